"""One small HOME for all tests of the Python API: the toy world with pictures, in five shards."""

from __future__ import annotations

from pathlib import Path
from typing import Any

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


TINY = {
    "plan.epochs": 1,
    "plan.batch_global": 16,
    "plan.lanes": 4,
    "encoder.width": 32,
    "encoder.heads": 2,
    "encoder.ffn": 64,
    "encoder.layers": 1,
    "lejepa.n_directions": 32,
    "tokenizer.vocab_size": 512,
}
"""On top of the recipe tiny-cpu: two steps an epoch."""


@pytest.fixture
def tiny() -> dict[str, Any]:
    """Settings of a training that takes a second."""
    return dict(TINY)


@pytest.fixture(scope="session")
def trained_home(home: str) -> str:
    """`home` with the run `first` and its vectors of the scenes of `train`, made by the commands."""
    sets = [word for key, value in TINY.items() for word in ("--set", f"{key}={value}")]
    train = ["train", "--recipe", "tiny-cpu", "--dataset", "toyworld", "--run-id", "first", *sets, "--home", home]
    embed = ["embed", "--model", "run:first", "--dataset", "toyworld", "--split", "train", "--of", "scenes"]
    assert cli.run(train) == 0
    assert cli.run([*embed, "--num-cpus", "0", "--home", home]) == 0
    return home
