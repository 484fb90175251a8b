"""What is published is read by the tools of others, without this project: every text of every scene, from parquet and tars."""

from __future__ import annotations

import gc
import io
import json
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import duckdb
import pandas as pd
import polars as pl
import pytest

import goodviews as gv
from infra.session import Workers

Texts = dict[str, list[tuple[int, str, str]]]
"Scene key -> (index, role, text) of each caption, by index."

PASSES = 5
"Of the toy world's bad views."


@pytest.fixture(scope="module")
def version(home: str) -> Path:
    """Folder of the published version."""
    (row,) = gv.open(home).datasets.to_pylist()
    return Path(home) / "datasets" / "toyworld" / str(row["version"])


@pytest.fixture(scope="module")
def texts(home: str) -> Texts:
    """Every caption of the split `train`, as the catalog holds them."""
    rows = gv.open(home).sql("SELECT scene_key, index, role, text FROM captions WHERE split = 'train' ORDER BY ALL")
    found: Texts = {}
    for row in rows.to_pylist():
        found.setdefault(row["scene_key"], []).append((row["index"], row["role"], row["text"]))
    assert len(found) == 39
    assert sum(map(len, found.values())) > 180
    return found


def of_rows(rows: Iterable[Mapping[str, Any]]) -> Texts:
    """The texts of scenes; each stands once."""
    found: Texts = {}
    for row in rows:
        assert row["scene_key"] not in found
        found[row["scene_key"]] = sorted((c["index"], c["role"], c["text"]) for c in row["captions"])
    return found


def parquet(version: Path) -> list[str]:
    """Scenes of `train`, a file a shard."""
    return sorted(map(str, (version / "scenes" / "train").glob("*.parquet")))


def tars(version: Path, kind: str = "good") -> list[str]:
    """Tars of `train`, a file a shard (of one pass)."""
    found = sorted(map(str, (version / "views" / kind).glob("train-*.tar")))
    assert len(found) == 3
    return found


def as_json(value: Any) -> Any:
    """The JSON member of a sample, decoded where the reader did not."""
    return json.loads(value) if isinstance(value, (bytes, str)) else value


def test_hugging_face_datasets_reads_parquet(version: Path, texts: Texts, tmp_path: Path) -> None:
    from datasets import load_dataset

    found = load_dataset("parquet", data_files=parquet(version), split="train", cache_dir=str(tmp_path))
    assert of_rows(found) == texts


@pytest.mark.parametrize("streaming", [False, True])
def test_hugging_face_datasets_reads_the_tars(version: Path, texts: Texts, tmp_path: Path, streaming: bool) -> None:
    from datasets import load_dataset

    found = load_dataset(
        "webdataset", data_files=tars(version), split="train", cache_dir=str(tmp_path), streaming=streaming
    )
    samples = list(found)
    assert of_rows(sample["json"] for sample in samples) == texts
    assert {sample["__key__"] for sample in samples} == set(texts)
    assert {sample["jpg"].size for sample in samples} == {(16, 16)}


def test_hugging_face_datasets_reads_every_pass_of_the_bad_tars(version: Path, texts: Texts, tmp_path: Path) -> None:
    from datasets import load_dataset

    shown: set[tuple[str, int, str, str]] = set()
    for number in range(PASSES):
        files = tars(version, f"bad/pass-{number:02d}")
        samples = list(load_dataset("webdataset", data_files=files, split="train", streaming=True))
        assert len(samples) == len(texts)
        for sample in samples:
            (caption,) = sample["json"]["captions"]
            shown.add((sample["json"]["scene_key"], caption["index"], caption["role"], caption["text"]))
    assert shown == {(key, *caption) for key, captions in texts.items() for caption in captions}


# Ray Data sets its own deprecated settings.
@pytest.mark.filterwarnings("ignore:.* is deprecated:DeprecationWarning:ray", "ignore:.target_shuffle_max_block_size.")
def test_ray_data_reads_parquet_and_tars(version: Path, texts: Texts, ray_workers: Workers) -> None:
    import ray.data

    ray.data.DataContext.get_current().enable_progress_bars = False
    assert of_rows(ray.data.read_parquet(parquet(version)).take_all()) == texts
    samples = ray.data.read_webdataset(tars(version), decoder=None).take_all()
    assert of_rows(as_json(sample["json"]) for sample in samples) == texts


def test_pandas_reads_parquet(version: Path, texts: Texts) -> None:
    frame = pd.concat([pd.read_parquet(path) for path in parquet(version)])
    assert of_rows(frame.to_dict("records")) == texts


def test_polars_reads_parquet(version: Path, texts: Texts) -> None:
    frame = pl.scan_parquet(parquet(version)).collect()
    assert of_rows(frame.to_dicts()) == texts
    captions = frame.explode("captions").unnest("captions")
    assert captions.height == sum(map(len, texts.values()))


def test_plain_duckdb_reads_parquet(version: Path, texts: Texts) -> None:
    pattern = str(version / "scenes" / "train" / "*.parquet")
    rows = duckdb.connect().execute("SELECT scene_key, captions FROM read_parquet(?)", [pattern]).fetchall()
    assert of_rows({"scene_key": key, "captions": captions} for key, captions in rows) == texts


# webdataset leaves the last file of a loop to the garbage collector.
@pytest.mark.filterwarnings("ignore:unclosed file:ResourceWarning")
def test_webdataset_reads_the_tars(version: Path, texts: Texts) -> None:
    import webdataset
    from PIL import Image

    samples = list(webdataset.WebDataset(tars(version), shardshuffle=False))
    gc.collect()
    assert of_rows(as_json(sample["json"]) for sample in samples) == texts
    assert {Image.open(io.BytesIO(sample["jpg"])).size for sample in samples} == {(16, 16)}
