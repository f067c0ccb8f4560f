"""Labeled images by number, wherever they are stored."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import torch

from lamina.errors import UserError

if TYPE_CHECKING:
    from PIL.Image import Image

ALLOWED = (
    "a folder with a subfolder of images for each class (or train/ and val/ with these), hf:NAME[:CONFIG][@SPLIT], "
    "mnist, or a .csv or .csv.gz of pixels"
)
_SPLIT_SEED = 0


@dataclass(frozen=True, kw_only=True)
class LabeledImages(ABC):
    """Images and their classes.

    Attributes:
        spec: the name of the set as the user wrote it.
        classes: the names of the classes, in the order of their numbers.
        labels: the class of each image, [images] of int64.
        held_out: the numbers of the images of the set's own test split; None if it has none.
        channels: 1 for gray, 3 for RGB.
    """

    spec: str
    classes: tuple[str, ...]
    labels: np.ndarray
    held_out: np.ndarray | None = None
    channels: int = 3

    @abstractmethod
    def image(self, number: int) -> Image:
        """An image, in mode L or RGB. Raises UserError that names an image that can't be read."""

    def refuse_unreadable(self, *, progress: bool) -> None:
        """Raise UserError that names the first image that can't be read, as far as that can be told in short time."""
        return

    def check(self) -> None:
        """Raise UserError for a set that not all can be learned from: a single class, no image, none of a class."""
        if len(self.classes) < 2:
            classes = "1 class, " + repr(self.classes[0]) if self.classes else "no classes"
            raise UserError(f"corpus: {self.spec!r} has {classes} (allowed: at least 2)")
        if not len(self.labels):
            raise UserError(f"corpus: {self.spec!r} has no images")
        learned = self.labels if self.held_out is None else np.delete(self.labels, self.held_out)
        empty = np.flatnonzero(np.bincount(learned, minlength=len(self.classes)) == 0)
        if len(empty):
            raise UserError(
                f"corpus: {self.spec!r} has no image of the class {self.classes[empty[0]]!r} to train on (allowed: at "
                f"least one of each of its {len(self.classes)} classes)"
            )


def split(images: LabeledImages, eval_fraction: float) -> tuple[np.ndarray, np.ndarray]:
    """The numbers of the images to train on and of those held out.

    They are the set's own splits if it has them. Otherwise ``eval_fraction`` of every class with two images or more is
    held out, at least one image of each: always the same ones.
    """
    every = np.arange(len(images.labels))
    if images.held_out is not None:
        return np.setdiff1d(every, images.held_out), images.held_out
    chosen: list[int] = []
    for label in range(len(images.classes)):
        members = np.flatnonzero(images.labels == label)
        if len(members) < 2:
            continue
        order = torch.randperm(len(members), generator=torch.Generator().manual_seed(_SPLIT_SEED + label)).numpy()
        chosen += members[order[: max(1, round(eval_fraction * len(members)))]].tolist()
    if not chosen:
        raise UserError(f"corpus: {images.spec!r} has no class with 2 images, so none can be held out")
    held_out = np.array(sorted(chosen))
    return np.setdiff1d(every, held_out), held_out


def class_entropy(train: Sequence[int] | np.ndarray, held_out: Sequence[int] | np.ndarray, classes: int) -> float:
    """Cross-entropy of the held-out classes under the add-one smoothed frequencies of the others, in nats."""
    counts = np.bincount(np.asarray(train), minlength=classes)
    log_probability = np.log(counts + 1) - np.log(counts.sum() + classes)
    return float(-log_probability[np.asarray(held_out)].mean())


def pillow() -> None:
    """Raise UserError if the library that decodes images is not installed."""
    try:
        import PIL.Image  # noqa: F401
    except ImportError:
        raise UserError("corpus: images are read with Pillow (allowed: pip install 'lamina[vision]')") from None
