"""Bootstrap intervals of means, of paired differences, and of statistics under item weights.

Invariants: the draws depend on the seed, the number of items and the number of draws alone, so two systems scored on
the same items are compared on the same draws; the block bounds the memory, unless a statistic needs all draws at once.

Such an interval covers another sample of items of that size, scored against the same neighbours, gallery or map. It
does not cover another training seed, another split, and the noise that a drawn item adds to the lists of the others.

Source: the percentile interval of Efron and Tibshirani 1993, chapter 13. N items, S systems, B draws.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Final

import numpy as np
import numpy.typing as npt

from infra.errors import UsageError
from infra.vectors import Floats

BLOCK_DRAWS: Final = 1 << 21
"Indices in memory at once. It is part of the result: another size would cut the stream of random numbers elsewhere."


@dataclass(frozen=True, kw_only=True)
class BootstrapConfig:
    """How intervals are computed."""

    draws: int = 10_000
    "Number of resamplings of the items; 0 for no interval."
    level: float = 0.95
    "Share of intervals that should hold the true value."
    seed: int = 0
    "Seed of the draws."

    def __post_init__(self) -> None:
        if self.draws and self.draws < 100:
            raise UsageError(
                f"{self.draws} bootstrap draws cannot show both ends of an interval. Use 0, or 100 or more."
            )
        if not 0 < self.level < 1:
            raise UsageError(f"The level of an interval is {self.level}; it is a share between 0 and 1.")


@dataclass(frozen=True, kw_only=True)
class Interval:
    """A value with the ends of its interval, None without one."""

    value: float
    low: float | None
    high: float | None


def blocks_of_items(n: int, config: BootstrapConfig) -> Iterator[npt.NDArray[np.int32]]:
    """Blocks (b, N) of drawn item numbers, `config.draws` rows in all."""
    generator = np.random.Generator(np.random.PCG64(config.seed))
    rows = max(1, BLOCK_DRAWS // n)
    for start in range(0, config.draws, rows):
        yield generator.integers(0, n, (min(rows, config.draws - start), n), dtype=np.int32)


def resampled_means(values_SN: Floats, config: BootstrapConfig) -> Floats:
    """Means (S, B) of S rows of contributions, each draw the same items for all."""
    # One row at a time: a gather for all rows stores the drawn items with a stride, and took three times as long.
    blocks = [
        np.stack([values_N.take(items).mean(axis=1) for values_N in values_SN])
        for items in blocks_of_items(values_SN.shape[1], config)
    ]
    return np.concatenate(blocks, axis=1) if blocks else np.empty((len(values_SN), 0))


def mean_interval(values_N: Floats, config: BootstrapConfig) -> Interval:
    """The mean of contributions with its percentile interval."""
    return interval_of(float(values_N.mean()), resampled_means(values_N[None], config)[0], config)


def difference_interval(left_N: Floats, right_N: Floats, config: BootstrapConfig) -> Interval:
    """mean(left) - mean(right) over the same items, with the interval of the paired difference."""
    left_B, right_B = resampled_means(np.stack([left_N, right_N]), config)
    return interval_of(float(left_N.mean() - right_N.mean()), left_B - right_B, config)


def ratio_interval(tops_N: Floats, bottoms_N: Floats, config: BootstrapConfig) -> Interval:
    """sum(tops) / sum(bottoms) with its interval, for items that count several times, or not at all (a bottom of 0).

    Raises ZeroDivisionError when all bottoms are 0.
    """
    total = float(bottoms_N.sum())
    if total == 0:
        raise ZeroDivisionError("No item counts, so there is no ratio.")
    # Without items that have a bottom of 0, since a draw of them alone would have no ratio.
    kept = np.flatnonzero(bottoms_N > 0)
    tops_B, bottoms_B = resampled_means(np.stack([tops_N[kept], bottoms_N[kept]]), config)
    return interval_of(float(tops_N.sum()) / total, tops_B / bottoms_B, config)


def weighted_values(
    statistic: Callable[[Floats], Floats], n: int, config: BootstrapConfig, *, at_once: bool = False
) -> Floats:
    """A statistic of drawn items that is no mean of contributions (B,).

    statistic: weights (N, b), how often each item was drawn -> values (b,). at_once: one call for all draws, which
    takes 8 N B bytes, for a statistic that reads all pairs of items in every call.
    """
    if not config.draws:
        return np.empty(0)
    if at_once:
        whole_NB = np.empty((n, config.draws))
        first = 0
        for items in blocks_of_items(n, config):
            whole_NB[:, first : first + len(items)] = _weights(items, n)
            first += len(items)
        return statistic(whole_NB)
    return np.concatenate([statistic(_weights(items, n)) for items in blocks_of_items(n, config)])


def _weights(items_bN: npt.NDArray[np.int32], n: int) -> Floats:
    """How often each item was drawn (N, b)."""
    counts_bN = np.stack([np.bincount(row, minlength=n) for row in items_bN])
    return np.ascontiguousarray(counts_bN.T, np.float64)


def interval_of(value: float, draws_B: Floats, config: BootstrapConfig) -> Interval:
    """The value with the percentile interval of its draws; without one when there is no draw, or an undefined one."""
    # Without the undefined draws the others would be a selection.
    if not len(draws_B) or not np.isfinite(draws_B).all() or not math.isfinite(value):
        return Interval(value=value, low=None, high=None)
    tail = (1 - config.level) / 2
    low, high = np.quantile(draws_B, [tail, 1 - tail])
    return Interval(value=value, low=float(low), high=float(high))
