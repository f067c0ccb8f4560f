"""Checks of a run's settings before its corpus is read."""

from __future__ import annotations

import importlib.util
from dataclasses import replace
from typing import TYPE_CHECKING

import torch
from transformers import PreTrainedConfig, PreTrainedModel, TrainingArguments

from lamina.core import initializers
from lamina.data.packed import single_corpus_of
from lamina.errors import UserError
from lamina.modeling.backbones import resolve_backbone
from lamina.modeling.building import build, recommended
from lamina.modeling.configuration_lamina import backbone_of
from lamina.modeling.memory import refuse_beyond_memory
from lamina.placements import Plan
from lamina.probes.engine import registry
from lamina.training.arguments import training_arguments
from lamina.training.checkpointing.saved_model import check_repository
from lamina.training.execution.devices import missing_compiler
from lamina.training.monitor.experts import choose, find_routers
from lamina.training.objectives.objective import objective_of
from lamina.training.objectives.text import about_eval_corpus
from lamina.training.optimization.optimizer import check_optimizer, width_scaling_of
from lamina.training.settings import PretrainSettings

if TYPE_CHECKING:
    from lamina.evaluation.job import TaskMeasure

# optimizers that treat each element of a weight independently
SHARDED_OPTIMIZERS = ("adamw_torch_fused", "adamw_torch", "sgd", "adagrad", "rmsprop")


def check_settings(settings: PretrainSettings, plan: Plan, processes: int = 1) -> TrainingArguments:
    """Raise UserError for settings that are invalid on this machine or placement; returns the Trainer's arguments."""
    if settings.push_to_hub is not None:
        check_repository(settings.push_to_hub)
    if settings.eval_corpus is not None:
        with about_eval_corpus():
            single_corpus_of(settings.eval_corpus, settings.text_field)
    task_measure(settings)
    for name in settings.reports():
        if importlib.util.find_spec(name) is None:
            raise UserError(f"report_to: {name!r} is not installed (allowed: pip install 'lamina[{name}]')")
    if settings.probe_every or settings.probes != PretrainSettings.probes:
        registry.make_all(settings.probes)
    initializers.check(recommended(plan) if settings.init == "recommended" else settings.init)
    arguments = training_arguments(settings, processes)
    if width_scaling_of(settings) is not None:
        check_optimizer(arguments)
    if settings.precision == "fp16" and arguments.device.type == "cpu":
        # accelerate has no loss scaler on the CPU and would silently train in float32
        raise UserError("precision: 'fp16' needs a GPU and its loss scaler (allowed on the CPU: auto, fp32, bf16)")
    if settings.compile == "on" and (missing := missing_compiler(arguments.device)):
        raise UserError(f"compile: 'on', but {missing} (allowed here: auto, off)")
    return arguments


def task_measure(settings: PretrainSettings) -> TaskMeasure | None:
    """Return the scorer of the run's eval_tasks; None without them. Raises UserError for a missing task or its data."""
    if settings.eval_tasks is None:
        return None
    from lamina.evaluation.job import TaskMeasure  # needs the harness only now

    return TaskMeasure.find(
        settings.eval_tasks, settings.eval_data_dir, settings.eval_task_limit, settings.batch_size, settings.seed
    )


def check_modules(
    settings: PretrainSettings,
    config: PreTrainedConfig,
    plan: Plan,
    arguments: TrainingArguments,
    processes: int = 1,
    *,
    trained: bool = True,
) -> None:
    """Raise UserError for groups that do not divide the width, and for a module's own norms, which only modules show.

    One layer of each kind is built on the meta device. ``trained``: whether this machine trains the model as it is,
    so that it has to fit into its memory.
    """
    kinds = tuple(layer for layer, _ in plan.kinds()[:4])
    with torch.device("meta"):
        few = resolve_backbone(config, num_layers=len(kinds))
        small = build(few, replace(plan, layers=kinds), init="normal", width_scaling=width_scaling_of(settings))
    if trained:
        _check_memory(settings, config, small, arguments, processes)
    if settings.expert_balance in ("bias", "loss"):
        with torch.device("meta"):
            model = build(config, plan, init="normal")
        choose(settings.expert_balance, find_routers(model))


def _check_memory(
    settings: PretrainSettings,
    whole: PreTrainedConfig,
    small: PreTrainedModel,
    arguments: TrainingArguments,
    processes: int,
) -> None:
    """Raise UserError if the blocks alone, or the states that enter them, do not fit: a lower bound of the memory.

    ``whole`` is the backbone, ``small`` the model with fewer layers, on the meta device.
    """
    num_layers, length = whole.num_hidden_layers, objective_of(whole, settings.objective).item_tokens(whole, settings)
    config = backbone_of(small.config)
    device = "cuda" if arguments.device.type == "cuda" else "cpu"
    parts = processes if settings.parallel == "fsdp2" else 1
    weights = sum(w.numel() for name, w in small.named_parameters() if ".layers." in name)
    weights = weights * num_layers // config.num_hidden_layers // parts
    optimizer = str(getattr(arguments.optim, "value", arguments.optim))
    copies = 4 if optimizer.startswith("adamw_torch") else 2  # the weight, its gradient, AdamW's two averages
    states = settings.batch_size // processes * length * config.hidden_size * num_layers
    refuse_beyond_memory(
        "hidden_size, num_layers", f"training {weights:.3g} weights in the blocks takes", 4.0 * copies * weights, device
    )
    refuse_beyond_memory(
        "batch_size, sequence_length",
        f"the backward pass of {settings.batch_size // processes} × {length} tokens through {num_layers} blocks takes",
        2.0 * states,
        device,
    )


def check_sharded(settings: PretrainSettings) -> None:
    """Raise UserError for settings that do not work with a model that is sharded over several processes."""
    if settings.eval_tasks is not None:
        raise UserError(
            f"eval_tasks: {settings.eval_tasks!r} needs the whole model in one process (allowed with --parallel fsdp2: "
            "none, and lamina eval afterwards; or --parallel ddp)"
        )
    if settings.probe_every:
        raise UserError(
            f"probe_every: {settings.probe_every} needs the whole model in one process (allowed with --parallel fsdp2: "
            "0, and lamina probe afterwards; or --parallel ddp)"
        )
    if settings.ema_decay:
        raise UserError(f"ema_decay: {settings.ema_decay} needs whole weights (allowed with --parallel fsdp2: 0)")
    optimizer = str(settings.trainer.get("optim", SHARDED_OPTIMIZERS[0]))
    if optimizer not in SHARDED_OPTIMIZERS:
        raise UserError(
            f"trainer.optim: {optimizer!r} does not work on parts of weights (allowed with --parallel fsdp2: "
            f"{', '.join(SHARDED_OPTIMIZERS)}; or --parallel ddp)"
        )
