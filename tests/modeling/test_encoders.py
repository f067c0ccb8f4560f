"""ModernBERT and ViT: parity with transformers, heads, the embedding's norm, saving, and every placement."""

import copy
import pickle

import pytest
import torch
from modeling.tiny import SIZES, TOKENS, VOCABULARY, llama, opened, shake, token_ids
from spread import rotated
from transformers import (
    AutoConfig,
    AutoModelForImageClassification,
    AutoModelForMaskedLM,
    AutoModelForSequenceClassification,
)

import lamina
from lamina.errors import UserError
from lamina.modeling import LaminaForImageClassification, LaminaForMaskedLM, LaminaForSequenceClassification
from lamina.modeling.initialization import weights
from lamina.placements import Layer, Norm, Plan, Sublayer, names, resolve

NUM_LAYERS = 4
LABELS = 5
FIELDS = {
    "modernbert": {**TOKENS, "vocab_size": VOCABULARY, "cls_token_id": 1, "sep_token_id": 2, "local_attention": 4},
    "vit": {"image_size": 16, "patch_size": 4, "num_labels": LABELS},
}
MODERNBERT = {".attn_norm.": ".attention.pre_norm.", ".mlp_norm.": ".feed_forward.pre_norm."}
MODERNBERT |= {".attn.": ".attention.module.", ".mlp.": ".feed_forward.module."}
MODERNBERT |= {"model.embeddings.norm": "model.embedding_norm"}
MODERNBERT |= {f"model.{name}": f"model.backbone.{name}" for name in ("embeddings", "layers", "final_norm")}
VIT = {".attention.": ".attention.module.", ".mlp.": ".feed_forward.module.", "vit.": "model.backbone."}
VIT |= {".layernorm_before.": ".attention.pre_norm.", ".layernorm_after.": ".feed_forward.pre_norm."}
RENAMED = {"modernbert": MODERNBERT, "vit": VIT}
AUTO = {"modernbert": AutoModelForMaskedLM, "vit": AutoModelForImageClassification}
over_both = pytest.mark.parametrize("model_type", AUTO)


def configuration(model_type, **changes):
    sizes = {**SIZES, "num_hidden_layers": NUM_LAYERS}
    return AutoConfig.for_model(model_type, **{**sizes, **FIELDS[model_type], **changes})


def own_plan(model_type):
    """ModernBERT's is Pre-LN behind a normed embedding, which its first attention reads as it is."""
    if model_type == "vit":
        return resolve("pre_ln", NUM_LAYERS)
    pre = Sublayer(pre_norm=Norm())
    layers = (Layer(attention=Sublayer(), feed_forward=pre), *[Layer(attention=pre, feed_forward=pre)] * 3)
    return Plan(placement="modernbert", layers=layers, embedding_norm=Norm(), final_norm=Norm())


def inputs(model_type, labelled=False):
    if model_type == "modernbert":
        ids = token_ids(length=13)
        return {"input_ids": ids, **({"labels": ids.masked_fill(ids % 3 > 0, -100)} if labelled else {})}
    images = torch.randn(2, 3, 16, 16, generator=torch.Generator().manual_seed(1))
    return {"pixel_values": images, **({"labels": torch.tensor([1, 3])} if labelled else {})}


def pair_of(model_type, **changes):
    theirs = AUTO[model_type].from_config(configuration(model_type, **changes)).eval()
    shake(theirs)
    state = {}
    for key, tensor in theirs.state_dict().items():
        for old, new in RENAMED[model_type].items():
            key = key.replace(old, new)
        state[key] = tensor
    ours = lamina.build(configuration(model_type, **changes), own_plan(model_type)).eval()
    ours.load_state_dict(state)
    return theirs, ours


@over_both
@torch.no_grad()
def test_logits_loss_and_every_state_are_those_of_transformers(model_type):
    given = inputs(model_type, labelled=True)
    theirs, ours = pair_of(model_type)
    one, other = (model(**given, output_hidden_states=True) for model in (theirs, ours))
    assert (one.logits - other.logits).abs().max().item() == 0.0
    assert one.loss.item() == other.loss.item()
    assert len(one.hidden_states) == len(other.hidden_states) == NUM_LAYERS + 1
    for state, mine in zip(one.hidden_states[:-1], other.hidden_states[:-1], strict=True):
        assert torch.equal(state, mine)
    last = other.hidden_states[-1]
    assert torch.equal(one.hidden_states[-1], ours.model.norm(last) if model_type == "modernbert" else last)


@pytest.mark.parametrize("kernel", ["eager", "sdpa"])
@torch.no_grad()
def test_padded_logits_are_those_of_transformers(kernel):
    theirs, ours = pair_of("modernbert")
    ids = token_ids(length=13)
    mask = torch.ones_like(ids)
    mask[0, 9:] = 0
    for model in (theirs, ours):
        model.set_attn_implementation(kernel)
    one, other = (model(input_ids=ids, attention_mask=mask).logits for model in (theirs, ours))
    assert torch.equal(one[mask == 1], other[mask == 1])
    ids[0, 9:] = 5  # what is masked is not seen
    assert torch.equal(ours(input_ids=ids, attention_mask=mask).logits[mask == 1], other[mask == 1])


@torch.no_grad()
def test_images_of_another_size_are_those_of_transformers():
    theirs, ours = pair_of("vit")
    images = torch.randn(2, 3, 24, 24)
    one, other = (model(pixel_values=images, interpolate_pos_encoding=True).logits for model in (theirs, ours))
    assert torch.equal(one, other)


@over_both
def test_dropout_between_module_and_add_is_that_of_transformers(model_type):
    """The same seed draws the same masks in the same order."""
    dropout = {"vit": {"hidden_dropout_prob": 0.5}, "modernbert": {"mlp_dropout": 0.5, "embedding_dropout": 0.5}}
    logits = []
    for model in pair_of(model_type, **dropout[model_type]):
        torch.manual_seed(7)
        logits.append(model.train()(**inputs(model_type)).logits)
    assert torch.equal(*logits)
    assert not torch.equal(logits[1], model(**inputs(model_type)).logits)


@pytest.mark.parametrize(("model_type", "name"), rotated(AUTO, names(), every=2))
def test_every_placement_gives_every_parameter_a_gradient(model_type, name):
    model = opened(lamina.build(configuration(model_type, num_hidden_layers=2), name).train())
    assert type(model) is {"modernbert": LaminaForMaskedLM, "vit": LaminaForImageClassification}[model_type]
    model(**inputs(model_type, labelled=True)).loss.backward()
    for key, parameter in model.named_parameters():
        assert parameter.grad is not None, key
        assert parameter.grad.isfinite().all(), key
        assert parameter.grad.abs().sum() > 0, key


@over_both
@torch.no_grad()
def test_the_embeddings_norm_and_scale_are_the_plans(model_type):
    with_norm = lamina.build(configuration(model_type), "pre_ln", embedding_norm=True, embedding_scale=3.0).eval()
    without = lamina.build(configuration(model_type), "pre_ln").eval()
    assert without.model.embedding_norm is None
    shake(with_norm)
    state = with_norm.state_dict()
    without.load_state_dict({k: v for k, v in state.items() if "embedding_norm" not in k})
    normed, plain = (m(**inputs(model_type), output_hidden_states=True).hidden_states[0] for m in (with_norm, without))
    norm = with_norm.model.embedding_norm
    expected = torch.nn.functional.layer_norm(3 * plain, (32,), norm.weight, norm.bias, norm.eps)
    torch.testing.assert_close(normed, expected)
    assert (norm.bias is None) == (model_type == "modernbert")


@torch.no_grad()
def test_a_copied_or_pickled_vit_norms_its_embeddings_with_its_own_norm():
    model = lamina.build(configuration("vit"), "peri_ln").eval()
    for again in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        assert torch.equal(again(**inputs("vit")).logits, model(**inputs("vit")).logits)
        again.model.embedding_norm.bias.fill_(1.0)
        assert not torch.equal(again(**inputs("vit")).logits, model(**inputs("vit")).logits)


@pytest.mark.parametrize("scopes", [("head", "off"), ("head", "full"), ("full", "head"), ("off", "head")])
@torch.no_grad()
def test_stacked_projections_are_normed_part_by_part(scopes, tmp_path):
    options = dict(zip(("qk_norm", "v_norm"), scopes, strict=True))
    model = lamina.build(configuration("modernbert"), "pre_ln", **options).eval()
    shake(model)
    attention = model.model.layers[1].attention.module
    assert type(attention.Wqkv) is torch.nn.Linear
    x = torch.randn(2, 7, 32)
    for index, (name, part) in enumerate(
        zip("qkv", attention.normed_stack(attention.Wqkv(x)).chunk(3, dim=-1), strict=True)
    ):
        expected = x @ attention.Wqkv.weight[32 * index : 32 * index + 32].T
        scope = scopes[name == "v"]
        if scope != "off":
            pieces = expected.unflatten(-1, (4, 8) if scope == "head" else (1, 32))
            rms = (pieces.square().mean(-1, keepdim=True) + 1e-5).sqrt()
            expected = (getattr(attention, f"{name}_norm").weight * pieces / rms).flatten(-2)
        torch.testing.assert_close(part, expected)
    model.save_pretrained(tmp_path)
    again = AutoModelForMaskedLM.from_pretrained(tmp_path).eval()
    assert torch.equal(again(**inputs("modernbert")).logits, model(**inputs("modernbert")).logits)


@pytest.mark.parametrize("num_labels", [None, 3])
def test_an_encoder_carries_a_sequence_classifier(num_labels, tmp_path):
    config = configuration("modernbert")
    model = lamina.build(config, "keel", head="sequence_classification", num_labels=num_labels).eval()
    assert type(model) is LaminaForSequenceClassification
    scores = model(input_ids=token_ids()).logits
    assert scores.shape == (2, num_labels or 1)
    model.save_pretrained(tmp_path)
    again = AutoModelForSequenceClassification.from_pretrained(tmp_path).eval()
    torch.testing.assert_close(again(input_ids=token_ids()).logits, scores)


@pytest.mark.parametrize(
    ("model_type", "options", "message"),
    [
        *(
            (one, {"head": head}, rf"head: '{head}' does not work with the backbone '{one}' \(allowed: ")
            for one, head in zip(("vit", "vit", "modernbert"), ("causal_lm", "masked_lm", "causal_lm"), strict=True)
        ),
        ("vit", {"vocab_size": 100}, "vocab_size: the backbone 'vit' reads no tokens"),
        ("llama", {"head": "masked_lm"}, "masked_lm"),
        ("llama", {"head": "causal"}, "did you mean 'causal_lm'"),
        ("llama", {"num_labels": 2}, "num_labels"),
    ],
)
def test_what_does_not_fit_the_backbone_is_refused(model_type, options, message):
    config = llama(1) if model_type == "llama" else configuration(model_type)
    with pytest.raises(UserError, match=message):
        lamina.build(config, "pre_ln", **options)


@over_both
def test_every_weight_has_a_role(model_type):
    model = lamina.build(configuration(model_type), "pre_ln", init="scaled")
    roles = {}
    for weight in weights(model):
        roles.setdefault(weight.role, []).append(weight.name)
        if weight.role in ("attention_out", "feed_forward_out"):
            assert weight.parameter.std().item() == pytest.approx(0.02 / (2 * NUM_LAYERS) ** 0.5, rel=0.1)
        elif weight.parameter.ndim > 1 and weight.parameter.numel() > 500:
            assert weight.parameter.std().item() == pytest.approx(0.02, rel=0.1), weight.name
    assert "hidden" not in roles
    expected = {"vector", "bias", "embedding", "readout", "attention_out", "feed_forward_out"}
    if model_type == "vit":
        expected |= {"query", "key", "value", "feed_forward_in"}
        assert all(".embeddings." in name for name in roles["embedding"])
        assert len(roles["embedding"]) == 3  # the class token, the positions, the patches
    else:
        expected |= {"query_key_value", "gate_and_in"}
    assert set(roles) == expected


@over_both
def test_admin_profiles_what_the_backbone_reads(model_type):
    model = lamina.build(configuration(model_type), "admin")
    omegas = [r.skip_scale.mean().item() for b in model.model.layers for r in (b.attention, b.feed_forward)]
    assert omegas[0] == 1
    assert all(0 < omega < 1 for omega in omegas[1:])  # they were measured: embeddings start small
