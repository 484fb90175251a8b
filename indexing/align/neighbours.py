"""Metrics of neighbour lists: mutual, cycle, LCS and edit-distance k-NN.

Invariant: a score is the mean of its contributions, and a contribution depends on neighbour lists alone, so rotation
and scale of either space change none of these scores.

Ties go against the score. Where the k-th and the (k+1)-th score of an item are equal on *both* sides, row numbers chose
the neighbours in those ties on both sides, and an agreement among them does not count. So two collapsed encoders score
0 and not 1; one collapsed encoder scores the agreement of the other with row numbers.

Formulas: Huh et al. 2024 (arXiv 2405.07987). N items, K neighbours each, -1 where an item has none.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Final, TypeAlias

import numpy as np

from indexing.scores.tables import check_rows, tiles_of
from indexing.search.knn import exact_knn
from infra.errors import InputError
from infra.vectors import Floats, Ids, Mask, Table

BLOCK_CELLS: Final = 1 << 24
"Comparisons of one block, which keeps temporaries in tens of megabytes for any N and K."


@dataclass(frozen=True, kw_only=True)
class NeighbourLists:
    """The K nearest neighbours of each of N items, nearest first.

    ids_NK: -1 where there is none. tied_NK: whether the neighbour belongs to a tie that the K-th place cuts through.
    n_undefined: items without any (zero rows).
    """

    ids_NK: Ids
    tied_NK: Mask
    n_undefined: int

    @property
    def tie_rate(self) -> float:
        """Share of the items whose list is arbitrary because of a tie at the K-th place."""
        return float(self.tied_NK.any(axis=1).mean())

    def permuted(self, order_N: Ids) -> NeighbourLists:
        """Lists of the table whose row i is row order_N[i] of this one: N(i) becomes order^-1(N(order(i))).

        Relabelling costs N * K; the search is not repeated. A tie keeps the choice that was made.
        """
        # The last place maps -1, no neighbour, to itself.
        places = np.empty(len(order_N) + 1, np.int64)
        places[order_N] = np.arange(len(order_N))
        places[-1] = -1
        return NeighbourLists(
            ids_NK=places[self.ids_NK[order_N]], tied_NK=self.tied_NK[order_N], n_undefined=self.n_undefined
        )


def neighbour_lists(x_ND: Table, *, k: int) -> NeighbourLists:
    """Exact cosine neighbours of each row among the others.

    Raises InputError when k is not in 1 to N - 2, and for rows that hold NaN or an infinity.
    """
    n = len(x_ND)
    if not 1 <= k <= n - 2:
        raise InputError(
            f"k is {k} for {n:,} items; with k >= n - 1 every list holds every item, so agreement says nothing. "
            "Use k from 1 to n - 2, or more items."
        )
    # One place more than asked for shows where the list ends inside a tie.
    found = exact_knn(x_ND, k=k + 1)
    last_N1, beyond_N1 = found.scores_MK[:, k - 1 : k], found.scores_MK[:, k:]
    tied_NK = (last_N1 == beyond_N1) & (found.scores_MK[:, :k] == last_N1)
    return NeighbourLists(ids_NK=found.ids_MK[:, :k], tied_NK=tied_NK, n_undefined=found.n_undefined)


Contributions: TypeAlias = Callable[[NeighbourLists, NeighbourLists], Floats]


def mutual_shares(a: NeighbourLists, b: NeighbourLists) -> Floats:
    """Share of each item's K neighbours that both spaces give it (N,), 0 to 1.

    The mean is mutual k-NN, m = mean_i |N_A(i) & N_B(i)| / K; K / (N - 1) for independent spaces.
    """
    return _by_blocks(a, lambda rows: _equal(a, b, rows).sum(axis=(1, 2)) / a.ids_NK.shape[1])


def cycle_hits(a: NeighbourLists, b: NeighbourLists) -> Floats:
    """1 where item i is a neighbour in A of one of its neighbours in B, else 0 (N,)."""

    def hits(rows: slice) -> Floats:
        via_RK = b.ids_NK[rows]
        home_RKK = a.ids_NK[via_RK] == np.arange(len(b.ids_NK))[rows, None, None]
        # A missing neighbour is -1, which NumPy reads as the last row, so it is masked here.
        home_RKK &= (via_RK >= 0)[:, :, None]
        home_RKK &= ~(a.tied_NK[via_RK] & b.tied_NK[rows][:, :, None])
        return np.asarray(home_RKK.any(axis=(1, 2)), np.float64)

    return _by_blocks(a, hits)


def lcs_lengths(a: NeighbourLists, b: NeighbourLists) -> Floats:
    """Length of the longest common subsequence of each item's two ordered lists (N,), 0 to K; not divided by K."""

    def cell(equal: Mask, diagonal: Ids, up: Ids, left: Ids) -> Ids:
        return np.asarray(np.where(equal, diagonal + 1, np.maximum(up, left)))

    border = np.zeros(a.ids_NK.shape[1] + 1, np.int64)
    return _by_blocks(a, lambda rows: _corner(_equal(a, b, rows), border, cell))


def edit_similarities(a: NeighbourLists, b: NeighbourLists) -> Floats:
    """1 - d / K of each item (N,), d the Levenshtein distance of its two ordered lists; 0 to 1."""

    def cell(equal: Mask, diagonal: Ids, up: Ids, left: Ids) -> Ids:
        return np.asarray(np.minimum(diagonal + ~equal, np.minimum(up, left) + 1))

    k = a.ids_NK.shape[1]
    return _by_blocks(a, lambda rows: 1 - _corner(_equal(a, b, rows), np.arange(k + 1), cell) / k)


NEIGHBOUR_METRICS: Final[dict[str, Contributions]] = {
    "mutual_knn": mutual_shares,
    "cycle_knn": cycle_hits,
    "lcs_knn": lcs_lengths,
    "edit_distance_knn": edit_similarities,
}
"""By the names of the public reference. Only `cycle_knn` depends on which space is the first."""


def mutual_knn(x_ND: Table, y_NE: Table, *, k: int) -> float:
    """Mean share of k nearest neighbours that two embedding tables give the same items.

    x_ND, y_NE: row i is one item in both. Returns a value in [0, 1]; independent tables score k / (N - 1) on average. A
    zero row has no neighbours and adds 0. Raises InputError if N differs or k >= N - 1.
    Source: Huh et al. 2024, arXiv 2405.07987. No layer search and no clipping here: see `indexing.align.layers`.
    """
    check_rows(x_ND, y_NE)
    return float(mutual_shares(neighbour_lists(x_ND, k=k), neighbour_lists(y_NE, k=k)).mean())


def _equal(a: NeighbourLists, b: NeighbourLists, rows: slice) -> Mask:
    """Whether place p of A and place q of B name one item, and not by a tie on both sides (R, K, K)."""
    a_RK, b_RK = a.ids_NK[rows], b.ids_NK[rows]
    equal_RKK: Mask = (a_RK[:, :, None] == b_RK[:, None, :]) & (a_RK >= 0)[:, :, None]
    equal_RKK &= ~(a.tied_NK[rows][:, :, None] & b.tied_NK[rows][:, None, :])
    return equal_RKK


def _corner(equal_RKK: Mask, border: Ids, cell: Callable[[Mask, Ids, Ids, Ids], Ids]) -> Floats:
    """Last cell of a dynamic programme over two lists (R,), a row of its table at a time for all items at once.

    border: first row and first column of the table. cell: of equality and the cells diagonal, up and left of it.
    """
    above = np.tile(border, (len(equal_RKK), 1))
    for i in range(len(border) - 1):
        row = np.empty_like(above)
        row[:, 0] = border[i + 1]
        for j in range(len(border) - 1):
            row[:, j + 1] = cell(equal_RKK[:, i, j], above[:, j], above[:, j + 1], row[:, j])
        above = row
    return above[:, -1].astype(np.float64)


def _by_blocks(lists: NeighbourLists, function: Callable[[slice], Floats]) -> Floats:
    """The function of all rows (N,), a block of them at a time."""
    n, k = lists.ids_NK.shape
    return np.concatenate([function(rows) for rows in tiles_of(n, k * k, BLOCK_CELLS)])
