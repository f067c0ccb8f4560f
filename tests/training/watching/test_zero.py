"""A stand-in for DeepSpeed's ZeRO in one process; ``test_watching`` runs DeepSpeed itself, where it is installed."""

import json
from types import SimpleNamespace

import pytest
import torch
from torch import distributed
from training.watching.loops import Naive, NanoGpt, Tokens, found, loop, nano_parts

import lamina
from lamina.errors import UserError

SCALE = 4.0  # of the loss, as under float16


@pytest.fixture
def alone():
    distributed.init_process_group("gloo", store=distributed.HashStore(), rank=0, world_size=1)
    yield
    distributed.destroy_process_group()


class Fragment:
    """Where a parameter lies in its group's flat weights; its gradient is there from a backward pass to the step."""

    def __init__(self, zero, group, start, numel):
        self.hp_fragment_address = SimpleNamespace(start=start, numel=numel)
        self.zero, self.group = zero, group

    def get_lp_grad_fragment(self, index):
        if self.zero.averaged_gradients[self.group] is None:
            raise ValueError("Gradients are only available immediately after backward and before engine step")
        return self.zero.averaged_gradients[self.group][index]


class Zero:
    """Stage 2 with two groups: it updates their flat weights one by one, and frees each one's gradients first."""

    def __init__(self, model):
        self.loss_scale, self.overflow, self.clip_grad = SCALE, False, 0.0
        decayed = [p for p in model.parameters() if p.ndim == 2]
        self.bit16_groups = [decayed, [p for p in model.parameters() if p.ndim < 2]]
        flats = [torch.cat([p.detach().flatten() for p in group]) for group in self.bit16_groups]
        self.single_partition_of_fp32_groups = [flat.requires_grad_() for flat in flats]
        groups = [{"params": [flat]} for flat in flats]
        self.optimizer = torch.optim.AdamW([{**groups[0], "weight_decay": 0.1}, groups[1]], lr=1e-2)
        self.averaged_gradients = [None, None]
        for number, group in enumerate(self.bit16_groups):
            start = 0
            for index, parameter in enumerate(group):
                parameter._index_in_param_group = index
                parameter._hp_mapping = Fragment(self, number, start, parameter.numel())
                start += parameter.numel()

    def reduce(self):
        """As ``engine.backward`` does, move the gradients away from the parameters."""
        for number, group in enumerate(self.bit16_groups):
            self.averaged_gradients[number] = [p.grad.clone() for p in group]
        self.zero_grad()

    def zero_grad(self):
        for parameter in (p for group in self.bit16_groups for p in group):
            parameter.grad = None

    @torch.no_grad()
    def step(self):
        for number, group in enumerate(self.bit16_groups):
            gradients, self.averaged_gradients[number] = self.averaged_gradients[number], None
            if self.overflow:
                continue
            flat = self.single_partition_of_fp32_groups[number]
            flat.grad = torch.cat([gradient.flatten() for gradient in gradients]) / self.loss_scale
            self.optimizer.step()  # the other group has no gradient now
            flat.grad = None
            for parameter, part in zip(group, flat.split([p.numel() for p in group]), strict=True):
                parameter.copy_(part.view_as(parameter))


def trained(folder, steps, every=1, before_step=lambda step, zero: None, **options):
    model = NanoGpt()
    zero = Zero(model)
    with lamina.watch(model, zero, output=str(folder), every=every, **options) as monitor:
        for step, batch in enumerate(Tokens(items=2 * steps).ids.split(2), 1):
            loss = model(batch[:, :-1], batch[:, 1:])[1]
            (loss * SCALE).backward()
            zero.reduce()
            before_step(step, zero)
            zero.step()
            monitor.step(loss)
    return model


def plain(steps):
    model = NanoGpt()
    naive = Naive(model, nano_parts())
    matrices, vectors = ([p for p in model.parameters() if (p.ndim == 2) == flat] for flat in (True, False))
    groups = [{"params": matrices, "weight_decay": 0.1}, {"params": vectors}]
    optimizer = torch.optim.AdamW(groups, lr=1e-2)
    for batch in Tokens(items=2 * steps).ids.split(2):
        optimizer.zero_grad()
        model(batch[:, :-1], batch[:, 1:])[1].backward()
        naive.keep()
        optimizer.step()
    return model, naive, optimizer


def test_a_step_of_zero_is_measured_as_a_plain_one(tmp_path, alone):
    watched = trained(tmp_path / "run", 3)
    model, naive, optimizer = plain(3)
    for a, b in zip(watched.parameters(), model.parameters(), strict=True):
        assert torch.equal(a, b)
    by_hand = {"gradient_norm": naive.norms(naive.gradients)}
    by_hand |= {"update_norm": naive.updates(), "first_moment": naive.moments(optimizer, "exp_avg")}
    by_hand |= {"second_moment": naive.moments(optimizer, "exp_avg_sq"), "weight_norm": naive.norms(naive.before)}
    for metric, expected in by_hand.items():
        assert found(tmp_path / "run", metric, 3) == pytest.approx(expected, rel=1e-5), metric
    assert found(tmp_path / "run", "unmoved_parameters", 3) == {}
    assert found(tmp_path / "run", "written_ratio", 3) == {}
    assert (0, "attention", "pre_norm") in found(tmp_path / "run", "gain_mean", 3)


def test_written_weights_parameters_that_do_not_move_and_the_groups_rates_are_found(tmp_path, alone):
    def spoil(step, zero):
        flat = zero.single_partition_of_fp32_groups[0]
        if step == 2:
            flat.data.mul_(1.5)
        if step == 3:
            zero.optimizer.param_groups[1]["lr"] = 1e-3
            first = flat.detach()[: zero.bit16_groups[0][0].numel()]
            old = first.clone()
            zero.optimizer.register_step_post_hook(lambda *_: setattr(first, "data", first.data.copy_(old)))

    trained(tmp_path / "run", 3, before_step=spoil)
    written = found(tmp_path / "run", "written_ratio", 2)
    assert 0.2 < written[0, "attention", "all"] < 0.5 / 1.5  # its norm's gain was not written
    assert found(tmp_path / "run", "unmoved_parameters", 3) == {(-1, "block", "embedding"): 1.0}
    assert found(tmp_path / "run", "rate_ratio", 3)[0, "attention", "all"] == pytest.approx(10.0)
    notes = json.loads((tmp_path / "run" / "watched.json").read_text())["notes"]
    assert "step 3: these parameters get a gradient but do not change: wte.weight" in notes


def test_a_step_that_overflows_is_left_out(tmp_path, alone):
    def overflow(step, zero):
        zero.overflow = step == 2
        if zero.overflow:
            zero.averaged_gradients[0][0].fill_(torch.inf)

    trained(tmp_path / "run", 3, before_step=overflow)
    assert found(tmp_path / "run", "gradient_norm", 2) == found(tmp_path / "run", "update_norm", 2) == {}
    assert found(tmp_path / "run", "gradient_norm", 3)
    assert found(tmp_path / "run", "update_norm", 3)


def test_an_engine_that_accumulates_ends_no_step_before_its_optimizer(tmp_path, alone):
    model = NanoGpt()
    zero = Zero(model)
    with lamina.watch(model, zero, output=str(tmp_path / "run"), every=1) as monitor:
        for micro, batch in enumerate(Tokens(items=8).ids.split(2), 1):
            loss = model(batch[:, :-1], batch[:, 1:])[1]
            (loss * SCALE / 2).backward()
            if micro % 2 == 0:
                zero.reduce()
                zero.step()
            monitor.step(loss)
    assert monitor.monitor.step == 2
    assert len(found(tmp_path / "run", "update_norm", 2)) == len(nano_parts())


def test_no_step_of_deepspeed_can_be_skipped(tmp_path):
    with pytest.raises(UserError, match="skip_outliers: DeepSpeed"):
        trained(tmp_path / "run", 1, skip_outliers=6.0)


def test_deepspeed_is_said_to_hide_weights_and_no_optimizer_is_said_to_miss_them(tmp_path):
    """ZeRO marks the model's parameters so, and its optimizer has others; here nothing gives ZeRO's optimizer."""
    model = NanoGpt()
    for number, parameter in enumerate(model.parameters()):
        parameter.ds_id = number
    mine = [torch.nn.Parameter(parameter.detach().flatten()) for parameter in model.parameters()]
    loop(model, tmp_path / "run", 2, optimizer=torch.optim.AdamW(mine))
    notes = json.loads((tmp_path / "run" / "watched.json").read_text())["notes"]
    assert any(note.startswith("DeepSpeed hides gradients") for note in notes)
    assert not any("no optimizer has" in note or "gradients and updates are" in note for note in notes)
