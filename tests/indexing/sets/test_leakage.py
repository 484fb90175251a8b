"""`indexing.sets.leakage` inside `goodviews align`: what was seen in training is counted, and the score stands without it too."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow.parquet as pq
import pytest

from catalog.overlap.parts import Part
from indexing.align.job import ScoringConfig, score_sets
from indexing.align.layers import ProtocolConfig
from indexing.align.neighbours import mutual_knn
from indexing.align.score import AlignConfig
from indexing.rotate.job import MappingConfig, rotate_sets
from indexing.rotate.maps import PICKS_FILE, map_url
from indexing.sets.leakage import Leakage, leakage, scored_part
from indexing.uncertainty.bootstrap import BootstrapConfig
from indexing.uncertainty.calibration import CalibrationConfig
from infra.home import Home, resolve
from tests.catalog.datasets import put_dataset
from tests.indexing.embedding_sets import put_set, related, scene_keys
from tests.indexing.measures import unbiased_cka

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
    web, photos = datasets(home, shared=0)
    put_sets(home, web, photos)
    (row,) = score_sets(home, ScoringConfig(left="x", right="y", align=QUIET))
    assert row["leakage"] == 0 and row["without_leaked"] == row["value"]
    put_sets(home, photos, photos, ("a", "b"))
    (row,) = score_sets(home, ScoringConfig(left="a", right="b", align=QUIET))
    assert row["leakage"] == 1.0 and row["without_leaked"] is None


def test_a_metric_with_too_few_scenes_left_says_nothing_and_the_others_stand(home: Home) -> None:
    x, y = put_sets(home, *datasets(home, shared=N - 8))
    asked = dataclasses.replace(QUIET, metrics=("svcca", "mutual_knn", "unbiased_cka"))
    for protocol in ("plain", "huh2024"):
        config = dataclasses.replace(asked, protocol=ProtocolConfig(name=protocol))
        rows = score_sets(home, ScoringConfig(left="x", right="y", align=config))
        assert rows[0]["value"] > 0 and rows[0]["without_leaked"] is None
        assert None not in (rows[1]["without_leaked"], rows[2]["without_leaked"])
        if protocol == "plain":
            assert rows[1]["without_leaked"] == pytest.approx(mutual_knn(x[-8:], y[-8:], k=5))
            assert rows[2]["without_leaked"] == pytest.approx(unbiased_cka(x[-8:], y[-8:]))


def test_recall_without_leaked_queries_keeps_the_gallery(home: Home) -> None:
    put_sets(home, *datasets(home, shared=10))
    config = MappingConfig(left="x", right="y", fit_pairs=20, splits=1, bootstrap=BootstrapConfig(draws=0))
    row = rotate_sets(home, config)[0]
    assert (row["leakage"], row["n"], row["direction"]) == (0.25, 20, "left_to_right")
    leaked = {key for key, _ in scene_keys(10)}
    picks = pq.read_table(map_url(home, row["map_id"], PICKS_FILE)).to_pylist()
    ranks = {p["scene_key"]: p["rank"] for p in picks if p["direction"] == row["direction"]}
    assert 0 < len(leaked & set(ranks)) < len(ranks) == 20
    hits = {key: rank == 1 for key, rank in ranks.items()}
    assert row["value"] == pytest.approx(np.mean(list(hits.values())))
    assert row["without_leaked"] == pytest.approx(np.mean([hit for key, hit in hits.items() if key not in leaked]))


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


def test_roles_and_split_of_the_training_set_decide_what_leaked(home: Home) -> None:
    texts = {key: [f"alt/only {i}" if i < 4 else f"human/only {i}"] for i, (key, _) in enumerate(scene_keys(N))}
    web = put_dataset(home, "web2", {f"w{key}": said for key, said in texts.items()})
    said = {key: [text.partition("/")[2] for text in found] for key, found in texts.items()}
    photos = put_dataset(home, "photos2", said, split="test", source="coco")
    counts = {}
    for name, roles in (("alt", ("alt",)), ("human", ("human",)), ("all", ())):
        put_sets(home, dataclasses.replace(web, roles=roles), photos, (f"x {name}", f"y {name}"))
        (row,) = score_sets(home, ScoringConfig(left=f"x {name}", right=f"y {name}", align=QUIET))
        counts[name] = row["leaked"]["web2@0123456789abcdef/train"]["any"]
    assert counts == {"alt": 4, "human": N - 4, "all": N}
    put_sets(home, dataclasses.replace(web, split="val"), photos, ("x val", "y val"))
    (row,) = score_sets(home, ScoringConfig(left="x val", right="y val", align=QUIET))
    assert row["leakage"] is None and "holds no scene of web2@0123456789abcdef/val" in row["leaked"]


@pytest.mark.parametrize(
    ("left", "right", "roles"),
    [
        (("captions", ("human",)), ("captions", ("alt",)), ("alt", "human")),
        (("captions", ("human",)), ("images", ()), ("human",)),
        (("images", ()), ("scenes", ("alt",)), ("alt",)),
        (("captions", ("human",)), ("scenes", ()), ()),
        (("images", ()), ("images", ()), ()),
    ],
)
def test_the_captions_of_both_sides_are_looked_for(
    home: Home, left: tuple[str, tuple[str, ...]], right: tuple[str, tuple[str, ...]], roles: tuple[str, ...]
) -> None:
    facts = {"dataset": "d", "version": "1", "split": "test"}
    sides = [
        put_set(home, name, scene_keys(3), {0: np.eye(3)}, observation=side[0], roles=side[1], **facts)
        for name, side in (("l", left), ("r", right))
    ]
    assert [scored_part(side, sides) for side in sides] == [Part(**facts, roles=roles)] * 2


def test_a_caption_of_the_other_side_leaks_too(home: Home) -> None:
    """The trained side was shown human captions, the other one alternatives, and the training set holds an alternative."""
    web = put_dataset(home, "web", {"w": ["alt/said twice"]})
    texts = {key: [f"human/own {i}", f"alt/{'said twice' if i < 3 else i}"] for i, (key, _) in enumerate(scene_keys(N))}
    photos = put_dataset(home, "photos", texts, split="test", source="coco")
    facts = {"dataset": photos.dataset, "version": photos.version, "split": "test", "observation": "scenes"}
    trained: dict[str, Any] = {
        "training": {"dataset": web.dataset, "version": web.version, "split": web.split, "roles": []}
    }
    sides = [
        put_set(home, "l", scene_keys(N), {0: np.eye(N)}, roles=("human",), config=trained, **facts),
        put_set(home, "r", scene_keys(N), {0: np.eye(N)}, roles=("alt",), **facts),
    ]
    found = leakage(home, sides, [key for key, _ in scene_keys(N)])
    assert isinstance(found, Leakage) and found.leaked == {key for key, _ in scene_keys(3)}
