"""A study's tables: a row per trial, and the rows of what was measured on them."""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, cast

from lamina.core.json_types import Json
from lamina.errors import UserError
from lamina.jobs import columns
from lamina.papers.engine.plan import Plan
from lamina.papers.trials.jobs import JOBS
from lamina.papers.trials.store import Store
from lamina.papers.trials.trial import Trial
from lamina.training.settings import PretrainSettings

if TYPE_CHECKING:
    import pandas as pd

_NOTES = {*columns.NOTES, "rollbacks", "key", "tuned", "at_edge"}


def results_table(plan: Plan, store: Store, failed: Mapping[str, Json] | None = None) -> pd.DataFrame:
    """A row per trial that has a result: its key, its place on the axes and in its arm's sweep, and the result."""
    failed = failed or {}
    found: dict[tuple[object, ...], Json] = {}  # two arms may be one computation: each has its rows

    def known(trial: Trial) -> Json | None:
        return failed.get(trial.key) or store.result(trial)

    for trial in plan.wanted(known):
        if (result := known(trial)) is not None:
            found[trial.key, *trial.values.values()] = result_row(
                trial, result, _values(plan, trial), **plan.places(trial)
            )
    return as_table(found.values(), list(plan.scale.axis_names))


def as_table(rows: Iterable[Json], axes: Sequence[str]) -> pd.DataFrame:
    """The rows of a study as a table: the key, the axes, then the columns of a result."""
    import pandas as pd

    rows = list(rows)
    names = ["key", *axes, "placement", "learning_rate", "seed", "tuned"]
    rest = [name for name in columns.names() if name not in (*names, "trial")]
    more = list(dict.fromkeys(name for row in rows for name in row if name not in names and name not in rest))
    return pd.DataFrame(rows, columns=list(dict.fromkeys([*names, *rest, *more])))


def result_row(trial: Trial, result: Json, values: Mapping[str, object], **places: object) -> Json:
    """A trial's row: its key, its result's numbers and texts, and where it stands.

    ``values``: on the axes; ``places``: in its arm's sweep (``tuned``, ``at_edge``).
    """
    left_out = {*_NOTES, *values, "trial"}
    numbers = JOBS[trial.job].numbers(result)
    scalars = {n: value for n, value in numbers.items() if n not in left_out and not isinstance(value, dict | list)}
    own: Json = {"key": trial.key, "placement": _named(trial.placement), **values, "seed": trial.seed}
    return {**scalars, **own, "learning_rate": trial.learning_rate, **places}


def _named(placement: str) -> str:
    """A placement's spec without the folders of a file of the user's own: they are of one machine."""
    return re.sub(r"^[^(]*/", "", placement)


def _values(plan: Plan, trial: Trial) -> Json:
    """A trial's value on each axis: a setting's value as it is written, or a label."""
    axes = plan.scale.axes
    return {axis: axes[axis][label].get(axis, label) if axis in axes else label for axis, label in trial.values.items()}


def with_bigrams(results: pd.DataFrame, plan: Plan, store: Store) -> pd.DataFrame:
    """The rows, those of runs that were stored without ``bigram_entropy`` with it: from the text that they read."""
    lacking = results["bigram_entropy"].isna() if "bigram_entropy" in results else results["key"].notna()
    keys = set(results.loc[lacking, "key"])
    found = {
        trial.key: _bigrams(trial)
        for trial in plan.wanted(store.result)
        if trial.key in keys and trial.job == "pretrain"
    }
    return results.assign(bigram_entropy=results.get("bigram_entropy", math.nan)).assign(
        bigram_entropy=lambda table: table["bigram_entropy"].fillna(table["key"].map(found))
    )


def _bigrams(trial: Trial) -> float:
    from lamina.training.objectives.bigram import bigram_entropy  # it loads torch

    try:
        found = bigram_entropy(cast(PretrainSettings, trial.settings))
    except UserError:  # the text is not on this machine
        found = None
    return math.nan if found is None else found


def measured_table(results: pd.DataFrame, store: Store, measure: str) -> pd.DataFrame | None:
    """A measure's rows of all trials, each with its trial's key first; None if no trial has them."""
    import pandas as pd

    tables = [(str(key), store.table(str(key), measure)) for key in results["key"].unique()]
    rows = [table.assign(key=key) for key, table in tables if table is not None and len(table)]
    if not rows:
        return None
    joined = pd.concat(rows, ignore_index=True)
    return joined.reindex(columns=["key", *(name for name in joined.columns if name != "key")])
