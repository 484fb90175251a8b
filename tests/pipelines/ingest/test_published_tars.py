"""View tars as others read them: one rule for keys, nothing short, nothing inferred."""

import json
import re
import tarfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import webdataset as wds

from catalog import schema
from catalog.versions.audit import verify
from infra import storage
from infra.home import resolve
from infra.session import Workers, open_workers
from pipelines.ingest.commands import build_request
from pipelines.ingest.job import ingest
from pipelines.ingest.tars import tar

# Stock webdataset leaves closing its file to the garbage collector.
pytestmark = pytest.mark.filterwarnings("ignore:Exception ignored in. <_io.FileIO")

IDS = [
    "Track 2.0.mp3",
    "22.05",
    "p/22.0/1.1",
    "train.v1/0001",
    "train.v1/0002",
    "__meta__",
    "x" * 200,
    "UPPER",
    "plain-1",
]


def write_home(folder: Path, captions: list[Any], ids: list[str]) -> Path:
    source = folder / "in.parquet"
    pq.write_table(pa.table({"caption": captions, "id": ids}), source)
    request = build_request("table", [str(source)], "odd", None, ["source.text=caption", "source.id=id"], 0.9)
    with open_workers(address=None, num_cpus=0) as workers:
        outcome = ingest(request, resolve(str(folder / "home")), workers)
    return Path(outcome.url)


@pytest.fixture(scope="module")
def version(tmp_path_factory: pytest.TempPathFactory) -> Path:
    texts = [f"caption {i} of something" for i in range(len(IDS) * 2)]
    return write_home(tmp_path_factory.mktemp("odd"), texts, IDS * 2)


def members(path: Path) -> list[str]:
    with tarfile.open(path) as file:
        return file.getnames()


def tars(version: Path) -> list[Path]:
    found = sorted(version.rglob("*.tar"))
    assert len(found) == 6
    return found


def test_b1_b2_b3_every_way_to_split_a_name_gives_the_same_key(version: Path) -> None:
    for path in tars(version):
        for name in members(path):
            assert re.fullmatch(r"[a-z0-9][a-z0-9_-]{0,70}\.json", name)
            # First dot of the base name (webdataset), first dot of the path, last dot (both have been HF's rule).
            assert name.partition(".")[0] == name.rpartition(".")[0]


def test_b1_b11_ids_with_dots_or_of_any_length_keep_their_scenes_apart(version: Path) -> None:
    scenes = pq.read_table(version / schema.scenes_path("train", 0)).to_pylist()
    assert sorted(s["source_id"] for s in scenes) == sorted(IDS)
    assert len({s["scene_key"] for s in scenes}) == len(IDS)
    good = list(wds.WebDataset(str(version / schema.good_path("train", 0)), shardshuffle=False))
    assert [s["__key__"] for s in good] == [s["scene_key"] for s in scenes]


def test_b5_b8_members_of_a_sample_are_adjacent_and_no_name_stands_twice(version: Path) -> None:
    for path in tars(version):
        names = members(path)
        assert len(names) == len(set(names)) == len(IDS)
        assert names == sorted(names)


def test_b9_a_truncated_tar_is_found_by_verify(tmp_path: Path) -> None:
    version = write_home(tmp_path, ["one text", "two texts"], ["a", "b"])
    assert verify(resolve(str(tmp_path / "home"))).problems == []
    path = version / schema.good_path("train", 0)
    data = path.read_bytes()
    path.write_bytes(data[: len(data) * 9 // 10])
    problems = verify(resolve(str(tmp_path / "home"))).problems
    assert len(problems) == 1
    assert "good/train-00000.tar" in str(problems[0])


def test_b14_a_first_scene_without_a_value_decides_no_type(tmp_path: Path) -> None:
    version = write_home(tmp_path, [None, "a text", "b text"], ["a", "b", "c"])
    assert pq.read_schema(version / schema.scenes_path("train", 0)).equals(schema.SCENES)
    assert pq.read_schema(version / schema.rejects_path(0)).equals(schema.REJECTS)


def test_b13_a_tar_ends_in_zero_blocks_and_yields_no_empty_sample(version: Path) -> None:
    for path in tars(version):
        assert path.read_bytes()[-1024:] == bytes(1024)
        samples = list(wds.WebDataset(str(path), shardshuffle=False))
        assert len(samples) == len(IDS)
        assert all(json.loads(s["json"])["captions"] for s in samples)


def test_b16_a_writer_that_fails_leaves_no_shorter_tar(tmp_path: Path) -> None:
    whole = tar(pa.array(["a.json"] * 3, pa.large_string()), pa.array([b"{}"] * 3, pa.large_binary()))

    def parts() -> Iterator[bytes]:
        yield bytes(whole.parts[0])[:512]
        raise RuntimeError("the writer broke")

    with pytest.raises(RuntimeError, match="the writer broke"):
        storage.publish(str(tmp_path / "t.tar"), parts())
    assert list(tmp_path.iterdir()) == []


# Ray Data warns of its own old options when it makes its context.
@pytest.mark.filterwarnings("ignore:.*deprecated")
def test_b2_c15_c16_ray_reads_what_two_workers_wrote_side_by_side(tmp_path: Path, ray_workers: Workers) -> None:
    """Many shards in one new folder, two writers: every row is there, and Ray's own webdataset reader agrees."""
    import ray

    source = tmp_path / "in.parquet"
    pq.write_table(pa.table({"caption": [f"caption number {i}" for i in range(60)]}), source)
    request = build_request("table", [str(source)], "many", None, ["source.text=caption", "scenes_per_shard=6"], 0.2)
    outcome = ingest(request, resolve(str(tmp_path / "home")), ray_workers)
    assert outcome.shards == 10
    paths = [str(p) for p in sorted((Path(outcome.url) / "views" / "good").iterdir())]
    context = ray.data.DataContext.get_current()
    context.enable_progress_bars = False
    rows = ray.data.read_webdataset(paths).take_all()
    stock = [s for path in paths for s in wds.WebDataset(path, shardshuffle=False)]
    assert sorted(r["__key__"] for r in rows) == sorted(s["__key__"] for s in stock)
    assert len(stock) == 60
