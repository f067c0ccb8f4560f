"""A checkpoint of transformers becomes a Lamina model with the same logits, and goes back tensor for tensor."""

import json
from pathlib import Path

import pytest
import torch
from modeling.tiny import VOCABULARY, built, llama
from spread import rotated, spread
from test_backbone_parity import LAST_BITS, configuration
from transformers import AutoConfig, AutoModelForCausalLM, LlamaModel

from lamina.core.architectures import conversions
from lamina.errors import UserError
from lamina.modeling import LaminaForCausalLM
from lamina.modeling.backbones.conversion import from_transformers, largest_difference, load, to_transformers
from lamina.placements import resolve
from lamina.training.source import stored_plan

MORE = {  # beside the fields of the same weights' parity
    "gemma2": {"attn_logit_softcapping": 2.0, "final_logit_softcapping": 5.0},
    "deepseek_v3": {"q_lora_rank": 16},
    "stablelm": {"qk_layernorm": True},
}
ROUNDING = {name for name, architecture in conversions().items() if architecture.rounds}


def tiny(model_type, **changes):
    """A model of transformers with random gains, in evaluation mode."""
    config = configuration(model_type, **MORE.get(model_type, {}), **changes)
    model = AutoModelForCausalLM.from_config(config).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.3 * torch.randn_like(parameter))
    return model


def refuse_difference(theirs, ours):
    difference, largest = largest_difference(theirs, ours)
    assert difference <= (1e-6 * largest if theirs.config.model_type in LAST_BITS else 0.0)


def test_a_model_type_has_one_name_in_the_census_and_in_conversions():
    """Norms inside a module come along with the module, so that the name leaves them out."""
    record = json.loads((Path(__file__).parents[2] / "benchmarks" / "results" / "census.json").read_text())
    for row in record["families"]:
        conversion, match = conversions().get(row["family"]), row["match"]
        if conversion and match and resolve(match["placement"], 4).layers[0].attention.inner_norm is None:
            assert conversion.placement.partition("(")[0] == match["placement"].partition("(")[0], row["family"]


@pytest.mark.parametrize("model_type", ["gemma2", "gemma3_text"])
def test_a_model_that_was_converted_under_its_old_name_goes_back(model_type):
    theirs = tiny(model_type)
    ours = from_transformers(theirs)
    ours.config.plan = resolve("peri_ln(embedding_norm=false)", theirs.config.num_hidden_layers).to_dict()
    back = to_transformers(ours)
    assert type(back) is type(theirs)
    assert largest_difference(theirs, back)[0] == 0.0


@pytest.mark.parametrize(("model_type", "tied"), rotated(conversions(), (False, True), every=2))
def test_there_and_back_without_a_difference(model_type, tied, tmp_path):
    theirs = tiny(model_type, tie_word_embeddings=tied)
    theirs.save_pretrained(tmp_path / "theirs")
    ours = from_transformers(tmp_path / "theirs")
    assert isinstance(ours, LaminaForCausalLM)
    refuse_difference(theirs, ours)
    assert stored_plan(str(tmp_path / "theirs")).to_dict() == ours.config.plan  # which a run --from it begins with
    ours.save_pretrained(tmp_path / "ours")
    back = to_transformers(tmp_path / "ours")
    assert type(back) is type(theirs)
    assert largest_difference(theirs, back)[0] == 0.0
    for key, tensor in theirs.state_dict().items():  # a gain read as 1 + w and stored as w is rounded once
        assert torch.allclose(back.state_dict()[key], tensor, rtol=0, atol=1e-6), key
        if not conversions()[model_type].gain_offset:
            assert torch.equal(back.state_dict()[key], tensor), key
    before, after = theirs.config.to_dict(), back.config.to_dict()
    assert {k for k, v in before.items() if after.get(k) != v} <= {"_name_or_path", "architectures"}
    assert (ours.lm_head.weight is ours.get_input_embeddings().weight) is tied


@pytest.mark.parametrize("model_type", spread(conversions(), [*ROUNDING, "llama", "deepseek_v3", "granite", "olmo2"]))
def test_a_checkpoint_in_half_precision_stays_in_it(model_type, tmp_path):
    tiny(model_type).bfloat16().save_pretrained(tmp_path)
    theirs, ours = load(tmp_path), from_transformers(tmp_path)
    assert {p.dtype for p in ours.parameters()} == {torch.bfloat16}
    difference, largest = largest_difference(theirs, ours)
    if model_type in ROUNDING:
        assert difference < 0.1 * largest
        assert difference > 0 or model_type in ("cohere", "cohere2")  # torch's LayerNorm rounds once, as theirs does
        refuse_difference(load(tmp_path, dtype="float32"), from_transformers(tmp_path, dtype="float32"))
    else:
        assert difference == 0.0


@pytest.mark.parametrize("model_type", ["gpt_neox", "stablelm"])
def test_branches_one_after_the_other_are_pre_ln(model_type):
    theirs = tiny(model_type, use_parallel_residual=False)
    ours = from_transformers(theirs)
    assert largest_difference(theirs, ours)[0] == 0.0
    assert largest_difference(theirs, to_transformers(ours))[0] == 0.0


@pytest.mark.parametrize("model_type", ["cohere", "phi", "stablelm"])
def test_two_norms_that_were_trained_apart_become_one(model_type):
    ours = from_transformers(tiny(model_type))
    with torch.no_grad():
        for block in ours.model.layers:
            for parameter in block.feed_forward.pre_norm.parameters():
                parameter.add_(0.3 * torch.randn_like(parameter))
    if model_type == "stablelm":
        with pytest.raises(UserError, match=r"plan: layer 0 has two norms with different biases, .*'q_proj'"):
            to_transformers(ours)
        return
    theirs = to_transformers(ours)
    difference, largest = largest_difference(ours, theirs)
    assert 0 < difference < 1e-5 * largest


def test_a_model_in_memory_is_copied_not_shared():
    theirs = tiny("llama")
    ours = from_transformers(theirs)
    assert largest_difference(theirs, ours)[0] == 0.0
    with torch.no_grad():
        ours.lm_head.weight.zero_()
    assert theirs.lm_head.weight.abs().max() > 0
    assert theirs.config.model_type == "llama"


def test_the_wrong_direction_is_refused():
    with pytest.raises(UserError, match="already a Lamina model"):
        from_transformers(built("pre_ln"))
    with pytest.raises(UserError, match="LaminaForCausalLM"):
        to_transformers(tiny("llama"))
    with pytest.raises(UserError, match="LlamaForCausalLM"):
        from_transformers(LlamaModel(llama(1)))


@pytest.mark.parametrize(
    ("model_type", "why"),
    [("gpt2", " .allowed: apertus, .*llama"), ("gptj", ": the layers of this model type return more")],
)
def test_an_architecture_that_cannot_be_converted_is_refused(model_type, why, tmp_path):
    config = AutoConfig.for_model(model_type, n_embd=16, n_layer=1, n_head=2, rotary_dim=4, vocab_size=VOCABULARY)
    model = AutoModelForCausalLM.from_config(config)
    model.save_pretrained(tmp_path)
    for source in (tmp_path, model):
        with pytest.raises(UserError, match=f"^model_type: Lamina cannot convert '{model_type}'{why}"):
            from_transformers(source)


def rewrite(folder, change):
    """Change the tensors of a saved model."""
    from safetensors.torch import load_file, save_file

    tensors = load_file(folder / "model.safetensors")
    change(tensors)
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (lambda t: t.pop("model.layers.1.mlp.up_proj.weight"), "missing tensor 'model.layers.1.mlp.up_proj.weight'"),
        (
            lambda t: t.update({"model.layers.0.self_attn.x": torch.ones(2)}),
            "extra tensor 'model.layers.0.self_attn.x'",
        ),
        (
            lambda t: t.update({"lm_head.weight": torch.ones(60, 32)}),
            r"tensor 'lm_head.weight': its shape is \[60, 32\]",
        ),
    ],
)
def test_tensors_are_accounted_for(tmp_path, change, said):
    tiny("llama").save_pretrained(tmp_path / "theirs")
    rewrite(tmp_path / "theirs", change)
    with pytest.raises(UserError, match=said):
        from_transformers(tmp_path / "theirs")


def test_a_head_of_its_own_in_a_tied_checkpoint_is_refused(tmp_path):
    tiny("llama", tie_word_embeddings=True).save_pretrained(tmp_path)
    rewrite(tmp_path, lambda t: t.update({"lm_head.weight": torch.ones(VOCABULARY, 32)}))
    with pytest.raises(UserError, match="tie_word_embeddings"):
        from_transformers(tmp_path)


def test_quantized_weights_are_refused(tmp_path):
    tiny("llama").save_pretrained(tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps({**config, "quantization_config": {"quant_method": "gptq"}}))
    with pytest.raises(UserError, match="quantization_config"):
        from_transformers(tmp_path)
