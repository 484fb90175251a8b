"""Exact neighbours against a plain oracle, and the failures that users of FAISS reported (ids F1 to F18)."""

from __future__ import annotations

import itertools
import logging
import math
import types
from pathlib import Path
from typing import Any

import faiss
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from indexing.search import knn, proposals, scan
from indexing.search.knn import KnnOptions, Neighbours, exact_knn, merge, search_part
from indexing.search.proposals import Tiles, fit_to_gpu, is_on_gpu, propose
from indexing.search.rows import Rows, cosines, error_bound
from infra.errors import InputError, UsageError


def oracle(base: Any, k: int, queries: Any = None, *, exclude_self: bool = True) -> tuple[np.ndarray, np.ndarray]:
    """Neighbours by plain Python on tables of small integers, whose sums are exact in any order."""
    rows = [[int(x) for x in row] for row in base]
    asked = rows if queries is None else [[int(x) for x in row] for row in queries]
    ids = np.full((len(asked), k), -1, np.int64)
    scores = np.full((len(asked), k), np.nan, np.float32)
    for i, q in enumerate(asked):
        found = []
        for j, b in enumerate(rows):
            if any(q) and any(b) and not (queries is None and exclude_self and i == j):
                dot, length = sum(x * y for x, y in zip(q, b, strict=True)), math.sqrt(sum(x * x for x in q))
                score = np.float32(dot / (length * math.sqrt(sum(y * y for y in b))))
                found.append((-float(score), j))
        for place, (negative, j) in enumerate(sorted(found)[:k]):
            ids[i, place], scores[i, place] = j, -negative
    return ids, scores


def assert_same(found: Neighbours, ids: np.ndarray, scores: np.ndarray) -> None:
    np.testing.assert_array_equal(found.ids_MK, ids)
    np.testing.assert_array_equal(found.scores_MK, scores)


def noise(n: int, d: int, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).standard_normal((n, d), dtype=np.float32)


def layouts(x: np.ndarray) -> dict[str, np.ndarray]:
    """The same table as views that are not contiguous, not writable, or in Fortran order."""
    wide = np.zeros((2 * len(x), 2 * x.shape[1]), x.dtype)
    wide[::2, ::2] = x
    frozen = x.copy()
    frozen.flags.writeable = False
    return {
        "sliced": wide[::2, ::2],
        "fortran": np.asfortranarray(x),
        "reversed": x[::-1].copy()[::-1],
        "frozen": frozen,
    }


tables = hnp.arrays(
    np.int64, st.tuples(st.integers(0, 40), st.integers(1, 6)), elements=st.integers(-2, 2), fill=st.just(0)
)


@settings(max_examples=120)
@given(
    x=tables,
    k=st.integers(1, 50),
    dtype=st.sampled_from([np.float16, np.float32, np.float64, np.int8]),
    layout=st.sampled_from(["sliced", "fortran", "reversed", "frozen"]),
    base_rows=st.integers(1, 50),
    query_rows=st.integers(1, 50),
    margin=st.integers(0, 3),
)
def test_neighbours_equal_the_oracle_on_ties_zeros_and_duplicates_for_any_tile(
    x: np.ndarray, k: int, dtype: Any, layout: str, base_rows: int, query_rows: int, margin: int
) -> None:
    options = KnnOptions(base_rows=base_rows, query_rows=query_rows, margin=margin)
    found = exact_knn(layouts(x.astype(dtype))[layout], k=k, options=options)
    ids, scores = oracle(x, k + 1)
    assert_same(found, ids[:, :k], scores[:, :k])
    assert found.n_undefined == int((x == 0).all(axis=1).sum())
    ties = (ids[:, k] >= 0) & (scores[:, k] == scores[:, k - 1])
    assert found.tie_rate == (ties.mean() if len(ties) else 0)


@settings(max_examples=60)
@given(base=tables, queries=tables, k=st.integers(1, 9), shards=st.integers(1, 7))
def test_parts_of_a_base_merge_into_the_whole(base: np.ndarray, queries: np.ndarray, k: int, shards: int) -> None:
    queries = np.resize(queries, (len(queries), base.shape[1]))
    cuts = np.linspace(0, len(base), shards + 1).astype(int)
    asked = Rows(queries, name="queries")
    parts = [
        search_part(asked, Rows(base[a:b], name="base", first_row=int(a)), k=k) for a, b in itertools.pairwise(cuts)
    ]
    whole = exact_knn(base, queries_MD=queries, k=k)
    merged = merge(parts, k=k, n_undefined=sum(p.n_undefined for p in parts) + asked.n_undefined)
    assert_same(merged, *oracle(base, k, queries))
    assert_same(whole, merged.ids_MK, merged.scores_MK)
    assert (merged.tie_rate, merged.n_undefined) == (whole.tie_rate, whole.n_undefined)


def test_a_part_leaves_out_the_own_row_of_the_whole_base() -> None:
    x = np.repeat(np.eye(4, dtype=np.float32), 5, axis=0)
    rows = Rows(x, name="queries")
    own = np.arange(20)
    parts = [search_part(rows, Rows(x[a : a + 7], name="base", first_row=a), k=3, own_M=own) for a in (0, 7, 14)]
    assert_same(merge(parts, k=3, n_undefined=0), *oracle(x, 3))


@pytest.mark.parametrize("threads", [1, 2])
@pytest.mark.parametrize(("base_rows", "query_rows"), [(None, None), (47, 16), (1, 150), (150, 1)])
def test_noise_gives_the_same_bytes_for_any_tile_batch_and_thread_count(
    threads: int, base_rows: int | None, query_rows: int | None
) -> None:
    x = noise(150, 70)
    plain = exact_knn(x, k=7)
    before = faiss.omp_get_max_threads()
    faiss.omp_set_num_threads(threads)
    try:
        found = exact_knn(x, k=7, options=KnnOptions(base_rows=base_rows, query_rows=query_rows))
    finally:
        faiss.omp_set_num_threads(before)
    assert found.ids_MK.tobytes() == plain.ids_MK.tobytes()
    assert found.scores_MK.tobytes() == plain.scores_MK.tobytes()


@pytest.mark.parametrize("dtype", [np.float16, np.float32, np.float64])
@pytest.mark.parametrize("spread", [1.0, 1e-3])
def test_scores_are_cosines_to_the_last_bit_of_float32(dtype: Any, spread: float) -> None:
    # With a common offset the cosines crowd at 1, where float32 products lose their order.
    x = (noise(90, 48) * spread + (0 if spread == 1 else 1)).astype(dtype)
    found = exact_knn(x, k=5)
    for i, (ids, scores) in enumerate(zip(found.ids_MK, found.scores_MK, strict=True)):
        exact = [_exact_cosine(x[i], y) for y in x]
        expected = sorted((-float(np.float32(s)), j) for j, s in enumerate(exact) if j != i)[:5]
        assert [j for _, j in expected] == ids.tolist()
        assert [-s for s, _ in expected] == scores.tolist()


@pytest.mark.parametrize("spread", [3e-2, 1e-2, 3e-3, 1e-3])
@pytest.mark.parametrize(("base_rows", "margin"), [(None, 6), (9, 0), (40, 2)])
def test_crowded_cosines_keep_their_order_though_float32_loses_it(
    spread: float, base_rows: int | None, margin: int
) -> None:
    x = noise(500, 48) * np.float32(spread) + 1
    rows, everything = Rows(x, name="base"), np.arange(500)
    scores = cosines(rows, rows, everything, np.tile(everything, (500, 1)))
    np.fill_diagonal(scores, -np.inf)
    expected = np.argsort(-scores, axis=1, kind="stable")[:, :6]
    unit = rows.unit(0, 500)
    products = unit @ unit.T
    np.fill_diagonal(products, -np.inf)
    # Else the test would show nothing.
    assert (np.argsort(-products, axis=1, kind="stable")[:, :6] != expected).any()
    found = exact_knn(x, k=6, options=KnnOptions(base_rows=base_rows, margin=margin))
    np.testing.assert_array_equal(found.ids_MK, expected)
    ordered = -np.sort(-scores, axis=1)
    assert found.tie_rate == (ordered[:, 5] == ordered[:, 6]).mean()


def test_near_copies_at_the_last_place_come_by_exact_score() -> None:
    # Copies differ by about what float32 resolves, and nothing else is near: so no scan mends a wrong choice of candidates.
    x = np.repeat(noise(75, 48).astype(np.float64), 4, axis=0)
    x *= 1 + 2e-7 * np.random.default_rng(1).standard_normal(x.shape)
    rows, everything = Rows(x, name="base"), np.arange(300)
    scores = cosines(rows, rows, everything, np.tile(everything, (300, 1)))
    np.fill_diagonal(scores, -np.inf)
    for k in (4, 8):
        found = exact_knn(x, k=k)
        np.testing.assert_array_equal(found.ids_MK, np.argsort(-scores, axis=1, kind="stable")[:, :k])


def _exact_cosine(x: Any, y: Any) -> float:
    def dot(a: Any, b: Any) -> float:
        return math.fsum(float(p) * float(q) for p, q in zip(a, b, strict=True))

    return dot(x, y) / math.sqrt(dot(x, x) * dot(y, y))


@settings(max_examples=30)
@given(st.integers(1, 300), st.integers(1, 5), st.integers(0, 1000))
def test_the_error_bound_holds_for_float32_products(d: int, n: int, seed: int) -> None:
    rows = Rows(np.random.default_rng(seed).exponential(1, (n, d)) ** 3, name="base")
    unit = rows.unit(0, n)
    everything = np.arange(n)
    exact = cosines(rows, rows, everything, np.tile(everything, (n, 1)))
    assert np.abs(unit @ unit.T - exact).max() <= error_bound(d)
    assert np.abs(np.cumsum(unit[:, None] * unit, axis=2, dtype=np.float32)[..., -1] - exact).max() <= error_bound(d)


def test_f1_more_neighbours_than_rows_are_marked_absent() -> None:
    found = exact_knn(noise(3, 4), k=6)
    assert (found.ids_MK[:, :2] >= 0).all() and (found.ids_MK[:, 2:] == -1).all()
    assert np.isfinite(found.scores_MK[:, :2]).all() and np.isnan(found.scores_MK[:, 2:]).all()


def test_f1_one_row_and_no_row_have_no_neighbours() -> None:
    assert exact_knn(noise(1, 4), k=2).ids_MK.tolist() == [[-1, -1]]
    assert exact_knn(noise(0, 4), k=2).ids_MK.shape == (0, 2)
    assert exact_knn(noise(0, 4), k=2, queries_MD=noise(2, 4)).ids_MK.tolist() == [[-1, -1], [-1, -1]]
    with pytest.raises(UsageError, match="k is 0"):
        exact_knn(noise(3, 4), k=0)


def test_f4_more_neighbours_than_a_gpu_selects_at_once() -> None:
    x = noise(5000, 8)
    found = exact_knn(x[:20], k=4096, queries_MD=x[:20], exclude_self=False)
    assert (found.ids_MK >= 0).sum() == 400
    found = exact_knn(x, k=4096, queries_MD=x[:3])
    expected = cosines(Rows(x, name=""), Rows(x, name=""), np.arange(3), np.tile(np.arange(5000), (3, 1)))
    order = np.argsort(-expected, axis=1, kind="stable")[:, :4096]
    np.testing.assert_array_equal(found.ids_MK, order)


def test_f4_tiles_for_a_device_that_selects_few_keep_the_bound() -> None:
    x = noise(400, 8)
    # All neighbours of the queries stand in the first tile, so later ones cannot make up for what it may select.
    x[:60, 0] += 30
    queries, base = Rows(x[:10], name="queries"), Rows(x, name="base")
    tiles = fit_to_gpu(Tiles(base_rows=400, query_rows=10), n=400, c=40, max_k=16)
    assert tiles.base_rows == 80
    proposed = propose(queries, base, np.arange(10), 40, tiles)
    products = queries.unit(0, 10) @ base.unit(0, 400).T
    for i in range(10):
        left_out = np.setdiff1d(np.arange(400), proposed.ids_MC[i])
        assert len(left_out) == 360
        assert products[i, left_out].max() <= proposed.bound_M[i] + 1e-6


def test_f4_f6_a_query_whose_candidates_fall_short_is_scanned(monkeypatch: pytest.MonkeyPatch) -> None:
    x = noise(400, 8)
    x[:60, 0] += 30
    expected = exact_knn(x, k=40)
    few = Tiles(base_rows=100, query_rows=64, max_k=16)
    monkeypatch.setattr(knn, "_tiles", lambda *_: few)
    assert_same(exact_knn(x, k=40), expected.ids_MK, expected.scores_MK)


def test_f6_duplicates_come_by_row_and_self_is_left_out_by_number() -> None:
    x = np.tile(noise(3, 16), (40, 1))
    found = exact_knn(x, k=5)
    for i, ids in enumerate(found.ids_MK):
        assert ids.tolist() == [j for j in range(i % 3, 120, 3) if j != i][:5]
    assert found.tie_rate == 1
    assert (found.scores_MK == 1).all()


def test_f6_ten_thousand_equal_rows_and_a_few_others() -> None:
    x = np.tile(noise(1, 8), (10_000, 1))
    x[[17, 5000, 9999]] = noise(3, 8, seed=1)
    found = exact_knn(x, k=4)
    assert found.ids_MK[0].tolist() == [1, 2, 3, 4]
    assert found.ids_MK[2].tolist() == [0, 1, 3, 4]
    assert found.ids_MK[9998].tolist() == [0, 1, 2, 3]
    others = exact_knn(x[[17, 5000, 9999]], k=1, queries_MD=x[:1])
    assert others.ids_MK.shape == (1, 1)
    # The one that is like nothing else sees the lowest of the equal rows first, unless another one is nearer.
    near = [j for j in found.ids_MK[17].tolist() if j not in (5000, 9999)]
    assert near == list(range(len(near)))


def test_f6_a_collapsed_table_gives_rows_in_order_across_tiles_and_scores_few_of_them(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Three directions and 9,000 rows, which are two tiles of the scan: k + 1 of each direction of a tile are enough."""
    widths = []
    keep_best = scan._keep_best

    def counted(ids_QK: Any, scores_QK: Any, ids_B: Any, scores_QB: Any) -> None:
        widths.append(scores_QB.shape[1])
        keep_best(ids_QK, scores_QK, ids_B, scores_QB)

    monkeypatch.setattr(scan, "_keep_best", counted)
    code = np.random.default_rng(0).integers(0, 3, 9_000)
    # So that the neighbours of the third direction lie in both tiles.
    code[(np.arange(9_000) < scan.BASE_BLOCK) & (code == 2)] = 0
    code[[5, 900]] = 2
    found = exact_knn(noise(3, 8)[code], k=6)
    members = [np.flatnonzero(code == c).tolist() for c in range(3)]
    for i, ids in enumerate(found.ids_MK.tolist()):
        assert ids == [j for j in members[code[i]][:7] if j != i][:6]
    assert found.tie_rate == 1
    # One more than k is wanted, to see ties, and one of the equal rows may be the query's own.
    assert widths and max(widths) <= 3 * (6 + 1 + 1)


def test_f6_many_distinct_rows_of_one_score_are_bounded_by_the_row_number() -> None:
    # Query e0; the base holds 3,000 different rows at the same angle to it, and one nearer.
    d = 3001
    base = np.zeros((3000, d), np.float32)
    base[:, 0] = 1
    base[np.arange(3000), np.arange(1, d)] = 1
    base[1234, 0] = 3
    query = np.zeros((1, d), np.float32)
    query[0, 0] = 2
    found = exact_knn(base, k=4, queries_MD=query, options=KnnOptions(base_rows=500))
    assert found.ids_MK.tolist() == [[1234, 0, 1, 2]]
    assert found.tie_rate == 1


def test_f8_a_memory_map_of_more_than_two_to_the_31_elements(tmp_path: Path) -> None:
    d, n = 64, 2**31 // 64 + 50_000
    base = np.memmap(tmp_path / "base.f16", dtype=np.float16, mode="w+", shape=(n, d))
    assert base.size > 2**31
    edge = 2**31 // d
    starts = [0, 2**30 // d - 50, edge - 50, n - 100]
    real = noise(400, d).astype(np.float16)
    for place, start in enumerate(starts):
        base[start : start + 100] = real[100 * place : 100 * place + 100]
    base.flush()
    frozen = np.memmap(tmp_path / "base.f16", dtype=np.float16, mode="r", shape=(n, d))
    queries = real[::4]
    numbers = np.concatenate([np.arange(start, start + 100) for start in starts])
    found = exact_knn(frozen, k=10, queries_MD=queries)
    small = exact_knn(real, k=10, queries_MD=queries)
    assert_same(found, numbers[small.ids_MK], small.scores_MK)
    assert found.ids_MK.max() > edge and found.ids_MK[:, 0].tolist() == numbers[::4].tolist()
    assert found.n_undefined == n - 400


@pytest.mark.parametrize("scale", [1e-30, 1e30])
def test_f9_large_and_small_rows_give_the_neighbours_of_their_directions(scale: float) -> None:
    x = noise(60, 12)
    factors = (np.float32(2) ** np.arange(-30, 30, dtype=np.float32))[:, None]
    expected = exact_knn(x, k=5)
    assert_same(exact_knn(x * factors, k=5), expected.ids_MK, expected.scores_MK)
    np.testing.assert_array_equal(exact_knn(x * np.float32(scale), k=5).ids_MK, expected.ids_MK)
    wide = x.astype(np.float64) * 1e200
    found = exact_knn(wide, k=5)
    np.testing.assert_array_equal(found.ids_MK, expected.ids_MK)
    assert_same(exact_knn(np.ldexp(wide, -60), k=5), found.ids_MK, found.scores_MK)


def test_f10_small_differences_under_a_large_offset_keep_their_order() -> None:
    # Rows e0 * 1000 + t * e1: the cosine falls with |t - s|; FAISS's float32 products of them are all 1.
    steps = np.random.default_rng(0).permutation(50)
    x = np.zeros((50, 16), np.float32)
    x[:, 0], x[:, 1] = 1000, steps
    found = exact_knn(x, k=49)
    for i, ids in enumerate(found.ids_MK):
        exact = [np.float32(_exact_cosine(x[i], y)) for y in x]
        assert ids.tolist() == sorted((j for j in range(50) if j != i), key=lambda j: (-exact[j], j))
    assert (found.scores_MK <= 1).all()


@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize("dtype", [np.float16, np.float32, np.float64])
def test_f11_rows_with_nan_or_infinity_are_refused_by_number(bad: float, dtype: Any) -> None:
    x = noise(30, 4).astype(dtype)
    x[[4, 29], 1] = bad
    with pytest.raises(InputError, match=r"2 of 30 rows of the base hold NaN or an infinity \(rows 4, 29\)"):
        exact_knn(x, k=2)
    with pytest.raises(InputError, match="of the queries hold NaN"):
        exact_knn(x[:4], k=2, queries_MD=x)


def test_f13_zero_rows_have_no_neighbours_and_are_nobodys() -> None:
    x = -np.abs(noise(20, 4))
    x[0] = np.abs(x[0])  # its products with all others are negative, so a zero row would come first
    x[[3, 7]] = 0
    found = exact_knn(x, k=30)
    assert (found.ids_MK[[3, 7]] == -1).all() and np.isnan(found.scores_MK[[3, 7]]).all()
    assert not np.isin(found.ids_MK, [3, 7]).any()
    assert (found.ids_MK[0] >= 0).sum() == 17
    assert found.n_undefined == 2
    assert exact_knn(np.zeros((4, 3)), k=1).ids_MK.tolist() == [[-1]] * 4


def test_f14_a_read_only_memory_map_is_read_and_left_alone(tmp_path: Path) -> None:
    x = noise(50, 6) * 5
    x.tofile(tmp_path / "x.f32")
    mapped = np.memmap(tmp_path / "x.f32", dtype=np.float32, mode="r", shape=(50, 6))
    before = (tmp_path / "x.f32").read_bytes()
    expected = exact_knn(x, k=3)
    assert_same(exact_knn(mapped[::-1][::-1], k=3), expected.ids_MK, expected.scores_MK)
    assert (tmp_path / "x.f32").read_bytes() == before


@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float32", "float64"])
def test_f16_tensors_of_torch_are_accepted(dtype: str) -> None:
    import torch

    x = torch.from_numpy(np.rint(noise(30, 6) * 3)).to(getattr(torch, dtype)).requires_grad_()
    expected = exact_knn(x.detach().float().numpy(), k=4)
    assert_same(exact_knn(x.t().contiguous().t(), k=4), expected.ids_MK, expected.scores_MK)


@pytest.mark.parametrize(
    "wrong", [np.zeros(5), np.zeros((2, 2, 2)), np.zeros((3, 0)), np.array([["a"]]), np.eye(2, dtype=bool)]
)
def test_f16_what_is_no_table_of_numbers_is_refused(wrong: np.ndarray) -> None:
    with pytest.raises(InputError, match="base"):
        exact_knn(wrong, k=1)


def test_f17_the_gpu_gets_the_memory_it_was_given(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: dict[str, Any] = {}

    class Resources:
        def setTempMemory(self, size: int) -> None:
            asked["temporary"] = size

    def knn_gpu(_: Any, xq: np.ndarray, xb: np.ndarray, k: int, **options: Any) -> tuple[np.ndarray, np.ndarray]:
        asked.update(options, k=k)
        return faiss.knn(xq, xb, k, metric=options["metric"])

    fake = types.SimpleNamespace(
        **{name: getattr(faiss, name) for name in ("METRIC_INNER_PRODUCT", "omp_get_max_threads")}
    )
    fake.StandardGpuResources, fake.knn_gpu, fake.get_num_gpus = Resources, knn_gpu, lambda: 1
    expected = exact_knn(noise(40, 5), k=3)
    monkeypatch.setitem(__import__("sys").modules, "faiss", fake)
    found = exact_knn(noise(40, 5), k=3, options=KnnOptions(device="gpu", gpu_memory_bytes=4096))
    assert_same(found, expected.ids_MK, expected.scores_MK)
    total = asked["temporary"] + asked["vectorsMemoryLimit"] + asked["queriesMemoryLimit"]
    assert total == 4096


def test_f18_a_faiss_without_gpu_falls_back_with_a_sentence(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setitem(__import__("sys").modules, "faiss", types.SimpleNamespace(get_num_gpus=lambda: 0))
    monkeypatch.setattr(proposals, "_machine_has_gpu", lambda: True)
    with caplog.at_level(logging.WARNING):
        assert not is_on_gpu("auto")
    assert "faiss-cpu and faiss-gpu together" in caplog.text
    with pytest.raises(UsageError, match="pip install faiss-gpu"):
        is_on_gpu("gpu")
    assert not is_on_gpu("cpu")


def test_tables_that_do_not_fit_together_are_refused() -> None:
    with pytest.raises(InputError, match="5 dimensions and the base has 4"):
        exact_knn(noise(3, 4), k=1, queries_MD=noise(3, 5))
    with pytest.raises(InputError, match="row i is not the same item"):
        exact_knn(noise(3, 4), k=1, queries_MD=noise(2, 4), exclude_self=True)


@pytest.mark.parametrize("wrong", [{"margin": -1}, {"base_rows": 0}, {"memory_bytes": 0}, {"device": "tpu"}])
def test_options_that_mean_nothing_are_refused(wrong: dict[str, Any]) -> None:
    with pytest.raises(UsageError, match=next(iter(wrong))):
        KnnOptions(**wrong)
