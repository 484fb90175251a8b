"""Approximate indexes, by a FAISS factory string or by limits in the user's units, audited against exact neighbours.

Invariant: every index that is returned was audited on a fixed sample of its own rows.

M: queries. K: neighbours. Places of an index are row numbers among the defined rows.
"""

from __future__ import annotations

import math
import statistics
import time
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any, Final

import numpy as np

from indexing.search.knn import KnnOptions, exact_knn
from indexing.search.rows import Rows, cosines
from infra import seeds
from infra.errors import InputError, UsageError
from infra.vectors import Ids, Singles

SAMPLE: Final = 500
"Queries of the audit: the interval of a recall of .95 is then .02 wide."
TIMED: Final = 100
"Queries that are timed one by one."
TRAIN_ROWS_PER_LIST: Final = 64
"FAISS warns below 39 and uses no more than 256."
ADD_ROWS: Final = 65_536
CENTROID_ROWS: Final = 39


@dataclass(frozen=True, kw_only=True)
class Wish:
    """Limits of an index: share of the true k neighbours found, bytes, milliseconds of a single query."""

    recall: float = 0.95
    memory_bytes: int | None = None
    ms_per_query: float | None = None
    k: int = 10

    def __post_init__(self) -> None:
        if not 0 < self.recall <= 1:
            raise UsageError(f"The wished recall is {self.recall}, but must be above 0 and at most 1.")
        if self.k < 1:
            raise UsageError(f"k is {self.k}, but must be 1 or more.")
        for name in ("memory_bytes", "ms_per_query"):
            value = getattr(self, name)
            if value is not None and value <= 0:
                raise UsageError(f"The wished {name} is {value}, but must be above 0.")


@dataclass(frozen=True, kw_only=True)
class Audit:
    """Measures of an index on a sample of its own rows, each searched without itself.

    recall: share of the k neighbours found; a row whose exact score equals that of the k-th counts. absent: share of
    the k places that the index left empty (-1). ms_per_query: median of single queries. bytes: size of the index.
    """

    factory: str
    parameters: str
    k: int
    queries: int
    recall: float
    absent: float
    ms_per_query: float
    bytes: int

    def flags(self, wish: Wish) -> list[str]:
        """The limits of the wish that the index misses, a sentence each."""
        found = []
        if self.recall < wish.recall:
            found.append(f"recall@{self.k} is {self.recall:.3f}, wished was {wish.recall:g}")
        if self.absent > 0:
            found.append(f"{self.absent:.1%} of the places were left empty, because too few lists are searched")
        if wish.memory_bytes is not None and self.bytes > wish.memory_bytes:
            found.append(f"it takes {self.bytes:,} bytes, wished were {wish.memory_bytes:,}")
        if wish.ms_per_query is not None and self.ms_per_query > wish.ms_per_query:
            found.append(f"a query takes {self.ms_per_query:.3g} ms, wished were {wish.ms_per_query:g}")
        return found


@dataclass(frozen=True, kw_only=True)
class Built:
    """An index with its audit, the limits of the wish that it misses, and the audits of all that were tried."""

    index: Any
    audit: Audit
    flags: tuple[str, ...]
    trials: tuple[Audit, ...]


def build(rows: Rows, wish: Wish, *, factory: str | None = None, parameters: str | None = None) -> Built:
    """The index of that factory, or the fastest of several that keeps the limits of the wish, over the defined rows.

    parameters: such as `nprobe=16` or `efSearch=64`; None: the cheapest that reach the wished recall. A named factory
    that misses the wish is returned with flags. Raises InputError when no candidate keeps the limits and when there are
    too few rows, UsageError for a factory or parameters that FAISS does not know.
    """
    defined_N = np.flatnonzero(rows.norms_N)
    if len(defined_N) < 2:
        raise InputError(f"An index needs two rows that are not zero, but there are {len(defined_N)}.")
    if parameters is not None and factory is None:
        raise UsageError("Search parameters belong to one factory. Name it with --factory.")
    sample = _sample(rows, defined_N, wish.k)
    candidates = [factory] if factory is not None else candidate_factories(len(defined_N), rows.dims, wish)
    trials: list[Audit] = []
    best: Built | None = None
    for name in candidates:
        index = train(rows, defined_N, name)
        audit = _tune(index, name, sample, wish, parameters)
        trials.append(audit)
        flags = tuple(audit.flags(wish))
        # An index that keeps the limits before one that does not, then the faster one.
        if best is None or (bool(flags), audit.ms_per_query) < (bool(best.flags), best.audit.ms_per_query):
            best = Built(index=index, audit=audit, flags=flags, trials=())
    if best is None or (best.flags and factory is None):
        raise InputError(_refusal(wish, trials))
    return replace(best, index=with_parameters(best.index, best.audit.parameters), trials=tuple(trials))


def candidate_factories(n: int, dims: int, wish: Wish) -> list[str]:
    """Factories whose index should fit into the wished memory, by an estimate of its bytes."""
    # FAISS advises 4 sqrt(N) lists or more, each of 39 rows or more; the links of HNSW32 take about 290 bytes a row.
    lists = max(1, min(2 ** round(math.log2(4 * math.sqrt(n))), n // CENTROID_ROWS))
    # One byte for 4 dims or more; FAISS needs equal numbers of dims in all codes.
    codes = max(m for m in range(1, max(1, dims // 4) + 1) if dims % m == 0)
    centroids = 4.0 * dims * lists / n
    bytes_per_row = {
        "Flat": 4.0 * dims,
        f"IVF{lists},Flat": 4.0 * dims + 8 + centroids,
        "HNSW32,Flat": 4.0 * dims + 290,
        f"IVF{lists},SQ8": dims + 8 + centroids,
        "HNSW32,SQ8": dims + 290,
        f"IVF{lists},PQ{codes}x8": codes + 8 + centroids + 1024.0 * dims / n,
    }
    # Product quantisation trains long and finds least, so it is tried only where nothing else fits.
    names = [name for name, size in bytes_per_row.items() if size * n <= (wish.memory_bytes or math.inf)]
    return [name for name in names if "PQ" not in name] or names


def train(rows: Rows, defined_N: Ids, factory: str) -> Any:
    """An index of that factory over the unit rows `defined_N`, added in that order."""
    import faiss

    try:
        index = faiss.index_factory(rows.dims, factory, faiss.METRIC_INNER_PRODUCT)
    except RuntimeError as error:
        raise UsageError(
            f"FAISS knows no index {factory!r} for {rows.dims} dimensions ({_reason(error)}). "
            "Name one as in https://github.com/facebookresearch/faiss/wiki/The-index-factory."
        ) from error
    ivf = faiss.try_extract_index_ivf(index)
    most = TRAIN_ROWS_PER_LIST * max(1024, ivf.nlist if ivf is not None else 0)
    try:
        index.train(rows.gather_unit(_drawn(defined_N, most)))
        for start in range(0, len(defined_N), ADD_ROWS):
            index.add(rows.gather_unit(defined_N[start : start + ADD_ROWS]))
    except RuntimeError as error:
        raise InputError(
            f"FAISS cannot build {factory!r} over {len(defined_N):,} rows ({_reason(error)}). "
            "An index of L lists or 2^b codes needs more rows than that; name a smaller one."
        ) from error
    return index


def search(index: Any, queries: Rows, k: int) -> tuple[Ids, Singles]:
    """places_MK (-1: none) and the index's own scores_MK (NaN: none), nearest first; zero queries find nothing."""
    scores_MK, places_MK = index.search(queries.unit(0, len(queries)), k)
    none_MK = (places_MK < 0) | (queries.norms_N == 0)[:, None]
    return np.where(none_MK, -1, places_MK), np.where(none_MK, np.float32(np.nan), scores_MK)


@dataclass(frozen=True, kw_only=True)
class _Sample:
    rows: Rows
    defined_N: Ids
    places_M: Ids
    kth_M: Singles
    "Exact score of the last neighbour."
    reachable_M: Ids
    "Number of neighbours, at most k."
    k: int


def _sample(rows: Rows, defined_N: Ids, k: int) -> _Sample:
    """Rows drawn by a fixed seed, with the scores of their exact neighbours over all rows."""
    places_M = _drawn(np.arange(len(defined_N), dtype=np.int64), SAMPLE)
    queries_MD = rows.x_ND[defined_N[places_M]]
    # One more, because each row finds itself; of equal rows it may find another one, which scores the same.
    exact = exact_knn(rows.x_ND, k=k + 1, queries_MD=queries_MD, options=KnnOptions())
    own_MK = exact.ids_MK == defined_N[places_M][:, None]
    own_MK[~own_MK.any(axis=1), -1] = True
    # One place of each row is dropped, so the rest is a table again.
    scores_MK = exact.scores_MK[~own_MK].reshape(len(places_M), k)
    reachable_M = np.isfinite(scores_MK).sum(axis=1)
    kth_M = np.nanmin(scores_MK, axis=1)  # never all NaN, since there are two defined rows
    return _Sample(rows=rows, defined_N=defined_N, places_M=places_M, kth_M=kth_M, reachable_M=reachable_M, k=k)


def _tune(index: Any, factory: str, sample: _Sample, wish: Wish, parameters: str | None) -> Audit:
    """The audit of the cheapest parameters that reach the recall without empty places, else of the last tried."""
    import faiss

    size = int(faiss.serialize_index(index).nbytes)
    audit: Audit | None = None
    for tried in _ladder(index) if parameters is None else [parameters]:
        audit = _audit(with_parameters(index, tried), factory, tried, sample, size)
        if audit.recall >= wish.recall and audit.absent == 0:
            break
    assert audit is not None  # every ladder has a rung
    return audit


def _ladder(index: Any) -> Iterator[str]:
    """Search parameters in the order of their cost."""
    import faiss

    ivf = faiss.try_extract_index_ivf(index)
    if ivf is not None:
        rungs = [2**i for i in range(ivf.nlist.bit_length()) if 2**i < ivf.nlist]
        yield from (f"nprobe={probes}" for probes in [*rungs, ivf.nlist])
    elif isinstance(faiss.downcast_index(index), faiss.IndexHNSW):
        yield from (f"efSearch={depth}" for depth in (16, 32, 64, 128, 256, 512, 1024))
    else:
        yield ""


def _audit(index: Any, factory: str, parameters: str, sample: _Sample, size: int) -> Audit:
    rows, own_M, k = sample.rows, sample.places_M, sample.k
    queries = Rows(rows.x_ND[sample.defined_N[own_M]], name="sample")
    places_MK, _ = search(index, queries, min(k + 1, len(sample.defined_N)))
    # Self is left out by its number; where it was not found, the last place is one too many.
    own_MK = places_MK == own_M[:, None]
    own_MK[~own_MK.any(axis=1), -1] = True
    others_MK = places_MK[~own_MK].reshape(len(own_M), -1)
    ids_MK = np.where(others_MK >= 0, sample.defined_N[others_MK], -1)
    scores_MK = cosines(queries, rows, np.arange(len(own_M)), ids_MK)
    hits = np.minimum((scores_MK >= sample.kth_M[:, None]).sum(axis=1), sample.reachable_M).sum()
    wanted = int(sample.reachable_M.sum())
    return Audit(
        factory=factory,
        parameters=parameters,
        k=k,
        queries=len(own_M),
        recall=float(hits / wanted),
        absent=float(1 - np.minimum((ids_MK >= 0).sum(axis=1), sample.reachable_M).sum() / wanted),
        ms_per_query=_ms_per_query(index, queries, k),
        bytes=size,
    )


def _ms_per_query(index: Any, queries: Rows, k: int) -> float:
    unit_MD = queries.unit(0, min(TIMED, len(queries)))
    taken = []
    for place in range(len(unit_MD)):
        start = time.perf_counter()
        index.search(unit_MD[place : place + 1], k)
        taken.append(time.perf_counter() - start)
    return 1000 * statistics.median(taken)


def with_parameters(index: Any, parameters: str) -> Any:
    """The same index, set to search with these parameters. Raises UsageError for those that FAISS does not know."""
    import faiss

    space: Any = faiss.ParameterSpace()
    if parameters:
        try:
            space.set_index_parameters(index, parameters)
        except RuntimeError as error:
            raise UsageError(
                f"The index takes no search parameters {parameters!r} ({_reason(error)}). "
                "Lists take nprobe=16, HNSW efSearch=64."
            ) from error
    return index


def _drawn(numbers_N: Ids, most: int) -> Ids:
    """At most `most` of the numbers, ascending; the same ones in every run."""
    if len(numbers_N) <= most:
        return numbers_N
    # By hash, not by NumPy's generator, whose draws may change between its releases.
    draws_N = seeds.mix(numbers_N.astype(np.uint64) ^ np.uint64(seeds.derive(0, "ann-sample")))
    return np.sort(numbers_N[np.argpartition(draws_N, most)[:most]])


def _reason(error: RuntimeError) -> str:
    """What FAISS says, without the C++ signature before it."""
    return " ".join(str(error).split()).rpartition(": ")[2].rstrip(".")


def _refusal(wish: Wish, trials: list[Audit]) -> str:
    limits = [f"recall {wish.recall:g}"]
    limits += [f"{wish.memory_bytes:,} bytes"] if wish.memory_bytes is not None else []
    limits += [f"{wish.ms_per_query:g} ms a query"] if wish.ms_per_query is not None else []
    tried = "; ".join(f"{a.factory}: recall {a.recall:.3f}, {a.bytes:,} bytes, {a.ms_per_query:.3g} ms" for a in trials)
    return (
        f"No index grants {', '.join(limits)}. Tried: {tried or 'none, as none is that small'}. "
        "Wish for less, or name one with --factory."
    )
