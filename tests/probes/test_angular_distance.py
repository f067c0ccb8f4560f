"""Angular distance and cosines between states against their definitions in double precision."""

import math

import numpy as np
import pandas as pd
import pytest
import torch
from naive_states import context_of, states
from small_models import llama_and_ids, small_inputs, small_model
from transformers import LlamaConfig, LlamaForCausalLM

import lamina
from lamina.errors import UserError
from lamina.probes.angular_distance import AngularDistance, best_blocks, scaled_rows
from lamina.probes.engine.measure import probe, run
from lamina.probes.similarity import Similarity


def naive(model, inputs, position=None, mask=None):
    """{(l, n): mean over the chosen tokens of the angle over pi}, written out token by token."""
    x = states(model, inputs)
    number, batch, tokens, _ = x.shape
    places = [range(tokens) if position is None else [position[b]] for b in range(batch)]
    chosen = [(b, t) for b, own in enumerate(places) for t in own if mask is None or mask[b, t]]
    found = {}
    for start in range(number):
        for end in range(start + 1, number):
            angles = []
            for b, t in chosen:
                u, v = x[start, b, t].numpy(), x[end, b, t].numpy()
                angles.append(math.acos(np.dot(u, v) / math.sqrt(np.dot(u, u) * np.dot(v, v))) / math.pi)
            found[start, end - start] = float(np.mean(angles))
    return found


def measured(frame):
    rows = frame[frame["metric"] == "angular_distance"]
    return {(int(s), int(n)): v for s, n, v in zip(rows["start"], rows["size"], rows["value"], strict=True)}


def assert_same(found, wanted):
    assert found.keys() == wanted.keys()
    for key, value in wanted.items():
        assert found[key] == pytest.approx(value, abs=2e-7), key  # the states themselves are float32


@pytest.mark.parametrize("name", ["llama", "bert", "albert"])
@pytest.mark.parametrize("tokens", ["(tokens=last)", "(tokens=first)", "(tokens=all)", ""])
def test_distance_is_the_mean_angle_over_pi_of_states_before_the_final_norm(name, tokens):
    model = small_model(name)
    inputs = small_inputs(model, sequences=5, tokens=7)
    frame = probe(model, f"angular_distance{tokens}", inputs["input_ids"], batch_size=2, tolerance=0)
    frame = frame["angular_distance"]
    position = {"(tokens=first)": [0] * 5, "(tokens=all)": None}.get(tokens, [6] * 5)
    assert_same(measured(frame), naive(model, inputs, position))
    assert list(frame.columns) == ["start", "size", "metric", "value", "standard_error", "sequences", "tokens"]
    assert len(frame) == 6 + 3


@pytest.mark.parametrize("side", ["right", "left"])
@pytest.mark.parametrize("tokens", ["last", "first", "all"])
def test_padding_is_no_token(side, tokens):
    model, ids = llama_and_ids(sequences=3, tokens=8)
    mask = torch.ones(3, 8, dtype=torch.long)
    for row, padding in enumerate((0, 3, 5)):
        where = slice(8 - padding, 8) if side == "right" else slice(0, padding)
        mask[row, where] = 0
    inputs = {"input_ids": ids, "attention_mask": mask}
    context = context_of(model, [{k: v[:2] for k, v in inputs.items()}, {k: v[2:] for k, v in inputs.items()}])
    found = measured(run(context, [AngularDistance(tokens)])["angular_distance"])
    real = [[t for t in range(8) if mask[row, t]] for row in range(3)]
    position = {"last": [r[-1] for r in real], "first": [r[0] for r in real], "all": None}[tokens]
    assert_same(found, naive(model, inputs, position, mask.bool()))


def test_standard_error_is_over_sequences():
    model, ids = llama_and_ids(sequences=6)
    frame = probe(model, "angular_distance(tokens=all)", ids, batch_size=4, tolerance=0)["angular_distance"]
    each = [naive(model, {"input_ids": row[None]})[0, 2] for row in ids]
    row = frame[(frame["start"] == 0) & (frame["size"] == 2)].iloc[0]
    assert row["value"] == pytest.approx(np.mean(each), rel=1e-6)
    assert row["standard_error"] == pytest.approx(np.std(each, ddof=1) / math.sqrt(6), rel=1e-4)


def test_a_layer_that_changes_nothing_is_at_distance_zero_and_a_mirror_at_one():
    model = small_model("llama")
    with torch.no_grad():
        model.model.layers[1].self_attn.o_proj.weight.zero_()
        model.model.layers[1].mlp.down_proj.weight.zero_()
    context = context_of(model, [small_inputs(model)])
    found = measured(run(context, [AngularDistance("all")])["angular_distance"])
    assert found[1, 1] < 1e-8  # float32's rounding of a cosine near 1 would be 1e-4
    angular = AngularDistance("all")
    angular.begin(context)
    x = torch.randn(2, 9, 16)
    for index, sign in enumerate((1, -1, 1, -1)):
        angular.see(index, sign * x)
    totals, counts = angular.angles()
    torch.testing.assert_close(totals[:, 0] / counts[:, None], torch.tensor([[0.0, 1, 0, 1]] * 2).double())


def test_images_compare_all_patches_and_have_no_last_one():
    model = small_model("vit")
    inputs = small_inputs(model, sequences=3)
    spec = "angular_distance"
    default = measured(probe(model, spec, inputs["pixel_values"])[spec])
    everything = measured(probe(model, f"{spec}(tokens=all)", inputs["pixel_values"])[spec])
    class_token = measured(probe(model, f"{spec}(tokens=first)", inputs["pixel_values"])[spec])
    assert default == everything != class_token
    with pytest.raises(UserError, match="tokens: 'last' is invalid for images"):
        probe(model, f"{spec}(tokens=last)", inputs["pixel_values"])


def test_fewer_tokens_a_batch_are_real_ones_of_every_sequence_and_the_page_says_so():
    model = small_model("llama")
    inputs = small_inputs(model, sequences=4, tokens=12)
    context = context_of(model, [{"input_ids": part} for part in inputs["input_ids"].split(2)])
    probes = [AngularDistance("all", tokens_per_batch=6)]
    found = measured(run(context, probes)["angular_distance"])
    whole = naive(model, inputs)
    assert found != pytest.approx(whole, abs=1e-6)
    assert found == pytest.approx(whole, abs=0.2)
    assert any("compares only 3 of the 12 tokens of each sequence" in note for note in context.notes)
    exact = context_of(model, context.batches)
    run(exact, [AngularDistance("all", tokens_per_batch=24)])
    assert not any("Lamina compares" in note for note in exact.notes)


def test_best_block_is_the_smallest_distance_of_its_size():
    frame = pd.DataFrame(
        [(0, 1, 0.3), (1, 1, 0.1), (2, 1, 0.1), (0, 2, math.nan), (1, 2, 0.4), (0, 3, math.nan)],
        columns=["start", "size", "value"],
    ).assign(metric="angular_distance", standard_error=0.0)
    frame = frame[["start", "size", "metric", "value", "standard_error"]]
    best = best_blocks(frame)
    assert best["metric"].unique().tolist() == ["best_start"]
    assert best["size"].tolist() == [1, 2, 3]
    assert best["value"].fillna(-7).tolist() == [1, 1, -7]


def test_rows_of_the_map_are_cut_to_percentiles_and_scaled_each_by_itself():
    values = np.random.default_rng(0).normal(size=50)
    frame = pd.DataFrame({"start": [*range(50), 0], "size": [1] * 50 + [50], "value": [*values, 0.3]})
    scaled = scaled_rows(frame)["value"].to_numpy()
    low, high = np.percentile(values, 1), np.percentile(values, 99)
    cut = np.clip(values, low, high)
    np.testing.assert_allclose(scaled[:50], (cut - cut.min()) / (cut.max() - cut.min()))
    assert scaled[50] == 0


@pytest.mark.parametrize("layers", [1, 40])
def test_one_layer_and_more_than_a_tile_of_the_product(layers):
    config = LlamaConfig(vocab_size=20, hidden_size=8, intermediate_size=8, num_attention_heads=1)
    config.num_hidden_layers = layers
    model = LlamaForCausalLM(config).eval()
    inputs = {"input_ids": torch.arange(12).view(2, 6)}
    made = AngularDistance()
    frames = run(context_of(model, [inputs]), [made, Similarity()])
    assert_same(measured(frames["angular_distance"]), naive(model, inputs, [5, 5]))
    assert list(made.sentences(frames["angular_distance"]))
    _, wanted = naive_cosines(model, inputs)
    pairs = of(frames["similarity"], "cosine")
    assert len(pairs) == layers * (layers + 1) // 2
    assert all(value == pytest.approx(wanted[i, i + k], abs=1e-6) for (i, k), value in pairs.items())


def test_a_token_of_zeros_has_no_direction_and_breaks_nothing():
    """An untrained ViT's class token and its position are zeros: a right angle to all, not NaN."""
    model = small_model("vit")
    with torch.no_grad():
        embeddings = model.vit.embeddings
        embeddings.cls_token.zero_()
        embeddings.position_embeddings.zero_()
    frame = probe(model, ["angular_distance(tokens=first)"], torch.rand(3, 3, 16, 16))["angular_distance"]
    turned = frame[(frame["metric"] == "angular_distance") & (frame["start"] == 0)]
    assert (turned["value"] - 0.5).abs().max() < 1e-12
    assert frame["value"].notna().all()


def test_states_that_are_not_finite_are_said_not_hidden():
    model = small_model("llama")
    hook = model.model.embed_tokens.register_forward_hook(lambda m, a, out: out * float("nan"))
    frame = probe(model, ["angular_distance"], torch.randint(3, 40, (3, 7)))["angular_distance"]
    hook.remove()
    assert frame[frame["metric"] == "angular_distance"]["value"].isna().all()
    assert "No angle is finite" in next(AngularDistance().sentences(frame))


def test_while_a_model_trains_all_tokens_count_and_the_page_says_whose_angles_they_are():
    """Few held-out blocks are probed there: their last tokens alone would be a mean of four angles."""
    model = small_model("llama")
    inputs = [small_inputs(model, sequences=2)]
    frames = {}
    for state in ({}, {"step": 5}):
        context = context_of(model, inputs)
        context.state = state
        made = AngularDistance()
        frames[bool(state)] = run(context, [made])["angular_distance"]
        whose = "all tokens (Mix-LN Eq 8)" if state else "each sequence's last token (Gromov et al. 2024)"
        assert any(whose in note for note in context.notes)
        assert all(whose in caption for _, caption in made.figures(frames[bool(state)]))
    assert frames[True].equals(run(context_of(model, inputs), [AngularDistance("all")])["angular_distance"])
    assert not frames[True].equals(frames[False])


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
    model, ids = llama_and_ids(sequences=3, tokens=8)
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


def test_angles_within_noise_are_said():
    frame = probe(small_model("llama"), ["angular_distance"], torch.randint(3, 40, (3, 7)))["angular_distance"]
    text = "Two standard errors cannot tell the angles of layers 0-2 apart on 3 sequences."
    assert text in list(AngularDistance().sentences(frame.assign(standard_error=1.0)))
    assert "standard errors" not in " ".join(AngularDistance().sentences(frame.assign(standard_error=0.0)))
