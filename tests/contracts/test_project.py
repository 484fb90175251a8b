"""The project's own files: every dependency is pinned, and nothing names one machine."""

from __future__ import annotations

import re
import tomllib
from pathlib import Path

REPOSITORY = Path(__file__).parents[2]


def pins() -> dict[str, str]:
    """Version by name, from constraints.txt."""
    lines = [x for x in (REPOSITORY / "constraints.txt").read_text().splitlines() if x and not x.startswith("#")]
    assert len(lines) > 50
    found = dict(line.split("==") for line in lines)
    assert len(found) == len(lines), "one line a package"
    return found


def direct() -> set[str]:
    """Names of the dependencies that pyproject.toml asks for; of the extras, those that go together."""
    project = tomllib.loads((REPOSITORY / "pyproject.toml").read_text())["project"]
    asked = list(project["dependencies"])
    for extra in ("cpu", "dev", "cluster"):
        asked += project["optional-dependencies"][extra]
    return {re.split(r"[ \[;<>=!~]", line)[0].lower().replace("_", "-") for line in asked}


def test_every_dependency_is_pinned_to_a_plain_version() -> None:
    pinned = pins()
    assert direct() - set(pinned) == set()
    for name, pinned_version in pinned.items():
        assert re.fullmatch(r"\d+[0-9a-z.]*", pinned_version), f"{name}=={pinned_version}"


def test_duckdb_and_its_extensions_have_one_version() -> None:
    assert len({v for name, v in pins().items() if name.startswith("duckdb")}) == 1


def test_no_file_of_the_build_names_a_machine_or_an_index() -> None:
    files = ["pyproject.toml", "constraints.txt", "Makefile", ".ci/run", ".gitignore"]
    for name in files:
        text = (REPOSITORY / name).read_text()
        assert not re.search(r"https?://|index-url|find-links|/root/|/home/|/opt/|/work/", text), name


def test_every_recipe_tells_what_it_does() -> None:
    text = (REPOSITORY / "Makefile").read_text()
    line, parts = [x for x in text.splitlines() if x.startswith(".PHONY:")]
    assert parts == ".PHONY: types others # parts of check"
    recipes = line.split()[1:]
    assert recipes == ["help", "setup", "demo", "test", "check", "bench"]
    for recipe in recipes:
        assert re.search(rf"^{recipe}:.*## .+", text, re.MULTILINE), recipe
        if recipe not in ("help", "setup"):
            assert re.search(rf"^{recipe}: \$\((RUN|DEV)\) ##", text, re.MULTILINE), f"{recipe} does not set up first"
