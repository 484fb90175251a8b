"""Pictures that a table carries, as the JPEG that view tars hold.

Owns: what becomes of each encoding. Does not own: where pictures come from, their decoding for an encoder.
Invariant: a picture that is JPEG keeps its bytes, whatever its name says; any other becomes JPEG by Pillow, upright, whose version is then part
of the dataset's; what Pillow cannot read carries no bytes, and its sha256 still tells it apart.
"""

from __future__ import annotations

import hashlib
import io
import warnings
from dataclasses import dataclass
from typing import Final

import PIL
from PIL import Image, ImageOps

QUALITY: Final = 95
"""Of pictures that were not JPEG; at 95 without chroma subsampling the error is about that of rounding to 8 bits."""

FORMATS: Final = ("JPEG", "PNG", "WEBP", "GIF", "BMP", "TIFF")
"""Of the web's pictures. Pillow knows more, some of which it hands to programs that a machine may have or not."""

WRITERS: Final = {"pillow": PIL.__version__}
_JPEG: Final = b"\xff\xd8\xff"


@dataclass(frozen=True, kw_only=True)
class Carried:
    """One picture. data: JPEG, None when it could not be read. sha256: of the bytes in the source. width, height: in pixels."""

    data: bytes | None
    sha256: str
    width: int | None = None
    height: int | None = None


def carried(raw: bytes) -> Carried:
    """The picture whose encoded bytes these are."""
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
        return Carried(data=None, sha256=sha256)
    return Carried(data=data, sha256=sha256, width=width, height=height)


def _as_jpeg(picture: Image.Image) -> bytes:
    """Transparent parts are shown on white, as a page shows them."""
    if picture.has_transparency_data:
        shown = Image.new("RGBA", picture.size, "white")
        shown.alpha_composite(picture.convert("RGBA"))
        picture = shown
    sink = io.BytesIO()
    picture.convert("RGB").save(sink, "JPEG", quality=QUALITY, subsampling=0)
    return sink.getvalue()
