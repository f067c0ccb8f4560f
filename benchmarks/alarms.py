"""Do the layer monitor's alarms come before the loss rises, and do they stay silent in healthy training?

Trains tiny Llamas on a Markov chain and breaks them on purpose, with seeds:

- rate: the learning rate grows a hundredfold in 20 steps
- batch: three batches of random labels under a much larger loss
- fp16: a layer's output projection grows by 60 % per step, and values above 65504 become infinite
- dead: a feed-forward's output projection is zero and so is its input, from the start
- init: one layer starts with weights 30 times too large

Each has a healthy twin: the same seed, unbroken. The loss has risen at the first step at which the loss of a fixed
batch, computed before the update, is not finite, or lies 0.15 nats above the twin's and stays there for three steps.
"Before" means: an alarm at a step of the failure, and before that one. Failures after which the loss never leaves the
twin's are counted apart. Healthy runs count false alarms by step. `python benchmarks/alarms.py` prints the
counts.

The rules were tuned on seeds below 200; the figures of merit are those of the seeds from 200 on.
"""

from __future__ import annotations

import argparse
import json
import logging
import math
import statistics
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import torch
from common import settings_of_machine, write_record
from torch import nn
from transformers import LlamaConfig, LlamaForCausalLM

import lamina
from lamina.reports.diagnosis import cause_of, gather

VOCAB, BATCH, LENGTH, LAYERS, RATE = 32, 8, 24, 4, 3e-3
BREAKS, EVERY = 60, 5  # step, and steps between records: these runs are short
NATS, STAYS = 0.15, 3  # above the twin's loss, for that many steps
FP16_MAX = 65504.0


class Chain:
    """Tokens of a Markov chain: learnable, and as long as one likes."""

    def __init__(self, seed: int):
        self.draw = torch.Generator().manual_seed(seed)
        self.next = torch.softmax(2.5 * torch.randn(VOCAB, VOCAB, generator=torch.Generator().manual_seed(7)), -1)

    def batch(self) -> torch.Tensor:
        tokens = [torch.randint(0, VOCAB, (BATCH,), generator=self.draw)]
        for _ in range(LENGTH - 1):
            tokens.append(torch.multinomial(self.next[tokens[-1]], 1, generator=self.draw)[:, 0])
        return torch.stack(tokens, 1)


CAUSES = {
    "rate": "learning rate too high",
    "batch": "bad batch",
    "fp16": "number range",
    "dead": "dead layer",
    "init": "initialization",
}
HELD = Chain(10_000).batch()


@dataclass(frozen=True)
class Step:
    """What a step leaves: its loss, and that of the fixed batch before its update."""

    loss: torch.Tensor
    held: float


class Failure:
    """A healthy run; the failures change one thing each."""

    name, starts = "healthy", BREAKS

    def __init__(self, seed: int):
        self.draw = torch.Generator().manual_seed(1000 + seed)
        self.layer = int(torch.randint(0, LAYERS, (), generator=self.draw))

    def prepare(self, model: LlamaForCausalLM) -> None: ...

    def rate(self, step: int) -> float:
        return 1.0

    def labels(self, step: int, ids: torch.Tensor) -> torch.Tensor:
        return ids

    def weight(self, step: int) -> float:
        return 1.0

    def before(self, step: int, model: LlamaForCausalLM) -> None: ...


class Rate(Failure):
    name = "rate"

    def rate(self, step: int) -> float:
        return 1.0 if step < BREAKS else 100.0 ** min(1.0, (step - BREAKS) / 20)


class Batch(Failure):
    name = "batch"

    def labels(self, step: int, ids: torch.Tensor) -> torch.Tensor:
        if BREAKS <= step < BREAKS + 3:
            return torch.randint(0, VOCAB, ids.shape, generator=self.draw)
        return ids

    def weight(self, step: int) -> float:
        return 30.0 if BREAKS <= step < BREAKS + 3 else 1.0


class Half(Failure):
    name = "fp16"

    def prepare(self, model: LlamaForCausalLM) -> None:
        def overflow(module: nn.Module, args: object, output: torch.Tensor) -> torch.Tensor:
            return torch.where(output.abs() > FP16_MAX, math.inf * output.sign(), output)

        for layer in model.model.layers:
            layer.mlp.register_forward_hook(overflow)

    def before(self, step: int, model: LlamaForCausalLM) -> None:
        if step >= BREAKS:
            with torch.no_grad():
                model.model.layers[self.layer].mlp.down_proj.weight.mul_(1.6)


class Dead(Failure):
    name, starts = "dead", 1

    def prepare(self, model: LlamaForCausalLM) -> None:
        mlp = model.model.layers[self.layer].mlp
        with torch.no_grad():
            for projection in (mlp.down_proj, mlp.up_proj, mlp.gate_proj):
                projection.weight.zero_()


class Init(Failure):
    name, starts = "init", 1

    def prepare(self, model: LlamaForCausalLM) -> None:
        with torch.no_grad():
            for parameter in model.model.layers[self.layer].parameters():
                if parameter.ndim == 2:
                    parameter.mul_(30.0)


def make(failure: Failure, seed: int) -> tuple[LlamaForCausalLM, torch.optim.Optimizer]:
    """A tiny Llama, prepared for the failure, and its optimizer."""
    torch.manual_seed(seed)
    sizes = {"hidden_size": 32, "intermediate_size": 64, "num_attention_heads": 2, "num_key_value_heads": 2}
    model = LlamaForCausalLM(LlamaConfig(vocab_size=VOCAB, num_hidden_layers=LAYERS, tie_word_embeddings=True, **sizes))
    failure.prepare(model)
    return model, torch.optim.AdamW(model.parameters(), lr=RATE, betas=(0.9, 0.95))


def step_through(
    failure: Failure, model: LlamaForCausalLM, optimizer: torch.optim.Optimizer, seed: int, steps: int
) -> Iterator[Step]:
    """Train; whoever iterates ends a step before asking for the next."""
    chain = Chain(seed)
    for step in range(1, steps + 1):
        failure.before(step, model)
        held = held_loss(model)
        optimizer.param_groups[0]["lr"] = RATE * min(1.0, step / 20) * failure.rate(step)
        ids = chain.batch()
        loss = failure.weight(step) * model(input_ids=ids, labels=failure.labels(step, ids)).loss
        loss.backward()
        if failure.name != "batch":
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        yield Step(loss, held)


def held_loss(model: LlamaForCausalLM) -> float:
    """The loss of a batch that is the same for all."""
    with torch.no_grad():
        return float(model(input_ids=HELD, labels=HELD).loss)


@cache
def twin_losses(seed: int, steps: int) -> list[float]:
    """The losses of the fixed batch in the healthy run, before each step's update."""
    model, optimizer = make(Failure(seed), seed)
    return [step.held for step in step_through(Failure(seed), model, optimizer, seed, steps)]


def train(failure: Failure, seed: int, steps: int, folder: Path) -> dict[str, Any]:
    """One run; returns whether its alarms came before the loss of a fixed batch rose."""
    model, optimizer = make(failure, seed)
    broken = failure.name != "healthy"
    losses: list[float] = []
    with lamina.watch(model, optimizer, output=str(folder), every=EVERY, on_divergence="stop") as monitor:
        assert monitor.monitor is not None
        if failure.name == "fp16":  # what LayerMonitor reads off Trainer's arguments
            monitor.monitor.instruments.half = monitor.monitor.alarms.half = True
        for step in step_through(failure, model, optimizer, seed, steps):
            losses.append(step.held)
            monitor.step(step.loss)
    return judged(failure, seed, steps, folder, rise(losses, twin_losses(seed, steps)) if broken else None)


def rise(losses: list[float], twin: list[float]) -> int | None:
    """The first step whose loss is off the twin's; None if none is."""
    above = [not math.isfinite(mine) or mine > other + NATS for mine, other in zip(losses, twin, strict=False)]
    for place, loss in enumerate(losses):
        if not math.isfinite(loss) or (len(above) >= place + STAYS and all(above[place : place + STAYS])):
            return place + 1
    return None


def judged(failure: Failure, seed: int, steps: int, folder: Path, rose: int | None) -> dict[str, Any]:
    """What the run's alarms are worth."""
    evidence = gather(folder)
    alarms = [alarm for alarm in evidence.alarms if alarm.step >= failure.starts]
    first = min((alarm.step for alarm in alarms), default=None)
    early = first is not None and (rose is None or first < rose)
    false = [alarm for alarm in evidence.alarms if failure.name == "healthy" or alarm.step < failure.starts]
    cause = cause_of(evidence)
    return {
        "failure": failure.name,
        "seed": seed,
        "rose": rose,
        "first": first,
        "early": early,
        "false": [(a.step, a.rule, a.layer, a.sublayer, a.metric, round(a.excess, 2)) for a in false],
        "healthy_steps": min(evidence.steps, steps if failure.name == "healthy" else failure.starts - 1),
        "cause": None if cause is None else cause.name,
    }


def counts(rows: list[dict[str, Any]]) -> dict[str, int]:
    """What the alarms of failures were worth."""
    rose = [row for row in rows if row["rose"] is not None]
    return {
        "runs": len(rows),
        "rose": len(rose),
        "early": sum(row["early"] for row in rose),
        "seen": sum(row["first"] is not None for row in rows),
        "named": sum(row["cause"] == CAUSES[row["failure"]] for row in rows),
        "median_lead": int(statistics.median([row["rose"] - row["first"] for row in rose if row["first"]] or [0])),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, default=10)
    parser.add_argument("--first-seed", type=int, default=200)
    parser.add_argument("--healthy-steps", type=int, default=10_000, help="in runs of 1000 steps")
    parser.add_argument("--runs", type=Path, default=None, help="folder for the runs (default: one that is deleted)")
    parser.add_argument("--output", type=Path, default=None, help="the record, as JSON")
    options = parser.parse_args()
    logging.disable(logging.WARNING)
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as unused:
        rows = measured(options, options.runs or Path(unused))
    broken = [row for row in rows if row["failure"] != "healthy"]
    healthy = [row for row in rows if row["failure"] == "healthy"]  # the others begin as one of them
    kinds = {name: [row for row in broken if row["failure"] == name] for name in CAUSES}
    record = {
        "benchmark": "alarms",
        "what": "alarms of the layer monitor before the loss rises, in runs broken on purpose, and in healthy ones",
        "targets": {"early": 0.8, "false_alarms_in_10000_steps": 1},
        "failures": {name: counts(these) for name, these in kinds.items() if these},
        "all": counts(broken),
        "healthy_steps": sum(row["healthy_steps"] for row in healthy),
        "false_alarms": sum(len(row["false"]) for row in healthy),
        "runs": rows,
        "settings": {name: getattr(options, name) for name in ("seeds", "first_seed")},
        **settings_of_machine(),
    }
    print(json.dumps({name: record[name] for name in ("failures", "all", "healthy_steps", "false_alarms")}, indent=1))
    if options.output:
        write_record(options.output, record)


def measured(options: argparse.Namespace, folder: Path) -> list[dict[str, Any]]:
    """All runs, a row for each."""
    rows = []
    length = min(1000, options.healthy_steps)
    kinds = [(kind, options.seeds, 100) for kind in (Rate, Batch, Half, Dead, Init)]
    for kind, seeds, steps in [*kinds, (Failure, options.healthy_steps // length, length)]:
        for seed in range(options.first_seed, options.first_seed + seeds):
            failure = kind(seed)
            rows.append(train(failure, seed, steps, folder / f"{failure.name}-{seed}"))
            print(json.dumps(rows[-1]), flush=True)
    return rows


if __name__ == "__main__":
    main()
