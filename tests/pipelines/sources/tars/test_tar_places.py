"""What is decided by names of tars and folders is the same from wherever the input is named."""

from __future__ import annotations

import zipfile
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest

from catalog.schema import read_back, scene_key
from infra.errors import InputError
from pipelines.ingest.group import scene_keys
from pipelines.sources.formats.discovery import find_inputs
from pipelines.sources.tars.img2dataset import Img2dataset
from pipelines.sources.tars.tar_places import Tar, placed
from pipelines.sources.tars.webdataset_tars import WebdatasetTars
from tests.pipelines.sources.tar_files import tar_of, write_shard, write_tar

SOURCE = WebdatasetTars()
SAMPLE = [("0.txt", b"a dog")]


def places(*paths: Path, split: str = "") -> list[Tar]:
    """Placed as a job finds them."""
    return placed(find_inputs([str(path) for path in paths], SOURCE.reads)[1], split)


def read(source: Any, *paths: Path) -> list[tuple[str, str]]:
    """(id, split) of all records as a job reads them."""
    survey = source.survey(find_inputs([str(path) for path in paths], source.reads)[1], None)
    rows = [row for piece in survey.pieces for batch in source.read(piece) for row in batch.records.to_pylist()]
    assert rows
    return [(row["source_id"], row["split"]) for row in rows]


@pytest.mark.parametrize(
    ("name", "split"),
    [
        ("in/train-1.tar", "train"),
        ("in/imagenet_val-0001.tar", "val"),
        ("in/train2017-1.tar", "train"),
        ("in/a-TEST_3.tar.gz", "test"),
        ("in/dev.tgz", "val"),
        ("val/1.tar", "val"),
        ("Validation/1.tar", "val"),
        ("test2015/1.tar", "test"),
        ("train/dev-1.tar", "val"),
        # The folder of a split above the direct one, and words of which one is a part, say nothing.
        ("val/part-1/1.tar", "train"),
        ("my-test-crawl/1.tar", "train"),
        ("dev-tools/1.tar", "train"),
        ("in/latest.tar", "train"),
        ("in/trainer-contrail.tar", "train"),
        ("in/testset-1.tar", "train"),
    ],
)
def test_a_split_is_a_word_of_the_tar_else_the_name_of_its_folder(tmp_path: Path, name: str, split: str) -> None:
    path = write_tar(tmp_path / name, SAMPLE)
    other = write_tar(tmp_path / "other.tar", SAMPLE)
    for named in ([path], [path.parent], [tmp_path], [path, other]):
        (tar,) = [tar for tar in places(*named) if tar.url == str(path)]
        assert tar.split == split
    assert {tar.split for tar in places(path, split="all")} == {"all"}


def test_one_tar_has_one_split_one_id_and_one_uri_from_wherever_it_is_named(tmp_path: Path) -> None:
    folder = tmp_path / "in"
    for split in ("train", "val"):
        write_tar(folder / split / "00000.tar", SAMPLE)
    both = [("train/00000.tar#0", "train"), ("val/00000.tar#0", "val")]
    assert read(SOURCE, folder) == both
    assert read(SOURCE, folder / "val") == read(SOURCE, folder / "val" / "00000.tar") == both[1:]
    # The folder decides, so it is in the uri, and by that in the version.
    assert [tar.uri for tar in places(folder / "val")] == ["val/00000.tar"]
    assert [tar.uri for tar in places(folder)] == ["train/00000.tar", "val/00000.tar"]
    assert [tar.uri for tar in places(folder / "val", split="train")] == ["val/00000.tar"]
    write_tar(folder / "val" / "val" / "00000.tar", SAMPLE)
    uris = [tar.uri for tar in places(folder / "val")]
    assert uris == ["val/00000.tar", "val/val/00000.tar"]


@pytest.mark.parametrize("member", ["00000.tar", "val/00000.tar"])
def test_a_tar_in_a_zip_archive_is_the_tar_beside_it(tmp_path: Path, member: str) -> None:
    archive = tmp_path / "val.zip"
    with zipfile.ZipFile(archive, "w") as packed:
        packed.writestr(member, tar_of(SAMPLE))
    write_tar(tmp_path / "val" / "00000.tar", SAMPLE)
    assert read(SOURCE, archive) == read(SOURCE, tmp_path / "val") == [("val/00000.tar#0", "val")]


def test_two_tars_of_one_name_need_ids_of_their_own(tmp_path: Path) -> None:
    for part in ("a", "b"):
        write_tar(tmp_path / part / "00000.tar", SAMPLE)
    with pytest.raises(InputError, match=r"'0' of a/00000\.tar names no picture.*another input is named like this tar"):
        read(SOURCE, tmp_path)
    assert read(SOURCE, tmp_path / "a") == [("00000.tar#0", "train")]
    ids = [b'{"caption": "a dog", "sha256": "%s"}' % (digit * 64) for digit in (b"a", b"b")]
    for part, json_ in zip("ab", ids, strict=True):
        write_tar(tmp_path / part / "00000.tar", [("0.json", json_)])
    assert read(SOURCE, tmp_path) == [("a" * 64, "train"), ("b" * 64, "train")]
    # A sample further on that has none is met when it is read.
    write_tar(tmp_path / "b" / "00000.tar", [("0.json", ids[1]), ("1.txt", b"a cat")])
    with pytest.raises(InputError, match=r"'1' of b/00000\.tar names no picture"):
        read(SOURCE, tmp_path)


def test_img2dataset_is_placed_by_the_same_rules(tmp_path: Path) -> None:
    write_shard(tmp_path / "val")
    assert {split for _, split in read(Img2dataset(), tmp_path / "val")} == {"val"}
    assert read(Img2dataset(), tmp_path / "val") == read(Img2dataset(), tmp_path)


def test_only_a_hashed_key_of_ours_is_read_back_as_it_is() -> None:
    hashed = scene_key("http://a.example/1")
    assert scene_key(read_back(hashed)) == hashed and read_back(hashed) != hashed
    assert scene_key(hashed) != hashed
    for key in ("42", "h", "h-1", hashed[:-1], f"{hashed}0", f"x{hashed}"):
        assert read_back(key) == key
        assert scene_key(f"scene_key:{key}") not in (key, hashed)
    ids = ["42", hashed, read_back(hashed), "A b"]
    assert scene_keys(pa.array(ids, pa.large_string())).to_pylist() == [scene_key(id_) for id_ in ids]


def test_a_name_of_two_splits_is_refused(tmp_path: Path) -> None:
    path = write_tar(tmp_path / "train-val-1.tar", SAMPLE)
    with pytest.raises(InputError, match=r"The name of train-val-1\.tar says train and val"):
        places(path)
    assert places(path, split="train")[0].split == "train"


def test_splits_are_always_said(tmp_path: Path) -> None:
    for name, words in (("a.tar", "train 1"), ("val/0.tar", "train 1, val 1")):
        write_tar(tmp_path / name, SAMPLE)
        inputs = find_inputs([str(tmp_path)], SOURCE.reads)[1]
        (note,) = [note for note in SOURCE.survey(inputs, None).notes if "splits are taken" in note]
        assert f": {words};" in note
        assert not any("splits" in note for note in WebdatasetTars(split="all").survey(inputs, None).notes)
