"""Results on stdout: one form of JSON for programs, tables and lists of facts for people.

Invariant: `--json` gives one JSON document that ends in a line end, and nothing else.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable, Mapping, Sequence
from typing import Any


def print_json(value: Any) -> None:
    """Print dataclasses, mappings, sequences and plain values as JSON; numbers may be keys, NaN becomes null."""
    import orjson

    options = orjson.OPT_INDENT_2 | orjson.OPT_APPEND_NEWLINE | orjson.OPT_NON_STR_KEYS
    sys.stdout.write(orjson.dumps(value, option=options).decode())


def print_facts(facts: Mapping[str, object]) -> None:
    """Print names and values, one a line, the names in bold and padded to one width."""
    # Here and below: rich takes 0.05 s to import, and `--json` needs none of it.
    from rich.console import Console
    from rich.text import Text

    console, width = Console(soft_wrap=True), max(map(len, facts), default=0)
    for name, value in facts.items():
        console.print(Text.assemble((f"{name:<{width}}", "bold"), f" {value}"), highlight=False)


def print_table(columns: Sequence[str], rows: Iterable[Sequence[str]]) -> None:
    """Print a table without borders; long cells are folded, never cut."""
    from rich.console import Console
    from rich.table import Table

    table = Table(box=None, pad_edge=False)
    for name in columns:
        table.add_column(name, overflow="fold")
    for row in rows:
        table.add_row(*row)
    Console(soft_wrap=not sys.stdout.isatty()).print(table)
