"""DepthBench's checkpoints with several streams or attention over depth have the same logits here."""

import pytest
import torch
from model_of_depthbench import Model
from test_emit import IDS, off
from transformers import AutoModelForCausalLM

from lamina.cli import main

KINDS = {
    "hc": ("hc", "dynamic_hc", {"hyper_connections": {"kind": "hc", "num_residual_streams": 4, "tanh": None}}),
    "mhc": ("mhc", "mhc", {"hyper_connections": {"kind": "mhc", "tanh": False, "collapse": "auto"}}),
    "liger_mhc": ("mhc", "mhc", {"hyper_connections": {"kind": "liger_mhc", "liger_rms_eps": 1e-6}}),
    "older": ("default", "dynamic_hc", {"hyper_connections": {"kind": "hc"}}),
    "attnres": ("attnres", "attn_res", {"attnres_block_size": 1}),
    "blocks": ("attnres", "attn_res", {"attnres_block_size": 4}),
}


def converting(folder):
    return ["convert", str(folder / "theirs"), str(folder / "ours"), "--from", "olmo-core"]


@torch.no_grad()
@pytest.mark.parametrize("kind", KINDS)
def test_its_logits_are_laminas(kind, tmp_path):
    name, wiring, more = KINDS[kind]
    torch.manual_seed(0)
    model = Model({"older": "hc", "blocks": "attnres"}.get(kind, kind), 5, more.get("attnres_block_size", 1))
    model.save(tmp_path / "theirs", name, more)
    assert main(converting(tmp_path)) == 0
    ours = AutoModelForCausalLM.from_pretrained(tmp_path / "ours")
    assert ours.config.plan["options"]["wiring"] == wiring
    limit = 1e-5 if wiring == "dynamic_hc" else 2e-6  # a sum of normed streams rounds more
    assert off(model(IDS), ours(input_ids=IDS).logits) < limit


def test_a_parameter_with_two_names_must_be_one(tmp_path, refused):
    model = Model("hc", 2)
    model.blocks["1"].attention_hyper_connection.branch.norm = type(model.lm_head.norm)(1e-6)
    model.save(tmp_path / "theirs", "hc", KINDS["hc"][2])
    assert "the two tensors are the same parameter" in refused(*converting(tmp_path))


@pytest.mark.parametrize(("kind", "missing"), [("hc", "static_beta"), ("attnres", "mlp_res_norm")])
def test_a_missing_parameter_is_named(kind, missing, tmp_path, refused):
    model = Model(kind, 2)
    block = model.blocks["1"]
    delattr(block.attention_hyper_connection if kind == "hc" else block, missing)
    model.save(tmp_path / "theirs", *KINDS[kind][::2])
    assert f"the checkpoint has no tensor '{missing.removeprefix('mlp_res_')}' for" in refused(*converting(tmp_path))


@pytest.mark.parametrize(
    ("name", "more", "said"),
    [
        ("mhc", {"hyper_connections": {"kind": "mhc_static"}}, "hyper_connections.kind is 'mhc_static', but"),
        (
            "mhc",
            {"hyper_connections": {"kind": "mhc", "sinkhorn_iters": 5}},
            "sinkhorn_iters is 5, but Lamina reads only 20.",
        ),
        ("hc", {"hyper_connections": {"kind": "hc", "tanh": False}}, "hyper_connections.tanh is False"),
        ("attnres", {"attnres_block_size": 3}, "attnres_block_size is 3. Choose a checkpoint in which"),
        ("moda", {}, "model.block.name is 'moda'. Choose a checkpoint without attention over depth."),
        ("mhc", {}, "its shape is [6, 32], but the configuration asks for [24, 128]"),
    ],
)
def test_what_no_plan_holds_is_refused_in_one_line(name, more, said, tmp_path, refused):
    model = Model("hc", 2)
    model.save(tmp_path / "theirs", name, more)
    assert said in refused(*converting(tmp_path))
