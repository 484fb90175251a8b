"""One answer to which version of the code wrote a row."""

from __future__ import annotations

import importlib.metadata
import re

import pytest

from infra import version
from tests.contracts.test_unused import product

ASKS = re.compile(r"\bversion\(\s*[\"']goodviews[\"']")


def test_only_one_module_asks_for_the_version_of_the_package() -> None:
    assert [path for path, text in product().items() if ASKS.search(text)] == ["infra/version.py"]


def test_code_that_nobody_installed_has_an_unknown_version(monkeypatch: pytest.MonkeyPatch) -> None:
    assert re.fullmatch(r"\d+\.\d+.*", version.code_version())

    def absent(name: str) -> str:
        raise importlib.metadata.PackageNotFoundError(name)

    monkeypatch.setattr(importlib.metadata, "version", absent)
    assert version.code_version() == "unknown"
