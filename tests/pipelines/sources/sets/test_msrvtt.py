"""`pipelines.sources.sets.msrvtt`: every sentence is a text of its clip, and the protocol says what it leaves out."""

from __future__ import annotations

import json
import zipfile
from pathlib import Path
from typing import Any

import pytest

from infra.errors import ConfigError, InputError
from pipelines.sources.formats.discovery import find_inputs
from pipelines.sources.sets.msrvtt import MsrVtt


def video(number: int, split: str, **others: Any) -> dict[str, Any]:
    clip = {"video_id": f"video{number}", "id": number, "category": 1, "url": f"https://v/{number // 2}"}
    return {**clip, "start time": 1.5, "end time": 2.25, "split": split, **others}


def sentence(sen_id: int, number: int, caption: Any = "") -> dict[str, Any]:
    return {"caption": caption or f"caption {sen_id}", "video_id": f"video{number}", "sen_id": sen_id}


def document(videos: list[Any], sentences: list[Any]) -> bytes:
    return json.dumps({"info": {}, "videos": videos, "sentences": sentences}).encode()


TRAIN = document(
    [video(0, "train"), video(1, "train"), video(2, "validate")],
    [sentence(5, 1), sentence(1, 0), sentence(3, 2), sentence(0, 0), sentence(4, 1), sentence(2, 0)],
)
TEST = document([video(9770, "test")], [sentence(7, 9770), sentence(6, 9770)])
LIST = b"key;vid_key;video_id;sentence\nret0;msr9770;video9770;a person connects\n"


@pytest.fixture
def files(write_text: Any) -> list[Path]:
    """Both files of the official release."""
    return [write_text("train_val_videodatainfo.json", TRAIN), write_text("test_videodatainfo.json", TEST)]


def rejected(whole: Any) -> list[str]:
    return [t["broken"].partition(":")[0] for t in whole.texts if t["broken"]]


def test_sentences_go_to_their_clip_in_the_order_of_their_ids(files: list[Path], read_whole: Any) -> None:
    whole = read_whole(MsrVtt(), *files)
    assert [text for _, text in whole.texts_of("video0")] == [b"caption 0", b"caption 1", b"caption 2"]
    assert [text for _, text in whole.texts_of("video9770")] == [b"caption 6", b"caption 7"]
    splits = {r["source_id"]: r["split"] for r in whole.records}
    assert splits == {"video0": "train", "video1": "train", "video2": "val", "video9770": "test"}
    assert whole.records[whole.ids.index("video1")]["image_uri"] == "https://v/0#t=1.5,2.25"
    assert not rejected(whole)


def test_the_zip_that_they_come_in_is_read_as_it_is(files: list[Path], tmp_path: Path, read_whole: Any) -> None:
    archive = tmp_path / "zips" / "train_val_annotation.zip"
    archive.parent.mkdir()
    with zipfile.ZipFile(archive, "w") as file:
        file.write(files[0], files[0].name)
        file.writestr("readme.txt", "MSR-VTT")
    _, found = find_inputs([str(archive)], MsrVtt().reads)
    assert [i.uri for i in found] == ["train_val_annotation.zip/train_val_videodatainfo.json"]
    survey = MsrVtt().survey(found, None)
    texts = [text for piece in survey.pieces for batch in MsrVtt().read(piece) for text in batch.texts.to_pylist()]
    assert len(texts) == 6


@pytest.mark.parametrize("separator", [b",", b";", b"\t"])
def test_1ka_is_9000_train_and_one_caption_of_each_test_clip(
    separator: bytes, files: list[Path], write_text: Any, read_whole: Any
) -> None:
    clips = write_text("MSRVTT_JSFUSION_test.csv", LIST.replace(b";", separator))
    whole = read_whole(MsrVtt(), *files, clips)
    assert whole.texts_of("video9770") == [("sentence", b"a person connects")]
    assert {r["source_id"]: r["split"] for r in whole.records}["video2"] == "train"
    assert any("1 captions of test clips are left out" in note for note in whole.survey.notes)
    assert {f.uri for piece in whole.survey.pieces for f in piece.input.files} == {p.name for p in (*files, clips)}
    every = read_whole(MsrVtt(test_captions="all"), *files, clips)
    assert len(every.texts_of("video9770")) == 2 and every.records[0]["split"] == "test"
    alone = read_whole(MsrVtt(), clips)
    assert alone.texts_of("video9770") == [("sentence", b"a person connects")]


def test_test_clips_of_videos_that_are_trained_on_are_noted(write_text: Any, read_whole: Any) -> None:
    videos = [video(0, "train"), video(1, "test"), video(2, "test")]
    path = write_text("a.json", document(videos, [sentence(n, n) for n in range(3)]))
    assert [n for n in read_whole(MsrVtt(), path).survey.notes if "1 of 2 test clips are cut from a video" in n]
    assert not [n for n in read_whole(MsrVtt(splits="official"), path).survey.notes if "cut from" in n]


def test_a_list_of_clips_that_are_not_there_is_noted(files: list[Path], write_text: Any, read_whole: Any) -> None:
    clips = write_text("list.csv", LIST + b"ret1;x;video9999;gone\n")
    whole = read_whole(MsrVtt(), *files, clips)
    assert any("1 clips of the list 1k-A are in no annotation file: video9999" in n for n in whole.survey.notes)


@pytest.mark.parametrize(
    ("data", "message"),
    [
        (LIST.replace(b";", b"|"), r"is no list of clips with captions: its first line is 'key\|vid_key"),
        (LIST + b"ret1;a;video1\n", "Row 2 of list.csv names no clip"),
        (LIST + b"ret1;a person;connects;video1\n", None),
        (LIST + LIST.split(b"\n")[1], "names video9770 twice"),
        (b"", "is no list of clips"),
    ],
)
def test_a_list_that_is_broken_is_refused(
    data: bytes, message: str | None, files: list[Path], write_text: Any, inputs: Any
) -> None:
    there = inputs(*files, write_text("list.csv", data))
    if message is None:
        # Shifted columns name no clip that there is.
        assert any("connects" in note for note in MsrVtt().survey(there, None).notes)
        return
    with pytest.raises(InputError, match=message):
        MsrVtt().survey(there, None)


def test_sentences_of_no_clip_and_broken_ones_are_rejects(write_text: Any, read_whole: Any) -> None:
    sentences: list[Any] = [
        sentence(0, 0),
        sentence(1, 77),
        {"caption": "no clip"},
        "text",
        sentence(2, 0, [1]),
        sentence(3, 0),
    ]
    sentences[-1]["caption"] = None
    whole = read_whole(MsrVtt(), write_text("test_videodatainfo.json", document([video(0, "test")], sentences)))
    assert sorted(rejected(whole)) == ["malformed_record", "malformed_record", "missing_image", "missing_image"]
    assert len(whole.texts) == 6 and {r["split"] for r in whole.records} == {"test"}


def test_clips_of_one_video_can_be_one_scene(files: list[Path], read_whole: Any) -> None:
    whole = read_whole(MsrVtt(scene="video"), *files)
    assert sorted(whole.ids) == ["https://v/0", "https://v/0", "https://v/1", "https://v/4885"]


def test_a_copy_in_which_all_is_train_is_noted_and_can_be_restored(write_text: Any, read_whole: Any) -> None:
    videos = [video(n, "train") for n in range(10_000)]
    path = write_text("MSRVTT_data.json", document(videos, [sentence(0, 0)]))
    assert any("source.splits=official" in note for note in read_whole(MsrVtt(), path).survey.notes)
    survey = MsrVtt(splits="official").survey(read_whole(MsrVtt(), path).survey.pieces[0].input.files, None)
    assert survey.pieces[0].scenes_by_split == {"test": 2_990, "train": 6_513, "val": 497}
    assert not survey.notes


@pytest.mark.parametrize(
    ("data", "message"),
    [
        (document([], []), "lists no clip"),
        (document([video(0, "train")], []), "hold 1 clips and no sentence"),
        (document([video(0, "train")] * 2, [sentence(0, 0)]), "lists a clip twice"),
        (document([video(0, "Train set")], [sentence(0, 0)]), "has the split 'Train set'"),
        (document([{"id": 1}], []), r"videos\[0\] of a.json has no `video_id`"),
        (b'{"images": []}', "is an object with images"),
        (b"[1]", "is a list"),
        (TRAIN[:-9], "is not JSON"),
    ],
)
def test_another_file_is_refused(data: bytes, message: str, write_text: Any, inputs: Any) -> None:
    with pytest.raises(InputError, match=message):
        MsrVtt().survey(inputs(write_text("a.json", data)), None)


def test_the_merged_file_beside_the_others_is_refused(files: list[Path], write_text: Any, inputs: Any) -> None:
    merged = write_text("MSRVTT_data.json", TEST)
    with pytest.raises(InputError, match=r"Clip video9770 is in MSRVTT_data\.json and in test_videodatainfo\.json"):
        MsrVtt().survey(inputs(*files, merged), None)


def test_two_lists_and_wrong_options_are_refused(files: list[Path], write_text: Any, inputs: Any) -> None:
    with pytest.raises(InputError, match="two would decide which are test"):
        MsrVtt().survey(inputs(*files, write_text("a.csv", LIST), write_text("b.csv", LIST)), None)
    with pytest.raises(ConfigError, match=r"source\.scene='shot' is not one of clip, video"):
        MsrVtt(scene="shot")


def test_a_limit_counts_clips(files: list[Path], read_whole: Any) -> None:
    for limit in range(1, 6):
        assert len(read_whole(MsrVtt(), *files, limit=limit).records) == min(limit, 4)


def test_one_video_in_two_splits_is_no_scene(files: list[Path], write_text: Any, inputs: Any) -> None:
    videos = [video(0, "train"), video(1, "test")]
    path = write_text("a.json", document(videos, [sentence(n, n) for n in range(2)]))
    with pytest.raises(InputError, match=r"1 videos have clips in several splits \(such as https://v/0\)"):
        MsrVtt(scene="video").survey(inputs(path), None)
    assert MsrVtt(scene="video").survey(inputs(*files), None).pieces
