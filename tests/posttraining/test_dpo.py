"""`lamina dpo` against its formula."""

import pytest
import torch
from posttraining.tiny import common, preferences, same_weights, write_rows
from transformers import AutoModelForCausalLM, AutoTokenizer

from lamina.posttraining.dpo import dpo


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
        given = {
            **common(base, pairs, tmp_path / "run"),
            "eval_data": str(held_out),
            "beta": 0.3,
            "learning_rate": 1e-2,
        }
        result = dpo(given, bar=False)
    policy, reference = (
        AutoModelForCausalLM.from_pretrained(path).eval() for path in (tmp_path / "run" / "model", base)
    )
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
