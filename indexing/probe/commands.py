"""Probe an embedding set for a label, with a linear classifier and nearest neighbours."""

from __future__ import annotations

from collections.abc import Callable
from typing import Annotated

import typer

from indexing.scores.printing import Row, interval, number, print_scores
from infra.options import HomeOption, JsonOption

app = typer.Typer(no_args_is_help=True, add_completion=False, rich_markup_mode=None)


@app.command()
def probe(
    set_: Annotated[str, typer.Argument(metavar="SET", help="Embedding set, by name or id.")],
    labels: Annotated[
        list[str], typer.Option(help="CSV or parquet file, or states:ATTRIBUTE such as states:place; repeat for more.")
    ],
    key: Annotated[str, typer.Option(help="Column of scene keys in a file.")] = "scene_key",
    label: Annotated[str, typer.Option(help="Column of labels in a file.")] = "label",
    kind: Annotated[list[str] | None, typer.Option(help="linear or knn; repeat for both [default: both].")] = None,
    layer: Annotated[int | None, typer.Option(help="Layer of SET [default: the last].")] = None,
    captions: Annotated[
        str, typer.Option(help="Several captions a scene: mean of unit vectors, one by hash, or each an item.")
    ] = "mean",
    k: Annotated[int, typer.Option("--k", help="Neighbours of the probe knn.")] = 10,
    folds: Annotated[int, typer.Option(help="Of the cross-validation.")] = 5,
    bootstrap: Annotated[int, typer.Option(help="Draws behind an interval; 0: none.")] = 10_000,
    seed: Annotated[int, typer.Option(help="Of folds, draws and captions.")] = 0,
    json: JsonOption = False,
    home: HomeOption = None,
    catalog: Annotated[str | None, typer.Option(help="SQLite path or postgres:... [env GOODVIEWS_CATALOG].")] = None,
) -> None:
    """Probe an embedding set for a label, with a linear classifier and nearest neighbours."""
    from indexing.probe.job import ProbingConfig, probe_set
    from indexing.probe.probes import KINDS, ProbeConfig
    from indexing.uncertainty.bootstrap import BootstrapConfig
    from infra.home import resolve

    where = resolve(home, catalog)
    how = ProbeConfig(
        kinds=tuple(dict.fromkeys(kind or KINDS)),
        folds=folds,
        k=k,
        seed=seed,
        bootstrap=BootstrapConfig(draws=bootstrap, seed=seed),
    )
    rows = []
    for source in labels:
        config = ProbingConfig(
            name=set_, labels=source, key=key, label=label, layer=layer, captions=captions, probe=how
        )
        rows += probe_set(where, config)
    print_scores(rows, _COLUMNS, ("probe", "label", "of"), as_json=json)


_COLUMNS: dict[str, Callable[[Row], str]] = {
    "probe": lambda row: str(row["metric"]).removeprefix("probe_"),
    "label": lambda row: str(row["right"]),
    "accuracy": lambda row: number(row["value"]),
    "95 %": interval,
    "chance": lambda row: number(row["chance"]),
    "n": lambda row: f"{row['n']:,}",
    "classes": lambda row: str(row["classes"]),
    "of": lambda row: str(row["left"]),
}
