"""`goodviews knn`, `index` and `search`, from embedding sets to answers by key."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow.parquet as pq
import pytest

from catalog.rows import embeddings
from catalog.rows.embeddings import EmbeddingRecord
from indexing.rotate import maps
from indexing.rotate.rotation import FittedMap, MapConfig
from indexing.search import text_search
from indexing.search.index_commands import read_bytes_option
from indexing.search.knn import exact_knn
from infra.cli import run as goodviews
from infra.errors import InputError, UsageError
from infra.home import Home, resolve
from infra.session import open_workers
from pipelines.embed.job import embed
from pipelines.embed.plan import EmbedConfig, plan_embedding
from pipelines.ingest.commands import build_request
from pipelines.ingest.job import ingest
from tests.indexing import vector_sets
from tests.infra import tiny_models


def noise(n: int = 50, d: int = 6, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).standard_normal((n, d), dtype=np.float32)


@pytest.fixture
def home(tmp_path: Path) -> Home:
    return resolve(str(tmp_path / "home"))


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory) -> tuple[Home, EmbeddingRecord]:
    """30 scenes of the toy world and their captions, embedded by a tiny model."""
    root = tmp_path_factory.mktemp("search")
    home = resolve(str(root / "home"))
    sets = ["source.scenes=30", "scenes_per_shard=15", "source.val=0", "source.test=0"]
    with open_workers(address=None, num_cpus=0) as workers:
        ingest(build_request("toyworld", [], "toy", None, sets, 0.2), home, workers)
    model = str(tiny_models.save_bert(root / "tiny"))
    config = EmbedConfig(model=model, dataset="toy", split="train", observation="captions", layers="all", name="texts")
    embed(plan_embedding(config, home), None)
    return home, embeddings.find(home, "texts")


def answer(capsys: pytest.CaptureFixture[str], *arguments: str) -> Any:
    assert goodviews(list(arguments)) == 0
    return json.loads(capsys.readouterr().out)


# --- knn ----------------------------------------------------------------------------------------------------------


def test_knn_names_neighbours_by_key(home: Home, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    x = noise()
    x[[3, 4]] = x[0]
    x[9] = 0
    names = [f"k{(i * 7) % 50:02d}" for i in range(50)]
    vector_sets.publish(home, x, keys=names, items=[i % 3 for i in range(50)])
    out = tmp_path / "near.parquet"
    found = answer(capsys, "knn", "tiny", "--k", "4", "--out", str(out), "--json", "--home", home.url)
    assert found["n"] == found["asked"] == 50 and found["undefined"] == 1
    order = sorted(range(50), key=lambda i: names[i])
    expected = exact_knn(x[order], k=4)
    assert found["ties"] == expected.tie_rate
    rows = pq.read_table(out).to_pylist()
    assert len(rows) == 49 * 4
    for row in rows:
        query = order.index(names.index(row["query_scene_key"]))
        near = expected.ids_MK[query, row["place"] - 1]
        assert (row["scene_key"], row["item"]) == (names[order[near]], order[near] % 3)
        assert row["score"] == expected.scores_MK[query, row["place"] - 1]


def test_knn_prints_the_same_from_shards_and_of_other_queries(home: Home, capsys: pytest.CaptureFixture[str]) -> None:
    vector_sets.publish(home, noise())
    vector_sets.publish(home, noise(5, seed=1), name="asked", keys=[f"q{i}" for i in range(5)])
    ask = ("knn", "tiny", "--queries", "asked", "--k", "3", "--json", "--home", home.url)
    one = answer(capsys, *ask)
    assert one == answer(capsys, *ask, "--shards", "4", "--num-cpus", "0")
    assert [n["query_scene_key"] for n in one["neighbours"]] == [f"q{i}" for i in range(5) for _ in range(3)]
    assert goodviews(["knn", "tiny", "--k", "3", "--home", home.url]) == 0
    printed = capsys.readouterr()
    assert len(printed.out.splitlines()) == 30 and "150 neighbours in all" in printed.err


def test_knn_refuses_sets_of_other_spaces(home: Home, capsys: pytest.CaptureFixture[str]) -> None:
    def content(weights: str) -> dict[str, Any]:
        return {"content": {"weights": weights, "facts": {"modality": "text"}}}

    vector_sets.publish(home, noise(), config=content("a"))
    vector_sets.publish(home, noise(seed=1), name="other", model="other", config=content("b"))
    assert goodviews(["knn", "tiny", "--queries", "other", "--home", home.url]) == 1
    assert "differ in weights" in capsys.readouterr().err
    assert goodviews(["knn", "tiny", "--k", "0", "--home", home.url]) == 2
    assert goodviews(["knn", "tiny", "--device", "gpu", "--home", home.url]) == 2
    assert "No GPU for neighbours" in capsys.readouterr().err


# --- index --------------------------------------------------------------------------------------------------------


def test_index_build_list_show_and_verify(home: Home, capsys: pytest.CaptureFixture[str]) -> None:
    vector_sets.publish(home, noise(300))
    where = ("--json", "--home", home.url)
    built = answer(capsys, "index", "build", "tiny", "--factory", "IVF4,Flat", "--name", "lists", *where)
    assert built["recall"] >= 0.95 and built["flags"] == [] and built["set_name"] == "tiny"
    assert built["audit"]["tried"][0]["parameters"] == built["parameters"]
    wished = answer(capsys, "index", "build", "tiny", "--recall", "1", "--memory", "20kB", "--name", "wish", *where)
    assert wished["bytes"] < 20_000 and wished["recall"] == 1
    assert [row["name"] for row in answer(capsys, "index", "list", *where)] == ["lists", "wish"]
    assert answer(capsys, "index", "show", "lists", *where) == built
    assert answer(capsys, "index", "verify", "lists", *where)["whole"] is True
    path = Path(home.url, "indexes", built["index_id"], "keys.parquet")
    path.write_bytes(path.read_bytes()[:-1])
    assert goodviews(["index", "verify", "lists", "--home", home.url]) == 1
    assert "File keys.parquet of index 'lists'" in capsys.readouterr().err


def test_an_index_that_falls_short_is_announced(
    home: Home, capsys: pytest.CaptureFixture[str], caplog: pytest.LogCaptureFixture
) -> None:
    vector_sets.publish(home, noise(300))
    build = ["index", "build", "tiny", "--factory", "IVF16,Flat", "--parameters", "nprobe=1", "--home", home.url]
    assert goodviews(build) == 0
    assert "falls short of the wish: recall@10 is" in caplog.text
    assert goodviews([*build, "--name", "tiny"]) == 4
    assert "is the name of an embedding set" in capsys.readouterr().err


@pytest.mark.parametrize(("text", "size"), [("2GB", 2 * 10**9), ("1.5 MiB", 1_572_864), ("4096", 4096)])
def test_sizes_are_read_in_any_unit(text: str, size: int) -> None:
    assert read_bytes_option(text, "--memory") == size
    with pytest.raises(UsageError, match="--memory is '2 apples'"):
        read_bytes_option("2 apples", "--memory")
    with pytest.raises(UsageError, match="above 0"):
        read_bytes_option("0GB", "--memory")


# --- search -------------------------------------------------------------------------------------------------------


def test_a_caption_finds_its_own_scene_with_its_captions(
    world: tuple[Home, EmbeddingRecord], capsys: pytest.CaptureFixture[str]
) -> None:
    home, record = world
    scenes = text_search.scene_texts(home, record, embeddings.read_keys(home, record)["scene_key"].to_pylist())
    assert len(scenes) == 30
    for key in list(scenes)[:3]:
        text = scenes[key][0][1]
        found = answer(capsys, "search", text, "--in", "texts", "--k", "5", "--json", "--home", home.url)
        assert found["exact"] is True and [s["place"] for s in found["scenes"]] == [1, 2, 3, 4, 5]
        assert len({s["scene_key"] for s in found["scenes"]}) == 5
        # The set is stored in float16, the query is not.
        best = {s["scene_key"] for s in found["scenes"] if s["score"] > 0.9999}
        assert key in best or any(text in scenes[other][0] for other in best)
        assert all(tuple(s["captions"]) == scenes[s["scene_key"]][0] for s in found["scenes"])
    assert goodviews(["search", text, "--in", "texts", "--k", "2", "--home", home.url]) == 0
    assert len(capsys.readouterr().out.splitlines()) == 2


def test_an_exact_index_finds_what_the_set_finds(
    world: tuple[Home, EmbeddingRecord], capsys: pytest.CaptureFixture[str]
) -> None:
    home, _ = world
    answer(
        capsys,
        "index",
        "build",
        "texts",
        "--factory",
        "Flat",
        "--layer",
        "1",
        "--name",
        "flat",
        "--json",
        "--home",
        home.url,
    )
    ask = ("search", "a red ball", "--k", "40", "--json", "--home", home.url)
    by_set = answer(capsys, *ask, "--in", "texts", "--layer", "1")
    by_index = answer(capsys, *ask, "--in", "flat")
    assert [s["scene_key"] for s in by_index["scenes"]] == [s["scene_key"] for s in by_set["scenes"]]
    assert len(by_set["scenes"]) == 30 and by_index["exact"] is False and by_index["layer"] == 1
    assert goodviews([*ask, "--in", "flat", "--layer", "2"]) == 2
    assert goodviews([*ask, "--in", "flats"]) == 1
    assert "Nor is it an index" in capsys.readouterr().err


def test_a_text_is_refused_where_it_has_no_place(world: tuple[Home, EmbeddingRecord]) -> None:
    home, record = world
    pictures = dataclasses.replace(record, observation="images")
    with pytest.raises(InputError, match="a text has no place in that space"):
        text_search.search_scenes(home, "a ball", (pictures, None), k=2)
    with pytest.raises(InputError, match="was imported"):
        text_search.search_scenes(home, "a ball", (dataclasses.replace(record, config={}), None), k=2)
    content = {**record.config["content"], "weights": "0" * 64}
    with pytest.raises(InputError, match="their sha256 differs"):
        text_search.search_scenes(home, "a ball", (dataclasses.replace(record, config={"content": content}), None), k=2)
    for words, k, error in (("  ", 2, "text is empty"), ("a ball", 0, "k is 0")):
        with pytest.raises(UsageError, match=error):
            text_search.search_scenes(home, words, (record, None), k=k)


@pytest.mark.parametrize("direction", ["texts to pictures", "pictures to texts"])
def test_a_map_leads_a_text_to_pictures(world: tuple[Home, EmbeddingRecord], direction: str) -> None:
    home, texts = world
    keys, x = embeddings.read_keys(home, texts), embeddings.read_layer(home, texts, 2).astype(np.float64)
    # Pictures are the captions' vectors turned by an orthogonal matrix, so the true map finds each again.
    turn = np.linalg.qr(np.random.default_rng(0).standard_normal((16, 16)))[0]
    pictures = vector_sets.publish(
        home,
        x @ turn,
        keys=keys["scene_key"].to_pylist(),
        items=keys["item"].to_pylist(),
        name="turned",
        observation="images",
        model="eye",
        dataset="toy",
        version=texts.version,
    )
    left, right, w = (texts, pictures, turn) if direction == "texts to pictures" else (pictures, texts, turn.T)
    fitted = FittedMap(config=MapConfig(), x_mean_D=np.zeros(16), y_mean_E=np.zeros(16), weights={"w": w})
    record = maps.MapRecord(
        map_id="0123456789abcdef" if left is texts else "fedcba9876543210",
        kind="rotation",
        config=dataclasses.asdict(MapConfig()),
        left={"embedding_id": left.embedding_id, "layer": left.layers[-1]},
        right={"embedding_id": right.embedding_id, "layer": right.layers[-1]},
        dataset="toy",
        version=texts.version,
        split="train",
        pairs=30,
        rule="",
        facts={},
        code_version="",
        created_at=0.0,
        files={},
    )
    maps.save_map(home, record, fitted, fitted, np.array([], object), maps.PICKS.empty_table())
    with pytest.raises(InputError, match="has no place in that space|was imported"):
        text_search.search_scenes(home, "a ball", (pictures, None), k=2)
    by_map = text_search.search_scenes(home, "a ball", (pictures, None), k=30, map_id=record.map_id)
    plain = text_search.search_scenes(home, "a ball", (texts, None), k=30)
    assert [s.scene_key for s in by_map.scenes] == [s.scene_key for s in plain.scenes]
    np.testing.assert_allclose([s.score for s in by_map.scenes], [s.score for s in plain.scenes], atol=1e-3)
    with pytest.raises(InputError, match="is of the space of neither"):
        text_search.search_scenes(home, "a ball", (texts, None), k=2, layer=0, map_id=record.map_id)


def test_f1_each_scene_stands_once_and_absent_places_are_no_rows() -> None:
    names = ["a"] * 6 + ["b", "c"]
    order = np.array([5, 0, 6, 1, 2, 3, 4, 7])

    def nearest(count: int) -> text_search.Ranked:
        places = np.concatenate([order[:count], np.full(count, -1)])[:count]
        return places, np.linspace(1, 0, count, dtype=np.float32)

    assert text_search.best_rows(names, nearest, 2)[0] == [5, 6]
    assert text_search.best_rows(names, nearest, 3)[0] == [5, 6, 7]
    assert text_search.best_rows(names, lambda count: (np.full(count, -1), np.full(count, np.nan, np.float32)), 3) == (
        [],
        [],
    )
