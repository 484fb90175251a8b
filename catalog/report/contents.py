"""Read everything that the report shows, except pictures, from one snapshot of the catalog.

Invariant: reading is bounded. Counts come from the shard table, never from captions; a curve has at most CURVE_POINTS
points, which are rows of the catalog.
"""

from __future__ import annotations

import datetime
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

from catalog.lake import lake
from catalog.lake.lake import Lake
from catalog.report.encoders import Encoder, Run, read_encoders, read_runs
from catalog.report.scores import Score, read_scores
from catalog.rows.alignments import DIFFERENCE
from catalog.rows.theory import Check, latest_checks
from catalog.versions.current import current_versions

CURVE_POINTS: Final = 400
CURVES: Final = ("loss", "inv", "sigreg", "effective_rank", "validation_loss")


@dataclass(frozen=True, kw_only=True)
class SplitCounts:
    """One split of the current version of a dataset. captions_per_scene: scenes by number of captions."""

    dataset: str
    version: str
    split: str
    scenes: int
    captions: int
    texts_read: int
    texts_kept: int
    rejects: int
    shards: int
    bytes: int
    rejects_by_reason: Mapping[str, int]
    captions_per_scene: Mapping[int, int]


@dataclass(frozen=True, kw_only=True)
class Contents:
    """All that a page is made of, but for pictures. snapshot: of the catalog as it was read, with its time."""

    snapshot: int
    snapshot_time: datetime.datetime
    versions: Mapping[str, str]
    parts: Sequence[SplitCounts]
    runs: Mapping[str, Run]
    encoders: Mapping[str, Encoder]
    scores: Sequence[Score]
    differences: Sequence[Score]
    "Paired differences of two of them."
    curves: Mapping[tuple[str, str], Sequence[tuple[int, float]]]
    "(run id, metric) -> (step, value)."
    checks: Mapping[str, Check]
    "Of the theorems, the newest of each kind."


def read_contents(reader: Lake) -> Contents:
    """Everything, of one snapshot."""
    reader.connection.execute("BEGIN TRANSACTION")
    try:
        runs = read_runs(reader)
        encoders = read_encoders(reader, runs)
        snapshot, time = _snapshot(reader)
        rows = read_scores(reader, encoders)
        return Contents(
            snapshot=snapshot,
            snapshot_time=time,
            versions=current_versions(reader),
            parts=_parts(reader),
            runs=runs,
            encoders=encoders,
            scores=[score for score in rows if not score.metric.endswith(DIFFERENCE)],
            differences=[score for score in rows if score.metric.endswith(DIFFERENCE)],
            curves=_curves(reader),
            checks=latest_checks(reader),
        )
    finally:
        reader.connection.execute("ROLLBACK")


def _snapshot(reader: Lake) -> tuple[int, datetime.datetime]:
    name = lake.quote(lake.ALIAS)
    query = f"""SELECT snapshot_id, snapshot_time FROM ducklake_snapshots({name})
        WHERE snapshot_id = (SELECT id FROM ducklake_current_snapshot({name}))"""
    number, time = reader.rows(query)[0]
    return int(number), time


def _parts(reader: Lake) -> list[SplitCounts]:
    query = """SELECT dataset, version, split, sum(scenes)::BIGINT AS scenes, sum(captions)::BIGINT AS captions,
        sum(texts_read)::BIGINT AS texts_read, sum(texts_kept)::BIGINT AS texts_kept, sum(rejects)::BIGINT AS rejects,
        count(*) AS shards, sum(bytes)::BIGINT AS bytes FROM main.shards GROUP BY ALL ORDER BY ALL"""
    reasons, numbers = (_histogram(reader, column) for column in ("rejects_by_reason", "captions_per_scene"))
    found = []
    for row in reader.records(query):
        place = (row["dataset"], row["split"])
        found.append(SplitCounts(**row, rejects_by_reason=reasons[place], captions_per_scene=numbers[place]))
    return found


def _histogram(reader: Lake, column: str) -> Mapping[tuple[str, str], dict[Any, int]]:
    """(dataset, split) -> sums of a map column of the shards, by key."""
    query = f"""SELECT dataset, split, e.key, sum(e.value)::BIGINT FROM
        (SELECT dataset, split, unnest(map_entries({column})) AS e FROM main.shards) GROUP BY ALL ORDER BY ALL"""
    found: dict[tuple[str, str], dict[Any, int]] = defaultdict(dict)
    for dataset, split, key, count in reader.rows(query):
        found[dataset, split][key] = count
    return found


def _curves(reader: Lake) -> dict[tuple[str, str], list[tuple[int, float]]]:
    names = ", ".join(map(lake.quote, CURVES))
    query = f"""SELECT run_id, name, step, value FROM (SELECT *, count(*) OVER (PARTITION BY run_id, name) AS n,
            row_number() OVER (PARTITION BY run_id, name ORDER BY step) AS place
            FROM main.metrics WHERE name IN ({names}) AND isfinite(value))
        WHERE place = n OR (place - 1) % greatest(1, ceil(n / {CURVE_POINTS - 1})::BIGINT) = 0
        ORDER BY run_id, name, step"""
    found: dict[tuple[str, str], list[tuple[int, float]]] = defaultdict(list)
    for run_id, name, step, value in reader.rows(query):
        found[run_id, name].append((step, value))
    return dict(found)
