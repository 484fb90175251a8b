"""Columns that the rows of align, rotate and probe have in common, and a row as JSON shows it."""

from __future__ import annotations

import dataclasses
import time
from typing import Any, Final

from catalog.rows.alignments import AlignmentRow
from catalog.rows.embeddings import EmbeddingRecord
from indexing.sets.leakage import Leakage, Unknown
from infra.version import code_version

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


def shared_columns(score: Any) -> dict[str, Any]:
    """The fields of a score (a dataclass) whose names are columns of an `AlignmentRow`."""
    columns = {column.name for column in dataclasses.fields(AlignmentRow)}
    return {field.name: getattr(score, field.name) for field in dataclasses.fields(score) if field.name in columns}


def columns_of(left: EmbeddingRecord, right: EmbeddingRecord, leaked: Leakage | Unknown | None) -> dict[str, Any]:
    """Columns of an `AlignmentRow` about its two sets, their training, the code and the time."""
    # Samples and tokens are those of the side that knows them, the left one first.
    trained = right if left.samples is None and right.samples is not None else left
    return {
        "left_id": left.embedding_id,
        "left_name": left.name,
        "right_id": right.embedding_id,
        "right_name": right.name,
        "samples": trained.samples,
        "tokens": trained.tokens,
        "leakage": leaked.share if isinstance(leaked, Leakage) else None,
        "code_version": code_version(),
        "created_at": time.time(),
        **place_of(left, right),
    }
