"""Facts that the rows of align, rotate and probe have in common, and a row as JSON shows it."""

from __future__ import annotations

import dataclasses
from typing import Any, Final

from catalog.rows.alignments import AlignmentRow
from catalog.rows.embeddings import EmbeddingRecord

_FIRST: Final = ("metric", "value", "low", "high", "chance", "calibrated", "p_value", "k", "n", "ties")


def plain(row: AlignmentRow) -> dict[str, Any]:
    """A row as JSON shows it: short names, details beside the columns."""
    values = {name: value for name, value in dataclasses.asdict(row).items() if name != "details"}
    shown = {
        "alignment_id": row.alignment_id,
        "left": values.pop("left_name"),
        "right": values.pop("right_name"),
        "layers": [values.pop("left_layer"), values.pop("right_layer")],
        **values,
        **row.details,
    }
    return {name: shown[name] for name in sorted(shown, key=lambda name: name not in _FIRST)}


def place_of(left: EmbeddingRecord, right: EmbeddingRecord) -> dict[str, Any]:
    """dataset, version and split of a score where both sides agree or one names none; all dataset versions."""
    found: dict[str, Any] = {}
    for name in ("dataset", "version", "split"):
        values = {getattr(record, name) for record in (left, right)} - {None}
        found[name] = values.pop() if len(values) == 1 else None
    found["dataset_versions"] = {**right.dataset_versions, **left.dataset_versions}
    return found


def trained_on(left: EmbeddingRecord, right: EmbeddingRecord) -> tuple[int | None, int | None]:
    """Samples and tokens of the side that knows them, the left one first."""
    record = right if left.samples is None and right.samples is not None else left
    return record.samples, record.tokens
