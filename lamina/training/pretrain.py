"""Pretraining: settings in, a run's folder out."""

from __future__ import annotations

import errno
import logging
import math
import os
import shutil
import sys
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
import transformers
from torch.utils.data import Subset
from tqdm.auto import tqdm
from transformers import TrainerState, TrainingArguments
from transformers.trainer_callback import PrinterCallback, ProgressCallback

from lamina.data import Blocks, prepare_blocks
from lamina.data import bits_per_byte as bits_per_byte_of
from lamina.data.mixed_blocks import MixedBlocks
from lamina.errors import UserError
from lamina.modeling.building import build, make_plan
from lamina.training import folder as run_folder
from lamina.training import speed
from lamina.training.arguments import training_arguments
from lamina.training.checkpoints import newest_checkpoint, step_of
from lamina.training.checks import backbone_config, check, merge
from lamina.training.experts import ExpertBalance
from lamina.training.groups import rate_factors, width_scaling_of
from lamina.training.guard import Diverged, DivergenceGuard
from lamina.training.outcome import outcome
from lamina.training.recorder import RunRecorder, stop_signals
from lamina.training.scheduled import ScheduledProbes
from lamina.training.settings import PretrainSettings, Status
from lamina.training.trainer import LaminaTrainer

logger = logging.getLogger(__name__)

GRACE_SECONDS = 30.0  # for a worker of a killed study that still writes its checkpoint


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
    scaling = width_scaling_of(settings)
    model = build(config, plan, head="causal_lm", init=settings.init, profile_ids=profile, width_scaling=scaling)
    settings = _settle(settings, model, arguments.device, target, bar=bar)
    arguments = training_arguments(settings)
    checkpoint = newest_checkpoint(target / "checkpoints") if resume else None
    resumed_step = (step_of(checkpoint) if checkpoint else -1) if resume else None
    guard = DivergenceGuard(margin=settings.divergence_margin, patience=settings.divergence_patience)
    monitor_blocks = settings.monitor_blocks or max(1, settings.batch_size // 4)
    train = _in_order(blocks.train, settings, arguments.world_size)
    monitor_ids = torch.stack([blocks.eval[i]["input_ids"] for i in spread(len(blocks.eval), monitor_blocks)])
    recorder = RunRecorder(
        metrics=run_folder.MetricsWriter(target, resumed_step),
        layers=run_folder.LayersWriter(target, resumed_step),
        guard=guard,
        monitor_ids=monitor_ids,
        tokens_per_step=settings.batch_size * settings.gradient_accumulation * settings.sequence_length,
        bits_per_byte=lambda loss: bits_per_byte_of(loss, blocks.stats),
        track_layers=bool(settings.reports()),
        bar=bar,
        realised=train.realised if isinstance(train, MixedBlocks) else None,
        blocks_per_step=settings.batch_size * settings.gradient_accumulation * arguments.world_size,
    )
    probing = ScheduledProbes(target, settings, monitor_ids, tokenizer, resumed_step) if settings.probe_every else None
    trainer = LaminaTrainer(
        model=model,
        args=arguments,
        train_dataset=train,
        eval_dataset=Subset(blocks.eval, spread(len(blocks.eval), settings.eval_blocks or len(blocks.eval))),
        callbacks=[recorder, *_tensorboard(settings), *([probing] if probing else [])],
        guard=guard,
        experts=ExpertBalance(model, settings.expert_balance, settings.expert_balance_rate),
        rate_factors=None if scaling is None else rate_factors(model, scaling),
    )
    for callback in (ProgressCallback, PrinterCallback):
        trainer.remove_callback(callback)
    recorder.trainer = trainer
    if probing:
        probing.trainer = trainer
    with stop_signals(recorder):
        status, reason = _train(trainer, recorder, guard, settings, blocks, checkpoint)
        if status in ("finished", "stuck"):
            _save(model, tokenizer, target / "model")
    return outcome(settings, status, reason, trainer, recorder, blocks, model, plan, time.monotonic() - began)


def _settle(
    settings: PretrainSettings, model: torch.nn.Module, device: torch.device, target: Path, *, bar: bool
) -> PretrainSettings:
    """The settings with their precision and compilation decided, and kept so: a resumed run does not try again."""
    if speed.is_open(settings):
        choice = speed.choose(settings, lambda: model, device)
        settings = replace(settings, precision=choice.precision, compile=choice.compile)
        run_folder.write_json(target / "speed.json", choice.to_dict())
        run_folder.write_yaml(target / "config.yaml", settings.to_dict())
        logger.info("%s", choice)
        if bar:
            tqdm.write(str(choice), file=sys.stderr)
    speed.prepare(model, settings)
    return settings


def _in_order(train: Any, settings: PretrainSettings, processes: int) -> Any:
    """The training blocks; a mix in this run's own order, with a word on what is seen more than once."""
    if not isinstance(train, MixedBlocks):
        return train
    drawn = train.drawn(
        settings.seed, settings.steps * settings.batch_size * settings.gradient_accumulation * processes
    )
    for name, part in drawn.realised(len(drawn)).items():
        if part["epochs"] > 1:
            logger.warning("corpus %s: its blocks are seen %.2f times in this run", name, part["epochs"])
    return drawn


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


def spread(available: int, wanted: int) -> list[int]:
    """``wanted`` indices (or all) spread evenly over ``available``: the same ones in every run."""
    wanted = min(wanted, available)
    return [i * available // wanted for i in range(wanted)]
