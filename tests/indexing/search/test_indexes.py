"""Indexes as files: bound to their set by digest, whole or not there, refused when anything differs."""

from __future__ import annotations

import dataclasses
import shutil
from pathlib import Path

import numpy as np
import pyarrow.parquet as pq
import pytest

from catalog.rows import embeddings
from indexing.search import ann, indexes
from indexing.search.indexes import IndexConfig, build_index, find_index, list_indexes, open_index
from indexing.search.rows import Rows
from infra import storage
from infra.errors import InputError, IntegrityError
from infra.home import Home, resolve
from tests.indexing import vector_sets

pytestmark = pytest.mark.filterwarnings("error")


@pytest.fixture
def home(tmp_path: Path) -> Home:
    return resolve(str(tmp_path))


def noise(n: int = 60, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).standard_normal((n, 8), dtype=np.float32)


def test_an_index_answers_with_the_keys_of_its_set(home: Home) -> None:
    x = noise()
    x[5] = 0
    names = [f"k{(i * 37) % 60:03d}" for i in range(60)]  # the set sorts them
    vectors = vector_sets.publish(home, x, keys=names)
    record = build_index(home, vectors, IndexConfig(factory="Flat", name="flat"))
    assert (record.rows, record.undefined, record.flags) == (59, 1, ())
    opened = open_index(home, find_index(home, "flat"))
    places, _ = ann.search(opened.index, Rows(x, name="queries"), 1)
    found = [opened.keys["scene_key"][int(p)].as_py() if p >= 0 else None for p in places[:, 0]]
    assert found == [name if i != 5 else None for i, name in enumerate(names)]
    assert indexes.read_audit(home, record)["tried"][0]["recall"] == 1


def test_the_same_bytes_have_the_same_id_and_other_vectors_another(home: Home) -> None:
    first = vector_sets.publish(home, noise())
    one, two = (build_index(home, first, IndexConfig(factory="IVF2,Flat")) for _ in range(2))
    assert one.index_id == two.index_id and len(list_indexes(home)) == 1
    other = build_index(home, vector_sets.publish(home, noise(seed=1), name="other"), IndexConfig(factory="IVF2,Flat"))
    assert other.index_id != one.index_id
    assert [r.name for r in list_indexes(home)] == ["tiny/IVF2,Flat", "other/IVF2,Flat"]


def test_f20_another_set_is_refused_though_it_has_as_many_rows(home: Home) -> None:
    vectors, other = vector_sets.publish(home, noise()), vector_sets.publish(home, noise(seed=1), name="other")
    record = build_index(home, vectors, IndexConfig(factory="Flat"))
    open_index(home, record, vectors=vectors)
    with pytest.raises(IntegrityError, match=r"was built from embedding set 'tiny' .*, not from 'other'"):
        open_index(home, record, vectors=other)


def test_f20_a_set_with_other_files_or_none_is_refused(home: Home) -> None:
    vectors = vector_sets.publish(home, noise())
    record = build_index(home, vectors, IndexConfig(factory="Flat"))
    vector_sets.publish(home, noise(seed=1))  # the same id with other vectors
    with pytest.raises(IntegrityError, match="are not those that index 'tiny/Flat' was built from"):
        open_index(home, record)
    shutil.rmtree(embeddings.set_url(home, vectors.embedding_id))
    with pytest.raises(IntegrityError, match="no longer there"):
        open_index(home, record)


@pytest.mark.parametrize("name", ["keys.parquet", "index.faiss", "audit.json"])
@pytest.mark.parametrize("damage", ["truncated", "changed", "missing"])
def test_f20_a_damaged_file_is_refused(home: Home, name: str, damage: str) -> None:
    record = build_index(home, vector_sets.publish(home, noise()), IndexConfig(factory="Flat"))
    path = Path(indexes.index_url(home, record.index_id, name))
    data = path.read_bytes()
    if damage == "missing":
        path.unlink()
    else:
        path.write_bytes(data[:-1] if damage == "truncated" else data[:-1] + bytes([data[-1] ^ 1]))
    with pytest.raises(IntegrityError, match=f"File {name} of index 'tiny/Flat'"):
        open_index(home, record)


def test_f20_a_shorter_side_file_is_refused_even_where_the_record_was_made_to_fit(home: Home) -> None:
    record = build_index(home, vector_sets.publish(home, noise()), IndexConfig(factory="Flat"))
    url = indexes.index_url(home, record.index_id, "keys.parquet")
    pq.write_table(pq.read_table(url).slice(1), url)
    files = {**record.files, "keys.parquet": dataclasses.asdict(storage.digest(url))}
    with pytest.raises(IntegrityError, match="holds 60 rows and 59 keys"):
        open_index(home, dataclasses.replace(record, files=files))


@pytest.mark.parametrize("survives", [0, 1, 2, 3])
def test_f21_a_builder_that_dies_leaves_no_index(home: Home, monkeypatch: pytest.MonkeyPatch, survives: int) -> None:
    vectors = vector_sets.publish(home, noise())
    publish = storage.publish
    written: list[str] = []

    def dying(url: str, parts: object) -> storage.FileRecord:
        if len(written) == survives:
            raise KeyboardInterrupt
        written.append(url)
        return publish(url, parts)  # type: ignore[arg-type]

    monkeypatch.setattr(storage, "publish", dying)
    with pytest.raises(KeyboardInterrupt):
        build_index(home, vectors, IndexConfig(factory="Flat"))
    assert len(written) == survives and list_indexes(home) == []
    monkeypatch.undo()
    assert open_index(home, build_index(home, vectors, IndexConfig(factory="Flat"))).keys.num_rows == 60


def test_f21_two_builders_with_other_wishes_write_other_folders(home: Home) -> None:
    vectors = vector_sets.publish(home, noise(200))
    a = build_index(home, vectors, IndexConfig(factory="IVF4,Flat", parameters="nprobe=1"))
    b = build_index(home, vectors, IndexConfig(factory="IVF4,Flat", parameters="nprobe=2"))
    assert a.index_id != b.index_id
    for record in (a, b):
        assert open_index(home, record).index.nprobe == int(record.parameters[-1])


def test_names_and_ids_that_fit_none_are_refused_with_what_is_near(home: Home) -> None:
    with pytest.raises(InputError, match="Known are none"):
        find_index(home, "flat")
    record = build_index(home, vector_sets.publish(home, noise()), IndexConfig(factory="Flat", name="photos-flat"))
    assert find_index(home, record.index_id[:6]) == record
    with pytest.raises(InputError, match="Did you mean 'photos-flat'"):
        find_index(home, "photo-flat")
    Path(indexes.index_url(home, record.index_id, "record.json")).write_text("{}")
    with pytest.raises(IntegrityError, match="not the record of an index"):
        list_indexes(home)
