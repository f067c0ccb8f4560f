"""One graph a kind of layer at any depth, the same losses, and hooks that still see every layer."""

import pytest
import torch
from torch._dynamo.utils import counters
from transformers import Gemma2Config, LlamaConfig

import lamina
from lamina.modeling.parts import uncompiled
from lamina.placements import names
from lamina.training.execution.compiling import compile_blocks, discard, structure
from lamina.training.monitor.stream_measures import hidden_state_rows
from lamina.training.monitor.training_hooks import is_compiled

SIZES = {"hidden_size": 8, "intermediate_size": 8, "num_attention_heads": 2, "num_key_value_heads": 2, "vocab_size": 16}
IDS = torch.arange(8).view(2, 4)


@pytest.fixture(autouse=True)
def _fresh_dynamo():
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


def tiny(placement, num_layers, backbone=LlamaConfig, **more):
    torch.manual_seed(0)
    config = backbone(**{**SIZES, **more}, num_hidden_layers=num_layers)
    return lamina.build(config, placement, init="normal").train()


def graphs(model, backend="eager"):
    """The graphs that a forward and backward pass of a model with compiled blocks are made of."""
    torch._dynamo.reset()
    counters.clear()
    compile_blocks(model, backend=backend)
    model(input_ids=IDS, labels=IDS).loss.backward()
    assert not counters["graph_break"]
    return counters["stats"]["unique_graphs"]


@pytest.mark.parametrize("placement", names())
def test_a_graph_for_each_kind_of_layer(placement):
    with torch.device("meta"):
        deep = tiny(placement, 64)
    kinds = len({structure(block) for block in deep.model.layers})
    assert kinds <= 2
    # One more where a scale differs by layer: the first value is compiled in, then any value is.
    assert kinds <= graphs(tiny(placement, 4)) <= kinds + 1


@pytest.mark.parametrize("placement", ["fusenorm", "layernorm_scaling"])
def test_deeper_models_compile_no_more_graphs(placement):
    assert graphs(tiny(placement, 2)) == graphs(tiny(placement, 16)) == 2


def test_a_scale_by_layer_is_no_kind_of_its_own():
    """LayerNorm Scaling's 1/sqrt(l) is 1 in the first layer: multiplied by all the same, to the bit."""
    scaled, plain = tiny("layernorm_scaling", 1), tiny("pre_ln", 1)
    assert torch.equal(scaled(input_ids=IDS).logits, plain(input_ids=IDS).logits)
    assert len({structure(block) for block in tiny("layernorm_scaling", 6).model.layers}) == 1


def test_kinds_of_attention_count():
    """Gemma 2 alternates windowed and full attention; Keel's first layer is a kind of its own (here it is windowed).

    Where the masks alone tell them apart, the two have one graph.
    """
    model = tiny("keel", 8, Gemma2Config, head_dim=4, sliding_window=2)
    assert len({structure(block) for block in model.model.layers}) == 3
    assert 2 <= graphs(model) <= 3


def test_a_plan_of_many_kinds_compiles_them_all():
    """More than the 8 graphs after which dynamo gives up."""
    plan = lamina.placements.resolve("pre_ln", 12)
    positions = [(a, b) for a in ("pre_norm", "out_norm", "post_norm") for b in ("pre_norm", "out_norm", "post_norm")]
    layers = []
    for attention, feed_forward in [*positions, *positions[:3]]:
        kind = {"attention": {attention: {"kind": "rms"}}, "feed_forward": {feed_forward: {"kind": "rms"}}}
        layers.append({part: {"pre_norm": None, **fields} for part, fields in kind.items()})
    plan = lamina.placements.Plan.from_dict({**plan.to_dict(), "layers": layers})
    assert graphs(tiny(plan, 12)) == 9


INDUCTOR = pytest.param("inductor", marks=pytest.mark.slow)  # its C++ compiler takes a minute on a busy machine


@pytest.mark.parametrize("backend", ["aot_eager", INDUCTOR])
@pytest.mark.parametrize("placement", ["keel", "layernorm_scaling"])
@pytest.mark.parametrize("checkpointing", [False, True])
def test_losses_and_gradients_are_those_of_the_uncompiled_model(placement, checkpointing, backend):
    model = tiny(placement, 3)
    if checkpointing:
        model.gradient_checkpointing_enable()

    def step():
        model.zero_grad()
        loss = model(input_ids=IDS, labels=IDS).loss
        loss.backward()
        return loss.detach(), [p.grad.clone() for p in model.parameters()]

    expected, expected_gradients = step()
    compile_blocks(model, backend=backend)
    loss, gradients = step()
    torch.testing.assert_close(loss, expected, rtol=1e-6, atol=0)
    for one, other in zip(gradients, expected_gradients, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-6)  # sums in another order
    assert list(model.state_dict()) == list(tiny(placement, 3).state_dict())


def test_compiled_blocks_keep_few_activations():
    """In states of the stream: 17.6 would be kept if the products' inputs were not computed again."""
    model = tiny("keel", 3, hidden_size=64, intermediate_size=172)
    compile_blocks(model, backend="aot_eager_decomp_partition")
    weights = {p.data_ptr() for p in model.parameters()}
    kept = {}

    def pack(tensor):
        if tensor.data_ptr() not in weights:
            kept[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage().nbytes()
        return tensor

    x = torch.randn(2, 32, 64, requires_grad=True)
    positions = model.model.backbone.rotary_emb(x, torch.arange(32)[None])
    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        model.model.layers[2](x, position_embeddings=positions)
    assert sum(kept.values()) < 13.5 * x.numel() * 4


def test_hooks_see_every_layer_and_evaluations_compile_nothing():
    model = tiny("keel", 4)
    expected = hidden_state_rows(model, IDS, step=1)
    first = graphs(model)
    seen = []
    for block in model.model.layers:
        block.register_forward_hook(lambda module, args, output: seen.append(module))
    model(input_ids=IDS, labels=IDS).loss.backward()
    assert seen == list(model.model.layers)
    assert hidden_state_rows(model, IDS, step=1) == expected
    with uncompiled(model):
        assert not is_compiled(model)
        model(input_ids=IDS[:1])
    assert is_compiled(model)
    assert counters["stats"]["unique_graphs"] == first
    discard(model)
    assert not is_compiled(model)
