"""A check that a ranking is of one experiment, by the settings of each trial."""

from __future__ import annotations

from lamina.reports.records import Study, read_config
from lamina.studies.record import refuse_mixture


def refuse_other_experiments(study: Study) -> None:
    """Raise UserError if a trial of a study was trained with other settings than the study's."""
    common = dict(study.settings)
    if isinstance(init := common.get("init"), str):
        common["init"] = init.removeprefix("same:")
    stored = {trial.name: read_config(trial.folder) for trial in study.trials}
    refuse_mixture({name: config for name, config in stored.items() if config}, common)
