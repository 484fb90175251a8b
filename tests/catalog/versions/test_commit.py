from __future__ import annotations

import dataclasses
import os
import sqlite3
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import orjson
import pyarrow as pa
import pytest

from catalog import schema
from catalog.lake import lake
from catalog.manifest import JobRecord, Manifest
from catalog.versions import commit
from catalog.versions.commit import JobStats, commit_version
from infra import storage
from infra.errors import AccountingError, ConflictError, InputError, IntegrityError, StorageError
from infra.home import Home

COUNTS = "SELECT (SELECT count(*) FROM versions.scenes), (SELECT count(*) FROM versions.rejects), (SELECT count(*) FROM versions.states), (SELECT count(*) FROM versions.shards), (SELECT count(*) FROM jobs), (SELECT count(*) FROM datasets)"


def rows(home: Home, query: str) -> list[tuple[Any, ...]]:
    with lake.reading(home) as reader:
        return reader.rows(query)


def edit_manifest(folder: str, shard: int = 0, **changes: Any) -> None:
    url = storage.join(folder, schema.manifest_path("train", shard))
    manifest = Manifest.from_json(storage.read_bytes(url), url=url)
    storage.publish(url, dataclasses.replace(manifest, **changes).to_json())


def edit_job(folder: str, **changes: Any) -> None:
    url = storage.join(folder, schema.JOB_PATH)
    job = JobRecord.from_json(storage.read_bytes(url), url=url)
    storage.publish(url, dataclasses.replace(job, **changes).to_json())


def replace_file(folder: str, path: str, table: pa.Table, **options: Any) -> None:
    """Publish another parquet under `path` and make the manifest of shard 0 agree in size, hash and rows."""
    import io

    import pyarrow.parquet as pq

    out = io.BytesIO()
    pq.write_table(table, out, **options)
    record = storage.publish(storage.join(folder, path), out.getvalue())
    url = storage.join(folder, schema.manifest_path("train", 0))
    files = Manifest.from_json(storage.read_bytes(url), url=url).files
    new = [
        dataclasses.replace(f, bytes=record.bytes, sha256=record.sha256, rows=table.num_rows) if f.path == path else f
        for f in files
    ]
    edit_manifest(folder, files=new)


def read_table(folder: str, path: str) -> pa.Table:
    import pyarrow.parquet as pq

    return pq.ParquetFile(storage.join(folder, path)).read()


def test_commit_is_one_snapshot_with_every_row(home: Home, publish: Any) -> None:
    made = publish()
    before = time.time()
    done = commit_version(home, made.dataset, made.version, stats=JobStats(started_at=before, seconds=2.5, workers=2))
    assert not done.was_there
    assert rows(home, COUNTS) == [(8, 2, 8, 2, 1, 1)]
    assert rows(home, "SELECT max(snapshot_id) FROM ducklake_snapshots('lake')") == [(done.snapshot_id,)]
    earlier = f"SELECT count(*) FROM versions.shards AT (VERSION => {done.snapshot_id - 1})"
    assert rows(home, earlier) == [(0,)]
    job = rows(
        home, "SELECT job_id, seconds, workers, peak_rss_bytes, epoch(started_at), config->>'$.source' FROM jobs"
    )
    assert job == [(f"ingest:toy@{made.version}", 2.5, 2, None, pytest.approx(before, abs=1e-5), "toyworld")]
    assert rows(home, "SELECT scenes, captions, texts_read, texts_kept, rejects, is_current FROM datasets") == [
        (8, 14, 16, 14, 2, True)
    ]
    pointer = orjson.loads(storage.read_bytes(home.datasets("toy", schema.CURRENT_PATH)))
    assert pointer == {"version": made.version}


def test_shard_rows_hold_what_the_manifests_say(home: Home, publish: Any) -> None:
    made = publish(shards=1)
    commit_version(home, made.dataset, made.version)
    [row] = rows(home, "SELECT rejects_by_reason, captions_per_scene, files, bytes FROM shards")
    url = storage.join(made.folder, schema.manifest_path("train", 0))
    files = Manifest.from_json(storage.read_bytes(url), url=url).files
    assert row[0] == {"missing_text": 1} and row[1] == {1: 2, 2: 1, 3: 1}
    assert [(f["path"], f["sha256"], f["rows"]) for f in row[2]] == [(f.path, f.sha256, f.rows) for f in files]
    assert row[3] == sum(f.bytes for f in files)


def test_d7_a_second_commit_of_one_version_adds_nothing(home: Home, publish: Any) -> None:
    made = publish()
    first = commit_version(home, made.dataset, made.version)
    second = commit_version(home, made.dataset, made.version)
    assert (second.was_there, second.snapshot_id) == (True, first.snapshot_id)
    assert rows(home, COUNTS) == [(8, 2, 8, 2, 1, 1)]


def test_plain_names_show_the_version_committed_last_and_versions_keep_all(home: Home, publish: Any) -> None:
    old, new = publish(version="a" * 16), publish(version="b" * 16, shards=3)
    commit_version(home, "toy", old.version)
    commit_version(home, "toy", new.version)
    assert rows(home, "SELECT count(*), min(version), max(version) FROM scenes") == [(12, new.version, new.version)]
    assert rows(home, "SELECT count(*) FROM captions") == [(new.captions,)]
    assert rows(home, "SELECT version, count(*) FROM versions.scenes GROUP BY ALL ORDER BY ALL") == [
        (old.version, 8),
        (new.version, 12),
    ]
    back = commit_version(home, "toy", old.version)
    assert back.was_there
    assert rows(home, "SELECT version FROM datasets WHERE is_current") == [(old.version,)]
    assert rows(home, "SELECT count(*) FROM scenes") == [(8,)]
    assert b'"' + old.version.encode() + b'"' in storage.read_bytes(home.datasets("toy", schema.CURRENT_PATH))


def test_versions_of_other_datasets_stay_current(home: Home, publish: Any) -> None:
    a, b = publish("one", "a" * 16), publish("two", "a" * 16)
    commit_version(home, a.dataset, a.version)
    commit_version(home, b.dataset, b.version)
    assert rows(home, "SELECT dataset, is_current FROM datasets ORDER BY dataset") == [("one", True), ("two", True)]
    assert rows(home, "SELECT dataset, count(*) FROM scenes GROUP BY ALL ORDER BY ALL") == [("one", 8), ("two", 8)]


def test_c7_an_empty_file_after_a_full_disk_is_not_registered(home: Home, publish: Any) -> None:
    made = publish()
    Path(made.folder, schema.scenes_path("train", 0)).write_bytes(b"")
    with pytest.raises(IntegrityError, match=r"0 bytes, as after a full disk"):
        commit_version(home, made.dataset, made.version)
    assert not os.path.exists(home.catalog)


@pytest.mark.parametrize("damage", ["missing", "shorter", "tar missing"])
def test_c7_a_missing_or_cut_file_is_named_and_not_registered(home: Home, publish: Any, damage: str) -> None:
    made = publish()
    path = schema.good_path("train", 1) if damage == "tar missing" else schema.rejects_path(1)
    target = Path(made.folder, path)
    if damage == "shorter":
        target.write_bytes(target.read_bytes()[:-1])
    else:
        target.unlink()
    with pytest.raises(IntegrityError, match=path):
        commit_version(home, made.dataset, made.version)
    assert not os.path.exists(home.catalog)


def test_c8_an_all_null_column_keeps_its_declared_type(home: Home, publish: Any) -> None:
    made = publish()
    commit_version(home, made.dataset, made.version)
    types = dict(
        rows(
            home,
            "SELECT column_name, data_type FROM duckdb_columns() WHERE table_name = 'rejects' AND schema_name = 'versions'",
        )
    )
    assert types["detail"] == "VARCHAR" and types["raw"] == "BLOB" and types["scene_key"] == "VARCHAR"
    assert rows(home, "SELECT count(raw), count(detail), max(octet_length(raw)) FROM rejects") == [(0, 0, None)]


@pytest.mark.parametrize("column", ["detail", "raw", "text"])
def test_c8_a_file_with_an_untyped_null_column_is_refused(home: Home, publish: Any, column: str) -> None:
    made = publish()
    table = read_table(made.folder, schema.rejects_path(0))
    at = table.column_names.index(column)
    replace_file(made.folder, schema.rejects_path(0), table.set_column(at, column, pa.nulls(table.num_rows)))
    with pytest.raises((IntegrityError, StorageError), match="rejects|column|type"):
        commit_version(home, made.dataset, made.version)
    assert rows(home, COUNTS) == [(0, 0, 0, 0, 0, 0)]


@pytest.mark.parametrize("change", ["extra", "absent", "narrow"])
def test_a_file_of_another_schema_is_refused(home: Home, publish: Any, change: str) -> None:
    made = publish()
    table = read_table(made.folder, schema.scenes_path("train", 0))
    if change == "extra":
        table = table.append_column("surprise", pa.array([1] * table.num_rows))
    elif change == "absent":
        table = table.drop_columns(["source_id"])
    else:
        at = table.column_names.index("source_row")
        table = table.set_column(at, "source_row", pa.array(["x"] * table.num_rows))
    replace_file(made.folder, schema.scenes_path("train", 0), table)
    with pytest.raises((IntegrityError, StorageError)):
        commit_version(home, made.dataset, made.version)
    assert rows(home, COUNTS) == [(0, 0, 0, 0, 0, 0)]


def test_a_file_whose_rows_belong_elsewhere_is_refused(home: Home, publish: Any) -> None:
    made = publish()
    table = read_table(made.folder, schema.scenes_path("train", 0))
    at = table.column_names.index("version")
    other = pa.array(["e" * 16] * table.num_rows, pa.large_string())
    replace_file(
        made.folder, schema.scenes_path("train", 0), table.set_column(at, table.schema.field("version"), other)
    )
    with pytest.raises(IntegrityError, match="another dataset, version or split"):
        commit_version(home, made.dataset, made.version)


def test_a_footer_with_fewer_rows_than_the_manifest_is_refused(home: Home, publish: Any) -> None:
    made = publish()
    path = schema.states_path("train", 0)
    replace_file(made.folder, path, read_table(made.folder, path).slice(0, 3))
    url = storage.join(made.folder, schema.manifest_path("train", 0))
    files = Manifest.from_json(storage.read_bytes(url), url=url).files
    edit_manifest(made.folder, files=[dataclasses.replace(f, rows=4) if f.path == path else f for f in files])
    with pytest.raises(IntegrityError, match="holds 3 rows, its manifest says 4"):
        commit_version(home, made.dataset, made.version)


def test_garbage_of_the_right_size_is_refused(home: Home, publish: Any) -> None:
    made = publish()
    target = Path(made.folder, schema.scenes_path("train", 0))
    target.write_bytes(b"x" * target.stat().st_size)
    with pytest.raises(IntegrityError, match="not readable as parquet"):
        commit_version(home, made.dataset, made.version)


@pytest.mark.parametrize(
    "changes",
    [
        {"texts_read": 9},
        {"texts_kept": 6, "texts_read": 7},
        {"rejects": {"missing_text": 2}},
        {"captions_per_scene": {"1": 4}},
        {"captions_per_scene": {"7": 1}},
        {"scenes": 5},
    ],
    ids=lambda changes: next(iter(changes)),
)
def test_a5_counts_that_do_not_add_up_stop_the_commit(home: Home, publish: Any, changes: dict[str, Any]) -> None:
    made = publish()
    edit_manifest(made.folder, **changes)
    with pytest.raises(AccountingError, match="train-00000"):
        commit_version(home, made.dataset, made.version)
    assert not os.path.exists(home.catalog)


@pytest.mark.parametrize(
    "changes", [{"scenes": 9}, {"texts_read": 15}, {"rejects": {"missing_text": 1}}, {"rejects": {"x": 2}}]
)
def test_a_job_that_disagrees_with_its_manifests_stops_the_commit(
    home: Home, publish: Any, changes: dict[str, Any]
) -> None:
    made = publish()
    edit_job(made.folder, **changes)
    with pytest.raises(AccountingError, match="job of toy@"):
        commit_version(home, made.dataset, made.version)


def test_an_unfinished_version_is_not_committed(home: Home, publish: Any) -> None:
    made = publish()
    os.unlink(storage.join(made.folder, schema.JOB_PATH))
    with pytest.raises(InputError, match="did not finish"):
        commit_version(home, made.dataset, made.version)


def test_a_shard_named_twice_is_refused_before_it_doubles_its_rows(home: Home, publish: Any) -> None:
    made = publish(shards=1)
    edit_job(made.folder, shards=["train-00000", "train-00000"])
    with pytest.raises(IntegrityError, match="names a shard twice"):
        commit_version(home, made.dataset, made.version)


def test_a_file_named_by_two_manifests_is_refused(home: Home, publish: Any) -> None:
    made = publish()
    url = storage.join(made.folder, schema.manifest_path("train", 0))
    edit_manifest(made.folder, 1, files=Manifest.from_json(storage.read_bytes(url), url=url).files)
    with pytest.raises(IntegrityError, match="named twice"):
        commit_version(home, made.dataset, made.version)


@pytest.mark.parametrize("path", ["/etc/passwd", "../../other/scenes/train/00000.parquet", "scenes/../../x.parquet"])
def test_a_manifest_cannot_reach_outside_its_version(home: Home, publish: Any, path: str) -> None:
    made = publish()
    url = storage.join(made.folder, schema.manifest_path("train", 0))
    files = Manifest.from_json(storage.read_bytes(url), url=url).files
    edit_manifest(made.folder, files=[dataclasses.replace(files[0], path=path), *files[1:]])
    with pytest.raises(IntegrityError, match="outside its version"):
        commit_version(home, made.dataset, made.version)


def test_files_registered_by_hand_are_not_registered_again(home: Home, publish: Any) -> None:
    """C of the DuckLake traps: the same file twice doubles its rows without an error."""
    first, made = publish("one"), publish("two")
    commit_version(home, first.dataset, first.version)
    with lake.writing(home) as writer:
        path = lake.quote(storage.join(made.folder, schema.scenes_path("train", 0)))
        writer.connection.execute(f"CALL ducklake_add_data_files('lake', 'scenes', {path}, schema => 'versions')")
    with pytest.raises(IntegrityError, match="holds a part of two@"):
        commit_version(home, made.dataset, made.version)
    assert rows(home, "SELECT dataset FROM datasets") == [("one",)]


def test_one_version_cannot_mean_two_contents(home: Home, publish: Any) -> None:
    made = publish()
    commit_version(home, made.dataset, made.version)
    path = schema.states_path("train", 0)
    table = read_table(made.folder, path)
    at = table.column_names.index("state")
    other = pa.array(['{"n": 1}'] * table.num_rows, pa.large_string())
    replace_file(made.folder, path, table.set_column(at, table.schema.field("state"), other))
    with pytest.raises(
        IntegrityError, match="with other content: shard train-00000 differs from its manifest in .*files"
    ):
        commit_version(home, made.dataset, made.version)


@pytest.mark.parametrize("table", ["ducklake_snapshot_changes", "ducklake_data_file", "ducklake_file_column_stats"])
def test_a_database_that_refuses_in_the_middle_of_a_commit_keeps_nothing_of_it(
    home: Home, publish: Any, table: str
) -> None:
    first, made = publish("one"), publish("two")
    commit_version(home, first.dataset, first.version)
    before = rows(home, COUNTS)
    with sqlite3.connect(home.catalog) as direct:
        direct.execute(f"CREATE TRIGGER full BEFORE INSERT ON {table} BEGIN SELECT RAISE(ABORT, 'disk is full'); END")
    direct.close()
    with pytest.raises((StorageError, ConflictError), match="two@"):
        commit_version(home, made.dataset, made.version)
    assert rows(home, COUNTS) == before
    assert not os.path.exists(home.datasets("two", schema.CURRENT_PATH))
    with sqlite3.connect(home.catalog) as direct:
        direct.execute("DROP TRIGGER full")
    direct.close()
    assert not commit_version(home, made.dataset, made.version).was_there
    assert rows(home, COUNTS) == [(16, 4, 16, 4, 2, 2)]


def test_d8_a_foreign_writer_that_holds_the_database_ends_in_a_sentence(
    home: Home, publish: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A plain client does not take our lock; the commit waits for it, gives up in words, and loses nothing."""
    first, made = publish("one"), publish("two")
    commit_version(home, first.dataset, first.version)
    monkeypatch.setattr(lake, "BUSY_TIMEOUT_MS", 50)
    monkeypatch.setattr(commit, "ATTEMPTS", 2)
    # In a process of its own: two SQLite libraries in one process do not see each other's locks.
    script = "import sqlite3, sys; c = sqlite3.connect(sys.argv[1], isolation_level=None); c.execute('BEGIN IMMEDIATE'); print('held', flush=True); sys.stdin.read()"
    with subprocess.Popen(
        [sys.executable, "-c", script, home.catalog], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    ) as foreign:
        assert foreign.stdout is not None and foreign.stdout.readline() == b"held\n"
        with pytest.raises((ConflictError, StorageError), match="locked"):
            commit_version(home, made.dataset, made.version)
        foreign.communicate(b"")
    assert not commit_version(home, made.dataset, made.version).was_there
    assert rows(home, COUNTS) == [(16, 4, 16, 4, 2, 2)]


@pytest.mark.parametrize(
    "name",
    ["a b", "it's", "x[1]", "wild*card?", 'quo"te', "version=9", "split=test", "ünï", "semi;colon", "%41", "{a,b}"],
)
def test_g3_paths_are_exact_names_and_never_patterns(tmp_path: Path, publish: Any, name: str) -> None:
    """Also: `key=value` in a path above HOME must not overwrite the column of that name."""
    folder = tmp_path / name
    home = Home(url=str(folder / "home"), catalog=str(folder / "home" / "catalog.sqlite"))
    publish.home = home
    made = publish()
    # A sibling that the name, taken as a pattern, would match as well.
    decoy = Path(str(tmp_path / "x1")) if name == "x[1]" else Path(str(tmp_path / "wildXcardY"))
    target = decoy / "home" / "datasets" / made.dataset / made.version / schema.scenes_path("train", 0)
    target.parent.mkdir(parents=True)
    target.write_bytes(Path(made.folder, schema.scenes_path("train", 0)).read_bytes())
    commit_version(home, made.dataset, made.version)
    assert rows(home, "SELECT count(*), min(version), max(version), min(split), max(split) FROM scenes") == [
        (8, made.version, made.version, "train", "train")
    ]
    assert commit_version(home, made.dataset, made.version).was_there


def test_d16_the_cost_of_a_commit_is_by_shard_and_not_by_file_of_the_home(home: Home, publish: Any) -> None:
    """30 shards of 4 files are one call a kind, one snapshot and one file in the lake's own folder."""
    made = publish(shards=30, scenes_per_shard=1)
    done = commit_version(home, made.dataset, made.version)
    assert rows(home, COUNTS) == [(30, 30, 30, 30, 1, 1)]
    assert rows(home, "SELECT count(*) FROM ducklake_snapshots('lake')") == [(done.snapshot_id + 1,)]
    assert len(storage.list_files(home.lake_data)) == 1
