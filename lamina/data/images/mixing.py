"""Batches of images: mixup, CutMix and label smoothing, as DeiT and ConvNeXt have them.

Zhang et al. 2018 (mixup, arXiv 1710.09412), Yun et al. 2019 (CutMix, arXiv 1905.04899, Algorithm A1), Szegedy et al.
2016 (label smoothing, arXiv 1512.00567, Section 7). As in timm, one share holds for a batch, and an image's partner is
its counterpart from the end of the batch.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch

from lamina.data.images.image_items import ImageItem


@dataclass(frozen=True, kw_only=True)
class Mixing:
    """Joins items to a batch; with the defaults, unchanged. Picklable, so that loader processes can hold it.

    Attributes:
        num_classes: of the set.
        mixup: alpha of mixup's Beta distribution; 0 for none.
        cutmix: alpha of CutMix's; 0 for none. With both, each batch takes one of them, with equal chances.
        label_smoothing: the share of a target that is spread evenly over all classes.
        seed: of the run.
    """

    num_classes: int
    mixup: float = 0.0
    cutmix: float = 0.0
    label_smoothing: float = 0.0
    seed: int = 0

    @property
    def changes(self) -> bool:
        """Whether it changes anything."""
        return bool(self.mixup or self.cutmix or self.label_smoothing)

    def __call__(self, items: Sequence[ImageItem]) -> dict[str, torch.Tensor]:
        """The batch of a training: ``labels`` are probabilities [batch, classes] if anything is changed."""
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
        """(1 - s) * one_hot + s / classes: [batch, classes]."""
        one_hot = torch.nn.functional.one_hot(labels, self.num_classes).float()
        return (1.0 - self.label_smoothing) * one_hot + self.label_smoothing / self.num_classes


def plain_batch(items: Sequence[ImageItem]) -> dict[str, torch.Tensor]:
    """The batch of an evaluation: ``labels`` are classes [batch]."""
    return {
        "pixel_values": torch.stack([item["pixel_values"] for item in items]),
        "labels": torch.stack([item["labels"] for item in items]),
    }


def mix(x: torch.Tensor, share: float) -> torch.Tensor:
    """Share * x + (1 - share) * partner, along the first axis."""
    return share * x + (1.0 - share) * x.flip(0)


def cut(images: torch.Tensor, share: float, generator: np.random.Generator) -> tuple[torch.Tensor, float]:
    """Images [batch, channels, height, width] with a box of their partners', and the share that stays their own.

    The box has the sides of the image times sqrt(1 - share) and is cut off at the edges; the share is then that of the
    area outside it.
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
