"""Approximate indexes: what a wish resolves to, and that the audit tells the truth."""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np
import pytest

from indexing.search import ann
from indexing.search.ann import Wish, build, candidate_factories
from indexing.search.knn import exact_knn
from indexing.search.rows import Rows
from infra.errors import InputError, UsageError


def clusters(n: int, d: int = 16, centres: int = 40) -> np.ndarray:
    generator = np.random.default_rng(0)
    middle = generator.standard_normal((centres, d))
    return (middle[generator.integers(0, centres, n)] + 0.3 * generator.standard_normal((n, d))).astype(np.float32)


def recall_by_hand(index: Any, x: np.ndarray, k: int) -> tuple[float, float]:
    """Recall and share of empty places over all rows, by sets of numbers."""
    unit = x / np.linalg.norm(x, axis=1, keepdims=True)
    _, found = index.search(unit, k + 1)
    exact = exact_knn(x, k=k).ids_MK
    others = [[j for j in row.tolist() if j != i][:k] for i, row in enumerate(found)]
    hits = sum(len(set(a) & set(b.tolist())) for a, b in zip(others, exact, strict=True))
    return hits / exact.size, sum(a.count(-1) for a in others) / exact.size


@pytest.mark.parametrize("n", [400, 401])
@pytest.mark.parametrize(
    ("factory", "parameters"), [("IVF8,Flat", "nprobe=2"), ("HNSW4,Flat", "efSearch=12"), ("Flat", "")]
)
def test_f23_every_build_is_audited_and_the_audit_is_true(n: int, factory: str, parameters: str) -> None:
    x = clusters(n)
    built = build(Rows(x, name="set"), Wish(recall=0.01), factory=factory, parameters=parameters)
    recall, absent = recall_by_hand(built.index, x, 10)
    assert built.audit.queries == n
    assert built.audit.recall == pytest.approx(recall, abs=1e-12)
    assert built.audit.absent == pytest.approx(absent, abs=1e-12)
    assert (built.audit.recall == 1) == (factory == "Flat")


def test_f23_one_query_gets_the_answer_it_gets_in_a_batch() -> None:
    x = clusters(600)
    rows = Rows(x, name="set")
    index = build(rows, Wish(), factory="IVF8,Flat").index
    together, _ = ann.search(index, rows, 5)
    for i in range(0, 600, 60):
        alone, _ = ann.search(index, Rows(x[i : i + 1], name="query"), 5)
        assert alone[0].tolist() == together[i].tolist()


def test_f3_empty_places_are_flagged_and_never_a_row() -> None:
    x = clusters(400)
    rows = Rows(x, name="set")
    built = build(rows, Wish(k=80), factory="IVF10,Flat", parameters="nprobe=1")
    assert built.audit.absent > 0.1
    assert any("left empty" in flag for flag in built.flags)
    places, scores = ann.search(built.index, rows, 80)
    assert (places == -1).any()
    assert np.isnan(scores[places == -1]).all() and np.isfinite(scores[places >= 0]).all()


def test_f3_without_parameters_enough_lists_are_searched_to_reach_the_wish() -> None:
    built = build(Rows(clusters(800), name="set"), Wish(recall=0.97, k=30), factory="IVF16,Flat")
    assert built.flags == () and built.audit.recall >= 0.97 and built.audit.absent == 0
    assert built.audit.parameters.startswith("nprobe=") and built.audit.parameters != "nprobe=1"


def test_a_wish_is_granted_or_refused_with_what_was_tried() -> None:
    rows = Rows(clusters(2000), name="set")
    flat_bytes = 2000 * 16 * 4
    built = build(rows, Wish(recall=0.8, memory_bytes=flat_bytes // 2))
    assert built.audit.bytes <= flat_bytes // 2 and built.audit.recall >= 0.8 and built.flags == ()
    assert {a.factory for a in built.trials} >= {built.audit.factory}
    fastest = min(a.ms_per_query for a in built.trials if not a.flags(Wish(recall=0.8, memory_bytes=flat_bytes // 2)))
    assert built.audit.ms_per_query == fastest
    with pytest.raises(InputError, match=r"No index grants recall 1, 56,000 bytes. Tried: IVF"):
        build(rows, Wish(recall=1.0, memory_bytes=56_000))
    with pytest.raises(InputError, match="none is that small"):
        build(rows, Wish(memory_bytes=10))


def test_a_named_factory_that_misses_the_wish_says_so() -> None:
    built = build(Rows(clusters(500), name="set"), Wish(recall=1.0, memory_bytes=1), factory="SQ4")
    assert len(built.flags) == 2
    assert "recall@10" in built.flags[0] and "1 bytes" not in built.flags[0]


def test_candidates_fit_into_the_memory_and_quantise_only_where_they_must() -> None:
    n, d = 100_000, 128
    everything = candidate_factories(n, d, Wish())
    assert "Flat" in everything and not any("PQ" in name for name in everything)
    small = candidate_factories(n, d, Wish(memory_bytes=n * 60))
    assert small and all("PQ" in name for name in small)


def test_f13_zero_rows_are_in_no_index_and_places_stay_true() -> None:
    x = clusters(300)
    x[[0, 7, 299]] = 0
    rows = Rows(x, name="set")
    built = build(rows, Wish(), factory="Flat")
    assert built.index.ntotal == 297 and built.audit.recall == 1
    places, scores = ann.search(built.index, rows, 4)
    assert (places[[0, 7, 299]] == -1).all() and np.isnan(scores[7]).all()
    assert np.flatnonzero(rows.norms_N)[places[8, 0]] == 8


def test_f6_duplicates_do_not_lower_the_recall_of_an_exact_index() -> None:
    x = np.repeat(clusters(20), 30, axis=0)
    assert build(Rows(x, name="set"), Wish(), factory="Flat").audit.recall == 1


@pytest.mark.parametrize(
    ("factory", "parameters", "error", "words"),
    [
        ("Nonsense", None, UsageError, "knows no index 'Nonsense'"),
        ("IVF500,Flat", None, InputError, "cannot build 'IVF500,Flat' over 100 rows"),
        ("IVF4,Flat", "depth=3", UsageError, "no search parameters 'depth=3'"),
        (None, "nprobe=3", UsageError, "--factory"),
    ],
)
def test_what_faiss_cannot_do_is_said_in_a_sentence(
    factory: str | None, parameters: str | None, error: type[Exception], words: str
) -> None:
    with pytest.raises(error, match=words):
        build(Rows(clusters(100), name="set"), Wish(), factory=factory, parameters=parameters)
    with pytest.raises(InputError, match="two rows"):
        build(Rows(np.zeros((5, 3)), name="set"), Wish())


@pytest.mark.parametrize(
    "wrong", [{"recall": 0}, {"recall": 1.1}, {"k": 0}, {"memory_bytes": 0}, {"ms_per_query": -1.0}]
)
def test_wishes_that_mean_nothing_are_refused(wrong: dict[str, Any]) -> None:
    with pytest.raises(UsageError):
        dataclasses.replace(Wish(), **wrong)
