from __future__ import annotations

import contextlib
import dataclasses
import os
import shutil
import sqlite3
from pathlib import Path
from typing import Any

import pytest

from catalog import schema
from catalog.lake import lake
from catalog.versions import audit, current, rebuild
from catalog.versions.commit import JobStats, commit_version
from infra import storage
from infra.errors import ConflictError, InputError, IntegrityError
from infra.home import Home

EVERYTHING = {
    "datasets": "SELECT * FROM datasets ORDER BY ALL",
    "jobs": "SELECT * FROM jobs ORDER BY ALL",
    "scenes": "SELECT * FROM versions.scenes ORDER BY ALL",
    "rejects": "SELECT * FROM versions.rejects ORDER BY ALL",
    "states": "SELECT * FROM versions.states ORDER BY ALL",
    "shards": "SELECT * FROM versions.shards ORDER BY dataset, version, shard",
    "current": "SELECT count(*), count(DISTINCT dataset) FROM scenes",
    "metrics": "SELECT * FROM metrics ORDER BY ALL",
    "runs": "SELECT * EXCLUDE (snapshot_id) FROM runs ORDER BY ALL",
}


def contents(home: Home) -> dict[str, list[tuple[Any, ...]]]:
    with lake.reading(home) as reader:
        return {name: reader.rows(query) for name, query in EVERYTHING.items()}


@pytest.fixture
def filled(home: Home, publish: Any) -> Home:
    """Two versions of one dataset with the older one current, another dataset, a run with its metrics."""
    old, new, other = publish(version="a" * 16), publish(version="b" * 16, shards=3), publish("other")
    commit_version(home, old.dataset, old.version, stats=JobStats(started_at=1e9, seconds=2.0, peak_rss_bytes=5))
    commit_version(home, new.dataset, new.version)
    commit_version(home, other.dataset, other.version)
    commit_version(home, old.dataset, old.version)
    with lake.writing(home) as writer:
        writer.connection.execute("INSERT INTO main.runs (run_id, snapshot_id, dataset_versions) VALUES ('r', 3, '{}')")
        writer.connection.execute(
            "INSERT INTO main.metrics SELECT 'r', range, 'loss', 1.0 / (1 + range), now() FROM range(5)"
        )
    return home


def test_the_new_catalog_holds_what_the_old_one_held(filled: Home) -> None:
    before = contents(filled)
    assert len(before["metrics"]) == 5 and len(before["scenes"]) == 28
    done = rebuild.rebuild(filled)
    assert (done.versions, done.carried_rows, done.lost, done.notes) == (3, 6, None, [])
    assert contents(filled) == before
    assert audit.verify(filled).problems == []
    # The snapshot it named is of a history that is gone.
    with lake.reading(filled) as reader:
        assert reader.rows("SELECT snapshot_id FROM runs") == [(None,)]


@pytest.mark.parametrize("damage", ["removed", "garbage", "emptied"])
def test_a_lost_or_damaged_catalog_comes_back_from_the_manifests(filled: Home, damage: str) -> None:
    names = ("scenes", "rejects", "states", "shards", "current")
    before = contents(filled)
    path = Path(filled.catalog)
    if damage == "removed":
        for ending in ("", "-wal", "-shm"):
            Path(filled.catalog + ending).unlink(missing_ok=True)
    else:
        path.write_bytes(b"" if damage == "emptied" else b"garbage" * 1000)
    done = rebuild.rebuild(filled)
    assert done.versions == 3 and done.carried_rows == 0
    after = contents(filled)
    assert {name: after[name] for name in names} == {name: before[name] for name in names}
    assert audit.verify(filled).problems == []
    kept = os.path.exists(filled.catalog + rebuild.KEPT_SUFFIX)
    assert kept == (damage == "garbage") == (done.lost is not None)


def test_a_catalog_with_broken_pages_comes_back_too(filled: Home) -> None:
    before = contents(filled)
    direct = sqlite3.connect(filled.catalog)
    direct.execute("PRAGMA wal_checkpoint(TRUNCATE)")
    direct.close()
    with open(filled.catalog, "r+b") as file:
        file.seek(4096 * 3)
        file.write(b"\xff" * 4096 * 30)
    assert rebuild.rebuild(filled).versions == 3
    assert contents(filled)["scenes"] == before["scenes"]
    assert audit.verify(filled).problems == []


def test_a_moved_home_is_mended_by_a_rebuild(filled: Home, tmp_path: Path) -> None:
    before = contents(filled)
    moved = Home(url=str(tmp_path / "moved"), catalog=str(tmp_path / "moved" / "catalog.sqlite"))
    shutil.move(filled.url, moved.url)
    with pytest.raises(IntegrityError, match="belongs to HOME"):
        contents(moved)
    assert rebuild.rebuild(moved).carried_rows == 6
    assert contents(moved) == before
    assert audit.verify(moved).problems == []


def test_an_unfinished_version_is_left_out(filled: Home, publish: Any) -> None:
    running = publish("running")
    os.unlink(os.path.join(running.folder, schema.JOB_PATH))
    assert rebuild.rebuild(filled).versions == 3
    with lake.reading(filled) as reader:
        assert reader.rows("SELECT count(*) FROM datasets WHERE dataset = 'running'") == [(0,)]


def test_a_version_with_a_wrong_file_stops_the_rebuild_and_the_old_catalog_stays(filled: Home) -> None:
    before = contents(filled)
    broken = Path(filled.datasets("other", "0123456789abcdef"), schema.rejects_path(0))
    saved = broken.read_bytes()
    broken.write_bytes(saved[:-1])
    with pytest.raises(IntegrityError, match="rejects/00000.parquet"):
        rebuild.rebuild(filled)
    broken.write_bytes(saved)
    assert contents(filled) == before
    assert not [name for name in os.listdir(filled.url) if storage.TEMPORARY_SUFFIX in name]


def test_the_old_catalog_says_which_version_is_current_also_when_the_pointer_is_behind(filled: Home) -> None:
    """A kill between a commit and the writing of the pointer leaves the pointer at the version before."""
    with lake.reading(filled) as reader:
        before = current.current_versions(reader)
        (other,) = reader.rows("SELECT version FROM datasets WHERE dataset = 'toy' AND NOT is_current")[0]
    current.write_pointer(filled, "toy", other)
    rebuild.rebuild(filled)
    with lake.reading(filled) as reader:
        assert current.current_versions(reader) == before
    assert audit.verify(filled).problems == []


def test_without_catalog_and_pointer_a_single_version_is_current_and_of_several_none_is(filled: Home) -> None:
    os.unlink(filled.catalog)
    for dataset in ("toy", "other"):
        os.unlink(filled.datasets(dataset, schema.CURRENT_PATH))
    done = rebuild.rebuild(filled)
    assert len(done.notes) == 1 and "toy has versions" in done.notes[0]
    with lake.reading(filled) as reader:
        assert reader.rows("SELECT dataset FROM datasets WHERE is_current") == [("other",)]
    assert [problem.dataset for problem in audit.verify(filled).problems] == ["toy"]


def test_a_reader_that_is_open_during_the_swap_answers_before_and_after(filled: Home) -> None:
    """The swap is a transaction on the same file, not another file of the same name with the old one's log beside it."""
    inode = os.stat(filled.catalog).st_ino
    with lake.reading(filled) as reader:
        assert reader.rows("SELECT count(*) FROM versions.scenes") == [(28,)]
        rebuild.rebuild(filled)
        assert reader.rows("SELECT count(*) FROM versions.scenes") == [(28,)]
        assert reader.rows("SELECT count(*) FROM captions") == reader.rows(
            "SELECT sum(captions) FROM datasets WHERE is_current"
        )
    assert os.stat(filled.catalog).st_ino == inode
    direct = sqlite3.connect(filled.catalog)
    assert direct.execute("PRAGMA integrity_check").fetchall() == [("ok",)]
    assert direct.execute("PRAGMA journal_mode").fetchall() == [("wal",)]
    direct.close()


def test_commits_go_on_after_a_rebuild(filled: Home, publish: Any) -> None:
    rebuild.rebuild(filled)
    late = publish("late")
    assert not commit_version(filled, late.dataset, late.version).was_there
    assert audit.verify(filled).problems == []


def test_the_old_catalog_is_kept_beside_the_new_one_with_what_stood_in_its_log(filled: Home) -> None:
    """Each rebuild keeps a copy of its own, and the copy opens."""
    query = "SELECT count(*) FROM ducklake_snapshot"
    with contextlib.closing(sqlite3.connect(filled.catalog)) as connection:
        before = connection.execute(query).fetchone()
    first, second = rebuild.rebuild(filled).kept, rebuild.rebuild(filled).kept
    assert (first, second) == (f"{filled.catalog}.before-rebuild", f"{filled.catalog}.before-rebuild-2")
    with contextlib.closing(sqlite3.connect(f"{filled.catalog}.before-rebuild")) as connection:
        assert connection.execute(query).fetchone() == before


def test_h4_a_file_that_holds_tables_of_others_is_neither_filled_nor_replaced(filled: Home, tmp_path: Path) -> None:
    other = tmp_path / "other.sqlite"
    with contextlib.closing(sqlite3.connect(other)) as connection:
        connection.execute("CREATE TABLE accounts (name TEXT)")
        connection.execute("INSERT INTO accounts VALUES ('kept')")
        connection.commit()
    content, home = other.read_bytes(), dataclasses.replace(filled, catalog=str(other))
    with pytest.raises(ConflictError, match=r"other\.sqlite holds tables that are not a catalog's \(accounts\)"):
        rebuild.rebuild(home)
    with pytest.raises(ConflictError, match=r"accounts.*nothing was changed"), lake.writing(home):
        pass
    assert other.read_bytes() == content
    # A table that somebody put into our catalog is not thrown away, either.
    with contextlib.closing(sqlite3.connect(filled.catalog)) as connection:
        connection.execute("CREATE TABLE accounts (name TEXT)")
        connection.commit()
    with pytest.raises(ConflictError, match="accounts"):
        rebuild.rebuild(filled)


def test_h4_a_home_that_is_not_there_is_an_error_and_no_empty_catalog(filled: Home) -> None:
    mistyped = dataclasses.replace(filled, url=filled.url + "-mistyped")
    with pytest.raises(InputError, match=r"There is no HOME .*-mistyped"):
        rebuild.rebuild(mistyped)


@pytest.mark.parametrize("column", ["record_count", "file_size_bytes"])
def test_h5_numbers_of_the_lake_that_were_edited_by_hand_are_found(filled: Home, column: str) -> None:
    assert audit.verify(filled, quick=True).problems == []
    with contextlib.closing(sqlite3.connect(filled.catalog)) as connection:
        where = "WHERE path LIKE '%/scenes/%' ORDER BY path LIMIT 1"
        connection.execute(
            f"UPDATE ducklake_data_file SET {column} = {column} + 1 WHERE path = (SELECT path FROM ducklake_data_file {where})"
        )
        connection.commit()
    problems = [str(problem) for problem in audit.verify(filled, quick=True).problems]
    assert [problem for problem in problems if "versions.scenes: the catalog records" in problem] != []


def test_h5_a_total_of_the_lake_that_was_edited_by_hand_is_found(filled: Home) -> None:
    with contextlib.closing(sqlite3.connect(filled.catalog)) as connection:
        connection.execute("UPDATE ducklake_table_stats SET record_count = record_count + 1")
        connection.commit()
    problems = [str(problem) for problem in audit.verify(filled, quick=True).problems]
    assert [problem for problem in problems if "rows in all" in problem] != []
