"""Parameter groups under width and depth scaling, in real runs."""

import json
import math
from typing import get_args, get_type_hints

import pytest
import torch
from spread import rotated, spread
from training.tiny_runs import SMALL, assert_same_weights, cut_back, flags, llama_of, records

import lamina
from lamina.cli import main
from lamina.errors import UserError
from lamina.modeling.scaling import DEPTH_SCHEMES, SCHEMES, Scaling
from lamina.placements import names
from lamina.training.optimization.optimizer import parameter_groups, step_factors
from lamina.training.setting_groups import WIDTH_SCALINGS
from lamina.training.settings import PretrainSettings

RATE, DECAY = 1e-2, 0.1


@pytest.mark.parametrize(("placement", "scheme"), rotated(names(), SCHEMES))
def test_every_parameter_is_in_one_group_and_rate_times_decay_is_the_same_in_all(placement, scheme):
    with torch.device("meta"):
        model = lamina.build(llama_of(64), placement, init="normal")
    factors = step_factors(model, Scaling(width=scheme, base_width=16, k_embedding=2.0, k_readout=0.5))
    groups = parameter_groups(model, factors, learning_rate=RATE, weight_decay=DECAY)
    members = [id(parameter) for group in groups for parameter in group["params"]]
    assert sorted(members) == sorted(id(parameter) for parameter in model.parameters())
    names_of = {id(parameter): name for name, parameter in model.named_parameters()}
    for group in groups:
        for parameter in group["params"]:
            assert group["lr"] == pytest.approx(RATE * factors[names_of[id(parameter)]].rate)
            decays = parameter.ndim >= 2
            assert "eps" not in group
            assert group["lr"] * group["weight_decay"] == pytest.approx(RATE * DECAY if decays else 0.0)


def test_the_settings_schemes_are_the_models():
    assert ("none", *SCHEMES) == WIDTH_SCALINGS
    assert get_args(get_type_hints(PretrainSettings)["depth_scaling"]) == ("none", *DEPTH_SCHEMES)


@pytest.mark.parametrize("placement", spread(names(), ["pre_ln", "post_ln", "keel", "hybridnorm", "rezero"]))
def test_at_the_base_sizes_a_run_is_bit_for_bit_the_one_without(trained, tmp_path, placement):
    trained("plain", placement=placement, steps=2)
    depth = {"depth_scaling": "completep", "base_depth": 2} if placement in ("pre_ln", "peri_ln", "olmo2") else {}
    trained("scaled", placement=placement, steps=2, width_scaling="standard", base_width=16, **depth)
    assert records(tmp_path / "plain") == records(tmp_path / "scaled")
    assert_same_weights(tmp_path / "plain", tmp_path / "scaled")


def test_one_step_at_four_times_the_base_is_the_naive_adamw_step_of_each_role(trained, trainers, first_step):
    before, grads = first_step
    scaled = {"hidden_size": 64, "num_heads": 4, "width_scaling": "standard", "base_width": 16, "k_hidden": 2.0}
    trained(steps=1, warmup=0, max_grad_norm=0, learning_rate=RATE, **scaled)
    for name, parameter in trainers[0].model.named_parameters():
        rate = RATE
        if parameter.ndim >= 2 and "embed_tokens" not in name:
            rate = RATE / 4 if name.startswith("lm_head") else RATE * 2 / 4
        start, gradient = before[name].double(), grads[name].double()
        decay = RATE * DECAY if parameter.ndim >= 2 else 0.0
        expected = start * (1 - decay) - rate * gradient / (gradient.abs() + 1e-8)
        # the step itself is 2.5e-3 at the least
        assert torch.allclose(parameter.detach().double(), expected, atol=1e-5), name


def test_one_step_at_four_times_the_base_depth_is_the_naive_adamw_step_of_each_role(trained, trainers, first_step):
    """Depth-muP: rates in the blocks halved, and an epsilon that weighs as much as the gradients halved with them."""
    before, grads = first_step
    epsilon, scaled = 1e-2, {"num_layers": 8, "depth_scaling": "depth-mup", "base_depth": 2}
    trained(steps=1, warmup=0, max_grad_norm=0, learning_rate=RATE, epsilon=epsilon, **scaled)
    assert all(sub.out_scale == 0.5 for block in trainers[0].model.model.layers for sub in block.children())
    for name, parameter in trainers[0].model.named_parameters():
        factor = 0.5 if ".layers." in name else 1.0
        start, gradient = before[name].double(), grads[name].double()
        decay = RATE * factor * DECAY if parameter.ndim >= 2 else 0.0
        expected = start * (1 - decay) - RATE * factor * gradient / (gradient.abs() + epsilon * factor)
        assert torch.allclose(parameter.detach().double(), expected, atol=1e-6), name


def test_a_model_with_the_multiplier_is_trained_on_and_another_is_not_given_its_rates(trained, tiny, tmp_path):
    scaled = {"depth_scaling": "completep", "base_depth": 1}
    trained("first", **scaled)
    trained("plain")
    again = {"from_model": str(tmp_path / "first"), "num_layers": None, "hidden_size": None, "num_heads": None}
    trained("second", **{**again, **scaled})
    config = json.loads((tmp_path / "second" / "model" / "config.json").read_text())
    assert config["plan"]["layers"][0]["attention"]["out_scale"] == 0.5
    assert config["plan"]["options"] == scaled
    with pytest.raises(UserError, match="depth_scaling is 'completep', but the placement does not scale its branches"):
        trained("third", **{**again, "from_model": str(tmp_path / "plain"), **scaled})
    assert not (tmp_path / "third").exists()


def test_the_logged_rate_is_the_one_that_was_given_and_each_group_follows_the_schedule(trained, tmp_path, trainers):
    steps, scaled = 10, {"width_scaling": "mup", "base_width": 8, "trainer": {"optim": "adamw_torch"}}
    trained(steps=steps, warmup=0, learning_rate=RATE, logging_steps=1, **scaled)
    rates = [r["learning_rate"] for r in records(tmp_path / "run") if "loss" in r]
    assert rates[0] == RATE
    last = 0.1 + 0.9 * 0.5 * (1 + math.cos(math.pi * (steps - 1) / steps))
    assert rates[-1] == pytest.approx(RATE * last)
    final = sorted({group["lr"] for group in trainers[0].optimizer.param_groups})
    assert final == pytest.approx([0.1 * RATE / 2, 0.1 * RATE])  # the schedule's end, hidden and readout halved


@pytest.mark.parametrize("depth", [{"depth_scaling": "depth-mup", "base_depth": 1}, {"optimizer": "muon"}])
def test_a_scaled_run_goes_on_where_it_was_stopped(trained, tmp_path, depth):
    scaled = {"width_scaling": "standard", "base_width": 8, **depth}
    given = {"steps": 6, "save_steps": 2, "logging_steps": 1, **scaled}
    whole = trained("whole", **given)
    trained("cut", **given)
    cut_back(tmp_path / "cut", 4)
    again = trained("cut", resume=True, **given)
    assert again["eval_loss"] == whole["eval_loss"]
    assert records(tmp_path / "cut") == records(tmp_path / "whole")


def test_tied_embeddings_are_refused_and_untied_on_request(tmp_path, corpus, refused):
    tiny = {**SMALL, "backbone": "llama-310m-proxy", "corpus": corpus, "output": tmp_path / "run"}
    argv = ["pretrain", *flags(**tiny, width_scaling="standard", base_width=8)]
    assert "--untie-embeddings" in refused(*argv)
    assert not (tmp_path / "run").exists()
    assert main([*argv, "--untie-embeddings"]) == 0
    config = json.loads((tmp_path / "run" / "model" / "config.json").read_text())
    assert config["tie_word_embeddings"] is False
