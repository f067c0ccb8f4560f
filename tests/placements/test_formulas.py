"""Every registered placement, as built and run, against its equation written out in naive.py."""

from types import SimpleNamespace

import pytest
import torch
from naive import EXPECTED, FORMULAS, HEAD_DIM, VOCABULARY, WIDTH, built, naive_norm, naive_norms, observe, token_ids
from spread import spread

import lamina

NAMES = [name for name in lamina.placements.names() if name in FORMULAS]
# The models run in float64, their RMS norms in float32 inside, as Llama's do. Here the two sides agree to 1e-15; where
# another CPU rounds every norm apart by 6e-8, 12 random blocks make 3e-5 of it.
CLOSE = {"rtol": 1e-4, "atol": 1e-4}
# The growth is exponential in depth: (3e-5 / 6e-8) ** (32 / 12) would pass 1e-4 by far there, and 1e-2 still tells any
# wrong wiring, whose difference is of order 1.
DEEP = {"rtol": 1e-2, "atol": 1e-2}


def rotated(x, cos, sin):
    first, second = x.chunk(2, dim=-1)
    return x * cos + torch.cat([-second, first], dim=-1) * sin


def attention_with_norms(module, position_embeddings, scopes, kind="rms"):
    """Causal attention written out; a projection named in `scopes` is normed before RoPE, by head or full width."""

    def project(h, name):
        layer = getattr(module, name)
        flat = h @ layer.weight.T
        if name in scopes:
            size = {"head": HEAD_DIM, "full": flat.shape[-1]}[scopes[name]]
            norm = getattr(module, f"{name[0]}_norm")
            assert norm.weight.shape == (size,)
            flat = naive_norm(norm, kind)(flat.unflatten(-1, (-1, size))).flatten(-2)
        return flat.unflatten(-1, (-1, HEAD_DIM)).transpose(1, 2)

    def attend(h):
        cos, sin = (part.unsqueeze(1) for part in position_embeddings)
        q, k, v = rotated(project(h, "q_proj"), cos, sin), rotated(project(h, "k_proj"), cos, sin), project(h, "v_proj")
        k, v = (part.repeat_interleave(q.shape[1] // k.shape[1], dim=1) for part in (k, v))
        scores = q @ k.transpose(-1, -2) / HEAD_DIM**0.5
        future = torch.ones(h.shape[1], h.shape[1]).triu(1).bool()
        weights = scores.masked_fill(future, float("-inf")).softmax(-1)
        inner = (weights @ v).transpose(1, 2).flatten(-2)
        if hasattr(module, "inner_norm"):
            inner = naive_norm(module.inner_norm, kind)(inner)
        return inner @ module.o_proj.weight.T

    return attend


def attentions(model, seen, scopes, kind="rms"):
    """Each block's attention as a function of hidden states, written out: a norm inside it cannot hide either."""
    pairs = zip((block.attention.module for block in model.model.layers), seen.attention_kwargs, strict=True)
    return [attention_with_norms(m, kwargs["position_embeddings"], scopes, kind) for m, kwargs in pairs]


def scopes_of(name, options):
    """HybridNorm norms q, k and v head by head, OLMo2 q and k over their full width; an option changes either."""
    qk, v = EXPECTED[name].heads
    qk, v = options.get("qk_norm", qk), options.get("v_norm", v)
    return {p: scope for p, scope in (("q_proj", qk), ("k_proj", qk), ("v_proj", v)) if scope != "off"}


@torch.no_grad()
def assert_follows_the_formula(name, num_layers, *, formula=None, formula_options=None, **options):
    """`formula` in place of the placement's own; a callable among its options is called with the model."""
    kind = options.get("norm", "group" if name == "group_ln" else "rms")
    model = built(name, num_layers, **options)
    norm = {"kind": kind, "groups": options.get("groups", 8)}
    ids = token_ids()
    seen = observe(model, ids)

    formula_options = {k: v(model) if callable(v) else v for k, v in (formula_options or {}).items()}
    formula_options["residuals"] = model.model.layers
    scale = options.get("embedding_scale", WIDTH**0.5 if name.startswith("gemma") else 1.0)
    x0 = scale * model.get_input_embeddings()(ids)
    embedding_norm = naive_norm(model.model.embedding_norm, **norm)
    assert (embedding_norm is not None) == options.get("embedding_norm", name in ("peri_ln", "minimax_01"))
    x0 = x0 if embedding_norm is None else embedding_norm(x0)
    feed_forwards = [block.feed_forward.module for block in model.model.layers]
    inside = "layer" if options.get("norm") == "layer" else "rms"
    modules = attentions(model, seen, scopes_of(name, options), inside), feed_forwards
    states = (formula or FORMULAS[name])(x0, *modules, naive_norms(model, **norm), num_layers, **formula_options)
    assert len(seen.states) == num_layers + 1
    close = CLOSE if num_layers <= 12 else DEEP
    for index, (state, expected) in enumerate(zip(seen.states, states, strict=True)):
        torch.testing.assert_close(state, expected, **close, msg=lambda text, index=index: f"x^{index}: {text}")

    final_norm = naive_norm(model.model.norm, **norm)
    assert (final_norm is not None) == options.get("final_norm", EXPECTED[name].final_norm)
    last = states[-1] if final_norm is None else final_norm(states[-1])
    torch.testing.assert_close(seen.logits, last @ model.lm_head.weight.T, **close)
    assert seen.logits.shape == (*ids.shape, VOCABULARY)


def test_every_registered_placement_has_a_formula_of_its_own():
    assert set(lamina.placements.names()) <= set(FORMULAS)


@pytest.mark.parametrize("num_layers", spread([1, 2, 12, 32], [1, 12]))
@pytest.mark.parametrize("name", NAMES)
def test_every_state_and_the_logits_follow_the_formula(name, num_layers):
    assert_follows_the_formula(name, num_layers)


@pytest.mark.parametrize("final", [True, False])
@pytest.mark.parametrize("name", NAMES)
def test_the_final_and_the_embeddings_norm_can_be_set_and_left_out(name, final):
    assert_follows_the_formula(name, 2, final_norm=final, embedding_norm=not final)


@pytest.mark.parametrize("name", [name for name in NAMES if name != "group_ln"])
def test_the_formulas_hold_with_layer_norms_too(name):
    assert_follows_the_formula(name, 2, norm="layer")


@torch.no_grad()
def test_the_attention_written_out_here_is_the_backbones_when_nothing_in_it_is_normed():
    model = built("pre_ln", 1)
    seen = observe(model, token_ids())
    module, x = model.model.layers[0].attention.module, seen.states[0]
    written_out = attention_with_norms(module, seen.attention_kwargs[0]["position_embeddings"], {})
    torch.testing.assert_close(written_out(x), module(hidden_states=x, **seen.attention_kwargs[0])[0], **CLOSE)


@pytest.mark.parametrize(
    ("name", "options", "formula_options"),
    [
        ("mix_ln", {"alpha": 0.5}, {"alpha": "0.5"}),
        ("mix_ln", {"alpha": 0}, {"alpha": "0"}),
        ("mix_ln", {"alpha": 1}, {"alpha": "1"}),
        ("mix_ln", {"num_post_layers": 3}, {"num_post_layers": 3}),
        ("keel", {"alpha": 1.5}, {"alpha": 1.5}),
        ("granite", {"multiplier": -0.7}, {"multiplier": -0.7}),
        ("minicpm", {"scale_depth": 0.3}, {"scale_depth": 0.3}),
        ("minimax_01", {"alpha": 1.5}, {"alpha": 1.5}),
        ("keel", {"learnable_alpha": True}, {}),
        ("deepnorm", {"alpha": 1.5}, {"alpha": 1.5}),
        ("peri_ln", {"learnable_gain": False}, {}),
        ("pre_ln", {"qk_norm": "head", "v_norm": "head"}, {}),
        ("post_ln", {"qk_norm": "full"}, {}),
        ("pre_ln", {"norm": "group", "groups": 4}, {}),
        ("pre_ln", {"embedding_scale": 3.0}, {}),
    ],
)
def test_the_options_change_what_the_formula_says_they_change(name, options, formula_options):
    assert_follows_the_formula(name, 4, formula_options=formula_options, **options)


def test_every_formula_has_states_of_its_own():
    """Else a model could follow the wrong one. Names that share a formula differ in norms that it does not see."""
    model = built("keel", 2, norm="layer")
    for block in model.model.layers:
        for residual in (block.attention, block.feed_forward):
            residual.pre_norm = residual.out_norm = residual.post_norm = torch.nn.LayerNorm(32).double()
    seen = observe(model, token_ids())
    arguments = (attentions(model, seen, {}), [b.feed_forward.module for b in model.model.layers], naive_norms(model))
    learned = SimpleNamespace(skip_scale=1.1, out_scale=1.2, gate=torch.tensor(0.1))
    residuals = [SimpleNamespace(attention=learned, feed_forward=learned)] * 2
    options = {"mix_ln": {"num_post_layers": 1}}
    distinct = {id(f): name for name, f in FORMULAS.items()}.values()
    with torch.no_grad():
        more = {n: {"residuals": residuals, **options.get(n, {})} for n in distinct}
        last = {n: FORMULAS[n](seen.states[0], *arguments, 2, **more[n])[-1] for n in distinct}
    for name in distinct:
        same = [other for other in distinct if torch.allclose(last[name], last[other], rtol=1e-3, atol=1e-3)]
        assert same == [name]
