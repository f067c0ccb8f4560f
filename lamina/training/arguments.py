"""The Trainer's arguments that a run's settings stand for."""

from __future__ import annotations

from dataclasses import fields
from pathlib import Path
from typing import Any

import torch
from transformers import TrainingArguments

from lamina.errors import UserError, unknown
from lamina.training.settings import PretrainSettings

_OURS = {
    "output_dir": "output",
    "max_steps": "steps",
    "num_train_epochs": "steps",
    "per_device_train_batch_size": "batch_size",
    "gradient_accumulation_steps": "gradient_accumulation",
    "learning_rate": "learning_rate",
    "weight_decay": "weight_decay",
    "adam_beta1": "beta1",
    "adam_beta2": "beta2",
    "adam_epsilon": "epsilon",
    "max_grad_norm": "max_grad_norm",
    "warmup_steps": "warmup",
    "seed": "seed",
    "logging_steps": "logging_steps",
    "eval_steps": "eval_steps",
    "save_steps": "save_steps",
    "save_total_limit": "keep",
    "report_to": "report_to",
    "bf16": "precision",
    "fp16": "precision",
    "torch_compile": "compile",
}
_FIXED = ("logging_nan_inf_filter", "remove_unused_columns", "logging_strategy", "eval_strategy", "save_strategy")


def training_arguments(settings: PretrainSettings) -> TrainingArguments:
    """The Trainer's arguments of these settings, ``settings.trainer`` included. Raises UserError that names a field."""
    known = {f.name for f in fields(TrainingArguments) if f.init}
    for name in settings.trainer:
        if name in _OURS:
            raise UserError(f"trainer.{name}: set by --{_OURS[name].replace('_', '-')} (allowed: that flag)")
        if name in _FIXED:
            raise UserError(f"trainer.{name}: fixed, Lamina's records rest on it")
        if name not in known:
            raise unknown("trainer argument", name, known - set(_OURS) - set(_FIXED))
    values: dict[str, Any] = {
        "output_dir": str(Path(settings.output) / "checkpoints"),
        "max_steps": settings.steps,
        "per_device_train_batch_size": settings.batch_size,
        "per_device_eval_batch_size": max(settings.batch_size, 1),
        "gradient_accumulation_steps": settings.gradient_accumulation,
        "learning_rate": settings.learning_rate,
        "lr_scheduler_type": "cosine_with_min_lr",
        "warmup_steps": settings.warmup,
        "weight_decay": settings.weight_decay,
        "adam_beta1": settings.beta1,
        "adam_beta2": settings.beta2,
        "adam_epsilon": settings.epsilon,
        "max_grad_norm": settings.max_grad_norm,
        "seed": settings.seed,
        "logging_steps": settings.log_every,
        "logging_first_step": True,
        "logging_nan_inf_filter": False,
        "eval_strategy": "steps",
        "eval_steps": settings.eval_every,
        "save_strategy": "steps" if settings.save_steps else "no",
        "save_steps": settings.save_steps or 500,
        "save_total_limit": settings.keep,
        # TensorBoard's callback gets a writer of its own below: its folder would be read off the environment
        "report_to": [r for r in settings.reports() if r != "tensorboard"] or "none",
        "logging_dir": None,
        "optim": "adamw_torch_fused",
        "bf16": settings.precision == "bf16",
        "fp16": settings.precision == "fp16",
        "remove_unused_columns": False,
        "prediction_loss_only": True,
        # renamed in transformers 5.23; the name that this one does not have is dropped below
        "activation_checkpointing": settings.gradient_checkpointing,
        "disable_tqdm": True,
        "use_cpu": not torch.cuda.is_available() and not torch.backends.mps.is_available(),
        **settings.trainer,
    }
    if "activation_checkpointing" not in known:
        values["gradient_checkpointing"] = settings.gradient_checkpointing
    values = {k: v for k, v in values.items() if k in known}
    if values["lr_scheduler_type"] == "cosine_with_min_lr":
        values.setdefault("lr_scheduler_kwargs", {"min_lr_rate": settings.min_learning_rate})
    try:
        return TrainingArguments(**values)
    except (ValueError, TypeError, ImportError) as error:
        raise UserError(f"trainer: {' '.join(str(error).split())}") from error
