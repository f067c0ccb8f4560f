"""Models of transformers that Lamina does not convert are tuned as they are, with the layer monitor on them."""

import json

import pytest
import torch
from lab.posttraining.tiny import common, preferences, same_weights, sorting, write_foreign, write_rows
from torch.nn import functional
from training.tiny_runs import layers
from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForSequenceClassification

from lamina.cli import main
from lamina.errors import UserError
from lamina.lab.posttraining.pairs import dpo, reward
from lamina.lab.posttraining.rlhf import rlhf
from lamina.lab.posttraining.settings import SftSettings
from lamina.lab.posttraining.sft import sft
from lamina.training.arguments import arguments_of

trl = pytest.importorskip("trl")

# Types that lamina convert does not take
KINDS = ("helium", *(pytest.param(kind, marks=pytest.mark.slow) for kind in ("nemotron", "persimmon")))


@pytest.fixture
def model(tmp_path):
    return lambda kind: write_foreign(tmp_path / kind, kind)


def value(rows, **where):
    for name, wanted in where.items():
        rows = rows[rows[name] == wanted]
    return float(rows["value"].iloc[0])


@pytest.mark.parametrize("kind", KINDS)
def test_it_is_tuned_with_the_monitor_on_it_and_is_transformers_own_again(kind, model, tmp_path, capsys):
    base = model(kind)
    held_out = [{"prompt": "Sort", "completion": " abc"}, {"prompt": "and then", "completion": " bcd"}]
    data, apart = write_rows(tmp_path / "d.jsonl", sorting(24)), write_rows(tmp_path / "h.jsonl", held_out)
    run = tmp_path / "run"
    flags = ["sft", "--from", str(base), "--data", str(data), "--eval-data", str(apart), "--output", str(run)]
    assert main([*flags, "--steps", "2", "--batch-size", "4", "--learning-rate", "1e-2", "--logging-steps", "1"]) == 0
    original = AutoModelForCausalLM.from_pretrained(base).eval()
    total, count, longest = 0.0, 0, None
    for row in held_out:
        prompt, answer = (list(row[name].encode()) for name in ("prompt", "completion"))
        ids = torch.tensor([[*prompt, *answer, 256]])
        with torch.no_grad():
            outputs = original(input_ids=ids, output_hidden_states=True)
        loss = functional.cross_entropy(outputs.logits[0, len(prompt) - 1 : -1], ids[0, len(prompt) :])
        total += float(loss) * (len(answer) + 1)
        count += len(answer) + 1
        longest = ids if longest is None else longest[:, : min(map(len, (longest[0], ids[0])))]
    first = json.loads((run / "metrics.jsonl").read_text().splitlines()[0])
    assert first["eval_loss"] == pytest.approx(total / count, rel=1e-5)
    rows = layers(run)
    assert {0, 1} <= set(rows["layer"])
    assert {"attention", "feed_forward"} <= set(rows["sublayer"])
    assert {"gradient_norm", "update_ratio", "hidden_variance", "gain_mean", "step_loss"} <= set(rows["metric"])
    norm = value(rows, step=1, metric="step_gradient_norm")
    parts = rows[(rows["step"] == 1) & (rows["metric"] == "gradient_norm") & (rows["sublayer"] == "block")]
    assert float((parts["value"] ** 2).sum()) ** 0.5 == pytest.approx(norm, rel=1e-4)
    tuned = AutoModelForCausalLM.from_pretrained(run / "model")
    assert type(tuned).__module__.startswith("transformers.models.")
    assert not list((run / "model").glob("*.py"))
    assert any(not torch.equal(t, original.state_dict()[name]) for name, t in tuned.state_dict().items())
    assert main(["report", str(run)]) == 0
    assert main(["generate", str(run), "--prompt", "Sort", "--max-new-tokens", "2"]) == 0


def test_the_recorded_stream_is_the_models_own(model, tmp_path):
    base, data = model("nemotron"), write_rows(tmp_path / "d.jsonl", [{"text": "the same words"}] * 12)
    sft({**common(base, data, tmp_path / "run"), "steps": 1}, bar=False)
    ids = torch.tensor([[*b"the same words", 256]])
    with torch.no_grad():
        inner = AutoModelForCausalLM.from_pretrained(base).model
        states = inner(input_ids=ids, output_hidden_states=True).hidden_states
    rows = layers(tmp_path / "run")
    for layer, state, sublayer in ((-1, states[0], "block"), (0, states[1], "feed_forward")):
        seen = value(rows, step=0, metric="hidden_variance", layer=layer, sublayer=sublayer)
        assert seen == pytest.approx(float(state.var(correction=0)), rel=1e-5)


@pytest.mark.parametrize("rank", [2, pytest.param(0, marks=pytest.mark.slow)])
def test_every_job_takes_it_and_resumes(rank, model, tmp_path):
    base, data = model("helium"), write_rows(tmp_path / "p.jsonl", preferences(12))
    usual = {**common(base, data, tmp_path), "lora_rank": rank}
    assert reward({**usual, "output": str(tmp_path / "judge")}, bar=False)["status"] == "finished"
    judge = AutoModelForSequenceClassification.from_pretrained(tmp_path / "judge" / "model")
    assert type(judge).__name__ == "HeliumForSequenceClassification"
    assert dpo({**usual, "output": str(tmp_path / "dpo")}, bar=False)["status"] == "finished"
    given = {**usual, "reward_model": str(tmp_path / "judge"), "max_answer": 4}
    assert rlhf({**given, "output": str(tmp_path / "whole")}, bar=False)["status"] == "finished"
    part = {**given, "output": str(tmp_path / "part")}
    assert rlhf({**part, "pause_step": 2}, bar=False)["status"] == "interrupted"
    assert rlhf(part, resume=True, bar=False)["status"] == "finished"
    assert same_weights(tmp_path / "whole", tmp_path / "part")


def test_a_model_that_cannot_be_tuned_is_one_line(model, tmp_path):
    pairs = write_rows(tmp_path / "p.jsonl", preferences(12))
    with pytest.raises(UserError, match=r"^from: transformers has no flex_olmo model with a score head"):
        reward(common(model("flex_olmo"), pairs, tmp_path / "run"), bar=False)
    for kind in ("t5", "bert"):  # BERT sees the tokens that it is to predict
        AutoConfig.for_model(kind).save_pretrained(tmp_path / kind)
        with pytest.raises(UserError, match="does not generate text"):
            dpo(common(tmp_path / kind, pairs, tmp_path / "run"), bar=False)
    assert not (tmp_path / "run").exists()


def test_ligers_layers_need_liger(model, tmp_path):
    data = write_rows(tmp_path / "d.jsonl", sorting(12))
    given = {**common(model("nemotron"), data, tmp_path / "run"), "trainer": {"use_liger_kernel": True}}
    with pytest.raises(UserError, match=r"^trainer.use_liger_kernel: liger-kernel is not installed. Run: pip"):
        sft({**given, "device": "cpu"}, bar=False)
    run = SftSettings.from_dict(given).as_run()
    assert arguments_of(trl.SFTConfig, run).use_liger_kernel
