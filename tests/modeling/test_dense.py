"""Dense connections whose weights move with the stream, in one way and in MUDD's four (arXiv 2502.12170)."""

import pytest
import torch
from modeling.tiny import llama, token_ids
from test_streams import EPS, wired
from torch.nn.functional import gelu, scaled_dot_product_attention
from transformers import AutoConfig, AutoModelForCausalLM
from transformers.models.llama.modeling_llama import apply_rotary_pos_emb

import lamina
from lamina.errors import UserError
from lamina.placements import Layer, Plan, Sublayer, resolve
from lamina.placements.plan import Sources
from lamina.training.monitor.gain_measures import gain_rows

WAYS = {"dynamic_dense": 1, "mudd": 4}


def dense(sources, x, before, ways):
    """The sums that queries, keys, values and the stream read, of the newest state and those before (Eq 5 to 8)."""
    unit = x / (x.pow(2).mean(-1, keepdim=True) + EPS).sqrt()
    moved = gelu(unit @ sources.down.T) @ sources.up.T
    sums = []
    for way in range(ways):
        weights = sources.weight if ways == 1 else sources.weight[way]
        weights = weights + moved[..., way * len(weights) : (way + 1) * len(weights)]
        sums.append(sum(weights[..., i, None] * state for i, state in enumerate((x, *before))))
    return sums if ways == 4 else sums * 4


def attended(module, q, k, v, places):
    """Llama's causal attention with inputs of their own for queries, keys and values."""
    parts = ((module.q_proj, q), (module.k_proj, k), (module.v_proj, v))
    q, k, v = (projection(y).unflatten(-1, (-1, module.head_dim)).transpose(1, 2) for projection, y in parts)
    q, k = apply_rotary_pos_emb(q, k, *places)
    k, v = (y.repeat_interleave(module.num_key_value_groups, dim=1) for y in (k, v))
    return module.o_proj(scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(2))


def norms_of(attention):
    """Of queries, keys and values: their own, or three times the one (MUDDFormer's "sepln")."""
    own = (attention.pre_norm, attention.key_norm, attention.value_norm)
    return own if attention.key_norm else own[:1] * 3


@torch.no_grad()
@pytest.mark.parametrize("wiring", WAYS)
def test_a_whole_model_is_its_equation_written_out(wiring):
    model, ids = wired(wiring, "pre_ln"), token_ids()
    x = model.get_input_embeddings()(ids)
    places = model.model.backbone.rotary_emb(x, position_ids=torch.arange(ids.shape[1])[None])
    states = [x]
    for block in model.model.layers:
        a, f = block.attention, block.feed_forward
        q, k, v, x = [x] * 4 if block.sources is None else dense(block.sources, x, states[:-1], WAYS[wiring])
        y = x + attended(a.module, *(norm(way) for norm, way in zip(norms_of(a), (q, k, v), strict=True)), places)
        x = y + f.module(f.pre_norm(y))
        states.append(x)
    norm = model.model.norm
    last = norm.norm(dense(norm.reader, x, states[:-1], 1)[-1])
    torch.testing.assert_close(model(ids).logits, last @ model.lm_head.weight.T, rtol=1e-4, atol=1e-5)


@torch.no_grad()
@pytest.mark.parametrize(("size", "widths"), [(None, [8, 12, 16, 20]), (64, [64, 64, 64, 64]), (8, [16, 16, 24, 24])])
def test_mudds_sums_are_those_of_the_published_code(size, widths):
    """There the states stand from x_0 to the newest, and one product sums them for all ways; eps and 64 are its."""
    model = wired("mudd", f"pre_ln(size={size})" if size else "pre_ln", layers=4)
    all_sources = [*(block.sources for block in model.model.layers[1:]), model.model.norm.reader]
    assert [len(sources.down) for sources in all_sources] == widths
    for sources, ways in zip(all_sources, (4, 4, 4, 1), strict=True):
        states = torch.randn(1 + len(sources.slots), 2, 5, 32)
        order = [*range(1, len(states)), 0]  # theirs, by our numbers: the newest is our first
        static = sources.weight.view(ways, -1)[:, order]
        up = sources.up.unflatten(0, (ways, -1))[:, order].flatten(0, 1)
        low = gelu(states[-1] * torch.rsqrt(states[-1].square().mean(-1, keepdim=True) + EPS) @ sources.down.T)
        dynamic = (low @ up.T).unflatten(-1, (ways, -1))  # [batch, tokens, ways, states]
        expected = torch.einsum("lbtd,btcl->cbtd", states, dynamic + static)
        found = sources(states[-1], tuple(states[:-1]))
        found = [found] if ways == 1 else [*found[1].unbind(-2), found[0]]
        torch.testing.assert_close(torch.stack(found), expected, rtol=1e-5, atol=1e-5)


def test_a_plan_of_before_has_one_norm_and_its_keys_norm_is_monitored():
    plan = resolve("pre_ln", 3, wiring="mudd").to_dict()
    model = lamina.build(llama(3), Plan.from_dict(plan))
    assert {row[3] for row in gain_rows(model, 0) if row[1] == 1} == {"pre_norm", "key_norm", "value_norm"}
    for sources in (plan["final_sources"], *(layer["sources"] for layer in plan["layers"][1:])):
        for field in ("own_norms", "hidden"):
            sources.pop(field, None)
    before = lamina.build(llama(3), Plan.from_dict(plan))
    assert not [name for name, _ in before.named_parameters() if "key_norm" in name]
    assert before.model.norm.reader.down.shape == (4, 32)


@torch.no_grad()
def test_under_autocast_its_weights_are_those_of_float32():
    sources, states = wired("mudd", "keel").model.layers[1].sources, torch.randn(2, 2, 5, 32).bfloat16()
    sums = sources(states[0], (states[1],))
    with torch.autocast("cpu", torch.bfloat16):
        assert all(map(torch.equal, sources(states[0], (states[1],)), sums))


@torch.no_grad()
@pytest.mark.parametrize("model_type", ["qwen3", "phi"])
def test_other_attentions_take_three_inputs_and_come_back_from_a_file(model_type, tmp_path):
    sizes = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 3}
    sizes |= {"num_attention_heads": 4, "num_key_value_heads": 2, "vocab_size": 61, "pad_token_id": 0}
    config = AutoConfig.for_model(model_type, **sizes)
    model, ids = lamina.build(config, "peri_ln", wiring="mudd").eval(), token_ids()
    for parameter in (p for name, p in model.named_parameters() if ".sources." in name):
        parameter.add_(0.2 * torch.randn_like(parameter))
    model.save_pretrained(tmp_path)
    assert torch.equal(AutoModelForCausalLM.from_pretrained(tmp_path)(ids).logits, model(ids).logits)


def test_what_has_no_meaning_is_refused_in_a_line():
    config = AutoConfig.for_model("gpt_neox", vocab_size=61, hidden_size=32, num_hidden_layers=2, num_attention_heads=4)
    with pytest.raises(UserError, match=r"this wiring needs 'q_proj', but GPTNeoXAttention has none"):
        lamina.build(config, "pre_ln", wiring="mudd")
    with pytest.raises(UserError, match="learned: 'vector' does not work with dynamic"):
        Sources(states=(), learned="vector", dynamic=True)
    with pytest.raises(UserError, match="own_norms: True has no effect without multiway"):
        Sources(states=(), own_norms=True)
    with pytest.raises(UserError, match="hidden: 8 has no effect without dynamic"):
        Sources(states=(), hidden=8)
    many = Sources(states=(), multiway=True)
    with pytest.raises(UserError, match=r"final_sources\.multiway: no attention"):
        Plan(layers=(Layer(),), final_sources=many)
    with pytest.raises(UserError, match=r"sources\.multiway: the attention reads 'depth'"):
        Layer(attention=Sublayer(read="depth"), sources=many)
