"""A synthetic study with claims: what `lamina study run` leaves, with the shapes of a real one."""

import json
from pathlib import Path

import numpy as np
import pandas as pd

from lamina.studies.record import write_study

PLACEMENTS = {"mix_ln": 2.40, "pre_ln": 2.50, "keel": 2.44, "post_ln": 3.25}
RATES = (2.5e-3, 5e-3, 1e-2)
BEST = 5e-3
HOLDS = {"claim": "mix-ppl", "says": "Mix-LN's loss is below Pre-LN's", "verdict": "holds", "paper": "21.39 < 21.92"}
HOLDS |= {"ours": "mix_ln 2.400 < pre_ln 2.500", "margin": -0.1, "interval": [-0.12, -0.08]}
HOLDS |= {"p": 0.0012, "p_holm": 0.0024, "seeds": 5, "note": ""}
FAILS = {"claim": "mix-ppl/post-fails", "says": "Post-LN <b>does not</b> train | at all", "verdict": "fails"}
FAILS |= {"ours": "1 of 5 stuck", "paper": "1409 (stuck)", "seeds": 5, "note": "[a](b) *c*"}
CLAIMS = [HOLDS, FAILS | dict.fromkeys(("margin", "interval", "p", "p_holm"))]


def definition(axes: dict | None = None, **more) -> dict:
    """The YAML of the study."""
    axes = axes or {"placement": list(PLACEMENTS), "learning_rate": {"tune": list(RATES), "seeds": 3}, "seed": 5}
    about = {"study": "mix-ppl", "paper": "mix_ln", "source": "Mix-LN Table 1"}
    about |= {"title": "Perplexity of <Mix-LN>, Pre-LN & others"}
    return {**about, "scales": {"cpu": {"base": "small", "axes": axes, **more}}}


def trials(extra: dict[str, list] | None = None) -> pd.DataFrame:
    """One row per trial; ``extra``: a further axis and its values, each of which adds 0.1 to the loss."""
    axis, values = next(iter((extra or {"": [None]}).items()))
    rows = []
    for placement, loss in PLACEMENTS.items():
        for place, value in enumerate(values):
            for rate in RATES:
                for seed in range(5 if rate == BEST else 3):
                    stuck = placement == "post_ln" and (rate != BEST or seed == 0)
                    at = loss + 0.1 * place + 0.05 * abs(np.log(rate / BEST)) + 0.01 * seed
                    row = {"key": f"{placement}-{value}-{rate:g}-{seed}", **({axis: value} if axis else {})}
                    row |= {"placement": placement, "learning_rate": rate, "seed": seed, "tuned": rate == BEST}
                    row |= {"status": "stuck" if stuck else "finished", "eval_loss": 3.3 if stuck else at}
                    rows.append({**row, "steps": 100, "seconds": 25.0})
    return pd.DataFrame(rows)


def write_claims_study(folder: Path, *, extra=None, tables=(), claims=None, **more) -> Path:
    """A study's folder. ``tables``: of ``gradients``, ``angles``, and ``metrics``."""
    results = trials(extra)
    folder.mkdir(parents=True, exist_ok=True)
    axes = {"placement": list(PLACEMENTS), **(extra or {})}
    axes |= {"learning_rate": {"tune": list(RATES), "seeds": 3}, "seed": 5}
    results.to_csv(folder / "results.csv", index=False)
    (folder / "claims.json").write_text(json.dumps(_dated(CLAIMS if claims is None else claims)), encoding="utf-8")
    header = {"command": "lamina study run mix-ppl", "version": "0.1.0", "created": "2026-11-22T07:00:00+00:00"}
    header |= {"settings": {"study": "mix-ppl", "scale": "cpu"}, "definition": definition(axes, **more)}
    write_study(folder, header)
    (folder / "environment.json").write_text(json.dumps({"kind": "claims"}), encoding="utf-8")
    keys = results.loc[results["tuned"], ["key", "seed"]].to_dict("records")
    made = {
        "gradients": {"init-gradients": _gradients(keys, 1.0), "end-gradients": _gradients(keys, 2.0)},
        "angles": {"end-angular_distance": _angles(keys)},
        "metrics": {"records-metrics": _metrics(keys)},
    }
    for name in tables:
        for stem, rows in made[name].items():
            (folder / "tables").mkdir(exist_ok=True)
            rows.to_parquet(folder / "tables" / f"{stem}.parquet", index=False)
    return folder


def _dated(claims: list[dict]) -> list[dict]:
    known = {"study": "mix-ppl", "scale": "cpu", "date": "2026-11-22", "revision": "abc1234", "machine": "A Processor"}
    return [{**one, **known} for one in claims]


def _gradients(keys: list[dict], factor: float) -> pd.DataFrame:
    rows = [
        {"key": one["key"], "layer": layer, "sublayer": part, "role": "all", "metric": "gradient_norm", "value": value}
        for one in keys
        for layer in range(4)
        for part, value in (("block", factor * (layer + 1) * (1 + one["seed"])), ("attention", 99.0))
    ]
    return pd.DataFrame(rows)


def _angles(keys: list[dict]) -> pd.DataFrame:
    blocks = [(start, size) for start in range(4) for size in range(1, 5 - start)]
    angle = {"metric": "angular_distance"}
    rows = [{"key": o["key"], "start": s, "size": n, **angle, "value": 0.1 * n} for o in keys for s, n in blocks]
    return pd.DataFrame(rows)


def _metrics(keys: list[dict]) -> pd.DataFrame:
    rows = [
        {"key": one["key"], "step": step, "tokens": 1000 * step, "loss": 5.0 - step / 50 + 0.1 * one["seed"]}
        for one in keys
        for step in (10, 50, 100)
    ]
    return pd.DataFrame(rows)
