"""Build transformers' TrainingArguments from a run's settings."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import fields
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

import torch
from transformers import Trainer, TrainingArguments
from transformers.optimization import get_scheduler

from lamina.core.json_types import Json
from lamina.core.values import entries, mapping, one_of, real_path, switch
from lamina.errors import UserError, unknown
from lamina.jobs.aliases import meaning
from lamina.jobs.settings import Check, Settings, at_least, between
from lamina.modeling.processes import device_of, launched
from lamina.training.settings import PretrainSettings

SCHEDULES = (
    *("linear", "cosine", "cosine_with_restarts", "cosine_with_min_lr", "cosine_warmup_with_min_lr"),
    *("polynomial", "inverse_sqrt", "constant", "constant_with_warmup"),
)
_LEVEL = partial(one_of, allowed=("debug", "info", "warning", "error", "critical", "passive"))


def _or_none(check: Check) -> Check:
    return lambda name, value: None if value is None else check(name, value)


def _some_text(name: str, value: object) -> str:
    if not isinstance(value, str) or not value:
        raise UserError(f"{name}: {value!r}. Give a string that is not empty.")
    return value


def _counted_tokens(name: str, value: object) -> object:
    if not isinstance(value, bool) and value not in ("all", "non_padding", "no"):
        raise UserError(f"{name}: {value!r} (allowed: true, false, all, non_padding, no)")
    return value


OPTIONS: dict[str, Check] = {
    "optim": _some_text,
    "optim_args": _or_none(_some_text),
    "lr_scheduler_type": partial(one_of, allowed=SCHEDULES),
    "lr_scheduler_kwargs": _or_none(mapping),
    "neftune_noise_alpha": _or_none(between(0.0, 1e6, open_high=True)),
    "tf32": _or_none(switch),
    "torch_empty_cache_steps": _or_none(at_least(1)),
    "full_determinism": switch,
    "include_num_input_tokens_seen": _counted_tokens,
    "per_device_eval_batch_size": at_least(1),
    "dataloader_num_workers": at_least(0),
    "dataloader_pin_memory": switch,
    "dataloader_persistent_workers": switch,
    "dataloader_prefetch_factor": _or_none(at_least(1)),
    "ddp_find_unused_parameters": switch,
    "ddp_bucket_cap_mb": _or_none(at_least(1)),
    "ddp_broadcast_buffers": _or_none(switch),
    "ddp_static_graph": _or_none(switch),
    "ddp_timeout": at_least(1),
    "log_level": _LEVEL,
    "log_level_replica": _LEVEL,
    "run_name": _or_none(_some_text),
    "project": _some_text,
    "trackio_space_id": _or_none(_some_text),
    "use_liger_kernel": switch,
}


def check_value(name: str, value: Any) -> None:
    """Raise UserError for a Trainer argument, or a value of the argument, that a run does not support."""
    if name not in OPTIONS:
        raise UserError(f"trainer.{name} has no effect in a run of Lamina (allowed: {', '.join(OPTIONS)})")
    if name == "lr_scheduler_type" and value == "warmup_stable_decay":
        raise UserError(
            "trainer.lr_scheduler_type: 'warmup_stable_decay' is Lamina's own schedule. Use --schedule wsd."
        )
    OPTIONS[name](f"trainer.{name}", value)


def check_together(options: Mapping[str, Any], schedule: str) -> None:
    """Raise UserError for Trainer arguments that contradict each other or the run's schedule."""
    clash = [name for name in ("lr_scheduler_type", "lr_scheduler_kwargs") if name in options]
    if schedule != "cosine" and clash:
        raise UserError(
            f"trainer.{clash[0]} has no effect with --schedule {schedule}. Remove the argument, or use "
            "--schedule cosine."
        )
    if not options.get("dataloader_num_workers"):
        for name in ("dataloader_prefetch_factor", "dataloader_persistent_workers"):
            if options.get(name):
                raise UserError(
                    f"trainer.{name}: {options[name]!r} has no effect without data-loader workers. Set "
                    "--trainer.dataloader_num_workers to at least 1."
                )


def try_out(arguments: TrainingArguments, options: Mapping[str, Any]) -> None:
    """Build the optimizer and the schedule, and take one step. Raises UserError if one of the two fails."""
    chosen = "optim" in options or "optim_args" in options
    weight = torch.nn.Parameter(torch.ones(2, 2, device=arguments.device if chosen else None))
    name = str(getattr(arguments.optim, "value", arguments.optim))
    try:
        kind, settings = Trainer.get_optimizer_cls_and_kwargs(arguments)
        optimizer = kind([weight], **settings)
        weight.grad = torch.ones_like(weight)
        if chosen:
            optimizer.step()
    except Exception as error:  # each optimizer's library raises other exception types
        raise UserError(
            f"trainer.optim: {name!r} does not work on this machine or with these arguments ({_line(error)})"
        ) from None
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
            raise ValueError(f"the schedule's factors on the learning rate are {', '.join(f'{s:g}' for s in shares)}")
    except Exception as error:  # a schedule's arguments can raise any exception type
        raise UserError(
            f"trainer.lr_scheduler_type: {scheduler!r} does not work with these arguments ({_line(error)})"
        ) from None


def _line(error: BaseException) -> str:
    return (" ".join(str(error).split()) or type(error).__name__)[:200]


_FIXED: Json = {  # arguments with one allowed value
    **dict.fromkeys(("logging_strategy", "eval_strategy", "save_strategy"), "steps"),
    **dict.fromkeys(("logging_first_step", "ignore_data_skip", "average_tokens_across_devices"), True),
    **dict.fromkeys(("logging_nan_inf_filter", "remove_unused_columns", "dataloader_drop_last"), False),
    **dict.fromkeys(("save_only_model", "auto_find_batch_size", "load_best_model_at_end"), False),
    "ddp_backend": None,
    **{f"{kind}_checkpointing_kwargs": {"use_reentrant": False} for kind in ("gradient", "activation")},
}
_OFFERED = PretrainSettings.names()
_NAMES = {entry.name for entry in fields(TrainingArguments) if entry.init}
_OURS = {  # for each argument, the setting that decides the argument
    name: setting
    for name in _NAMES - set(_FIXED)
    if (setting := name if name in _OFFERED else meaning(name, _OFFERED, near=True)) not in (None, "trainer")
}
A = TypeVar("A", bound=TrainingArguments)


def training_arguments(settings: PretrainSettings, processes: int = 1) -> TrainingArguments:
    """Build the Trainer's arguments for one of several processes. Raises a UserError that names the invalid setting."""
    if settings.batch_size == processes:
        for name in ("mixup", "cutmix"):
            if value := getattr(settings, name):
                raise UserError(
                    f"{name}: {value:g} needs two images per process, but each process has one. Set {name} to 0, "
                    f"or batch_size to at least {2 * processes}"
                )
    return arguments_of(TrainingArguments, settings, processes)


def check_arguments(trainer: Json, schedule: str, record: type[Settings]) -> None:
    """Raise UserError for arguments that are unknown, that the job sets itself, or that change Lamina's records."""
    for name, value in trainer.items():
        if name in _FIXED:
            if value != _FIXED[name]:
                raise UserError(
                    f"trainer.{name}: {value!r}, but Lamina's records need {_FIXED[name]!r}. Leave out trainer.{name}."
                )
            continue
        if name in _OURS and _OURS[name] not in record.names():
            raise UserError(
                f"trainer.{name}: `lamina {record.command_name}` sets this argument. Leave out trainer.{name}."
            )
        if name in _OURS:
            flag = f"--{_OURS[name].replace('_', '-')}"
            raise UserError(f"trainer.{name}: {flag} sets this argument. Use {flag}.")
        if name not in _NAMES:
            raise unknown("trainer argument", name, _NAMES & set(OPTIONS))
        check_value(name, value)
    check_together(trainer, schedule)


def arguments_of(kind: type[A], settings: PretrainSettings, processes: int = 1, **own: object) -> A:
    """Build a subclass of TrainingArguments, such as GRPOConfig, from a run's settings and the arguments ``own``."""
    if settings.batch_size % processes:
        raise UserError(
            f"batch_size: {settings.batch_size} blocks cannot be split evenly over {processes} processes. Choose a "
            f"multiple of {processes}, or another number of processes"
        )
    check_arguments(settings.trainer, settings.schedule, PretrainSettings)
    values = _values(settings, processes)
    if "activation_checkpointing" not in _NAMES:
        values["gradient_checkpointing"] = settings.gradient_checkpointing
    values = {k: v for k, v in values.items() if k in _NAMES}
    if values["lr_scheduler_type"] in ("cosine_with_min_lr", "cosine_warmup_with_min_lr"):
        values.setdefault("lr_scheduler_kwargs", {"min_lr_rate": settings.min_learning_rate})
    try:
        arguments = kind(**{**values, **own})
    except Exception as error:  # the checks in ``kind`` can raise any exception type
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
        "logging_steps": settings.logging_steps or max(1, round(settings.steps / 20)),
        "logging_first_step": True,
        "logging_nan_inf_filter": False,
        "eval_strategy": "steps",
        "eval_steps": settings.eval_steps or max(1, round(settings.steps / 5)),
        "save_strategy": "steps" if settings.save_steps else "no",
        "save_steps": settings.save_steps or 500,
        "save_total_limit": settings.keep,
        # Lamina adds TensorBoard's callback later, because transformers takes the folder from the environment
        "report_to": [r for r in entries(settings.report_to) if r not in ("none", "tensorboard")] or "none",
        "logging_dir": None,
        "run_name": real_path(settings.output).name,
        "project": "lamina",
        "optim": "adamw_torch_fused",
        "bf16": settings.precision in ("bf16", "float8"),
        "fp16": settings.precision == "fp16",
        "remove_unused_columns": False,
        "prediction_loss_only": True,
        # transformers 5.23 renamed this argument; ``arguments_of`` drops the name that this version lacks
        "activation_checkpointing": settings.gradient_checkpointing,
        "disable_tqdm": True,
        "use_cpu": device == "cpu",
        "ddp_backend": ("nccl" if device == "cuda" else "gloo") if launched()[1] > 1 else None,
        "ddp_find_unused_parameters": False,
        # the training order starts where a checkpoint ended; a step counts the tokens of all processes
        "ignore_data_skip": True,
        "average_tokens_across_devices": True,
        **{name: value for name, value in settings.trainer.items() if name not in _FIXED},
    }
