"""Ranks that would never come together are refused before anybody waits for them."""

from __future__ import annotations

from pathlib import Path

import pytest

from infra.errors import UsageError
from infra.session import Workers
from tests.trainer import training
from trainer.run import job
from trainer.run.launch import Cluster


def test_d14_more_ranks_than_the_cluster_has_room_for_are_refused_by_number(
    ray_workers: Workers, tmp_path: Path
) -> None:
    home = training.make_home(tmp_path / "home")
    with pytest.raises(UsageError, match=r"4 ranks need 3.6 CPUs, Ray has 2"):
        job.start(training.small_recipe("plan.epochs=1"), home, Cluster(num_workers=4), run_id="wide")
