"""What can be known wrong about a run's settings before its corpus is read."""

from __future__ import annotations

import importlib.util
import json
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
import transformers
from transformers import TrainingArguments

from lamina.data.corpus import Corpus
from lamina.errors import UserError
from lamina.jobs import digests
from lamina.jobs.files import was_written
from lamina.modeling import initialization
from lamina.modeling.backbones import PRESETS, resolve_backbone
from lamina.modeling.building import build, recommended
from lamina.modeling.memory import refuse_beyond_memory
from lamina.modeling.modeling_lamina import check_head
from lamina.placements import Plan
from lamina.probes.engine import registry
from lamina.training import source
from lamina.training.arguments import training_arguments
from lamina.training.checkpointing.resuming import known_of, plan_digest
from lamina.training.execution.compiling import missing_compiler
from lamina.training.monitoring.experts import choose, find_routers
from lamina.training.optimizer import check_optimizer, width_scaling_of
from lamina.training.settings import PretrainSettings

DATA = "data.json"  # which text the run began with
# what a resumed run may change
FREE = {"output", "save_steps", "keep", "report_to", "threads", "parallel", "device"}
FREE |= {"rollback", "rollback_factor", "rollback_skip", "probe_every", "probes"}
# those that treat every element of a weight by itself
SHARDED_OPTIMIZERS = ("adamw_torch_fused", "adamw_torch", "sgd", "adagrad", "rmsprop")
SPEED_BEFORE = {"precision": "fp32", "compile": "off"}  # of runs older than these settings
BEFORE = {
    **SPEED_BEFORE,
    **{name: getattr(PretrainSettings, name) for name in ("streaming", "shuffle_buffer")},
    **{name: getattr(PretrainSettings, name) for name in ("schedule", "decay", "decay_shape")},
}


def check(settings: PretrainSettings, processes: int = 1, *, trained: bool = True) -> Plan:
    """The plan, with everything that can be known wrong before the corpus is read. Raises UserError.

    ``trained``: whether this machine trains the model as it is, so that it has to fit into its memory.
    """
    for name in settings.reports():
        if importlib.util.find_spec(name) is None:
            raise UserError(f"report_to: {name!r} is not installed (allowed: pip install 'lamina[{name}]')")
    if settings.probe_every or settings.probes != PretrainSettings.probes:
        registry.make_all(settings.probes)
    config = backbone_config(settings)
    plan = source.plan_of(settings, config.num_hidden_layers)
    initialization.check(recommended(plan) if settings.init == "recommended" else settings.init)
    arguments = training_arguments(settings, processes)
    scaling = width_scaling_of(settings)
    if scaling is not None:
        check_optimizer(arguments)
    if settings.precision == "fp16" and arguments.device.type == "cpu":
        # accelerate has no loss scaler for it there, and would train in float32 without a word
        raise UserError("precision: 'fp16' needs a GPU and its loss scaler (allowed on the CPU: auto, fp32, bf16)")
    if settings.compile == "on" and (missing := missing_compiler(arguments.device)):
        raise UserError(f"compile: 'on', but {missing} (allowed here: auto, off)")
    # What only the modules know (groups that don't divide the width, norms that the attention has already) shows in
    # one layer of each kind, on the meta device.
    kinds = tuple(layer for layer, _ in plan.kinds()[:4])
    with torch.device("meta"):
        few = resolve_backbone(config, num_layers=len(kinds))
        small = build(few, replace(plan, layers=kinds), init="normal", width_scaling=scaling)
    if trained:
        _check_memory(settings, config.num_hidden_layers, small, arguments, processes)
    if settings.expert_balance in ("bias", "loss"):
        with torch.device("meta"):
            model = build(config, plan, init="normal")
        choose(settings.expert_balance, find_routers(model))
    return plan


def _check_memory(
    settings: PretrainSettings, num_layers: int, small: Any, arguments: TrainingArguments, processes: int
) -> None:
    """Raise UserError where the blocks alone, or the states that enter them, do not fit. A lower bound of what is used.

    ``small``: the model with fewer layers, on the meta device.
    """
    config = small.config.get_text_config()
    device = "cuda" if arguments.device.type == "cuda" else "cpu"
    parts = processes if settings.parallel == "fsdp2" else 1
    weights = sum(w.numel() for name, w in small.named_parameters() if ".layers." in name)
    weights = weights * num_layers // config.num_hidden_layers // parts
    optimizer = str(getattr(arguments.optim, "value", arguments.optim))
    copies = 4 if optimizer.startswith("adamw_torch") else 2  # itself, its gradient, AdamW's two averages
    states = settings.batch_size // processes * settings.sequence_length * config.hidden_size * num_layers
    refuse_beyond_memory(
        "hidden_size, num_layers", f"training {weights:.3g} weights in the blocks takes", 4.0 * copies * weights, device
    )
    refuse_beyond_memory(
        "batch_size, sequence_length",
        f"the backward pass of {settings.batch_size // processes} × {settings.sequence_length} tokens through "
        f"{num_layers} blocks takes",
        2.0 * states,
        device,
    )


def check_sharded(settings: PretrainSettings) -> None:
    """Raise UserError for what can't be done with a model that is shared out over several processes."""
    if settings.probe_every:
        raise UserError(
            f"probe_every: {settings.probe_every} needs the whole model in one process (allowed with --parallel fsdp2: "
            "0, and lamina probe afterwards; or --parallel ddp)"
        )
    optimizer = str(settings.trainer.get("optim", SHARDED_OPTIMIZERS[0]))
    if optimizer not in SHARDED_OPTIMIZERS:
        raise UserError(
            f"trainer.optim: {optimizer!r} does not work on parts of weights (allowed with --parallel fsdp2: "
            f"{', '.join(SHARDED_OPTIMIZERS)}; or --parallel ddp)"
        )


def backbone_config(settings: PretrainSettings, vocab_size: int | None = None) -> transformers.PreTrainedConfig:
    """The backbone's configuration with the settings' sizes and room for the sequence length."""
    if settings.from_model is not None:
        config = source.config_of(settings.from_model, vocab_size)
        if settings.sequence_length > config.max_position_embeddings:
            config.max_position_embeddings = settings.sequence_length
        return config
    config = resolve_backbone(
        settings.backbone,
        num_layers=settings.num_layers,
        hidden_size=settings.hidden_size,
        num_heads=settings.num_heads,
        vocab_size=vocab_size,
    )
    try:
        check_head(config, "causal_lm")
    except ValueError as error:
        raise UserError(
            f"backbone: {settings.backbone!r} is no language model that can be trained here; {error}"
        ) from None
    if settings.untie_embeddings:
        config.tie_word_embeddings = False
    # A preset's positions are those that the run trains; a folder's are its own, on which its windows and RoPE stand.
    if settings.backbone in PRESETS or settings.sequence_length > config.max_position_embeddings:
        config.max_position_embeddings = settings.sequence_length
    return config


def merge(stored: Mapping[str, Any], given: Mapping[str, Any]) -> dict[str, Any]:
    """The stored settings of a run to resume. Raises UserError where a given one differs in what the run computes."""
    stored = {**BEFORE, **stored}
    for name, value in given.items():
        if value == "auto" and name in SPEED_BEFORE:
            continue  # decided when the run began
        if name not in FREE and stored.get(name) != value:
            raise UserError(
                f"{name}: {value!r} differs from the run's {stored.get(name)!r} (allowed with --resume: the same, or "
                f"another of {', '.join(sorted(FREE))})"
            )
    return {**stored, **{k: v for k, v in given.items() if not (v == "auto" and k in SPEED_BEFORE)}}


def refuse_changes(folder: Path, plan: Plan, settings: PretrainSettings, fingerprint: str) -> None:
    """Raise UserError where the text or the placement is not what it was when the run in ``folder`` began."""
    known = known_of(folder)
    text = {"corpus": settings.corpus, "fingerprint": fingerprint}
    stored = known["text"] if "text" in known else _stored(folder / DATA, text).get("fingerprint")
    if stored is not None and stored != fingerprint:
        raise UserError(
            f"corpus: {settings.corpus!r} or its tokenizer {settings.tokenizer!r} is not what it was when the run in "
            f"{str(folder)!r} began{_changed(settings.corpus, folder / DATA)} (allowed with --resume: the same text; "
            "else another --output, or --overwrite)"
        )
    before = {} if "plan" in known else _stored(folder / "plan.json", plan.to_dict())
    same = (
        before == json.loads(json.dumps(plan.to_dict())) if "plan" not in known else known["plan"] == plan_digest(plan)
    )
    if not same and (before or known):
        raise UserError(
            f"placement: {settings.placement!r} is not what it was when the run in {str(folder)!r} began (allowed with "
            "--resume: the same; else another --output, or --overwrite)"
        )


def _changed(corpus: str, noted: Path) -> str:
    """The corpus' files that are newer than the run's last start, as a part of a sentence."""
    if not noted.is_file():
        return ""
    found = [str(path) for path in Corpus.parse(corpus).changed_since(noted.stat().st_mtime)]
    return f"; changed since: {', '.join(found[:3])}{', ...' * (len(found) > 3)}" if found else ""


def _stored(path: Path, now: dict[str, Any]) -> dict[str, Any]:
    """What a file of the run holds; of a damaged one ``now``, if that is what was written. Raises UserError if not."""
    if words := digests.differs(path):
        if was_written(path, now):
            return json.loads(json.dumps(now))
        raise UserError(
            f"{str(path)!r} {words}, and it did not hold what this run would write (allowed with --resume: the same "
            "text and placement; else another --output, or --overwrite)"
        )
    try:
        stored = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    return stored if isinstance(stored, dict) else {}
