"""`pipelines.sources.formats.embedded_images`: what becomes of each encoding."""

from __future__ import annotations

import hashlib
import io

import numpy as np
import pytest
from PIL import Image

from pipelines.sources.formats.embedded_images import embedded_image


def encoded(picture: Image.Image, encoding: str) -> bytes:
    sink = io.BytesIO()
    picture.save(sink, encoding)
    return sink.getvalue()


def test_a_jpeg_keeps_its_bytes(jpeg: bytes) -> None:
    found = embedded_image(jpeg)
    assert (found.data, found.width, found.height) == (jpeg, 8, 6)
    assert found.sha256 == hashlib.sha256(jpeg).hexdigest()


@pytest.mark.parametrize("mode", ["RGB", "L", "P", "1", "CMYK", "I;16", "LA", "RGBA"])
def test_any_other_becomes_a_jpeg_of_the_same_size(mode: str) -> None:
    encoding = "TIFF" if mode == "CMYK" else "PNG"
    data = encoded(Image.new(mode, (9, 5)), encoding)
    found = embedded_image(data)
    assert found.data is not None and found.sha256 == hashlib.sha256(data).hexdigest()
    again = Image.open(io.BytesIO(found.data))
    assert (again.format, again.mode, again.size) == ("JPEG", "RGB", (9, 5))


def test_transparent_parts_are_white_and_opaque_ones_keep_their_colour() -> None:
    picture = Image.new("RGBA", (16, 8), (255, 0, 0, 255))
    picture.paste((0, 255, 0, 0), (8, 0, 16, 8))
    found = embedded_image(encoded(picture, "PNG"))
    assert found.data is not None
    pixels = np.asarray(Image.open(io.BytesIO(found.data)), np.int64)
    assert abs(pixels[:, :7] - [255, 0, 0]).max() < 8
    assert abs(pixels[:, 9:] - 255).max() < 8


@pytest.mark.parametrize("data", [b"", b"?", b"\xff\xd8\xff", b"GIF89a", b"\x89PNG\r\n\x1a\n"])
def test_what_is_no_picture_has_a_hash_and_no_bytes(data: bytes) -> None:
    found = embedded_image(data)
    assert (found.data, found.width) == (None, None) and len(found.sha256) == 64


def test_a_picture_cut_short_has_no_bytes(png: bytes) -> None:
    assert embedded_image(png[:-30]).data is None


@pytest.mark.parametrize("encoding", ["PPM", "ICO", "TGA", "PCX", "SGI", "DDS", "EPS"])
def test_formats_that_are_none_of_the_web_are_not_opened(encoding: str) -> None:
    assert embedded_image(encoded(Image.new("RGB", (16, 16)), encoding)).data is None


def test_a_turned_picture_becomes_upright() -> None:
    picture = Image.new("RGB", (16, 8), (255, 0, 0))
    exif = Image.Exif()
    exif[0x0112] = 6  # to be turned by 90 degrees
    sink = io.BytesIO()
    picture.save(sink, "WEBP", exif=exif, lossless=True)
    found = embedded_image(sink.getvalue())
    assert found.data is not None and (found.width, found.height) == (8, 16)
    again = Image.open(io.BytesIO(found.data))
    assert again.size == (8, 16) and 0x0112 not in again.getexif()
