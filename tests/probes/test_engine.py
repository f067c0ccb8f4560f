"""The engine: streaming, early stop, losses, running averages and ratios, and layers that are called again."""

from __future__ import annotations

import math
import time
from types import SimpleNamespace

import numpy as np
import pandas as pd
import pytest
import torch
from small_models import small_model
from tiny_contexts import context_of, lamina_model, transformers_model
from torch import nn

import lamina
from lamina.errors import UserError
from lamina.probes.engine.layer_calls import frozen, record_layer_calls, short_inputs
from lamina.probes.engine.losses import is_causal, masked_positions, token_losses
from lamina.probes.engine.measure import make_context, run
from lamina.probes.engine.measure import probe as run_probe
from lamina.probes.engine.probe_settings import ProbeSettings
from lamina.probes.engine.registry import Probe, make
from lamina.probes.engine.statistics import Ratio, Running
from lamina.probes.job.probe_folder import Bars, Measuring
from lamina.probes.structure.hooks import intercept
from lamina.probes.structure.sites import Point


class Watcher(Probe):
    """The mean of a state, and how many forward passes there were."""

    name, title, summary, source = "watcher", "Watcher", "counts", "test"

    def __init__(self, error: float | None = None):
        self.error, self.passes, self.seen = error, 0, []

    def points(self):
        return {0: self.first}

    def begin(self, context):
        self.first = context.structure.layers[0].input

    def see(self, key, value):
        self.seen.append(value.shape)

    def end_batch(self, inputs, output):
        self.passes += 1

    def standard_error(self):
        return self.error

    def finish(self, context):
        return pd.DataFrame({"passes": [context.forwards]})


def _ids(count: int = 48) -> torch.Tensor:
    return torch.randint(3, 40, (count, 7), generator=torch.Generator().manual_seed(0))


def test_all_batches_without_a_tolerance():
    probe = Watcher(error=0.0)
    frames = run_probe(small_model("llama"), [probe], _ids(), tolerance=0.0)
    assert frames["watcher"]["passes"][0] == probe.passes == 12
    assert probe.seen == [(4, 7, 16)] * 12


@pytest.mark.parametrize(("error", "passes"), [(0.01, 4), (0.03, 12), (None, 12)])
def test_it_stops_early_if_all_errors_are_small_but_after_16_sequences(error, passes):
    frames = run_probe(small_model("llama"), [Watcher(error)], _ids(), tolerance=0.02)
    assert frames["watcher"]["passes"][0] == passes


def test_the_mode_and_the_hooks_are_left_as_they_were():
    model = small_model("bert").train()
    run_probe(model, [Watcher()], _ids(4))
    assert model.training
    assert not any(m._forward_hooks or m._forward_pre_hooks for m in model.modules())


def test_a_probe_that_needs_text_on_images():
    class Reads(Watcher):
        needs = frozenset({"tokens"})

    with pytest.raises(UserError, match="needs a text model"):
        run_probe(small_model("vit"), [Reads()], torch.rand(2, 3, 16, 16))


_METHODS = ("begin", "cost", "points", "see", "end_batch", "standard_error", "finish")


@pytest.mark.parametrize("method", _METHODS)
def test_a_method_that_raises_fails_its_probe_alone_and_the_line_names_the_method_and_the_line(method):
    def fails(self, *args):
        raise KeyError("value")

    Broken = type("Broken", (Watcher,), {"name": "broken", method: fails, "__module__": __name__})
    context = make_context(small_model("llama"), ProbeSettings(), _ids())
    fault = []
    whole = Watcher(error=0.0)
    broken = Broken(error=0.0)
    measuring = SimpleNamespace(_note=lambda probe, status, reason: fault.append((probe, status, reason)))

    frames = run(
        context,
        [broken, whole],
        tolerance=0.02,
        strict=False,
        broken=lambda probe, error: Measuring._broken(measuring, probe, error),
    )
    assert (list(frames), whole.passes) == (["watcher"], 4)
    assert [(probe, status) for probe, status, _ in fault] == [(broken, "failed")]
    line = fails.__code__.co_firstlineno + 1
    assert fault[0][2] == f"fails (test_engine.py, line {line}): KeyError: 'value'"


def test_a_finish_that_returns_a_list():
    class Listed(Watcher):
        def finish(self, context):
            return [1]

    with pytest.raises(TypeError, match="finish returned a list, not a DataFrame"):
        run_probe(small_model("llama"), [Listed()], _ids(4))


def test_loss_of_a_causal_model_is_transformers_own():
    model = small_model("llama")
    ids = _ids(3)
    with torch.no_grad():
        torch.testing.assert_close(token_losses(model, {"input_ids": ids}).mean(), model(ids, labels=ids).loss)
    assert is_causal(model, ids)


def test_loss_of_a_masked_model_is_that_of_its_masked_tokens():
    model, ids = small_model("bert"), _ids(3)

    class Tokenizer:
        mask_token_id = 3

    assert not is_causal(model, ids)
    positions = masked_positions(7)
    labels = torch.full_like(ids, -100)
    labels[:, positions] = ids[:, positions]
    hidden = ids.clone()
    hidden[:, positions] = 3
    with torch.no_grad():
        expected = model(hidden, labels=labels).loss
        torch.testing.assert_close(token_losses(model, {"input_ids": ids}, Tokenizer()).mean(), expected)
        assert token_losses(model, {"input_ids": ids}, Tokenizer()).shape == (3, len(positions))
    with pytest.raises(UserError, match="mask token"):
        token_losses(model, {"input_ids": ids})


def test_a_model_that_needs_more_than_its_tokens():
    class Needs(nn.Module):
        def __init__(self):
            super().__init__()
            self.weight = nn.Parameter(torch.ones(2))

        def forward(self, input_ids, other):
            return input_ids

    with pytest.raises(UserError, match=r"does not run on input_ids alone.*other"):
        run_probe(Needs(), [Watcher()], _ids(2))


def test_a_running_mean_and_its_standard_error():
    values = torch.randn(50, 3, dtype=torch.float64) * torch.tensor([1.0, 10.0, 1e-3]) + 1e6
    running = Running()
    for part in values.split(7):
        running.add(part)
    torch.testing.assert_close(running.mean, values.mean(0), rtol=1e-14, atol=0)
    expected = values.std(0, correction=1) / math.sqrt(50)
    torch.testing.assert_close(running.standard_error, expected, rtol=1e-6, atol=0)  # 1e6 leaves 10 digits
    assert running.relative_error() == pytest.approx(float((expected / values.mean(0)).max()))
    one = Running()
    one.add(values[:1])
    assert one.relative_error() == math.inf


def test_seconds_are_those_of_a_probes_own_work_wherever_it_is_done_and_the_cheap_come_first():
    class Slow(Watcher):
        name = "slow"

        def cost(self, context):
            return 1e9

        def end_batch(self, inputs, output):
            super().end_batch(inputs, output)
            time.sleep(0.02)

    class Other(Watcher):
        name = "other"

    told, planned, begun = {}, {}, []
    ids = _ids(12)
    context = make_context(small_model("llama"), ProbeSettings(), ids)
    seen = {"done": lambda probe, frame, seconds: told.update({probe.name: seconds}), "starting": begun.append}
    run(context, [Slow(), Other()], estimated=planned.update, **seen)
    assert 0.06 <= told["slow"] < 2  # three batches
    assert told["other"] < 0.06
    assert begun == ["forward passes", "other", "slow"]
    assert planned["slow"] > planned["forward passes"] > planned["other"] == 0


def test_ratio_is_total_over_count_with_the_error_of_a_ratio_of_sums():
    generator = np.random.default_rng(0)
    counts = generator.integers(1, 9, 12)
    totals = generator.normal(0.7, 0.3, (12, 2)) * counts[:, None]
    ratio = Ratio()
    for part in (slice(0, 5), slice(5, 12)):
        ratio.add(torch.from_numpy(totals[part]), torch.from_numpy(counts[part]))
    wanted = totals.sum(0) / counts.sum()
    residuals = totals - wanted * counts[:, None]
    error = np.sqrt((residuals**2).sum(0) * 12 / 11) / counts.sum()
    np.testing.assert_allclose(ratio.mean, wanted, rtol=1e-12)
    np.testing.assert_allclose(ratio.standard_error, error, rtol=1e-9)


def test_a_sequence_without_tokens_is_left_out_and_one_alone_has_no_error():
    ratio = Ratio()
    assert torch.isnan(ratio.mean)
    ratio.add(torch.tensor([[3.0], [math.nan]]), torch.tensor([2.0, 0.0]))
    assert ratio.samples == 1
    assert ratio.mean.tolist() == [1.5]
    assert ratio.standard_error.tolist() == [math.inf]


@pytest.mark.parametrize("spread", [0.0, 1e-9])
def test_almost_equal_values_give_an_error_that_is_a_number(spread: float):
    ratio = Ratio()
    ratio.add(0.3 + spread * torch.randn(50, 1, dtype=torch.float64), torch.ones(50))
    assert 0 <= float(ratio.standard_error) < 1e-8


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
            _, found = block.observe({"added": points[layer]}, block.stream)
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


def test_short_inputs_are_the_first_real_tokens():
    context = context_of(lamina_model("pre_ln"), sequences=3, tokens=6)
    ids = torch.tensor([[9, 8, 7, 6, 5, 4], [3, 3, 3, 12, 13, 14], [20, 21, 22, 23, 3, 3]])
    mask = torch.tensor([[1, 1, 1, 1, 1, 1], [0, 0, 0, 1, 1, 1], [1, 1, 1, 1, 0, 0]])
    parts = slice(0, 2), slice(2, 3)
    context.batches = [{"input_ids": ids[part], "attention_mask": mask[part]} for part in parts]
    assert short_inputs(context, 1, 4)["input_ids"].tolist() == [[9, 8, 7, 6]]
    three = short_inputs(context, 3, 4)
    assert three["input_ids"].tolist() == [[9, 8, 7], [12, 13, 14], [20, 21, 22]]
    assert set(three) == {"input_ids"}
    assert short_inputs(context, 10, 2)["input_ids"].shape == (3, 2)


def test_a_text_of_one_token_is_refused():
    context = context_of(lamina_model("pre_ln"))
    context.batches = [{"input_ids": torch.tensor([[5]])}]
    with pytest.raises(UserError, match="a text has 1 token"):
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


def test_without_a_terminal_each_finished_part_is_a_line_and_a_long_plan_says_what_to_leave_out(capsys):
    bars = Bars(show=True)
    bars.plan({"forward passes": 5.0, "gains": 1.0, "jacobian": 3300.0, "bounds": 1260.0})
    bars.start("gains")
    bars.start("jacobian")
    bars.end()
    about, *ended = capsys.readouterr().err.splitlines()
    assert "(jacobian 55 min 0 s, bounds 21 min 0 s," in about
    assert about.endswith("To skip these probes, add --probes gains")
    assert [line.partition(",")[0] for line in ended] == ["gains has ended", "jacobian has ended"]
    Bars(show=True).plan({"gains": 1.0, "jacobian": 330.0})
    assert "--probes" not in capsys.readouterr().err


def test_without_a_terminal_a_long_part_writes_how_far_it_is_and_a_short_part_nothing(capsys, monkeypatch):
    clock = [0.0]
    monkeypatch.setattr("time.monotonic", lambda: clock[0])
    bars = Bars(show=True)
    for part, seconds in (("layer", 10.0), ("other", 0.1)):
        for done in range(9):
            bars(done, 8, f"without {part} {done}")
            clock[0] += seconds
    shown = capsys.readouterr().err.splitlines()
    assert shown == [
        "step 3/8 (38%)  without layer 3",
        "step 6/8 (75%)  without layer 6  20 s left",
    ]


@pytest.mark.parametrize(
    ("own", "seconds", "said"),
    [
        (True, 1700.0, None),
        (True, 6000.0, ". To measure less text, add --sequences 2 (about 10 min 0 s)"),
        (
            True,
            1e6,
            'and limit the tokens, as in --probes "jacobian(tokens=32)"',
        ),
        (False, 6000.0, ". To measure less text, add --sequences 1"),
    ],
)
def test_a_very_long_estimate_names_the_flag_that_cuts_it(own, seconds, said, capsys):
    batches = [{"input_ids": torch.zeros(4, 8, dtype=torch.long)}] * 5
    context = SimpleNamespace(batches=batches, whole=own, requested=False)
    measuring = SimpleNamespace(context=context, remaining=[make("jacobian")], bars=Bars(show=True))
    Measuring._plan(measuring, {"jacobian": seconds})
    line = capsys.readouterr().err.rstrip()
    assert "--sequences" not in line if said is None else line.endswith(said)


def test_a_note_stands_at_the_probe_that_made_it(tmp_path):
    """All probes begin before the first one ends: a note from a beginning is not the first one's."""
    lamina_model("post_ln", vocab_size=300).save_pretrained(tmp_path / "model")
    text = {"tokenizer": "bytes", "corpus": "embedded", "sequences": 2, "sequence_length": 16}
    result = lamina.api.probe_folder(
        checkpoint=str(tmp_path / "model"), probes="gains,angular_distance", output=str(tmp_path / "out"), **text
    )
    notes = {name: " ".join(each["notes"]) for name, each in result["probes"].items()}
    assert "angular distances use each sequence's last token" in notes["angular_distance"]
    assert "angular distances" not in notes["gains"]
