"""Score how alike two embedding sets are, with chance, intervals, ties and leakage."""

from __future__ import annotations

from typing import Annotated

import typer

from indexing.scores.printing import Row, interval, number, print_scores
from infra.options import HomeOption, JsonOption

app = typer.Typer(no_args_is_help=True, add_completion=False, rich_markup_mode=None)

_METRICS = (
    "mutual_knn, cycle_knn, lcs_knn, edit_distance_knn, cka, unbiased_cka, cknna, svcca, or all; repeat for more "
    "[default: mutual_knn]."
)
_DRAWS = (
    "Draws behind an interval; 0: none. cka, unbiased_cka and cknna take 1,000 at most (200 from 5,000 items on), "
    "svcca 200, and cka of over 100,000 items none; the JSON tells `draws`."
)
_Metric = Annotated[list[str] | None, typer.Option(help=_METRICS)]
_Protocol = Annotated[str, typer.Option(help="plain, or huh2024: outliers clamped, the best pair of layers.")]
_Bootstrap = Annotated[int, typer.Option(help=_DRAWS)]


@app.command()
def align(
    left: Annotated[str, typer.Argument(help="Embedding set, by name or id.")],
    right: Annotated[str, typer.Argument(help="Embedding set, by name or id.")],
    metric: _Metric = None,
    k: Annotated[int, typer.Option("--k", help="Neighbours.")] = 10,
    protocol: _Protocol = "plain",
    exact_clamp: Annotated[bool, typer.Option("--exact-clamp", help="huh2024: the quantile over all values.")] = False,
    left_layer: Annotated[int | None, typer.Option(help="Layer of LEFT [default: the last].")] = None,
    right_layer: Annotated[int | None, typer.Option(help="Layer of RIGHT [default: the last].")] = None,
    captions: Annotated[
        str, typer.Option(help="Several captions a scene: mean of unit vectors, or one by hash.")
    ] = "mean",
    keys: Annotated[str | None, typer.Option(help="File of scene keys, one a line: score only these.")] = None,
    against: Annotated[
        str | None, typer.Option(help="Another set in the place of LEFT: also the paired difference.")
    ] = None,
    permutations: Annotated[int, typer.Option(help="Shuffles that calibrate a score; 0: none.")] = 200,
    bootstrap: _Bootstrap = 10_000,
    seed: Annotated[int, typer.Option(help="Of shuffles, draws and captions.")] = 0,
    json: JsonOption = False,
    home: HomeOption = None,
    catalog: Annotated[str | None, typer.Option(help="SQLite path or postgres:... [env GOODVIEWS_CATALOG].")] = None,
) -> None:
    """Score how alike two embedding sets are, with chance, intervals, ties and leakage."""
    from indexing.align.job import ScoringConfig, score_sets
    from indexing.align.layers import ProtocolConfig
    from indexing.align.score import METRICS, AlignConfig
    from indexing.sets.joins import JoinConfig
    from indexing.uncertainty.bootstrap import BootstrapConfig
    from indexing.uncertainty.calibration import CalibrationConfig
    from infra.home import resolve

    named = metric or ["mutual_knn"]
    config = ScoringConfig(
        left=left,
        right=right,
        against=against,
        left_layer=left_layer,
        right_layer=right_layer,
        keys=keys,
        align=AlignConfig(
            metrics=METRICS if named == ["all"] else tuple(dict.fromkeys(named)),
            k=k,
            protocol=ProtocolConfig(name=protocol, exact_quantile=exact_clamp),
            bootstrap=BootstrapConfig(draws=bootstrap, seed=seed),
            calibration=CalibrationConfig(permutations=permutations, seed=seed),
        ),
        join=JoinConfig(captions=captions, seed=seed),
    )
    print_scores(score_sets(resolve(home, catalog), config), _COLUMNS, ("metric", "of"), as_json=json)


def _described(row: Row) -> str:
    """The metric, with all that distinguishes the rows of one table."""
    if "difference" in row:
        return f"{row['metric']}, difference"
    known = [str(layer) for layer in row.get("layers") or [] if layer is not None]
    return f"{row['metric']} (layers {', '.join(known)})" if row.get("protocol") == "huh2024" else str(row["metric"])


_COLUMNS = {
    "metric": _described,
    "value": lambda row: number(row["value"]),
    "95 %": interval,
    "chance": lambda row: number(row["chance"]),
    "calibrated": lambda row: number(row.get("calibrated")),
    "p": lambda row: number(row.get("p_value")),
    "k": lambda row: str(row["k"] or "-"),
    "n": lambda row: f"{row['n']:,}",
    "ties": lambda row: "-" if row["ties"] is None else f"{row['ties']:.1%}",
    "leaked": lambda row: "?" if row.get("leakage") is None else f"{row['leakage']:.1%}",
    "of": lambda row: " - ".join(row["difference"]) if "difference" in row else f"{row['left']} | {row['right']}",
}
