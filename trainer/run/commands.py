"""List trainings, show one, and verify that two consumed the same sequence."""

from __future__ import annotations

import datetime
import sys
from typing import TYPE_CHECKING, Annotated, Any

import typer

from infra.options import HomeOption, JsonOption
from infra.output import print_facts, print_json, print_table

if TYPE_CHECKING:
    from infra.home import Home
    from trainer.run.records import RunRecord, RunStatus

app = typer.Typer(
    no_args_is_help=True,
    add_completion=False,
    help="List trainings, show one, and verify that two consumed the same sequence.",
)

_Catalog = Annotated[str | None, typer.Option(help="SQLite path or postgres:... [env GOODVIEWS_CATALOG].")]


@app.command("list")
def list_(home: HomeOption = None, catalog: _Catalog = None, json: JsonOption = False) -> None:
    """List all runs, oldest first."""
    from infra.home import resolve
    from trainer.run import records

    where = resolve(home, catalog)
    rows = []
    for run_id in records.list_run_ids(where):
        record = records.read_record(where, run_id)
        rows.append(_summary(record, records.read_status(records.runs_url(where, run_id))))
    if json:
        print_json(rows)
    elif rows:
        cells = [[f"{v:,}" if isinstance(v, int) else str(v) for v in row.values()] for row in rows]
        print_table(list(rows[0]), cells)
    else:
        print("There are no runs yet; `goodviews train` makes one.", file=sys.stderr)


@app.command()
def show(
    run: Annotated[str, typer.Argument(help="Id of the run.")],
    home: HomeOption = None,
    catalog: _Catalog = None,
    json: JsonOption = False,
) -> None:
    """Show the config of a run, how far it is, and its latest metrics."""
    from infra.home import resolve
    from trainer.run import checkpoint, records

    where = resolve(home, catalog)
    record = records.read_record(where, run)
    url = records.runs_url(where, run)
    found = {
        **_summary(record, records.read_status(url)),
        "snapshot_id": record.snapshot_id,
        "code_version": record.code_version,
        "plan_digest": record.plan_digest,
        "tokenizer_digest": record.tokenizer_digest,
        "ledger_steps": records.read_ledger(url).num_rows,
        "checkpoints": checkpoint.published_steps(records.checkpoints_url(url, record)),
        "encoders": records.encoder_names(url),
        "metrics": records.latest_metrics(url),
        "url": url,
        "config": record.config,
    }
    if json:
        print_json(found)
        return
    metrics = ", ".join(f"{name} {value:.5g}" for name, value in found["metrics"].items())
    print_facts({**found, "metrics": metrics or "none yet"})


@app.command()
def verify(
    left: Annotated[str, typer.Argument(help="Id of a run.")],
    right: Annotated[str, typer.Argument(help="Id of another run.")],
    home: HomeOption = None,
    catalog: _Catalog = None,
    json: JsonOption = False,
) -> None:
    """Check that two runs consumed the same sequence, or name the first step where they differ (exit code 1)."""
    from infra.home import resolve
    from trainer.run import records

    found = records.verify(resolve(home, catalog), left, right)
    if json:
        print_json(found)
    else:
        print(found.sentence)
    if found.differs_at is not None:
        raise typer.Exit(1)


@app.command()
def record(
    run: Annotated[str, typer.Argument(help="Id of the run.")], home: HomeOption = None, catalog: _Catalog = None
) -> None:
    """Write the rows of a run into the catalog again, from its files."""
    from catalog.rows.runs import finish_run
    from infra.home import resolve
    from trainer.run import records

    where: Home = resolve(home, catalog)
    found = records.read_record(where, run)
    url = records.runs_url(where, run)
    status = records.read_status(url) or records.no_status()
    finish_run(where, records.catalog_row(url, found, status), records.read_metrics(url))
    print(f"Wrote the rows of run {run}.")


def _summary(record: RunRecord, status: RunStatus | None) -> dict[str, Any]:
    from trainer.run import records

    state = status or records.no_status()
    started = datetime.datetime.fromtimestamp(record.started_at, datetime.UTC)
    return {
        "run_id": record.run_id,
        "recipe": record.recipe,
        "arm": record.arm,
        "objective": record.objective,
        "dataset": f"{record.dataset}@{record.version}/{record.split}",
        "seed": record.seed,
        "status": state.status,
        "steps": f"{state.steps:,}/{record.steps:,}",
        "samples": state.samples,
        "tokens": state.tokens,
        "ranks": state.ranks,
        "started": started.isoformat(sep=" ", timespec="seconds"),
    }
