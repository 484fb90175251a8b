"""`trainer.run.alarms`: effective rank and spread on known shapes, and alarms that ring exactly when they should."""

from __future__ import annotations

import math
import re

import pytest
import torch

from infra.errors import GoodviewsError
from trainer.run import recipe
from trainer.run.alarms import AlarmConfig, SpeedAlarm, collapse, measure, refuse_not_finite

CONFIG = AlarmConfig()


def gaussian(n: int, d: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(n, d, generator=torch.Generator().manual_seed(seed))


def test_white_vectors_have_full_rank_and_spread() -> None:
    health = measure(gaussian(4000, 16))
    assert health.effective_rank == pytest.approx(16, rel=0.01) and health.spread == pytest.approx(1.0, rel=0.01)
    assert collapse(health, CONFIG) is None


def test_vectors_on_a_plane_have_rank_two() -> None:
    health = measure(gaussian(4000, 2) @ torch.linalg.qr(gaussian(16, 2, 1))[0].T)
    assert health.effective_rank == pytest.approx(2, rel=0.01)


def test_equal_vectors_are_a_collapse() -> None:
    health = measure(gaussian(1, 64).expand(256, 64))
    assert health.effective_rank == pytest.approx(1.0) and health.spread < 1e-5
    assert "collapsed" in str(collapse(health, CONFIG))


def test_a_cone_far_from_the_origin_is_a_collapse_though_its_rank_is_full() -> None:
    health = measure(gaussian(512, 64) * 0.01 + 5.0)
    assert health.rank_share > 0.5
    assert "spread" in str(collapse(health, CONFIG))


def test_rank_is_judged_by_what_few_vectors_can_have() -> None:
    assert collapse(measure(gaussian(8, 512)), CONFIG) is None


def test_vectors_that_are_not_finite_are_a_collapse_too() -> None:
    assert collapse(measure(torch.full((8, 4), math.nan)), CONFIG) is not None


@pytest.mark.parametrize(("loss", "norm"), [(math.nan, 1.0), (1.0, math.inf)])
def test_a_number_that_is_not_finite_ends_the_run(loss: float, norm: float) -> None:
    with pytest.raises(GoodviewsError, match="Step 7") as caught:
        refuse_not_finite(loss, norm, 7)
    config = recipe.to_config(recipe.load("tiny-cpu"))
    for section, key in re.findall(r"\b([a-z]+)\.([a-z_]+)", str(caught.value)):
        assert key in config[section]
    refuse_not_finite(1.0, 1.0, 7)


def test_a_fall_in_speed_rings_and_goes_on_ringing() -> None:
    alarm = SpeedAlarm(CONFIG)
    assert [alarm.check(100.0 + i) for i in range(6)] == [None] * 6
    assert alarm.check(60.0) is None
    assert "from usually" in str(alarm.check(40.0)) and alarm.check(40.0) is not None


def test_slow_first_windows_are_no_alarm() -> None:
    alarm = SpeedAlarm(CONFIG)
    assert [alarm.check(speed) for speed in (1.0, 100.0, 1.0, 100.0)] == [None] * 4
