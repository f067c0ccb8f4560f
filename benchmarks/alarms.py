"""Do the layer monitor's alarms come before the loss rises, and do they stay silent in healthy training?

Trains tiny Llamas on a Markov chain and breaks them on purpose, with seeds:

- rate: the learning rate grows a hundredfold in 20 steps
- batch: three batches of random labels under a much larger loss
- fp16: a layer's output projection grows by 30 % per step, and values above 65504 become infinite
- dead: a feed-forward's output projection is zero and so is its input, from the start
- init: one layer starts with weights 30 times too large

"Before" means: an alarm at a step of the failure, after which the loss of a fixed batch is still as it was. Healthy
runs count false alarms by step. `python benchmarks/alarms.py --output runs/alarms` prints the table.
"""

from __future__ import annotations

import argparse
import json
import logging
import math
import tempfile
from collections.abc import Callable
from pathlib import Path

import torch
from torch import nn
from transformers import LlamaConfig, LlamaForCausalLM

import lamina
from lamina.reports.diagnosing.advice import cause_of
from lamina.reports.diagnosing.evidence import gather, loss_rise

VOCAB, BATCH, LENGTH, LAYERS = 32, 8, 24, 4
BREAKS, EVERY = 60, 5  # step, and steps between records: these runs are short
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
                model.model.layers[self.layer].mlp.down_proj.weight.mul_(1.3)


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


def train(failure: Failure, seed: int, steps: int, folder: Path) -> dict[str, object]:
    """One run; returns whether its alarms came before the loss of a fixed batch rose."""
    torch.manual_seed(seed)
    sizes = {"hidden_size": 32, "intermediate_size": 64, "num_attention_heads": 2, "num_key_value_heads": 2}
    model = LlamaForCausalLM(LlamaConfig(vocab_size=VOCAB, num_hidden_layers=LAYERS, tie_word_embeddings=True, **sizes))
    failure.prepare(model)
    chain, fixed = Chain(seed), Chain(10_000).batch()
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3, betas=(0.9, 0.95))
    losses: dict[int, float] = {}
    with lamina.watch(model, optimizer, output=str(folder), every=EVERY, on_divergence="stop") as monitor:
        if failure.name == "fp16":  # what LayerMonitor reads off Trainer's arguments
            assert monitor.monitor is not None
            monitor.monitor.instruments.half = monitor.monitor.alarms.half = True
        for step in range(1, steps + 1):
            if failure.name != "healthy":
                with torch.no_grad():
                    losses[step] = float(model(input_ids=fixed, labels=fixed).loss)
            failure.before(step, model)
            optimizer.param_groups[0]["lr"] = 3e-3 * min(1.0, step / 20) * failure.rate(step)
            ids = chain.batch()
            loss = failure.weight(step) * model(input_ids=ids, labels=failure.labels(step, ids)).loss
            loss.backward()
            if failure.name != "batch":
                torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad()
            monitor.step(loss)
    return judged(failure, seed, steps, folder, loss_rise(losses))


def judged(failure: Failure, seed: int, steps: int, folder: Path, rose: int | None) -> dict[str, object]:
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


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument("--healthy-steps", type=int, default=10_000, help="in runs of 1000 steps")
    parser.add_argument("--output", type=Path, default=None, help="folder for the runs and alarms.json")
    options = parser.parse_args()
    logging.disable(logging.WARNING)
    torch.set_num_threads(1)
    folder = options.output or Path(tempfile.mkdtemp())
    folder.mkdir(parents=True, exist_ok=True)
    rows = []
    kinds: list[tuple[Callable[[int], Failure], int, int]] = [
        (kind, options.seeds, 100) for kind in (Rate, Batch, Half, Dead, Init)
    ]
    length = min(1000, options.healthy_steps)
    for kind, seeds, steps in [*kinds, (Failure, options.healthy_steps // length, length)]:
        for seed in range(seeds):
            failure = kind(seed)
            rows.append(train(failure, seed, steps, folder / f"{failure.name}-{seed}"))
            print(json.dumps(rows[-1]), flush=True)
            (folder / "alarms.json").write_text(json.dumps(rows, indent=1) + "\n")
    broken = [row for row in rows if row["failure"] != "healthy"]
    steps = sum(int(str(row["healthy_steps"])) for row in rows)
    false = sum(len(row["false"]) for row in rows)  # type: ignore[arg-type]
    for name in dict.fromkeys(row["failure"] for row in broken):
        these = [row for row in broken if row["failure"] == name]
        print(f"{name:<8} {sum(bool(row['early']) for row in these)} of {len(these)} alarms before the loss rose")
    print(
        f"all      {sum(bool(row['early']) for row in broken)} of {len(broken)}; {false} false alarms in {steps} steps"
    )


if __name__ == "__main__":
    main()
