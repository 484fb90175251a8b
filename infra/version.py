"""Version of the code that wrote a row or a file."""

from __future__ import annotations

import importlib.metadata
from typing import Final

UNKNOWN: Final = "unknown"


def code_version() -> str:
    """Version of the installed package; `unknown` in a checkout that nobody installed."""
    try:
        return importlib.metadata.version("goodviews")
    except importlib.metadata.PackageNotFoundError:
        return UNKNOWN
