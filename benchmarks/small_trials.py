"""Compare the speed of a trial of `make demo` with a plain loop over the same model, batches and optimizer.

The model has 24 blocks of width 64. A step has 512 tokens and one thread. Both sides run in one process: after every 8
steps of the trial, the loop takes 8 steps with a copy of the model. So a drift of the machine's speed affects both.
Evaluations and the first steps do not count, but the trial's 20 or so records do. Each turn is a new process, because
the memory layout of a process affects the speed.

    python benchmarks/small_trials.py --output benchmarks/results/small_trials.json
"""

from __future__ import annotations

import argparse
import copy
import json
import statistics
import subprocess
import sys
import tempfile
import time
from itertools import cycle
from pathlib import Path
from typing import Any

from common import ROOT, settings_of_machine, write_record

TRIAL = {"backbone": "llama-nano", "num_layers": 24, "batch_size": 8, "sequence_length": 64, "placement": "pre_ln"}
ALIKE = {"precision": "fp32", "compile": "off", "save_steps": 0}
BLOCK = 8  # steps of one side before the other side's turn
FIRST = 3 * BLOCK  # steps before the clock starts


class PlainLoop:
    """A plain training loop with a copy of a trainer's model, the same kind of optimizer, and the same batches."""

    def __init__(self, trainer: Any):
        import torch

        model = copy.deepcopy(trainer.model)
        trained = dict(zip(trainer.model.parameters(), model.parameters(), strict=True))
        optimizer = getattr(trainer.optimizer, "optimizer", trainer.optimizer)  # inside accelerate's
        groups = [{**group, "params": [trained[each] for each in group["params"]]} for group in optimizer.param_groups]
        self.model, self.optimizer = model.train(), type(optimizer)(groups)
        self.schedule = torch.optim.lr_scheduler.LambdaLR(self.optimizer, lambda step: min(1.0, step / 24))
        self.batches = cycle(trainer.get_train_dataloader())

    def run(self, steps: int) -> None:
        from torch.nn.utils import clip_grad_norm_

        for _ in range(steps):
            loss = self.model(**next(self.batches)).loss
            loss.backward()
            clip_grad_norm_(self.model.parameters(), 1.0)
            self.optimizer.step()
            self.schedule.step()
            self.optimizer.zero_grad()
            loss.item()


def turn(steps: int) -> dict[str, float]:
    """Return the CPU seconds per step in a trial of ``steps`` steps, and in the loop."""
    import torch

    from lamina.training.monitor.recorder import RunRecorder
    from lamina.training.pretrain import pretrain
    from lamina.training.settings import PretrainSettings

    torch.set_num_threads(1)
    begins, ends = RunRecorder.on_train_begin, RunRecorder.on_step_end
    loops: list[PlainLoop] = []
    seconds = {"trial": 0.0, "loop": 0.0}
    since = counted = 0

    def begin(self: Any, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        loops.append(PlainLoop(self.trainer))
        begins(self, args, state, control, **kwargs)

    def end(self: Any, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        nonlocal since, counted
        ends(self, args, state, control, **kwargs)
        if state.global_step % BLOCK or state.global_step == steps:  # the last step is evaluated
            return
        now = time.process_time()
        loops[0].run(BLOCK)
        done = time.process_time()
        if state.global_step > FIRST:
            seconds["trial"], seconds["loop"] = seconds["trial"] + now - since, seconds["loop"] + done - now
            counted += BLOCK
        since = time.process_time()

    RunRecorder.on_train_begin, RunRecorder.on_step_end = begin, end
    with tempfile.TemporaryDirectory() as folder:
        given = {**TRIAL, **ALIKE, "steps": steps, "eval_steps": steps, "output": f"{folder}/run"}
        pretrain(PretrainSettings.from_dict(given), bar=False)
    return {way: total / counted for way, total in seconds.items()}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--turns", type=int, default=7)
    parser.add_argument("--steps", type=int, default=240, help="steps per turn (default: 240, as in the demo)")
    parser.add_argument("--output", type=Path)
    parser.add_argument("--one", action="store_true", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.one:
        print(json.dumps(turn(arguments.steps)))
        return
    turns = []
    command = [sys.executable, __file__, "--one", "--steps", str(arguments.steps)]
    for _ in range(arguments.turns):
        done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
        if done.returncode:
            raise SystemExit(done.stderr[-2000:])
        turns.append(json.loads(done.stdout.splitlines()[-1]))
        print({way: f"{1000 * seconds:.1f} ms" for way, seconds in turns[-1].items()}, flush=True)
    speed = statistics.median(each["loop"] / each["trial"] for each in turns)
    print(f"a trial has {speed:.3f} of the loop's speed")
    if arguments.output:
        record = {"benchmark": "small_trials", "trial": {**TRIAL, **ALIKE}, **settings_of_machine()}
        write_record(arguments.output, {**record, "speed": speed, "turns": turns})


if __name__ == "__main__":
    main()
