"""Comparing two datasets spills: four times the captions under one small limit, the same peak of memory."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest

from catalog import schema
from catalog.manifest import JobRecord, Manifest, ShardFile
from catalog.overlap.comparison import compare
from catalog.versions.commit import commit_version
from infra import storage
from infra.home import Home, resolve
from infra.progress import peak_rss_bytes
from pipelines.ingest.shards import parquet_bytes

REPOSITORY = Path(__file__).parents[2]
VERSION = "0123456789abcdef"
MEMORY_LIMIT = "64MB"


def put_captions(home: Home, dataset: str, texts: list[str]) -> None:
    """Commit a dataset of one shard in which every text is a scene of its own."""
    n, folder = len(texts), home.datasets(dataset, VERSION)
    keys = pa.array([f"s{i}" for i in range(n)], pa.large_string())

    def constant(value: str) -> pa.Array:
        return pa.repeat(pa.scalar(value, pa.large_string()), n)

    kind = schema.SCENES.field("captions").type
    captions = pa.StructArray.from_arrays(
        [pa.array(np.zeros(n, np.int64)), constant("human"), pa.array(texts, pa.large_string()), pa.array([False] * n)],
        fields=list(kind.value_type),
    )
    images = schema.SCENES.field("images").type
    columns = [
        constant(dataset),
        constant(VERSION),
        keys,
        constant("train"),
        pa.LargeListArray.from_arrays(pa.array(np.arange(n + 1)), captions, type=kind),
        pa.LargeListArray.from_arrays(
            pa.array(np.zeros(n + 1, np.int64)), pa.array([], images.value_type), type=images
        ),
        keys,
        constant("in.csv"),
        pa.array(np.arange(n)),
    ]
    data = parquet_bytes(pa.Table.from_arrays(columns, schema=schema.SCENES))
    path = schema.scenes_path("train", 0)
    written = storage.publish(storage.join(folder, path), [data])
    file = ShardFile(path=path, kind="scenes", bytes=written.bytes, sha256=written.sha256, rows=n)
    totals: dict[str, Any] = {"scenes": n, "captions": n, "texts_read": n, "texts_kept": n}
    manifest = Manifest(
        dataset=dataset,
        version=VERSION,
        split="train",
        shard=0,
        seed=0,
        rejects={},
        repaired=0,
        captions_per_scene={"1": n},
        bad_passes=0,
        bad_repeats=0,
        rows_digest="0" * 64,
        files=[file],
        **totals,
    )
    storage.publish(storage.join(folder, schema.manifest_path("train", 0)), manifest.to_json())
    job = JobRecord(
        dataset=dataset,
        version=VERSION,
        content={"source": "table"},
        inputs=[],
        shards=["train-00000"],
        rejects={},
        **totals,
    )
    storage.publish(storage.join(folder, schema.JOB_PATH), job.to_json())
    commit_version(home, dataset, VERSION)


def captions(seed: int, n: int) -> list[str]:
    """Captions of eleven words; two of them are equal only by a chance of 4000^-11."""
    words = [f"word{i}" for i in range(4000)]
    return [
        " ".join([words[w] for w in row]) for row in np.random.default_rng(seed).integers(0, 4000, (n, 11)).tolist()
    ]


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Home:
    made = resolve(str(tmp_path_factory.mktemp("captions")))
    both = captions(0, 125_000)
    for side, seed in (("left", 1), ("right", 2)):
        own = captions(seed, 125_000)
        put_captions(made, f"large-{side}", both + own)
        put_captions(made, f"small-{side}", both[:31_250] + own[:31_250])
    return made


def peak(home: Home, size: str) -> int:
    """Peak RSS (KiB) of a process that compares the two datasets of one size."""
    done = subprocess.run(
        [sys.executable, __file__, home.url, size],
        env={**os.environ, "PYTHONPATH": str(REPOSITORY)},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    shared, kib = map(int, done.stdout.split())
    assert shared == {"small": 31_250, "large": 125_000}[size]
    return kib


def test_the_peak_of_a_comparison_does_not_grow_with_the_captions(home: Home) -> None:
    small, large = peak(home, "small"), peak(home, "large")
    assert large < 1.25 * small, f"{small} KiB for 62,500 captions a side, {large} KiB for 250,000"


if __name__ == "__main__":
    found = compare(resolve(sys.argv[1]), f"{sys.argv[2]}-left", f"{sys.argv[2]}-right", memory_limit=MEMORY_LIMIT)
    shared = next(kind.shared for kind in found.kinds if kind.kind == "caption")
    print(shared, peak_rss_bytes() >> 10)
