"""`indexing.rotate.job`, `transfer`, `maps`, `recall`: fit here, score there, keep the map, never score what was fitted."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import orjson
import pyarrow.parquet as pq
import pytest

from indexing.rotate.job import MappingConfig, rotate_sets
from indexing.rotate.maps import FIT_KEYS, PICKS_FILE, RECORD, WEIGHTS, load_map, map_url, read_map_record
from indexing.rotate.rotation import MapConfig, fit
from indexing.rotate.transfer import apply_map
from indexing.sets.joins import JoinConfig
from indexing.uncertainty.bootstrap import BootstrapConfig
from indexing.uncertainty.divisions import hashed_order, random_divisions
from infra.errors import InputError, IntegrityError, UsageError
from infra.home import Home, resolve
from tests.catalog.stored_rows import list_alignments
from tests.indexing.embedding_sets import put_set, related, scene_keys

N = 120
DRAWS = BootstrapConfig(draws=200)


@pytest.fixture
def home(tmp_path: Path) -> Home:
    return resolve(str(tmp_path / "home"))


@pytest.fixture
def sets(home: Home) -> Home:
    """x and y: 120 scenes of 6 and 5 dims that one latent of 8 explains."""
    x, y = related(0, N, 6, 5, noise=0.1)
    put_set(home, "x", scene_keys(N), {0: x})
    put_set(home, "y", scene_keys(N), {0: y})
    return home


def asked(**options: Any) -> MappingConfig:
    chosen = {"left": "x", "right": "y", "fit_pairs": 60, "splits": 1, "bootstrap": DRAWS, **options}
    return MappingConfig(**chosen)


def only(rows: list[dict[str, Any]], **facts: Any) -> dict[str, Any]:
    (row,) = [row for row in rows if all(row.get(name) == value for name, value in facts.items())]
    return row


FIRST = {"metric": "recall@1", "direction": "left_to_right", "protocol": "single"}


def test_divisions_are_disjoint_and_go_by_key_and_not_by_row() -> None:
    keys = np.array([key for key, _ in scene_keys(50)], object)
    first, second = random_divisions(keys, 20, 2, seed=0)
    for one in (first, second):
        assert len(one.fit) == 20 and not set(one.fit) & set(one.scored)
        assert sorted([*one.fit, *one.scored]) == list(range(50))
    assert set(first.fit) != set(second.fit)
    turned = keys[::-1].copy()
    assert turned[hashed_order(turned, 0, 0)].tolist() == keys[hashed_order(keys, 0, 0)].tolist()
    for pairs in (1, 49):
        with pytest.raises(InputError, match=rf"{pairs} fit pairs of 50 common scenes leave {50 - pairs}"):
            next(random_divisions(keys, pairs, 1, seed=0))


def test_a_map_is_scored_beside_its_controls_and_recorded(sets: Home) -> None:
    rows = rotate_sets(sets, asked(splits=4, curve=(10, 30)))
    main = only(rows, **FIRST, map="rotation", pairs=60)
    assert main["value"] > 0.2 and main["n"] == 60 and main["chance"] == pytest.approx(1 / 60)
    assert main["low"] < main["value"] < main["high"] and main["spread_over_divisions"] > 0
    assert main["scenes_scored"] > 60 and main["divisions"] == 4
    # Without ties the recall that breaks them at random, a mean over divisions, is the recall.
    assert main["ties"] == 0 and main["value"] == pytest.approx(main["ties_at_random"])
    for control in ("random", "shuffled"):
        assert only(rows, **FIRST, map=control)["value"] < 0.1
    assert only(rows, **FIRST, map="rotation", pairs=10)["value"] < main["value"]
    assert {(row["metric"], row["direction"]) for row in rows if row["map"] == "rotation" and row["pairs"] == 60} == {
        (metric, direction)
        for metric in ("recall@1", "recall@5", "recall@10", "median_rank")
        for direction in ("left_to_right", "right_to_left")
    }
    assert len(list_alignments(sets)) == len(rows)


def test_the_number_is_that_of_the_plain_procedure(sets: Home) -> None:
    x, y = (t.astype(np.float64) for t in related(0, N, 6, 5, noise=0.1))
    row = only(rotate_sets(sets, asked()), **FIRST, map="rotation")
    keys = np.array([key for key, _ in scene_keys(N)], object)
    (division,) = random_divisions(keys, 60, 1, seed=0)
    centred = [t - t[division.fit].mean(axis=0) for t in (x, y)]
    u, _, vt = np.linalg.svd(centred[0][division.fit].T @ centred[1][division.fit], full_matrices=False)
    mapped, targets = centred[0][division.scored] @ (u @ vt), centred[1][division.scored]
    cosine = mapped @ targets.T / np.linalg.norm(mapped, axis=1)[:, None] / np.linalg.norm(targets, axis=1)
    hits = [(cosine[i] >= cosine[i, i]).sum() == 1 for i in range(60)]
    assert row["value"] == pytest.approx(np.mean(hits))


def test_a_fit_split_is_another_set_of_the_same_models_and_shares_no_scene(home: Home) -> None:
    x, y = related(0, 200, 6, 5, noise=0.1)
    for name, t in (("x", x), ("y", y)):
        facts = {"model": name, "dataset": "d", "version": "1"}
        put_set(home, name, scene_keys(80), {0: t[:80]}, split="test", **facts)
        put_set(home, f"{name} val", scene_keys(120, 80), {0: t[80:]}, split="val", **facts)
        put_set(home, f"{name} bad", scene_keys(120, 79), {0: t[80:]}, split="bad", **facts)
    rows = rotate_sets(home, asked(fit_pairs=None, fit="val"))
    row = only(rows, **FIRST, map="rotation")
    assert (row["n"], row["pairs"], row["split"]) == (80, 120, "test") and "split val" in row["selection"]
    assert row["value"] > 0.2
    capped = rotate_sets(home, asked(fit_pairs=None, fit="val", pairs=20))
    assert only(capped, **FIRST, map="rotation")["pairs"] == 20
    with pytest.raises(InputError, match=r"1 scenes, among them 's00079', are in the fit split bad"):
        rotate_sets(home, asked(fit_pairs=None, fit="bad"))
    with pytest.raises(InputError, match="no embedding set of 'x' .* for split train of d"):
        rotate_sets(home, asked(fit_pairs=None, fit="train"))
    with pytest.raises(InputError, match="500 pairs are asked for, and there are 120"):
        rotate_sets(home, asked(fit_pairs=None, fit="val", pairs=500))


def made_by(weights: str, tokenizer: str = "t") -> dict[str, Any]:
    """The part of a record that says which files made its vectors."""
    facts = {"modality": "text", "layers": [0]}
    return {"config": {"content": {"weights": weights, "tokenizer": tokenizer, "facts": facts}, "training": None}}


def put_splits(home: Home, weights: str, **changed: Any) -> None:
    """x and y on test by weights `new`; x on val by these weights, in other directions, under the same label."""
    x, y = related(0, 200, 6, 5, noise=0.1)
    turned = x[80:] @ np.linalg.qr(np.random.default_rng(0).normal(size=(6, 6)))[0]
    run, other = ({"model": name, "dataset": "d", "version": "1"} for name in ("run:r@best", "y"))
    put_set(home, "x", scene_keys(80), {0: x[:80]}, split="test", **run, **made_by("new"))
    put_set(home, "xv", scene_keys(120, 80), {0: turned}, split="val", **{**run, **made_by(weights), **changed})
    put_set(home, "y", scene_keys(80), {0: y[:80]}, split="test", **other)
    put_set(home, "yv", scene_keys(120, 80), {0: y[80:]}, split="val", **other)


@pytest.mark.parametrize(
    ("changed", "word"),
    [(made_by("old"), "weights"), (made_by("new", "u"), "tokenizer"), ({"version": "2"}, "version")],
)
def test_a_fit_set_of_the_same_label_but_of_other_files_is_refused(
    home: Home, changed: dict[str, Any], word: str
) -> None:
    put_splits(home, "new", **changed)
    with pytest.raises(InputError, match=f"'xv' has that label, but differs in {word},"):
        rotate_sets(home, asked(fit_pairs=None, fit="val"))


def test_a_fit_set_is_known_by_its_digests_and_not_by_its_label(home: Home) -> None:
    put_splits(home, "new", model="/a/copied/folder")
    assert only(rotate_sets(home, asked(fit_pairs=None, fit="val")), **FIRST, map="rotation")["pairs"] == 120


def test_a_map_is_refused_for_other_files_of_the_same_label(home: Home) -> None:
    x, y = related(0, 80, 6, 5, noise=0.1)
    put_set(home, "y", scene_keys(80), {0: y})
    put_set(home, "old", scene_keys(80), {0: x}, model="run:r@best", **made_by("old"))
    put_set(home, "new", scene_keys(80), {0: x}, model="run:r@best", **made_by("new"))
    put_set(home, "import", scene_keys(80), {0: x}, model="run:r@best")
    map_id = rotate_sets(home, asked(left="old", fit_pairs=40))[0]["map_id"]
    assert apply_map(home, map_id, ("old", "y"), JoinConfig(), DRAWS)
    with pytest.raises(InputError, match=r"fitted for run:r@best with weights old .* 'new' has new"):
        apply_map(home, map_id, ("new", "y"), JoinConfig(), DRAWS)
    with pytest.raises(InputError, match=r"fitted for run:r@best on the left side, and 'import' differs in origin"):
        apply_map(home, map_id, ("import", "y"), JoinConfig(), DRAWS)
    path = Path(map_url(home, map_id, RECORD))
    values = orjson.loads(path.read_bytes())
    del values["left"]["space"]
    path.write_bytes(orjson.dumps(values))
    with pytest.raises(InputError, match="kept no digests of its models"):
        apply_map(home, map_id, ("old", "y"), JoinConfig(), DRAWS)


def test_each_caption_finds_its_image_and_an_image_any_of_its_captions(home: Home) -> None:
    x, y = related(0, N, 6, 5, noise=0.1)
    put_set(home, "x", scene_keys(N), {0: x})
    g = np.random.default_rng(1)
    captions = (y[:, None] + 0.3 * g.normal(size=(N, 3, 5))).reshape(-1, 5)
    put_set(home, "y", [(f"s{i:05d}", c) for i in range(N) for c in range(3)], {0: captions}, observation="captions")
    rows = rotate_sets(home, asked())
    forward = only(rows, **{**FIRST, "protocol": "multi"}, map="rotation")
    backward = only(rows, **{**FIRST, "protocol": "multi", "direction": "right_to_left"}, map="rotation")
    assert forward["n"] == 180 and forward["chance"] == pytest.approx(3 / 180)
    assert backward["n"] == 60 and backward["chance"] == pytest.approx(1 / 60)
    assert backward["scenes_scored"] == 60 and min(forward["value"], backward["value"]) > 0.2
    picks = pq.read_table(map_url(home, forward["map_id"], PICKS_FILE)).to_pylist()
    back = [p for p in picks if p["protocol"] == "multi" and p["direction"] == "right_to_left"]
    assert len(back) == 180 and {p["item"] for p in back} == {0, 1, 2}
    hits = {
        key: np.mean([p["rank"] == 1 for p in back if p["scene_key"] == key]) for key in {p["scene_key"] for p in back}
    }
    assert np.mean(list(hits.values())) == pytest.approx(backward["value"])


def test_picks_say_who_was_picked_and_where_the_right_one_stands(sets: Home) -> None:
    row = only(rotate_sets(sets, asked()), **FIRST, map="rotation")
    picks = pq.read_table(map_url(sets, row["map_id"], PICKS_FILE)).to_pylist()
    assert len(picks) == 120
    forward = [p for p in picks if p["direction"] == "left_to_right"]
    assert np.mean([p["rank"] == 1 for p in forward]) == pytest.approx(row["value"])
    assert all((p["rank"] == 1) == (p["scene_key"] == p["picked_scene_key"]) for p in forward)


def test_the_same_number_of_pairs_scored_on_other_scenes_is_another_row_and_another_map(sets: Home) -> None:
    point = only(rotate_sets(sets, asked(fit_pairs=90, curve=(20,))), **FIRST, map="rotation", pairs=20)
    alone = only(rotate_sets(sets, asked(fit_pairs=20)), **FIRST, map="rotation")
    fewer = only(rotate_sets(sets, asked(fit_pairs=90, pairs=20)), **FIRST, map="rotation")
    assert (point["n"], alone["n"], fewer["n"]) == (30, 100, 30)
    assert point["alignment_id"] == fewer["alignment_id"] != alone["alignment_id"]
    kept = [row["n"] for row in list_alignments(sets) if row["pairs"] == 20 and row["map"] == "rotation"]
    assert sorted(set(kept)) == [30, 100]
    # One fitted map, but the picks beside it are of other scenes.
    assert load_map(sets, alone["map_id"]).fit_keys == load_map(sets, fewer["map_id"]).fit_keys
    picks = [pq.read_table(map_url(sets, row["map_id"], PICKS_FILE)).num_rows for row in (alone, fewer)]
    assert picks == [200, 60]


def test_picks_stay_when_a_map_is_scored_on_another_set(home: Home) -> None:
    x, y = related(0, 200, 6, 5, noise=0.1)
    for name, t in (("x", x), ("y", y)):
        facts = {"model": name, "dataset": "d", "version": "1"}
        put_set(home, name, scene_keys(80), {0: t[:80]}, split="test", **facts)
        put_set(home, f"{name} few", scene_keys(40), {0: t[:40]}, split="few", **facts)
        put_set(home, f"{name} val", scene_keys(120, 80), {0: t[80:]}, split="val", **facts)
    first = only(rotate_sets(home, asked(fit_pairs=None, fit="val")), **FIRST, map="rotation")
    second = only(
        rotate_sets(home, asked(left="x few", right="y few", fit_pairs=None, fit="val")), **FIRST, map="rotation"
    )
    counts = [pq.read_table(map_url(home, row["map_id"], PICKS_FILE)).num_rows for row in (first, second)]
    assert counts == [160, 80]
    weights = [load_map(home, row["map_id"]).fitted.weights["w"] for row in (first, second)]
    assert np.array_equal(weights[0], weights[1])
    applied = only(apply_map(home, first["map_id"], ("x few", "y few"), JoinConfig(), DRAWS), **FIRST, map="rotation")
    assert applied["value"] == second["value"]
    assert applied["applied_map_id"] == first["map_id"] and "map_id" not in applied


def test_a_rival_is_fitted_and_scored_on_the_same_scenes(sets: Home) -> None:
    x, _ = related(0, N, 6, 5, noise=0.1)
    noisy = x + 2 * np.random.default_rng(2).normal(size=x.shape)
    put_set(sets, "z", scene_keys(100), {0: noisy[:100]})
    rows = rotate_sets(sets, asked(against="z", splits=3))
    gap = only(rows, difference=["x", "z"], metric="recall@1", direction="left_to_right")
    assert gap["n"] == 40 and 0 < gap["low"] < gap["value"] < gap["high"]
    assert gap["value"] == pytest.approx(gap["values"][0] - gap["values"][1])
    recorded = {
        (row["metric"], row["protocol"], row["direction"]): row["value"]
        for row in list_alignments(sets)
        if row["metric"].endswith("_difference")
    }
    gaps = [row for row in rows if "difference" in row]
    assert recorded == {(f"{r['metric']}_difference", r["protocol"], r["direction"]): r["value"] for r in gaps}
    assert len(recorded) >= 6
    same = rotate_sets(sets, asked(against="x"))
    assert {(r["value"], r["low"], r["high"]) for r in same if "difference" in r} == {(0.0, 0.0, 0.0)}


def test_a_saved_map_comes_back_and_is_applied_to_what_it_was_not_fitted_on(sets: Home) -> None:
    x, y = related(0, N, 6, 5, noise=0.1)
    row = only(rotate_sets(sets, asked()), **FIRST, map="rotation")
    stored = load_map(sets, row["map_id"])
    assert len(stored.fit_keys) == stored.record.pairs == 60
    rows = [i for i, (key, _) in enumerate(scene_keys(N)) if key in stored.fit_keys]
    assert stored.fitted.weights["w"] == pytest.approx(fit(x[rows], y[rows], MapConfig()).weights["w"], abs=1e-6)
    again = apply_map(sets, row["map_id"], ("x", "y"), JoinConfig(), DRAWS)
    applied = only(again, **FIRST, map="rotation")
    assert (applied["n"], applied["value"]) == (60, pytest.approx(row["value"]))
    assert only(again, **FIRST, map="shuffled")["value"] < 0.1 and only(again, **FIRST, map="random")["value"] < 0.1
    assert row["map_id"] in applied["selection"]


def test_a_map_is_refused_where_it_means_nothing(sets: Home) -> None:
    map_id = rotate_sets(sets, asked())[0]["map_id"]
    x, _ = related(0, N, 6, 5)
    put_set(sets, "other", scene_keys(N), {0: x}, model="another")
    with pytest.raises(InputError, match="fitted for model 'x' .* 'other' has 'another'"):
        apply_map(sets, map_id, ("other", "y"), JoinConfig(), DRAWS)
    fitted_on = sorted(load_map(sets, map_id).fit_keys)
    put_set(sets, "small", [(key, 0) for key in fitted_on], {0: x[:60]}, model="x")
    with pytest.raises(InputError, match="Of 60 common scenes 0 are no fit pairs"):
        apply_map(sets, map_id, ("small", "y"), JoinConfig(), DRAWS)
    with pytest.raises(InputError, match=rf"There is no map 'nothing' .* There are {map_id}"):
        load_map(sets, "nothing")


@pytest.mark.parametrize("name", [WEIGHTS, FIT_KEYS])
def test_a_changed_file_of_a_map_is_refused(sets: Home, name: str) -> None:
    map_id = rotate_sets(sets, asked())[0]["map_id"]
    path = Path(map_url(sets, map_id, name))
    path.write_bytes(path.read_bytes()[:-1] + b"x")
    with pytest.raises(IntegrityError, match=f"File {name} of map {map_id}"):
        load_map(sets, map_id)


def test_a_map_without_its_record_is_not_there(sets: Home) -> None:
    map_id = rotate_sets(sets, asked())[0]["map_id"]
    path = Path(map_url(sets, map_id, RECORD))
    values = orjson.loads(path.read_bytes())
    path.write_bytes(orjson.dumps({**values, "format": "other"}))
    with pytest.raises(IntegrityError, match="another format"):
        read_map_record(sets, map_id)
    path.unlink()
    with pytest.raises(InputError, match="There is none yet"):
        load_map(sets, map_id)


def test_f24_a_collapsed_encoder_finds_nothing_and_raises_an_alarm(sets: Home) -> None:
    put_set(sets, "flat", scene_keys(N), {0: np.full((N, 6), 0.1)})
    row = only(rotate_sets(sets, asked(left="flat")), **FIRST, map="rotation")
    assert (row["value"], row["ties"], row["ties_at_random"]) == (0.0, 1.0, pytest.approx(1 / 60))
    assert any("collapsed" in alarm for alarm in row["alarms"])


def test_few_pairs_raise_an_alarm(sets: Home) -> None:
    row = only(rotate_sets(sets, asked(pairs=3)), **FIRST, map="rotation")
    assert any("3 pairs fix 2 of 5 directions" in alarm for alarm in row["alarms"])


def test_wrong_options_are_refused() -> None:
    for options in ({"fit": "val", "fit_pairs": 5}, {"fit_pairs": None}):
        with pytest.raises(UsageError, match="Name exactly one of --fit"):
            asked(**options)
    with pytest.raises(UsageError, match="--fit-share is 1"):
        asked(fit_pairs=None, fit_share=1)
    with pytest.raises(UsageError, match="2 or more"):
        asked(curve=(10, 1))
