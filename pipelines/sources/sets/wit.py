"""WIT-1024 in the layout of `minhuh/prh`, the set on which vision and language models are compared.

Two layouts are read: parquet with pictures inside, and pictures with a `metadata.jsonl` beside them.
Invariant: a scene is named by its picture's path without ending, or by the picture's sha256 where no path is known.
Rows are sorted as text (image_0, image_1, image_10), so a row number would name another picture in another copy. Every
row is one scene, and two rows of one name fail. The first text is the caption; the others are contexts.
"""

from __future__ import annotations

import hashlib
import itertools
import posixpath
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Final

import pyarrow as pa
import pyarrow.compute as pc

from infra import storage
from infra.errors import InputError
from pipelines.records import Batch, Input, Piece, Source, Survey
from pipelines.sources.formats import arrow_columns, footers
from pipelines.sources.formats.arrow_columns import as_url
from pipelines.sources.formats.documents import encode, json_lines, text_of
from pipelines.sources.formats.embedded_images import (
    PICTURE_BATCH_BYTES,
    PICTURE_ROWS,
    WRITERS,
    embedded_image,
    is_picture,
    picture_columns,
)
from pipelines.sources.formats.names import base, listed
from pipelines.sources.formats.rows import Record, Text, batches, malformed
from pipelines.sources.options import FALLBACK_SPLIT

PICTURE: Final = "image"
TEXT: Final = "text"
CONTEXT: Final = "context"
METADATA: Final = "metadata.jsonl"
PICTURE_ENDS: Final = (".jpg", ".jpeg", ".png", ".webp", ".gif", ".bmp", ".tif", ".tiff")


@dataclass(frozen=True, kw_only=True)
class Listing(Input):
    """A `metadata.jsonl` with the pictures that lie beside or below it."""

    pictures: tuple[Input, ...] = ()

    @property
    def files(self) -> tuple[Input, ...]:
        """The listing and its pictures, whose bytes go into the dataset."""
        return (self, *self.pictures)


@dataclass(frozen=True, kw_only=True)
class Wit(Source):
    """WIT in the layout of `minhuh/prh`: a picture and the list [caption, page description, section description]."""

    contexts: bool = False
    "Keep descriptions of page and section as captions of the role `alt`; the public comparison reads no such text."
    pictures: bool = True
    "Take the pictures too."

    name = "wit"
    grouped = False

    @property
    def writers(self) -> Mapping[str, str]:
        """Pillow, when pictures are taken."""
        return WRITERS if self.pictures else {}

    def reads(self, name: str) -> bool:
        """Parquet, `metadata.jsonl`, and pictures when they are taken."""
        name = name.lower()
        return name.endswith(".parquet") or name == METADATA or (self.pictures and name.endswith(PICTURE_ENDS))

    def survey(self, inputs: Sequence[Input], limit: int | None) -> Survey:
        """Footers of parquet; all lines of a listing.

        Raises InputError for a wrong column, and for inputs of neither layout or of both.
        """
        every = sorted(inputs, key=lambda source: source.uri)
        tables = [source for source in every if source.uri.endswith(".parquet")]
        listings = [source for source in every if base(source.uri) == METADATA]
        if bool(tables) == bool(listings):
            found = "both parquet and metadata.jsonl are" if tables else "neither parquet nor metadata.jsonl is"
            uris = listed([source.uri for source in every])
            raise InputError(f"Of WIT, {found} among the inputs ({uris}). Name the files of one layout.")
        pieces = self._of_tables(tables, limit) if tables else self._of_listings(listings, every, limit)
        meanings = {PICTURE: "image" if self.pictures else "scene id", TEXT: "text:human"}
        if self.contexts:
            meanings[TEXT] = "text:human, then text:alt"
        layout = "parquet" if tables else "pictures with metadata.jsonl"
        rows = sum(piece.stop - piece.start for piece in pieces)
        return Survey(format=f"WIT ({layout}), {rows:,} rows", pieces=pieces, columns=meanings)

    def read(self, piece: Piece) -> Iterator[Batch]:
        """Rows of one piece."""
        source = piece.input_as(Input)
        if isinstance(source, Listing):
            yield from batches(source.uri, self._listed_records(source, piece.start, piece.stop))
        else:
            yield from self._read_table(source, piece.start, piece.stop)

    # --- parquet

    def _of_tables(self, tables: Sequence[Input], limit: int | None) -> list[Piece]:
        found = footers.footers(tables)
        for footer in found:
            self._check(footer)
        return [piece for footer, rows in footers.limited(found, limit) for piece in self._pieces(footer.input, rows)]

    def _pieces(self, source: Input, rows: int) -> Iterator[Piece]:
        step = PICTURE_ROWS if self.pictures else footers.PIECE_ROWS
        for start in range(0, rows, step):
            stop = min(start + step, rows)
            yield Piece(input=source, start=start, stop=stop, scenes_by_split={FALLBACK_SPLIT: stop - start})

    def _check(self, footer: footers.Footer) -> None:
        hint = "Is it the subset `wit_1024` of minhuh/prh?"
        footers.check_type(footer, TEXT, arrow_columns.is_texts, "a text or a list of texts", hint)
        footers.check_type(footer, PICTURE, is_picture, "pictures as struct<bytes, path>", hint)

    def _read_table(self, source: Input, start: int, stop: int) -> Iterator[Batch]:
        for first, rows in footers.read_rows(source, start, stop, [PICTURE, TEXT], batch_bytes=PICTURE_BATCH_BYTES):
            picture, text = rows.column(PICTURE), rows.column(TEXT)
            paths: list[str | None] = [None] * rows.num_rows
            if picture.type.get_field_index("path") >= 0:
                paths = arrow_columns.as_text(pc.struct_field(picture, "path"))[0].to_pylist()
            columns = arrow_columns.address(source, first, rows.num_rows, FALLBACK_SPLIT)
            columns["source_id"] = pa.array(_ids(paths, picture), pa.large_string())
            columns["image_uri"] = pa.array(paths, pa.large_string())
            if self.pictures:
                columns |= picture_columns(picture, PICTURE)
            is_list = arrow_columns.is_text_list(text.type)
            captions = pc.list_slice(text, 0, 1, return_fixed_size_list=False) if is_list else text
            texts = [arrow_columns.text_column(captions, TEXT, "human")]
            if is_list and self.contexts:
                texts.append(_contexts(pc.list_slice(text, 1, return_fixed_size_list=False)))
            yield arrow_columns.batch(columns, texts)

    # --- a folder of pictures

    def _of_listings(self, listings: Sequence[Input], every: Sequence[Input], limit: int | None) -> list[Piece]:
        pieces: list[Piece] = []
        for listing in listings:
            left = None if limit is None else limit - sum(piece.stop - piece.start for piece in pieces)
            names = [_file_name(value) for _, (_, _, value) in zip(_numbers(left), json_lines(listing), strict=False)]
            folder = listing.uri[: -len(METADATA)]
            named = {folder + name for name in names if name}
            beside = tuple(i for i in every if i.uri in named and self.pictures)
            source = Listing(uri=listing.uri, url=listing.url, pictures=beside)
            pieces += self._pieces(source, len(names))
        return pieces

    def _listed_records(self, source: Listing, start: int, stop: int) -> Iterator[Record]:
        folder = source.uri[: -len(METADATA)]
        urls = {picture.uri.removeprefix(folder): picture.url for picture in source.pictures}
        for row, (_, raw, value) in enumerate(itertools.islice(json_lines(source), start, stop), start):
            name = _file_name(value)
            if not isinstance(value, dict) or not name:
                detail = value if isinstance(value, str) else "no `file_name` of a picture"
                yield malformed(FALLBACK_SPLIT, row, raw, detail)
                continue
            uri = as_url(encode(name))
            columns: dict[str, Any] = {"image_uri": uri}
            if name in urls:
                columns |= embedded_image(storage.read_bytes(urls[name])).columns("file_name")
            missing = f"missing_image: {uri} does not lie beside {base(source.uri)}"
            texts = self._texts(value.get(TEXT), missing if self.pictures and name not in urls else None)
            yield Record(source_id=_stem(uri), split=FALLBACK_SPLIT, row=row, texts=texts, columns=columns)

    def _texts(self, value: Any, missing: str | None) -> Iterator[Text]:
        texts = value if isinstance(value, list) else [value]
        for place, text in enumerate(texts if self.contexts else texts[:1]):
            if place and text is None:
                continue
            field, role = (f"{TEXT}[0]", "human") if place == 0 else (f"{CONTEXT}[{place - 1}]", "alt")
            data, broken = text_of(text, f"`{field}`")
            yield field, role, data, broken or missing


def _contexts(column: pa.Array) -> arrow_columns.TextColumn:
    """The texts without nulls: a page without a description has lost no caption."""
    texts = arrow_columns.text_column(column, CONTEXT, "alt")
    valid = texts.text.is_valid()
    mask = valid.to_numpy(zero_copy_only=False)
    return replace(texts, record=texts.record[mask], field=texts.field[mask], text=texts.text.filter(valid))


def _ids(paths: Sequence[str | None], picture: pa.Array) -> list[str | None]:
    """The path without ending; where there is none, the sha256 of the picture; null without either."""
    # Pictures are hashed only where a path is missing: hashing reads every byte of the batch.
    if all(paths):
        return [_stem(path) for path in paths]
    data = pc.struct_field(picture, "bytes").to_pylist()
    hashes = [None if raw is None else hashlib.sha256(raw).hexdigest() for raw in data]
    return [_stem(path) or found for path, found in zip(paths, hashes, strict=True)]


def _file_name(value: Any) -> str:
    """`image_1.jpg` of an object of the listing; nothing when it names no picture."""
    name = value.get("file_name") if isinstance(value, dict) else None
    return posixpath.normpath(name) if isinstance(name, str) and _stem(name) else ""


def _numbers(limit: int | None) -> Iterator[int]:
    """0, 1, ... up to the limit."""
    return itertools.count() if limit is None else iter(range(max(0, limit)))


def _stem(path: str | None) -> str:
    """`folder/image_10` of `folder/image_10.jpg`; nothing without an ending."""
    return path.rpartition(".")[0].removeprefix("./") if path and "." in path.rsplit("/", 1)[-1].lstrip(".") else ""
