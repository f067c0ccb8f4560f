"""`lamina max-lr`: how high a learning rate each placement bears, by Keel's protocol (arXiv 2601.19895).

A trial is one run with one linear warm-up from 0, all else as in `lamina pretrain`. It ends where a rule of
``lamina.training.monitoring.max_rate_rules`` holds; its result is the rate just before.
"""

from __future__ import annotations

from lamina.core.json_types import Json
from lamina.jobs.folder import Resume
from lamina.studies.max_rate_settings import MaxRateSettings
from lamina.training.monitoring.guard import DivergenceGuard
from lamina.training.monitoring.max_rate import MaxRateGuard
from lamina.training.pretrain import pretrain
from lamina.training.setting_groups import GuardSettings


def run_max_rate(
    settings: MaxRateSettings, *, resume: Resume = False, overwrite: bool = False, bar: bool = True
) -> Json:
    """Raise the learning rate until the run fails; writes a run's folder and returns its result.json.

    Beyond a run's columns, the result has ``max_learning_rate``, ``stop_rule`` and ``loss_at_stop``.

    Raises:
        UserError, OSError: as ``pretrain`` does.
    """

    def guard(run: GuardSettings, unigram_entropy: float) -> DivergenceGuard:
        rules = settings.rules(unigram_entropy)
        return MaxRateGuard(margin=run.divergence_margin, patience=run.divergence_patience, rules=rules)

    return pretrain(settings.run(), resume=resume, overwrite=overwrite, bar=bar, guard=guard)
