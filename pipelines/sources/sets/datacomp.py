"""Metadata of DataComp: web pictures by URL with their alt text, in parquet files named by 32 hex digits.

Owns: its columns. Does not own: the identity of a picture on the web (`recap`), placeholders (grouping), the subsets in .npy files.
Invariant: a scene is named by the sha256 of the picture, else by DataComp's uid, so that it joins Recap-DataComp-1B; never by a row number.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Final

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from infra.errors import InputError
from pipelines.records import Batch, Input, Piece, Source, Survey
from pipelines.sources.formats import arrow_columns, footers
from pipelines.sources.formats.names import NO_WRITERS, listed, nearest
from pipelines.sources.tables.column_roles import FALLBACK_SPLIT

TEXT: Final = "text"
IDS: Final = {"sha256": "scene id, image sha256", "uid": "scene id where sha256 is missing"}
OTHERS: Final = {"url": "image uri", "original_width": "image width", "original_height": "image height"}


@dataclass(frozen=True, kw_only=True)
class DataComp(Source):
    """DataComp metadata parquet. No options: everything is of the split train."""

    name = "datacomp"
    bad_passes = 5
    grouped = True
    needs_input = True
    repairs_byte_escapes = False
    writers = NO_WRITERS

    def reads(self, name: str) -> bool:
        """Parquet; the .npz of CLIP features beside each is left out."""
        return name.endswith(".parquet")

    def survey(self, inputs: Sequence[Input], limit: int | None) -> Survey:
        """Footers only. Raises InputError for a file without texts or without ids."""
        files = sorted((i for i in inputs if i.uri.endswith(".parquet")), key=lambda i: i.uri)
        if not files:
            message = f"DataComp metadata is parquet, and none of the inputs is: {listed([i.uri for i in inputs])}. Name the folder of its `<32 hex digits>.parquet` files."
            raise InputError(message)
        found = footers.footers(files)
        for footer in found:
            _check(footer)
        pieces, left = [], limit
        for footer in found:
            rows = footer.rows if left is None else min(left, footer.rows)
            left = None if left is None else left - rows
            for start, stop in footers.cuts(footer.row_groups, rows):
                counts = {FALLBACK_SPLIT: stop - start}
                pieces.append(Piece(input=footer.input, start=start, stop=stop, scenes_by_split=counts))
        every = {name for footer in found for name in footer.schema.names}
        meanings = {TEXT: "text:alt", **IDS, **OTHERS}
        return Survey(
            format=f"DataComp metadata, {len(found)} files, {sum(f.rows for f in found):,} rows by their footers",
            pieces=pieces,
            columns={name: meaning for name, meaning in meanings.items() if name in every},
        )

    def read(self, piece: Piece) -> Iterator[Batch]:
        """Rows of one piece."""
        source = piece.input
        if source is None:
            raise InputError("A piece of DataComp names no input.")
        for first, rows in footers.read_rows(source, piece.start, piece.stop, [TEXT, *IDS, *OTHERS]):
            count = rows.num_rows
            held = {name: rows.column(name) for name in rows.schema.names}
            sha256 = arrow_columns.as_sha256(held["sha256"]) if "sha256" in held else pa.nulls(count, pa.large_string())
            uid = arrow_columns.as_text(held["uid"])[0] if "uid" in held else pa.nulls(count, pa.large_string())
            uid = pc.if_else(pc.equal(pc.utf8_trim_whitespace(uid), ""), pa.scalar(None, pa.large_string()), uid)
            columns = {
                "source_id": pc.coalesce(sha256, uid),
                "split": arrow_columns.constant(FALLBACK_SPLIT, count),
                "source_uri": arrow_columns.constant(source.uri, count),
                "source_row": pa.array(np.arange(first, first + count, dtype=np.int64)),
                "image_sha256": sha256,
            }
            if "url" in held:
                columns["image_uri"] = arrow_columns.as_text(held["url"])[0]
            for name, meaning in (("original_width", "width"), ("original_height", "height")):
                if name in held:
                    columns[meaning] = arrow_columns.as_int32(held[name])
            yield arrow_columns.batch(count, columns, [arrow_columns.strand(held[TEXT], TEXT, "alt")])


def _check(footer: footers.Footer) -> None:
    known, uri = footer.schema.names, footer.input.uri
    if TEXT not in known:
        message = f"{uri} has no column {TEXT!r}.{nearest(TEXT, known)} Its columns: {listed(known)}. Read other parquet with the source `table`."
        raise InputError(message)
    if not any(name in known for name in IDS):
        message = f"{uri} has neither `sha256` nor `uid`, so its rows name no picture. Its columns: {listed(known)}."
        raise InputError(message)
    for name in (TEXT, *IDS, "url"):
        if name in known and not arrow_columns.is_text(kind := footers.column_type(footer, name)):
            raise InputError(f"Column {name} of {uri} is {kind}, not text. Is it metadata of DataComp?")
    for name in ("original_width", "original_height"):
        if name in known:
            kind = footers.column_type(footer, name)
            if not (pa.types.is_integer(kind) or pa.types.is_floating(kind) or pa.types.is_null(kind)):
                raise InputError(f"Column {name} of {uri} is {kind}, not a number. Is it metadata of DataComp?")
