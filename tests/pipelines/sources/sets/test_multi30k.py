from __future__ import annotations

import gzip
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from infra.errors import InputError
from pipelines.records import Piece
from pipelines.sources.sets.multi30k import Multi30k


@pytest.fixture
def release(tmp_path: Path) -> list[Path]:
    """Three splits in the folders of the data set's repository, gzipped and plain, with files that are not ours."""
    raw, lists = tmp_path / "task2" / "raw", tmp_path / "task2" / "image_splits"
    for folder in (raw, lists):
        folder.mkdir(parents=True)
    for split, size in (("train", 4), ("val", 2), ("test_2016", 1)):
        (lists / f"{split}_images.txt").write_text("".join(f"{split}{i}.jpg\n" for i in range(size)))
        for n in range(1, 6):
            lines = "".join(f"{split} {i} by {n}\n" for i in range(size)).encode()
            if split == "val":
                (raw / f"{split}.{n}.en").write_bytes(lines)
            else:
                (raw / f"{split}.{n}.en.gz").write_bytes(gzip.compress(lines))
    (lists / "test_2017_images.txt").write_text("x.jpg\n")
    (raw / "train.1.de.gz").write_bytes(b"")
    (tmp_path / "task2" / "README.md").write_text("#")
    return sorted(p for p in tmp_path.rglob("*") if p.is_file())


def test_line_i_of_five_files_is_of_picture_i(release: list[Path], read_whole: Any) -> None:
    whole = read_whole(Multi30k(), *release)
    assert len(whole.records) == 7 and len(whole.texts) == 35
    assert whole.texts_of("train2") == [(f"{n}.en", f"train 2 by {n}".encode()) for n in range(1, 6)]
    record = whole.records[whole.ids.index("train2")]
    assert (record["image_uri"], record["split"], record["source_row"]) == ("train2.jpg", "train", 2)
    assert record["source_uri"].endswith("train_images.txt")
    assert {r["split"] for r in whole.records} == {"train", "val", "test"}
    assert whole.records[whole.ids.index("test_20160")]["split"] == "test"
    assert any("test_2017_images.txt" in note for note in whole.survey.notes)


def test_order_of_inputs_does_not_matter(release: list[Path], inputs: Any) -> None:
    there = inputs(*release)
    assert Multi30k().survey(there, None).pieces == Multi30k().survey(there[::-1], None).pieces


def test_a_piece_can_be_cut_at_any_row(release: list[Path], read_whole: Any, read_pieces: Any) -> None:
    whole = read_whole(Multi30k(), *release)
    pieces = [
        # As a plain piece, which is how the job cuts shards.
        Piece(input=p.input, start=row, stop=row + 1, scenes_by_split=p.scenes_by_split)
        for p in whole.survey.pieces
        for row in range(p.stop)
    ]
    assert len(pieces) == 7
    assert read_pieces(Multi30k(), pieces) == (whole.records, whole.texts)
    cut = replace(whole.survey.pieces[0], stop=1)
    assert read_pieces(Multi30k(), [cut])[0] == whole.records[:1]


def test_a_limit_counts_lines_over_the_splits(release: list[Path], read_whole: Any) -> None:
    whole = read_whole(Multi30k(), *release)
    for limit in range(1, 9):
        assert read_whole(Multi30k(), *release, limit=limit).records == whole.records[:limit]


def test_a5_every_scene_needs_all_five_files(release: list[Path], inputs: Any) -> None:
    rest = [path for path in release if path.name != "val.3.en"]
    with pytest.raises(InputError, match=r"val, val\.3\.en is missing"):
        Multi30k().survey(inputs(*rest), None)


def test_files_whose_lines_do_not_match_are_refused(release: list[Path], inputs: Any) -> None:
    path = next(path for path in release if path.name == "val.3.en")
    path.write_bytes(path.read_bytes() + b"one more\n")
    with pytest.raises(InputError, match=r"val\.3\.en has 3 lines and .*val_images\.txt has 2"):
        Multi30k().survey(inputs(*release), None)


def test_captions_without_an_image_list_are_refused(release: list[Path], inputs: Any) -> None:
    rest = [path for path in release if path.name != "val_images.txt"]
    with pytest.raises(InputError, match=r"captions of val but no val_images\.txt"):
        Multi30k().survey(inputs(*rest), None)


def test_one_picture_twice_is_refused(release: list[Path], inputs: Any) -> None:
    path = next(path for path in release if path.name == "val_images.txt")
    path.write_text("val0.jpg\ntrain1.jpg\n")
    with pytest.raises(InputError, match=r"Picture train1\.jpg stands in .*train_images\.txt and again in line 2"):
        Multi30k().survey(inputs(*release), None)
    path.write_text("\nval1.jpg\n")
    with pytest.raises(InputError, match=r"Line 1 of .*val_images\.txt is empty"):
        Multi30k().survey(inputs(*release), None)


def test_one_file_twice_is_refused(release: list[Path], inputs: Any) -> None:
    plain = next(path for path in release if path.name == "val.3.en")
    zipped = plain.with_name("val.3.en.gz")
    zipped.write_bytes(gzip.compress(plain.read_bytes()))
    with pytest.raises(InputError, match="are the same file of Multi30k"):
        Multi30k().survey(inputs(*release, zipped), None)


def test_a_folder_without_captions_is_refused(write_text: Any, inputs: Any) -> None:
    with pytest.raises(InputError, match=r"None of the inputs is a caption file of Multi30k task 2.*train\.en"):
        Multi30k().survey(inputs(write_text("train.en", b"a\n")), None)


def test_bytes_of_a_line_are_kept(release: list[Path], read_whole: Any) -> None:
    path = next(path for path in release if path.name == "val.1.en")
    path.write_bytes(b" caf\x92 \r\n\x00")
    whole = read_whole(Multi30k(), *release)
    assert whole.texts_of("val0")[0] == ("1.en", b" caf\x92 \r")
    assert whole.texts_of("val1")[0] == ("1.en", b"\x00")
