"""Every documented command line and Python block runs as it stands.

Those of a page, or of a command's help, run one after another in one folder, in which ``documented_scenes`` has put
tiny data and models at the paths that they name. Settings are parsed and checked as printed; only then ``shorten``
lowers the number of steps. What cannot run is in ``NOT_RUN``, with the reason.
"""

import io
import re
import shutil
import sys
from pathlib import Path

import pytest
from documented import typed, words_of
from documented_scenes import after_pretraining, lay, loop, shorten
from spread import spread

from lamina.catalog import JOBS
from lamina.cli import main
from lamina.placements import registry as placements
from lamina.placements.wirings import WIRINGS
from lamina.probes.engine import registry as probes

TYPED = {page: parts for page, parts in typed().items() if parts}
FULL = {"posttraining.md", *(f"lamina {job} --help" for job in ("sft", "reward", "rlhf", "dpo"))}  # epochs, not steps
FAST = {"posttraining.md", "edit-layers.md", "loss-spiked.md", "watch.md"}
FAST |= {f"lamina {job} --help" for job in ("convert", "generate", "reward")}
PYTHON_ELSEWHERE = {  # pages whose Python is run by the test of their own
    "README.md": "tests/test_readme.py",
    "inspect.md": "tests/probes/test_probes_docs.py",
    "evaluate.md": "tests/modeling/test_serving.py",
    "use.md": "tests/modeling/test_wiring.py",
}
NOT_RUN = {  # the beginning of a line or of a Python block: why it is not run here
    "pip install": "changes the environment; the extras are compared with pyproject.toml",
    "make demo": "makes a virtual environment; its only line is lamina compare's",
    "make test": "these tests",
    "make bench-gpu": "needs a GPU",
    "lamina convert olmo/step1000": "needs OLMo-core's checkpoint: tests/ports/test_trainers.py saves them",
    "lamina convert runs/keel-64 models/keel-mlx": "the same file converts to it and loads it",
    "torchrun": "several processes: tests/training/test_distributed.py",
    "accelerate launch": "several processes: tests/training/test_distributed.py",
    "sbatch ": "needs Slurm: tests/training/test_distributed.py runs the script without it",
    "ray up": "needs a cluster",
    "kubectl logs": "needs a cluster: tests/reports/test_history_forms.py pipes a log",
    "python -m sglang": "SGLang is not installed in CI: tests/modeling/test_engines.py has its rules",
    "vllm serve": "vLLM is not among what CI installs: a test does by hand what its sources do",
    "lm_eval ": "the harness's own command: tests/evaluation compares with the harness in process",
    "tensorboard --logdir": "a server; tests/training/test_run_folder.py reads what it shows",
    "lamina study run mix-ppl\n": "half an hour; tests/lab/papers runs smaller ones to the end",
    "lamina study run mix-ppl,keel-lr": "hours; tests/lab/papers runs smaller ones to the end",
    "lamina study run all": "days",
    "lamina report runs/studies/mix-ppl-cpu": "needs that study; tests/lab/papers writes the figures of smaller ones",
    "lamina report runs/compare --screenshot": "needs Chromium",
    "lamina eval models/smollm2 --tasks arc_easy": "needs the hub",
    "lamina eval --compare": "needs two evaluations of the same items: tests/evaluation/test_paired.py compares some",
    "lamina study worker mix-ppl --scale gpu": "hours on a GPU: tests/lab/papers has two workers",
    "lamina study run mix-ppl --scale gpu --engine ray": "needs a Ray cluster with GPUs",
    "from lamina.placements import Layer": "a file: tests/placements/test_own_placement_docs.py",
    "import torch\nfrom lamina.modeling import LaminaNorm": "the same file",
    "from dataclasses import replace\n\nfrom lamina.placements.plan": "the same file",
    "import pandas as pd\n\nfrom lamina.probes": "a file: tests/probes/test_probes_docs.py",
}


@pytest.fixture(autouse=True)
def registries_as_before():
    with placements.PLACEMENTS.isolated(), WIRINGS.isolated(), probes.REGISTRY.isolated():
        yield


@pytest.mark.parametrize("page", spread(TYPED, FAST))
def test_what_a_page_says_to_type_runs_as_it_stands(tmp_path, monkeypatch, capsys, page):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "stdin", io.StringIO("Hello\n"))
    if page.endswith("--help"):  # most of the time; the pages' own lines write theirs
        monkeypatch.setattr("lamina.api.job_functions.write_page", lambda folder: None)
    parts = [(language, said) for language, said in TYPED[page] if not f"{said}\n".startswith(tuple(NOT_RUN))]
    if page in FULL:
        pytest.importorskip("trl")
        pytest.importorskip("peft")
        after_pretraining(parts)
    else:
        lay([part for part in parts if part[0] == "bash" or page not in PYTHON_ELSEWHERE])
        shorten(monkeypatch)
    names = loop() if page == "watch.md" else {"__name__": "__main__"}
    for language, said in parts:
        if language == "python" and page not in PYTHON_ELSEWHERE:
            exec(compile(said, page, "exec"), names)
        elif language == "bash":
            argv = words_of(said)
            assert argv is not None, f"{said}: another program's, and no reason why it is not run"
            before = folders()
            assert main(argv) == 0, f"{said}: {capsys.readouterr().err[-2000:]}"
            if page.endswith("--help") and "--output " not in said:  # the next example is for another day
                for path in folders() - before:
                    shutil.rmtree(path, ignore_errors=True)


def folders():
    return {path for pattern in ("*", "*/*") for path in Path().glob(pattern) if path.is_dir()}


def test_what_is_not_run_is_written_somewhere():
    said = [each for parts in TYPED.values() for _, each in parts]
    for start in NOT_RUN:
        assert any(f"{each}\n".startswith(start) for each in said), start
    for page, test in PYTHON_ELSEWHERE.items():
        assert page.removesuffix(".md") in (Path(__file__).parent.parent / test).read_text("utf-8")


def test_no_two_lines_of_a_page_start_jobs_in_the_same_folder():
    """The second line would stop, because the first one's job is there."""
    again = re.compile(r"--(resume|overwrite|list|compare|dry-run)\b")
    folders = {name: str(row.folder_of({})) for name, row in JOBS.items() if name not in ("preflight", "study")}
    twice = []
    for page, parts in TYPED.items():
        seen = set()
        for said in (said for language, said in parts if language == "bash" and not again.search(said)):
            words = (words_of(said) if "lamina " in said else None) or [""]
            if words[0] not in folders or words[-1] == "...":
                continue
            folder = words[words.index("--output") + 1] if "--output" in words else folders[words[0]]
            twice += [f"{page}: {said}"] * (folder in seen)
            seen.add(folder)
    assert twice == []
