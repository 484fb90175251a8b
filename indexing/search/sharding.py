"""Exact neighbours over many workers: the base is cut into shards of rows, and their answers are merged.

Invariant: the answer is that of one process, for any number of shards.
"""

from __future__ import annotations

import functools
import itertools
from dataclasses import dataclass
from typing import Any

import numpy as np

from indexing.search.knn import KnnOptions, Neighbours, PartNeighbours, merge, search_part, tables
from indexing.search.rows import Rows
from infra.errors import UsageError
from infra.session import Workers
from infra.vectors import Ids, Table

DEFAULTS = KnnOptions()


@dataclass(frozen=True)
class _Shard:
    first_row: int
    x_BD: Table


def sharded_knn(
    base_ND: Any,
    workers: Workers,
    *,
    shards: int,
    k: int,
    queries_MD: Any = None,
    options: KnnOptions = DEFAULTS,
) -> Neighbours:
    """`exact_knn` with the rows of the base in `shards` parts, each a task of `workers`; the same answer.

    Every worker takes all queries. Raises the errors of `exact_knn`, and UsageError for fewer shards than 1.
    """
    if shards < 1:
        raise UsageError(f"The number of shards is {shards}, but must be 1 or more.")
    queries, base, own_M = tables(base_ND, queries_MD, None)
    cuts = np.linspace(0, len(base), min(shards, max(1, len(base))) + 1).astype(np.int64).tolist()
    tasks = (_Shard(start, base.x_ND[start:stop]) for start, stop in itertools.pairwise(cuts))
    answer = functools.partial(_answer, queries_MD=queries.x_ND, k=k, own_M=own_M, options=options)
    parts: list[PartNeighbours] = [part for _, part in workers.map(answer, tasks)]
    n_undefined = sum(part.n_undefined for part in parts) + (0 if queries is base else queries.n_undefined)
    return merge(parts, k=k, n_undefined=n_undefined)


def _answer(shard: _Shard, *, queries_MD: Table, k: int, own_M: Ids | None, options: KnnOptions) -> PartNeighbours:
    base = Rows(shard.x_BD, name="base", first_row=shard.first_row)
    return search_part(Rows(queries_MD, name="queries"), base, k=k, own_M=own_M, options=options)
