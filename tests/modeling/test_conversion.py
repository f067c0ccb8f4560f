"""A checkpoint of transformers becomes a Lamina model with the same logits, and goes back tensor for tensor."""

import json
import subprocess
import sys

import pytest
import torch
from spread import rotated, spread
from tiny import LATENT, OF_EXPERTS, OF_TEXT, TOKENS, VOCABULARY, built, llama
from transformers import AutoConfig, AutoModelForCausalLM, GPT2Config, GPT2LMHeadModel, LlamaModel

from lamina.core.architectures import ARCHITECTURES, conversions
from lamina.errors import UserError
from lamina.modeling import LaminaForCausalLM
from lamina.modeling.backbones.conversion import from_transformers, largest_difference, load, to_transformers
from lamina.training.source import stored_plan

GEMMA = {"head_dim": 8, "query_pre_attn_scalar": 8, "sliding_window": 4, "attn_logit_softcapping": None}
MUP = {"embedding_multiplier": 3.0, "logits_scaling": 0.7, "attention_multiplier": 0.2}
MLA = {**LATENT, "q_lora_rank": None, "num_key_value_heads": 4, "head_dim": 8, "dim_model_base": 8}
MORE = {
    "mistral": {"sliding_window": 4},
    "qwen3": {"head_dim": 16},
    "exaone4": {"sliding_window": 4, "sliding_window_pattern": 2},
    **{name: OF_EXPERTS for name, row in ARCHITECTURES.items() if "router" in row.roles.values()},
    **{name: {"head_dim": 8} for name in ("gemma", "glm4", "seed_oss", "arcee", "cwm", "glm", "jais2")},
    **{name: {**MLA, "q_lora_rank": rank} for name, rank in (("deepseek_v2", None), ("deepseek_v3", 16))},
    "granitemoe": {**OF_EXPERTS, "residual_multiplier": 0.3, **MUP},
    "gemma2": {**GEMMA, "attn_logit_softcapping": 2.0, "final_logit_softcapping": 5.0},
    "granite": {"residual_multiplier": 0.3, **MUP},
    "hyperclovax": {"residual_multiplier": 0.3, "use_post_norm": True, **MUP},
    "minicpm3": {**MLA, "scale_emb": 3.0, "scale_depth": 1.4},
    "olmo3": {"sliding_window": 4, "layer_types": ["sliding_attention", "full_attention"]},
    "smollm3": {"no_rope_layers": [1, 0]},
    "gpt_neox": {"num_key_value_heads": 4},
    "stablelm": {"use_parallel_residual": True, "qk_layernorm": True},
    "cohere": {"use_qk_norm": True, "logit_scale": 0.5},
    "cohere2": {"sliding_window": 4, "layer_types": ["sliding_attention", "full_attention"]},
    "gemma3_text": {**GEMMA, "layer_types": ["sliding_attention", "full_attention"]},
}
ROUNDING = {name for name, architecture in conversions().items() if architecture.rounds}
LAST_BITS = {"gpt_neox": 1e-6, "cohere": 1e-6, "cohere2": 1e-6, "phi": 1e-6}  # of the largest logit; the rest is 0


def tiny(model_type, **changes):
    """A model of transformers with random gains, in evaluation mode."""
    config = AutoConfig.for_model(model_type, **{**OF_TEXT, **TOKENS, **MORE.get(model_type, {}), **changes})
    model = AutoModelForCausalLM.from_config(config).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.3 * torch.randn_like(parameter))
    return model


def refuse_difference(theirs, ours):
    difference, largest = largest_difference(theirs, ours)
    assert difference <= LAST_BITS.get(theirs.config.model_type, 0.0) * largest


@pytest.mark.parametrize("model_type", conversions())
def test_a_run_from_a_checkpoint_has_the_placement_that_its_weights_have(model_type, tmp_path):
    """The options that the checkpoint's configuration has fields for, such as Granite's multiplier, included."""
    model = tiny(model_type)
    model.save_pretrained(tmp_path / "theirs")
    assert stored_plan(str(tmp_path / "theirs")).to_dict() == from_transformers(model).config.plan


@pytest.mark.parametrize(("model_type", "tied"), rotated(conversions(), (False, True), every=2))
def test_there_and_back_without_a_difference(model_type, tied, tmp_path):
    theirs = tiny(model_type, tie_word_embeddings=tied)
    theirs.save_pretrained(tmp_path / "theirs")
    ours = from_transformers(tmp_path / "theirs")
    assert isinstance(ours, LaminaForCausalLM)
    refuse_difference(theirs, ours)
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
    else:
        assert difference == 0.0


@pytest.mark.parametrize("model_type", sorted(ROUNDING))
def test_in_float32_nothing_is_rounded(model_type, tmp_path):
    tiny(model_type).bfloat16().save_pretrained(tmp_path)
    refuse_difference(load(tmp_path, dtype="float32"), from_transformers(tmp_path, dtype="float32"))


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


@torch.no_grad()
def test_a_cache_and_a_clean_process_change_nothing(tmp_path):
    ids, folders = torch.randint(3, VOCABULARY, (2, 9)), []
    how = {"do_sample": False, "max_new_tokens": 12, "min_new_tokens": 12, "pad_token_id": 0}
    for model_type in ("gpt_neox", "cohere2", "phi"):
        theirs = tiny(model_type)
        ours = from_transformers(theirs)
        assert torch.equal(ours.generate(ids, **how), theirs.generate(ids, **how))
        ours.save_pretrained(tmp_path / model_type)
        torch.save({"ids": ids, "logits": ours(input_ids=ids).logits}, tmp_path / f"{model_type}.pt")
        folders.append(str(tmp_path / model_type))
    code = f"""
import sys, torch
from transformers import AutoModelForCausalLM
for folder in {folders}:
    told = torch.load(folder + ".pt")
    model = AutoModelForCausalLM.from_pretrained(folder, trust_remote_code=True).eval()
    assert "lamina" not in sys.modules
    print((model(input_ids=told["ids"]).logits - told["logits"]).abs().max().item())
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=tmp_path)
    differences = [float(line) for line in done.stdout.split()]
    assert len(differences) == 3, done.stderr
    assert max(differences) < 1e-5  # with as many threads as it likes


def test_layers_that_return_more_than_the_stream_are_refused(tmp_path):
    config = AutoConfig.for_model("gptj", n_embd=16, n_layer=1, n_head=2, rotary_dim=4, vocab_size=VOCABULARY)
    AutoModelForCausalLM.from_config(config).save_pretrained(tmp_path)
    with pytest.raises(UserError, match=r"^model_type: Lamina cannot convert 'gptj': its layers return more"):
        from_transformers(tmp_path)


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


def test_an_unknown_architecture_is_refused(tmp_path):
    model = GPT2LMHeadModel(GPT2Config(n_embd=16, n_layer=1, n_head=2, vocab_size=61))
    model.save_pretrained(tmp_path)
    for source in (tmp_path, model):
        with pytest.raises(UserError, match=r"model_type: Lamina cannot convert 'gpt2' .allowed: apertus, .*llama"):
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
