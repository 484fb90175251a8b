"""The command `goodviews overlap`: what it has found is printed, whatever becomes of the record."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from typer.testing import CliRunner

from catalog.lake import lake, lock
from catalog.overlap.commands import app
from infra.errors import ConflictError
from infra.home import Home
from tests.catalog.datasets import put_dataset

REPOSITORY = Path(__file__).parents[3]


def test_counts_that_cannot_be_recorded_are_printed_first(home: Home, monkeypatch: pytest.MonkeyPatch) -> None:
    put_dataset(home, "left", {"a": ["one word"], "b": ["two"]})
    put_dataset(home, "right", {"x": ["One word."]}, source="coco")
    monkeypatch.setattr("catalog.lake.transaction.commit_rows.__kwdefaults__", {"timeout_s": 0.2})
    words = ["left", "right", "--json", "--home", home.url, "--catalog", home.catalog]
    with lock.commit_lock(home):
        done = CliRunner().invoke(app, words)
    assert json.loads(done.stdout)["kinds"]["caption"]["left"]["scenes"] == 1
    assert done.exit_code != 0 and isinstance(done.exception, ConflictError)
    assert "is held by" in str(done.exception) and "shards" not in str(done.exception)


def test_counts_are_recorded_also_when_nobody_reads_them_to_the_end(home: Home) -> None:
    """`goodviews overlap A B | head` closes the pipe while the tables are printed."""
    put_dataset(home, "left", {"a": ["one word"]})
    put_dataset(home, "right", {"x": ["One word."]}, source="coco")
    read, write = os.pipe()
    os.close(read)
    words = ["overlap", "left", "right", "--home", home.url, "--catalog", home.catalog]
    command = [sys.executable, "-m", "infra.cli", *words]
    with os.fdopen(write, "wb") as closed:
        done = subprocess.run(command, stdout=closed, stderr=subprocess.PIPE, cwd=REPOSITORY, check=False)
    assert done.returncode != 0 and b"Traceback" not in done.stderr
    with lake.reading(home) as reader:
        assert reader.rows("SELECT shared FROM overlap_counts WHERE kind = 'caption'") == [(1,)]
