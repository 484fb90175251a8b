"""Printed scores of the commands: JSON or a table on stdout, warnings on stderr."""

from __future__ import annotations

import sys
from collections.abc import Callable, Collection, Mapping
from typing import Any

import typer

from infra.output import print_json

Row = Mapping[str, Any]


def print_scores(
    rows: list[dict[str, Any]], columns: Mapping[str, Callable[[Row], str]], words: Collection[str], *, as_json: bool
) -> None:
    """Print rows as JSON or as a table without borders, after their alarms, each once.

    columns: heading -> text of a row. words: the columns that are aligned left; numbers are aligned right.
    """
    for sentence in dict.fromkeys(sentence for row in rows for sentence in row.get("alarms", [])):
        typer.echo(f"warning: {sentence}.", err=True)
    if as_json:
        print_json(rows)
        return
    # Imported here: rich takes 0.05 s, and `--json` needs none of it.
    from rich.console import Console
    from rich.table import Table

    table = Table(box=None, pad_edge=False)
    for name in columns:
        table.add_column(name, overflow="fold", justify="left" if name in words else "right")
    for row in rows:
        table.add_row(*(text(row) for text in columns.values()))
    # Cells are folded on a terminal only: a file or a pipe is as wide as its lines.
    console = Console() if sys.stdout.isatty() else Console(width=240)
    console.print(table, markup=False)


def number(value: float | None) -> str:
    """Four digits, or a dash for an unknown value."""
    return "-" if value is None else f"{value:.4f}"


def interval(row: Row) -> str:
    """`low to high`, or a dash."""
    return "-" if row["low"] is None else f"{row['low']:.4f} to {row['high']:.4f}"
