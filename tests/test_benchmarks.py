"""The benchmarks run where little is installed, leave out what isn't there, and compare models of the same size."""

import importlib.util
import json
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
# None of these may be needed by the GPU benchmark; trl, plotly and the others are asked for by name.
BLOCKED = ("datasets", "trl", "plotly", "litgpt", "x_transformers", "liger_kernel", "zstandard")
WITHOUT = f"""
import importlib.util, runpy, sys
blocked = {BLOCKED}
class Blocker:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in blocked:
            raise ModuleNotFoundError(f"No module named {{name!r}}", name=name)
sys.meta_path.insert(0, Blocker())
find_spec = importlib.util.find_spec  # transformers and accelerate ask it what is installed
importlib.util.find_spec = lambda name, *more: None if name.partition(".")[0] in blocked else find_spec(name, *more)
script, *sys.argv[1:] = sys.argv[1:]
sys.argv[0] = script
runpy.run_path(script, run_name="__main__")
"""
SMOKE = {"size": "smoke", "batch_size": 2, "sequence_length": 16, "threads": 1}


@pytest.fixture(scope="module")
def common():
    sys.path.insert(0, str(ROOT / "benchmarks"))
    yield importlib.import_module("common")
    sys.path.remove(str(ROOT / "benchmarks"))


def answers(**task):
    """What a worker says that trains two turns, without the blocked packages."""
    command = [sys.executable, "-c", WITHOUT, str(ROOT / "benchmarks" / "worker.py"), json.dumps({**SMOKE, **task})]
    turns = '{"steps": 2}\n{"steps": 1}\n{"steps": 0}\n'
    done = subprocess.run(command, input=turns, capture_output=True, text=True, cwd=ROOT, check=False)
    assert done.returncode == 0, done.stderr
    return [json.loads(line[1:]) for line in done.stdout.splitlines() if line.startswith("@")]


@pytest.mark.parametrize("name", ["lamina:keel", pytest.param("transformers", marks=pytest.mark.slow)])
def test_a_worker_needs_torch_transformers_and_accelerate_alone(name):
    ready, first, second, last = answers(name=name, precision="fp32", compile="off")
    assert ready["first_step"] > 0
    # 2 layers of 4 d^2 + 3 d inner, embedding and readout; norms: 2 a layer and the last one, in Keel 4 and none.
    gains = {"lamina:keel": 2 * 4 * 16 - 16, "transformers": 2 * 2 * 16 + 16}[name]
    assert ready["parameters"] == 2 * (4 * 16 * 16 + 3 * 16 * 48) + 2 * 64 * 16 + gains
    assert first["seconds"] > 0
    assert second["seconds"] > 0
    assert last["peak_memory_mib"] > 100


def test_an_absent_peer_says_so():
    (only,) = answers(name="litgpt", precision="fp32", compile="off")
    assert only["absent"].startswith("not installed: No module named 'litgpt'")


@pytest.mark.slow
def test_the_plain_loop_trains_the_same_model():
    ready, *_ = answers(name="nanogpt-style", precision="fp32", compile="off")
    assert ready["parameters"] == 2 * (4 * 16 * 16 + 3 * 16 * 48) + 2 * 64 * 16 + 5 * 16


def test_flops_are_counted_by_the_formula(common):
    """6 P + 12 N d T a token, P without the embedding."""
    weights = 2 * (4 * 16 * 16 + 3 * 16 * 48) + 64 * 16
    assert common.flops_per_token("smoke", 10) == 6 * weights + 12 * 2 * 16 * 10


@pytest.mark.slow  # four processes
def test_a_comparison_ends_in_ratios_and_a_table(tmp_path):
    """Two contenders, alternating; the record, and the page's table made of it."""
    command = [sys.executable, str(ROOT / "benchmarks" / "training.py"), "--suite", "placements", "--sizes", "smoke"]
    command += ["--placements", "keel", "--rounds", "2", "--threads", "1", "--output", str(tmp_path / "record.json")]
    environment = {"PATH": "/usr/bin:/bin", "HOME": str(tmp_path), "TORCH_COMPILE_DISABLE": "1"}
    subprocess.run(command, check=True, capture_output=True, cwd=ROOT, env=environment)
    record = json.loads((tmp_path / "record.json").read_text())
    first, second = record["parts"][0]["results"]
    assert (first["name"], second["name"], first["speed_ratio"]) == ("lamina:pre_ln", "lamina:keel", 1.0)
    rate = 2 * 16 / first["step_seconds"]
    assert first["tokens_per_second"] == pytest.approx(rate, rel=0.01)
    own = record["products_gflops_per_second"][first["precision"]]
    # The products' rates are rounded, and those of the turns after a contender's end are in the record alone.
    assert first["utilisation_of_own"] == pytest.approx(first["gflops_per_second"] / own, rel=0.5, abs=2e-3)
