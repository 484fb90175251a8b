"""Flickr30k as parquet on the Hugging Face hub: one row a picture, with the list of its captions.

Both public layouts are read: `nlphuji/flickr30k` with a split column, `lmms-lab/flickr30k` without.
Invariant: pictures, which lie in the same row groups as captions, are read only when they are asked for; then a piece
has at most PICTURE_ROWS rows.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from typing import Final

import pyarrow as pa

from pipelines.records import Batch, Input, Piece
from pipelines.sources.formats import arrow_columns, footers
from pipelines.sources.formats.embedded_images import PICTURE_BATCH_BYTES, PICTURE_ROWS, is_picture, picture_columns
from pipelines.sources.formats.names import base, picture_id

CAPTION: Final = "caption"
NAME: Final = "filename"
SPLIT: Final = "split"
PICTURE: Final = "image"

_SPLIT = re.compile(r"([a-z]+)-\d+-of-\d+\.parquet")


def split_by_name(source: Input) -> str:
    """`test` of `test-00000-of-00009.parquet`; nothing for another name."""
    match = _SPLIT.fullmatch(base(source.uri))
    return match[1] if match else ""


def pieces(
    source: Input, left: int | None, split: Callable[[str | None, str | None], str], pictures: bool
) -> Iterator[tuple[Piece, set[str]]]:
    """Pieces of one file with the scene ids in them. Reads the names and splits alone.

    Raises InputError for a column that is absent or of another type.
    """
    footer = footers.footers([source])[0]
    _check(footer, pictures)
    rows = footer.rows if left is None else min(left, footer.rows)
    cuts = list(footers.cuts(footer.row_groups, rows))
    if pictures:
        cuts = [(at, min(at + PICTURE_ROWS, stop)) for start, stop in cuts for at in range(start, stop, PICTURE_ROWS)]
    for start, stop in cuts:
        counts: dict[str, int] = {}
        ids: set[str] = set()
        for first, batch in footers.read_rows(source, start, stop, [NAME, SPLIT]):
            for place, (id_, name) in enumerate(zip(*_named(batch, split), strict=True)):
                counts[name] = counts.get(name, 0) + 1
                ids.add(id_ if id_ is not None else f"#{first + place}")
        yield Piece(input=source, start=start, stop=stop, scenes_by_split=dict(sorted(counts.items()))), ids


def read(
    source: Input, start: int, stop: int, split: Callable[[str | None, str | None], str], pictures: bool
) -> Iterator[Batch]:
    """Rows [start, stop) of one file."""
    wanted = [CAPTION, NAME, SPLIT, *([PICTURE] if pictures else [])]
    limit = PICTURE_BATCH_BYTES if pictures else footers.BATCH_BYTES
    for first, batch in footers.read_rows(source, start, stop, wanted, batch_bytes=limit):
        ids, splits = _named(batch, split)
        columns = arrow_columns.address(source, first, batch.num_rows, "")
        columns["source_id"] = pa.array(ids, pa.large_string())
        columns["split"] = pa.array(splits, pa.string()).dictionary_encode()
        columns["image_uri"] = arrow_columns.as_text(batch.column(NAME))[0]
        if pictures:
            columns |= picture_columns(batch.column(PICTURE), PICTURE)
        yield arrow_columns.batch(columns, [arrow_columns.text_column(batch.column(CAPTION), CAPTION, "human")])


def _named(batch: pa.RecordBatch, split: Callable[[str | None, str | None], str]) -> tuple[list[str | None], list[str]]:
    """Scene ids and splits of the rows."""
    names = arrow_columns.as_text(batch.column(NAME))[0].to_pylist()
    ids = [picture_id(name) or None if name else None for name in names]
    named: list[str | None] = [None] * len(ids)
    if SPLIT in batch.schema.names:
        named = arrow_columns.as_text(batch.column(SPLIT))[0].fill_null("").to_pylist()
    return ids, [split(id_, name) for id_, name in zip(ids, named, strict=True)]


def _check(footer: footers.Footer, pictures: bool) -> None:
    footers.check_type(footer, CAPTION, arrow_columns.is_texts, "a text or a list of texts", "Is it Flickr30k?")
    for name in (NAME, SPLIT):
        if name == NAME or name in footer.schema.names:
            footers.check_type(footer, name, arrow_columns.is_text, "a text", "Is it Flickr30k?")
    if pictures:
        footers.check_type(footer, PICTURE, is_picture, "a column of pictures", "Leave source.pictures out.")
