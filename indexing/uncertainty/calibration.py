"""Chance and calibration: a score beside the scores of shuffled items.

Invariant: a permutation moves all layers of the second side together, so that the maximum over layer pairs is compared
with maxima over layer pairs.

Source: Groeger, Wen and Brbic 2026 (arXiv 2602.14486). With s_1 .. s_K the scores under K permutations:
p = (1 + #{s_k >= s}) / (K + 1); tau = the ceil((1 - alpha)(K + 1))-th smallest of {s, s_1 .. s_K};
calibrated = clip((s - tau) / (s_max - tau), 0, 1), where 0 means: not distinguishable from shuffled items.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Final

import numpy as np

from infra.errors import UsageError
from infra.vectors import Ids

SMALLEST_RANGE: Final = 1e-12


@dataclass(frozen=True, kw_only=True)
class CalibrationConfig:
    """How chance is measured."""

    permutations: int = 200
    "0 for none."
    alpha: float = 0.05
    "A score counts if it is above the 1 - alpha quantile of the shuffled ones."
    seed: int = 0
    "Seed of the permutations."

    def __post_init__(self) -> None:
        if not 0 < self.alpha < 1:
            raise UsageError(f"alpha is {self.alpha}; it is a share between 0 and 1.")
        if self.permutations < 0 or 0 < self.permutations < 1 / self.alpha - 1:
            least = math.ceil(1 / self.alpha - 1)
            raise UsageError(
                f"{self.permutations} permutations cannot show a quantile of {1 - self.alpha:g}. "
                f"Use 0, or {least} or more."
            )


@dataclass(frozen=True, kw_only=True)
class Calibration:
    """A score beside shuffled items. mean: of the shuffled scores; threshold: tau."""

    p_value: float
    threshold: float
    calibrated: float
    mean: float


def permutations_of(n: int, config: CalibrationConfig) -> Iterator[Ids]:
    """The permutations (N,) of n items, the same for every metric and system."""
    generator = np.random.Generator(np.random.PCG64(config.seed))
    for _ in range(config.permutations):
        yield generator.permutation(n)


def calibrate(
    score: float, shuffled: Callable[[Ids], float], n: int, config: CalibrationConfig, *, largest: float = 1.0
) -> Calibration | None:
    """The score beside `shuffled(permutation)`; None without permutations and for an undefined score.

    largest: the value of a perfect score.
    """
    if not config.permutations or not math.isfinite(score):
        return None
    null_K = np.array([shuffled(order) for order in permutations_of(n, config)])
    # An undefined shuffled score counts against the score.
    above = int((~(null_K < score)).sum())
    pool = np.sort(np.append(np.nan_to_num(null_K, nan=math.inf), score))
    place = math.ceil((1 - config.alpha) * len(pool))
    threshold = float(pool[place - 1])
    scale = max(largest - threshold, SMALLEST_RANGE)
    return Calibration(
        p_value=(1 + above) / len(pool),
        threshold=threshold,
        calibrated=float(np.clip((score - threshold) / scale, 0, 1)) if math.isfinite(threshold) else 0.0,
        mean=float(np.nanmean(null_K)) if np.isfinite(null_K).any() else math.nan,
    )
