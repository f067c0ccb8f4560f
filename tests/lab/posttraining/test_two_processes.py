"""Every job after pretraining in two processes, DDP and FSDP2 on gloo, takes the steps of one."""

import json
import subprocess
from pathlib import Path

import pandas as pd
import pytest
import torch
from lab.posttraining.tiny import answers, common, same_weights, uneven, write_foreign, write_reward, write_rows
from lab.posttraining.two_stages import JOBS
from safetensors.torch import load_file
from training.test_distributed import DOCS, free_port, scripts, torchrun
from training.tiny_runs import SMALL, flags, layers, records

from lamina.training.pretrain import pretrain

pytestmark = pytest.mark.slow
FSDP2, LORA = {"parallel": "fsdp2"}, {"lora_rank": 2, "best_by": "loss"}
# By name: the job, its settings, what only the run of two processes is given, and whether one process takes its steps
# (answers are sampled from each process's own random numbers, so policies are compared with those of DDP).
RUNS = {
    "reward": ("reward", {}, {}, "one"),
    "dpo": ("dpo", {}, {}, "one"),
    "sft-fsdp2": ("sft", {"gradient_accumulation": 2, "eval_corpus": ...}, FSDP2, "one"),
    "sft-lora-fsdp2": ("sft", LORA, FSDP2, "one"),
    "sft-best-fsdp2": ("sft", {"best_by": "loss", "learning_rate": 0.3}, FSDP2, "one"),
    "sft-foreign-fsdp2": ("sft", {"from_model": ...}, FSDP2, "one"),
    "sft-bf16-fsdp2": ("sft", {"weights": "bf16"}, FSDP2, "one"),
    "reward-fsdp2": ("reward", {}, FSDP2, "one"),
    "dpo-fsdp2": ("dpo", {}, FSDP2, "one"),
    "dpo-lora-fsdp2": ("dpo", {"lora_rank": 2, "gradient_checkpointing": True}, FSDP2, "one"),
    "remax": ("rlhf", {"max_answer": 6}, {}, None),
    "remax-fsdp2": ("rlhf", {"max_answer": 6}, FSDP2, "remax"),
    "grpo": ("rlhf", {"max_answer": 6, "algorithm": "grpo"}, {}, None),
    "grpo-fsdp2": ("rlhf", {"max_answer": 6, "algorithm": "grpo"}, FSDP2, "grpo"),
}


@pytest.fixture(scope="module")
def runs(base, pairs, tmp_path_factory):
    """The folder of all runs, by their names, and what the two processes said of each."""
    folder = tmp_path_factory.mktemp("two")
    seven = write_rows(folder / "held_out.jsonl", uneven())
    rows = write_rows(folder / "rows.jsonl", answers(24))
    other = write_rows(folder / "other.jsonl", [{"text": "what it may forget " * 80}])
    rewards = write_reward(folder, "answer.count('a') - len(answer) / 9")
    filled = {"eval_corpus": str(other), "from_model": str(write_foreign(folder / "arcee", "arcee"))}

    def given(name, output):
        job, own, _, _ = RUNS[name]
        data = {"sft": rows, "rlhf": pairs}.get(job, pairs)
        shared = {"eval_steps": 2, "learning_rate": 1e-2, "precision": "fp32", "threads": 1}
        if job != "sft":
            shared["eval_data"] = str(seven)
        if job == "rlhf":
            shared["reward_function"] = rewards
        own = {key: filled[key] if value is ... else value for key, value in own.items()}
        return {**common(base, data, folder / output), **shared, **own}

    plan = []
    for name, (job, _, two, alike) in RUNS.items():
        if alike == "one":
            JOBS[job](given(name, f"{name}-one"), bar=False)
        plan.append((job, {**given(name, name), **two}, False))
    sft = given("sft-fsdp2", "paused")
    plan += [("sft", {**sft, **FSDP2, "pause_step": 2}, False), ("sft", {**sft, **FSDP2}, True)]
    (folder / "plan.json").write_text(json.dumps(plan))
    done = torchrun(Path(__file__).with_name("two_stages.py"), folder / "plan.json", timeout=600)
    assert done.returncode == 0, done.stderr[-4000:]
    return folder, json.loads((folder / "plan.said").read_text())


@pytest.mark.parametrize("name", [name for name, (*_, alike) in RUNS.items() if alike])
def test_two_processes_take_the_same_steps(name, runs):
    folder, said = runs
    alike = RUNS[name][3]
    assert said[list(RUNS).index(name)] == "finished"
    ours, theirs = (records(folder / run) for run in (name, f"{name}-one" if alike == "one" else alike))
    assert len(ours) == len(theirs)
    coarse = "bf16" in name  # gradients are summed in bfloat16
    for one, two in zip(ours, theirs, strict=True):
        assert one.keys() == two.keys()
        measured = [key for key in one if key == "loss" or key == "grad_norm" or key.startswith("eval_")]
        close = {"rel": 3e-2, "abs": 1e-2} if coarse else {"rel": 1e-3, "abs": 1e-4}
        assert [one[key] for key in measured] == pytest.approx([two[key] for key in measured], **close)
    columns = ["step", "layer", "sublayer", "role", "index", "metric"]
    ours, theirs = (layers(folder / run) for run in (name, f"{name}-one" if alike == "one" else alike))
    pd.testing.assert_frame_equal(ours[columns], theirs[columns])


@pytest.mark.parametrize("name", ["sft-fsdp2", "sft-lora-fsdp2", "sft-best-fsdp2", "reward-fsdp2", "remax-fsdp2"])
def test_the_model_is_written_whole(name, runs):
    folder, _ = runs
    other = f"{name}-one" if RUNS[name][3] == "one" else RUNS[name][3]
    ours, theirs = (load_file(folder / run / "model" / "model.safetensors") for run in (name, other))
    assert ours.keys() == theirs.keys()
    for key, tensor in ours.items():
        assert torch.allclose(tensor, theirs[key], atol=1e-3)


def test_a_paused_run_takes_the_steps_of_one_never_stopped(runs):
    folder, said = runs
    assert said[-2:] == ["interrupted", "finished"]
    ours, theirs = (records(folder / run) for run in ("paused", "sft-fsdp2"))
    assert [one.get("loss") for one in ours] == [two.get("loss") for two in theirs]
    assert same_weights(folder / "paused", folder / "sft-fsdp2")


@pytest.mark.parametrize("job", ["pretrain", "sft"])
def test_accelerate_launch_divides_the_batches_writes_each_record_once_and_resumes(job, base, tmp_path):
    usual = {"steps": 4, "batch_size": 2, "learning_rate": 1e-2, "logging_steps": 1, "eval_steps": 2, "device": "cpu"}
    if job == "pretrain":
        (tmp_path / "text.txt").write_text("where the norm of a layer sits " * 60)
        usual = {**SMALL, "corpus": tmp_path / "text.txt", "placement": "keel", **usual}
    else:
        usual = {"from": base, "data": write_rows(tmp_path / "rows.jsonl", answers(24)), **usual}

    environment = scripts(tmp_path / "bin")

    def launch(*words, ends=0):
        command = ["accelerate", "launch", "--config_file", DOCS / "accelerate" / "ddp.yaml", "--no_python"]
        command += ["--main_process_port", str(free_port()), "lamina", job, *words]
        done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=240)
        assert done.returncode == ends, done.stderr[-3000:]
        return done.stdout

    assert launch(*flags(**usual, output=tmp_path / "whole")).count("the model:") == 1
    launch(*flags(**usual, output=tmp_path / "part", pause_step=2), ends=1)  # the launcher's, of Lamina's 130
    launch("--resume", *flags(output=tmp_path / "part", pause_step="null"))
    assert len(list((tmp_path / "whole").glob("checkpoints/*/rng_state_*.pth"))) in (0, 2)
    whole, part = (records(tmp_path / run) for run in ("whole", "part"))
    assert whole == part
    given = {name: v if isinstance(v, int | float) else str(v) for name, v in usual.items()}
    given = {"from_model" if name == "from" else name: v for name, v in given.items()}
    {"pretrain": pretrain, **JOBS}[job]({**given, "output": str(tmp_path / "one")}, bar=False)
    one = records(tmp_path / "one")
    assert [line["step"] for line in whole] == [line["step"] for line in one]
    for name in ("loss", "grad_norm", "eval_loss", "tokens"):
        ours, theirs = ([line[name] for line in lines if name in line] for lines in (whole, one))
        assert ours == pytest.approx(theirs, rel=1e-4)
