"""The command `lamina pretrain` in Lamina's catalog of jobs."""

from __future__ import annotations

from typing import TYPE_CHECKING, Unpack

from lamina.core.json_types import Json
from lamina.jobs.kinds import Kind
from lamina.jobs.row import CHECKPOINT, MODEL, Given, JobRow, Modes

if TYPE_CHECKING:
    from lamina.training.settings import PretrainSettings


def settings() -> type[PretrainSettings]:
    from lamina.training.settings import PretrainSettings

    return PretrainSettings


def pretrain(settings: Given, **modes: Unpack[Modes]) -> Json:
    from lamina.training.pretrain import pretrain as train

    return train(settings, **modes)


PRETRAIN = JobRow(
    name="pretrain",
    kind=Kind.RUN,
    summary="train one model, from scratch or from a checkpoint",
    about="Train one model on text or images. Load the model from OUTPUT/model with transformers' Auto classes.",
    examples="""
  lamina pretrain --placement keel --num-layers 64 --steps 1000 --output runs/keel-64
  lamina pretrain --backbone llama-71m --placement peri_ln --corpus books/ --tokenizer bpe:8192 --save-steps 200
  lamina pretrain --placement keel --trainer.optim adafactor --report-to tensorboard --output runs/keel-af
  lamina pretrain --from runs/keel-64 --corpus web/:0.7,code/:0.3 --learning-rate 1e-3 --output runs/keel-64b
  lamina pretrain --streaming --corpus hf:roneneldan/TinyStories --save-steps 500 --output runs/streamed
  lamina pretrain --backbone vit-tiny --placement mix_ln --corpus photos/ --flip 0.5 --crop-scale 0.3 --output runs/vit
  lamina pretrain --output runs/keel-64 --resume
  torchrun --nproc_per_node 8 --no-python lamina pretrain --parallel fsdp2 --save-steps 500 --rollback 2 --output runs/x
""",
    settings=settings,
    run=pretrain,
    returns=(
        f"Returns the content of result.json; {MODEL} ``corpus`` may also be a path, a list of paths or texts, "
        "or a datasets.Dataset."
    ),
    resumes=CHECKPOINT,
    inputs=("from_model",),
)
