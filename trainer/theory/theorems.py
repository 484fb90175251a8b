"""The claims about encoders on finite worlds, as numbers that can be computed and checked.

Invariant: a bound is computed from the assumptions of its claim only, never from the error that it bounds.

The names follow the paper (arXiv 2610.39302) as it is reported; the proofs are in docs/theory.md.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

import numpy as np
from numpy.typing import NDArray

from infra.errors import InputError
from trainer.theory.finite_world import F64, PairLaw

ROUNDED_DIGITS: Final = 9
"Values that agree in so many digits count as equal when they are sorted."


# --- nuisance: Theorem 3, Proposition 3 ---------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class Threshold:
    """alpha: value k of the world, for k dimensions; beta: largest value of the nuisance."""

    alpha: float
    beta: float

    @property
    def is_below(self) -> bool:
        """Whether no direction is lost."""
        return self.beta < self.alpha


def threshold(world: PairLaw, nuisance: PairLaw, dims: int) -> Threshold:
    """Proposition 3: with beta_1 < alpha_k no direction is lost, with beta_1 > alpha_k at least one.

    Raises InputError for a kernel that is not positive semidefinite: a product of negative values may exceed alpha_k.
    """
    for name, law in (("world", world), ("nuisance", nuisance)):
        if not law.is_positive:
            message = (
                f"The kernel of the {name} has the value {law.values[-1]:.3g}, so the threshold says nothing: products "
                "of negative values count too. Make pairs by two independent draws from one scene."
            )
            raise InputError(message)
    return Threshold(alpha=float(world.values[dims - 1]), beta=float(nuisance.values[0]))


def count_lost(world: PairLaw, nuisance: PairLaw, dims: int) -> int:
    """How many of the `dims` largest values of the product kernel, without the constant's, belong to the nuisance.

    The values are alpha_i beta_j: of the world (j = 0) or with nuisance (j > 0). The latter have E[f | z] = 0.
    """
    values, is_nuisance = _products(world, nuisance)
    # Index 0 is alpha_0 beta_0, the constant. Stable, so that equal values keep an order that can be repeated.
    order = np.argsort(-values[1:], kind="stable")[:dims]
    return int(is_nuisance[1:][order].sum())


def count_lost_naively(world: PairLaw, nuisance: PairLaw, dims: int) -> int:
    """The count when the first of all sorted values is dropped as the constant; wrong where another value is 1 too.

    At beta = 1 it drops a direction of the nuisance and keeps the constant, which may come after its equals.
    """
    values, is_nuisance = _products(world, nuisance)
    order = np.argsort(np.round(values, ROUNDED_DIGITS), kind="stable")[::-1]
    return int(is_nuisance[order[1 : dims + 1]].sum())


def _products(world: PairLaw, nuisance: PairLaw) -> tuple[F64, NDArray[np.bool_]]:
    """All values of the product kernel, the constant's first, and which belong to the nuisance."""
    alphas, betas = (np.concatenate([[1.0], law.values]) for law in (world, nuisance))
    is_nuisance = np.zeros((len(alphas), len(betas)), bool)
    is_nuisance[:, 1:] = True
    return np.outer(alphas, betas).ravel(), is_nuisance.ravel()


def least_error(dims: int, lost: float, lost_by_other: float) -> float:
    """Theorem 3: least alignment error of two whitened encoders, with so many dimensions that encode own nuisances.

    2 k - 2 sqrt((k - r)(k - r')), by Cauchy and Schwarz on the nuclear norm; at least r + r'.
    """
    return 2 * dims - 2 * float(np.sqrt(max(0.0, dims - lost) * max(0.0, dims - lost_by_other)))


# --- other positives ----------------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class MismatchBounds:
    """Upper bounds of the alignment error of two worlds; inf where a gap is not positive."""

    by_both: float
    "2 |dK|_F^2 / (alpha_k(K1) - alpha_k+1(K2))^2: Davis and Kahan's sine theorem, with 1 - cos <= sin^2."
    by_one: float
    "8 |dK|_F^2 / (alpha_k - alpha_k+1)^2 of K1 alone: Yu, Wang and Samworth (arXiv 1405.0680)."


def mismatch_bounds(left: PairLaw, right: PairLaw, dims: int) -> MismatchBounds:
    """Bounds of the alignment error of the closed-form encoders of two worlds with different positives.

    Raises InputError when the marginals differ, since the bounds assume equal ones.
    """
    apart = float(abs(left.marginal_X - right.marginal_X).max())
    if apart > 1e-10:
        message = (
            f"The marginals of two worlds differ by up to {apart:.3g}, but the bound for other positives needs equal "
            "ones. Change the pairs, not the frequency of a state."
        )
        raise InputError(message)
    squared = float(np.square(left.kernel_XX - right.kernel_XX).sum())
    both = float(left.values[dims - 1] - right.values[dims])
    one = float(left.values[dims - 1] - left.values[dims])
    return MismatchBounds(
        by_both=2 * squared / both**2 if both > 0 else np.inf, by_one=8 * squared / one**2 if one > 0 else np.inf
    )


def mixed_pairing(law: PairLaw, scenes_ZS: F64, share: float) -> PairLaw:
    """A world of the same marginal that mixes (1 - share) of the old pairs with `share` of pairs from other scenes.

    scenes_ZS: P(s | z), rows of sum 1. P(z, z') = sum_s P(s) q(z | s) q(z' | s), q by Bayes, keeps the marginal of z.
    """
    joint_ZS = law.marginal_X[:, None] * scenes_ZS
    other_ZZ = (joint_ZS / joint_ZS.sum(0)) @ joint_ZS.T
    return PairLaw((1 - share) * law.joint_XX + share * (other_ZZ + other_ZZ.T) / 2)
