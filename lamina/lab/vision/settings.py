"""The settings of an image classifier."""

from __future__ import annotations

from lamina.jobs.settings import Settings, at_least, between, not_below, setting


class ImageSettings(Settings, group="images"):
    """The size of a classifier's images, and the augmentation of the training images."""

    image_size: int | None = setting(
        None, "side of the images in pixels (default: the backbone's image size)", at_least(1)
    )
    patch_size: int | None = setting(
        None, "side of a patch in pixels (default: the backbone's patch size)", at_least(1)
    )
    center_crop: float = setting(
        1.0,
        "side of the center crop, as a fraction of the shorter side (ImageNet: usually 0.875)",
        between(0.0, 1.0, open_low=True),
    )
    crop_scale: float = setting(
        1.0,
        "smallest area of a random crop, as a fraction of the image (1: no random crops; DeiT: 0.08)",
        between(0.0, 1.0, open_low=True),
    )
    flip: float = setting(0.0, "probability of a horizontal flip", between(0.0, 1.0))
    rand_augment: float = setting(
        0.0, "strength of RandAugment's two operations, from 0 (off) to 1 (DeiT: 0.9)", between(0.0, 1.0)
    )
    random_erasing: float = setting(0.0, "probability that noise replaces a rectangle", between(0.0, 1.0))
    repeated_augmentation: int = setting(1, "number of augmented copies of each image (DeiT: 3)", at_least(1))
    mixup: float = setting(0.0, "alpha of mixup's Beta distribution (0: no mixup; DeiT: 0.8)", not_below(0.0))
    cutmix: float = setting(0.0, "alpha of CutMix's Beta distribution (0: no CutMix; DeiT: 1)", not_below(0.0))
    label_smoothing: float = setting(
        0.0,
        "label smoothing: fraction of the target probability that is spread evenly over all classes",
        between(0.0, 1.0, open_high=True),
    )
