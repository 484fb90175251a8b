"""Arrow columns of an input into RECORDS and TEXTS, whole columns at a time.

Invariant: Python loops over rows only in batches that hold bytes outside UTF-8 where a text must be UTF-8.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Final

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from numpy.typing import NDArray

from catalog.schema import SPLIT_PATTERN
from pipelines.records import RECORDS, TEXTS, Batch, Input

BATCH_RECORDS: Final = 65_536

_ESCAPED = re.compile("[\udc80-\udcff]")


def is_text(kind: pa.DataType) -> bool:
    """Whether a column of this type holds texts (or nothing at all, which Arrow types as null)."""
    if pa.types.is_dictionary(kind):
        kind = kind.value_type
    tests = ("is_string", "is_large_string", "is_string_view", "is_binary", "is_large_binary", "is_binary_view")
    return pa.types.is_null(kind) or any(getattr(pa.types, test)(kind) for test in tests)


def is_text_list(kind: pa.DataType) -> bool:
    """Whether a column of this type holds lists of texts."""
    listed = pa.types.is_list(kind) or pa.types.is_large_list(kind) or pa.types.is_fixed_size_list(kind)
    return bool(listed) and is_text(kind.value_type)


def is_texts(kind: pa.DataType) -> bool:
    """Whether a column of this type holds texts or lists of texts."""
    return is_text(kind) or is_text_list(kind)


def is_number(kind: pa.DataType) -> bool:
    """Whether a column of this type holds numbers (or nothing at all)."""
    return bool(pa.types.is_integer(kind) or pa.types.is_floating(kind) or pa.types.is_null(kind))


def as_bytes(column: pa.Array) -> pa.Array:
    """The column as large_binary: the bytes in the file, not validated."""
    return column.cast(pa.large_binary())


def as_text(column: pa.Array) -> tuple[pa.Array, NDArray[np.bool_] | None]:
    """The column as large_string that is UTF-8, and which rows were not (None: all were).

    Parquet does not promise UTF-8. Those rows are written as `as_url` does.
    """
    raw = as_bytes(column)
    # Arrow validates a whole batch in one pass; Python looks at single rows only when that fails.
    try:
        return raw.cast(pa.large_string()), None
    except pa.ArrowInvalid:
        values = raw.to_pylist()
    texts = [None if value is None else as_url(value) for value in values]
    wrong = np.array([t is not None and t.encode() != v for v, t in zip(values, texts, strict=True)], np.bool_)
    return pa.array(texts, pa.large_string()), wrong


def as_url(raw: bytes) -> str:
    """The bytes as text; one outside UTF-8 becomes `%NN`, which is its form in a URL."""
    return _ESCAPED.sub(_percent, raw.decode("utf-8", "surrogateescape"))


def _percent(match: re.Match[str]) -> str:
    return f"%{ord(match[0]) - 0xDC00:02X}"


SHA256_RULES: Final = {"image_sha256": "2"}
"In versions whose digests `as_sha256` read: before rule 2, rows in the middle of a row group lost theirs."


def as_sha256(column: pa.Array) -> pa.Array:
    """The column as lower-case sha256 in hex; null where it is not 64 hex digits."""
    text, _ = as_text(column)
    # Not `ascii_lower`: Arrow 26 reads the wrong bytes for a slice that was cast to the large type.
    lower = pc.utf8_lower(text)
    fits = pc.match_substring_regex(lower, "^[0-9a-f]{64}$")
    return pc.if_else(pc.fill_null(fits, False), lower, pa.scalar(None, pa.large_string()))


def as_int32(column: pa.Array) -> pa.Array:
    """A column of numbers as int32; null where the number is negative, broken or too large."""
    if pa.types.is_null(column.type):
        return column.cast(pa.int32())
    if pa.types.is_floating(column.type):
        # Arrow compares no half floats, and 2^31 is no number of the smaller kinds.
        column = column.cast(pa.float64())
    inside = pc.and_(pc.greater_equal(column, 0), pc.less(column, 2**31))
    return pc.if_else(pc.fill_null(inside, False), column, pa.scalar(None, column.type)).cast(pa.int32(), safe=False)


def as_split(column: pa.Array, fallback: str) -> tuple[pa.Array, NDArray[np.bool_] | None]:
    """The column as a dictionary of split names, and which rows name none (None: all do); those get `fallback`."""
    encoded = pc.dictionary_encode(as_text(column)[0])
    names = encoded.dictionary.to_pylist()
    legal = np.array([*(SPLIT_PATTERN.fullmatch(name) is not None for name in names), False], np.bool_)
    # Null rows get a code of their own behind the names; `legal` and `kept` have an entry for it.
    codes = pc.fill_null(encoded.indices, len(names)).to_numpy(zero_copy_only=False)
    kept = [name if ok else fallback for name, ok in zip([*names, fallback], legal, strict=True)]
    # Two names may now be one, and Arrow wants a dictionary without repeats.
    places = {name: place for place, name in enumerate(dict.fromkeys(kept))}
    recoded = np.array([places[name] for name in kept], np.int32)[codes]
    wrong = ~legal[codes]
    split = pa.DictionaryArray.from_arrays(pa.array(recoded), pa.array(list(places), pa.string()))
    return split, wrong if bool(wrong.any()) else None


def constant(value: str, rows: int) -> pa.Array:
    """`value` in every row, as a dictionary of one word."""
    return pa.DictionaryArray.from_arrays(pa.array(np.zeros(rows, np.int32)), pa.array([value], pa.string()))


def address(source: Input, first: int, rows: int, split: str) -> dict[str, pa.Array]:
    """The columns `split`, `source_uri` and `source_row` of rows [first, first + rows) of a file."""
    return {
        "split": constant(split, rows),
        "source_uri": constant(source.uri, rows),
        "source_row": pa.array(np.arange(first, first + rows, dtype=np.int64)),
    }


@dataclass(frozen=True, kw_only=True)
class TextColumn:
    """The texts of one input column. `record` (T,): their records, ascending; `field` (T,): places in `names`."""

    record: NDArray[np.int64]
    field: NDArray[np.int32]
    names: Sequence[str]
    role: str
    text: pa.Array


def text_column(column: pa.Array, name: str, role: str) -> TextColumn:
    """The texts of a column: one a row, or one an element (`name[3]`) when it holds lists.

    A null list is one absent text; an empty list is none.
    """
    rows = len(column)
    if is_text(column.type):
        record = np.arange(rows, dtype=np.int64)
        field = np.zeros(rows, np.int32)
        return TextColumn(record=record, field=field, names=[name], role=role, text=as_bytes(column))
    if pa.types.is_fixed_size_list(column.type):
        column = column.cast(pa.large_list(column.type.value_type))
    lengths = pc.fill_null(pc.list_value_length(column), 0).to_numpy(zero_copy_only=False).astype(np.int64)
    absent = column.is_null().to_numpy(zero_copy_only=False)
    # A null list shows as one absent text, so that it is accounted for; an empty list shows as none.
    shown = np.where(absent, 1, lengths)
    record = np.repeat(np.arange(rows, dtype=np.int64), shown)
    # The place of each text inside its list: its place among all texts less that of the first text of its list.
    place = np.arange(len(record)) - np.repeat(np.cumsum(shown) - shown, shown)
    names = [name, *(f"{name}[{i}]" for i in range(int(lengths.max(initial=0))))]
    field = np.where(absent[record], 0, place + 1).astype(np.int32)
    # The place of each text among the flattened values. A null list has no value there, so its text is null.
    source = np.repeat(np.cumsum(lengths) - lengths, shown) + place
    values = as_bytes(column.flatten())
    text = values.take(pa.array(source, pa.int64(), mask=absent[record]))
    return TextColumn(record=record, field=field, names=names, role=role, text=text)


def text_table(columns: Sequence[TextColumn], *, rows: int, broken: pa.Array | None = None) -> pa.Table:
    """TEXTS of a batch of `rows` records: by record, then in the order of the columns.

    broken: `reason: detail` by record, null where the record is sound.
    """
    if not columns:
        return TEXTS.empty_table()
    names = [name for c in columns for name in c.names]
    # The dictionaries of field names are concatenated, so the codes of each column move by the names before it.
    firsts = np.cumsum([0, *(len(c.names) for c in columns)])
    record = np.concatenate([c.record for c in columns])
    field = np.concatenate([c.field + np.int32(first) for c, first in zip(columns, firsts, strict=False)])
    role = np.repeat(np.arange(len(columns), dtype=np.int32), [len(c.record) for c in columns])
    text = pa.concat_arrays([c.text for c in columns])
    if len(columns) > 1:
        order = _order(columns, record, rows)
        record, field, role, text = record[order], field[order], role[order], text.take(pa.array(order))
    roles = {name: place for place, name in enumerate(dict.fromkeys(c.role for c in columns))}
    role = np.array([roles[c.role] for c in columns], np.int32)[role]
    return pa.Table.from_arrays(
        [
            pa.array(record),
            pa.DictionaryArray.from_arrays(pa.array(field), pa.array(names, pa.string())),
            pa.DictionaryArray.from_arrays(pa.array(role), pa.array(list(roles), pa.string())),
            text,
            pa.nulls(len(record), pa.large_string()) if broken is None else broken.take(pa.array(record)),
        ],
        schema=TEXTS,
    )


def _order(columns: Sequence[TextColumn], record: NDArray[np.int64], rows: int) -> NDArray[np.int64]:
    if all(len(c.record) == rows and len(c.names) == 1 for c in columns):
        # One text a row in every column: a transposition, without sorting.
        return np.arange(len(record)).reshape(len(columns), rows).T.ravel()
    return np.argsort(record, kind="stable")


def batch(columns: Mapping[str, pa.Array], texts: Sequence[TextColumn], broken: pa.Array | None = None) -> Batch:
    """A batch from the columns of RECORDS that there are (the others are null) and its columns of texts."""
    rows = len(columns["source_row"])
    arrays = [columns[f.name] if f.name in columns else pa.nulls(rows, f.type) for f in RECORDS]
    records = pa.Table.from_arrays(arrays, schema=RECORDS)
    return Batch(records=records, texts=text_table(texts, rows=rows, broken=broken))
