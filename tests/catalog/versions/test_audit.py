from __future__ import annotations

import dataclasses
import os
from pathlib import Path
from typing import Any

import pytest

from catalog import schema
from catalog.lake import lake
from catalog.manifest import Manifest
from catalog.versions import audit
from catalog.versions.commit import commit_version
from infra import storage
from infra.errors import InputError, IntegrityError
from infra.home import Home


@pytest.fixture
def made(home: Home, publish: Any) -> Any:
    published = publish()
    commit_version(home, published.dataset, published.version)
    return published


def details(home: Home, **options: Any) -> list[str]:
    return [str(problem) for problem in audit.verify(home, **options).problems]


def test_a_sound_home_has_no_problems_and_every_file_is_hashed(home: Home, made: Any) -> None:
    found = audit.verify(home)
    assert found.problems == [] and (found.versions, found.files) == (1, 8)
    assert found.bytes == sum(
        os.path.getsize(os.path.join(made.folder, p))
        for p in storage.list_files(made.folder)
        if p.endswith((".parquet", ".tar"))
    )


def flip(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(data)


@pytest.mark.parametrize("path", [schema.scenes_path("train", 0), schema.good_path("train", 1)])
def test_one_flipped_bit_is_found_and_named(home: Home, made: Any, path: str) -> None:
    flip(Path(made.folder, path))
    [problem] = [problem for problem in audit.verify(home).problems if not problem.path.startswith("versions.")]
    assert problem.path == path and "sha256" in problem.detail
    assert audit.verify(home, quick=True).files == 8


def test_a_missing_a_cut_and_an_unnamed_file_are_each_one_problem(home: Home, made: Any) -> None:
    Path(made.folder, schema.rejects_path(0)).unlink()
    cut = Path(made.folder, schema.good_path("train", 0))
    cut.write_bytes(cut.read_bytes()[:-1])
    Path(made.folder, "scenes/train/00009.parquet").write_bytes(b"x")
    Path(made.folder, f".x.1-ab{storage.TEMPORARY_SUFFIX}").write_bytes(b"in flight")
    paths = sorted(problem.path for problem in audit.verify(home, quick=True).problems)
    assert [p for p in paths if not p.startswith("versions.")] == [
        schema.rejects_path(0),
        "scenes/train/00009.parquet",
        schema.good_path("train", 0),
    ]


def test_a_file_with_rows_added_to_the_catalog_twice_is_found(home: Home, made: Any) -> None:
    with lake.writing(home) as writer:
        path = lake.quote(os.path.join(made.folder, schema.scenes_path("train", 0)))
        writer.connection.execute(f"CALL ducklake_add_data_files('lake', 'scenes', {path}, schema => 'versions')")
    assert any("twice" in text and "rebuild" in text for text in details(home))


@pytest.mark.parametrize(
    ("statement", "expected"),
    [
        ("DELETE FROM versions.scenes WHERE scene_key = 's0-1'", "holds 7 rows, the manifests say 8"),
        ("UPDATE main.datasets SET scenes = 9", "counts 9 scenes, the job record 8"),
        (
            "UPDATE versions.shards SET rows_digest = 'f' WHERE shard = 1",
            "shard train-00001 differs from its manifest in rows_digest",
        ),
        ("DELETE FROM versions.shards WHERE shard = 1", "holds 1 shard rows, the job record names 2"),
        ("DELETE FROM main.jobs", "0 ingest jobs"),
        ("DELETE FROM main.datasets", "6 files of it but no dataset row"),
        ("UPDATE main.datasets SET is_current = false", "the catalog shows version none"),
        ("INSERT INTO main.datasets SELECT * FROM main.datasets", "2 rows for this version"),
    ],
)
def test_a_catalog_that_differs_from_the_manifests_is_found(
    home: Home, made: Any, statement: str, expected: str
) -> None:
    with lake.writing(home) as writer:
        writer.connection.execute(statement)
    found = details(home)
    assert any(expected in text for text in found), found


def test_a_version_that_was_published_but_never_committed_is_found(home: Home, made: Any, publish: Any) -> None:
    publish("late")
    assert any("late@" in text and "0 rows for this version" in text for text in details(home))
    assert details(home, dataset="toy") == []


def test_a_version_that_lost_its_folder_is_found(home: Home, made: Any, publish: Any) -> None:
    storage.remove_folder(made.folder)
    found = details(home)
    assert any("toy@" in text and "no job record" in text for text in found), found


def test_an_unreadable_file_does_not_hide_what_is_wrong_elsewhere(home: Home, made: Any, publish: Any) -> None:
    other = publish("other")
    commit_version(home, other.dataset, other.version)
    flip(Path(made.folder, schema.scenes_path("train", 0)))
    with lake.writing(home) as writer:
        writer.connection.execute("DELETE FROM versions.states WHERE dataset = 'other' AND scene_key = 's0-1'")
    found = details(home)
    assert any("toy@" in text and "sha256" in text for text in found)
    assert any("other@" in text and "holds 7 rows, the manifests say 8" in text for text in found)


def test_files_without_any_catalog_are_a_problem_and_nothing_at_all_is_an_error(home: Home, publish: Any) -> None:
    with pytest.raises(InputError, match="no catalog"):
        audit.verify(home)
    publish()
    assert any("There is no catalog" in text for text in details(home))


def test_an_unfinished_version_is_hashed_but_not_missed_in_the_catalog(home: Home, made: Any, publish: Any) -> None:
    running = publish("running")
    os.unlink(os.path.join(running.folder, schema.JOB_PATH))
    Path(running.folder, "scenes/train/00007.parquet").write_bytes(b"its manifest comes next")
    assert details(home) == []
    flip(Path(running.folder, schema.scenes_path("train", 0)))
    assert len(details(home)) == 1


def test_a_broken_record_is_a_problem_and_hides_no_other(home: Home, made: Any, publish: Any) -> None:
    other = publish("other")
    commit_version(home, other.dataset, other.version)
    Path(made.folder, schema.manifest_path("train", 0)).write_bytes(b"{")
    flip(Path(other.folder, schema.scenes_path("train", 0)))
    found = details(home)
    assert any("is not JSON" in text for text in found) and any("other@" in text and "sha256" in text for text in found)


def test_an_unknown_dataset_is_an_error(home: Home, made: Any) -> None:
    with pytest.raises(InputError, match="no dataset 'nope'.*toy"):
        audit.verify(home, dataset="nope")


def test_current_json_of_another_version_is_found(home: Home, made: Any) -> None:
    storage.publish(home.datasets("toy", schema.CURRENT_PATH), b'{"version": "ffff"}\n')
    assert any("says ffff" in text for text in details(home))
    storage.publish(home.datasets("toy", schema.CURRENT_PATH), b"[]")
    assert any("rerun `goodviews ingest`" in text.lower() for text in details(home))


# --- unique keys --------------------------------------------------------------------------------------------------


def scene_files(made: Any) -> list[str]:
    return [os.path.join(made.folder, schema.scenes_path("train", i)) for i in range(2)]


def test_unique_keys_pass(home: Home, publish: Any) -> None:
    audit.check_unique_keys(scene_files(publish()), dataset="toy")
    audit.check_unique_keys([], dataset="toy")


def test_a_key_in_two_shards_is_named_with_both_source_ids(home: Home, publish: Any) -> None:
    made = publish(shards=2)
    other = publish("other", shards=1)
    files = [*scene_files(made), os.path.join(other.folder, schema.scenes_path("train", 0))]
    with pytest.raises(
        IntegrityError, match=r"'s0-0' of toy stands for 2 scenes: source ids 'S0-0' in .*other.* and 'S0-0' in .*toy"
    ):
        audit.check_unique_keys(files, dataset="toy")


def test_a_key_twice_in_one_file_is_named(home: Home, publish: Any, tmp_path: Path) -> None:
    import pyarrow.parquet as pq

    made = publish(shards=1)
    table = pq.ParquetFile(os.path.join(made.folder, schema.scenes_path("train", 0))).read()
    doubled = table.to_pylist()
    doubled[1]["scene_key"] = doubled[0]["scene_key"]
    path = str(tmp_path / "dup[1].parquet")
    pq.write_table(table.from_pylist(doubled, schema=table.schema), path)
    with pytest.raises(IntegrityError, match="source ids 'S0-0' in .* and 'S0-1'"):
        audit.check_unique_keys([path], dataset="toy")


def test_keys_of_many_scenes_are_checked_within_a_small_memory(
    home: Home, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two million keys under 100 MB, by spilling; one of them twice."""
    monkeypatch.setattr(audit, "UNIQUE_MEMORY", "100MB")
    path = tmp_path / "many.parquet"
    with lake.parquet_reader([], memory_limit="500MB") as connection:
        query = "SELECT 'scene-' || (range % 1999999) AS scene_key, 'id-' || range AS source_id FROM range(2000000)"
        connection.execute(f"COPY ({query}) TO {lake.quote(str(path))} (FORMAT parquet)")
    with pytest.raises(
        IntegrityError, match="'scene-0' of big stands for 2 scenes: source ids 'id-0' in .* and 'id-1999999'"
    ):
        audit.check_unique_keys([str(path)], dataset="big")


def test_a_manifest_edit_after_the_commit_is_found(home: Home, made: Any) -> None:
    url = storage.join(made.folder, schema.manifest_path("train", 0))
    manifest = Manifest.from_json(storage.read_bytes(url), url=url)
    storage.publish(url, dataclasses.replace(manifest, repaired=3).to_json())
    assert any("differs from its manifest in repaired" in text for text in details(home))
