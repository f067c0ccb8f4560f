"""Placements that equal an architecture of transformers on another backbone: the logits of both are compared."""

from dataclasses import replace

import pytest
import torch
from modeling.tiny import OF_TEXT, built, llama, token_ids
from transformers import AutoModelForCausalLM, Gemma2Config, MistralConfig, Qwen2Config

import lamina
from lamina.errors import UserError
from lamina.modeling.backbones.conversion import EQUIVALENTS, to_transformers
from lamina.placements import Norm, names, resolve

SIZES = {**OF_TEXT, "num_hidden_layers": 4}


def without_gains(placement):
    """The plan with norms of a constant gain before each sub-layer."""
    plan, norm = resolve(placement, 4), Norm(learnable_gain=False, initial_gain=0.5)
    halves = ("attention", "feed_forward")
    layers = (replace(x, **{half: replace(getattr(x, half), pre_norm=norm) for half in halves}) for x in plan.layers)
    return replace(plan, layers=tuple(layers))


def with_branches(placement, **fields):
    """The plan with these fields in each sub-layer."""
    plan = resolve(placement, 4)
    return replace(plan, layers=tuple(layer.map(lambda sub: replace(sub, **fields)) for layer in plan.layers))


# Every placement on a Llama, at its defaults: the architecture of transformers that computes it.
ON_A_LLAMA = {"pre_ln": "llama", "layernorm_scaling": "llama", "olmo2": "olmo2", "sandwich_ln": "glm4"}
ON_A_LLAMA |= {"peri_ln": "glm4", **dict.fromkeys(("granite", "minicpm", "layerscale"), "llama")}
ON_A_LLAMA |= {**dict.fromkeys(("gemma2", "sandwich_depth_scaled"), "glm4")}
CASES = {
    **{name: (name, llama(4), {}) for name in ON_A_LLAMA},
    "mix_ln without Post-LN layers": ("mix_ln", llama(4), {"num_post_layers": 0}),
    "norms without learned gains": (without_gains("sandwich_ln"), llama(4), {}),
    "an embedding that is scaled": ("pre_ln", llama(4, tie_word_embeddings=True), {"embedding_scale": 3.0}),
    "heads of another width": ("pre_ln", llama(4, head_dim=16), {}),
    "scaled branches": (with_branches("pre_ln", out_scale=0.3), llama(4), {}),
    "branches scaled by channel": (with_branches("pre_ln", out_scale_learned="vector"), llama(4), {}),
    "normed branches with a learned scale": (with_branches("sandwich_ln", out_scale_learned="scalar"), llama(4), {}),
    "tied": ("pre_ln", llama(4, tie_word_embeddings=True), {}),
    "olmo2, tied": ("olmo2", llama(4, tie_word_embeddings=True), {}),
    "peri_ln, tied": ("peri_ln", llama(4, tie_word_embeddings=True), {}),
    "qwen3": ("pre_ln", llama(4, head_dim=128), {"qk_norm": "head"}),
    "exaone4": ("out_ln", llama(4), {"qk_norm": "head"}),
    "qwen2": ("pre_ln", Qwen2Config(**SIZES), {}),
    "mistral": ("pre_ln", MistralConfig(**SIZES, sliding_window=None), {}),
    "on a Gemma 2": ("peri_ln", Gemma2Config(**SIZES, head_dim=256, sliding_window=8), {"embedding_norm": False}),
}
# A factor that goes into a gain is rounded once more; Glm4 and Gemma 2 order their sums in another way.
TOLERANCE = 2e-5


@torch.no_grad()
def logits(model):
    return model.eval()(input_ids=token_ids(length=17)).logits


def difference(one, other):
    return float((logits(one) - logits(other)).abs().max())


@pytest.mark.parametrize("case", CASES)
def test_the_architecture_that_computes_a_placement_is_found_and_loads(case, tmp_path):
    placement, config, options = CASES[case]
    model = built(placement, config=config, **options)
    same = to_transformers(model)
    assert same.config.model_type == ON_A_LLAMA.get(case, case if case in EQUIVALENTS else same.config.model_type)
    assert difference(same, model) < TOLERANCE
    same.save_pretrained(tmp_path)
    again = AutoModelForCausalLM.from_pretrained(tmp_path)
    assert type(again).__module__.startswith("transformers.")
    assert difference(again, same) == 0.0


@pytest.mark.parametrize("placement", sorted(set(names()) - set(ON_A_LLAMA)))
def test_a_placement_that_no_architecture_has_is_refused_in_one_line(placement):
    with pytest.raises(
        UserError, match="transformers has no model class with the norms and scales of this placement"
    ) as refusal:
        to_transformers(built(placement, 4))
    assert "\n" not in str(refusal.value)


@pytest.mark.parametrize(
    ("config", "options", "message"),
    [
        (llama(4), {"norm": "layer"}, "transformers has no model class with"),
        (llama(4), {"final_norm": False}, "transformers has no model class with"),
        (llama(4), {"v_norm": "head"}, "transformers has no model class with"),
        (llama(4), {"qk_norm": "full"}, "transformers has no model class with"),
        *((llama(4), {"wiring": w}, "transformers has no model class with") for w in ("mhc", "x0", "parallel")),
        (llama(4, hidden_act="gelu"), {"qk_norm": "head"}, "this backbone's biases, activation"),
        (llama(4, mlp_bias=True), {"qk_norm": "head"}, "this backbone's biases, activation"),
        (Gemma2Config(**SIZES, head_dim=8), {}, "on the backbone 'gemma2'"),
        (MistralConfig(**SIZES, sliding_window=8), {"qk_norm": "head"}, r"a sliding window \(8 tokens\)"),
    ],
)
def test_so_is_another_equation_under_the_name_of_pre_ln(config, options, message):
    with pytest.raises(UserError, match=message):
        to_transformers(lamina.build(config, "pre_ln", **options))
