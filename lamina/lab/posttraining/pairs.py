"""Train reward models, or policies with DPO. Each example is a prompt with a better and a worse answer."""

from __future__ import annotations

import math
import sys
from collections.abc import Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING, NamedTuple, cast

import numpy as np
from transformers import PreTrainedModel, TrainingArguments
from trl.trainer.dpo_config import DPOConfig
from trl.trainer.dpo_trainer import DPOTrainer
from trl.trainer.reward_config import RewardConfig
from trl.trainer.reward_trainer import RewardTrainer
from trl.trainer.utils import disable_dropout_in_model

from lamina.core.json_types import Json
from lamina.jobs.kinds import Kind
from lamina.lab.posttraining.examples import PAIR_FORMS, REWARD_FORMS, Fields, by_trl
from lamina.lab.posttraining.settings import DpoSettings, RewardSettings
from lamina.lab.posttraining.trainer import NoReference, Passed, TunedTrainer
from lamina.lab.posttraining.tuning import S, TuningStage, tune
from lamina.modeling.parts import patched
from lamina.training.run import TrainingRun

if TYPE_CHECKING:
    from datasets import Dataset

_EXTREMES = {"min_reward": min, "max_reward": max}


class Measured(NamedTuple):
    """TRL's loss and metrics on a batch, and the number of pairs or tokens in each metric's mean."""

    metrics: Mapping[str, float]
    weights: Mapping[str, int]


class PairTrainer(TunedTrainer):
    """Lamina's additions to TRL's RewardTrainer and DPOTrainer."""

    def held_out(self) -> dict[str, float]:
        """Return the mean loss over the held-out pairs, and give TRL the other metrics to log."""
        # each pair once (TRL's evaluation averages over batches and may repeat pairs)
        batches = [batch for part in self.processes.everyones(self.measured_here()) for batch in part]
        overall: dict[str, float] = {}
        for name in batches[0].metrics:
            values, weights = [b.metrics[name] for b in batches], [b.weights[name] for b in batches]
            overall[name] = _EXTREMES[name](values) if name in _EXTREMES else np.average(values, weights=weights)
        loss = float(overall.pop("loss"))
        self._metrics["eval"].update({name: [float(value)] for name, value in overall.items()})
        return {"eval_loss": loss}

    def measured_here(self) -> list[Measured]:
        """Measure the held-out pairs of this process in batches."""
        data: Passed = self.eval_dataset

        def measure(chosen: list[int]) -> Measured:
            inputs: Passed = self._prepare_inputs(self.data_collator([data[i] for i in chosen]))
            loss: Passed = self.compute_loss(self.in_precision, inputs)  # type: ignore[arg-type]
            metrics = {"loss": float(loss)} | {name: float(v[-1]) for name, v in self._metrics["eval"].items()}
            self._metrics["eval"].clear()
            weights = dict.fromkeys(metrics, len(inputs["input_ids"]) // 2)
            if "completion_mask" in inputs:  # DPO; no model predicts the first token
                better, worse = (max(1, int(part.sum())) for part in inputs["completion_mask"][:, 1:].chunk(2))
                weights |= {"entropy": better + worse, "mean_token_accuracy": better}
                weights |= {"logits/chosen": better, "logits/rejected": worse}
            return Measured(metrics=metrics, weights=weights)

        def keep(data: Passed, *args: Passed, **kwargs: Passed) -> Passed:
            return data  # TRL would gather each batch, but processes may have different numbers of batches

        with patched(self.accelerator, gather=keep, gather_for_metrics=keep):
            return self.held_out_batches(measure)


class PairRewardTrainer(PairTrainer, RewardTrainer):
    """TRL's RewardTrainer with Lamina's additions."""


class PairStage(TuningStage[S]):
    """A job that trains on preferences: prompts with a better and a worse answer."""

    forms = PAIR_FORMS
    prepared_by: Passed

    def new_model(self) -> PreTrainedModel:
        """Load or build the model. As in TRL, dropout is off by default."""
        model = self.start.scorer() if self.head == "sequence_classification" else super().new_model()
        if self.settings.trl.get("disable_dropout", True):
            disable_dropout_in_model(model)
        return model

    def by_trl(self, rows: Dataset, form: Sequence[str]) -> Dataset:
        return by_trl(self.prepared_by, rows, self.config, self.start.tokenizer, "data")


class RewardModeling(PairStage[RewardSettings]):
    """Train a reward model with the loss -log sigmoid(score(chosen) - score(rejected) - margin).

    With margin 0 (the default), the loss is InstructGPT's Eq. 1 for two answers. An example may have a field "margin",
    as in Llama 2's Eq. 2.
    """

    kind = Kind.REWARD
    record = RewardSettings
    head = "sequence_classification"
    made_by, configured_by, prepared_by = PairRewardTrainer, RewardConfig, RewardTrainer
    forms = REWARD_FORMS
    columns = ("chosen_ids", "rejected_ids", "margin")

    def by_trl(self, rows: Dataset, form: Sequence[str]) -> Dataset:
        rows = super().by_trl(rows, form)
        if "margin" in rows.column_names:  # a row without a margin has None
            margins = [_margin(margin) for margin in rows["margin"]]
            rows = rows.remove_columns("margin").add_column("margin", margins)
        return rows

    def wrong(self, row: Fields) -> str:
        if max(len(row["chosen_ids"]), len(row["rejected_ids"])) > self.start.longest:  # TRL would drop this pair
            return f"the prompt and an answer have more than {self.start.longest} tokens together"
        return "the two answers are equal" if row["chosen_ids"] == row["rejected_ids"] else ""

    def fields(self, run: TrainingRun) -> Json:
        return {"max_length": None, "disable_dropout": False}


def _margin(given: object) -> float:
    if given is None:
        return 0.0
    if isinstance(given, int | float) and math.isfinite(given):
        return float(given)
    raise ValueError(f"the field 'margin' must be a number, not {given!r}")


class DpoTrainer(PairTrainer, DPOTrainer):
    """TRL's DPOTrainer with Lamina's additions."""

    def __init__(self, *args: Passed, **kwargs: Passed):
        # TRL would cache by a hash of the reference model, which does not work with LoRA or a sharded model
        with patched(sys.modules[DPOTrainer.__module__], hash_module=lambda module: ""):
            super().__init__(*args, **kwargs)
        if self.precompute_ref_logps:  # TRL no longer needs the reference model
            self.accelerator._models.remove(self.ref_model)
            self.ref_model = None
        elif isinstance(self.ref_model, NoReference):
            self.ref_model = self.without_adapters

    def _precompute_ref_logps(self, dataset: Dataset, name: str, batch_size: int) -> Dataset:
        """Add two columns: the reference model's log-probabilities of both answers, in nats."""
        reference = self.without_adapters if isinstance(self.ref_model, NoReference) else self.ref_model

        def measure(chosen: list[int]) -> list[tuple[int, float, float]]:
            inputs: Passed = self._prepare_inputs(self.data_collator([dataset[i] for i in chosen]))
            both = self.compute_ref_log_probs(reference, inputs)
            return list(zip(chosen, *(part.tolist() for part in both), strict=True))

        mine = [row for batch in self.held_out_batches(measure, len(dataset), batch_size) for row in batch]
        rows = sorted(row for part in self.processes.everyones(mine) for row in part)
        for index, column in enumerate(("ref_chosen_logps", "ref_rejected_logps"), start=1):
            dataset = dataset.add_column(column, [row[index] for row in rows])
        return dataset

    def _prepare_dataset(self, dataset: Passed, *args: object, **kwargs: object) -> Passed:
        return dataset  # Lamina has already prepared it; TRL does not check this


class DirectPreferences(PairStage[DpoSettings]):
    """Train a policy with the loss of direct preference optimization (Rafailov et al. 2023, Eq. 7)."""

    kind = Kind.DPO
    record = DpoSettings
    made_by, configured_by, prepared_by = DpoTrainer, DPOConfig, DPOTrainer
    columns = ("prompt_ids", "chosen_ids", "rejected_ids")

    def wrong(self, row: Fields) -> str:
        """Reject the examples that TRL would drop: equal answers, and prompts without room for an answer."""
        prompt, longest = row["prompt_ids"], self.start.longest
        keeps_end = self.config.truncation_mode == "keep_end"
        if len(prompt) >= longest and not keeps_end:
            return f"the prompt fills all {longest} tokens, so no token is left for the answer"
        better, worse = row["chosen_ids"], row["rejected_ids"]
        cut = slice(-longest, None) if keeps_end else slice(longest)
        same = better == worse or [*prompt, *better][cut] == [*prompt, *worse][cut]
        return "the two answers are equal, or equal after cutting" if same else ""

    def token_ids(self, row: Fields) -> list[int]:
        return [*row["prompt_ids"], *row["chosen_ids"]][: self.start.longest]

    def counts(self, train: Dataset, held_out: Dataset) -> Json:
        """Count the pairs with an answer that TRL cuts."""
        lengths = (
            len(row["prompt_ids"]) + max(len(row["chosen_ids"]), len(row["rejected_ids"]))
            for part in (train, held_out)
            for row in cast("list[Json]", part)
        )
        return {"truncated": sum(length > self.start.longest for length in lengths)}

    def fields(self, run: TrainingRun) -> Json:
        return {"max_length": self.start.longest, "beta": self.settings.beta, "disable_dropout": False}

    def options(self, arguments: TrainingArguments) -> Json:
        return {"ref_model": self.reference()}


reward = partial(tune, RewardModeling)
"""Train a reward model on preferences. ``lamina.lab.posttraining.tuning.tune`` lists the arguments."""
dpo = partial(tune, DirectPreferences)
"""Train a policy on preferences. ``lamina.lab.posttraining.tuning.tune`` lists the arguments."""
