"""What a loop does besides its steps: what is done on purpose is noted, what does not learn is named."""

import json
import math

import pytest
import torch
from torch import nn
from training.watching.loops import NanoGpt, Tokens, found, llama, loop

import lamina
from lamina.training.monitor.alarms import NOTABLE

STEPS = 30


def watched(folder, model, every=5, **options):
    """Train; returns (rule, layer, sub-layer) of what was told, and the notes."""
    monitor = loop(model, folder, steps=STEPS, every=every, **options)
    told = [(a.rule, a.layer, a.sublayer) for a in monitor.monitor.alarms.told if a.rule != NOTABLE]
    return told, json.loads((folder / "watched.json").read_text())["notes"]


def test_layers_that_a_step_does_not_call_are_a_note(tmp_path):
    class Skipping(NanoGpt):
        calls = 0

        def forward(self, idx, targets=None):
            layers, self.calls = self.h, self.calls + 1
            self.h = nn.ModuleList(layer for at, layer in enumerate(layers) if at != self.calls % 5)
            result = super().forward(idx, targets)
            self.h = layers
            return result

    told, notes = watched(tmp_path / "run", Skipping(layers=3))
    assert told == []
    assert len([note for note in notes if "the model skipped layer" in note]) == 1


def test_parameters_that_are_frozen_and_trained_again_are_a_note(tmp_path):
    model = NanoGpt(layers=4)

    def freeze(step):
        for parameter in model.h[1].parameters():
            parameter.requires_grad_(step < 12 or step >= 20)

    told, notes = watched(tmp_path / "run", model, after=freeze)
    assert told == []
    assert [n.partition("(")[2].partition(")")[0] for n in notes if "compares these parts" in n] == ["layer 1"] * 2


def test_a_look_ahead_is_a_note(tmp_path):
    model = NanoGpt()
    slow = [p.detach().clone() for p in model.parameters()]

    @torch.no_grad()
    def back(step):
        for parameter, own in zip(model.parameters(), slow, strict=True) if step % 5 == 0 else ():
            parameter.copy_(own.lerp_(parameter, 0.5))

    told, notes = watched(tmp_path / "run", model, after=back, every=4)
    assert told == []
    assert any("look-ahead" in note for note in notes)


@pytest.mark.parametrize("part", ["h.1.mlp.c_fc.weight", "lm_head.weight"])
def test_a_parameter_that_no_optimizer_has_is_named(tmp_path, part):
    model = NanoGpt(layers=3)
    given = [p for name, p in model.named_parameters() if name != part]
    told, notes = watched(tmp_path / "run", model, optimizer=torch.optim.AdamW(given, lr=1e-3))
    place = (1, "feed_forward") if part.startswith("h") else (-1, "block")
    assert told == [("unmoved", *place)]
    assert [note for note in notes if "no optimizer has these parameters" in note and part in note]


@pytest.mark.parametrize("called", [True, False])
def test_a_parameter_behind_a_detach_is_named_and_one_that_nothing_calls_is_not(tmp_path, called):
    model = llama(layers=4)
    attention = model.model.layers[2].self_attn
    if called:
        attention.k_proj.register_forward_hook(lambda m, args, output: output.detach())
    else:
        keys = nn.Linear(16, 8, bias=False).requires_grad_(False)  # as of a layer that shares another one's keys
        attention.k_proj.forward = lambda x: keys(x)
        attention.k_proj.__class__ = type("Shared", (nn.Linear,), {"__call__": lambda self, x: self.forward(x)})

    def loss_of(model, batch):
        return model(input_ids=batch, labels=batch).loss

    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, weight_decay=0.0)
    told, notes = watched(tmp_path / "run", model, optimizer=optimizer, loss_of=loss_of)
    assert told == ([("dead", 2, "attention")] if called else [])
    names = [note for note in notes if note.startswith("these parameters get no gradient")]
    assert [note.endswith("layers.2.self_attn.k_proj.weight") for note in names] == [True] * called
    assert not attention.k_proj._forward_pre_hooks


def test_a_mask_that_hides_all_tokens_leaves_nothing_to_measure_and_attention_without_a_gradient(tmp_path):
    def loss_of(model, batch):
        return model(input_ids=batch, labels=batch, attention_mask=torch.zeros_like(batch)).loss

    told, _ = watched(tmp_path / "run", llama(layers=3), loss_of=loss_of)
    assert "not_finite" not in {rule for rule, _, _ in told}


class Estimating(torch.optim.SGD):
    """Raises its own estimate of the rate in ``d``, as Prodigy and D-Adaptation do."""

    def step(self, closure=None):
        for group in self.param_groups:
            for parameter in group["params"]:
                parameter.data -= group["d"] * group["lr"] * parameter.grad
            group["d"] *= 2.0


def test_the_rate_of_an_optimizer_that_estimates_it_is_its_estimate(tmp_path):
    model = NanoGpt()
    optimizer = Estimating(model.parameters(), lr=0.5)
    optimizer.param_groups[0]["d"] = 1e-6
    loop(model, tmp_path / "run", steps=4, every=1, optimizer=optimizer)
    rates = [found(tmp_path / "run", "learning_rate", step)[-1, "model", "all"] for step in range(1, 5)]
    assert rates == pytest.approx([0.5e-6 * 2**step for step in range(4)])
    assert found(tmp_path / "run", "rate_estimate", 4)[-1, "model", "all"] == pytest.approx(16e-6)


def test_a_state_that_the_loop_adds_to_is_not_lost(tmp_path):
    """As Sophia's estimate of the Hessian, which starts at zero and is updated apart from the steps."""
    model = NanoGpt()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)

    @torch.no_grad()
    def update(step):
        for parameter in model.parameters():
            average = optimizer.state[parameter].setdefault("hessian", torch.zeros_like(parameter))
            average.mul_(0.99).add_(parameter.grad.square()) if step % 10 == 2 else None

    told, _ = watched(tmp_path / "run", model, optimizer=optimizer, after=update)
    assert told == []


def test_an_optimizer_that_rests_a_rate_of_zero_and_rounded_steps_are_no_alarm(tmp_path):
    model = NanoGpt(layers=3)
    rest = [p for p in model.parameters() if all(p is not own for own in model.h[1].parameters())]
    groups = [{"params": rest, "lr": 1e-3}, {"params": list(model.h[1].parameters()), "lr": 0.0}]
    told, notes = watched(tmp_path / "zero", model, optimizer=torch.optim.AdamW(groups))
    (note,) = [note for note in notes if "the learning rate is 0 for" in note]
    assert (told, "h.1." in note) == ([], True)
    model = NanoGpt(layers=3)
    assert watched(tmp_path / "small", model, optimizer=torch.optim.AdamW(model.parameters(), lr=3e-9))[0] == []


def test_a_layer_that_is_replaced_is_followed_and_does_not_learn(tmp_path):
    model = NanoGpt(layers=3)

    def replace(step):
        if step == 12:
            torch.manual_seed(1)
            model.h[1] = type(model.h[1])(16, 2)

    told, notes = watched(tmp_path / "run", model, after=replace)
    assert {("unmoved", 1, "attention"), ("unmoved", 1, "feed_forward")} <= set(told)
    assert {layer for rule, layer, _ in told if rule == "unmoved"} == {1}
    assert any("12 new parameters, and 12 earlier parameters " in note for note in notes)


def test_gradients_that_nobody_zeroes_are_named_and_micro_batches_are_not(tmp_path):
    model = NanoGpt()
    kept = torch.optim.SGD(model.parameters(), lr=1e-3)
    kept.zero_grad = lambda: None
    told, _ = watched(tmp_path / "kept", model, optimizer=kept)
    assert ("kept", -1, "model") in told

    def twice(model, batch):
        model(batch[:, :-1], batch[:, 1:])[1].backward()
        return model(batch[:, :-1], batch[:, 1:])[1]

    model = NanoGpt()
    zeroed = torch.optim.SGD(model.parameters(), lr=1e-3)
    assert watched(tmp_path / "twice", model, optimizer=zeroed, loss_of=twice)[0] == []


def test_gradients_that_are_clipped_while_scaled_are_recorded_unscaled_with_a_note(tmp_path):
    model, scaler = NanoGpt(), torch.amp.GradScaler("cpu", init_scale=2.0**12)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    norms = []
    with lamina.watch(model, optimizer, output=str(tmp_path / "run"), every=1) as monitor:
        for batch in Tokens(items=8).ids.split(2):
            loss = model(batch[:, :-1], batch[:, 1:])[1]
            norms.append(math.sqrt(sum(float(g.pow(2).sum()) for g in torch.autograd.grad(loss, model.parameters()))))
            loss = model(batch[:, :-1], batch[:, 1:])[1]
            scaler.scale(loss).backward()
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            scaler.step(optimizer)
            scaler.update()
            optimizer.zero_grad()
            monitor.step(loss)
    for step, norm in enumerate(norms, 1):
        assert found(tmp_path / "run", "step_gradient_norm", step)[-1, "model", "all"] == pytest.approx(norm, rel=1e-4)
    notes = json.loads((tmp_path / "run" / "watched.json").read_text())["notes"]
    assert any("scaler.unscale_" in note for note in notes)
