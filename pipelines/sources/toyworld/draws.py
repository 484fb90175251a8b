"""Random draws of the toy world: numbers in [0, 1) that depend on (seed, stage, scene) alone.

Draws are indexed by a counter, so any scene can be drawn alone, in any order.
Invariant: 64-bit integer arithmetic only (`infra.seeds`), so a draw is the same on every machine and library version.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TypeVar

import numpy as np
from numpy.typing import NDArray

from infra.seeds import U64, derive, mix

T = TypeVar("T")


def words(root: int, stage: str, numbers_N: NDArray[np.int64], count: int) -> U64:
    """(N, count) words of 64 random bits: row i belongs to number i alone."""
    # The salt separates stages and seeds; mixing twice separates neighbouring numbers and neighbouring columns.
    salt = mix(np.full(1, derive(root, stage), np.uint64))
    rows_N = mix(numbers_N.astype(np.uint64) ^ salt)
    with np.errstate(over="ignore"):
        cells: U64 = np.add(rows_N[:, None], np.arange(count, dtype=np.uint64), dtype=np.uint64)
    return mix(cells)


def uniforms(root: int, stage: str, numbers_N: NDArray[np.int64], count: int) -> NDArray[np.float64]:
    """(N, count) draws in [0, 1), of 53 bits."""
    # The upper 53 bits, as many as a float64 holds exactly: the division by 2^53 is exact.
    return (words(root, stage, numbers_N, count) >> np.uint64(11)).astype(np.float64) * 2.0**-53


class Dice:
    """Draws of one scene or caption, taken one after another."""

    __slots__ = ("_draws", "_next")

    def __init__(self, draws: Sequence[float]) -> None:
        self._draws = draws
        self._next = 0

    def roll(self) -> float:
        """The next draw, in [0, 1)."""
        draw = self._draws[self._next]
        self._next += 1
        return draw

    def chance(self, probability: float) -> bool:
        """True with the probability."""
        return self.roll() < probability

    def pick(self, options: Sequence[T]) -> T:
        """One of the options, all equally likely."""
        return options[int(self.roll() * len(options))]

    def spread(self, width: float) -> float:
        """A number in [-width, width)."""
        return (2.0 * self.roll() - 1.0) * width
