"""Count the scenes and captions that two datasets or splits share."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Annotated, Any

import typer

from infra.options import DatasetsHomeOption, JsonOption
from infra.output import print_json

if TYPE_CHECKING:
    from catalog.overlap.comparison import Comparison, Kind

app = typer.Typer(no_args_is_help=True, add_completion=False, rich_markup_mode=None)

_WHAT = "DATASET[@VERSION][:SPLIT]"


@app.command()
def overlap(
    left: Annotated[str, typer.Argument(metavar="A", help=_WHAT)],
    right: Annotated[str, typer.Argument(metavar="B", help=_WHAT)],
    near: Annotated[bool, typer.Option("--near", help="Also find nearly equal captions; slower.")] = False,
    threshold: Annotated[float, typer.Option(help="Least Jaccard similarity of --near.")] = 0.7,
    memory: Annotated[str, typer.Option(help="Memory of the comparison; the rest goes to TMPDIR.")] = "1GB",
    record: Annotated[bool, typer.Option(help="Write the counts to the catalog's table overlap_counts.")] = True,
    json: JsonOption = False,
    home: DatasetsHomeOption = None,
    catalog: Annotated[str | None, typer.Option(help="SQLite path or postgres:... [env GOODVIEWS_CATALOG].")] = None,
) -> None:
    """Count the scenes and captions that two datasets or splits share.

    Kinds: id (same photo by source id), sha256 (image bytes; sha256_common: bytes under many scenes), caption (ignoring
    case and punctuation), caption_set (all captions of a scene), id_and_captions, id_and_letters (ignoring blanks too),
    near (nearly equal captions).
    """
    from catalog.overlap.comparison import compare
    from catalog.rows import overlaps
    from infra.home import resolve

    where = resolve(home, catalog)
    found = compare(where, left, right, near_from=threshold if near else None, memory_limit=memory)
    # Print first, so that the result is shown even if the commit fails; record even if the pipe closes early.
    try:
        if json:
            _print_json(found)
        else:
            _print_tables(found)
        sys.stdout.flush()
    finally:
        if record:
            overlaps.record(where, found)


def _print_json(found: Comparison) -> None:
    import dataclasses

    facts: dict[str, Any] = {
        "left": {**dataclasses.asdict(found.left), "name": found.left.name},
        "right": {**dataclasses.asdict(found.right), "name": found.right.name},
        "kinds": {kind.kind: _facts(kind) for kind in found.kinds},
        "notes": list(found.notes),
    }
    print_json(facts)


def _facts(kind: Kind) -> dict[str, Any]:
    import dataclasses

    facts = dataclasses.asdict(kind)
    facts["is_known"] = kind.is_known
    facts["left"]["share"], facts["right"]["share"] = kind.left.share, kind.right.share
    return facts


def _print_tables(found: Comparison) -> None:
    from rich.console import Console
    from rich.markup import escape
    from rich.table import Table

    console = Console(soft_wrap=not sys.stdout.isatty())
    console.print(f"A = {found.left.name} ({found.kinds[0].left.total:,} scenes)", highlight=False, markup=False)
    console.print(f"B = {found.right.name} ({found.kinds[0].right.total:,} scenes)", highlight=False, markup=False)
    counts = Table(box=None, pad_edge=False, padding=(0, 1, 0, 0))
    for name in ("kind", "shared", "scenes A", "scenes B", "captions A", "captions B"):
        counts.add_column(name, justify="left" if name == "kind" else "right")
    for kind in found.kinds:
        counts.add_row(kind.kind, *_cells(kind))
    console.print(counts)
    splits = Table(box=None, pad_edge=False)
    for name in ("kind", "split A", "split B", "scenes A", "scenes B"):
        splits.add_column(name, justify="right" if name.startswith("scenes") else "left")
    for kind in found.kinds:
        for pair in kind.by_split:
            splits.add_row(
                kind.kind, pair.left_split, pair.right_split, f"{pair.left_scenes:,}", f"{pair.right_scenes:,}"
            )
    if splits.row_count:
        console.print()
        console.print(splits)
    for note in found.notes:
        console.print(escape(f"Note: {note}."), highlight=False)


def _cells(kind: Kind) -> list[str]:
    """A kind that one side does not record shows dashes, because 0 would look like a result."""
    if not kind.is_known:
        return ["-"] * 5
    sides = [f"{side.scenes:,} ({side.share:.1%})" for side in (kind.left, kind.right)]
    captions = ["-" if side.captions is None else f"{side.captions:,}" for side in (kind.left, kind.right)]
    return [f"{kind.shared:,}", *sides, *captions]
