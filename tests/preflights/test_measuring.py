"""Every measured number against a naive computation in double precision on a small model."""

import math

import pytest
import torch
from torch import nn

import lamina
from lamina.preflights.burn_in import take_snapshot

LAYERS, WIDTH, TOKENS = 3, 8, 5
PLACEMENTS = ("pre_ln", "post_ln", "peri_ln", "fusenorm", "keel", "b2t")


@pytest.fixture(params=PLACEMENTS)
def model(request):
    made = lamina.build(
        "llama-nano", request.param, num_layers=LAYERS, hidden_size=WIDTH, num_heads=2, vocab_size=23, init="xavier"
    )
    with torch.no_grad():
        for name, parameter in made.named_parameters():
            if "norm" in name:
                parameter.uniform_(0.5, 1.5)
    return made.double()


@pytest.fixture
def ids():
    return torch.randint(0, 23, (2, TOKENS))


def snapshot(model, ids, seed=5):
    return take_snapshot(
        model, ids, torch.tensor([2.5, 3.5], dtype=torch.float64), 7, torch.Generator().manual_seed(seed)
    )


def forward(model, ids, replaced=None):
    """The states x^0 .. x^N and the logits; with ``replaced`` = (l, x) x^l is that tensor."""
    states, handles = [], []
    for index, block in enumerate(model.model.layers):

        def before(module, args, index=index):
            states.append(replaced[1] if replaced and replaced[0] == index else args[0])
            return (states[-1], *args[1:])

        handles.append(block.register_forward_pre_hook(before))
    handles.append(model.model.layers[-1].register_forward_hook(lambda module, args, output: states.append(output)))
    try:
        logits = model(input_ids=ids, use_cache=False).logits
    finally:
        for handle in handles:
            handle.remove()
    return states, logits


def naive_loss(logits, ids):
    p = logits.softmax(-1)
    return -sum(p[b, t, ids[b, t + 1]].log() for b in range(len(ids)) for t in range(TOKENS - 1)) / (
        len(ids) * (TOKENS - 1)
    )


def test_loss_and_what_the_input_is_worth(model, ids):
    shot = snapshot(model, ids)
    _, logits = forward(model, ids)
    mean = torch.stack([logits[b, t].softmax(-1) for b in range(2) for t in range(TOKENS - 1)]).mean(0)
    constant = -sum(mean[ids[b, t + 1]].log() for b in range(2) for t in range(TOKENS - 1)) / (2 * (TOKENS - 1))
    loss = naive_loss(logits, ids)
    # the loss is taken in float32
    assert shot.loss == pytest.approx(float(loss.detach()), rel=1e-6)
    assert shot.context == pytest.approx(float((constant - loss).detach()), abs=1e-6)
    each = [logits[b, t].softmax(-1) for b in range(2) for t in range(TOKENS - 1)]
    divergence = sum((p * (p / mean).log()).sum() for p in each) / len(each)
    assert shot.variation == pytest.approx(float(divergence.detach()), abs=1e-6)
    assert (shot.step, shot.unigram) == (7, 3.0)
    first, second = (float(naive_loss(logits[i : i + 1], ids[i : i + 1]).detach()) for i in range(2))
    # of two numbers: half their distance
    assert shot.error == pytest.approx(abs((first - 2.5) - (second - 3.5)) / 2, rel=1e-5)


def test_states_their_gradients_and_the_similarity_of_tokens(model, ids):
    shot = snapshot(model, ids)
    states, logits = forward(model, ids)
    gradients = torch.autograd.grad(naive_loss(logits, ids), states)
    for layer, (state, gradient) in enumerate(zip(states, gradients, strict=True), start=-1):
        # the loss is taken in float32, and its gradient with it
        assert shot.series("state_gradient_norm")[layer] == pytest.approx(float(gradient.norm()), rel=1e-5)
        x = state.detach().flatten(0, 1)
        cosines = [torch.dot(a, b) / (a.norm() * b.norm()) for a in x for b in x]
        assert shot.series("token_similarity")[layer] == pytest.approx(float(sum(cosines)) / len(cosines), rel=1e-9)
        variance = float(((x - x.mean()) ** 2).mean())
        assert shot.series("hidden_variance")[layer] == pytest.approx(variance, rel=1e-5)
        assert shot.series("hidden_abs_max")[layer] == pytest.approx(float(x.abs().max()), rel=1e-6)


def test_the_weights_gradients_by_block(model, ids):
    shot = snapshot(model, ids)
    assert all(parameter.grad is None for parameter in model.parameters())
    naive_loss(forward(model, ids)[1], ids).backward()
    for layer, block in enumerate(model.model.layers):
        squares = sum(float(p.grad.pow(2).sum()) for p in block.parameters())
        assert shot.series("gradient_norm")[layer] == pytest.approx(math.sqrt(squares), rel=1e-5)


def full_jacobian(model, ids, layer):
    """The matrix of partial derivatives of x^N by x^(layer), [all of x^N, all of x^layer]."""
    states, _ = forward(model, ids)
    fixed = states[layer].detach()

    def run(x):
        return forward(model, ids, (layer, x))[0][-1]

    return torch.autograd.functional.jacobian(run, fixed).reshape(fixed.numel(), fixed.numel())


def test_the_cumulative_jacobian(model, ids):
    ids = ids[:1, :3]
    for layer in range(LAYERS):
        jacobian = full_jacobian(model, ids, layer)
        vector = torch.randn(1, 3, WIDTH, generator=torch.Generator().manual_seed(5)).double().flatten()
        expected = float((jacobian.T @ vector).norm() / vector.norm())
        assert snapshot(model, ids).series("jacobian_gain")[layer - 1] == pytest.approx(expected, rel=1e-6)


def test_the_gain_is_the_root_mean_square_of_the_jacobian():
    model = lamina.build("llama-nano", "peri_ln", num_layers=2, hidden_size=WIDTH, num_heads=2, vocab_size=23).double()
    ids = torch.randint(0, 23, (1, 3))
    gains = [snapshot(model, ids, seed).series("jacobian_gain")[-1] for seed in range(200)]
    jacobian = full_jacobian(model, ids, 0)
    mean_square = float(jacobian.pow(2).sum()) / len(jacobian)
    # 200 random vectors in 24 dimensions: their mean square has a standard error of a few percent
    assert sum(g * g for g in gains) / len(gains) == pytest.approx(mean_square, rel=0.1)


@pytest.mark.parametrize("name", ["attention", "feed_forward"])
def test_branch_skip_and_sum(model, ids, name):
    """The added and the skip's variance against the sub-layer's equation written out."""
    seen = {}

    def keep(key):
        def hook(module, args, output):
            seen[key] = (args, output[0] if isinstance(output, tuple) else output)

        return hook

    for index, block in enumerate(model.model.layers):
        residual = getattr(block, name)
        residual.register_forward_hook(keep((index, "residual")))
        residual.module.register_forward_hook(keep((index, "module")))
    shot = snapshot(model, ids)
    for index, block in enumerate(model.model.layers):
        residual = getattr(block, name)
        args, _ = seen[index, "residual"]
        branch = seen[index, "module"][1]
        added = branch if residual.out_norm is None else residual.out_norm(branch)
        x, start = args[0], args[1] if len(args) > 1 else args[0]
        skip = {"stream": x, "block_input": start, "both": x + start}[residual.skip] * residual.skip_scale
        for metric, value in (("branch_variance", branch), ("added_variance", added), ("skip_variance", skip)):
            expected = float(((value - value.mean()) ** 2).mean().detach())
            assert shot.series(metric, name)[index] == pytest.approx(expected, rel=1e-9), metric


def test_the_model_is_left_as_it_was(model, ids):
    model.train()
    before = {name: p.clone() for name, p in model.named_parameters()}
    snapshot(model, ids)
    assert model.training
    assert all(torch.equal(before[name], p) for name, p in model.named_parameters())
    hooks = [len(m._forward_hooks) + len(m._forward_pre_hooks) for m in model.modules() if isinstance(m, nn.Module)]
    assert sum(hooks) == 0
