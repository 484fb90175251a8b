"""Load DuckDB's extensions from installed wheels, and check each file once a process.

Invariant: an extension is loaded without a signature check only after DuckDB has accepted the signature of the same
file in this process.
"""

from __future__ import annotations

import importlib.util
import os
from collections.abc import Collection
from pathlib import Path
from typing import Final, TypeAlias

import duckdb

from infra.errors import StorageError

NAMES: Final = ("ducklake", "sqlite_scanner", "postgres_scanner", "httpfs")
"All that goodviews may load."

Connection: TypeAlias = duckdb.DuckDBPyConnection
_Identity: TypeAlias = tuple[str, int, int, int]

_checked: set[_Identity | None] = set()
"""Extension files whose signature DuckDB accepted in this process; a check of 70 MB takes 0.35 s a connection."""


def wheel_file(name: str) -> str | None:
    """The extension's file in its wheel, for this version of DuckDB; None when that is not installed."""
    wheel = importlib.util.find_spec(f"duckdb_extension_{name}")
    for folder in (wheel.submodule_search_locations or []) if wheel else []:
        path = Path(folder) / "extensions" / f"v{duckdb.__version__}" / f"{name}.duckdb_extension"
        if path.exists():
            return str(path)
    return None


def are_checked(names: Collection[str]) -> bool:
    """Whether there are names, and all of them were loaded from these very files before in this process."""
    return bool(names) and {_identity(name) for name in names} <= _checked


def load(connection: Connection, name: str) -> None:
    """Load one extension from its wheel, else let DuckDB download it. Raises StorageError that names the wheel."""
    if (path := wheel_file(name)) is not None:
        identity = _identity(name)
        connection.execute("LOAD '" + path.replace("'", "''") + "'")
        _checked.add(identity)
        return
    try:
        connection.execute(f"INSTALL {name}")
        connection.execute(f"LOAD {name}")
    except duckdb.Error as error:
        message = (
            f"DuckDB {duckdb.__version__} cannot load its extension {name}, and downloading it failed. Install it "
            f"with `pip install {package(name)}`."
        )
        raise StorageError(message) from error


def package(name: str) -> str:
    """What pip installs for this extension and this version of DuckDB."""
    return f"duckdb-extension-{name.replace('_', '-')}=={duckdb.__version__}"


def _identity(name: str) -> _Identity | None:
    """What tells one extension file from another; None without a wheel, which is never in `_checked`."""
    if (path := wheel_file(name)) is None:
        return None
    found = os.stat(path)
    return path, found.st_ino, found.st_size, found.st_mtime_ns
