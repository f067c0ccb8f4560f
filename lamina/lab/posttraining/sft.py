"""Supervised fine-tuning on TRL's SFTTrainer, with tokens encoded here."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING

from lamina.core.json_types import Json
from lamina.errors import UserError
from lamina.jobs.job import Job
from lamina.jobs.kinds import Kind
from lamina.lab.posttraining.examples import IGNORED, Fields, example_of, read_template
from lamina.lab.posttraining.settings import SftSettings
from lamina.lab.posttraining.trainer import Passed, TunedTrainer, trl
from lamina.lab.posttraining.tuning import TuningStage, tune
from lamina.modeling.processes import Processes
from lamina.training.run import TrainingRun

if TYPE_CHECKING:
    from datasets import Dataset


class SftTrainer(TunedTrainer):
    """A mixin for TRL's SFTTrainer; the held-out loss is the mean over all held-out tokens, however batched."""

    def held_out(self) -> dict[str, float]:
        """Return the mean loss per label, in nats, and the share of labels predicted correctly."""
        data: Passed = self.eval_dataset
        model = self.bare_model()

        def measure(chosen: list[int]) -> tuple[float, float, int]:
            inputs: Passed = self._prepare_inputs(self.data_collator([data[i] for i in chosen]))
            with self.compute_loss_context_manager():
                outputs = model(**inputs, fused_lm_head=True)
            return -float(outputs.log_probs.sum()), float(outputs.is_top1.sum()), int(outputs.label_mask.sum())

        sums = [sum(part) for part in zip((0.0, 0.0, 0), *self.held_out_batches(measure), strict=True)]
        total, right, tokens = (self.processes.mean(float(value)) * self.processes.size for value in sums)
        if not tokens:
            raise UserError("eval_data: the held-out examples have no token to predict (needed: longer ones)")
        return {"eval_loss": total / tokens, "eval_accuracy": right / tokens}


class SupervisedFineTuning(TuningStage[SftSettings]):
    """Trains on the mean negative log-likelihood of the answers' tokens."""

    kind = Kind.SFT
    record = SftSettings
    part, theirs = SftTrainer, "SFT"
    encodes = ("input_ids", "labels", "truncated")
    columns = (("input_ids", "input_ids"), ("labels", "labels"))

    def check(self, job: Job[SftSettings], processes: Processes) -> None:
        if job.settings.packing and "padding_free" in job.settings.trl:
            raise UserError("trl.padding_free: set by --packing (allowed: without it)")
        super().check(job, processes)

    def template(self) -> str | None:
        return None  # with ``auto``, the first conversation decides

    def encoded(self, row: Fields) -> Json:
        example, encoder = example_of(row), self.encoder
        if encoder.template is None and ("messages" in example or encoder.wraps_texts):
            default = "alpaca" if "instruction" in row else "chat"
            encoder.template = read_template(self.settings.template, self.start.tokenizer, default=default)
        return encoder.example(example)

    def dataset(self, encoded_rows: Dataset, *, train: bool) -> Dataset:
        data = super().dataset(encoded_rows, train=train)
        return trl("pack_dataset")(data, self.start.longest, "bfd") if train and self.settings.packing else data

    def counts(self, train: Dataset) -> Json:
        answers = sum(label != IGNORED for labels in train["labels"] for label in labels)
        return {"sequences": len(self.train), "answer_tokens": answers}

    def fields(self, run: TrainingRun) -> Json:
        prepared = {"skip_prepare_dataset": True}
        return {"max_length": None, "padding_free": self.settings.packing, "dataset_kwargs": prepared}


sft = partial(tune, SupervisedFineTuning)
"""Fine-tune a model on examples; see ``lamina.lab.posttraining.tuning.tune``."""
