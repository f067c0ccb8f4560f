"""Runs small enough for tests: a corpus of a few kilobytes, a model of two layers, and what reads their folders."""

import json
import os
import random
import shutil
import signal
import socket
import subprocess
import sys
import time
from contextlib import contextmanager
from pathlib import Path

import pandas as pd
import pytest
import torch
from safetensors.torch import load_file
from transformers import LlamaConfig

from lamina.training.settings import PretrainSettings
from lamina.training.trainer import LaminaTrainer

SMALL = {"num_layers": 2, "hidden_size": 16, "num_heads": 2, "steps": 4, "sequence_length": 16, "batch_size": 2}
SMALL |= {"eval_blocks": 4, "threads": 1}
WORDS = "the norm sits before after and between every layer of a deep model whose stream carries what it adds"
TIMING = ("tokens_per_second", "seconds")


def llama_of(width: int, **changed) -> LlamaConfig:
    """Two layers whose heads, of 8 channels, and feed-forwards grow with the width."""
    sizes = {"intermediate_size": 2 * width, "num_attention_heads": width // 8, "num_key_value_heads": width // 8}
    return LlamaConfig(**{"vocab_size": 61, "hidden_size": width, "num_hidden_layers": 2, **sizes, **changed})


def write_corpus(path: Path) -> Path:
    """About 40 kB of lines made of few words, always the same ones."""
    draw = random.Random(7)
    words = WORDS.split()
    path.write_text("\n".join(" ".join(draw.choices(words, k=12)) for _ in range(600)) + "\n", encoding="utf-8")
    return path


@pytest.fixture(scope="session")
def corpus(tmp_path_factory):
    return write_corpus(tmp_path_factory.mktemp("corpus") / "words.txt")


@pytest.fixture(scope="session")
def session_cache(tmp_path_factory):
    return tmp_path_factory.mktemp("lamina-cache")


@pytest.fixture(autouse=True)
def shared_cache(session_cache, monkeypatch):
    """The blocks are packed once for all the tests of a folder, and by the server that forks a study's trials."""
    monkeypatch.setenv("LAMINA_CACHE", str(session_cache))


@contextmanager
def at_each_pass(act):
    """Call ``act(trainer, model, inputs)`` right before each forward pass of a step."""
    original = LaminaTrainer.training_step

    def training_step(self, model, inputs, *args, **kwargs):
        act(self, model, inputs)
        return original(self, model, inputs, *args, **kwargs)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(LaminaTrainer, "training_step", training_step)
        yield


@contextmanager
def at_step(step: int, act):
    """Call ``act(trainer, model)`` right before the first forward pass of a step (counted from 1)."""
    done = []

    def once(trainer, model, inputs):
        if trainer.state.global_step + 1 == step and trainer not in done:
            done.append(trainer)
            act(trainer, model)

    with at_each_pass(once):
        yield


def pull_the_plug(trainer, model):
    raise RuntimeError("pulled the plug")


@contextmanager
def cut_at(step: int):
    """The run inside ends in this step by an error."""
    with at_step(step, pull_the_plug), pytest.raises(RuntimeError, match="plug"):
        yield


def cut_back(folder: Path, step: int) -> None:
    """Leave a run that has ended as one that was killed after the checkpoint of this step."""
    (folder / "result.json").unlink()
    for path in (folder / "checkpoints").iterdir():
        if int(path.name.split("-")[1]) > step:
            shutil.rmtree(path)


def settings(corpus: Path, output: Path, **changed) -> PretrainSettings:
    return PretrainSettings(corpus=str(corpus), output=str(output), **{**SMALL, **changed})


def flags(**given) -> list[str]:
    """``num_layers=2`` as ``--num-layers 2``; True as a bare flag."""
    argv = []
    for name, value in given.items():
        argv += [f"--{name.replace('_', '-')}"] + ([] if value is True else [str(value)])
    return argv


def start(*argv: str, **options) -> subprocess.Popen:
    """``lamina ARGV`` in a process of its own."""
    usual = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    usual |= {"env": {**os.environ, "PYTHONUNBUFFERED": "1"}}
    return subprocess.Popen([sys.executable, "-m", "lamina", *argv], **{**usual, **options})


def free_port() -> int:
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        return found.getsockname()[1]


def torchrun(*argv, processes=2, timeout=600) -> subprocess.CompletedProcess:
    """``torchrun ARGV`` to its end."""
    command = [sys.executable, "-m", "torch.distributed.run", "--nproc_per_node", str(processes)]
    command += ["--master_port", str(free_port()), *map(str, argv)]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": os.pathsep.join(sys.path)}
    return subprocess.run(command, env=environment, capture_output=True, text=True, timeout=timeout)


def in_a_child(work) -> None:
    """Do work in a child process that is killed on the way."""
    if (child := os.fork()) == 0:
        try:
            work()
        finally:
            os._exit(1)
    assert os.WTERMSIG(os.waitpid(child, 0)[1]) == signal.SIGKILL


def wait_for(condition, seconds: float = 60.0):
    """The first true value of ``condition()``."""
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        if found := condition():
            return found
        time.sleep(0.02)
    raise AssertionError(f"did not happen within {seconds:g} s")


def alive(pid: int) -> bool:
    """Whether a process runs (a zombie does not)."""
    try:
        return Path(f"/proc/{pid}/stat").read_text(encoding="utf-8").rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


def records(folder: Path) -> list[dict]:
    """metrics.jsonl without what a clock measured."""
    lines = (folder / "metrics.jsonl").read_text(encoding="utf-8").splitlines()
    return [{k: v for k, v in json.loads(line).items() if k not in TIMING} for line in lines]


def last_step(folder: Path) -> int:
    try:
        return max((r["step"] for r in records(folder)), default=0)
    except (OSError, ValueError):
        return 0


def result(folder: Path) -> dict:
    """result.json without its seal."""
    found = json.loads((folder / "result.json").read_text(encoding="utf-8"))
    return {name: value for name, value in found.items() if name != "seal"}


def assert_same_weights(a: Path, b: Path) -> None:
    """Bit for bit."""
    one, other = (load_file(folder / "model" / "model.safetensors") for folder in (a, b))
    assert one.keys() == other.keys()
    assert all(torch.equal(one[name], other[name]) for name in one)


def assert_same_records(a: Path, b: Path) -> None:
    assert records(a) == records(b)
    pd.testing.assert_frame_equal(layers(a), layers(b))


def assert_same_run(a: Path, b: Path) -> None:
    """The end of one run is that of the other, bit for bit."""
    assert result(a)["eval_loss"] == result(b)["eval_loss"]
    assert result(a)["status"] == result(b)["status"]
    assert_same_weights(a, b)


def layers(folder: Path) -> pd.DataFrame:
    """Every row of layers/, sorted, so that runs written in different parts compare."""
    keys = ["step", "layer", "sublayer", "role", "index", "metric"]
    table = pd.concat([pd.read_parquet(part) for part in sorted((folder / "layers").glob("part-*.parquet"))])
    return table.sort_values(keys).reset_index(drop=True)


def values(table: pd.DataFrame, metric: str, step: int) -> dict[tuple[int, str, str], float]:
    """(layer, sublayer, role) -> value of a metric at a step."""
    found = table[(table.metric == metric) & (table.step == step)]
    return {(r.layer, r.sublayer, r.role): r.value for r in found.itertuples()}
