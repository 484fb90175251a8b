"""`catalog.overlap` and `catalog.wording`: what a training set has seen of the scored scenes."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import duckdb
import pytest
from hypothesis import given
from hypothesis import strategies as st

from catalog import schema
from catalog.commit import commit_version
from catalog.manifest import JobRecord, Manifest
from catalog.overlap import Overlap, Part, overlap
from catalog.wording import PYTHON_FUNCTION, normal_form, sql_normal_form
from infra import storage
from infra.errors import InputError
from infra.home import Home
from tests.catalog.conftest import parquet

Scenes = dict[str, list[str]]
Put = Callable[..., Part]


@pytest.fixture
def put(home: Home) -> Put:
    """Publishes and commits a dataset of one split: {scene_key: captions}; a caption `role:text` has that role."""

    def write(dataset: str, scenes: Scenes, split: str = "train", source: str = "table") -> Part:
        version = "0123456789abcdef"
        folder = home.datasets(dataset, version)
        rows = [
            {
                "dataset": dataset,
                "version": version,
                "scene_key": key,
                "split": split,
                "captions": [
                    {
                        "index": i,
                        "role": t.partition("/")[0] if "/" in t else "human",
                        "text": t.rpartition("/")[2],
                        "repaired": False,
                    }
                    for i, t in enumerate(texts)
                ],
                "images": [],
                "source_id": f"id-{key}",
                "source_uri": "in.json",
                "source_row": i,
            }
            for i, (key, texts) in enumerate(sorted(scenes.items()))
        ]
        captions = sum(map(len, scenes.values()))
        counts: dict[str, Any] = {
            "scenes": len(scenes),
            "captions": captions,
            "texts_read": captions,
            "texts_kept": captions,
        }
        histogram = {str(len(t)): sum(len(o) == len(t) for o in scenes.values()) for t in scenes.values()}
        manifest = Manifest(
            dataset=dataset,
            version=version,
            split=split,
            shard=0,
            seed=0,
            rejects={},
            repaired=0,
            captions_per_scene=histogram,
            bad_passes=0,
            bad_repeats=0,
            rows_digest="0" * 64,
            files=[
                parquet(folder, schema.scenes_path(split, 0), "scenes", rows),
                parquet(folder, schema.rejects_path(0), "rejects", []),
            ],
            **counts,
        )
        name = schema.shard_name(split, 0)
        storage.publish(storage.join(folder, f"manifests/{name}.json"), manifest.to_json())
        content = {"source": source, "scenes_per_shard": 9}
        job = JobRecord(
            dataset=dataset, version=version, content=content, inputs=[], shards=[name], rejects={}, **counts
        )
        storage.publish(storage.join(folder, schema.JOB_PATH), job.to_json())
        commit_version(home, dataset, version)
        return Part(dataset=dataset, version=version, split=split)

    return write


def found(seen: Overlap) -> dict[str, list[str]]:
    return {kind: sorted(keys) for kind, keys in seen.keys.items()}


def test_each_kind_of_leak_is_found_and_nothing_else(home: Home, put: Put) -> None:
    training = put("web", {"a": ["A dog runs.", "Other"], "b": ["STRASSE 1"], "c": ["alone"], "d": ["..."]})
    scored = put(
        "photos",
        {
            "p1": ["nothing", "A dog runs."],
            "p2": ["a DOG, runs"],
            "p3": ["Straße 1!"],
            "p4": ["a dog walks", "dog runs a"],
            "p5": ["!!!"],
            "a": ["new words"],
        },
        split="test",
        source="coco",
    )
    seen = overlap(home, training, scored, ["p1", "p2", "p3", "p4", "p5", "a"])
    assert found(seen) == {"exact": ["p1"], "normalised": ["p1", "p2", "p3"], "scene": [], "source_id": []}
    assert seen.counts == {"exact": 1, "normalised": 3, "scene": 0, "source_id": 0, "any": 3}


def test_only_the_scenes_that_are_scored_count(home: Home, put: Put) -> None:
    training = put("web", {"a": ["one"], "b": ["two"]})
    scored = put("photos", {"p": ["one"], "q": ["two"]}, split="test")
    assert overlap(home, training, scored, ["q", "zzz"]).leaked == {"q"}


def test_scenes_of_the_same_dataset_leak_by_key_and_those_of_the_same_kind_of_source_by_id(
    home: Home, put: Put
) -> None:
    training = put("web", {"a": ["one"], "b": ["two"]})
    assert found(overlap(home, training, training, ["b"])) == {
        "exact": ["b"],
        "normalised": ["b"],
        "scene": ["b"],
        "source_id": [],
    }
    copy = put("copy", {"a": ["other"], "x": ["words"]}, split="test")
    assert found(overlap(home, training, copy, ["a", "x"]))["source_id"] == ["a"]
    foreign = put("foreign", {"a": ["other"]}, split="test", source="coco")
    assert overlap(home, training, foreign, ["a"]).leaked == frozenset()


def test_roles_that_were_not_trained_on_or_not_scored_do_not_leak(home: Home, put: Put) -> None:
    training = put("web", {"a": ["alt/one", "recap/two"]})
    scored = put("photos", {"p": ["alt/one"], "q": ["recap/two"]}, split="test")

    def leaked(trained: tuple[str, ...], shown: tuple[str, ...]) -> frozenset[str]:
        trained_part, shown_part = (
            Part(dataset=p.dataset, version=p.version, split=p.split, roles=r)
            for p, r in ((training, trained), (scored, shown))
        )
        return overlap(home, trained_part, shown_part, ["p", "q"]).leaked

    assert leaked((), ()) == {"p", "q"}
    assert leaked(("alt",), ()) == {"p"}
    assert leaked(("alt", "recap"), ("recap",)) == {"q"}


def test_a_part_that_is_not_there_is_no_proof_of_innocence(home: Home, put: Put) -> None:
    scored = put("photos", {"p": ["one"]}, split="test")
    with pytest.raises(InputError, match="holds no scene of gone@0"):
        overlap(home, Part(dataset="gone", version="0"), scored, ["p"])


TEXTS = st.text(st.one_of(st.characters(max_codepoint=127), st.sampled_from("ßİıſKÅéκ中किা́½")), max_size=12)


@given(st.lists(TEXTS, min_size=1, max_size=20))
def test_the_normal_form_in_sql_is_that_of_python(texts: list[str]) -> None:
    texts = [t.replace("\x00", " ") for t in texts]
    with duckdb.connect() as connection:
        connection.create_function(PYTHON_FUNCTION, normal_form, ["VARCHAR"], "VARCHAR")
        query = f"SELECT {sql_normal_form('t')} FROM (SELECT unnest(?::VARCHAR[]) AS t)"
        assert [row[0] for row in connection.execute(query, [texts]).fetchall()] == [normal_form(t) for t in texts]
