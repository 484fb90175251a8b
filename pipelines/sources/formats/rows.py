"""Records one at a time into batches, for inputs that Python must parse anyway (JSON, CSV, lines, the toy world).

Owns: the lists behind a batch under construction and when it is full. Does not own: parsing.
Invariant: a batch holds at most `BATCH_RECORDS` records and, but for its last record, `BATCH_BYTES` of texts and pictures.
"""

from __future__ import annotations

from typing import Any, Final

import pyarrow as pa

from pipelines.records import RECORDS, TEXTS, Batch
from pipelines.sources.formats.arrow_columns import BATCH_RECORDS

BATCH_BYTES: Final = 64 << 20

MALFORMED_FIELD: Final = "line"
"""Field of the one text that stands for a record which does not parse."""


class Builder:
    """A batch under construction: `record` opens a record, `text` adds a text to the last one, `build` empties it."""

    def __init__(self, source_uri: str) -> None:
        self._source_uri = source_uri
        self._clear()

    def _clear(self) -> None:
        self._columns: dict[str, list[Any]] = {name: [] for name in RECORDS.names if name != "source_uri"}
        self._texts: dict[str, list[Any]] = {name: [] for name in TEXTS.names}
        self._bytes = 0

    def record(self, source_id: str | None, split: str, source_row: int, **columns: Any) -> None:
        """Open a record. columns: the other columns of RECORDS, absent ones null."""
        last = len(self._columns["source_row"])
        for name, value in (("source_id", source_id), ("split", split), ("source_row", source_row), *columns.items()):
            column = self._columns[name]
            column.extend([None] * (last - len(column)))
            column.append(value)
        self._bytes += len(columns.get("image") or b"")

    def text(self, field: str, role: str, text: bytes | None, broken: str | None = None) -> None:
        """Add a text to the record that was opened last."""
        texts = self._texts
        texts["record"].append(len(self._columns["source_row"]) - 1)
        texts["field"].append(field)
        texts["role"].append(role)
        texts["text"].append(text)
        texts["broken"].append(broken)
        self._bytes += len(text or b"")

    def malformed(self, split: str, source_row: int, raw: bytes, detail: str) -> None:
        """Add a record that names no scene and holds one broken text: the raw line."""
        self.record(None, split, source_row)
        self.text(MALFORMED_FIELD, "human", raw, f"malformed_record: {detail}")

    @property
    def is_full(self) -> bool:
        """Whether the batch should be taken before the next record is opened."""
        return len(self._columns["source_row"]) >= BATCH_RECORDS or self._bytes >= BATCH_BYTES

    @property
    def is_empty(self) -> bool:
        """Whether no record was opened since the last `build`."""
        return not self._columns["source_row"]

    def build(self) -> Batch:
        """The batch so far; the next record starts another one."""
        rows = len(self._columns["source_row"])
        self._columns["source_uri"] = [self._source_uri] * rows
        records = pa.Table.from_arrays([_column(self._columns[f.name], f.type, rows) for f in RECORDS], schema=RECORDS)
        texts = self._texts
        columns = [_column(texts[f.name], f.type, len(texts["record"])) for f in TEXTS]
        self._clear()
        return Batch(records=records, texts=pa.Table.from_arrays(columns, schema=TEXTS))


def _column(values: list[Any], kind: pa.DataType, rows: int) -> pa.Array:
    values.extend([None] * (rows - len(values)))
    if pa.types.is_dictionary(kind):
        return pa.array(values, kind.value_type).dictionary_encode()
    return pa.array(values, kind)
