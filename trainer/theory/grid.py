"""The theorems on many worlds: a grid of worlds and strengths of bad views, and worlds with different positives.

Invariant: every encoder is solved from the pairs of shuffled observations, never from the factors that a claim is
about, and each row draws its own renderings and nuisances.

Regimes of a row: `below` (beta_1 < alpha_k), `above`, `special` (beta = 1: bad views keep the whole nuisance).
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Final

import numpy as np

from infra import seeds
from infra.errors import ConfigError
from trainer.theory import theorems
from trainer.theory.finite_world import (
    F64,
    Modality,
    PairLaw,
    Shown,
    alignment_error,
    fresh_nuisance,
    kept_nuisance,
    random_modality,
    random_world,
    shown,
    whitening_jepa,
)

TOLERANCE: Final = 1e-12
"Largest error that counts as rounding."


@dataclass(frozen=True, kw_only=True)
class GridConfig:
    """Settings of the grid. Raises ConfigError for values outside their range."""

    states: int = 30
    "States of a world."
    dims: int = 4
    "Dimensions k of the encoders."
    worlds: int = 20
    "Number of random worlds."
    steps: int = 40
    "Strengths beta = 0, 1/steps, ... below 1; beta = 1 is one more."
    seed: int = 0
    "Root seed."
    bandwidth: float = 0.35
    "Width of a scene in the cube [-1, 1]^3; wider scenes have a lower threshold."
    mismatches: int = 400
    "Pairs of worlds with different positives."

    def __post_init__(self) -> None:
        for name, least in (("dims", 1), ("worlds", 1), ("steps", 1), ("mismatches", 0), ("seed", 0)):
            if getattr(self, name) < least:
                raise ConfigError(f"{name} is {getattr(self, name)}, but must be at least {least}. Change --{name}.")
        if self.states < self.dims + 2:
            message = (
                f"{self.states} states are too few for {self.dims} dimensions, the constant and a gap. Give at least "
                f"{self.dims + 2} with --states."
            )
            raise ConfigError(message)
        if not (math.isfinite(self.bandwidth) and self.bandwidth > 0):
            raise ConfigError(f"bandwidth is {self.bandwidth}, but must be a positive number. Change --bandwidth.")

    @property
    def nuisances(self) -> int:
        """States of the nuisance: the fewest that can fill every dimension."""
        return self.dims + 1


@dataclass(frozen=True, kw_only=True)
class GridRow:
    """One world at one strength. error, lost: of bad views; lost: of the modality that loses more."""

    world: int
    regime: str
    beta: float
    alpha: float
    good_error: float
    error: float
    lost: float
    predicted_lost: int
    naive_lost: int
    least_error: float


@dataclass(frozen=True, kw_only=True)
class MismatchRow:
    """Two worlds of one marginal with different pairs. A bound is inf where its gap is not positive."""

    world: int
    share: float
    error: float
    by_both: float
    by_one: float


def run_grid(config: GridConfig) -> Iterator[GridRow]:
    """All rows, world by world; the last row of a world is the special one."""
    for number in range(config.worlds):
        world = grid_world(config, number)
        rng = np.random.default_rng(seeds.derive(config.seed, "finite-world-views", number))
        for beta in np.linspace(0, 1, config.steps + 1):
            yield _row(config, number, world, float(beta), rng)


def grid_world(config: GridConfig, number: int) -> PairLaw:
    """The world of that number, with as many scenes as states."""
    rng = np.random.default_rng(seeds.derive(config.seed, "finite-world", number))
    return random_world(rng, states=config.states, scenes=config.states, bandwidth=config.bandwidth)


def _row(config: GridConfig, number: int, world: PairLaw, beta: float, rng: np.random.Generator) -> GridRow:
    weights = [rng.dirichlet(np.ones(config.nuisances)) for _ in range(2)]
    good = [_encoded(random_modality(rng, world, fresh_nuisance(w_U)), config.dims) for w_U in weights]
    corrupted = [random_modality(rng, world, kept_nuisance(w_U, beta)) for w_U in weights]
    bad = [_encoded(modality, config.dims) for modality in corrupted]
    limits = [theorems.threshold(world, modality.nuisance, config.dims) for modality in corrupted]
    regime = "special" if beta == 1 else "below" if all(limit.is_below for limit in limits) else "above"
    return GridRow(
        world=number,
        regime=regime,
        beta=max(limit.beta for limit in limits),
        alpha=limits[0].alpha,
        good_error=alignment_error(*good),
        error=alignment_error(*bad),
        lost=max(one.lost for one in bad),
        predicted_lost=max(theorems.count_lost(world, m.nuisance, config.dims) for m in corrupted),
        naive_lost=min(theorems.count_lost_naively(world, m.nuisance, config.dims) for m in corrupted),
        least_error=theorems.least_error(config.dims, *(one.lost for one in bad)),
    )


def _encoded(modality: Modality, dims: int) -> Shown:
    return shown(modality, whitening_jepa(modality.pairs, dims))


def run_mismatches(config: GridConfig) -> Iterator[MismatchRow]:
    """Worlds of the grid in turn, each beside one of the same marginal with a few to all pairs changed."""
    for number in range(config.mismatches):
        world = grid_world(config, number % config.worlds)
        rng = np.random.default_rng(seeds.derive(config.seed, "finite-world-mismatch", number))
        scenes_ZS = rng.dirichlet(np.full(config.states, 0.1), config.states)
        # Log-uniform: from nearly the same pairs to completely different ones.
        share = float(10 ** rng.uniform(-4, 0))
        other = theorems.mixed_pairing(world, scenes_ZS, share)
        bounds = theorems.mismatch_bounds(world, other, config.dims)
        yield MismatchRow(
            world=number % config.worlds,
            share=share,
            error=alignment_error(_plain(world, config.dims), _plain(other, config.dims)),
            by_both=bounds.by_both,
            by_one=bounds.by_one,
        )


def _plain(world: PairLaw, dims: int) -> Shown:
    f_ZK: F64 = whitening_jepa(world, dims)
    return Shown(world.marginal_X, f_ZK, float(world.marginal_X @ np.square(f_ZK).sum(1)))


# --- results ------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class GridResult:
    """The worst case of each claim; None where no row is of that kind. The command prints these names."""

    max_good_error: float
    rows_below: int
    max_below_error: float | None
    rows_above: int
    max_above_deviation: float | None
    "max |error - 2r| above the threshold, r as counted."
    min_above_r: int | None
    above_r: dict[int, int]
    "Number of rows above by r."
    special_error: float
    "Of the special row that is farthest from 2k."
    special_r: int
    "Lowest count of a special row."
    special_naive_r: int
    max_r_deviation: float
    "max |r measured - r counted| over all rows."
    min_bound_slack: float
    "min(error - lower bound) of Theorem 3 over all rows; negative by rounding only."
    mismatch_checks: int
    "Pairs of worlds with a finite bound by both."
    mismatch_checks_one: int
    mismatch_violations: int
    mismatch_tightness_median: float | None
    "error / bound, by both."
    mismatch_tightness_max: float | None
    mismatch_tightness_one_median: float | None
    mismatch_tightness_one_max: float | None

    def failures(self, config: GridConfig) -> list[str]:
        """The claims that do not hold."""
        full = 2 * config.dims
        claims = {
            f"good views agree up to {TOLERANCE:g}": self.max_good_error <= TOLERANCE,
            f"bad views agree below the threshold up to {TOLERANCE:g}": (self.max_below_error or 0) <= TOLERANCE,
            "a direction is lost above the threshold": self.min_above_r is None or self.min_above_r >= 1,
            f"the error above is 2r up to {TOLERANCE:g}": (self.max_above_deviation or 0) <= TOLERANCE,
            f"the error is {full} where all nuisance is kept": abs(self.special_error - full) <= TOLERANCE,
            f"all {config.dims} directions are lost where all nuisance is kept": self.special_r == config.dims,
            "as many directions are lost as counted": self.max_r_deviation <= TOLERANCE,
            "the error is at least the lower bound": self.min_bound_slack >= -TOLERANCE,
            "the bounds for other positives hold": self.mismatch_violations == 0,
        }
        return [claim for claim, holds in claims.items() if not holds]


def judge(config: GridConfig, rows: Sequence[GridRow], mismatches: Sequence[MismatchRow]) -> GridResult:
    """The worst case of each claim over all rows."""
    below, above, special = ([r for r in rows if r.regime == name] for name in ("below", "above", "special"))
    full = 2 * config.dims
    tight, tight_one = (
        np.array([m.error / bound for m in mismatches if 0 < (bound := getattr(m, name)) < np.inf])
        for name in ("by_both", "by_one")
    )
    return GridResult(
        max_good_error=max(abs(r.good_error) for r in rows),
        rows_below=len(below),
        max_below_error=max((abs(r.error) for r in below), default=None),
        rows_above=len(above),
        max_above_deviation=max((abs(r.error - 2 * r.predicted_lost) for r in above), default=None),
        min_above_r=min((r.predicted_lost for r in above), default=None),
        above_r={n: sum(r.predicted_lost == n for r in above) for n in sorted({r.predicted_lost for r in above})},
        special_error=max((r.error for r in special), key=lambda error: abs(error - full)),
        special_r=min(r.predicted_lost for r in special),
        special_naive_r=min(r.naive_lost for r in special),
        max_r_deviation=max(abs(r.lost - r.predicted_lost) for r in rows),
        min_bound_slack=min(r.error - r.least_error for r in rows),
        mismatch_checks=len(tight),
        mismatch_checks_one=len(tight_one),
        mismatch_violations=int((tight > 1 + TOLERANCE).sum() + (tight_one > 1 + TOLERANCE).sum()),
        mismatch_tightness_median=float(np.median(tight)) if len(tight) else None,
        mismatch_tightness_max=float(tight.max()) if len(tight) else None,
        mismatch_tightness_one_median=float(np.median(tight_one)) if len(tight_one) else None,
        mismatch_tightness_one_max=float(tight_one.max()) if len(tight_one) else None,
    )


def points(rows: Sequence[GridRow], mismatches: Sequence[MismatchRow]) -> dict[str, list[dict[str, float]]]:
    """The rows as series of numbers: one series for each regime, and `mismatch`."""
    found: dict[str, list[dict[str, float]]] = {}
    for values in [*map(dataclasses.asdict, rows), *map(dataclasses.asdict, mismatches)]:
        found.setdefault(values.pop("regime", "mismatch"), []).append({k: float(v) for k, v in values.items()})
    return found
