"""Cosines between states, their mean by distance and block influence, against double precision."""

import numpy as np
import pytest
import torch
from naive_states import context_of, states
from small_models import small_inputs, small_model
from transformers import LlamaConfig, LlamaForCausalLM

import lamina
from lamina.probes.angular_distance import AngularDistance
from lamina.probes.engine.measure import probe, run
from lamina.probes.similarity import Similarity


def naive_cosines(model, inputs, mask=None):
    """[N + 1, N + 1, sequences] mean over each sequence's tokens, and [N + 1, N + 1] over all of them."""
    x = states(model, inputs)
    unit = x / x.norm(dim=-1, keepdim=True)
    cosine = torch.einsum("ibtc,jbtc->ijbt", unit, unit)
    mask = torch.ones(cosine.shape[2:]) if mask is None else mask
    total = (cosine * mask).sum((2, 3)) / mask.sum()
    return ((cosine * mask).sum(3) / mask.sum(1)).numpy(), total.numpy()


def of(frame, metric):
    rows = frame[frame["metric"] == metric]
    return dict(zip(zip(rows["start"], rows["size"], strict=True), rows["value"], strict=True))


@pytest.mark.parametrize("name", ["llama", "bert", "albert"])
def test_cosines_by_pair_and_by_distance_and_block_influence(name):
    model = small_model(name)
    inputs = small_inputs(model, sequences=5)
    frame = probe(model, "similarity", inputs["input_ids"], batch_size=2, tolerance=0)["similarity"]
    _, wanted = naive_cosines(model, inputs)
    pairs = of(frame, "cosine")
    assert pairs == pytest.approx({(i, j - i): wanted[i, j] for i in range(4) for j in range(i + 1, 4)}, abs=1e-6)
    outputs = {(-1, k): np.mean([wanted[i, i + k] for i in range(1, 4 - k)]) for k in (1, 2)}  # 2 for 3 layers
    assert of(frame, "cosine_by_distance") == pytest.approx(outputs, abs=1e-6)
    assert of(frame, "block_influence") == pytest.approx({(i, 1): 1 - wanted[i, i + 1] for i in range(3)}, abs=1e-6)


def test_every_placement_of_ours():
    config = LlamaConfig(vocab_size=40, hidden_size=16, intermediate_size=24, num_attention_heads=2)
    ids = torch.randint(3, 40, (3, 7))
    for placement in ("pre_ln", "post_ln", "hybridnorm", "fusenorm"):
        model = lamina.build(config, placement, num_layers=3).eval()
        context = context_of(model, [{"input_ids": ids}])
        frame = run(context, [Similarity()])["similarity"]
        _, wanted = naive_cosines(model, {"input_ids": ids})
        assert of(frame, "cosine")[0, 3] == pytest.approx(wanted[0, 3], abs=1e-6)
        assert ("HybridNorm" in " ".join(context.notes)) == (placement == "hybridnorm")
        assert ("Post-LN" in " ".join(context.notes)) == (placement in ("post_ln", "fusenorm"))


def test_standard_errors_are_over_sequences_also_of_the_mean_by_distance():
    model = small_model("llama")
    inputs = small_inputs(model, sequences=6)
    frame = probe(model, "similarity", inputs["input_ids"], batch_size=4, tolerance=0)["similarity"]
    each, _ = naive_cosines(model, inputs)
    rows = frame.set_index(["metric", "start", "size"])["standard_error"]
    assert rows["cosine", 1, 2] == pytest.approx(each[1, 3].std(ddof=1) / 6**0.5, rel=1e-4)
    mean = (each[1, 2] + each[2, 3]) / 2  # of one text: the pairs' errors are not independent
    assert rows["cosine_by_distance", -1, 1] == pytest.approx(mean.std(ddof=1) / 6**0.5, rel=1e-4)


def test_padding_is_left_out_and_each_token_counts_once():
    model = small_model("llama")
    ids = small_inputs(model, sequences=3, tokens=8)["input_ids"]
    mask = torch.ones(3, 8, dtype=torch.long)
    mask[1, 5:] = 0
    mask[2, 2:] = 0
    inputs = {"input_ids": ids, "attention_mask": mask}
    frame = run(context_of(model, [inputs]), [Similarity()])["similarity"]
    _, wanted = naive_cosines(model, inputs, mask)
    assert of(frame, "cosine")[0, 3] == pytest.approx(wanted[0, 3], abs=1e-6)


def test_a_huge_token_weighs_no_more_than_another():
    made = Similarity()
    model = small_model("llama")
    context = context_of(model, [small_inputs(model, sequences=1, tokens=4)])
    made.begin(context)
    x, y = torch.randn(2, 1, 4, 16)
    scale = torch.tensor([1e6, 1, 1, 1])[None, :, None]
    for index, state in enumerate((x * scale, y * scale, x, y)):
        made.see(index, state)
    made.end_batch(context.batches[0], None)
    wanted = torch.nn.functional.cosine_similarity(x.double(), y.double(), dim=-1).mean()
    assert of(made.finish(context), "cosine")[0, 1] == pytest.approx(float(wanted), abs=1e-6)


@pytest.mark.parametrize("layers", [7, 33, 40])
def test_more_layers_than_a_tile_of_the_product(layers):
    config = LlamaConfig(vocab_size=20, hidden_size=8, intermediate_size=8, num_attention_heads=1)
    config.num_hidden_layers = layers
    model = LlamaForCausalLM(config).eval()
    inputs = {"input_ids": torch.arange(12).view(2, 6)}
    frame = run(context_of(model, [inputs]), [Similarity()])["similarity"]
    _, wanted = naive_cosines(model, inputs)
    pairs = of(frame, "cosine")
    assert len(pairs) == layers * (layers + 1) // 2
    assert all(value == pytest.approx(wanted[i, i + k], abs=1e-6) for (i, k), value in pairs.items())


def test_both_probes_in_one_pass_give_what_each_gives_alone():
    model = small_model("llama")
    inputs = [{"input_ids": part} for part in small_inputs(model, sequences=4)["input_ids"].split(2)]
    both = run(context_of(model, inputs), [Similarity(), AngularDistance("all")])
    for made in (Similarity(), AngularDistance("all")):
        alone = run(context_of(model, inputs), [made])[made.name]
        assert both[made.name].equals(alone)
