"""The layers that are found, on many architectures, and the proof that what was followed is the stream."""

from __future__ import annotations

import math

import pytest
import torch
import transformers
from small_models import IMAGE, MODELS, SIZES, TEXT, small_inputs, small_model, stir
from spread import rotated
from torch import nn
from transformers import LlamaConfig, SwinConfig, SwinForImageClassification, ViTConfig

import lamina
from lamina.errors import UserError
from lamina.probes.engine.losses import is_causal
from lamina.probes.engine.measure import make_context
from lamina.probes.engine.probe_settings import ProbeSettings
from lamina.probes.structure.discovery import find_structure
from lamina.probes.structure.hooks import forward, observe
from lamina.probes.structure.sites import Structure, effective_gain

# What a layer's norms are, in the order attention, feed-forward; the inner ones left out.
ROLES = {
    **dict.fromkeys(("llama", "phi3", "granite", "gpt2", "opt", "bloom", "vit", "dinov2", "siglip", "beit"), "pre pre"),
    **dict.fromkeys(("qwen3_moe", "modernbert", "gpt_neox", "yolos"), "pre pre"),
    **dict.fromkeys(("phi", "falcon", "cohere"), "pre shared"),
    **dict.fromkeys(("bert", "roberta", "electra", "distilbert", "deberta_v2", "albert", "fnet"), "post post"),
    **dict.fromkeys(("gemma2", "glm4"), "pre,out pre,out"),
    "olmo2": "out out",
}
EMBEDDING_NORM = {"bert", "roberta", "electra", "distilbert", "deberta_v2", "modernbert", "bloom"}


def _values(model: nn.Module, structure: Structure, inputs: dict[str, torch.Tensor]) -> dict:
    points = {("state", i): p for i, p in structure.states().items()}
    for site in structure.layers:
        for k, sublayer in enumerate(site.sublayers):
            points["contribution", site.index, k] = sublayer.contribution
            if sublayer.after is not None:
                points["after", site.index, k] = sublayer.after
    found = {}
    with torch.no_grad(), observe(points, lambda key, x: found.__setitem__(key, x.clone()), root=model):
        forward(model, inputs)
    return found


@pytest.mark.parametrize("name", MODELS)
def test_layers_and_sublayers_of_an_architecture_and_that_they_add_up(name: str):
    """x^(l+1) = x^l + what was added, with the norm behind each sum where there is one."""
    model = small_model(name)
    structure = find_structure(model, small_inputs(model, 1, 5))
    assert structure.num_layers == 3
    assert structure.hidden_size == 16
    assert not structure.notes
    for site in structure.layers:
        assert [s.kind for s in site.sublayers] == ["mixer" if name == "fnet" else "attention", "feed_forward"]
        roles = [[n.role for n in s.norms if n.role != "inner_norm"] for s in site.sublayers]
        wanted = [[f"{r}_norm" for r in part.split(",") if r != "shared"] for part in ROLES[name].split()]
        if name == "modernbert" and site.index == 0:
            wanted[0] = []  # its first layer's attention reads the embedding's norm
        if ROLES[name].endswith("shared"):
            assert roles[0] == ["pre_norm"]
            assert roles[1] in ([], ["pre_norm"])
        else:
            assert roles == wanted
    assert (structure.embedding_norm is not None) == (name in EMBEDDING_NORM)
    assert (structure.final_norm is not None) == (ROLES[name] != "post post" and name != "beit")
    found = _values(model, structure, small_inputs(model))
    for site in structure.layers:
        x = found["state", site.index]
        parallel = len({id(s.after) for s in site.sublayers if s.after is not None}) < len(site.sublayers)
        for k, sublayer in enumerate(site.sublayers):
            x = x + found["contribution", site.index, k].view_as(x)
            for norm in sublayer.norms:
                if norm.role == "post_norm":
                    with torch.no_grad():
                        x = norm.module(x)
            if ("after", site.index, k) in found and not parallel:
                torch.testing.assert_close(found["after", site.index, k].view_as(x), x, rtol=1e-5, atol=1e-6)
        if name != "yolos" or site.index == 2:  # it adds position embeddings between its layers
            torch.testing.assert_close(found["state", site.index + 1], x, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("name", ["llama", "gemma2", "bert", "gpt2", "vit", "albert"])
def test_what_goes_into_the_nonlinearity_and_out_of_it(name: str):
    model = small_model(name)
    parts = find_structure(model, small_inputs(model, 1, 5)).layers[1].sublayers[1].feed_forward
    found = {}
    points = {"pre": parts.pre, "post": parts.post}
    with torch.no_grad(), observe(points, lambda key, x: found.__setitem__(key, x.clone()), root=model):
        forward(model, small_inputs(model))
    assert found["pre"].shape == found["post"].shape
    assert found["post"].shape[-1] == parts.width != 16
    assert len(parts.up) == (2 if name in ("llama", "gemma2") else 1)


@pytest.mark.parametrize(("backbone", "name"), rotated(("llama", "vit"), lamina.placements.names(), every=2))
def test_norms_of_a_placement_are_those_of_its_plan(backbone: str, name: str):
    if backbone == "vit":
        config = ViTConfig(**SIZES, image_size=16, patch_size=8)
    else:
        config = LlamaConfig(**TEXT)
    config.num_hidden_layers = 4
    torch.manual_seed(0)
    model = stir(lamina.build(config, name).eval())
    (inputs,) = small_inputs(model, 4).values()
    structure = make_context(model, ProbeSettings(), inputs).structure  # what adds up to the layers' outputs
    assert structure.num_layers == 4
    for layer, site in zip(model.config.plan["layers"], structure.layers, strict=True):
        for kind, sublayer in zip(("attention", "feed_forward"), site.sublayers, strict=True):
            wanted = [role for role in ("pre_norm", "out_norm", "post_norm") if layer[kind][role] is not None]
            assert sublayer.kind == kind
            assert sorted(n.role for n in sublayer.norms if n.role != "inner_norm") == sorted(wanted)
    assert (structure.final_norm is not None) == (model.config.plan["final_norm"] is not None)


def test_shared_layers_are_told_apart_by_their_call():
    model = small_model("albert")
    structure = find_structure(model, small_inputs(model, 1, 5))
    assert len({id(site.module) for site in structure.layers}) == 1
    assert [site.call for site in structure.layers] == [0, 1, 2]
    found = _values(model, structure, small_inputs(model))
    assert not torch.equal(found["state", 1], found["state", 2])
    again = _values(model, structure, small_inputs(model))  # the count starts again with each forward pass
    assert torch.equal(found["state", 1], again["state", 1])


def test_no_layers_says_what_was_looked_for():
    class Flat(nn.Module):
        def __init__(self):
            super().__init__()
            self.embedding, self.out = nn.Embedding(8, 4), nn.ModuleList([nn.Linear(4, 4)])

        def forward(self, input_ids):
            return self.out[0](self.embedding(input_ids))

    with pytest.raises(
        UserError, match=r"Lamina found no layers in Flat.*--layers PATH.*the model's lists of modules: out"
    ):
        find_structure(Flat(), {"input_ids": torch.arange(5)[None]})


def test_layers_can_be_named():
    model = small_model("bert")
    inputs = small_inputs(model, 1, 5)
    assert find_structure(model, inputs, layers="bert.encoder.layer").num_layers == 3
    with pytest.raises(UserError, match=r"has no module 'bert.encoder.block'.*bert.encoder.layer"):
        find_structure(model, inputs, layers="bert.encoder.block")


def test_a_hierarchy_of_stages_needs_to_be_told_which_stage():
    torch.manual_seed(0)
    config = SwinConfig(image_size=32, patch_size=4, embed_dim=8, depths=[2, 2], num_heads=[2, 2], window_size=2)
    model = SwinForImageClassification(config).eval()
    pixels = {"pixel_values": torch.randn(1, 3, 32, 32)}
    with pytest.raises(UserError, match=r"a chain of 4 .* chains of 2, 1, 2.*swin.encoder.layers.0.blocks"):
        find_structure(model, pixels)
    second = find_structure(model, pixels, layers="swin.encoder.layers.1.blocks")
    assert second.hidden_size == 16
    assert second.num_layers == 2
    assert (
        "measures such a layer only as a whole" in second.notes[0]
    )  # its windows are rearranged before they are added
    assert not any(site.sublayers for site in second.layers)


EXPERTS = {"num_experts_per_tok": 2, "moe_intermediate_size": 8}
GATED = {f"linear_{what}": 4 for what in ("num_key_heads", "num_value_heads", "key_head_dim", "value_head_dim")}


def _model(name: str, config: str, **sizes):
    torch.manual_seed(0)
    return getattr(transformers, name)(getattr(transformers, config)(**sizes)).eval()


def _ids(sequences: int = 4, tokens: int = 9) -> torch.Tensor:
    return torch.randint(3, 40, (sequences, tokens), generator=torch.Generator().manual_seed(1))


def _qwen3_next():
    more = {"num_hidden_layers": 4, "num_experts": 4, "shared_expert_intermediate_size": 8, "num_key_value_heads": 2}
    return _model("Qwen3NextForCausalLM", "Qwen3NextConfig", **{**TEXT, **EXPERTS, **GATED, **more, "head_dim": 8})


@pytest.mark.parametrize(
    ("name", "config", "sizes", "message"),
    [
        (
            *("XLNetLMHeadModel", "XLNetConfig"),
            {"vocab_size": 40, "d_model": 16, "n_layer": 2, "n_head": 2, "d_inner": 24},
            r"has the shape \[7, 3, 16\] for 3 sequences of 7 tokens",
        ),
        (
            *("SqueezeBertForMaskedLM", "SqueezeBertConfig"),
            {**TEXT, "embedding_size": 16, "num_attention_heads": 4},
            r"has the shape \[3, 16, 7\] for 3 sequences of 7 tokens",
        ),
        ("ViTMAEModel", "ViTMAEConfig", {**IMAGE, "patch_size": 4}, "draws random numbers"),
        (
            *("HieraModel", "HieraConfig"),
            {"embed_dim": 16, "image_size": [32, 32], "depths": [1, 1], "num_heads": [1, 2], "masked_unit_size": [2, 2]}
            | {"query_stride": [1, 1], "num_query_pool": 1},
            r"a chain of 2 .*--layers PATH",
        ),
    ],
)
def test_what_is_no_stream_of_tokens_is_refused(name, config, sizes, message):
    model = _model(name, config, **sizes)
    with pytest.raises(UserError, match=message):
        lamina.probe(model, "hidden_states", None if "pixel" in model.main_input_name else _ids())


def test_a_layer_whose_contributions_do_not_add_up_has_none():
    """RWKV norms the stream inside its first layer, and adds up tokens that go nowhere else but to projections."""
    sizes = {"vocab_size": 40, "hidden_size": 16, "attention_hidden_size": 16, "num_hidden_layers": 3}
    model = _model("RwkvForCausalLM", "RwkvConfig", **sizes)
    context = make_context(model, ProbeSettings(), _ids())
    assert [len(site.sublayers) for site in context.structure.layers] == [0, 2, 2]
    assert [[s.kind for s in x.sublayers] for x in context.structure.layers[1:]] == [["mixer", "feed_forward"]] * 2
    assert all(sublayer.feed_forward is None for site in context.structure.layers for sublayer in site.sublayers)
    assert not any(norm.role == "post_norm" for _, _, norm in context.structure.norms())
    assert any("layer 0" in note and "only as a whole" in note for note in context.notes)


def test_experts_are_causal_though_their_grouping_rounds():
    for name in ("qwen3_moe", "llama", "gpt2", "falcon"):
        assert is_causal(small_model(name), _ids())
    sizes = {**TEXT, **EXPERTS, "q_lora_rank": 8, "kv_lora_rank": 8, "qk_rope_head_dim": 4, "qk_nope_head_dim": 4}
    sizes |= {"v_head_dim": 8, "n_routed_experts": 4, "n_group": 1, "topk_group": 1, "first_k_dense_replace": 1}
    model = _model("DeepseekV3ForCausalLM", "DeepseekV3Config", **sizes)
    assert is_causal(model, _ids())
    frame = lamina.probe(model, "layer_drop", _ids())["layer_drop"]  # no mask token is asked for
    assert frame["value"].notna().all()


@pytest.mark.parametrize("name", ["bert", "albert", "deberta_v2", "modernbert", "fnet", "distilbert"])
def test_models_that_read_both_ways_are_not_causal(name: str):
    assert not is_causal(small_model(name), _ids())


def test_what_ended_in_a_traceback():
    dino = _model("DINOv3ViTModel", "DINOv3ViTConfig", **IMAGE)  # its base is an encoder that takes no pixels
    assert len(lamina.probe(dino, "hidden_states", torch.randn(2, 3, 16, 16))["hidden_states"])
    assert len(lamina.probe(small_model("falcon"), "bounds(tokens=4)", _ids())["bounds"])  # adds in place
    gpt = _model("OpenAIGPTLMHeadModel", "OpenAIGPTConfig", vocab_size=40, n_embd=16, n_layer=2, n_head=2)
    frame = lamina.probe(gpt, "jacobian(tokens=3, sequences=1)", _ids())["jacobian"]  # its layers hand on lists
    assert math.isfinite(frame["value"].iloc[0])


def test_the_gain_of_a_gated_norm_is_its_weight():
    model = _qwen3_next()
    norm = model.model.layers[0].linear_attn.norm
    with torch.no_grad():
        norm.weight.add_(0.3 * torch.randn_like(norm.weight))
    gains = lamina.probe(model, "gains", _ids())["gains"]
    row = gains[(gains["path"] == "model.layers.0.linear_attn.norm") & (gains["metric"] == "gain_mean")]
    assert row["value"].item() == pytest.approx(float(norm.weight.detach().mean()), rel=1e-5)


def test_what_is_called_a_norm_and_only_multiplies_has_its_weight_for_a_gain():
    from transformers.models.mobilebert.modeling_mobilebert import NoNorm

    norm = NoNorm(16)
    torch.testing.assert_close(effective_gain(norm), torch.ones(16))


def test_a_head_that_is_not_in_the_checkpoint_measures_nothing(tmp_path):
    small_model("bert").bert.save_pretrained(tmp_path)
    config = transformers.AutoConfig.from_pretrained(tmp_path)
    config.architectures = ["BertForMaskedLM"]
    config.save_pretrained(tmp_path)
    context = make_context(tmp_path, ProbeSettings(), _ids())
    assert "cls.predictions" in context.warnings[0]
    frames = lamina.probe(tmp_path, "all", _ids())
    assert {"gradients", "layer_drop", "logit_lens"}.isdisjoint(frames)
    assert {"hidden_states", "angular_distance", "gains"} <= set(frames)
    assert not frames["low_precision"]["metric"].isin(["loss", "loss_increase"]).any()
    with pytest.raises(UserError, match="the checkpoint lacks the weights"):
        lamina.probe(tmp_path, "gradients", _ids())
    small_model("bert").save_pretrained(tmp_path)
    assert not make_context(tmp_path, ProbeSettings(), _ids()).warnings
