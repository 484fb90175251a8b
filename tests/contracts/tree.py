"""The tree of ARCHITECTURE.md, drawn from the first line of each module's docstring.

`python -m tests.contracts.tree` writes it below the heading `## Layout`; `test_trees.py` fails where the file differs.
"""

from __future__ import annotations

import ast
import re
from pathlib import Path

REPOSITORY = Path(__file__).parents[2]
PACKAGES = ("infra", "catalog", "pipelines", "trainer", "indexing")
BLOCK = re.compile(r"(^## Layout\n(?:(?!## )[^\n]*\n)*?```text\n)(.*?)(^```)", re.MULTILINE | re.DOTALL)


def summary(module: Path) -> str:
    """The first line of the docstring, without its full stop."""
    text = ast.get_docstring(ast.parse(module.read_text())) or ""
    return text.split("\n", 1)[0].removesuffix(".")


def drawn(folder: Path, depth: int = 0) -> list[str]:
    """A line for the folder, one for each module in it, then its folders; names padded to one column a folder."""
    indent = "  " * depth
    modules = sorted(p for p in folder.glob("*.py") if p.name != "__init__.py")
    width = max((len(p.name) for p in modules), default=0)
    lines = [f"{indent}{folder.name}/  {summary(folder / '__init__.py')}"]
    lines += [f"{indent}  {p.name:{width}}  {summary(p)}" for p in modules]
    for inner in sorted(p.parent for p in folder.glob("*/__init__.py")):
        lines += drawn(inner, depth + 1)
    return lines


def tree(repository: Path = REPOSITORY) -> str:
    """Every package of ours, front door first."""
    front = repository / "goodviews.py"
    lines = [f"goodviews.py  {summary(front)}"] if front.is_file() else []
    for package in PACKAGES:
        lines += drawn(repository / package)
    return "\n".join(lines) + "\n"


def with_tree(document: str, new: str) -> str:
    """`document` with `new` as its tree. Raises ValueError when it has no block for one."""
    if BLOCK.search(document) is None:
        raise ValueError("ARCHITECTURE.md has no ```text block below the heading `## Layout`.")
    return BLOCK.sub(lambda found: found.group(1) + new + found.group(3), document)


if __name__ == "__main__":
    path = REPOSITORY / "ARCHITECTURE.md"
    path.write_text(with_tree(path.read_text(), tree()))
