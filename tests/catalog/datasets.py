"""Datasets made by hand and committed, so that a test knows every caption."""

from __future__ import annotations

from typing import Any

from catalog import schema
from catalog.manifest import JobRecord, Manifest
from catalog.overlap.parts import Part
from catalog.versions.commit import commit_version
from infra import storage
from infra.home import Home
from tests.catalog.conftest import parquet

Scenes = dict[str, list[str]]


def image(sha256: str | None = None, uri: str | None = None) -> dict[str, Any]:
    """The column `images` of a scene of one image."""
    return {"images": [{"uri": uri, "sha256": sha256, "width": None, "height": None, "frame": None}]}


def put_dataset(
    home: Home,
    dataset: str,
    scenes: Scenes,
    *,
    split: str = "train",
    source: str | None = "shop",
    version: str = "0123456789abcdef",
    facts: dict[str, dict[str, Any]] | None = None,
) -> Part:
    """Publish and commit a dataset of one split: {scene_key: captions}; a caption `role/text` has that role.

    facts: {scene_key: columns} that differ from those of an ordinary scene.
    """
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
            **(facts or {}).get(key, {}),
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
    content = {"scenes_per_shard": 9} | ({"source": source} if source else {})
    job = JobRecord(dataset=dataset, version=version, content=content, inputs=[], shards=[name], rejects={}, **counts)
    storage.publish(storage.join(folder, schema.JOB_PATH), job.to_json())
    commit_version(home, dataset, version)
    return Part(dataset=dataset, version=version, split=split)
