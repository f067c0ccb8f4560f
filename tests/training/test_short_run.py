"""A run's first steps without its folder."""

import math

import pytest
import torch
from training.tiny_runs import SMALL

import lamina
from lamina.data.packed import prepare_blocks
from lamina.training.settings import PretrainSettings
from lamina.training.short_run import ShortRun


@pytest.fixture
def short(corpus, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    blocks, tokenizer = prepare_blocks(str(corpus), "bytes", 16, cache_dir=tmp_path / "cache", progress=False)

    def make(**changed):
        settings = PretrainSettings(**{**SMALL, "corpus": str(corpus), "steps": 12, **changed})
        torch.manual_seed(0)
        model = lamina.build(
            "llama-nano", "pre_ln", num_layers=2, hidden_size=16, num_heads=2, vocab_size=len(tokenizer)
        )
        return ShortRun(settings, model, blocks.train, in_order=False, device="cpu")

    return make


def test_it_ends_when_its_caller_has_seen_enough_and_leaves_no_folder(short, tmp_path):
    run, steps = short(), []
    run.train(lambda step: steps.append(step) or step < 5)
    assert steps == [1, 2, 3, 4, 5]
    assert len(run.losses) == len(run.gradient_norms) == len(run.learning_rates) == 5
    assert run.stopped == ""
    assert {path.name for path in tmp_path.iterdir()} <= {"cache"}


def test_a_gradient_that_is_not_finite_ends_it(short):
    run = short(max_grad_norm=0.0)
    weight = run.model.model.layers[0].attention.module.q_proj.weight
    weight.register_hook(lambda gradient: gradient * math.inf)
    run.train(lambda step: True)
    assert run.stopped == "the gradient was not finite at step 1"
    assert math.isfinite(run.losses[0])


def test_what_is_measured_in_mixed_precision_is_measured_in_full(short):
    run = short(precision="bf16")
    ids = torch.arange(32).view(2, 16)
    outputs = {}

    def after_step(step):
        with torch.no_grad():
            outputs["mixed"] = run.model(input_ids=ids).logits
            with run.full_precision():
                outputs["full"] = run.model(input_ids=ids).logits
            outputs["again"] = run.model(input_ids=ids).logits
        return False

    run.train(after_step)
    assert not torch.equal(outputs["mixed"], outputs["full"])
    assert torch.equal(outputs["mixed"], outputs["again"])
    assert torch.allclose(outputs["mixed"], outputs["full"], atol=0.1)
