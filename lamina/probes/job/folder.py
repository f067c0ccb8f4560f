"""`lamina probe`: a checkpoint in, a folder with a table and figures per probe out."""

from __future__ import annotations

import json
from pathlib import Path

from lamina.core.json_types import Json
from lamina.core.specs import split
from lamina.errors import UserError
from lamina.jobs import digests
from lamina.jobs.files import read_result, read_written_yaml
from lamina.jobs.folder import Resume
from lamina.jobs.job import open_job
from lamina.jobs.kinds import Kind
from lamina.jobs.resume import ResumePolicy
from lamina.probes.engine import registry
from lamina.probes.engine.settings import ProbeSettings

POLICY = ResumePolicy(
    what="folder",
    # which probes run, where, and how fast; not what a probe measures
    free=frozenset(("probes", "output", "threads", "device")),
)


def probe_folder(
    settings: ProbeSettings | Json, *, resume: Resume = False, overwrite: bool = False, bar: bool = True
) -> Json:
    """Measure a checkpoint and write the folder ``settings.output``; returns the content of result.json.

    ``settings`` are a whole record, or the user's values by name. Each probe's table, figures and sentences are written
    as soon as it has them. With ``resume``, finished probes are not run again. A probe that cannot measure the model is
    skipped, with the reason.

    Raises:
        UserError: for invalid settings, a checkpoint or a corpus that can't be read, an output folder in use.
        OSError: the disk is full; finished probes are kept.
        KeyboardInterrupt: after result.json says `interrupted`; finished probes are kept.
    """
    job = open_job(
        Kind.PROBING, ProbeSettings, settings, resume=resume, overwrite=overwrite, policy=POLICY, stored=_stored
    )
    complete = job.settings
    if not complete.checkpoint:
        raise UserError("checkpoint: none given (allowed: a folder, a run's folder, a .gguf file, a name on the hub)")
    probes = registry.make_all(complete.probes)
    specs = spec_by_name(complete.probes)
    done = finished(job.folder, specs) if job.resumes else {}
    if done and all(name in done for name in specs):
        return json.loads((job.folder / "result.json").read_text(encoding="utf-8"))
    from lamina.probes.job.measuring import Measuring

    measuring = Measuring(complete, probes, specs, done, bar=bar)  # the folder is not touched: it may be unreadable
    with job:
        job.write_yaml("config.yaml", complete.to_dict())
        return measuring.run(job.folder)


def _stored(folder: Path) -> Json:
    return read_written_yaml(folder / "config.yaml")


def spec_by_name(probes: str) -> dict[str, str]:
    """The spec of each requested probe, by name: ``{"angular_distance": "angular_distance(tokens=all)"}``."""
    specs: dict[str, str] = {}
    for spec in split(probes, "probe"):
        names = registry.names() if spec == "all" else [registry.make(spec).name]
        specs |= {name: name if spec == "all" else spec for name in names}
    return specs


def finished(folder: Path, specs: dict[str, str]) -> dict[str, Json]:
    """The results of the finished probes in a folder to resume, by name."""
    results = (read_result(folder) or {}).get("probes") or {}
    return {
        name: result
        for name, result in results.items()
        if result.get("status") == "finished"
        and (folder / f"{name}.parquet").is_file()
        and not any(digests.differs(folder / file) for file in _files_of(name, result))
        and result.get("spec") == specs.get(name, result.get("spec"))
    }


def _files_of(name: str, result: Json) -> list[str]:
    return [f"{name}.parquet", *(str(figure["file"]) for figure in result.get("figures") or ())]
