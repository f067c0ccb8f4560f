"""What belongs to which step, with several optimizers and loss scalers, and what something else than they does."""

import json
import logging
import math

import pytest
import torch
from torch.nn import functional
from training.tiny_runs import layers, records, result
from training.watching.loops import Naive, NanoGpt, Tokens, found, loop, nano_parts, norm_of
from transformers.optimization import Adafactor

import lamina
from lamina.errors import UserError
from lamina.reports.causes import causes_of
from lamina.reports.diagnosis import gather
from lamina.training.monitor.alarms import read_alarms
from lamina.training.monitor.training_hooks import _numbers_of


def batches(steps):
    ids = Tokens(items=2 * steps).ids
    return [(ids[2 * step : 2 * step + 2, :-1], ids[2 * step : 2 * step + 2, 1:]) for step in range(steps)]


def series(folder, metric):
    """{step: value} of one metric of the whole model."""
    rows = layers(folder)
    rows = rows[(rows["metric"] == metric) & (rows["sublayer"] == "model")]
    return dict(zip(rows["step"], rows["value"], strict=True))


def test_a_learning_rate_is_that_of_the_step_though_the_schedule_went_on(tmp_path):
    model = NanoGpt()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda done: 1.0 if done < 6 else 0.01)
    used = []

    def spoil(step, model):
        used.append(optimizer.param_groups[0]["lr"])

    loop(model, tmp_path / "run", 7, optimizer, spoil, after=lambda step: schedule.step(), every=1)
    assert series(tmp_path / "run", "learning_rate") == pytest.approx(dict(enumerate(used, 1)))
    assert [line["learning_rate"] for line in records(tmp_path / "run")] == pytest.approx(used)
    assert not read_alarms(tmp_path / "run"), "the sixth update over the seventh step's rate is 100 times too large"


def test_a_learning_rate_that_jumps_and_falls_back_between_two_records_is_recorded_on_both_sides(tmp_path):
    model = NanoGpt()
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    rates = {step: 1e-3 * (1 - step / 100) * (30 if step in (13, 14) else 1) for step in range(1, 26)}

    def spoil(step, model):
        optimizer.param_groups[0]["lr"] = rates[step]

    loop(model, tmp_path / "run", 25, optimizer, spoil, every=10)
    recorded = (1, 10, 12, 13, 14, 15, 20)
    assert series(tmp_path / "run", "learning_rate") == pytest.approx({step: rates[step] for step in recorded})


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
    assert set(layers(tmp_path / "run").query("metric == 'update_norm'")["step"]) == {1, 2, 3, 4}
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
    assert {"fp16", "not_finite"} & {alarm.rule for alarm in read_alarms(tmp_path / "run")}
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
    assert ["at step 4" in text.partition(";")[0] for text in told] == [True, False]
    assert "at step 9" in told[1]
    assert [line["step"] for line in records(tmp_path / "run") if "diverged" in line] == [4, 9]
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
    rows = layers(tmp_path / "run")
    for metric in ("update_norm", "gradient_norm", "hidden_variance"):
        assert set(rows[rows["metric"] == metric]["step"]) == {1, 2, 4}


@pytest.mark.parametrize(("loss", "says"), [(torch.ones(2), r"loss: a tensor of shape \[2\]"), ("1.0", "loss: a str")])
def test_a_loss_that_is_not_one_number_is_one_line(tmp_path, loss, says):
    model = NanoGpt()
    watched = lamina.watch(model, torch.optim.SGD(model.parameters(), lr=0.1), output=str(tmp_path / "run"))
    with pytest.raises(UserError, match=says), watched as monitor:
        monitor.step(loss)


EXACT = {"rel": 1e-6, "abs": 1e-12}


def loss_of(model, step):
    ids = Tokens(items=40).ids[2 * step : 2 * step + 2]
    return model(ids[:, :-1], ids[:, 1:])[1]


def two(model):
    """Matrices and vectors, each with its own optimizer."""
    matrices = [p for p in model.parameters() if p.ndim > 1]
    vectors = [p for p in model.parameters() if p.ndim == 1]
    return torch.optim.AdamW(matrices, lr=1e-2), torch.optim.SGD(vectors, lr=0.1)


@pytest.mark.parametrize("turns", [[(1, 0)] * 4, [(0,), (1,), (0,), (1,)]], ids=["other order", "in turns"])
def test_an_update_is_that_of_all_optimizers_in_any_order(tmp_path, turns):
    model = NanoGpt()
    optimizers, naive, expected = two(model), Naive(model, nano_parts()), {}
    with lamina.watch(model, optimizers, output=str(tmp_path / "run"), every=2) as monitor:
        for step, chosen in enumerate(turns, 1):
            loss = loss_of(model, step)
            loss.backward()
            naive.keep()
            for index in chosen:
                optimizers[index].step()
            expected[step] = naive.updates()
            model.zero_grad()
            monitor.step(loss)
    for step in (1, 2, 4):
        assert found(tmp_path / "run", "update_norm", step) == pytest.approx(expected[step], **EXACT), step


def test_another_models_clipping_says_nothing_of_this_ones_gradient(tmp_path):
    model, other = NanoGpt(), NanoGpt()
    optimizer, naive, expected = torch.optim.AdamW(model.parameters(), lr=1e-3), Naive(model, nano_parts()), {}
    with lamina.watch(model, optimizer, output=str(tmp_path / "run"), every=1) as monitor:
        for step in (1, 2, 3):
            optimizer.zero_grad()  # the last step's gradients are there while the other model is clipped
            (loss_of(model, step) / 2).backward()
            loss_of(other, step).backward()
            torch.nn.utils.clip_grad_norm_((p for p in other.parameters()), 0.1)
            loss = loss_of(model, step + 3)
            (loss / 2).backward()
            naive.keep()
            expected[step] = naive.norms(naive.gradients)
            torch.nn.utils.clip_grad_norm_((p for p in model.parameters()), 0.1)
            norm = math.sqrt(sum(float(p.grad.pow(2).sum()) for p in model.parameters()))
            assert norm == pytest.approx(0.1, rel=1e-3)
            optimizer.step()
            monitor.step(loss)
            loss_of(other, step).backward()
            torch.nn.utils.clip_grad_value_(other.parameters(), 0.1)
    for step in (1, 2, 3):
        assert found(tmp_path / "run", "gradient_norm", step) == pytest.approx(expected[step], **EXACT), step


@pytest.mark.parametrize("fused", [False, True])
@pytest.mark.parametrize("clips", [False, True])
@pytest.mark.parametrize("says", [False, True])
def test_a_scaled_loss_is_measured_unscaled_and_its_overflow_is_no_divergence(tmp_path, fused, clips, says):
    model, losses = NanoGpt(), []
    optimizer, naive = torch.optim.AdamW(model.parameters(), lr=1e-3, fused=fused), Naive(model, nano_parts())
    scaler, expected = torch.amp.GradScaler("cpu", init_scale=1024.0), {}
    watched = lamina.watch(model, optimizer, output=str(tmp_path / "run"), every=1, on_divergence="stop")
    with watched as monitor:
        for step in (1, 2, 3, 4):
            loss = loss_of(model, step)
            losses.append(loss.item())
            scaler.scale(loss).backward()
            if step in (1, 3):
                model.lm_head.weight.grad[0, 0] = math.inf
            naive.keep()
            norms = naive.norms(naive.gradients)
            expected[step] = {place: norm / scaler.get_scale() for place, norm in norms.items()}
            if clips:
                scaler.unscale_(optimizer)
                torch.nn.utils.clip_grad_norm_(model.parameters(), 0.1)
            scaler.step(optimizer)
            scaler.update()
            optimizer.zero_grad()
            if says:
                monitor.step(loss)
    assert (result(tmp_path / "run")["steps"], watched.diverged) == (4, None)
    assert not (tmp_path / "run" / "alarms.jsonl").exists()
    assert json.loads((tmp_path / "run" / "watched.json").read_text())["notes"] == []
    rows = layers(tmp_path / "run")
    assert set(rows[rows["metric"].str.endswith("gradient_norm")]["step"]) == {2, 4}
    assert series(tmp_path / "run", "step_loss") == pytest.approx(dict(enumerate(losses, 1)), rel=1e-6)
    for step in (2, 4):
        assert found(tmp_path / "run", "gradient_norm", step) == pytest.approx(expected[step], **EXACT), step


def test_an_optimizer_that_chooses_its_rate_itself_is_watched(tmp_path):
    model = NanoGpt()
    loop(model, tmp_path / "run", steps=2, optimizer=Adafactor(model.parameters()), every=1)  # its rate is None
    assert found(tmp_path / "run", "update_norm", 2)[1, "block", "all"] > 0
    assert not found(tmp_path / "run", "second_moment", 2)  # of vectors alone, and no average of fixed length


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


def lose_under_layer_drop(model, optimizer, step):
    if step == AT:
        optimizer.state.clear()
        model.h[1].zero_grad()  # left out: its state stays empty after the step


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
CASES = [(swap, BOTH), (redraw, {("written", 1, "feed_forward")}), (shrink, {("written", 1, "attention")})]
CASES += [(each, {("forgotten", -1, "model")}) for each in (lose, lose_under_layer_drop)]
CASES += [(lose_second, {("forgotten", -1, "block")})]
CASES += [(spoil, {("not_finite", 1, "attention")}), (swap_and_back, set()), (normalize, set())]


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


@pytest.mark.parametrize("step", [AT, STEPS])
def test_what_is_written_behind_the_optimizers_step_is_of_this_step(tmp_path, step):
    """The last step included. What the step measures later, such as the gains, is of the weights as they are now."""
    model = NanoGpt()

    def halve(now):
        if now == step:
            with torch.no_grad():
                model.h[1].attn.c_proj.weight.mul_(0.5)

    loop(model, tmp_path / "run", STEPS, after=halve, every=5, on_divergence="note")
    written = [alarm for alarm in read_alarms(tmp_path / "run") if alarm.rule == "written"]
    assert [(alarm.step, alarm.layer, alarm.sublayer) for alarm in written] == [(step, 1, "attention")]


@pytest.mark.parametrize("kind", [torch.optim.Adam, torch.optim.SGD, torch.optim.RMSprop])
def test_weights_in_bfloat16_are_compared_outside_of_autograd(tmp_path, kind):
    """As on a GPU, torch joins the sample. The optimizer then writes into tensors of which the sample has views."""
    model = NanoGpt().bfloat16()
    loop(model, tmp_path / "run", 3, optimizer=kind(model.parameters(), lr=1e-3), every=1)
    assert found(tmp_path / "run", "update_norm", 3)
    assert read_alarms(tmp_path / "run") == []


class Shrinking(torch.optim.AdamW):
    """An optimizer whose step calls its base's step, whose hooks torch then calls, too."""

    @torch.no_grad()
    def step(self, closure=None):
        loss = super().step(closure)
        for group in self.param_groups:
            for parameter in group["params"]:
                parameter.mul_(0.95)
        return loss


def test_what_a_step_does_after_its_bases_step_is_the_optimizers(tmp_path):
    model = NanoGpt()
    torch.optim.AdamW(model.parameters())  # torch gives a class its hooks with its first optimizer
    loop(model, tmp_path / "run", STEPS, Shrinking(model.parameters(), lr=1e-3), every=5)
    assert [alarm.rule for alarm in read_alarms(tmp_path / "run") if alarm.rule == "written"] == []
    assert found(tmp_path / "run", "written_ratio", 5) == {}


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


class Headless(NanoGpt):
    def forward(self, idx):
        x = self.wte(idx) + self.wpe(torch.arange(idx.shape[1]))
        for layer in self.h:
            x = layer(x)
        return self.ln_f(x)


class Assembled(torch.autograd.Function):
    """The sum of losses whose gradient is there already."""

    @staticmethod
    def forward(ctx, hidden, gradient, total):
        ctx.gradient = gradient
        return total.clone()

    @staticmethod
    def backward(ctx, share):
        return ctx.gradient * share, None, None


def in_chunks(model, hidden, targets):
    """The loss in chunks, each with its own backward pass through the head, as torchtitan's ChunkedLossWrapper."""
    total, gradients = torch.zeros(()), []
    for part, labels in zip(hidden.detach().chunk(3, dim=1), targets.chunk(3, dim=1), strict=True):
        part = part.clone().requires_grad_()
        loss = functional.cross_entropy(model.lm_head(part).flatten(0, 1), labels.flatten(), reduction="sum")
        loss = loss / targets.numel()
        loss.backward()
        gradients.append(part.grad)
        total = total + loss.detach()
    return Assembled.apply(hidden, torch.cat(gradients, dim=1), total)


@pytest.mark.parametrize("micro_batches", [1, 2])
def test_a_loss_in_chunks_counts_once(tmp_path, micro_batches):
    model, losses, norms = Headless(), [], []
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    with lamina.watch(model, optimizer, output=str(tmp_path / "run")):
        for step in range(4):
            shares = []
            for inputs, targets in batches(8)[micro_batches * step :][:micro_batches]:
                loss = in_chunks(model, model(inputs), targets) / micro_batches
                loss.backward()
                shares.append(loss.item())
            losses.append(sum(shares))
            norms.append(norm_of([p.grad for p in model.parameters()]))
            optimizer.step()
            optimizer.zero_grad()
    assert series(tmp_path / "run", "step_loss") == pytest.approx(dict(enumerate(losses, 1)), rel=1e-6)
    assert series(tmp_path / "run", "step_gradient_norm") == pytest.approx(dict(enumerate(norms, 1)), rel=1e-6)
    assert not read_alarms(tmp_path / "run")


def test_a_loss_of_what_a_hook_saw_counts(tmp_path):
    model, seen, losses = Headless(), [], []
    model.h[0].register_forward_hook(lambda module, args, output: seen.append(output))

    def loss_of(model, batch):
        model(batch)
        losses.append(loss := seen[-1].square().mean())
        return loss

    loop(model, tmp_path / "run", steps=3, loss_of=loss_of, says=False)
    assert series(tmp_path / "run", "step_loss") == pytest.approx(dict(enumerate(map(float, losses), 1)), rel=1e-6)
