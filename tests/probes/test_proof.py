"""What was followed is proved to be the stream, whoever wrote the model; what is not is refused in one line."""

from __future__ import annotations

import math

import pytest
import torch
import transformers
from small_models import IMAGE, TEXT, small_model

import lamina
from lamina.errors import UserError
from lamina.probes.engine.losses import is_causal
from lamina.probes.engine.measure import make_context
from lamina.probes.engine.probe_settings import ProbeSettings
from lamina.probes.structure.sites import effective_gain

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
            r"is \[7, 3, 16\] for 3 sequences of 7 tokens",
        ),
        (
            *("SqueezeBertForMaskedLM", "SqueezeBertConfig"),
            {**TEXT, "embedding_size": 16, "num_attention_heads": 4},
            r"is \[3, 16, 7\] for 3 sequences of 7 tokens",
        ),
        ("ViTMAEModel", "ViTMAEConfig", {**IMAGE, "patch_size": 4}, "draws something at random"),
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
    assert [[sublayer.kind for sublayer in site.sublayers] for site in context.structure.layers[1:]] == [
        ["mixer", "feed_forward"]
    ] * 2
    assert all(sublayer.feed_forward is None for site in context.structure.layers for sublayer in site.sublayers)
    assert not any(norm.role == "post_norm" for _, _, norm in context.structure.norms())
    assert any("of layer 0" in note and "left out" in note for note in context.notes)


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
    assert len(lamina.probe(_qwen3_next(), "gains", _ids())["gains"])  # a norm with a gate
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
    with pytest.raises(UserError, match="not in the checkpoint but newly initialized"):
        lamina.probe(tmp_path, "gradients", _ids())
    small_model("bert").save_pretrained(tmp_path)
    assert not make_context(tmp_path, ProbeSettings(), _ids()).warnings
