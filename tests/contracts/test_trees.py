"""The tree that ARCHITECTURE.md draws is the tree that is there, and every path that a page names exists."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tests.contracts.tree import PACKAGES, tree, with_tree

REPOSITORY = Path(__file__).parents[2]


def test_architecture_draws_the_tree_that_is_there() -> None:
    text = (REPOSITORY / "ARCHITECTURE.md").read_text()
    assert text == with_tree(text, tree()), "Run `python -m tests.contracts.tree`."
    assert tree().count(".py ") > 200


def test_a_module_that_is_missing_from_the_tree_is_found(tmp_path: Path) -> None:
    for package in PACKAGES:
        (tmp_path / package).mkdir()
        (tmp_path / package / "__init__.py").write_text('"""A package."""\n')
    before = tree(tmp_path)
    (tmp_path / "infra" / "new.py").write_text('"""Do something new.\n\nAt length."""\n')
    assert tree(tmp_path) == before.replace("infra/  A package\n", "infra/  A package\n  new.py  Do something new\n")


def test_a_page_without_a_place_for_the_tree_is_refused() -> None:
    assert with_tree("## Layout\n\n```text\nold\n```\n", "new\n") == "## Layout\n\n```text\nnew\n```\n"
    with pytest.raises(ValueError, match="no ```text block"):
        with_tree("## Layout\n\n## Other\n```text\nx\n```\n", "new\n")


@pytest.mark.parametrize("document", ["README.md", "ARCHITECTURE.md", "CONTRIBUTING.md"])
def test_every_path_that_a_document_names_is_there(document: str) -> None:
    text = (REPOSITORY / document).read_text()
    links = [x for x in re.findall(r"\]\(([^)#]+)", text) if "://" not in x]
    named = re.findall(r"`((?:\.ci|docs|tests|" + "|".join(PACKAGES) + r")/[\w./-]+)`", text)
    assert links + named != []
    assert [x for x in links + named if not (REPOSITORY / x).exists()] == []
