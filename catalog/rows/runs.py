"""Runs in the catalog: the tables `runs` and `metrics`, each commit whole or not at all.

The truth about a run is in files below HOME/runs (`trainer.run.records`), from which these rows can be written again.
Invariant: a run has one row; a metric of a run, name and step has one value. Every write replaces what it overlaps, so
writing again after a kill or a resume changes nothing.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any, Final

import pyarrow as pa

from catalog.lake import lake
from catalog.lake.lake import Lake
from catalog.lake.lock import TIMEOUT_S
from catalog.lake.transaction import commit_rows
from infra.home import Home

METRICS: Final = pa.schema(
    [
        pa.field("step", pa.int64(), nullable=False),
        pa.field("name", pa.large_string(), nullable=False),
        pa.field("value", pa.float64(), nullable=False),
        pa.field("recorded_at", pa.timestamp("us", tz="UTC"), nullable=False),
    ]
)
"""Metrics of one run: the value `name` had after `step` steps."""

JSON_COLUMNS: Final = ("config", "dataset_versions")


@dataclass(frozen=True, kw_only=True)
class RunRow:
    """One row of `runs`. steps, samples and tokens are what has been done so far; times are seconds since the epoch."""

    run_id: str
    recipe: str
    objective: str
    config: Mapping[str, Any]
    dataset_versions: Mapping[str, str]
    plan_digest: str
    code_version: str
    seed: int
    ranks: int
    steps: int
    samples: int
    tokens: int
    status: str
    "running, finished or failed."
    url: str
    started_at: float
    snapshot_id: int | None = None
    "Of the catalog as the run found it; None once a rebuild has renumbered the snapshots."
    finished_at: float | None = None


def start_run(home: Home, row: RunRow) -> int:
    """Write the row of a run that starts (or goes on); returns the snapshot id that it is recorded with.

    row.snapshot_id: None takes the snapshot that is current before this commit.
    Raises ConflictError when the lock cannot be had, StorageError when the catalog cannot take the row.
    """

    def write(writer: Lake) -> int:
        snapshot = writer.current_snapshot() if row.snapshot_id is None else row.snapshot_id
        _put(writer, row, snapshot)
        return snapshot

    return commit_rows(home, f"start run {row.run_id}", write)


def append_metrics(home: Home, row: RunRow, rows: pa.Table, *, timeout_s: float = TIMEOUT_S) -> None:
    """Add metrics of a run and bring its row up to date, in one commit.

    rows: columns of `METRICS`. What the catalog holds of this run at or after their first step is replaced.
    Raises ConflictError when the lock cannot be had within `timeout_s`.
    """

    def write(writer: Lake) -> None:
        _put(writer, row, row.snapshot_id)
        _put_metrics(writer, row.run_id, rows)
        lake.sync_table(writer, "main", "metrics")

    commit_rows(home, f"metrics of run {row.run_id} to step {row.steps}", write, timeout_s=timeout_s)


def finish_run(home: Home, row: RunRow, rows: pa.Table) -> None:
    """Write the last row of a run and all of its metrics from the first step of `rows` on."""
    append_metrics(home, row, rows)


def _put(writer: Lake, row: RunRow, snapshot_id: int | None) -> None:
    if snapshot_id is None:
        known = writer.rows("SELECT snapshot_id FROM main.runs WHERE run_id = ?", [row.run_id])
        snapshot_id = known[0][0] if known else None
    values = {field.name: getattr(row, field.name) for field in fields(row)}
    values["snapshot_id"] = snapshot_id
    writer.connection.execute("DELETE FROM main.runs WHERE run_id = ?", [row.run_id])
    writer.insert("main.runs", values)


def _put_metrics(writer: Lake, run_id: str, rows: pa.Table) -> None:
    if rows.num_rows == 0:
        return
    first = min(rows.column("step").to_pylist())
    table = rows.cast(METRICS).add_column(0, "run_id", pa.array([run_id] * rows.num_rows, pa.large_string()))
    # Only when there is something: a DELETE that matches nothing still reads every file of the table.
    if writer.rows("SELECT 1 FROM main.metrics WHERE run_id = ? AND step >= ? LIMIT 1", [run_id, first]):
        writer.connection.execute("DELETE FROM main.metrics WHERE run_id = ? AND step >= ?", [run_id, first])
    writer.connection.register("incoming_metrics", table)
    writer.connection.execute("INSERT INTO main.metrics BY NAME SELECT * FROM incoming_metrics ORDER BY step, name")
    writer.connection.unregister("incoming_metrics")
