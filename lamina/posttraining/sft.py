"""Supervised fine-tuning on TRL's SFTTrainer, on tokens that are encoded here."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import cache
from typing import TYPE_CHECKING

import torch

from lamina.core.json_types import Json
from lamina.errors import UserError
from lamina.jobs.folder import Resume
from lamina.jobs.kinds import Kind
from lamina.posttraining.examples import IGNORED, as_turns, example_of, read_template
from lamina.posttraining.rows import Fields
from lamina.posttraining.settings import SftSettings
from lamina.posttraining.trainer import Passed, TunedTrainer, trl
from lamina.posttraining.tuning import Row, TuningStage, tune
from lamina.training.run import TrainingRun

if TYPE_CHECKING:
    from datasets import Dataset


def sft(
    settings: SftSettings | Mapping[str, object], *, resume: Resume = False, overwrite: bool = False, bar: bool = True
) -> Json:
    """Fine-tune a model on examples; see ``lamina.posttraining.tuning.tune``."""
    return tune(SupervisedFineTuning(), settings, resume=resume, overwrite=overwrite, bar=bar)


class SupervisedFineTuning(TuningStage[SftSettings]):
    """The mean negative log-likelihood of the answers' tokens."""

    kind = Kind.SFT
    record = SftSettings

    def template(self) -> str | None:
        return None  # with ``auto``, the first conversation decides

    def encoded(self, row: Fields) -> Json:
        example, encoder, choice = example_of(row), self.encoder, self.settings.template
        if "completion" in example and choice not in ("auto", "none"):
            answer = {"role": "assistant", "content": example["completion"]}
            example = {"messages": [*as_turns(example["prompt"]), answer]}
        if encoder.template is None and "messages" in example:
            default = "alpaca" if "instruction" in row else "chat"
            encoder.template = read_template(choice, self.start.tokenizer, default=default)
        return encoder.example(example)

    def dataset(self, encoded_rows: Sequence[Row], *, train: bool) -> Dataset:
        from datasets import Dataset

        data = Dataset.from_dict({name: [row[name] for row in encoded_rows] for name in ("input_ids", "labels")})
        return trl("pack_dataset")(data, self.start.longest, "bfd") if train and self.settings.packing else data

    def counts(self, train: Sequence[Row], data: Dataset) -> Json:
        labels = sum(label != IGNORED for row in train for label in row["labels"])
        return {"sequences": len(data), "answer_tokens": labels}

    def trainer(self, run: TrainingRun) -> TunedTrainer:
        arguments = self.arguments(
            trl("SFTConfig"),
            run,
            max_length=None,
            padding_free=self.settings.packing,
            dataset_kwargs={"skip_prepare_dataset": True},
        )
        return trainer_class()(**self.trainer_options(run, arguments))


@cache
def trainer_class() -> type[TunedTrainer]:
    """TRL's SFTTrainer with Lamina's part; made when it is needed, since TRL is an extra."""

    class LaminaSFTTrainer(TunedTrainer, trl("SFTTrainer")):
        """The held-out loss is the mean over all held-out tokens, whatever the batches."""

        def evaluate(self, *args: Passed, **kwargs: Passed) -> dict[str, float]:
            metrics = held_out_loss(self)
            self.log_held_out(metrics)
            self.control = self.callback_handler.on_evaluate(self.args, self.state, self.control, metrics)
            return metrics

    return LaminaSFTTrainer


@torch.no_grad()
def held_out_loss(trainer: Passed) -> dict[str, float]:
    """Return the mean loss in nats per counted token, and the share predicted right, over the held-out examples."""
    processes, data, batch = trainer.processes, trainer.eval_dataset, trainer.args.per_device_eval_batch_size
    model = trainer.bare_model()
    mine = range(processes.rank, len(data), processes.size)
    total, right, count = 0.0, 0.0, 0
    was_training = model.training
    model.eval()
    try:
        for first in range(0, len(mine), batch):
            chosen = [data[i] for i in mine[first : first + batch]]
            inputs = trainer._prepare_inputs(trainer.data_collator(chosen))
            with trainer.compute_loss_context_manager():
                outputs = model(**inputs, fused_lm_head=True)
            total -= float(outputs.log_probs.sum())
            right += float(outputs.is_top1.sum())
            count += int(outputs.label_mask.sum())
    finally:
        model.train(was_training)
    total, right, tokens = (processes.mean(float(value)) * processes.size for value in (total, right, count))
    if not tokens:
        raise UserError("eval_data: the held-out examples have no token to predict (needed: longer ones, or others)")
    return {"eval_loss": total / tokens, "eval_accuracy": right / tokens}
