"""Images of other depths than 8 bits per channel, which Pillow would cut off at 255 rather than scale."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from PIL.Image import Image

_LARGEST = 65_535  # of 16 bits


def in_8_bits(picture: Image, mode: str) -> Image:
    """The image in a mode of 8 bits per channel (L or RGB); 16-bit gray levels keep their upper 8 bits.

    Raises ValueError for pixels whose range is unknown: floating-point numbers, or more than 16 bits.
    """
    from PIL import Image

    if picture.mode == "F":
        raise ValueError("its pixels are floating-point numbers, whose range is unknown; save it with 8 or 16 bits")
    if not picture.mode.startswith("I"):
        return picture.convert(mode)
    levels = np.asarray(picture).astype(np.int64)
    if levels.min() < 0 or levels.max() > _LARGEST:
        raise ValueError("its pixels have more than 16 bits; save it with 8 or 16 bits")
    return Image.fromarray((levels >> 8).astype(np.uint8)).convert(mode)
