"""WIT-1024 in the layout of `minhuh/prh`, the set on which vision and language models are compared.

Owns: its two layouts (parquet with pictures inside; pictures with a `metadata.jsonl` beside them), which of its texts are captions.
Does not own: the encoding of pictures (`pictures`).
Invariant: a scene is named by its picture's path without ending, or by the picture's hash where no path is known, since rows are
sorted as text (image_0, image_1, image_10) and a row number would name another picture in another copy. A row is a scene of its own,
and two of one name fail. The first text is the caption; descriptions of page and section are contexts.
"""

from __future__ import annotations

import hashlib
import itertools
import posixpath
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any, Final

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from infra import storage
from infra.errors import InputError
from pipelines.records import Batch, Input, Piece, Source, Survey
from pipelines.sources.formats import arrow_columns, footers
from pipelines.sources.formats.arrow_columns import as_url
from pipelines.sources.formats.documents import encode, json_lines, name_of, show
from pipelines.sources.formats.embedded_images import WRITERS, carried
from pipelines.sources.formats.names import NO_WRITERS, base, listed
from pipelines.sources.formats.rows import Builder
from pipelines.sources.sets.flickr_tables import PICTURE_BATCH_BYTES, PICTURE_ROWS, is_picture, picture_columns
from pipelines.sources.tables.column_roles import FALLBACK_SPLIT

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
    """WIT as `minhuh/prh` has it: a picture and the list [caption, page description, section description]."""

    contexts: bool = False
    "Keep page and section descriptions as captions of the role `alt`; the public comparison reads the first text alone."
    pictures: bool = True
    "Take the pictures too."

    name = "wit"
    bad_passes = 5
    grouped = False
    needs_input = True
    repairs_byte_escapes = False
    writers = NO_WRITERS

    def __post_init__(self) -> None:
        if self.pictures:
            object.__setattr__(self, "writers", WRITERS)

    def reads(self, name: str) -> bool:
        """Parquet, `metadata.jsonl`, and pictures when they are taken."""
        name = name.lower()
        return name.endswith(".parquet") or name == METADATA or (self.pictures and name.endswith(PICTURE_ENDS))

    def survey(self, inputs: Sequence[Input], limit: int | None) -> Survey:
        """Footers of parquet; all lines of a listing. Raises InputError for a wrong column, and for inputs of neither layout."""
        every = sorted(inputs, key=lambda source: source.uri)
        tables = [source for source in every if source.uri.endswith(".parquet")]
        listings = [source for source in every if base(source.uri) == METADATA]
        if bool(tables) == bool(listings):
            found = "both parquet and metadata.jsonl are" if tables else "neither parquet nor metadata.jsonl is"
            message = (
                f"Of WIT, {found} among the inputs ({listed([i.uri for i in every])}). Name the files of one layout."
            )
            raise InputError(message)
        pieces = self._of_tables(tables, limit) if tables else self._of_listings(listings, every, limit)
        meanings = {PICTURE: "image" if self.pictures else "scene id", TEXT: "text:human"}
        if self.contexts:
            meanings[TEXT] = "text:human, then text:alt"
        layout = "parquet" if tables else "pictures with metadata.jsonl"
        rows = sum(piece.stop - piece.start for piece in pieces)
        return Survey(format=f"WIT ({layout}), {rows:,} rows", pieces=pieces, columns=meanings)

    def read(self, piece: Piece) -> Iterator[Batch]:
        """Rows of one piece."""
        if isinstance(piece.input, Listing):
            yield from self._read_listing(piece.input, piece.start, piece.stop)
        elif piece.input is not None:
            yield from self._read_table(piece.input, piece.start, piece.stop)
        else:
            raise InputError("A piece of WIT names no input.")

    # --- parquet

    def _of_tables(self, tables: Sequence[Input], limit: int | None) -> list[Piece]:
        pieces, left = [], limit
        for footer in footers.footers(tables):
            self._check(footer)
            rows = footer.rows if left is None else min(left, footer.rows)
            left = None if left is None else left - rows
            step = PICTURE_ROWS if self.pictures else footers.PIECE_ROWS
            for start in range(0, rows, step):
                stop = min(start + step, rows)
                counts = {FALLBACK_SPLIT: stop - start}
                pieces.append(Piece(input=footer.input, start=start, stop=stop, scenes_by_split=counts))
        return pieces

    def _check(self, footer: footers.Footer) -> None:
        kind = footers.column_type(footer, TEXT)
        if not arrow_columns.is_text(kind) and not arrow_columns.is_text_list(kind):
            raise InputError(f"Column {TEXT!r} of {footer.input.uri} is {kind}, not a text or a list of texts.")
        if not is_picture(kind := footers.column_type(footer, PICTURE)):
            message = f"Column {PICTURE!r} of {footer.input.uri} is {kind}, not pictures as struct<bytes, path>. Is it the subset `wit_1024` of minhuh/prh?"
            raise InputError(message)

    def _read_table(self, source: Input, start: int, stop: int) -> Iterator[Batch]:
        for first, rows in footers.read_rows(source, start, stop, [PICTURE, TEXT], batch_bytes=PICTURE_BATCH_BYTES):
            count = rows.num_rows
            picture, text = rows.column(PICTURE), rows.column(TEXT)
            numbers = np.arange(first, first + count, dtype=np.int64)
            paths: list[str | None] = [None] * count
            if picture.type.get_field_index("path") >= 0:
                paths = arrow_columns.as_text(pc.struct_field(picture, "path"))[0].to_pylist()
            columns: dict[str, Any] = {
                "source_id": pa.array(_ids(paths, picture), pa.large_string()),
                "split": arrow_columns.constant(FALLBACK_SPLIT, count),
                "source_uri": arrow_columns.constant(source.uri, count),
                "source_row": pa.array(numbers),
                "image_uri": pa.array(paths, pa.large_string()),
            }
            if self.pictures:
                columns |= picture_columns(picture)
            strands = [arrow_columns.strand(text, TEXT, "human")]
            if arrow_columns.is_text_list(text.type):
                strands = [arrow_columns.strand(pc.list_slice(text, 0, 1, return_fixed_size_list=False), TEXT, "human")]
                if self.contexts:
                    strands.append(_contexts(pc.list_slice(text, 1, return_fixed_size_list=False)))
            yield arrow_columns.batch(count, columns, strands)

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
            step = PICTURE_ROWS if self.pictures else footers.PIECE_ROWS
            for start in range(0, len(names), step):
                stop = min(start + step, len(names))
                counts = {FALLBACK_SPLIT: stop - start}
                pieces.append(Piece(input=source, start=start, stop=stop, scenes_by_split=counts))
        return pieces

    def _read_listing(self, source: Listing, start: int, stop: int) -> Iterator[Batch]:
        folder = source.uri[: -len(METADATA)]
        urls = {picture.uri.removeprefix(folder): picture.url for picture in source.pictures}
        builder = Builder(source.uri)
        for row, (_, raw, value) in enumerate(itertools.islice(json_lines(source), start, stop), start):
            if builder.is_full:
                yield builder.build()
            name = _file_name(value)
            if not isinstance(value, dict) or not name:
                detail = value if isinstance(value, str) else "no `file_name` of a picture"
                builder.malformed(FALLBACK_SPLIT, row, raw, detail)
                continue
            uri = as_url(encode(name))
            columns: dict[str, Any] = {"image_uri": uri}
            if name in urls:
                found = carried(storage.read_bytes(urls[name]))
                columns |= {"image": found.data, "image_sha256": found.sha256}
                columns |= {"width": found.width, "height": found.height}
            builder.record(_stem(uri), FALLBACK_SPLIT, row, **columns)
            missing = f"missing_image: {uri} does not lie beside {base(source.uri)}"
            lost = missing if self.pictures and name not in urls else None
            self._add_texts(builder, value.get(TEXT), lost)
        if not builder.is_empty:
            yield builder.build()

    def _add_texts(self, builder: Builder, value: Any, lost: str | None) -> None:
        texts = value if isinstance(value, list) else [value]
        for place, text in enumerate(texts if self.contexts else texts[:1]):
            if place and text is None:
                continue
            field, role = (f"{TEXT}[0]", "human") if place == 0 else (f"{CONTEXT}[{place - 1}]", "alt")
            if text is None or isinstance(text, str):
                builder.text(field, role, None if text is None else encode(text), lost)
            else:
                builder.text(field, role, show(text), f"malformed_record: `{field}` is {name_of(text)}, not a text")


def _contexts(column: pa.Array) -> arrow_columns.Strand:
    """The texts that there are: a page without a description is no caption that was lost."""
    strand = arrow_columns.strand(column, CONTEXT, "alt")
    there = strand.text.is_valid()
    mask = there.to_numpy(zero_copy_only=False)
    return replace(strand, record=strand.record[mask], field=strand.field[mask], text=strand.text.filter(there))


def _ids(paths: Sequence[str | None], picture: pa.Array) -> list[str | None]:
    """The path without ending; where there is none, the sha256 of the picture; null without either."""
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
