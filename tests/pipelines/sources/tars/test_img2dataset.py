from __future__ import annotations

import datetime
import decimal
import json
import re
from collections import Counter
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from infra.errors import ConfigError, GoodviewsError, InputError
from pipelines.ingest import tables
from pipelines.ingest.clean import CleanConfig
from pipelines.ingest.group import group, merge
from pipelines.records import Input
from pipelines.sources.formats import tar_samples
from pipelines.sources.formats.discovery import find_inputs
from pipelines.sources.tars.img2dataset import Img2dataset
from tests.pipelines.sources.tar_files import (
    FETCHED,
    METADATA,
    files,
    metadata,
    picture,
    write_img2dataset,
    write_shard,
    write_stats,
    write_tar,
)

SOURCE = Img2dataset()


def test_rows_are_in_the_order_of_keys_whatever_came_first(read_whole: Any, tmp_path: Path) -> None:
    wholes = [
        read_whole(SOURCE, *files(write_shard(tmp_path / name, order=order)))
        for name, order in (("a", [0, 1, 2, 3, 4, 5]), ("b", [5, 2, 0, 4, 1, 3]))
    ]
    assert wholes[0].records == wholes[1].records and wholes[0].texts == wholes[1].texts
    assert [r["source_row"] for r in wholes[0].records] == [0, 1, 2, 3, 4, 5]
    assert [t["text"] for t in wholes[0].texts] == [
        b"red boots, size 38",
        b"Boots",
        b"a hill in fog",
        b"gone for good",
        b"",
        b"too slow",
    ]
    assert {t["role"] for t in wholes[0].texts} == {"alt"}


def test_a3_rows_of_one_picture_are_one_scene_named_by_its_hash(read_whole: Any, tmp_path: Path) -> None:
    whole = read_whole(SOURCE, *files(write_shard(tmp_path)))
    rows = metadata(FETCHED)
    assert whole.ids == [row["sha256"] or row["url"] for row in rows]
    assert whole.ids[0] == whole.ids[1]
    assert [r["image"] for r in whole.records[:3]] == [picture(3), picture(3), picture(90)]
    # What is joined on is the hash of what was fetched, not of what was encoded again.
    assert whole.records[0]["image_sha256"] == rows[0]["sha256"] and whole.records[0]["image_uri"] == rows[0]["url"]
    for option in ("key", "__key__"):
        with pytest.raises(ConfigError, match="number of a row in one img2dataset download"):
            Img2dataset(id=option)


def test_a3_another_download_of_one_list_gives_the_same_scenes(read_whole: Any, tmp_path: Path) -> None:
    """The keys differ with the number of rows a shard; a list that is cut elsewhere, and comes in another order, joins all the same."""
    rows = [{**row, "url": f"https://pictures.example/{n}"} for n, row in enumerate(FETCHED)]
    one = read_whole(SOURCE, *files(write_shard(tmp_path / "10k", rows)))
    halves = [*files(write_shard(tmp_path / "5k", rows[:3])), *files(write_shard(tmp_path / "5k", rows[3:], shard=1))]
    two = read_whole(SOURCE, *halves)
    assert one.ids == two.ids
    assert [(t["text"], t["broken"]) for t in one.texts] == [(t["text"], t["broken"]) for t in two.texts]


def test_captions_of_pictures_that_were_not_fetched_are_rejects(read_whole: Any, tmp_path: Path) -> None:
    whole = read_whole(SOURCE, *files(write_shard(tmp_path)))
    assert [(t["text"], t["broken"]) for t in whole.texts if t["broken"]] == [
        (b"gone for good", "missing_image: failed_to_download: HTTP Error 404: Not Found"),
        (b"too slow", "missing_image: failed_to_download: timed out"),
    ]
    assert any("2 of 6 rows have no picture (failed_to_download 2)" in note for note in whole.survey.notes)
    assert sum(piece.scenes_by_split["train"] for piece in whole.survey.pieces) == 6


def test_they_can_be_kept_or_skipped(read_whole: Any, tmp_path: Path) -> None:
    paths = files(write_shard(tmp_path))
    kept = read_whole(Img2dataset(failed="keep"), *paths)
    assert len(kept.texts) == 6 and all(text["broken"] is None for text in kept.texts)
    assert kept.records[3]["image_uri"] == "https://pictures.example/0/3.jpg" and kept.records[3]["image"] is None
    skipped = read_whole(Img2dataset(failed="skip"), *paths)
    assert [r["source_row"] for r in skipped.records] == [0, 1, 2, 4] and len(skipped.texts) == 4
    assert any("their captions are not read" in note for note in skipped.survey.notes)
    assert sum(piece.scenes_by_split["train"] for piece in skipped.survey.pieces) == 4
    with pytest.raises(ConfigError, match=r"source\.failed='drop' is not one of reject, keep, skip"):
        Img2dataset(failed="drop")


def test_pieces_and_limits_read_the_same_records(
    read_whole: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = write_img2dataset(tmp_path)
    paths = sorted(folder.iterdir())
    whole = read_whole(SOURCE, *paths)
    assert len(whole.survey.pieces) == 2 and len(whole.records) == 18
    monkeypatch.setattr(tar_samples, "PIECE_BYTES", 4_096)
    parts = read_whole(SOURCE, *paths)
    assert len(parts.survey.pieces) > 4
    assert (parts.records, parts.texts) == (whole.records, whole.texts)
    for limit in (1, 3, 4, 6, 7, 18, 19):
        assert read_whole(SOURCE, *paths, limit=limit).records == whole.records[:limit]


def test_a_tar_alone_is_read_and_says_what_is_unknown(read_whole: Any, tmp_path: Path) -> None:
    tar, parquet, stats = files(write_shard(tmp_path))
    whole = read_whole(SOURCE, tar, parquet, stats)
    parquet.unlink()
    alone = read_whole(SOURCE, tar)
    assert alone.records == [r for r in whole.records if r["image"]]
    assert any("1 of 1 tars come without their parquet" in note for note in alone.survey.notes)
    assert any("no stats" in note for note in alone.survey.notes)
    assert read_whole(SOURCE, tar, stats).records == alone.records


def test_parquet_that_carries_the_pictures(read_whole: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    rows = metadata(FETCHED)
    for row, fetched in zip(rows, FETCHED, strict=True):
        row["jpg"] = None if "error" in fetched else picture(fetched["shade"])
        row["txt"] = None if "error" in fetched else row["caption"]
    path = tmp_path / "00000.parquet"
    schema = METADATA.append(pa.field("jpg", pa.binary())).append(pa.field("txt", pa.string()))
    pq.write_table(pa.Table.from_pylist(rows[::-1], schema=schema), path, row_group_size=2)
    write_stats(tmp_path / "00000_stats.json", rows)
    whole = read_whole(SOURCE, path, tmp_path / "00000_stats.json")
    assert whole.ids == [row["sha256"] or row["url"] for row in rows[::-1]]
    assert [r["image"] for r in whole.records[3:]] == [picture(90), picture(3), picture(3)]
    assert [t["text"] for t in whole.texts] == [None, None, None, b"a hill in fog", b"Boots", b"red boots, size 38"]
    assert [t["broken"] is not None for t in whole.texts] == [True, False, True, False, False, False]
    monkeypatch.setattr(tar_samples, "PIECE_BYTES", 3_000)
    parts = read_whole(SOURCE, path)
    assert len(parts.survey.pieces) > 1 and parts.records == whole.records
    captions = read_whole(Img2dataset(text="caption:alt"), path)
    assert [t["text"] for t in captions.texts][2] == b"gone for good"


def test_texts_may_be_several_fields(read_whole: Any, tmp_path: Path) -> None:
    row = metadata(FETCHED[:1])[0] | {"re_caption": "a pair of boots"}
    tar = write_tar(tmp_path / "00000.tar", [(f"{row['key']}.json", json.dumps(row).encode())])
    whole = read_whole(Img2dataset(text="caption:alt,re_caption:recap"), tar)
    assert [(t["role"], t["text"]) for t in whole.texts] == [
        ("alt", b"red boots, size 38"),
        ("recap", b"a pair of boots"),
    ]


def test_samples_whose_json_was_not_written_are_named_by_their_place(read_whole: Any, tmp_path: Path) -> None:
    """A12: with `--disable_all_reencoding` the json may be missing and the text empty (img2dataset#344)."""
    tar = write_tar(
        tmp_path / "00000.tar", [("000000000.jpg", picture(1)), ("000000001.jpg", picture(2)), ("000000001.txt", b"b")]
    )
    whole = read_whole(SOURCE, tar)
    assert whole.ids == ["00000.tar#000000000", "00000.tar#000000001"]
    assert [t["text"] for t in whole.texts] == [None, b"b"]


def test_a_sample_without_json_is_its_row_of_the_metadata(
    read_whole: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A3, A12: img2dataset#344, with the parquet beside the tar."""
    paths = files(write_shard(tmp_path))
    whole = read_whole(SOURCE, *paths)
    with_texts = [("000000000", b"red boots, size 38"), ("000000001", b""), ("000000002", None), ("000000004", b"")]
    members = []
    for key, text in with_texts:
        members.append((f"{key}.jpg", picture(FETCHED[int(key)]["shade"])))
        members += [] if text is None else [(f"{key}.txt", text)]
    write_tar(paths[0], members)
    for piece_bytes in (tar_samples.PIECE_BYTES, 4_096):
        monkeypatch.setattr(tar_samples, "PIECE_BYTES", piece_bytes)
        found = read_whole(SOURCE, *paths)
        assert found.ids == whole.ids and found.records == whole.records
        assert [t["text"] for t in found.texts] == [
            b"red boots, size 38",
            b"Boots",
            b"a hill in fog",
            b"gone for good",
            None,
            b"too slow",
        ]
    urls = read_whole(Img2dataset(id="url", text="txt,caption:recap"), *paths)
    assert urls.ids == [row["url"] for row in metadata(FETCHED)]
    assert [t["text"] for t in urls.texts][:6] == [
        b"red boots, size 38",
        b"red boots, size 38",
        b"",
        b"Boots",
        None,
        b"a hill in fog",
    ]


def with_pictures(folder: Path, **columns: Any) -> Path:
    """A shard of one row whose parquet carries the picture."""
    row = {"key": "000000000", "status": "success", "url": "http://a.example/1", "txt": "a", "jpg": picture(1)}
    path = folder / "00000.parquet"
    pq.write_table(pa.Table.from_pylist([row | columns]), path)
    return path


def test_names_that_no_file_has_are_refused_or_said(inputs: Any, tmp_path: Path) -> None:
    parquet = inputs(with_pictures(tmp_path, caption="a"))
    for option in ({"text": "captoin"}, {"id": "captoin"}):
        with pytest.raises(InputError, match=r"No parquet of 00000\.parquet has a column 'captoin'.*mean 'caption'"):
            Img2dataset(**option).survey(parquet, None)
    tar = inputs(*files(write_shard(tmp_path)))
    for option in ({"text": "captoin"}, {"id": "captoin"}):
        (note,) = [note for note in Img2dataset(**option).survey(tar, None).notes if "captoin" in note]
        assert "none of the first 4 samples of 00000.tar" in note and "Did you mean 'caption'" in note
    known = Img2dataset(text="txt,caption:recap", id="url").survey(tar, None)
    assert not any("none of the first" in note for note in known.notes)


@pytest.mark.parametrize(
    ("value", "shown"),
    [
        (datetime.datetime(2020, 1, 2), b"2020-01-02 00:00:00"),
        (decimal.Decimal("1.50"), b"1.50"),
        ([datetime.date(2020, 1, 2)], b"2020-01-02"),
        ({"a": datetime.date(2020, 1, 2)}, b"{'a': datetime.date(2020, 1, 2)}"),
        (7, b"7"),
    ],
)
def test_a_column_that_holds_no_texts_is_a_reject(read_whole: Any, tmp_path: Path, value: Any, shown: bytes) -> None:
    path = with_pictures(tmp_path, other=value)
    (text,) = read_whole(Img2dataset(text="other"), path).texts
    assert text["text"] == shown and re.search(r"malformed_record: `other(\[0\])?` is an? \w+, not", text["broken"])
    named = read_whole(Img2dataset(id="other"), path)
    assert named.ids == (["7"] if value == 7 else [None])


def test_other_files_of_the_folder_are_no_inputs(tmp_path: Path) -> None:
    """The list of URLs often lies beside what was fetched from it (img2dataset#207)."""
    write_img2dataset(tmp_path)
    pq.write_table(pa.table({"url": ["http://a.example/1"]}), tmp_path / "urls.parquet")
    (tmp_path / "README.md").write_text("hello")
    found = [source.uri for source in find_inputs([str(tmp_path)], SOURCE.reads)[1]]
    assert found == [f"0000{n}{end}" for n in (0, 2) for end in (".parquet", ".tar", "_stats.json")]
    assert not SOURCE.reads("urls.parquet")
    with pytest.raises(InputError, match="None of the inputs is named as img2dataset names its output"):
        SOURCE.survey([Input(uri="urls.parquet", url="urls.parquet")], None)


def test_a_split_of_failures_alone_is_still_accounted_for(read_whole: Any, tmp_path: Path) -> None:
    write_shard(tmp_path)
    write_shard(tmp_path / "val", FETCHED[3:4])
    whole = read_whole(SOURCE, *sorted(tmp_path.rglob("0*")))
    assert Counter(r["split"] for r in whole.records) == {"train": 6, "val": 1}
    assert any("1 of 2 shards hold no picture" in note for note in whole.survey.notes)


SHARD: dict[str, bytes] = {}


@settings(max_examples=100)
@given(
    which=st.sampled_from(["00000.tar", "00000.parquet", "00000_stats.json"]),
    at=st.floats(0, 1, exclude_max=True),
    flip=st.integers(0, 255),
    drop=st.integers(0, 600),
)
def test_a_mutated_shard_is_a_sentence_or_every_text_is_accounted_for(
    tmp_path_factory: pytest.TempPathFactory, which: str, at: float, flip: int, drop: int
) -> None:
    folder = tmp_path_factory.getbasetemp() / "fuzzed"
    folder.mkdir(exist_ok=True)
    if not SHARD:
        SHARD.update({path.name: path.read_bytes() for path in files(write_shard(folder))})
    for name, data in SHARD.items():
        place = int(at * len(data))
        edited = data[:place] + bytes([data[place] ^ flip]) + data[place + 1 + drop :]
        (folder / name).write_bytes(edited if name == which else data)
    try:
        survey = SOURCE.survey(find_inputs([str(folder)], SOURCE.reads)[1], None)
        batch = merge(part for piece in survey.pieces for part in SOURCE.read(piece))
    except GoodviewsError as error:
        assert "00000" in str(error)
        return
    scenes = group(batch, config=CleanConfig(), repair=False)
    captions = tables.scenes_table(
        scenes, tables.keep(scenes), tables.Origin(dataset="d", version="0", split="train", shard=0)
    )
    rejects = tables.rejects_table(scenes, tables.Origin(dataset="d", version="0", split="train", shard=0))
    assert batch.texts.num_rows == len(FETCHED)
    assert len(captions["captions"].combine_chunks().values) + rejects.num_rows == batch.texts.num_rows
