"""Convert images to input tensors for a classifier, and augment training images."""

from __future__ import annotations

import hashlib
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, TypedDict

import numpy as np
import torch

from lamina.core.extras import install
from lamina.data.blocks import DrawnItems, ItemSource, Splits, Stats, spread
from lamina.data.corpus import FileCorpus, single_corpus
from lamina.errors import UserError
from lamina.lab.vision.labeled_images import LabeledImages, class_entropy, open_images, pillow, split

if TYPE_CHECKING:
    from PIL.Image import Image
    from transformers.image_processing_utils import BaseImageProcessor

OPERATIONS = 2  # RandAugment operations per image, as in DeiT and ConvNeXt
_MAGNITUDES = 30  # kornia's magnitudes lie between 0 and 30
_RATIO = (3.0 / 4.0, 4.0 / 3.0)
_ERASED, _ERASED_RATIO = (0.02, 1.0 / 3.0), (0.3, 3.3)
_SEEDS = 2**62


@dataclass(frozen=True, kw_only=True)
class Augmentation:
    """The augmentation of training images. The default values change nothing."""

    size: int  # the width and height of an image after cropping and resizing, in pixels
    # the smallest area of a random crop, as a fraction of the image's area. 1 means no random crops
    crop_scale: float = 1.0
    flip: float = 0.0  # the probability of a horizontal flip
    rand_augment: float = 0.0  # the strength of RandAugment (Cubuk et al. 2020, arXiv 1909.13719), from 0 (off) to 1
    random_erasing: float = 0.0  # the probability that noise replaces a rectangle (Zhong et al. 2020, arXiv 1708.04896)
    repeats: int = 1  # the number of augmented copies of each image (Hoffer et al. 2020, arXiv 1901.09335)

    def check(self) -> None:
        needed = [name for name in ("rand_augment", "random_erasing") if getattr(self, name)]
        if not needed:
            return
        try:
            import kornia.augmentation  # noqa: F401
        except ImportError:
            raise UserError(
                f"{needed[0]}: {getattr(self, needed[0])} needs the library kornia. Set {needed[0]} to 0, or run: "
                f"{install('vision')}"
            ) from None

    def crop(self, picture: Image, generator: torch.Generator) -> Image | None:
        """Crop an image at random, and resize the crop to a square. Returns None if random crops are off."""
        if self.crop_scale >= 1.0:
            return None
        from PIL import Image

        box = crop_box(*picture.size, self.crop_scale, generator)
        return picture.resize((self.size, self.size), Image.Resampling.BICUBIC, box=box)

    def change(
        self, pixels: torch.Tensor, generator: torch.Generator, mean: torch.Tensor, std: torch.Tensor
    ) -> torch.Tensor:
        """Flip, distort and erase a normalized image [channels, height, width].

        The normalization used the given mean and standard deviation, both [channels, 1, 1].
        """
        if self.flip and _uniform(generator) < self.flip:
            pixels = pixels.flip(-1)
        if not (self.rand_augment or self.random_erasing):
            return pixels
        import kornia.augmentation as kornia
        from kornia.augmentation.auto import RandAugment

        with torch.random.fork_rng(devices=[]):  # kornia draws from torch's global generator
            torch.manual_seed(int(torch.randint(_SEEDS, (), generator=generator)))
            batch = pixels[None]
            if self.rand_augment:
                magnitude = min(max(1, round(self.rand_augment * _MAGNITUDES)), _MAGNITUDES - 1)
                distort = RandAugment(n=OPERATIONS, m=magnitude)
                plain = (batch * std + mean).clamp(0.0, 1.0)  # RandAugment needs values from 0 to 1
                # some operations need RGB; the three channels of a gray image stay equal
                distorted = distort(plain.expand(-1, 3, -1, -1))[:, : plain.shape[1]]
                batch = (distorted - mean) / std
            if self.random_erasing and _uniform(generator) < self.random_erasing:
                erase = kornia.RandomErasing(scale=_ERASED, ratio=_ERASED_RATIO, p=1.0)
                ones = erase(torch.ones_like(batch[:, :1]))  # 0 marks the noise, as in DeiT's "pixel" mode
                batch = torch.where(ones == 0, torch.randn(batch.shape), batch)
        return batch[0]


def crop_box(width: int, height: int, smallest: float, generator: torch.Generator) -> tuple[int, int, int, int]:
    """Draw a random crop (left, upper, right, lower) as Inception does (Szegedy et al. 2015, arXiv 1409.4842).

    The crop's area is uniform between the fraction ``smallest`` of the image and the whole image. The aspect ratio is
    log-uniform between 3/4 and 4/3. If ten draws do not fit into the image, Lamina returns the largest centered crop
    with an allowed aspect ratio.
    """
    low, high = map(math.log, _RATIO)
    for _ in range(10):
        area = width * height * (smallest + (1.0 - smallest) * _uniform(generator))
        ratio = math.exp(low + (high - low) * _uniform(generator))
        wide, tall = round(math.sqrt(area * ratio)), round(math.sqrt(area / ratio))
        if 0 < wide <= width and 0 < tall <= height:
            left = int(torch.randint(width - wide + 1, (), generator=generator))
            upper = int(torch.randint(height - tall + 1, (), generator=generator))
            return left, upper, left + wide, upper + tall
    wide, tall = min(width, round(height * _RATIO[1])), min(height, round(width / _RATIO[0]))
    left, upper = (width - wide) // 2, (height - tall) // 2
    return left, upper, left + wide, upper + tall


def _uniform(generator: torch.Generator) -> float:
    return float(torch.rand((), generator=generator))


class ImageItem(TypedDict):
    """An image's pixel values (float [channels, height, width]), class number, and position in the training order."""

    pixel_values: torch.Tensor
    labels: torch.Tensor
    draw: torch.Tensor


@dataclass(frozen=True, eq=False)
class ImageItems(ItemSource[ImageItem]):
    """The images of the training set or held-out set. ``numbers`` has the images' indices in ``images``, [items]."""

    images: LabeledImages
    numbers: np.ndarray
    processor: BaseImageProcessor
    augmentation: Augmentation

    def __len__(self) -> int:
        return len(self.numbers)

    def __getitem__(self, index: int) -> ImageItem:
        return self.item(index, index)

    def item(self, index: int, draw: int, generator: torch.Generator | None = None) -> ImageItem:
        """Return an image's tensors. If a random generator is given, augment the image."""
        picture, processor = self.picture(index), self.processor
        crop = None if generator is None else self.augmentation.crop(picture, generator)
        pixels = pixels_of(picture, processor) if crop is None else normalized(crop, processor)
        if generator is not None:
            pixels = self.augmentation.change(pixels, generator, *statistics_of(processor))
        label = torch.tensor(int(self.images.labels[self.numbers[index]]))
        return {"pixel_values": pixels, "labels": label, "draw": torch.tensor(draw)}

    def picture(self, index: int) -> Image:
        return self.images.image(int(self.numbers[index]))

    def sample(self, count: int) -> torch.Tensor:
        """Return the pixel values [count, channels, height, width] of evenly spaced images."""
        return torch.stack([self[index]["pixel_values"] for index in spread(len(self), count)])

    def for_run(self, seed: int) -> AugmentedImages:
        return AugmentedImages(self, seed, training=True, repeats=self.augmentation.repeats)


class AugmentedImages(DrawnItems[ImageItem]):
    """A run's training images in random order, with random augmentation."""

    source: ImageItems

    def __getitem__(self, index: int) -> ImageItem:
        return self.source.item(self.number(index), index, self.generator(index))


def pixels_of(picture: Image, processor: BaseImageProcessor) -> torch.Tensor:
    """Apply an image processor to an image. Returns pixel values [channels, height, width]."""
    side = getattr(processor, "size", {}).get("shortest_edge")
    if (
        picture.size == (side, side) and getattr(processor, "crop_pct", None) == 1.0
    ):  # no resizing: the same values in half the time
        return normalized(picture, processor)
    array = np.asarray(picture)
    array = array[..., None] if array.ndim == 2 else array
    return processor(array, input_data_format="channels_last", return_tensors="pt")["pixel_values"][0]


def normalized(picture: Image, processor: BaseImageProcessor) -> torch.Tensor:
    """Scale an image's pixel values to the range 0 to 1, and normalize each channel."""
    array = np.asarray(picture, dtype=np.float32) / 255.0
    array = array[..., None] if array.ndim == 2 else array
    mean, std = statistics_of(processor)
    return (torch.from_numpy(array).permute(2, 0, 1) - mean) / std


def statistics_of(processor: BaseImageProcessor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return each channel's mean and standard deviation in an image processor, both [channels, 1, 1]."""
    mean, std = (torch.tensor(getattr(processor, name)).view(-1, 1, 1) for name in ("image_mean", "image_std"))
    return mean, std


@dataclass(frozen=True, kw_only=True)
class Mixing:
    """Collate images into batches, with mixup, CutMix and label smoothing. By default, all three are off.

    If mixup and CutMix are both on, each batch randomly uses one of them.
    """

    num_classes: int
    mixup: float = 0.0  # alpha of mixup's Beta distribution. 0 means no mixup
    cutmix: float = 0.0  # alpha of CutMix's Beta distribution. 0 means no CutMix
    label_smoothing: float = 0.0  # the fraction of the target probability that Lamina spreads evenly over all classes
    seed: int = 0

    @property
    def changes(self) -> bool:
        return bool(self.mixup or self.cutmix or self.label_smoothing)

    def __call__(self, items: Sequence[ImageItem]) -> dict[str, torch.Tensor]:
        """Collate a training batch. With mixing or smoothing, the labels are probabilities [batch, classes]."""
        batch = plain_batch(items)
        if not self.changes:
            return batch
        pixels, targets = batch["pixel_values"], self.smoothed(batch["labels"])
        generator = np.random.default_rng((self.seed, int(items[0]["draw"])))
        cuts = bool(self.cutmix) and (not self.mixup or generator.random() < 0.5)
        if self.mixup or self.cutmix:
            alpha = self.cutmix if cuts else self.mixup
            share = float(generator.beta(alpha, alpha))
            pixels, share = cut(pixels, share, generator) if cuts else (mix(pixels, share), share)
            targets = mix(targets, share)
        return {"pixel_values": pixels, "labels": targets}

    def smoothed(self, labels: torch.Tensor) -> torch.Tensor:
        one_hot = torch.nn.functional.one_hot(labels, self.num_classes).float()
        return (1.0 - self.label_smoothing) * one_hot + self.label_smoothing / self.num_classes


def plain_batch(items: Sequence[ImageItem]) -> dict[str, torch.Tensor]:
    """Collate an evaluation batch. The labels are class numbers [batch]."""
    return {
        "pixel_values": torch.stack([item["pixel_values"] for item in items]),
        "labels": torch.stack([item["labels"] for item in items]),
    }


def mix(x: torch.Tensor, share: float) -> torch.Tensor:
    """Return the mixup ``share * x + (1 - share) * y``, where y is the batch x in reversed order."""
    return share * x + (1.0 - share) * x.flip(0)


def cut(images: torch.Tensor, share: float, generator: np.random.Generator) -> tuple[torch.Tensor, float]:
    """Paste a box of another image into each image (CutMix). The box's sides are the image's sides * sqrt(1 - share).

    The box is cut off at the image's edges. Returns the images, and the fraction of each image's area outside the box.
    """
    height, width = images.shape[-2:]
    side = (1.0 - share) ** 0.5
    tall, wide = int(height * side), int(width * side)
    middle = int(generator.integers(height)), int(generator.integers(width))
    top, bottom = max(0, middle[0] - tall // 2), min(height, middle[0] + tall // 2)
    left, right = max(0, middle[1] - wide // 2), min(width, middle[1] + wide // 2)
    images = images.clone()
    images[..., top:bottom, left:right] = images.flip(0)[..., top:bottom, left:right]
    return images, 1.0 - (bottom - top) * (right - left) / (height * width)


@dataclass(frozen=True, kw_only=True)
class ImageStats(Stats):
    train_images: int
    eval_images: int
    classes: tuple[str, ...]
    channels: int


@dataclass(frozen=True, kw_only=True)
class ImageSplits(Splits[ImageItem]):
    stats: ImageStats


def prepare_images(
    corpus: str, augmentation: Augmentation, *, eval_fraction: float, center_crop: float = 1.0, progress: bool = True
) -> tuple[ImageSplits, BaseImageProcessor]:
    """Return the training images, the held-out images, and their image processor.

    Args:
        corpus: a source of labeled images, as in ``lamina.lab.vision.labeled_images.ALLOWED``.
        augmentation: the augmentation of the training images. ``augmentation.size`` is the size of all images.
        eval_fraction: the fraction of each class to hold out, if the corpus has no test split.
        center_crop: the side of the center crop, as a fraction of the image's shorter side.
        progress: whether to show a progress bar on a terminal after two seconds.

    Raises:
        UserError: the corpus or a library is missing, an image is unreadable, or a class has no images.
    """
    pillow()
    augmentation.check()
    images = open_images(corpus)
    images.refuse_unreadable(progress=progress)
    train, held_out = split(images, eval_fraction)
    processor = image_processor(augmentation.size, images.channels, center_crop)
    single = single_corpus(corpus)  # above 1 GiB of files, hash only names, sizes and times
    content = single.shards().fingerprint if isinstance(single, FileCorpus) else single.fingerprint()
    identity = f"images-1|{content}|{augmentation.size}|{center_crop!r}|{eval_fraction!r}"
    stats = ImageStats(
        unigram_entropy=class_entropy(images.labels[train], images.labels[held_out], len(images.classes)),
        fingerprint=hashlib.sha256(identity.encode()).hexdigest(),
        train_images=len(train),
        eval_images=len(held_out),
        classes=images.classes,
        channels=images.channels,
    )
    items = (ImageItems(images, numbers, processor, augmentation) for numbers in (train, held_out))
    return ImageSplits(train=next(items), eval=next(items), stats=stats), processor


def image_processor(size: int, channels: int, center_crop: float = 1.0) -> BaseImageProcessor:
    """Return transformers' ConvNeXt image processor, which resizes, crops the center, and normalizes."""
    from transformers.models.convnext.image_processing_pil_convnext import ConvNextImageProcessorPil
    from transformers.utils.constants import IMAGENET_DEFAULT_MEAN, IMAGENET_DEFAULT_STD

    mean, std = (IMAGENET_DEFAULT_MEAN, IMAGENET_DEFAULT_STD) if channels == 3 else ([0.5] * channels, [0.5] * channels)
    return ConvNextImageProcessorPil(
        size={"shortest_edge": size}, crop_pct=center_crop, resample=3, image_mean=mean, image_std=std
    )
