"""Train the runs with which the verdict of `lamina preflight` is fitted, and the runs with which it is judged.

    python -m tools.calibration.preflight_calibration    # all stages. `runs` and `measure` resume
    python -m tools.calibration.preflight_calibration measure fit judge
    python -m tools.calibration.preflight_calibration trials --store runs/trials   # add the trials of studies as runs

`runs` pretrains each case with lamina (runs.jsonl, one line per case). `measure` does the burn-in of each case
(measurements.jsonl, with the features of every measurement). `fit` writes lamina/preflights/calibration.json from the
sets FITTED. `judge` writes judged.json and the tables of docs/evidence/preflight.md from the sets JUDGED_ON.

The sets are:
grid: all placements x {12, 24, 48} layers x {normal, scaled} x two learning rates.
more: random settings, with more learning rates, initializers and shapes.
held_out: other random settings, with other depths, learning rates and another seed.
default: the settings of `lamina compare`, and one more combination of depth and learning rate.
All stages take about two hours on one core. With --jobs, several processes share the cases.
"""

from __future__ import annotations

import argparse
import dataclasses
import itertools
import json
import multiprocessing
import os
import random
import shutil
import sys
import sysconfig
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from lamina.errors import UserError
from lamina.jobs.aliases import in_our_words
from lamina.jobs.files import read_config, read_result
from lamina.jobs.status import ENDED
from lamina.preflights.settings import PreflightSettings
from lamina.training.settings import PretrainSettings

FOLDER = Path(__file__).parents[2] / "benchmarks" / "results" / "preflight"
# number of cases per set. The sets take turns, so that an interrupted calibration has cases of all sets
SETS = {"grid": 204, "held_out": 54, "default": 34, "more": 46, "slow": 120, "unseen": 120, "reviewed": 10}
OTHER_TEXT = 60  # settings of the studies to train on the second corpus
LOOKED_AT = 6  # cases of held_out that were seen while the rules were designed, and are therefore fitted
TURNS = ("slow", "unseen", "slow", "unseen", "reviewed")
OLD_TURNS = ("grid", "held_out", "grid", "default", "grid", "more")
# the placements at the time of the draw. Another list would give other cases
PLACEMENTS = (
    *("admin", "b2t", "deepnorm", "fusenorm", "group_ln", "hybridnorm", "hybridnorm_star", "keel"),
    *("layernorm_scaling", "mix_ln", "olmo2", "out_ln", "peri_ln", "post_ln", "pre_ln", "pre_post_ln", "sandwich_ln"),
)
GRID_LAYERS, GRID_INITS, GRID_RATES = (12, 24, 48), ("normal", "scaled"), (3e-3, 1.5e-2)
SHAPE = {"hidden_size": 32, "num_heads": 2, "sequence_length": 32, "batch_size": 16, "steps": 80, "warmup": 0.1}
DEFAULT = {"hidden_size": 48, "num_heads": 2, "sequence_length": 64, "batch_size": 16, "steps": 100, "warmup": 0.1}
RATES = (3e-4, 1e-3, 2e-3, 5e-3, 1e-2, 2e-2, 3e-2, 6e-2, 0.2)
SCALED_THEN = ("pre_ln", "post_ln", "mix_ln", "b2t")
STAGES = ("runs", "measure", "fit", "judge")  # and "trials", only on request
MOST_WORK = 32 * 1600  # width x layers x steps, from the 14th case of "slow" and of "unseen" on
STDLIB = "stdlib"  # a corpus: the top modules of Python's standard library, about 4 MB of code
SPARE = {"hidden_size": 32, "num_heads": 2, "sequence_length": 32, "batch_size": 16, "warmup": 0.1, "seed": 5}
# settings that a review found to have the verdict "fine": three with low rates, and one long run
REVIEWED = (
    {"placement": "pre_ln", "num_layers": 8, "hidden_size": 64, "learning_rate": 3.4e-4, "init": "recommended"},
    {"placement": "hybridnorm", "num_layers": 20, "learning_rate": 4.8e-4, "init": "recommended"},
    {"placement": "olmo2", "num_layers": 8, "learning_rate": 6.6e-4, "init": "small"},
)
LONG = {"placement": "hybridnorm", "num_layers": 14, "hidden_size": 128, "learning_rate": 8e-3, "init": "recommended"}


def cases(which: str) -> Iterator[dict[str, Any]]:
    """Yield the settings of the runs of a set, always in the same order. "recommended" has its original meaning."""
    for case in _cases(which):
        yield {**case, "init": init_of(case["placement"])} if case["init"] == "recommended" else case


def init_of(placement: str) -> str:
    """Return the initializer that a placement recommended for the first runs. Four placements have changed since."""
    from lamina.modeling.building import recommended
    from lamina.placements import resolve

    return "scaled" if placement in SCALED_THEN else recommended(resolve(placement, 8))


def _cases(which: str) -> Iterator[dict[str, Any]]:

    if which == "grid":
        grid = [
            {**SHAPE, "placement": p, "num_layers": n, "init": i, "learning_rate": r, "seed": 0}
            for n in GRID_LAYERS
            for i in GRID_INITS
            for r in GRID_RATES
            for p in PLACEMENTS
        ]
        random.Random(1).shuffle(grid)
        yield from grid
    elif which == "default":
        for layers, rate in ((32, 5e-3), (20, 1.2e-2)):
            for p in PLACEMENTS:
                plan = {"placement": p, "num_layers": layers, "init": "recommended"}
                yield {**DEFAULT, **plan, "learning_rate": rate, "seed": 0}
    elif which == "held_out":
        yield from itertools.islice(_drawn(which), LOOKED_AT, None)
    elif which == "reviewed":
        for steps in (100, 200, 320):
            yield from ({**SPARE, **plan, "steps": steps} for plan in REVIEWED)
        yield {**SPARE, **LONG, "num_heads": 4, "sequence_length": 64, "steps": 400}
    elif which in ("slow", "unseen"):
        yield from _slow(which)
    else:
        yield from itertools.islice(_drawn("held_out"), LOOKED_AT)
        yield from _drawn(which)


def _drawn(which: str) -> Iterator[dict[str, Any]]:
    draw = random.Random(f"preflight {which}")
    depths = (8, 16, 24, 32, 48) if which == "more" else (10, 18, 30, 36, 40, 64)
    for number in itertools.count():
        yield {
            "placement": PLACEMENTS[number % len(PLACEMENTS)] if which == "held_out" else draw.choice(PLACEMENTS),
            "num_layers": draw.choice(depths),
            "init": draw.choice(("recommended", "recommended", "normal", "scaled", "xavier", "small")),
            "learning_rate": draw.choice(RATES) if which == "more" else float(f"{10 ** draw.uniform(-3.3, -0.9):.2g}"),
            "seed": 1 if which == "more" else 2,
            "hidden_size": draw.choice((32, 32, 48)),
            "num_heads": 2,
            "sequence_length": draw.choice((32, 32, 64)),
            "batch_size": draw.choice((8, 16)),
            "steps": draw.choice((60, 80, 120)),
            "warmup": draw.choice((0.02, 0.1, 0.1, 0.3)),
        }


def _slow(which: str) -> Iterator[dict[str, Any]]:
    """Yield low rates and long runs. ``unseen`` has other depths and seeds, and a second corpus in half of the runs."""
    draw, fitted = random.Random(f"preflight {which}"), which == "slow"
    for number in itertools.count():
        low, high = draw.choice(((-4.0, -3.0), (-3.3, -2.5), (-3.0, -1.5)))
        wide = draw.choice((32, 32, 64))
        case = {
            "placement": draw.choice(PLACEMENTS),
            "num_layers": draw.choice((4, 8, 12, 16) if fitted else (6, 10, 14, 20)),
            "init": draw.choice(("recommended", "recommended", "normal", "scaled", "xavier", "small")),
            "learning_rate": float(f"{10 ** draw.uniform(low, high):.2g}"),
            "seed": 3 if fitted else 4,
            "hidden_size": wide,
            "num_heads": wide // 16,
            "sequence_length": draw.choice((32, 32, 64)),
            "batch_size": draw.choice((8, 16)),
            "steps": draw.choice((100, 200, 300) if fitted else (120, 200, 400)),
            "warmup": draw.choice((0.02, 0.1, 0.1, 0.3)),
        }
        case = case if fitted or draw.random() < 0.5 else {**case, "corpus": STDLIB}
        if number < 13 or case["num_layers"] * case["steps"] * wide <= MOST_WORK:
            yield case


def stdlib(folder: Path) -> str:
    """Write the top modules of Python's standard library to a text file, and return the file's path."""
    path = folder / f"python-{sys.version_info.major}.{sys.version_info.minor}.txt"
    sources = sorted(Path(sysconfig.get_path("stdlib")).glob("*.py"))
    path.write_text("\n".join(source.read_text(encoding="utf-8", errors="replace") for source in sources))
    return str(path)


def all_cases() -> Iterator[tuple[str, dict[str, Any]]]:
    """Yield every case with the name of its set. The sets take turns."""
    waiting = {name: iter(list(itertools.islice(cases(name), count))) for name, count in SETS.items()}
    for turns in (TURNS, OLD_TURNS):
        ended: set[str] = set()
        for name in itertools.cycle(turns):
            if ended == set(turns):
                break
            case = next(waiting[name], None)
            if case is None:
                ended.add(name)
            else:
                yield name, case
    yield from other_text()


def other_text() -> Iterator[tuple[str, dict[str, Any]]]:
    """Yield random settings of the studies (from runs.jsonl) with the second corpus and a new seed."""
    settings = [r["case"] for r in read("runs.jsonl") if r["set"] in ("trials", "other depths")]
    for case in random.Random("preflight other text").sample(settings, min(OTHER_TEXT, len(settings))):
        yield "other text", {**case, "corpus": STDLIB, "seed": 6}


def key_of(case: dict[str, Any]) -> str:
    return json.dumps(case, sort_keys=True)


def read(name: str) -> list[dict[str, Any]]:
    """Return the records of a results file, or [] if the file does not exist yet."""
    path = FOLDER / name
    return [json.loads(line) for line in path.read_text().splitlines()] if path.is_file() else []


def append(name: str, record: dict[str, Any]) -> None:
    """Append a line in one write, so that several processes can append at the same time."""
    FOLDER.mkdir(parents=True, exist_ok=True)
    with (FOLDER / name).open("ab", buffering=0) as file:
        file.write(f"{json.dumps(record)}\n".encode())


def train(case: dict[str, Any]) -> dict[str, Any]:
    from lamina.training.pretrain import pretrain

    folder = Path(tempfile.mkdtemp(prefix="preflight-"))
    try:
        settings = PretrainSettings(
            **located(case, folder),
            eval_blocks=64,
            eval_steps=20,
            logging_steps=4,
            precision="fp32",
            compile="off",
            threads=1,
            output=str(folder / "run"),
        )
        pretrain(settings, bar=False)
        return result_of(folder / "run")
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def located(case: dict[str, Any], folder: Path) -> dict[str, Any]:
    return {**case, "corpus": stdlib(folder)} if case.get("corpus") == STDLIB else case


def measure(case: dict[str, Any]) -> dict[str, Any]:
    """Do the burn-in of a case as `lamina preflight` does, and return the features of the measurements."""
    import torch

    from lamina.data.packed import prepare_blocks
    from lamina.jobs.files import finite
    from lamina.preflights.planned_runs import burn_in_of
    from lamina.preflights.verdict import Features, features

    def open_question(numbers: Features) -> bool:  # continue longer than any fitted rule would
        return numbers.excess > -0.25 and not (numbers.jacobian < -4 and numbers.context < 0.01)

    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory(prefix="preflight-") as folder:
        named = in_our_words(located(case, Path(folder)), PreflightSettings.names())
        settings = PreflightSettings.from_dict(named)
        blocks, _ = prepare_blocks(settings.corpus, settings.tokenizer, settings.sequence_length, progress=False)
        seen = burn_in_of(settings, settings.runs()[0], blocks, open_question)
    ends = range(min(1, len(seen.snapshots) - 1), len(seen.snapshots))
    courses = [dataclasses.asdict(features(seen, end)) for end in ends]
    rounded = [{name: float(f"{v:.5g}") if isinstance(v, float) else v for name, v in c.items()} for c in courses]
    return finite({"stopped": seen.stopped, "features": rounded})


def work_off(name: str, todo: list[tuple[str, dict[str, Any]]], act: Callable[..., Any], jobs: int) -> None:
    """Process the cases that a results file lacks, with ``jobs`` processes. Print a line for each finished case."""
    done = {key_of(record["case"]) for record in read(name)}
    todo = [(which, case) for which, case in todo if key_of(case) not in done]
    os.environ["OMP_NUM_THREADS"] = "1"
    with multiprocessing.get_context("spawn").Pool(jobs, maxtasksperchild=8) as pool:
        for number, (which, case, result) in enumerate(pool.imap_unordered(_Act(act), todo), start=1):
            append(name, {"set": which, "case": case, "result": result})
            shown = f"{case['placement']} {case['num_layers']} {case['init']} {case['learning_rate']:g}"
            print(f"{name} {number}/{len(todo)} {which}: {shown} {result.get('status', '')}", flush=True)


def add_trials(store: Path) -> None:
    done = {key_of(record["case"]) for record in read("runs.jsonl")}
    new = [run for run in trial_runs(store) if key_of(run["case"]) not in done]
    for run in new:
        append("runs.jsonl", run)
    print(f"{len(new)} trials added")


class _Act:
    def __init__(self, act: Callable[..., Any]):
        self.act = act

    def __call__(self, item: tuple[str, dict[str, Any]]) -> tuple[str, dict[str, Any], dict[str, Any]]:
        return *item, self.act(item[1])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "stages", nargs="*", choices=[*STAGES, "trials", []], help="stages (default: the first four, in this order)"
    )
    parser.add_argument("--jobs", type=int, default=1, help="number of processes, with one thread each")
    parser.add_argument("--store", type=Path, help="for `trials`: folder with the trials of `lamina study run`")
    parser.add_argument("--most", type=int, help="maximum number of cases, including cases that already have a run")
    options = parser.parse_args()
    stages = options.stages or STAGES
    if "trials" in stages:
        if options.store is None:
            parser.error("trials: --store is missing (allowed: a folder of trials, such as runs/trials)")
        add_trials(options.store)
    if "runs" in stages:
        work_off("runs.jsonl", list(itertools.islice(all_cases(), options.most)), train, options.jobs)
    if "measure" in stages:
        work_off("measurements.jsonl", [(r["set"], r["case"]) for r in read("runs.jsonl")], measure, options.jobs)
    if "fit" in stages or "judge" in stages:
        from tools.calibration import preflight_fit

        if "fit" in stages:
            preflight_fit.fit(read("runs.jsonl"), read("measurements.jsonl"))
        if "judge" in stages:
            preflight_fit.judge(read("runs.jsonl"), read("measurements.jsonl"))


FITTED_DEPTHS = (12, 24, 32)
NAMED = ("placement", "num_layers", "hidden_size", "init", "learning_rate", "seed", "steps", "warmup")
IGNORED = ("output", "threads", "compile", "precision", "eval_steps", "eval_blocks", "save_steps", "logging_steps")
KEPT = ("status", "reason", "eval_loss", "unigram_entropy", "steps", "seconds")
NANO_WIDTH = 48


def trial_runs(store: Path) -> Iterator[dict[str, Any]]:
    """Yield the pretraining trials of a store as lines of runs.jsonl, one per setting, sorted by setting.

    Unfinished trials are left out, and also trials with a setting that `lamina preflight` does not have.
    """
    lowest: dict[str, tuple[int, dict[str, Any], Path]] = {}
    for folder in sorted(path.parent for path in store.glob("*/trial.json")):
        case = case_of(folder)
        if case is not None:
            key = json.dumps({name: value for name, value in case.items() if name != "seed"}, sort_keys=True)
            if key not in lowest or case["seed"] < lowest[key][0]:
                lowest[key] = case["seed"], case, folder
    for _, (_, case, folder) in sorted(lowest.items()):
        which = "trials" if case["num_layers"] in FITTED_DEPTHS else "other depths"
        yield {"set": which, "case": case, "result": result_of(folder)}


def case_of(folder: Path) -> dict[str, Any] | None:
    """Return the changed settings of a finished trial, or None if `lamina preflight` does not support the settings."""
    if json.loads((folder / "trial.json").read_text())["job"] != "pretrain":
        return None
    result = read_result(folder)
    if result is None or result["status"] not in ENDED or not (folder / "metrics.jsonl").is_file():
        return None
    given = read_config(folder)
    defaults = PretrainSettings().to_dict()
    changed = {name: value for name, value in given.items() if value != defaults.get(name) and name not in IGNORED}
    named = {name: given[name] for name in NAMED}
    named["hidden_size"] = named["hidden_size"] or NANO_WIDTH
    case = {**changed, **named}
    try:
        PreflightSettings.from_dict(in_our_words(case, PreflightSettings.names()))
    except UserError:
        return None
    return case


def result_of(folder: Path) -> dict[str, Any]:
    result = json.loads((folder / "result.json").read_text())
    records = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    return {name: result.get(name) for name in KEPT} | {
        "losses": [[r["step"], round(r["loss"], 4)] for r in records if r.get("loss") is not None],
        "eval_losses": [[r["step"], round(r["eval_loss"], 4)] for r in records if r.get("eval_loss") is not None],
    }


if __name__ == "__main__":
    main()
