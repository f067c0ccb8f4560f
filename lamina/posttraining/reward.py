"""Reward models on TRL's RewardTrainer: a score at the last token, trained on pairs of answers."""

from __future__ import annotations

from collections.abc import Mapping
from functools import cache

from transformers import PreTrainedModel

from lamina.core.json_types import Json
from lamina.jobs.folder import Resume
from lamina.jobs.kinds import Kind
from lamina.posttraining.job import tune
from lamina.posttraining.pairs import PairTrainer
from lamina.posttraining.preferences import read_preferences
from lamina.posttraining.settings import RewardSettings
from lamina.posttraining.stage import Examples, Setup, Stage, arguments_for
from lamina.posttraining.starting import Start
from lamina.posttraining.trainer import Parts, TunedTrainer, trl


def reward(
    settings: RewardSettings | Mapping[str, object],
    *,
    resume: Resume = False,
    overwrite: bool = False,
    bar: bool = True,
) -> Json:
    """Train a reward model on preferences; see ``lamina.posttraining.job.tune``."""
    return tune(RewardModeling(), settings, resume=resume, overwrite=overwrite, bar=bar)


class RewardModeling(Stage[RewardSettings]):
    """The loss -log sigmoid(score(chosen) - score(rejected)), InstructGPT's Eq. 1 with two answers per prompt."""

    kind = Kind.REWARD
    settings = RewardSettings
    head = "sequence_classification"

    def examples(self, settings: RewardSettings, start: Start) -> Examples:
        return read_preferences(settings, start, ("chosen_whole", "rejected_whole"))

    def model(self, settings: RewardSettings, start: Start) -> PreTrainedModel:
        return start.scorer()

    def trainer(self, setup: Setup[RewardSettings], parts: Parts) -> TunedTrainer:
        arguments = arguments_for(trl("RewardConfig"), setup, max_length=None, disable_dropout=False)
        return trainer_class()(**setup.trainer_options(arguments, parts))


@cache
def trainer_class() -> type[TunedTrainer]:
    """TRL's RewardTrainer with Lamina's part."""

    class LaminaRewardTrainer(PairTrainer, trl("RewardTrainer")):
        pass

    return LaminaRewardTrainer
