"""A backbone with its own placement gives the logits of the transformers model on the same weights, to the last bit."""

import pytest
import torch
from modeling.tiny import LATENT, OF_EXPERTS, OF_TEXT, SIZES, TOKENS, VOCABULARY, token_ids
from spread import rotated
from transformers import AutoConfig, AutoModelForCausalLM

import lamina
from lamina.core.architectures import ROLES
from lamina.errors import UserError
from lamina.modeling.initialization import weights
from lamina.modeling.parts import decaying
from lamina.placements import names, resolve

PRE_LN = {"input_layernorm": "attention.pre_norm", "post_attention_layernorm": "feed_forward.pre_norm"}
PERI_LN = {"input_layernorm": "attention.pre_norm", "post_attention_layernorm": "attention.out_norm"}
PERI_LN |= {"pre_feedforward_layernorm": "feed_forward.pre_norm", "post_feedforward_layernorm": "feed_forward.out_norm"}
OUT_LN = {"post_attention_layernorm": "attention.out_norm", "post_feedforward_layernorm": "feed_forward.out_norm"}
NUM_LAYERS = 2
KNOWN_ROLES = {*ROLES.values(), "embedding", "readout", "vector", "bias", "wiring"}
APERTUS = {"attention_layernorm": "attention.pre_norm", "feedforward_layernorm": "feed_forward.pre_norm"}
GLM4 = {"input_layernorm": "attention.pre_norm", "post_self_attn_layernorm": "attention.out_norm"}
GLM4 |= {"post_attention_layernorm": "feed_forward.pre_norm", "post_mlp_layernorm": "feed_forward.out_norm"}
HYPERCLOVA = {**PRE_LN, "post_norm1": "attention.out_norm", "post_norm2": "feed_forward.out_norm"}
MUP = {"embedding_multiplier": 3.0, "logits_scaling": 0.7, "attention_multiplier": 0.2, "residual_multiplier": 0.3}
MLA = {**LATENT, "q_lora_rank": None, "num_key_value_heads": 4, "head_dim": 8}
ALTERNATING = {"sliding_window": 4, "layer_types": ["sliding_attention", "full_attention"]}
GEMMA = {"head_dim": 8, "query_pre_attn_scalar": 8, "sliding_window": 4}
BACKBONES = {
    "llama": ("pre_ln", PRE_LN, {}),
    "apertus": ("pre_ln", APERTUS, {}),
    "ernie4_5": ("pre_ln", PRE_LN, {}),
    "exaone4": ("out_ln", OUT_LN, {"sliding_window": 4, "sliding_window_pattern": 2}),
    "gemma": ("pre_ln", PRE_LN, {"head_dim": 16}),
    "glm4": ("sandwich_ln", GLM4, {"head_dim": 8}),
    "phi3": ("pre_ln", PRE_LN, {"resid_pdrop": 0.0}),
    "seed_oss": ("pre_ln", PRE_LN, {"head_dim": 8}),
    "starcoder2": ("pre_ln", PRE_LN, {"sliding_window": 4}),
    "mistral": ("pre_ln", PRE_LN, {"sliding_window": 4}),
    "qwen2": ("pre_ln", PRE_LN, {}),
    "qwen3": ("pre_ln", PRE_LN, {"head_dim": 16}),
    "deepseek_v3": ("pre_ln", PRE_LN, MLA),
    "deepseek_v2": ("pre_ln", PRE_LN, MLA),
    "gemma3_text": ("gemma3(qk_norm=off, embedding_scale=1, zero_centered=false)", PERI_LN, {**GEMMA, **ALTERNATING}),
    "gemma2": ("gemma2(embedding_scale=1, zero_centered=false)", PERI_LN, GEMMA),
    "olmo2": ("out_ln", OUT_LN, {}),
    "olmo3": ("out_ln", OUT_LN, ALTERNATING),
    "smollm3": ("pre_ln", PRE_LN, {"no_rope_layers": [1, 0]}),
    "granite": ("granite(multiplier=0.3)", PRE_LN, MUP),
    "hyperclovax": ("granite(multiplier=0.3,out_norm=true)", HYPERCLOVA, {**MUP, "use_post_norm": True}),
    "gpt_neox": ("pre_ln(wiring=parallel)", PRE_LN, {"num_key_value_heads": 4}),
    "stablelm": ("pre_ln(wiring=parallel)", PRE_LN, {"use_parallel_residual": True}),
    "cohere": ("pre_ln(wiring=parallel)", PRE_LN, {"logit_scale": 0.5, "use_qk_norm": True}),
    "cohere2": ("pre_ln(wiring=parallel)", PRE_LN, ALTERNATING),
    "phi": ("pre_ln(wiring=parallel)", PRE_LN, {}),
    "minicpm3": ("minicpm", PRE_LN, {**MLA, "scale_emb": 3.0, "scale_depth": 1.4, "dim_model_base": 8}),
}
# Layers of those above, but for experts, an activation, or norms inside their modules.
ALIKE = {
    **dict.fromkeys(("arcee", "bitnet", "glm", "jais2", "ministral3"), ("pre_ln", PRE_LN, {"head_dim": 8})),
    "cwm": ("pre_ln", PRE_LN, {"head_dim": 8, "sliding_window": 4}),
    **dict.fromkeys(
        ("glm4_moe", "minimax_m2", "mixtral", "olmoe", "phimoe", "qwen2_moe", "qwen3_moe", "solar_open"),
        ("pre_ln", PRE_LN, OF_EXPERTS),
    ),
    "exaone_moe": ("pre_ln", PRE_LN, {**OF_EXPERTS, "sliding_window": 4, "sliding_window_pattern": 2}),
    "doge": ("doge", PRE_LN, {}),
    "granitemoe": ("granite(multiplier=0.3)", PRE_LN, {**OF_EXPERTS, **MUP}),
}


PLUS_ONE = {"gemma", "gemma2", "gemma3_text"}
# On queries and keys: they have their own, or no such projections.
NO_MORE_NORMS = {"apertus", "exaone4", "phi3", "qwen3", "olmo2", "olmo3", "minicpm3", "deepseek_v2", "deepseek_v3"}
NO_MORE_NORMS |= {"gemma3_text", "gpt_neox", "cohere"}


def configuration(model_type, **changes):
    sizes = {**OF_TEXT, **TOKENS, "num_hidden_layers": NUM_LAYERS}
    return AutoConfig.for_model(model_type, **{**sizes, **{**BACKBONES, **ALIKE}[model_type][2], **changes})


LAST_BITS = {"gpt_neox", "cohere", "cohere2", "phi"}  # another order of sums, or LayerNorms step by step
ONE_NORM = {"stablelm", "cohere", "cohere2", "phi"}  # for both branches


def copy_weights(theirs, ours, renamed, plus_one):
    """Every parameter and buffer of theirs into ours, a gain that is stored as w and means 1 + w as 1 + w."""
    state = {}
    for key, tensor in theirs.state_dict().items():
        for norm, position in renamed.items():
            key = key.replace(f".{norm}.", f".{position}.")
        own = ".attention.query" in key or ".attention.dense" in key
        key = key.replace(".attention.", ".self_attn.") if own else key
        key = key.replace("self_attn.", "attention.module.").replace(".mlp.", ".feed_forward.module.")
        key = key.replace(".block_sparse_moe.", ".feed_forward.module.")
        key = key.replace(".input_residual", ".attention.skip_scale")
        key = key.replace(".post_attention_residual", ".feed_forward.skip_scale")
        key = key.replace("gpt_neox.", "model.").replace("model.", "model.backbone.", 1)
        own = key.endswith(("q_norm.weight", "k_norm.weight"))  # stay the backbone's modules
        is_norm = plus_one and key.endswith("norm.weight") and not own
        state[key] = tensor + 1 if is_norm else tensor
        if ".attention.pre_norm." in key and theirs.config.model_type in ONE_NORM:
            state[key.replace("attention", "feed_forward")] = tensor
    ours.load_state_dict(state)


@pytest.fixture(params=[*BACKBONES, *ALIKE])
def pair(request):
    torch.manual_seed(0)
    placement, renamed, _ = {**BACKBONES, **ALIKE}[request.param]
    config = configuration(request.param)
    theirs = AutoModelForCausalLM.from_config(config).eval()
    with torch.no_grad():
        for parameter in theirs.parameters():
            parameter.add_(0.2 * torch.randn_like(parameter))
    ours = lamina.build(config, placement).eval()
    copy_weights(theirs, ours, renamed, plus_one=request.param in PLUS_ONE)
    return theirs, ours


@torch.no_grad()
def test_padded_logits_loss_and_every_state_are_those_of_transformers(pair):
    ids = token_ids()
    mask = torch.ones_like(ids)
    mask[0, :3] = 0
    given = {"input_ids": ids, "labels": ids.masked_fill(mask == 0, -100), "output_hidden_states": True}
    theirs, ours = (model(**given, attention_mask=mask) for model in pair)
    kept = mask == 1
    close = 1e-5 if pair[0].config.model_type in LAST_BITS else 0
    torch.testing.assert_close(ours.logits[kept], theirs.logits[kept], rtol=0, atol=close)
    assert ours.loss.item() == pytest.approx(theirs.loss.item(), rel=close, abs=0)
    assert len(theirs.hidden_states) == len(ours.hidden_states) == NUM_LAYERS + 1
    last = pair[1].model.norm(ours.hidden_states[-1])  # theirs is the normed one
    for one, other in zip(theirs.hidden_states, (*ours.hidden_states[:-1], last), strict=True):
        torch.testing.assert_close(one[kept], other[kept], rtol=0, atol=close)


@torch.no_grad()
def test_generation_with_a_cache_gives_the_tokens_of_transformers(pair):
    theirs, ours = pair
    how = {"do_sample": False, "max_new_tokens": 7, "min_new_tokens": 7, "pad_token_id": 0}
    assert torch.equal(ours.generate(token_ids(), **how), theirs.generate(token_ids(), **how))


@pytest.mark.parametrize(("model_type", "name"), rotated(BACKBONES, names()))
def test_every_placement_trains_on_every_backbone_and_every_weight_has_a_role(model_type, name):
    config = configuration(model_type)
    no_last = name == "subln" and model_type in ("deepseek_v2", "deepseek_v3")  # experts
    if no_last or (resolve(name, NUM_LAYERS).qk_norm != "off" and model_type in NO_MORE_NORMS):
        with pytest.raises(UserError, match="_norm"):
            lamina.build(config, name)
        return
    model = lamina.build(config, name).train()
    output = model(input_ids=token_ids(), labels=token_ids())
    output.loss.backward()
    assert output.loss.isfinite()
    assert not [key for key in decaying(model) if "norm" in key]  # Cohere's gains on queries are matrices
    for key, parameter in model.named_parameters():
        assert parameter.grad is not None or "experts" in key, key
    covered = list(weights(model))
    assert [weight.name for weight in covered] == [key for key, _ in model.named_parameters()]
    for weight in covered:
        assert weight.role in KNOWN_ROLES, weight.name
        assert (weight.layer >= 0) == (".layers." in weight.name)
        if weight.layer >= 0:
            assert weight.sublayer == weight.name.split(".layers.")[1].split(".")[1]


@pytest.mark.parametrize(
    ("model_type", "option", "why"),
    [
        ("qwen3", "qk_norm", ".* already has a norm"),
        ("olmo2", "qk_norm", ".* already has a norm"),
        ("deepseek_v3", "qk_norm", "'head' does not work, because .* has "),
        ("deepseek_v3", "v_norm", "'head' does not work, because .* has "),
    ],
)
def test_norms_on_projections_that_are_not_there_or_are_normed_are_refused(model_type, option, why):
    with pytest.raises(UserError, match=f"{option}: {why}"):
        lamina.build(configuration(model_type), "pre_ln", **{option: "head"})


@pytest.mark.parametrize("model_type", ["gpt2", "gptj", "t5", "bert"])  # small by the names that each has for its sizes
def test_a_backbone_that_cannot_be_wired_is_refused_by_name(model_type):
    small = {"vocab_size": VOCABULARY, "pad_token_id": 0}
    small |= {
        "gpt2": {"n_embd": 32, "n_head": 4},
        "gptj": {"n_embd": 32, "n_head": 4},
        "t5": {"d_model": 32, "d_ff": 48, "num_heads": 4, "d_kv": 8},
        "bert": SIZES,
    }[model_type]
    why = "the layers of this model type return more" if model_type == "gptj" else "there is no module"
    with pytest.raises(UserError, match=f"^backbone '{model_type}': .*{why}"):
        lamina.build(AutoConfig.for_model(model_type, **small), "pre_ln", num_layers=2)


def test_one_layer_without_a_norm_does_not_make_the_branches_parallel():
    names = {"attention": "attn", "norm": "final_norm", "embedding_norm": "embeddings.norm"}
    config = AutoConfig.for_model("modernbert-decoder", **SIZES, vocab_size=VOCABULARY, pad_token_id=0)
    assert lamina.build(config, "pre_ln", adapter=names).model.layers[1].attention.pre_norm is not None


def test_a_backbone_whose_layer_does_more_than_a_placement_says_is_refused():
    """Some scale each branch, some run both branches side by side: silently another model otherwise."""
    for model_type, more, why in (
        ("granitemoe_swa", {"residual_multiplier": 0.22}, ""),
        ("cohere2_moe", {"num_experts": 4, "num_experts_per_tok": 2}, r"in parallel. Add wiring=parallel"),
    ):
        with pytest.raises(UserError, match=f"{model_type}.*{why}"):
            lamina.build(AutoConfig.for_model(model_type, **OF_TEXT, **TOKENS, **more), "pre_ln")
