"""Alignment scores in the catalog: the table `alignments`, one row a number.

Invariant: the id of a row is a digest of what was scored, so scoring again replaces the row; every row has its n.
"""

from __future__ import annotations

import dataclasses
import hashlib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, fields
from typing import Any, Final

import orjson

from catalog.lake.lake import Lake
from catalog.lake.transaction import commit_rows
from infra import storage
from infra.home import Home
from infra.models import checkpoints

_IDENTITY: Final = (
    "left_id",
    "right_id",
    "left_layer",
    "right_layer",
    "dataset",
    "version",
    "split",
    "metric",
    "map",
    "k",
    "protocol",
    "selection",
    "seed",
    "pairs",
    "direction",
    "n",
    "scored",
)
DIFFERENCE: Final = "_difference"
"Ends the metric of a row that is a paired difference of two scores."

CHECKPOINT_COLUMNS: Final = {
    "untrained_value": checkpoints.UNTRAINED,
    "first_epoch_value": checkpoints.FIRST_EPOCH,
}
"Columns of a row that hold the same score at an earlier checkpoint of the run."

JSON_COLUMNS: Final = ("dataset_versions", "details")


@dataclass(frozen=True, kw_only=True)
class AlignmentRow:
    """One row of `alignments`.

    left_id, right_id: embedding sets; right_id is None for a probe, where right_name says what was probed.
    map: rotation, linear, ridge, mlp, random, shuffled or none. pairs: number of pairs that a map was fitted on.
    direction: of retrieval, left_to_right or right_to_left. value may be NaN. low, high: the bootstrap interval.
    leakage: share of the scored scenes that a training set holds, None where no training set is known.
    details: what has no column, as plain JSON. scored: digest of what was scored (`digest_of` of its keys and of what a
    map was fitted on); kept in `details`.
    """

    left_id: str
    left_name: str
    right_id: str | None
    right_name: str
    metric: str
    value: float
    n: int
    created_at: float
    code_version: str
    dataset_versions: Mapping[str, str]
    left_layer: int | None = None
    right_layer: int | None = None
    dataset: str | None = None
    version: str | None = None
    split: str | None = None
    map: str | None = None
    low: float | None = None
    high: float | None = None
    chance: float | None = None
    calibrated: float | None = None
    p_value: float | None = None
    k: int | None = None
    ties: float | None = None
    protocol: str | None = None
    selection: str | None = None
    leakage: float | None = None
    samples: int | None = None
    tokens: int | None = None
    untrained_value: float | None = None
    first_epoch_value: float | None = None
    seed: int | None = None
    snapshot_id: int | None = None
    pairs: int | None = None
    direction: str | None = None
    scored: str | None = None
    details: Mapping[str, Any] = field(default_factory=dict)

    @property
    def alignment_id(self) -> str:
        """16 hex digits of the sha256 of what the score is of; not of its value."""
        content = {name: getattr(self, name) for name in _IDENTITY}
        return hashlib.sha256(orjson.dumps(content, option=orjson.OPT_SORT_KEYS)).hexdigest()[:16]


def digest_of(*parts: Iterable[str]) -> str:
    """16 hex digits of the sha256 of lists of words; another order or another cut is another digest."""
    lists = [list(part) for part in parts]
    return hashlib.sha256(orjson.dumps(lists)).hexdigest()[:16]


def difference_row(row: AlignmentRow, baseline: tuple[str, str], found: Mapping[str, Any]) -> AlignmentRow:
    """The row of a paired difference: what `row` scores minus the same score of a baseline set.

    baseline: embedding id and name. found: value, low, high, and values, the two scores. Its metric ends in DIFFERENCE.
    """
    baseline_id, baseline_name = baseline
    return dataclasses.replace(
        row,
        metric=row.metric + DIFFERENCE,
        **{name: found[name] for name in ("value", "low", "high")},
        chance=0.0,
        calibrated=None,
        p_value=None,
        leakage=None,
        untrained_value=None,
        first_epoch_value=None,
        selection=f"{row.selection}; minus {baseline_name} ({baseline_id})",
        details={"rival_id": baseline_id, "rival_name": baseline_name, "values": list(found["values"])},
    )


def alignment_url(home: Home, alignment_id: str, *names: str) -> str:
    """URL below HOME/alignments/<alignment_id>, where a score keeps what a page shows of it."""
    return storage.join(home.url, "alignments", alignment_id, *names)


def record_alignments(home: Home, rows: Sequence[AlignmentRow]) -> int:
    """Write the rows in one commit, each in the place of an earlier one of its id; returns the snapshot before it.

    A row without snapshot_id takes that snapshot. Raises ConflictError when the lock cannot be had, StorageError when
    the catalog cannot take the rows.
    """

    def write(writer: Lake) -> int:
        current = writer.current_snapshot()
        for row in rows:
            _put(writer, row, current)
        return current

    return commit_rows(home, f"{len(rows)} scores of {rows[0].left_name}" if rows else "no scores", write)


def _put(writer: Lake, row: AlignmentRow, snapshot: int) -> None:
    values = {f.name: getattr(row, f.name) for f in fields(row)} | {"alignment_id": row.alignment_id}
    # What was scored has no column: rows of earlier releases would lack it.
    values["details"] = {**row.details, "scored": values.pop("scored")}
    values["snapshot_id"] = snapshot if row.snapshot_id is None else row.snapshot_id
    writer.connection.execute("DELETE FROM main.alignments WHERE alignment_id = ?", [row.alignment_id])
    writer.insert("main.alignments", values)
