"""Fit a rotation between two embedding sets and score what it finds on other scenes."""

from __future__ import annotations

from collections.abc import Callable
from typing import Annotated

import typer

from indexing.scores.printing import Row, interval, number, print_scores
from infra.errors import UsageError
from infra.options import HomeOption, JsonOption

app = typer.Typer(no_args_is_help=True, add_completion=False, rich_markup_mode=None)

_Fit = Annotated[
    str | None, typer.Option(help="Split to fit on; both models need a set of it. LEFT and RIGHT are scored.")
]
_FitPairs = Annotated[
    int | None, typer.Option(help="Fit on so many scenes of LEFT and RIGHT, drawn by hash; score the others.")
]


@app.command()
def rotate(
    left: Annotated[str, typer.Argument(help="Embedding set that is mapped, by name or id.")],
    right: Annotated[str, typer.Argument(help="Embedding set whose space it is mapped into.")],
    fit: _Fit = None,
    fit_pairs: _FitPairs = None,
    fit_share: Annotated[float | None, typer.Option(help="The same as a share of the scenes.")] = None,
    splits: Annotated[int, typer.Option(help="Random divisions, with --fit-pairs and --fit-share.")] = 20,
    map: Annotated[str, typer.Option(help="rotation, linear, ridge or mlp.")] = "rotation",
    pairs: Annotated[int | None, typer.Option(help="Use at most so many of the fit pairs.")] = None,
    curve: Annotated[str | None, typer.Option(help="Numbers of pairs to score as well, such as 10,30,100.")] = None,
    apply: Annotated[str | None, typer.Option(help="Score this saved map on LEFT and RIGHT, and fit nothing.")] = None,
    against: Annotated[
        str | None, typer.Option(help="Another set in the place of LEFT: also the paired difference.")
    ] = None,
    centre: Annotated[bool, typer.Option(help="Take the mean of the fit rows off.")] = True,
    unit: Annotated[bool, typer.Option(help="Bring fit rows to length 1 after centring.")] = False,
    captions: Annotated[
        str, typer.Option(help="Several captions a scene: mean of unit vectors, or one by hash.")
    ] = "mean",
    bootstrap: Annotated[int, typer.Option(help="Draws behind an interval; 0: none.")] = 10_000,
    seed: Annotated[int, typer.Option(help="Of divisions, controls, draws and captions.")] = 0,
    json: JsonOption = False,
    home: HomeOption = None,
    catalog: Annotated[str | None, typer.Option(help="SQLite path or postgres:... [env GOODVIEWS_CATALOG].")] = None,
) -> None:
    """Fit a rotation between two embedding sets and score what it finds on other scenes."""
    from indexing.rotate.job import MappingConfig, rotate_sets
    from indexing.rotate.rotation import MapConfig
    from indexing.rotate.transfer import apply_map
    from indexing.sets.joins import JoinConfig
    from indexing.uncertainty.bootstrap import BootstrapConfig
    from infra.home import resolve

    where = resolve(home, catalog)
    joining, drawing = JoinConfig(captions=captions, seed=seed), BootstrapConfig(draws=bootstrap, seed=seed)
    if apply is not None:
        _refuse_fitting(fit, fit_pairs, fit_share, pairs, curve, against)
        rows = apply_map(where, apply, (left, right), joining, drawing)
    else:
        config = MappingConfig(
            left=left,
            right=right,
            fit=fit,
            fit_pairs=fit_pairs,
            fit_share=fit_share,
            splits=splits,
            pairs=pairs,
            curve=_numbers(curve),
            against=against,
            map=MapConfig(kind=map, centre=centre, unit=unit, seed=seed),
            join=joining,
            bootstrap=drawing,
        )
        rows = rotate_sets(where, config)
    print_scores(rows, _COLUMNS, ("map", "direction", "captions", "metric"), as_json=json)
    map_id = next(filter(None, (row.get("map_id") or row.get("applied_map_id") for row in rows)), None)
    if map_id is not None and not json:
        print(f"map {map_id}")


def _refuse_fitting(*options: object) -> None:
    if any(option is not None for option in options):
        raise UsageError("--apply scores a saved map and fits nothing. Leave out --fit and what belongs to fitting.")


def _numbers(text: str | None) -> tuple[int, ...]:
    try:
        return tuple(dict.fromkeys(int(word) for word in text.split(","))) if text else ()
    except ValueError:
        raise UsageError(f"--curve is {text!r}; write numbers of pairs with commas, such as 10,30,100.") from None


_COLUMNS: dict[str, Callable[[Row], str]] = {
    "map": lambda row: f"{row['map']}, difference" if "difference" in row else str(row["map"]),
    "pairs": lambda row: f"{row['pairs']:,}",
    "direction": lambda row: str(row["direction"]).replace("_", " "),
    "captions": lambda row: str(row["protocol"]),
    "metric": lambda row: str(row["metric"]),
    "value": lambda row: number(row["value"]),
    "95 %": interval,
    "chance": lambda row: number(row["chance"]),
    "n": lambda row: f"{row['n']:,}",
    "ties": lambda row: f"{row['ties']:.1%}",
}
