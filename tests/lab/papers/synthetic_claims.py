"""Trials made up for a study of the catalog: its own arms, rates and seeds, a test's losses and tables."""

import random
from collections.abc import Callable, Mapping
from itertools import product
from pathlib import Path

import pandas as pd
import pytest

from lamina.core.yaml_files import read_mapping
from lamina.lab.papers.judging import Judged, Trials, Verdict, judge, load_claims

STUDIES = Path(__file__).parents[3] / "studies"
SCALES = ("cpu", "gpu", "paper")
Values = dict[str, object]


def claims_of(study):
    return {claim.name: claim for claim in load_claims(STUDIES / f"{study}.py", trusted=True)}


def arms_of(scale) -> list[Values]:
    axes = {axis: values for axis, values in scale["axes"].items() if axis not in ("learning_rate", "seed")}
    arms = [dict(zip(axes, labels, strict=True)) for labels in product(*(list(values) for values in axes.values()))]
    skips = [{k: v if isinstance(v, list) else [v] for k, v in pattern.items()} for pattern in scale.get("skip", [])]
    return [arm for arm in arms if not any(all(arm[k] in v for k, v in pattern.items()) for pattern in skips)]


def _rough(table: pd.DataFrame, key: str) -> pd.DataFrame:
    """The table with each value off by a millionth: differences that are equal in all seeds are those of counts."""
    draw = random.Random(key)
    if "value" in table and pd.api.types.is_float_dtype(table["value"]):
        table = table.assign(value=[value * (1 + draw.gauss(0, 1e-6)) for value in table["value"]])
    return table


def trials_of(
    study: str,
    scale: str,
    outcome: Callable[[Values], float | str | Values] = lambda arm: 2.0,
    tables: Mapping[tuple[str, str], Callable[[Values, float], pd.DataFrame]] | None = None,
    spread: float = 1e-4,
) -> Trials:
    """The trials of a study's scale.

    Args:
        outcome: an arm's loss, or the status of a run that failed, or columns with it as "loss"; at a rate that is not
            the chosen one, the loss is 0.1 higher. ``arm["place"]`` is the place of the rate among the study's.
        tables: by (probe or record, time), the table of an arm; the second argument is a small random number.
        spread: of the losses and of that number.
    """
    described = read_mapping(STUDIES / f"{study}.yaml")["scales"][scale]
    given = described["axes"].get("learning_rate", [1e-3])
    sweep = given if isinstance(given, dict) else {"tune": given, "seeds": 99}
    rates, tuned = [float(rate) for rate in sweep["tune"]], None if sweep is not given else float(sweep["tune"][1])
    of_test, of_sweep = described["axes"].get("seed", 1), sweep["seeds"]
    # of fewer than 6, no exact test of a share says anything
    seeds = of_test if isinstance(of_test, list) else [*range(max(6, of_test))]
    sweeping = of_sweep if isinstance(of_sweep, list) else seeds[:of_sweep]
    draw = random.Random(0)
    rows, trained, frames = [], {}, {}
    for arm in arms_of(described):
        for rate, seed in product(rates, dict.fromkeys((*seeds, *sweeping))):
            if seed in (sweeping if rate != tuned else (*seeds, *sweeping)):
                noise, key = draw.gauss(0, spread), str(len(rows))
                ended = outcome({**arm, "seed": seed, "place": rates.index(rate)})
                more = dict(ended) if isinstance(ended, Mapping) else {"loss": ended}
                ended = more.pop("loss", 2.0)
                status = ended if isinstance(ended, str) else "finished"
                away = 0.1 * (tuned not in (None, rate))
                loss = 7.2 if isinstance(ended, str) else ended + 0.01 * seed + noise + away
                own = {"status": status, "eval_loss": loss, "tuned": tuned in (None, rate) and seed in seeds}
                rows.append({**arm, "learning_rate": rate, "seed": seed, "key": key, **own, **more})
                trained[key] = (arm, noise)
    table = pd.DataFrame(rows)
    if described.get("job") == "init":
        table = table.drop(columns=["status", "eval_loss"])

    def measured(key, name, at):
        made = (tables or {}).get((name, at))
        if made is not None and (key, name, at) not in frames:
            frames[key, name, at] = _rough(made(*trained[key]), key)
        return frames.get((key, name, at))

    return Trials(table, axes=list(described["axes"]), scale=scale, measures=measured)


def agrees(verdict: Verdict, expected: Verdict | str) -> bool:
    """Whether a verdict is the expected one, or of the expected kind: "failed" in whatever way."""
    return verdict.failed if expected == "failed" else verdict == expected


def judged(claim: str, trials: Trials) -> Judged:
    return judge([claims_of(study_of(claim))[claim]], trials)[0]


def study_of(claim: str) -> str:
    return claim.partition("/")[0]


def at_scales(claims):
    """Each claim at each scale of its study that runs trials; all but the first are slow."""
    found = []
    for claim in claims:
        scales = read_mapping(STUDIES / f"{study_of(claim)}.yaml")["scales"]
        ran = ["paper"] if claim == "mix-7b" else [scale for scale in SCALES if "needs" not in scales[scale]]
        found += [pytest.param(claim, ran[0]), *(pytest.param(claim, one, marks=pytest.mark.slow) for one in ran[1:])]
    return found


def rows(metric, by_layer, sublayer="block", role="all", layer="layer", **more):
    """A probe's rows of one metric: a value per layer, from ``by_layer``."""
    values = list(by_layer)
    named = {layer: range(len(values)), "sublayer": sublayer, "role": role, "metric": metric}
    return pd.DataFrame({**named, "value": values, **more})
