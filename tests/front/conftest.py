"""One small HOME for all tests of the Python API: the toy world with pictures, in five shards."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.front import examples


@pytest.fixture(scope="session")
def home(tmp_path_factory: pytest.TempPathFactory) -> str:
    """HOME of `toyworld`: 39 scenes to train on, 13 in val, 8 in test; made by the command, without Ray."""
    folder = str(Path(tmp_path_factory.mktemp("front")) / "home")
    examples.ingest(folder)
    return folder


@pytest.fixture
def tiny() -> dict[str, Any]:
    """Settings of a training that takes a second."""
    return dict(examples.TINY)


@pytest.fixture(scope="session")
def trained_home(home: str) -> str:
    """`home` with the run `first` and its vectors of the scenes of `train`, made by the commands."""
    examples.train(home)
    return home
