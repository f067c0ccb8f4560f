"""Supply images for probes: the user's tensor, images of a corpus, or noise."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import nn
from transformers import AutoImageProcessor

from lamina.data.blocks import spread
from lamina.data.corpus import EMBEDDED, MNIST
from lamina.errors import UserError, one_line
from lamina.lab.vision.image_items import pixels_of
from lamina.lab.vision.labeled_images import open_images
from lamina.probes.engine.inputs import NOISE, Inputs

if TYPE_CHECKING:
    from PIL.Image import Image
    from transformers.image_processing_utils import BaseImageProcessor


def read_images(given: Inputs, corpus: str, model: nn.Module, count: int, seed: int) -> torch.Tensor:
    """Return images [images, channels, height, width] of the model's size. Raises UserError for another shape."""
    config: Any = getattr(model, "config", None)
    text = config.get_text_config()
    size = getattr(text, "image_size", None) or getattr(config, "image_size", 224)
    channels = getattr(text, "num_channels", None) or getattr(config, "num_channels", 3)
    height, width = size if isinstance(size, list | tuple) else (size, size)
    shape = (channels, height, width)
    if given is None and corpus in (NOISE, EMBEDDED):
        return torch.randn(count, *shape, generator=torch.Generator().manual_seed(seed))
    folder = Path(getattr(model, "name_or_path", "") or "")
    has_processor = given is None and (folder / "preprocessor_config.json").is_file()
    processor = AutoImageProcessor.from_pretrained(folder, trust_remote_code=False) if has_processor else None
    images = _from_corpus(corpus, shape, count, processor) if given is None else torch.as_tensor(given)
    if not images.is_floating_point() or images.ndim != 4 or tuple(images.shape[1:]) != shape:
        raise UserError(
            f"images: {images.dtype} of shape {list(images.shape)} does not fit. Give floating-point values of shape "
            f"{['images', *shape]}."
        )
    return images[spread(len(images), count)].float()


def _from_corpus(
    corpus: str, shape: tuple[int, int, int], count: int, processor: BaseImageProcessor | None
) -> torch.Tensor:
    """Read images from a .npy file, from a .csv file of labeled pixels, or from a folder of image files.

    The image processor resizes and normalizes images. Without an image processor, Lamina resizes images and scales
    pixel values to the range -1 to 1. Lamina does not change the values of a .npy file.
    """
    path = Path(corpus)
    if corpus == MNIST or corpus.endswith((".csv", ".csv.gz")):
        labeled = open_images(corpus)
        return _pixels([labeled.image(i) for i in spread(len(labeled.labels), count)], shape, processor)
    allowed = f"noise, a .npy file of [images, {', '.join(map(str, shape))}], or a folder of .png or .jpg files"
    if path.suffix == ".npy" and path.is_file():
        try:
            return torch.from_numpy(np.load(path, allow_pickle=False)).float()
        except (ValueError, OSError) as error:
            raise UserError(f"corpus: Lamina cannot read {str(path)!r} ({error}). Give {allowed}.") from None
    files = sorted(p for p in path.rglob("*") if p.suffix.lower() in (".png", ".jpg", ".jpeg")) if path.is_dir() else []
    if not files:
        raise UserError(f"corpus: there are no images at {str(path)!r}. Give {allowed}.")
    try:
        from PIL import Image
    except ImportError:
        raise UserError(
            "corpus: Lamina reads images with Pillow. Give a .npy file, or run: pip install pillow"
        ) from None
    pictures = []
    for index in spread(len(files), count):
        try:
            with Image.open(files[index]) as picture:
                pictures.append(picture.convert("RGB" if shape[0] == 3 else "L"))
        except (OSError, ValueError, SyntaxError) as error:
            raise UserError(
                f"corpus: Lamina cannot read the image {str(files[index])!r} ({one_line(error)}). Fix or remove the "
                "image."
            ) from None
    return _pixels(pictures, shape, processor)


def _pixels(
    pictures: Sequence[Image], shape: tuple[int, int, int], processor: BaseImageProcessor | None
) -> torch.Tensor:
    if processor is not None:
        return torch.stack([pixels_of(picture, processor) for picture in pictures])
    resized = [picture.resize((shape[2], shape[1])) for picture in pictures]
    arrays = [np.asarray(picture, dtype=np.float32).reshape(shape[1], shape[2], shape[0]) for picture in resized]
    return torch.from_numpy(np.stack(arrays)).permute(0, 3, 1, 2) / 127.5 - 1
