"""A study's tables: a row per trial, and the rows of what was measured on them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

from lamina.core.json_types import Json
from lamina.jobs import columns
from lamina.studies.engine.plan import Plan
from lamina.studies.trials.store import Store
from lamina.studies.trials.trial import Trial

if TYPE_CHECKING:
    import pandas as pd

_NOTES = {*columns.NOTES, "rollbacks", "key", "tuned"}


def results_table(plan: Plan, store: Store, failed: Mapping[str, Json] | None = None) -> pd.DataFrame:
    """A row per trial that has a result: its key, its place on the axes, whether it is tuned, and the result."""
    import pandas as pd

    failed = failed or {}
    found: dict[str, tuple[Trial, Json]] = {}
    for trial in plan.wanted(store.result):
        result = failed.get(trial.key) or store.result(trial)
        if result is not None:
            found[trial.key] = (trial, result)
    rows = [_row(plan, trial, result) for trial, result in found.values()]
    names = ["key", *plan.scale.axes, "placement", "learning_rate", "seed", "tuned"]
    rest = [name for name in columns.names() if name not in (*names, "trial")]
    more = list(dict.fromkeys(name for row in rows for name in row if name not in names and name not in rest))
    return pd.DataFrame(rows, columns=list(dict.fromkeys([*names, *rest, *more])))


def _row(plan: Plan, trial: Trial, result: Json) -> Json:
    left_out = {*_NOTES, *plan.scale.axes, "trial"}
    scalars = {n: value for n, value in result.items() if n not in left_out and not isinstance(value, dict | list)}
    placement = str(getattr(trial.settings, "placement", ""))
    own: Json = {"key": trial.key, "placement": placement, **_values(plan, trial), "seed": trial.seed}
    return {**scalars, **own, "learning_rate": trial.learning_rate, "tuned": plan.is_tuned(trial)}


def _values(plan: Plan, trial: Trial) -> Json:
    """A trial's value on each axis: a setting's value as it is written, or a label."""
    axes = plan.scale.axes
    return {axis: axes[axis][label].get(axis, label) for axis, label in trial.values.items()}


def measured_table(results: pd.DataFrame, store: Store, measure: str) -> pd.DataFrame | None:
    """A measure's rows of all trials, each with its trial's key first; None if no trial has them."""
    import pandas as pd

    tables = [(str(key), store.table(str(key), measure)) for key in results["key"]]
    rows = [table.assign(key=key) for key, table in tables if table is not None and len(table)]
    if not rows:
        return None
    joined = pd.concat(rows, ignore_index=True)
    return joined[["key", *(name for name in joined.columns if name != "key")]]
