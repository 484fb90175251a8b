"""Pictures as encoders want them: decoded, and resized for the one model that brings no processor of its own.

Invariant: a picture that cannot be read whole is an InputError, never a grey square.
"""

from __future__ import annotations

import io
from typing import Final

import numpy as np
from numpy.typing import NDArray
from PIL import Image

from infra.errors import InputError

EFFICIENTNET_PREPROCESSING: Final = "shorter side to 256 px, bicubic; centre 224 x 224; (x - 127) / 128"


def decode(data: bytes) -> Image.Image:
    """The first frame in RGB. Raises InputError when the bytes are no whole picture that Pillow reads."""
    try:
        with Image.open(io.BytesIO(data)) as image:
            return image.convert("RGB")
    except (OSError, ValueError, SyntaxError, Image.DecompressionBombError) as error:
        raise InputError(f"{len(data):,} bytes are no picture that can be read ({error}).") from error


def efficientnet_pixels(image: Image.Image) -> NDArray[np.float32]:
    """(3, 224, 224), the preprocessing that the weights were trained with.

    Found by comparing with features made elsewhere: this one gives cosine 1.000, a stretched square .85, a crop without
    the margin of 32 px .93.
    """
    width, height = image.size
    scale = 256 / min(width, height)
    large = image.resize((round(width * scale), round(height * scale)), Image.Resampling.BICUBIC)
    left, top = (large.width - 224) // 2, (large.height - 224) // 2
    pixels_HWC = np.asarray(large.crop((left, top, left + 224, top + 224)), np.float32)
    normal: NDArray[np.float32] = ((pixels_HWC - np.float32(127)) / np.float32(128)).transpose(2, 0, 1)
    return normal
