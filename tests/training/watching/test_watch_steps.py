"""What belongs to which step: learning rates, closures, accumulation, and divergences that last."""

import json
import logging
import math

import pytest
import torch
from training.watching.loops import NanoGpt, Tokens, lines, loop, norm_of, result, rows_of

import lamina
from lamina.errors import UserError
from lamina.reports.causes import causes_of
from lamina.reports.diagnosis import gather


def batches(steps):
    ids = Tokens(items=2 * steps).ids
    return [(ids[2 * step : 2 * step + 2, :-1], ids[2 * step : 2 * step + 2, 1:]) for step in range(steps)]


def series(folder, metric):
    """{step: value} of one metric of the whole model."""
    rows = rows_of(folder)
    rows = rows[(rows["metric"] == metric) & (rows["sublayer"] == "model")]
    return dict(zip(rows["step"], rows["value"], strict=True))


def alarms(folder):
    path = folder / "alarms.jsonl"
    return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []


def test_a_learning_rate_is_that_of_the_step_though_the_schedule_went_on(tmp_path):
    model = NanoGpt()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda done: 1.0 if done < 6 else 0.01)
    used = []

    def spoil(step, model):
        used.append(optimizer.param_groups[0]["lr"])

    loop(model, tmp_path / "run", 7, optimizer, spoil, after=lambda step: schedule.step(), every=1)
    assert series(tmp_path / "run", "learning_rate") == pytest.approx(dict(enumerate(used, 1)))
    assert [line["learning_rate"] for line in lines(tmp_path / "run")] == pytest.approx(used)
    assert not alarms(tmp_path / "run"), "the sixth update over the seventh step's rate is a hundred times too large"


def test_the_gradient_of_a_closure_is_that_of_its_own_step(tmp_path):
    model, plain, norms = NanoGpt(), NanoGpt(), []

    def train(model, optimizer, end_step):
        for number, (inputs, targets) in enumerate(batches(4)):

            def closure(inputs=inputs, targets=targets, factor=10 if number == 2 else 1):
                optimizer.zero_grad()
                loss = factor * model(inputs, targets)[1]
                loss.backward()
                norms.append(norm_of([p.grad for p in model.parameters()]))
                return loss

            end_step(optimizer.step(closure) if number % 2 else optimizer.step(closure=closure))

    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    with lamina.watch(model, optimizer, output=str(tmp_path / "run"), every=1) as monitor:
        train(model, optimizer, monitor.step)
    assert series(tmp_path / "run", "step_gradient_norm") == pytest.approx(dict(enumerate(norms, 1)), rel=1e-6)
    assert set(rows_of(tmp_path / "run").query("metric == 'update_norm'")["step"]) == {1, 2, 3, 4}
    train(plain, torch.optim.AdamW(plain.parameters(), lr=1e-2), lambda loss: None)
    assert all(torch.equal(p, q) for p, q in zip(model.parameters(), plain.parameters(), strict=True))


@pytest.mark.parametrize("inside", [False, True], ids=["around the call", "inside the call"])
def test_autocast_to_float16_is_seen(tmp_path, inside):
    model = NanoGpt()
    if inside:  # as accelerate does
        model.forward = torch.autocast("cpu", torch.float16)(model.forward)

    def loss_of(model, batch):
        with torch.autocast("cpu", torch.float16, enabled=not inside):
            return model(batch[:, :-1], batch[:, 1:])[1]

    def after(step):
        if step == 1:
            with torch.no_grad():
                model.h[0].mlp.c_proj.weight.mul_(3e5)

    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    loop(model, tmp_path / "run", 3, optimizer, loss_of=loss_of, after=after, every=1)
    assert json.loads((tmp_path / "run" / "watched.json").read_text())["half"] is True
    assert {"fp16", "not_finite"} & {alarm["rule"] for alarm in alarms(tmp_path / "run")}
    assert "number range" in dict(causes_of(gather(tmp_path / "run")))


def test_a_lasting_nan_is_noted_once_and_its_first_step_is_kept(tmp_path, caplog):
    def loss_of(model, batch):
        loss = model(batch[:, :-1], batch[:, 1:])[1]
        seen.append(loss)
        return loss * math.nan if len(seen) in (4, 5, 6, 9) else loss

    def spoil(step, model):
        for parameter in model.parameters():
            parameter.grad.nan_to_num_(0.0)  # the weights stay: the loss comes back

    seen = []
    with caplog.at_level(logging.WARNING):
        monitor = loop(NanoGpt(), tmp_path / "run", steps=10, every=2, loss_of=loss_of, spoil=spoil)
    told = [record.getMessage() for record in caplog.records if "diverged:" in record.getMessage()]
    assert ["at step 4" in text for text in told] == [True, False]
    assert "at step 9" in told[1]
    assert [line["step"] for line in lines(tmp_path / "run") if "diverged" in line] == [4, 9]
    assert monitor.diverged.step == 4
    assert "at step 4" in result(tmp_path / "run")["reason"]


def test_micro_batches_of_accelerate_are_no_steps(tmp_path):
    from accelerate import Accelerator

    accelerator = Accelerator(gradient_accumulation_steps=3, cpu=True)
    model = NanoGpt()
    prepared, optimizer = accelerator.prepare(model, torch.optim.AdamW(model.parameters(), lr=1e-3))
    losses = []
    with lamina.watch(prepared, optimizer, output=str(tmp_path / "run"), every=2) as monitor:
        for inputs, targets in batches(12):
            with accelerator.accumulate(prepared):
                loss = prepared(inputs, targets)[1]
                accelerator.backward(loss)
                optimizer.step()
                optimizer.zero_grad()
            losses.append(float(loss))
            monitor.step(loss)
    assert result(tmp_path / "run")["steps"] == 4
    means = {step: sum(losses[3 * step - 3 : 3 * step]) / 3 for step in (1, 2, 3, 4)}
    assert series(tmp_path / "run", "step_loss") == pytest.approx(means, rel=1e-6)
    rows = rows_of(tmp_path / "run")
    for metric in ("update_norm", "gradient_norm", "hidden_variance"):
        assert set(rows[rows["metric"] == metric]["step"]) == {1, 2, 4}


@pytest.mark.parametrize(("loss", "says"), [(torch.ones(2), r"loss: a tensor of shape \[2\]"), ("1.0", "loss: a str")])
def test_a_loss_that_is_not_one_number_is_one_line(tmp_path, loss, says):
    model = NanoGpt()
    watched = lamina.watch(model, torch.optim.SGD(model.parameters(), lr=0.1), output=str(tmp_path / "run"))
    with pytest.raises(UserError, match=says), watched as monitor:
        monitor.step(loss)
