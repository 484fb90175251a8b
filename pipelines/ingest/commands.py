"""Turn caption sets into scenes, view tars and a committed dataset version."""

from __future__ import annotations

import dataclasses
import logging
from typing import TYPE_CHECKING, Annotated, Any

import typer

from infra.options import DatasetsHomeOption, JsonOption
from infra.output import print_json
from infra.units import size

if TYPE_CHECKING:
    from infra.config import Settings
    from pipelines.ingest.job import IngestOutcome
    from pipelines.ingest.request import IngestConfig, Request

_log = logging.getLogger(__name__)

app = typer.Typer(no_args_is_help=True, add_completion=False, rich_markup_mode=None)


@app.command()
def ingest(
    source: Annotated[str | None, typer.Argument(help="Name of the source; docs/sources.md has them.")] = None,
    input: Annotated[list[str] | None, typer.Option(help="File, folder, glob or URL; repeat for more.")] = None,
    dataset: Annotated[str | None, typer.Option(help="Name of the dataset; default: the source's name.")] = None,
    scenes_per_shard: Annotated[int | None, typer.Option(help="Scenes a shard [default: 10000].")] = None,
    views: Annotated[str | None, typer.Option(help="View tars to write [default: good,bad].")] = None,
    limit: Annotated[int | None, typer.Option(help="At most so many rows of the input (images, scenes).")] = None,
    exclude: Annotated[
        list[str] | None, typer.Option(help="DATASET[@VERSION][:SPLIT] to leave out; repeat for more.")
    ] = None,
    max_scenes_per_caption: Annotated[
        int | None, typer.Option(help="At most so many scenes under one caption [default: no cap].")
    ] = None,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Show what would be done, read a sample, stop.")] = False,
    max_reject_rate: Annotated[float, typer.Option(help="Share of rejected texts that fails the job.")] = 0.2,
    json: JsonOption = False,
    config: Annotated[str | None, typer.Option(help="TOML file of options.")] = None,
    set_: Annotated[list[str] | None, typer.Option("--set", help="Option as a.b=v; repeat for more.")] = None,
    home: DatasetsHomeOption = None,
    catalog: Annotated[str | None, typer.Option(help="SQLite path or postgres:... [env GOODVIEWS_CATALOG].")] = None,
    address: Annotated[str | None, typer.Option(help="Ray cluster to join; default: start one here.")] = None,
    num_cpus: Annotated[int | None, typer.Option(help="CPUs of the Ray started here; 0: no Ray.")] = None,
) -> None:
    """Turn caption sets into scenes, view tars and a committed dataset version."""
    from infra.config import to_sets

    flags: Settings = {
        "scenes_per_shard": scenes_per_shard,
        "views": views,
        "limit": limit,
        "max_scenes_per_caption": max_scenes_per_caption,
        "exclude.sets": exclude,
    }
    sets = [*(set_ or []), *to_sets(flags)]
    recognised = None
    if source is None:
        recognised = _recognise(input or [], limit, dry_run=dry_run)
        source = next(iter(recognised))
        dataset = dataset or "unnamed"
    request = build_request(source, input or [], dataset, config, sets, max_reject_rate)
    if dry_run:
        _preview(request, home, catalog, json=json, recognised=recognised)
        return
    from infra.home import resolve
    from infra.session import open_workers
    from pipelines.ingest.job import ingest as run

    where = resolve(home, catalog)
    with open_workers(address=address, num_cpus=num_cpus) as workers:
        outcome = run(request, where, workers)
    _print(outcome, as_json=json)


def _preview(
    request: Request, home: str | None, catalog: str | None, *, json: bool, recognised: dict[str, str] | None
) -> None:
    """Show what the job would do. An unknown set to exclude fails here as it would in the job."""
    from infra.home import resolve
    from pipelines.ingest import exclusion
    from pipelines.ingest.preview import preview

    exclusion.resolve(resolve(home, catalog), request.dataset, request.config.exclude)
    if request.config.exclude.sets or request.config.max_scenes_per_caption is not None:
        _log.warning("--dry-run knows neither excluded scenes nor common captions: they take the whole input")
    preview(request, as_json=json, recognised=recognised)


def _recognise(paths: list[str], limit: int | None, *, dry_run: bool) -> dict[str, str]:
    """The sources that read the inputs, when the command line names none. Raises UsageError unless it is a dry run."""
    from infra.errors import UsageError
    from pipelines.ingest.preview import recognise
    from pipelines.sources import SOURCES

    if not dry_run or not paths:
        raise UsageError(
            f"No source was named. Name one of {', '.join(sorted(SOURCES))}, or add --dry-run and --input to see which "
            "reads your files."
        )
    return recognise(paths, limit)


def build_request(
    source: str,
    paths: list[str],
    dataset: str | None,
    config_file: str | None,
    sets: list[str],
    max_reject_rate: float,
) -> Request:
    """A checked request from the values of the command line. Raises UsageError, ConfigError or InputError."""
    from catalog import schema
    from infra.errors import UsageError
    from pipelines.ingest.request import Request
    from pipelines.sources import source_class
    from pipelines.sources.formats.discovery import find_inputs

    kind = source_class(source)
    options, settings = _load(kind, config_file, sets)
    if dataset is None and source == "table":
        raise UsageError(
            "A table has no name of its own, and the next one would hide it. Name the dataset with --dataset."
        )
    name = dataset or options.name
    if not schema.DATASET_PATTERN.fullmatch(name):
        raise UsageError(
            f"The dataset name {name!r} does not match {schema.DATASET_PATTERN.pattern}. Use lower-case letters, "
            "digits, _ and -."
        )
    if not 0 <= max_reject_rate <= 1:
        raise UsageError(f"--max-reject-rate is {max_reject_rate}; it is a share, from 0 to 1.")
    if options.needs_input and not paths:
        raise UsageError(f"Source {source!r} reads files. Name them with --input PATH.")
    if not options.needs_input and paths:
        raise UsageError(f"Source {source!r} reads no files, but --input {paths[0]} was given. Leave it out.")
    inputs = find_inputs(paths, options.reads)[1] if paths else []
    return Request(dataset=name, source=options, config=settings, inputs=inputs, max_reject_rate=max_reject_rate)


def _load(kind: type[Any], config_file: str | None, sets: list[str]) -> tuple[Any, IngestConfig]:
    """Options of the source (section `source`) and of the ingestion (all else) from one file and one list of sets."""
    from infra import config
    from pipelines.ingest.request import IngestConfig

    whole = dataclasses.make_dataclass(
        "IngestOptions",
        [("source", kind, dataclasses.field(default_factory=kind))],
        bases=(IngestConfig,),
        frozen=True,
        kw_only=True,
    )
    loaded: Any = config.load(whole, file=config_file, sets=sets)
    own = {f.name: getattr(loaded, f.name) for f in dataclasses.fields(IngestConfig)}
    return loaded.source, IngestConfig(**own)


def _print(outcome: IngestOutcome, *, as_json: bool) -> None:
    from rich.console import Console
    from rich.markup import escape
    from rich.table import Table

    if as_json:
        print_json(outcome)
        return
    table = Table(show_header=False, box=None, pad_edge=False)
    state = "was there already" if outcome.was_there else f"committed as snapshot {outcome.snapshot_id}"
    reused = f", {outcome.shards_reused} of them published before" if outcome.shards_reused else ""
    rejected = outcome.texts_read - outcome.texts_kept
    reasons = ", ".join(f"{k} {v:,}" for k, v in sorted(outcome.rejects.items(), key=lambda kv: -kv[1]))
    left_out = ", ".join(f"{scenes:,} scenes of {which}" for which, scenes in outcome.excluded.items())
    if "excluded" in outcome.rejects:
        left_out += f"; {outcome.rejects['excluded']:,} texts"
    rows = {
        "version": f"{outcome.dataset}@{outcome.version}, {state}",
        "scenes": f"{outcome.scenes:,} in {outcome.shards:,} shards{reused}",
        "texts": f"{outcome.texts_read:,} read = {outcome.texts_kept:,} kept + {rejected:,} rejected",
        "rejects": reasons or "none",
        **({"left out": left_out} if left_out else {}),
        "time": f"{outcome.seconds:.1f} s, {outcome.scenes / max(outcome.seconds, 1e-9):,.0f} scenes/s",
        "memory": f"peak {size(outcome.peak_rss_bytes)} in one process",
        "files": outcome.url,
    }
    for name, value in rows.items():
        table.add_row(f"[bold]{name}[/bold]", escape(value))
    Console(soft_wrap=True).print(table)
