"""`indexing.uncertainty.calibration`: p-values are uniform when nothing is there, and the layer search is part of the null."""

from __future__ import annotations

import numpy as np
import pytest
from scipy import stats

from indexing.align.layers import ProtocolConfig
from indexing.align.score import AlignConfig
from indexing.uncertainty.bootstrap import BootstrapConfig
from indexing.uncertainty.calibration import CalibrationConfig, calibrate, permutations_of
from infra.errors import UsageError
from tests.indexing.measures import score

NO_DRAWS = BootstrapConfig(draws=0)


def test_the_formulas_by_hand() -> None:
    """39 shuffled scores 0.01 .. 0.39 and a score of 0.385: one of them is larger, and tau is the 38th of the 40."""
    null = iter(np.arange(1, 40) / 100)
    found = calibrate(0.385, lambda _: float(next(null)), 5, CalibrationConfig(permutations=39))
    assert found is not None
    assert found.p_value == 2 / 40
    assert found.threshold == pytest.approx(0.38)
    assert found.calibrated == pytest.approx((0.385 - 0.38) / (1 - 0.38))
    assert found.mean == pytest.approx(0.2)


def test_ties_with_the_score_and_undefined_values_count_against_it() -> None:
    null = iter([0.5, float("nan"), *[0.1] * 17])
    found = calibrate(0.5, lambda _: float(next(null)), 5, CalibrationConfig(permutations=19))
    assert found is not None
    assert found.p_value == 3 / 20


def test_a_score_at_its_threshold_calibrates_to_zero_and_a_perfect_one_to_one() -> None:
    config = CalibrationConfig(permutations=19)
    low, high = (calibrate(s, lambda _: 0.3, 5, config) for s in (0.3, 1.0))
    assert low is not None and high is not None
    assert (low.calibrated, low.p_value) == (0.0, 1.0)
    assert (high.calibrated, high.p_value) == (1.0, 1 / 20)


@pytest.mark.parametrize("metric", ["mutual_knn", "unbiased_cka"])
def test_p_values_are_uniform_under_the_null(metric: str) -> None:
    """Kolmogorov-Smirnov over 150 pairs of independent tables; k and N leave mutual k-NN few equal scores."""
    p_values = []
    for seed in range(150):
        g = np.random.default_rng(seed)
        x, y = g.normal(size=(40, 8)), g.normal(size=(40, 8))
        config = AlignConfig(
            metrics=(metric,),
            k=12,
            bootstrap=NO_DRAWS,
            calibration=CalibrationConfig(permutations=39, seed=seed),
        )
        found = score({0: x}, {0: y}, config)[0].score
        assert found.p_value is not None
        p_values.append(found.p_value)
    # Uniform on {1/40 .. 40/40}, so the middle of each cell is uniform on [0, 1] but for its width.
    assert stats.kstest(np.array(p_values) - 0.5 / 40, "uniform").pvalue > 0.01
    assert np.mean(np.array(p_values) <= 0.05) == pytest.approx(0.05, abs=0.04)


def test_the_null_of_a_layer_search_searches_too_and_moves_all_layers_together() -> None:
    """The best of 36 independent pairs looks significant against one pair, and not against the best of 36."""
    g = np.random.default_rng(0)
    left, right = ({i: g.normal(size=(60, 10)).astype(np.float32) for i in range(6)} for _ in range(2))
    huh = AlignConfig(
        k=5,
        protocol=ProtocolConfig(name="huh2024"),
        bootstrap=NO_DRAWS,
        calibration=CalibrationConfig(permutations=99),
    )
    best = score(left, right, huh)[0].score
    one = AlignConfig(k=5, bootstrap=NO_DRAWS, calibration=CalibrationConfig(permutations=99))
    alone = score({0: left[best.left_layer]}, {0: right[best.right_layer]}, one)[0].score
    assert best.p_value is not None and alone.p_value is not None
    assert alone.p_value <= 0.05 < best.p_value


def test_all_layers_of_the_right_side_move_together() -> None:
    """Six copies of a layer have the null of one. Entries of +-1 are all at the clamp, so it changes nothing."""
    g = np.random.default_rng(3)
    left, right = (np.sign(g.normal(size=(40, 32))).astype(np.float32) for _ in range(2))
    config = AlignConfig(
        k=5,
        protocol=ProtocolConfig(name="huh2024", exact_quantile=True),
        bootstrap=NO_DRAWS,
        calibration=CalibrationConfig(permutations=99),
    )
    one, six = (score({0: left}, dict.fromkeys(range(copies), right), config)[0].score for copies in (1, 6))
    assert (one.value, one.p_value, one.threshold) == (six.value, six.p_value, six.threshold)


def test_permutations_depend_on_the_seed_and_the_number_of_items_alone() -> None:
    first, again, other = (
        [p.tolist() for p in permutations_of(9, CalibrationConfig(permutations=20, seed=s))] for s in (1, 1, 2)
    )
    assert first == again != other
    assert len({tuple(p) for p in first}) > 15
    assert all(sorted(p) == list(range(9)) for p in first)


def test_no_permutations_give_no_calibration_and_too_few_are_refused() -> None:
    assert calibrate(0.5, lambda _: 0.1, 5, CalibrationConfig(permutations=0)) is None
    with pytest.raises(UsageError, match="Use 0, or 19 or more"):
        CalibrationConfig(permutations=18)
    CalibrationConfig(permutations=19)
    with pytest.raises(UsageError, match="alpha is 1"):
        CalibrationConfig(alpha=1)
