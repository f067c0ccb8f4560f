"""The job `init`: no training, only what can be measured on a model before its first step."""

from __future__ import annotations

from lamina.core.json_types import Json
from lamina.jobs.folder import Resume
from lamina.jobs.job import open_job
from lamina.jobs.kinds import Kind
from lamina.jobs.names import CONFIG, PLAN, RESULT
from lamina.jobs.status import Status
from lamina.training.resolve import resolve_run
from lamina.training.settings import PretrainSettings


def initialize(settings: PretrainSettings, *, resume: Resume = False, bar: bool = True) -> Json:
    """Write the folder of a model that is not trained: its settings, its plan, and a result of 0 steps.

    Raises UserError for invalid settings and a folder in use.
    """
    del bar  # nothing here takes long
    resolved = resolve_run(settings)
    result: Json = {"status": str(Status.FINISHED), "steps": 0, "init": settings.init, "seconds": 0.0, "reason": ""}
    with open_job(Kind.RUN, PretrainSettings, settings, resume=resume) as job:
        job.write_yaml(CONFIG, settings.to_dict())
        job.write_json(PLAN, resolved.plan.to_dict())
        job.write_json(RESULT, result)
    return result
