"""The catalog entry of `lamina probe`."""

from __future__ import annotations

from typing import TYPE_CHECKING, Unpack

from lamina.core.json_types import Json
from lamina.errors import UserError
from lamina.jobs.kinds import Kind
from lamina.jobs.row import Given, JobRow, Modes, Switch

if TYPE_CHECKING:
    from lamina.probes.engine.probe_settings import ProbeSettings


def settings() -> type[ProbeSettings]:
    from lamina.probes.engine.probe_settings import ProbeSettings

    return ProbeSettings


def probe(settings: Given, **modes: Unpack[Modes]) -> Json:
    from lamina.probes.job.probe_folder import probe_folder

    return probe_folder(dict(settings), **modes)


def listing(*, full: bool = False) -> str:
    from lamina.probes.engine.registry import listing

    return listing(full=full)


def refused_probe(result: Json) -> bool:
    """Raise UserError if a probe that the user named does not apply to the model. Other probes' results are on disk."""
    if "all" not in str(result["settings"]["probes"]).split(","):
        for name, record in result["probes"].items():
            if record["status"] == "skipped":
                reason = record["reason"]
                raise UserError(reason if name in reason else f"{name}: {reason}")
    return False


PROBE = JobRow(
    name="probe",
    function="probe_folder",
    kind=Kind.PROBING,
    summary="measure what each layer of a checkpoint does, and write one page about it",
    about=(
        "Measure what each layer of a checkpoint does: one table and one figure per probe, and "
        "OUTPUT/report.html.\n\nprobes:"
    ),
    examples="""
  lamina probe runs/keel-64
  lamina probe models/smollm2 --probes hidden_states,angular_distance,layer_drop --output runs/smollm2
  lamina probe models/bert --corpus my_texts/ --sequences 256 --sequence-length 128 --output runs/bert
  lamina probe models/smollm2 --probes "angular_distance(tokens=all)" --output runs/smollm2 --resume
  lamina probe --list
""",
    settings=settings,
    run=probe,
    returns=(
        "Returns the content of result.json. OUTPUT/NAME.parquet is the table of the probe NAME. "
        "``lamina.probe`` returns only the tables and writes nothing."
    ),
    raises="a checkpoint or a corpus that can't be read",
    resumes="measure only the unfinished probes",
    positional=("checkpoint",),
    switches=(
        Switch(
            name="png",
            help="also draw each figure as a PNG (needs Chromium or Chrome)",
            draws=True,
        ),
    ),
    listing=listing,
    inputs=("checkpoint",),
    fails=refused_probe,
)
