"""Neighbours over workers equal those of one process."""

from __future__ import annotations

import numpy as np
import pytest

from indexing.search.knn import exact_knn
from indexing.search.sharding import sharded_knn
from infra.errors import InputError, UsageError
from infra.session import Workers, open_workers


def crowd() -> np.ndarray:
    """Rows with duplicates over the cuts, a zero row, and ties."""
    x = np.random.default_rng(0).integers(-2, 3, (90, 5)).astype(np.float32)
    x[40:60] = x[10]
    x[33] = 0
    return x


@pytest.mark.parametrize("shards", [1, 2, 7, 90, 1000])
def test_any_number_of_shards_gives_the_answer_of_one(shards: int) -> None:
    x = crowd()
    with open_workers(address=None, num_cpus=0) as workers:
        own = sharded_knn(x, workers, shards=shards, k=6)
        asked = sharded_knn(x, workers, shards=shards, k=6, queries_MD=x[:9] + 1)
    for found, expected in ((own, exact_knn(x, k=6)), (asked, exact_knn(x, k=6, queries_MD=x[:9] + 1))):
        assert found.ids_MK.tobytes() == expected.ids_MK.tobytes()
        assert found.scores_MK.tobytes() == expected.scores_MK.tobytes()
        assert (found.n_undefined, found.tie_rate) == (expected.n_undefined, expected.tie_rate)


def test_f11_a_shard_names_bad_rows_by_their_number_in_the_whole() -> None:
    x = crowd()
    x[77, 2] = np.nan
    with open_workers(address=None, num_cpus=0) as workers, pytest.raises(InputError, match=r"\(rows 77\)"):
        sharded_knn(x, workers, shards=3, k=2, queries_MD=x[:3])
    with open_workers(address=None, num_cpus=0) as workers, pytest.raises(UsageError, match="shards is 0"):
        sharded_knn(x, workers, shards=0, k=2)


def test_shards_on_ray_give_the_answer_of_one_process(ray_workers: Workers) -> None:
    x = np.random.default_rng(0).standard_normal((3000, 64), dtype=np.float32)
    found, expected = sharded_knn(x, ray_workers, shards=3, k=5), exact_knn(x, k=5)
    assert found.ids_MK.tobytes() == expected.ids_MK.tobytes()
    assert found.scores_MK.tobytes() == expected.scores_MK.tobytes()
