"""The loss without whole logits equals the plain formula, in loss and gradients, and never makes the logits."""

import pytest
import torch
from torch import nn
from torch.nn import functional
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import Gemma2Config, LlamaConfig

import lamina
from lamina.modeling.linear_cross_entropy import LinearLoss, chunk_loss

TOKENS, WIDTH, VOCABULARY = 45, 16, 96
CHUNK = 8  # does not divide 45


def naive(states, weight, labels, *, scale=1.0, softcap=None):
    """sum_i (log sum_v exp z_iv - z_i,t_i) over kept labels, written out in float64, and how many were kept."""
    z = scale * states.double() @ weight.double().T
    if softcap is not None:
        z = softcap * torch.tanh(z / softcap)
    kept = [i for i, t in enumerate(labels.tolist()) if t != -100]
    return sum(torch.log(torch.exp(z[i]).sum()) - z[i, labels[i]] for i in kept), len(kept)


@pytest.fixture(params=["torch's own", "python"])
def path(request, monkeypatch):
    if request.param == "python":
        monkeypatch.delattr(functional, "linear_cross_entropy", raising=False)
    elif not hasattr(functional, "linear_cross_entropy"):
        pytest.skip(f"torch {torch.__version__} has none")
    return request.param


def case(dtype=torch.float64):
    generator = torch.Generator().manual_seed(0)
    states = torch.randn(3, TOKENS // 3, WIDTH, generator=generator, dtype=torch.float64).to(dtype)
    head = nn.Linear(WIDTH, VOCABULARY, bias=False, dtype=dtype)
    with torch.no_grad():
        head.weight.copy_(torch.randn(VOCABULARY, WIDTH, generator=generator, dtype=torch.float64) / 4)
    labels = torch.randint(0, VOCABULARY, (3, TOKENS // 3), generator=generator)
    labels[0, 3:7] = -100
    return states.requires_grad_(), head, labels


def shifted(labels):
    return torch.cat([labels[:, 1:], torch.full((len(labels), 1), -100)], dim=1).flatten()


# float32: sums of 96 exponentials and 45 products, a few ulp each.
@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float64, 1e-12), (torch.float32, 2e-6)])
@pytest.mark.parametrize("more", [{}, {"scale": 0.25}, {"softcap": 2.0}, {"scale": 3.0, "softcap": 5.0}])
def test_loss_and_gradients_are_those_of_the_formula(path, dtype, tolerance, more):
    states, head, labels = case(dtype)
    loss = LinearLoss(elements=CHUNK * VOCABULARY)(states, head, labels, **more)
    (3 * loss).backward()  # as a loss scaler or gradient accumulation would
    x, w = states.detach().double().requires_grad_(), head.weight.detach().double().requires_grad_()
    total, kept = naive(x.flatten(0, 1), w, shifted(labels), **more)
    (3 * total / kept).backward()
    assert loss.dtype == dtype
    torch.testing.assert_close(loss.double(), total / kept, rtol=tolerance, atol=0)
    torch.testing.assert_close(states.grad.double(), x.grad, rtol=0, atol=tolerance)
    torch.testing.assert_close(head.weight.grad.double(), w.grad, rtol=0, atol=tolerance)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_keeps_a_float32_loss_and_gradient_sums(dtype):
    states, head, labels = case(torch.float32)
    with torch.autocast("cpu", dtype=dtype):
        loss = LinearLoss(elements=CHUNK * VOCABULARY)(states, head, labels)
    loss.backward()
    # The formula on the same rounded factors: what is left is the rounding of the logits and of their gradient.
    x = states.detach().to(dtype).double().requires_grad_()
    w = head.weight.detach().to(dtype).double().requires_grad_()
    total, kept = naive(x.flatten(0, 1), w, shifted(labels))
    (total / kept).backward()
    ulp = torch.finfo(dtype).eps
    assert loss.dtype == torch.float32
    # A logit of up to 4 is off by up to 2 ulp; the mean of many is off by far less. A loss rounded to bfloat16 itself
    # (as torch's own comes back) would be off by up to ulp/2 of its size, 0.009 here.
    assert abs(loss.item() - (total / kept).item()) < ulp / 8
    assert (states.grad.double() - x.grad).norm() < 2 * ulp * x.grad.norm()
    assert (head.weight.grad.double() - w.grad).norm() < 2 * ulp * w.grad.norm()
    assert states.grad.dtype == head.weight.grad.dtype == torch.float32


def test_float16_gradients_do_not_vanish_before_the_scaler(path):
    """1/n of a small probability is below float16's smallest number: the division has to come after the scaler's."""
    states, head, labels = case(torch.float32)
    with torch.autocast("cpu", dtype=torch.float16):
        loss = LinearLoss(elements=CHUNK * VOCABULARY)(states, head, labels, num_items_in_batch=10**7)
    (loss * 2.0**16).backward()
    x = states.detach().double().requires_grad_()
    (naive(x.flatten(0, 1), head.weight.detach(), shifted(labels))[0] * 2.0**16 / 10**7).backward()
    assert (states.grad.double() - x.grad).norm() < 5e-3 * x.grad.norm()


def test_division_and_shifted_labels(path):
    states, head, labels = case()
    loss = LinearLoss(elements=CHUNK * VOCABULARY)
    total, _ = naive(states.flatten(0, 1), head.weight, shifted(labels))
    for items in (7, torch.tensor(7)):
        assert loss(states, head, labels, num_items_in_batch=items).item() == pytest.approx(total.item() / 7, rel=1e-12)
    given = loss(states, head, None, shift_labels=shifted(labels).view_as(labels), num_items_in_batch=7)
    assert given.item() == pytest.approx(total.item() / 7, rel=1e-12)


def test_what_it_is_not_made_for_is_left_to_the_model():
    states, head, labels = case()
    loss = LinearLoss(elements=CHUNK * VOCABULARY)
    assert loss(states, nn.Linear(WIDTH, VOCABULARY, bias=True, dtype=torch.float64), labels) is None
    assert loss(states, nn.Sequential(head), labels) is None
    assert loss(states, head, labels, label_smoothing=0.1) is None
    assert LinearLoss()(states, head, labels) is None  # 45 tokens are one chunk


def test_goes_backward_once():
    states, head, labels = case(torch.float32)
    loss = LinearLoss(elements=CHUNK * VOCABULARY)(states, head, labels, softcap=5.0)
    loss.backward(retain_graph=True)
    with pytest.raises(RuntimeError, match="only one backward pass"):
        loss.backward()


class Largest(TorchDispatchMode):
    """The most elements that any operation's result had."""

    elements = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        for item in result if isinstance(result, tuple | list) else (result,):
            if isinstance(item, torch.Tensor):
                self.elements = max(self.elements, item.numel())
        return result


@pytest.mark.parametrize("training", [True, False])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("backbone", ["llama", "gemma2"])
def test_a_model_gives_the_same_loss_without_whole_logits(path, backbone, dtype, training):
    torch.manual_seed(0)
    sizes = {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2}
    sizes |= {"num_key_value_heads": 2, "vocab_size": 1024, "head_dim": 8}
    config = LlamaConfig(**sizes) if backbone == "llama" else Gemma2Config(**sizes, final_logit_softcapping=0.5)
    model = lamina.build(config, "peri_ln").train(training)
    ids = torch.randint(0, 1024, (4, 32))

    def gradients(**kwargs):
        model.zero_grad()
        with Largest() as largest, torch.autocast("cpu", dtype=dtype, enabled=dtype != torch.float32):
            with torch.set_grad_enabled(training):
                output = model(input_ids=ids, labels=ids, use_cache=False, **kwargs)
            if training:
                output.loss.backward()
        return output, [p.grad.clone() for p in model.parameters() if training], largest.elements

    plain, plain_gradients, plain_largest = gradients()
    model.linear_loss = LinearLoss(elements=16 * 1024)
    chunked, chunked_gradients, chunked_largest = gradients()
    assert plain_largest >= 4 * 32 * 1024 > 4 * chunked_largest
    assert chunked.logits is None
    assert chunked.loss.dtype == torch.float32
    # bfloat16: both round the logits alike; the gradient is rounded at other places.
    tolerance = 1e-5 if dtype == torch.float32 else 2e-2
    # ... and the plain path rounds soft-capped logits to bfloat16 once more.
    torch.testing.assert_close(chunked.loss, plain.loss, rtol=1e-6 if dtype == torch.float32 else 1e-5, atol=0)
    for one, other in zip(chunked_gradients, plain_gradients, strict=True):
        assert (one - other).norm() <= tolerance * other.norm() + 1e-9
    assert model(input_ids=ids).logits is not None


@pytest.mark.parametrize("softcap", [None, 2.0])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
def test_what_is_compiled_gives_the_bits_of_what_is_not(dtype, softcap):
    """Without a scatter: on a GPU it is a part of one kernel."""
    logits = torch.randn(TOKENS, VOCABULARY, generator=torch.Generator().manual_seed(0)).to(dtype)
    labels = torch.arange(TOKENS).where(torch.arange(TOKENS) % 5 > 0, torch.tensor(-100))
    graphs = []

    def kept(graph, inputs):
        graphs.append(graph)
        return graph.forward

    loss, gradient = chunk_loss(logits, labels, softcap)
    compiled = torch.compile(chunk_loss, backend=kept)(logits, labels, softcap)
    assert torch.equal(compiled[0], loss)
    assert torch.equal(compiled[1], gradient)
    assert gradient.dtype == dtype
    assert "scatter" not in graphs[0].print_readable(print_output=False)
