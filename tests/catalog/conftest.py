"""Tiny published versions, written under the declared schemas without the pipelines package."""

from __future__ import annotations

import io
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from catalog import schema
from catalog.manifest import JobRecord, Manifest, ShardFile
from infra import storage
from infra.home import Home


@dataclass(frozen=True, kw_only=True)
class Published:
    """What a test needs to know of a version that it published."""

    dataset: str
    version: str
    folder: str
    scenes: int
    captions: int
    rejects: int


@dataclass
class Publisher:
    """Publishes versions of `scenes_per_shard` scenes: scene i of a shard has 1 + i % 3 captions, one text is rejected."""

    home: Home
    made: list[Published] = field(default_factory=list)

    def __call__(
        self, dataset: str = "toy", version: str = "0123456789abcdef", *, shards: int = 2, scenes_per_shard: int = 4
    ) -> Published:
        folder = self.home.datasets(dataset, version)
        manifests = [self._shard(folder, dataset, version, i, scenes_per_shard) for i in range(shards)]
        names = [schema.shard_name(m.split, m.shard) for m in manifests]
        for name, manifest in zip(names, manifests, strict=True):
            storage.publish(storage.join(folder, f"manifests/{name}.json"), manifest.to_json())
        total = {n: sum(getattr(m, n) for m in manifests) for n in ("scenes", "captions", "texts_read", "texts_kept")}
        job = JobRecord(
            dataset=dataset,
            version=version,
            content={"source": "toyworld", "scenes_per_shard": scenes_per_shard},
            inputs=[],
            shards=names,
            rejects={"missing_text": shards},
            scenes=total["scenes"],
            captions=total["captions"],
            texts_read=total["texts_read"],
            texts_kept=total["texts_kept"],
        )
        storage.publish(storage.join(folder, schema.JOB_PATH), job.to_json())
        made = Published(
            dataset=dataset,
            version=version,
            folder=folder,
            scenes=total["scenes"],
            captions=total["captions"],
            rejects=shards,
        )
        self.made.append(made)
        return made

    def _shard(self, folder: str, dataset: str, version: str, shard: int, scenes: int) -> Manifest:
        rows = [_scene(dataset, version, shard, i) for i in range(scenes)]
        reject = {
            "dataset": dataset,
            "version": version,
            "shard": shard,
            "split": "train",
            "reason": "missing_text",
            "field": "caption",
            "source_uri": "in.json",
            "source_row": 99,
        }
        counts = [1 + i % 3 for i in range(scenes)]
        histogram = {str(n): counts.count(n) for n in sorted(set(counts))}
        files = [
            parquet(folder, schema.scenes_path("train", shard), "scenes", rows),
            parquet(folder, schema.rejects_path(shard), "rejects", [reject]),
            parquet(folder, schema.states_path("train", shard), "states", [_state(row) for row in rows]),
            tar(folder, schema.good_path("train", shard), scenes),
        ]
        return Manifest(
            dataset=dataset,
            version=version,
            split="train",
            shard=shard,
            seed=0,
            scenes=scenes,
            captions=sum(counts),
            texts_read=sum(counts) + 1,
            texts_kept=sum(counts),
            rejects={"missing_text": 1},
            repaired=0,
            captions_per_scene=histogram,
            bad_passes=0,
            bad_repeats=0,
            rows_digest="0" * 64,
            files=files,
        )


def _scene(dataset: str, version: str, shard: int, i: int) -> dict[str, object]:
    captions = [
        {"index": j, "role": "human", "text": f"caption {j} of {i} [red]", "repaired": False} for j in range(1 + i % 3)
    ]
    return {
        "dataset": dataset,
        "version": version,
        "scene_key": f"s{shard}-{i}",
        "split": "train",
        "captions": captions,
        "images": [],
        "source_id": f"S{shard}-{i}",
        "source_uri": "in.json",
        "source_row": i,
    }


def _state(row: dict[str, object]) -> dict[str, object]:
    return {**{name: row[name] for name in ("dataset", "version", "scene_key", "split")}, "state": "{}"}


def parquet(
    folder: str, path: str, kind: str, rows: Sequence[dict[str, object]], arrow: pa.Schema | None = None
) -> ShardFile:
    """Publish `rows` under the declared schema of `kind` (or `arrow`) and return the manifest's line for the file."""
    out = io.BytesIO()
    pq.write_table(pa.Table.from_pylist(list(rows), schema=arrow or schema.SCHEMAS[kind]), out)
    record = storage.publish(storage.join(folder, path), out.getvalue())
    return ShardFile(path=path, kind=kind, bytes=record.bytes, sha256=record.sha256, rows=len(rows))


def tar(folder: str, path: str, samples: int) -> ShardFile:
    """Publish something in the place of a tar; the catalog never looks inside."""
    record = storage.publish(storage.join(folder, path), b"tar" * 100)
    return ShardFile(
        path=path, kind="good", bytes=record.bytes, sha256=record.sha256, rows=samples, blocks=[1] * samples
    )


@pytest.fixture
def home(tmp_path: Path) -> Home:
    """An empty HOME with a SQLite catalog that does not exist yet."""
    return Home(url=str(tmp_path / "home"), catalog=str(tmp_path / "home" / "catalog.sqlite"))


@pytest.fixture
def publish(home: Home) -> Publisher:
    """Publishes tiny versions below `home`, without committing them."""
    return Publisher(home)


@pytest.fixture(scope="session")
def publisher() -> type[Publisher]:
    """The same for a HOME that several tests share: `publisher(home)()`."""
    return Publisher
