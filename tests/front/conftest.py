"""One small HOME for all tests of the Python API: the toy world with pictures, in five shards."""

from __future__ import annotations

from pathlib import Path

import pytest

from infra import cli

SCENES = 60


@pytest.fixture(scope="session")
def home(tmp_path_factory: pytest.TempPathFactory) -> str:
    """HOME of `toyworld`: 39 scenes to train on, 13 in val, 8 in test; made by the command, without Ray."""
    folder = Path(tmp_path_factory.mktemp("front")) / "home"
    world = [f"source.scenes={SCENES}", "source.val=0.1", "source.test=0.2", "source.image_px=16"]
    sets = [word for text in world for word in ("--set", text)]
    words = ["ingest", "toyworld", *sets, "--scenes-per-shard", "14", "--num-cpus", "0", "--home", str(folder)]
    assert cli.run(words) == 0
    return str(folder)
