"""The engine: streaming, early stop, losses, and running averages."""

from __future__ import annotations

import math
import time

import pandas as pd
import pytest
import torch
from small_models import small_model
from torch import nn

from lamina.errors import UserError
from lamina.probes.engine.losses import is_causal, masked_positions, token_losses
from lamina.probes.engine.measure import make_context, run
from lamina.probes.engine.measure import probe as run_probe
from lamina.probes.engine.probe_settings import ProbeSettings
from lamina.probes.engine.registry import Probe
from lamina.probes.engine.statistics import Running


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

    with pytest.raises(UserError, match=r"could not be run on input_ids alone.*other"):
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
    run(
        context,
        [Slow(), Other()],
        done=lambda probe, frame, seconds: told.update({probe.name: seconds}),
        estimated=planned.update,
        starting=begun.append,
    )
    assert 0.06 <= told["slow"] < 2  # three batches
    assert told["other"] < 0.06
    assert begun == ["forward passes", "other", "slow"]
    assert planned["slow"] > planned["forward passes"] > planned["other"] == 0
