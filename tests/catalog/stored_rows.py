"""Rows of the catalog as tests compare them: read back whole, with JSON decoded."""

from __future__ import annotations

from typing import Any

from catalog.lake import lake
from infra.errors import InputError
from infra.home import Home


def list_runs(home: Home) -> list[dict[str, Any]]:
    """All rows of `runs`, latest start first. Raises InputError without a catalog."""
    with lake.reading(home) as reader:
        query = "SELECT * FROM main.runs ORDER BY started_at DESC, run_id"
        return reader.records(query, decode=("config", "dataset_versions"))


def last_metrics(home: Home, run_id: str) -> dict[str, float]:
    """The latest value of each metric of a run, by name. Raises InputError when the catalog does not know the run."""
    with lake.reading(home) as reader:
        if not reader.rows("SELECT 1 FROM main.runs WHERE run_id = ?", [run_id]):
            raise InputError(f"The catalog knows no run {run_id!r}. `goodviews runs list` shows those it knows.")
        query = "SELECT name, arg_max(value, step) FROM main.metrics WHERE run_id = ? GROUP BY name ORDER BY name"
        return {str(name): float(value) for name, value in reader.rows(query, [run_id])}


def list_alignments(home: Home) -> list[dict[str, Any]]:
    """All rows of `alignments`, newest first. Raises InputError without a catalog."""
    with lake.reading(home) as reader:
        query = "SELECT * FROM main.alignments ORDER BY created_at DESC, alignment_id"
        return reader.records(query, decode=("dataset_versions", "details"))
