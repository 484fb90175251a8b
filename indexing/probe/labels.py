"""Labels of scenes: from a file, or from the true states that a source knows.

Invariant: a scene has one label; two that differ are refused, not overwritten.

    labels.csv, labels.parquet     a column of scene keys and one of labels
    states:sky, states:things.0.kind, states:things.count     an attribute of the state, lists by number or by length
"""

from __future__ import annotations

from typing import Any, Final

import orjson
import pyarrow as pa
import pyarrow.csv
import pyarrow.parquet as pq

from catalog.lake import lake
from catalog.rows.embeddings import EmbeddingRecord
from infra import storage
from infra.errors import InputError, UsageError
from infra.home import Home

STATES: Final = "states:"
LENGTH: Final = "count"


def read_labels(home: Home, source: str, record: EmbeddingRecord, columns: tuple[str, str]) -> dict[str, str]:
    """Label of each scene key. columns: names of the key column and of the label column of a file.

    Raises InputError for a file without these columns, for a scene with two labels, and for an unknown attribute.
    """
    if source.startswith(STATES):
        return _from_states(home, source.removeprefix(STATES), record)
    table = _read(source, columns)
    for column in columns:
        if column not in table.column_names:
            raise InputError(
                f"{source} has no column {column!r}; it has {', '.join(table.column_names)}. "
                "Name them with --key and --label."
            )
    labels: dict[str, str] = {}
    for key, label in zip(*(table[column].to_pylist() for column in columns), strict=True):
        if key is None or label is None:
            continue
        if labels.setdefault(str(key), str(label)) != str(label):
            raise InputError(
                f"{source} gives scene {key!r} two labels, {labels[str(key)]!r} and {label!r}. Keep one of the rows."
            )
    if not labels:
        raise InputError(f"{source} holds no labelled scene. Give a file with rows of a key and a label.")
    return labels


def name_of(source: str, columns: tuple[str, str]) -> str:
    """The name of labels in a row. The digest and the column are part of it, so two files or columns have two names."""
    if source.startswith(STATES):
        return source
    digest = storage.digest(storage.absolute(source)).sha256[:16]
    return f"{source.rstrip('/').rsplit('/', 1)[-1]}:{columns[1]} ({digest})"


def _read(source: str, columns: tuple[str, str]) -> pa.Table:
    data = pa.BufferReader(storage.read_bytes(storage.absolute(source)))
    # As text: a key `0012` is not the number 12, and the label `NA` is not an absent one.
    as_text = pyarrow.csv.ConvertOptions(
        column_types=dict.fromkeys(columns, pa.string()), strings_can_be_null=True, null_values=[""]
    )
    try:
        return (
            pq.read_table(data) if source.endswith(".parquet") else pyarrow.csv.read_csv(data, convert_options=as_text)
        )
    except pa.ArrowInvalid as error:
        kind = "parquet" if source.endswith(".parquet") else "CSV with a header"
        raise InputError(f"{source} is not {kind} ({error}). Give a CSV or a parquet file.") from error


def _from_states(home: Home, attribute: str, record: EmbeddingRecord) -> dict[str, str]:
    if record.dataset is None or record.version is None:
        raise InputError(
            f"{record.name!r} names no dataset, so its scenes have no known states. "
            "Embed it with `goodviews embed`, or give a label file."
        )
    with lake.reading(home) as reader:
        query = """SELECT scene_key, state FROM versions.states
            WHERE dataset = ? AND version = ? AND (? IS NULL OR split = ?)"""
        rows = reader.rows(query, [record.dataset, record.version, record.split, record.split])
    if not rows:
        raise InputError(
            f"The source of {record.dataset}@{record.version} knows no true states of split {record.split}. "
            "Give a label file."
        )
    states = {str(key): orjson.loads(state) for key, state in rows}
    values = ((key, attribute_of(state, attribute)) for key, state in states.items())
    labels = {key: value for key, value in values if value is not None}
    if not labels:
        known = ", ".join(sorted(next(iter(states.values()))))
        raise UsageError(
            f"No state of {record.dataset} has a plain value at {attribute!r}. States hold {known}; "
            "write for example states:place or states:things.0.kind."
        )
    return labels


def attribute_of(state: Any, attribute: str) -> str | None:
    """The plain value at a dotted path, None without one; `.count` of a list is its length."""
    for word in attribute.split("."):
        if isinstance(state, dict) and word in state:
            state = state[word]
        elif isinstance(state, list) and word.isdigit() and int(word) < len(state):
            state = state[int(word)]
        elif isinstance(state, list) and word == LENGTH:
            state = len(state)
        else:
            return None
    return None if state is None or isinstance(state, (dict, list)) else str(state)
