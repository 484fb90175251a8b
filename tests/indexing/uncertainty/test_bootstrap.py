"""`indexing.uncertainty.bootstrap`: draws are paired and reproducible, and intervals cover what they say they cover."""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np
import pytest

from indexing.uncertainty import bootstrap
from indexing.uncertainty.bootstrap import BootstrapConfig, difference_interval, mean_interval, weighted_values
from infra.errors import UsageError


def test_an_interval_of_ones_and_zeros_is_that_of_the_binomial() -> None:
    """n = 400, p = .2: standard error .02, so the interval reaches 1.96 x .02 to either side."""
    values = np.repeat([1.0, 0.0], [80, 320])
    found = mean_interval(values, BootstrapConfig())
    assert found.value == pytest.approx(0.2)
    assert found.low == pytest.approx(0.1608, abs=0.005)
    assert found.high == pytest.approx(0.2392, abs=0.005)


def test_the_same_seed_gives_the_same_interval_and_another_one_another() -> None:
    values = np.random.default_rng(0).normal(size=77)
    one, again, other = (mean_interval(values, BootstrapConfig(draws=500, seed=s)) for s in (3, 3, 4))
    assert one == again != other


def test_a_difference_is_paired() -> None:
    """Two systems that differ by .1 on every item differ by exactly .1 in every draw, however much the items differ."""
    base = np.random.default_rng(1).normal(scale=10, size=50)
    found = difference_interval(base + 0.1, base, BootstrapConfig(draws=1_000))
    assert (found.value, found.low, found.high) == pytest.approx((0.1, 0.1, 0.1))


def test_a_ratio_of_items_that_count_alike_is_their_mean_and_items_that_do_not_count_are_not_drawn() -> None:
    config = BootstrapConfig(draws=300)
    values = np.random.default_rng(2).normal(size=41)
    alike = bootstrap.ratio_interval(3 * values, np.full(41, 3.0), config)
    tops, bottoms = (np.append(part, np.zeros(9)) for part in (values, np.ones(41)))
    padded, plain = bootstrap.ratio_interval(tops, bottoms, config), mean_interval(values, config)
    for found in (alike, padded):
        assert dataclasses.astuple(found) == pytest.approx(dataclasses.astuple(plain))
    heavy = bootstrap.ratio_interval(np.array([9.0, 0.0]), np.array([9.0, 1.0]), config)
    assert heavy.value == 0.9 and (heavy.low, heavy.high) == (0.0, 1.0)
    with pytest.raises(ZeroDivisionError):
        bootstrap.ratio_interval(np.zeros(2), np.zeros(2), config)


def test_weights_are_the_counts_of_the_same_draws() -> None:
    config = BootstrapConfig(draws=300)
    values = np.random.default_rng(2).normal(size=41)
    weighted = weighted_values(lambda w_NB: values @ w_NB / 41, 41, config)
    assert weighted == pytest.approx(bootstrap.resampled_means(values[None], config)[0])


def test_a_statistic_over_pairs_is_asked_once_for_the_same_draws(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bootstrap, "BLOCK_DRAWS", 41 * 7)
    config = BootstrapConfig(draws=300)
    asked: list[tuple[int, ...]] = []

    def statistic(w_NB: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
        asked.append(w_NB.shape)
        return np.asarray(np.arange(41) @ w_NB)

    blocks = weighted_values(statistic, 41, config)
    assert len(asked) == 43
    assert np.array_equal(weighted_values(statistic, 41, config, at_once=True), blocks)
    assert asked[43:] == [(41, 300)]
    assert not len(weighted_values(statistic, 41, BootstrapConfig(draws=0), at_once=True)) and len(asked) == 44


def test_undefined_draws_give_no_interval() -> None:
    draws = np.array([0.1, np.nan] * 100)
    assert bootstrap.interval_of(0.2, draws, BootstrapConfig()).low is None
    assert mean_interval(np.ones(5), BootstrapConfig(draws=0)).high is None


def test_wrong_options_are_refused() -> None:
    with pytest.raises(UsageError, match="7 bootstrap draws"):
        BootstrapConfig(draws=7)
    with pytest.raises(UsageError, match="level of an interval is 95"):
        BootstrapConfig(level=95)
