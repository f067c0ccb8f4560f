"""`lamina probe`: a checkpoint in, a folder with a table and figures a probe out."""

from __future__ import annotations

import json
from pathlib import Path

from lamina.core.json_types import Json
from lamina.core.specs import split
from lamina.errors import UserError
from lamina.jobs import digests
from lamina.jobs import folder as run_folder
from lamina.jobs.environment import environment
from lamina.jobs.files import read_result, read_written_yaml, write_json, write_yaml
from lamina.probes.engine import registry
from lamina.probes.job.settings import ProbeSettings

# What a resumed job may change: which probes there are, and where and how fast it runs; not what a probe measures.
FREE = {"probes", "output", "threads", "device"}


def probe_folder(
    settings: ProbeSettings, *, resume: run_folder.Resume = False, overwrite: bool = False, bar: bool = True
) -> Json:
    """Measure a checkpoint and leave the folder ``settings.output``; returns what result.json holds.

    Each probe's table, figures and sentences are written as soon as it has them. With ``resume`` the probes that are
    finished are not run again. A probe that has no meaning for the model is skipped with the reason.

    Raises:
        UserError: for settings with no meaning, a checkpoint or a corpus that can't be read, an output folder in use.
        OSError: the disk is full; what was finished is kept.
        KeyboardInterrupt: after result.json says `interrupted`; what was finished is kept.
    """
    folder = Path(settings.output)
    if not settings.checkpoint:
        raise UserError("checkpoint: none given (allowed: a folder, a run's folder, a .gguf file, a name on the hub)")
    run_folder.refuse(folder, resume=resume, overwrite=overwrite)
    probes = registry.make_all(settings.probes)
    specs = spec_by_name(settings.probes)
    done = finished(folder, settings, specs) if resume and run_folder.in_use(folder) else {}
    if done and all(name in done for name in specs):
        return json.loads((folder / "result.json").read_text(encoding="utf-8"))
    from lamina.probes.job.measuring import Measuring

    measuring = Measuring(settings, probes, specs, done, bar=bar)  # the folder is not touched: it may be unreadable
    with run_folder.lock(folder):
        run_folder.claim(folder, resume=resume, overwrite=overwrite)
        write_json(folder / "environment.json", environment(settings.seed))
        write_yaml(folder / "config.yaml", settings.to_dict())
        return measuring.run(folder)


def spec_by_name(probes: str) -> dict[str, str]:
    """What was asked for by each probe's name: ``{"angular_distance": "angular_distance(tokens=all)"}``."""
    specs: dict[str, str] = {}
    for spec in split(probes, "probe"):
        names = registry.names() if spec == "all" else [registry.make(spec).name]
        specs |= {name: name if spec == "all" else spec for name in names}
    return specs


def finished(folder: Path, settings: ProbeSettings, specs: dict[str, str]) -> dict[str, Json]:
    """What a folder to resume holds of finished probes. Raises UserError where its settings were others."""
    stored = read_written_yaml(folder / "config.yaml")
    for name, value in settings.to_dict().items():
        if name not in FREE and stored.get(name) != value:
            raise UserError(
                f"{name}: {value!r} differs from the folder's {stored.get(name)!r} (allowed with --resume: the same, "
                f"or another of {', '.join(sorted(FREE - {'output'}))}; else another --output)"
            )
    told = (read_result(folder) or {}).get("probes") or {}
    return {
        name: one
        for name, one in told.items()
        if one.get("status") == "finished"
        and (folder / f"{name}.parquet").is_file()
        and not any(digests.differs(folder / file) for file in _files_of(name, one))
        and one.get("spec") == specs.get(name, one.get("spec"))
    }


def _files_of(name: str, told: Json) -> list[str]:
    return [f"{name}.parquet", *(str(drawn["file"]) for drawn in told.get("figures") or ())]
