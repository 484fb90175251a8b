"""The measures: those of the packages, on arrays and tensors alike."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch

import goodviews as gv
from indexing.align import kernels
from indexing.align.neighbours import neighbour_lists
from indexing.align.score import AlignConfig
from indexing.uncertainty.bootstrap import BootstrapConfig
from indexing.uncertainty.calibration import CalibrationConfig
from tests.indexing.measures import score

X = np.random.default_rng(1).normal(size=(60, 6)).astype(np.float32)
Y = X @ np.random.default_rng(2).normal(size=(6, 5)).astype(np.float32) + 0.5

MEASURES: dict[str, Callable[[Any, Any], float]] = {
    "mutual_knn": lambda x, y: gv.mutual_knn(x, y, k=5),
    "cka": gv.cka,
    "unbiased_cka": lambda x, y: gv.cka(x, y, unbiased=True),
    "cknna": lambda x, y: gv.cknna(x, y, k=5),
    "svcca": gv.svcca,
}


@pytest.mark.parametrize("metric", MEASURES)
def test_a_measure_is_what_align_scores(metric: str) -> None:
    config = AlignConfig(
        metrics=(metric,), k=5, bootstrap=BootstrapConfig(draws=0), calibration=CalibrationConfig(permutations=0)
    )
    (found,) = score({0: X}, {0: Y}, config)
    assert MEASURES[metric](X, Y) == found.score.value


@pytest.mark.parametrize("metric", MEASURES)
def test_tensors_measure_like_arrays(metric: str) -> None:
    measure = MEASURES[metric]
    x, y = torch.from_numpy(X).requires_grad_(), torch.from_numpy(Y)
    assert measure(x, y) == measure(X, Y)
    rounded = torch.from_numpy(X).bfloat16()
    assert measure(rounded, y) == measure(rounded.float().numpy(), Y)


@pytest.mark.parametrize("metric", MEASURES)
def test_tables_of_other_lengths_are_refused(metric: str) -> None:
    with pytest.raises(gv.InputError):
        MEASURES[metric](X, Y[:-1])


def test_neighbours_take_queries_and_tensors() -> None:
    found = gv.exact_knn(torch.from_numpy(X), k=3, queries=torch.from_numpy(X[:7]), exclude_self=False)
    assert found.ids_MK.shape == (7, 3)
    assert found.ids_MK[:, 0].tolist() == list(range(7))
    with pytest.raises(gv.UsageError, match="k is 0"):
        gv.exact_knn(X, k=0)


@pytest.mark.parametrize("metric", MEASURES)
def test_a_named_metric_calibrates_like_align(metric: str) -> None:
    how = CalibrationConfig(permutations=39, seed=3)
    config = AlignConfig(metrics=(metric,), k=5, bootstrap=BootstrapConfig(draws=0), calibration=how)
    (scored,) = score({0: X}, {0: Y}, config)
    found = gv.calibrate(metric, X, Y, k=5, permutations=39, seed=3)
    assert (found.p_value, found.threshold) == (scored.score.p_value, scored.score.threshold)
    assert found.calibrated == scored.score.calibrated


def test_a_function_calibrates_like_its_name() -> None:
    named = gv.calibrate("cka", X, torch.from_numpy(Y), permutations=39)
    own = gv.calibrate(gv.cka, X, Y, permutations=39)
    assert own.p_value == named.p_value
    assert own.calibrated == pytest.approx(named.calibrated)
    with pytest.raises(gv.UsageError, match="no metric 'ckaa'"):
        gv.calibrate("ckaa", X, Y)
    with pytest.raises(gv.UsageError, match="nothing to compare"):
        gv.calibrate("cka", X, Y, permutations=0)


def test_cknna_takes_the_same_neighbours_on_both_sides() -> None:
    lists = neighbour_lists(X, k=5), neighbour_lists(Y, k=5)
    assert gv.cknna(X, Y, k=5) == kernels.CKNNA(X, Y, lists).value()


def test_a_rotation_maps_pairs_it_has_not_seen() -> None:
    turn = np.linalg.qr(np.random.default_rng(4).normal(size=(6, 6)))[0]
    fitted = gv.fit_rotation(torch.from_numpy(X[:40]), X[:40] @ turn)
    mapped, targets = fitted.map_rows(X[40:]), fitted.target_rows(X[40:] @ turn)
    assert gv.recall_at_k(mapped, targets, k=1) == 1.0
    assert gv.recall_at_k(X[40:] - X[40:].mean(0), targets, k=1) < 0.5


def test_recall_counts_several_right_ones_and_refuses_a_query_without_one() -> None:
    captions = np.repeat(X, 2, axis=0)
    labels = np.repeat(np.arange(len(X)), 2).tolist()
    assert gv.recall_at_k(X, captions, gallery_labels=labels) == 1.0
    assert gv.recall_at_k(torch.from_numpy(captions), torch.from_numpy(X), k=1, query_labels=labels) == 1.0
    with pytest.raises(gv.InputError, match="no right one"):
        gv.recall_at_k(X, captions[2:], gallery_labels=labels[2:])
    with pytest.raises(gv.InputError, match="a label for each"):
        gv.recall_at_k(X, Y)
    with pytest.raises(gv.UsageError, match="k is 0"):
        gv.recall_at_k(X, X, k=0)
