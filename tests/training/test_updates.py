"""Update-to-weight ratios: those of cloned weights, at the recorded steps only, and without a trace in training."""

from dataclasses import replace

import pandas as pd
import pytest
from training.tiny_runs import layers, settings

from lamina import build
from lamina.modeling.backbones import resolve_backbone
from lamina.training import pretrain as pretraining
from lamina.training.monitor.parameter_measures import UpdateRatios
from lamina.training.trainer import LaminaTrainer


@pytest.fixture
def tiny(corpus, tmp_path):
    given = {"steps": 6, "logging_steps": 3, "precision": "fp32", "compile": "off"}
    return lambda name="run", **changed: settings(corpus, tmp_path / name, **{**given, **changed})


def naive(before, after, sublayers):
    """The ratio of each sub-layer and block by the parameters' names."""
    ratios = {}
    for place, names in sublayers.items():
        update = sum(((after[n].double() - before[n].double()) ** 2).sum() for n in names)
        weight = sum((before[n].double() ** 2).sum() for n in names)
        ratios[place] = (update / weight).sqrt().item()
    return ratios


def sublayers_of(names, num_layers):
    places = {}
    for layer in range(num_layers):
        for sublayer in ("attention", "feed_forward"):
            inside = [n for n in names if f"layers.{layer}.{sublayer}." in n]
            assert inside
            places[layer, sublayer] = inside
        places[layer, "block"] = places[layer, "attention"] + places[layer, "feed_forward"]
    return places


@pytest.mark.parametrize(
    "changed", [{"placement": "pre_ln"}, {"placement": "keel"}, {"trainer": {"optim": "adafactor"}}], ids=str
)
def test_the_ratios_are_those_of_cloned_weights(tiny, tmp_path, monkeypatch, changed):
    seen, create = {}, LaminaTrainer.create_optimizer

    def watched(self, model=None):
        optimizer = create(self, model)
        inner = optimizer.step

        def step(*args, **kwargs):
            whole = self.bare_model()
            before = {n: p.detach().clone() for n, p in whole.named_parameters()}
            result = inner(*args, **kwargs)
            seen[self.state.global_step + 1] = before, {n: p.detach().clone() for n, p in whole.named_parameters()}
            return result

        optimizer.step = step
        return optimizer

    monkeypatch.setattr(LaminaTrainer, "create_optimizer", watched)
    chosen = tiny(**changed)
    pretraining.pretrain(chosen, bar=False)
    rows = layers(tmp_path / "run")
    rows = rows[rows["metric"] == "update_ratio"]
    assert sorted(rows["step"].unique()) == [3, 6]  # the first step's rate is 0: it moves nothing
    for step in (3, 6):
        before, after = seen[step]
        expected = naive(before, after, sublayers_of(before, chosen.num_layers))
        at = rows[(rows["step"] == step) & rows["layer"].ge(0)]
        found = {(row.layer, row.sublayer): row.value for row in at.itertuples()}
        assert found == pytest.approx(expected, rel=1e-4)
        assert {"embedding"} <= set(rows[(rows["step"] == step) & rows["layer"].lt(0)]["role"])


def test_measuring_leaves_no_trace_in_training(tiny, tmp_path, monkeypatch):
    pretraining.pretrain(tiny("with"), bar=False)
    monkeypatch.setattr(UpdateRatios, "on_pre_optimizer_step", lambda self, *args, **kwargs: None)
    pretraining.pretrain(tiny("without"), bar=False)
    both = [layers(tmp_path / name) for name in ("with", "without")]
    measured = ["update_ratio", "update_norm", "weight_norm", "first_moment", "second_moment"]
    kept = [rows[~rows["metric"].isin(measured)].reset_index(drop=True) for rows in both]
    pd.testing.assert_frame_equal(*kept)
    assert len(both[0]) > len(both[1])
    weights = [(tmp_path / name / "model" / "model.safetensors").read_bytes() for name in ("with", "without")]
    assert weights[0] == weights[1]


def test_a_step_that_the_scaler_skipped_has_no_ratio():
    backbone = resolve_backbone("llama-nano", num_layers=1, hidden_size=16, num_heads=2, vocab_size=61)
    ratios = UpdateRatios(build(backbone, "pre_ln", head="causal_lm"))
    ratios.before_step()
    ratios.after_step()
    assert ratios.rows(1) == []


def test_the_cost_is_paid_at_recorded_steps_only(tiny, monkeypatch):
    kept = []
    before = UpdateRatios.before_step

    def counted(self, optimizers=(), *, recorded=True):
        before(self, optimizers, recorded=recorded)
        kept.append(bool(self._before))

    monkeypatch.setattr(UpdateRatios, "before_step", counted)
    pretraining.pretrain(replace(tiny(), logging_steps=5), bar=False)
    assert sum(kept) == 2 < len(kept)
