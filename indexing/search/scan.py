"""Exact neighbours by a scan of the whole base, for queries with more ties at the last place than candidates.

Invariant: the result is in canonical order, and the size of a block bounds the memory, however many rows tie.

A row gets an exact score only if its float32 product comes within the error bound of the query's threshold. Of equal
rows of a tile only the first k + 1 count: they come before the others, and one of them may be the query's own. Equal
rows are scored once. So 10,000 equal rows of a tile cost float32 products and one exact score.

Q: queries of a block. B: rows of a tile that matter. U: distinct ones of them. K: neighbours wanted.
"""

from __future__ import annotations

import hashlib
from typing import Final

import numpy as np

from indexing.search.proposals import unit_tiles
from indexing.search.rows import Rows, cosines, error_bound
from infra.vectors import Ids, Mask, Singles

QUERY_BLOCK: Final = 128
BASE_BLOCK: Final = 8192
"Their product in float32 takes 4 MiB."


def scan(queries: Rows, base: Rows, rows_M: Ids, excluded_M: Ids, threshold_M: Singles, k: int) -> tuple[Ids, Singles]:
    """ids_MK (-1: none) and scores_MK (-inf: none) of the queries `rows_M`, in canonical order.

    excluded_M: the row of the base that does not count, or -1. threshold_M: a score that k rows are known to reach.
    """
    ids_MK = np.full((len(rows_M), k), -1, np.int64)
    scores_MK = np.full((len(rows_M), k), -np.inf, np.float32)
    threshold_M = threshold_M.copy()
    # A tile serves all blocks of queries, since converting it may mean reading it from a disk.
    for ids_B, unit_BD in unit_tiles(base, BASE_BLOCK):
        tile = _Tile(base, ids_B)
        for start in range(0, len(rows_M), QUERY_BLOCK):
            part = slice(start, start + QUERY_BLOCK)
            # A row that reaches the threshold has a product within one bound of it; the second covers this subtraction.
            floor_Q = threshold_M[part] - np.float32(2 * error_bound(base.dims))
            near_QB = queries.gather_unit(rows_M[part]) @ unit_BD.T >= floor_Q[:, None]
            near_QB &= ids_B != excluded_M[part][:, None]
            matters_B = tile.first_of_equals(np.flatnonzero(near_QB.any(axis=0)), k + 1)
            if len(matters_B):
                scores_QB = _scores(queries, tile, rows_M[part], matters_B, near_QB[:, matters_B])
                _keep_best(ids_MK[part], scores_MK[part], ids_B[matters_B], scores_QB)
                threshold_M[part] = np.maximum(threshold_M[part], scores_MK[part][:, -1])
    return ids_MK, scores_MK


class _Tile:
    """Rows of the base, with the equal ones among those that were asked for."""

    def __init__(self, base: Rows, ids_B: Ids) -> None:
        self.base, self.ids_B = base, ids_B
        self._codes_B = np.full(len(ids_B), -1)
        self._code_of: dict[bytes, int] = {}

    def codes(self, places_B: Ids) -> Ids:
        """A number for each row, the same for equal rows."""
        missing = places_B[self._codes_B[places_B] < 0]
        for place, row in zip(missing, self.base.x_ND[self.ids_B[missing]], strict=True):
            # A digest, not the bytes, as key: a tile of distinct rows would keep a second copy of itself.
            digest = hashlib.blake2b(row.tobytes(), digest_size=16).digest()
            self._codes_B[place] = self._code_of.setdefault(digest, len(self._code_of))
        return self._codes_B[places_B]

    def first_of_equals(self, places_B: Ids, most: int) -> Ids:
        """The places, ascending, without those that have `most` equal rows before them."""
        if len(places_B) <= most:
            return places_B
        # The rank of each row among its equals, without a loop: a stable sort groups equal rows in ascending order.
        codes_B = self.codes(places_B)
        order_B = np.argsort(codes_B, kind="stable")
        sorted_B = codes_B[order_B]
        rank_B = np.arange(len(order_B)) - np.searchsorted(sorted_B, sorted_B)
        return places_B[np.sort(order_B[rank_B < most])]


def _scores(queries: Rows, tile: _Tile, rows_Q: Ids, places_B: Ids, near_QB: Mask) -> Singles:
    """Scores of rows of the tile where near_QB, else -inf (Q, B); each distinct row is scored once a query."""
    _, first_U, distinct_B = np.unique(tile.codes(places_B), return_index=True, return_inverse=True)
    wanted_QU = np.zeros((len(rows_Q), len(first_U)), np.bool_)
    pair_q, pair_b = np.nonzero(near_QB)
    wanted_QU[pair_q, distinct_B[pair_b]] = True
    pair_q, pair_u = np.nonzero(wanted_QU)
    ids_U = tile.ids_B[places_B[first_U]]
    scores_QU = np.full(wanted_QU.shape, -np.inf, np.float32)
    scores_QU[pair_q, pair_u] = cosines(queries, tile.base, rows_Q[pair_q], ids_U[pair_u][:, None])[:, 0]
    return np.where(near_QB, scores_QU[:, distinct_B], np.float32(-np.inf))


def _keep_best(ids_QK: Ids, scores_QK: Singles, ids_B: Ids, scores_QB: Singles) -> None:
    """Merge rows with higher numbers into the kept ones, in place."""
    k = ids_QK.shape[1]
    found_QX = np.concatenate([scores_QK, scores_QB], axis=1)
    all_QX = np.concatenate([ids_QK, np.broadcast_to(ids_B, scores_QB.shape)], axis=1)
    # Rows come in ascending order, so a stable sort keeps ties in canonical order.
    order_QK = np.argsort(-found_QX, axis=1, kind="stable")[:, :k]
    scores_QK[:] = np.take_along_axis(found_QX, order_QK, axis=1)
    ids_QK[:] = np.where(scores_QK > -np.inf, np.take_along_axis(all_QX, order_QK, axis=1), -1)
