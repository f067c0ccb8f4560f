"""Every code block of README and docs does what it says.

Commands are read, their settings checked, and stopped where the work would begin; Python is run, page by page, with
studies and models of a size that takes seconds. Slow tests run the tutorials' commands to the end. What cannot run is
below, each with its reason.
"""

import contextlib
import os
import re
import tomllib

import pytest
import torch
import yaml
from documented import BLOCKS, PAGES, ROOT, blocks, commands, words_of
from transformers import GPTNeoXConfig, LlamaConfig

import lamina
import lamina.api
from lamina.cli import main
from lamina.jobs.job import Job

COVERED = {  # pages whose Python is run by the test of their own
    "README.md": "tests/test_readme.py",
    "own-placement.md": "tests/placements/test_own_placement_docs.py",
    "own-probe.md": "tests/probes/test_probes_docs.py",
    "probes.md": "tests/probes/test_probes_docs.py",
    "serving.md": "tests/modeling/test_serving_docs.py",
    "wire.md": "tests/modeling/test_wire_docs.py",
}
NOT_RUN = {  # the beginning of a command or of a Python block: why it is only read
    "lm_eval ": "the harness's own command: tests/evaluation compares with the harness in process",
    "make demo": "trains for minutes",
    "make docs": "tests/test_site.py builds the site",
    "make test": "runs this test",
    "pip install": "changes the environment; the extras are compared with pyproject.toml",
    "python tests/reliability/command_lines.py": "takes minutes; tests/reliability has its own tests",
    "ray up": "needs a cluster",
    "vllm serve": "vLLM is not among what CI installs: a test does by hand what its sources do",
    "tensorboard --logdir": "a server; tests/training/test_run_folder.py reads what it shows",
    "trackio show": "a server",
    "sbatch ": "needs Slurm: tests/training/test_distributed.py runs the script without it",
    "from transformers import AutoModelForCausalLM\nfrom transformers.distributed": (
        "needs two processes under torchrun: tests/modeling has tensor parallelism"
    ),
}
OUTSIDE = ("hf:", "HuggingFaceTB/")
TINY = {"num_layers": 2, "hidden_size": 16, "num_heads": 2, "steps": 2, "sequence_length": 16, "batch_size": 2}
TINY |= {"eval_blocks": 4, "corpus": "words.txt", "tokenizer": "bytes"}
SETUP = {
    "convert.md": """
import lamina, shutil, torch
from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM
lamina.build(tiny, "keel").save_pretrained("runs/keel-64/model")
LlamaForCausalLM(tiny).save_pretrained("models/smollm2")
""",
    "watch.md": """
import torch
from transformers import LlamaForCausalLM, TrainingArguments
model = LlamaForCausalLM(tiny)
data = [{"input_ids": row, "labels": row} for row in torch.randint(0, 61, (8, 8))]
args = TrainingArguments("trainer", max_steps=2, per_device_train_batch_size=4, report_to="none")
batches = [{"input_ids": rows, "labels": rows} for rows in torch.randint(0, 61, (3, 4, 8))]
optimizer = torch.optim.AdamW(model.parameters())
""",
    "studies.md": "from lamina.studies.judging import *\n",
}
SLOW = {"first-study.md", "own-text.md", "trainer-and-trl.md"}


COMMANDS = sorted(set(commands()))


def begun(command):
    """The words that begin a documented command's work; None if it is not Lamina's."""
    words = words_of(command)
    return words and [word for word in words if word not in ("...", "--resume", "--resume=auto", "--dry-run")]


class Reached(BaseException):
    """The work would begin now."""


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """A folder with the files that the pages name."""
    for name in ("recipes", "docs", "examples", "tests"):
        (tmp_path / name).symlink_to(ROOT / name)
    texts = tmp_path / "my_texts"
    texts.mkdir()
    for name in ("qwen-small", "neox-small"):
        (tmp_path / name).mkdir()
    words = "The norm sits before, after and between.\n" * 400
    for name in ("words.txt", "my_text.txt", "my_texts/a.txt"):
        (tmp_path / name).write_text(words, encoding="utf-8")
    for page, code in (*blocks("yaml"), *blocks("python")):
        if page == "own-placement.md":
            (tmp_path / f"mine.{'yaml' if code.startswith('placement') else 'py'}").write_text(code, encoding="utf-8")
        if page == "own-probe.md":
            (tmp_path / "small_values.py").write_text(code, encoding="utf-8")
    monkeypatch.chdir(tmp_path)
    return tmp_path


def test_every_block_says_its_language():
    languages = {(page, language) for page, found in BLOCKS.items() for language, _ in found}
    assert {language for _, language in languages} <= {"bash", "python", "py", "yaml", "text"}
    assert {page for page, language in languages if language == "py"} <= {"wire.md"}  # sketches, and said to be


def test_the_list_of_what_is_not_run_is_of_blocks_that_are_there():
    for start in NOT_RUN:
        assert any(line.startswith(start) for _, line in (*COMMANDS, *blocks("python"))), start
    for page, test in COVERED.items():
        assert page.removesuffix(".md") in (ROOT / test).read_text("utf-8")


def test_the_extras_and_make_targets_of_the_pages_exist():
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))["project"]["optional-dependencies"]
    makefile = (ROOT / "Makefile").read_text("utf-8")
    for page, text in PAGES.items():
        assert set(re.findall(r"lamina\[(\w+)\]", text)) <= set(extras), page
        assert all(f"\n{name}:" in makefile for name in re.findall(r"`make ([\w-]+)", text)), page
        assert all(f"\n{name}:" in makefile for name in re.findall(r"^make ([\w-]+)", text, re.MULTILINE)), page


@pytest.mark.parametrize(("page", "command"), COMMANDS, ids=[f"{page}: {command[:60]}" for page, command in COMMANDS])
def test_a_command_is_one(folder, monkeypatch, capsys, page, command):
    argv = begun(command)
    if argv is None:
        assert command.startswith(tuple(NOT_RUN)), "a command of another program, and no reason why it is not run"
        return
    monkeypatch.setattr(Job, "__init__", reached)
    for work in ("lamina.studies.engine.run.work", "lamina.preflights.job.run_preflight"):
        monkeypatch.setattr(work, reached)
    with contextlib.suppress(Reached):
        code = main(argv)
        error = capsys.readouterr().err
        # a model, run or data that the page takes for granted
        parts = [part for word in argv[1:] for part in re.split("[,:]", word) if "/" in part or "." in part]
        missing = any(part in error for part in parts) and "unknown" not in error
        assert code == 0 or missing, error


def reached(*args, **kwargs):
    raise Reached


@contextlib.contextmanager
def tiny_jobs(monkeypatch):
    """lamina.compare and its like with studies that take seconds, whatever the page asks for."""
    for name in ("compare", "pretrain", "max_lr"):
        job = getattr(lamina.api, name)
        size = TINY | ({} if name == "pretrain" else {"workers": 1})

        def small(job=job, size=size, **settings):
            rates = {"learning_rates": settings["learning_rates"][:1]} if "learning_rates" in settings else {}
            seeds = {"seeds": settings["seeds"][:1]} if "seeds" in settings else {}
            return job(**{**settings, **size, **rates, **seeds, "bar": False})

        monkeypatch.setattr(lamina, name, small)
    yield


PYTHON = sorted({page for page, _ in blocks("python") if page not in COVERED})


@pytest.mark.parametrize(
    "page", [pytest.param(page, marks=[pytest.mark.slow] if page in SLOW else []) for page in PYTHON]
)
def test_the_python_of_a_page_runs(folder, monkeypatch, page):
    sizes = {"hidden_size": 16, "intermediate_size": 24, "num_attention_heads": 2, "num_hidden_layers": 2}
    names = {"tiny": LlamaConfig(vocab_size=61, **sizes), "__name__": "__main__"}
    if page == "trainer-and-trl.md":
        pytest.importorskip("trl")
        base = {**TINY, "sequence_length": 64, "output": "runs/base"}
        lamina.api.pretrain(**base, bar=False)
    torch.manual_seed(0)
    exec(SETUP.get(page, ""), names)
    with tiny_jobs(monkeypatch):
        for name, code in blocks("python"):
            if name == page and not code.startswith(tuple(NOT_RUN)):
                exec(compile(code, page, "exec"), names)


@pytest.mark.parametrize("code", [code for page, code in blocks("yaml") if page != "own-placement.md"])
def test_a_yaml_block_is_read(code):
    read = yaml.safe_load(code)
    assert isinstance(read, dict)
    assert set(read) <= {"study", "title", "scales", "axes", "then", "figures"}


RUN = ("README.md", "first-study.md", "own-text.md", "own-backbone.md", "pretrain-100m.md", "compare.md")
TRAINING = ("compare", "pretrain")
SMALL = {
    "generate": "--max-new-tokens 2",
    "eval": "--limit 2",
    "probe": "--sequences 2",
    "preflight": "--corpus words.txt --tokenizer bytes --hidden-size 16 --num-heads 2 --num-layers 2 --steps 20 "
    "--sequence-length 16 --batch-size 2",
}


@pytest.mark.slow
@pytest.mark.parametrize("page", RUN)
def test_the_commands_of_a_tutorial_run_to_the_end(folder, capsys, page):
    if page == "own-backbone.md":
        config = {"vocab_size": 256, "hidden_size": 16, "intermediate_size": 24, "num_attention_heads": 2}
        LlamaConfig(**config, num_hidden_layers=2).save_pretrained("qwen-small")
        names = {"attention": "attention", "norm": "final_layer_norm"}
        neox = GPTNeoXConfig(**config, num_hidden_layers=2, lamina_adapter=names)
        neox.save_pretrained("neox-small")
    for name, command in commands():
        argv = begun(command)
        if name != page or argv is None:
            continue
        if argv[0] in TRAINING:
            argv += [word for key, value in TINY.items() for word in (f"--{key.replace('_', '-')}", str(value))]
            argv += ["--workers", "1"] if argv[0] == "compare" else []
            argv += ["--output", f"out-{len(os.listdir())}"] if "--output" not in argv else []
            argv += ["--sequence-length", "256"] if page == "pretrain-100m.md" else []  # its questions fit in
        elif argv[0] in SMALL:
            argv += SMALL[argv[0]].split()
        assert main(argv) in (0, 1), (command, capsys.readouterr().err)
