"""`catalog.rows.embeddings`: one canonical order whatever the files, one row in the catalog, and no wrong vector."""

from __future__ import annotations

import dataclasses
import os
import shutil
import time
from pathlib import Path

import numpy as np
import orjson
import pyarrow as pa
import pytest

from catalog.lake import lake
from catalog.rows import embeddings
from catalog.rows.embeddings import EmbeddingFile, EmbeddingRecord
from catalog.versions.audit import verify
from catalog.versions.collect import collect
from catalog.versions.rebuild import rebuild
from infra.errors import InputError, IntegrityError
from infra.home import Home

ID = "0123456789abcdef"


def keys(names: list[str], items: list[int]) -> pa.Table:
    return pa.table({"scene_key": names, "item": items})


def record_of(home: Home, files: tuple[EmbeddingFile, ...], **changes: object) -> EmbeddingRecord:
    record = EmbeddingRecord(
        embedding_id=ID,
        name="tiny/toy/test/captions",
        model="tiny",
        run_id=None,
        observation="captions",
        dataset="toy",
        version="v1",
        split="test",
        roles=("human",),
        layers=(0, 3),
        pooling="mean",
        averaging="none",
        max_length=64,
        rows=sum(file.rows for file in files),
        dims=3,
        dtype="float16",
        samples=10,
        tokens=100,
        config={"weights": "abc"},
        url=embeddings.set_url(home, ID),
        snapshot_id=None,
        dataset_versions={"toy": "v1"},
        code_version="0.1.0",
        created_at=1_700_000_000.0,
        files=files,
    )
    return dataclasses.replace(record, **changes)  # type: ignore[arg-type]


NAMES, ITEMS = ["b", "d", "b", "a", "c"], [1, 0, 0, 2, 10]
LAYERS = {n: (np.arange(15).reshape(5, 3) + 100 * n).astype(np.float16) for n in (0, 3)}
SORTED = sorted(range(5), key=lambda i: (NAMES[i], ITEMS[i]))


def publish(home: Home, parts: list[list[int]], **changes: object) -> EmbeddingRecord:
    """A set whose files hold these rows of NAMES, ITEMS, LAYERS."""
    files = []
    for number, rows in enumerate(parts):
        part = keys([NAMES[i] for i in rows], [ITEMS[i] for i in rows])
        layers = {n: v[rows] for n, v in LAYERS.items()}
        files.append(embeddings.publish_vectors(home, ID, number, part, layers))
    return embeddings.publish_set(home, record_of(home, tuple(files), **changes))


@pytest.mark.parametrize("parts", [[[0, 1, 2, 3, 4]], [[4, 1], [0, 3], [2]], [[1, 2], [], [0, 3, 4]]])
def test_the_order_of_a_set_does_not_depend_on_its_files(home: Home, parts: list[list[int]]) -> None:
    record = publish(home, parts)
    found = embeddings.read_keys(home, record)
    assert found.to_pydict() == {"scene_key": [NAMES[i] for i in SORTED], "item": [ITEMS[i] for i in SORTED]}
    for layer in (0, 3):
        vectors = embeddings.read_layer(home, record, layer, verify=True)
        assert vectors.dtype == np.float16
        np.testing.assert_array_equal(vectors, LAYERS[layer][SORTED])
    np.testing.assert_array_equal(embeddings.read_layer(home, record), LAYERS[3][SORTED])


def test_the_same_rows_in_another_order_give_the_same_bytes(home: Home) -> None:
    first = publish(home, [[0, 1, 2, 3, 4]]).files
    assert first == publish(home, [[3, 2, 4, 0, 1]]).files
    assert len(first) == 1 and first[0].rows == 5


def test_a_file_of_many_row_groups_reads_back_in_order(home: Home, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(embeddings, "GROUP_BYTES", 64)
    record = publish(home, [[0, 1, 2, 3, 4]])
    np.testing.assert_array_equal(embeddings.read_layer(home, record), LAYERS[3][SORTED])


def test_float32_is_kept_bit_for_bit(home: Home) -> None:
    vectors = np.random.default_rng(0).standard_normal((4, 7)).astype(np.float32)
    file = embeddings.publish_vectors(home, ID, 0, keys(list("abcd"), [0] * 4), {12: vectors})
    record = embeddings.publish_set(home, record_of(home, (file,), layers=(12,), dims=7, dtype="float32"))
    np.testing.assert_array_equal(embeddings.read_layer(home, record), vectors)


def test_a_record_comes_back_from_disk_as_it_went(home: Home) -> None:
    record = publish(home, [[0, 1], [2, 3, 4]])
    assert embeddings.read_record(home, ID) == record
    assert embeddings.list_sets(home) == [record]


def test_a_set_has_one_row_in_the_catalog_also_when_published_again(home: Home) -> None:
    record = publish(home, [[0, 1, 2, 3, 4]])
    embeddings.publish_set(home, dataclasses.replace(record, name="other"))
    with lake.reading(home) as reader:
        query = 'SELECT embedding_id, name, roles, layers, "rows", dims, config, epoch(created_at) FROM main.embeddings'
        assert reader.rows(query) == [
            (ID, "other", '["human"]', "[0,3]", 5, 3, '{"weights":"abc"}', 1_700_000_000.0),
        ]


def test_the_newest_set_of_a_name_is_found_with_a_warning_and_ids_by_their_beginning(
    home: Home, caplog: pytest.LogCaptureFixture
) -> None:
    old = publish(home, [[0, 1, 2, 3, 4]])
    other = "0123ffffffffffff"
    file = embeddings.publish_vectors(home, other, 0, keys(["a"], [0]), {n: v[:1] for n, v in LAYERS.items()})
    new = record_of(home, (file,), embedding_id=other, created_at=old.created_at + 1)
    embeddings.publish_set(home, new)
    assert embeddings.find(home, old.name) == new
    (warning,) = caplog.messages
    assert "2 embedding sets are called 'tiny/toy/test/captions'" in warning
    assert f"the newest of {other}, {ID}" in warning
    caplog.clear()
    assert embeddings.find(home, "01234") == old
    assert embeddings.find(home, other) == new
    assert not caplog.messages
    with pytest.raises(InputError, match=r"'0123' begins the ids of several .*0123456789abcdef.*0123ffffffffffff"):
        embeddings.find(home, "0123")
    with pytest.raises(InputError, match="Did you mean 'tiny/toy/test/captions'"):
        embeddings.find(home, "tiny/toy/test/caption")
    with pytest.raises(InputError, match="Did you mean 'tiny/toy/test/captions'"):
        embeddings.find(home, "tiny")
    with pytest.raises(InputError, match="Known are 'tiny/toy/test/captions'"):
        embeddings.find(home, "0120")


def test_without_any_set_the_command_that_makes_one_is_named(home: Home) -> None:
    assert embeddings.list_sets(home) == []
    with pytest.raises(InputError, match="goodviews embed"):
        embeddings.find(home, "x")


def test_vectors_without_a_manifest_are_no_set(home: Home) -> None:
    embeddings.publish_vectors(home, ID, 0, keys(["a"], [0]), {0: np.ones((1, 3), np.float16)})
    assert embeddings.list_sets(home) == []


def test_a_key_that_stands_twice_is_refused_within_a_file_and_between_files(home: Home) -> None:
    with pytest.raises(InputError, match="Scene 'a', item 0, stands twice"):
        embeddings.publish_vectors(home, ID, 0, keys(["a", "b", "a"], [0, 0, 0]), {0: np.ones((3, 3), np.float16)})
    with pytest.raises(InputError, match="Scene 'b', item 1, stands twice"):
        publish(home, [[0, 1], [2, 0]])
    assert not os.path.exists(embeddings.set_url(home, ID, "manifest.json"))


def test_vectors_that_are_not_finite_are_refused_and_named(home: Home) -> None:
    vectors = np.ones((3, 2), np.float16)
    vectors[1, 0], vectors[2, 1] = np.inf, np.nan
    with pytest.raises(
        InputError, match="2 of 3 vectors of layer 4 are not finite, among them that of scene 'a', item 7"
    ):
        embeddings.publish_vectors(home, ID, 0, keys(["b", "a", "c"], [0, 7, 0]), {4: vectors})


def test_an_unknown_layer_is_refused(home: Home) -> None:
    with pytest.raises(InputError, match="holds no layer 1; it holds 0, 3"):
        embeddings.read_layer(home, publish(home, [[0, 1, 2, 3, 4]]), 1)


def test_a_changed_file_is_noticed(home: Home) -> None:
    record = publish(home, [[0, 1, 2, 3, 4]])
    path = Path(embeddings.set_url(home, ID, record.files[0].path))
    whole = path.read_bytes()
    path.write_bytes(whole[:-1])
    with pytest.raises(IntegrityError, match="bytes, its manifest says"):
        embeddings.read_keys(home, record)
    changed = bytearray(whole)
    changed[whole.index(LAYERS[3][SORTED].tobytes())] ^= 1
    path.write_bytes(changed)
    embeddings.read_layer(home, record)
    with pytest.raises(IntegrityError, match="another sha256"):
        embeddings.read_layer(home, record, verify=True)
    path.unlink()
    with pytest.raises(IntegrityError, match="is missing"):
        embeddings.read_layer(home, record)


def test_files_of_another_shape_than_the_record_says_are_not_published(home: Home) -> None:
    for changes in ({"dims": 4}, {"dtype": "float32"}, {"layers": (0, 1)}):
        with pytest.raises(IntegrityError, match="its manifest says"):
            publish(home, [[0, 1, 2, 3, 4]], **changes)
    with pytest.raises(IntegrityError, match="counts 6 rows, its files 5"):
        publish(home, [[0, 1, 2, 3, 4]], rows=6)
    assert embeddings.list_sets(home) == []


def test_a_manifest_of_another_set_or_format_is_refused(home: Home) -> None:
    record = publish(home, [[0, 1, 2, 3, 4]])
    url = Path(embeddings.set_url(home, ID, "manifest.json"))
    values = orjson.loads(record.to_json())
    outside = {**values["files"][0], "path": "../x.parquet"}
    for wrong in ({"format": "x"}, {"embedding_id": "f" * 16}, {"surprise": 1}, {"files": [outside]}):
        url.write_bytes(orjson.dumps({**values, **wrong}))
        with pytest.raises(IntegrityError):
            embeddings.read_record(home, ID)


def test_a_rebuild_keeps_the_row_of_a_set(home: Home) -> None:
    publish(home, [[0, 1, 2, 3, 4]], snapshot_id=3)
    assert rebuild(home).carried_rows == 1
    with lake.reading(home) as reader:
        assert reader.rows("SELECT embedding_id, snapshot_id FROM main.embeddings") == [(ID, None)]


def test_a_rebuild_without_the_old_catalog_finds_the_sets_again(home: Home) -> None:
    publish(home, [[0, 1, 2, 3, 4]], snapshot_id=3)
    os.unlink(home.catalog)
    assert rebuild(home).carried_rows == 1
    with lake.reading(home) as reader:
        assert reader.rows('SELECT embedding_id, "rows", snapshot_id FROM main.embeddings') == [(ID, 5, None)]


def test_verify_names_what_is_wrong_with_a_set(home: Home) -> None:
    record = publish(home, [[0, 1], [2, 3, 4]])
    assert verify(home).problems == []
    first, second = (Path(embeddings.set_url(home, ID, file.path)) for file in record.files)
    changed = bytearray(first.read_bytes())
    changed[10] ^= 1
    first.write_bytes(changed)
    assert verify(home, quick=True).problems == []
    assert [(p.version, p.path) for p in verify(home).problems] == [(ID, record.files[0].path)]
    second.unlink()
    assert [p.path for p in verify(home, quick=True).problems] == [record.files[1].path]
    shutil.rmtree(embeddings.set_url(home, ID))
    (problem,) = verify(home).problems
    assert (problem.path, problem.version) == ("main.embeddings", ID) and "no manifest" in problem.detail


def test_gc_takes_what_no_manifest_names_once_its_job_is_silent(home: Home) -> None:
    record = publish(home, [[0, 1, 2, 3, 4]])
    stray = embeddings.set_url(home, ID, "vectors/00007.parquet")
    running, ended = ("a" * 16, "b" * 16)
    for embedding_id in (running, ended):
        for number in (0, 1):
            part = keys(["a"], [number])
            embeddings.publish_vectors(home, embedding_id, number, part, {0: np.ones((1, 3), np.float16)})
    Path(stray).write_bytes(b"x")
    cut_off = embeddings.set_url(home, ID, "vectors/.00000.parquet.7-ab.goodviews-tmp")
    Path(cut_off).write_bytes(b"x")
    somebodys = embeddings.set_url(home, ID, "notes.txt")
    Path(somebodys).write_bytes(b"x")
    fresh = embeddings.set_url(home, running, "vectors/00001.parquet")
    for path in Path(home.url, "embeddings").rglob("*"):
        if path.is_file() and str(path) != fresh:
            os.utime(path, (time.time() - 48 * 3600,) * 2)
    found = {stray_file.url for stray_file in collect(home, delete=True).strays}
    assert found == {stray, cut_off, *(embeddings.set_url(home, ended, f"vectors/0000{n}.parquet") for n in (0, 1))}
    assert not os.path.exists(embeddings.set_url(home, ended)) and os.path.exists(fresh) and os.path.exists(somebodys)
    np.testing.assert_array_equal(embeddings.read_layer(home, record, verify=True), LAYERS[3][SORTED])


def test_the_id_depends_on_content_and_not_on_the_order_of_keys() -> None:
    first = embeddings.embedding_id_of({"a": 1, "b": [1, 2]})
    assert first == embeddings.embedding_id_of({"b": [1, 2], "a": 1})
    assert first != embeddings.embedding_id_of({"a": 1, "b": [2, 1]})
    assert embeddings.ID_PATTERN.fullmatch(first)
