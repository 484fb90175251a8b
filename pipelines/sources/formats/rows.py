"""Records one at a time into batches, for inputs that Python must parse anyway (JSON, CSV, lines, tars, the toy world).

Invariant: a batch holds at most `BATCH_RECORDS` records and, except for its last record, at most `BATCH_BYTES` of texts
and pictures.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, Final, TypeAlias

import pyarrow as pa

from pipelines.records import RECORDS, TEXTS, Batch
from pipelines.sources.formats.arrow_columns import BATCH_RECORDS

BATCH_BYTES: Final = 64 << 20

MALFORMED_FIELD: Final = "line"
"""Field of the one text that stands for a record which does not parse."""

Text: TypeAlias = tuple[str, str, bytes | None, str | None]
"""(field, role, bytes as read or None, None or `reason: detail` when the reader rejects it)."""


@dataclass(kw_only=True, slots=True)
class Record:
    """One row of RECORDS and its texts. row: `source_row`. columns: the other columns of RECORDS, absent ones null."""

    source_id: str | None
    split: str
    row: int
    texts: Iterable[Text] = ()
    columns: Mapping[str, Any] = field(default_factory=dict)


def malformed(split: str, row: int, raw: bytes, detail: str) -> Record:
    """A record that names no scene and holds one broken text: the raw line."""
    text = (MALFORMED_FIELD, "human", raw, f"malformed_record: {detail}")
    return Record(source_id=None, split=split, row=row, texts=[text])


def batches(source_uri: str, records: Iterable[Record]) -> Iterator[Batch]:
    """The records, in order, in batches of bounded size."""
    builder = _Builder(source_uri)
    for record in records:
        if builder.is_full:
            yield builder.build()
        builder.add(record)
    if builder.rows:
        yield builder.build()


def one_batch(source_uri: str, records: Iterable[Record]) -> Batch:
    """All the records in one batch."""
    builder = _Builder(source_uri)
    for record in records:
        builder.add(record)
    return builder.build()


class _Builder:
    """The lists behind a batch under construction; `build` empties them."""

    def __init__(self, source_uri: str) -> None:
        self._source_uri = source_uri
        self._clear()

    def _clear(self) -> None:
        self.rows = self._bytes = 0
        self._columns: dict[str, list[Any]] = {name: [] for name in RECORDS.names if name != "source_uri"}
        self._texts: dict[str, list[Any]] = {name: [] for name in TEXTS.names}

    def add(self, record: Record) -> None:
        fixed = (("source_id", record.source_id), ("split", record.split), ("source_row", record.row))
        for name, value in (*fixed, *record.columns.items()):
            column = self._columns[name]
            # Rows since the last one that had this column.
            column.extend([None] * (self.rows - len(column)))
            column.append(value)
        self._bytes += len(record.columns.get("image") or b"")
        for text in record.texts:
            for values, value in zip(self._texts.values(), (self.rows, *text), strict=True):
                values.append(value)
            self._bytes += len(text[2] or b"")
        self.rows += 1

    @property
    def is_full(self) -> bool:
        """Whether the batch should be taken before the next record is added."""
        return self.rows >= BATCH_RECORDS or self._bytes >= BATCH_BYTES

    def build(self) -> Batch:
        """The batch so far; the next record starts another one."""
        rows, texts = self.rows, self._texts
        self._columns["source_uri"] = [self._source_uri] * rows
        records = pa.Table.from_arrays([_column(self._columns[f.name], f.type, rows) for f in RECORDS], schema=RECORDS)
        columns = [_column(texts[f.name], f.type, len(texts["record"])) for f in TEXTS]
        self._clear()
        return Batch(records=records, texts=pa.Table.from_arrays(columns, schema=TEXTS))


def _column(values: list[Any], kind: pa.DataType, rows: int) -> pa.Array:
    values.extend([None] * (rows - len(values)))
    if pa.types.is_dictionary(kind):
        return pa.array(values, kind.value_type).dictionary_encode()
    return pa.array(values, kind)
