"""The studies' trials as cases of the preflight's calibration: their runs are there, only the burn-ins are missing.

    python benchmarks/preflight_calibration.py trials --store runs/trials

writes a line to runs.jsonl for each setting that the trials of a store had, with the lowest seed of those that ended.
Depths of FITTED_DEPTHS are fitted on; the others are judged on, so that a depth is either.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from lamina.errors import UserError
from lamina.jobs.aliases import in_our_words
from lamina.jobs.files import read_result
from lamina.jobs.status import ENDED
from lamina.preflights.settings import PreflightSettings
from lamina.training.settings import PretrainSettings

FITTED_DEPTHS = (12, 24, 32)
NAMED = ("placement", "num_layers", "hidden_size", "init", "learning_rate", "seed", "steps", "warmup")
IGNORED = ("output", "threads", "compile", "precision", "eval_steps", "eval_blocks", "save_steps", "logging_steps")
KEPT = ("status", "reason", "eval_loss", "unigram_entropy", "steps", "seconds")
NANO_WIDTH = 48


def trial_runs(store: Path) -> Iterator[dict[str, Any]]:
    """The pretraining trials of a store as lines of runs.jsonl, one per setting, in the order of their settings.

    Left out: trials that have not ended, and those with a setting that `lamina preflight` does not have.
    """
    lowest: dict[str, tuple[int, dict[str, Any], Path]] = {}
    for folder in sorted(path.parent for path in store.glob("*/trial.json")):
        case = case_of(folder)
        if case is not None:
            key = json.dumps({name: value for name, value in case.items() if name != "seed"}, sort_keys=True)
            if key not in lowest or case["seed"] < lowest[key][0]:
                lowest[key] = case["seed"], case, folder
    for _, (_, case, folder) in sorted(lowest.items()):
        which = "trials" if case["num_layers"] in FITTED_DEPTHS else "other depths"
        yield {"set": which, "case": case, "result": result_of(folder)}


def case_of(folder: Path) -> dict[str, Any] | None:
    """The settings of a trial that ended, as far as they are no defaults; None where `preflight` can't have them."""
    import yaml

    if json.loads((folder / "trial.json").read_text())["job"] != "pretrain":
        return None
    result = read_result(folder)
    if result is None or result["status"] not in ENDED or not (folder / "metrics.jsonl").is_file():
        return None
    given = yaml.safe_load((folder / "config.yaml").read_text())
    defaults = PretrainSettings().to_dict()
    changed = {name: value for name, value in given.items() if value != defaults.get(name) and name not in IGNORED}
    named = {name: given[name] for name in NAMED}
    named["hidden_size"] = named["hidden_size"] or NANO_WIDTH
    case = {**changed, **named}
    try:
        PreflightSettings.from_dict(in_our_words(case, PreflightSettings.names()))
    except UserError:
        return None
    return case


def result_of(folder: Path) -> dict[str, Any]:
    """What the calibration keeps of a run."""
    result = json.loads((folder / "result.json").read_text())
    records = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    return {name: result.get(name) for name in KEPT} | {
        "losses": [[r["step"], round(r["loss"], 4)] for r in records if r.get("loss") is not None],
        "eval_losses": [[r["step"], round(r["eval_loss"], 4)] for r in records if r.get("eval_loss") is not None],
    }
