"""Parquet of web pictures by URL, one row a picture with its texts; what DataComp and Recap-DataComp share.

Invariant: a scene is named by the sha256 of its picture where there is one, so that both sets join.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from typing import ClassVar, Final

import pyarrow as pa

from infra.errors import InputError
from pipelines.records import Batch, Input, Piece, Source, Survey
from pipelines.sources.formats import arrow_columns, footers
from pipelines.sources.formats.names import listed, nearest

URL: Final = "url"
SIZES: Final = {"original_width": "width", "original_height": "height"}


class WebParquet(Source):
    """A source of such files. A subclass is a dataclass that names the columns."""

    title: ClassVar[str]
    "What the files are, for the survey."
    hint: ClassVar[str]
    "What to name as input instead of files that are not parquet."
    texts: ClassVar[Mapping[str, str]]
    "Text column -> role, in the order of the fields. A file has one of them at least."
    ids: ClassVar[Mapping[str, str]]
    "Column that may name the scene -> its meaning. A file has one of them at least."
    others: ClassVar[Mapping[str, str]] = {}
    "Other columns that are read -> their meaning."

    writers = arrow_columns.SHA256_RULES

    @abstractmethod
    def split_of(self, source: Input) -> str:
        """The split of all rows of a file."""

    @abstractmethod
    def scene_ids(self, sha256: pa.Array, columns: Mapping[str, pa.Array]) -> pa.Array:
        """Scene ids: `sha256` where it is there, else by another of the columns, else null."""

    def notes(self, inputs: Sequence[Input], found: Sequence[footers.Footer]) -> list[str]:
        """Notes on the files. Raises InputError when they do not belong together."""
        return []

    def reads(self, name: str) -> bool:
        """Parquet only; the .npz of CLIP features beside each file of DataComp is left out."""
        return name.endswith(".parquet")

    def survey(self, inputs: Sequence[Input], limit: int | None) -> Survey:
        """Footers only. Raises InputError for a file without texts or without ids."""
        found = footers.footers(footers.parquet_inputs(inputs, self.name, self.hint))
        notes = self.notes(inputs, found)
        for footer in found:
            self._check(footer)
        every = {name for footer in found for name in footer.schema.names}
        meanings = {**self.ids, **{name: f"text:{role}" for name, role in self.texts.items()}, **self.others}
        return Survey(
            format=f"{self.title}, {len(found)} files, {sum(f.rows for f in found):,} rows by their footers",
            pieces=footers.pieces(found, limit, self.split_of),
            columns={name: meaning for name, meaning in meanings.items() if name in every},
            notes=notes,
        )

    def read(self, piece: Piece) -> Iterator[Batch]:
        """Rows of one piece; a text column that the file lacks is no field of its records."""
        source = piece.input_as(Input)
        wanted = [*self.ids, *self.others, *self.texts]
        for first, rows in footers.read_rows(source, piece.start, piece.stop, wanted):
            held = {name: rows.column(name) for name in rows.schema.names}
            sha256 = pa.nulls(rows.num_rows, pa.large_string())
            if "sha256" in held:
                sha256 = arrow_columns.as_sha256(held["sha256"])
            columns = arrow_columns.address(source, first, rows.num_rows, self.split_of(source))
            columns |= {"source_id": self.scene_ids(sha256, held), "image_sha256": sha256}
            if URL in held:
                columns["image_uri"] = arrow_columns.as_text(held[URL])[0]
            columns |= {size: arrow_columns.as_int32(held[name]) for name, size in SIZES.items() if name in held}
            texts = [arrow_columns.text_column(held[n], n, role) for n, role in self.texts.items() if n in held]
            yield arrow_columns.batch(columns, texts)

    def _check(self, footer: footers.Footer) -> None:
        known, uri = footer.schema.names, footer.input.uri
        texts, ids = ([name for name in wanted if name in known] for wanted in (self.texts, self.ids))
        if not texts:
            first = next(iter(self.texts))
            lacks = (
                f"no column {first!r}" if len(self.texts) == 1 else f"none of the text columns {', '.join(self.texts)}"
            )
            raise InputError(
                f"{uri} has {lacks}.{nearest(first, known)} Its columns: {listed(known)}. "
                "Read other parquet with the source `table`."
            )
        if not ids:
            lacks = " nor ".join(f"`{name}`" for name in self.ids)
            raise InputError(f"{uri} has neither {lacks}, so its rows name no picture. Its columns: {listed(known)}.")
        for name in (*texts, *ids, *(name for name in self.others if name in known)):
            fits, wanted = (arrow_columns.is_number, "a number") if name in SIZES else (arrow_columns.is_text, "a text")
            footers.check_type(footer, name, fits, wanted, f"Is it a file of {self.name}?")
