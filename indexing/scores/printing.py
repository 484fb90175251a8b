"""What the commands of indexing print: tables of scores on stdout, warnings on stderr."""

from __future__ import annotations

import sys
from collections.abc import Collection, Iterable, Sequence
from typing import TYPE_CHECKING, Any

import typer

if TYPE_CHECKING:
    from rich.console import Console


def warn(rows: list[dict[str, Any]]) -> None:
    """Print the alarms of all rows to stderr, each once."""
    for sentence in dict.fromkeys(sentence for row in rows for sentence in row.get("alarms", [])):
        typer.echo(f"warning: {sentence}.", err=True)


def print_scores(columns: Sequence[str], lefts: Collection[str], rows: Iterable[Sequence[str]]) -> Console:
    """Print a table without borders; the columns `lefts` are aligned left. Returns the console."""
    # Imported here: rich takes 0.05 s, and `--json` needs none of it.
    from rich.console import Console
    from rich.table import Table

    table = Table(box=None, pad_edge=False)
    for name in columns:
        table.add_column(name, overflow="fold", justify="left" if name in lefts else "right")
    for row in rows:
        table.add_row(*row)
    # Cells are folded on a terminal only: a file or a pipe is as wide as its lines.
    console = Console() if sys.stdout.isatty() else Console(width=240)
    console.print(table, markup=False)
    return console


def number(value: float | None) -> str:
    """Four digits, or a dash for an unknown value."""
    return "-" if value is None else f"{value:.4f}"


def interval(row: dict[str, Any]) -> str:
    """`low to high`, or a dash."""
    return "-" if row["low"] is None else f"{row['low']:.4f} to {row['high']:.4f}"
