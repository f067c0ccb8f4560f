"""Random changes of single images: crops, flips, RandAugment, erasing. The last two are those of the library kornia."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from lamina.errors import UserError

if TYPE_CHECKING:
    from PIL.Image import Image

OPERATIONS = 2  # of RandAugment, per image: as DeiT and ConvNeXt
_MAGNITUDES = 30  # of kornia, which takes those between 0 and 30
_RATIO = (3.0 / 4.0, 4.0 / 3.0)
_ERASED, _ERASED_RATIO = (0.02, 1.0 / 3.0), (0.3, 3.3)
_SEEDS = 2**62


@dataclass(frozen=True, kw_only=True)
class Augmentation:
    """How the images of a training are changed; the default changes nothing.

    Attributes:
        size: side of the square that a crop is resized to.
        crop_scale: the smallest share of an image's area that a random crop takes; 1 for no random crops.
        flip: the probability of a horizontal flip.
        rand_augment: the strength of RandAugment (Cubuk et al. 2020, arXiv 1909.13719), 0 (off) to 1.
        random_erasing: the probability that a rectangle becomes noise (Zhong et al. 2020, arXiv 1708.04896).
        repeats: how often an image is drawn before the next one (Hoffer et al. 2020, arXiv 1901.09335).
    """

    size: int
    crop_scale: float = 1.0
    flip: float = 0.0
    rand_augment: float = 0.0
    random_erasing: float = 0.0
    repeats: int = 1

    def check(self) -> None:
        """Raise UserError if the library that an augmentation needs is not installed."""
        needed = [name for name in ("rand_augment", "random_erasing") if getattr(self, name)]
        if not needed:
            return
        try:
            import kornia.augmentation  # noqa: F401
        except ImportError:
            raise UserError(
                f"{needed[0]}: {getattr(self, needed[0])} needs the library kornia (allowed: pip install "
                "'lamina[vision]', or 0)"
            ) from None

    def crop(self, picture: Image, generator: torch.Generator) -> Image | None:
        """A random crop, resized to the square [size, size]; None where there are no random crops."""
        if self.crop_scale >= 1.0:
            return None
        from PIL import Image

        box = crop_box(*picture.size, self.crop_scale, generator)
        return picture.resize((self.size, self.size), Image.Resampling.BICUBIC, box=box)

    def change(
        self, pixels: torch.Tensor, generator: torch.Generator, mean: torch.Tensor, std: torch.Tensor
    ) -> torch.Tensor:
        """Flip, distort and erase normalized pixel values [channels, height, width].

        ``mean`` and ``std`` [channels, 1, 1] normalized them: RandAugment works on values from 0 to 1.
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
                plain = (batch * std + mean).clamp(0.0, 1.0)
                # some operations take colors alone; of a gray image, all three channels stay the same
                distorted = distort(plain.expand(-1, 3, -1, -1))[:, : plain.shape[1]]
                batch = (distorted - mean) / std
            if self.random_erasing and _uniform(generator) < self.random_erasing:
                erase = kornia.RandomErasing(scale=_ERASED, ratio=_ERASED_RATIO, p=1.0)
                ones = erase(torch.ones_like(batch[:, :1]))  # where it is 0, noise is put, as in DeiT's "pixel" mode
                batch = torch.where(ones == 0, torch.randn(batch.shape), batch)
        return batch[0]


def crop_box(width: int, height: int, smallest: float, generator: torch.Generator) -> tuple[int, int, int, int]:
    """The box (left, upper, right, lower) of a random crop, as Inception's (Szegedy et al. 2015, arXiv 1409.4842).

    Its share of the area is uniform from ``smallest`` to 1, the logarithm of its ratio of sides from 3/4 to 4/3. After
    ten boxes that do not fit, it is the largest box in the middle.
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
