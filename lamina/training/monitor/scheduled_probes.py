"""Run probes on a few held-out blocks during training, without an effect on the training."""

from __future__ import annotations

import logging
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from torch.distributed.tensor import DTensor
from transformers import PreTrainedModel, PreTrainedTokenizerBase, TrainerCallback, TrainerState

from lamina.core.json_types import Json
from lamina.jobs.files import disk_full, write_json, write_lines, write_parquet
from lamina.jobs.names import ABOUT, NOTES
from lamina.jobs.run_folder import parse_lines
from lamina.probes.engine.context import Context
from lamina.probes.engine.measure import SKIPPED, run, structure_of
from lamina.probes.engine.registry import Probe, make_all
from lamina.probes.structure.hooks import undisturbed
from lamina.training.checkpointing.checkpoints import RunState
from lamina.training.objectives.objective import Processor

if TYPE_CHECKING:
    import pandas as pd

    from lamina.probes.structure.sites import Structure
    from lamina.training.monitor.recorder import MonitoredTrainer
    from lamina.training.settings import PretrainSettings

logger = logging.getLogger(__name__)

_REFUSED = "not measured: "


class ScheduledProbes(TrainerCallback):
    """Run probes before the first step, at regular steps, and at the last step.

    The results go into probes/NAME/part-STEP.parquet. If a probe fails or does not fit the model, Lamina writes a note
    to probes/NAME/notes.jsonl. Only the first process runs probes, and models with sharded weights are not probed.
    Probing does not count as training time.
    """

    trainer: MonitoredTrainer  # set before training begins

    def __init__(
        self,
        folder: Path,
        settings: PretrainSettings,
        inputs: torch.Tensor,
        processor: Processor,
        stop_clock: Callable[[], None],
    ):
        self.stop_clock = stop_clock
        self.folder, self.specs, self.every = folder / "probes", settings.probes, settings.probe_every
        self.inputs, self.processor = inputs, processor
        self._structure: Structure | None = None
        self._noted: set[tuple[str, str]] = set()

    def state_dict(self) -> Json:
        """Return {}. The names of the measurement files contain the steps, so a checkpoint needs no state."""
        return {}

    def load_state_dict(self, state: RunState) -> None:
        if "step" in state:
            forget(self.folder, after=state["step"])

    def on_train_begin(self, args: object, state: TrainerState, control: object, **kwargs: object) -> None:
        if state.global_step == 0:
            self._probe(state)

    def on_step_end(self, args: object, state: TrainerState, control: object, **kwargs: object) -> None:
        # The optimizer has already stepped, and Trainer has cleared the gradients.
        if state.global_step % self.every == 0 or state.global_step == state.max_steps:
            self._probe(state)

    def _probe(self, state: TrainerState) -> None:
        if not state.is_world_process_zero:
            return
        self.stop_clock()
        step = state.global_step
        model = self.trainer.bare_model()
        if any(isinstance(parameter, DTensor) for parameter in model.parameters()):
            self._note("all", step, f"{_REFUSED}the weights are split over several processes")
            return
        with undisturbed(model):
            context = self._context(model, step)
            for probe, frame, notes in self._measure(context):
                if frame is not None:
                    write_part(self.folder / probe.name, step, frame)
                    about = self.folder / probe.name / ABOUT
                    if not about.is_file():  # the page's texts: the probe may be the user's own
                        words = {key: getattr(probe, key) for key in ("title", "summary", "source")}
                        write_json(about, {**words, "over_steps": list(probe.over_steps)})
                for note in notes:
                    self._note(probe.name, step, note)

    def _context(self, model: PreTrainedModel, step: int) -> Context:
        inputs = {model.main_input_name: self.inputs.to(next(model.parameters()).device)}
        if self._structure is None:
            self._structure = structure_of(model, inputs)
        return Context(
            model=model,
            base=model.base_model,
            structure=self._structure,
            batches=[inputs],
            tokenizer=self.processor if isinstance(self.processor, PreTrainedTokenizerBase) else None,
            state={"step": step},
        )

    def _measure(self, context: Context) -> list[tuple[Probe, pd.DataFrame | None, list[str]]]:
        """Run all probes in one pass. If a probe fails, run each probe separately, so that the others succeed."""
        results: list[tuple[Probe, pd.DataFrame | None, list[str]]] = []

        def done(probe: Probe, frame: pd.DataFrame, seconds: float) -> None:
            results.append((probe, frame, [note for note in context.notes if SKIPPED not in note]))
            context.notes[:] = [note for note in context.notes if SKIPPED in note]

        probes = make_all(self.specs)
        try:
            run(context, probes, strict=False, done=done, sampled=False)
        except Exception as error:
            if disk_full(error):
                raise
            results.clear()
            context.notes.clear()
            for probe in make_all(self.specs):
                try:
                    run(context, [probe], strict=False, done=done, sampled=False)
                except Exception as error:
                    if disk_full(error):
                        raise
                    context.notes.append(f"{probe.name}{SKIPPED}{type(error).__name__}: {error}")
        for probe in probes:
            start = f"{probe.name}{SKIPPED}"
            reasons = [" ".join(n.removeprefix(start).split()) for n in context.notes if n.startswith(start)]
            results += [(probe, None, [f"{_REFUSED}{reason}" for reason in reasons])] if reasons else []
        return results

    def _note(self, name: str, step: int, note: str) -> None:
        if (name, note) in self._noted:
            return
        self._noted.add((name, note))
        level = logging.WARNING if note.startswith(_REFUSED) else logging.INFO
        logger.log(level, "probe %s, step %d: %s", name, step, note)
        (self.folder / name).mkdir(parents=True, exist_ok=True)
        path = self.folder / name / NOTES
        write_lines(path, [*parse_lines(path)[0], {"step": step, "note": note}])


def write_part(folder: Path, step: int, frame: pd.DataFrame) -> None:
    """Write the measurements of one step to a file, completely or not at all."""
    folder.mkdir(parents=True, exist_ok=True)
    rows = frame.assign(step=step)[["step", *frame.columns.drop("step", errors="ignore")]]
    write_parquet(folder / f"part-{step:08d}.parquet", rows)


def forget(folder: Path, *, after: int) -> None:
    """Delete the measurements and notes that are later than the step ``after``."""
    for path in folder.glob("*/part-*.parquet"):
        number = path.stem.removeprefix("part-")
        if number.isdecimal() and int(number) > after:
            path.unlink()
    for path in folder.glob(f"*/{NOTES}"):
        write_lines(path, [note for note in parse_lines(path)[0] if note["step"] <= after])
