"""Runs that are killed with SIGKILL at random moments, as often as their draw says, and resumed to their end.

Each configuration is trained once undisturbed, then again in processes that are killed and resumed until one gets to
the end; its losses, its table of layers, its scheduled probes and its weights must then be the undisturbed ones, bit
for bit. Every kill counts as a case: all the kills of a run are right, or none is.

    python -m tools.reliability.kills --count 110 --seed 0 --output docs/reliability/kills.json
"""

from __future__ import annotations

import contextlib
import json
import multiprocessing
import os
import random
import signal
import sys
import tempfile
import time
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

from tests.training.tiny_runs import SMALL, free_port, layers, records, result, write_corpus
from tools.reliability import stages, watched
from tools.reliability.record import HUNG, LOST, RIGHT, SILENT, TRACEBACK, Case, environment_as_before, main

RUN = {**SMALL, "steps": 24, "logging_steps": 2, "save_steps": 2, "eval_steps": 6, "keep": 2}
# By name: what differs from RUN, and in how many processes it trains.
CONFIGURATIONS: dict[str, tuple[dict[str, Any], int]] = {
    "plain": ({}, 1),
    "accumulation": ({"gradient_accumulation": 3, "placement": "keel"}, 1),
    "a mix": ({"corpus": "{corpus}:0.7,{other}:0.3"}, 1),
    "experts": ({"backbone": "{experts}", "num_layers": None, "hidden_size": None, "num_heads": None}, 1),
    "streaming": ({"streaming": True, "shuffle_buffer": 16, "placement": "peri_ln"}, 1),
    "bf16": ({"precision": "bf16", "placement": "fusenorm"}, 1),
    "width scaling": ({"width_scaling": "mup", "base_width": 8}, 1),
    "scheduled probes": ({"probe_every": 4, "probes": "gains"}, 1),
    "a rollback": ({"rollback": 2}, 1),
    "--overwrite": ({}, 1),
    "2 processes, DDP": ({"batch_size": 4}, 2),
    "2 processes, FSDP2": ({"batch_size": 4, "parallel": "fsdp2"}, 2),
    **stages.CONFIGURATIONS,
    **watched.CONFIGURATIONS,
}
LONGEST = 240.0  # seconds that a process may take to its end


def work(given: dict[str, Any], how: dict[str, Any], rank: int, size: int, port: int) -> None:
    """The body of a process that may be killed: one run, resumed where something is there."""
    with open(os.devnull, "w") as nothing:
        os.dup2(nothing.fileno(), 1)
    if size > 1:
        os.environ.update(RANK=str(rank), WORLD_SIZE=str(size), LOCAL_RANK=str(rank), LOCAL_WORLD_SIZE=str(size))
        os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port))
    if how.get("watched"):
        watched.train(Path(given["output"]), how["watched"])
        return
    if how.get("job"):
        stages.job_named(how["job"])(given, resume="auto", bar=False)
        return
    from lamina.training import pretrain
    from lamina.training.settings import PretrainSettings
    from lamina.training.trainer import LaminaTrainer

    if how.get("spoiled"):  # these steps' data make the loss NaN, whichever step trains on them
        original = LaminaTrainer.training_step

        def training_step(self: Any, *args: Any, **kwargs: Any) -> Any:
            step = self.state.global_step + 1
            loss = original(self, *args, **kwargs)
            if self.order.data_step(step) in (9, 17):
                self.guard.see_loss(step, float("nan"))
            return loss

        LaminaTrainer.training_step = training_step  # type: ignore[method-assign]
    settings = PretrainSettings.from_dict(given)
    if how.get("overwrite"):
        pretrain.pretrain(settings, overwrite=True, bar=False)
    else:
        pretrain.pretrain(settings, resume="auto", bar=False)


class Bench:
    """Starts processes from a server that has imported torch, and kills them."""

    def __init__(self, root: Path, names: Iterable[str]):
        self.root = root
        jobs = any("job" in CONFIGURATIONS[name][0] for name in names)
        self.corpus, self.other = write_corpus(root / "words.txt"), root / "other.txt"
        self.other.write_text(self.corpus.read_text(encoding="utf-8").upper(), encoding="utf-8")
        os.environ["LAMINA_CACHE"] = str(root / "cache")
        self.experts = self._experts()
        self.context = multiprocessing.get_context("forkserver")
        self.context.set_forkserver_preload(["lamina.training.pretrain", *(["trl", "peft"] if jobs else [])])
        self.places = stages.places_of(root, tuned=jobs)

    def _experts(self) -> str:
        from tests.training.tiny_experts import config

        config("v3", vocab_size=257).save_pretrained(self.root / "experts")
        return str(self.root / "experts")

    def settings(self, name: str, output: Path) -> dict[str, Any]:
        """A configuration's settings."""
        changed = {**CONFIGURATIONS[name][0], "output": str(output)}
        job = changed.pop("job", None)
        changed = {**(stages.TUNED if job else {**RUN, "corpus": "{corpus}"}), **changed}
        places = {"corpus": self.corpus, "other": self.other, "experts": self.experts, **self.places}
        filled = {k: v.format(**places) if isinstance(v, str) else v for k, v in changed.items()}
        return {k: v for k, v in filled.items() if v is not None}

    def start(self, given: dict[str, Any], how: dict[str, Any], size: int) -> list[Any]:
        """Start a run's processes."""
        port = free_port()
        started = [self.context.Process(target=work, args=(given, how, rank, size, port)) for rank in range(size)]
        for process in started:
            process.start()
        return started

    def to_the_end(self, given: dict[str, Any], how: dict[str, Any], size: int) -> str:
        """Let a run come to its end; gives what went wrong, or nothing."""
        return self.wait(self.start(given, how, size), LONGEST)

    @staticmethod
    def wait(started: list[Any], seconds: float) -> str:
        deadline = time.monotonic() + seconds
        for process in started:
            process.join(max(0.0, deadline - time.monotonic()))
        hung = [process for process in started if process.is_alive()]
        kill(hung)
        if hung:
            return "hung"
        codes = {process.exitcode for process in started}
        return "" if codes == {0} else f"exit codes {codes}"


def kill(processes: list[Any]) -> None:
    """SIGKILL, all at once."""
    for process in processes:
        with contextlib.suppress(ProcessLookupError, TypeError):
            os.kill(process.pid, signal.SIGKILL)
    for process in processes:
        process.join()


def outcome_of(folder: Path) -> dict[str, Any]:
    """What a run came to, bit for bit, without what a clock measured."""
    import pandas as pd

    ended = {k: v for k, v in result(folder).items() if k not in ("seconds", "tokens_per_second")}
    parts = sorted(folder.glob("probes/*/part-*.parquet"))
    return {
        "weights": (folder / "model" / "model.safetensors").read_bytes(),
        "records": json.dumps(records(folder)),
        "layers": layers(folder).to_csv(),
        "probes": [(part.name, pd.read_parquet(part).to_csv()) for part in parts],
        "result": json.dumps(ended),
        "held out": stages.held_out_of(folder),
        "left": sorted(p.name for p in folder.glob(".*") if p.name != ".lock"),
    }


def killed(
    bench: Bench, name: str, kills: int, seconds: float, expected: dict[str, Any], draw: random.Random
) -> list[Case]:
    """Kill a run ``kills`` times and compare what it comes to; a case a kill."""
    size = CONFIGURATIONS[name][1]
    folder = bench.root / f"killed-{draw.randrange(10**9)}"
    given, how, made, trouble = bench.settings(name, folder), how_of(name), 0, ""
    if name == "--overwrite":  # of a run of another placement: a kill leaves one of the two
        trouble = bench.to_the_end({**given, "placement": "post_ln", "steps": 4}, {}, 1)
    while made < kills and not trouble:
        again = {"overwrite": True} if name == "--overwrite" and not begun(folder, given) else how
        started = bench.start(given, again, size)
        # most of a process' life is its start, so a share of the kills waits until it trains
        # and a third comes in the first second, between its first files
        time.sleep(draw.uniform(0.02, min(seconds, 1.0) if draw.random() < 1 / 3 else seconds))
        if not any(process.is_alive() for process in started):
            trouble = bench.wait(started, 1.0)
            break
        kill(started)
        made += 1
        if "watched" in how:
            trouble = watched.faults_at_a_kill(folder, whole_of(bench, name))
    if not trouble:
        again = {"overwrite": True} if name == "--overwrite" and not begun(folder, given) else how
        trouble = bench.to_the_end(given, again, size)
    words = f"{made} kills"
    if "watched" in how and not trouble:
        trouble = watched.faults_at_the_end(folder, whole_of(bench, name))
    if trouble:
        outcome, detail = HUNG if trouble == "hung" else LOST if "rows" in trouble else TRACEBACK, trouble
    elif "watched" in how:
        outcome, detail = RIGHT, ""
    else:
        found = outcome_of(folder)
        differing = [key for key in expected if found[key] != expected[key]]
        outcome, detail = (SILENT, f"differing: {', '.join(differing)}") if differing else (RIGHT, "")
    return [Case(name, f"kill {number + 1} of {words}", outcome, detail) for number in range(made)]


def how_of(name: str) -> dict[str, Any]:
    job = CONFIGURATIONS[name][0].get("job")
    if "watched" in CONFIGURATIONS[name][0]:
        return CONFIGURATIONS[name][0]
    return {"spoiled": True} if name == "a rollback" else {"job": job} if job else {}


def begun(folder: Path, given: dict[str, Any]) -> bool:
    """Whether the new run of --overwrite has begun; the old one is whole until that has a checkpoint."""
    import yaml

    config, aside = folder / "config.yaml", folder.with_name(f"{folder.name}.old")
    stored = yaml.safe_load(config.read_text(encoding="utf-8")) if config.is_file() else {}
    ours = stored.get("steps") == given["steps"]
    assert (
        any((folder if ours else aside).glob("checkpoints/*/manifest.json"))
        or ((aside if aside.exists() else folder) / "model" / "manifest.json").is_file()
    ), "the old run is gone, the new one not there"
    return ours


def whole_of(bench: Bench, name: str) -> Path:
    """The folder of a configuration's undisturbed run."""
    return bench.root / f"whole-{name.replace(' ', '-')}"


def suite(count: int, seed: int, only: tuple[str, ...] = ()) -> Iterator[Case]:
    """Kill runs ``count`` times in all; ``only``: of these configurations."""
    draw = random.Random(seed)
    names = [name for name in CONFIGURATIONS if not only or name in only]
    with tempfile.TemporaryDirectory() as root, environment_as_before():
        bench = Bench(Path(root), names)
        left = count
        while left > 0:
            share = max(1, -(-left // len(names)))
            for name in names:
                size = CONFIGURATIONS[name][1]
                kills = min(left, share if size == 1 else max(1, share // 3))
                if kills == 0:
                    break
                undisturbed = whole_of(bench, name)
                if not undisturbed.exists():
                    warm = bench.root / f"warm-{name.replace(' ', '-')}"
                    bench.to_the_end(
                        {**bench.settings(name, warm), "steps": 1}, how_of(name), size
                    )  # server, cache, imports
                    began = time.monotonic()
                    trouble = bench.to_the_end(bench.settings(name, undisturbed), how_of(name), size)
                    if trouble:
                        raise RuntimeError(f"the undisturbed run of {name!r} failed: {trouble}")
                    (undisturbed / "took").write_text(str(time.monotonic() - began), encoding="utf-8")
                seconds = float((undisturbed / "took").read_text(encoding="utf-8"))
                expected = {} if name in watched.CONFIGURATIONS else outcome_of(undisturbed)
                cases = killed(bench, name, kills, seconds, expected, draw)
                left -= len(cases)
                yield from cases


if __name__ == "__main__":
    sys.exit(main("kills", suite, 110))
