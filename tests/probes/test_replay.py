"""Layers called again on their own: the same values as in the model, the right call of a shared layer, real tokens."""

import pytest
import torch
from tiny_contexts import context_of, lamina_model, transformers_model

from lamina.errors import UserError
from lamina.probes.engine.layer_calls import frozen, record_layer_calls, short_inputs
from lamina.probes.structure.hooks import intercept
from lamina.probes.structure.sites import Point


@pytest.mark.parametrize("name", ["BertForMaskedLM", "AlbertForMaskedLM", "GPT2LMHeadModel", "Gemma2ForCausalLM"])
def test_each_block_hands_on_what_the_next_one_was_handed(name):
    changes = {"embedding_size": 8} if name.startswith("Albert") else {}
    context = context_of(transformers_model(name, **changes))
    blocks = record_layer_calls(context, context.batches[0])
    assert [block.site.index for block in blocks] == [0, 1]
    with torch.no_grad():
        torch.testing.assert_close(blocks[0](blocks[0].stream), blocks[1].stream)
        torch.testing.assert_close(blocks[1].residual_path(blocks[1].stream), blocks[1](blocks[1].stream))


def test_a_shared_layer_is_watched_in_the_call_that_is_meant():
    context = context_of(transformers_model("AlbertForMaskedLM", embedding_size=8))
    sites, blocks = context.structure.layers, record_layer_calls(context, context.batches[0])
    assert sites[0].module is sites[1].module
    seen = {}
    points = {layer: site.sublayers[0].contribution for layer, site in enumerate(sites)}
    with torch.no_grad(), intercept(points, lambda key, tensor: seen.update({key: tensor})):
        context.forward(context.batches[0], head=False)
    for layer, block in enumerate(blocks):
        with torch.no_grad():
            _, found = block.watch({"added": points[layer]}, block.stream)
        torch.testing.assert_close(found["added"], seen[layer])
    assert not torch.allclose(seen[0], seen[1])


def test_a_tensor_is_replaced_on_its_way_and_only_in_its_call():
    layer = torch.nn.Linear(2, 2)
    points = {"out": Point(layer, "", "output", call=1), "in": Point(layer, "", "input", call=2)}
    replacements = {"out": torch.full((2,), 7.0), "in": torch.zeros(2)}
    with torch.no_grad(), intercept(points, lambda key, tensor: replacements[key]):
        outputs = [layer(torch.ones(2)) for _ in range(4)]
    torch.testing.assert_close(outputs[0], outputs[3])
    torch.testing.assert_close(outputs[1], replacements["out"])
    torch.testing.assert_close(outputs[2], layer.bias.detach())
    assert not layer._forward_hooks


def test_calls_are_counted_anew_in_each_forward_pass_of_the_root():
    root = torch.nn.Sequential(torch.nn.Linear(2, 2))
    seen = []
    with intercept({"a": Point(root[0], "0", "output")}, lambda key, tensor: seen.append(1), roots=[root]):
        root(torch.ones(2))
        root(torch.ones(2))
    assert len(seen) == 2


def test_short_inputs_are_the_first_real_tokens():
    context = context_of(lamina_model("pre_ln"), sequences=3, tokens=6)
    ids = torch.tensor([[9, 8, 7, 6, 5, 4], [3, 3, 3, 12, 13, 14], [20, 21, 22, 23, 3, 3]])
    mask = torch.tensor([[1, 1, 1, 1, 1, 1], [0, 0, 0, 1, 1, 1], [1, 1, 1, 1, 0, 0]])
    context.batches = [
        {"input_ids": ids[:2], "attention_mask": mask[:2]},
        {"input_ids": ids[2:], "attention_mask": mask[2:]},
    ]
    assert short_inputs(context, 1, 4)["input_ids"].tolist() == [[9, 8, 7, 6]]
    three = short_inputs(context, 3, 4)
    assert three["input_ids"].tolist() == [[9, 8, 7], [12, 13, 14], [20, 21, 22]]
    assert set(three) == {"input_ids"}
    assert short_inputs(context, 10, 2)["input_ids"].shape == (3, 2)


def test_a_text_of_one_token_is_refused():
    context = context_of(lamina_model("pre_ln"))
    context.batches = [{"input_ids": torch.tensor([[5]])}]
    with pytest.raises(UserError, match="one has 1 token"):
        short_inputs(context, 1, 8)


def test_a_frozen_model_gets_its_types_and_its_gradients_back_after_an_error():
    model = lamina_model("pre_ln").bfloat16()
    before = {name: parameter.detach().clone() for name, parameter in model.named_parameters()}
    model.lm_head.weight.requires_grad_(False)
    with frozen(model):
        assert model.lm_head.weight.dtype == torch.float32
        assert not any(parameter.requires_grad for parameter in model.parameters())
    with pytest.raises(RuntimeError), frozen(model):
        model(input_ids=torch.zeros(1, 1, 1, 1))
    asked = {name for name, parameter in model.named_parameters() if parameter.requires_grad}
    assert asked == set(before) - {"lm_head.weight"}
    assert all(torch.equal(parameter, before[name]) for name, parameter in model.named_parameters())
