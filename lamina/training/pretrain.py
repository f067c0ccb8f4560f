"""Pretraining: settings in, a run's folder out."""

from __future__ import annotations

import errno
import importlib.util
import logging
import math
import os
import shutil
import time
from collections.abc import Mapping
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

import torch
import transformers
from torch.utils.data import Subset
from transformers import Trainer, TrainerState, TrainingArguments
from transformers.trainer_callback import PrinterCallback, ProgressCallback

from lamina.data import Blocks, prepare_blocks
from lamina.data import bits_per_byte as bits_per_byte_of
from lamina.errors import UserError, unknown
from lamina.modeling import initialization
from lamina.modeling.backbones import resolve_backbone
from lamina.modeling.building import build, make_plan, recommended
from lamina.modeling.modeling_lamina import check_head
from lamina.placements import Plan
from lamina.training import folder as run_folder
from lamina.training.checkpoints import newest_checkpoint, step_of
from lamina.training.experts import ExpertBalance, choose, find_routers
from lamina.training.guard import Diverged, DivergenceGuard
from lamina.training.recorder import RunRecorder, safe_exp, stop_signals
from lamina.training.settings import PretrainSettings, Status
from lamina.training.trainer import LaminaTrainer

logger = logging.getLogger(__name__)

GRACE_SECONDS = 30.0  # for a worker of a killed study that still writes its checkpoint

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
}
_FIXED = ("logging_nan_inf_filter", "remove_unused_columns", "logging_strategy", "eval_strategy", "save_strategy")


FREE = {"output", "save_steps", "keep", "report_to", "threads"}  # what a resumed run may change


def pretrain(settings: PretrainSettings, *, resume: bool = False, overwrite: bool = False, bar: bool = True) -> dict:
    """Train a model from scratch and leave the run's folder; returns what result.json holds.

    A run that diverges, sticks or is interrupted ends with that status, not with an exception. With ``resume`` a folder
    that holds a finished run is left as it is; otherwise the run goes on from its newest whole checkpoint.

    Raises:
        UserError: for settings with no meaning, a corpus that can't be read, an output folder in use, settings that
            differ from those of the run to resume.
        OSError: the disk is full.
    """
    target = Path(settings.output)
    run_folder.refuse(target, resume=resume, overwrite=overwrite)
    stored = target / "config.yaml"
    if resume and stored.is_file():
        settings = PretrainSettings.from_dict(merge(run_folder.read_yaml(stored), settings.to_dict()))
    check(settings)
    done = run_folder.read_result(target) if resume else None
    if done is not None and done["status"] in ("finished", "stuck", "diverged"):
        return done
    blocks, tokenizer = _blocks(settings, bar)  # before the folder is touched: the corpus may be unreadable
    arguments = training_arguments(settings)
    with run_folder.lock(target, wait=GRACE_SECONDS if resume else 0.0):
        used = run_folder.claim(target, resume=resume, overwrite=overwrite)
        (target / "result.json").unlink(missing_ok=True)
        run_folder.write_json(target / "environment.json", run_folder.environment(settings.seed))
        run_folder.write_yaml(target / "config.yaml", settings.to_dict())
        before = float((done or {}).get("seconds") or 0.0)
        result: dict[str, Any]
        try:
            result = _run(settings, arguments, target, blocks, tokenizer, resume=used, bar=bar)
        except KeyboardInterrupt:
            result = {"status": "interrupted", "reason": "stopped at once"}
        except UserError:
            raise
        except Exception as error:
            if run_folder.disk_full(error):
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(target)) from error
            result = {"status": "failed", "reason": f"{type(error).__name__}: {error}"}
            run_folder.write_json(target / "result.json", result)
            raise
        result["seconds"] = round(before + float(result.get("seconds", 0.0)), 2)
        run_folder.write_json(target / "result.json", result)
    return result


def check(settings: PretrainSettings) -> Plan:
    """The plan, with everything that can be known wrong before the corpus is read. Raises UserError."""
    if int(os.environ.get("WORLD_SIZE", "1")) > 1:
        raise UserError(f"WORLD_SIZE: {os.environ['WORLD_SIZE']} processes (allowed: 1; distributed runs are to come)")
    for name in settings.reports():
        if importlib.util.find_spec(name) is None:
            raise UserError(f"report_to: {name!r} is not installed (allowed: pip install 'lamina[{name}]')")
    config = backbone_config(settings)
    plan = make_plan(settings.placement, config.num_hidden_layers)
    initialization.check(recommended(plan) if settings.init == "recommended" else settings.init)
    training_arguments(settings)
    # What only the modules know (groups that don't divide the width, norms that the attention has already) shows in
    # one layer of each kind, on the meta device.
    kinds = tuple(layer for layer, _ in plan.kinds()[:4])
    with torch.device("meta"):
        build(resolve_backbone(config, num_layers=len(kinds)), replace(plan, layers=kinds), init="normal")
    if settings.expert_balance in ("bias", "loss"):
        with torch.device("meta"):
            model = build(config, plan, init="normal")
        choose(settings.expert_balance, find_routers(model))
    return plan


def backbone_config(settings: PretrainSettings, vocab_size: int | None = None) -> transformers.PreTrainedConfig:
    """The backbone's configuration with the settings' sizes and room for the sequence length."""
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
    if settings.sequence_length > config.max_position_embeddings:
        config.max_position_embeddings = settings.sequence_length
    return config


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


def _blocks(settings: PretrainSettings, bar: bool) -> tuple[Blocks, Any]:
    return prepare_blocks(
        settings.corpus,
        settings.tokenizer,
        settings.sequence_length,
        eval_fraction=settings.eval_fraction,
        text_field=settings.text_field,
        progress=bar,
    )


def _run(
    settings: PretrainSettings,
    arguments: TrainingArguments,
    target: Path,
    blocks: Blocks,
    tokenizer: Any,
    *,
    resume: bool,
    bar: bool,
) -> dict[str, Any]:
    transformers.utils.logging.disable_progress_bar()
    if settings.threads:
        torch.set_num_threads(settings.threads)
    began = time.monotonic()
    config = backbone_config(settings, vocab_size=len(tokenizer))
    config.bos_token_id, config.eos_token_id = tokenizer.bos_token_id, tokenizer.eos_token_id
    plan = make_plan(settings.placement, config.num_hidden_layers)
    run_folder.write_json(target / "plan.json", plan.to_dict())
    torch.manual_seed(settings.seed)
    profile = torch.stack([blocks.train[i]["input_ids"] for i in spread(len(blocks.train), settings.batch_size)])
    model = build(config, plan, head="causal_lm", init=settings.init, profile_ids=profile)
    checkpoint = newest_checkpoint(target / "checkpoints") if resume else None
    resumed_step = (step_of(checkpoint) if checkpoint else -1) if resume else None
    guard = DivergenceGuard(margin=settings.divergence_margin, patience=settings.divergence_patience)
    monitor_blocks = settings.monitor_blocks or max(1, settings.batch_size // 4)
    recorder = RunRecorder(
        metrics=run_folder.MetricsWriter(target, resumed_step),
        layers=run_folder.LayersWriter(target, resumed_step),
        guard=guard,
        monitor_ids=torch.stack([blocks.eval[i]["input_ids"] for i in spread(len(blocks.eval), monitor_blocks)]),
        tokens_per_step=settings.batch_size * settings.gradient_accumulation * settings.sequence_length,
        bits_per_byte=lambda loss: bits_per_byte_of(loss, blocks.stats),
        track_layers=bool(settings.reports()),
        bar=bar,
    )
    trainer = LaminaTrainer(
        model=model,
        args=arguments,
        train_dataset=blocks.train,
        eval_dataset=Subset(blocks.eval, spread(len(blocks.eval), settings.eval_blocks or len(blocks.eval))),
        callbacks=[recorder, *_tensorboard(settings)],
        guard=guard,
        experts=ExpertBalance(model, settings.expert_balance, settings.expert_balance_rate),
    )
    for callback in (ProgressCallback, PrinterCallback):
        trainer.remove_callback(callback)
    recorder.trainer = trainer
    with stop_signals(recorder):
        status, reason = _train(trainer, recorder, guard, settings, blocks, checkpoint)
        if status in ("finished", "stuck"):
            _save(model, tokenizer, target / "model")
    return _result(settings, status, reason, trainer, recorder, blocks, model, plan, time.monotonic() - began)


def _tensorboard(settings: PretrainSettings) -> list[Any]:
    if "tensorboard" not in settings.reports():
        return []
    from torch.utils.tensorboard import SummaryWriter
    from transformers.integrations.integration_utils import TensorBoardCallback

    return [TensorBoardCallback(SummaryWriter(str(Path(settings.output) / "tensorboard")))]


def _save(model: torch.nn.Module, tokenizer: Any, folder: Path) -> None:
    """Write the model whole or not at all."""
    draft = folder.with_name(".model-draft")
    shutil.rmtree(draft, ignore_errors=True)
    model.save_pretrained(draft)  # type: ignore[operator]
    tokenizer.save_pretrained(draft)
    shutil.rmtree(folder, ignore_errors=True)
    os.replace(draft, folder)


def _train(
    trainer: LaminaTrainer,
    recorder: RunRecorder,
    guard: DivergenceGuard,
    settings: PretrainSettings,
    blocks: Blocks,
    checkpoint: Path | None,
) -> tuple[Status, str]:
    try:
        if checkpoint is not None and step_of(checkpoint) >= settings.steps:
            trainer._load_from_checkpoint(str(checkpoint))  # Trainer would take one step too many
            trainer.state = TrainerState.load_from_json(str(checkpoint / "trainer_state.json"))
        else:
            trainer.train(resume_from_checkpoint=str(checkpoint) if checkpoint else None)
        complete = trainer.state.global_step >= settings.steps
        if complete and recorder.evaluated_step != trainer.state.global_step:
            trainer.evaluate()
    except Diverged as diverged:
        recorder.record_divergence(diverged)
        return "diverged", diverged.reason
    finally:
        recorder.close()
    if recorder.interrupted and not complete:
        return "interrupted", f"{recorder.interrupted} at step {trainer.state.global_step}"
    if not math.isfinite(recorder.last_eval):
        return "diverged", f"the eval loss is {recorder.last_eval}; {guard.first_to_leave()}"
    if recorder.best_eval > blocks.stats.unigram_entropy - settings.stuck_margin:
        return "stuck", (
            f"the eval loss never got {settings.stuck_margin:g} nats below the corpus' unigram entropy of "
            f"{blocks.stats.unigram_entropy:.3f} (best: {recorder.best_eval:.3f} in {settings.steps} steps)"
        )
    return "finished", ""


def _result(
    settings: PretrainSettings,
    status: Status,
    reason: str,
    trainer: Trainer,
    recorder: RunRecorder,
    blocks: Blocks,
    model: torch.nn.Module,
    plan: Plan,
    seconds: float,
) -> dict[str, Any]:
    steps = trainer.state.global_step
    tokens = steps * recorder.tokens_per_step
    timed = recorder.training_steps * recorder.tokens_per_step
    loss = recorder.last_eval if math.isfinite(recorder.last_eval) else math.nan
    parameters = sum(p.numel() for p in model.parameters())
    return {
        "status": status,
        "eval_loss": loss,
        "perplexity": safe_exp(loss),
        "bits_per_byte": bits_per_byte_of(loss, blocks.stats),
        "unigram_entropy": blocks.stats.unigram_entropy,
        "tokens": tokens,
        "steps": steps,
        "seconds": round(seconds, 2),
        "tokens_per_second": timed / recorder.training_seconds if recorder.training_seconds else None,
        "parameters": parameters,
        "flops": training_flops(model, plan, settings.sequence_length) * tokens,
        "init": recommended(plan) if settings.init == "recommended" else settings.init,
        "reason": reason,
    }


def training_flops(model: torch.nn.Module, plan: Plan, sequence_length: int) -> float:
    """Model FLOPs a token of forward and backward: 6 a weight outside the embedding and 12 N d T for full attention."""
    config: Any = model.config.get_text_config()  # type: ignore[union-attr]
    embedding = model.get_input_embeddings().weight.numel()  # type: ignore[operator,union-attr]
    weights = sum(p.numel() for p in model.parameters() if p.ndim >= 2)
    if not config.tie_word_embeddings:
        weights -= embedding
    return 6.0 * weights + 12.0 * plan.num_layers * config.hidden_size * sequence_length


def spread(available: int, wanted: int) -> list[int]:
    """``wanted`` indices (or all) spread evenly over ``available``: the same ones in every run."""
    wanted = min(wanted, available)
    return [i * available // wanted for i in range(wanted)]


def merge(stored: Mapping[str, Any], given: Mapping[str, Any]) -> dict[str, Any]:
    """The stored settings of a run to resume. Raises UserError where a given one differs in what the run computes."""
    for name, value in given.items():
        if name not in FREE and stored.get(name) != value:
            raise UserError(
                f"{name}: {value!r} differs from the run's {stored.get(name)!r} (allowed with --resume: the same, or "
                f"another of {', '.join(sorted(FREE))})"
            )
    return {**stored, **given}
