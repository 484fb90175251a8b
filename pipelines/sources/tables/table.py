"""The source `table`: parquet, CSV or JSON lines, with the columns that the options name.

Invariant: every file of a job has the same layout, and a text is the bytes of its cell.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Final, TypeAlias

from infra.errors import ConfigError, InputError
from pipelines.records import Batch, Input, Piece, Source, Survey
from pipelines.sources.formats import footers
from pipelines.sources.formats.arrow_columns import SHA256_RULES
from pipelines.sources.formats.delimited import delimiter_of
from pipelines.sources.formats.names import base, none_read
from pipelines.sources.options import FALLBACK_SPLIT, guess_texts, parse_split, parse_texts
from pipelines.sources.tables.column_roles import Layout
from pipelines.sources.tables.line_tables import LineTable
from pipelines.sources.tables.parquet_tables import ParquetTable

PARQUET_ENDS: Final = (".parquet", ".pq")
CSV_ENDS: Final = (".csv", ".tsv")
JSON_ENDS: Final = (".jsonl", ".ndjson")

AnyTable: TypeAlias = ParquetTable | LineTable


@dataclass(frozen=True, kw_only=True)
class Table(Source):
    """A table of captions and the names of its columns."""

    text: str = ""
    "Caption columns, commas between, each `column` or `column:role`, texts or lists of texts. Empty: guessed by name."
    id: str = ""
    "Column that names the scene of a row. Empty: each row is a scene, named `<file>#<row>`."
    image: str = ""
    "Column of the image's path or URL."
    image_sha256: str = ""
    "Column of the sha256 (hex) of the image's bytes."
    width: str = ""
    "Column of the image's width in pixels."
    height: str = ""
    "Column of the image's height in pixels."
    split: str = FALLBACK_SPLIT
    "A split name for all rows, or `column:<name>`."
    unique: bool = False
    "The ids are known to be unique, so rows need not be brought together by id."
    delimiter: str = ""
    "One character, CSV only. Empty: tab for `.tsv`, else comma."

    name = "table"

    def __post_init__(self) -> None:
        if self.delimiter and (len(self.delimiter) > 1 or not self.delimiter.isascii() or self.delimiter in '\n\r"'):
            raise ConfigError(
                f"The option source.delimiter={self.delimiter!r} must be one ASCII character, no quote or line end."
            )
        if self.unique and not self.id:
            message = (
                "The option source.unique=true needs source.id: rows without an id column are scenes of their own."
            )
            raise ConfigError(message)
        parse_texts(self.text)
        parse_split(self.split)

    @property
    def grouped(self) -> bool:
        """Rows are brought together when they have ids that may repeat."""
        return bool(self.id) and not self.unique

    @property
    def writers(self) -> Mapping[str, str]:
        """The rules by which digests are read, where they are read."""
        return SHA256_RULES if self.image_sha256 else {}

    def reads(self, name: str) -> bool:
        """Parquet, CSV and JSON lines, by the ending of the name."""
        return _end(Input(uri=name, url=name)) in PARQUET_ENDS + CSV_ENDS + JSON_ENDS

    def survey(self, inputs: Sequence[Input], limit: int | None) -> Survey:
        """Footers of parquet; one pass over CSV and JSON lines. Raises InputError for a wrong column or type."""
        files = sorted((i for i in inputs if _end(i) in PARQUET_ENDS + CSV_ENDS + JSON_ENDS), key=lambda i: i.uri)
        if not files:
            ends = ", ".join(PARQUET_ENDS + CSV_ENDS + JSON_ENDS)
            raise none_read(inputs, "a table", f"Tables end in {ends}; the last four may be gzipped (.gz).")
        pieces: list[Piece] = []
        layouts: list[Layout] = []
        for source, table in zip(files, self._open(files), strict=True):
            layouts.append(layout := self._layout(table))
            if layout != layouts[0]:
                raise InputError(
                    f"The captions of {files[0].uri} are in {layouts[0].texts[0][0]!r}, those of {source.uri} in "
                    f"{layout.texts[0][0]!r}. Name one column with `--set source.text=<column>`, or ingest two "
                    "datasets."
                )
            read = sum(piece.stop - piece.start for piece in pieces)
            pieces.extend(table.pieces(layout, None if limit is None else limit - read))
        return Survey(
            format=f"table ({', '.join(sorted({_end(f)[1:] for f in files}))}), {len(files)} files",
            pieces=pieces,
            columns=layouts[0].meanings,
            notes=self._notes(layouts[0], skipped=len(inputs) - len(files)),
            cuttable=all(_end(f) in PARQUET_ENDS for f in files),
        )

    def _notes(self, layout: Layout, *, skipped: int) -> list[str]:
        notes = []
        if not self.text:
            notes.append(
                f"captions are taken from {layout.texts[0][0]!r}, a guess by its name; "
                "`--set source.text=<column>[:role]` decides"
            )
        if skipped:
            notes.append(f"{skipped} inputs are no tables by their names and are not read")
        return notes

    def read(self, piece: Piece) -> Iterator[Batch]:
        """Rows of one piece."""
        table = next(self._open([piece.input_as(Input)]))
        yield from table.read(piece.start, piece.stop, self._layout(table))

    def _open(self, files: Sequence[Input]) -> Iterator[AnyTable]:
        """The files in their order; all footers are read at once."""
        parquet = iter(footers.footers([file for file in files if _end(file) in PARQUET_ENDS]))
        for file in files:
            if _end(file) in PARQUET_ENDS:
                yield ParquetTable(footer=next(parquet))
            else:
                delimiter = self.delimiter or delimiter_of(file.uri)
                yield LineTable(input=file, is_csv=_end(file) in CSV_ENDS, delimiter=delimiter)

    def _layout(self, table: AnyTable) -> Layout:
        """The options against the columns of one file. Raises InputError when they do not fit."""
        split, split_name = parse_split(self.split)
        layout = Layout(
            texts=parse_texts(self.text) or guess_texts(table.guessable()),
            id=self.id or None,
            image=self.image or None,
            image_sha256=self.image_sha256 or None,
            width=self.width or None,
            height=self.height or None,
            split=split,
            split_name=split_name,
        )
        table.check(layout)
        return layout


def _end(source: Input) -> str:
    name = base(source.uri).lower()
    dot = name.rfind(".")
    return name[dot:] if dot >= 0 else ""
