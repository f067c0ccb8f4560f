"""Find learning rates on a narrow model and convert them for a wide model (FuseNorm Section 4.2 and Figure 4)."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from itertools import takewhile
from typing import Any

import pandas as pd
import torch

from lamina.core.frames import Frame
from lamina.core.json_types import Json
from lamina.jobs.folder import Resume
from lamina.jobs.kinds import Kind
from lamina.jobs.names import RESULTS, TRANSFER
from lamina.jobs.status import severity
from lamina.modeling.building import build, make_plan
from lamina.modeling.scaling import scaled_weights
from lamina.studies.compare import open_study, run_missing
from lamina.studies.settings import TransferSettings
from lamina.training.optimization.optimizer import scaling_of
from lamina.training.resolve import backbone_config, resolve_run
from lamina.training.settings import PretrainSettings

KEYS = ("placement", "hidden_size", "learning_rate", "seed")
HEADROOM = 2.0  # a learning rate is safe if it is more than this factor below the first failing learning rate


@dataclass(frozen=True, kw_only=True)
class Rate:
    """The results of training with one learning rate at one width."""

    learning_rate: float
    status: str  # the worst status among the runs with different seeds
    eval_loss: float  # the mean loss, if all seeds finished
    best: bool = False  # whether the loss is within ``best_margin`` of the lowest loss
    risk: str = ""  # what to expect from this learning rate at another width, in words

    @property
    def fails(self) -> bool:
        return self.status in ("diverged", "stuck")


def transfer(
    settings: TransferSettings | Mapping[str, Any], *, resume: Resume = False, overwrite: bool = False, bar: bool = True
) -> pd.DataFrame:
    """Train the narrow model at every learning rate, and optionally a wider model. Returns the table of results.csv.

    The arguments and errors are the same as in ``compare``.
    """
    job, complete, trials = open_study(Kind.TRANSFER, TransferSettings, settings, resume, overwrite, bar)
    factors = role_rates(complete)  # before hours of training, because building the target may fail
    with job:
        try:
            results = run_missing(job, complete, trials, bar=bar, keys=KEYS)
        finally:
            if (job.folder / RESULTS).is_file():
                summary = summarize(pd.read_csv((job.folder / RESULTS).absolute()), complete, factors)
                job.write_json(TRANSFER, summary)
    return results


def role_rates(settings: TransferSettings) -> dict[str, float]:
    """Return the factor from the proxy's learning rate to the target's learning rate, for each kind of weight."""
    trial = next(iter(settings.trials().values()))
    target = PretrainSettings(**{**trial.to_dict(), "hidden_size": settings.target_width})
    resolve_run(target, trained=False)
    config = backbone_config(target)
    scaling = scaling_of(target)
    assert scaling is not None
    with torch.device("meta"):
        model = build(config, make_plan(target.placement, config.num_hidden_layers), init="normal")
    factors: dict[str, float] = {}
    for scaled in scaled_weights(model, scaling):
        rate, usual = scaled.factors.rate, scaling.rate("hidden", settings.target_width / settings.proxy_width)
        fixed = scaled.kind == "hidden" and rate != usual
        factors["hidden, of a fixed fan-in" if fixed else scaled.kind] = rate
    return factors


def summarize(results: Frame, settings: TransferSettings, factors: dict[str, float]) -> Json:
    """Return the content of transfer.json."""
    narrow = judged(results[results["hidden_size"] == settings.proxy_width], settings.best_margin)
    wide = sorted(set(results["hidden_size"]) - {settings.proxy_width})
    best_by_width = {int(w): judged(results[results["hidden_size"] == w], settings.best_margin) for w in wide}
    stable, best = _stable(narrow), [rate for rate in narrow if rate.best]
    proxy = min(best, key=lambda rate: rate.eval_loss, default=None)
    above = [r for r in narrow if stable and r.learning_rate > stable[-1].learning_rate]
    eta = proxy.learning_rate if proxy else math.nan
    return {
        "placement": settings.placement,
        "width_scaling": settings.width_scaling,
        "proxy_width": settings.proxy_width,
        "target_width": settings.target_width,
        "rates": [asdict(rate) for rate in narrow],
        "stable": [stable[0].learning_rate, stable[-1].learning_rate] if stable else None,
        "first_failing_above": above[0].learning_rate if above else None,
        "best": [best[0].learning_rate, best[-1].learning_rate] if best else None,
        "learning_rate": None if proxy is None else eta,
        "risk": proxy.risk if proxy else "no learning rate finished on the proxy",
        "at_the_grids_edge": bool(proxy and proxy in (narrow[0], narrow[-1])),
        "roles": {
            kind: {
                "learning_rate": None if proxy is None else eta * factor,
                "weight_decay": 0.0 if kind == "vector" else settings.weight_decay / factor,
                "factor": factor,
            }
            for kind, factor in factors.items()
        },
        "verified": {
            str(width): [
                {**asdict(rate), "agrees": _agrees(narrow, rate), "proxy": _status(narrow, rate.learning_rate)}
                for rate in rates
            ]
            for width, rates in best_by_width.items()
        },
    }


def judged(results: Frame, margin: float) -> list[Rate]:
    """Return the status, loss and risk of each learning rate, in ascending order of the learning rates."""
    rates = []
    for rate, trials in results.groupby("learning_rate"):
        worst = max(trials["status"], key=severity)
        loss = float(trials["eval_loss"].mean()) if worst == "finished" else math.nan
        rates.append(Rate(learning_rate=float(rate), status=worst, eval_loss=loss))
    lowest = min((r.eval_loss for r in rates if r.status == "finished"), default=math.nan)
    rates = [replace(rate, best=rate.eval_loss <= lowest + margin) for rate in rates]
    return [replace(rate, risk=_risk(rates, rate)) for rate in rates]


def _risk(rates: list[Rate], rate: Rate) -> str:
    best = min((r for r in rates if r.best), key=lambda r: r.eval_loss, default=None)
    if rate.status == "stuck" and best and rate.learning_rate < best.learning_rate:
        return "too slow on the proxy, and probably too slow at other widths"
    if rate.fails:
        return "fails on the proxy, and will probably fail at other widths"
    if rate.status == "short":
        return "unknown, because the loss on the proxy still falls (too few steps)"
    if rate.status != "finished":
        return "unknown"
    failing = [r.learning_rate for r in rates if r.fails and r.learning_rate > rate.learning_rate]
    if not failing:
        return "stable on the proxy, where no larger learning rate failed"
    if min(failing) / rate.learning_rate <= HEADROOM * (1 + 1e-9):
        return f"stable on the proxy, but close to {min(failing):g}, which fails on the proxy"
    times = min(failing) / rate.learning_rate
    return f"stable on the proxy, {times:.3g} times below the first learning rate that fails on the proxy"


def _stable(rates: list[Rate]) -> list[Rate]:
    """Return the learning rates next to the best learning rate, in both directions up to the first unfinished run."""
    best = min((r for r in rates if r.best), key=lambda r: r.eval_loss, default=None)
    if best is None:
        return []
    number = rates.index(best)
    below = takewhile(lambda rate: rate.status == "finished", reversed(rates[:number]))
    above = takewhile(lambda rate: rate.status == "finished", rates[number + 1 :])
    return [*reversed([*below]), best, *above]


def _agrees(narrow: list[Rate], wide: Rate) -> bool | None:
    """Return whether a learning rate has the same outcome on both models, or None if we cannot tell."""
    status = _status(narrow, wide.learning_rate)
    if status is None or {"failed", "interrupted", "short"} & {status, wide.status}:
        return None
    return (status == "finished") == (wide.status == "finished")


def _status(rates: list[Rate], learning_rate: float) -> str | None:
    return next((r.status for r in rates if math.isclose(r.learning_rate, learning_rate)), None)
