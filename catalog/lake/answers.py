"""Write query results as a table for people, or as CSV or JSON for programs.

Invariants: no value is lost or changes its kind: numbers stay numbers, NULL and NaN become null, text is never read as
markup or sent to the terminal as control codes. A table is cut to the width only on a terminal.
"""

from __future__ import annotations

import csv
import datetime
import decimal
import json
import math
import shutil
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import IO, Any, Final

from infra.errors import UsageError

TERMINAL_ROWS: Final = 1000
"A terminal gets no more rows unless --limit says so; files and pipes get all."

Row = Sequence[Any]


def plain(value: Any) -> Any:
    """`value` in JSON's own types; integers of any size stay integers."""
    if value is None or isinstance(value, (bool, int, str)):
        return value
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, decimal.Decimal):
        return int(value) if value == value.to_integral_value() else float(value)
    if isinstance(value, (datetime.datetime, datetime.date, datetime.time)):
        return value.isoformat()
    if isinstance(value, (bytes, bytearray, memoryview)):
        return bytes(value).hex()
    if isinstance(value, dict):
        return {key if isinstance(key, str) else _compact(plain(key)): plain(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [plain(item) for item in value]
    return str(value)


def write_json(out: IO[str], names: Sequence[str], rows: Iterable[Row]) -> int:
    """A list of objects, one a line. Raises UsageError when two columns bear one name, since one would be lost."""
    twice = sorted({name for name in names if list(names).count(name) > 1})
    if twice:
        raise UsageError(f"Two columns are named {twice[0]!r}, and a JSON object holds one. Name them apart with AS.")
    count, before = 0, "["
    for row in rows:
        out.write(before + "\n" + _compact(dict(zip(names, map(plain, row), strict=True))))
        count, before = count + 1, ","
    out.write("\n]\n" if count else "[]\n")
    return count


def write_csv(out: IO[str], names: Sequence[str], rows: Iterable[Row]) -> int:
    """CSV with a header; NULL is empty, lists and structs are JSON."""
    writer = csv.writer(out, lineterminator="\n")
    writer.writerow(names)
    count = 0
    for row in rows:
        writer.writerow(["" if value is None else _cell(value) for value in map(plain, row)])
        count += 1
    return count


def write_table(out: IO[str], names: Sequence[str], rows: Iterable[Row]) -> int:
    """A table: fitted to the width on a terminal, as wide as its cells in a file or pipe."""
    from rich import box
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    terminal = out.isatty()
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False)
    kept = [list(row) for row in rows]
    cells = [[_shown(value, rounded=terminal) for value in row] for row in kept]
    for i, name in enumerate(names):
        numeric = all(row[i] is None or _is_number(row[i]) for row in kept)
        table.add_column(
            Text(printable(name)), justify="right" if numeric else "left", overflow="fold", no_wrap=not terminal
        )
    for row, shown in zip(kept, cells, strict=True):
        # Text and not str: rich would take `[red]` in a caption for markup and swallow it.
        table.add_row(
            *(Text(cell, style="dim" if value is None else "") for value, cell in zip(row, shown, strict=True))
        )
    if terminal:
        width = shutil.get_terminal_size().columns
    else:
        # Two columns a character at most, as for Chinese.
        width = 10 + sum(
            4 + 2 * max(len(text) for text in [printable(name), *(row[i] for row in cells)])
            for i, name in enumerate(names)
        )
    Console(file=out, width=width, highlight=False).print(table)
    return len(kept)


def printable(text: str) -> str:
    """`text` on one line with control characters written out, so that no data can move the cursor or change colours."""
    if text.isprintable():
        return text
    return "".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in text)


def in_batches(fetch: Callable[[int], Sequence[Row]], size: int = 1000) -> Iterator[Row]:
    """Rows of a cursor's `fetchmany`, a batch in memory at a time."""
    while batch := fetch(size):
        yield from batch


def _compact(value: Any) -> str:
    return json.dumps(value, ensure_ascii=False, separators=(", ", ": "), allow_nan=False)


def _cell(value: Any) -> Any:
    return _compact(value) if isinstance(value, (dict, list, bool)) else value


def _is_number(value: Any) -> bool:
    return isinstance(value, (int, float, decimal.Decimal)) and not isinstance(value, bool)


def _shown(value: Any, *, rounded: bool) -> str:
    if value is None:
        return "null"
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, float):
        return f"{value:.6g}" if rounded else repr(value)
    if isinstance(value, datetime.datetime):
        return value.isoformat(sep=" ", timespec="seconds" if rounded else "auto")
    simple = plain(value)
    return printable(simple if isinstance(simple, str) else _compact(simple))
