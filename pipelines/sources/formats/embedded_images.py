"""Pictures inside tables and tars, as the JPEG that view tars hold.

Invariant: a JPEG keeps its bytes, whatever its name says. Pillow encodes any other picture as an upright JPEG, so its
version is part of the dataset's. Every picture is decoded once, to its end. One that cannot be decoded has no bytes and
a fault, but keeps its sha256.
"""

from __future__ import annotations

import hashlib
import io
import re
import struct
import warnings
import zlib
from dataclasses import dataclass
from typing import Any, Final

import PIL
import pyarrow as pa
import pyarrow.compute as pc
from PIL import Image, ImageOps, UnidentifiedImageError

PICTURE_ROWS: Final = 1_000
"""Rows of one piece of a table with pictures: about 140 MB of pictures of Flickr30k."""

PICTURE_BATCH_BYTES: Final = 64 << 20

QUALITY: Final = 95
"""JPEG quality; at 95 without chroma subsampling the error is about that of rounding to 8 bits."""

FORMATS: Final = ("JPEG", "PNG", "WEBP", "GIF", "BMP", "TIFF")
"""Formats of pictures on the web. Pillow hands some of its others to programs that a machine may lack."""

RULES: Final = "2"
"""Raise it when other pictures pass, or their bytes change. Rule 2: cut JPEGs are rejects, and pictures are counted."""

WRITERS: Final = {"pillow": PIL.__version__, "pictures": RULES}
_JPEG: Final = b"\xff\xd8\xff"
_ADDRESS: Final = re.compile(r" ?<[^>]* at 0x[0-9a-f]+>")


@dataclass(frozen=True, kw_only=True)
class EmbeddedImage:
    """One picture. data: JPEG, None when it is rejected. sha256: of the bytes in the source. Sizes in pixels.

    fault: None, or "reason: detail" of the reject.
    """

    data: bytes | None
    sha256: str
    width: int | None = None
    height: int | None = None
    fault: str | None = None

    def columns(self, field: str) -> dict[str, Any]:
        """The columns of RECORDS that describe the picture of this column or member."""
        return {
            "image": self.data,
            "image_sha256": self.sha256,
            "width": self.width,
            "height": self.height,
            "image_field": field,
            "image_fault": self.fault,
        }


def embedded_image(raw: bytes) -> EmbeddedImage:
    """The picture that has these encoded bytes, decoded to their end."""
    sha256 = hashlib.sha256(raw).hexdigest()
    size: tuple[int, int] | None = None
    try:
        with warnings.catch_warnings():
            # Pillow warns of odd metadata, which no user can act on. A picture above its limit of pixels is a reject.
            warnings.simplefilter("ignore")
            warnings.simplefilter("error", Image.DecompressionBombWarning)
            with Image.open(io.BytesIO(raw), formats=FORMATS) as picture:
                size = picture.size
                if not raw.startswith(_JPEG):
                    shown = ImageOps.exif_transpose(picture)
                    size = shown.size
                    data = _as_jpeg(shown)
                else:
                    data = raw
                    _decode_small(picture)
    except (Image.DecompressionBombError, Image.DecompressionBombWarning):
        return EmbeddedImage(data=None, sha256=sha256, fault=oversized(len(raw), "above the limit of pixels"))
    except UnidentifiedImageError:  # its message holds an address in memory, which differs between runs
        return EmbeddedImage(data=None, sha256=sha256, fault=_broken("in no format that is read", raw, size))
    except (OSError, ValueError, SyntaxError, EOFError, TypeError, IndexError, struct.error, zlib.error) as error:
        return EmbeddedImage(data=None, sha256=sha256, fault=_broken(_ADDRESS.sub("", str(error)), raw, size))
    return EmbeddedImage(data=data, sha256=sha256, width=size[0], height=size[1])


def oversized(size: int, why: str) -> str:
    """The fault of a picture of so many bytes that is not decoded."""
    limit = f"{Image.MAX_IMAGE_PIXELS:,}" if Image.MAX_IMAGE_PIXELS else "any number of"
    return f"oversized_image: {why}; {size:,} bytes; at most {limit} pixels are decoded"


def _broken(why: str, raw: bytes, size: tuple[int, int] | None) -> str:
    pixels = f", {size[0]} x {size[1]} pixels by its header" if size else ""
    return f"broken_image: {why or 'not decoded'}; {len(raw):,} bytes{pixels}"


def _decode_small(picture: Image.Image) -> None:
    """Decode a JPEG at an eighth of its size: all data is read, in half of the time and 1/64 of the memory."""
    picture.draft("L", (1, 1))
    picture.load()


def picture_columns(column: pa.Array, field: str) -> dict[str, pa.Array]:
    """Columns of RECORDS for a column of pictures as the library `datasets` stores them: struct<bytes, path>.

    field: the name of the column. A row whose bytes are null carries no picture.
    """
    found = [None if raw is None else embedded_image(raw) for raw in pc.struct_field(column, "bytes").to_pylist()]
    return {
        "image": pa.array([f and f.data for f in found], pa.large_binary()),
        "image_sha256": pa.array([f and f.sha256 for f in found], pa.large_string()),
        "width": pa.array([f and f.width for f in found], pa.int32()),
        "height": pa.array([f and f.height for f in found], pa.int32()),
        "image_field": pa.array([f and field for f in found], pa.string()).dictionary_encode(),
        "image_fault": pa.array([f and f.fault for f in found], pa.large_string()),
    }


def is_picture(kind: pa.DataType) -> bool:
    """Whether a column of this type holds pictures as the library `datasets` stores them."""
    if not pa.types.is_struct(kind) or kind.get_field_index("bytes") < 0:
        return False
    inner = kind.field("bytes").type
    return bool(pa.types.is_binary(inner) or pa.types.is_large_binary(inner))


def _as_jpeg(picture: Image.Image) -> bytes:
    """JPEG has no transparency: transparent parts become white, as on a web page."""
    if picture.has_transparency_data:
        shown = Image.new("RGBA", picture.size, "white")
        shown.alpha_composite(picture.convert("RGBA"))
        picture = shown
    sink = io.BytesIO()
    picture.convert("RGB").save(sink, "JPEG", quality=QUALITY, subsampling=0)
    return sink.getvalue()
