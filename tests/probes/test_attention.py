"""attention against transformers' own attention weights, and logits written out."""

import math

import pytest
import torch
from probes.tiny import TEXT, albert, bert, blocks, gemma2, llama, made, value, vit
from torch import nn

from lamina.errors import UserError
from lamina.probes.attention import Attention, of_heads
from lamina.probes.engine.context import Context
from lamina.probes.engine.measure import make_context, probe
from lamina.probes.engine.probe_settings import ProbeSettings


def measure(model, ids, **settings):
    return probe(model, ["attention"], ids, tolerance=0.0, batch_size=2, **settings)["attention"]


@torch.no_grad()
def own_weights(model, **inputs):
    before = model.config._attn_implementation
    model.set_attn_implementation("eager")
    weights = [w.double() for w in model(**inputs, output_attentions=True).attentions]
    model.set_attn_implementation(before)
    return weights


def expect(frame, layer, weights, see):
    """``weights`` [batch, heads, queries, keys]; ``see``: which keys a query sees, [queries, keys]."""
    log = torch.where(weights > 0, weights.log(), 0.0)
    entropy = -(weights * log).sum(-1)
    several = see.sum(-1) > 1
    share = (entropy / see.sum(-1).double().log())[:, :, several]
    wanted = {"entropy": entropy, "entropy_share": share, "first_token_share": weights[..., 0]}
    for metric, x in wanted.items():
        place = {"layer": layer, "metric": metric}
        found = value(frame, metric, layer=layer, role="all")
        assert found == pytest.approx(float(x.mean()), rel=1e-5), place
        error = x.mean((1, 2)).std(correction=1) / math.sqrt(len(x))
        found = value(frame, metric, "standard_error", layer=layer, role="all")
        assert found == pytest.approx(float(error), rel=1e-3, abs=1e-9)
        for head in range(x.shape[1]):
            found = value(frame, metric, layer=layer, role="head", index=head)
            assert found == pytest.approx(float(x[:, head].mean()), rel=1e-5)


def causal(tokens):
    return torch.ones(tokens, tokens).tril().bool()


@pytest.mark.parametrize(
    ("model", "see"),
    [
        (llama(), causal(16)),  # with shared keys
        (bert(), torch.ones(16, 16).bool()),
        (albert(initializer_range=0.5), torch.ones(16, 16).bool()),  # with shared layers
        (vit(), torch.ones(17, 17).bool()),
    ],
    ids=["llama", "bert", "albert", "vit"],
)
def test_entropy_and_shares_are_those_of_the_models_own_weights(model, see):
    inputs = torch.randn(4, 3, 16, 16) if model.main_input_name == "pixel_values" else blocks()
    before = model.config._attn_implementation
    frame = measure(model, inputs)
    assert model.config._attn_implementation == before
    weights = own_weights(model, **{model.main_input_name: inputs})
    assert set(frame["layer"]) == set(range(len(weights)))
    for layer, each in enumerate(weights):
        expect(frame, layer, each, see)


def test_the_largest_logit_is_of_the_keys_that_may_be_seen():
    model, ids = llama(layers=1), blocks(sequences=2, tokens=6)
    frame = measure(model, ids)
    attention = model.model.layers[0].self_attn
    with torch.no_grad():
        hidden = model.model.layers[0].input_layernorm(model.model.embed_tokens(ids))
        cos, sin = model.model.rotary_emb(hidden, torch.arange(6).unsqueeze(0))
        q = attention.q_proj(hidden).view(2, 6, 4, 8).transpose(1, 2).double()
        k = attention.k_proj(hidden).view(2, 6, 2, 8).transpose(1, 2).repeat_interleave(2, 1).double()

        def rotate(x):
            half = torch.cat([-x[..., 4:], x[..., :4]], -1)
            return x * cos.unsqueeze(1) + half * sin.unsqueeze(1)

        logits = rotate(q) @ rotate(k).transpose(2, 3) / math.sqrt(8)
    seen = logits.masked_fill(~causal(6), -math.inf)
    assert (seen.amax((0, 2, 3)) != logits.amax((0, 2, 3))).any()
    for head in range(4):
        found = value(frame, "max_logit", role="head", index=head)
        assert found == pytest.approx(float(seen[:, head].max()), rel=1e-4)
    assert value(frame, "max_logit", role="all") == pytest.approx(float(seen.max()), rel=1e-4)


def gemma(**more):
    return gemma2(initializer_range=3.0, **more)


def test_a_window_and_a_soft_cap_count():
    model, ids = gemma(sliding_window=4, attn_logit_softcapping=2.0), blocks()
    frame = measure(model, ids)
    weights = own_weights(model, input_ids=ids)
    window = causal(16) & ~torch.ones(16, 16).tril(-4).bool()
    assert model.config.layer_types == ["sliding_attention", "full_attention"]
    expect(frame, 0, weights[0], window)
    expect(frame, 1, weights[1], causal(16))
    for layer in (0, 1):
        assert value(frame, "max_logit", layer=layer, role="all") == pytest.approx(2.0, rel=1e-2)
    free = measure(gemma(attn_logit_softcapping=None), ids)
    assert value(free, "max_logit", layer=1, role="all") > 4.0


def test_padding_asks_nothing_and_gets_nothing():
    model = llama()
    ids = blocks(sequences=3, tokens=8)
    mask = torch.tensor([[1] * 8, [1] * 5 + [0] * 3, [0] * 3 + [1] * 5])
    context = make_context(model, ProbeSettings(batch_size=3), ids)
    frame = run_on(context, [{"input_ids": ids, "attention_mask": mask}])
    alone = [ids[0], ids[1, :5], ids[2, 3:]]
    # rotary positions are relative, so text behind padding on the left has the same weights
    for metric in ("entropy", "entropy_share", "first_token_share"):
        singles = [value(run_on(context, [{"input_ids": x[None]}]), metric, layer=2, role="all") for x in alone]
        assert value(frame, metric, layer=2, role="all") == pytest.approx(sum(singles) / 3, rel=1e-4)
    top = max(value(run_on(context, [{"input_ids": x[None]}]), "max_logit", layer=2, role="all") for x in alone)
    assert value(frame, "max_logit", layer=2, role="all") == pytest.approx(top, rel=1e-4)


def run_on(context, batches):
    made = Context(model=context.model, base=context.base, structure=context.structure, batches=batches)
    instance = Attention()
    instance.begin(made)
    return instance.finish(made)


def test_attention_of_another_make_is_seen_too():
    """A layer of torch's own, with no eager implementation to ask for."""

    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.embed = nn.Embedding(61, 32)
            how = {"batch_first": True, "norm_first": True}
            self.layers = nn.ModuleList(nn.TransformerEncoderLayer(32, 4, 48, **how) for _ in range(2))

        def forward(self, input_ids):
            x = self.embed(input_ids)
            for layer in self.layers:
                x = layer(x)
            return (x,)

    model, ids = Model().eval(), blocks()
    frame = measure(model, ids, layers="layers")
    layer = model.layers[0]
    with torch.no_grad():
        x = layer.norm1(model.embed(ids))
        _, weights = layer.self_attn(x, x, x, average_attn_weights=False)
    expect(frame, 0, weights.double(), torch.ones(16, 16).bool())


def test_uniform_attention_has_the_entropy_of_its_number_of_keys():
    logits = torch.zeros(1, 2, 5, 5).masked_fill(~causal(5), torch.finfo(torch.float32).min)
    samples, largest = of_heads(logits, logits.softmax(-1), None)
    assert float(samples[0, 0, 0]) == pytest.approx(sum(math.log(n) for n in range(1, 6)) / 5, rel=1e-6)
    assert float(samples[0, 0, 1]) == pytest.approx(1.0, rel=1e-6)
    assert float(samples[0, 0, 2]) == pytest.approx(sum(1 / n for n in range(1, 6)) / 5, rel=1e-6)
    assert largest.tolist() == [0.0, 0.0]
    old = torch.zeros(1, 2, 5, 5).masked_fill(~causal(5), -10000.0)
    torch.testing.assert_close(of_heads(old, old.softmax(-1), None)[0], samples)


def test_a_key_far_below_the_best_is_still_seen():
    logits = torch.tensor([[[[300.0, 0.0, -300.0]]]])
    samples, _ = of_heads(logits, logits.softmax(-1), None)
    assert float(samples[0, 0, 1]) == 0.0  # one key gets all, of three that it sees


def test_a_model_without_attention_is_refused():
    sizes = {"vocab_size": 61, "hidden_size": 32, "num_hidden_layers": 2, "state_size": 4, "time_step_rank": 4}
    model = made("MambaForCausalLM", sizes)
    with pytest.raises(UserError, match="attention: no layer computes a softmax over keys"):
        measure(model, blocks())


def test_a_layer_that_takes_two_softmaxes_has_the_mean_of_all_their_heads():
    model = made("DiffLlamaForCausalLM", TEXT, num_key_value_heads=2, num_hidden_layers=2)
    frame = measure(model, blocks())
    heads = frame[(frame.role == "head") & (frame.metric == "entropy")].groupby("layer")["value"].mean()
    means = frame[(frame.role == "all") & (frame.metric == "entropy")].set_index("layer")["value"]
    assert means.to_dict() == pytest.approx(heads.to_dict(), rel=1e-9)
