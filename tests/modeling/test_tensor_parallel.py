"""The plans that transformers shards a model by name the modules that a rewired model has."""

import re
from pathlib import Path

import pytest
import torch
from modeling.tiny import LATENT, OF_TEXT, built, llama, token_ids
from training.test_distributed import torchrun
from transformers import DeepseekV3Config, Olmo2Config, Qwen3Config

import lamina
from lamina.placements import names

BACKBONES = {
    "qwen3": Qwen3Config(**OF_TEXT, head_dim=8),
    "deepseek_v3": DeepseekV3Config(**{**OF_TEXT, **LATENT, "num_key_value_heads": 4, "q_lora_rank": 16}),
}


def matching(model, key):
    """The names of modules and parameters that an entry of a plan is about."""
    pattern = re.compile(key.replace(".", r"\.").replace("*", r"\d+"))
    return [name for name, _ in (*model.named_modules(), *model.named_parameters()) if pattern.fullmatch(name)]


@pytest.mark.parametrize("placement", names())
def test_every_projection_is_sharded_and_every_entry_names_something(placement):
    model = built(placement, 4)
    sharded = {name for key in model.tp_plan for name in matching(model, key)}
    projections = {name for name, module in model.named_modules() if isinstance(module, torch.nn.Linear)}
    assert projections <= sharded
    assert all(matching(model, key) for key in model.tp_plan)


@pytest.mark.parametrize("name", BACKBONES)
def test_other_backbones_plans_follow(name):
    config = BACKBONES[name]
    model, peer = lamina.build(config, "keel"), config.base_model_tp_plan
    inside = [key for key in peer if re.search(r"\.(self_attn|mlp)\.", key)]
    named = [key for key in model.tp_plan if re.search(r"\.(attention|feed_forward)\.module\.", key)]
    assert len(named) == len(inside) > 6
    # a first dense layer lacks experts, but no entry is about nothing
    unused = {key.rpartition("module.")[2] for key in named if not matching(model, key)}
    assert unused <= {key.rpartition("self_attn.")[2] for key in inside if "q_proj" in key}


def test_norms_over_the_full_width_see_all_channels():
    plan = built("olmo2").tp_plan
    prefix = "model.backbone.layers.*.attention.module."
    peer = Olmo2Config.base_model_tp_plan
    for part in ("q_proj", "k_proj", "v_proj", "o_proj"):
        assert plan[prefix + part] == peer[f"layers.*.self_attn.{part}"]


@pytest.mark.slow
def test_two_processes_compute_what_one_does(tmp_path):
    for placement in names():
        model, ids = built(placement, 4, config=llama(4)), token_ids()
        folder = tmp_path / placement
        model.save_pretrained(folder)
        output = model(ids, labels=ids)
        output.loss.backward()
        norm = model.model.layers[1].feed_forward.module.up_proj.weight.grad.norm()
        torch.save({"ids": ids, "logits": output.logits.detach(), "gradient": norm}, folder / "expected.pt")
    done = torchrun(Path(__file__).with_name("sharded_processes.py"), tmp_path)
    assert done.returncode == 0, done.stderr[-4000:]
    for placement in names():
        off = torch.load(tmp_path / placement / "off.pt")
        assert off["sharded"], placement
        # sums over halves of the channels are rounded in another order
        assert off["logits"] < 1e-4, placement
        assert off["gradient"] < 1e-4, placement
