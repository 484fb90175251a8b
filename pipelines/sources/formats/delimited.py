"""CSV as rows of bytes, parsed strictly; reading goes on after a row that does not parse.

Invariant: every line of the file is in exactly one row or malformed row. A row that does not parse costs its first line
only: reading resumes at the next line, so that one stray quote cannot consume the rest of the file.
"""

from __future__ import annotations

import csv
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass

from infra.errors import InputError
from pipelines.records import Input
from pipelines.sources.formats.lines import read_lines

BOM = b"\xef\xbb\xbf"


@dataclass(frozen=True)
class Malformed:
    """A line that is no row, and why."""

    raw: bytes
    detail: str


class _Feed:
    """Lines as latin-1, which maps bytes to characters one to one; remembers what the current row has taken."""

    def __init__(self, lines: Iterator[bytes]) -> None:
        self._lines = lines
        self._again: deque[str] = deque()
        self.taken: list[str] = []

    def __iter__(self) -> _Feed:
        return self

    def __next__(self) -> str:
        line = self._again.popleft() if self._again else next(self._lines).decode("latin-1")
        self.taken.append(line)
        return line

    def give_back_all_but_first(self) -> bytes:
        # A quote that is not closed takes all lines to the end of the file; only the first is malformed.
        first, *rest = self.taken
        self._again.extendleft(reversed(rest))
        return first.rstrip("\r\n").encode("latin-1")


def delimiter_of(uri: str) -> str:
    """Tab for `.tsv`, else comma."""
    return "\t" if uri.removesuffix(".gz").endswith(".tsv") else ","


def read_csv(source: Input, delimiter: str) -> tuple[list[str], Iterator[list[str] | Malformed]]:
    """The column names, and the rows below them: each field as latin-1 (see `encoded`); blank lines are no rows.

    Raises InputError when the first line does not name columns, or names one twice.
    """
    feed = _Feed(_without_bom(source))
    every = _parse(feed, delimiter)
    first = next(every, None)
    if not isinstance(first, list):
        detail = "it is empty" if first is None else first.detail
        raise InputError(f"{source.uri} has no CSV header: {detail}. Its first line must name the columns.")
    names = [encoded(name).decode("utf-8", "backslashreplace") for name in first]
    twice = [name for name in names if names.count(name) > 1]
    if twice:
        raise InputError(f"{source.uri} names the column {twice[0]!r} twice, so it is ambiguous. Rename one.")
    return names, _of_width(every, feed, len(names))


def encoded(field: str) -> bytes:
    """The bytes of a field, as they are in the file."""
    return field.encode("latin-1")


def _without_bom(source: Input) -> Iterator[bytes]:
    lines = read_lines(source)
    for line in lines:
        if line.startswith((b"\xff\xfe", b"\xfe\xff")):
            raise InputError(f"{source.uri} is UTF-16. Convert it to UTF-8, with `iconv -f utf-16 -t utf-8`.")
        yield line.removeprefix(BOM)
        break
    yield from lines


def _parse(feed: _Feed, delimiter: str) -> Iterator[list[str] | Malformed]:
    reader = csv.reader(feed, delimiter=delimiter, strict=True)
    while True:
        feed.taken = []
        try:
            fields = next(reader)
        except StopIteration:
            return
        except csv.Error as error:
            yield Malformed(feed.give_back_all_but_first(), f"not CSV: {error}")
            # A reader keeps its state after an error, so the next row gets a new one.
            reader = csv.reader(feed, delimiter=delimiter, strict=True)
            continue
        yield fields


def _of_width(every: Iterator[list[str] | Malformed], feed: _Feed, width: int) -> Iterator[list[str] | Malformed]:
    for row in every:
        if row == []:
            # A blank line: an empty cell in a table of one column, nothing in a wider one.
            if width == 1:
                yield [""]
        elif isinstance(row, list) and len(row) != width:
            yield Malformed(feed.give_back_all_but_first(), f"{len(row)} fields, but the header names {width}")
        else:
            yield row
