"""The scores of a layer's use against copies of the model whose layers are deleted, exchanged or replaced."""

import copy
from typing import Any, cast

import numpy as np
import pandas as pd
import pytest
import torch
from naive_states import states
from spread import spread
from test_gradients import Masks, causal_loss
from tiny_contexts import context_of, lamina_model, measured, transformers_model, value

from lamina.errors import UserError
from lamina.probes.engine.measure import probe
from lamina.probes.layer_use import LayerUse

PLAIN = ["pre_ln", "fusenorm", "keel", "llama of transformers"]
STREAMS = ["pre_ln(wiring=mhc,size=2)"]


def built(name, layers=3):
    if name.startswith("llama"):
        return transformers_model("LlamaForCausalLM", num_hidden_layers=layers)
    return lamina_model(name, layers)


def ids_of(context):
    return torch.cat([batch["input_ids"] for batch in context.batches])


@torch.no_grad()
def loss(model, ids):
    return float(causal_loss(model, ids))


@pytest.mark.parametrize("name", PLAIN)
def test_a_causal_score_is_the_change_of_later_updates_without_the_layer(name):
    model = built(name)
    context = context_of(model, sequences=3, tokens=6, batch_size=2)
    frame = measured(LayerUse(metric="causal_score"), context)
    whole = states(model, {"input_ids": ids_of(context)})
    assert set(zip(frame.layer, frame["index"], strict=True)) == {(0, 1), (0, 2), (1, 2)}
    for skipped in range(2):
        other = copy.deepcopy(model)
        del other.model.layers[skipped]
        fewer = states(other, {"input_ids": ids_of(context)})
        for later in range(skipped + 1, 3):
            u, v = whole[later + 1] - whole[later], fewer[later] - fewer[later - 1]
            score = ((u - v).norm(dim=-1) / u.norm(dim=-1)).mean()
            found = value(frame, "causal_score", "block", skipped, index=later)
            assert found == pytest.approx(float(score), rel=1e-4), (skipped, later)


@pytest.mark.parametrize("name", [*PLAIN, *STREAMS])
def test_a_permutation_score_is_the_loss_with_two_layers_exchanged(name):
    model = built(name)
    context = context_of(model, sequences=3, tokens=6)
    before = {key: tensor.clone() for key, tensor in model.state_dict().items()}
    frame = measured(LayerUse(metric="permutation_score"), context)
    whole = loss(model, ids_of(context))
    assert list(frame.layer) == [0, 1]
    for first in range(2):
        other = copy.deepcopy(model)
        layers = other.model.layers
        layers[first], layers[first + 1] = layers[first + 1], layers[first]
        if "mhc" in name and first == 0:  # the first layer makes two streams of one
            layers[0].streams, layers[1].streams = 2, 0
        expected = abs(loss(other, ids_of(context)) - whole) / whole
        assert value(frame, "permutation_score", "block", first) == pytest.approx(expected, rel=1e-3)
    assert loss(model, ids_of(context)) == whole  # all is in its place
    assert all(torch.equal(before[key], tensor) for key, tensor in model.state_dict().items())


@torch.no_grad()
@pytest.mark.parametrize(
    "name", spread([*PLAIN, *STREAMS, "peri_ln(wiring=denseformer)"], ["keel", "pre_ln(wiring=mhc,size=2)"])
)
def test_a_linear_layer_is_the_least_squares_map_of_the_other_half(name):
    model = built(name)
    context = context_of(model, sequences=12, tokens=20, batch_size=5)
    frame = measured(LayerUse(metric="linear_loss_increase"), context)
    ids = ids_of(context)
    whole = loss(model, ids[:6])
    for layer in range(3):
        pairs = []
        block = cast("Any", model).model.layers[layer]

        def first(x):
            return x[0] if isinstance(x, tuple) else x

        def keep(module, args, kwargs, output, pairs=pairs):
            pairs.append((first(args[0]).double().flatten(2), first(output).double().flatten(2)))

        hook = block.register_forward_hook(keep, with_kwargs=True)
        for row in ids[6:]:
            model(row[None])
            if sum(x.shape[1] for x, _ in pairs) >= 4 * pairs[0][0].shape[-1]:
                break
        hook.remove()
        x, y = (np.concatenate([pair[side][0].numpy() for pair in pairs]) for side in (0, 1))
        weight = torch.from_numpy(np.linalg.lstsq(x, y, rcond=None)[0])

        def replaced(module, args, output, weight=weight):
            made = (first(args[0]).double().flatten(2) @ weight).float().view_as(first(output))
            return type(output)(made, *output[1:]) if isinstance(output, tuple) else made

        hook = block.register_forward_hook(replaced)
        expected = loss(model, ids[:6]) - whole
        hook.remove()
        found = value(frame, "linear_loss_increase", "block", layer)
        assert found == pytest.approx(expected, abs=1e-4), layer


def test_a_linear_layer_costs_nothing_and_too_few_tokens_are_refused():
    model = built("pre_ln", 2)
    with torch.no_grad():
        for name, parameter in model.model.layers[1].named_parameters():
            if name.split(".")[-2] in ("o_proj", "down_proj"):
                parameter.zero_()
    frame = measured(LayerUse(metric="linear_loss_increase"), context_of(model, sequences=12, tokens=20))
    assert value(frame, "linear_loss_increase", "block", 1) == pytest.approx(0, abs=1e-5)
    assert value(frame, "linear_loss_increase", "block", 0) > 0.01
    assert set(frame.sequences) == {6}
    with pytest.raises(UserError, match="linear_loss_increase: 20 tokens"):
        measured(LayerUse(metric="linear_loss_increase"), context_of(model, sequences=1, tokens=20))
    with pytest.raises(UserError, match="linear_loss_increase: 10 tokens are too few for 16 channels"):
        measured(LayerUse(metric="linear_loss_increase"), context_of(model, sequences=4, tokens=5))


def test_with_a_memory_all_but_the_permutation_is_measured():
    model = lamina_model("pre_ln(wiring=attn_res,size=1)", 3)
    context = context_of(model, sequences=8, tokens=20)
    frame = measured(LayerUse(), context)
    assert set(frame.metric) == {"causal_score", "linear_loss_increase"}
    assert [note for note in context.notes if "leaves out" in note] == [
        "layer_use: Lamina leaves out permutation_score: the layers share weights, or read earlier states. Choose "
        "another metric."
    ]
    with pytest.raises(UserError, match="permutation_score"):
        measured(LayerUse(metric="permutation_score"), context)
    context = context_of(transformers_model("AlbertForMaskedLM"))
    context.tokenizer = cast("Any", Masks())
    with pytest.raises(UserError, match="permutation_score: the layers share weights"):
        measured(LayerUse(metric="permutation_score"), context)


def test_the_page_names_the_least_and_the_most_used_layer():
    frame = probe(built("keel"), "layer_use", torch.randint(3, 61, (12, 20)))["layer_use"]
    texts = list(LayerUse().sentences(frame))
    mean = frame[frame.metric == "causal_score"].groupby("layer").value.mean()
    assert f"Skipping layer {mean.idxmin()} changes the later layers' updates least" in texts[0]
    assert f"Skipping layer {mean.idxmax()} changes the updates most" in texts[0]
    certain = frame.assign(standard_error=0.0)
    assert len(list(LayerUse().sentences(certain))) == len(list(LayerUse().figures(frame))) == 3
    linear = list(LayerUse().sentences(frame.assign(standard_error=1e3)))[-1]
    layers = f"0-{frame['layer'].max()}"
    tokens = frame.loc[frame["metric"] == "linear_loss_increase", "tokens"].iloc[0]
    assert linear == f"With {tokens} tokens, two standard errors cannot tell layers {layers} apart in this measure."


def test_a_single_layer_is_not_named_both_least_and_most():
    rows = [{"layer": 0, "metric": metric, "value": 0.25} for metric in ("causal_score", "permutation_score")]
    rows += [{"layer": layer, "metric": "linear_loss_increase", "value": 1.0 + layer} for layer in (0, 1)]
    texts = list(LayerUse().sentences(pd.DataFrame(rows).assign(standard_error=0.0, tokens=64)))
    assert texts == [
        "Skipping layer 0 changes the later layers' updates by 0.25 of the updates' norm.",
        "Exchanging layer 0 with the next layer changes the loss by 25.00%.",
        "Replacing a layer with a linear map increases the loss least for layer 0 (1 nats), and most for layer 1 "
        "(2 nats).",
    ]


def test_a_model_that_guesses_is_noted():
    model = built("pre_ln")  # untrained
    for vocabulary, guesses in ((model.get_output_embeddings().weight.shape[0], True), (10**6, False)):
        model.config.get_text_config().vocab_size = vocabulary
        context = context_of(model)
        measured(LayerUse(metric="permutation_score"), context)
        assert any("no better than guessing" in note for note in context.notes) == guesses
