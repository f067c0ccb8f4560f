"""Find the models in a study's folder, so that you can evaluate them."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pandas as pd

from lamina.core.json_types import Json
from lamina.errors import UserError
from lamina.evaluation.candidates import Candidate
from lamina.evaluation.settings import EvalSettings
from lamina.jobs.kinds import Kind, kind_of
from lamina.jobs.names import RESULTS
from lamina.jobs.seals import refuse_tables


def runs_of(path: str) -> list[Candidate] | None:
    """Return a model to evaluate for each row of results.csv, or None if the folder holds no study."""
    folder = Path(path).expanduser()
    if kind_of(folder) not in (Kind.COMPARE, Kind.CLAIMS, Kind.TRANSFER, Kind.MAX_LR):
        return None
    refuse_tables(folder)
    try:
        rows = pd.read_csv(folder / RESULTS, dtype={"key": str})
        if "trial" not in rows and "key" in rows:
            raise UserError(
                f"models: {path!r} is a study whose runs are in a store. Give each run's folder: the store's "
                f"folder with a key from results.csv, such as STORE/{rows['key'].iloc[0]}"
            )
        candidates = [_candidate(folder, row, rows) for row in rows.to_dict("records")]
    except (OSError, ValueError, KeyError) as error:
        if isinstance(error, UserError):
            raise
        raise UserError(
            f"models: {path!r} is a study without complete results ({error}). Finish the study with --resume."
        ) from None
    return candidates


def _candidate(folder: Path, row: Json, rows: pd.DataFrame) -> Candidate:
    placement, rate, seed = str(row["placement"]), row["learning_rate"], row["seed"]
    arm, alike = placement, rows[rows["placement"] == placement]
    if "hidden_size" in rows and len(set(rows["hidden_size"])) > 1:
        arm, alike = f"{arm} of width {row['hidden_size']}", alike[alike["hidden_size"] == row["hidden_size"]]
    if len(set(alike["learning_rate"])) > 1:
        arm = f"{arm} at {rate:g}"
    run = folder / "trials" / str(row["trial"])
    status = str(row["status"])
    candidate = Candidate(
        name=f"{folder.name}/{row['trial']}",
        path=str(run),
        arm=arm,
        seed=None if pd.isna(seed) else int(seed),
        status=status,
    )
    if not candidate.left_out and not (run / "model").is_dir():
        raise UserError(
            f"models: the run {str(run)!r} is {status}, but holds no model. Use a study that keeps its models."
        )
    return candidate


def evaluate_runs(settings: EvalSettings | Mapping[str, object], **modes: Any) -> Json:
    """Evaluate models, including all models of studies. See ``lamina.evaluation.job.evaluate`` for the arguments."""
    from lamina.evaluation.job import evaluate

    return evaluate(settings, expand=runs_of, **modes)
