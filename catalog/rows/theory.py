"""Checks of the theorems in the catalog: the tables `theory` and `theory_values`.

Invariant: a check is identified by its kind and settings; checking again replaces it with all its numbers in one
commit.
"""

from __future__ import annotations

import hashlib
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final, Literal, TypeAlias

import orjson
import pyarrow as pa

from catalog.lake import lake
from catalog.lake.lake import Lake
from catalog.lake.transaction import commit_rows
from infra.home import Home
from infra.version import code_version

Kind: TypeAlias = Literal["grid", "bridge"]
Points: TypeAlias = Mapping[str, Sequence[Mapping[str, float]]]
"""Series -> its points, each a number by name."""

VALUES: Final = pa.schema(
    [
        pa.field("theory_id", pa.large_string(), nullable=False),
        pa.field("series", pa.large_string(), nullable=False),
        pa.field("point", pa.int64(), nullable=False),
        pa.field("name", pa.large_string(), nullable=False),
        pa.field("value", pa.float64(), nullable=False),
    ]
)


@dataclass(frozen=True, kw_only=True)
class Check:
    """One check. config: its settings; result: what they came to, as plain JSON; points: the numbers behind it."""

    kind: Kind
    seed: int
    config: Mapping[str, Any]
    result: Mapping[str, Any]
    points: Points

    @property
    def theory_id(self) -> str:
        """16 hex digits of the sha256 of kind and settings."""
        content = orjson.dumps([self.kind, self.seed, dict(self.config)], option=orjson.OPT_SORT_KEYS)
        return hashlib.sha256(content).hexdigest()[:16]


def record_check(home: Home, check: Check) -> str:
    """Write a check in one commit, in the place of an earlier one of its settings; returns its id.

    Raises ConflictError when the lock cannot be had, StorageError when the catalog cannot take the rows.
    """
    values = pa.Table.from_pylist(list(_values(check)), schema=VALUES)

    def write(writer: Lake) -> None:
        for table in ("theory", "theory_values"):
            if writer.rows(f"SELECT 1 FROM main.{table} WHERE theory_id = ? LIMIT 1", [check.theory_id]):
                writer.connection.execute(f"DELETE FROM main.{table} WHERE theory_id = ?", [check.theory_id])
        writer.connection.execute(
            "INSERT INTO main.theory BY NAME SELECT ? AS theory_id, ? AS kind, ? AS seed, ? AS config, ? AS result, "
            "? AS code_version, to_timestamp(?) AS created_at",
            [
                check.theory_id,
                check.kind,
                check.seed,
                _json(check.config),
                _json(check.result),
                code_version(),
                time.time(),
            ],
        )
        writer.connection.register("incoming_values", values)
        writer.connection.execute("INSERT INTO main.theory_values BY NAME SELECT * FROM incoming_values")
        writer.connection.unregister("incoming_values")
        lake.sync_table(writer, "main", "theory_values")

    commit_rows(home, f"theory: {check.kind} {check.theory_id}", write)
    return check.theory_id


def latest_checks(reader: Lake) -> dict[str, Check]:
    """The newest check of each kind; none of a catalog that was made before there were any."""
    there = "SELECT 1 FROM duckdb_tables() WHERE database_name = ? AND schema_name = 'main' AND table_name = 'theory'"
    if not reader.rows(there, [lake.ALIAS]):
        return {}
    query = """SELECT theory_id, kind, seed, config, result FROM main.theory
        QUALIFY row_number() OVER (PARTITION BY kind ORDER BY created_at DESC, theory_id) = 1 ORDER BY kind"""
    return {
        kind: Check(
            kind=kind,
            seed=seed,
            config=orjson.loads(config),
            result=orjson.loads(result),
            points=_points(reader, theory_id),
        )
        for theory_id, kind, seed, config, result in reader.rows(query)
    }


def _points(reader: Lake, theory_id: str) -> dict[str, list[dict[str, float]]]:
    query = "SELECT series, point, name, value FROM main.theory_values WHERE theory_id = ? ORDER BY series, point, name"
    found: dict[str, list[dict[str, float]]] = {}
    for series, point, name, value in reader.rows(query, [theory_id]):
        points = found.setdefault(series, [])
        if point == len(points):
            points.append({})
        points[point][name] = value
    return found


def _values(check: Check) -> Iterable[dict[str, object]]:
    for series, points in check.points.items():
        for number, point in enumerate(points):
            for name, value in point.items():
                row = {"series": series, "point": number, "name": name, "value": float(value)}
                yield {"theory_id": check.theory_id, **row}


def _json(value: Mapping[str, Any]) -> str:
    return orjson.dumps(dict(value), option=orjson.OPT_SORT_KEYS | orjson.OPT_NON_STR_KEYS).decode()
