"""`pipelines.sources.sets.flickr`: one set in several forms gives the same scenes, and a broken file gives a reject or a sentence."""

from __future__ import annotations

import gzip
import json
import zipfile
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest

from infra.errors import ConfigError, InputError
from pipelines.sources.formats.discovery import find_inputs
from pipelines.sources.sets.coco import Coco
from pipelines.sources.sets.flickr import LOST_OF_FLICKR8K, Flickr8k, Flickr30k

CAPTIONS = {
    "1000_ab.jpg": ["A dog, running .", 'He says " hi " .', "A dog runs ."],
    "2000_cd.jpg": ["Two guys | one hat .", "Men ."],
    "3000.jpg": ["A bird ."],
}
TOKEN = "".join(f"{name}#{n}\t{text}\n" for name, texts in CAPTIONS.items() for n, text in enumerate(texts)).encode()
PIPED = b"image_name| comment_number| comment\n" + b"".join(
    f"{name}| {n}| {text}\n".encode() for name, texts in CAPTIONS.items() for n, text in enumerate(texts)
)
COMMA = b"image,caption\n" + b"".join(
    ('{},"{}"\n'.format(name, text.replace('"', '""'))).encode() for name, texts in CAPTIONS.items() for text in texts
)
ANNOTATIONS = b"raw,sentids,split,filename,img_id\n" + b"".join(
    '"{}","[1]",{},{},0\n'.format(json.dumps(texts).replace('"', '""'), split, name).encode()
    for (name, texts), split in zip(CAPTIONS.items(), ("train", "val", "test"), strict=True)
)
KARPATHY = json.dumps(
    {
        "images": [
            {
                "filename": name,
                "split": split,
                "sentences": [{"raw": text, "sentid": n} for n, text in enumerate(texts)],
            }
            for (name, texts), split in zip(CAPTIONS.items(), ("train", "val", "test"), strict=True)
        ],
    }
).encode()
FORMS = {
    "Flickr8k.token.txt": TOKEN,
    "results_20130124.token": TOKEN,
    "results.csv": PIPED,
    "captions.txt": COMMA,
    "flickr_annotations_30k.csv": ANNOTATIONS,
    "dataset_x.json": KARPATHY,
}


def texts_by_scene(whole: Any) -> dict[str, list[bytes]]:
    return {id_: [text for _, text in whole.texts_of(id_)] for id_ in whole.ids}


def rejected(whole: Any) -> list[tuple[bytes, str]]:
    return [(t["text"], t["broken"].partition(":")[0]) for t in whole.texts if t["broken"]]


WANTED = {name.removesuffix(".jpg"): [text.encode() for text in texts] for name, texts in CAPTIONS.items()}


@pytest.mark.parametrize("source", [Flickr8k(), Flickr30k()])
@pytest.mark.parametrize("name", sorted(FORMS))
@pytest.mark.parametrize("pack", [bytes, gzip.compress])
def test_every_form_gives_the_same_scenes(name: str, source: Any, pack: Any, write_text: Any, read_whole: Any) -> None:
    path = write_text(name + (".gz" if pack is gzip.compress else ""), pack(FORMS[name]))
    assert source.reads(path.name)
    whole = read_whole(source, path)
    assert texts_by_scene(whole) == WANTED
    assert not rejected(whole)
    assert {r["image_uri"] for r in whole.records} == set(CAPTIONS)


def test_of_the_archive_with_three_sets_one_is_read(tmp_path: Path, read_whole: Any) -> None:
    archive = tmp_path / "caption_datasets.zip"
    sets = ("coco", "flickr8k", "flickr30k")
    with zipfile.ZipFile(archive, "w") as file:
        for name in sets:
            document = json.loads(KARPATHY)
            for image in document["images"]:
                image["sentences"] = [{"raw": f"of {name}", "sentid": 0}]
            file.writestr(f"dataset_{name}.json", json.dumps({**document, "dataset": name}))
    for source in (Coco(), Flickr8k(), Flickr30k()):
        survey = source.survey(find_inputs([str(archive)], source.reads)[1], None)
        texts = {
            text for piece in survey.pieces for batch in source.read(piece) for text in batch.texts["text"].to_pylist()
        }
        assert texts == {f"of {source.name}".encode()}
        assert all(any(name in note for note in survey.notes) for name in sets if name != source.name)


def test_sets_of_karpathy_without_coco_are_not_mixed(write_text: Any, inputs: Any) -> None:
    paths = [
        write_text(f"dataset_{name}.json", json.dumps({**json.loads(KARPATHY), "dataset": name}).encode())
        for name in ("flickr8k", "flickr30k")
    ]
    with pytest.raises(InputError, match=r"of several datasets: dataset_flickr30k\.json \(flickr30k\)"):
        Coco().survey(inputs(*paths), None)
    with pytest.raises(InputError, match=r"says that it is flickr30k, and is not read"):
        Flickr8k().survey(inputs(paths[1]), None)


@pytest.mark.parametrize("split", [True, False])
def test_parquet_of_both_layouts(split: bool, write_parquet: Any, read_whole: Any) -> None:
    columns = {"caption": list(CAPTIONS.values()), "filename": list(CAPTIONS), "sentids": [["0"]] * 3}
    if split:
        columns["split"] = ["train", "val", "test"]
    pictures = pa.array([{"bytes": b"x", "path": None}] * 3, pa.struct([("bytes", pa.binary()), ("path", pa.string())]))
    table = pa.table({**columns, "image": pictures})
    # lmms-lab calls the whole of Flickr30k `test`.
    whole = read_whole(Flickr30k(), write_parquet("data/test-00000-of-00009.parquet", table, row_group_size=2))
    assert texts_by_scene(whole) == WANTED
    assert [r["split"] for r in whole.records] == (["train", "val", "test"] if split else ["all"] * 3)
    assert all(r["image"] is None for r in whole.records)
    assert any("all are of the split `all`" in note for note in whole.survey.notes) is not split


def test_parquet_files_of_several_names_are_splits(write_parquet: Any, read_whole: Any) -> None:
    def table(name: str) -> pa.Table:
        return pa.table({"caption": [CAPTIONS[name]], "filename": [name]})

    paths = [
        write_parquet("train-00000-of-00001.parquet", table("1000_ab.jpg")),
        write_parquet("validation-00000-of-00001.parquet", table("2000_cd.jpg")),
    ]
    whole = read_whole(Flickr30k(), *paths)
    assert [(r["source_id"], r["split"]) for r in whole.records] == [("1000_ab", "train"), ("2000_cd", "val")]


def test_pictures_of_parquet_are_taken_when_asked_for(
    write_parquet: Any, read_whole: Any, jpeg: bytes, png: bytes
) -> None:
    struct = pa.struct([("bytes", pa.binary()), ("path", pa.string())])
    values = [{"bytes": jpeg, "path": "x"}, {"bytes": png, "path": "x"}, None]
    table = pa.table(
        {"caption": list(CAPTIONS.values()), "filename": list(CAPTIONS), "image": pa.array(values, struct)}
    )
    source = Flickr30k(pictures=True)
    assert source.writers and not Flickr30k().writers
    first, second, third = read_whole(source, write_parquet("test.parquet", table)).records
    assert first["image"] == jpeg and (first["width"], first["height"]) == (8, 6)
    assert second["image"].startswith(b"\xff\xd8\xff") and second["width"] == 8
    assert third["image"] is None and third["image_sha256"] is None


def test_lists_decide_the_split(write_text: Any, read_whole: Any) -> None:
    paths = [
        write_text("Flickr8k.token.txt", TOKEN),
        write_text("Flickr_8k.trainImages.txt", b"1000_ab.jpg\n"),
        write_text("Flickr_8k.devImages.txt", b"2000_cd.jpg\r\n\n"),
    ]
    source = Flickr8k()
    assert all(source.reads(path.name) for path in paths)
    whole = read_whole(source, *paths)
    assert {r["source_id"]: r["split"] for r in whole.records} == {"1000_ab": "train", "2000_cd": "val", "3000": "rest"}
    # The lists decide, so they are inputs like the captions.
    assert {file.uri for piece in whole.survey.pieces for file in piece.input.files} == {p.name for p in paths}
    one = read_whole(Flickr8k(split="test"), *paths)
    assert {r["split"] for r in one.records} == {"test"}


def test_one_picture_in_two_lists_is_refused(write_text: Any, inputs: Any) -> None:
    paths = [
        write_text("Flickr8k.token.txt", TOKEN),
        write_text("train.txt", b"1000_ab\n"),
        write_text("test.txt", b"1000_ab\n"),
    ]
    with pytest.raises(
        InputError, match=r"Picture 1000_ab is of the split test by one list and of train by train\.txt"
    ):
        Flickr30k().survey(inputs(*paths), None)


def test_splits_from_two_sides_are_refused(write_text: Any, inputs: Any) -> None:
    paths = [write_text("dataset_flickr30k.json", KARPATHY), write_text("train.txt", b"1000_ab\n")]
    with pytest.raises(InputError, match="says the splits itself, and so does"):
        Flickr30k().survey(inputs(*paths), None)


def test_two_forms_of_one_set_at_once_are_refused(write_text: Any, inputs: Any) -> None:
    paths = [write_text("results.csv", PIPED), write_text("results.token", TOKEN)]
    with pytest.raises(InputError, match=r"has captions in results\.csv and in results\.token"):
        Flickr30k().survey(inputs(*paths), None)


def test_the_stray_name_is_a_reject_and_so_are_captions_of_the_lost_picture(write_text: Any, read_whole: Any) -> None:
    (lost,) = LOST_OF_FLICKR8K
    lines = f"{lost}.jpg.1#0\tpeople\n{lost}.jpg#1\tSome people\n".encode()
    path = write_text("Flickr8k.token.txt", lines + TOKEN)
    whole = read_whole(Flickr8k(), path)
    assert rejected(whole) == [(b"people", "malformed_record"), (b"Some people", "missing_image")]
    assert len(whole.texts) == TOKEN.count(b"\n") + 2
    assert not [t for t in read_whole(Flickr30k(), path).texts if t["broken"] and "missing" in t["broken"]]


def test_the_line_of_kaggle_without_its_second_separator_is_mended_and_named(write_text: Any, read_whole: Any) -> None:
    broken = b"2199200615.jpg| 4   A dog runs across the grass .\n"
    whole = read_whole(Flickr30k(), write_text("results.csv", PIPED + broken))
    assert whole.texts_of("2199200615") == [("caption[4]", b"A dog runs across the grass .")]
    assert not rejected(whole)
    assert any("2199200615.jpg (row 6)" in note for note in whole.survey.notes)


def test_a_line_break_inside_a_caption_never_leaves_half_of_it(write_text: Any, read_whole: Any) -> None:
    for name, data in (("r.token", TOKEN), ("results.csv", PIPED)):
        cut = data.replace(b"A dog runs .", b"A dog\nruns .")
        whole = read_whole(Flickr30k(), write_text(name, cut))
        assert [reason for _, reason in rejected(whole)] == ["malformed_record"] * 2
        assert len(whole.texts) == 7
    quoted = COMMA.replace(b"A dog runs .", b"A dog\nruns .")
    whole = read_whole(Flickr30k(), write_text("captions.txt", quoted))
    assert texts_by_scene(whole)["1000_ab"][2] == b"A dog\nruns ." and not rejected(whole)


def test_shifted_columns_are_rejects(write_text: Any, read_whole: Any) -> None:
    shifted = b'image,caption\n"A dog, running .",1000_ab.jpg\n'
    whole = read_whole(Flickr8k(), write_text("captions.txt", shifted + COMMA.split(b"\n", 1)[1]))
    assert rejected(whole) == [(b"1000_ab.jpg", "malformed_record")]
    assert len(whole.texts) == 7


def test_an_unquoted_comma_is_a_reject_and_not_a_shorter_caption(write_text: Any, read_whole: Any) -> None:
    whole = read_whole(Flickr8k(), write_text("captions.txt", COMMA + b"4000.jpg,A dog, running\n"))
    assert rejected(whole) == [(b"4000.jpg,A dog, running", "malformed_record")]


@pytest.mark.parametrize(
    "data",
    [
        b"",
        b"\n\n",
        TOKEN.replace(b"\t", b" "),
        PIPED.replace(b"|", b";"),
        b"<html>",
        "image,caption\n".encode("utf-16"),
    ],
)
def test_a_file_in_no_known_form_is_refused(data: bytes, write_text: Any, inputs: Any) -> None:
    with pytest.raises(InputError, match="is no caption file of Flickr8k or Flickr30k"):
        Flickr30k().survey(inputs(write_text("results.csv", data)), None)


def test_a_windows_byte_stays_in_its_text(write_text: Any, read_whole: Any) -> None:
    for name, data in (("r.token", TOKEN), ("results.csv", PIPED), ("captions.txt", COMMA)):
        whole = read_whole(Flickr30k(), write_text(name, data.replace(b"A bird", b"A\x92bird")))
        assert whole.texts_of("3000")[0][1] == b"A\x92bird ."


def test_lemmas_and_ratings_are_not_read() -> None:
    names = ("Flickr8k.lemma.token.txt", "CrowdFlowerAnnotations.txt", "ExpertAnnotations.txt", "readme.txt")
    assert not any(source.reads(name) for source in (Flickr8k(), Flickr30k()) for name in names)
    assert not Flickr8k().reads("x.parquet")


@pytest.mark.parametrize("name", ["results.csv", "Flickr8k.token.txt", "dataset_x.json"])
def test_a_limit_counts_pictures_and_never_cuts_one(name: str, write_text: Any, read_whole: Any) -> None:
    for limit in range(1, 5):
        whole = read_whole(Flickr30k(), write_text(name, FORMS[name]), limit=limit)
        assert texts_by_scene(whole) == dict(list(WANTED.items())[:limit])


def test_a_limit_counts_pictures_over_files(write_text: Any, read_whole: Any) -> None:
    paths = [write_text("a.token", TOKEN), write_text("b.token", TOKEN.replace(b"_", b"_9").replace(b"3000", b"3001"))]
    assert len(set(read_whole(Flickr30k(), *paths, limit=4).ids)) == 4


def test_a_split_that_cannot_be_one_is_refused(write_text: Any, inputs: Any) -> None:
    data = ANNOTATIONS.replace(b",train,", b",A dog,")
    with pytest.raises(InputError, match="names the split 'A dog' for 1000_ab"):
        Flickr30k().survey(inputs(write_text("a.csv", data)), None)
    with pytest.raises(ConfigError, match="no split name"):
        Flickr8k(split="A b")


def test_a_json_list_that_is_none_is_a_reject(write_text: Any, read_whole: Any) -> None:
    data = ANNOTATIONS.replace(b'"[""A bird .""]"', b"A bird .")
    whole = read_whole(Flickr30k(), write_text("a.csv", data))
    assert rejected(whole) == [(b"A bird .", "malformed_record")]


def test_columns_of_another_type_are_refused(write_parquet: Any, inputs: Any) -> None:
    path = write_parquet("x.parquet", pa.table({"caption": [1], "filename": ["a.jpg"]}))
    with pytest.raises(InputError, match="Column 'caption' of x.parquet is int64"):
        Flickr30k().survey(inputs(path), None)
    path = write_parquet("y.parquet", pa.table({"caption": ["a"], "filename": ["a.jpg"], "image": ["a.jpg"]}))
    with pytest.raises(InputError, match="Column 'image' of .*, not a column of pictures"):
        Flickr30k(pictures=True).survey(inputs(path), None)


def test_folders_do_not_matter(write_text: Any, read_whole: Any, tmp_path: Path) -> None:
    first = read_whole(Flickr30k(), write_text("a/results.csv", PIPED))
    second = read_whole(Flickr30k(), write_text("b/results.csv", PIPED))
    assert first.records == second.records and first.texts == second.texts


@pytest.mark.parametrize(
    "data",
    [
        b"\xef\xbb\xbf1000_ab.jpg\n",
        b"1000_ab.jpg#0\n1000_ab.jpg#1\n",
        b"1000_ab.JPG\n",
        b"1000_ab\n",
        b" 1000_ab.jpg \r\n\n",
    ],
)
def test_a_list_names_pictures_in_any_spelling(data: bytes, write_text: Any, read_whole: Any) -> None:
    paths = [write_text("Flickr8k.token.txt", TOKEN), write_text("test_2016_images.txt", data)]
    assert Flickr30k().reads("test_2016_images.txt")
    whole = read_whole(Flickr30k(), *paths)
    splits = {r["source_id"]: r["split"] for r in whole.records}
    assert splits == {"1000_ab": "test", "2000_cd": "rest", "3000": "rest"}
    assert any("2 pictures are in no list" in note for note in whole.survey.notes)


def test_a_list_of_another_set_is_refused(write_text: Any, inputs: Any, read_whole: Any) -> None:
    token = write_text("Flickr8k.token.txt", TOKEN)
    with pytest.raises(InputError, match="None of the 1 pictures that train.txt name has a caption here"):
        Flickr30k().survey(inputs(token, write_text("train.txt", b"77.jpg\n")), None)
    with pytest.raises(InputError, match=r"train\.txt is UTF-16"):
        Flickr30k().survey(inputs(token, write_text("train.txt", "1000_ab.jpg\n".encode("utf-16"))), None)
    whole = read_whole(Flickr30k(), token, write_text("train.txt", b"77.jpg\n3000.jpg\n"))
    assert any("1 of 2 pictures that train.txt name have no caption here" in note for note in whole.survey.notes)


def test_a_continuation_with_a_separator_in_it_never_leaves_half_a_caption(write_text: Any, read_whole: Any) -> None:
    cut = PIPED.replace(b"| A dog runs .", b"| A dog and\n2 men| 3 dogs run")
    whole = read_whole(Flickr30k(), write_text("results.csv", cut))
    assert [reason for _, reason in rejected(whole)] == ["malformed_record"] * 2
    assert not any("separator" in note for note in whole.survey.notes)


def test_rows_that_an_open_quote_swallowed_are_rejects_one_by_one(write_text: Any, read_whole: Any) -> None:
    data = b'image,caption\na.jpg,"A dog runs\nb.jpg,A cat sits\nc.jpg,A sign says stop"\nd.jpg,"A\nbird"\n'
    whole = read_whole(Flickr8k(), write_text("captions.txt", data))
    assert [text for text, _ in rejected(whole)] == [b"A dog runs", b"b.jpg,A cat sits", b"c.jpg,A sign says stop"]
    assert texts_by_scene(whole)["d"] == [b"A\nbird"]


def test_a_file_without_its_last_line_end_may_be_cut(write_text: Any, read_whole: Any) -> None:
    for name in ("results.csv", "r.token", "captions.txt"):
        data = {"results.csv": PIPED, "r.token": TOKEN, "captions.txt": COMMA}[name]
        assert not any("cut short" in n for n in read_whole(Flickr30k(), write_text(name, data)).survey.notes)
        assert any("cut short" in n for n in read_whole(Flickr30k(), write_text(name, data[:-1])).survey.notes)


def test_the_sister_set_is_refused_by_the_names_of_its_pictures(write_text: Any, inputs: Any) -> None:
    eight = write_text("a.token", b"1000268201_693b08cb0e.jpg#0\tA child\n")
    thirty = write_text("b.token", b"1000268201.jpg#0\tA child\n")
    with pytest.raises(InputError, match=r"names of flickr8k \(such as 1000268201_693b08cb0e\.jpg\), not of flickr30k"):
        Flickr30k().survey(inputs(eight), None)
    with pytest.raises(InputError, match="Use the source flickr30k"):
        Flickr8k().survey(inputs(thirty), None)
    assert Flickr8k().survey(inputs(eight), None).pieces and Flickr30k().survey(inputs(thirty), None).pieces


def test_a_blank_split_beside_others_is_refused(write_text: Any, write_parquet: Any, inputs: Any) -> None:
    blank = write_text("a.csv", ANNOTATIONS.replace(b",val,", b",,"))
    with pytest.raises(InputError, match="names no split for 2000_cd"):
        Flickr30k().survey(inputs(blank), None)
    columns = {"caption": [["a"]] * 2, "filename": ["a.jpg", "b.jpg"], "split": ["train", None]}
    with pytest.raises(InputError, match="names no split for b"):
        Flickr30k().survey(inputs(write_parquet("x.parquet", pa.table(columns))), None)
    assert Flickr30k(split="test").survey(inputs(blank), None).pieces


def test_lines_that_end_in_cr_alone_are_refused(write_text: Any, inputs: Any) -> None:
    with pytest.raises(InputError, match="its lines end in CR alone"):
        Flickr30k().survey(inputs(write_text("a.token", TOKEN.replace(b"\n", b"\r"))), None)
