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
from lamina.posttraining.examples import rows
from lamina.posttraining.examples.encoding import IGNORED, Encoder, Tokens
from lamina.posttraining.examples.formats import Completion, Dialogue, example_of
from lamina.posttraining.examples.templates import read_template
from lamina.posttraining.job import tune
from lamina.posttraining.settings import SftSettings
from lamina.posttraining.stage import Examples, Row, Setup, Stage, arguments_for, fingerprint, monitored, split
from lamina.posttraining.starting import Start
from lamina.posttraining.trainer import Parts, Passed, TunedTrainer, trl

if TYPE_CHECKING:
    from datasets import Dataset


def sft(
    settings: SftSettings | Mapping[str, object], *, resume: Resume = False, overwrite: bool = False, bar: bool = True
) -> Json:
    """Fine-tune a model on examples; see ``lamina.posttraining.job.tune``."""
    return tune(SupervisedFineTuning(), settings, resume=resume, overwrite=overwrite, bar=bar)


class SupervisedFineTuning(Stage[SftSettings]):
    """The mean negative log-likelihood of the answers' tokens."""

    kind = Kind.SFT
    settings = SftSettings

    def examples(self, settings: SftSettings, start: Start) -> Examples:
        encoder = _Encoder(settings, start)
        found = rows.read("data", str(settings.data), encoder, skip_bad=settings.skip_bad)
        own = settings.eval_data
        held_out = None if own is None else rows.read("eval_data", own, encoder, skip_bad=settings.skip_bad)
        if encoder.template is not None:
            start.tokenizer.chat_template = encoder.template
        train, chosen = split(found.items, settings, None if held_out is None else held_out.items)
        data, labels = _dataset(train, start.longest if settings.packing else None), _labels(train)
        skipped = found.skipped + (0 if held_out is None else held_out.skipped)
        return Examples(
            train=data,
            held_out=_dataset(chosen, None),
            monitored=monitored([row["input_ids"] for row in chosen]),
            fingerprint=fingerprint(train, chosen),
            notes={
                "examples": len(train),
                "sequences": len(data),
                "held_out": len(chosen),
                "answer_tokens": labels,
                "skipped": skipped,
                "truncated": sum(row["truncated"] for row in (*found.items, *(held_out.items if held_out else ()))),
            },
        )

    def trainer(self, setup: Setup[SftSettings], parts: Parts) -> TunedTrainer:
        settings = setup.settings
        arguments = arguments_for(
            trl("SFTConfig"),
            setup,
            max_length=None,
            padding_free=settings.packing,
            dataset_kwargs={"skip_prepare_dataset": True},
        )
        return trainer_class()(**setup.trainer_options(arguments, parts))


class _Encoder:
    """Encodes rows; the first one decides the template that ``auto`` stands for."""

    def __init__(self, settings: SftSettings, start: Start):
        self.settings, self.start = settings, start
        self._encoder: Encoder | None = None

    @property
    def template(self) -> str | None:
        """The template in use; None before the first row, and for texts that are used as they are."""
        return None if self._encoder is None else self._encoder.template

    def __call__(self, row: rows.Fields) -> Json:
        example = example_of(row)
        if self._encoder is None or (self._encoder.template is None and isinstance(example, Dialogue)):
            default = None if isinstance(example, Completion) else "alpaca" if "instruction" in row else "chat"
            template = self._template(default)
            self._encoder = Encoder(
                tokenizer=self.start.tokenizer,
                template=template,
                longest=self.start.longest,
                loss_on_all=self.settings.loss_on == "all",
            )
        if isinstance(example, Completion) and self.settings.template not in ("auto", "none"):
            turns = ({"role": "user", "content": example.prompt}, {"role": "assistant", "content": example.completion})
            example = Dialogue(messages=turns)
        return _row(self._encoder.example(example))

    def _template(self, default: str | None) -> str | None:
        choice = self.settings.template
        if choice == "auto" and default is None:
            return None  # a prompt and its completion are used as they are
        return read_template(choice, self.start.tokenizer, default=default)


def _row(tokens: Tokens) -> Json:
    return {"input_ids": tokens.input_ids, "labels": tokens.labels, "truncated": tokens.truncated}


def _dataset(encoded: Sequence[Row], packed: int | None) -> Dataset:
    """The rows as TRL's trainer takes them; ``packed``: the length of a sequence of several examples."""
    from datasets import Dataset

    columns = {name: [row[name] for row in encoded] for name in ("input_ids", "labels")}
    data = Dataset.from_dict(columns)
    if packed is None:
        return data

    return trl("pack_dataset")(data, packed, "bfd")


def _labels(encoded: Sequence[Row]) -> int:
    return sum(label != IGNORED for row in encoded for label in row["labels"])


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
    """The mean loss in nats per token that counts, the share of them predicted right, over the held-out examples."""
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
