"""Admin's omegas: the profiling chain written out, and the starts that need no profiling."""

import math
from dataclasses import replace
from itertools import pairwise

import pytest
import torch
from naive import EPS, llama, observe, rms_norm, token_ids

import lamina
from lamina.placements import resolve

IDS = token_ids(4, 32)
WIDE = "admin(std=0.3)"  # branches large enough to move the omegas, which a std of 0.02 hardly does


def omegas(model):
    return [r.skip_scale.detach() for block in model.model.layers for r in (block.attention, block.feed_forward)]


def profiled(num_layers=3, placement="admin", **options):
    torch.manual_seed(0)
    return lamina.build(llama(num_layers), placement, init=WIDE, profile_ids=IDS, **options).eval()


@torch.no_grad()
def naive_profile(model, out_scale):
    """omega_1 = 1, omega_(i+1) = sqrt(Var(omega_i x_i) + Var(f_i(x_i))), x_(i+1) = LN(omega_i x_i + f_i(x_i))."""
    kwargs = observe(model, IDS).attention_kwargs
    x, omega, chain = model.get_input_embeddings()(IDS), 1.0, []
    for index, block in enumerate(model.model.layers):
        for branch in ("attention", "feed_forward"):
            chain.append(omega)
            module = getattr(block, branch).module
            f = module(hidden_states=x, **kwargs[index])[0] if branch == "attention" else module(x)
            f, scaled = out_scale * f, omega * x
            omega = math.sqrt(scaled.var().item() + f.var().item())
            x = rms_norm(scaled + f, 1.0, EPS)
    return chain


@pytest.mark.parametrize("out_scale", [1.0, 0.5])
def test_the_profiled_omegas_follow_the_chain_and_belong_to_the_next_sublayer(out_scale):
    plan = resolve("admin", 3)
    layers = tuple(layer.map(lambda sub: replace(sub, out_scale=out_scale)) for layer in plan.layers)
    model = profiled(placement=replace(plan, layers=layers))
    expected = naive_profile(model, out_scale)
    assert min(abs(one / other - 1) for one, other in pairwise(expected)) > 0.01  # a chain off by one would show
    for omega, value in zip(omegas(model), expected, strict=True):
        assert omega.shape == (32,)
        torch.testing.assert_close(omega, torch.full((32,), value), rtol=1e-3, atol=0)


def test_profiling_keeps_the_weights_that_the_seed_gives():
    torch.manual_seed(0)
    plain = lamina.build(llama(3), "admin", init="normal(std=0.3)", omega="one").state_dict()
    model = profiled().state_dict()
    matrices = [key for key in model if model[key].dim() == 2]
    assert len(matrices) > 20
    assert all(torch.equal(model[key], plain[key]) for key in matrices)


@pytest.mark.parametrize("num_layers", [1, 12, 1024])
@pytest.mark.parametrize(
    ("omega", "value"),
    [("log", lambda n: math.sqrt((n + 1) / math.log(n + 1) - 1)), ("sqrt", math.sqrt), ("one", lambda n: 1.0)],
)
def test_the_starts_without_profiling_are_admin_torchs_functions_of_the_number_of_sublayers(omega, value, num_layers):
    for layer in resolve("admin", num_layers=num_layers, omega=omega).layers:
        for part in (layer.attention, layer.feed_forward):
            assert part.skip_scale == pytest.approx(value(2 * num_layers), rel=1e-12)
            assert part.skip_scale_learned == "vector"


def test_a_start_without_profiling_reaches_the_models_vectors():
    expected = math.sqrt(7 / math.log(7) - 1)
    for omega in omegas(lamina.build(llama(3), "admin", init="normal", omega="log")):
        torch.testing.assert_close(omega, torch.full((32,), expected))
