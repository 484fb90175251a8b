"""docs/commands.md is what the command line says, and every link of a page leads somewhere."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

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
