"""Direct preference optimization on TRL's DPOTrainer."""

from __future__ import annotations

from collections.abc import Mapping
from functools import cache

from lamina.core.json_types import Json
from lamina.jobs.folder import Resume
from lamina.jobs.kinds import Kind
from lamina.posttraining.pairs import PairStage, PairTrainer
from lamina.posttraining.settings import DpoSettings
from lamina.posttraining.trainer import Passed, TunedTrainer, trl
from lamina.posttraining.tuning import tune
from lamina.training.run import TrainingRun


def dpo(
    settings: DpoSettings | Mapping[str, object], *, resume: Resume = False, overwrite: bool = False, bar: bool = True
) -> Json:
    """Train a policy on preferences; see ``lamina.posttraining.tuning.tune``."""
    return tune(DirectPreferences(), settings, resume=resume, overwrite=overwrite, bar=bar)


class DirectPreferences(PairStage[DpoSettings]):
    """The loss -log sigmoid(beta * (log-ratio of chosen - log-ratio of rejected)), Rafailov et al. 2023, Eq. 7."""

    kind = Kind.DPO
    record = DpoSettings
    columns = (("prompt_ids", "prompt_ids"), ("chosen_ids", "chosen_ids"), ("rejected_ids", "rejected_ids"))

    def trainer(self, run: TrainingRun) -> TunedTrainer:
        options = {"max_length": None, "beta": self.settings.beta, "disable_dropout": False}
        arguments = self.arguments(trl("DPOConfig"), run, **options)
        reference = self.start.policy().eval().requires_grad_(False)
        return trainer_class()(ref_model=reference, **self.trainer_options(run, arguments))


@cache
def trainer_class() -> type[TunedTrainer]:
    """Make TRL's DPOTrainer with Lamina's part."""

    class LaminaDPOTrainer(PairTrainer, trl("DPOTrainer")):
        def _prepare_dataset(self, dataset: Passed, *args: object, **kwargs: object) -> Passed:
            return dataset  # it is encoded, which TRL does not look for here

    return LaminaDPOTrainer
