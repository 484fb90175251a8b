"""Comparisons in the catalog: the table `overlap_counts`, one row a comparison and kind.

Invariant: a comparison is identified by its two parts and its threshold, so comparing again replaces its rows. No file
holds them: `catalog rebuild` copies them from the old catalog; if that is lost, comparing again restores them.
"""

from __future__ import annotations

import dataclasses
import hashlib
import time
from typing import Any

import orjson

from catalog.lake.lake import Lake
from catalog.lake.transaction import commit_rows
from catalog.overlap.comparison import Comparison, Kind
from catalog.overlap.parts import Part
from infra.home import Home
from infra.version import code_version


def overlap_id(left: Part, right: Part) -> str:
    """16 hex digits of the sha256 of the two names; A beside B is another comparison than B beside A."""
    return hashlib.sha256(orjson.dumps([left.name, right.name])).hexdigest()[:16]


def record(home: Home, found: Comparison) -> str:
    """Write the rows of a comparison in one commit, in the place of those of an earlier one; returns its id.

    Kinds that were not asked for this time (`near`) keep their row. Raises ConflictError, StorageError.
    """
    name = overlap_id(found.left, found.right)

    def write(writer: Lake) -> None:
        snapshot = writer.current_snapshot()
        for kind in found.kinds:
            values = {"overlap_id": name, **_values(found, kind), "snapshot_id": snapshot, "created_at": time.time()}
            writer.connection.execute(
                (
                    "DELETE FROM main.overlap_counts WHERE overlap_id = ? AND kind = ? AND threshold IS NOT DISTINCT "
                    "FROM ?"
                ),
                [name, kind.kind, kind.threshold],
            )
            writer.insert("main.overlap_counts", values)

    commit_rows(home, f"overlap of {found.left.name} and {found.right.name}", write)
    return name


def _values(found: Comparison, kind: Kind) -> dict[str, Any]:
    values: dict[str, Any] = {
        "kind": kind.kind,
        "shared": kind.shared,
        "threshold": kind.threshold,
        "by_split": tuple(dataclasses.asdict(pair) for pair in kind.by_split),
        "code_version": code_version(),
    }
    for side, part, counts in (("left", found.left, kind.left), ("right", found.right, kind.right)):
        facts: dict[str, Any] = {"dataset": part.dataset, "version": part.version, "split": part.split}
        facts |= {"scenes": counts.scenes, "known": counts.known, "total": counts.total, "share": counts.share}
        values |= {f"{side}_{name}": value for name, value in {**facts, "captions": counts.captions}.items()}
    return values
