"""Query the catalog with SQL, verify it against the files, rebuild it, and collect garbage.

Invariant: results go to stdout, everything else to stderr; errors pass through to the CLI root.
"""

from __future__ import annotations

import sys
from typing import Annotated, Any

import typer

app = typer.Typer(
    no_args_is_help=True,
    add_completion=False,
    rich_markup_mode=None,
    help=__doc__.splitlines()[0] if __doc__ else None,
)

HomeOption = Annotated[
    str | None, typer.Option(help="Folder or URL that holds datasets and runs [env GOODVIEWS_HOME].")
]
CatalogOption = Annotated[str | None, typer.Option(help="SQLite path or postgres:... [env GOODVIEWS_CATALOG].")]
JsonOption = Annotated[bool, typer.Option("--json", help="Print JSON.")]


def _resolve(home: str | None, catalog: str | None) -> Any:
    from infra.home import resolve

    return resolve(home, catalog)


@app.command()
def sql(
    query: Annotated[str, typer.Argument(help="One SELECT, for example 'SELECT * FROM scene_stats'.")],
    as_csv: Annotated[bool, typer.Option("--csv", help="Print CSV.")] = False,
    as_json: JsonOption = False,
    limit: Annotated[int | None, typer.Option(min=1, help="Print at most so many rows [on a terminal 1000].")] = None,
    home: HomeOption = None,
    catalog: CatalogOption = None,
) -> None:
    """Run one SELECT, read-only, and print a table, CSV or JSON."""
    from catalog.lake.queries import run_select

    run_select(_resolve(home, catalog), query, out=sys.stdout, as_csv=as_csv, as_json=as_json, limit=limit)


@app.command()
def tables(as_json: JsonOption = False, home: HomeOption = None, catalog: CatalogOption = None) -> None:
    """List tables and views with their rows and what they hold."""
    from catalog.lake import answers
    from catalog.lake.queries import list_tables

    names, rows = list_tables(_resolve(home, catalog))
    (answers.write_json if as_json else answers.write_table)(sys.stdout, names, rows)


@app.command()
def snapshots(as_json: JsonOption = False, home: HomeOption = None, catalog: CatalogOption = None) -> None:
    """List the snapshots: when, by what, and what changed."""
    from catalog.lake import answers
    from catalog.lake.queries import list_snapshots

    names, rows = list_snapshots(_resolve(home, catalog))
    (answers.write_json if as_json else answers.write_table)(sys.stdout, names, rows)


@app.command()
def verify(
    dataset: Annotated[str | None, typer.Option(help="Only this dataset.")] = None,
    quick: Annotated[bool, typer.Option("--quick", help="Compare sizes instead of hashing every file.")] = False,
    as_json: JsonOption = False,
    home: HomeOption = None,
    catalog: CatalogOption = None,
) -> None:
    """Compare every file with its manifest, and the catalog with the manifests."""
    import dataclasses
    import json

    from catalog.versions import audit
    from infra.errors import IntegrityError

    found = audit.verify(_resolve(home, catalog), dataset=dataset, quick=quick)
    checked = (
        f"{found.versions} versions, {found.files:,} files, {found.bytes:,} bytes {'measured' if quick else 'hashed'}"
    )
    if as_json:
        print(json.dumps(dataclasses.asdict(found), indent=2))
    else:
        for problem in found.problems:
            print(problem)
        print(f"{checked}: {len(found.problems)} problems")
    if found.problems:
        raise IntegrityError(f"{len(found.problems)} problems in {checked}; each is a line of the output.")


@app.command()
def rebuild(as_json: JsonOption = False, home: HomeOption = None, catalog: CatalogOption = None) -> None:
    """Rebuild the catalog from job records and manifests."""
    import dataclasses
    import json

    from catalog.versions import rebuild as rebuilding

    where = _resolve(home, catalog)
    done = rebuilding.rebuild(where)
    for note in done.notes:
        print(note, file=sys.stderr)
    if done.lost:
        print(
            (f"What no manifest holds (runs, sets, scores) could not be carried over ({done.lost})."),
            file=sys.stderr,
        )
    if done.kept:
        print(f"The old catalog is kept as {done.kept}; delete it when the new one is right.", file=sys.stderr)
    if as_json:
        print(json.dumps(dataclasses.asdict(done), indent=2))
    else:
        print(
            f"{done.versions} versions registered, {done.carried_rows} rows that no manifest holds carried over "
            "(runs, sets, scores, overlaps, checks)"
        )


@app.command()
def gc(
    delete: Annotated[bool, typer.Option("--delete", help="Remove what is listed.")] = False,
    older_than_hours: Annotated[
        float, typer.Option(min=0, help="Leave younger files alone; a running job may need them.")
    ] = 24.0,
    as_json: JsonOption = False,
    home: HomeOption = None,
    catalog: CatalogOption = None,
) -> None:
    """List, and with --delete remove, files that no snapshot and no manifest names."""
    import dataclasses
    import json

    from catalog.versions.collect import collect

    found = collect(_resolve(home, catalog), delete=delete, older_than_hours=older_than_hours)
    for note in found.left_alone:
        print(f"left alone: {note}", file=sys.stderr)
    if as_json:
        print(json.dumps([dataclasses.asdict(stray) for stray in found.strays], indent=2))
        return
    for stray in found.strays:
        print(f"{stray.url}  {stray.bytes:,} bytes  {stray.why}")
    total = sum(stray.bytes for stray in found.strays)
    print(f"{len(found.strays)} files, {total:,} bytes {'removed' if delete else 'would be removed by --delete'}")


@app.command()
def connect(home: HomeOption = None, catalog: CatalogOption = None) -> None:
    """Print the SQL that opens the catalog in a plain DuckDB client."""
    from catalog.lake.lake import connect_lines

    print("\n".join(connect_lines(_resolve(home, catalog))))
