"""`indexing.align.job` and `indexing.sets.joins`: sets meet by key, and a score is recorded with what it must be read with."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow.parquet as pq
import pytest

from catalog.rows import embeddings
from catalog.rows.alignments import alignment_url
from indexing.align import score
from indexing.align.job import ScoringConfig, read_key_file, score_sets
from indexing.align.layers import ProtocolConfig, prepare
from indexing.align.neighbours import mutual_knn, neighbour_lists
from indexing.align.score import METRICS, AlignConfig
from indexing.sets.joins import JoinConfig, join, scene_vectors
from indexing.uncertainty.bootstrap import BootstrapConfig
from indexing.uncertainty.calibration import CalibrationConfig
from infra import vectors
from infra.errors import InputError, UsageError
from infra.home import Home, resolve
from tests.catalog.stored_rows import list_alignments
from tests.indexing.embedding_sets import put_set, related, scene_keys


@pytest.fixture
def home(tmp_path: Path) -> Home:
    return resolve(str(tmp_path / "home"))


def asked(left: str = "x", right: str = "y", **options: Any) -> ScoringConfig:
    """A quick call: 19 shuffles and 100 draws."""
    align = {
        "metrics": options.pop("metrics", ("mutual_knn",)),
        "k": options.pop("k", 5),
        "protocol": options.pop("protocol", ProtocolConfig()),
    }
    return ScoringConfig(
        left=left,
        right=right,
        align=AlignConfig(
            **align, bootstrap=BootstrapConfig(draws=100), calibration=CalibrationConfig(permutations=19)
        ),
        **options,
    )


# --- joins --------------------------------------------------------------------------------------------------------


def test_rows_meet_by_key_whatever_their_order_and_number(home: Home) -> None:
    x, y = related(0, 40, 6, 5)
    put_set(home, "x", scene_keys(30), {0: x[:30]})
    shuffled = np.random.default_rng(1).permutation(35)
    put_set(home, "y", [scene_keys(40)[5:][i] for i in shuffled], {0: y[5:][shuffled]})
    a, b = (scene_vectors(home, embeddings.find(home, name), None, JoinConfig()) for name in "xy")
    joined = join(a, b)
    assert (len(joined.keys_S), joined.left_only, joined.right_only) == (25, 5, 10)
    assert np.array_equal(joined.left.last, x[5:30]) and np.array_equal(joined.right.last, y[5:30])
    assert joined.keys_S.tolist() == [key for key, _ in scene_keys(40)[5:30]]


def test_captions_of_a_scene_become_the_mean_of_their_unit_vectors(home: Home) -> None:
    x = np.array([[2.0, 0], [0, 3], [5, 5], [0, 1], [0, -1]])
    keys = [("a", 0), ("a", 3), ("b", 0), ("c", 0), ("c", 1)]
    put_set(home, "x", keys, {0: x}, observation="captions")
    found = scene_vectors(home, embeddings.find(home, "x"), None, JoinConfig())
    half = np.sqrt(0.5)
    assert found.last == pytest.approx(np.array([[half, half], [half, half], [0, 0]]))
    assert found.items_S.tolist() == [-1, -1, -1]
    assert found.rule == "mean of the unit captions of a scene"


def test_blocks_do_not_change_the_mean(monkeypatch: pytest.MonkeyPatch) -> None:
    x = np.random.default_rng(0).normal(size=(200, 4))
    starts = np.concatenate([[0], np.sort(np.random.default_rng(1).choice(np.arange(1, 200), 60, replace=False))])
    whole = vectors.mean_of_unit_rows(x, starts)
    for rows in (1, 7, 64):
        monkeypatch.setattr(vectors, "BLOCK_ROWS", rows)
        assert np.array_equal(vectors.mean_of_unit_rows(x, starts), whole)


def test_one_caption_is_drawn_by_hash_and_not_by_position(home: Home) -> None:
    keys = [(f"s{i:03d}", item) for i in range(300) for item in range(5)]
    x = np.array([[i, item] for i in range(300) for item in range(5)], np.float32)
    put_set(home, "x", keys, {0: x}, observation="captions")
    record = embeddings.find(home, "x")
    drawn = [scene_vectors(home, record, None, JoinConfig(captions="hash", seed=s)) for s in (0, 0, 1)]
    assert np.array_equal(drawn[0].items_S, drawn[1].items_S)
    assert not np.array_equal(drawn[0].items_S, drawn[2].items_S)
    assert np.array_equal(drawn[0].last[:, 1], drawn[0].items_S)
    counts = np.bincount(drawn[0].items_S, minlength=5)
    assert counts.min() > 30
    with pytest.raises(UsageError, match="'first'"):
        JoinConfig(captions="first")


def test_joins_that_would_mean_nothing_are_refused_with_the_counts(home: Home) -> None:
    x, y = related(0, 20, 6, 5)
    put_set(home, "x", scene_keys(20), {0: x}, dataset="a", version="1", split="test")
    put_set(home, "y", scene_keys(20, 18), {0: y}, dataset="a", version="1", split="val")
    with pytest.raises(InputError, match=r"'x' has 20 scenes .*'y' has 20 .* 2 are in both; a score needs 7"):
        score_sets(home, asked())
    put_set(home, "z", scene_keys(20), {0: y}, dataset="b", version="1", split="test")
    with pytest.raises(InputError, match="'x' is of dataset a and 'z' of b"):
        score_sets(home, asked(right="z"))


# --- scores -------------------------------------------------------------------------------------------------------


def test_every_metric_is_scored_recorded_and_told_with_what_it_needs(home: Home) -> None:
    x, y = related(0, 60, 12, 14)
    put_set(home, "x", scene_keys(60), {0: x}, samples=7, tokens=8)
    put_set(home, "y", scene_keys(60), {0: y})
    rows = score_sets(home, asked(metrics=METRICS))
    assert [row["metric"] for row in rows] == list(METRICS)
    for row in rows:
        assert row["low"] <= row["value"] <= row["high"] and row["low"] < row["high"], row["metric"]
        assert row["p_value"] == 1 / 20 and row["n"] == 60 and row["chance"] < row["value"], row["metric"]
        assert (row["samples"], row["tokens"], row["layers"]) == (7, 8, [0, 0])
        assert row["leakage"] is None and "no training set" in row["leaked"]
    assert rows[0]["value"] == pytest.approx(mutual_knn(x, y, k=5))
    assert rows[0]["chance"] == 5 / 59
    stored = {row["metric"]: row for row in list_alignments(home)}
    assert len(stored) == len(METRICS)
    for row in rows:
        for name in ("value", "low", "high", "chance", "k", "n", "ties", "calibrated", "p_value", "selection"):
            assert stored[row["metric"]][name] == row[name], name


def test_neighbours_of_some_scenes_are_kept_beside_the_row(home: Home) -> None:
    x, y = related(0, 100, 6, 5)
    put_set(home, "x", scene_keys(100), {0: x})
    put_set(home, "y", scene_keys(100), {0: y})
    (row,) = score_sets(home, asked())
    kept = pq.read_table(alignment_url(home, row["alignment_id"], "neighbours.parquet")).to_pylist()
    assert len(kept) == 64
    keys = [key for key, _ in scene_keys(100)]
    unit = x / np.linalg.norm(x, axis=1, keepdims=True)
    for line in kept:
        i = keys.index(line["scene_key"])
        nearest = [j for j in np.argsort(-(unit @ unit[i])) if j != i][:5]
        assert line["left"] == [keys[j] for j in nearest]
        assert len(line["right"]) == 5


def test_a_rival_is_scored_on_the_common_scenes_and_the_difference_is_paired(home: Home) -> None:
    x, y = related(0, 80, 6, 5)
    noise = np.random.default_rng(3).normal(size=(80, 6))
    put_set(home, "x", scene_keys(80), {0: x})
    put_set(home, "y", scene_keys(80), {0: y})
    put_set(home, "z", scene_keys(70), {0: noise[:70]})
    one, gap = score_sets(home, asked(against="z"))
    assert one["n"] == gap["n"] == 70
    assert gap["value"] == pytest.approx(mutual_knn(x[:70], y[:70], k=5) - mutual_knn(noise[:70], y[:70], k=5))
    assert gap["difference"] == ["x", "z"] and 0 < gap["low"] < gap["value"] < gap["high"]
    (alone,) = score_sets(home, asked())
    assert alone["n"] == 80 and alone["alignment_id"] != one["alignment_id"]
    rows = {(row["metric"], row["n"]): row for row in list_alignments(home)}
    assert {name: row["value"] for name, row in rows.items()} == {
        ("mutual_knn", 70): one["value"],
        ("mutual_knn", 80): alone["value"],
        ("mutual_knn_difference", 70): gap["value"],
    }
    recorded = rows["mutual_knn_difference", 70]
    assert recorded["details"]["rival_name"] == "z" and recorded["details"]["values"] == gap["values"]
    assert (recorded["low"], recorded["high"], recorded["chance"]) == (gap["low"], gap["high"], 0.0)
    put_set(home, "w", scene_keys(70, 10), {0: noise[10:]})
    (other, _) = score_sets(home, asked(against="w"))
    assert other["n"] == 70 and other["alignment_id"] != one["alignment_id"]
    assert score_sets(home, asked(against="w"))[0]["alignment_id"] == other["alignment_id"]
    same = score_sets(home, asked(against="x", metrics=("mutual_knn", "unbiased_cka")))[2:]
    assert [(row["value"], row["low"], row["high"]) for row in same] == [(0, 0, 0)] * 2


def test_earlier_checkpoints_of_the_run_stand_beside_its_score(home: Home) -> None:
    x, y = related(0, 50, 6, 5)
    g = np.random.default_rng(5)
    facts = {"run_id": "r1", "dataset": "d", "version": "1", "split": "test"}
    put_set(home, "last", scene_keys(50), {0: x}, model="run:r1", **facts)
    weak, weaker = (x + s * g.normal(size=x.shape) for s in (1, 4))
    put_set(home, "e1", scene_keys(50), {0: weak}, model="run:r1@epoch-001", **facts)
    put_set(home, "e0", scene_keys(50), {0: weaker}, model="run:r1@untrained", **facts)
    put_set(home, "other", scene_keys(50), {0: x}, model="run:r1@untrained", **{**facts, "split": "val"})
    put_set(home, "y", scene_keys(50), {0: y})
    (row,) = score_sets(home, asked(left="last"))
    assert row["untrained_value"] == pytest.approx(mutual_knn(weaker.astype(np.float32), y, k=5))
    assert row["first_epoch_value"] == pytest.approx(mutual_knn(weak.astype(np.float32), y, k=5))
    (turned,) = score_sets(home, asked(left="y", right="last"))
    assert turned["untrained_value"] == row["untrained_value"]


def test_an_earlier_checkpoint_of_other_layers_or_of_another_make_stands_beside_nothing(home: Home) -> None:
    x, y = related(0, 50, 6, 5)
    g = np.random.default_rng(5)
    weak, noise = x + g.normal(size=x.shape), g.normal(size=x.shape)
    facts = {"run_id": "r1", "dataset": "d", "version": "1", "split": "test"}
    put_set(home, "last", scene_keys(50), {3: x, 7: noise}, model="run:r1", max_length=64, **facts)
    put_set(home, "e1", scene_keys(50), {7: weak}, model="run:r1@epoch-001", max_length=64, **facts)
    put_set(home, "e0", scene_keys(50), {3: weak, 9: weak}, model="run:r1@untrained", max_length=64, **facts)
    put_set(home, "short", scene_keys(50), {3: x, 7: x}, model="run:r1@untrained", max_length=32, **facts)
    put_set(home, "cls", scene_keys(50), {3: x, 7: x}, model="run:r1@untrained", max_length=64, pooling="cls", **facts)
    put_set(home, "y", scene_keys(50), {0: y})
    at_weak = pytest.approx(mutual_knn(weak.astype(np.float32), y, k=5))
    for options, untrained, first_epoch in (
        ({}, None, at_weak),
        ({"left_layer": 3}, at_weak, None),
        ({"protocol": ProtocolConfig(name="huh2024")}, None, None),
    ):
        (row,) = score_sets(home, asked(left="last", **options))
        assert (row["untrained_value"], row["first_epoch_value"]) == (untrained, first_epoch), options


def test_a_broken_earlier_checkpoint_does_not_take_the_score_with_it(home: Home) -> None:
    x, y = related(0, 50, 6, 5)
    facts = {"run_id": "r1", "dataset": "d", "version": "1", "split": "test"}
    put_set(home, "last", scene_keys(50), {0: x}, model="run:r1", **facts)
    gone = put_set(home, "e0", scene_keys(50), {0: x}, model="run:r1@untrained", **facts)
    Path(embeddings.set_url(home, gone.embedding_id, gone.files[0].path)).unlink()
    cut = put_set(home, "e1", scene_keys(50), {0: x}, model="run:r1@epoch-001", **facts)
    Path(embeddings.set_url(home, cut.embedding_id, cut.files[0].path)).write_bytes(b"")
    put_set(home, "y", scene_keys(50), {0: y})
    (row,) = score_sets(home, asked(left="last"))
    assert row["value"] == pytest.approx(mutual_knn(x, y, k=5))
    assert row["untrained_value"] is None and row["first_epoch_value"] is None


def test_every_side_is_searched_once(home: Home, monkeypatch: pytest.MonkeyPatch) -> None:
    x, y = related(0, 50, 6, 5)
    g = np.random.default_rng(5)
    facts = {"run_id": "r1", "dataset": "d", "version": "1", "split": "test"}
    put_set(home, "last", scene_keys(50), {0: x}, model="run:r1", **facts)
    put_set(home, "e0", scene_keys(50), {0: g.normal(size=x.shape)}, model="run:r1@untrained", **facts)
    put_set(home, "z", scene_keys(50), {0: g.normal(size=x.shape)})
    put_set(home, "y", scene_keys(50), {0: y})
    searched = []

    def counted(x_ND: Any, *, k: int) -> Any:
        searched.append(x_ND.tobytes())
        return neighbour_lists(x_ND, k=k)

    monkeypatch.setattr(score, "neighbour_lists", counted)
    score_sets(home, asked(left="last", against="z", metrics=("mutual_knn", "cycle_knn", "cknna")))
    assert len(searched) == len(set(searched)) == 4


def test_kept_neighbours_are_those_that_were_scored(home: Home) -> None:
    """Clamping moves neighbours: what a page shows is what the protocol compared."""
    x, y = related(0, 60, 6, 5)
    x[:, 0] += 60 * (np.random.default_rng(0).random(60) < 0.3)
    put_set(home, "x", scene_keys(60), {0: x, 1: 2 * x})
    put_set(home, "y", scene_keys(60), {0: y})
    (row,) = score_sets(home, asked(protocol=ProtocolConfig(name="huh2024")))
    clamped = prepare({0: x, 1: 2 * x}, ProtocolConfig(name="huh2024"))[row["layers"][0]]
    ids, raw = (neighbour_lists(table, k=5).ids_NK for table in (clamped, x))
    assert not np.array_equal(ids, raw)
    keys = [key for key, _ in scene_keys(60)]
    kept = pq.read_table(alignment_url(home, row["alignment_id"], "neighbours.parquet")).to_pylist()
    assert {line["scene_key"]: line["left"] for line in kept} == {
        key: [keys[j] for j in ids[i]] for i, key in enumerate(keys)
    }


def test_chance_of_a_search_over_layers_is_that_of_the_search(home: Home) -> None:
    g = np.random.default_rng(0)
    for name in "xy":
        put_set(home, name, scene_keys(50), {i: g.normal(size=(50, 6)) for i in range(4)})
    huh = ProtocolConfig(name="huh2024")
    (row,) = score_sets(home, asked(protocol=huh))
    assert row["chance"] > 1.2 * 5 / 49 and row["value"] == pytest.approx(row["chance"], rel=0.35)
    (one,) = score_sets(home, asked(protocol=huh, left_layer=0, right_layer=0))
    assert one["chance"] == 5 / 49
    bare = dataclasses.replace(asked(protocol=huh).align, calibration=CalibrationConfig(permutations=0))
    assert score_sets(home, ScoringConfig(left="x", right="y", align=bare))[0]["chance"] is None


def test_costly_metrics_take_fewer_draws_and_say_how_many(home: Home, monkeypatch: pytest.MonkeyPatch) -> None:
    x, y = related(0, 30, 6, 5)
    put_set(home, "x", scene_keys(30), {0: x})
    put_set(home, "y", scene_keys(30), {0: y})
    many = AlignConfig(metrics=METRICS, k=5, calibration=CalibrationConfig(permutations=0))
    found = {row["metric"]: row for row in score_sets(home, ScoringConfig(left="x", right="y", align=many))}
    kernels = {"cka": 1_000, "unbiased_cka": 1_000, "cknna": 1_000, "svcca": 200}
    assert {name: row["draws"] for name, row in found.items()} == {**dict.fromkeys(METRICS, 10_000), **kernels}
    monkeypatch.setattr(score, "MOST_PAIRED_ITEMS", 29)
    found = {row["metric"]: row for row in score_sets(home, ScoringConfig(left="x", right="y", align=many))}
    for name, row in found.items():
        without = name in ("cka", "unbiased_cka")
        assert (row["low"] is None, row["draws"] == 0, bool(row["alarms"])) == (without,) * 3, name
    assert "cka over 30 items has no interval" in found["cka"]["alarms"][0]


def test_layers_are_searched_by_huh2024_only_and_can_be_named(home: Home) -> None:
    x, y = related(0, 50, 6, 5)
    noise = np.random.default_rng(1).normal(size=x.shape)
    put_set(home, "x", scene_keys(50), {3: x, 7: noise})
    put_set(home, "y", scene_keys(50), {0: y})
    assert score_sets(home, asked())[0]["layers"] == [7, 0]
    assert score_sets(home, asked(left_layer=3))[0]["value"] == pytest.approx(mutual_knn(x, y, k=5))
    (best,) = score_sets(home, asked(protocol=ProtocolConfig(name="huh2024")))
    assert best["layers"] == [3, 0] and "best of all pairs of layers" in best["selection"]
    with pytest.raises(InputError, match="no layer 4"):
        score_sets(home, asked(left_layer=4))


def test_a_key_file_restricts_the_scenes_and_is_named_in_the_row(home: Home, tmp_path: Path) -> None:
    x, y = related(0, 50, 6, 5)
    put_set(home, "x", scene_keys(50), {0: x})
    put_set(home, "y", scene_keys(50), {0: y})
    (tmp_path / "keys").write_text("\n".join(key for key, _ in scene_keys(20)) + "\nnowhere\n")
    (row,) = score_sets(home, asked(keys=str(tmp_path / "keys")))
    assert row["n"] == 20 and row["value"] == pytest.approx(mutual_knn(x[:20], y[:20], k=5))
    assert "key file" in row["selection"] and row["keys_not_found"] == 1
    assert any("1 of the scenes of" in alarm for alarm in row["alarms"])
    score_sets(home, asked())
    assert len(list_alignments(home)) == 2
    (tmp_path / "keys").write_text("nowhere")
    with pytest.raises(InputError, match="0 of the 1 scenes"):
        score_sets(home, asked(keys=str(tmp_path / "keys")))


def test_keys_of_a_file_may_hold_spaces(tmp_path: Path) -> None:
    (tmp_path / "keys").write_bytes("\ufeffa dog.jpg \r\n\nb\na dog.jpg\n".encode())
    assert read_key_file(str(tmp_path / "keys")).tolist() == ["a dog.jpg", "b"]
    for content, sentence in ((b" \n", "names no scene"), (b"\xff", "not UTF-8")):
        (tmp_path / "keys").write_bytes(content)
        with pytest.raises(InputError, match=sentence):
            read_key_file(str(tmp_path / "keys"))


def test_f24_a_collapsed_set_raises_an_alarm(home: Home) -> None:
    x, y = related(0, 50, 6, 5)
    put_set(home, "x", scene_keys(50), {0: np.ones_like(x)})
    put_set(home, "y", scene_keys(50), {0: y})
    (row,) = score_sets(home, asked())
    assert row["ties"] == 1.0 and row["p_value"] > 0.05 and row["calibrated"] < 0.1
    assert any("collapsed" in alarm for alarm in row["alarms"])
    put_set(home, "w", scene_keys(50), {0: np.ones_like(y)})
    assert score_sets(home, asked(right="w"))[0]["value"] == 0


def test_the_real_photos_and_captions_give_the_known_number(home: Home, real_features: Path) -> None:
    """EfficientNet-Lite0 against MiniLM, mean of five captions, 1,000 photos: .125, and .011 with permuted captions."""
    with np.load(real_features) as features:  # noqa: TID251  pickles stay refused
        images, captions = features["effnet_lite0"], features["minilm_int8"]
    names = [f"p{i:04d}" for i in range(1_000)]
    put_set(home, "images", [(name, 0) for name in names], {0: images}, observation="images")
    each = [(name, item) for name in names for item in range(5)]
    put_set(home, "captions", each, {0: captions.reshape(5_000, -1)}, observation="captions")
    order = np.random.default_rng(0).permutation(1_000)
    put_set(home, "permuted", each, {0: captions[order].reshape(5_000, -1)}, observation="captions")
    (real,) = score_sets(home, asked("images", "captions", k=10))
    assert real["value"] == pytest.approx(0.125, abs=0.004) and real["n"] == 1_000 and real["p_value"] == 1 / 20
    (chance,) = score_sets(home, asked("images", "permuted", k=10))
    assert chance["value"] == pytest.approx(0.0100, abs=0.002) and chance["p_value"] > 0.05
