"""CUDA graphs of blocks: what is captured, when it is replayed, and what is refused. The numbers are tests/gpu's."""

import pytest
import torch
from modeling.tiny import built, token_ids
from training.tiny_runs import settings

from lamina.errors import UserError
from lamina.modeling.parts import uncompiled
from lamina.training import pretrain as pretraining
from lamina.training.execution import compiling
from lamina.training.execution.graphs import Replay

PLACEMENTS = ["pre_ln", "keel", "fusenorm", "peri_ln", "pre_ln(wiring=mhc)", "pre_ln(wiring=denseformer)"]


class StaticCapture:
    """Stands in for torch's capture on a CPU: replays work on the samples' memory alone, as a graph's do."""

    def __init__(self):
        self.captured, self.replayed = 0, 0

    def __call__(self, functions, samples):
        self.captured += 1
        return [self._replayed(function, tensors) for function, tensors in zip(functions, samples, strict=True)]

    def _replayed(self, function, static):
        parameters = tuple(function.parameters())

        class Graphed(torch.autograd.Function):
            @staticmethod
            def forward(ctx, *tensors):
                with torch.no_grad():
                    for place, tensor in zip(static, tensors, strict=False):
                        place.copy_(tensor)
                with torch.enable_grad():
                    outputs = function(*static)
                leaves, ctx.tree = torch.utils._pytree.tree_flatten(outputs)
                ctx.outputs, Graphed.tree = leaves, ctx.tree
                return tuple(leaf.detach() for leaf in leaves)

            @staticmethod
            def backward(ctx, *gradients):
                inputs = [tensor for tensor in (*static, *parameters) if tensor.requires_grad]
                found = iter(torch.autograd.grad(ctx.outputs, inputs, gradients, allow_unused=True))
                return tuple(next(found) if tensor.requires_grad else None for tensor in (*static, *parameters))

        def replay(*tensors):
            self.replayed += 1
            outputs = Graphed.apply(*tensors, *parameters)
            return torch.utils._pytree.tree_unflatten(outputs, Graphed.tree)

        return replay


def step(model, ids):
    model.zero_grad()
    loss = model(input_ids=ids, labels=ids, use_cache=False).loss
    loss.backward()
    return loss.detach(), {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}


@pytest.mark.parametrize("placement", PLACEMENTS)
def test_from_the_second_step_on_blocks_are_replayed_with_the_eager_numbers(placement):
    model = built(placement, 4).train()
    batches = [token_ids(seed=seed) for seed in range(3)]
    eager = [step(model, ids) for ids in batches]
    capture = StaticCapture()
    Replay(compiling._blocks(model), capture)
    for index, (ids, (loss, gradients)) in enumerate(zip(batches, eager, strict=True)):
        replayed, theirs = step(model, ids)
        assert (capture.captured, capture.replayed) == (min(index, 1), 4 * index)
        assert torch.equal(replayed, loss)
        assert theirs.keys() == gradients.keys()
        for name, gradient in gradients.items():
            torch.testing.assert_close(theirs[name], gradient, atol=0, rtol=0, msg=f"{name}: {{}}".format)


def test_evaluations_other_shapes_and_the_monitors_passes_run_eagerly():
    model, ids, capture = built("keel", 2).train(), token_ids(), StaticCapture()
    Replay(compiling._blocks(model), capture)
    for _ in range(2):
        step(model, ids)
    capture.replayed = 0
    with torch.no_grad():
        model(input_ids=ids)
    model.eval()(input_ids=ids)
    model.train()
    step(model, ids[:1])
    with uncompiled(model):
        step(model, ids)
    assert capture.replayed == 0
    step(model, ids)
    assert capture.replayed == 2


def test_what_prepares_a_model_anew_takes_its_graphs_away():
    model = built("pre_ln", 2).train()
    compiling.prepare(model, compiled=False, replayed=True)
    assert all(block._compiled_call_impl is not None for block in compiling._blocks(model))
    compiling.prepare(model, compiled=False)
    assert all(block._compiled_call_impl is None for block in compiling._blocks(model))


def test_a_block_that_cannot_be_captured_is_named_in_a_line():
    def fails(functions, samples):
        raise RuntimeError("operation not permitted when stream is capturing\nmore")

    model, ids = built("pre_ln", 2).train(), token_ids()
    Replay(compiling._blocks(model), fails)
    step(model, ids)
    with pytest.raises(UserError, match=r"cuda_graphs: the blocks can't be captured: operation.*Leave out"):
        step(model, ids)


def test_a_cpu_trains_the_same_bytes(corpus, tmp_path):
    for name in ("eager", "graphs"):
        pretraining.pretrain(settings(corpus, tmp_path / name, cuda_graphs=name == "graphs"), bar=False)
    weights = [(tmp_path / name / "model" / "model.safetensors").read_bytes() for name in ("eager", "graphs")]
    assert weights[0] == weights[1]
