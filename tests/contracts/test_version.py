"""One answer to which version of the code wrote a row."""

from __future__ import annotations

import importlib.metadata
import re
import subprocess
from pathlib import Path

import pytest

from infra import version
from tests.contracts.test_unused import product

ASKS = re.compile(r"\bversion\(\s*[\"']goodviews[\"']")


def test_only_one_module_asks_for_the_version_of_the_package() -> None:
    assert [path for path, text in product().items() if ASKS.search(text)] == ["infra/version.py"]


def test_a_checkout_adds_its_commit_and_another_repository_around_the_package_does_not(tmp_path: Path) -> None:
    def git(folder: Path, *words: str) -> str:
        identity = ["-c", "user.name=a", "-c", "user.email=a@example.org", "-c", "init.defaultBranch=main"]
        done = subprocess.run(["git", *identity, "-C", str(folder), *words], capture_output=True, text=True, check=True)
        return done.stdout.strip()

    git(tmp_path, "init")
    git(tmp_path, "commit", "--allow-empty", "-m", "one")
    commit = git(tmp_path, "rev-parse", "--short", "HEAD")
    assert version.commit_of(tmp_path) == commit
    (tmp_path / "a.py").write_text("")
    git(tmp_path, "add", "a.py")
    assert version.commit_of(tmp_path) == f"{commit}-dirty"
    inside = tmp_path / "site-packages"
    inside.mkdir()
    assert version.commit_of(inside) is None


def test_code_that_nobody_installed_has_an_unknown_version(monkeypatch: pytest.MonkeyPatch) -> None:
    assert re.fullmatch(r"\d+\.\d+.*", version.package_version())
    assert version.code_version().startswith(version.package_version())

    def absent(name: str) -> str:
        raise importlib.metadata.PackageNotFoundError(name)

    monkeypatch.setattr(importlib.metadata, "version", absent)
    assert version.package_version() == "unknown"
