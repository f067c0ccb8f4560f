"""What is refused before torch is loaded: all that can be known without it."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from pathlib import Path

from lamina.core import initializers
from lamina.core.backbone_presets import get as get_preset
from lamina.core.backbone_presets import is_place
from lamina.core.values import comma_separated, existing_file, path, text
from lamina.errors import UserError, did_you_mean, shortened
from lamina.jobs.aliases import suggestion
from lamina.jobs.folder import Resume, in_use, refuse
from lamina.jobs.kinds import refuse_other_kind
from lamina.jobs.model_folder import refuse_as_output
from lamina.jobs.settings import Settings
from lamina.placements.resolution import check_spec, split_specs
from lamina.probes.engine.registry import check_probes

_READ = ("from_model", "checkpoint", "reward_model", "models")  # settings that name saved models
_NO_FILE = ("mnist", "noise")  # data sets of images, which have names of their own


def refuse_early(
    record: type[Settings], given: Mapping[str, object], *, resume: Resume = False, overwrite: bool = False
) -> None:
    """Raise UserError for an unknown setting, an invalid value, an output folder in use, a file that is missing.

    Args:
        record: of the job's settings.
        given: the user's settings, by Lamina's names.
        resume: whether the job resumes; then its folder's settings decide, and the job itself checks them.
        overwrite: whether it replaces what the folder holds.
    """
    if os.environ.get("WORLD_SIZE", "1") not in ("", "1"):
        return  # of several processes the first one speaks, and begins the folder that another may see already
    for name in given:
        if name not in record.names():
            hint = did_you_mean(suggestion(name, record.names()))
            listed = f"see `lamina {record.command_name} --help all`"
            raise UserError(f"unknown setting {name!r}{hint} ({listed})")
    output = given.get("output", record.default("output") if "output" in record.names() else None)
    if output is not None:
        folder = Path(path("output", output))
        for model in _models(given):
            refuse_as_output(str(folder), model)
        refuse(folder, resume=resume, overwrite=overwrite)
        if resume and in_use(folder):
            refuse_other_kind(folder, record.command_name)
            return
    if not record.needs_backbone:
        settings = record.from_dict(_with_preset(given))
        if record.needed and "preset" not in given:
            settings.require(*record.needed)
    _refuse_names(record, given)
    if isinstance(tokenizer := given.get("tokenizer"), str) and "tokenizer" in record.names():
        from lamina.data.tokenizers import validate_spec

        validate_spec(tokenizer)
    for name in ("corpus", "data", "eval_data"):
        if isinstance(place := given.get(name), str):
            _refuse_missing(name, place)


def _refuse_names(record: type[Settings], given: Mapping[str, object]) -> None:
    """Raise UserError for an unknown placement, initializer, backbone or probe."""
    specs = _specs(record, given)
    codes = [spec for spec in specs if re.search(r"\.py\s*(\(|$)", spec)]  # a file that runs as code: once is enough
    for spec in specs:
        if spec not in codes:
            check_spec(spec)
    if "init" in record.names() and not codes and (init := text("init", given.get("init", "normal"))) != "recommended":
        initializers.check(init.removeprefix(initializers.SAME))
    if isinstance(backbone := given.get("backbone"), str) and not is_place(backbone):
        get_preset(backbone)
    if isinstance(probes := given.get("probes"), str) and "probes" in record.names():
        check_probes(probes)


def _models(given: Mapping[str, object]) -> list[str]:
    """The saved models that a job reads, as the user names them."""
    named = [given[name] for name in _READ if isinstance(given.get(name), str)]
    several = given.get("models")
    return [str(model) for model in [*named, *(several if isinstance(several, list | tuple) else ())]]


def _with_preset(given: Mapping[str, object]) -> dict[str, object]:
    """The settings with those of their preset, of which one may need another."""
    if "preset" not in given:
        return dict(given)
    from lamina.posttraining.settings import with_preset

    return with_preset(dict(given))


def _specs(record: type[Settings], given: Mapping[str, object]) -> list[str]:
    if "placement" in record.names():
        return [str(given["placement"])] if "placement" in given else []
    value = given.get("placements")
    if value is None:
        return []
    entries = value if isinstance(value, list | tuple) else ()
    for entry in entries:
        if not isinstance(entry, str | os.PathLike):
            raise UserError(
                f"placements: {type(entry).__name__} {shortened(str(entry), 60)!r} (allowed: names, YAML or Python "
                "files; lamina.build takes a Plan)"
            )
    return split_specs(comma_separated("placements", value))


def _refuse_missing(name: str, place: str) -> None:
    from lamina.data.corpus import EMBEDDED, parse_mix, single_corpus

    if name != "corpus":
        existing_file(name, place)
        return
    for part in parse_mix(place) or [place]:
        if part not in (EMBEDDED, *_NO_FILE):
            single_corpus(part)
