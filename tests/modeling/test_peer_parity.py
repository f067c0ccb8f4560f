"""Blocks of others, wired again from their own modules and weights: the same outputs."""

import pytest
import torch
from torch import nn
from transformers import BertConfig
from transformers.models.bert.modeling_bert import BertLayer

import lamina

WIDTH, LAYERS, EPSILON = 32, 6, 1e-6  # wire's norms have this epsilon


def shake(module):
    """Weights and gains that differ, so that no mix-up is too small to see."""
    with torch.no_grad():
        for parameter in module.parameters():
            parameter.add_(0.2 * torch.randn_like(parameter))


def wired(placement, attention, feed_forward, norms, **options):
    """One layer of the placement with LayerNorms, which get the peer's gains and biases."""
    layer = lamina.placements.resolve(placement, LAYERS, norm="layer", **options).layers[0]
    block = lamina.wire(attention, feed_forward, layer, WIDTH).eval()
    for mine, theirs in zip((block.attention.post_norm, block.feed_forward.post_norm), norms, strict=True):
        assert theirs.eps == EPSILON
        mine.load_state_dict(theirs.state_dict())
    return block


class BertSelf(nn.Module):
    """BERT's attention up to its output projection, without the add and the norm that follow."""

    def __init__(self, attention):
        super().__init__()
        self.self, self.dense = attention.self, attention.output.dense

    def forward(self, hidden_states, attention_mask=None):
        return self.dense(self.self(hidden_states, attention_mask=attention_mask)[0])


@pytest.fixture
def bert_layer():
    sizes = {"hidden_size": WIDTH, "num_attention_heads": 4, "intermediate_size": 48, "layer_norm_eps": EPSILON}
    config = BertConfig(**sizes, attn_implementation="eager")
    layer = BertLayer(config).eval()
    shake(layer)
    return layer


@pytest.mark.parametrize("masked", [False, True])
def test_post_ln_is_transformers_bert_layer(bert_layer, masked):
    feed_forward = nn.Sequential(bert_layer.intermediate, bert_layer.output.dense)
    norms = (bert_layer.attention.output.LayerNorm, bert_layer.output.LayerNorm)
    block = wired("post_ln", BertSelf(bert_layer.attention), feed_forward, norms)
    x = torch.randn(2, 7, WIDTH)
    mask = None
    if masked:
        mask = torch.zeros(2, 1, 7, 7)
        mask[1, :, :, 4:] = torch.finfo(mask.dtype).min
    expected = bert_layer(x, mask)
    expected = expected[0] if isinstance(expected, tuple) else expected
    assert torch.equal(block(x, mask), expected)
    assert not torch.allclose(block(x), wired("pre_post_ln", block.attention.module, feed_forward, norms)(x))


class TorchscaleSelf(nn.Module):
    """torchscale's attention, called as its EncoderLayer calls it."""

    def __init__(self, attention):
        super().__init__()
        self.attention = attention

    def forward(self, x):
        return self.attention(query=x, key=x, value=x, key_padding_mask=None, attn_mask=None, rel_pos=None)[0]


@pytest.fixture
def torchscale_encoder():
    reason = "torchscale is not installed (it pins another torch; with --no-deps it needs fairscale and timm beside it)"
    architecture = pytest.importorskip("torchscale.architecture.encoder", reason=reason, exc_type=ImportError)
    from torchscale.architecture.config import EncoderConfig

    config = EncoderConfig(
        encoder_embed_dim=WIDTH, encoder_attention_heads=4, encoder_ffn_embed_dim=48, encoder_layers=LAYERS,
        deepnorm=True, layernorm_eps=EPSILON, dropout=0.0, no_output_layer=True, vocab_size=-1,
    )  # fmt: skip
    return architecture.Encoder(config).eval()


def test_deepnorm_is_torchscales_encoder_layer(torchscale_encoder):
    layer = torchscale_encoder.layers[0]
    shake(layer)
    norms = (layer.self_attn_layer_norm, layer.final_layer_norm)
    block = wired("deepnorm", TorchscaleSelf(layer.self_attn), layer.ffn, norms)
    assert block.attention.skip_scale == pytest.approx(layer.alpha)
    x = torch.randn(2, 7, WIDTH)
    expected, _ = layer(x, encoder_padding_mask=None)
    assert torch.allclose(block(x), expected, rtol=0, atol=1e-6)
