"""A synthetic study: what `lamina compare` leaves, with the shapes of a real one, made in a fraction of a second."""

import math
from itertools import product
from pathlib import Path

import numpy as np
import pandas as pd

from lamina.jobs import files
from lamina.jobs.kinds import Kind
from lamina.placements import names, resolve
from lamina.studies import record
from lamina.training.monitor.writers import LAYER_COLUMNS

UNIGRAM = 3.24
# placement: final eval loss, log10 of the gradient's last over first block, growth of the variance, status
COURSES = {"post_ln": (3.25, 3.2, 1.0, "stuck"), "pre_ln": (2.73, -0.6, 40.0, "finished")}
COURSES |= {"peri_ln": (2.64, -0.3, 24.0, "finished"), "mix_ln(alpha=0.25)": (math.nan, 1.1, 30.0, "diverged")}
COURSES |= {"fusenorm": (2.49, 0.2, 1.0, "finished"), "keel": (2.53, 0.4, 1.0, "finished")}
SIZES = {"backbone": "llama", "hidden_size": 48, "num_heads": 4, "batch_size": 16, "sequence_length": 128}
OTHERS = {"init": "recommended", "tokenizer": "bytes", "corpus": None}
OTHERS |= {"optimizer": {"name": "adamw", "weight_decay": 0.1}}


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
    **settings,
) -> Path:
    """A study of a trial for each placement, learning rate and seed, and one that failed before it began."""
    courses = COURSES if courses is None else courses
    trials = product(courses.items(), rates, seeds)
    rows = [_trial(folder, *course, rate, seed, num_layers, steps, logged) for course, rate, seed in trials]
    if failed:
        began = {"trial": "deepnorm-0.003-0", "placement": "deepnorm", "learning_rate": rates[0], "seed": 0}
        rows.append({**began, "status": "failed", "reason": "MemoryError: <b>out of memory</b> & no more"})
    pd.DataFrame(rows).to_csv(folder / "results.csv", index=False)
    lists = {"placements": list(courses), "learning_rates": list(rates), "seeds": list(seeds)}
    header = {
        "command": f"lamina compare --placements {','.join(courses)} --output demo",
        "version": "0.1.0",
        "created": "2026-11-21 05:40",
        "settings": {"num_layers": num_layers, "steps": steps, **SIZES, **OTHERS, **lists, **settings},
    }
    record.write_study(folder, header)
    files.write_json(folder / "environment.json", {"kind": Kind.COMPARE})
    return folder


def _trial(folder, placement, course, rate, seed, num_layers, steps, logged) -> dict:
    final, slope, growth, status = course
    rng = np.random.default_rng([seed, len(placement), round(rate * 1e6)])
    if math.isfinite(final):
        final = final + 0.1 * math.log10(rate / 3e-3) ** 2 * (final < UNIGRAM) + 0.004 * seed
    base = placement.split("(")[0]
    name = f"{base.strip('<>/')}-{rate:g}-{seed}".replace("/", "-")
    run = folder / "trials" / name
    (run / "layers").mkdir(parents=True)
    files.write_json(run / "plan.json", resolve(placement if base in names() else "pre_ln", num_layers).to_dict())
    files.write_yaml(run / "config.yaml", {"placement": placement, "learning_rate": rate, "seed": seed})
    versions = {"python": "3.11", "torch": "2.13.0", "threads": 1}
    files.write_json(run / "environment.json", {"kind": Kind.RUN, **versions})
    last = steps // 2 if status == "diverged" else steps
    lines, floor = [], final if math.isfinite(final) else 2.7
    for step in range(1, last + 1):
        broken = math.nan if status == "diverged" and step == last else 0.0
        clean = floor + (5.6 - floor) * math.exp(-step / 16) + broken
        loss = floor + (5.6 - floor) * math.exp(-step / (6 if status == "stuck" else 16)) + 0.05 * rng.normal() + broken
        line = {"step": step, "tokens": step * 2048, "loss": loss, "learning_rate": rate * min(1, step / 12)}
        lines.append({**line, "grad_norm": 1 + rng.random(), "tokens_per_second": 7000})
        lines += [{"step": step, "tokens": step * 2048, "eval_loss": clean}] * (step % 20 == 0)
    files.write_lines(run / "metrics.jsonl", lines)
    at = sorted({max(1, round(s)) for s in np.linspace(1, last, logged)})
    dead = last if status == "diverged" else math.inf
    rows = [row for s in at for row in _layers(s, steps, num_layers, slope, growth, s >= dead, rng, base == "keel")]
    pd.DataFrame(rows, columns=LAYER_COLUMNS).to_parquet(run / "layers" / "part-00000.parquet", index=False)
    reason = {"stuck": "eval loss within 0.02 of the unigram entropy", "finished": ""}.get(
        status, f"the loss is NaN at step {last}; first in layer 9's feed_forward"
    )
    measured = {"eval_loss": final, "perplexity": math.exp(final), "bits_per_byte": final / math.log(2)}
    ended = {"status": status, "tokens": last * 2048, "reason": reason, "seconds": 35.2 + rng.random()}
    files.write_json(run / "result.json", {**ended, **measured, "flops": 1e12})
    given = {"trial": name, "placement": placement, "learning_rate": rate, "seed": seed}
    given |= {"init": "scaled" if base != "keel" else "normal"}
    more = {"unigram_entropy": UNIGRAM, "steps": last, "tokens_per_second": 7000 + 100 * rng.random()}
    more |= {"parameters": 912_432, "loss_spikes": 3 + seed, "loss_spike_score": (3 + seed) / steps}
    more |= {"gradient_spikes": 0, "gradient_spike_score": 0.0, "an_extra_column": 1}
    return {**given, **ended, **measured, **more}


def _layers(step, steps, num_layers, slope, growth, broken, rng, experts) -> list[tuple]:
    part = np.arange(num_layers) / max(num_layers - 1, 1)
    trained = step / steps
    gradient = 10 ** (slope * (0.3 + 0.7 * trained) * (part - 1) - 0.4 + 0.06 * rng.normal(size=num_layers))
    noise = np.exp(0.05 * rng.normal(size=num_layers))
    variance = (1 + (growth - 1) * part**1.3) * (1 + trained * (growth > 1)) * noise
    if broken:
        gradient[8:] = np.nan
    rows = []

    def add(sublayer, role, metric, values, index=0, first=0):
        rows.extend((step, layer, sublayer, role, index, metric, v) for layer, v in enumerate(values, start=first))

    for sublayer, factor in (("attention", 0.6), ("feed_forward", 0.8), ("block", 1.0)):
        add(sublayer, "all", "gradient_norm", gradient * factor)
        add(sublayer, "all", "update_ratio", 1e-3 * factor * (1 + np.arange(num_layers)))
    for sublayer, factor in (("attention", 0.9), ("feed_forward", 1.0)):
        add(sublayer, "all", "hidden_variance", variance * factor)
        for metric, value in (("hidden_abs_max", 4.0), ("hidden_abs_mean", 0.8), ("hidden_mean", 0.3 * part)):
            add(sublayer, "all", metric, value * variance**0.5)
    add("attention", "pre_norm", "gain_mean", [1.0 + 0.1 * trained] * num_layers)
    add("attention", "pre_norm", "gain_abs_max", [1.0 + 0.5 * trained] * num_layers)
    for expert, load in enumerate((0.5, 0.7, 0.8) if experts else ()):
        add("feed_forward", "expert", "expert_load", [load] * num_layers, expert)
    for rank in range(100):
        add("model", "all", "hidden_top_abs", [(step + 1) * 7e4 / (rank + 1)], rank, first=-1)
    for role, metric, value in (
        ("final_norm", "gain_mean", 1.0),
        ("embedding", "gradient_norm", 0.3),
        ("readout", "gradient_norm", 0.9),
        ("all", "hidden_variance", 0.9 + 0.1 * trained),
    ):
        add("block", role, metric, [value], first=-1)
    return rows
