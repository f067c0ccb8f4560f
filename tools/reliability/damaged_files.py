"""Files that are damaged, then the command that reads them: refused in one line that names the file, or as if whole.

Every case copies an undamaged folder (a run, a study, what another job left), a cache, a corpus or a configuration;
damages one file of it that has a digest; and runs a command. Right is a refusal that names the file and loses nothing,
or the very results of the undamaged copy, or results that lack what was in the file and a line that names it. The
weights that a run ends with must be the undamaged ones, bit for bit, in every case that is not refused.

    python -m tools.reliability.damaged_files --count 240 --seed 0 --output docs/reliability/damaged_files.json
"""

from __future__ import annotations

import contextlib
import gzip
import json
import os
import random
import re
import shutil
import signal
import sys
import tempfile
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pandas as pd

from lamina.errors import printable
from tests.training.tiny_runs import SMALL, flags, layers, records, result, write_corpus
from tools.reliability import record
from tools.reliability.record import LOST, RIGHT, SILENT, TRACEBACK, WRONG, Case, main

KILLED, ENDED, STUDY, CACHE, CORPUS, CONFIG = (
    "a killed run", "an ended run", "a study", "the data cache", "a corpus", "a configuration",
)  # fmt: skip
PREFLIGHT, PROBED, EVALUATED = "a preflight", "a probe's folder", "an evaluation"
TWINS: dict[Path, Path] = {}  # by a copied folder: another of the same job, which trained on other draws
OPTIONS = {"steps": 10, "logging_steps": 1, "save_steps": 3, "eval_steps": 3, "learning_rate": 2e-3, "keep": 2}
PROBES = {"probe_every": 3, "probes": "gains"}
LONGEST = 240  # seconds: a reader that waits for a pipe ends with the signal
TIMING = ("seconds", "tokens_per_second")


# What can happen to a file. Each gets the file and a source of draws; gives the path that it left or made.
def cut(path: Path, draw: random.Random) -> None:
    path.write_bytes(path.read_bytes()[: draw.randrange(path.stat().st_size)])


def flip(path: Path, draw: random.Random) -> None:
    content = bytearray(path.read_bytes())
    content[draw.randrange(len(content))] ^= 1 << draw.randrange(8)
    path.write_bytes(bytes(content))


def digit(path: Path, draw: random.Random) -> None:
    """Another digit in the place of one; in a binary file another byte."""
    content = bytearray(path.read_bytes())
    places = [i for i, byte in enumerate(content) if 48 <= byte <= 57] or list(range(len(content)))
    place = draw.choice(places)
    content[place] = draw.choice([byte for byte in range(48, 58) if byte != content[place]])
    path.write_bytes(bytes(content))


def empty(path: Path, draw: random.Random) -> None:
    path.write_bytes(b"")


def delete(path: Path, draw: random.Random) -> None:
    path.unlink()


def double(path: Path, draw: random.Random) -> None:
    path.write_bytes(path.read_bytes() * 2)


def rename(path: Path, draw: random.Random) -> None:
    path.rename(path.with_name(f"{path.stem}-{draw.randrange(100)}{path.suffix}"))


def folder(path: Path, draw: random.Random) -> None:
    path.unlink()
    path.mkdir()


def stray(path: Path, draw: random.Random) -> None:
    """One more file beside it, under a name of its kind, with other content of its kind."""
    number = re.search(r"(\d*)(\.\w+)$", path.name)
    assert number is not None
    begin, digits, end = path.name[: number.start()], number[1], number[2]
    names = (f"{begin}{int(digits or 0) + more:0{len(digits)}d}{end}" for more in range(7, 99))
    other = next(other for name in names if not (other := path.with_name(name)).exists())
    shutil.copyfile(path, other)
    if path.suffix in (".json", ".jsonl", ".yaml", ".csv"):
        digit(other, draw)


def exchange(path: Path, draw: random.Random) -> None:
    """The file of the study's other trial in its place, and the other way round; of another run; or another digit."""
    if "trials" not in path.parts:
        other = next((TWINS[place] / path.relative_to(place) for place in path.parents if place in TWINS), path)
        if other.is_file() and other.read_bytes() != path.read_bytes():
            shutil.copyfile(other, path)
        else:
            digit(path, draw)
        return
    run = next(place for place in path.parents if place.parent.name == "trials")
    other = next(place for place in sorted(run.parent.iterdir()) if place != run) / path.relative_to(run)
    if other.is_file():
        aside = path.with_name("aside")
        path.rename(aside)
        other.rename(path)
        aside.rename(other)


def pipe(path: Path, draw: random.Random) -> None:
    path.unlink()
    os.mkfifo(path)


def steering(path: Path, draw: random.Random) -> None:
    """One more file beside it, whose name sets the title of a terminal's window."""
    path.with_name(f"x\x1b]0;title\x07{draw.randrange(100)}{path.suffix}").write_bytes(b"{}")


HARMS = (cut, flip, digit, empty, delete, double, rename, folder, stray, exchange, pipe, steering)


@dataclass(frozen=True)
class Outcome:
    """How a command went in this process: exit code (None for an exception), all that was said, what it gives."""

    code: int | None
    said: str
    result: Any


class Bench:
    """Undamaged folders in a temporary place, and what the commands give on them."""

    def __init__(self, root: Path):
        self.root, self.number = root, 0
        self.corpus = write_corpus(root / "words.txt")
        self.texts = root / "texts"
        self.texts.mkdir()
        lines = self.corpus.read_text(encoding="utf-8").splitlines()
        rows = [{"text": line} for line in lines]
        (self.texts / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
        pd.DataFrame(rows).to_parquet(self.texts / "rows.parquet", index=False)
        (self.texts / "words.txt.gz").write_bytes(gzip.compress(self.corpus.read_bytes(), mtime=0))
        shutil.copyfile(self.corpus, self.texts / "words.txt")
        os.environ["LAMINA_CACHE"] = str(root / "cache")
        self.folders = {KILLED: root / "killed", ENDED: root / "ended", STUDY: root / "study"}
        self.folders |= {PREFLIGHT: root / "preflight", PROBED: root / "probed", EVALUATED: root / "evaluated"}
        self.twins = {kind: root / "twins" / place.name for kind, place in self.folders.items() if kind != STUDY}
        self._make()
        self.expected: dict[tuple[str, str], Any] = {}

    @property
    def probing(self) -> list[str]:
        """The flags of a probe that takes no time."""
        sizes = {"corpus": self.corpus, "sequence_length": 16, "sequences": 4, "threads": 1}
        return ["--probes", "gains", *flags(**sizes)]

    def _make(self) -> None:
        from lamina.studies.compare import compare
        from lamina.studies.settings import CompareSettings

        for seed, at in enumerate((self.folders, self.twins)):
            self._stopped(at[KILLED], str(self.corpus), rollback=1, **PROBES, seed=seed)
            shutil.copytree(at[KILLED], at[ENDED])
            self._need(self._call(["pretrain", "--output", str(at[ENDED]), "--resume"]))
            given = {"corpus": self.corpus, "sequence_length": 16, "threads": 1, "seed": seed}
            self._need(self._call(["probe", str(at[ENDED]), "--output", str(at[PROBED]), *self.probing]))
            self._need(self._call(["eval", str(at[ENDED]), *flags(corpus=self.corpus, limit=8, output=at[EVALUATED])]))
            sizes = {"num_layers": 2, "hidden_size": 16, "num_heads": 2, "batch_size": 2, "steps": 8, "sequences": 2}
            burn = flags(placements="pre_ln", output=at[PREFLIGHT], **sizes, **given)
            self._need(self._call(["preflight", *burn]))
        study = {k: v for k, v in {**SMALL, **OPTIONS}.items() if k != "learning_rate"}
        made = CompareSettings(
            corpus=str(self.corpus), output=str(self.folders[STUDY]), placements="pre_ln,keel", **study
        )
        compare(made, bar=False)
        for name in ("rows.jsonl", "rows.parquet", "words.txt.gz", "words.txt"):
            self._stopped(self.root / f"on-{name}", str(self.texts / name))

    def _stopped(self, output: Path, corpus: str, **more: Any) -> None:
        """A run that was killed at step 8; with ``rollback`` one that had gone back once before."""
        from lamina.training import pretrain
        from lamina.training.settings import PretrainSettings
        from lamina.training.trainer import LaminaTrainer

        original = LaminaTrainer.training_step

        def training_step(self: Any, *args: Any, **kwargs: Any) -> Any:
            step = self.state.global_step + 1
            if more.get("rollback") and self.order.data_step(step) == 5:
                self.guard.see_loss(step, float("nan"))
            if step == 8:
                raise RuntimeError("pulled the plug")
            return original(self, *args, **kwargs)

        LaminaTrainer.training_step = training_step
        try:
            with contextlib.suppress(RuntimeError):
                given = PretrainSettings(corpus=corpus, output=str(output), **{**SMALL, **OPTIONS, **more})
                pretrain.pretrain(given, bar=False)
        finally:
            LaminaTrainer.training_step = original
        (output / "result.json").unlink()  # a kill leaves none

    @staticmethod
    def _need(outcome: Outcome) -> None:
        if outcome.code != 0:
            raise RuntimeError(f"the suite's own folders could not be made: {outcome.said}")

    def copy(self, kind: str) -> Path:
        """A fresh copy of an undamaged folder."""
        self.number += 1
        place = shutil.copytree(self.folders[kind], self.root / f"bench{self.number:05d}", symlinks=True)
        TWINS.update({place: self.twins[kind]} if kind in self.twins else {})
        return place

    def _call(self, argv: list[str]) -> Outcome:
        return called(lambda: __import__("lamina.cli").cli.main(argv))

    def outcome(self, kind: str, command: str, place: Path) -> Outcome:
        """Run one of a kind's commands on a folder."""
        argv = {
            "resume": {
                KILLED: ["pretrain", "--output", str(place), "--resume"],
                ENDED: ["pretrain", "--output", str(place), "--resume"],
                STUDY: ["compare", "--output", str(place), "--resume"],
            }.get(kind, []),
            "generate": ["generate", str(place), "--temperature", "0", "--max-new-tokens", "4"],
            "probe": ["probe", str(place), "--output", f"{place}-probed", *self.probing],
            "report": ["report", str(place)],
        }[command]
        done = self._call(argv)
        return Outcome(done.code, done.said, read(command, kind, place, done) if done.code == 0 else None)

    def undamaged(self, kind: str, command: str) -> Any:
        """What a command gives on the undamaged folder."""
        if (kind, command) not in self.expected:
            place = self.copy(kind)
            done = self.outcome(kind, command, place)
            self._need(done)
            self.expected[kind, command] = done.result
            shutil.rmtree(place)
        return self.expected[kind, command]


def called(act: Callable[[], Any]) -> Outcome:
    """Call the command line in this process and keep all that it says."""
    from lamina.training import source

    source._read_once.cache_clear()  # what a process reads once
    return Outcome(*record.called(act), None)


def read(command: str, kind: str, place: Path, done: Outcome) -> dict[str, Any]:
    """What a command's results are, in a form that compares; of a file that can't be read, the error."""
    if command == "generate":
        return {"text": done.said.strip().splitlines()[-1]}
    if command == "report":
        return {"page": (place / "report.html").read_text(encoding="utf-8").replace(place.name, "NAME")}
    if command == "probe":
        return {"table": table_of(Path(f"{place}-probed") / "gains.parquet")}
    found: dict[str, Any] = {}
    for run in sorted(place.glob("trials/*/")) if kind == STUDY else [place]:
        name = run.name if kind == STUDY else "run"
        found[f"{name}: weights"] = attempted(lambda run=run: (run / "model" / "model.safetensors").read_bytes())
        found[f"{name}: records"] = attempted(lambda run=run: records(run))
        found[f"{name}: layers"] = attempted(lambda run=run: layers(run).to_csv())
        found[f"{name}: result"] = attempted(lambda run=run: result_of(run))
        parts = sorted(run.glob("probes/*/part-*.parquet"))
        found[f"{name}: probes"] = [(part.parent.name, part.name, table_of(part)) for part in parts]
    if kind == STUDY:
        results = attempted(lambda: pd.read_csv(place / "results.csv").drop(columns=list(TIMING)).to_csv())
        found["results.csv"] = results
    return found


def attempted(reading: Callable[[], Any]) -> Any:
    try:
        return reading()
    except Exception as error:  # a damaged file of a run that has ended stays as it is, and was named
        return f"not readable: {type(error).__name__}"


def table_of(path: Path) -> str:
    return attempted(lambda: pd.read_parquet(path).to_csv())


def result_of(run: Path) -> dict[str, Any]:
    return {k: v for k, v in result(run).items() if k not in TIMING}


def judged(case: tuple[str, str], done: Outcome, expected: Any, names: Iterable[str], kept: Callable[[], bool]) -> Case:
    """How a case came out."""
    group, name = case
    named = any(word in done.said for word in names)
    last = done.said.strip()[-300:]
    if "\x1b" in done.said:
        return Case(group, name, WRONG, f"steers the terminal: {last!r}")
    if done.code is None or "Traceback" in done.said:
        return Case(group, name, TRACEBACK, last)
    if done.code != 0:
        lines = [line for line in done.said.splitlines() if line.startswith("lamina:")]
        if len(lines) != 1:
            return Case(group, name, WRONG, f"{len(lines)} lines: {last}")
        if not named:
            return Case(group, name, WRONG, f"does not name {', '.join(names)}: {last}")
        return Case(group, name) if kept() else Case(group, name, LOST, last)
    differing = [key for key in expected if done.result.get(key) != expected[key]]
    if any(key.endswith("weights") or key in ("text", "table") for key in differing) or (differing and not named):
        return Case(group, name, SILENT, f"{', '.join(differing)}: {last}")
    return Case(group, name, RIGHT)


def files_of(place: Path) -> list[Path]:
    """What may be damaged: every file of a cache; of a job's folder the checkpoints, the models and the records."""
    files = [path for path in sorted(place.rglob("*")) if path.is_file() and path.stat().st_size]
    names = ("study.yaml", "config.yaml", "result.json", "metrics.jsonl", "results.csv", "preflight.json", "seal.json")
    inside = {"checkpoints", "model", "layers", "probes", "items", "scores", "figures"}
    sealed = [p for p in files if inside & set(p.parts) or p.name in names or p.suffix == ".parquet"]
    return sealed or files


def state_of(place: Path) -> dict[str, int]:
    """Checkpoints and records by name and time: a refusal leaves them."""
    return {
        str(p.relative_to(place)): p.stat().st_mtime_ns
        for p in place.rglob("*")
        if p.is_file() and ("checkpoints" in p.parts or p.name.startswith(("metrics", "part-")))
    }


def damaged(bench: Bench, kind: str, command: str, harm: Callable[..., None], draw: random.Random) -> Case:
    """One file of a folder, one command."""
    expected = bench.undamaged(kind, command)
    place = bench.copy(kind)
    files = files_of(place)
    if command in ("generate", "probe"):
        files = [path for path in files if "model" in path.relative_to(place).parts]
    path = draw.choice(files)
    name = path.relative_to(place).as_posix()
    there = set(place.rglob("*"))
    harm(path, draw)
    made = [printable(other.name) for other in set(place.rglob("*")) - there]
    before = state_of(place)
    signal.alarm(LONGEST)
    done = bench.outcome(kind, command, place)
    signal.alarm(0)
    case = (kind, f"{command}, {name}, {harm.__name__}")
    # a file of a checkpoint may be named by its checkpoint; one of a trial by its trial
    words = [path.name, *made, *(part for part in Path(name).parts if part.startswith("checkpoint-"))]
    words += [trial.name for trial in place.glob("trials/*/")] if harm is exchange else []
    found = judged(case, done, expected, words, lambda: before.items() <= state_of(place).items())
    for left in (place, Path(f"{place}-probed")):
        shutil.rmtree(left, ignore_errors=True)
    return found


def damaged_cache(bench: Bench, harm: Callable[..., None], draw: random.Random) -> Case:
    """A file of the cache: it is made again, or its loss is said, and the tokens are the same."""
    from lamina.data.packed import prepare_blocks

    bench.number += 1
    root = bench.root / f"bench{bench.number:05d}"

    def prepare() -> tuple[Any, ...]:
        blocks, tokenizer = prepare_blocks(
            str(bench.corpus), "bpe:300", 16, eval_fraction=0.1, cache_dir=root, progress=False
        )
        stats = blocks.stats
        return blocks.train.array.tobytes(), blocks.eval.array.tobytes(), stats, tokenizer.encode("the norm sits")

    whole = prepare()
    path = draw.choice(files_of(root))
    name = path.relative_to(root).as_posix()
    harm(path, draw)
    given: list[Any] = []

    def act() -> int:
        given.append(prepare())
        return 0

    done = called(act)
    done = Outcome(done.code, done.said, {"tokens": given[0]} if given else None)
    found = judged(
        (CACHE, f"{re.sub('[0-9a-f]{32}', 'KEY', name)}, {harm.__name__}"), done, {"tokens": whole}, [], bool
    )
    shutil.rmtree(root, ignore_errors=True)
    return found


def damaged_corpus(bench: Bench, harm: Callable[..., None], draw: random.Random) -> Case:
    """The text of a killed run: the run goes on with the very same text or not at all."""
    name = draw.choice(["rows.jsonl", "rows.parquet", "words.txt.gz", "words.txt"])
    bench.folders[name] = bench.root / f"on-{name}"
    place = bench.copy(name)
    path = bench.texts / name
    whole = path.read_bytes()
    if ("corpus", name) not in bench.expected:
        done = bench._call(["pretrain", "--output", str(place), "--resume"])
        bench._need(done)
        bench.expected["corpus", name] = read("resume", KILLED, place, done)
        shutil.rmtree(place)
        place = bench.copy(name)
    try:
        harm(path, draw)
        before = state_of(place)
        done = bench._call(["pretrain", "--output", str(place), "--resume"])
        if done.code == 0:
            done = Outcome(0, done.said, read("resume", KILLED, place, done))
        expected = bench.expected["corpus", name]
        case = (CORPUS, f"{name}, {harm.__name__}")
        return judged(case, done, expected, ["corpus", name], lambda: before.items() <= state_of(place).items())
    finally:
        if path.is_dir():
            path.rmdir()
        elif path.is_fifo():  # to write into it would wait for a reader
            path.unlink()
        for other in bench.texts.iterdir():
            if other.name not in ("rows.jsonl", "rows.parquet", "words.txt.gz", "words.txt"):
                other.unlink()
        path.write_bytes(whole)
        shutil.rmtree(place, ignore_errors=True)


def damaged_config(bench: Bench, harm: Callable[..., None], draw: random.Random) -> Case:
    """A --config file that a killed run is resumed with: a setting that it changes is refused by its name."""
    import yaml

    expected = bench.undamaged(KILLED, "resume")
    place = bench.copy(KILLED)
    path = bench.root / f"config-{bench.number}.yaml"
    given = {**SMALL, **{k: v for k, v in OPTIONS.items() if k not in ("keep", "save_steps")}}
    path.write_text(yaml.safe_dump({name: value for name, value in given.items() if name != "threads"}))
    harm(path, draw)
    before = state_of(place)
    done = bench._call(["pretrain", "--output", str(place), "--config", str(path), "--resume"])
    if done.code == 0:
        done = Outcome(0, done.said, read("resume", KILLED, place, done))
    words = [path.name, *given]
    found = judged(
        (CONFIG, f"--config, {harm.__name__}"), done, expected, words, lambda: before.items() <= state_of(place).items()
    )
    shutil.rmtree(place, ignore_errors=True)
    for left in bench.root.glob("config-*.yaml"):
        left.rmdir() if left.is_dir() else left.unlink()
    return found


# How many of a hundred cases each command gets.
SHARES: tuple[tuple[int, str, str], ...] = (
    (30, KILLED, "resume"), (18, ENDED, "resume"), (12, ENDED, "generate"), (8, ENDED, "probe"),
    (8, STUDY, "resume"), (14, CACHE, ""), (6, CORPUS, ""), (4, CONFIG, ""),
    (8, STUDY, "report"), (6, ENDED, "report"), (8, PREFLIGHT, "report"), (6, PROBED, "report"),
    (6, EVALUATED, "report"),
)  # fmt: skip


def suite(count: int, seed: int, only: Iterable[str] = ()) -> Iterator[Case]:
    """Damage ``count`` files, drawn by ``seed``; ``only``: of these kinds."""
    draw = random.Random(seed)
    shares = [share for share in SHARES if not only or share[1] in only]
    plan = [(kind, command) for many, kind, command in shares for _ in range(many)]
    draw.shuffle(plan)
    others = {CACHE: damaged_cache, CORPUS: damaged_corpus, CONFIG: damaged_config}

    def late(*_: object) -> None:
        raise TimeoutError(f"not done after {LONGEST} seconds")

    signal.signal(signal.SIGALRM, late)
    with tempfile.TemporaryDirectory() as root, record.environment_as_before():
        bench = Bench(Path(root))
        for number in range(count):
            kind, command = plan[number % len(plan)]
            harm = HARMS[number % len(HARMS)]
            yield others[kind](bench, harm, draw) if kind in others else damaged(bench, kind, command, harm, draw)


if __name__ == "__main__":
    sys.exit(main("damaged_files", suite, 240))
