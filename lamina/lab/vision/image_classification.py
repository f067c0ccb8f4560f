"""Train a vision Transformer to classify images, with the augmentation of DeiT and ConvNeXt."""

from __future__ import annotations

import copy
from typing import cast

import torch
from transformers import PreTrainedConfig

from lamina.data.blocks import Splits, Stats
from lamina.data.corpus import EMBEDDED
from lamina.errors import UserError
from lamina.lab.vision.image_items import Augmentation, ImageSplits, ImageStats, Mixing, plain_batch, prepare_images
from lamina.lab.vision.labeled_images import ALLOWED
from lamina.lab.vision.settings import ImageSettings
from lamina.training.objectives.objective import Collate, Objective, Processor, objective
from lamina.training.settings import PretrainSettings

_OF_TEXT = ("tokenizer", "sequence_length", "text_field", "packing", "streaming", "shuffle_buffer", "eval_corpus")
TOP = 5
_NAMED = 20  # the most classes that a model's card names


@objective
class ImageClassification(Objective):
    """Predict the class of an image."""

    head = "image_classification"
    guess = "the entropy of the classes"
    own = frozenset(ImageSettings.names())
    without = frozenset(_OF_TEXT)

    def check(self, settings: PretrainSettings) -> None:
        super().check(settings)
        if settings.corpus == EMBEDDED:
            raise UserError(
                f"corpus: {EMBEDDED!r} is text, but the backbone {settings.backbone!r} reads images. Give {ALLOWED}."
            )
        augmentation_of(settings, 1).check()

    def fit(self, config: PreTrainedConfig, settings: PretrainSettings) -> None:
        for name in ("image_size", "patch_size"):
            if (value := getattr(settings, name)) is not None:
                setattr(config, name, value)
        image, patch = _side(config, "image_size"), _side(config, "patch_size")
        if image % patch:
            allowed = ", ".join(str(side) for side in range(1, image + 1) if image % side == 0)
            raise UserError(
                f"patch_size: {patch} does not divide image_size = {image}. Choose another image_size, or a "
                f"patch_size of {allowed}."
            )

    def item_tokens(self, config: PreTrainedConfig, settings: PretrainSettings) -> int:
        return (_side(config, "image_size") // _side(config, "patch_size")) ** 2 + 1  # plus the class token

    def read(self, settings: PretrainSettings, config: PreTrainedConfig, *, bar: bool) -> tuple[Splits, Processor]:
        return prepare_images(
            settings.corpus,
            augmentation_of(settings, _side(config, "image_size")),
            eval_fraction=settings.eval_fraction,
            center_crop=settings.center_crop,
            progress=bar,
        )

    def complete(
        self, config: PreTrainedConfig, splits: Splits, processor: Processor, from_model: str | None
    ) -> PreTrainedConfig:
        stats = cast(ImageSplits, splits).stats
        config = copy.deepcopy(config)
        if from_model is not None:
            labels = config.id2label or {}
            if (tuple(labels.values()), config.num_channels) != (stats.classes, stats.channels):
                raise UserError(
                    f"corpus: the images have {len(stats.classes)} classes and {stats.channels} channels, but the "
                    f"checkpoint {from_model!r} has other classes ({len(labels)}) or channels "
                    f"({config.num_channels}). Give a corpus with the same classes and channels."
                )
            return config
        config.num_channels = stats.channels
        config.id2label = dict(enumerate(stats.classes))
        config.label2id = {name: number for number, name in enumerate(stats.classes)}
        return config

    def collate(self, settings: PretrainSettings, splits: Splits) -> Collate:
        return Mixing(
            num_classes=len(cast(ImageSplits, splits).stats.classes),
            mixup=settings.mixup,
            cutmix=settings.cutmix,
            label_smoothing=settings.label_smoothing,
            seed=settings.seed,
        )

    def collate_eval(self) -> Collate:
        return plain_batch

    def derived(self, loss: float, stats: Stats) -> dict[str, float]:
        return {}

    def facts(self, settings: PretrainSettings, stats: Stats) -> dict[str, object]:
        assert isinstance(stats, ImageStats)
        names = ", ".join(stats.classes[:_NAMED]) + ", ..." * (len(stats.classes) > _NAMED)
        return {
            "images": settings.corpus,
            "classes": f"{len(stats.classes):,}: {names}",
            "images to train on": f"{stats.train_images:,}",
            "images held out": f"{stats.eval_images:,}",
            "entropy of the classes": f"{stats.unigram_entropy:.3f} nats",
            "fingerprint": stats.fingerprint,
        }

    def scores(self, logits: torch.Tensor, labels: torch.Tensor) -> dict[str, torch.Tensor]:
        """Return each image's accuracy (0 or 1) and top-5 accuracy (0 or 1)."""
        best = logits.topk(min(TOP, logits.shape[-1]), dim=-1).indices
        right = (best == labels[:, None]).float()
        return {"accuracy": right[:, 0], "top5_accuracy": right.sum(-1)}


def augmentation_of(settings: PretrainSettings, size: int) -> Augmentation:
    return Augmentation(
        size=size,
        crop_scale=settings.crop_scale,
        flip=settings.flip,
        rand_augment=settings.rand_augment,
        random_erasing=settings.random_erasing,
        repeats=settings.repeated_augmentation,
    )


def _side(config: PreTrainedConfig, name: str) -> int:
    side = getattr(config, name)
    if isinstance(side, int):
        return side
    height, width = side
    if height != width:
        raise UserError(
            f"{name}: the backbone's images of {list(side)} are not square. Choose a backbone with square images."
        )
    return int(height)
