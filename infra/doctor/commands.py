"""Check this machine, its libraries, HOME and the catalog, and say what to do.

Invariant: exit status 1 when something is broken, 0 when there is only advice; never a traceback.
"""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Annotated

import typer

from infra.options import DatasetsHomeOption

if TYPE_CHECKING:
    from infra.doctor.findings import Finding

app = typer.Typer(add_completion=False)


@app.command()
def doctor(
    ray: Annotated[bool, typer.Option("--ray", help="Start a Ray here too; takes about 10 s.")] = False,
    only: Annotated[list[str] | None, typer.Option(help="Name of a check; repeat for more.")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
    home: DatasetsHomeOption = None,
    catalog: Annotated[str | None, typer.Option(help="SQLite path or postgres:... [env GOODVIEWS_CATALOG].")] = None,
) -> int:
    """Check this machine, its libraries, HOME and the catalog, and say what to do."""
    import dataclasses
    import json

    from infra.doctor.findings import Circumstances, broken, examine
    from infra.errors import UsageError
    from infra.home import resolve

    where, found = None, []
    try:
        where = resolve(home, catalog)
    except UsageError as error:
        found = [broken("home", str(error), "HOME and the catalog were not looked at.")]
    found += examine(Circumstances(home=where, with_ray=ray), only=only or [])
    if as_json:
        sys.stdout.write(json.dumps([dataclasses.asdict(finding) for finding in found], indent=2) + "\n")
    else:
        _print(found)
    return int(any(finding.state == "broken" for finding in found))


def _print(found: list[Finding]) -> None:
    from rich.console import Console
    from rich.text import Text

    console = Console(soft_wrap=True, highlight=False)
    marks = {"ok": ("ok", "green"), "advice": ("advice", "yellow"), "broken": ("BROKEN", "bold red")}
    width = max((len(finding.check) for finding in found), default=0)
    for finding in found:
        word, style = marks[finding.state]
        line = Text.assemble((f"{word:<6}", style), "  ", (f"{finding.check:<{width}}", "bold"), "  ", finding.found)
        if finding.advice:
            line.append(f"  {finding.advice}", style="italic")
        console.print(line)
