"""Show data, trainings, scores and pictures of the catalog as one HTML page."""

from __future__ import annotations

from typing import Annotated

import typer

from infra.options import HomeOption, JsonOption
from infra.output import print_json
from infra.units import size

app = typer.Typer(add_completion=False, rich_markup_mode=None)


@app.command()
def report(
    out: Annotated[str | None, typer.Option(help="Folder for the report [default: below HOME/reports].")] = None,
    title: Annotated[str | None, typer.Option(help="Of the page.")] = None,
    json: JsonOption = False,
    home: HomeOption = None,
    catalog: Annotated[str | None, typer.Option(help="SQLite path or postgres:... [env GOODVIEWS_CATALOG].")] = None,
) -> None:
    """Show what the catalog holds as one page, with each plot as PNG and SVG beside it."""
    from catalog.report.page import DEFAULT_TITLE, ReportConfig, plain, write_report
    from infra.home import resolve

    done = write_report(resolve(home, catalog), ReportConfig(out=out, title=title or DEFAULT_TITLE))
    if json:
        print_json(plain(done))
        return
    absent = f"; nothing in the catalog for {', '.join(done.absent)}" if done.absent else ""
    print(f"{done.page}: snapshot {done.snapshot_id}, {len(done.figures)} figures, {size(done.bytes)}{absent}")
