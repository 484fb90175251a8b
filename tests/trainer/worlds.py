"""Random worlds, and encoders on them, for the tests of the theorems."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from scipy.linalg import polar, qr
from scipy.special import logsumexp

from trainer.theory import finite_world
from trainer.theory.finite_world import F64, I64, Modality, PairLaw, Shown

TINY = 1e-12
"Of claims that are exact."


def random_world(rng: np.random.Generator, states: int = 14) -> PairLaw:
    return finite_world.random_world(rng, states=states, scenes=states, bandwidth=float(rng.uniform(0.25, 0.6)))


def random_nuisance(rng: np.random.Generator, states: int = 4) -> PairLaw:
    """Any positive law of a nuisance: between drawn anew and always kept."""
    drawn_SU = rng.dirichlet(np.full(states, float(rng.choice([0.05, 0.3, 2.0]))), size=states + 1)
    # Never quite 0, so that each state of it occurs.
    return finite_world.pairs_of_scenes(rng.dirichlet(np.ones(states + 1)), 0.999 * drawn_SU + 0.001 / states)


def rotation(rng: np.random.Generator, dims: int) -> F64:
    """A random orthogonal matrix, reflections among them."""
    q_KK, r_KK = np.linalg.qr(rng.normal(size=(dims, dims)))
    return np.asarray(q_KK * np.sign(np.diag(r_KK)))


def encoded(modality: Modality, dims: int) -> Shown:
    return finite_world.shown(modality, finite_world.whitening_jepa(modality.pairs, dims))


def gap(law: PairLaw, dims: int) -> float:
    return float(law.values[dims - 1] - law.values[dims])


def by_itself(law: PairLaw, f_ZK: F64) -> Shown:
    """An encoder of the states themselves."""
    return Shown(law.marginal_X, f_ZK, float(law.marginal_X @ np.square(f_ZK).sum(1)))


def waves(states: int = 8) -> PairLaw:
    """States on a ring whose waves of one length share a value: no gap after the first of two."""
    step = np.roll(np.eye(states), 1, axis=1)
    return PairLaw((0.5 * np.eye(states) + 0.25 * (step + step.T)) / states)


def aimed(rng: np.random.Generator, dims: int, size: float) -> tuple[PairLaw, PairLaw]:
    """A world and the same with functions k and k + 1 of its kernel mixed, `size` of what keeps probabilities >= 0."""
    plain = random_world(rng)
    p_Z = plain.marginal_X
    # Half of the pairs at random, so that no probability is near 0.
    world = PairLaw((plain.joint_XX + np.outer(p_Z, p_Z)) / 2)
    f_ZK = finite_world.spectrum(world)[1] * p_Z[:, None]
    turn_ZZ = np.outer(f_ZK[:, dims - 1], f_ZK[:, dims])
    turn_ZZ = turn_ZZ + turn_ZZ.T
    room = float((world.joint_XX / np.maximum(np.abs(turn_ZZ), 1e-300)).min())
    changed_ZZ = world.joint_XX + 0.99 * size * room * turn_ZZ
    # The marginals are kept but for rounding, which the total is freed of.
    return world, PairLaw(changed_ZZ / changed_ZZ.sum())


# --- the rotation: Proposition 2 ----------------------------------------------------------------------------------


def well_placed(f_ZK: F64) -> I64:
    """K states whose vectors span the space and lie far apart: the pivots of a QR decomposition."""
    _, _, pivots = qr(f_ZK.T, mode="economic", pivoting=True)
    return np.sort(pivots[: f_ZK.shape[1]]).astype(np.int64)


def rotation_from_pairs(left_NK: F64, right_NK: F64) -> F64:
    """The rotation Q, (K, K), that minimises sum |left - right Q|^2 (orthogonal Procrustes).

    With fewer than K independent pairs, several rotations fit and this is one of them.
    """
    rotation_KK, _ = polar(right_NK.T @ left_NK)
    return np.asarray(rotation_KK, np.float64)


# --- next tokens: Proposition 4 -----------------------------------------------------------------------------------


@dataclass(frozen=True, eq=False)
class SoftmaxSplit:
    """The cross-entropy of each token: a pull towards its target and a push from all tokens."""

    pull_N: F64
    "-<h, e_y>"
    log_partition_N: F64
    "log sum_v exp <h, e_v>"


def softmax_split(h_NK: F64, e_VK: F64, y_N: I64) -> SoftmaxSplit:
    """Proposition 4: cross-entropy with a tied table and no bias = pull + log-partition.

    The pull, -<h, e> = |h - e|^2 / 2 - |h|^2 / 2 - |e|^2 / 2, is a distance between a prefix and its continuation, two
    views of one text. The log-partition prevents collapse.
    """
    logits_NV = h_NK @ e_VK.T
    pull_N = -np.take_along_axis(logits_NV, y_N[:, None], axis=1)[:, 0]
    return SoftmaxSplit(pull_N, logsumexp(logits_NV, axis=1))
