"""Jacobians and dropped layers of several streams, or earlier states, against whole matrices and deletion."""

import copy

import pytest
import torch
from test_gradients import causal_loss
from test_layer_drop import built, loss_of_bare, table
from tiny_contexts import context_of, jacobian_matrix, lamina_model, measured, value

from lamina.errors import UserError
from lamina.modeling.streams_lamina import State
from lamina.probes.engine.measure import probe
from lamina.probes.jacobian import JacobianProbe
from lamina.probes.structure.hooks import eager_attention


def exact(**options):
    return JacobianProbe(**{"sequences": 1, "tokens": 4, "tolerance": 1e-5, "iterations": 200, **options})


@pytest.mark.parametrize(
    "name", ["pre_ln(wiring=mhc,size=2)", "keel(wiring=identity_hc,size=2)", "pre_ln(wiring=siamese)"]
)
def test_of_streams_the_norms_are_joint_of_each_and_of_their_mean(name):
    """Each block is called by itself, on streams [tokens, n, width]; its matrix is cut into the streams' parts."""
    model = lamina_model(name)
    context = context_of(model, sequences=1, tokens=4)
    frame = measured(exact(), context)
    states = []
    hooks = [
        block.attention.register_forward_pre_hook(lambda _, args: states.append(args[0].detach().clone()))
        for block in model.model.layers
    ]
    calls = []
    for block in model.model.layers:
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

            joint = matrix.reshape(128, 128)
            assert value(frame, "norm", "jacobian", layer) == pytest.approx(
                float(torch.linalg.matrix_norm(joint, ord=2)), rel=1e-4
            )
            for i in range(2):
                part = matrix[:, i, :, :, i].reshape(64, 64)
                assert value(frame, "norm", "stream", layer, index=i) == pytest.approx(
                    float(torch.linalg.matrix_norm(part, ord=2)), rel=1e-4
                )
            mean = matrix.mean(1).sum(3).reshape(64, 64)
            assert value(frame, "norm", "collapsed", layer) == pytest.approx(
                float(torch.linalg.matrix_norm(mean, ord=2)), rel=1e-4
            )
    assert not frame.role.isin(["keel", "fusenorm"]).any()
    assert any("mean" in sentence for sentence in JacobianProbe().sentences(frame))
    assert len(list(JacobianProbe().figures(frame))) == 2


def test_earlier_states_are_refused():
    with pytest.raises(UserError, match="jacobian: a layer reads earlier states"):
        measured(exact(), context_of(lamina_model("pre_ln(wiring=attn_res,size=1)"), sequences=1))


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
