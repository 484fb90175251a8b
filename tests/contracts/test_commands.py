"""docs/commands.md is what the command line says, pages show commands that exist, and their links lead somewhere."""

from __future__ import annotations

import re
import shlex
from collections.abc import Sequence
from importlib.metadata import entry_points
from pathlib import Path
from typing import Any

import pytest
import typer
from typer.exceptions import TyperException

from tests.contracts.commands import PAGE, page

REPOSITORY = Path(__file__).parents[2]
PAGES = sorted([*REPOSITORY.glob("*.md"), *REPOSITORY.glob("docs/**/*.md")])


def test_the_page_of_commands_is_up_to_date() -> None:
    text = page()
    assert PAGE.read_text() == text, "Run `python -m tests.contracts.commands`."
    assert text.count("\n## ") >= 16 and text.count("\n| `--home`") >= 20
    assert not re.search(r"/work/|/root/|/home/[a-z]", text), "a default of one machine"


def anchors(text: str) -> set[str]:
    """The anchors that a page of Markdown has, as GitHub makes them from its headings."""
    headings = re.findall(r"^#{1,6} (.+)$", text, re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


def broken_links(page: Path) -> list[str]:
    """Relative links of a page whose file, or whose anchor in it, is not there."""
    text = re.sub(r"```.*?```", "", page.read_text(), flags=re.DOTALL)
    found = []
    for link in re.findall(r"\]\(([^)\s]+)\)|(?:src|srcset|href)=\"([^\"]+)\"", text):
        target = link[0] or link[1]
        if re.match(r"[a-z]+:", target):
            continue
        name, _, anchor = target.partition("#")
        file = (page.parent / name).resolve() if name else page
        if not file.exists() or (anchor and anchor not in anchors(file.read_text())):
            found.append(target)
    return found


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(REPOSITORY)))
def test_every_link_of_a_page_leads_somewhere(page: Path) -> None:
    assert broken_links(page) == []


def test_a_broken_link_is_found(tmp_path: Path) -> None:
    page = tmp_path / "a.md"
    page.write_text(
        '# Some words\n\n[a](#some-words) [b](#other) [c](b.md) [d](https://example.org) <img src="c.svg">\n'
    )
    assert broken_links(page) == ["#other", "b.md", "c.svg"]


def shown_commands(text: str) -> list[list[str]]:
    """The words after `goodviews` of each command line in the shell blocks of a page."""
    blocks = re.findall(r"^```sh\n(.*?)^```", text, re.MULTILINE | re.DOTALL)
    lines = [shlex.split(line, comments=True) for block in blocks for line in block.splitlines()]
    return [words[1:] for words in lines if words[:1] == ["goodviews"]]


def refusal(words: Sequence[str]) -> str:
    """Why the command line does not take these words; empty when it does. Nothing is run."""
    verbs = {entry.name: entry for entry in entry_points(group="goodviews.commands")}
    if words[0] not in verbs:
        return f"no command {words[0]}"
    command: Any = typer.main.get_command(verbs[words[0]].load())
    rest = list(words[1:])
    while rest and rest[0] in getattr(command, "commands", {}):
        command = command.commands[rest.pop(0)]
    try:
        command.make_context(words[0], rest)
    except TyperException as error:
        return str(error.format_message())
    return ""


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(REPOSITORY)))
def test_the_command_line_takes_every_command_that_a_page_shows(page: Path) -> None:
    shown = shown_commands(page.read_text())
    assert {shlex.join(words): refusal(words) for words in shown if refusal(words)} == {}
    assert len(shown) > {"guide.md": 30, "sources.md": 20}.get(page.name, -1)


def test_a_command_that_does_not_exist_is_found() -> None:
    text = (
        "```sh\ngoodviews align a b   # two sets\ngoodviews align a --metrics all b\ngoodviews dance\nmake demo\n```\n"
    )
    assert shown_commands(text) == [["align", "a", "b"], ["align", "a", "--metrics", "all", "b"], ["dance"]]
    refused = [refusal(words) for words in shown_commands(text)]
    assert [bool(text) for text in refused] == [False, True, True]
    assert "--metrics" in refused[1]
