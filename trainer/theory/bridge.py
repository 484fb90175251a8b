"""From theorems to training: a small network trained with LeJEPA on a finite world, beside the closed form.

Invariant: training sees pairs drawn from the law of observations and nothing else. The result is measured on all
observations with their exact probabilities, which adds no sampling error.

The theorems assume whitening. LeJEPA also asks every direction to be Gaussian, which no encoder of a few states can be.
So the span that it learns leaves that of the closed form, more so at a larger weight. The control is the same network
with a whitening penalty instead of SIGReg: its error is that of network and sampling.

Shapes: X observations, V two views, B pairs a step, K dimensions of an encoder, N rows.
"""

from __future__ import annotations

import itertools
import math
import os
from collections.abc import Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from multiprocessing import get_context
from typing import Final, Literal, TypeAlias

import numpy as np
import torch
from torch import Tensor, nn

from infra import seeds
from infra.errors import ConfigError
from trainer.model.objectives import LejepaConfig, lejepa
from trainer.theory import finite_world
from trainer.theory.finite_world import F64, Modality, PairLaw
from trainer.theory.grid import GridConfig, grid_world

Arm: TypeAlias = Literal["good", "bad"]
ARMS: Final[tuple[Arm, ...]] = ("good", "bad")
WEIGHTS_U: Final = np.array([0.4, 0.35, 0.25])
"Probabilities of the nuisance: with three states, a kept nuisance has two directions."
MODALITIES: Final = 2
WEIGHTS: Final = (1.0, 4.0, 16.0)
"Weights of SIGReg; the recipes of real encoders have 20 and 41."
CONTROL_WEIGHT: Final = 4.0
"Weight of the whitening penalty; the span of its optimum is that of the closed form at any weight."
SHARES: Final = 8
"Number of eigenfunctions that a span is compared with, the strongest first."


@dataclass(frozen=True, kw_only=True)
class BridgeConfig:
    """Settings of the experiment. Raises ConfigError for values outside their range."""

    seed: int = 0
    "Seed of the grid that the world is taken from."
    seeds: int = 3
    "Trainings of each kind: 0, 1, ..."
    weights: tuple[float, ...] = WEIGHTS
    "Weights of SIGReg; the whitening control is always trained too."
    steps: int = 1200
    batch: int = 1024
    "Pairs a step."
    dims: int = 4
    n_directions: int = 16
    "Directions of SIGReg at each step."
    learning_rate: float = 3e-2
    "At the first step; a cosine schedule takes it to 0."
    hidden: int = 64

    def __post_init__(self) -> None:
        for name in ("seeds", "steps", "batch", "n_directions", "hidden"):
            if getattr(self, name) < 1:
                raise ConfigError(f"{name} is {getattr(self, name)}, but must be at least 1. Change --{name}.")
        if self.dims < 3:
            raise ConfigError(f"dims is {self.dims}; it must be at least 3, as the nuisance takes 2 in the bad arm.")
        if not self.weights or not all(math.isfinite(weight) and weight > 0 for weight in self.weights):
            raise ConfigError(f"The weights are {self.weights}, but must be positive numbers. Change --weight.")

    @property
    def grid(self) -> GridConfig:
        """The grid that the world is taken from."""
        return GridConfig(dims=self.dims, seed=self.seed)


@dataclass(frozen=True, kw_only=True)
class Trained:
    """One training in each modality, and how far they are from the closed form.

    weight: of SIGReg, None for the control. angles: principal angles to the closed form, degrees, ascending, mean of
    both modalities. shares: how much of each of the strongest eigenfunctions is in the span (1 or 0 for the closed
    form), a mean over equal values. excess: JEPA loss of the whitened encoder above the minimum. lost: nuisance
    directions. error: alignment error of the two modalities; exact_error: that of their closed forms.
    least_variance, most_variance: of a direction as trained; 1 under whitening.
    """

    arm: Arm
    weight: float | None
    seed: int
    angles: Sequence[float]
    shares: Sequence[float]
    excess: float
    lost: float
    error: float
    exact_error: float
    least_variance: float
    most_variance: float

    @property
    def kind(self) -> str:
        """`good: SIGReg, w 4`, `bad: whitening`."""
        return f"{self.arm}: {'whitening' if self.weight is None else f'SIGReg, w {self.weight:g}'}"


def run_bridge(config: BridgeConfig) -> Iterator[Trained]:
    """All trainings in the order of arms, kinds and seeds, one process for each core.

    Raises InputError when an encoder has collapsed to fewer dimensions.
    """
    jobs = list(itertools.product(ARMS, (None, *config.weights), range(config.seeds)))
    # Spawned, because a fork of a process with threads may hang.
    workers, context = min(len(jobs), os.cpu_count() or 1), get_context("spawn")
    # The network is too small for more than one thread.
    with ProcessPoolExecutor(workers, context, initializer=torch.set_num_threads, initargs=(1,)) as pool:
        yield from pool.map(train_both, itertools.repeat(config), *zip(*jobs, strict=True))


def train_both(config: BridgeConfig, arm: Arm, weight: float | None, seed: int) -> Trained:
    """Train one encoder in each modality, with its own seed, and compare them."""
    shown, exact, angles, shares, excess, variances = [], [], [], [], [], []
    for number, modality in enumerate(modalities(config, arm)):
        law = modality.pairs
        f_XK = train(law, config, weight, seeds.derive(seed, "finite-bridge", arm, number))
        white_XK, best_XK = finite_world.whitened(law.marginal_X, f_XK), finite_world.whitening_jepa(law, config.dims)
        shown.append(finite_world.shown(modality, white_XK))
        exact.append(finite_world.shown(modality, best_XK))
        angles.append(finite_world.principal_angles(law.marginal_X, best_XK, white_XK))
        shares.append(_shares(law, white_XK))
        excess.append(finite_world.jepa_loss(law, white_XK) - finite_world.jepa_loss(law, best_XK))
        variances += np.linalg.eigvalsh(finite_world.covariance(law.marginal_X, f_XK)).tolist()
    return Trained(
        arm=arm,
        weight=weight,
        seed=seed,
        angles=np.mean(angles, axis=0).tolist(),
        shares=np.mean(shares, axis=0).tolist(),
        excess=float(np.mean(excess)),
        lost=float(np.mean([one.lost for one in shown])),
        error=finite_world.alignment_error(*shown),
        exact_error=finite_world.alignment_error(*exact),
        least_variance=min(variances),
        most_variance=max(variances),
    )


def _shares(law: PairLaw, white_XK: F64) -> F64:
    """|projection of each of the strongest eigenfunctions on the span|^2, averaged over equal values."""
    values, functions_XX = finite_world.spectrum(law)
    share_X = np.square(functions_XX.T @ (law.marginal_X[:, None] * white_XK)).sum(1)
    equal_XX = np.abs(values[:, None] - values) < 1e-9
    mean_X: F64 = (equal_XX @ share_X) / equal_XX.sum(1)
    return mean_X[:SHARES]


def bridge_world(config: BridgeConfig) -> tuple[PairLaw, float]:
    """The world, and the strength of its bad views: half-way between values k - 2 and k - 1, so the nuisance takes two.

    The world is the one of the grid with the widest gaps: with a narrow gap, the closed form itself is hardly unique.
    """
    kept, dims = config.dims - 2, config.dims

    def narrowest(world: PairLaw) -> float:
        return float(min(world.values[dims - 1] - world.values[dims], world.values[kept - 1] - world.values[kept]))

    world = max((grid_world(config.grid, n) for n in range(config.grid.worlds)), key=narrowest)
    return world, float(world.values[kept - 1] + world.values[kept]) / 2


def modalities(config: BridgeConfig, arm: Arm) -> list[Modality]:
    """Two renderings of the world with the views of that arm."""
    world, beta = bridge_world(config)
    nuisance = finite_world.fresh_nuisance(WEIGHTS_U) if arm == "good" else finite_world.kept_nuisance(WEIGHTS_U, beta)
    rng = np.random.default_rng(seeds.derive(config.seed, "finite-bridge", arm))
    return [finite_world.random_modality(rng, world, nuisance) for _ in range(MODALITIES)]


def train(law: PairLaw, config: BridgeConfig, weight: float | None, seed: int) -> F64:
    """Outputs (X, K) of a small network trained on pairs drawn from `law`. weight: of SIGReg, None for whitening."""
    generator = torch.Generator().manual_seed(seed)
    net = _network(len(law.marginal_X), config, generator)
    optimizer = torch.optim.Adam(net.parameters(), lr=config.learning_rate)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, config.steps)
    rng = np.random.default_rng(seed)
    # Pairs are drawn by inverting the cumulative sum of the flattened law.
    flat = law.joint_XX.ravel().cumsum()
    sigreg = LejepaConfig(weight=weight or 0.0, n_directions=config.n_directions, direction_seed=seed)
    for step in range(config.steps):
        drawn = np.searchsorted(flat, rng.random(config.batch) * flat[-1], side="right")
        x_VB = torch.from_numpy(np.stack(np.divmod(drawn, len(law.marginal_X))))
        z_VBK = net(x_VB)
        loss = lejepa(z_VBK, 2, step, sigreg).loss if weight is not None else whitening_loss(z_VBK)
        optimizer.zero_grad()
        loss.backward()  # type: ignore[no-untyped-call]
        optimizer.step()
        schedule.step()
    with torch.no_grad():
        outputs: F64 = net(torch.arange(len(law.marginal_X))).double().numpy()
    return outputs


def whitening_loss(z_VBK: Tensor) -> Tensor:
    """The control: LeJEPA's distance of views, and |E zz' - I|^2 + |E z|^2 from the two halves of a batch.

    The product of two independent halves is unbiased. The square over one batch would add the variance of its estimate,
    largest for functions that are large on rare states: with 1,024 rows it turns the span by 30 degrees.
    """
    distance = (z_VBK - z_VBK.mean(0)).square().mean()
    halves = [half.flatten(0, 1) for half in z_VBK.chunk(2, dim=1)]
    (off_KK, other_KK), (mean_K, other_K) = (
        [z_NK.T @ z_NK / len(z_NK) - torch.eye(z_NK.shape[1]) for z_NK in halves],
        [z_NK.mean(0) for z_NK in halves],
    )
    penalty = (off_KK * other_KK).sum() + (mean_K * other_K).sum()
    return distance + CONTROL_WEIGHT * penalty / z_VBK.shape[2]


def _network(observations: int, config: BridgeConfig, generator: torch.Generator) -> nn.Sequential:
    """One hidden layer on the number of an observation, which can learn any function of it."""
    net = nn.Sequential(nn.Embedding(observations, config.hidden), nn.GELU(), nn.Linear(config.hidden, config.dims))
    with torch.no_grad():
        for parameter in net.parameters():
            parameter.copy_(torch.randn(parameter.shape, generator=generator) / math.sqrt(parameter.shape[-1]))
    return net


def points(found: Sequence[Trained]) -> dict[str, list[dict[str, float]]]:
    """The trainings as series of numbers, one series for each kind; `angle_1` is the smallest angle."""
    series: dict[str, list[dict[str, float]]] = {}
    for one in found:
        numbers = {f"angle_{i}": angle for i, angle in enumerate(one.angles, start=1)}
        numbers |= {f"share_{i}": share for i, share in enumerate(one.shares, start=1)}
        names = ("seed", "excess", "lost", "error", "exact_error", "least_variance", "most_variance")
        series.setdefault(one.kind, []).append({**numbers, **{name: float(getattr(one, name)) for name in names}})
    return series


def summary(config: BridgeConfig, found: Sequence[Trained]) -> dict[str, object]:
    """The world's values, those of each arm, and the kinds in order."""
    world, beta = bridge_world(config)
    values = {arm: modalities(config, arm)[0].pairs.values[:SHARES].tolist() for arm in ARMS}
    # A list, because the catalog sorts the keys of objects.
    kinds = [{"name": one.kind, "arm": one.arm, "weight": one.weight} for one in found if one.seed == 0]
    return {"alphas": world.values[:SHARES].tolist(), "beta": beta, "values": values, "kinds": kinds}
