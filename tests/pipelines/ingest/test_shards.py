"""A shard's files are ordinary files with fixed bytes, and its manifest says the truth about them."""

import hashlib
import json
import tarfile
from pathlib import Path
from typing import Any

import duckdb
import numpy as np
import pyarrow as pa
import pyarrow.dataset
import pyarrow.parquet as pq
import pytest
import webdataset as wds

from catalog import schema
from catalog.manifest import Manifest
from infra import seeds, storage
from infra.errors import GoodviewsError, IntegrityError
from pipelines.ingest.clean import CleanConfig
from pipelines.ingest.shards import ShardTask, ViewConfig, parquet_bytes, publish_shard
from pipelines.ingest.tables import Origin
from pipelines.records import Input, Piece
from pipelines.sources.tables.table import Table
from pipelines.sources.toyworld.source import Toyworld

SCENES = 40

# Stock webdataset leaves closing its file to the garbage collector.
pytestmark = pytest.mark.filterwarnings("ignore:Exception ignored in. <_io.FileIO")


def task(folder: Path, **changes: Any) -> ShardTask:
    views = {"good": True, "bad": True, "images": True, "bad_passes": 7, "seed": 3} | changes.pop("views", {})
    source = Toyworld(scenes=SCENES, image_px=16, defects=0.1, val=0, test=0)
    piece = Piece(input=None, start=0, stop=SCENES, scenes_by_split={"train": SCENES})
    values: dict[str, Any] = {
        "origin": Origin(dataset="toy", version="v1", split="train", shard=0),
        "version_url": str(folder),
        "source": source,
        "clean": CleanConfig(),
        "views": ViewConfig(**views),
        "pieces": (piece,),
    }
    return ShardTask(**(values | changes))


@pytest.fixture(scope="module")
def shard(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Manifest]:
    folder = tmp_path_factory.mktemp("version")
    publish_shard(task(folder))
    url = str(folder / schema.manifest_path("train", 0))
    return folder, Manifest.from_json(storage.read_bytes(url), url=url)


def samples(path: Path) -> list[dict[str, Any]]:
    return list(wds.WebDataset(str(path), shardshuffle=False, empty_check=False))


def scenes(folder: Path) -> list[dict[str, Any]]:
    rows: list[dict[str, Any]] = pq.read_table(folder / schema.scenes_path("train", 0)).to_pylist()
    return rows


def test_the_manifest_names_every_file_with_its_size_and_digest(shard: tuple[Path, Manifest]) -> None:
    folder, manifest = shard
    found = {str(p.relative_to(folder)) for p in folder.rglob("*") if p.is_file()}
    assert found == {f.path for f in manifest.files} | {schema.manifest_path("train", 0)}
    for file in manifest.files:
        data = (folder / file.path).read_bytes()
        assert (len(data), hashlib.sha256(data).hexdigest()) == (file.bytes, file.sha256)
    assert {f.kind for f in manifest.files} == {"scenes", "good", "bad", "rejects", "states"}


def test_texts_read_are_texts_kept_plus_rejects(shard: tuple[Path, Manifest]) -> None:
    folder, manifest = shard
    assert manifest.texts_read == SCENES * 5
    assert sum(manifest.rejects.values()) > 0
    assert manifest.texts_read == manifest.texts_kept + sum(manifest.rejects.values())
    assert manifest.captions == sum(len(s["captions"]) for s in scenes(folder)) == manifest.texts_kept
    rejects = pq.read_table(folder / schema.rejects_path(0)).to_pylist()
    assert {r: sum(x["reason"] == r for x in rejects) for r in manifest.rejects} == manifest.rejects


def test_stock_webdataset_reads_the_good_tar(shard: tuple[Path, Manifest]) -> None:
    folder, _manifest = shard
    read = samples(folder / schema.good_path("train", 0))
    expected = scenes(folder)
    assert [s["__key__"] for s in read] == [s["scene_key"] for s in expected]
    for sample, scene in zip(read, expected, strict=True):
        captions = [{k: c[k] for k in ("index", "role", "text")} for c in scene["captions"]]
        assert json.loads(sample["json"]) == {"dataset": "toy", "scene_key": scene["scene_key"], "captions": captions}
        assert hashlib.sha256(sample["jpg"]).hexdigest() == scene["images"][0]["sha256"]


def test_stock_webdataset_reads_each_bad_pass_and_it_holds_every_scene_once(shard: tuple[Path, Manifest]) -> None:
    folder, manifest = shard
    expected = {s["scene_key"]: [c["index"] for c in s["captions"]] for s in scenes(folder)}
    assert manifest.bad_passes == 7
    shown: dict[str, list[int]] = {key: [] for key in expected}
    for bad_pass in range(7):
        read = samples(folder / schema.bad_path("train", 0, bad_pass))
        bodies = [json.loads(s["json"]) for s in read]
        assert [b["scene_key"] for b in bodies] == list(expected)
        for sample, body in zip(read, bodies, strict=True):
            (caption,) = body["captions"]
            assert sample["__key__"] == f"{body['scene_key']}-c{caption['index']:03d}"
            shown[body["scene_key"]].append(caption["index"])
    for key, indices in expected.items():
        # n captions come once each, in the scene's own seeded order, before any comes again.
        n = len(indices)
        hashes = np.repeat(seeds.hash_keys([key]), n)
        places = seeds.permutation_places(hashes, np.array(indices), 3)
        order = [indices[int(i)] for i in np.argsort(places)]
        assert shown[key] == [order[p % n] for p in range(7)]
    assert manifest.bad_repeats == sum(max(0, 7 - len(i)) for i in expected.values())


def test_blocks_of_the_manifest_give_the_offset_of_each_sample(shard: tuple[Path, Manifest]) -> None:
    folder, manifest = shard
    tars = [f for f in manifest.files if f.blocks is not None]
    assert len(tars) == 8
    for file in tars:
        with tarfile.open(folder / file.path) as tar:
            first_members = [
                m.offset for m in tar.getmembers() if m.name.endswith((".jpg", "-c000.json")) or "-c" in m.name
            ]
        assert file.blocks is not None
        assert [0, *(512 * np.cumsum(file.blocks)).tolist()][:-1] == first_members
        assert len(file.blocks) == file.rows


def test_plain_readers_read_the_parquet(shard: tuple[Path, Manifest]) -> None:
    folder, manifest = shard
    path = folder / schema.scenes_path("train", 0)
    assert pq.read_table(folder / "scenes").num_rows == manifest.scenes
    assert pq.read_schema(path).equals(schema.SCENES)
    assert pa.dataset.dataset(folder / "scenes").count_rows() == manifest.scenes
    counted = duckdb.sql(f"SELECT count(*), sum(len(captions)) FROM read_parquet('{path}')").fetchone()
    assert counted == (manifest.scenes, manifest.captions)


def test_a_rerun_publishes_nothing_new_and_a_lost_file_is_made_again(tmp_path: Path) -> None:
    first = publish_shard(task(tmp_path))
    manifest = tmp_path / schema.manifest_path("train", 0)
    before = manifest.stat().st_mtime_ns
    again = publish_shard(task(tmp_path))
    assert (first.was_there, again.was_there) == (False, True)
    assert manifest.stat().st_mtime_ns == before
    lost = tmp_path / schema.good_path("train", 0)
    data = lost.read_bytes()
    lost.unlink()
    assert not publish_shard(task(tmp_path)).was_there
    assert lost.read_bytes() == data


def test_d6_rows_that_a_reader_loses_are_an_error(tmp_path: Path) -> None:
    path = tmp_path / "t.parquet"
    pq.write_table(pa.table({"caption": [f"text {i}" for i in range(40)]}), path)
    source, given = Table(text="caption"), Input(uri="t.parquet", url=str(path))
    pieces = tuple(source.survey([given], None).pieces)
    pq.write_table(pa.table({"caption": [f"text {i}" for i in range(39)]}), path)
    with pytest.raises(GoodviewsError, match="39"):
        publish_shard(task(tmp_path / "v", source=source, pieces=pieces))
    assert not (tmp_path / "v" / "manifests").exists()


def test_records_of_another_split_are_an_error(tmp_path: Path) -> None:
    wrong = Origin(dataset="toy", version="v1", split="val", shard=0)
    with pytest.raises(IntegrityError, match="split 'train'"):
        publish_shard(task(tmp_path, origin=wrong))


def test_c6_no_file_without_rows_is_published(tmp_path: Path) -> None:
    publish_shard(task(tmp_path, views={"good": False, "bad": False}, clean=CleanConfig(repeats=False)))
    manifest = Manifest.from_json((tmp_path / schema.manifest_path("train", 0)).read_bytes(), url="m")
    assert all(f.rows > 0 for f in manifest.files)
    assert not (tmp_path / "views").exists()


def test_views_hold_no_pictures_when_none_are_asked_for(tmp_path: Path) -> None:
    publish_shard(task(tmp_path, views={"images": False}))
    assert {
        tuple(sorted(k for k in s if not k.startswith("__"))) for s in samples(tmp_path / schema.good_path("train", 0))
    } == {("json",)}


def test_c2_row_groups_are_cut_by_bytes_of_text() -> None:
    # 100 scenes of about 2 MB of text each: one row group would hold 200 MB.
    long = "x" * (2 << 20)
    captions = [[{"index": 0, "role": "human", "text": long, "repaired": False}]] * 100
    columns = {"captions": captions, "images": [[]] * 100, "source_row": list(range(100))}
    for name in ("dataset", "version", "scene_key", "split", "source_id", "source_uri"):
        columns[name] = ["a"] * 100
    table = pa.Table.from_pydict({n: columns[n] for n in schema.SCENES.names}, schema.SCENES)
    file = pq.ParquetFile(pa.BufferReader(parquet_bytes(table)))
    sizes = [file.metadata.row_group(i).total_byte_size for i in range(file.num_row_groups)]
    assert file.num_row_groups >= 4
    assert file.metadata.num_rows == 100
    assert max(file.metadata.row_group(i).num_rows for i in range(file.num_row_groups)) * (2 << 20) <= 65 << 20
    assert len(sizes) == file.num_row_groups


def test_c1_texts_of_a_shard_may_pass_two_gigabytes_of_offsets() -> None:
    # large_string everywhere: offsets are 64-bit, so concatenating never overflows (ray#29492).
    kinds = [
        schema.CAPTION.field("text").type,
        schema.SCENES.field("scene_key").type,
        schema.REJECTS.field("text").type,
    ]
    assert kinds == [pa.large_string()] * 3
    assert pa.types.is_large_list(schema.SCENES.field("captions").type)
