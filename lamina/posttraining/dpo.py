"""Direct preference optimization on TRL's DPOTrainer."""

from __future__ import annotations

from collections.abc import Mapping
from functools import cache

from lamina.core.json_types import Json
from lamina.jobs.folder import Resume
from lamina.jobs.kinds import Kind
from lamina.posttraining.job import tune
from lamina.posttraining.pairs import PairTrainer
from lamina.posttraining.preferences import read_preferences
from lamina.posttraining.settings import DpoSettings
from lamina.posttraining.stage import Examples, Setup, Stage, arguments_for
from lamina.posttraining.starting import Start
from lamina.posttraining.trainer import Parts, Passed, TunedTrainer, trl


def dpo(
    settings: DpoSettings | Mapping[str, object], *, resume: Resume = False, overwrite: bool = False, bar: bool = True
) -> Json:
    """Train a policy on preferences; see ``lamina.posttraining.job.tune``."""
    return tune(DirectPreferences(), settings, resume=resume, overwrite=overwrite, bar=bar)


class DirectPreferences(Stage[DpoSettings]):
    """The loss -log sigmoid(beta * (log-ratio of chosen - log-ratio of rejected)), Rafailov et al. 2023, Eq. 7."""

    kind = Kind.DPO
    settings = DpoSettings

    def examples(self, settings: DpoSettings, start: Start) -> Examples:
        return read_preferences(settings, start, ("prompt_ids", "chosen_ids", "rejected_ids"))

    def trainer(self, setup: Setup[DpoSettings], parts: Parts) -> TunedTrainer:
        options = {"max_length": None, "beta": setup.settings.beta, "disable_dropout": False}
        arguments = arguments_for(trl("DPOConfig"), setup, **options)
        reference = setup.start.policy().eval().requires_grad_(False)
        return trainer_class()(ref_model=reference, **setup.trainer_options(arguments, parts))


@cache
def trainer_class() -> type[TunedTrainer]:
    """TRL's DPOTrainer with Lamina's part."""

    class LaminaDPOTrainer(PairTrainer, trl("DPOTrainer")):
        def _prepare_dataset(self, dataset: Passed, *args: object, **kwargs: object) -> Passed:
            return dataset  # it is encoded, which TRL does not look for here

    return LaminaDPOTrainer
