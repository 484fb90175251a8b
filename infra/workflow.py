"""Tour the built-in toy world: ingest it, then ask the catalog what is there.

Owns: verbs that cross stages. Does not own: any stage; it runs their commands by name, as a shell script would, so that
every line shown here can be typed by hand. Invariant: no stage is imported.
"""

from __future__ import annotations

import shlex
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated

import typer

if TYPE_CHECKING:
    from rich.console import Console

DEMO_HOME = "./goodviews-demo"
SHARDS_OF_THE_DEMO = 4

app = typer.Typer(add_completion=False)


@dataclass(frozen=True, kw_only=True)
class _Step:
    title: str
    why: str
    command: Sequence[str]


@app.command()
def demo(
    home: Annotated[str, typer.Option(help="Folder for the demo; made when absent.")] = DEMO_HOME,
    scenes: Annotated[int, typer.Option(min=1, help="Scenes of the toy world.")] = 2000,
    num_cpus: Annotated[
        int | None, typer.Option(min=0, help="CPUs for Ray; 0: in one process, without Ray. Default: all.")
    ] = None,
) -> None:
    """Ingest a toy world of pictures and captions and show, from the catalog, what came of it."""
    from rich.console import Console
    from rich.panel import Panel

    console = Console(highlight=False)
    console.print(
        Panel(_INTRODUCTION, title="[bold]goodviews demo[/bold]", expand=False, width=min(console.width, 100))
    )
    steps = [*_ingest_steps(home, scenes, num_cpus), *_catalog_steps(home)]
    for number, step in enumerate(steps, start=1):
        _run(console, step, f"{number}/{len(steps)}")
    console.print(Panel(_next(home), title="[bold]Try next[/bold]", expand=False, width=min(console.width, 100)))


_INTRODUCTION = (
    "A [bold]scene[/bold] is one state of the world; its captions are [bold]observations[/bold] of it. Two captions of "
    "one scene are a [green]good[/green] pair of views: they share what is true of the scene. Two crops of one caption "
    "are a [red]bad[/red] pair: they also share its wording. goodviews keeps track of who may be paired with whom."
)


def _ingest_steps(home: str, scenes: int, num_cpus: int | None) -> list[_Step]:
    per_shard = max(1, -(-scenes // SHARDS_OF_THE_DEMO))
    words = ["ingest", "toyworld", "--set", f"source.scenes={scenes}", "--scenes-per-shard", str(per_shard)]
    words += ["--home", home, *([] if num_cpus is None else ["--num-cpus", str(num_cpus)])]
    return [
        _Step(
            title="Ingest the toy world",
            why="A world with a known state is drawn and captioned by five writers, some of them careless. Its texts are "
            "cleaned, grouped by scene, and written as parquet (for queries) and tars of good and bad views (for "
            "training). Same parameters, same bytes: run it again and nothing is written twice.",
            command=words,
        )
    ]


def _catalog_steps(home: str) -> list[_Step]:
    def ask(title: str, why: str, query: str) -> _Step:
        return _Step(title=title, why=why, command=["catalog", "sql", query, "--home", home])

    return [
        ask(
            "Captions per scene",
            "A scene with one caption has no good pair. Five writers, less what was rejected:",
            "SELECT len(captions) AS captions, count(*) AS scenes, bar(count(*), 0, sum(count(*)) OVER (), 30) AS share "
            "FROM scenes GROUP BY 1 ORDER BY 1",
        ),
        ask(
            "The shards",
            "A shard is the unit of work, of retry and of accounting: texts read = texts kept + rejects, in each.",
            "SELECT split, shard, scenes, texts_read, texts_kept, rejects, bad_passes, "
            "round(bytes / 1e6, 1) AS megabytes, len(files) AS files, rows_digest[:12] AS rows_digest "
            "FROM shards ORDER BY shard",
        ),
        ask(
            "Rejects by reason",
            "No text vanishes: what was not kept is a row too, with its reason and its address in the source.",
            "SELECT reason, count(*) AS texts, min(text) AS example FROM rejects GROUP BY reason ORDER BY texts DESC",
        ),
        ask(
            "One scene",
            "The group that good views draw from. A bad view draws from one of these lines alone.",
            "SELECT scene_key, index, role, text FROM captions "
            "WHERE scene_key = (SELECT min(scene_key) FROM scenes WHERE split = 'train') ORDER BY index",
        ),
        _Step(
            title="Verify",
            why="Every file is hashed again and compared with its manifest, and the catalog with the manifests.",
            command=["catalog", "verify", "--home", home],
        ),
    ]


def _next(home: str) -> str:
    here = shlex.quote(home)
    return "\n".join(
        [
            f"[cyan]goodviews catalog tables --home {here}[/cyan]",
            "    what else the catalog holds",
            f"[cyan]goodviews catalog sql 'SELECT * FROM scene_stats' --home {here}[/cyan]",
            "    any SELECT you like, as a table, --csv or --json",
            f"[cyan]goodviews catalog connect --home {here}[/cyan]",
            "    the same catalog in a plain DuckDB client",
            "[cyan]goodviews ingest table --dataset mine --input captions.csv --dry-run[/cyan]",
            "    your own captions: what would be read, and as what",
        ]
    )


def _run(console: Console, step: _Step, place: str) -> None:
    from rich.text import Text

    console.print()
    console.rule(f"[bold]{place}  {step.title}[/bold]", align="left")
    console.print(Text(step.why, style="italic"), width=min(console.width, 100))
    # Never wrapped, so that the line can be copied into a shell.
    console.print(Text("$ goodviews " + " ".join(map(_quoted, step.command)), style="cyan"), soft_wrap=True)
    # The child writes to the same place, after us.
    console.file.flush()
    code = subprocess.run([sys.executable, "-m", "infra.cli", *step.command], check=False).returncode
    if code != 0:
        # The command has said why.
        raise typer.Exit(code if code > 0 else 1)


def _quoted(word: str) -> str:
    """`word` for a shell; SQL with its own single quotes stays readable in double ones."""
    if "'" in word and not set(word) & set('"$`\\!'):
        return f'"{word}"'
    return shlex.quote(word)
