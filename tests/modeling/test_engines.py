"""A serving engine that rewrites forwards, replaces norms and casts weights has the model's logits, or refuses."""

import json
import os
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest
import torch
from modeling.engines import STYLES, Engine, attention
from modeling.tiny import LATENT, OF_TEXT, OTHER_BACKBONES, built, llama, opened, shake, token_ids
from torch import nn
from transformers import AutoConfig, AutoModelForCausalLM
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

import lamina
from lamina.errors import UserError
from lamina.placements import Norm, Plan, Sublayer, names
from lamina.placements.plan import Layer
from lamina.placements.wirings import WIRINGS

RULES = ("vllm", "sglang")
OPTIONS = {"plain": {}, "qk_head": {"qk_norm": "head"}, "qk_full": {"qk_norm": "full"}}
OPTIONS |= {"v_full": {"v_norm": "full"}, "v_head": {"v_norm": "head", "qk_norm": "head"}}
LOST = ("hybridnorm", "hybridnorm_star", "olmo2", "gemma3", "subln")  # their norms, while the source was not changed
FAST = [(name, "plain", None) for name in (*LOST, "muse_spark", "group_ln", "keel", "pre_ln")]
FAST += [("pre_ln", option, None) for option in ("qk_head", "v_full")]
FAST += [("pre_ln", "plain", wiring) for wiring in ("mhc", "mudd", "attn_res", "siamese")]
FAST += [("gemma3", "qk_full", "mhc"), ("subln", "v_head", "mudd")]
ALL = [(name, option, wiring) for name in names() for option in OPTIONS for wiring in (None, *WIRINGS.names())]


@pytest.fixture(autouse=True)
def engines(monkeypatch):
    for rules in RULES:
        monkeypatch.setitem(ALL_ATTENTION_FUNCTIONS._global_mapping, rules, attention)


def model_of(placement, option, wiring, **options):
    """The model, or None for a wiring that has no meaning there."""
    more = {**OPTIONS[option], **({"wiring": wiring} if wiring else {}), **options}
    try:
        return opened(built(placement, 3, config=llama(3), **more))
    except UserError:
        assert wiring
        return None


@torch.no_grad()
def check(model, folder, rules, **more):
    """Compare an engine's logits with the model's; return the engine."""
    model.save_pretrained(folder)
    ids, served = token_ids(batch=1), Engine(folder, rules, **more).load(model)
    logits = model(ids).logits
    largest = float(logits.abs().max())  # an engine's merged products round elsewhere; a lost norm is no rounding
    torch.testing.assert_close(served.logits(ids), logits, rtol=0, atol=1e-4 * max(1.0, largest))
    return served


@pytest.mark.parametrize("rules", RULES)
@pytest.mark.parametrize(("placement", "option", "wiring"), FAST)
def test_an_engine_computes_the_models_logits(placement, option, wiring, rules, tmp_path):
    served = check(model_of(placement, option, wiring), tmp_path, rules)
    if rules == "vllm":  # it has rewritten something: the queries of MUDD's later layers have inputs of their own
        assert len(served.merged) == (9 if wiring == "mudd" else 15)


@pytest.mark.slow
@pytest.mark.parametrize("placement", names())
def test_so_it_does_for_every_placement_option_and_wiring(placement, tmp_path):
    met = 0
    for index, (_, option, wiring) in enumerate(one for one in ALL if one[0] == placement):
        if (model := model_of(placement, option, wiring)) is not None:
            met += 1
            for rules in RULES:
                check(model, tmp_path / f"{index} {rules}", rules)
    assert met >= len(OPTIONS) * 8


OTHERS = [{"placement": "olmo2", "norm": kind} for kind in ("layer", "group", "l2", "dyt")]
OTHERS += [{"placement": "keel", "config": config} for config in OTHER_BACKBONES.values()]


@pytest.mark.parametrize("rules", RULES)
@pytest.mark.parametrize("options", OTHERS)
def test_other_norms_and_backbones_stay_as_they_are(options, rules, tmp_path):
    check(built(**options), tmp_path, rules)


@pytest.mark.parametrize("first", range(5))
@pytest.mark.parametrize("rules", RULES)
def test_every_formula_of_a_norm_is_a_class(first, rules, tmp_path):
    """Whichever an engine meets first."""
    norms = [Norm(), Norm(zero_centered=True), Norm(learnable_gain=False, initial_gain=2.0)]
    norms += [Norm(learnable_gain=False), Norm(kind="group", groups=4)]
    norms = norms[first:] + norms[:first]
    half = [Sublayer(pre_norm=norm, inner_norm=other) for norm, other in zip(norms, norms[1:] + norms[:1], strict=True)]
    model = lamina.build(llama(5), Plan(placement="own", layers=tuple(Layer.of(one) for one in half))).eval()
    shake(model)
    kinds = [type(layer.attention.pre_norm).__name__ for layer in model.model.layers]
    assert len(set(kinds)) == 5
    assert [kind for kind in kinds if kind.endswith("RMSNorm")] == ["LaminaRMSNorm"]
    check(model, tmp_path, rules)


@torch.no_grad()
@pytest.mark.parametrize("rules", RULES)
@pytest.mark.parametrize("wiring", [None, "mhc", "dynamic_dense"])
def test_weights_that_are_cast_to_bfloat16_give_what_transformers_gives(wiring, rules, tmp_path):
    """The wiring's numbers are cast, too, by both."""
    model_of("doge" if wiring is None else "pre_ln", "qk_head", wiring).save_pretrained(tmp_path)
    model, ids = AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.bfloat16).eval(), token_ids(batch=1)
    expected = model(ids).logits.float()
    off = Engine(tmp_path, rules, torch.bfloat16).load(model).logits(ids).float() - expected
    assert off.abs().max() < 0.02 * expected.abs().max()


OF_LOGITS = {
    "granite": ({"logits_scaling": 4.0}, 0.25),
    "hyperclovax": ({"logits_scaling": 0.25}, 0.25),
    "minicpm3": ({**LATENT, "q_lora_rank": 16, "num_key_value_heads": 4, "dim_model_base": 4}, 0.125),
    "cohere": ({"logit_scale": 0.5}, 0.5),
    "llama": ({}, None),
}


@pytest.mark.parametrize("name", OF_LOGITS)
def test_the_factor_on_the_logits_is_where_engines_read_it(name, tmp_path):
    fields, factor = OF_LOGITS[name]
    backbone = AutoConfig.for_model(name, **{**OF_TEXT, "pad_token_id": 0, **fields})
    model = built("pre_ln", config=backbone)
    before = model(token_ids()).logits
    check(model, tmp_path, "vllm")
    written = json.loads((tmp_path / "config.json").read_text())
    assert written.get("logit_scale") == getattr(model.config, "logit_scale", None) == factor
    again = AutoModelForCausalLM.from_pretrained(tmp_path).eval()
    assert torch.equal(again(token_ids()).logits, before)  # not applied twice
    assert again.config.to_dict()["backbone_config"] == model.config.to_dict()["backbone_config"]
    (tmp_path / "config.json").write_text(json.dumps({**written, "logit_scale": 3.0}))
    with pytest.raises(ValueError, match=r"logit_scale is 3.0, but backbone_config scales the logits by"):
        AutoConfig.from_pretrained(tmp_path)


@pytest.mark.parametrize("rules", RULES)
@pytest.mark.parametrize(
    ("placement", "option", "whole"),
    [("pre_ln", "plain", False), ("pre_ln", "v_head", False), ("olmo2", "plain", True), ("subln", "plain", True)],
)
def test_norms_of_all_channels_refuse_to_be_served_in_shards(placement, option, whole, rules, tmp_path):
    model = model_of(placement, option, None)
    if whole:
        with pytest.raises(ValueError, match=r"plan: a norm over all heads.*Set the tensor parallel size to 1.$"):
            check(model, tmp_path, rules, tp_size=2)
    else:
        check(model, tmp_path, rules, tp_size=2)


@pytest.mark.parametrize("rules", RULES)
@pytest.mark.parametrize(
    ("placement", "wiring", "whole"),
    [("keel", None, False), ("gemma2", None, True), ("pre_ln", "mhc", True), ("pre_ln", "x0", True)],
)
def test_what_can_not_be_staged_refuses_to_be_served_in_stages(placement, wiring, whole, rules, tmp_path):
    model = model_of(placement, "plain", wiring)
    model.save_pretrained(tmp_path)
    body = Engine(tmp_path, rules).load(model).model
    body.layers[0] = nn.Identity()  # in the place of a layer that is on another device
    if whole:
        with pytest.raises(
            ValueError,
            match=r"plan: a model cannot be split into pipeline stages if .* Set the pipeline parallel size to 1.$",
        ):
            body(input_ids=token_ids(batch=1))
    else:
        body._check_whole()


@pytest.mark.parametrize("placement", names())
def test_styles_are_those_that_both_engines_know(placement):
    model = model_of(placement, "qk_full", None)
    assert set(model.tp_plan.values()) <= STYLES
    assert set(lamina.build(OTHER_BACKBONES["qwen3"], "keel").tp_plan.values()) <= STYLES


@pytest.fixture(scope="module")
def files_of_vllm(tmp_path_factory):
    """The files of vLLM's Transformers backend, of a wheel in the folder VLLM_WHEELS, or from the package index."""
    wheels = Path(os.environ.get("VLLM_WHEELS", Path.home() / ".cache" / "lamina-tests"))
    if not (found := sorted(wheels.glob("vllm-*.whl"))):
        download = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "-d", str(wheels), "vllm==0.33.0"]
        if subprocess.run(download, capture_output=True, timeout=900).returncode:
            pytest.skip(f"no vllm-*.whl in {wheels}, and the package index does not give one")
        found = sorted(wheels.glob("vllm-*.whl"))
    folder = tmp_path_factory.mktemp("vllm")
    with zipfile.ZipFile(found[-1]) as wheel:
        inside = [one for one in wheel.namelist() if one.startswith("vllm/model_executor/models/transformers/")]
        wheel.extractall(folder, inside)
    return folder


@pytest.mark.slow
def test_the_files_of_vllm_merge_the_projections_and_keep_the_norms(files_of_vllm, tmp_path):
    wired = [("pre_ln", "plain"), ("post_ln", "plain"), ("gemma3", "plain")]
    for name, option, wiring in (one for one in ALL if one[2] is None or one[:2] in wired):
        if (model := model_of(name, option, wiring)) is not None:
            model.save_pretrained(tmp_path / f"{name}-{option}-{wiring}")
    script = Path(__file__).with_name("vllm_processes.py")
    command = [sys.executable, str(script), str(files_of_vllm), str(tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-4000:]
    results = json.loads(done.stdout.splitlines()[-1])
    assert len(results) > len(names()) * len(OPTIONS)
    assert {name: one for name, one in results.items() if one["off"] > 1e-5} == {}
    # the first layer's projections alone where MUDD gives the others three inputs
    merged = {name.endswith("mudd"): one["fused"]["QKVFuser"] for name, one in results.items()}
    assert merged == {False: 3, True: 1}
    assert results["olmo2-plain-None"]["fused"]["RMSNormFuser"] == 13
