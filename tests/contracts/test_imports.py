"""The import contracts hold, and they bite: a tree that breaks one is refused by name."""

from __future__ import annotations

import ast
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

REPOSITORY = Path(__file__).parents[2]
PACKAGES = ("catalog", "indexing", "infra", "pipelines", "trainer")

OWNERS = {"ray.data": "pipelines", "ray.train": "trainer"}
"""Submodules with one owner. import-linter sees whole distributions only, and ruff cannot ban by folder and name."""


def tool(name: str) -> str:
    """The program of this environment."""
    found = shutil.which(name, path=str(Path(sys.executable).parent)) or shutil.which(name)
    assert found is not None, f"{name} is not installed: run `make setup`"
    return found


def lint_imports(folder: Path) -> subprocess.CompletedProcess[str]:
    """import-linter with the contracts of the project, on the packages of `folder`."""
    command = [tool("lint-imports"), "--no-logo", "--no-cache", str(folder / "pyproject.toml")]
    return subprocess.run(command, cwd=folder, capture_output=True, text=True, check=False)


def test_the_project_keeps_its_contracts() -> None:
    done = lint_imports(REPOSITORY)
    assert done.returncode == 0, done.stdout
    assert "0 broken" in done.stdout


@pytest.fixture
def tree(tmp_path: Path) -> Path:
    """Five packages without imports, under the contracts of the project."""
    shutil.copy(REPOSITORY / "pyproject.toml", tmp_path)
    for package in PACKAGES:
        (tmp_path / package).mkdir()
        (tmp_path / package / "__init__.py").write_text("")
        (tmp_path / package / "part.py").write_text("")
    (tmp_path / "infra" / "models").mkdir()
    for name in ("__init__", "encoders"):
        (tmp_path / "infra" / "models" / f"{name}.py").write_text("")
    return tmp_path


@pytest.mark.parametrize(
    ("module", "line"),
    [
        ("pipelines/part.py", "import trainer.part"),
        ("pipelines/part.py", "from indexing import part"),
        ("trainer/part.py", "import pipelines.part"),
        ("indexing/part.py", "import trainer.part"),
        ("catalog/part.py", "import pipelines.part"),
        ("infra/part.py", "import catalog.part"),
        ("infra/part.py", "def late() -> None:\n    import pipelines.part"),
        ("infra/part.py", "import duckdb"),
        ("pipelines/part.py", "from duckdb import connect"),
        ("trainer/part.py", "import psycopg"),
        ("pipelines/part.py", "import faiss"),
        ("catalog/part.py", "import faiss"),
        ("catalog/part.py", "import torch"),
        ("catalog/part.py", "def late() -> None:\n    import torch.nn"),
        ("infra/part.py", "import torch"),
        ("infra/part.py", "from transformers import AutoModel"),
        ("infra/part.py", "import goodviews"),
        ("trainer/part.py", "def late() -> None:\n    from goodviews import cka"),
    ],
)
def test_a_forbidden_import_breaks_a_contract(tree: Path, module: str, line: str) -> None:
    (tree / module).write_text(line + "\n")
    done = lint_imports(tree)
    assert done.returncode == 1, done.stdout + done.stderr
    assert re.search(r"[1-9] broken", done.stdout)
    assert module.removesuffix(".py").replace("/", ".") in done.stdout


def test_the_allowed_imports_break_none(tree: Path) -> None:
    allowed = {
        "pipelines/part.py": "import catalog.part\nimport infra.part\nimport ray\n",
        "trainer/part.py": "import torch\nimport catalog.part\nimport infra.models.encoders\n",
        "indexing/part.py": "import faiss\nimport infra.models.encoders\n",
        "catalog/part.py": "import duckdb\nimport psycopg\nimport infra.part\n",
        "infra/models/encoders.py": "def load() -> None:\n    import torch\n    import transformers\n",
    }
    for module, text in allowed.items():
        (tree / module).write_text(text)
    done = lint_imports(tree)
    assert done.returncode == 0, done.stdout + done.stderr


def names_used(source: str) -> Iterator[str]:
    """Every dotted name that a module imports or reaches through one."""
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module:
            yield from (f"{node.module}.{alias.name}" for alias in node.names)
        elif isinstance(node, ast.Attribute):
            yield ast.unparse(node)


def trespassers(folder: Path) -> list[str]:
    """`module: name` for every use of a submodule outside the package that owns it."""
    found = []
    for package in PACKAGES:
        for path in sorted((folder / package).rglob("*.py")):
            for name in names_used(path.read_text()):
                owned = [o for o in OWNERS if name == o or name.startswith(o + ".")]
                found += [f"{path.relative_to(folder)}: {name}" for o in owned if OWNERS[o] != package]
    return found


def test_ray_data_and_ray_train_stay_with_their_owners() -> None:
    assert trespassers(REPOSITORY) == []


@pytest.mark.parametrize(
    ("module", "text"),
    [
        ("trainer/part.py", "import ray.data"),
        ("infra/part.py", "from ray import data"),
        ("pipelines/part.py", "from ray.train.torch import TorchTrainer"),
        ("catalog/part.py", "import ray\n\nnumbers = ray.data.range(3)"),
    ],
)
def test_a_trespasser_is_found(tree: Path, module: str, text: str) -> None:
    (tree / module).write_text(text)
    assert any(line.startswith(module) for line in trespassers(tree))


@pytest.mark.parametrize(
    "text",
    [
        "import pickle\n\nx = pickle.loads(b'')\n",
        "from numpy import load\n\nx = load('x.npy')\n",
        "from . import part\n",
    ],
)
def test_ruff_refuses_what_reads_pickles_and_relative_imports(text: str) -> None:
    command = [tool("ruff"), "check", "--select", "TID", "--stdin-filename", str(REPOSITORY / "infra" / "x.py"), "-"]
    done = subprocess.run(command, input=text, cwd=REPOSITORY, capture_output=True, text=True, check=False)
    assert done.returncode == 1, done.stdout + done.stderr
    assert re.search(r"TID25[12]", done.stdout)
