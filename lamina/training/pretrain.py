"""Pretraining: settings in, a run's folder out."""

from __future__ import annotations

import errno
import gc
import logging
import os
import shutil
import time
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import Any

import torch
import transformers

from lamina.data import Blocks, prepare_blocks, stream_blocks
from lamina.errors import UserError
from lamina.jobs import digests
from lamina.jobs import folder as run_folder
from lamina.jobs.environment import environment
from lamina.jobs.files import disk_full, write_json, write_yaml
from lamina.jobs.manifest import MANIFEST, entry_of, seal
from lamina.jobs.status import ENDED, Status
from lamina.training import source
from lamina.training.arguments import device_of
from lamina.training.checkpointing.resuming import result_to_keep, stored_settings
from lamina.training.checkpointing.rollback import Rollbacks
from lamina.training.checkpointing.sharding import full_state, is_sharded, own_class
from lamina.training.checkpointing.store import checkpoints, discard, newest_checkpoint, step_of
from lamina.training.execution.processes import GONE, Processes, lost_another, parallel_of, processes
from lamina.training.monitoring.guard import Diverged
from lamina.training.monitoring.writers import keep_abandoned
from lamina.training.outcome import outcome
from lamina.training.resolve import DATA, FREE, backbone_config, check, check_sharded, merge, refuse_changes
from lamina.training.run import Line, is_good
from lamina.training.settings import PretrainSettings

logger = logging.getLogger(__name__)

GRACE_SECONDS = 30.0  # for a worker of a killed study that still writes its checkpoint


def pretrain(
    settings: PretrainSettings, *, resume: run_folder.Resume = False, overwrite: bool = False, bar: bool = True
) -> dict:
    """Train a model from scratch and leave the run's folder; returns what result.json holds.

    A run that diverges, sticks or is interrupted ends with that status, not with an exception. With ``resume`` a folder
    that holds a finished run is left as it is; otherwise the run goes on from its newest whole checkpoint.

    Where torchrun or accelerate launch started several processes, all call this with the same settings: the first one
    writes the folder, and all return the same.

    Raises:
        UserError: for settings with no meaning, a corpus that can't be read, an output folder in use, settings that
            differ from those of the run to resume, a text that does.
        OSError: the disk is full.
    """
    with processes(device_of(settings), parallel_of(settings)) as crew:
        bar = bar and crew.first
        settings, done = crew.by_first(lambda: _settled(settings, crew, resume=resume, overwrite=overwrite))
        if done is not None and done["status"] in ENDED:
            return done
        crew.together(lambda: check(settings, crew.size))
        # before the folder is touched: the corpus may be unreadable
        blocks, tokenizer = crew.one_a_host_first(lambda: read_blocks(settings, bar))
        with ExitStack() as held:
            used = crew.by_first(lambda: _claim(held, settings, blocks, resume=resume, overwrite=overwrite))
            before = float((done or {}).get("seconds") or 0.0)
            return _recorded(settings, blocks, tokenizer, crew, before, resume=used, bar=bar)


def _settled(
    settings: PretrainSettings, crew: Processes, *, resume: run_folder.Resume, overwrite: bool
) -> tuple[Any, Any]:
    """The settings with those of the run to resume, and the result that it has already."""
    settings = source.settled(settings)
    target = Path(settings.output)
    run_folder.refuse(target, resume=resume, overwrite=overwrite)
    stored = stored_settings(target, FREE) if resume else None
    if stored is not None:
        settings = PretrainSettings.from_dict(merge(stored, settings.to_dict()))
    elif resume is True:
        raise run_folder.nothing_to_resume(target)
    check(settings, crew.size)
    if crew.size > 1 and crew.parallel == "fsdp2":
        check_sharded(settings)
    return settings, result_to_keep(target) if resume else None


def _claim(
    held: ExitStack, settings: PretrainSettings, blocks: Blocks, *, resume: run_folder.Resume, overwrite: bool
) -> bool:
    target = Path(settings.output)
    plan = source.plan_of(settings, backbone_config(settings).num_hidden_layers)
    if resume:
        refuse_changes(target, plan, settings, blocks.stats.fingerprint)
    held.enter_context(run_folder.lock(target, wait=GRACE_SECONDS if resume else 0.0))
    used = run_folder.claim(target, resume=resume, overwrite=overwrite)
    digests.remove(target / "result.json")
    write_json(target / "environment.json", environment(settings.seed))
    write_yaml(target / "config.yaml", settings.to_dict())
    write_json(target / "plan.json", plan.to_dict())
    write_json(target / DATA, {"corpus": settings.corpus, "fingerprint": blocks.stats.fingerprint})
    return used


def _recorded(
    settings: PretrainSettings,
    blocks: Blocks,
    tokenizer: Any,
    crew: Processes,
    seconds: float,
    *,
    resume: bool,
    bar: bool,
) -> dict[str, Any]:
    """Run, and write result.json however it ends, unless the user is at fault. ``seconds``: spent before a resume."""
    target, began = Path(settings.output), time.monotonic()

    def write(result: dict[str, Any]) -> dict[str, Any]:
        result["seconds"] = round(seconds + time.monotonic() - began, 2)
        if crew.first:
            write_json(target / "result.json", result)
        return result

    try:
        result = _run(settings, blocks, tokenizer, crew, resume=resume, bar=bar)
    except KeyboardInterrupt:
        return write({"status": "interrupted", "reason": "stopped at once"})
    except UserError:
        raise
    except Exception as error:
        if disk_full(error):
            full = OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(target))
            full.told = not crew.first  # type: ignore[attr-defined]  # one line for all processes
            raise full from error
        reason = GONE if lost_another(error) else f"{type(error).__name__}: {error}"
        write({"status": "failed", "reason": reason})
        raise
    return crew.by_first(lambda: write(result))


def read_blocks(settings: PretrainSettings, bar: bool) -> tuple[Blocks, Any]:
    """The blocks of the run's corpus and their tokenizer; ``bar``: show one while they are made."""
    of: dict[str, Any] = {
        "corpus": settings.corpus,
        "tokenizer_spec": settings.tokenizer,
        "sequence_length": settings.sequence_length,
        "eval_fraction": settings.eval_fraction,
        "text_field": settings.text_field,
    }
    if settings.streaming:
        return stream_blocks(**of, eval_blocks=settings.eval_blocks, buffer=settings.shuffle_buffer, seed=settings.seed)
    return prepare_blocks(**of, progress=bar)


def _run(
    settings: PretrainSettings, blocks: Blocks, tokenizer: Any, crew: Processes, *, resume: bool, bar: bool
) -> dict[str, Any]:
    """Train until it ends, and as often as ``rollback`` allows again from where it was good."""
    transformers.utils.logging.disable_progress_bar()
    if settings.threads:
        torch.set_num_threads(settings.threads)
    target = Path(settings.output)
    rollbacks = crew.by_first(lambda: Rollbacks.read(target)) if resume else Rollbacks(folder=target)
    while True:
        line = Line(settings, blocks, tokenizer, crew, rollbacks, resume=resume, bar=bar)
        settings = line.settings
        ended = line.train()
        if not isinstance(ended, Diverged):
            break
        if len(rollbacks.done) >= settings.rollback:
            ended = (Status.DIVERGED, ended.reason)
            break
        crew.by_first(partial(_go_back, settings, rollbacks, ended))
        rollbacks = Rollbacks.read(target)
        resume = True
        del line
        gc.collect()
    status, reason = ended
    if status.ended and status != Status.DIVERGED:
        _save(line.model, tokenizer, target / "model", crew)
    result = outcome(settings, status, reason, line.trainer, line.recorder, blocks, line.model, line.plan)
    return {**result, "rollbacks": rollbacks.to_list()}


def _go_back(settings: PretrainSettings, rollbacks: Rollbacks, diverged: Diverged) -> None:
    """Decide where to, and note it."""
    target = Path(settings.output)
    checkpoint = newest_checkpoint(
        target / "checkpoints",
        lambda state: rollbacks.admits(state) and is_good(state) and state["step"] < diverged.step,
    )
    step = step_of(checkpoint) if checkpoint else 0
    keep_abandoned(target, step, len(rollbacks.done) + 1)
    made = rollbacks.add(
        step=step,
        diverged_at=diverged.step,
        reason=diverged.reason,
        factor=settings.rollback_factor,
        skip=settings.rollback_skip,
    )
    for path in checkpoints(target / "checkpoints"):
        if step_of(path) > step:
            discard(path)
    logger.warning(
        "rollback %d of %d: %s; back to step %d, leaving out the data of steps %d to %d, learning rates times %g",
        *(made.number, settings.rollback, diverged.reason, step, *made.skipped, made.learning_rate_factor),
    )


def _save(model: Any, tokenizer: Any, folder: Path, crew: Processes) -> None:
    """Write the model whole or not at all; a sharded one is put together for it."""
    state = full_state(model) if is_sharded(model) else None

    def write() -> None:
        draft = folder.with_name(".model-draft")
        shutil.rmtree(draft, ignore_errors=True)
        with own_class(model):
            model.save_pretrained(draft, state_dict=state)
        tokenizer.model_max_length = model.config.get_text_config().max_position_embeddings
        tokenizer.save_pretrained(draft)
        seal(draft)
        digests.note(folder / MANIFEST, entry_of(draft / MANIFEST))
        gone = folder.with_name(".gone-model")
        shutil.rmtree(gone, ignore_errors=True)
        if folder.exists():
            os.replace(folder, gone)
        os.replace(draft, folder)
        shutil.rmtree(gone, ignore_errors=True)

    crew.by_first(write)
