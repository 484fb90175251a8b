"""Tour the built-in toy world: from captions and pictures to encoders, scores and a page.

It runs the commands of the stages by name, as a shell script would, so that every line that it shows can be typed by
hand. Invariant: what an earlier demo in the same folder has finished is not done again, and what it left unfinished
goes on.
"""

from __future__ import annotations

import contextlib
import io
import json
import shlex
import time
from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Annotated, Any

import typer

from infra.units import duration

if TYPE_CHECKING:
    from rich.console import Console

    from infra.demo.tour import DemoConfig, Step

DEMO_HOME = "./goodviews-demo"

app = typer.Typer(add_completion=False)


@app.command()
def demo(
    home: Annotated[str, typer.Option(help="Folder for the demo; made when absent.")] = DEMO_HOME,
    seeds: Annotated[
        int | None, typer.Option(min=1, help="Trainings of each kind, with seeds 0, 1, ...; default: 1, with --full 3.")
    ] = None,
    scenes: Annotated[int, typer.Option(min=100, help="Scenes of the toy world.")] = 3000,
    epochs: Annotated[int | None, typer.Option(min=2, help="Of each training; default: 14, with --full 20.")] = None,
    full: Annotated[
        bool, typer.Option("--full", help="Train longer and with three seeds, unless they are given.")
    ] = False,
    num_cpus: Annotated[int, typer.Option(min=0, help="CPUs for Ray; 0: in one process, without Ray.")] = 0,
) -> None:
    """Train three text encoders on a toy world and show which of them sees it as a picture encoder does."""
    from rich.console import Console
    from rich.panel import Panel

    from infra.cli import run as goodviews
    from infra.demo import tour
    from infra.demo.background import Background
    from infra.home import resolve
    from infra.models import registry

    # What is missing is missed now and not after four minutes.
    registry.find_model(tour.PICTURE_MODEL, resolve(home))
    config = tour.DemoConfig(
        home=home,
        scenes=scenes,
        epochs=epochs or (20 if full else tour.EPOCHS),
        seeds=seeds or (3 if full else 1),
        num_cpus=num_cpus,
    )
    began = time.monotonic()
    console = Console(highlight=False)
    width = min(console.width, 100)
    console.print(Panel(_INTRODUCTION, title="[bold]goodviews demo[/bold]", expand=False, width=width))
    first = tour.ingest_steps(config)
    # As many follow whatever the version is; it is known only when the world is there.
    total = len(first) + len(tour.scoring_steps(config, ""))
    for number, step in enumerate(first, start=1):
        _show(console, step, f"{number}/{total}")
        _check(goodviews(list(step.command)))
    known = {run["run_id"]: run["status"] for run in _answer(["runs", "list", "--json", "--home", home])}
    (world,) = _answer(tour.version_query(config))
    steps = [_resumed(step, known) for step in tour.scoring_steps(config, world["version"])]
    trainings = [step.command for step in steps if step.run_id]
    with Background(trainings) as background:
        shown = 0
        for number, step in enumerate(steps, start=len(first) + 1):
            _show(console, step, f"{number}/{total}")
            if step.run_id:
                _check(background.show(shown))
                shown += 1
            else:
                _check(goodviews(list(step.command)))
    title = f"[bold]Done in {duration(time.monotonic() - began)}[/bold]"
    console.print(Panel(_next(config), title=title, expand=False, width=width))


_INTRODUCTION = (
    "A [bold]scene[/bold] is one state of the world; its captions are [bold]observations[/bold] of it. Two captions of"
    " one scene are a [green]good[/green] pair of views: they share what is true of the scene. Two crops of one caption"
    " are a [red]bad[/red] pair: they also share its wording. Three text encoders are trained here, on good views, on"
    " bad views, and on next tokens, and each is compared with an encoder of pictures that none of them has met."
)


def _next(config: DemoConfig) -> str:
    from rich.markup import escape

    here = escape(shlex.quote(config.home))
    return "\n".join(
        [
            f"[bold]{escape(config.page)}[/bold]",
            "    the page: open it in a browser",
            f"[cyan]goodviews catalog tables --home {here}[/cyan]",
            "    what the catalog holds",
            f"[cyan]goodviews catalog sql 'SELECT * FROM leaderboard' --home {here}[/cyan]",
            "    any SELECT you like, as a table, --csv or --json",
            f"[cyan]goodviews catalog verify --home {here}[/cyan]",
            "    every file hashed again and compared with its manifest",
            "[cyan]goodviews ingest table --dataset mine --input captions.csv --dry-run[/cyan]",
            "    your own captions: what would be read, and as what",
        ]
    )


def _resumed(step: Step, known: dict[str, str]) -> Step:
    """The step as it is for a run that an earlier demo has finished or begun."""
    status = known.get(step.run_id or "")
    if status is None or step.run_id is None:
        return step
    home = [*step.command[step.command.index("--home") :]]
    if status == "finished":
        why = (
            "An earlier demo in this folder has trained it, on the same world with the same settings. Shown is what it"
            " came to."
        )
        return replace(step, why=why, command=["runs", "show", step.run_id, *home])
    why = "An earlier demo in this folder was ended while it trained this one. It goes on from its newest checkpoint."
    return replace(step, why=why, command=["train", "--resume", step.run_id, *home])


def _show(console: Console, step: Step, place: str) -> None:
    from rich.text import Text

    console.print()
    console.rule(Text(f"{place}  {step.title}", style="bold"), align="left")
    console.print(Text(step.why, style="italic"), width=min(console.width, 100))
    # Never wrapped, so that the line can be copied into a shell.
    console.print(Text("$ goodviews " + " ".join(map(_quoted, step.command)), style="cyan"), soft_wrap=True)
    # The command writes to the same place, after us.
    console.file.flush()


def _check(code: int) -> None:
    """End the demo with the exit code of a command that failed; the command has said why."""
    if code != 0:
        raise typer.Exit(code if code > 0 else 1)


def _answer(command: Sequence[str]) -> Any:
    """What a command prints as JSON."""
    from infra.cli import run as goodviews

    printed = io.StringIO()
    with contextlib.redirect_stdout(printed):
        code = goodviews(list(command))
    _check(code)
    return json.loads(printed.getvalue())


def _quoted(word: str) -> str:
    """`word` for a shell; SQL with its own single quotes stays readable in double ones."""
    if "'" in word and not set(word) & set('"$`\\!'):
        return f'"{word}"'
    return shlex.quote(word)
