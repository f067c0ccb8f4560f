"""What something else than the optimizer does: to weights, to moments, to batches; and what a loop may do itself."""

import math

import pytest
import torch
from training.watching.loops import NanoGpt, Tokens, loop

from lamina.training.monitor.alarms import read_alarms
from lamina.training.monitor.training_hooks import _numbers_of

AT, STEPS = 13, 18  # between two records


def swap(model, optimizer, step):
    if step == AT:
        for one, other in zip(model.h[0].parameters(), model.h[1].parameters(), strict=True):
            one.data, other.data = other.data.clone(), one.data.clone()


def redraw(model, optimizer, step):
    if step == AT:
        model.h[1].mlp.c_fc.weight.normal_(0.0, 0.15)


def shrink(model, optimizer, step):
    if step >= AT:
        model.h[1].attn.c_proj.weight.mul_(0.9)


def lose(model, optimizer, step):
    if step == AT:
        optimizer.state.clear()


def lose_second(model, optimizer, step):
    if step == AT:
        optimizer.state[model.lm_head.weight]["exp_avg_sq"].zero_()


def spoil(model, optimizer, step):
    if step == AT:
        model.h[1].attn.c_proj.weight[0, 0] = math.nan


def swap_and_back(model, optimizer, step):
    kept = [p.clone() for p in model.parameters()]
    for p in model.parameters():
        p.mul_(0.5)
    for p, old in zip(model.parameters(), kept, strict=True):
        p.copy_(old)


def normalize(model, optimizer, step):
    for layer in model.h:
        for linear in (layer.attn.c_attn, layer.mlp.c_fc):
            linear.weight.div_(linear.weight.norm(dim=-1, keepdim=True))


BOTH = {("written", layer, part) for layer in (0, 1) for part in ("attention", "feed_forward")}
CASES = [
    (swap, BOTH),
    (redraw, {("written", 1, "feed_forward")}),
    (shrink, {("written", 1, "attention")}),
    (lose, {("forgotten", -1, "model")}),
    (lose_second, {("forgotten", -1, "block")}),
    (spoil, {("not_finite", 1, "attention")}),
    (swap_and_back, set()),
    (normalize, set()),
]


def watched(folder, act=None, **options):
    model = NanoGpt()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)

    def hand(step, model):
        with torch.no_grad():
            act(model, optimizer, step)

    loop(model, folder, STEPS, optimizer, spoil=hand if act else None, every=5, on_divergence="note", **options)
    return read_alarms(folder)


@pytest.mark.parametrize(("act", "said"), CASES, ids=[act.__name__ for act, _ in CASES])
def test_what_somebody_else_writes_is_told_at_its_step_and_where(tmp_path, act, said):
    told = sorted(watched(tmp_path / "run", act), key=lambda alarm: alarm.order)
    if act is spoil:
        told = told[:1]
    found = {(a.rule, a.layer, a.sublayer) for a in told if a.rule in ("written", "forgotten", "not_finite")}
    assert found == said
    assert not said or told[0].step == AT + (act is spoil)  # in the next pass


def test_labels_that_are_shifted_and_a_batch_that_stays_are_told(tmp_path):
    batches = list(Tokens(items=2 * STEPS).ids.split(2))
    step = iter(range(1, STEPS + 1))

    def shifted(model, batch):
        labels = batch[:, 1:].roll(-1 if next(step) >= AT else 0, 1)
        return model(batch[:, :-1], labels)[1]

    told = watched(tmp_path / "shifted", loss_of=shifted, batches=batches)
    assert (told[0].step, told[0].rule, told[0].metric) == (AT, "fall", "label_match")
    stays = batches[: AT - 6] + [batches[0]] * (STEPS - AT + 6)
    told = [alarm for alarm in watched(tmp_path / "stays", batches=stays) if alarm.rule == "repeated"]
    assert [alarm.step for alarm in told] == [AT + 1]  # the seventh time
    assert not watched(tmp_path / "whole", batches=[batches[0]] * STEPS)


def test_labels_on_another_device_than_the_tokens_are_not_compared():
    tokens = torch.arange(6).view(1, 6)
    assert _numbers_of({"input_ids": tokens, "labels": tokens.to("meta")})[1:].tolist() == [0.0, 0.0, 0.0]
    assert _numbers_of({"input_ids": tokens, "labels": tokens.clone()})[1:].tolist() == [6.0, 1.0, 6.0]


@pytest.mark.parametrize("kept", [False, True])
def test_a_resumed_training_whose_optimizers_state_was_not_loaded_is_told(tmp_path, kept):
    model = NanoGpt()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    loop(model, tmp_path / "run", 5, optimizer, every=5)
    optimizer = optimizer if kept else torch.optim.AdamW(model.parameters(), lr=1e-3)
    loop(model, tmp_path / "run", 5, optimizer, every=5, resume=True, step=5)
    told = [(alarm.step, alarm.rule) for alarm in read_alarms(tmp_path / "run") if alarm.rule == "forgotten"]
    assert told == ([] if kept else [(6, "forgotten")])
