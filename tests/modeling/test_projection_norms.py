"""Norms on q, k and v stand beside plain linear layers: they outlive LoRA, quantization and a change of names."""

import copy
import pickle
import subprocess
import sys

import pytest
import torch
from tiny import SIZES, VOCABULARY, built, llama, token_ids
from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForMaskedLM

import lamina
from lamina.modeling.wiring_lamina import LaminaLayerNorm, LaminaNorm, LaminaRMSNorm
from lamina.placements import names, resolve

ENCODERS = ("modernbert hybridnorm", "modernbert olmo2")
ALL = (*names(), *ENCODERS)
AUTO = {name: AutoModelForMaskedLM if name in ENCODERS else AutoModelForCausalLM for name in ALL}


def model_of(name):
    torch.manual_seed(0)
    backbone, _, placement = name.rpartition(" ")
    encoder = AutoConfig.for_model("modernbert", pad_token_id=0, vocab_size=VOCABULARY, **SIZES)
    return built(placement, 2, config=encoder if backbone else llama(2))


@torch.no_grad()
def logits(model):
    return model.eval()(input_ids=token_ids()).logits


def norms_of(model):
    return {n: m for n, m in model.named_modules() if isinstance(m, LaminaNorm)}


def inner_norms(model):
    return {n for n in norms_of(model) if n.endswith(("q_norm", "k_norm", "v_norm"))}


def expected_inner_norms(name):
    plan = resolve(name.rpartition(" ")[2], 2)
    return 2 * (2 * (plan.qk_norm != "off") + (plan.v_norm != "off"))


@pytest.mark.parametrize("name", ALL)
def test_projections_are_plain_linear_layers(name):
    model = model_of(name)
    assert len(inner_norms(model)) == expected_inner_norms(name)
    for block in model.model.layers:
        projections = [m for n, m in block.attention.module.named_children() if n in ("q_proj", "k_proj", "v_proj")]
        projections += [m for n, m in block.attention.module.named_children() if n == "Wqkv"]
        assert len(projections) == (1 if name in ENCODERS else 3)
        assert {type(m) for m in projections} == {torch.nn.Linear}
        assert not any(m._forward_hooks or m._forward_pre_hooks for m in projections)


@pytest.mark.parametrize("name", [n for n in ALL if n not in ("rezero", "skipinit")])  # their states grow without bound
def test_an_adapter_trains_saves_loads_and_merges(name, tmp_path):
    """The check on the review's own case: merging took hybridnorm from a loss of 1.053 to 3.924."""
    peft = pytest.importorskip("peft")
    model = model_of(name)
    before, kept = logits(model), set(norms_of(model))
    tuned = peft.get_peft_model(model, peft.LoraConfig(r=4))  # PEFT knows the targets
    optimizer = torch.optim.SGD([p for p in tuned.parameters() if p.requires_grad], lr=0.5)
    for _ in range(2):  # the first step moves B alone, which starts at 0
        tuned.train()(input_ids=token_ids(), labels=token_ids()).loss.backward()
        optimizer.step()
    trained = logits(tuned)
    assert (trained - before).abs().max() > 1e-3
    tuned.save_pretrained(tmp_path / "adapter")

    again = peft.PeftModel.from_pretrained(model_of(name), tmp_path / "adapter")
    assert torch.equal(logits(again), trained)
    with again.disable_adapter():
        assert torch.equal(logits(again), before)
    merged = again.merge_and_unload()
    assert set(norms_of(merged)) == kept
    # W + BA in place of two products: rounding, of the same order as that of any other sum.
    torch.testing.assert_close(logits(merged), trained, rtol=1e-4, atol=1e-4)
    merged.save_pretrained(tmp_path / "merged")
    loaded = AUTO[name].from_pretrained(tmp_path / "merged")
    assert torch.equal(logits(loaded), logits(merged))


@pytest.mark.parametrize("name", ["hybridnorm", "olmo2", *ENCODERS])
def test_copies_and_pickles_compute_the_same(name):
    model = model_of(name)
    for again in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        assert torch.equal(logits(again), logits(model))
        assert inner_norms(again) == inner_norms(model)


@pytest.mark.slow  # a process that imports transformers
def test_a_normed_attention_is_unpickled_in_a_fresh_process(tmp_path):
    attention = model_of("hybridnorm").model.layers[0].attention.module
    (tmp_path / "attention.pickle").write_bytes(pickle.dumps(attention))
    code = "import pickle, sys; print(type(pickle.load(open(sys.argv[1], 'rb')).v_norm).__name__)"
    done = subprocess.run([sys.executable, "-c", code, str(tmp_path / "attention.pickle")], capture_output=True)
    assert done.stdout.decode().strip() == "LaminaRMSNorm", done.stderr.decode()


def test_norms_built_on_the_meta_device_are_there():
    with torch.device("meta"):
        model = lamina.build(llama(2), "hybridnorm")
    assert len(inner_norms(model)) == 6
    assert all(p.is_meta for p in model.parameters())


@pytest.mark.parametrize("name", ["hybridnorm", "olmo2"])
def test_the_kind_of_norm_reaches_queries_keys_and_values(name):
    def kinds(**options):
        model = lamina.build(llama(2), name, **options)
        return {type(m) for n, m in norms_of(model).items() if n in inner_norms(model)}

    assert kinds() == kinds(norm="rms") == {LaminaRMSNorm}
    assert kinds(norm="layer") == {LaminaLayerNorm}


def test_a_group_of_heads_is_normed_head_by_head():
    model = lamina.build(llama(2), "pre_ln", qk_norm="head", v_norm="full", norm="group", groups=4)
    attention = model.model.layers[0].attention.module
    assert type(attention.q_norm) is LaminaRMSNorm
    assert attention.v_norm.groups == 4
