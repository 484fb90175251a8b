"""Pictures of samples: what is carried, and which of several."""

from __future__ import annotations

import hashlib
import io
from pathlib import Path
from typing import Any

import pytest
from PIL import Image

from pipelines.sources.tars.webdataset_tars import WebdatasetTars
from tests.pipelines.sources.tar_files import picture, write_tar

SOURCE = WebdatasetTars()


@pytest.mark.parametrize("name", ["jpg", "jpeg", "png", "webp"])
def test_a_picture_is_what_its_bytes_say(read_whole: Any, tmp_path: Path, name: str) -> None:
    jpeg, webp = picture(5), picture(5, "WEBP")
    path = write_tar(tmp_path / "a.tar", [(f"1.{name}", jpeg), ("1.txt", b"a"), (f"2.{name}", webp), ("2.txt", b"b")])
    one, two = read_whole(SOURCE, path).records
    assert one["image"] == jpeg
    assert two["image"] != webp and two["image_sha256"] == hashlib.sha256(webp).hexdigest()
    assert Image.open(io.BytesIO(two["image"])).format == "JPEG"


def test_a_picture_that_cannot_be_read_or_is_too_large_carries_no_bytes(
    read_whole: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    large = picture(5, px=64)
    monkeypatch.setattr("pipelines.sources.tars.tar_records.PICTURE_BYTES_MAX", len(large) - 1)
    path = write_tar(tmp_path / "a.tar", [("1.jpg", b"<html>"), ("1.txt", b"a"), ("2.jpg", large), ("2.txt", b"b")])
    one, two = read_whole(SOURCE, path).records
    assert one["image"] is None and one["image_sha256"] == hashlib.sha256(b"<html>").hexdigest()
    assert two["image"] is None and two["image_sha256"] is None and two["image_uri"] == "a.tar/2.jpg"


def test_a_second_picture_is_a_record_of_the_same_scene(read_whole: Any, tmp_path: Path) -> None:
    members = [("1.left.png", picture(1, "PNG")), ("1.right.jpg", picture(2)), ("1.jpg", picture(3)), ("1.txt", b"a")]
    whole = read_whole(SOURCE, write_tar(tmp_path / "a.tar", members))
    assert [r["image_uri"] for r in whole.records] == ["a.tar/1.jpg", "a.tar/1.right.jpg", "a.tar/1.left.png"]
    assert len(set(whole.ids)) == 1 and [t["record"] for t in whole.texts] == [0]
    assert [r["image"] is not None for r in whole.records] == [True, False, False]


def test_frames_are_carried_with_their_numbers(read_whole: Any, tmp_path: Path) -> None:
    names = ["f1000.jpg", "f002.png", "f000.jpg", "f000.png", "left.jpg"]
    members = [(f"1.{name}", picture(n, "PNG" if "png" in name else "JPEG")) for n, name in enumerate(names)]
    whole = read_whole(SOURCE, write_tar(tmp_path / "a.tar", [*members, ("1.txt", b"a dog runs")]))
    assert [(r["image_uri"].partition("1.")[2], r["frame"], r["image"] is not None) for r in whole.records] == [
        ("left.jpg", None, True),
        ("f000.jpg", 0, True),
        ("f000.png", 0, False),
        ("f002.png", 2, True),
        ("f1000.jpg", 1000, True),
    ]
    assert [t["record"] for t in whole.texts] == [0] and len(set(whole.ids)) == 1
    assert whole.survey.columns["fNNN.jpg"] == "image, frame"
