"""The Trainer's arguments for a run's settings."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import fields
from pathlib import Path
from typing import Any, TypeVar

import torch
from transformers import Trainer, TrainingArguments
from transformers.optimization import get_scheduler

from lamina.core.json_types import Json
from lamina.errors import UserError, unknown
from lamina.jobs.aliases import meaning
from lamina.jobs.settings import Settings
from lamina.training.execution.devices import device_of
from lamina.training.settings import PretrainSettings

Check = Callable[[Any], bool]


def _whole(low: int, high: int = 2**31 - 1) -> tuple[Check, str]:
    def is_allowed(v: Any) -> bool:
        return isinstance(v, int) and not isinstance(v, bool) and low <= v <= high

    return is_allowed, f"a whole number from {low} to {high}"


def _one_of(*values: Any) -> tuple[Check, str]:
    return lambda v: any(v is x or (type(v) is type(x) and v == x) for x in values), ", ".join(map(_as_text, values))


def _as_text(value: Any) -> str:
    return "none" if value is None else str(value).lower() if isinstance(value, bool) else str(value)


def _or_none(kind: tuple[Check, str]) -> tuple[Check, str]:
    return lambda v: v is None or kind[0](v), f"{kind[1]}, or none"


def _number(low: float, high: float) -> tuple[Check, str]:
    def is_allowed(v: Any) -> bool:
        return isinstance(v, int | float) and not isinstance(v, bool) and low <= v < high

    return is_allowed, f"a number of at least {low:g} and below {high:g}"


_BOOL = _one_of(True, False)
_TEXT = (lambda v: isinstance(v, str) and bool(v), "a text")
_MAPPING = (lambda v: v is None or isinstance(v, Mapping), "a mapping, e.g. '{\"num_cycles\": 2}'")
_LEVELS = ("debug", "info", "warning", "error", "critical", "passive")
SCHEDULES = (
    *("linear", "cosine", "cosine_with_restarts", "cosine_with_min_lr", "cosine_warmup_with_min_lr"),
    *("polynomial", "inverse_sqrt", "constant", "constant_with_warmup"),
)
OPTIONS: dict[str, tuple[Check, str]] = {
    "optim": _TEXT,
    "optim_args": _or_none(_TEXT),
    "lr_scheduler_type": _one_of(*SCHEDULES),
    "lr_scheduler_kwargs": _MAPPING,
    "neftune_noise_alpha": _or_none(_number(0.0, 1e6)),
    "tf32": _or_none(_BOOL),
    "torch_empty_cache_steps": _or_none(_whole(1)),
    "full_determinism": _BOOL,
    "include_num_input_tokens_seen": _one_of(True, False, "all", "non_padding", "no"),
    "per_device_eval_batch_size": _whole(1),
    "dataloader_num_workers": _whole(0, 1024),
    "dataloader_pin_memory": _BOOL,
    "dataloader_persistent_workers": _BOOL,
    "dataloader_prefetch_factor": _or_none(_whole(1, 1024)),
    "ddp_find_unused_parameters": _BOOL,
    "ddp_bucket_cap_mb": _or_none(_whole(1)),
    "ddp_broadcast_buffers": _or_none(_BOOL),
    "ddp_static_graph": _or_none(_BOOL),
    "ddp_timeout": _whole(1),
    "log_level": _one_of(*_LEVELS),
    "log_level_replica": _one_of(*_LEVELS),
    "run_name": _or_none(_TEXT),
    "project": _TEXT,
    "trackio_space_id": _or_none(_TEXT),
}


def check_value(name: str, value: Any) -> None:
    """Raise UserError for an option that a run does not accept, or an invalid value."""
    if name not in OPTIONS:
        raise UserError(f"trainer.{name}: has no effect in a run of Lamina (allowed: {', '.join(OPTIONS)})")
    if name == "lr_scheduler_type" and value == "warmup_stable_decay":
        raise UserError(
            "trainer.lr_scheduler_type: 'warmup_stable_decay' is a schedule of Lamina's (allowed: --schedule wsd)"
        )
    is_allowed, allowed = OPTIONS[name]
    if not is_allowed(value):
        raise UserError(f"trainer.{name}: {value!r} (allowed: {allowed})")


def check_together(options: Mapping[str, Any], schedule: str) -> None:
    """Raise UserError for options that contradict each other or the run's own schedule."""
    clash = [name for name in ("lr_scheduler_type", "lr_scheduler_kwargs") if name in options]
    if schedule != "cosine" and clash:
        raise UserError(f"trainer.{clash[0]}: the run's schedule is {schedule!r} (allowed: with --schedule cosine)")
    if not options.get("dataloader_num_workers"):
        for name in ("dataloader_prefetch_factor", "dataloader_persistent_workers"):
            if options.get(name):
                raise UserError(
                    f"trainer.{name}: {options[name]!r} needs --trainer.dataloader_num_workers of at least 1"
                )


def try_out(arguments: TrainingArguments, options: Mapping[str, Any]) -> None:
    """Build the requested optimizer and schedule, and take a step. Raises UserError if that fails."""
    chosen = "optim" in options or "optim_args" in options
    weight = torch.nn.Parameter(torch.ones(2, 2, device=arguments.device if chosen else None))
    name = str(getattr(arguments.optim, "value", arguments.optim))
    try:
        kind, settings = Trainer.get_optimizer_cls_and_kwargs(arguments)
        optimizer = kind([weight], **settings)
        weight.grad = torch.ones_like(weight)
        if chosen:
            optimizer.step()
    except Exception as error:  # each optimizer's library raises its own
        raise UserError(f"trainer.optim: {name!r} can't be used here ({_line(error)})") from None
    scheduler = str(getattr(arguments.lr_scheduler_type, "value", arguments.lr_scheduler_type))
    steps = arguments.max_steps
    try:
        schedule: Any = get_scheduler(
            scheduler,
            optimizer=torch.optim.SGD([weight], lr=arguments.learning_rate),
            num_warmup_steps=arguments.get_warmup_steps(steps),
            num_training_steps=steps,
            scheduler_specific_kwargs=arguments.lr_scheduler_kwargs,  # type: ignore[arg-type]
        )
        warmup = arguments.get_warmup_steps(steps)
        shares = [float(schedule.lr_lambdas[0](s)) for s in {0, 1, warmup, warmup + 1, steps // 2, steps - 1, steps}]
        if not all(math.isfinite(share) and share >= 0 for share in shares):
            raise ValueError(f"it returns the shares {', '.join(f'{s:g}' for s in shares)} of the rate")
    except Exception as error:  # whatever its arguments cause
        raise UserError(f"trainer.lr_scheduler_type: {scheduler!r} can't be used like that ({_line(error)})") from None


def _line(error: BaseException) -> str:
    return (" ".join(str(error).split()) or type(error).__name__)[:200]


_FIXED = (
    *("logging_nan_inf_filter", "remove_unused_columns", "logging_strategy", "eval_strategy", "save_strategy"),
    *("ignore_data_skip", "dataloader_drop_last", "average_tokens_across_devices", "save_only_model"),
    *("auto_find_batch_size", "ddp_backend", "load_best_model_at_end"),
)
_OFFERED = PretrainSettings.names()


def _deciding(argument: str) -> str | None:
    """Return the setting of a run that decides an argument of the Trainer; None if none does."""
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
    """Raise UserError for an argument under ``trainer`` that a job with this schedule does not take.

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
    """Convert arguments to another ``kind`` of arguments (TRL's trainers have theirs), with the fields ``own``."""
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
