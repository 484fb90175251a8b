"""`indexing.leakage` inside `goodviews align`: what was seen in training is counted, and the score stands without it too."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from catalog.overlap import Part
from indexing.alignment import AlignConfig
from indexing.bootstrap import BootstrapConfig
from indexing.calibration import CalibrationConfig
from indexing.leakage import Leakage, Unknown, leakage, training_part
from indexing.mapping import MappingConfig, rotate_sets
from indexing.metrics import mutual_knn
from indexing.scoring import ScoringConfig, score_sets
from infra.home import Home, resolve
from tests.catalog.datasets import put_dataset
from tests.indexing.sets import put_set, related, scene_keys

N = 40
QUIET = AlignConfig(k=5, bootstrap=BootstrapConfig(draws=0), calibration=CalibrationConfig(permutations=0))


@pytest.fixture
def home(tmp_path: Path) -> Home:
    return resolve(str(tmp_path / "home"))


def put_sets(
    home: Home, training: Part | None, scored: Part | None, names: tuple[str, str] = ("x", "y")
) -> tuple[np.ndarray[Any, Any], ...]:
    """x of a run that was trained on `training`, y of a model from elsewhere, both of the scenes of `scored`."""
    x, y = related(0, N, 6, 5)
    facts: dict[str, Any] = {}
    if scored is not None:
        facts = {"dataset": scored.dataset, "version": scored.version, "split": scored.split}
    config: dict[str, Any] = {"training": None}
    if training is not None:
        config = {"training": {"run_id": "r", "dataset": training.dataset, "version": training.version}}
        config["training"] |= {"split": training.split, "roles": list(training.roles)}
    put_set(home, names[0], scene_keys(N), {0: x}, config=config, **facts)
    put_set(home, names[1], scene_keys(N), {0: y}, config={"training": None}, **facts)
    return x, y


def datasets(home: Home, *, shared: int) -> tuple[Part, Part]:
    """`photos`, the first `shared` scenes of which say what some scene of `web` says in other letters."""
    web = put_dataset(home, "web", {f"w{i}": [f"a dog of kind {i}"] for i in range(max(1, shared))})
    texts = {key: [f"A dog, of kind {i}!" if i < shared else f"else {i}"] for i, (key, _) in enumerate(scene_keys(N))}
    return web, put_dataset(home, "photos", texts, split="test", source="coco")


def test_the_score_stands_without_the_scenes_that_leaked(home: Home) -> None:
    x, y = put_sets(home, *datasets(home, shared=10))
    (row,) = score_sets(home, ScoringConfig(left="x", right="y", align=QUIET))
    assert row["leakage"] == 0.25
    assert row["leaked"] == {
        "web@0123456789abcdef/train": {"exact": 0, "normalised": 10, "scene": 0, "source_id": 0, "any": 10}
    }
    assert row["value"] == pytest.approx(mutual_knn(x, y, k=5))
    assert row["without_leaked"] == pytest.approx(mutual_knn(x[10:], y[10:], k=5))
    # The side that was trained may stand on the right.
    (turned,) = score_sets(home, ScoringConfig(left="y", right="x", align=QUIET))
    assert turned["leakage"] == 0.25


def test_no_leak_is_zero_and_everything_leaked_leaves_no_score(home: Home) -> None:
    put_sets(home, *datasets(home, shared=0))
    (row,) = score_sets(home, ScoringConfig(left="x", right="y", align=QUIET))
    assert row["leakage"] == 0 and row["without_leaked"] == pytest.approx(row["value"])


def test_training_on_the_scored_scenes_leaks_all_of_them(home: Home) -> None:
    _, photos = datasets(home, shared=0)
    put_sets(home, photos, photos)
    (row,) = score_sets(home, ScoringConfig(left="x", right="y", align=QUIET))
    assert row["leakage"] == 1.0 and row["without_leaked"] is None


def test_recall_without_leaked_queries_keeps_the_gallery(home: Home) -> None:
    put_sets(home, *datasets(home, shared=10))
    config = MappingConfig(left="x", right="y", fit_pairs=20, splits=1, bootstrap=BootstrapConfig(draws=0))
    row = rotate_sets(home, config)[0]
    assert row["leakage"] == 0.25 and row["n"] == 20
    assert row["without_leaked"] is not None and 0 <= row["without_leaked"] <= 1


def test_what_nobody_recorded_is_unknown_and_not_zero(home: Home) -> None:
    web, photos = datasets(home, shared=10)
    put_sets(home, None, photos)
    (row,) = score_sets(home, ScoringConfig(left="x", right="y", align=QUIET))
    assert row["leakage"] is None and row["without_leaked"] is None and "no training set" in row["leaked"]
    put_sets(home, web, None, ("a", "b"))
    (row,) = score_sets(home, ScoringConfig(left="a", right="b", align=QUIET))
    assert row["leakage"] is None and "which dataset" in row["leaked"]
    put_sets(home, Part(dataset="gone", version="0"), photos, ("c", "d"))
    (row,) = score_sets(home, ScoringConfig(left="c", right="d", align=QUIET))
    assert row["leakage"] is None and "holds no scene of gone@0" in row["leaked"]


def test_roles_and_split_of_the_training_set_are_read_from_the_record(home: Home) -> None:
    record = put_set(
        home,
        "z",
        scene_keys(3),
        {0: np.eye(3)},
        config={"training": {"dataset": "d", "version": "v", "split": "train", "roles": ["alt"]}},
    )
    assert training_part(record) == Part(dataset="d", version="v", split="train", roles=("alt",))
    assert isinstance(leakage(home, [record], ["a"]), Unknown)
    assert Leakage(leaked=frozenset("a"), share=0.5, counts={}).share == 0.5
