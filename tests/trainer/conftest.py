"""Tiny published versions with real tars and manifests, laid out by hand so that a test decides every scene."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from catalog import schema
from catalog.manifest import JobRecord, Manifest, ShardFile
from infra import seeds, storage
from infra.home import Home
from pipelines.ingest import tars
from pipelines.ingest.clean import CleanConfig
from pipelines.ingest.shards import ShardTask, ViewConfig, publish_shard
from pipelines.ingest.tables import Origin
from pipelines.records import Piece
from pipelines.sources.toyworld.source import Toyworld
from trainer.data import wordpiece
from trainer.data.tokenizer import TextTokenizer

WORDS = [
    "a",
    "an",
    "the",
    "dog",
    "cat",
    "man",
    "woman",
    "child",
    "red",
    "green",
    "blue",
    "old",
    "young",
    "small",
    "big",
    "runs",
    "walks",
    "sits",
    "jumps",
    "sleeps",
    "near",
    "under",
    "over",
    "behind",
    "house",
    "tree",
    "river",
    "road",
    "snow",
    "grass",
    "ball",
    "bike",
    "boat",
    "hat",
    "two",
    "three",
    "people",
    "with",
    "and",
    "on",
    "in",
    "of",
    "holding",
    "wearing",
]

SceneRow = tuple[str, list[tuple[int, str, str]]]
"Scene key and captions (index, role, text)."


def sentence(rng: random.Random) -> str:
    """3 to 14 words."""
    return " ".join(rng.choice(WORDS) for _ in range(rng.randint(3, 14)))


def scenes(count: int, *, seed: int = 0, prefix: str = "s", most: int = 5) -> list[SceneRow]:
    """`count` scenes of 1 to `most` captions; role `human` for index 0, then `alt` and `recap` in turn.

    Indices have gaps.
    """
    rng = random.Random(f"{seed} {prefix}")
    made = []
    for i in range(count):
        numbers = sorted(rng.sample(range(most + 2), rng.randint(1, most)))
        roles = ["human" if n == 0 else ("alt", "recap")[n % 2] for n in numbers]
        captions = [(n, role, sentence(rng)) for n, role in zip(numbers, roles, strict=True)]
        made.append((f"{prefix}{i:05d}", captions))
    return made


@dataclass
class Publisher:
    """Publishes versions below one HOME. Every shard has the split `train`, good tars and `passes` bad passes."""

    home: Home
    passes: int = 3
    seed: int = 7
    made: list[str] = field(default_factory=list)

    def __call__(
        self, shards: dict[int, Sequence[SceneRow]] | Sequence[int], *, dataset: str = "tiny", version: str = "v1"
    ) -> str:
        """Shard number -> scenes, or just the number of scenes of each shard. Returns the folder of the version."""
        if not isinstance(shards, dict):
            shards = {i: scenes(n, prefix=f"s{i}-") for i, n in enumerate(shards)}
        folder = self.home.datasets(dataset, version)
        manifests = [self._shard(folder, dataset, version, i, rows) for i, rows in shards.items()]
        total = {n: sum(getattr(m, n) for m in manifests) for n in ("scenes", "captions", "texts_read", "texts_kept")}
        job = JobRecord(
            dataset=dataset,
            version=version,
            content={"bad_passes": self.passes, "seed": self.seed},
            inputs=[],
            shards=[schema.shard_name(m.split, m.shard) for m in manifests],
            rejects={},
            **total,
        )
        storage.publish(storage.join(folder, schema.JOB_PATH), job.to_json())
        self.made.append(folder)
        return folder

    def _shard(self, folder: str, dataset: str, version: str, number: int, rows: Sequence[SceneRow]) -> Manifest:
        files = [_parquet(folder, dataset, version, number, rows), _good(folder, dataset, number, rows)]
        files += [_bad(folder, dataset, number, rows, p, self.seed) for p in range(self.passes)]
        counts = [len(captions) for _, captions in rows]
        manifest = Manifest(
            dataset=dataset,
            version=version,
            split="train",
            shard=number,
            seed=self.seed,
            scenes=len(rows),
            captions=sum(counts),
            texts_read=sum(counts),
            texts_kept=sum(counts),
            rejects={},
            repaired=0,
            captions_per_scene={str(n): k for n, k in sorted(Counter(counts).items())},
            bad_passes=self.passes,
            bad_repeats=sum(max(0, self.passes - n) for n in counts),
            rows_digest="0" * 64,
            files=files,
        )
        storage.publish(storage.join(folder, schema.manifest_path("train", number)), manifest.to_json())
        return manifest


def _parquet(folder: str, dataset: str, version: str, number: int, rows: Sequence[SceneRow]) -> ShardFile:
    table = [
        {
            "dataset": dataset,
            "version": version,
            "scene_key": key,
            "split": "train",
            "captions": [{"index": i, "role": r, "text": t, "repaired": False} for i, r, t in captions],
            "images": [],
            "source_id": key,
            "source_uri": "in",
            "source_row": row,
        }
        for row, (key, captions) in enumerate(rows)
    ]
    sink = pa.BufferOutputStream()
    pq.write_table(
        pa.Table.from_pylist(table, schema=schema.SCENES), sink, use_dictionary=["captions.list.element.role"]
    )
    path = schema.scenes_path("train", number)
    record = storage.publish(storage.join(folder, path), [sink.getvalue()])
    return ShardFile(path=path, kind="scenes", bytes=record.bytes, sha256=record.sha256, rows=len(rows))


def _good(folder: str, dataset: str, number: int, rows: Sequence[SceneRow]) -> ShardFile:
    flat = [c for _, captions in rows for c in captions]
    json = tars.caption_json(
        np.array([c[0] for c in flat]),
        pa.array([c[1] for c in flat], pa.large_string()),
        pa.array([c[2] for c in flat], pa.large_string()),
    )
    offsets = np.concatenate([[0], np.cumsum([len(captions) for _, captions in rows])])
    keys = pa.array([key for key, _ in rows], pa.large_string())
    payload = tars.sample_json(dataset, keys, tars.joined_by_scene(json, offsets))
    return publish_tar(folder, schema.good_path("train", number), "good", tars.tar(tars.joined(keys, ".json"), payload))


def _bad(folder: str, dataset: str, number: int, rows: Sequence[SceneRow], bad_pass: int, seed: int) -> ShardFile:
    """The definition of a bad pass, scene by scene: the caption at place `pass mod n` of the scene's permutation."""
    names, payloads = [], []
    for key, captions in rows:
        index = np.array([c[0] for c in captions], np.int64)
        places = seeds.permutation_places(np.repeat(seeds.hash_keys([key]), len(captions)), index, seed)
        number_, role, text = captions[int(np.flatnonzero(places == bad_pass % len(captions))[0])]
        names.append(f"{key}-c{number_:03d}.json")
        caption = f'{{"index":{number_},"role":"{role}","text":"{text}"}}'
        payloads.append(f'{{"dataset":"{dataset}","scene_key":"{key}","captions":[{caption}]}}')
    tar = tars.tar(pa.array(names, pa.large_string()), pa.array([p.encode() for p in payloads], pa.large_binary()))
    return publish_tar(folder, schema.bad_path("train", number, bad_pass), "bad", tar, bad_pass=bad_pass)


def publish_tar(folder: str, path: str, kind: str, tar: tars.Tar, *, bad_pass: int | None = None) -> ShardFile:
    """Publish a tar and return its line of the manifest."""
    record = storage.publish(storage.join(folder, path), tar.parts)
    blocks = tar.blocks.tolist()
    return ShardFile(
        path=path,
        kind=kind,
        bytes=record.bytes,
        sha256=record.sha256,
        rows=len(blocks),
        blocks=blocks,
        bad_pass=bad_pass,
    )


@pytest.fixture
def home(tmp_path: Path) -> Home:
    """An empty HOME."""
    return Home(url=str(tmp_path / "home"), catalog=str(tmp_path / "home" / "catalog.sqlite"))


@pytest.fixture
def publish(home: Home) -> Publisher:
    """Publishes into `home`."""
    return Publisher(home)


@pytest.fixture
def make_scenes() -> Callable[..., list[SceneRow]]:
    """The function `scenes` of this file."""
    return scenes


@pytest.fixture(scope="session")
def words() -> TextTokenizer:
    """A tokenizer trained on sentences of the same words as the tiny versions."""
    rng = random.Random(0)
    texts = [sentence(rng) for _ in range(300)]
    return wordpiece.train(lambda: [texts], vocab_size=160)


@pytest.fixture
def publish_toyworld(home: Home) -> Callable[[int], None]:
    """Publishes so many scenes as `tiny`, with pictures, through the real source and shard writer, in three shards."""
    return lambda scenes: _toyworld(home, scenes)


def _toyworld(home: Home, scenes: int) -> None:
    folder = home.datasets("tiny", "v1")
    source = Toyworld(scenes=scenes, images=True, image_px=16, defects=0.1, val=0.0, test=0.0)
    names = []
    for shard in range(3):
        start, stop = shard * scenes // 3, (shard + 1) * scenes // 3
        piece = Piece(input=None, start=start, stop=stop, scenes_by_split={"train": stop - start})
        task = ShardTask(
            origin=Origin(dataset="tiny", version="v1", split="train", shard=shard),
            version_url=folder,
            source=source,
            clean=CleanConfig(),
            views=ViewConfig(good=True, bad=True, images=True, bad_passes=source.bad_passes, seed=3),
            pieces=(piece,),
        )
        names.append(publish_shard(task).name)
    urls = [storage.join(folder, f"manifests/{name}.json") for name in names]
    manifests = [Manifest.from_json(storage.read_bytes(url), url=url) for url in urls]
    total = {n: sum(getattr(m, n) for m in manifests) for n in ("scenes", "captions", "texts_read", "texts_kept")}
    content = {"bad_passes": source.bad_passes}
    job = JobRecord(dataset="tiny", version="v1", content=content, inputs=[], shards=names, rejects={}, **total)
    storage.publish(storage.join(folder, schema.JOB_PATH), job.to_json())
