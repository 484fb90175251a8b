"""Pictures inside tables and tars, as the JPEG that view tars hold.

Invariant: a JPEG keeps its bytes, whatever its name says. Pillow encodes any other picture as an upright JPEG, so its
version is part of the dataset's. A picture that Pillow cannot read has no bytes, but keeps its sha256.
"""

from __future__ import annotations

import hashlib
import io
import warnings
from dataclasses import dataclass
from typing import Any, Final

import PIL
import pyarrow as pa
import pyarrow.compute as pc
from PIL import Image, ImageOps

PICTURE_ROWS: Final = 1_000
"""Rows of one piece of a table with pictures: about 140 MB of pictures of Flickr30k."""

PICTURE_BATCH_BYTES: Final = 64 << 20

QUALITY: Final = 95
"""JPEG quality; at 95 without chroma subsampling the error is about that of rounding to 8 bits."""

FORMATS: Final = ("JPEG", "PNG", "WEBP", "GIF", "BMP", "TIFF")
"""Formats of pictures on the web. Pillow hands some of its others to programs that a machine may lack."""

WRITERS: Final = {"pillow": PIL.__version__}
_JPEG: Final = b"\xff\xd8\xff"


@dataclass(frozen=True, kw_only=True)
class EmbeddedImage:
    """One picture. data: JPEG, None when it cannot be read. sha256: of the bytes in the source. Sizes in pixels."""

    data: bytes | None
    sha256: str
    width: int | None = None
    height: int | None = None

    @property
    def columns(self) -> dict[str, Any]:
        """The columns of RECORDS that describe the picture."""
        return {"image": self.data, "image_sha256": self.sha256, "width": self.width, "height": self.height}


def embedded_image(raw: bytes) -> EmbeddedImage:
    """The picture that has these encoded bytes."""
    sha256 = hashlib.sha256(raw).hexdigest()
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("error", Image.DecompressionBombWarning)
            with Image.open(io.BytesIO(raw), formats=FORMATS) as picture:
                shown: Image.Image = picture
                data = raw
                if not raw.startswith(_JPEG):
                    shown = ImageOps.exif_transpose(picture)
                    data = _as_jpeg(shown)
                width, height = shown.size
    except (OSError, ValueError, SyntaxError, Image.DecompressionBombError, Image.DecompressionBombWarning):
        return EmbeddedImage(data=None, sha256=sha256)
    return EmbeddedImage(data=data, sha256=sha256, width=width, height=height)


def picture_columns(column: pa.Array) -> dict[str, pa.Array]:
    """Columns of RECORDS for a column of pictures as the library `datasets` stores them: struct<bytes, path>."""
    found = [None if raw is None else embedded_image(raw) for raw in pc.struct_field(column, "bytes").to_pylist()]
    return {
        "image": pa.array([f and f.data for f in found], pa.large_binary()),
        "image_sha256": pa.array([f and f.sha256 for f in found], pa.large_string()),
        "width": pa.array([f and f.width for f in found], pa.int32()),
        "height": pa.array([f and f.height for f in found], pa.int32()),
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
