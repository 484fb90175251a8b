"""Rows of CSV and JSON lines into batches, by the layout of a table.

Invariant: a row unit is a record of a CSV file below its header, or a line of a JSON-lines file; each gives at most one
record. A cell is a text, a list of texts, an id or a number; a text of any other kind is marked broken.
"""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Final

from catalog.schema import SPLIT_PATTERN
from infra.errors import InputError
from pipelines.records import Batch, Input, Piece
from pipelines.sources.formats.arrow_columns import as_url
from pipelines.sources.formats.delimited import Malformed, encoded, read_csv
from pipelines.sources.formats.documents import encode, is_unicode, json_lines, name_of, text_of
from pipelines.sources.formats.names import as_sha256
from pipelines.sources.formats.rows import Record, Text, batches, malformed
from pipelines.sources.tables import column_roles
from pipelines.sources.tables.column_roles import Layout

PEEKED_LINES: Final = 1_000
"""Lines of JSON that are read to learn which members there are."""


@dataclass(frozen=True, kw_only=True)
class LineTable:
    """A CSV or JSON-lines input."""

    input: Input
    is_csv: bool
    delimiter: str = ","

    def columns(self) -> list[str]:
        """The header, or the members of the first PEEKED_LINES objects in order of appearance."""
        if self.is_csv:
            return read_csv(self.input, self.delimiter)[0]
        names: dict[str, None] = {}
        problem = "it is empty"
        for _, _, value in itertools.islice(json_lines(self.input), PEEKED_LINES):
            if isinstance(value, dict):
                names.update(dict.fromkeys(value))
            else:
                problem = value
        if not names:
            raise InputError(
                f"None of the first lines of {self.input.uri} is a JSON object: {problem}. Is it JSON lines?"
            )
        return list(names)

    def guessable(self) -> list[str]:
        """Columns that could hold captions: any, as the file declares no types."""
        return self.columns()

    def check(self, layout: Layout) -> None:
        """Raises InputError when the layout names a column that is not there; cells are judged one by one."""
        names = self.columns()
        if not self.is_csv and not set(layout.names) <= set(names):
            # A member may be rare: only the whole file can tell that it is not there.
            later = (value for _, _, value in json_lines(self.input) if isinstance(value, dict))
            names = list(dict.fromkeys([*names, *itertools.chain.from_iterable(later)]))
        column_roles.check_columns(layout, names, uri=self.input.uri)

    def pieces(self, layout: Layout, limit: int | None) -> list[Piece]:
        """One piece, since lines cannot be found without reading what comes before; one pass over the file.

        Raises InputError when the split column holds a name that cannot be a split.
        """
        splits: Counter[str] = Counter()
        stop = 0
        for row, _, cells in self._rows([layout.split] if layout.split else []):
            if limit is not None and row >= limit:
                break
            stop = row + 1
            splits[_name(cells[0]) if layout.split and not isinstance(cells, str) else layout.split_name] += 1
        if not stop:
            return []
        counts = column_roles.splits_found(splits, layout, uri=self.input.uri)
        return [Piece(input=self.input, start=0, stop=stop, scenes_by_split=counts)]

    def read(self, start: int, stop: int, layout: Layout) -> Iterator[Batch]:
        """The records of row units [start, stop). What comes before is parsed and skipped."""
        yield from batches(self.input.uri, self._records(start, stop, layout))

    def _records(self, start: int, stop: int, layout: Layout) -> Iterator[Record]:
        for row, raw, cells in self._rows(layout.names):
            if row >= stop:
                break
            if row < start:
                continue
            if isinstance(cells, str):
                yield malformed(layout.split_name, row, raw, cells)
            else:
                yield _record(row, dict(zip(layout.names, cells, strict=True)), layout, self.input.uri)

    def _rows(self, wanted: Sequence[str]) -> Iterator[tuple[int, bytes, list[Any] | str]]:
        """(row unit, raw line where it is malformed, the wanted cells or what is wrong)."""
        if not self.is_csv:
            for row, raw, value in json_lines(self.input):
                yield row, raw, value if isinstance(value, str) else [value.get(name) for name in wanted]
            return
        names, every = read_csv(self.input, self.delimiter)
        places = [names.index(name) for name in wanted]
        for row, fields in enumerate(every):
            if isinstance(fields, Malformed):
                yield row, fields.raw, fields.detail
            else:
                yield row, b"", [encoded(fields[place]) for place in places]


def _record(row: int, cells: dict[str, Any], layout: Layout, uri: str) -> Record:
    source_id: str | None = f"{uri}#{row}"
    broken = None
    if layout.id is not None:
        source_id, broken = _id(cells[layout.id], layout.id)
    split = layout.split_name
    if layout.split is not None:
        split = _name(cells[layout.split])
        if not SPLIT_PATTERN.fullmatch(split):
            broken = f"malformed_record: the split in `{layout.split}` is {split!r}"
            split = layout.split_name
    columns = {
        "image_uri": _uri(cells.get(layout.image or "")),
        "image_sha256": as_sha256(_name(cells.get(layout.image_sha256 or ""))),
        "width": _number(cells.get(layout.width or "")),
        "height": _number(cells.get(layout.height or "")),
    }
    texts = [text for name, role in layout.texts for text in _texts(cells[name], name, role, broken)]
    return Record(source_id=None if broken else source_id, split=split, row=row, texts=texts, columns=columns)


def _texts(cell: Any, name: str, role: str, broken: str | None) -> Iterator[Text]:
    elements = {name: cell}
    if isinstance(cell, list):
        elements = {f"{name}[{place}]": element for place, element in enumerate(cell)}
    for field, element in elements.items():
        text, problem = text_of(element, f"`{field}`")
        yield field, role, text, broken or problem


def _id(cell: Any, column: str) -> tuple[str | None, str | None]:
    """(scene id, what is wrong). Whole numbers are written in decimal, as 12 and 12.0 are one id."""
    if isinstance(cell, bytes):
        try:
            cell = cell.decode()
        except UnicodeDecodeError:
            return None, f"malformed_record: the scene id in `{column}` is not UTF-8"
    if isinstance(cell, float) and abs(cell) >= 2**53:
        # The parser has rounded it, so two ids could be one here.
        return None, f"malformed_record: the scene id in `{column}` is a number of more than 53 bits; write it as text"
    if isinstance(cell, float) and cell.is_integer():
        cell = int(cell)
    if isinstance(cell, int) and not isinstance(cell, bool):
        return str(cell), None
    if cell is None or cell == "":
        return None, None
    if not isinstance(cell, str):
        return None, f"malformed_record: the scene id in `{column}` is {name_of(cell)}"
    if not is_unicode(cell):
        return None, f"malformed_record: the scene id in `{column}` is not Unicode"
    return cell, None


def _name(cell: Any) -> str:
    if isinstance(cell, bytes):
        return cell.decode("utf-8", "backslashreplace")
    return cell.encode("utf-8", "backslashreplace").decode() if isinstance(cell, str) else ""


def _uri(cell: Any) -> str | None:
    raw = encode(cell) if isinstance(cell, str) else cell
    return as_url(raw) if isinstance(raw, bytes) else None


def _number(cell: Any) -> int | None:
    if isinstance(cell, bytes):
        cell = int(cell) if cell.isdigit() and len(cell) < 11 else None
    if isinstance(cell, float) and cell.is_integer():
        cell = int(cell)
    return cell if isinstance(cell, int) and not isinstance(cell, bool) and 0 <= cell < 2**31 else None
