"""Train a text encoder: good views, bad views, next tokens or caption pairs."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

import typer

from infra.options import HomeOption, JsonOption
from infra.output import print_facts, print_json
from infra.units import duration, size

if TYPE_CHECKING:
    from collections.abc import Mapping

    from trainer.run.forecast import Forecast
    from trainer.run.job import Finished

app = typer.Typer(no_args_is_help=True, add_completion=False)


@app.command()
def train(
    recipe: Annotated[str | None, typer.Option(help="flickr-33m, recap-109m, tiny-cpu, or a TOML file.")] = None,
    dataset: Annotated[str | None, typer.Option(help="Dataset to train on; default: the recipe's.")] = None,
    split: Annotated[str | None, typer.Option(help="Split of it; default: the recipe's.")] = None,
    roles: Annotated[str | None, typer.Option(help="Captions of these roles only, such as human,alt,recap.")] = None,
    views: Annotated[str | None, typer.Option(help="good, bad, or the share of good samples from 0 to 1.")] = None,
    objective: Annotated[str | None, typer.Option(help="lejepa or ntp (next tokens).")] = None,
    arm: Annotated[
        str | None, typer.Option(help="good, bad, next-token or caption-pair: a table of the recipe.")
    ] = None,
    seed: Annotated[int | None, typer.Option(help="Of order, views, weights and dropout.")] = None,
    num_workers: Annotated[int, typer.Option(help="Ranks on Ray; 0: one rank in this process, without Ray.")] = 0,
    use_gpu: Annotated[bool, typer.Option("--use-gpu", help="One GPU a rank.")] = False,
    plan: Annotated[bool, typer.Option("--plan", help="Print steps, tokens, memory and cost, and stop.")] = False,
    resume: Annotated[str | None, typer.Option(help="Go on with this run from its newest checkpoint.")] = None,
    run_id: Annotated[
        str | None, typer.Option(help="Id of the new run; default: made from recipe, arm, seed and time.")
    ] = None,
    json: JsonOption = False,
    set_: Annotated[list[str] | None, typer.Option("--set", help="Option as a.b=v; repeat for more.")] = None,
    home: HomeOption = None,
    catalog: Annotated[str | None, typer.Option(help="SQLite path or postgres:... [env GOODVIEWS_CATALOG].")] = None,
    address: Annotated[str | None, typer.Option(help="Ray cluster to join; default: start one here.")] = None,
    num_cpus: Annotated[int | None, typer.Option(help="CPUs of the Ray started here.")] = None,
) -> None:
    """Train a text encoder: good views, bad views, next tokens or caption pairs."""
    from infra.home import resolve

    flags = {"data.dataset": dataset, "data.split": split, "objective": objective, "plan.seed": seed}
    sets = [f"{key}={value}" for key, value in flags.items() if value is not None]
    sets += _roles(roles) + _fraction(views) + (set_ or [])
    where = resolve(home, catalog)
    _check_choice(resume, plan=plan, own={"--recipe": recipe, "--arm": arm, "--run-id": run_id})

    # Imported here, because torch and ray take seconds and a wrong option should fail at once.
    from trainer.run import recipe as recipes
    from trainer.run.launch import Cluster

    cluster = Cluster(num_workers=num_workers, use_gpu=use_gpu, address=address, num_cpus=num_cpus)
    if plan and recipe is not None:
        from trainer.run.forecast import forecast

        found = forecast(recipes.load(recipe, arm=arm, sets=sets), where, ranks=cluster.ranks, on_gpu=use_gpu)
        _print_forecast(found, as_json=json)
        return
    from trainer.run import job

    if resume is not None:
        finished = job.resume(resume, where, cluster, sets=sets)
    else:
        chosen = recipes.load(str(recipe), arm=arm, sets=sets)
        finished = job.start(chosen, where, cluster, run_id=run_id)
    _print_finished(finished, as_json=json)


def _check_choice(resume: str | None, *, plan: bool, own: Mapping[str, str | None]) -> None:
    """Refuse options that contradict --resume, and a command without a recipe or a run. own: options of a new run."""
    from infra.errors import UsageError

    given = [name for name, value in own.items() if value is not None]
    if resume is not None and given:
        raise UsageError(f"{given[0]} cannot be combined with --resume: run {resume} has its own. Leave it out.")
    if resume is not None and plan:
        raise UsageError("--plan and --resume exclude each other. `goodviews runs show` prints how far a run is.")
    if resume is None and own["--recipe"] is None:
        raise UsageError("Name a recipe, such as `--recipe tiny-cpu`, or a run to go on with: `--resume RUN`.")


def _roles(text: str | None) -> list[str]:
    if text is None:
        return []
    names = ", ".join(f'"{name.strip()}"' for name in text.split(",") if name.strip())
    return [f"plan.roles=[{names}]"]


def _fraction(text: str | None) -> list[str]:
    """`--views` as a setting of the recipe. Raises UsageError for anything but good, bad or a share."""
    from infra.errors import UsageError

    if text is None:
        return []
    words = {"good": 1.0, "bad": 0.0}
    try:
        share = words[text] if text in words else float(text)
    except ValueError:
        share = -1.0
    if not 0 <= share <= 1:
        raise UsageError(f"--views is {text!r}; use `good`, `bad`, or the share of good samples, from 0 to 1.")
    return [f"plan.good_fraction={share}"]


def _print_finished(finished: Finished, *, as_json: bool) -> None:
    if as_json:
        print_json(finished)
        return

    names = ("loss", "inv", "sigreg", "validation_loss", "effective_rank", "samples_per_s")
    numbers = {name: finished.metrics[name] for name in names if name in finished.metrics}
    print_facts(
        {
            "run": f"{finished.run_id}, {finished.status} in {duration(finished.seconds)}",
            "consumed": f"{finished.steps:,} steps, {finished.samples:,} samples, {finished.tokens:,} caption tokens",
            "last": ", ".join(f"{name} {value:.4g}" for name, value in numbers.items()),
            "encoders": ", ".join(finished.encoders),
            "files": finished.url,
        }
    )


def _print_forecast(found: Forecast, *, as_json: bool) -> None:
    if as_json:
        print_json(found)
        return

    f, v = found.facts, found.views
    left_out = f", {f.scenes_left_out:,} left out" if f.scenes_left_out else ""
    repeats = "unknown from manifests" if f.repeats is None else f"{f.repeats:,}"
    sigreg = "none (next-token prediction)"
    if found.sigreg_weight is not None:
        scale = f"{found.views_per_sample} views x {found.batch_per_rank} a rank"
        sigreg = f"w {found.sigreg_weight:g} (lambda {found.sigreg_lambda:g} x {scale})"
    scenes = f"{f.scenes:,} scenes in {f.shards:,} shards{left_out}"
    epochs = f"{f.steps_per_epoch:,} an epoch, {f.epochs:.4g} epochs"
    views = f"{found.tokens_trained:,} of views ({v.source}, {v.tokens:.1f} a sample)"
    hours = f"{found.device_hours:,.2f} device hours, {duration(3600 * found.wall_hours)} on {found.ranks}"
    device = f"{found.device} at {found.peak_tflops:g} TFLOP/s and {found.mfu:.0%} of it"
    rows = {
        "recipe": f"{found.recipe}, arm {found.arm}, {found.objective}",
        "data": f"{f.dataset}@{f.version} {f.split}: {scenes}, plan {f.digest}",
        "steps": f"{f.steps:,} ({epochs}), batch {f.batch_global:,} over {found.ranks} ranks, {f.lanes} lanes",
        "samples": f"{f.samples:,}, dropped {f.drops_per_epoch:,} an epoch, bad captions repeated {repeats}",
        "tokens": f"{f.tokens:,} of captions (from {f.tokens_from}); {views}",
        "padding": f"{v.padding_share:.1%} of positions in attention, none elsewhere ({v.source})",
        "model": f"{found.parameters:,} parameters, {found.parameters_trained:,} with projector, {found.precision}",
        "memory": f"about {size(found.memory_bytes)} a rank (estimated)",
        "SIGReg": sigreg,
        "cost": f"{found.flops:.3g} operations: {hours} ({device})",
    }
    if found.tokenizer_problem is not None:
        rows["tokenizer"] = found.tokenizer_problem
    print_facts(rows)
