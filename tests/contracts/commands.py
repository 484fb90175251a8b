"""docs/commands.md, written from the command line itself.

`python -m tests.contracts.commands` writes it; `test_commands.py` fails where the file differs.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from importlib.metadata import entry_points
from pathlib import Path
from typing import Any

import typer

REPOSITORY = Path(__file__).parents[2]
PAGE = REPOSITORY / "docs" / "commands.md"
HEAD = """# Commands

Every verb with its arguments and options, written from the command line itself (`python -m tests.contracts.commands`).
[guide.md](guide.md) shows how they follow each other.

Exit codes: 0 done, 1 failed, 2 wrong use, 3 rejects over `--max-reject-rate`, 4 conflict with what is there, 130 interrupted.
Results go to stdout, progress and warnings to stderr. `goodviews -v COMMAND` logs more.
"""


def page() -> str:
    """The whole page: a list of the verbs, then a section each."""
    verbs = {entry.name: typer.main.get_command(entry.load()) for entry in entry_points(group="goodviews.commands")}
    lines = [f"- [{name}](#{name}): {_first_line(verbs[name])}" for name in sorted(verbs)]
    sections = [section for name in sorted(verbs) for section in _sections(name, verbs[name], level=2)]
    return "\n".join([HEAD, *lines, "", *sections])


def _sections(name: str, command: Any, level: int) -> Iterator[str]:
    """The section of a command, then those of its subcommands."""
    inner = getattr(command, "commands", {})
    yield f"{'#' * level} {name}\n"
    yield _text(command.help or "") + "\n"
    if not inner or getattr(command, "invoke_without_command", False):
        yield f"```text\ngoodviews {name} {_usage(command)}\n```\n"
    rows = [_row(parameter) for parameter in command.params if not getattr(parameter, "hidden", False)]
    if rows:
        yield "\n".join(["| | | |", "|---|---|---|", *rows]) + "\n"
    for one in inner:
        yield from _sections(f"{name} {one}", inner[one], level + 1)


def _usage(command: Any) -> str:
    """The arguments in their order; whatever else is an option."""
    words = [p.name.upper() if p.required else f"[{p.name.upper()}]" for p in command.params if _is_argument(p)]
    return " ".join([*words, "[OPTIONS]"])


def _row(parameter: Any) -> str:
    """A line of the table: the name, what it takes and its default, what it does."""
    if _is_argument(parameter):
        name = f"`{parameter.name.upper()}`"
    else:
        name = ", ".join(f"`{option}`" for option in [*parameter.opts, *parameter.secondary_opts])
    return f"| {name} | {_kind(parameter)} | {_text(parameter.help or '')} |"


def _kind(parameter: Any) -> str:
    """`integer, 10`: the type and the default; nothing for a flag that is off unless given."""
    annotation = parameter.type_descriptor.annotation
    names = {str: "text", int: "integer", float: "number", bool: "flag", list[str]: "text, repeatable"}
    kind = names.get(annotation, getattr(annotation, "__name__", str(annotation)))
    default = parameter.default
    if parameter.required:
        return f"{kind}, required"
    is_unset = default is None or default is False or default in ((), [])
    return kind if is_unset else f"{kind}, `{default}`"


def _is_argument(parameter: Any) -> bool:
    return type(parameter).__name__ == "TyperArgument"


def _first_line(command: Any) -> str:
    return _text((command.help or "").partition("\n\n")[0])


def _text(text: str) -> str:
    """One paragraph a line; no bar that would end the cell of a table."""
    paragraphs = [" ".join(part.split()) for part in re.split(r"\n\s*\n", text)]
    return "\n\n".join(paragraphs).replace("|", "\\|").strip()


if __name__ == "__main__":
    PAGE.write_text(page())
