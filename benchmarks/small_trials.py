"""A trial of `make demo` beside a plain loop over the same model, batches and optimizer: 24 blocks of width 64, 512
tokens a step, one thread.

Both are processes of their own that alternate; a round's ratio is of two neighbors, and the result is the median of the
rounds. Evaluations and the first steps do not count, records do: a trial writes about 20, the loop none.

    python benchmarks/small_trials.py --output benchmarks/results/small_trials.json
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
import time
from contextlib import suppress
from itertools import cycle
from pathlib import Path
from typing import Any

from common import ROOT, settings_of_machine, write_record

TRIAL = {"backbone": "llama-nano", "num_layers": 24, "batch_size": 8, "sequence_length": 64, "placement": "pre_ln"}
ALIKE = {"precision": "fp32", "compile": "off", "save_steps": 0}
FIRST = 10  # steps before the clock starts


def settings(steps: int, folder: str) -> Any:
    from lamina.training.settings import PretrainSettings

    return PretrainSettings.from_dict({**TRIAL, **ALIKE, "steps": steps, "eval_steps": steps, "output": folder})


def trial(steps: int, folder: str) -> float:
    """Return the CPU seconds of a step of `lamina pretrain`, records and all."""
    from lamina.training.monitor.recorder import RunRecorder
    from lamina.training.pretrain import pretrain

    clock: dict[int, float] = {}
    ends = RunRecorder.on_step_end

    def timed(self: Any, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        ends(self, args, state, control, **kwargs)
        clock[state.global_step] = time.process_time()

    RunRecorder.on_step_end = timed
    pretrain(settings(steps, folder), bar=False)
    return (clock[steps - 1] - clock[FIRST]) / (steps - 1 - FIRST)


def loop(steps: int, folder: str) -> float:
    """Return the CPU seconds of a step of a plain loop over what a trial has prepared."""
    import torch

    from lamina.training.pretrain import pretrain
    from lamina.training.trainer import LaminaTrainer

    seconds: list[float] = []

    def train(self: Any, *args: Any, **kwargs: Any) -> None:
        model, optimizer = self.model.train(), self.create_optimizer()
        schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: min(1.0, step / 24))
        begun = 0.0
        for step, batch in zip(range(steps), cycle(self.get_train_dataloader()), strict=False):
            begun = time.process_time() if step == FIRST else begun
            loss = model(**batch).loss
            loss.backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            schedule.step()
            optimizer.zero_grad()
            loss.item()
        seconds.append((time.process_time() - begun) / (steps - FIRST))
        raise KeyboardInterrupt

    LaminaTrainer.train = train  # pyright: ignore[reportAttributeAccessIssue]
    with suppress(KeyboardInterrupt):
        pretrain(settings(steps, folder), bar=False)
    return seconds[0]


WAYS = {"trial": trial, "loop": loop}


def turn(way: str, steps: int) -> float:
    """Return the CPU seconds of a step in a process of its own."""
    with tempfile.TemporaryDirectory() as folder:
        command = [sys.executable, __file__, "--way", way, "--steps", str(steps), "--folder", f"{folder}/run"]
        done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    if done.returncode:
        raise SystemExit(done.stderr[-2000:])
    return json.loads(done.stdout.splitlines()[-1])


def main() -> None:
    """Measure the rounds and print, or write, the record."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=8)
    parser.add_argument("--steps", type=int, default=240, help="steps of a turn: 240, as in the demo")
    parser.add_argument("--output", type=Path)
    parser.add_argument("--way", choices=WAYS, help=argparse.SUPPRESS)
    parser.add_argument("--folder", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.way:
        import torch

        torch.set_num_threads(1)
        print(json.dumps(WAYS[arguments.way](arguments.steps, arguments.folder)))
        return
    rounds = []
    for number in range(arguments.rounds):
        ways = sorted(WAYS, reverse=bool(number % 2))
        rounds.append({way: turn(way, arguments.steps) for way in ways})
        print({way: f"{1000 * seconds:.1f} ms" for way, seconds in rounds[-1].items()}, flush=True)
    speed = statistics.median(each["loop"] / each["trial"] for each in rounds)
    print(f"a trial has {speed:.3f} of the loop's speed")
    if arguments.output:
        record = {"benchmark": "small_trials", "trial": {**TRIAL, **ALIKE}, **settings_of_machine()}
        write_record(arguments.output, {**record, "speed": speed, "rounds": rounds})


if __name__ == "__main__":
    main()
