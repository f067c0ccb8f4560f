"""Fine-tune a model on examples with TRL's SFTTrainer."""

from __future__ import annotations

import copy
import logging
from collections.abc import Sequence
from functools import partial
from typing import TYPE_CHECKING

from trl.trainer.sft_config import SFTConfig
from trl.trainer.sft_trainer import SFTTrainer

from lamina.core.json_types import Json
from lamina.errors import UserError
from lamina.jobs.job import Job
from lamina.jobs.kinds import Kind
from lamina.lab.posttraining.examples import IGNORED, SFT_FORMS, Fields, by_trl, training_template
from lamina.lab.posttraining.settings import SftSettings
from lamina.lab.posttraining.trainer import Passed, TunedTrainer
from lamina.lab.posttraining.tuning import TuningStage, tune
from lamina.modeling.processes import Processes
from lamina.training.run import TrainingRun

if TYPE_CHECKING:
    from datasets import Dataset

logger = logging.getLogger(__name__)


class SftTrainer(TunedTrainer, SFTTrainer):
    """TRL's SFTTrainer, with a held-out loss that is the mean over all held-out tokens."""

    def held_out(self) -> dict[str, float]:
        """Return the mean loss in nats per predicted token, and the fraction of correctly predicted tokens."""
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
            raise UserError("eval_data: the held-out examples have no token to predict. Give longer examples.")
        return {"eval_loss": total / tokens, "eval_accuracy": right / tokens}


class SupervisedFineTuning(TuningStage[SftSettings]):
    """Minimize the mean negative log-likelihood of the completions' tokens, or of all tokens."""

    kind = Kind.SFT
    record = SftSettings
    made_by, configured_by = SftTrainer, SFTConfig
    forms = SFT_FORMS
    columns = ("input_ids", "labels")

    def check(self, job: Job[SftSettings], processes: Processes) -> None:
        if job.settings.packing and "padding_free" in job.settings.trl:
            raise UserError("trl.padding_free: --packing sets this argument. Leave out trl.padding_free.")
        if (text := job.settings.trl.get("dataset_text_field")) is not None:
            self.forms = (*SFT_FORMS[:-1], (str(text),))
        super().check(job, processes)

    def by_trl(self, rows: Dataset, form: Sequence[str]) -> Dataset:
        answers = self.config.completion_only_loss
        template = training_template(self.start.tokenizer) if self.config.assistant_only_loss else None
        options = {"completion_only_loss": len(form) == 2 if answers is None else answers, "chat_template": template}
        return by_trl(SFTTrainer, rows, self.config, self.start.tokenizer, False, None, "data", **options)

    @property
    def splits(self) -> bool:
        """Whether packing puts the end of a long example into the next sequence, so that no token is lost."""
        return self.settings.packing and self.config.packing_strategy != "bfd"

    def wrong(self, row: Fields) -> str:
        labels, longest = row["labels"], self.start.longest
        kept, which = labels[:longest], f"first {longest}"
        if self.splits:
            kept, which = labels, f"{len(labels)}"
        elif self.config.truncation_mode == "keep_end" and not self.settings.packing:  # with packing, TRL cuts the end
            kept, which = labels[-longest:], f"last {longest}"
        if any(label != IGNORED for label in kept[1:]):
            return ""
        return f"the {which} tokens contain no token to train on. Raise --sequence-length"

    def dataset(self, rows: Dataset, *, train: bool) -> Dataset:
        packing = train and self.settings.packing
        config = copy.copy(self.config)
        config.max_length = self.start.longest
        if packing:  # one process, because the packed sequences depend on the number of processes
            config.dataset_num_proc = self.settings.trl.get("dataset_num_proc")
        prepared = by_trl(SFTTrainer, rows, config, self.start.tokenizer, packing, None, "data")
        if not packing and len(prepared) < len(rows):  # TRL drops rows without a token to train on
            empty = f"{len(rows) - len(prepared)} of {len(rows)} held-out examples"
            why = f"{empty} have no token to train on in the first {config.max_length} tokens"
            if not prepared:
                raise UserError(f"eval_data: {why}. Raise --sequence-length.")
            logger.warning("eval_data: %s, so Lamina leaves out these examples", why)
        return prepared

    def counts(self, train: Dataset, held_out: Dataset) -> Json:
        counted = sum(label != IGNORED for labels in self.train["labels"] for label in labels)
        kind = "the completions" if len(self.form) == 2 else "the tokens that the rows mark"
        if counted == sum(map(len, self.train["input_ids"])):
            kind = "all tokens"
        elif self.config.assistant_only_loss:
            kind = "the assistant's turns"
        parts = [held_out] if self.splits else [train, held_out]  # held-out rows are never packed, so TRL cuts them
        cut = sum(len(ids) > self.start.longest for part in parts for ids in part["input_ids"])
        return {"sequences": len(self.train), "loss_tokens": counted, "loss_on": kind, "truncated": cut}

    def fields(self, run: TrainingRun) -> Json:
        packed = self.settings.packing and self.config.packing_strategy != "wrapped"
        prepared = {"dataset_kwargs": {"skip_prepare_dataset": True}, "assistant_only_loss": False}
        return {"max_length": None, **({"padding_free": True} if packed else {}), **prepared}


sft = partial(tune, SupervisedFineTuning)
"""Fine-tune a model on examples. ``lamina.lab.posttraining.tuning.tune`` lists the arguments."""
