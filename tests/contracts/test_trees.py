"""The trees that ARCHITECTURE.md and README.md draw are the tree that is there."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

REPOSITORY = Path(__file__).parents[2]
PACKAGES = ("catalog", "indexing", "infra", "pipelines", "trainer")


def drawn(text: str) -> list[str]:
    """Paths in the fenced block below the heading `## Layout`.

    A line is an indented name, or several with commas, then two spaces and what it is; a name with `/` holds the deeper lines.
    """
    block = re.search(r"^## Layout\n(?:(?!## )[^\n]*\n)*?```\w*\n(.*?)^```", text, re.MULTILINE | re.DOTALL)
    if block is None:
        return []
    paths: list[str] = []
    above: list[tuple[int, str]] = []
    for line in block.group(1).splitlines():
        indent = len(line) - len(line.lstrip())
        names = re.split(r"\s{2,}", line.strip())[0]
        while above and above[-1][0] >= indent:
            above.pop()
        for name in filter(None, re.split(r",?\s+", names)):
            paths.append((above[-1][1] if above else "") + name)
            if name.endswith("/"):
                folder = paths[-1]
        if names.endswith("/"):
            above.append((indent, folder))
    return paths


def test_the_parser_reads_a_tree() -> None:
    text = "# A\n\n## Layout\n\nWords.\n\n```\na/    one\n  b.py, c.py  two\n  d/e/\n    f.py\nREADME.md  CHANGES.md\n```\n"
    assert drawn(text) == ["a/", "a/b.py", "a/c.py", "a/d/e/", "a/d/e/f.py", "README.md"]
    assert drawn("## Layout\n\n## Other\n```\nx\n```\n") == []


def test_architecture_draws_every_package() -> None:
    paths = drawn((REPOSITORY / "ARCHITECTURE.md").read_text())
    folders = {
        str(p.parent.relative_to(REPOSITORY)) + "/"
        for name in PACKAGES
        for p in (REPOSITORY / name).rglob("__init__.py")
    }
    assert len(folders) >= 5
    assert folders - set(paths) == set()


def test_every_path_that_is_drawn_is_there() -> None:
    paths = drawn((REPOSITORY / "ARCHITECTURE.md").read_text())
    assert len(paths) > 10
    assert [p for p in paths if not (REPOSITORY / p).exists()] == []
    assert [p for p in paths if p.endswith("/") != (REPOSITORY / p).is_dir()] == []


@pytest.mark.parametrize("document", ["README.md", "ARCHITECTURE.md", "CONTRIBUTING.md"])
def test_every_path_that_a_document_names_is_there(document: str) -> None:
    text = (REPOSITORY / document).read_text()
    links = [x for x in re.findall(r"\]\(([^)#]+)", text) if "://" not in x]
    named = re.findall(r"`((?:\.ci|docs|tests|" + "|".join(PACKAGES) + r")/[\w./-]+)`", text)
    assert links + named != []
    assert [x for x in links + named if not (REPOSITORY / x).exists()] == []
