"""A run that was interrupted ends with the bytes of one that was not: LoRA in every job, answers trained on again."""

import pytest
from lab.posttraining.tiny import answers, common, write_reward, write_rows
from lab.posttraining.two_stages import JOBS
from safetensors.torch import load_file
from training.tiny_runs import records

from lamina.errors import UserError
from lamina.lab.posttraining.rlhf import PromptOrder
from lamina.training.monitor.writers import read_rows

LORA = {"lora_rank": 2, "lora_dropout": 0.3}
AGAIN = {"steps_per_generation": 2, "num_iterations": 2}
ADAPTED = {"use_adaptive_entropy": True, "entropy_target": 6.0}
TIMES = {"seconds", "tokens_per_second", "step_seconds", "max_memory_bytes"}
# By name: the job, its settings, and the step after which it is interrupted.
RUNS = {
    "sft": ("sft", LORA, 2),
    "sft-whole": ("sft", {}, 2),
    "sft-dora": ("sft", {**LORA, "lora": {"use_dora": True}}, 2),
    "reward": ("reward", LORA, 2),
    "dpo": ("dpo", LORA, 2),
    "dpo-precomputed": ("dpo", {**LORA, "trl": {"precompute_ref_log_probs": True}}, 2),
    "dpo-precomputed-whole": ("dpo", {"trl": {"precompute_ref_log_probs": True}}, 2),
    "remax": ("rlhf", LORA, 2),
    "rloo": ("rlhf", {**LORA, "algorithm": "rloo"}, 2),
    "grpo": ("rlhf", {**LORA, "algorithm": "grpo"}, 2),
    "rloo-again": ("rlhf", {"algorithm": "rloo", "trl": {"num_iterations": 2}, "eval_steps": 1}, 3),
    "grpo-again": ("rlhf", {"algorithm": "grpo", "trl": {**AGAIN, **ADAPTED}}, 2),
}  # fmt: skip
SLOW = ("sft-dora", "dpo-precomputed-whole", "remax", "rloo", "grpo", "rloo-again")


def recorded(folder):
    return [{name: value for name, value in line.items() if name not in TIMES} for line in records(folder)]


@pytest.mark.parametrize("name", [pytest.param(n, marks=[pytest.mark.slow] if n in SLOW else []) for n in RUNS])
def test_an_interrupted_run_ends_with_the_same_bytes(name, base, pairs, tmp_path):
    job, own, pause = RUNS[name]
    rewards = write_reward(tmp_path, "answer.count('a') - len(answer) / 9")
    rows = write_rows(tmp_path / "rows.jsonl", answers(16))
    policy = {"reward_function": rewards, "max_answer": 6} if job == "rlhf" else {}

    def run(folder, resume=False, **changed):
        given = common(base, rows if job == "sft" else pairs, tmp_path / folder)
        given |= {"learning_rate": 1e-2, "steps": 5, "precision": "fp32", "threads": 1, "eval_steps": 2}
        given |= {**policy, **own}
        given = {"output": given["output"], "pause_step": None} if resume else {**given, **changed}
        return JOBS[job](given, resume=resume, bar=False)

    whole = run("whole")
    assert run("part", pause_step=pause, save_steps=1, async_checkpoints=True)["status"] == "interrupted"
    resumed = run("part", resume=True)
    assert {k: v for k, v in resumed.items() if k not in TIMES} == {k: v for k, v in whole.items() if k not in TIMES}
    assert resumed["status"] == "finished"
    assert run("part", resume=True) == resumed
    assert recorded(tmp_path / "whole") == recorded(tmp_path / "part")
    metrics = ["step_loss", "update_ratio", "gradient_norm"]
    assert read_rows(tmp_path / "whole", metrics) == read_rows(tmp_path / "part", metrics)
    files = ["model/model.safetensors", *(["adapter/adapter_model.safetensors"] if "lora_rank" in own else [])]
    for file in [*files, *(["held_out.jsonl"] if job == "rlhf" else [])]:
        ours, theirs = ((tmp_path / folder / file).read_bytes() for folder in ("whole", "part"))
        assert ours == theirs
    assert len(load_file(tmp_path / "part" / files[-1])) > 2


def test_prompts_are_those_of_the_answers_in_use():
    order = PromptOrder(100, copies=2, steps=6, batch_size=2, seed=0, **AGAIN)
    batches = list(order)
    assert batches[0] == batches[3] != batches[4] == batches[5]
    assert len(batches[0]) == 8
    plain = [place for batch in PromptOrder(100, copies=2, steps=4, batch_size=2, seed=0) for place in batch]
    assert batches[0] + batches[4] == plain
    assert list(PromptOrder(100, copies=2, steps=6, batch_size=2, seed=0, done=3, **AGAIN)) == batches[3:]


def test_what_trl_refuses_is_one_line(base, pairs, tmp_path):
    with pytest.raises(UserError, match=r"^trl: ValueError: Unknown loss type: aot_pair") as caught:
        JOBS["dpo"]({**common(base, pairs, tmp_path / "run"), "trl": {"loss_type": ["aot_pair"]}}, bar=False)
    assert "\n" not in str(caught.value)
