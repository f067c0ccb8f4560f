"""Runs that diverge or stick: how they end, and which layer and step they blame."""

import json
import math
import random
import re

import pytest
import torch
from training.tiny_runs import layers, records, result

from lamina.training.monitor.guard import Diverged, DivergenceGuard


def named(layer, sublayer) -> str:
    """A pattern for the clause that blames a sub-layer, as one indexes it."""
    return rf"layers\[{layer}\] left first: .*\({sublayer.replace('_', '-')}\)"


def guard(**changed) -> DivergenceGuard:
    return DivergenceGuard(**{"margin": 1.0, "patience": 5, **changed})


@pytest.mark.parametrize("loss", [math.nan, math.inf, -math.inf])
def test_a_loss_that_is_not_finite_has_diverged(loss):
    with pytest.raises(Diverged, match=f"{loss} at step 7") as caught:
        guard().see_loss(7, loss)
    assert caught.value.step == 7


def test_a_loss_above_its_best_by_the_margin_for_patience_steps_has_diverged():
    watch = guard()
    watch.see_loss(1, 2.0)
    for step in range(2, 6):
        watch.see_loss(step, 3.5)
    with pytest.raises(Diverged, match="from step 2 to 6"):
        watch.see_loss(6, 3.5)


@pytest.mark.parametrize("patience", [5, 20])
def test_a_noisy_loss_with_a_lucky_step_has_not_diverged_but_one_that_climbs_has(patience):
    """A batch of 1: losses of 2.7, give or take 0.7, and one of 1.2."""
    draw, watch = random.Random(0), guard(patience=patience)
    for step in range(1, 400):
        watch.see_loss(step, 1.2 if step == 150 else 2.7 + 0.7 * draw.gauss(0.0, 1.0))
    climbing = ((step, 6.5 + 0.7 * draw.gauss(0.0, 1.0)) for step in range(400, 500))
    with pytest.raises(Diverged, match="more than 1 nats above its best"):
        all(watch.see_loss(*pair) is None for pair in climbing)
    resumed = guard(patience=patience)
    resumed.load_state_dict(json.loads(json.dumps(watch.state_dict())))
    assert resumed.state_dict() == {"guard": {**watch.state_dict()["guard"]}}
    resumed.load_state_dict({"guard": {"best": 2.0, "above_since": None, "recent": [], "left": []}})  # an older one


@pytest.mark.parametrize("loss", [lambda step: 9.0 if step % 5 else 2.0, lambda step: 2.0 if step == 1 else 2.99])
def test_a_spike_shorter_than_patience_and_a_loss_within_the_margin_are_forgiven(loss):
    watch = guard()
    for step in range(1, 60):
        watch.see_loss(step, loss(step))


@pytest.mark.parametrize("norm", [math.nan, math.inf])
def test_a_gradient_that_is_not_finite_names_the_layer_where_it_arose(norm):
    """Backward, everything below the layer is broken, too."""
    rows = [(9, i, s, "all", 0, "gradient_norm", norm if (i, s) <= (2, "attention") else 1.0) for i in range(4)
            for s in ("attention", "feed_forward")]  # fmt: skip
    watch = guard()
    watch.alarms.see(rows)
    with pytest.raises(Diverged, match=rf"at step 9; .*{named(2, 'attention')}"):
        watch.see_gradient(9, norm)


def test_states_that_are_not_finite_name_the_lowest_layer():
    watch = guard()
    watch.alarms.see(
        (9, i, s, "all", 0, "hidden_variance", math.nan if (i, s) >= (1, "feed_forward") else 1.0)
        for i in range(4)
        for s in ("attention", "feed_forward")
    )
    with pytest.raises(Diverged, match=named(1, "feed_forward")):
        watch.see_loss(9, math.nan)


def test_a_layer_that_broke_is_named_although_another_one_grew_harmlessly_long_before():
    """Variances of Pre-LN grow by ten early in every healthy run."""
    watch = guard()
    for step in range(1, 5):
        watch.alarms.see([(step, 0, "attention", "all", 0, "hidden_variance", 0.001)])
    for step in range(5, 100):
        watch.alarms.see([(step, 0, "attention", "all", 0, "hidden_variance", 0.02)])
        watch.see_loss(step, 2.0)
    watch.alarms.see([(100, 3, "feed_forward", "all", 0, "hidden_variance", math.nan)])
    with pytest.raises(Diverged, match=named(3, "feed_forward")):
        watch.see_loss(100, math.nan)


def poison(layer, sublayer):
    def act(trainer, model):
        with torch.no_grad():
            module = getattr(model.model.layers[layer], sublayer).module
            next(module.parameters()).fill_(math.nan)

    return act


@pytest.mark.parametrize(("layer", "sublayer"), [(0, "feed_forward"), (2, "attention"), (3, "feed_forward")])
@pytest.mark.parametrize("logging_steps", [1, 10])
def test_a_poisoned_weight_ends_the_run_and_is_named(trained, tmp_path, before_step, layer, sublayer, logging_steps):
    before_step(5, poison(layer, sublayer))
    found = trained(num_layers=4, steps=12, eval_steps=12, logging_steps=logging_steps)
    assert found["status"] == "diverged"
    assert re.search(named(layer, sublayer), found["reason"])
    assert "at step 5" in found["reason"]
    assert result(tmp_path / "run")["status"] == "diverged"
    assert found["steps"] <= 5


@pytest.mark.parametrize("clip", [1.0, 0.0])
@pytest.mark.parametrize("accumulation", [1, 2])
@pytest.mark.parametrize("layer", [0, 1])
def test_a_poisoned_gradient_ends_the_run_and_is_named(trained, before_step, clip, accumulation, layer):
    def act(trainer, model):
        weight = next(model.model.layers[layer].feed_forward.module.parameters())
        weight.register_hook(lambda gradient: gradient * math.nan)

    before_step(3, act)
    found = trained(steps=8, logging_steps=8, max_grad_norm=clip, gradient_accumulation=accumulation)
    assert found["status"] == "diverged"
    assert re.search(named(layer, "feed_forward"), found["reason"])
    assert "at step 3" in found["reason"]


def test_a_run_that_diverged_never_logs_a_loss_of_zero(trained, tmp_path):
    found = trained(steps=30, learning_rate=1e30, warmup=0, logging_steps=1)
    assert found["status"] == "diverged"
    assert all(r["loss"] is None or r["loss"] > 0.01 for r in records(tmp_path / "run") if "loss" in r)
    for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines():
        json.loads(line, parse_constant=pytest.fail)
    written = result(tmp_path / "run")
    assert written["eval_loss"] is None
    assert written["reason"]
    assert not (tmp_path / "run" / "model").exists()


def test_a_run_that_climbs_above_its_best_ends_before_its_last_step(trained, before_step, tmp_path):
    def spoil(trainer, model):
        with torch.no_grad():
            model.lm_head.weight.mul_(0).add_(torch.randn_like(model.lm_head.weight) * 30)

    for step in range(10, 60):
        before_step(step, spoil)
    found = trained(steps=60, logging_steps=1, divergence_patience=6, eval_steps=60, learning_rate=1e-3)
    assert found["status"] == "diverged"
    assert "from step 10 to 15" in found["reason"]


def test_the_layers_of_a_run_that_diverged_reach_up_to_its_end(trained, tmp_path, before_step):
    before_step(4, poison(1, "attention"))
    trained(steps=8, logging_steps=1)
    assert layers(tmp_path / "run").step.max() >= 3


def test_a_run_that_never_gets_below_the_unigram_entropy_is_stuck(trained, tmp_path):
    found = trained(learning_rate=1e-9)
    assert found["status"] == "stuck"
    assert found["eval_loss"] > found["unigram_entropy"]
    assert "unigram entropy" in found["reason"]
    assert (tmp_path / "run" / "model").is_dir()


LEARNS = {"steps": 60, "learning_rate": 2e-2, "batch_size": 8, "logging_steps": 20, "eval_steps": 60}


def test_a_run_that_learns_is_finished(trained):
    found = trained(**LEARNS)
    assert (found["status"], found["reason"]) == ("finished", "")
    assert found["eval_loss"] < found["unigram_entropy"] - 0.1


def test_the_margin_below_the_unigram_entropy_can_be_set(trained):
    assert trained(**LEARNS, stuck_margin=50.0)["status"] in ("stuck", "short")
