"""`pipelines.sources.pictures`: what becomes of each encoding."""

from __future__ import annotations

import hashlib
import io

import numpy as np
import pytest
from PIL import Image

from pipelines.sources.pictures import carried


def encoded(picture: Image.Image, encoding: str) -> bytes:
    sink = io.BytesIO()
    picture.save(sink, encoding)
    return sink.getvalue()


def test_a_jpeg_keeps_its_bytes(jpeg: bytes) -> None:
    found = carried(jpeg)
    assert (found.data, found.width, found.height) == (jpeg, 8, 6)
    assert found.sha256 == hashlib.sha256(jpeg).hexdigest()


@pytest.mark.parametrize("mode", ["RGB", "L", "P", "1", "CMYK", "I;16", "LA", "RGBA"])
def test_any_other_becomes_a_jpeg_of_the_same_size(mode: str) -> None:
    encoding = "TIFF" if mode == "CMYK" else "PNG"
    data = encoded(Image.new(mode, (9, 5)), encoding)
    found = carried(data)
    assert found.data is not None and found.sha256 == hashlib.sha256(data).hexdigest()
    again = Image.open(io.BytesIO(found.data))
    assert (again.format, again.mode, again.size) == ("JPEG", "RGB", (9, 5))


def test_transparent_parts_are_white_and_opaque_ones_keep_their_colour() -> None:
    picture = Image.new("RGBA", (16, 8), (255, 0, 0, 255))
    picture.paste((0, 255, 0, 0), (8, 0, 16, 8))
    found = carried(encoded(picture, "PNG"))
    assert found.data is not None
    pixels = np.asarray(Image.open(io.BytesIO(found.data)), np.int64)
    assert abs(pixels[:, :7] - [255, 0, 0]).max() < 8
    assert abs(pixels[:, 9:] - 255).max() < 8


@pytest.mark.parametrize("data", [b"", b"?", b"\xff\xd8\xff", b"GIF89a", b"\x89PNG\r\n\x1a\n"])
def test_what_is_no_picture_has_a_hash_and_no_bytes(data: bytes) -> None:
    found = carried(data)
    assert (found.data, found.width) == (None, None) and len(found.sha256) == 64


def test_a_picture_cut_short_has_no_bytes(png: bytes) -> None:
    assert carried(png[:-30]).data is None
