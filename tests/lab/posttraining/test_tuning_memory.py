"""What a job after pretraining takes in memory: weights, attention kernel, one model for two, batches by length."""

from types import SimpleNamespace

import pytest
import torch
from lab.posttraining.tiny import common, preferences, same_weights, sorting, write_model, write_reward, write_rows
from safetensors.torch import load_file
from training.tiny_runs import records
from transformers import AutoModelForCausalLM

from lamina.cli import main
from lamina.lab.posttraining.pairs import DirectPreferences, DpoTrainer, dpo
from lamina.lab.posttraining.rlhf import PolicyTrainer, rlhf
from lamina.lab.posttraining.settings import DpoSettings, SftSettings
from lamina.lab.posttraining.sft import sft
from lamina.lab.posttraining.starting import Start, find_start
from lamina.modeling.processes import Processes
from lamina.training.optimization.order import TrainOrder


@pytest.fixture(scope="session")
def rows(tmp_path_factory):
    return write_rows(tmp_path_factory.mktemp("rows") / "rows.jsonl", sorting(24))


def test_weights_in_bfloat16_and_another_kernel_by_flags(base, rows, tmp_path, capsys):
    flags = ["sft", "--from", str(base), "--data", str(rows), "--steps", "1", "--batch-size", "4"]
    for name, more in (("usual", []), ("half", ["--weights", "bf16"]), ("eager", ["--attn-implementation", "eager"])):
        assert main([*flags, "--output", str(tmp_path / name), *more]) == 0
    losses = {name: records(tmp_path / name)[0]["eval_loss"] for name in ("usual", "half", "eager")}
    assert losses["half"] != losses["usual"] == pytest.approx(losses["half"], rel=2e-3)
    assert losses["eager"] == pytest.approx(losses["usual"], rel=1e-6)
    tensors = load_file(tmp_path / "half" / "model" / "model.safetensors")
    assert {tensor.dtype for tensor in tensors.values()} == {torch.bfloat16}
    assert main([*flags, "--output", str(tmp_path / "none"), "--attn-implementation", "sdp"]) == 2
    assert "attn_implementation: 'sdp' does not work" in capsys.readouterr().err


@pytest.mark.parametrize("job", ["dpo", "remax", pytest.param("rloo", marks=pytest.mark.slow)])
def test_with_lora_the_policy_without_its_matrices_is_the_reference(job, base, tmp_path, monkeypatch):
    """One model is loaded, and every recorded number is that of a run with a second one."""
    data = write_rows(tmp_path / "pairs.jsonl", preferences(12))
    given = {**common(base, data, tmp_path), "lora_rank": 2, "lora_dropout": 0.3, "learning_rate": 1e-2}
    if job != "dpo":
        vowels = write_reward(tmp_path, "float(sum(c in 'aeiou' for c in answer))")
        given |= {"algorithm": job, "reward_function": vowels, "max_answer": 4, "beta": 0.5}
    run, part = (dpo, DpoTrainer) if job == "dpo" else (rlhf, PolicyTrainer)
    loaded, policy = [], Start.policy
    monkeypatch.setattr(Start, "policy", lambda self, *given: loaded.append(policy(self, *given)) or loaded[-1])
    run({**given, "output": str(tmp_path / "one")}, bar=False)
    assert len(loaded) == 1

    second = find_start(SftSettings(from_model=str(base), steps=1)).policy().eval().requires_grad_(False)
    asked = []

    def apart(self, **inputs):
        from trl.trainer.utils import add_fused_lm_head

        if not asked:
            add_fused_lm_head(second, temperature=getattr(self, "temperature", 1.0))
        asked.append(inputs)
        with torch.no_grad():
            return second(**inputs)

    monkeypatch.setattr(part, "without_adapters", apart)
    run({**given, "output": str(tmp_path / "two")}, bar=False)
    assert asked
    assert records(tmp_path / "one") == records(tmp_path / "two")
    assert same_weights(tmp_path / "one", tmp_path / "two")


@pytest.mark.parametrize(("weights", "near"), [("nf4", 0.02), ("int8", 0.002)])
def test_lora_on_quantized_weights_learns_resumes_and_leaves_a_whole_model(weights, near, base, rows, tmp_path):
    pytest.importorskip("bitsandbytes")
    given = {**common(base, rows, tmp_path / "plain"), "lora_rank": 2, "lora_dropout": 0.2, "learning_rate": 1e-2}
    plain = sft(given, bar=False)
    given |= {"weights": weights, "save_steps": 2, "gradient_checkpointing": True}
    whole = sft({**given, "output": str(tmp_path / "whole")}, bar=False)
    assert records(tmp_path / "whole")[0]["eval_loss"] != records(tmp_path / "plain")[0]["eval_loss"]
    assert whole["eval_loss"] == pytest.approx(plain["eval_loss"], rel=near)
    assert whole["parameters"] == plain["parameters"]
    (stored,) = (tmp_path / "whole" / "checkpoints" / "checkpoint-4" / "model").iterdir()
    assert all(".lora_" in name for name in load_file(stored))
    part = {**given, "output": str(tmp_path / "part")}
    assert sft({**part, "pause_step": 2}, bar=False)["status"] == "interrupted"
    assert sft(part, resume=True, bar=False)["eval_loss"] == whole["eval_loss"]
    assert same_weights(tmp_path / "whole", tmp_path / "part")
    names = [set(AutoModelForCausalLM.from_pretrained(f).state_dict()) for f in (base, tmp_path / "part" / "model")]
    assert names[0] == names[1]


def test_packed_sequences_have_trls_length_unless_the_model_or_the_user_says_less(base, tmp_path):
    long = write_model(tmp_path / "long", positions=4096)

    def longest(model, **more):
        return find_start(SftSettings(from_model=str(model), steps=1, **more)).longest

    assert (longest(long), longest(long, packing=True), longest(base, packing=True)) == (4096, 1024, 512)
    assert longest(long, packing=True, sequence_length=2048) == 2048


def test_a_pair_is_as_long_as_its_prompt_and_answers(base, tmp_path):
    pairs = [{**pair, "prompt": "p" * (1 + 5 * n)} for n, pair in enumerate(preferences(12))]
    data = write_rows(tmp_path / "pairs.jsonl", pairs)
    given = {**common(base, data, tmp_path / "run"), "group_by_length": True}
    settings = DpoSettings(**{**given, "template": "none", "steps": 1})
    stage = DirectPreferences()
    stage.check(SimpleNamespace(settings=settings), Processes())
    stage.read(Processes(), bar=False)
    (lengths,) = stage.ordered.keywords.values()
    whole = [sum(map(len, (row["prompt_ids"], row["chosen_ids"], row["rejected_ids"]))) for row in stage.train]
    assert lengths == whole
    assert max(lengths) > min(lengths) + 20


def test_batches_by_length_hold_every_item_once_a_pass_and_little_padding():
    lengths = torch.randint(1, 100, (203,), generator=torch.Generator().manual_seed(0)).tolist()
    options = {"steps": 140, "batch_size": 4, "gradient_accumulation": 2, "seed": 3}
    plain, grouped = TrainOrder(203, **options), TrainOrder(203, lengths=lengths, **options)
    batches = list(grouped)
    flat = [item for batch in batches for item in batch]
    for turn in range(5):
        assert sorted(flat[turn * 203 : (turn + 1) * 203]) == list(range(203))

    def padding(order):
        return sum(max(lengths[i] for i in batch) * len(batch) - sum(lengths[i] for i in batch) for batch in order)

    assert padding(batches) < padding(plain) / 8
    assert flat[:203] != flat[203:406]
    means = [sum(lengths[i] for i in batch) / 4 for batch in batches[:50]]
    assert means != sorted(means)
    assert list(TrainOrder(203, lengths=lengths, **options, done=100)) == batches[200:]
    halves = [list(TrainOrder(203, lengths=lengths, **options, rank=rank, size=2)) for rank in range(2)]
    assert [a + b for a, b in zip(*halves, strict=True)] == batches


def test_a_job_trains_on_batches_by_length(base, tmp_path):
    data = write_rows(tmp_path / "rows.jsonl", [{"text": "a" * (1 + 7 * n)} for n in range(24)])
    given = {**common(base, data, tmp_path / "run"), "group_by_length": True, "epochs": 2.0, "steps": 0}
    result = sft(given, bar=False)
    assert (result["status"], result["steps"]) == ("finished", 9)
