"""Images as the tensors that a classifier takes: the held-out ones as they are, those of the training changed."""

from __future__ import annotations

from typing import TYPE_CHECKING, TypedDict

import numpy as np
import torch

from lamina.data.blocks import ItemSource, spread
from lamina.data.drawn.drawn_items import DrawnItems
from lamina.data.images.augmentation import Augmentation
from lamina.data.images.labeled_images import LabeledImages

if TYPE_CHECKING:
    from PIL.Image import Image
    from transformers.image_processing_utils import BaseImageProcessor


class ImageItem(TypedDict):
    """``pixel_values`` float [channels, height, width], ``labels`` the class, and ``draw``, a number of its own."""

    pixel_values: torch.Tensor
    labels: torch.Tensor
    draw: torch.Tensor


class ImageItems(ItemSource[ImageItem]):
    """Some images of a set, resized and normalized by an image processor of transformers.

    Args:
        images: the set.
        numbers: of the images to take, [items].
        processor: resizes, crops and normalizes.
        augmentation: how ``for_run`` changes the images of a training.
    """

    def __init__(
        self,
        images: LabeledImages,
        numbers: np.ndarray,
        processor: BaseImageProcessor,
        augmentation: Augmentation,
    ):
        self.images, self.numbers, self.processor, self.augmentation = images, numbers, processor, augmentation

    def __len__(self) -> int:
        return len(self.numbers)

    def __getitem__(self, index: int) -> ImageItem:
        return self._item(index, pixels_of(self.picture(index), self.processor))

    def _item(self, index: int, pixels: torch.Tensor) -> ImageItem:
        label = torch.tensor(int(self.images.labels[self.numbers[index]]))
        return {"pixel_values": pixels, "labels": label, "draw": torch.tensor(index)}

    def picture(self, index: int) -> Image:
        """The image itself."""
        return self.images.image(int(self.numbers[index]))

    def sample(self, count: int) -> torch.Tensor:
        """Pixel values [items, channels, height, width]."""
        return torch.stack([self[index]["pixel_values"] for index in spread(len(self), count)])

    def for_run(self, seed: int) -> AugmentedImages:
        return AugmentedImages(self, seed)


class AugmentedImages(DrawnItems[ImageItem]):
    """Images in the order of a run, each changed at random as its augmentation says."""

    source: ImageItems

    def __init__(self, source: ImageItems, seed: int):
        super().__init__(source, seed, training=True, repeats=source.augmentation.repeats)

    def __getitem__(self, index: int) -> ImageItem:
        number, augmentation = self.number(index), self.source.augmentation
        picture, processor = self.source.picture(number), self.source.processor
        generator = self.generator(index)
        cropped = augmentation.crop(picture, generator)
        pixels = pixels_of(picture, processor) if cropped is None else normalized(cropped, processor)
        item = self.source._item(number, pixels)
        item["draw"] = torch.tensor(index)
        return self.change(item, generator)

    def change(self, item: ImageItem, generator: torch.Generator) -> ImageItem:
        """Flip, distort and erase."""
        processor = self.source.processor
        pixels = self.source.augmentation.change(item["pixel_values"], generator, *statistics_of(processor))
        return {**item, "pixel_values": pixels}


def pixels_of(picture: Image, processor: BaseImageProcessor) -> torch.Tensor:
    """The pixel values of an image [channels, height, width] as the processor makes them."""
    side = getattr(processor, "size", {}).get("shortest_edge")
    if (
        picture.size == (side, side) and getattr(processor, "crop_pct", None) == 1.0
    ):  # nothing to resize: the same at half the time
        return normalized(picture, processor)
    array = np.asarray(picture)
    array = array[..., None] if array.ndim == 2 else array
    return processor(array, input_data_format="channels_last", return_tensors="pt")["pixel_values"][0]


def normalized(picture: Image, processor: BaseImageProcessor) -> torch.Tensor:
    """The pixel values of an image that has its size already: scaled to 0 to 1, then normalized."""
    array = np.asarray(picture, dtype=np.float32) / 255.0
    array = array[..., None] if array.ndim == 2 else array
    mean, std = statistics_of(processor)
    return (torch.from_numpy(array).permute(2, 0, 1) - mean) / std


def statistics_of(processor: BaseImageProcessor) -> tuple[torch.Tensor, torch.Tensor]:
    """A processor's mean and standard deviation by channel, each [channels, 1, 1]."""
    mean, std = (torch.tensor(getattr(processor, name)).view(-1, 1, 1) for name in ("image_mean", "image_std"))
    return mean, std
