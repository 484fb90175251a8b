"""`make bench`, the stream: scenes/s of our tars and token cache beside what else reads the same captions.

Usage: bench_stream.py [--scenes N] [--peer-scenes N] [--texts short|long] [--repeats R]. Every contestant runs alone, in
one process, on one thread, once to warm up and R times measured; imports and the conversion into a peer's own format are
not counted. `scenes/s` is the median by the clock, `per CPU second` the best pass by CPU time, which other jobs disturb less.
MosaicML streaming and litData pin packages that fight with ours: install
them into a virtual environment of their own and name its python in GOODVIEWS_PEERS_PYTHON (see PEERS); without it their rows say
so. Data is generated into a temporary folder and removed.
"""

from __future__ import annotations

import argparse
import importlib
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

import numpy as np

HERE = Path(__file__).parent
REPOSITORY = HERE.parents[1]
PEERS = (
    "python -m venv PEERS; a .pth file in it that names our site-packages; PEERS/bin/pip install --no-deps mosaicml-streaming "
    "litdata brotli lightning-utilities python-snappy cramjam zstd tifffile obstore xxhash catalogue"
)
VIEWS = 8
VOCAB = 8_192


def main() -> None:
    """Run all contestants and print two tables."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--scenes", type=int, default=30_000)
    parser.add_argument(
        "--peer-scenes", type=int, default=10_000, help="scenes for the slow peers; their rates are flat"
    )
    parser.add_argument("--texts", choices=("short", "long"), default="short")
    parser.add_argument("--repeats", type=int, default=3)
    args = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="goodviews-bench-") as name:
        folder = Path(name)
        for count in sorted({args.scenes, args.peer_scenes}):
            contest("prepare", folder / str(count), args.texts, count, 1)
        title = f"three {args.texts} captions a scene, one process"
        table(f"Raw captions, {title}", RAW, folder, args, "ours_unverified")
        table(f"Tokens, {VIEWS} views a scene, {title}", TOKENS, folder, args, "ours_cached")


def table(title: str, rows: list[tuple[str, str, bool]], folder: Path, args: Any, ours: str) -> None:
    """One row a contestant; `ours is` compares rates per CPU second."""
    from rich.console import Console
    from rich.table import Table

    results: dict[str, dict[str, Any]] = {}
    for name, _, is_slow in rows:
        count = args.peer_scenes if is_slow else args.scenes
        results[name] = contest(name, folder / str(count), args.texts, count, args.repeats)
    best = max(results[ours]["per_cpu_s"])
    out = Table(title=title)
    for heading in ("contestant", "scenes/s", "per CPU second", "ours is", "views/s per CPU second"):
        out.add_column(heading, justify="left" if heading == "contestant" else "right")
    for name, label, _ in rows:
        found = results[name]
        if "missing" in found:
            out.add_row(label, found["missing"])
            continue
        cpu = max(found["per_cpu_s"])
        views = f"{cpu * VIEWS:,.0f}" if rows is TOKENS else ""
        out.add_row(label, f"{statistics.median(found['per_s']):,.0f}", f"{cpu:,.0f}", f"{best / cpu:.1f} x", views)
    Console(width=140).print(out)


def contest(name: str, folder: Path, texts: str, count: int, repeats: int) -> dict[str, Any]:
    """Run one contestant in a process of its own; a missing peer gives {"missing": why}."""
    python = sys.executable
    if name.split("_")[0] in ("mosaicml", "litdata"):
        python = os.environ.get("GOODVIEWS_PEERS_PYTHON", sys.executable)
    environment = {**os.environ, "PYTHONPATH": str(REPOSITORY), "HF_HUB_OFFLINE": "1"}
    environment |= {
        "OMP_NUM_THREADS": "1",
        "RAYON_NUM_THREADS": "1",
        "TOKENIZERS_PARALLELISM": "false",
        "PYTHONWARNINGS": "ignore",
    }
    print(f"running {name} on {count:,} scenes", file=sys.stderr, flush=True)
    command = [python, __file__, "--contestant", name, str(folder), texts, str(count), str(repeats)]
    run = subprocess.run(command, env=environment, capture_output=True, text=True, check=False, timeout=900)
    lines = [line for line in run.stdout.splitlines() if line.startswith("RESULT ")]
    if run.returncode or not lines:
        raise SystemExit(f"{name} failed with exit code {run.returncode}:\n{run.stderr[-2000:]}")
    result: dict[str, Any] = json.loads(lines[0].removeprefix("RESULT "))
    return result


REPEATS = 3


def timed(run: Callable[[], int], before: Callable[[], None] = lambda: None) -> dict[str, Any]:
    """Rates of REPEATS runs after one to warm up; `run` returns the number of scenes, `before` is not counted."""
    per_s, per_cpu_s = [], []
    for i in range(REPEATS + 1):
        before()
        wall, cpu = time.perf_counter(), time.process_time()
        scenes = run()
        if i:
            per_s.append(scenes / (time.perf_counter() - wall))
            per_cpu_s.append(scenes / (time.process_time() - cpu))
    return {"per_s": per_s, "per_cpu_s": per_cpu_s}


# --- ours ---------------------------------------------------------------------------------------------------------


def prepare(folder: Path, texts: str, count: int) -> dict[str, Any]:
    """Publish the version, train the tokenizer, convert for the peers that are there."""
    from tests.bench import stream_data
    from trainer.data import wordpiece

    stream_data.publish(_home(folder), texts, count)
    wordpiece.corpus(_shards(folder, texts), _home(folder), vocab_size=VOCAB).save(str(folder / "tokenizer"))
    rows = folder / "rows.jsonl"
    with rows.open("w") as file:
        for sample in _webdataset(folder, texts):
            file.write(json.dumps(sample["json"]) + "\n")
    return {"scenes": count}


def _home(folder: Path) -> Any:
    from infra.home import Home

    return Home(url=str(folder), catalog=str(folder / "catalog.sqlite"))


def _shards(folder: Path, texts: str) -> Any:
    from trainer.data.shardset import open_shards

    return open_shards(_home(folder), texts, "bench", "train")


def ours_raw(folder: Path, texts: str, *, verify: bool = True) -> dict[str, Any]:
    """Every tar into Arrow columns, its sha256 checked on the way."""
    from trainer.data.reader import read_tar, view_tar

    shards = _shards(folder, texts)

    def run() -> int:
        tars = (view_tar(shards.folder, shards.manifest(i)) for i in range(len(shards.numbers)))
        return sum(len(part.keys) for tar in tars for part in read_tar(tar, verify=verify))

    return timed(run)


def ours_stream(folder: Path, texts: str, *, is_cold: bool, good_fraction: float = 1.0) -> dict[str, Any]:
    """One epoch of batches of 256 with 2 global and 6 local views, 15 % hidden, without workers."""
    import shutil

    from trainer.data import tokenizer
    from trainer.data.cache import TokenCache
    from trainer.data.plan import PlanConfig, make_plan
    from trainer.data.stream import Stream
    from trainer.data.views import ViewsConfig

    shards, home = _shards(folder, texts), _home(folder)
    words = tokenizer.load(str(folder / "tokenizer"))
    plan = make_plan(PlanConfig(batch_global=256, epochs=1, good_fraction=good_fraction), shards, home)

    def forget() -> None:
        if is_cold:
            shutil.rmtree(folder / "cache" / "tokens", ignore_errors=True)

    def run() -> int:
        stream = Stream(plan, TokenCache(shards, words, home), ViewsConfig())
        return sum(len(batch.scene_hashes) for batch in stream.batches())

    return timed(run, before=forget)


# --- peers --------------------------------------------------------------------------------------------------------


def _webdataset(folder: Path, texts: str) -> Any:
    import webdataset as wds

    tars = sorted(str(p) for p in (folder / "datasets" / texts / "bench/views/good").glob("*.tar"))
    return wds.WebDataset(tars, shardshuffle=False, empty_check=False).decode()


def webdataset_raw(folder: Path, texts: str) -> dict[str, Any]:
    """Stock webdataset with decoding, on the same tars."""
    data = _webdataset(folder, texts)
    return timed(lambda: sum(1 for _ in data))


def parquet_columns(folder: Path, texts: str) -> dict[str, Any]:
    """The bare scan of the scenes parquet, as Arrow columns: the floor of reading."""
    import pyarrow.parquet as pq

    files = sorted((folder / "datasets" / texts / "bench/scenes/train").glob("*.parquet"))
    return timed(
        lambda: sum(pq.read_table(f, columns=["scene_key", "captions"], use_threads=False).num_rows for f in files)
    )


def parquet_objects(folder: Path, texts: str) -> dict[str, Any]:
    """The bare scan with every key and text as a Python string."""
    import pyarrow.parquet as pq

    def run() -> int:
        count = 0
        for file in sorted((folder / "datasets" / texts / "bench/scenes/train").glob("*.parquet")):
            scenes = pq.read_table(file, columns=["scene_key", "captions"], use_threads=False)
            count += len(scenes["scene_key"].to_pylist())
            scenes["captions"].combine_chunks().flatten().field("text").to_pylist()
        return count

    return timed(run)


def _rows(folder: Path) -> Iterator[dict[str, Any]]:
    with (folder / "rows.jsonl").open() as file:
        yield from map(json.loads, file)


def _mosaicml(folder: Path) -> Any:
    """A StreamingDataset over the same captions as MDS shards."""
    _stub_torchvision()
    streaming = importlib.import_module("streaming")

    target = folder / "mds"
    if not target.exists():
        with streaming.MDSWriter(out=str(target), columns={"scene_key": "str", "captions": "json"}) as writer:
            for row in _rows(folder):
                writer.write({"scene_key": row["scene_key"], "captions": row["captions"]})
    return streaming.StreamingDataset(local=str(target), shuffle=False, batch_size=256)


def _litdata(folder: Path) -> Any:
    """A litData StreamingDataset over the same captions, as optimised chunks."""
    litdata = importlib.import_module("litdata")

    target = folder / "lit"
    if not target.exists():
        target.mkdir()
        writer = importlib.import_module("litdata.streaming.writer").BinaryWriter(str(target), chunk_bytes=16 << 20)
        for i, row in enumerate(_rows(folder)):
            writer.add_item(i, {"scene_key": row["scene_key"], "captions": json.dumps(row["captions"])})
        writer.done()
        writer.merge()
    return litdata.StreamingDataset(str(target), shuffle=False)


def _stub_torchvision() -> None:
    """Streaming imports torchvision for pictures; its wheel needs the CUDA build of torch, and captions need neither."""
    import types
    from importlib.machinery import ModuleSpec

    names = ("torchvision", "torchvision.transforms", "torchvision.transforms.functional", "torchvision.datasets")
    modules: dict[str, Any] = {name: types.ModuleType(name) for name in names}
    for name, module in modules.items():
        module.__spec__ = ModuleSpec(name, None)
        sys.modules.setdefault(name, module)
        parent, _, child = name.rpartition(".")
        if parent:
            setattr(modules[parent], child, module)
    modules["torchvision.transforms.functional"].to_tensor = None
    modules["torchvision.datasets"].VisionDataset = object


def peer(open_peer: Callable[[Path], Any], folder: Path, *, views: bool) -> dict[str, Any]:
    """Read a peer's format through, raw or with views; {"missing": why} when it is not installed."""
    try:
        data = open_peer(folder)
    except ImportError as error:
        return {"missing": f"not measured: {error}. {PEERS}"}

    def captions() -> Iterator[list[dict[str, Any]]]:
        for sample in data:
            found = sample["captions"]
            yield json.loads(found) if isinstance(found, str) else found

    return timed(lambda: plain_views(captions(), folder)) if views else timed(lambda: sum(1 for _ in captions()))


def webdataset_views(folder: Path, texts: str) -> dict[str, Any]:
    """Stock webdataset, then tokens and views scene by scene."""
    data = _webdataset(folder, texts)
    return timed(lambda: plain_views((sample["json"]["captions"] for sample in data), folder))


def plain_views(samples: Iterable[list[dict[str, Any]]], folder: Path) -> int:
    """What a loader without a token cache does: draw captions, tokenise them, cut and mask each view in a loop."""
    import tokenizers

    backend = tokenizers.Tokenizer.from_file(str(folder / "tokenizer" / "tokenizer.json"))
    cls, sep, mask = (backend.token_to_id(t) for t in ("[CLS]", "[SEP]", "[MASK]"))
    rng = np.random.default_rng(0)
    count = 0
    for captions in samples:
        drawn = rng.integers(0, len(captions), VIEWS)
        texts = [captions[i]["text"] for i in sorted(set(drawn.tolist()))]
        encoded = backend.encode_batch_fast(texts, add_special_tokens=False)
        ids = dict(zip(sorted(set(drawn.tolist())), (np.array(e.ids) for e in encoded), strict=True))
        for view, caption in enumerate(drawn.tolist()):
            tokens = ids[caption]
            share = rng.uniform(0.5, 1.0) if view < 2 else rng.uniform(0.15, 0.5)
            size = max(1, int(share * len(tokens)))
            start = rng.integers(0, len(tokens) - size + 1)
            span = np.where(rng.random(size) < 0.15, mask, tokens[start : start + size])
            np.concatenate([[cls], span, [sep]])
        count += 1
    return count


RAW = [
    ("ours_unverified", "goodviews: tar offsets, columnar JSON", False),
    ("ours_raw", "goodviews, sha256 checked too (once, when the cache is filled)", False),
    ("webdataset_raw", "webdataset, decoded", True),
    ("mosaicml_raw", "MosaicML streaming (MDS, JSON column)", True),
    ("litdata_raw", "litData (optimised chunks, JSON)", True),
    ("parquet_objects", "bare parquet scan, Python strings", False),
    ("parquet_columns", "bare parquet scan, Arrow columns", False),
]
TOKENS = [
    ("ours_cached", "goodviews, from the token cache, good views", False),
    ("ours_bad", "goodviews, from the token cache, bad views", False),
    ("ours_cold", "goodviews, first epoch: tar, tokens, cache, views", False),
    ("webdataset_views", "webdataset, tokenised, views in a loop", True),
    ("mosaicml_views", "MosaicML streaming, tokenised, views in a loop", True),
    ("litdata_views", "litData, tokenised, views in a loop", True),
]
"(name, label, runs on fewer scenes)"


def contestant(name: str, folder: Path, texts: str, count: int) -> dict[str, Any]:
    """Dispatch by name."""
    contestants: dict[str, Callable[[], dict[str, Any]]] = {
        "prepare": lambda: prepare(folder, texts, count),
        "ours_raw": lambda: ours_raw(folder, texts),
        "ours_unverified": lambda: ours_raw(folder, texts, verify=False),
        "ours_cached": lambda: ours_stream(folder, texts, is_cold=False),
        "ours_bad": lambda: ours_stream(folder, texts, is_cold=False, good_fraction=0.0),
        "ours_cold": lambda: ours_stream(folder, texts, is_cold=True),
        "webdataset_raw": lambda: webdataset_raw(folder, texts),
        "webdataset_views": lambda: webdataset_views(folder, texts),
        "mosaicml_raw": lambda: peer(_mosaicml, folder, views=False),
        "mosaicml_views": lambda: peer(_mosaicml, folder, views=True),
        "litdata_raw": lambda: peer(_litdata, folder, views=False),
        "litdata_views": lambda: peer(_litdata, folder, views=True),
        "parquet_objects": lambda: parquet_objects(folder, texts),
        "parquet_columns": lambda: parquet_columns(folder, texts),
    }
    return contestants[name]()


if __name__ == "__main__":
    if sys.argv[1:2] == ["--contestant"]:
        REPEATS = int(sys.argv[6])
        print("RESULT " + json.dumps(contestant(sys.argv[2], Path(sys.argv[3]), sys.argv[4], int(sys.argv[5]))))
    else:
        main()
