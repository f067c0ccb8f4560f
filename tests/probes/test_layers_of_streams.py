"""Jacobians and dropped layers of several streams, or earlier states, against whole matrices and deletion."""

import copy

import pytest
import torch
from spread import spread
from test_gradients import causal_loss
from test_layer_drop import built, loss_of_bare, table
from tiny_contexts import context_of, jacobian_matrix, lamina_model, measured, spectral, value

from lamina.errors import UserError
from lamina.modeling.streams_lamina import State
from lamina.probes.attention import Attention
from lamina.probes.bounds import Bounds
from lamina.probes.engine import registry
from lamina.probes.engine.measure import probe
from lamina.probes.gradients import Gradients
from lamina.probes.jacobian import JacobianProbe
from lamina.probes.low_precision import LowPrecision
from lamina.probes.spectra import Spectra
from lamina.probes.structure.hooks import eager_attention


def exact(**options):
    return JacobianProbe(**{"sequences": 1, "tokens": 4, "tolerance": 1e-5, "iterations": 200, **options})


STREAMS = ["pre_ln(wiring=mhc,size=2)", "keel(wiring=identity_hc,size=2)", "pre_ln(wiring=siamese)"]


@pytest.mark.parametrize("name", spread(STREAMS, STREAMS[1:2]))
def test_of_streams_the_norms_are_joint_of_each_and_of_their_mean(name):
    """Each block is called by itself, on streams [tokens, n, width]; its matrix is cut into the streams' parts."""
    model = lamina_model(name)
    context = context_of(model, sequences=1, tokens=4)
    frame = measured(exact(), context)
    states, calls, hooks = [], [], []
    for block in model.model.layers:
        hooks.append(block.attention.register_forward_pre_hook(lambda _, a: states.append(a[0].detach().clone())))
        hooks.append(block.register_forward_pre_hook(lambda _, a, k: calls.append(k), with_kwargs=True))
    with torch.no_grad(), eager_attention(model):
        model(input_ids=context.batches[0]["input_ids"][:1], use_cache=False)
    for hook in hooks:
        hook.remove()
    model.model.layers[0].streams = 0  # it takes streams, too
    with eager_attention(model):
        for layer, (block, state, more) in enumerate(zip(model.model.layers, states, calls, strict=True)):
            function = lambda s, block=block, more=more: block(s, **more)  # noqa: E731
            matrix = jacobian_matrix(function, state).reshape(4, 2, 16, 4, 2, 16)
            whole = spectral(matrix.reshape(128, 128))
            assert value(frame, "norm", "jacobian", layer) == pytest.approx(whole, rel=1e-4)
            for i in range(2):
                own = spectral(matrix[:, i, :, :, i].reshape(64, 64))
                assert value(frame, "norm", "stream", layer, index=i) == pytest.approx(own, rel=1e-4)
            mean = spectral(matrix.mean(1).sum(3).reshape(64, 64))
            assert value(frame, "norm", "collapsed", layer) == pytest.approx(mean, rel=1e-4)
    assert not frame.role.isin(["keel", "fusenorm"]).any()
    assert any("mean" in sentence for sentence in JacobianProbe().sentences(frame))
    assert len(list(JacobianProbe().figures(frame))) == 2


def test_earlier_states_are_refused():
    with pytest.raises(UserError, match="jacobian: a layer reads earlier states"):
        measured(exact(), context_of(lamina_model("pre_ln(wiring=attn_res,size=1)"), sequences=1))


MORE = ["pre_ln(wiring=mhc,size=2)", "pre_ln(wiring=attn_res,size=1)", "peri_ln(wiring=denseformer)"]


def seen(modules, run):
    """The first argument and the output of each module in one pass, by its number."""
    found, modules = {}, list(modules)

    def keep(module, args, kwargs, output):
        found[modules.index(module)] = next(iter((*args, *kwargs.values()))), output

    hooks = [module.register_forward_hook(keep, with_kwargs=True) for module in modules]
    run()
    for hook in hooks:
        hook.remove()
    return found


@pytest.mark.parametrize("name", MORE)
def test_what_needs_no_single_stream_is_measured_of_every_model(name):
    model = lamina_model(name)
    context = context_of(model, sequences=6, tokens=9)
    ids = torch.cat([batch["input_ids"] for batch in context.batches])
    halves = [half for block in model.model.layers for half in (block.attention, block.feed_forward)]
    with torch.no_grad(), eager_attention(model):
        inside = seen([half.module for half in halves], lambda: model(input_ids=ids, use_cache=False))

    frame = measured(Attention(), context)
    for layer in range(2):
        weights = inside[2 * layer][1][1].double()
        entropy = torch.special.entr(weights).sum(-1).mean()
        assert value(frame, "entropy", "all", layer) == pytest.approx(float(entropy), rel=1e-5)
    assert set(frame.layer) == {0, 1}

    frame = measured(Spectra(), context)
    for layer in range(2):
        ffn = model.model.layers[layer].feed_forward.module
        with torch.no_grad():
            y = inside[2 * layer + 1][0]
            pre = ffn.gate_proj(y)
            post = torch.nn.functional.silu(pre) * ffn.up_proj(y)
        for role, x in (("pre", pre), ("post", post)):
            values = torch.linalg.eigvalsh(torch.cov(x.flatten(0, 1).double().T)).clamp(min=1e-12)
            hard = values.sum() ** 2 / values.square().sum() / len(values)
            assert value(frame, "hard_rank", role, layer) == pytest.approx(float(hard), rel=1e-4)
        found = value(frame, "condition_number", "feed_forward.module.up_proj", layer)
        assert found == pytest.approx(float(torch.linalg.cond(ffn.up_proj.weight.detach().double())), rel=1e-4)

    context.notes.clear()
    frame = measured(Bounds(sequences=6, tokens=9), context)
    assert set(frame.role) == {"fusenorm_eq_21"}
    frame = measured(LowPrecision(sequences=0), context)
    assert set(frame.role) == {"contribution", "activation", "weight", "model", "state"}
    assert (frame[frame.role == "state"].layer == -1).all()  # the loss without rounding
    assert [note.split(":")[0] for note in context.notes] == ["bounds", "low_precision"]
    with torch.no_grad():
        last = seen([half.module if half.out_norm is None else half.out_norm for half in halves], lambda: model(ids))
    for number in range(4):
        added = last[number][1][0] if isinstance(last[number][1], tuple) else last[number][1]
        kind, layer = ("attention", "feed_forward")[number % 2], number // 2
        rows = frame[(frame.format == "bf16") & (frame.sublayer == kind)]
        error = (added - added.bfloat16().float()).norm(dim=(1, 2)) / added.norm(dim=(1, 2))
        assert value(rows, "relative_error", "contribution", layer) == pytest.approx(float(error.mean()), rel=1e-4)
        bounds = measured(Bounds(sequences=6, tokens=9), context)
        variance = float(added.var(-1, correction=0).mean())
        found = value(bounds[bounds.sublayer == kind], "left", "fusenorm_eq_21", layer)
        assert found == pytest.approx(variance, rel=1e-4)


@pytest.mark.parametrize("name", MORE)
def test_the_gradient_of_all_streams_is_autograds(name):
    model = lamina_model(name)
    context = context_of(model, sequences=3, tokens=7)
    frame = measured(Gradients(), context)
    states = []

    def keep(module, args, kwargs, output):
        states.extend([args[0], output])

    hooks = [block.register_forward_hook(keep, with_kwargs=True) for block in model.model.layers]
    loss = causal_loss(model, torch.cat([batch["input_ids"] for batch in context.batches]))
    for hook in hooks:
        hook.remove()
    states = [state.stream if isinstance(state, State) else state for state in (states[0], states[1], states[3])]
    weight = model.model.layers[1].feed_forward.module.up_proj.weight
    for state, gradient in enumerate(torch.autograd.grad(loss, [*states, weight])):
        role, kind = ("state", "block") if state < 3 else ("feed_forward_in", "feed_forward")
        row = frame[frame.sublayer == kind]
        found = value(row, "gradient_norm", role, state if state < 3 else 1)
        assert found == pytest.approx(float(gradient.norm()), rel=1e-4)


@pytest.mark.slow
def test_only_the_logit_lens_refuses_several_streams():
    frames = probe(lamina_model(MORE[0]), "all", torch.randint(3, 40, (8, 9)))
    assert set(registry.names()) - set(frames) == {"logit_lens", "weight_change"}  # the latter needs a reference
    with pytest.raises(UserError, match=r"a single residual stream, but .* read several streams\. Choose"):
        probe(lamina_model(MORE[0]), "logit_lens", torch.randint(3, 40, (8, 9)))


@pytest.mark.parametrize("placement", ["keel(wiring=mhc)", "post_ln(wiring=residual)", "pre_ln(wiring=x0)"])
def test_of_several_streams_a_layer_hands_on_all_and_of_earlier_states_the_stream(placement):
    model = built(placement, num_layers=3)
    ids = torch.randint(3, 40, (3, 8))
    found = table(probe(model, "layer_drop(metric=loss)", ids, batch_size=2)["layer_drop"])
    whole = float(causal_loss(model, ids).detach())
    for layer in range(3):
        other = copy.deepcopy(model)
        block = other.model.layers[layer]
        if block.has_memory:  # the stream passes, and is remembered
            block.forward = lambda x, remembers=block.remembers, **_: State(x, (x,)) if remembers else x
        else:
            del other.model.layers[layer]
            if not layer:
                other.model.layers[0].streams = block.streams
        expected = {"remove": float(causal_loss(other, ids).detach()), "branch": loss_of_bare(model, ids, [layer])}
        assert {meaning: found[layer, meaning] for meaning in expected} == {
            meaning: pytest.approx(loss - whole, abs=2e-5) for meaning, loss in expected.items()
        }
