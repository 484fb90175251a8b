"""What a commit adds to the catalog does not depend on how many came before it."""

from __future__ import annotations

import contextlib
import itertools
import sqlite3
from typing import Any

from catalog.versions.commit import commit_version
from infra import storage
from infra.home import Home

COMMITS = 12


def sizes(home: Home) -> dict[str, int]:
    """Rows of every table of the metadata, by name, and the number of files that the lake itself wrote."""
    with contextlib.closing(sqlite3.connect(f"file:{home.catalog}?mode=ro", uri=True)) as direct:
        names = [name for (name,) in direct.execute("SELECT name FROM sqlite_master WHERE type = 'table'")]
        assert {"ducklake_data_file", "ducklake_snapshot"} <= set(names)
        rows = {name: int(direct.execute(f'SELECT count(*) FROM "{name}"').fetchone()[0]) for name in names}
    return {**rows, "files": len(storage.list_files(home.lake_data))}


def test_g14_every_commit_adds_as_much_as_the_one_before(home: Home, publish: Any) -> None:
    """One snapshot, one file of the lake's own, and the same number of rows in each table of the metadata."""
    seen = []
    for i in range(COMMITS):
        made = publish(f"set-{i}", shards=2, scenes_per_shard=2)
        commit_version(home, made.dataset, made.version)
        seen.append(sizes(home))
    added = [{name: after[name] - before[name] for name in after} for before, after in itertools.pairwise(seen[1:])]
    assert len(added) == COMMITS - 2
    assert all(step == added[0] for step in added), added
    assert (added[0]["ducklake_snapshot"], added[0]["files"]) == (1, 1)
    # A version that is there already adds nothing.
    commit_version(home, "set-0", made.version)
    assert sizes(home) == seen[-1]
