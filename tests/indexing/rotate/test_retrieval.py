"""`indexing.rotate.retrieval`: ranks with ties against the model, several right ones, and what chance reads."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from indexing.rotate.retrieval import mean_by_label, rank
from indexing.rotate.rotation import MapConfig, fit
from indexing.scores import tables
from indexing.uncertainty.bootstrap import BootstrapConfig, mean_interval
from infra.errors import InputError
from tests.indexing.embedding_sets import related

EYE = np.eye(4)
PLACES = np.arange(4)


def test_the_right_ones_of_one_caption_each() -> None:
    found = rank(EYE, EYE[[0, 1, 3, 2]], PLACES, PLACES)
    assert found.ranks_M.tolist() == [0, 0, 3, 3]  # a zero score ties with the other two wrong ones, and one is above
    assert found.above_M.tolist() == [0, 0, 1, 1]
    assert found.picked_M.tolist() == [0, 1, 3, 2]
    assert found.hits(1).mean() == 0.5


def test_f24_one_score_for_all_finds_nothing_and_reads_chance_when_ties_are_broken_at_random() -> None:
    found = rank(np.ones((4, 2)), np.ones((4, 2)), PLACES, PLACES)
    assert found.ranks_M.tolist() == [3] * 4
    assert found.hits(3).sum() == 0
    assert found.tie_rate == 1.0
    assert found.expected_hits(1).mean() == 0.25
    assert found.expected_hits(3).mean() == 0.75
    assert found.median_rank == 2.5


def test_the_best_of_several_right_ones_counts_and_they_do_not_compete() -> None:
    queries = np.array([[1.0, 0.0]])
    gallery = np.array([[0.9, 0], [0.8, 0], [0.95, 0], [0.7, 0], [0.99, 0]])
    found = rank(queries, gallery, np.array([7]), np.array([7, 7, 1, 7, 2]))
    assert (found.ranks_M[0], found.right_M[0], found.picked_M[0]) == (2, 3, 4)


@given(st.integers(0, 10**6), st.integers(1, 4), st.integers(2, 6))
def test_ranks_are_those_of_a_plain_loop(seed: int, captions: int, scenes: int) -> None:
    """Small integers, so that many scores tie."""
    g = np.random.default_rng(seed)
    gallery = g.integers(-1, 2, (scenes * captions, 3)).astype(float)
    labels = np.repeat(np.arange(scenes), captions)
    g.shuffle(labels)
    queries = g.integers(-1, 2, (scenes, 3)).astype(float)
    found = rank(queries, gallery, np.arange(scenes), labels)
    for i in range(scenes):
        scores = [float(queries[i] @ row) for row in gallery]
        best = max(s for s, label in zip(scores, labels, strict=True) if label == i)
        wrong = [s for s, label in zip(scores, labels, strict=True) if label != i]
        assert found.above_M[i] == sum(s > best for s in wrong)
        assert found.tied_M[i] == sum(s == best for s in wrong)
        assert scores[found.picked_M[i]] == max(scores)
        if found.ranks_M[i] > 0 and max(wrong, default=-9) == max(scores):
            assert labels[found.picked_M[i]] != i


def test_tiles_do_not_change_ranks(monkeypatch: pytest.MonkeyPatch) -> None:
    g = np.random.default_rng(0)
    queries, gallery = g.normal(size=(50, 8)), g.normal(size=(50, 8))
    places = np.arange(50)
    whole = rank(queries, gallery, places, places)
    monkeypatch.setattr(tables, "TILE_CELLS", 7 * 50)
    tiled = rank(queries, gallery, places, places)
    assert np.array_equal(whole.above_M, tiled.above_M) and np.array_equal(whole.picked_M, tiled.picked_M)


def test_chance_is_what_random_orders_find() -> None:
    """Three right ones of twelve: 1 - C(9, 4) / C(12, 4)."""
    labels = np.repeat(np.arange(4), 3)
    found = rank(EYE, EYE[labels], PLACES, labels)
    assert found.chance(4) == pytest.approx(1 - 126 / 495)
    assert found.chance(1) == pytest.approx(3 / 12)
    assert found.chance(10) == found.chance(99) == 1.0
    assert rank(EYE, EYE, PLACES, PLACES).chance(1) == pytest.approx(0.25)


def test_captions_of_a_scene_are_averaged_before_anything_is_drawn() -> None:
    values = np.array([1.0, 0.0, 1.0, 0.0, 0.0])
    means = mean_by_label(values, np.array([0, 0, 2, 2, 2]), 4)
    assert means[[0, 2]].tolist() == [0.5, pytest.approx(1 / 3)]
    assert np.isnan(means[[1, 3]]).all()


def test_queries_that_nothing_can_answer_are_refused() -> None:
    with pytest.raises(InputError, match="1 of 4 queries have no right one"):
        rank(EYE, EYE[:3], PLACES, PLACES[:3])
    with pytest.raises(InputError, match="0 queries"):
        rank(EYE[:0], EYE, PLACES[:0], PLACES)


def test_intervals_of_recall_cover_what_they_say_within_three_points() -> None:
    """400 worlds of 150 new items each, one map; the target is the mean recall over all worlds."""
    x, y = related(0, 400 * 150 + 300, 16, 12, noise=1.0)
    fitted = fit(x[:300], y[:300], MapConfig())
    places = np.arange(150)
    rows = []
    for world in range(400):
        part = slice(300 + 150 * world, 450 + 150 * world)
        hits = rank(fitted.map_rows(x[part]), fitted.target_rows(y[part]), places, places).hits(1)
        found = mean_interval(hits, BootstrapConfig(draws=500, seed=world))
        assert found.low is not None and found.high is not None
        rows.append((found.value, found.low, found.high))
    value, low, high = np.array(rows).T
    assert 0.1 < value.mean() < 0.9
    assert ((low <= value.mean()) & (value.mean() <= high)).mean() == pytest.approx(0.95, abs=0.03)


def test_the_first_half_of_the_real_photos_finds_the_second(real_features: Path) -> None:
    """Known value: rotation fitted on the first 500 pairs, R@1 among the other 500 is .176."""
    with np.load(real_features) as features:  # noqa: TID251  pickles stay refused
        images, captions = features["effnet_lite0"], features["minilm_int8"].astype(np.float64)
    means = (captions / np.linalg.norm(captions, axis=2, keepdims=True)).mean(axis=1)
    places = np.arange(500)
    fitted = fit(images[:500], means[:500], MapConfig())
    found = rank(fitted.map_rows(images[500:]), fitted.target_rows(means[500:]), places, places)
    assert found.hits(1).mean() == pytest.approx(0.176, abs=1e-9)
    shuffled = fit(images[:500], means[np.random.default_rng(0).permutation(500)], MapConfig())
    assert rank(shuffled.map_rows(images[500:]), fitted.target_rows(means[500:]), places, places).hits(1).mean() < 0.012
