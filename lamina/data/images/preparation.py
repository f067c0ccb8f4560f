"""The two splits of an image set, and the image processor that is saved beside the model."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from typing import TYPE_CHECKING

from lamina.data.blocks import Splits, Stats
from lamina.data.corpus import FileCorpus, single_corpus
from lamina.data.images.augmentation import Augmentation
from lamina.data.images.image_items import ImageItem, ImageItems
from lamina.data.images.labeled_images import class_entropy, pillow, split
from lamina.data.images.sources import open_images

if TYPE_CHECKING:
    from transformers.image_processing_utils import BaseImageProcessor


@dataclass(frozen=True, kw_only=True)
class ImageStats(Stats):
    """The numbers of two splits of images; ``classes`` are their names."""

    train_images: int
    eval_images: int
    classes: tuple[str, ...]
    channels: int


@dataclass(frozen=True, kw_only=True)
class ImageSplits(Splits[ImageItem]):
    """The two splits of an image set."""

    stats: ImageStats


def prepare_images(
    corpus: str, augmentation: Augmentation, *, eval_fraction: float, center_crop: float = 1.0, progress: bool = True
) -> tuple[ImageSplits, BaseImageProcessor]:
    """The items of a labeled image set and their processor.

    Args:
        corpus: see ``lamina.data.images.labeled_images.ALLOWED``.
        augmentation: of the training images; its size is that of all images.
        eval_fraction: the share of each class that is held out, where the set has no split of its own.
        center_crop: the share of the shorter side that the crop of the middle keeps.
        progress: show a progress bar on a terminal after two seconds.

    Raises:
        UserError: the set is missing, an image can't be read (its path), a class has none, a library is missing.
    """
    pillow()
    augmentation.check()
    images = open_images(corpus)
    images.refuse_unreadable(progress=progress)
    train, held_out = split(images, eval_fraction)
    processor = image_processor(augmentation.size, images.channels, center_crop)
    identity = f"images-1|{_content(corpus)}|{augmentation.size}|{center_crop!r}|{eval_fraction!r}"
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
    """ConvNeXt's processor of transformers: resize the shorter side, crop the middle, normalize.

    RGB images are normalized by ImageNet's mean and standard deviation, gray ones to -1 to 1.
    """
    from transformers.models.convnext.image_processing_pil_convnext import ConvNextImageProcessorPil
    from transformers.utils.constants import IMAGENET_DEFAULT_MEAN, IMAGENET_DEFAULT_STD

    mean, std = (IMAGENET_DEFAULT_MEAN, IMAGENET_DEFAULT_STD) if channels == 3 else ([0.5] * channels, [0.5] * channels)
    return ConvNextImageProcessorPil(
        size={"shortest_edge": size}, crop_pct=center_crop, resample=3, image_mean=mean, image_std=std
    )


def _content(corpus: str) -> str:
    """A hash of the images; of more than 1 GiB of files, one of their names, sizes and times."""
    single = single_corpus(corpus)
    return single.shards().fingerprint if isinstance(single, FileCorpus) else single.fingerprint()
