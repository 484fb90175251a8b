"""The public names: pinned, documented, annotated, cheap to import, and each example runs."""

from __future__ import annotations

import doctest
import importlib.metadata
import inspect
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

import goodviews
from tests.front import examples

NAMES = [
    "AccountingError",
    "Calibration",
    "ConfigError",
    "ConflictError",
    "FittedMap",
    "GoodviewsError",
    "InputError",
    "IntegrityError",
    "LejepaLoss",
    "Neighbours",
    "RejectBudgetError",
    "Result",
    "Score",
    "SigReg",
    "StorageError",
    "UsageError",
    "Views",
    "Workspace",
    "calibrate",
    "cka",
    "cknna",
    "exact_knn",
    "fit_rotation",
    "mutual_knn",
    "open",
    "recall_at_k",
    "sigreg",
    "svcca",
]
"""A name that is added or goes is a change of the public interface: it needs a line in CHANGELOG.md."""

HEAVY = ("torch", "ray", "duckdb", "pyarrow", "numpy", "pandas", "faiss", "typer", "scipy")
IMPORT_S = 0.1
MODULES = ("goodviews", "trainer.model.losses", "trainer.run.dataset")
"""Where what is public here and nowhere else is defined."""


def ours() -> list[tuple[str, Any]]:
    """(name, object) of every public callable that was written for this interface, methods of its classes too."""
    found = [(name, getattr(goodviews, name)) for name in NAMES]
    found = [(name, thing) for name, thing in found if thing.__module__ in MODULES]
    methods = [
        (f"{name}.{inner}", member)
        for name, thing in found
        if inspect.isclass(thing)
        for inner, member in vars(thing).items()
        if not inner.startswith("_") and (inspect.isfunction(member) or isinstance(member, property))
    ]
    return found + methods


def test_the_public_names_are_these() -> None:
    assert sorted(goodviews.__all__) == NAMES == sorted(NAMES)
    assert dir(goodviews) == sorted(NAMES)
    for name in NAMES:
        assert getattr(goodviews, name) is not None


def test_the_version_is_that_of_the_package() -> None:
    assert goodviews.__version__ == importlib.metadata.version("goodviews")


def test_an_unknown_name_is_refused_with_those_there_are() -> None:
    with pytest.raises(AttributeError, match="no attribute 'mutual_nn'.*mutual_knn"):
        goodviews.mutual_nn  # noqa: B018


def test_the_import_is_quick_and_loads_nothing_heavy() -> None:
    program = (
        "import sys, time; began = time.perf_counter(); import goodviews; took = time.perf_counter() - began; "
        f"print(took, [name for name in {HEAVY!r} if name in sys.modules])"
    )
    # The quickest of three: another process may hold the core.
    runs = [
        subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True) for _ in range(3)
    ]
    took, heavy = zip(*(run.stdout.strip().split(" ", 1) for run in runs), strict=True)
    assert set(heavy) == {"[]"}
    assert min(map(float, took)) < IMPORT_S


@pytest.mark.parametrize("name", NAMES)
def test_every_name_is_documented(name: str) -> None:
    assert (inspect.getdoc(getattr(goodviews, name)) or "").strip()


@pytest.mark.parametrize(("name", "thing"), ours(), ids=[name for name, _ in ours()])
def test_what_is_defined_here_is_annotated_and_documented(name: str, thing: Any) -> None:
    assert (inspect.getdoc(thing) or "").strip(), name
    function = thing.fget if isinstance(thing, property) else thing
    if inspect.isfunction(function):
        signature = inspect.signature(function)
        assert signature.return_annotation is not inspect.Signature.empty, name
        untyped = [p for p in signature.parameters.values() if p.name != "self" and p.annotation is p.empty]
        assert untyped == [], name


EXAMPLES = examples.examples()
WITHOUT_EXAMPLE = {
    "Workspace.datasets": "like `sql`",
    "Workspace.runs": "like `sql`",
    "Workspace.embeddings": "like `sql`",
    "Workspace.leaderboard": "like `sql`",
    "Workspace": "its methods have one each",
    "LejepaLoss.forward": "in that of the class",
    "SigReg.forward": "in that of the class",
    "Views.load_state_dict": "in tests/front/test_views.py",
    "Views.state_dict": "in tests/front/test_views.py",
    "Views.n_views": "a fact",
    "Views.plan": "a fact",
    "Views.tokenizer": "a fact",
    "Result.df": "in that of `Result`",
}


def test_every_callable_has_an_example() -> None:
    shown = {test.name for test in EXAMPLES}
    assert {name for name, _ in ours()} - shown == set(WITHOUT_EXAMPLE)


@pytest.mark.parametrize("example", EXAMPLES, ids=[test.name for test in EXAMPLES])
def test_the_example_runs(example: doctest.DocTest, trained_home: str, tmp_path: Path) -> None:
    assert examples.failure(example, trained_home, str(tmp_path)) == ""
