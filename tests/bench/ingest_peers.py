"""The contestants of the ingestion benchmark; each is run alone in a process of its own by `bench_ingest.py`.

All but the scans write the same things: scenes as parquet, one good tar sample a scene, three passes of bad tars. The
peers do no cleaning to speak of (strip only), no manifest, no digest, no rejects and no catalog: they are ahead there.
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

COLUMNS = ["url", "org_caption", "re_caption", "sha256"]
ROLES = {"org_caption": "alt", "re_caption": "recap"}
SHARD = 10_000
PASSES = 3


def ours(data: Path, out: Path, cpus: int) -> dict[str, Any]:
    """`goodviews ingest recap-datacomp`, from the parquet files to the committed catalog."""
    from infra.home import resolve
    from infra.session import open_workers
    from pipelines.ingest.commands import build_request
    from pipelines.ingest.job import ingest

    request = build_request("recap-datacomp", [str(data)], "recap", None, [], 0.2)
    with open_workers(address=None, num_cpus=cpus) as workers:
        list(workers.map(_warm, [0] * cpus))  # the first task of a worker imports pyarrow
        started = time.perf_counter()
        outcome = ingest(request, resolve(str(out)), workers)
        seconds = time.perf_counter() - started
    return {"scenes": outcome.scenes, "seconds": seconds, "worker_rss": outcome.peak_rss_bytes}


def _warm(_: int) -> int:
    import pipelines.ingest.shards  # noqa: F401

    return 0


def _scene_sample(sha: str, rows: list[dict[str, Any]]) -> dict[str, Any]:
    captions = [
        {"index": i, "role": role, "text": (row[name] or "").strip()}
        for i, (row, (name, role)) in enumerate((row, item) for row in rows for item in ROLES.items())
    ]
    return {"dataset": "recap", "scene_key": sha, "captions": captions, "images": [r["url"] for r in rows]}


def plain_loop(data: Path, out: Path, cpus: int) -> dict[str, Any]:
    """pyarrow, a dict for the groups, and stock `webdataset.TarWriter`, in one process."""
    import pyarrow as pa
    import pyarrow.parquet as pq
    import webdataset as wds

    started = time.perf_counter()
    groups: dict[str, list[dict[str, Any]]] = {}
    for path in sorted(data.glob("*.parquet")):
        for batch in pq.ParquetFile(path).iter_batches(columns=COLUMNS):
            for row in batch.to_pylist():
                groups.setdefault(row["sha256"], []).append(row)
    keys = sorted(groups)
    for folder in ("scenes", "good", *(f"bad-{p}" for p in range(PASSES))):
        (out / folder).mkdir(parents=True, exist_ok=True)
    for shard, first in enumerate(range(0, len(keys), SHARD)):
        scenes = [_scene_sample(key, groups[key]) for key in keys[first : first + SHARD]]
        pq.write_table(pa.Table.from_pylist(scenes), out / f"scenes/{shard:05d}.parquet")
        with wds.TarWriter(str(out / f"good/{shard:05d}.tar"), mtime=0) as writer:
            for scene in scenes:
                sample = {k: scene[k] for k in ("dataset", "scene_key", "captions")}
                writer.write({"__key__": scene["scene_key"], "json": sample})
        for bad_pass in range(PASSES):
            with wds.TarWriter(str(out / f"bad-{bad_pass}/{shard:05d}.tar"), mtime=0) as writer:
                for scene in scenes:
                    writer.write(_bad_sample(scene, bad_pass))
    return {"scenes": len(keys), "seconds": time.perf_counter() - started}


def _bad_sample(scene: dict[str, Any], bad_pass: int) -> dict[str, Any]:
    caption = scene["captions"][bad_pass % len(scene["captions"])]
    sample = {"dataset": scene["dataset"], "scene_key": scene["scene_key"], "captions": [caption]}
    return {"__key__": f"{scene['scene_key']}-c{caption['index']:03d}", "json": sample}


def ray_data(data: Path, out: Path, cpus: int) -> dict[str, Any]:
    """Ray Data: read_parquet, groupby, write_parquet, write_webdataset."""
    import logging

    import pandas as pd
    import ray

    ray.init(num_cpus=cpus, include_dashboard=False, logging_level=logging.ERROR, log_to_driver=False)
    context = ray.data.DataContext.get_current()
    context.enable_progress_bars = False
    context.print_on_execution_start = False
    logging.getLogger("ray.data").setLevel(logging.ERROR)

    def scene(group: pd.DataFrame) -> pd.DataFrame:
        rows = group.to_dict("records")
        sample = _scene_sample(rows[0]["sha256"], rows)
        return pd.DataFrame({"scene_key": [sample["scene_key"]], "json": [json.dumps(sample)]})

    def good(row: dict[str, Any]) -> dict[str, Any]:
        sample = json.loads(row["json"])
        del sample["images"]
        return {"__key__": row["scene_key"], "json": sample}

    def bad(row: dict[str, Any]) -> list[dict[str, Any]]:
        sample = json.loads(row["json"])
        return [_bad_sample(sample, bad_pass) for bad_pass in range(PASSES)]

    started = time.perf_counter()
    scenes = (
        ray.data.read_parquet(str(data), columns=COLUMNS).groupby("sha256").map_groups(scene, batch_format="pandas")
    )
    scenes = scenes.materialize()
    scenes.write_parquet(str(out / "scenes"))
    scenes.map(good).write_webdataset(str(out / "good"))
    scenes.flat_map(bad).write_webdataset(str(out / "bad"))
    seconds = time.perf_counter() - started
    return {"scenes": scenes.count(), "seconds": seconds}


def _files(data: Path) -> Iterator[Any]:
    import pyarrow.parquet as pq

    for path in sorted(data.glob("*.parquet")):
        yield pq.ParquetFile(path)


def scan_objects(data: Path, out: Path, cpus: int) -> dict[str, Any]:
    """The bare scan of the same columns, as Python objects."""
    started = time.perf_counter()
    rows = sum(len(batch.to_pylist()) for file in _files(data) for batch in file.iter_batches(columns=COLUMNS))
    return {"scenes": rows, "seconds": time.perf_counter() - started}


def scan_columns(data: Path, out: Path, cpus: int) -> dict[str, Any]:
    """The bare scan of the same columns, as Arrow columns."""
    started = time.perf_counter()
    rows = sum(batch.num_rows for file in _files(data) for batch in file.iter_batches(columns=COLUMNS))
    return {"scenes": rows, "seconds": time.perf_counter() - started}


CONTESTANTS: dict[str, Callable[[Path, Path, int], dict[str, Any]]] = {
    "ours": ours,
    "plain_loop": plain_loop,
    "ray_data": ray_data,
    "scan_objects": scan_objects,
    "scan_columns": scan_columns,
}

if __name__ == "__main__":
    name, data_folder, out_folder, n_cpus = sys.argv[1:5]
    result = CONTESTANTS[name](Path(data_folder), Path(out_folder), int(n_cpus))
    print("RESULT " + json.dumps(result), flush=True)
