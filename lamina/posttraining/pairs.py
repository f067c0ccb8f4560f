"""Pairs of a better and a worse answer: their tokens, and evaluations over every held-out pair once."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

import numpy as np
import torch
from accelerate import Accelerator
from accelerate.utils import convert_to_fp32

from lamina.core.json_types import Json
from lamina.posttraining.examples import IGNORED, preference_of
from lamina.posttraining.rows import Fields
from lamina.posttraining.trainer import Passed, TunedTrainer
from lamina.posttraining.tuning import Row, S, TuningStage

if TYPE_CHECKING:
    from datasets import Dataset

# TRL's metrics of a batch that are no mean over its pairs
_EXTREMES = {"min_reward": min, "max_reward": max}
_OF_TOKENS = {
    "entropy": "tokens",
    "logits/chosen": "chosen",
    "mean_token_accuracy": "chosen",
    "logits/rejected": "rejected",
}


class PairStage(TuningStage[S]):
    """A stage that trains on preferences.

    Attributes:
        columns: of the data set for TRL, each with the field of an encoded row that it takes.
    """

    monitored = "chosen_whole"
    columns: ClassVar[Sequence[tuple[str, str]]]

    def encoded(self, row: Fields) -> Json:
        """Encode a preference: whole texts, and the prompt (what both begin with) and the answers apart."""
        better, worse = self.encoder.preference(preference_of(row))
        ids, others = better["input_ids"], worse["input_ids"]
        first = min(next(i for i, label in enumerate(t["labels"]) if label != IGNORED) for t in (better, worse))
        first = next((i for i in range(first) if ids[i] != others[i]), first)
        return {
            "chosen_whole": ids,
            "rejected_whole": others,
            "prompt_ids": ids[:first],
            "chosen_ids": ids[first:],
            "rejected_ids": others[first:],
            "truncated": better["truncated"] or worse["truncated"],
        }

    def dataset(self, encoded_rows: Sequence[Row], *, train: bool) -> Dataset:
        from datasets import Dataset

        return Dataset.from_dict({name: [row[field] for row in encoded_rows] for name, field in self.columns})


@dataclass(frozen=True, kw_only=True)
class Measured:
    """What TRL measures on a batch of held-out pairs.

    Attributes:
        loss: the mean over the pairs.
        metrics: by TRL's name.
        counts: of ``pairs``, and of the answers' ``tokens``, those ``chosen`` and those ``rejected``.
    """

    loss: float
    metrics: Mapping[str, float]
    counts: Mapping[str, int]


class PairTrainer(TunedTrainer):
    """A mixin for TRL's RewardTrainer and DPOTrainer."""

    def evaluate(self, *args: Passed, **kwargs: Passed) -> dict[str, float]:
        """TRL's metrics of the held-out pairs: means over pairs or tokens, and the lowest and highest reward of all.

        TRL's own evaluation averages batches, and repeats pairs until every process has as many. Trainer's, before
        training, would also keep the model from being trained by DDP.
        """
        here = self._held_out_batches()
        batches = [batch for part in self.processes.everyones(here) for batch in part]
        losses = np.repeat(np.array([b.loss for b in batches], np.float32), [b.counts["pairs"] for b in batches])
        metrics = {"eval_loss": float(losses.mean())}  # to the bit Trainer's, in one process
        self._metrics["eval"].update(_overall(batches))
        self.log_held_out(metrics)  # which adds TRL's
        self.control = self.callback_handler.on_evaluate(self.args, self.state, self.control, metrics)
        return metrics

    @torch.no_grad()
    def _held_out_batches(self) -> list[Measured]:
        """Measure this process's share of the held-out pairs, batch by batch."""
        data: Passed = self.eval_dataset
        size, model = self.args.per_device_eval_batch_size, self.bare_model()
        mine = range(self.processes.rank, len(data), self.processes.size)
        measured, was_training = [], model.training
        model.eval()
        try:
            with _on_its_own(self.accelerator):
                for first in range(0, len(mine), size):
                    chosen = [data[i] for i in mine[first : first + size]]
                    inputs: Passed = self._prepare_inputs(self.data_collator(chosen))
                    loss: Passed = self.compute_loss(self._forward, inputs)  # type: ignore[arg-type]
                    metrics = {name: float(values[-1]) for name, values in self._metrics["eval"].items()}
                    self._metrics["eval"].clear()
                    measured.append(Measured(loss=float(loss), metrics=metrics, counts=_counts(inputs)))
        finally:
            model.train(was_training)
        return measured

    def _forward(self, **inputs: Passed) -> Passed:
        """Return the model in the run's precision, also before training, when accelerate has not wrapped it yet."""
        with self.accelerator.autocast():
            outputs = self.bare_model()(**inputs)
        return convert_to_fp32(outputs) if self.accelerator.native_amp else outputs


def _counts(inputs: Mapping[str, torch.Tensor]) -> dict[str, int]:
    counts = {"pairs": len(inputs["input_ids"]) // 2}
    if "completion_mask" in inputs:  # of DPO; a text's first token is not predicted
        chosen, rejected = (int(part.sum()) for part in inputs["completion_mask"][:, 1:].chunk(2))
        counts |= {"tokens": chosen + rejected, "chosen": chosen, "rejected": rejected}
    return counts


def _overall(batches: Sequence[Measured]) -> dict[str, list[float]]:
    """All batches' metrics in TRL's form, a list whose mean it logs."""
    overall: dict[str, list[float]] = {}
    for name in batches[0].metrics:
        values = [batch.metrics[name] for batch in batches]
        weights = [batch.counts[_OF_TOKENS.get(name, "pairs")] for batch in batches]
        if name in _EXTREMES:
            overall[name] = [_EXTREMES[name](values)]
        elif name in _OF_TOKENS:
            overall[name] = [float(np.average(values, weights=weights)) if any(weights) else 0.0]
        else:
            overall[name] = [value for value, times in zip(values, weights, strict=True) for _ in range(times)]
    return overall


@contextmanager
def _on_its_own(accelerator: Accelerator) -> Iterator[None]:
    """Keep TRL from gathering a batch's numbers: one process may have a batch more than another."""

    def keep(data: Passed, *args: Passed, **kwargs: Passed) -> Passed:
        return data

    names = ("gather", "gather_for_metrics")
    for name in names:
        setattr(accelerator, name, keep)
    try:
        yield
    finally:
        for name in names:
            delattr(accelerator, name)
