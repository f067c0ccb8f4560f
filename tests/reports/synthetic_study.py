"""A synthetic study: what `lamina compare` leaves, with the shapes of a real one, made in a fraction of a second."""

import json
import math
from pathlib import Path

import numpy as np
import pandas as pd
import yaml

from lamina.placements import resolve

UNIGRAM = 3.24
# placement: final eval loss, log10 of the gradient's last over first block, growth of the variance, status
COURSES = {
    "post_ln": (3.25, 3.2, 1.0, "stuck"),
    "pre_ln": (2.73, -0.6, 40.0, "finished"),
    "peri_ln": (2.64, -0.3, 24.0, "finished"),
    "mix_ln(alpha=0.25)": (math.nan, 1.1, 30.0, "diverged"),
    "fusenorm": (2.49, 0.2, 1.0, "finished"),
    "keel": (2.53, 0.4, 1.0, "finished"),
}


def write_study(
    folder: Path,
    *,
    courses=None,
    num_layers: int = 32,
    steps: int = 120,
    logged: int = 12,
    rates=(3e-3,),
    seeds=(0,),
    failed: bool = True,
) -> Path:
    """A study of a trial for each placement, learning rate and seed, and one that failed before it began."""
    courses = COURSES if courses is None else courses
    folder.mkdir(parents=True, exist_ok=True)
    rows = []
    for placement, course in courses.items():
        for rate in rates:
            for seed in seeds:
                rows.append(_trial(folder, placement, course, rate, seed, num_layers, steps, logged))
    if failed:
        rows.append(
            {
                **dict.fromkeys(rows[0], ""),
                "trial": "deepnorm-0.003-0",
                "placement": "deepnorm",
                "learning_rate": rates[0],
                "seed": 0,
                "init": "deepnorm",
                "status": "failed",
                "reason": "MemoryError: <b>out of memory</b> & no more",
            }
        )
    pd.DataFrame(rows).to_csv(folder / "results.csv", index=False)
    header = {
        "command": "lamina compare --placements post_ln,pre_ln,peri_ln,mix_ln,fusenorm,keel --output demo",
        "version": "0.1.0",
        "created": "2026-11-21 05:40",
        "settings": {
            "placements": list(courses),
            "backbone": "llama",
            "num_layers": num_layers,
            "hidden_size": 48,
            "num_heads": 4,
            "steps": steps,
            "learning_rates": list(rates),
            "seeds": list(seeds),
            "init": "recommended",
            "batch_size": 16,
            "sequence_length": 128,
            "tokenizer": "bytes",
            "corpus": None,
            "optimizer": {"name": "adamw", "weight_decay": 0.1},
        },
    }
    (folder / "study.yaml").write_text(yaml.safe_dump(header), encoding="utf-8")
    return folder


def _trial(folder, placement, course, rate, seed, num_layers, steps, logged) -> dict:
    final, slope, growth, status = course
    rng = np.random.default_rng([seed, len(placement), round(rate * 1e6)])
    if math.isfinite(final):
        final = final + 0.1 * math.log10(rate / 3e-3) ** 2 * (final < UNIGRAM) + 0.004 * seed
    name = f"{placement.split('(')[0].strip('<>/')}-{rate:g}-{seed}".replace("/", "-")
    run = folder / "trials" / name
    (run / "layers").mkdir(parents=True)
    base = placement.split("(")[0]
    try:
        plan = resolve(placement, num_layers)
    except ValueError:
        plan = resolve("pre_ln", num_layers)
    (run / "plan.json").write_text(json.dumps(plan.to_dict()), encoding="utf-8")
    (run / "config.yaml").write_text(
        yaml.safe_dump({"placement": placement, "learning_rate": rate, "seed": seed}), encoding="utf-8"
    )
    (run / "environment.json").write_text(json.dumps({"python": "3.11", "torch": "2.13.0", "threads": 1}), "utf-8")
    broken = steps // 2 if status == "diverged" else steps + 1
    lines = []
    floor = final if math.isfinite(final) else 2.7
    for step in range(1, steps + 1):
        loss = floor + (5.6 - floor) * math.exp(-step / (6 if status == "stuck" else 16)) + 0.05 * rng.normal()
        tokens = step * 2048
        if step >= broken:
            loss = math.nan
        line = {"step": step, "tokens": tokens, "loss": loss, "learning_rate": rate * min(1, step / 12)}
        lines.append({**line, "grad_norm": 1 + rng.random(), "tokens_per_second": 7000})
        if step % 20 == 0:
            clean = floor + (5.6 - floor) * math.exp(-step / 16)
            lines.append({"step": step, "tokens": tokens, "eval_loss": clean if step < broken else math.nan})
        if step >= broken:
            break
    (run / "metrics.jsonl").write_text("\n".join(json.dumps(line) for line in lines) + "\n", encoding="utf-8")
    last = min(steps, broken)
    at = sorted({max(1, round(s)) for s in np.linspace(1, last, logged)})
    layers = pd.concat(
        [_layers(step, steps, num_layers, slope, growth, step >= broken, rng, base == "keel") for step in at]
    )
    layers.to_parquet(run / "layers" / "part-00000.parquet", index=False)
    reason = {"stuck": "eval loss within 0.02 of the unigram entropy", "finished": ""}.get(
        status, f"the loss is NaN at step {broken}; first in layer 9's feed_forward"
    )
    row = {
        "trial": name,
        "placement": placement,
        "learning_rate": rate,
        "seed": seed,
        "init": "scaled" if base != "keel" else "normal",
        "status": status,
        "eval_loss": final if math.isfinite(final) else "",
        "perplexity": math.exp(final) if math.isfinite(final) else "",
        "bits_per_byte": final / math.log(2) if math.isfinite(final) else "",
        "unigram_entropy": UNIGRAM,
        "tokens": last * 2048,
        "steps": last,
        "seconds": 35.2 + rng.random(),
        "tokens_per_second": 7000 + 100 * rng.random(),
        "parameters": 912_432,
        "reason": reason,
        "loss_spikes": 3 + seed,
        "loss_spike_score": (3 + seed) / steps,
        "gradient_spikes": 0,
        "gradient_spike_score": 0.0,
        "an_extra_column": 1,
    }
    result = {"status": status, "eval_loss": final, "perplexity": row["perplexity"], "tokens": row["tokens"]}
    (run / "result.json").write_text(json.dumps({**result, "seconds": 35, "flops": 1e12, "reason": reason}), "utf-8")
    return row


def _layers(step, steps, num_layers, slope, growth, broken, rng, experts=False) -> pd.DataFrame:
    part = np.arange(num_layers) / max(num_layers - 1, 1)
    trained = step / steps
    gradient = 10 ** (slope * (0.3 + 0.7 * trained) * (part - 1) - 0.4 + 0.06 * rng.normal(size=num_layers))
    variance = (
        (1 + (growth - 1) * part**1.3) * (1 + trained * (growth > 1)) * np.exp(0.05 * rng.normal(size=num_layers))
    )
    if broken:
        gradient[8:] = np.nan
    rows = []
    for layer in range(num_layers):
        for sublayer, factor in (("attention", 0.6), ("feed_forward", 0.8), ("block", 1.0)):
            rows.append((step, layer, sublayer, "all", 0, "gradient_norm", gradient[layer] * factor))
            rows.append((step, layer, sublayer, "all", 0, "update_ratio", 1e-3 * factor * (1 + layer)))
        for sublayer, factor in (("attention", 0.9), ("feed_forward", 1.0)):
            rows.append((step, layer, sublayer, "all", 0, "hidden_variance", variance[layer] * factor))
            for metric, value in (("hidden_abs_max", 4.0), ("hidden_abs_mean", 0.8), ("hidden_mean", 0.01 * layer)):
                rows.append((step, layer, sublayer, "all", 0, metric, value * variance[layer] ** 0.5))
        rows.append((step, layer, "attention", "pre_norm", 0, "gain_mean", 1.0 + 0.1 * trained))
        rows.append((step, layer, "attention", "pre_norm", 0, "gain_abs_max", 1.0 + 0.5 * trained))
        rows += [
            (step, layer, "feed_forward", "expert", e, "expert_load", (0.5, 0.7, 0.8)[e]) for e in range(3 * experts)
        ]
    rows += [(step, -1, "model", "all", rank, "hidden_top_abs", (step + 1) * 7e4 / (rank + 1)) for rank in range(100)]
    rows.append((step, -1, "block", "final_norm", 0, "gain_mean", 1.0))
    rows.append((step, -1, "block", "embedding", 0, "gradient_norm", 0.3))
    rows.append((step, -1, "block", "readout", 0, "gradient_norm", 0.9))
    rows.append((step, -1, "block", "all", 0, "hidden_variance", 0.9 + 0.1 * trained))
    return pd.DataFrame(rows, columns=["step", "layer", "sublayer", "role", "index", "metric", "value"])
