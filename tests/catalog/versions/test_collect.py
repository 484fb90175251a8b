from __future__ import annotations

import os
import shutil
import time
from pathlib import Path
from typing import Any

import pytest

from catalog import schema
from catalog.lake import lake
from catalog.lake.lock import commit_lock
from catalog.versions import audit
from catalog.versions.collect import collect
from catalog.versions.commit import commit_version
from infra import storage
from infra.home import Home


def put(path: str | Path, *, age_hours: float = 48.0) -> str:
    target = Path(path)
    target.parent.mkdir(parents=True, exist_ok=True)
    target.write_bytes(b"stray")
    age(target, age_hours)
    return str(target)


def age(path: str | Path, hours: float) -> None:
    then = time.time() - hours * 3600
    os.utime(path, (then, then))


def files(home: Home) -> set[str]:
    return {
        str(path) for path in Path(home.url).rglob("*") if path.is_file() and not path.name.endswith(("-wal", "-shm"))
    }


@pytest.fixture
def made(home: Home, publish: Any) -> Any:
    published = publish()
    commit_version(home, published.dataset, published.version)
    for path in files(home):
        age(path, 48)
    return published


def strays(home: Home, made: Any) -> list[str]:
    """One of each kind that gc is for."""
    unfinished = home.datasets("toy", "e" * 16)
    return [
        put(os.path.join(made.folder, "scenes/train/00099.parquet")),
        put(os.path.join(made.folder, "views/bad/pass-00/train-00000.tar")),
        put(os.path.join(made.folder, f"scenes/train/.00000.parquet.77-abcd{storage.TEMPORARY_SUFFIX}")),
        put(os.path.join(unfinished, "scenes/train/00000.parquet")),
        put(os.path.join(unfinished, "rejects/00000.parquet")),
        put(os.path.join(home.work("job-1"), "part/0.arrow")),
        put(os.path.join(home.lake_data, "versions/shards/ducklake-0000.parquet")),
        put(f"{home.url}/.catalog.sqlite.77-abcd{storage.TEMPORARY_SUFFIX}"),
        put(f"{home.url}/.catalog.sqlite.77-abcd{storage.TEMPORARY_SUFFIX}-wal"),
    ]


def foreign(home: Home, made: Any) -> list[str]:
    """What other people may keep in HOME, and what a running job has just written."""
    return [
        put(os.path.join(home.url, "notes.txt")),
        put(os.path.join(home.url, "runs/r1/encoder.safetensors")),
        put(os.path.join(home.url, "embeddings/e1/00000.parquet")),
        put(os.path.join(home.datasets(), "README.md")),
        put(os.path.join(home.datasets("toy"), "notes.txt")),
        put(os.path.join(home.datasets("toy", "my-analysis"), "plot.png")),
        put(os.path.join(home.datasets("Not A Dataset", "v"), "scenes/train/00000.parquet")),
        put(os.path.join(made.folder, "notes.txt")),
        put(os.path.join(home.lake_data, "notes.txt")),
        put(os.path.join(made.folder, "scenes/train/00098.parquet"), age_hours=1),
        put(os.path.join(home.work("job-2"), "part/0.arrow"), age_hours=1),
        put(os.path.join(home.datasets("new", "d" * 16), "scenes/train/00000.parquet"), age_hours=1),
    ]


def test_it_lists_all_strays_and_removes_nothing_unasked(home: Home, made: Any) -> None:
    expected, _ = strays(home, made), foreign(home, made)
    before = files(home)
    found = collect(home)
    assert sorted(stray.url for stray in found.strays) == sorted(expected)
    assert found.left_alone == [] and all(stray.bytes == 5 and stray.why for stray in found.strays)
    assert files(home) == before


def test_delete_removes_the_strays_and_nothing_else(home: Home, made: Any) -> None:
    sound = files(home)
    expected, kept = strays(home, made), foreign(home, made)
    assert len(collect(home, delete=True).strays) == len(expected)
    assert files(home) == sound | set(kept)
    assert not os.path.exists(home.work("job-1")) and not os.path.exists(home.datasets("toy", "e" * 16))
    assert [p.path for p in audit.verify(home).problems] == ["notes.txt", "scenes/train/00098.parquet"]
    with lake.reading(home) as reader:
        assert reader.rows("SELECT count(*) FROM captions") == [(made.captions,)]
        assert reader.rows("SELECT count(*) FROM shards") == [(2,)]


def test_a_sound_home_has_no_strays_at_any_age(home: Home, made: Any) -> None:
    before = files(home)
    assert collect(home, delete=True, older_than_hours=0).strays == []
    assert files(home) == before


def test_files_that_only_an_old_snapshot_names_stay(home: Home, made: Any, publish: Any) -> None:
    new = publish(version="f" * 16)
    commit_version(home, new.dataset, new.version)
    assert collect(home, delete=True, older_than_hours=0).strays == []
    with lake.reading(home) as reader:
        assert reader.rows("SELECT count(*) FROM versions.shards AT (VERSION => 2)") == [(2,)]
        assert reader.rows("SELECT count(*) FROM versions.scenes") == [(16,)]


def test_files_that_the_catalog_alone_still_names_stay(home: Home, made: Any) -> None:
    """Without manifests and job record, the registered parquet is all that is left of a version."""
    storage.remove_folder(os.path.join(made.folder, "manifests"))
    os.unlink(os.path.join(made.folder, schema.JOB_PATH))
    collect(home, delete=True, older_than_hours=0)
    with lake.reading(home) as reader:
        assert reader.rows("SELECT count(*) FROM captions") == [(made.captions,)]


def test_a_version_in_the_making_keeps_its_published_shards(home: Home, made: Any, publish: Any) -> None:
    running = publish("running")
    os.unlink(os.path.join(running.folder, schema.JOB_PATH))
    assert collect(home, delete=True, older_than_hours=0).strays == []
    assert len(storage.list_files(running.folder)) == 10


def test_nothing_of_a_version_with_a_broken_record_is_judged(home: Home, made: Any) -> None:
    put(os.path.join(made.folder, schema.manifest_path("train", 0)))
    put(os.path.join(made.folder, "scenes/train/00099.parquet"))
    found = collect(home, delete=True)
    assert found.strays == [] and len(found.left_alone) == 1 and "is not JSON" in found.left_alone[0]
    assert os.path.exists(os.path.join(made.folder, schema.scenes_path("train", 0)))


def test_nothing_that_a_catalog_might_name_is_judged_when_the_catalog_is_missing_or_another(
    home: Home, made: Any, tmp_path: Path
) -> None:
    """With the wrong catalog every file in the lake would look like garbage, and those that manifests lost, too."""
    strays(home, made)
    before = files(home)
    other = Home(url=str(tmp_path / "other"), catalog=str(tmp_path / "other" / "catalog.sqlite"))
    with lake.writing(other):
        pass
    for catalog, sentence in (
        (str(tmp_path / "none.sqlite"), "There is no catalog"),
        (other.catalog, "belongs to HOME"),
    ):
        found = collect(Home(url=home.url, catalog=catalog), older_than_hours=0)
        assert not [stray for stray in found.strays if "/lake/" in stray.url or stray.url.endswith(".parquet")]
        assert len(found.left_alone) == 2 and all(sentence in text for text in found.left_alone)
    assert files(home) == before


def test_before_the_first_commit_what_a_killed_job_left_is_collected(home: Home, publish: Any) -> None:
    made = publish()
    shutil.rmtree(os.path.join(made.folder, "manifests"))
    os.unlink(os.path.join(made.folder, schema.JOB_PATH))
    found = collect(home, delete=True, older_than_hours=0)
    assert len(found.strays) == 8 and found.left_alone == []
    assert not os.path.exists(made.folder)


def test_a_long_job_keeps_its_first_files_as_long_as_it_writes(home: Home, made: Any) -> None:
    first = put(home.work("job", "map/0.arrow"), age_hours=100)
    last = put(home.work("job", "map/9.arrow"), age_hours=1)
    assert collect(home, delete=True).strays == []
    age(last, 25)
    assert sorted(stray.url for stray in collect(home, delete=True).strays) == [first, last]


def test_a_file_written_anew_between_the_look_and_the_deletion_stays(
    home: Home, made: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    stray = put(os.path.join(made.folder, "scenes/train/00099.parquet"))

    def resumed_job_writes_first(where: Home) -> Any:
        Path(stray).write_bytes(b"new")
        return commit_lock(where)

    monkeypatch.setattr("catalog.versions.collect.commit_lock", resumed_job_writes_first)
    collect(home, delete=True)
    assert Path(stray).read_bytes() == b"new"


def test_a_killed_rebuild_and_a_killed_commit_leave_only_what_gc_removes(home: Home, made: Any) -> None:
    """Parquet that DuckLake wrote for a transaction that was never committed."""
    with lake.writing(home) as writer:
        writer.connection.execute("BEGIN")
        writer.connection.execute("INSERT INTO versions.shards (dataset) VALUES ('x')")
        left = [path for path in storage.list_files(home.lake_data)]
        assert len(left) == 2
        copies = {path: Path(home.lake_data, path).read_bytes() for path in left}
        writer.connection.execute("ROLLBACK")
    for path, data in copies.items():
        Path(home.lake_data, path).write_bytes(data)
    assert len(collect(home, delete=True, older_than_hours=0).strays) == 1
    assert len(storage.list_files(home.lake_data)) == 1
    assert audit.verify(home).problems == []
