from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import pytest

from infra.errors import ConfigError, InputError
from pipelines.sources.sets.coco import Coco

Write = Callable[[str, bytes], Any]

IMAGES: list[dict[str, Any]] = [
    {"id": 42, "file_name": "COCO_val2014_000000000042.jpg", "width": 640, "height": 480, "license": 3},
    {"id": 7, "file_name": "COCO_val2014_000000000007.jpg", "width": 10, "height": -1},
    {"id": 9, "file_name": None},
]
ANNOTATIONS = [
    {"image_id": 7, "id": 30, "caption": "seven, late "},
    {"image_id": 42, "id": 5, "caption": "second\n"},
    {"image_id": 7, "id": 4, "caption": "seven, early"},
    {"image_id": 42, "id": 2, "caption": "first"},
]


def official(images: Any = IMAGES, annotations: Any = ANNOTATIONS) -> bytes:
    document = {"info": {}, "type": "captions", "images": images, "annotations": annotations, "licenses": []}
    return json.dumps(document).encode()


def test_captions_are_in_the_order_of_their_ids_whatever_the_file(write_text: Write, read_whole: Any) -> None:
    for order in (ANNOTATIONS, ANNOTATIONS[::-1]):
        whole = read_whole(Coco(), write_text("captions_val2014.json", official(annotations=order)))
        assert whole.texts_of("42") == [("caption[0]", b"first"), ("caption[1]", b"second\n")]
        assert whole.texts_of("7") == [("caption[0]", b"seven, early"), ("caption[1]", b"seven, late ")]
        assert whole.ids == ["42", "7", "9"]
        assert {record["split"] for record in whole.records} == {"val"}


def test_a_picture_without_captions_is_a_record_without_texts(write_text: Write, read_whole: Any) -> None:
    whole = read_whole(Coco(), write_text("captions_val2014.json", official()))
    assert whole.texts_of("9") == []
    uri = "COCO_val2014_000000000042.jpg"
    assert [(r["image_uri"], r["width"], r["height"]) for r in whole.records] == [
        (uri, 640, 480),
        (IMAGES[1]["file_name"], 10, None),
        (None, None, None),
    ]


def test_a6_pictures_keep_all_their_captions(write_text: Write, read_whole: Any) -> None:
    sizes = {1: 5, 2: 5, 3: 6, 4: 7}
    images = [{"id": i, "file_name": f"{i:012d}.jpg"} for i in sizes]
    annotations = [
        {"image_id": i, "id": 10 * i + n, "caption": f"{i} {n}"} for i, size in sizes.items() for n in range(size)
    ]
    whole = read_whole(Coco(), write_text("captions_train2017.json", official(images, annotations)))
    assert {int(i): len(whole.texts_of(i)) for i in whole.ids} == sizes


def test_annotations_that_cannot_be_placed_are_rejects_with_their_reason(write_text: Write, read_whole: Any) -> None:
    annotations = [
        *ANNOTATIONS,
        {"image_id": 1000, "id": 77, "caption": "of a lost picture"},
        {"image_id": 42, "id": 2, "caption": "id twice"},
        {"id": 78, "caption": "of none"},
        {"image_id": 42, "id": 79, "caption": 12},
        {"image_id": 42, "id": 80},
        "text",
    ]
    whole = read_whole(Coco(), write_text("captions_val2014.json", official(annotations=annotations)))
    broken = {text["text"]: text["broken"] for text in whole.texts if text["broken"]}
    assert broken == {
        b"of a lost picture": "missing_image: annotation 77 names image 1000, which `images` does not list",
        b"id twice": "malformed_record: the annotation id 2 stands twice",
        b"of none": "malformed_record: the annotation names no image",
        b"12": "malformed_record: the caption is a number, not a text",
        b'"text"': "malformed_record: the annotation is a text, not an object",
    }
    assert len(whole.texts) == len(annotations)
    assert ("caption[4]", None) in whole.texts_of("42")
    # An orphan is at its place among the annotations.
    assert [r["source_row"] for r in whole.records if r["source_id"] is None] == [4, 6, 9]


def test_a10_a_lone_surrogate_or_a_wrong_byte_costs_one_caption(write_text: Write, read_whole: Any) -> None:
    data = official(annotations=[*ANNOTATIONS, {"image_id": 9, "id": 90, "caption": "lone \udc8f"}])
    for damaged in (data, data.replace(b"lone \\udc8f", b"caf\x92")):
        whole = read_whole(Coco(), write_text("captions_val2014.json", damaged))
        assert len(whole.texts) == 5
        (_, text), *_ = whole.texts_of("9")
        with pytest.raises(UnicodeDecodeError):
            text.decode()
        assert whole.texts_of("42")[0] == ("caption[0]", b"first")


KARPATHY = {
    "dataset": "coco",
    "images": [
        {
            "filepath": "val2014",
            "filename": f"COCO_val2014_{i:012d}.jpg",
            "cocoid": i,
            "split": split,
            "sentids": [2 * i, 2 * i + 1],
            "sentences": [
                {"tokens": ["b"], "raw": f"b {i}", "imgid": 0, "sentid": 2 * i + 1},
                {"tokens": ["a"], "raw": f"a {i}", "imgid": 0, "sentid": 2 * i},
            ],
        }
        for i, split in ((1, "train"), (2, "restval"), (3, "val"), (4, "test"))
    ],
}


@pytest.mark.parametrize(
    ("restval", "splits"),
    [
        ("train", ["train", "train", "val", "test"]),
        ("keep", ["train", "restval", "val", "test"]),
        ("drop", ["train", "val", "test"]),
    ],
)
def test_restval_joins_train_unless_asked_otherwise(
    write_text: Write, read_whole: Any, restval: str, splits: list[str]
) -> None:
    assert Coco().restval == "train"
    whole = read_whole(Coco(restval=restval), write_text("dataset_coco.json", json.dumps(KARPATHY).encode()))
    assert [record["split"] for record in whole.records] == splits
    assert any("1 pictures of the split restval" in note for note in whole.survey.notes)
    counts = whole.survey.pieces[0].scenes_by_split
    assert counts == {split: splits.count(split) for split in set(splits)}
    assert whole.texts_of("1") == [("sentences[0]", b"a 1"), ("sentences[1]", b"b 1")]
    assert whole.records[0]["image_uri"] == "val2014/COCO_val2014_000000000001.jpg"


def test_flickr30k_in_karpathys_layout_is_named_by_its_files(write_text: Write, read_whole: Any) -> None:
    image = {
        "sentids": [0],
        "imgid": 0,
        "sentences": [{"tokens": [], "raw": "Two men", "imgid": 0, "sentid": 0}],
        "split": "test",
        "filename": "1000092795.jpg",
    }
    path = write_text("dataset_flickr30k.json", json.dumps({"images": [image], "dataset": "flickr30k"}).encode())
    assert read_whole(Coco(), path).texts_of("1000092795") == [("sentences[0]", b"Two men")]


def test_blip_lists_join_by_picture(write_text: Write, read_whole: Any) -> None:
    entries = [
        {"image": "val2014/COCO_val2014_000000000042.jpg", "caption": "one", "image_id": "coco_42"},
        {"image": "val2014/COCO_val2014_000000000007.jpg", "caption": ["a", "b"]},
        {"image": "val2014/COCO_val2014_000000000042.jpg", "caption": "two"},
        {"caption": "of none"},
    ]
    whole = read_whole(Coco(), write_text("coco_karpathy_train.json", json.dumps(entries).encode()))
    assert whole.ids == ["42", "7", "42", None]
    assert whole.texts_of("42") == [("caption", b"one"), ("caption", b"two")]
    assert whole.texts_of("7") == [("caption[0]", b"a"), ("caption[1]", b"b")]
    assert whole.survey.pieces[0].scenes_by_split == {"train": 2}
    assert [text["broken"] for text in whole.texts][-1].startswith("malformed_record")


def test_one_picture_has_one_id_in_every_layout_and_year(write_text: Write, read_whole: Any) -> None:
    images = [{"id": 1, "file_name": "000000000001.jpg"}]
    ids = [
        read_whole(
            Coco(), write_text("captions_train2017.json", official(images, [{"image_id": 1, "id": 1, "caption": "x"}]))
        ).ids[0],
        read_whole(Coco(), write_text("dataset_coco.json", json.dumps(KARPATHY).encode())).ids[0],
        read_whole(
            Coco(),
            write_text(
                "coco_karpathy_val.json",
                json.dumps([{"image": "COCO_val2014_000000000001.jpg", "caption": "x"}]).encode(),
            ),
        ).ids[0],
    ]
    assert ids == ["1", "1", "1"]


def test_a_picture_in_two_files_is_refused(write_text: Write, inputs: Any) -> None:
    files = [write_text(name, official()) for name in ("captions_val2014.json", "captions_train2017.json")]
    with pytest.raises(InputError, match=r"Picture 42 is in captions_train2017\.json and in captions_val2014\.json"):
        Coco().survey(inputs(*files), None)


def test_files_of_boxes_beside_the_captions_are_left_alone(write_text: Write, read_whole: Any) -> None:
    files = [write_text("instances_val2014.json", b"{}"), write_text("captions_val2014.json", official())]
    whole = read_whole(Coco(), *files)
    assert len(whole.texts) == 4 and any("1 inputs are no caption files" in note for note in whole.survey.notes)


@pytest.mark.parametrize(
    ("name", "data", "message"),
    [
        ("captions_val2014.json", b"", "is not JSON: .*It is empty"),
        ("captions_val2014.json", official()[:-40], r"is not JSON: .*begins with b'\{\"info.*cut short"),
        ("instances_val2014.json", b'{"images": [], "annotations": [{"bbox": []}]}', "holds no captions.*captions_"),
        ("results.json", b'[{"image_id": 1, "caption": "x"}]', "is a list, but holds no captions"),
        ("captions_val2014.json", official(images=[*IMAGES, IMAGES[0]]), "lists the id 42 twice"),
        ("captions_val2014.json", official(images=[{"file_name": "x.jpg"}]), r"images\[0\] of .* has no id"),
        ("my_captions.json", official(), "does not say its split"),
        ("captions_val2014.txt", official(), "None of the inputs is JSON by its name"),
        ("dataset_coco.json", json.dumps({"images": [{"filename": "a.jpg", "sentences": []}]}).encode(), r"images\[0\] .*has split None"),
    ],
)  # fmt: skip
def test_what_is_no_captions_file_is_refused_with_what_it_is(
    write_text: Write, inputs: Any, name: str, data: bytes, message: str
) -> None:
    with pytest.raises(InputError, match=message):
        Coco().survey(inputs(write_text(name, data)), None)


def test_a_split_can_be_named_where_the_file_does_not_say_it(write_text: Write, read_whole: Any, inputs: Any) -> None:
    whole = read_whole(Coco(split="mini"), write_text("my_captions.json", official()))
    assert {record["split"] for record in whole.records} == {"mini"}
    path = write_text("dataset_coco.json", json.dumps(KARPATHY).encode())
    with pytest.raises(InputError, match="names the split of each picture"):
        Coco(split="train").survey(inputs(path), None)


def test_a_limit_counts_pictures_and_makes_no_orphans(write_text: Write, read_whole: Any) -> None:
    path = write_text("captions_val2014.json", official())
    whole = read_whole(Coco(), path, limit=1)
    assert whole.ids == ["42"] and len(whole.texts) == 2
    assert all(text["broken"] is None for text in whole.texts)


@pytest.mark.parametrize("options", [{"restval": "both"}, {"split": "Val 2014"}])
def test_options_that_mean_nothing_are_refused(options: dict[str, str]) -> None:
    with pytest.raises(ConfigError):
        Coco(**options)
