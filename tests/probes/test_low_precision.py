"""low_precision: rounding written out by hand, value by value."""

import math

import pytest
import torch
from probes.tiny import blocks, llama, outputs, states, value

from lamina.probes.engine.measure import make_context, probe, run
from lamina.probes.engine.probe_settings import ProbeSettings
from lamina.probes.low_precision import FORMATS, LowPrecision, round_trip


def rounded(x, mantissa, smallest_exponent):
    """Round to nearest even with so many mantissa bits, subnormals included, in float64."""
    exponent = torch.floor(torch.log2(x.abs().clamp(min=2.0**-200))).clamp(min=smallest_exponent)
    step = 2.0 ** (exponent - mantissa)
    return torch.round(x / step) * step


def naive(x, kind, scaled=True):
    """The round trip of one sequence [tokens, channels] in float64, with the limits written out."""
    if kind == "fp16":
        made = rounded(x, 10, -14)
        return torch.where(made.abs() > 65504, made.sign() * math.inf, made)
    if kind == "bf16":
        return rounded(x, 7, -126)
    if kind.startswith("fp8"):
        limit, mantissa, smallest = {"fp8_e4m3": (448.0, 3, -6), "fp8_e5m2": (57344.0, 2, -14)}[kind]
        scale = limit / float(x.abs().max()) if scaled else 1.0
        made = rounded((x * scale).clamp(-limit, limit) if scaled else x, mantissa, smallest)
        return torch.where(made.abs() > limit, made.sign() * math.inf, made) / scale
    peak = x.abs().max() if kind == "int8_tensor" else x.abs().max(-1, keepdim=True).values
    return torch.round(x / (peak / 127)) * (peak / 127)


def measured(model, instance):
    return probe(model, [instance], blocks(4), tolerance=0.0)["low_precision"]


@pytest.mark.parametrize("kind", FORMATS)
@pytest.mark.parametrize("scaled", [True, False])
def test_a_round_trip_is_rounding_to_the_nearest_of_the_format(kind, scaled):
    x = torch.randn(2, 7, 33) * torch.logspace(-9, 2, 33)
    wanted = torch.stack([naive(one.double(), kind, scaled) for one in x])
    # a float32 product or quotient may fall on the other side of a tie: at most one such step in a thousand
    close = torch.isclose(round_trip(x, kind, scaled=scaled).double(), wanted, rtol=1e-6, atol=1e-30)
    assert (~close).float().mean() <= 1e-3


@pytest.mark.parametrize(
    ("kind", "fits", "overflows"),
    [("fp16", 65519.0, 65520.0), ("fp8_e4m3", 464.0, 464.1), ("fp8_e5m2", 61439.0, 61440.0)],
)
def test_what_rounds_above_the_largest_value_overflows(kind, fits, overflows):
    back = round_trip(torch.tensor([[fits, -fits, overflows, -overflows]]), kind, scaled=False)[0]
    largest = {"fp16": 65504.0, "fp8_e4m3": 448.0, "fp8_e5m2": 57344.0}[kind]
    assert back.tolist() == [largest, -largest, math.inf, -math.inf]


def test_errors_by_layer_equal_the_definition():
    model, ids = llama(), blocks(4)
    frame = probe(model, ["low_precision(loss=false)"], ids, tolerance=0.0, batch_size=2)["low_precision"]
    tensors = {("state", layer): x for layer, x in enumerate(states(model, ids))}
    layer = model.model.layers[1]
    (_, added), (activation, _) = outputs(model, ids, [layer.mlp, layer.mlp.down_proj])
    tensors["contribution", 1], tensors["activation", 1] = added, activation
    for (role, layer), x in tensors.items():
        for kind in FORMATS:
            place = {"role": role, "layer": layer, "format": kind}
            if role == "contribution":
                place["sublayer"] = "feed_forward"
            back = torch.stack([naive(one, kind) for one in x])
            relative = ((back - x).flatten(1).norm(dim=1) / x.flatten(1).norm(dim=1)).mean()
            # ties again: an element in a thousand may differ by a step
            assert value(frame, "relative_error", **place) == pytest.approx(float(relative), rel=5e-3)
            each = ((back - x).norm(dim=-1) / x.norm(dim=-1)).mean()
            assert value(frame, "token_error", **place) == pytest.approx(float(each), rel=5e-3)
            assert value(frame, "share_lost", **place) == pytest.approx(float((back == 0).double().mean()), abs=1e-9)
            assert value(frame, "max_error", **place) == pytest.approx(float((back - x).abs().max()), rel=2e-2)
    assert (frame.loc[frame["metric"] == "overflow_share", "value"] == 0).all()


def test_a_massive_activation_breaks_int8_per_tensor_and_not_bf16():
    model, ids = llama(), blocks(4)
    context = make_context(model, ProbeSettings(batch_size=2, tolerance=0.0), ids)

    def hook(module, args, output):
        changed = output.clone()
        changed[:, 0, 5] = 1e5
        return changed

    handle = model.model.layers[1].register_forward_hook(hook)
    instance = LowPrecision(loss=False)
    frame = run(context, [instance])["low_precision"]
    handle.remove()
    place = {"layer": 2, "role": "state"}
    # every other element is below half a step, and is lost; the massive value itself is stored well
    x = states(model, ids)[2]
    x[:, 0, 5] = 1e5
    lost = torch.stack([naive(one, "int8_tensor") for one in x])
    assert int((lost != 0).sum()) == len(ids)
    assert value(frame, "overflow_share", format="fp16", **place) == pytest.approx(1 / (16 * 32))
    assert value(frame, "relative_error", format="fp16", **place) == math.inf
    assert value(frame, "share_lost", format="int8_tensor", **place) == pytest.approx(1 - 1 / (16 * 32))
    assert value(frame, "share_lost", format="bf16", **place) == 0
    assert value(frame, "relative_error", format="int8_tensor", **place) < 1e-2
    assert value(frame, "token_error", format="int8_tensor", **place) > 0.9
    assert value(frame, "token_error", format="bf16", **place) < 5e-3
    said = " ".join(instance.sentences(frame))
    assert "fp16 overflows to inf in states 2" in said
    assert "A few large values make per-tensor INT8 inaccurate in states 2-3." in said


HOT = {  # what makes fp16 overflow, and how the sentence names it
    "weight": ("the attention's weights in layer 1", lambda layer: layer.self_attn.q_proj.weight[3, 3].fill_(9e4)),
    "activation": ("the feed-forward's activation in layer 1", lambda layer: heat(layer.mlp)),
    "queries": ("inside a sub-layer, such as in the attention's queries", lambda layer: widen(layer.self_attn)),
}


def widen(attention):
    attention.q_proj.weight.mul_(4e4)


def heat(mlp):
    """Let one hidden unit pass FP16's limit, and add almost nothing to the stream."""
    mlp.gate_proj.weight[5] *= 3e4
    mlp.up_proj.weight[5] *= 3e4
    mlp.down_proj.weight[:, 5] *= 1e-6


@pytest.mark.parametrize("where", HOT)
def test_an_overflow_is_the_first_sentence_and_makes_the_models_loss_nan(where):
    model, ids = llama(), blocks(4)
    named, spoil = HOT[where]
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    with torch.no_grad():
        spoil(model.model.layers[1])
        assert math.isfinite(plain := float(model(input_ids=ids, labels=ids).loss))
    after = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    instance = LowPrecision()
    frame = probe(model, [instance], ids, tolerance=0.0)["low_precision"]
    assert all(torch.equal(tensor, after[name]) for name, tensor in model.state_dict().items())
    assert value(frame, "loss", format="none") == pytest.approx(plain, rel=1e-6)
    assert math.isnan(value(frame, "model_loss", format="fp16"))
    assert math.isfinite(value(frame, "model_loss_increase", format="bf16"))
    first = next(iter(instance.sentences(frame)))
    assert first.startswith("fp16 overflows")
    assert f"{named}, and the model's loss in fp16 is nan." in first
    assert instance.urgent(frame)
    if where == "weight":
        place = {"layer": 1, "sublayer": "attention", "role": "weight"}
        assert value(frame, "abs_max", **place) == 9e4
        assert value(frame, "overflow_share", format="fp16", **place) == pytest.approx(1 / (32 * 32 * 3))
    model.load_state_dict(before)
    quiet = LowPrecision()
    frame = measured(model, quiet)
    assert next(iter(quiet.sentences(frame))).startswith("On this text, nothing overflows in fp16 or bf16 (checked: ")
    assert not quiet.urgent(frame)


def test_the_models_loss_is_that_of_the_model_loaded_in_half_precision(tmp_path):
    model, ids = llama(), blocks(4)
    frame = probe(model, ["low_precision"], ids, tolerance=0.0, batch_size=4)["low_precision"]
    assert {parameter.dtype for parameter in model.parameters()} == {torch.float32}
    model.save_pretrained(tmp_path)
    with torch.no_grad():
        for kind, dtype in (("fp16", torch.float16), ("bf16", torch.bfloat16)):
            logits = type(model).from_pretrained(tmp_path, dtype=dtype)(input_ids=ids).logits[:, :-1].float()
            wanted = torch.nn.functional.cross_entropy(logits.flatten(0, 1), ids[:, 1:].flatten())
            assert value(frame, "model_loss", format=kind) == pytest.approx(float(wanted), abs=1e-6)
            assert value(frame, "model_loss_increase", format=kind) != 0


def test_unscaled_fp8_weights_that_are_too_large_are_named():
    model, instance = llama(), LowPrecision(fp8_scaling="none", loss=False)
    with torch.no_grad():
        model.lm_head.weight[0, 0] = 500.0
    first = next(iter(instance.sentences(measured(model, instance))))
    assert first == "fp8_e4m3 overflows to inf in the weights outside of the layers."
    scaled = LowPrecision(loss=False)
    texts = list(scaled.sentences(measured(model, scaled)))
    assert texts[1].startswith("Lamina scales FP8 and INT8 by the largest value of each sequence")


@pytest.mark.parametrize("bad", [math.inf, math.nan])
def test_what_is_not_finite_without_rounding_is_no_format_s_fault(bad):
    model, instance = llama(), LowPrecision()
    with torch.no_grad():
        model.model.layers[1].mlp.up_proj.weight[0, 0] = bad
    texts = list(instance.sentences(measured(model, instance)))
    assert texts[0].startswith("Without any rounding, the model holds inf or NaN in states 2-3 and the feed-forward's")
    assert "the feed-forward's weights in layer 1" in texts[0]
    assert not any("overflow" in text for text in texts)


def test_a_small_share_of_zeros_breaks_nothing():
    instance = LowPrecision(loss=False)
    frame = measured(llama(), instance)
    states = (frame["role"] == "state") & (frame["metric"] == "token_error")
    frame.loc[states & (frame["format"] == "int8_tensor"), "value"] = 0.035
    frame.loc[states & (frame["format"] == "int8_token"), "value"] = 0.0062
    assert "per-tensor INT8" not in " ".join(instance.sentences(frame))


def test_a_chart_names_the_values_that_it_cannot_draw():
    instance = LowPrecision(loss=False)
    frame = measured(llama(), instance)
    errors = (frame["role"] == "state") & (frame["metric"] == "relative_error")
    frame.loc[errors & (frame["layer"] == 2) & (frame["format"] == "fp16"), "value"] = math.inf
    frame.loc[errors & (frame["layer"] == 0), "value"] = 0.0
    caption = next(iter(instance.figures(frame)))[1]
    assert "Not drawn: values that are not finite, at state 2 (fp16)." in caption
    assert f"Not drawn: values that are 0 or negative, at state 0 ({', '.join(FORMATS)})." in caption


def test_the_loss_with_every_state_rounded():
    model, ids = llama(), blocks(4)
    frame = probe(model, ["low_precision"], ids, tolerance=0.0, batch_size=4)["low_precision"]

    def loss_with(kind):
        hidden = model.model.embed_tokens(ids)
        positions = torch.arange(ids.shape[1]).unsqueeze(0)
        rotary = model.model.rotary_emb(hidden, positions)
        for layer in model.model.layers:
            hidden = layer(round_trip(hidden, kind), position_embeddings=rotary)
        logits = model.lm_head(model.model.norm(round_trip(hidden, kind)))
        return torch.nn.functional.cross_entropy(logits[:, :-1].flatten(0, 1), ids[:, 1:].flatten())

    with torch.no_grad():
        plain = model(input_ids=ids, labels=ids).loss
        for kind in ("bf16", "int8_tensor"):
            wanted = float(loss_with(kind) - plain)
            found = value(frame, "loss_increase", format=kind)
            assert found == pytest.approx(wanted, abs=2e-6)
            assert abs(found) > 1e-5
    assert value(frame, "loss", format="none") == pytest.approx(float(plain), rel=1e-6)
    with torch.no_grad():
        assert float(model(input_ids=ids, labels=ids).loss) == float(plain)  # the hooks are gone


def test_a_model_without_a_language_head_has_no_loss():
    frame = measured(llama().model, LowPrecision())
    assert "loss" not in set(frame["metric"])
    assert len(frame)


def test_nothing_comes_back_as_nothing():
    model = llama()
    with torch.no_grad():
        for layer in model.model.layers:
            layer.mlp.down_proj.weight.zero_()
    frame = measured(model, LowPrecision(loss=False))
    place = {"layer": 1, "sublayer": "feed_forward", "role": "contribution", "format": "int8_tensor"}
    for metric in ("relative_error", "token_error", "max_error", "share_lost"):
        assert value(frame, metric, **place) == 0.0
