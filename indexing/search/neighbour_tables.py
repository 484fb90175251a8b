"""The job behind `goodviews knn`: neighbours within an embedding set or between two sets, by key.

Invariant: neighbours are named by (scene_key, item), never by position.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from catalog.rows import embeddings
from catalog.rows.embeddings import EmbeddingRecord
from indexing.search.knn import KnnOptions, Neighbours, exact_knn
from indexing.search.sharding import sharded_knn
from indexing.sets.spaces import check_same_space
from infra import storage
from infra.errors import UsageError
from infra.home import Home
from infra.session import Workers


@dataclass(frozen=True, kw_only=True)
class KnnRequest:
    """One call of `goodviews knn`. queries None: the rows of `base`, each without itself. layer None: the last."""

    base: EmbeddingRecord
    queries: EmbeddingRecord | None
    k: int
    layer: int | None = None
    shards: int = 1
    options: KnnOptions = field(default_factory=KnnOptions)


@dataclass(frozen=True, kw_only=True)
class NeighbourTable:
    """Neighbours by key, one a row, ordered by query and place (1 is the nearest)."""

    rows: pa.Table
    n: int
    queries: int
    n_undefined: int
    tie_rate: float


def neighbour_table(home: Home, request: KnnRequest, workers: Workers | None) -> NeighbourTable:
    """Exact neighbours as a table of query_scene_key, query_item, place, scene_key, item, score.

    workers: for several shards. Raises InputError for sets of different spaces or without that layer.
    """
    base, queries, layer = request.base, request.queries, request.layer
    if queries is not None and queries.embedding_id == base.embedding_id:
        queries = None
    if queries is not None:
        check_same_space(base, queries)
    layer = base.layers[-1] if layer is None else layer
    x_ND = embeddings.read_layer(home, base, layer)
    q_MD = None if queries is None else embeddings.read_layer(home, queries, layer)
    if request.shards != 1:
        if workers is None:
            raise UsageError("Several shards need workers to run on.")
        found = sharded_knn(x_ND, workers, shards=request.shards, k=request.k, queries_MD=q_MD, options=request.options)
    else:
        found = exact_knn(x_ND, k=request.k, queries_MD=q_MD, options=request.options)
    keys = embeddings.read_keys(home, base)
    query_keys = keys if queries is None else embeddings.read_keys(home, queries)
    return NeighbourTable(
        rows=by_key(found, keys, query_keys),
        n=keys.num_rows,
        queries=query_keys.num_rows,
        n_undefined=found.n_undefined,
        tie_rate=found.tie_rate,
    )


def by_key(found: Neighbours, keys: pa.Table, query_keys: pa.Table) -> pa.Table:
    """Neighbours with keys in the place of row numbers; places without a neighbour have no row."""
    query_X, place_X = np.nonzero(found.ids_MK >= 0)
    near = keys.take(pa.array(found.ids_MK[query_X, place_X]))
    own = query_keys.take(pa.array(query_X))
    return pa.table(
        {
            "query_scene_key": own["scene_key"],
            "query_item": own["item"],
            "place": pa.array(place_X + 1),
            "scene_key": near["scene_key"],
            "item": near["item"],
            "score": pa.array(found.scores_MK[query_X, place_X]),
        }
    )


def write_table(table: NeighbourTable, url: str) -> storage.FileRecord:
    """Publish the rows as one parquet file, whole or not at all."""
    sink = pa.BufferOutputStream()
    pq.write_table(table.rows, sink, compression="zstd")
    return storage.publish(storage.absolute(url), [sink.getvalue()])
