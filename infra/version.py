"""Which code wrote a row or a file."""

from __future__ import annotations

import contextlib
import functools
import importlib.metadata
import os
import subprocess
from pathlib import Path
from typing import Final

UNKNOWN: Final = "unknown"


def package_version() -> str:
    """Version of the installed package; `unknown` in a checkout that nobody installed."""
    try:
        return importlib.metadata.version("goodviews")
    except importlib.metadata.PackageNotFoundError:
        return UNKNOWN


@functools.cache
def code_version() -> str:
    """Version of the package, from a checkout with its commit: `0.1.0+1a2b3c4-dirty`. Every row and record holds it."""
    commit = commit_of(Path(__file__).resolve().parents[1])
    return f"{package_version()}+{commit}" if commit else package_version()


def commit_of(folder: Path) -> str | None:
    """`git describe` of a checkout; None when the folder is none, or git does not answer."""
    # Without this test a virtual environment inside another project would get the commit of that project.
    if not (folder / ".git").exists():
        return None
    command = ["git", "-C", str(folder), "describe", "--always", "--dirty", "--tags"]
    with contextlib.suppress(OSError, subprocess.SubprocessError):
        environment = {**os.environ, "GIT_OPTIONAL_LOCKS": "0"}
        found = subprocess.run(command, capture_output=True, text=True, timeout=10, env=environment, check=False)
        return found.stdout.strip() or None
    return None
