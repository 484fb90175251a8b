"""Rows of parquet into batches, by the layout of a table, whole columns at a time.

Schemas may differ between files in column order, nullability and all-null columns (C8, C11, C12).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Final

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from numpy.typing import NDArray

from infra.errors import InputError
from pipelines.records import Batch, Input, Piece
from pipelines.sources.formats import arrow_columns, footers
from pipelines.sources.tables import column_roles
from pipelines.sources.tables.column_roles import Layout

LARGEST_WHOLE_FLOAT: Final = 2**53
"""Above it a float does not tell whole numbers apart, so it cannot be an id."""


@dataclass(frozen=True, kw_only=True)
class ParquetTable:
    """A parquet input, by its footer."""

    footer: footers.Footer

    def columns(self) -> list[str]:
        """The names of all columns."""
        return list(self.footer.schema.names)

    def guessable(self) -> list[str]:
        """Columns that could hold captions: texts, or lists of texts."""
        return [field.name for field in self.footer.schema if arrow_columns.is_texts(field.type)]

    def check(self, layout: Layout) -> None:
        """Raises InputError when a column is absent or has a type that its meaning does not allow."""
        column_roles.check_columns(layout, self.columns(), uri=self.footer.input.uri)
        for name, _ in layout.texts:
            self._check(name, arrow_columns.is_texts, "a text or a list of texts", "Name a caption column.")
        for column in (layout.image, layout.image_sha256, layout.split):
            self._check(column, arrow_columns.is_text, "a text", "Pictures inside a table are not read.")
        for column in (layout.width, layout.height):
            self._check(column, arrow_columns.is_number, "a number", "Name a column of pixels.")
        self._check(layout.id, _can_be_id, "a text or a whole number", "Name the column that names the scene.")

    def _check(self, column: str | None, fits: Callable[[pa.DataType], bool], wanted: str, hint: str) -> None:
        if column is not None:
            footers.check_type(self.footer, column, fits, wanted, hint)

    def pieces(self, layout: Layout, limit: int | None) -> list[Piece]:
        """Ranges of rows along row groups; reads the split column when there is one."""
        source = self.footer.input
        rows = self.footer.rows if limit is None else min(limit, self.footer.rows)
        pieces = []
        for start, stop in footers.cuts(self.footer.row_groups, rows):
            counts = {layout.split_name: stop - start}
            if layout.split is not None:
                counts = self._splits(start, stop, layout, layout.split)
            pieces.append(Piece(input=source, start=start, stop=stop, scenes_by_split=counts))
        return pieces

    def _splits(self, start: int, stop: int, layout: Layout, column: str) -> dict[str, int]:
        counts: dict[str, int] = {}
        for _, rows in footers.read_rows(self.footer.input, start, stop, [column]):
            text, _ = arrow_columns.as_text(rows.column(column))
            for found in pc.value_counts(text).to_pylist():
                name = found["values"] or ""
                counts[name] = counts.get(name, 0) + found["counts"]
        return column_roles.splits_found(counts, layout, uri=self.footer.input.uri)

    def read(self, start: int, stop: int, layout: Layout) -> Iterator[Batch]:
        """The records of rows [start, stop)."""
        for first, rows in footers.read_rows(self.footer.input, start, stop, layout.names):
            yield _batch(rows, first, layout, self.footer.input)


def _can_be_id(kind: pa.DataType) -> bool:
    return arrow_columns.is_text(kind) or arrow_columns.is_number(kind)


def _batch(rows: pa.RecordBatch, first: int, layout: Layout, source: Input) -> Batch:
    columns = arrow_columns.address(source, first, rows.num_rows, layout.split_name)
    broken = _Broken(rows.num_rows)
    if layout.id is None:
        numbers = columns["source_row"].cast(pa.large_string())
        source_id = pc.binary_join_element_wise(
            pa.scalar(source.uri, pa.large_string()), numbers, pa.scalar("#", pa.large_string())
        )
    else:
        source_id, wrong = _ids(rows.column(layout.id), layout.id, source.uri)
        broken.add(wrong, f"malformed_record: the scene id in `{layout.id}` is not UTF-8")
    if layout.split is not None:
        columns["split"], wrong = arrow_columns.as_split(rows.column(layout.split), layout.split_name)
        broken.add(wrong, f"malformed_record: `{layout.split}` names no split")
    columns["source_id"] = broken.without(source_id)
    if layout.image is not None:
        columns["image_uri"] = arrow_columns.as_text(rows.column(layout.image))[0]
    if layout.image_sha256 is not None:
        columns["image_sha256"] = arrow_columns.as_sha256(rows.column(layout.image_sha256))
    if layout.width is not None:
        columns["width"] = arrow_columns.as_int32(rows.column(layout.width))
    if layout.height is not None:
        columns["height"] = arrow_columns.as_int32(rows.column(layout.height))
    texts = [arrow_columns.text_column(rows.column(name), name, role) for name, role in layout.texts]
    return arrow_columns.batch(columns, texts, broken.reasons)


class _Broken:
    """Reasons of rejects by record; None while every record is sound, which is nearly always."""

    def __init__(self, rows: int) -> None:
        self._rows = rows
        self.reasons: pa.Array | None = None

    def add(self, wrong: NDArray[np.bool_] | None, reason: str) -> None:
        if wrong is not None:
            before = pa.nulls(self._rows, pa.large_string()) if self.reasons is None else self.reasons
            self.reasons = pc.if_else(pa.array(wrong), pa.scalar(reason, pa.large_string()), before)

    def without(self, source_id: pa.Array) -> pa.Array:
        """The ids, null where the record is broken: it must not begin a scene."""
        if self.reasons is None:
            return source_id
        return pc.if_else(self.reasons.is_null(), source_id, pa.scalar(None, pa.large_string()))


def _ids(column: pa.Array, name: str, uri: str) -> tuple[pa.Array, NDArray[np.bool_] | None]:
    """Scene ids as text, null where empty, and which rows are not UTF-8."""
    kind = column.type
    if pa.types.is_floating(kind):
        # pandas turns whole numbers into floats when one of them is missing.
        whole = pc.and_(pc.equal(column, pc.floor(column)), pc.less(pc.abs(column), LARGEST_WHOLE_FLOAT))
        # NaN is how pandas writes the missing ones.
        column = pc.if_else(pc.is_nan(column), pa.scalar(None, kind), column)
        if not pc.all(pc.if_else(column.is_null(), True, whole)).as_py():
            raise InputError(
                f"Column {name!r} of {uri} holds numbers that are not whole or pass 2^53, so they cannot name scenes. "
                "Name another column as `source.id`."
            )
        column = column.cast(pa.int64())
    if pa.types.is_integer(column.type):
        return column.cast(pa.large_string()), None
    text, wrong = arrow_columns.as_text(column)
    return pc.if_else(pc.equal(text, ""), pa.scalar(None, pa.large_string()), text), wrong
