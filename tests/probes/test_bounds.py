"""Both sides of the papers' statements against the equations written out, and the propositions' own toy."""

import math
from dataclasses import dataclass, replace

import numpy as np
import pandas as pd
import pytest
import torch
from probes.tiny import outputs
from tiny_contexts import (
    context_of,
    jacobian_matrix,
    lamina_model,
    measured,
    spectral,
    state_to_state,
    transformers_model,
    value,
)
from torch import nn

from lamina.placements import resolve
from lamina.probes.bounds import Bounds, LastLayer, last_layer_sides
from lamina.probes.engine.context import Context
from lamina.probes.engine.registry import COLUMNS
from lamina.probes.structure.hooks import eager_attention
from lamina.probes.structure.sites import FeedForward, LayerSite, NormSite, Point, Structure, SublayerSite

WIDTH, INNER = 12, 20


class Gain(nn.Module):
    """RMSNorm with one gain for all channels, as the propositions have it."""

    def __init__(self, gain):
        super().__init__()
        self.weight = nn.Parameter(torch.full((WIDTH,), gain, dtype=torch.float64))

    def forward(self, x):
        return self.weight * x / x.square().mean(-1, keepdim=True).sqrt()


class Toy(nn.Module):
    """Propositions C.1-C.3: one feed-forward with a ReLU, the logits are the layer's output o."""

    def __init__(self, statement, gain=1.25, massive=1.0):
        super().__init__()
        torch.manual_seed(0)
        self.statement = statement
        self.up, self.relu = nn.Linear(WIDTH, INNER, dtype=torch.float64), nn.ReLU()
        self.down = nn.Linear(INNER, WIDTH, dtype=torch.float64)
        self.pre, self.norm = Gain(1.0), Gain(gain)
        with torch.no_grad():
            self.up.weight.mul_(massive)

    def forward(self, x):
        a = self.down(self.relu(self.up(x if self.statement == "c3" else self.pre(x))))
        if self.statement == "c2":
            return x + self.norm(a)
        return self.norm(x + a) if self.statement == "c3" else x + a


@dataclass(kw_only=True)
class ToyContext(Context):
    """The loss of the propositions: cross-entropy of o against a one-hot label."""

    def loss(self, inputs):
        return nn.functional.cross_entropy(self.model(inputs["x"]).flatten(0, -2), inputs["y"], reduction="sum")


def toy_context(toy):
    role = {"c2": "out_norm", "c3": "post_norm"}.get(toy.statement)
    norms = (NormSite(role, toy.norm, "norm"),) if role else ()
    feed_forward = FeedForward(
        (("up", toy.up),), ("down", toy.down), Point(toy.relu, "relu", "input"), Point(toy.down, "down", "input")
    )
    branch = Point(toy.norm, "norm", "output") if role == "out_norm" else Point(toy.down, "down", "output")
    site = LayerSite(0, toy, "", 0, (SublayerSite("feed_forward", branch, None, norms, feed_forward),))
    structure = Structure((site,), WIDTH, None, None, None, None)
    return ToyContext(model=toy, base=toy, structure=structure, batches=[])


@pytest.mark.parametrize("massive", [1.0, 1000.0])
@pytest.mark.parametrize("statement", ["c1", "c2", "c3"])
def test_the_propositions_own_toy(statement, massive):
    toy = Toy(statement, massive=massive)
    x, y = torch.randn(1, 1, WIDTH, dtype=torch.float64), torch.tensor([3])
    context = toy_context(toy)
    last = LastLayer.of(context)
    assert last.statement == statement
    sides = last_layer_sides(context, last, {"x": x, "y": y})

    o = toy(x)
    loss = nn.functional.cross_entropy(o.flatten(0, -2), y)
    (gradient,) = torch.autograd.grad(loss, toy.down.weight)
    with torch.no_grad():
        o = toy(x)
        h = torch.relu(toy.up(x if statement == "c3" else toy.pre(x)))[0, 0]
        a = toy.down(h)
    assert sides.left == pytest.approx(float(gradient.norm()), rel=1e-9)
    difference = torch.softmax(o[0, 0], -1) - nn.functional.one_hot(y[0], WIDTH)
    if statement == "c1":
        torch.testing.assert_close(gradient, torch.outer(difference, h))  # Eq 11, the weight is [out, in]
        assert sides.right == pytest.approx(float(h.norm() * difference.norm()), rel=1e-9)
        assert sides.left == pytest.approx(sides.right, rel=1e-9)
    else:
        below = a if statement == "c2" else x[0, 0] + a
        factor = 2 * 1.25 * math.sqrt(WIDTH) * float(h.norm()) / float(below.norm())
        assert sides.right == pytest.approx(factor * float(difference.norm()), rel=1e-9)
        assert sides.left <= sides.right
        assert sides.right <= 2 * factor  # the right side of Eq 21 and 37: ||p - y|| is at most 2
        assert float(gradient.abs().max()) <= 2 * factor


def down_of(model):
    return model.model.backbone.layers[-1].feed_forward.module.down_proj


@pytest.mark.parametrize(
    ("placement", "statement"),
    [("pre_ln", "c1"), ("peri_ln", "c2"), ("post_ln", "c3"), ("keel", "c3"), ("fusenorm", "c3"), ("olmo2", "c2")],
)
def test_the_last_gradient_is_the_models_and_below_its_bound(placement, statement):
    model = lamina_model(placement)
    context = context_of(model, sequences=1, tokens=8)
    frame = measured(Bounds(sequences=1, tokens=8), context)
    role, ids = f"peri_ln_{statement}", context.batches[0]["input_ids"]
    kept = {}
    block = model.model.backbone.layers[-1]
    residual = block.feed_forward
    watched = {"down": down_of(model), "block": block, "norm": residual.post_norm or residual.out_norm}
    for name, module in watched.items():
        if module is not None:
            module.register_forward_hook(lambda module, args, output, name=name: kept.update({name: (args[0], output)}))
    logits = model(input_ids=ids).logits[:, :-1]
    loss = nn.functional.cross_entropy(logits.flatten(0, 1), ids[:, 1:].flatten())
    by_w, by_o = torch.autograd.grad(loss, [down_of(model).weight, kept["block"][1]])
    right = kept["down"][0].detach().norm(dim=-1) * by_o.norm(dim=-1)
    if "norm" in kept:
        gain = float(watched["norm"].weight.detach().abs().max())
        right = right * 2 * gain * math.sqrt(16) / kept["norm"][0].detach().norm(dim=-1)
    assert value(frame, "left", role, 1) == pytest.approx(float(by_w.norm()), rel=1e-4)
    assert value(frame, "right", role, 1) == pytest.approx(float(right.sum()), rel=1e-4)
    ratio = value(frame, "ratio", f"{role}_token", 1)
    if statement == "c1":
        assert ratio == pytest.approx(1, rel=1e-4)
    else:
        assert 0 < ratio <= 1
    assert value(frame, "ratio", role, 1) == pytest.approx(float(by_w.norm() / right.sum()), rel=1e-4)


@pytest.mark.parametrize("name", ["Gemma2ForCausalLM", "GPT2LMHeadModel", "GPTNeoXForCausalLM", "GraniteForCausalLM"])
def test_the_token_ratio_of_transformers_own_models(name):
    more = {"residual_multiplier": 0.25} if name.startswith("Granite") else {}
    context = context_of(transformers_model(name, **more), sequences=2, tokens=8)
    frame = measured(Bounds(sequences=2, tokens=8), context)
    statement = "c2" if name.startswith("Gemma") else "c1"
    ratio = value(frame, "ratio", f"peri_ln_{statement}_token", 1)
    assert (ratio == pytest.approx(1, rel=1e-3)) if statement == "c1" else (0 < ratio <= 1)


def test_layer_norms_are_bounded_by_the_standard_deviation():
    """A LayerNorm takes the mean off: with ||x + a|| in the place of the deviation the bound would not hold."""
    model = lamina_model("post_ln", scale=0.02)  # its branches are small against the skip's mean of 20
    for block in model.model.backbone.layers:
        for part in (block.attention, block.feed_forward):
            part.post_norm = shifted(part.post_norm.weight)
    frame = measured(Bounds(sequences=1, tokens=8), context_of(model, sequences=1, tokens=8))
    assert 0.05 < value(frame, "ratio", "peri_ln_c3_token", 1) <= 1


def shifted(weight):
    norm = nn.LayerNorm(16, elementwise_affine=True)
    norm.weight.data.copy_(weight)
    norm.bias.data.fill_(20.0)
    return norm


def branch_variances(model, ids):
    """Var of each sub-layer's contribution, and of the input and skip of its post-norm, by (layer, kind)."""
    kinds = ("attention", "feed_forward")
    layers = enumerate(model.model.backbone.layers)
    parts = {(index, kind): getattr(block, kind) for index, block in layers for kind in kinds}
    normed = {key: part.post_norm for key, part in parts.items() if part.post_norm is not None}
    sources = [part.out_norm or part.module for part in parts.values()]
    found = [*outputs(model, ids, sources), *outputs(model, ids, normed.values())]
    added = {key: output for key, (_, output) in zip(parts, found, strict=False)}

    def variance(x):
        return float(np.var(x[0].numpy(), axis=-1).mean())

    sums = {k: (variance(z), variance(z - added[k])) for k, (z, _) in zip(normed, found[len(parts) :], strict=True)}
    return {key: variance(x) for key, x in added.items()}, sums


@pytest.mark.parametrize("placement", ["pre_ln", "peri_ln", "fusenorm", "keel"])
def test_variances_of_branches_and_of_sums(placement):
    model = lamina_model(placement, num_layers=3)
    context = context_of(model, sequences=1, tokens=8)
    frame = measured(Bounds(sequences=1, tokens=8, constant=2.0), context)
    branches, sums = branch_variances(model, context.batches[0]["input_ids"])
    for (layer, kind), expected in branches.items():
        where = {"layer": layer, "sublayer": kind}
        assert value(frame, "left", "fusenorm_eq_21", **where) == pytest.approx(expected, rel=1e-4)
        assert value(frame, "right", "fusenorm_eq_21", **where) == pytest.approx(2 / 3)
        assert value(frame, "ratio", "fusenorm_eq_21", **where) == pytest.approx(expected * 3 / 2, rel=1e-4)
    for (layer, kind), (total, skip) in sums.items():
        where = {"layer": layer, "sublayer": kind}
        assert value(frame, "left", "fusenorm_eq_20", **where) == pytest.approx(total, rel=1e-4)
        assert value(frame, "right", "fusenorm_eq_20", **where) == pytest.approx(skip + branches[layer, kind], rel=1e-4)
    mean = np.mean([variance for (_, kind), variance in branches.items() if kind == "feed_forward"])
    assert value(frame, "left", "fusenorm_eq_21", sublayer="feed_forward") == pytest.approx(mean, rel=1e-4)
    assert ("fusenorm_eq_20" in set(frame.role)) == bool(sums)


@pytest.mark.parametrize("placement", ["pre_ln", "peri_ln"])
def test_the_distance_to_the_identity_against_sigma(placement):
    model = lamina_model(placement, num_layers=4)
    context = context_of(model, sequences=1)
    frame = measured(Bounds(sequences=1, tokens=5, tolerance=1e-4), context)
    distances, sigmas = [], []
    with eager_attention(context.model):
        for layer in range(4):
            start, function = state_to_state(context, context.batches[0]["input_ids"], layer, layer + 1)
            matrix = jacobian_matrix(function, start) - torch.eye(5 * 16, dtype=torch.float64)
            distances.append(spectral(matrix))
            sigmas.append(math.sqrt(np.var(start[0].double().numpy(), axis=-1).mean()))
    constant = math.exp(np.mean(np.log(np.multiply(distances, sigmas))))
    for layer in range(4):
        assert value(frame, "left", "fusenorm_eq_9", layer) == pytest.approx(distances[layer], rel=1e-3)
        assert value(frame, "right", "fusenorm_eq_9", layer) == pytest.approx(constant / sigmas[layer], rel=1e-3)
    for role, x in (("fusenorm_eq_9", sigmas), ("fusenorm_eq_9_depth", [1, 2, 3, 4])):
        slope = np.polyfit(np.log(x), np.log(distances), 1)[0]
        assert value(frame, "left", role) == pytest.approx(slope, abs=5e-3)
    assert not {"fusenorm_eq_19", "fusenorm_eq_20"} & set(frame.role)


@pytest.mark.parametrize("out_scale", [1.0, 0.5])
def test_the_bound_of_a_fused_blocks_jacobian(out_scale):
    plan = resolve("fusenorm", 3)
    layers = tuple(layer.map(lambda sub: replace(sub, out_scale=out_scale)) for layer in plan.layers)
    model = lamina_model(replace(plan, layers=layers), num_layers=3)
    context = context_of(model, sequences=1)
    ids = context.batches[0]["input_ids"]
    frame = measured(Bounds(sequences=1, tokens=5, tolerance=1e-4), context)
    block = model.model.backbone.layers[1]
    attention, feed_forward = block.attention, block.feed_forward
    inputs = {}
    with eager_attention(context.model):
        start, function = state_to_state(context, ids, 1, 2)
        norm = spectral(jacobian_matrix(function, start))
        hooks = [
            part.post_norm.register_forward_hook(lambda m, args, out, part=part: inputs.update({part: (args[0], out)}))
            for part in (attention, feed_forward)
        ]

        def branch(x):
            function(x)
            return inputs[attention][0] - x

        mixing = spectral(jacobian_matrix(branch, start))
        function(start)
        for hook in hooks:
            hook.remove()
    y = inputs[attention][1].detach()
    inner = out_scale * spectral(jacobian_matrix(feed_forward.module, y))
    up, down = (getattr(feed_forward.module, name).weight.detach().double() for name in ("up_proj", "down_proj"))
    product = out_scale * spectral(down @ up)
    sigmas = [inputs[part][0][0].detach().double().square().mean(-1).sqrt() for part in (attention, feed_forward)]
    gains = [float(part.post_norm.weight.detach().abs().max()) for part in (attention, feed_forward)]

    def bound(first, second, jacobian):
        return gains[1] / float(second) * (1 + jacobian * gains[0] / float(first) * (1 + mixing))

    paper = bound(*(sigma.mean() for sigma in sigmas), product)
    chain = bound(*(sigma.min() for sigma in sigmas), inner)
    for role in ("fusenorm_eq_19", "fusenorm_eq_19_chain"):
        assert value(frame, "left", role, 1) == pytest.approx(norm, rel=1e-3)
    assert value(frame, "right", "fusenorm_eq_19", 1) == pytest.approx(paper, rel=1e-3)
    assert value(frame, "right", "fusenorm_eq_19_chain", 1) == pytest.approx(chain, rel=1e-3)
    assert norm <= chain
    ratios = frame[(frame.role == "fusenorm_eq_19_chain") & (frame.metric == "ratio")].value
    assert len(ratios) == 3
    assert (ratios <= 1).all()


def test_a_model_without_a_head_keeps_the_statements_about_depth():
    context = context_of(transformers_model("BertModel", add_pooling_layer=False), sequences=2)
    frame = measured(Bounds(), context)
    assert {"fusenorm_eq_20", "fusenorm_eq_21"} == set(frame.role)
    assert any("Lamina leaves out Proposition 3.1" in note for note in context.notes)


def test_an_exponent_that_the_layers_do_not_determine_is_none():
    """Sigmas that hardly differ: their slope is noise, and can be any number."""
    fit = [("fusenorm_eq_9", 32.4, 20.0), ("fusenorm_eq_9_depth", -0.51, 0.03)]
    rows = [(-1, "model", role, 0, "left", slope, error) for role, slope, error in fit]
    papers = {"fusenorm_eq_9": -1.0, "fusenorm_eq_9_depth": -0.5}
    rows += [(-1, "model", role, 0, "right", paper, math.nan) for role, paper in papers.items()]
    rows += [(x, "block", "fusenorm_eq_9", 0, metric, 1.0, 0.1) for x in range(3) for metric in ("left", "ratio")]
    said = list(Bounds().sentences(pd.DataFrame(rows, columns=COLUMNS)))
    unknown = (
        "3 layers are too few to tell how the Jacobian's distance from the identity scales with sigma_l. The exponent "
        "is 32 ± 20, and the paper's exponent is -1."
    )
    assert unknown in said
    known = "The Jacobian's distance from the identity scales as (l + 1)^(-0.51 ± 0.03). The paper's exponent is -0.5."
    assert known in said
