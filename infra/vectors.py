"""Unit rows and means of unit rows: one rule for what has no direction.

Invariants: all sums are in float64; the power-of-two scaling of extreme rows is exact, so it never moves an ordinary
row.

A row of zeros stays zeros. A row that holds NaN or an infinity becomes NaN throughout, and so does every mean of it. A
mean whose length is at most `VANISHING` is the zero vector: what rounding leaves of vectors that cancel has a direction
without meaning. N rows, D dims, S groups.
"""

from __future__ import annotations

from typing import Any, Final

import numpy as np
import numpy.typing as npt

Floats = npt.NDArray[np.float64]
Singles = npt.NDArray[np.float32]
Ids = npt.NDArray[np.int64]
Mask = npt.NDArray[np.bool_]
Table = npt.NDArray[Any]
"Vectors of real numbers, one a row, in any dtype."

VANISHING: Final = 1e-6
"""Longest mean of unit rows that counts as zero: 17 roundings of float32 (2**-24), the type of most vectors."""
BLOCK_ROWS: Final = 1 << 15
"Rows that `mean_of_unit_rows` holds in float64 at once, unless one group is larger."
_SAFE: Final = 1e140
"Norms between 1/_SAFE and _SAFE come from squares that neither vanish nor overflow in float64."


def unit_rows(x_ND: npt.NDArray[Any]) -> Floats:
    """Rows of length 1 (N, D); zero rows stay zero, rows that are not finite become NaN."""
    x = np.asarray(x_ND, np.float64)
    with np.errstate(over="ignore"):
        norms_N = np.linalg.norm(x, axis=1)
    extreme = np.flatnonzero(~((norms_N > 1 / _SAFE) & (norms_N < _SAFE)))
    if len(extreme):
        # A power of two brings the largest value of a row near 1 without rounding.
        largest = np.abs(x[extreme]).max(axis=1, initial=0.0)
        scaled = np.ldexp(x[extreme], -np.frexp(largest)[1][:, None])
        norms = np.linalg.norm(scaled, axis=1)
        x, norms_N[extreme] = x.copy(), np.where(np.isfinite(norms), norms, np.nan)
        x[extreme] = scaled
    return np.asarray(np.divide(x, norms_N[:, None], out=np.zeros_like(x), where=norms_N[:, None] != 0))


def mean_of_unit_rows(x_ND: npt.NDArray[Any], starts_S: npt.NDArray[np.integer[Any]]) -> npt.NDArray[np.float32]:
    """Mean of the unit rows of each group of neighbouring rows, at length 1 again (S, D); zero where the mean vanishes.

    starts_S: first row of each group, strictly ascending; a group ends where the next begins, the last one at row N.
    """
    ends_S = np.append(starts_S[1:], len(x_ND))
    means_SD = np.empty((len(starts_S), x_ND.shape[1]), np.float32)
    first = 0
    while first < len(starts_S):
        start = starts_S[first]
        last = max(first + 1, int(np.searchsorted(ends_S, start + BLOCK_ROWS, side="right")))
        rows = unit_rows(x_ND[start : ends_S[last - 1]])
        sums = np.add.reduceat(rows, starts_S[first:last] - start, axis=0)
        means_SD[first:last] = mean_of_sums(sums, ends_S[first:last] - starts_S[first:last])
        first = last
    return means_SD


def mean_of_sums(sums_SD: Floats, counts_S: npt.NDArray[np.integer[Any]]) -> Floats:
    """Direction of the mean of `counts_S` unit rows that were summed elsewhere (S, D); zero where the mean vanishes."""
    vanishes_S = np.linalg.norm(sums_SD, axis=1) <= VANISHING * counts_S
    # The mean and the sum have one direction, so no division comes before the last.
    return unit_rows(np.where(vanishes_S[:, None], 0.0, sums_SD))
