"""`goodviews embed import`: what is in the file is what is published, and a file that is not right is refused whole."""

from __future__ import annotations

import json
import pickle
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from numpy.typing import NDArray

from catalog.lake import lake
from catalog.rows import embeddings
from catalog.rows.embeddings import EmbeddingRecord
from indexing.search.text_search import text_facts
from indexing.sets.spaces import check_same_space, space_of
from infra import storage
from infra.cli import run as goodviews
from infra.errors import ConflictError, InputError, UsageError
from infra.home import Home, resolve
from infra.session import open_workers
from pipelines.embed import imported
from pipelines.embed.imported import ImportConfig, import_vectors
from pipelines.ingest.commands import build_request
from pipelines.ingest.job import ingest

KEYS = ["dog", "cat", "ant", "bee"]
VECTORS = np.random.default_rng(0).standard_normal((4, 3)).astype(np.float32)


@pytest.fixture
def home(tmp_path: Path) -> Home:
    return resolve(str(tmp_path / "home"))


def npz(path: Path, **arrays: Any) -> str:
    np.savez(path, **arrays)
    return str(path)


def taken(home: Home, file: str, name: str = "mine", **options: Any) -> dict[tuple[str, int], NDArray[Any]]:
    record = import_vectors(ImportConfig(file=file, name=name, **options), home)
    assert embeddings.find(home, name) == record
    keys, vectors = embeddings.read_keys(home, record), embeddings.read_layer(home, record, verify=True)
    return dict(zip(zip(keys["scene_key"].to_pylist(), keys["item"].to_pylist(), strict=True), vectors, strict=True))


def check(found: dict[tuple[str, int], NDArray[Any]], items: list[int], vectors: NDArray[Any] = VECTORS) -> None:
    assert list(found) == sorted(zip(KEYS, items, strict=True))
    for row, key in enumerate(zip(KEYS, items, strict=True)):
        np.testing.assert_array_equal(found[key], vectors[row])


def test_npz_npy_and_parquet_give_their_own_rows(home: Home, tmp_path: Path) -> None:
    check(taken(home, npz(tmp_path / "a.npz", keys=np.array(KEYS), vectors=VECTORS), "a"), [0, 0, 0, 0])
    items = [3, 0, 1, 2]
    file = npz(tmp_path / "b.npz", keys=np.array(KEYS, "S"), vectors=VECTORS.astype(np.float16), items=np.array(items))
    check(taken(home, file, "b", observation="captions"), items, VECTORS.astype(np.float16))
    np.save(tmp_path / "c.npy", VECTORS.astype(np.float64))
    (tmp_path / "c.txt").write_text("".join(f"{k}\t{i}\n" for k, i in zip(KEYS, items, strict=True)))
    found = taken(home, str(tmp_path / "c.npy"), "c", keys=str(tmp_path / "c.txt"), observation="images")
    check(found, items)
    assert found["dog", 3].dtype == np.float32
    (tmp_path / "d.txt").write_text("\n".join(KEYS))
    check(taken(home, str(tmp_path / "c.npy"), "d", keys=str(tmp_path / "d.txt")), [0] * 4)
    for name, kind in (("e", pa.list_(pa.float32())), ("f", pa.list_(pa.float32(), 3))):
        table = pa.table({"scene_key": KEYS, "vector": pa.array(VECTORS.tolist(), kind)})
        pq.write_table(table, tmp_path / f"{name}.parquet", row_group_size=3)
        check(taken(home, str(tmp_path / f"{name}.parquet"), name), [0] * 4)


def test_a_parquet_of_several_layers_keeps_them_all(home: Home, tmp_path: Path) -> None:
    columns = {f"layer_{n}": pa.array((VECTORS * n).tolist(), pa.list_(pa.float32())) for n in (12, 2)}
    pq.write_table(pa.table({"key": KEYS, "item": [0, 0, 0, 0], **columns}), tmp_path / "l.parquet")
    taken(home, str(tmp_path / "l.parquet"))
    record = embeddings.find(home, "mine")
    assert record.layers == (2, 12)
    order = np.argsort(KEYS)
    for n in (2, 12):
        np.testing.assert_array_equal(embeddings.read_layer(home, record, n), (VECTORS * n)[order])


def test_many_rows_lie_in_several_files_in_one_order(
    home: Home, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(imported, "ROWS_A_FILE", 3)
    check(taken(home, npz(tmp_path / "a.npz", keys=np.array(KEYS), vectors=VECTORS)), [0] * 4)
    assert [file.rows for file in embeddings.find(home, "mine").files] == [3, 1]


def test_importing_again_changes_nothing_and_another_name_is_refused(home: Home, tmp_path: Path) -> None:
    file = npz(tmp_path / "a.npz", keys=np.array(KEYS), vectors=VECTORS)
    first = import_vectors(ImportConfig(file=file, name="mine"), home)
    assert import_vectors(ImportConfig(file=file, name="mine"), home) == first
    with pytest.raises(ConflictError, match="is there already, as 'mine'"):
        import_vectors(ImportConfig(file=file, name="yours"), home)
    with lake.reading(home) as reader:
        assert reader.rows("SELECT count(*) FROM main.embeddings") == [(1,)]


def test_imports_of_one_label_are_of_one_space_and_others_are_not_known_to_be(
    home: Home, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    def labelled(name: str, model: str | None) -> EmbeddingRecord:
        file = npz(tmp_path / f"{name}.npz", keys=np.array(KEYS), vectors=VECTORS * (1 + ord(name)))
        return import_vectors(ImportConfig(file=file, name=name, model=model), home)

    one, two, other, unlabelled = (labelled(*pair) for pair in (("a", "m"), ("b", "m"), ("c", "n"), ("d", None)))
    assert [record.model for record in (one, two, other, unlabelled)] == ["import:m"] * 2 + ["import:n", "import:d"]
    assert space_of(one) == space_of(two) and space_of(one) is not None and space_of(unlabelled) is None
    check_same_space(one, two)
    assert not caplog.messages
    with pytest.raises(InputError, match="differ in weights"):
        check_same_space(one, other)
    check_same_space(one, unlabelled)
    assert "is not known" in caplog.text
    with pytest.raises(InputError, match="was imported"):
        text_facts(one)
    # The same file under another label is another set.
    again = import_vectors(ImportConfig(file=str(tmp_path / "a.npz"), name="e", model="n"), home)
    assert again.embedding_id != one.embedding_id
    with pytest.raises(UsageError, match="--model is empty"):
        ImportConfig(file="a.npz", name="a", model=" ")


@pytest.mark.parametrize(
    ("arrays", "words"),
    [
        ({"keys": np.array(KEYS), "vectors": VECTORS[:3]}, r"holds 4 keys and vectors of shape \(3, 3\)"),
        ({"keys": np.array(KEYS), "vectors": VECTORS[:, 0]}, r"vectors of shape \(4,\)"),
        ({"keys": np.array(KEYS), "vectors": VECTORS[None]}, r"vectors of shape \(1, 4, 3\)"),
        ({"keys": np.array(KEYS), "vectors": VECTORS[:, :0]}, r"vectors of shape \(4, 0\)"),
        ({"keys": np.array(KEYS), "vectors": VECTORS.astype(np.int8)}, "are int8"),
        ({"keys": np.array([*KEYS[:3], "dog"]), "vectors": VECTORS}, "Scene 'dog', item 0, stands twice"),
        ({"keys": np.array([*KEYS[:3], ""]), "vectors": VECTORS}, "without a key"),
        ({"keys": np.arange(4), "vectors": VECTORS}, "keys are a one-dimensional array of strings"),
        (
            {"keys": np.array(KEYS), "vectors": np.where(VECTORS == VECTORS[2, 1], np.nan, VECTORS)},
            "scene 'ant', item 0",
        ),
        (
            {"keys": np.array(KEYS), "vectors": VECTORS.astype(np.float64) * 1e300},
            "4 of 4 vectors of layer 0 are not finite",
        ),
        ({"keys": np.array(KEYS), "vectors": VECTORS, "items": np.arange(4)}, "a scene has one vector"),
        ({"keys": np.array(KEYS), "vectors": VECTORS, "items": np.arange(3)}, "must be 4 integers"),
        ({"keys": np.array(KEYS), "vectors": VECTORS, "items": np.array([0, 0, 0, -1])}, "4 integers, 0 or more"),
        ({"names": np.array(KEYS), "vectors": VECTORS}, "holds the arrays names, vectors, but no keys"),
        ({"keys": np.array(KEYS, object), "vectors": VECTORS}, "cannot be read as npz"),
    ],
)
def test_a_file_that_is_not_right_is_refused_and_nothing_is_published(
    home: Home, tmp_path: Path, arrays: dict[str, Any], words: str
) -> None:
    with pytest.raises(InputError, match=words):
        import_vectors(ImportConfig(file=npz(tmp_path / "a.npz", **arrays), name="mine"), home)
    assert embeddings.list_sets(home) == []


def test_files_of_no_known_format_are_refused(home: Home, tmp_path: Path) -> None:
    for name, data, words in (
        ("a.npz", b"PK no", "cannot be read as npz"),
        ("a.parquet", b"PAR1", "cannot be read as parquet"),
    ):
        (tmp_path / name).write_bytes(data)
        with pytest.raises(InputError, match=words):
            import_vectors(ImportConfig(file=str(tmp_path / name), name="x"), home)
    (tmp_path / "p.npy").write_bytes(pickle.dumps(VECTORS))
    (tmp_path / "k.txt").write_text("\n".join(KEYS))
    with pytest.raises(InputError, match="cannot be read as npy"):
        import_vectors(ImportConfig(file=str(tmp_path / "p.npy"), name="x", keys=str(tmp_path / "k.txt")), home)
    (tmp_path / "a.csv").write_text("x")
    with pytest.raises(UsageError, match=r"ends with none of .npz, .npy, .parquet"):
        import_vectors(ImportConfig(file=str(tmp_path / "a.csv"), name="x"), home)
    with pytest.raises(UsageError, match=r"A .npy file holds no keys"):
        ImportConfig(file="a.npy", name="x")
    np.save(tmp_path / "v.npy", VECTORS)
    (tmp_path / "k.txt").write_text("dog\t0\ncat\n")
    with pytest.raises(InputError, match=r"Line 2 of .*k.txt is 'cat'"):
        import_vectors(ImportConfig(file=str(tmp_path / "v.npy"), name="x", keys=str(tmp_path / "k.txt")), home)


def test_vectors_in_parquet_with_gaps_are_refused(home: Home, tmp_path: Path) -> None:
    for values, words in (
        ([[1.0, 2.0], [1.0]], "lists of the lengths 1, 2"),
        ([[1.0, 2.0], None], "lists of the lengths"),
        ([[1.0, None], [1.0, 2.0]], "1 nulls within its vectors"),
    ):
        table = pa.table({"key": ["a", "b"], "vector": pa.array(values, pa.list_(pa.float32()))})
        pq.write_table(table, tmp_path / "v.parquet")
        with pytest.raises(InputError, match=words):
            import_vectors(ImportConfig(file=str(tmp_path / "v.parquet"), name="x"), home)
    pq.write_table(pa.table({"key": ["a"], "vector": [1.0]}), tmp_path / "v.parquet")
    with pytest.raises(InputError, match="is double; vectors are lists of floats"):
        import_vectors(ImportConfig(file=str(tmp_path / "v.parquet"), name="x"), home)


def test_keys_are_scene_keys_or_source_ids_of_the_dataset(home: Home, tmp_path: Path) -> None:
    path = tmp_path / "t.csv"
    path.write_text("id,text\n" + "".join(f"{key}.JPG,a {key}\n" for key in KEYS))
    request = build_request("table", [str(path)], "zoo", None, ["source.id=id", "source.text=text:human"], 0.2)
    with open_workers(address=None, num_cpus=0) as workers:
        outcome = ingest(request, home, workers)
    with lake.reading(home) as reader:
        scenes = dict(reader.rows("SELECT source_id, scene_key FROM main.scenes"))
    split = storage.list_names(storage.join(outcome.url, "scenes"))[0]
    by_id = npz(tmp_path / "a.npz", keys=np.array([f"{key}.JPG" for key in KEYS]), vectors=VECTORS)
    found = taken(home, by_id, "a", dataset="zoo", split=split)
    assert set(found) == {(scenes[f"{key}.JPG"], 0) for key in KEYS}
    np.testing.assert_array_equal(found[scenes["ant.JPG"], 0], VECTORS[2])
    record = embeddings.find(home, "a")
    assert (record.dataset, record.version, record.split) == ("zoo", outcome.version, split)
    by_key = npz(tmp_path / "b.npz", keys=np.array([scenes[f"{key}.JPG"] for key in KEYS]), vectors=VECTORS)
    assert set(taken(home, by_key, "b", dataset="zoo")) == set(found)
    other = npz(tmp_path / "c.npz", keys=np.array([*KEYS[:3], "bee.JPG"]), vectors=VECTORS)
    with pytest.raises(
        InputError, match=r"3 of 4 keys of .*c.npz are neither scene keys nor source ids of zoo, for example 'dog'"
    ):
        import_vectors(ImportConfig(file=other, name="c", dataset="zoo"), home)
    with pytest.raises(InputError, match="The catalog holds no dataset 'cats'. It holds zoo"):
        import_vectors(ImportConfig(file=other, name="c", dataset="cats"), home)
    with pytest.raises(InputError, match="no scene in the split 'night'"):
        import_vectors(ImportConfig(file=other, name="c", dataset="zoo", split="night"), home)


def test_the_command_line_imports(home: Home, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = npz(tmp_path / "a.npz", keys=np.array(KEYS), vectors=VECTORS)
    assert goodviews(["embed", "import", file, "--name", "mine", "--home", home.url]) == 0
    assert "mine (" in (said := capsys.readouterr().out) and "4 scenes x 3" in said
    assert goodviews(["embed", "import", file, "--name", "mine", "--home", home.url, "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["rows"] == 4
    assert goodviews(["embed", "import", file, "--name", "m", "--model", "clip", "--home", home.url, "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["model"] == "import:clip"
