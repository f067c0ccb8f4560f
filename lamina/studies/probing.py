"""`lamina probe`: a checkpoint in, a folder with a table and figures a probe and a page out."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from lamina.errors import UserError
from lamina.probes import registry
from lamina.probes.settings import ProbeSettings
from lamina.studies.measuring import Measuring
from lamina.training import folder as run_folder

# What a resumed job may change: which probes there are, and where and how fast it runs; not what a probe measures.
FREE = {"probes", "output", "threads"}


def probe_folder(
    settings: ProbeSettings, *, resume: bool = False, overwrite: bool = False, bar: bool = True
) -> dict[str, Any]:
    """Measure a checkpoint and leave the folder ``settings.output``; returns what result.json holds.

    Each probe's table, figures and sentences are written as soon as it has them. With ``resume`` the probes that are
    finished are not run again. A probe that has no meaning for the model is skipped with the reason.

    Raises:
        UserError: for settings with no meaning, a checkpoint or a corpus that can't be read, an output folder in use;
            and, with everything else written, where a probe that was named could not measure this model.
        OSError: the disk is full; what was finished is kept.
        KeyboardInterrupt: after result.json says `interrupted`; what was finished is kept.
    """
    folder = Path(settings.output)
    run_folder.refuse(folder, resume=resume, overwrite=overwrite)
    probes = registry.make_all(settings.probes)
    done = finished(folder, settings) if resume and run_folder.in_use(folder) else {}
    if all(one.name in done for one in probes) and done:
        return json.loads((folder / "result.json").read_text(encoding="utf-8"))
    measuring = Measuring(settings, probes, done, bar=bar)  # before the folder is touched: all may be unreadable
    with run_folder.lock(folder):
        run_folder.claim(folder, resume=resume, overwrite=overwrite)
        run_folder.write_json(folder / "environment.json", run_folder.environment(settings.seed))
        run_folder.write_yaml(folder / "config.yaml", settings.to_dict())
        return measuring.run(folder)


def finished(folder: Path, settings: ProbeSettings) -> dict[str, dict[str, Any]]:
    """What a folder to resume holds of finished probes. Raises UserError where its settings were others."""
    stored = run_folder.read_yaml(folder / "config.yaml")
    for name, value in settings.to_dict().items():
        if name not in FREE and stored.get(name) != value:
            raise UserError(
                f"{name}: {value!r} differs from the folder's {stored.get(name)!r} (allowed with --resume: the same, "
                f"or another of {', '.join(sorted(FREE - {'output'}))}; else another --output)"
            )
    told = (run_folder.read_result(folder) or {}).get("probes") or {}
    specs = {registry.make(spec).name: spec for spec in registry.specs(settings.probes)}
    kept = {}
    for name, one in told.items():
        whole = (folder / f"{name}.parquet").is_file() and one.get("status") == "finished"
        if whole and specs.get(name, one.get("spec")) == one.get("spec"):
            kept[name] = one
    return kept
