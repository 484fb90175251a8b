"""Exact cosine nearest neighbours, the same for any tile, batch, shard, thread count and device.

Invariant: neighbours are the rows of the base in the canonical order (score descending, row ascending), without the
query's own row and without undefined rows; exact scores alone decide the order.

float32 products differ between tiles, devices and thread counts. So FAISS proposes k + m candidates, and their exact
scores are computed. The answer is final once the last exact score exceeds the highest score that another row can have:
its product plus the error bound of float32. The few queries for which that fails (ties, near ties) are scanned.

N: rows of the base. M: queries. K: neighbours. C: candidates a query.
"""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

import numpy as np

from indexing.search import proposals
from indexing.search.proposals import Device, Tiles
from indexing.search.rows import Rows, cosines, error_bound
from indexing.search.scan import scan
from infra.errors import InputError, UsageError
from infra.vectors import Ids, Singles


@dataclass(frozen=True, kw_only=True)
class KnnOptions:
    """How neighbours are computed. No option changes the answer."""

    device: Device = "auto"
    "gpu demands one, auto takes one where FAISS can use it."
    memory_bytes: int = 256 << 20
    "Size of the float32 tiles of base and queries together, beside the result."
    gpu_memory_bytes: int = 1 << 30
    "Size of FAISS's buffers on the GPU."
    margin: int = 6
    "Candidates beyond those needed. Fewer lead to more scans, more to more exact scores."
    base_rows: int | None = None
    "Rows of a tile of the base; None: as many as the memory allows."
    query_rows: int | None = None
    "Queries of a batch; None: as many as the memory allows."

    def __post_init__(self) -> None:
        least = {"memory_bytes": 1, "gpu_memory_bytes": 1, "margin": 0, "base_rows": 1, "query_rows": 1}
        for name, low in least.items():
            value = getattr(self, name)
            if value is not None and value < low:
                raise UsageError(f"{name} is {value}, but must be {low} or more.")
        if self.device not in ("auto", "cpu", "gpu"):
            raise UsageError(f"The device is {self.device!r}, but must be auto, cpu or gpu.")


@dataclass(frozen=True, kw_only=True)
class Neighbours:
    """The k nearest rows of a base for each of M queries, nearest first, with counts of ties and undefined rows."""

    ids_MK: Ids
    "Row numbers of the base; -1 where there is no neighbour."
    scores_MK: Singles
    "Cosines, descending; NaN where there is no neighbour."
    n_undefined: int
    "Zero rows in the base, and in the queries where those are another table."
    tie_rate: float
    "Share of queries whose k-th and (k+1)-th score are equal, so that the row number decided; 0 without queries."


@dataclass(frozen=True, kw_only=True)
class PartNeighbours:
    """Exact neighbours within one part of a base: k + 1 of them, so that ties at the last place stay visible.

    ids_MK: row numbers of the whole base, -1 where none. scores_MK: -inf where none.
    """

    ids_MK: Ids
    scores_MK: Singles
    n_undefined: int


def exact_knn(
    base_ND: Any,
    *,
    k: int,
    queries_MD: Any = None,
    exclude_self: bool | None = None,
    options: KnnOptions = KnnOptions(),
) -> Neighbours:
    """The k nearest rows of the base by exact cosine, ties by the lower row.

    base_ND, queries_MD: see `indexing.search.rows`; memory-mapped tables are read tile by tile. queries None: the rows
    of the base themselves. exclude_self: whether row i is no neighbour of query i; None: only where the queries are the
    base. A score is the float64 cosine of the rows as given, rounded to float32 once. For k of N or more the answer is
    padded with -1 and NaN. Zero rows have no neighbours, and no row has them.
    Memory: O(M k) for the answer, `options.memory_bytes` for tiles.
    Raises InputError for NaN and infinite rows and for tables that do not fit together, UsageError for k < 1.
    """
    queries, base, own_M = tables(base_ND, queries_MD, exclude_self)
    part = search_part(queries, base, k=k, own_M=own_M, options=options)
    return merge([part], k=k, n_undefined=part.n_undefined + (0 if queries is base else queries.n_undefined))


def tables(base_ND: Any, queries_MD: Any, exclude_self: bool | None) -> tuple[Rows, Rows, Ids | None]:
    """Queries, base, and the own row of each query in the base: the arguments of `exact_knn`, checked."""
    base = Rows(base_ND, name="base")
    queries = base if queries_MD is None else Rows(queries_MD, name="queries")
    exclude = queries is base if exclude_self is None else exclude_self
    if exclude and len(queries) != len(base):
        raise InputError(
            f"There are {len(queries):,} queries and {len(base):,} rows in the base, so row i is not the same item in "
            "both and cannot be left out. Leave out exclude_self, or give tables of the same items."
        )
    if queries.dims != base.dims:
        raise InputError(
            f"The queries have {queries.dims} dimensions and the base has {base.dims}, so they are no vectors of one "
            "space. Embed both with one model and layer."
        )
    return queries, base, np.arange(len(queries), dtype=np.int64) if exclude else None


def search_part(
    queries: Rows, base: Rows, *, k: int, own_M: Ids | None = None, options: KnnOptions = KnnOptions()
) -> PartNeighbours:
    """Exact neighbours of all queries within a part of a base; rows are numbered from `base.first_row` on.

    own_M: the own row of each query in the whole base, which is not its neighbour; None: the queries are no rows of it.
    """
    if k < 1:
        raise UsageError(f"k is {k}, but must be 1 or more.")
    tiles = _tiles(queries, base, k + 2 + options.margin, options)
    part = _PartSearch(queries=queries, base=base, wanted=k + 1, margin=options.margin, tiles=tiles)
    # One place more than k, so that the merge sees ties at the last place.
    ids_MK = np.full((len(queries), k + 1), -1, np.int64)
    scores_MK = np.full((len(queries), k + 1), -np.inf, np.float32)
    _ = queries.norms_N, base.norms_N  # refuses NaN before any product is computed
    excluded_M = np.full(len(queries), -1, np.int64) if own_M is None else own_M - base.first_row
    with ThreadPoolExecutor(_threads()) as threads:
        for start in range(0, len(queries), tiles.query_rows):
            rows_M = np.arange(start, min(start + tiles.query_rows, len(queries)), dtype=np.int64)
            ids_MK[rows_M], scores_MK[rows_M] = part.batch(rows_M, excluded_M[rows_M], threads)
    ids_MK[ids_MK >= 0] += base.first_row
    return PartNeighbours(ids_MK=ids_MK, scores_MK=scores_MK, n_undefined=base.n_undefined)


def merge(parts: Sequence[PartNeighbours], *, k: int, n_undefined: int) -> Neighbours:
    """The neighbours over all parts of a base; exact, since each part is."""
    ids_MX = np.concatenate([part.ids_MK for part in parts], axis=1)
    scores_MX = np.concatenate([part.scores_MK for part in parts], axis=1)
    ids_MK, scores_MK = _canonical(ids_MX, scores_MX, k + 1)
    is_tied_M = (ids_MK[:, k] >= 0) & (scores_MK[:, k] == scores_MK[:, k - 1])
    ids_MK, scores_MK = ids_MK[:, :k].copy(), scores_MK[:, :k].copy()
    scores_MK[ids_MK < 0] = np.nan
    tie_rate = float(is_tied_M.mean()) if len(is_tied_M) else 0.0
    return Neighbours(ids_MK=ids_MK, scores_MK=scores_MK, n_undefined=n_undefined, tie_rate=tie_rate)


@dataclass(frozen=True, kw_only=True)
class _PartSearch:
    """The search of all queries in one part of a base, a batch of queries at a time."""

    queries: Rows
    base: Rows
    wanted: int
    margin: int
    tiles: Tiles

    def batch(self, rows_M: Ids, excluded_M: Ids, threads: ThreadPoolExecutor) -> tuple[Ids, Singles]:
        """The `wanted` nearest rows of the queries `rows_M`, without the excluded row of each, and their scores."""
        queries, base, bound = self.queries, self.base, error_bound(self.base.dims)
        # One more than wanted: the own row usually takes a place.
        least = self.wanted + int(excluded_M.max() >= 0)
        proposed = proposals.propose(queries, base, rows_M, least + self.margin, self.tiles, threads)
        ids_MC = _worth_a_score(proposed, least, bound)
        ids_MC[ids_MC == excluded_M[:, None]] = -1
        ids_MK, scores_MK = _canonical(ids_MC, cosines(queries, base, rows_M, ids_MC, threads), self.wanted)
        # Not strictly above: a row that ties with the last one might have the lower number.
        is_open_M = scores_MK[:, -1] <= proposed.bound_M + np.float32(bound)
        open_M = np.flatnonzero(is_open_M & (proposed.bound_M > -np.inf) & (queries.norms_N[rows_M] > 0))
        if len(open_M):
            found = scan(queries, base, rows_M[open_M], excluded_M[open_M], scores_MK[open_M, -1], self.wanted)
            ids_MK[open_M], scores_MK[open_M] = found
        return ids_MK, scores_MK


def _worth_a_score(proposed: proposals.Proposals, least: int, bound: float) -> Ids:
    """The candidates that may be among the `least` best; -1 where a product is lower by more than twice the bound."""
    products_MC = proposed.products_MC
    if products_MC.shape[1] <= least:
        return proposed.ids_MC.copy()
    keep_MC = products_MC >= products_MC[:, least - 1 : least] - np.float32(2 * bound)
    return np.where(keep_MC, proposed.ids_MC, -1)[:, : int(keep_MC.sum(axis=1).max(initial=1))]


def _canonical(ids_MC: Ids, scores_MC: Singles, k: int) -> tuple[Ids, Singles]:
    """The k best in canonical order, padded with -1 and -inf."""
    missing = k - ids_MC.shape[1]
    if missing > 0:
        ids_MC = np.pad(ids_MC, ((0, 0), (0, missing)), constant_values=-1)
        scores_MC = np.pad(scores_MC, ((0, 0), (0, missing)), constant_values=-np.inf)
    ids_MC = np.where(scores_MC > -np.inf, ids_MC, -1)
    # The last key of lexsort is the first to decide.
    order_MK = np.lexsort((ids_MC, -scores_MC), axis=-1)[:, :k]
    return np.take_along_axis(ids_MC, order_MK, axis=1), np.take_along_axis(scores_MC, order_MK, axis=1)


def _tiles(queries: Rows, base: Rows, c: int, options: KnnOptions) -> Tiles:
    # 4 bytes a value, on two sides.
    rows = max(1, options.memory_bytes // (8 * base.dims))
    tiles = Tiles(
        base_rows=options.base_rows or rows,
        query_rows=options.query_rows or max(1, min(rows, len(queries))),
        on_gpu=proposals.is_on_gpu(options.device),
        gpu_bytes=options.gpu_memory_bytes,
    )
    return proposals.fit_to_gpu(tiles, len(base), c) if tiles.on_gpu else tiles


def _threads() -> int:
    """As many threads as FAISS uses, so that OMP_NUM_THREADS limits both."""
    import faiss

    return int(faiss.omp_get_max_threads())
