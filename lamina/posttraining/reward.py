"""Reward models on TRL's RewardTrainer: a score at the last token, trained on pairs of answers."""

from __future__ import annotations

from collections.abc import Mapping
from functools import cache

from transformers import PreTrainedModel

from lamina.core.json_types import Json
from lamina.jobs.folder import Resume
from lamina.jobs.kinds import Kind
from lamina.posttraining.pairs import PairStage, PairTrainer
from lamina.posttraining.settings import RewardSettings
from lamina.posttraining.trainer import TunedTrainer, trl
from lamina.posttraining.tuning import tune
from lamina.training.run import TrainingRun


def reward(
    settings: RewardSettings | Mapping[str, object],
    *,
    resume: Resume = False,
    overwrite: bool = False,
    bar: bool = True,
) -> Json:
    """Train a reward model on preferences; see ``lamina.posttraining.tuning.tune``."""
    return tune(RewardModeling(), settings, resume=resume, overwrite=overwrite, bar=bar)


class RewardModeling(PairStage[RewardSettings]):
    """The loss -log sigmoid(score(chosen) - score(rejected)), InstructGPT's Eq. 1 with two answers per prompt."""

    kind = Kind.REWARD
    record = RewardSettings
    head = "sequence_classification"
    columns = (("chosen_ids", "chosen_whole"), ("rejected_ids", "rejected_whole"))

    def new_model(self) -> PreTrainedModel:
        return self.start.scorer()

    def trainer(self, run: TrainingRun) -> TunedTrainer:
        arguments = self.arguments(trl("RewardConfig"), run, max_length=None, disable_dropout=False)
        return trainer_class()(**self.trainer_options(run, arguments))


@cache
def trainer_class() -> type[TunedTrainer]:
    """Make TRL's RewardTrainer with Lamina's part."""

    class LaminaRewardTrainer(PairTrainer, trl("RewardTrainer")):
        pass

    return LaminaRewardTrainer
