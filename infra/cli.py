"""The command line root: `goodviews`, its lazy commands, logging, and the exit code of every ending.

Invariant: a command's module is imported when that command runs, and never for `--help`; so help needs no torch, no
ray.
"""

from __future__ import annotations

import ast
import contextlib
import difflib
import logging
import os
import select
import sys
import traceback
from collections.abc import Sequence
from importlib.machinery import ModuleSpec, PathFinder
from importlib.metadata import EntryPoint, entry_points
from importlib.util import find_spec
from pathlib import Path
from typing import Annotated, Any, cast

import typer
from typer.core import TyperCommand, TyperGroup
from typer.exceptions import TyperException

from infra.errors import EXIT_DONE, EXIT_INTERRUPTED, GoodviewsError, UsageError
from infra.version import package_version

GROUP = "goodviews.commands"
EXIT_PIPE_CLOSED = 128 + 13
"What a shell reports of a program that SIGPIPE ended."

_ABOUT = "From raw caption sets to image-grouped shards, encoders and alignment numbers."
_INTERRUPTED = "interrupted. What was finished is kept; run the same command again to go on."
_NOT_INSTALLED = "No command is installed. Run `make setup`, or `pip install -e .` in the folder of the project."


class _LazyGroup(TyperGroup):
    """The commands of the entry-point group; each is loaded when it is named, and listed without being loaded."""

    def list_commands(self, ctx: Any) -> list[str]:
        return sorted(_entries())

    def get_command(self, ctx: Any, cmd_name: str) -> TyperCommand | TyperGroup | None:
        entry = _entries().get(cmd_name)
        if entry is None:
            raise UsageError(_no_such_command(cmd_name))
        # A Typer app of one command is that command: `goodviews ingest`, not `goodviews ingest ingest`.
        command = typer.main.get_command(_load(entry))
        command.name = cmd_name
        return cast("TyperCommand | TyperGroup", command)

    def format_help(self, ctx: Any, formatter: Any) -> None:
        # Typer's own would load every command for its help.
        self.format_usage(ctx, formatter)
        formatter.write_paragraph()
        formatter.write_text(_ABOUT)
        rows = [(typer.style(name, bold=True), _summary(entry)) for name, entry in sorted(_entries().items())]
        if rows:
            with formatter.section("Commands"):
                formatter.write_dl(rows)
        else:
            formatter.write_paragraph()
            formatter.write_text(_NOT_INSTALLED)
        records = [record for p in self.get_params(ctx) if (record := p.get_help_record(ctx)) is not None]
        with formatter.section("Options"):
            formatter.write_dl(records)
        formatter.write_paragraph()
        formatter.write_text("Begin with `goodviews demo`. `goodviews COMMAND --help` tells more of one command.")

    def invoke(self, ctx: Any) -> Any:
        try:
            return super().invoke(ctx)
        except BrokenPipeError as error:
            # Typer would end with 1 and no word, whichever pipe or connection it was.
            raise _PipeError from error


class _PipeError(Exception):
    """Somebody closed the other end of a pipe or connection while a command ran."""


def _entries() -> dict[str, EntryPoint]:
    return {entry.name: entry for entry in entry_points(group=GROUP)}


def _no_such_command(name: str) -> str:
    known = sorted(_entries())
    if not known:
        return f"There is no command {name!r}. {_NOT_INSTALLED}"
    near = difflib.get_close_matches(name, known, n=1, cutoff=0.5)
    hint = f"Did you mean `goodviews {near[0]}`?" if near else f"Commands: {', '.join(known)}."
    return f"There is no command {name!r}. {hint}"


def _load(entry: EntryPoint) -> typer.Typer:
    try:
        app = entry.load()
    except ModuleNotFoundError as error:
        missing = (error.name or "").partition(".")[0]
        if error.name == entry.module or missing in ("", *_own_packages()):
            raise
        message = (
            f"`goodviews {entry.name}` needs the package {missing}, which is not installed. Run `pip install"
            f" {missing}`."
        )
        raise UsageError(message) from error
    return cast(typer.Typer, app)


def _own_packages() -> set[str]:
    return {entry.module.partition(".")[0] for entry in _entries().values()}


def _summary(entry: EntryPoint) -> str:
    """First line of the docstring of the command's module, read from its source without importing anything."""
    spec = _spec(entry.module)
    if spec is None or spec.origin is None or not spec.origin.endswith(".py"):
        return ""
    with contextlib.suppress(OSError, SyntaxError, ValueError):
        docstring = ast.get_docstring(ast.parse(Path(spec.origin).read_bytes())) or ""
        return docstring.partition("\n")[0].strip()
    return ""


def _spec(module: str) -> ModuleSpec | None:
    """`find_spec` that imports no parent package, which may be heavy."""
    head, *rest = module.split(".")
    with contextlib.suppress(ImportError, ValueError):
        spec, name = find_spec(head), head
        for part in rest:
            if spec is None or spec.submodule_search_locations is None:
                return None
            name = f"{name}.{part}"
            spec = PathFinder.find_spec(name, list(spec.submodule_search_locations))
        return spec
    return None


app = typer.Typer(cls=_LazyGroup, add_completion=False, help=_ABOUT, context_settings={"max_content_width": 110})


def _show_version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"goodviews {package_version()}")
        raise typer.Exit


@app.callback(invoke_without_command=True)
def _root(
    ctx: typer.Context,
    verbose: Annotated[bool, typer.Option("--verbose", "-v", help="Log more, to stderr.")] = False,
    show_version: Annotated[
        bool, typer.Option("--version", callback=_show_version, is_eager=True, help="Print the version and exit.")
    ] = False,
) -> None:
    _set_up_logging(verbose=verbose)
    if ctx.invoked_subcommand is None:
        typer.echo(ctx.get_help())


def _set_up_logging(*, verbose: bool) -> None:
    level = logging.DEBUG if verbose else logging.WARNING
    logging.basicConfig(stream=sys.stderr, level=logging.WARNING, format="%(asctime)s %(levelname)s %(message)s")
    # Only our own packages speak up: a debug log of fsspec or asyncio would drown them.
    for package in {"infra", *_own_packages()}:
        logging.getLogger(package).setLevel(level)


def main(arguments: Sequence[str] | None = None) -> None:
    """Run the command line and exit: 0 done, 1 failed, 2 usage, 3 rejects over budget, 4 conflict, 130 interrupted."""
    sys.exit(run(sys.argv[1:] if arguments is None else arguments))


def run(arguments: Sequence[str]) -> int:
    """Run one command line in this process; returns its exit code (an int that the command returns, else 0)."""
    try:
        code = typer.main.get_command(app).main(list(arguments), prog_name="goodviews", standalone_mode=False)
        # An early flush, so that a closed pipe shows here and not as noise at exit.
        sys.stdout.flush()
    except GoodviewsError as error:
        return _fail(str(error), error.exit_code)
    except TyperException as error:
        return _fail(_usage_sentence(error), error.exit_code)
    except (KeyboardInterrupt, typer.Abort):
        return _fail(_INTERRUPTED, EXIT_INTERRUPTED)
    except Exception as error:  # noqa: BLE001  (the last line of defence; it prints the traceback)
        if isinstance(error, (BrokenPipeError, _PipeError)) and _is_stdout_closed():
            # The reader (`| head`) has seen enough. Python would complain once more when it flushes stdout at exit.
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
            return EXIT_PIPE_CLOSED
        traceback.print_exc()
        return _fail("this is a bug in goodviews. Please report it with the command and the lines above.", 1)
    if code == EXIT_INTERRUPTED:
        return _fail(_INTERRUPTED, EXIT_INTERRUPTED)
    return code if isinstance(code, int) and not isinstance(code, bool) else EXIT_DONE


def _is_stdout_closed() -> bool:
    """Whether the reader of stdout has gone away."""
    poll = select.poll()
    poll.register(sys.stdout.fileno(), 0)
    return any(event & select.POLLERR for _, event in poll.poll(0))


def _fail(message: str, code: int) -> int:
    typer.echo(typer.style("error: ", fg="red", bold=True) + message, err=True)
    return code


def _usage_sentence(error: TyperException) -> str:
    message = " ".join(error.format_message().split())
    context = getattr(error, "ctx", None)
    return f"{message.rstrip('.')}. See `{context.command_path} --help`." if context is not None else message


if __name__ == "__main__":
    main()
