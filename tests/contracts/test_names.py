"""Our names are ours: no module shadows a dependency or the standard library, and each package name has one owner."""

from __future__ import annotations

import re
import sys
from importlib.metadata import packages_distributions, requires
from pathlib import Path

import pytest

REPOSITORY = Path(__file__).parents[2]
PACKAGES = ("catalog", "indexing", "infra", "pipelines", "trainer")


def modules() -> list[Path]:
    """Every module and package of ours."""
    found = [p for package in PACKAGES for p in sorted((REPOSITORY / package).rglob("*.py"))]
    assert len(found) > 20
    return [p.parent if p.name == "__init__.py" else p for p in found]


def normal(name: str) -> str:
    """The name of a distribution as registries compare it."""
    return re.sub(r"[-_.]+", "-", name).lower()


def dependency_names() -> set[str]:
    """Names that our direct dependencies, extras included, are imported by."""
    needed = {normal(re.split(r"[ \[;<>=!~]", line)[0]) for line in requires("goodviews") or []}
    names = {name for name, owners in packages_distributions().items() if needed & set(map(normal, owners))}
    assert {"duckdb", "numpy", "pyarrow", "pytest", "ray", "typer"} <= names
    return names


def test_no_module_shadows_a_dependency_or_the_standard_library() -> None:
    taken = dependency_names() | sys.stdlib_module_names
    assert {str(p.relative_to(REPOSITORY)) for p in modules() if p.stem in taken} == set()


@pytest.mark.parametrize("package", PACKAGES)
def test_each_package_name_has_one_owner(package: str) -> None:
    assert set(packages_distributions().get(package, [])) == {"goodviews"}


def test_no_module_has_a_name_that_says_nothing() -> None:
    empty = {"base", "common", "helpers", "manager", "misc", "utils"}
    assert {str(p.relative_to(REPOSITORY)) for p in modules() if p.stem in empty} == set()


def test_every_folder_of_ours_is_a_package_of_the_wheel() -> None:
    """A folder without `__init__.py` would be left out of the wheel, and missed only by who installs it."""
    folders = {p.parent for package in PACKAGES for p in (REPOSITORY / package).rglob("*.py")}
    assert len(folders) > 20
    assert {str(p.relative_to(REPOSITORY)) for p in folders if not (p / "__init__.py").is_file()} == set()
