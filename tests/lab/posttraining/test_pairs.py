"""`lamina reward` and `lamina dpo`: their formulas, every held-out pair once, whatever the batches and processes."""

import math

import pytest
import torch
from lab.posttraining.tiny import common, preferences, same_weights, sorting, uneven, write_rows
from training.tiny_runs import layers, records
from transformers import (
    AutoModelForCausalLM,
    AutoModelForSequenceClassification,
    AutoTokenizer,
    GPT2Config,
    GPT2LMHeadModel,
    Trainer,
)

from lamina.data.tokenizers import load_tokenizer
from lamina.lab.posttraining.pairs import dpo, reward
from lamina.lab.posttraining.sft import sft
from lamina.modeling.processes import Processes

JOBS = {"reward": reward, "dpo": dpo}


@pytest.fixture
def seven(tmp_path):
    return write_rows(tmp_path / "held_out.jsonl", uneven())


def given(base, pairs, seven, folder, **changed):
    own = {"eval_data": str(seven), "eval_steps": 2, "learning_rate": 1e-2, "precision": "fp32", "threads": 1}
    return {**common(base, pairs, folder), **own, **changed}


@pytest.mark.parametrize("job", list(JOBS))
def test_the_processes_parts_are_one_evaluation(job, base, pairs, seven, tmp_path, monkeypatch):
    trainers = []
    train = Trainer.train

    def seen(self, *args, **kwargs):
        # accelerate would not wrap a model that an evaluation has prepared: processes would train apart
        assert not getattr(self.model, "_is_accelerate_prepared", False)
        trainers.append(self)
        return train(self, *args, **kwargs)

    monkeypatch.setattr(Trainer, "train", seen)
    result = JOBS[job](given(base, pairs, seven, tmp_path / "run", steps=2), bar=False)
    (trainer,) = trainers
    parts = []
    for rank in range(2):
        trainer.processes = Processes(rank=rank, size=2)
        parts.append(trainer.measured_here())
    assert [sum(batch.weights["loss"] for batch in part) for part in parts] == [4, 3]

    class Both(Processes):
        def everyones(self, value):
            return parts

    trainer.processes = Both()
    measured = {name.replace("/", "_"): value for name, value in trainer.evaluate().items()}
    last = {name: value for name, value in result.items() if name.startswith("eval_") and value is not None}
    assert len(last) > 4
    assert {name: measured[name] for name in last} == pytest.approx(last, abs=1e-5)


def answer_logp(model, tokenizer, row, name):
    """The log probability of an answer and the end after it, given the prompt, token by token."""
    prompt = tokenizer(row["prompt"])["input_ids"]
    answer = tokenizer(row[name] + tokenizer.eos_token)["input_ids"]
    total = 0.0
    for done, token in enumerate(answer):
        logits = model(input_ids=torch.tensor([prompt + answer[:done]])).logits[0, -1]
        total += float(logits.log_softmax(-1)[token])
    return total


@torch.no_grad()
def test_an_evaluation_of_dpo_is_its_formula_over_pairs_whatever_the_batches(base, pairs, tmp_path):
    """Rafailov et al. 2023, eq. 7: -log sigmoid(beta ((log p - log q)(chosen) - (log p - log q)(rejected)))."""
    rows = preferences(6)  # two batches, of four pairs and of two
    rows[4]["rejected"] = rows[5]["rejected"] = rows[5]["chosen"] + " and more"  # of other lengths, in the second batch
    held_out = write_rows(tmp_path / "held_out.jsonl", rows)
    with torch.enable_grad():
        more = {"eval_data": str(held_out), "beta": 0.3, "learning_rate": 1e-2}
        result = dpo({**common(base, pairs, tmp_path / "run"), **more}, bar=False)
    policy, reference = (AutoModelForCausalLM.from_pretrained(p).eval() for p in (tmp_path / "run" / "model", base))
    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "run" / "model")
    margins = []
    for row in rows:
        chosen, rejected = (
            0.3 * (answer_logp(policy, tokenizer, row, name) - answer_logp(reference, tokenizer, row, name))
            for name in ("chosen", "rejected")
        )
        margins.append(chosen - rejected)
    losses = [-torch.nn.functional.logsigmoid(torch.tensor(margin)).item() for margin in margins]
    assert max(losses) - min(losses) > 1e-3, "pairs that are alike prove no mean"
    assert result["eval_loss"] == pytest.approx(sum(losses) / 6, abs=1e-5)
    assert result["eval_rewards_margins"] == pytest.approx(sum(margins) / 6, abs=1e-5)
    assert result["eval_rewards_accuracies"] == pytest.approx(sum(margin > 0 for margin in margins) / 6)


def test_an_evaluation_of_pairs_draws_no_number_of_training(base, pairs, tmp_path):
    given = {**common(base, pairs, tmp_path / "often"), "lora_rank": 2, "lora_dropout": 0.3, "learning_rate": 1e-2}
    dpo({**given, "eval_steps": 1}, bar=False)
    dpo({**given, "eval_steps": 4, "output": str(tmp_path / "once")}, bar=False)
    assert same_weights(tmp_path / "often", tmp_path / "once")


def test_the_adapter_of_a_reward_model_has_its_score_as_peft_reads_it(base, tmp_path):
    from peft import PeftModel

    pairs = write_rows(tmp_path / "pairs.jsonl", preferences(12))
    reward({**common(base, pairs, tmp_path / "run"), "steps": 2, "lora_rank": 2, "learning_rate": 1e-2}, bar=False)
    merged = AutoModelForSequenceClassification.from_pretrained(tmp_path / "run" / "model").eval()
    torch.manual_seed(1)  # the score that peft is to replace
    original = AutoModelForSequenceClassification.from_pretrained(base, num_labels=1, pad_token_id=256)
    wrapped = PeftModel.from_pretrained(original, tmp_path / "run" / "adapter").eval()
    ids = torch.arange(20).view(2, 10)
    with torch.no_grad():
        scores = wrapped(input_ids=ids).logits
        torch.testing.assert_close(scores, merged(input_ids=ids).logits, atol=1e-6, rtol=1e-5)
    assert wrapped.peft_config["default"].task_type == "SEQ_CLS"


@pytest.mark.parametrize("job", ["reward", pytest.param("dpo", marks=pytest.mark.slow)])
def test_the_models_own_dropout_is_off_as_in_trl_unless_asked_for(job, tmp_path):
    tokenizer = load_tokenizer("bytes")
    drops = {"attn_pdrop": 0.3, "resid_pdrop": 0.3, "embd_pdrop": 0.3}
    sizes = {"n_embd": 16, "n_layer": 2, "n_head": 2, "vocab_size": len(tokenizer), "n_positions": 64}
    GPT2LMHeadModel(GPT2Config(**sizes, **drops, bos_token_id=256, eos_token_id=256)).save_pretrained(tmp_path / "gpt2")
    tokenizer.save_pretrained(tmp_path / "gpt2")
    rows = write_rows(tmp_path / "rows.jsonl", preferences(4))
    first = {}
    for off in (True, False):
        folder = tmp_path / str(off)
        more = {"eval_data": str(rows), "steps": 1, "precision": "fp32"}
        more |= {} if off else {"trl": {"disable_dropout": False}}
        JOBS[job]({**common(tmp_path / "gpt2", rows, folder), **more}, bar=False)
        trained = next(line["loss"] for line in records(folder) if "loss" in line)
        held_out = next(line["eval_loss"] for line in records(folder) if "eval_loss" in line)
        first[off] = abs(trained - held_out)  # of the same four pairs, by the same model
    assert first[True] < 1e-6
    assert first[False] > 1e-4


@pytest.mark.parametrize("train", [dpo, *(pytest.param(job, marks=pytest.mark.slow) for job in (sft, reward))])
def test_every_steps_recorded_loss_is_the_one_that_is_trained(base, tmp_path, train):
    data = write_rows(tmp_path / "rows.jsonl", sorting(24) if train is sft else preferences(24))
    more = {"batch_size": 2, "gradient_accumulation": 2, "logging_steps": 2}
    train({**common(base, data, tmp_path / "run"), **more}, bar=False)
    rows = layers(tmp_path / "run")
    losses = rows[rows["metric"] == "step_loss"].set_index("step")["value"]
    logged = {line["step"]: line["loss"] for line in records(tmp_path / "run") if "loss" in line}
    assert logged == pytest.approx({1: losses[1], 2: losses[2], 4: (losses[3] + losses[4]) / 2}, rel=1e-5)
    if train is dpo:
        assert losses[1] == pytest.approx(math.log(2), rel=1e-4)  # the policy is the reference
