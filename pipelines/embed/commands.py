"""Embed captions, pictures or scenes with a frozen encoder, or import vectors made elsewhere."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Annotated

import typer

from infra.models.checkpoints import SYNTAX
from infra.options import HomeOption, JsonOption
from infra.output import print_json

if TYPE_CHECKING:
    from infra.home import Home
    from pipelines.embed.job import EmbedOutcome
    from pipelines.embed.plan import EmbedConfig

app = typer.Typer(
    add_completion=False,
    rich_markup_mode=None,
    help="Embed captions, pictures or scenes with a frozen encoder, or import vectors made elsewhere.",
)

_Catalog = Annotated[str | None, typer.Option(help="SQLite path or postgres:... [env GOODVIEWS_CATALOG].")]


@app.callback(invoke_without_command=True)
def embed(
    ctx: typer.Context,
    model: Annotated[
        list[str] | None,
        typer.Option(help=f"HF name, folder, {SYNTAX}, efficientnet-lite0; repeat for more."),
    ] = None,
    dataset: Annotated[str | None, typer.Option(help="Dataset, or dataset@version; default: the current one.")] = None,
    split: Annotated[str | None, typer.Option(help="Split to embed.")] = None,
    of: Annotated[str | None, typer.Option(help="captions, images or scenes (mean of unit captions).")] = None,
    images: Annotated[list[str] | None, typer.Option(help="Folder or tar of pictures; repeat for more.")] = None,
    layers: Annotated[str, typer.Option(help="last, all, or numbers such as 0,6,12.")] = "last",
    pool: Annotated[str | None, typer.Option(help="mean, cls or last; default: what the folder records.")] = None,
    dtype: Annotated[str, typer.Option(help="float16 or float32.")] = "float16",
    roles: Annotated[str | None, typer.Option(help="Captions of these roles only, such as human,alt.")] = None,
    name: Annotated[
        str | None, typer.Option(help="Name of the set; default: model/dataset/split/of, then what is not default.")
    ] = None,
    batch_tokens: Annotated[int, typer.Option(help="Tokens a batch.")] = 8192,
    max_missing_rate: Annotated[float, typer.Option(help="Share of pictures that may be missing.")] = 0.0,
    json: JsonOption = False,
    home: HomeOption = None,
    catalog: _Catalog = None,
    address: Annotated[str | None, typer.Option(help="Ray cluster to join; default: start one here.")] = None,
    num_cpus: Annotated[int | None, typer.Option(help="CPUs of the Ray started here; 0: no Ray.")] = None,
) -> None:
    """Embed captions, pictures or scenes with a frozen encoder, or import vectors made elsewhere."""
    if ctx.invoked_subcommand is not None:
        _refuse_options_before(ctx)
        return
    from infra.errors import UsageError
    from infra.home import resolve
    from pipelines.embed.plan import EmbedConfig

    needed = {"--model": model, "--dataset": dataset, "--split": split, "--of": of}
    if absent := [option for option, value in needed.items() if not value]:
        raise UsageError(f"{' and '.join(absent)} must be given. See `goodviews embed --help`.")
    models = list(dict.fromkeys(model or ()))
    if name is not None and len(models) > 1:
        raise UsageError(f"--name names one set, but {len(models)} models were given. Leave it out.")
    title, _, version = str(dataset).partition("@")
    config = EmbedConfig(
        model=models[0],
        dataset=title,
        version=version or None,
        split=str(split),
        observation=str(of),
        images=tuple(images or ()),
        layers=layers,
        pooling=pool,
        dtype=dtype,
        roles=tuple(role.strip() for role in roles.split(",")) if roles else (),
        name=name,
        batch_tokens=batch_tokens,
        max_missing_rate=max_missing_rate,
    )
    outcomes = _embed_all(config, models, resolve(home, catalog), address=address, num_cpus=num_cpus)
    _print(outcomes, as_json=json)


def _embed_all(
    config: EmbedConfig, models: Sequence[str], home: Home, *, address: str | None, num_cpus: int | None
) -> list[EmbedOutcome]:
    from infra.session import open_workers
    from pipelines.embed.job import embed as run
    from pipelines.embed.plan import plan_embedding

    # All models are planned before the first is run, so that a wrong name fails at once.
    plans = [plan_embedding(replace(config, model=model), home) for model in models]
    with open_workers(address=address, num_cpus=num_cpus) as workers:
        return [run(plan, None if num_cpus == 0 else workers) for plan in plans]


@app.command("import")
def import_(
    file: Annotated[str, typer.Argument(help="npz with keys and vectors, npy with --keys, or parquet.")],
    name: Annotated[str, typer.Option(help="Name of the set.")],
    keys: Annotated[str | None, typer.Option(help="Key file of a npy: a key a line, or key, tab, item.")] = None,
    dataset: Annotated[str | None, typer.Option(help="Dataset whose scenes (or source ids) the keys name.")] = None,
    split: Annotated[str | None, typer.Option(help="Split that the keys must be in.")] = None,
    of: Annotated[str, typer.Option(help="captions, images or scenes.")] = "scenes",
    model: Annotated[
        str | None, typer.Option(help="Label of what made the vectors; imports of one label are of one space.")
    ] = None,
    json: JsonOption = False,
    home: HomeOption = None,
    catalog: _Catalog = None,
) -> None:
    """Take vectors made elsewhere as an embedding set."""
    from infra.home import resolve
    from pipelines.embed.imported import ImportConfig, import_vectors

    config = ImportConfig(file=file, name=name, keys=keys, dataset=dataset, split=split, observation=of, model=model)
    record = import_vectors(config, resolve(home, catalog))
    if json:
        print_json(record)
        return
    where = f" of {record.dataset}" if record.dataset else ""
    typer.echo(f"{record.name} ({record.embedding_id}): {record.rows:,} {record.observation}{where} x {record.dims}")


def _refuse_options_before(ctx: typer.Context) -> None:
    """Raise UsageError for an option of `embed` before a subcommand, which would ignore it."""
    from infra.errors import UsageError

    sources = {name: ctx.get_parameter_source(name) for name in ctx.params}
    given = [name for name, source in sources.items() if source is not None and source.name == "COMMANDLINE"]
    if given:
        option = "--" + given[0].replace("_", "-")
        raise UsageError(
            f"{option} stands before `{ctx.invoked_subcommand}`, which has its own options. Put it behind."
        )


def _print(outcomes: Sequence[EmbedOutcome], *, as_json: bool) -> None:
    """As JSON one object for one model, a list for several."""
    if as_json:
        print_json(outcomes[0] if len(outcomes) == 1 else outcomes)
        return
    for outcome in outcomes:
        typer.echo(_line(outcome))


def _line(outcome: EmbedOutcome) -> str:
    layers = f"layer{'s' if len(outcome.layers) > 1 else ''} {', '.join(map(str, outcome.layers))}"
    noun = "pictures" if outcome.observation == "images" else "texts"
    if outcome.was_there:
        cost = "was there already"
    else:
        cost = f"{outcome.seconds:.1f} s, {outcome.texts_per_s:,.0f} {noun}/s"
        if outcome.shards_reused:
            cost += f", {outcome.shards_reused} of {outcome.shards} shards finished before"
    notes = f"; {outcome.truncated:,} texts cut" if outcome.truncated else ""
    notes += f"; {outcome.missing:,} pictures missing" if outcome.missing else ""
    return (
        f"{outcome.name} ({outcome.embedding_id}): {outcome.rows:,} {outcome.observation} x {outcome.dims}, {layers}, "
        f"{outcome.pooling}; {cost}{notes}"
    )
