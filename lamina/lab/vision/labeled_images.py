"""Read labeled images from folders, Hugging Face datasets, or files of pixels."""

from __future__ import annotations

import logging
import math
import warnings
from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, cast

import numpy as np
import torch
from tqdm import tqdm

from lamina.core.extras import install
from lamina.data.corpus import MNIST, existing, packaged_file
from lamina.data.sources import hub_datasets
from lamina.data.sources.file_documents import walk
from lamina.errors import UserError, one_line

if TYPE_CHECKING:
    from datasets import Dataset
    from PIL.Image import Image

_LARGEST = 65_535  # the largest 16-bit value
logger = logging.getLogger(__name__)

_SUFFIXES = frozenset((".png", ".jpg", ".jpeg", ".bmp", ".webp", ".gif", ".tif", ".tiff", ".ppm", ".pgm"))
_DECODED = 20_000  # the most images that Lamina decodes before a run
_HELD_OUT = ("val", "validation", "valid", "test")
ALLOWED = (
    "a folder with a subfolder of images for each class (optionally inside train/ and val/), hf:NAME[:CONFIG][@SPLIT], "
    "mnist, or a .csv or .csv.gz of pixels"
)
_SPLIT_SEED = 0


@dataclass(frozen=True, kw_only=True)
class LabeledImages(ABC):
    """Images and their classes."""

    spec: str  # the user's value of the setting ``corpus``
    classes: tuple[str, ...]  # the names of the classes, in the order of the class numbers
    labels: np.ndarray  # the class number of each image, [images] of int64
    held_out: np.ndarray | None = None  # the indices of the images in the test split, or None without a test split
    channels: int = 3  # the number of color channels: 1 for gray, 3 for RGB

    @abstractmethod
    def image(self, number: int) -> Image:
        """Return an image in Pillow's mode L or RGB. Raises UserError if Lamina cannot read the image."""

    def refuse_unreadable(self, *, progress: bool) -> None:
        """Raise UserError if an image is unreadable. The base class checks nothing."""
        return

    def check(self) -> None:
        """Raise UserError if the source has no images, only one class, or a class without images."""
        if len(self.classes) < 2:
            classes = "1 class, " + repr(self.classes[0]) if self.classes else "no classes"
            raise UserError(f"corpus: {self.spec!r} has {classes}. Give at least 2 classes.")
        if not len(self.labels):
            raise UserError(f"corpus: {self.spec!r} has no images. Give a dataset with images.")
        learned = self.labels if self.held_out is None else np.delete(self.labels, self.held_out)
        empty = np.flatnonzero(np.bincount(learned, minlength=len(self.classes)) == 0)
        if len(empty):
            raise UserError(
                f"corpus: {self.spec!r} has no image of the class {self.classes[empty[0]]!r} to train on. Give at "
                f"least one image of each of the {len(self.classes)} classes."
            )


def split(images: LabeledImages, eval_fraction: float) -> tuple[np.ndarray, np.ndarray]:
    """Return the indices of the training images and of the held-out images. Every call makes the same choice.

    If the source has a test split, Lamina holds out the test split. If the source has no test split, Lamina holds out a
    fraction of every class: at least one image, but never the only image of a class.
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
        raise UserError(
            f"corpus: {images.spec!r} has no class with 2 images, so Lamina cannot hold out an image. Add images."
        )
    held_out = np.array(sorted(chosen))
    return np.setdiff1d(every, held_out), held_out


def class_entropy(train: Sequence[int] | np.ndarray, held_out: Sequence[int] | np.ndarray, classes: int) -> float:
    """Return the cross-entropy (nats) of the held-out classes under the training frequencies with add-one smoothing."""
    counts = np.bincount(np.asarray(train), minlength=classes)
    log_probability = np.log(counts + 1) - np.log(counts.sum() + classes)
    return float(-log_probability[np.asarray(held_out)].mean())


def pillow() -> None:
    try:
        import PIL.Image  # noqa: F401
    except ImportError:
        raise UserError(f"corpus: Lamina reads images with Pillow. Run: {install('vision')}") from None


def in_8_bits(picture: Image, mode: str) -> Image:
    """Convert an image to mode L or RGB, with the upper 8 bits of 16-bit pixels. Raises ValueError for other pixels."""
    from PIL import Image

    if picture.mode == "F":
        raise ValueError("has floating-point pixels, whose range is unknown; save the image with 8 or 16 bits")
    if not picture.mode.startswith("I"):
        return picture.convert(mode)
    levels = np.asarray(picture).astype(np.int64)
    if levels.min() < 0 or levels.max() > _LARGEST:
        raise ValueError("has more than 16 bits per pixel; save the image with 8 or 16 bits")
    return Image.fromarray((levels >> 8).astype(np.uint8)).convert(mode)


def open_images(spec: str) -> LabeledImages:
    """Open a source of labeled images without decoding. Raises UserError for an invalid source or a missing library."""
    if hub_datasets.is_hub(spec):
        images: LabeledImages = _of_hub(spec)
    else:
        path = packaged_file(spec) or existing(spec, [MNIST], ALLOWED)
        if path.is_dir():
            images = _of_folder(spec, path)
        elif path.name.endswith((".csv", ".csv.gz")):
            images = _of_pixels(spec, path)
        else:
            raise UserError(f"corpus: {spec!r} holds no labeled images. Give {ALLOWED}.")
    images.check()
    return images


@dataclass(frozen=True, kw_only=True)
class ImageFiles(LabeledImages):
    """Image files in one folder per class."""

    paths: tuple[Path, ...]

    def image(self, number: int) -> Image:
        with self._open(number) as picture:
            return in_8_bits(picture, "RGB")

    def refuse_unreadable(self, *, progress: bool) -> None:
        """Decode every image if there are at most 20,000. For larger sets, run only Pillow's quick checks."""
        small = len(self.paths) <= _DECODED
        bar = tqdm(range(len(self.paths)), desc="checking images", delay=2, disable=None if progress else True)
        for number in bar:
            with self._open(number) as picture:
                if small:
                    in_8_bits(picture, "RGB")
                else:
                    picture.verify()

    @contextmanager
    def _open(self, number: int) -> Iterator[Image]:
        from PIL import Image

        path = self.paths[number]
        try:
            with Image.open(path) as picture:
                yield picture
        except (OSError, ValueError, SyntaxError, Image.DecompressionBombError) as error:
            reason = f"can't be read ({_reason(error)}). Fix or remove the image."
            raise UserError(f"corpus: the image {str(path)!r} {reason}") from None


def _of_folder(spec: str, root: Path) -> ImageFiles:
    names = _subfolders(root)
    held_out = [name for name in _HELD_OUT if name in names]
    splits = [root]
    if "train" in names and held_out:
        if beside := sorted(set(names) - {"train", *held_out}):
            raise UserError(
                f"corpus: {spec!r} has the folder {beside[0]!r} in addition to the splits 'train' and {held_out[0]!r}. "
                "Keep only the folders of splits, or only the folders of classes."
            )
        splits = [root / "train", root / held_out[0]]
    classes = _subfolders(splits[0])
    if not classes:
        raise UserError(f"corpus: {str(splits[0])!r} has no subfolders, so there are no classes. Give {ALLOWED}.")
    paths: list[Path] = []
    labels: list[int] = []
    strays: list[Path] = []
    for part in splits:
        if (differing := set(_subfolders(part)) ^ set(classes)) and part != splits[0]:
            named = sorted(differing)[0]
            raise UserError(
                f"corpus: only one of {str(splits[0])!r} and {str(part)!r} has the class {named!r}. Give the same "
                "classes in each split."
            )
        for label, name in enumerate(classes):
            files = walk(part / name)
            pictures = [path for path in files if path.suffix.lower() in _SUFFIXES]
            strays += [path for path in files if path.suffix.lower() not in _SUFFIXES]
            if not pictures:
                raise UserError(
                    f"corpus: the class folder {str(part / name)!r} has no images. Add images, or remove the folder."
                )
            paths += pictures
            labels += [label] * len(pictures)
    if strays:
        names = ", ".join(path.relative_to(root).as_posix() for path in strays[:3])
        logger.warning(
            "%s: Lamina skipped %d files that are not images (%s%s). Lamina reads %s",
            *(root, len(strays), names, ", ..." * (len(strays) > 3), ", ".join(sorted(_SUFFIXES))),
        )
    first = len(paths) if len(splits) == 1 else sum(splits[0] in path.parents for path in paths)
    return ImageFiles(
        spec=spec,
        classes=tuple(classes),
        labels=np.array(labels),
        held_out=None if len(splits) == 1 else np.arange(first, len(paths)),
        paths=tuple(paths),
    )


def _subfolders(root: Path) -> list[str]:
    return sorted(path.name for path in root.iterdir() if path.is_dir() and not path.name.startswith("."))


@dataclass(frozen=True, kw_only=True)
class PixelImages(LabeledImages):
    """Gray images in memory, [images, height, width] of uint8."""

    pixels: np.ndarray

    def image(self, number: int) -> Image:
        from PIL import Image

        return Image.fromarray(self.pixels[number])


def _of_pixels(spec: str, path: Path) -> PixelImages:
    """Read a file with one square gray image per row: the pixels (0 to 255), then the class number."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # numpy warns about a file without rows
            rows = np.loadtxt(path, delimiter=",", dtype=np.int64, ndmin=2, encoding="latin1")
    except (OSError, EOFError, ValueError) as error:
        raise UserError(
            f"corpus: {spec!r} is not a file of pixels ({_reason(error)}). In each row, give pixels and a class."
        ) from None
    if not rows.size:
        raise UserError(f"corpus: {spec!r} has no rows. In each row, give the pixels of a square image and its class.")
    side = math.isqrt(max(rows.shape[1] - 1, 0))
    if side * side != rows.shape[1] - 1 or side < 1:
        raise UserError(
            f"corpus: {spec!r} has rows of {rows.shape[1]} numbers. In each row, give the pixels of a square image and "
            "its class."
        )
    pixels, labels = rows[:, :-1], rows[:, -1]
    if pixels.min() < 0 or pixels.max() > 255 or labels.min() < 0 or labels.max() >= len(labels):
        raise UserError(
            f"corpus: {spec!r} has values out of range. Give pixels from 0 to 255 and class numbers from 0."
        )
    return PixelImages(
        spec=spec,
        classes=tuple(map(str, range(int(labels.max()) + 1))),
        labels=labels,
        channels=1,
        pixels=pixels.reshape(-1, side, side).astype(np.uint8),
    )


@dataclass(frozen=True, kw_only=True)
class HubImages(LabeledImages):
    """The images of a Hugging Face dataset, one split after another."""

    parts: tuple[Dataset, ...]
    column: str

    def image(self, number: int) -> Image:
        part, row = 0, number
        while row >= len(self.parts[part]):
            row -= len(self.parts[part])
            part += 1
        try:
            picture = cast("Image", self.parts[part][row][self.column])
            return in_8_bits(picture, "L" if self.channels == 1 else "RGB")
        except (OSError, ValueError, SyntaxError, AttributeError) as error:
            raise UserError(
                f"corpus: Lamina cannot read image {row} of {self.spec!r} ({_reason(error)}). Fix or remove the image."
            ) from None


def _of_hub(spec: str) -> HubImages:
    parts = hub_datasets.load_splits(hub_datasets.parse(spec), held_out=_HELD_OUT)
    from datasets import ClassLabel
    from datasets import Image as ImageFeature

    features = parts[0].features
    columns = [name for name, feature in features.items() if isinstance(feature, ImageFeature)]
    targets = [name for name, feature in features.items() if isinstance(feature, ClassLabel)]
    if not columns or not targets:
        missing = "images" if not columns else "class labels"
        raise UserError(
            f"corpus: {spec!r} has no column of {missing} (columns: {', '.join(features)}). Give a dataset with this "
            "column."
        )
    labels = [np.array(part.with_format(None)[targets[0]], dtype=np.int64) for part in parts]
    for part, numbers in zip(parts, labels, strict=True):
        if len(numbers) and numbers.min() < 0:
            raise UserError(
                f"corpus: {spec!r}: row {int(numbers.argmin())} of {part.split} has no class. Give every image a class."
            )
    gray = all(cast("Image", part[0][columns[0]]).mode in ("L", "1") for part in parts if len(part))
    return HubImages(
        spec=spec,
        classes=tuple(features[targets[0]].names),
        labels=np.concatenate(labels),
        held_out=None if len(parts) == 1 else np.arange(len(labels[0]), sum(map(len, labels))),
        channels=1 if gray else 3,
        parts=tuple(parts),
        column=columns[0],
    )


def _reason(error: Exception) -> str:
    return one_line(error).partition(": ")[2] or one_line(error)
