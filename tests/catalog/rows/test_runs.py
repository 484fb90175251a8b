"""`catalog.rows.runs`: one row a run, one value a metric and step, whatever is written again."""

from __future__ import annotations

import dataclasses
import datetime
from pathlib import Path

import pyarrow as pa
import pytest

from catalog.rows import runs
from infra.errors import InputError
from infra.home import Home, resolve
from tests.catalog.stored_rows import last_metrics, list_runs

ROW = runs.RunRow(
    run_id="r1",
    recipe="tiny-cpu",
    objective="lejepa",
    config={"seed": 1, "encoder": {"layers": 2}},
    dataset_versions={"toyworld": "abc"},
    plan_digest="d",
    code_version="0.1.0",
    seed=1,
    ranks=2,
    steps=0,
    samples=0,
    tokens=0,
    status="running",
    url="/home/runs/r1",
    started_at=1_700_000_000.0,
)


def metrics(values: dict[int, float], name: str = "loss") -> pa.Table:
    at = datetime.datetime(2026, 11, 30, tzinfo=datetime.UTC)
    rows = [{"step": s, "name": name, "value": v, "recorded_at": at} for s, v in values.items()]
    return pa.Table.from_pylist(rows, schema=runs.METRICS)


@pytest.fixture
def home(tmp_path: Path) -> Home:
    return resolve(str(tmp_path / "home"))


def test_a_run_has_one_row_from_start_to_finish(home: Home) -> None:
    snapshot = runs.start_run(home, ROW)
    runs.start_run(home, dataclasses.replace(ROW, snapshot_id=snapshot))
    done = dataclasses.replace(ROW, steps=9, samples=90, tokens=900, status="finished", finished_at=1_700_000_100.0)
    runs.finish_run(home, done, metrics({9: 1.5}))
    (found,) = list_runs(home)
    assert (found["status"], found["steps"], found["samples"], found["tokens"]) == ("finished", 9, 90, 900)
    assert found["snapshot_id"] == snapshot
    assert found["config"] == ROW.config and found["dataset_versions"] == ROW.dataset_versions
    assert last_metrics(home, "r1") == {"loss": 1.5}


def test_metrics_written_again_after_a_resume_replace_the_lost_future(home: Home) -> None:
    runs.start_run(home, ROW)
    runs.append_metrics(home, ROW, metrics({1: 5.0, 2: 4.0, 3: 3.0}))
    other = dataclasses.replace(ROW, run_id="r2")
    runs.append_metrics(home, other, metrics({2: 7.0, 4: 6.0}))
    runs.append_metrics(home, ROW, metrics({2: 4.5}))
    assert last_metrics(home, "r1") == {"loss": 4.5}
    assert last_metrics(home, "r2") == {"loss": 6.0}


def test_two_runs_are_listed_latest_first(home: Home) -> None:
    runs.start_run(home, ROW)
    runs.start_run(home, dataclasses.replace(ROW, run_id="r2", started_at=ROW.started_at + 1))
    assert [row["run_id"] for row in list_runs(home)] == ["r2", "r1"]


def test_an_unknown_run_and_an_absent_catalog_are_said_so(home: Home) -> None:
    with pytest.raises(InputError, match="no catalog"):
        list_runs(home)
    runs.start_run(home, ROW)
    with pytest.raises(InputError, match="knows no run 'r9'"):
        last_metrics(home, "r9")
