"""Every public function, class and constant of a product module is used by the product, not by tests alone."""

from __future__ import annotations

import ast
import re
import tomllib
from collections.abc import Iterator, Mapping
from pathlib import Path

REPOSITORY = Path(__file__).parents[2]
PACKAGES = ("catalog", "indexing", "infra", "pipelines", "trainer")


def product() -> dict[str, str]:
    """Source by path of every product module."""
    paths = [path for package in PACKAGES for path in sorted((REPOSITORY / package).rglob("*.py"))]
    paths.append(REPOSITORY / "goodviews.py")
    assert len(paths) > 100
    return {str(path.relative_to(REPOSITORY)): path.read_text(encoding="utf-8") for path in paths}


def entry_points() -> set[str]:
    """Names that pyproject.toml refers to as MODULE:NAME."""
    project = tomllib.loads((REPOSITORY / "pyproject.toml").read_text())["project"]
    groups = [project["scripts"], *project["entry-points"].values()]
    return {target.partition(":")[2] for group in groups for target in group.values()}


def unused(sources: Mapping[str, str], entry: set[str]) -> set[str]:
    """`path: name` of the public names at the top of modules that no module of `sources` refers to.

    Names are compared without their modules, so a name that stands in two modules may be missed; none is reported
    that is used. Comments and docstrings are no use, nor is an import: what is imported is used by name.
    """
    trees = {path: ast.parse(text) for path, text in sources.items()}
    used = set(entry)
    for tree in trees.values():
        used.update(_references(tree))
    return {f"{path}: {name}" for path, tree in trees.items() for name in _definitions(tree) if name not in used}


def _definitions(tree: ast.Module) -> Iterator[str]:
    for node in tree.body:
        names: list[str] = []
        if isinstance(node, (ast.FunctionDef, ast.ClassDef)):
            # A decorated function is registered by its decorator, as commands are.
            names = [node.name] if isinstance(node, ast.ClassDef) or not node.decorator_list else []
        elif isinstance(node, ast.Assign):
            names = [target.id for target in node.targets if isinstance(target, ast.Name)]
        elif isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name):
            names = [node.target.id]
        yield from (name for name in names if not name.startswith("_"))


def _references(tree: ast.Module) -> Iterator[str]:
    for node in ast.walk(tree):
        if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Load):
            yield node.id
        elif isinstance(node, ast.Attribute):
            yield node.attr
        elif isinstance(node, (ast.ImportFrom, ast.Import)):
            yield from (alias.name for alias in node.names if alias.asname)
        elif isinstance(node, ast.Constant) and isinstance(node.value, str):
            # A lazy reference: a name alone, or MODULE:NAME.
            yield from re.findall(r"^(?:[\w.]+:)?([A-Za-z_]\w*)$", node.value)


def test_the_product_uses_all_of_its_public_names() -> None:
    assert unused(product(), entry_points()) == set()


def test_a_name_that_only_tests_use_is_found() -> None:
    sources = {
        "a.py": (
            '"""Says dead and LIMIT."""\nLIMIT = 3\nSIZE: int = 4\nclass Dead: ...\nclass Kept: ...\n'
            "def dead(): return LAZY  # dead()\ndef kept(): ...\n@app.command()\ndef command(): ...\n"
            "def check(): ...\nLAZY = 1\n_PRIVATE = 2\n"
        ),
        "b.py": "from a import Dead, Kept, kept as other\nimport a\nprint(Kept, a.SIZE, other())\n",
    }
    assert unused(sources, {"check"}) == {"a.py: LIMIT", "a.py: Dead", "a.py: dead"}
