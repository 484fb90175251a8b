"""Which version of a dataset a name means: the catalog decides.

Invariant: every command asks here. The file `current.json` beside the versions repeats the answer of the catalog for
`rebuild`, which may find no catalog to read. A commit writes it after the rows, so after a kill it may be behind, and
nothing else may decide by it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import orjson

from catalog import schema
from catalog.lake import lake
from catalog.lake.lake import Lake
from infra import storage
from infra.errors import InputError, IntegrityError
from infra.home import Home


@dataclass(frozen=True, kw_only=True)
class KnownVersion:
    """A version that the catalog holds, and the snapshot that was read."""

    version: str
    is_current: bool
    snapshot_id: int


def find_version(reader: Lake, dataset: str, version: str | None = None) -> KnownVersion:
    """That version of a dataset, or its current one. Raises InputError when the catalog does not hold it."""
    query = "SELECT version, is_current FROM main.datasets WHERE dataset = ? ORDER BY created_at"
    versions = {str(name): bool(current) for name, current in reader.rows(query, [dataset])}
    if not versions:
        known = [str(row[0]) for row in reader.rows("SELECT DISTINCT dataset FROM main.datasets ORDER BY dataset")]
        message = (
            f"The catalog holds no dataset {dataset!r}. It holds {listed(known)}. Run `goodviews ingest`, or "
            "`goodviews catalog rebuild` if the dataset was published and the catalog lost."
        )
        raise InputError(message)
    if version is None:
        version = next((name for name, is_current in versions.items() if is_current), None)
        if version is None:
            names = list(versions)
            message = f"No version of {dataset} is current. Name one of {listed(names)}, as `{dataset}@{names[-1]}`."
            raise InputError(message)
    elif version not in versions:
        message = f"The catalog holds no version {version!r} of {dataset}. It holds {listed(list(versions))}."
        raise InputError(message)
    return KnownVersion(version=version, is_current=versions[version], snapshot_id=reader.current_snapshot())


def current_version(home: Home, dataset: str) -> str:
    """The current version of a dataset. Raises InputError when there is no catalog, or none in it."""
    with lake.reading(home) as reader:
        return find_version(reader, dataset).version


def current_versions(reader: Lake) -> dict[str, str]:
    """Dataset -> current version, by name."""
    rows = reader.rows("SELECT dataset, version FROM main.datasets WHERE is_current ORDER BY dataset")
    return {str(dataset): str(version) for dataset, version in rows}


def listed(names: Sequence[str]) -> str:
    """The first twelve names, and how many more there are."""
    shown = ", ".join(names[:12]) or "none"
    return f"{shown} and {len(names) - 12} more" if len(names) > 12 else shown


def write_pointer(home: Home, dataset: str, version: str) -> None:
    """Repeat on disk which version the catalog shows."""
    storage.publish(home.datasets(dataset, schema.CURRENT_PATH), orjson.dumps({"version": version}) + b"\n")


def read_pointer(home: Home, dataset: str) -> str | None:
    """The version that `current.json` names; None without that file. Raises IntegrityError when it is broken."""
    url = home.datasets(dataset, schema.CURRENT_PATH)
    if not storage.exists(url):
        return None
    try:
        return str(orjson.loads(storage.read_bytes(url))["version"])
    except (orjson.JSONDecodeError, KeyError, TypeError) as error:
        message = (
            f'{url} is not `{{"version": ...}}`. Rerun `goodviews ingest` for the version that should be current; '
            "it writes the file again."
        )
        raise IntegrityError(message) from error
