"""`indexing.probe.probes`, `labels` and `probing`: what a space says of a label, without a scene on both sides."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import orjson
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from sklearn.model_selection import StratifiedGroupKFold

from indexing.probe.job import ProbingConfig, probe_set
from indexing.probe.labels import attribute_of, read_labels
from indexing.probe.probes import ProbeConfig, probe
from indexing.uncertainty.bootstrap import BootstrapConfig
from infra.errors import InputError, UsageError
from infra.home import Home, resolve
from tests.catalog.stored_rows import list_alignments
from tests.indexing.embedding_sets import put_set, scene_keys

QUICK = BootstrapConfig(draws=200)


@pytest.fixture
def home(tmp_path: Path) -> Home:
    return resolve(str(tmp_path / "home"))


def clusters(n: int, classes: int, spread: float, seed: int = 0) -> tuple[np.ndarray[Any, Any], list[str]]:
    g = np.random.default_rng(seed)
    centres = 3 * g.normal(size=(classes, 8))
    codes = np.arange(n) % classes
    return centres[codes] + spread * g.normal(size=(n, 8)), [f"c{code}" for code in codes]


def test_separable_classes_are_read_and_noise_is_at_chance() -> None:
    x, labels = clusters(200, 4, 0.5)
    scenes = [str(i) for i in range(200)]
    config = ProbeConfig(bootstrap=QUICK)
    for one in probe(x, labels, scenes, config):
        assert one.accuracy.value > 0.95 and one.chance == 0.25 and (one.n, one.classes, one.dropped) == (200, 4, 0)
    noise = np.random.default_rng(1).normal(size=x.shape)
    for one in probe(noise, labels, scenes, config):
        assert one.accuracy.low is not None and one.accuracy.high is not None
        assert one.accuracy.low < 0.3 and one.accuracy.value < 0.36


def test_a_linear_boundary_is_for_the_linear_probe_and_a_curved_one_for_neighbours() -> None:
    g = np.random.default_rng(0)
    angle = g.uniform(0, 2 * np.pi, 300)
    ring = np.stack([np.cos(angle), np.sin(angle)], axis=1)
    labels = [str(int(a // (np.pi / 3)) % 2) for a in angle]
    linear, knn = probe(ring, labels, [str(i) for i in range(300)], ProbeConfig(bootstrap=QUICK, k=3))
    assert knn.accuracy.value > 0.9
    assert linear.accuracy.value < 0.7


def test_items_of_one_scene_are_never_on_both_sides() -> None:
    """Random vectors, five equal copies a scene: who sees a copy in training knows the answer, the others know nothing."""
    g = np.random.default_rng(0)
    x = np.repeat(g.normal(size=(100, 6)), 5, axis=0)
    labels = np.repeat([str(i % 2) for i in g.permutation(100)], 5).tolist()
    scenes = np.repeat([f"s{i}" for i in range(100)], 5).tolist()
    config = ProbeConfig(kinds=("knn",), k=1, bootstrap=QUICK)
    (apart,) = probe(x, labels, scenes, config)
    (leaking,) = probe(x, labels, [str(i) for i in range(500)], config)
    assert leaking.accuracy.value > 0.95
    assert apart.accuracy.value < 0.7
    # 100 scenes and not 500 items decide how wide the interval is.
    assert apart.accuracy.low is not None and apart.accuracy.high is not None
    assert apart.accuracy.high - apart.accuracy.low > 0.15


def test_the_majority_class_is_chance_and_rare_classes_are_left_out_and_counted() -> None:
    x, _ = clusters(100, 2, 1.0)
    labels = ["a"] * 70 + ["b"] * 27 + ["c"] * 3
    (one,) = probe(x, labels, [str(i) for i in range(100)], ProbeConfig(kinds=("linear",), bootstrap=QUICK))
    assert (one.n, one.classes, one.dropped, one.chance) == (97, 2, 3, 70 / 97)
    with pytest.raises(InputError, match="belong to 1 classes"):
        probe(x, ["a"] * 97 + ["b"] * 3, [str(i) for i in range(100)], ProbeConfig(bootstrap=QUICK))


def test_scenes_and_not_items_decide_whether_a_class_is_probed() -> None:
    x, _ = clusters(60, 2, 1.0)
    scenes = [f"s{i // 2}" for i in range(60)]
    # Classes of 5 scenes and 10 items, of 4 scenes and 8 items, and of 21 scenes.
    labels = ["b"] * 10 + ["10"] * 8 + ["a"] * 42
    (one,) = probe(x, labels, scenes, ProbeConfig(kinds=("linear",), bootstrap=QUICK))
    assert (one.n, one.classes, one.dropped, one.chance) == (52, 2, 8, 42 / 52)


def test_the_linear_probe_is_a_standardised_logistic_regression_fitted_on_the_other_folds() -> None:
    from sklearn.linear_model import LogisticRegression

    x, labels = clusters(90, 3, 4.0)
    x *= np.array([1, 100, 1e-3, 1, 1, 1, 1, 1])
    scenes = np.repeat([f"s{i}" for i in range(45)], 2).tolist()
    labels = np.repeat(labels[:45], 2).tolist()
    (found,) = probe(x, labels, scenes, ProbeConfig(kinds=("linear",), bootstrap=QUICK, seed=4))
    codes = np.unique(labels, return_inverse=True)[1]
    hits = np.zeros(90)
    for train, test in StratifiedGroupKFold(5, shuffle=True, random_state=4).split(x, codes, scenes):
        assert not set(np.array(scenes)[train]) & set(np.array(scenes)[test])
        mean, std = x[train].mean(axis=0), x[train].std(axis=0)
        model = LogisticRegression(max_iter=2_000).fit((x[train] - mean) / std, codes[train])
        hits[test] = model.predict((x[test] - mean) / std) == codes[test]
    assert np.array_equal(found.hits_N, hits)


def test_a_zero_vector_is_counted_wrong_by_the_neighbours() -> None:
    x, labels = clusters(100, 2, 0.1)
    x[:10] = 0
    (one,) = probe(x, labels, [str(i) for i in range(100)], ProbeConfig(kinds=("knn",), bootstrap=QUICK))
    assert one.hits_N[:10].sum() == 0 and one.hits_N[10:].mean() == 1


# --- labels -------------------------------------------------------------------------------------------------------


def test_labels_of_a_csv_keep_their_zeros_and_those_of_parquet_are_the_same(home: Home, tmp_path: Path) -> None:
    record = put_set(home, "x", scene_keys(3), {0: np.eye(3)})
    (tmp_path / "l.csv").write_text("id,place,other\n0012,01,5\n0013,02,\n0014,,7\n")
    pq.write_table(pa.table({"id": ["0012", "0013"], "place": ["01", "02"]}), tmp_path / "l.parquet")
    for name in ("l.csv", "l.parquet"):
        labels = read_labels(home, str(tmp_path / name), record, ("id", "place"))
        assert labels["0012"] == "01" and labels["0013"] == "02"
    with pytest.raises(InputError, match="no column 'label'; it has id, place, other"):
        read_labels(home, str(tmp_path / "l.csv"), record, ("id", "label"))


def test_two_labels_of_one_scene_are_refused(home: Home, tmp_path: Path) -> None:
    record = put_set(home, "x", scene_keys(3), {0: np.eye(3)})
    (tmp_path / "l.csv").write_text("scene_key,label\na,1\na,1\nb,2\na,3\n")
    with pytest.raises(InputError, match="scene 'a' two labels, '1' and '3'"):
        read_labels(home, str(tmp_path / "l.csv"), record, ("scene_key", "label"))
    (tmp_path / "l.csv").write_text("scene_key,label\n")
    with pytest.raises(InputError, match="no labelled scene"):
        read_labels(home, str(tmp_path / "l.csv"), record, ("scene_key", "label"))


def test_attributes_of_states_are_found_by_path() -> None:
    state = orjson.loads('{"place":"snow","things":[{"count":2,"kind":"dog"},{"count":1,"kind":"cat"}],"sky":null}')
    found = {a: attribute_of(state, a) for a in ("place", "things.0.kind", "things.1.count", "things.count")}
    assert found == {"place": "snow", "things.0.kind": "dog", "things.1.count": "1", "things.count": "2"}
    assert [attribute_of(state, a) for a in ("sky", "things", "things.2.kind", "place.x", "colour")] == [None] * 5


# --- the job ------------------------------------------------------------------------------------------------------


def test_probes_are_recorded_beside_the_alignments(home: Home, tmp_path: Path) -> None:
    x, labels = clusters(100, 2, 0.3)
    put_set(home, "x", scene_keys(100), {0: x}, samples=9, dataset="d", version="1", split="test")
    lines = [f"{key},{label}" for (key, _), label in zip(scene_keys(100), labels, strict=True)]
    (tmp_path / "l.csv").write_text("\n".join(["scene_key,label", *lines[:90], "gone,c0"]))
    config = ProbingConfig(name="x", labels=str(tmp_path / "l.csv"), probe=ProbeConfig(bootstrap=QUICK))
    rows = probe_set(home, config)
    assert [row["metric"] for row in rows] == ["probe_linear", "probe_knn"]
    for row in rows:
        assert (
            row["value"] > 0.95 and row["n"] == 90 and row["right"].startswith("l.csv:label (") and row["samples"] == 9
        )
        assert (row["items_without_label"], row["labels_without_item"], row["classes"]) == (10, 1, 2)
    assert {row["metric"]: row["value"] for row in list_alignments(home)} == {r["metric"]: r["value"] for r in rows}
    (tmp_path / "l.csv").write_text("scene_key,label\nnobody,1\n")
    with pytest.raises(InputError, match="None of the 100 items"):
        probe_set(home, config)


def test_each_caption_can_be_an_item(home: Home, tmp_path: Path) -> None:
    keys = [(f"s{i:03d}", item) for i in range(60) for item in range(3)]
    x, _ = clusters(180, 2, 0.3)
    put_set(home, "x", keys, {0: x}, observation="captions")
    (tmp_path / "l.csv").write_text("\n".join(["scene_key,label", *(f"s{i:03d},{i % 2}" for i in range(60))]))
    for captions, n in (("each", 180), ("mean", 60), ("hash", 60)):
        how = ProbeConfig(kinds=("linear",), bootstrap=QUICK)
        config = ProbingConfig(name="x", labels=str(tmp_path / "l.csv"), captions=captions, probe=how)
        assert probe_set(home, config)[0]["n"] == n
    with pytest.raises(UsageError, match="'first'"):
        ProbingConfig(name="x", labels="l", captions="first")


def test_wrong_options_are_refused() -> None:
    with pytest.raises(UsageError, match="no probe 'svm'"):
        ProbeConfig(kinds=("svm",))
    with pytest.raises(UsageError, match="folds is 1"):
        ProbeConfig(folds=1)
