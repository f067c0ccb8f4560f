"""Measure the time that the engine of studies adds to the time of the trials.

overhead: the seconds between the last file of a trial and the first file of the next trial, relative to the seconds of
a trial. The study has one worker and trials of about ten seconds. For comparison, the same trials run one by one in a
process without the engine. Both times come from the same run, so a drift of the machine's speed does not matter.
start: the seconds until a study with only one unfinished trial begins this trial, minus the seconds for a study with
this trial alone. The difference is the time to find the finished trials.
workers: the time with one worker per core and one thread per worker, relative to one worker with all threads.

    python benchmarks/studies.py --output benchmarks/results/studies.json
    python benchmarks/studies.py --parts start --ended 300
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import yaml
from common import ROOT, settings_of_machine, write_record

PARTS = ("overhead", "start", "workers")
# a trial takes about ten seconds on one thread at 60 GFLOP/s
TRIAL = {"backbone": "llama-nano", "num_layers": 12, "steps": 100, "batch_size": 16, "sequence_length": 64}
TINY = {"backbone": "llama-nano", "num_layers": 1, "steps": 1, "batch_size": 1, "sequence_length": 16, "eval_blocks": 1}
ALIKE = {"init": "scaled", "precision": "fp32", "compile": "off", "placement": "pre_ln", "save_steps": 0}
# the same trials without the engine: one function call each, in one process
PLAIN = """
import json, sys
import torch
torch.set_num_threads(1)
from lamina.training.pretrain import pretrain
from lamina.training.settings import PretrainSettings
for settings in json.loads(sys.argv[1]):
    pretrain(PretrainSettings.from_dict(settings), bar=False)
"""


def study_file(folder: Path, trial: dict[str, Any], seeds: int) -> Path:
    """Write a study of one placement and some seeds."""
    name = f"bench-{seeds}"
    scales = {"cpu": {"settings": {**trial, **ALIKE, "eval_steps": trial["steps"]}, "axes": {"seed": seeds}}}
    path = folder / f"{name}.yaml"
    path.write_text(yaml.safe_dump({"study": name, "title": "A benchmark", "source": "", "scales": scales}))
    return path


def run_study(path: Path, store: Path, *options: str) -> float:
    output = path.parent / f"out-{path.stem}-{time.monotonic_ns()}"
    command = [sys.executable, "-m", "lamina", "study", "run", str(path), "--store", str(store), "--output"]
    return seconds_of([*command, str(output), *options])


def run_plain(folder: Path, trial: dict[str, Any], count: int) -> Path:
    place = folder / f"plain-{time.monotonic_ns()}"
    settings = [
        {**trial, **ALIKE, "eval_steps": trial["steps"], "seed": seed, "output": str(place / str(seed))}
        for seed in range(count)
    ]
    seconds_of([sys.executable, "-c", PLAIN, json.dumps(settings)])
    return place


def seconds_of(command: list[str]) -> float:
    """Run a command, and return the seconds. Exits if the command fails."""
    start = time.perf_counter()
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    if done.returncode:
        raise SystemExit(f"{' '.join(command[:6])} ...: {done.stderr[-2000:]}")
    return time.perf_counter() - start


def overhead(folder: Path, arguments: argparse.Namespace) -> dict[str, Any]:
    """Return the seconds between two trials, and the seconds of the trials with and without the engine."""
    path, rounds = study_file(folder, TRIAL, 1 + arguments.trials), []
    for turn in range(arguments.rounds):
        store = folder / f"store-{turn}"
        run_study(path, store, "--workers", "1")
        times = sorted((begun.stat().st_mtime, ended_of(begun.parent)) for begun in store.glob("[0-9a-f]*/trial.json"))
        plain = run_plain(folder, TRIAL, 1 + arguments.trials)
        rounds.append(
            {
                "between": [after[0] - before[1] for before, after in itertools.pairwise(times)],
                "trials": [ended - begun for begun, ended in times],
                "plain": [json.loads(file.read_text())["seconds"] for file in sorted(plain.glob("*/result.json"))],
            }
        )
        print("overhead:", {name: [round(one, 2) for one in rounds[-1][name]] for name in rounds[-1]}, flush=True)
    medians = {name: statistics.median(one for r in rounds for one in r[name]) for name in rounds[0]}
    return {**medians, "ratio": 1 + medians["between"] / medians["trials"], "rounds": rounds}


def ended_of(trial: Path) -> float:
    return (trial / "result.json").stat().st_mtime


def first_file(path: Path, store: Path, known: set[str]) -> float:
    """Return the seconds from the command to the first file of a trial that is not in ``known``."""
    output = path.parent / f"out-{path.stem}-{time.monotonic_ns()}"
    command = [sys.executable, "-m", "lamina", "study", "run", str(path), "--store", str(store), "--output"]
    start = time.perf_counter()
    process = subprocess.Popen([*command, str(output), "--workers", "1"], cwd=ROOT, stderr=subprocess.DEVNULL)
    while process.poll() is None:
        if any(found.parent.name not in known for found in store.glob("[0-9a-f]*/config.yaml")):
            break
        time.sleep(0.01)
    seconds = time.perf_counter() - start
    process.wait()
    return seconds


def start(folder: Path, arguments: argparse.Namespace) -> dict[str, Any]:
    """Return the seconds that finding the finished trials adds to the start of a study."""
    many, store = arguments.ended, folder / "store-start"
    run_study(study_file(folder, TINY, many), store)
    rounds = []
    for turn in range(arguments.rounds):
        known = {place.name for place in store.iterdir()}
        among = first_file(study_file(folder, TINY, many + 1 + turn), store, known)
        alone = first_file(study_file(folder, TINY, 1), folder / f"store-alone-{turn}", set())
        rounds.append({"among": among, "alone": alone})
        print(f"start: {among:.2f} s among {many} ended trials, {alone:.2f} s alone", flush=True)
    return {
        "ended": many,
        "seconds": statistics.median(r["among"] for r in rounds),
        "seconds_alone": statistics.median(r["alone"] for r in rounds),
        "seconds_added": statistics.median(r["among"] - r["alone"] for r in rounds),
        "rounds": rounds,
    }


def workers(folder: Path, arguments: argparse.Namespace) -> dict[str, Any]:
    """Return the throughput of one worker per core, relative to one worker with all threads."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    path, rounds = study_file(folder, TRIAL, cores * arguments.trials), []
    for turn in range(arguments.rounds):
        each = run_study(path, folder / f"store-each-{turn}", "--workers", str(cores), "--threads", "1")
        one = run_study(path, folder / f"store-one-{turn}", "--workers", "1", "--threads", str(cores))
        rounds.append({"worker_per_core": each, "one_worker": one})
        print(f"workers: {each:.1f} s with one each, {one:.1f} s with one for all", flush=True)
    ratio = statistics.median(r["one_worker"] / r["worker_per_core"] for r in rounds)
    return {"cores": cores, "trials": cores * arguments.trials, "throughput_ratio": ratio, "rounds": rounds}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--parts", default=",".join(PARTS), help="parts to measure, separated by commas")
    parser.add_argument("--trials", type=int, default=3, help="trials after the first, or per core")
    parser.add_argument("--ended", type=int, default=300, help="number of finished trials that start must find")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--output", type=Path)
    arguments = parser.parse_args()
    measured = {"overhead": overhead, "start": start, "workers": workers}
    results = {}
    with tempfile.TemporaryDirectory() as folder:
        for part in arguments.parts.split(","):
            results[part] = measured[part](Path(folder), arguments)
    record = {"benchmark": "studies", "trial": {**TRIAL, **ALIKE}, **settings_of_machine(), **results}
    print(json.dumps(results, indent=1))
    if arguments.output:
        write_record(arguments.output, record)


if __name__ == "__main__":
    main()
