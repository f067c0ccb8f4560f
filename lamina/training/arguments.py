"""The Trainer's arguments for a run's settings."""

from __future__ import annotations

from dataclasses import fields
from pathlib import Path
from typing import TypeVar

from transformers import TrainingArguments

from lamina.core.json_types import Json
from lamina.errors import UserError, unknown
from lamina.jobs.aliases import meaning
from lamina.jobs.settings import Settings
from lamina.training.execution.devices import device_of
from lamina.training.settings import PretrainSettings
from lamina.training.trainer_options import OPTIONS, check_together, check_value, try_out

_FIXED = (
    *("logging_nan_inf_filter", "remove_unused_columns", "logging_strategy", "eval_strategy", "save_strategy"),
    *("ignore_data_skip", "dataloader_drop_last", "average_tokens_across_devices", "save_only_model"),
    *("auto_find_batch_size", "ddp_backend", "load_best_model_at_end"),
)
_OFFERED = PretrainSettings.names()


def _deciding(argument: str) -> str | None:
    """The setting of a run that decides an argument of the Trainer; None if none does."""
    if argument in _OFFERED:
        return argument
    setting = meaning(argument, _OFFERED, near=True)
    return None if setting == "trainer" else setting


_OURS = {
    entry.name: setting
    for entry in fields(TrainingArguments)
    if entry.init and entry.name not in _FIXED and (setting := _deciding(entry.name)) is not None
}
A = TypeVar("A", bound=TrainingArguments)


def training_arguments(settings: PretrainSettings, processes: int = 1) -> TrainingArguments:
    """The Trainer's arguments for these settings, including ``settings.trainer``, in each of the run's ``processes``.

    Raises UserError that names the field.
    """
    if settings.batch_size == processes:
        for name in ("mixup", "cutmix"):
            if value := getattr(settings, name):
                raise UserError(
                    f"{name}: {value:g} needs a second image to mix in, each process has one (allowed: 0, or a "
                    f"batch_size of at least {2 * processes})"
                )
    return arguments_of(TrainingArguments, settings, processes)


def check_arguments(trainer: Json, schedule: str, record: type[Settings]) -> None:
    """Raise UserError for an argument under ``trainer`` that a job with this schedule and record does not take.

    It is one that a run sets itself, that its records depend on, or that does not exist.
    """
    known = {entry.name for entry in fields(TrainingArguments) if entry.init}
    for name, value in trainer.items():
        if name in _FIXED:
            raise UserError(f"trainer.{name}: fixed, since Lamina's records depend on it")
        if name in _OURS and _OURS[name] not in record.names():
            raise UserError(f"trainer.{name}: `lamina {record.command_name}` decides it (allowed: to leave it out)")
        if name in _OURS:
            raise UserError(f"trainer.{name}: set by --{_OURS[name].replace('_', '-')} (allowed: that flag)")
        if name not in known:
            raise unknown("trainer argument", name, known & set(OPTIONS))
        check_value(name, value)
    check_together(trainer, schedule)


def arguments_of(kind: type[A], settings: PretrainSettings, processes: int = 1, **own: object) -> A:
    """The same as a ``kind`` of arguments (TRL's trainers have theirs), with further fields of its ``own``."""
    if settings.batch_size % processes:
        raise UserError(
            f"batch_size: {settings.batch_size} blocks can't be split evenly over {processes} processes "
            f"(allowed: a multiple of {processes}, or another number of processes)"
        )
    check_arguments(settings.trainer, settings.schedule, PretrainSettings)
    known = {entry.name for entry in fields(TrainingArguments) if entry.init}
    values = _values(settings, processes)
    if "activation_checkpointing" not in known:
        values["gradient_checkpointing"] = settings.gradient_checkpointing
    values = {k: v for k, v in values.items() if k in known}
    if values["lr_scheduler_type"] in ("cosine_with_min_lr", "cosine_warmup_with_min_lr"):
        values.setdefault("lr_scheduler_kwargs", {"min_lr_rate": settings.min_learning_rate})
    try:
        arguments = kind(**{**values, **own})
    except Exception as error:  # its checks raise any type
        raise UserError(f"trainer: {' '.join(str(error).split())}") from error
    if settings.trainer:
        try_out(arguments, settings.trainer)
    return arguments


def _values(settings: PretrainSettings, processes: int) -> Json:
    device = device_of(settings.device)
    return {
        "output_dir": str(Path(settings.output) / "checkpoints"),
        "max_steps": settings.steps,
        "per_device_train_batch_size": settings.batch_size // processes,
        "per_device_eval_batch_size": settings.batch_size // processes,
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
        # TensorBoard's callback gets its own writer later: it would take its folder from the environment
        "report_to": [r for r in settings.reports() if r != "tensorboard"] or "none",
        "logging_dir": None,
        "run_name": Path(settings.output).resolve().name,
        "project": "lamina",
        "optim": "adamw_torch_fused",
        "bf16": settings.precision == "bf16",
        "fp16": settings.precision == "fp16",
        "remove_unused_columns": False,
        "prediction_loss_only": True,
        # renamed in transformers 5.23; the name that this version does not have is dropped below
        "activation_checkpointing": settings.gradient_checkpointing,
        "disable_tqdm": True,
        "use_cpu": device == "cpu",
        "ddp_backend": ("nccl" if device == "cuda" else "gloo") if processes > 1 else None,
        "ddp_find_unused_parameters": False,
        # the training order starts where a checkpoint ended, and a step's tokens are those of all processes
        "ignore_data_skip": True,
        "average_tokens_across_devices": True,
        **settings.trainer,
    }
