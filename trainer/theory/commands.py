"""Check the theorems on finite worlds, and LeJEPA beside them."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Annotated

import typer

from infra.options import HomeOption, JsonOption
from infra.output import print_json, print_table

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from trainer.theory.grid import GridConfig, GridResult

app = typer.Typer(
    no_args_is_help=True,
    add_completion=False,
    help="Check the theorems on finite worlds, and LeJEPA beside them.",
)

_Catalog = Annotated[str | None, typer.Option(help="SQLite path or postgres:... [env GOODVIEWS_CATALOG].")]


@app.command()
def verify(
    states: Annotated[int, typer.Option(help="States of a world.")] = 30,
    dims: Annotated[int, typer.Option(help="Dimensions of an encoder.")] = 4,
    worlds: Annotated[int, typer.Option(help="Random worlds.")] = 20,
    steps: Annotated[int, typer.Option(help="Strengths of bad views below 1.")] = 40,
    seed: Annotated[int, typer.Option(help="Decides the worlds and their renderings.")] = 0,
    bandwidth: Annotated[float, typer.Option(help="Width of a scene; wider: a lower threshold.")] = 0.35,
    json: JsonOption = False,
    home: HomeOption = None,
    catalog: _Catalog = None,
) -> None:
    """Solve both arms on many worlds and record the worst case of each claim (exit code 1: one fails)."""
    import dataclasses

    from threadpoolctl import threadpool_limits

    from catalog.rows.theory import Check, record_check
    from infra.errors import IntegrityError
    from infra.home import resolve
    from trainer.theory import grid

    config = grid.GridConfig(states=states, dims=dims, worlds=worlds, steps=steps, seed=seed, bandwidth=bandwidth)
    where = resolve(home, catalog)
    # On matrices of a hundred rows, threads of BLAS cost more than they bring: ten times as much beside other work.
    with threadpool_limits(1, user_api="blas"):
        rows, mismatches = list(grid.run_grid(config)), list(grid.run_mismatches(config))
    outcome = grid.judge(config, rows, mismatches)
    result = dataclasses.asdict(outcome)
    points = grid.points(rows, mismatches)
    check = Check(kind="grid", seed=seed, config=dataclasses.asdict(config), result=result, points=points)
    theory_id = record_check(where, check)
    if json:
        print_json({"theory_id": theory_id, **result})
    else:
        _print_result(config, outcome)
    if failures := outcome.failures(config):
        message = f"On these worlds it does not hold that {'; nor that '.join(failures)}."
        raise IntegrityError(f"{message} The rows are in the catalog as {theory_id}.")


@app.command()
def bridge(
    seeds: Annotated[int, typer.Option(help="Trainings of each kind.")] = 3,
    weight: Annotated[
        list[float] | None, typer.Option(help="Weight of SIGReg; repeat for more [default: 1, 4, 16].")
    ] = None,
    steps: Annotated[int, typer.Option(help="Steps of a training.")] = 1200,
    batch: Annotated[int, typer.Option(help="Pairs in a step.")] = 1024,
    seed: Annotated[int, typer.Option(help="Seed of the grid that the world is taken from.")] = 0,
    json: JsonOption = False,
    home: HomeOption = None,
    catalog: _Catalog = None,
) -> None:
    """Train small networks with LeJEPA on one world and record how far they are from the closed form."""
    import dataclasses

    from catalog.rows.theory import Check, record_check
    from infra.home import resolve
    from trainer.theory.bridge import WEIGHTS, BridgeConfig, points, run_bridge, summary

    config = BridgeConfig(seeds=seeds, steps=steps, batch=batch, seed=seed, weights=tuple(weight or WEIGHTS))
    where = resolve(home, catalog)
    found = []
    for one in run_bridge(config):
        found.append(one)
        angles = ", ".join(f"{angle:.1f}" for angle in one.angles)
        print(f"{one.kind}, seed {one.seed}: angles {angles} degrees, error {one.error:.3f}", file=sys.stderr)
    result = summary(config, found)
    series = points(found)
    check = Check(kind="bridge", seed=seed, config=dataclasses.asdict(config), result=result, points=series)
    theory_id = record_check(where, check)
    if json:
        print_json({"theory_id": theory_id, **result, "series": series})
    else:
        _print_bridge(series)


def _print_bridge(series: Mapping[str, Sequence[Mapping[str, float]]]) -> None:
    import statistics

    # Columns of the table and the numbers in them; the largest angle has the number of dimensions in its name.
    names = {"largest angle": "", "excess loss": "excess", "nuisance": "lost", "error": "error"}
    names["exact error"] = "exact_error"
    rows = []
    for kind, members in series.items():
        largest = f"angle_{sum(name.startswith('angle_') for name in members[0])}"
        means = [statistics.fmean(point[name or largest] for point in members) for name in names.values()]
        rows.append([kind, *(f"{mean:.{1 if i == 0 else 3}f}" for i, mean in enumerate(means))])
    print_table(["kind", *names], rows)


@app.command()
def plot(
    out: Annotated[str | None, typer.Option(help="Folder of the plots [default: HOME/reports/theory].")] = None,
    home: HomeOption = None,
    catalog: _Catalog = None,
) -> None:
    """Draw the newest checks as PNG and SVG, like the report."""
    from catalog.lake import lake
    from catalog.report.canvas import Figure
    from catalog.report.theory import theory
    from catalog.rows.theory import latest_checks
    from infra import storage
    from infra.errors import InputError
    from infra.home import resolve

    where = resolve(home, catalog)
    with lake.reading(where) as reader:
        section = theory(latest_checks(reader))
    if not section.pieces:
        raise InputError("The catalog holds no check of the theorems to draw. Run `goodviews theory verify` first.")
    folder = storage.absolute(out) if out else storage.join(where.url, "reports", "theory")
    for figure in (piece for piece in section.pieces if isinstance(piece, Figure)):
        for ending, content in (("svg", figure.svg), ("png", figure.png)):
            url = storage.join(folder, f"{figure.name}.{ending}")
            storage.publish(url, content)
            print(url)


def _print_result(config: GridConfig, found: GridResult) -> None:
    full, total = 2 * config.dims, found.rows_below + found.rows_above + config.worlds
    lost = ", ".join(f"{r} in {n}" for r, n in found.above_r.items()) or "-"
    worst, median = found.mismatch_tightness_max, found.mismatch_tightness_median
    lines = [
        ("good views", total, "error 0", found.max_good_error, "0"),
        ("bad, below", found.rows_below, "error 0", found.max_below_error, "0"),
        ("bad, above", found.rows_above, "error 2r", found.max_above_deviation, lost),
        ("bad, all kept", config.worlds, f"error {full}", abs(found.special_error - full), f"{found.special_r}"),
    ]
    print_table(
        ["regime", "rows", "claim", "worst deviation", "directions lost, r"],
        [(regime, f"{rows:,}", claim, _short(deviation), r) for regime, rows, claim, deviation, r in lines],
    )
    print(
        f"Sorting the values and dropping the first would count {found.special_naive_r} where all nuisance is kept.\n"
        f"Other positives: {found.mismatch_violations} of {found.mismatch_checks} errors beyond the bound; "
        f"error / bound: median {_short(median)}, most {_short(worst)}."
    )


def _short(value: float | None) -> str:
    return "-" if value is None else f"{value:.1e}"
