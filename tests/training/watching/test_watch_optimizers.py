"""Several optimizers, loss scalers and other models' clipping: the numbers are still those of the step."""

import math

import pytest
import torch
from training.watching.loops import Naive, NanoGpt, Tokens, found, loop, nano_parts, result, rows_of
from transformers.optimization import Adafactor

import lamina

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
            assert math.sqrt(sum(float(p.grad.pow(2).sum()) for p in model.parameters())) == pytest.approx(
                0.1, rel=1e-3
            )
            optimizer.step()
            monitor.step(loss)
            loss_of(other, step).backward()
            torch.nn.utils.clip_grad_value_(other.parameters(), 0.1)
    for step in (1, 2, 3):
        assert found(tmp_path / "run", "gradient_norm", step) == pytest.approx(expected[step], **EXACT), step


@pytest.mark.parametrize("fused", [False, True])
@pytest.mark.parametrize("clips", [False, True])
def test_a_scaled_loss_is_measured_unscaled_and_its_overflow_is_no_divergence(tmp_path, fused, clips):
    model = NanoGpt()
    optimizer, naive = torch.optim.AdamW(model.parameters(), lr=1e-3, fused=fused), Naive(model, nano_parts())
    scaler, expected = torch.amp.GradScaler("cpu", init_scale=1024.0), {}
    watched = lamina.watch(model, optimizer, output=str(tmp_path / "run"), every=1, on_divergence="stop")
    with watched as monitor:
        for step in (1, 2, 3, 4):
            loss = loss_of(model, step)
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
            monitor.step(loss)
    assert (result(tmp_path / "run")["steps"], watched.diverged) == (4, None)
    assert not (tmp_path / "run" / "alarms.jsonl").exists()
    rows = rows_of(tmp_path / "run")
    assert set(rows[rows["metric"].str.endswith("gradient_norm")]["step"]) == {2, 4}
    assert rows[rows["metric"] == "step_loss"]["step"].tolist() == [1, 2, 3, 4]
    for step in (2, 4):
        assert found(tmp_path / "run", "gradient_norm", step) == pytest.approx(expected[step], **EXACT), step


def test_an_optimizer_that_chooses_its_rate_itself_is_watched(tmp_path):
    model = NanoGpt()
    loop(model, tmp_path / "run", steps=2, optimizer=Adafactor(model.parameters()), every=1)  # its rate is None
    assert found(tmp_path / "run", "update_norm", 2)[1, "block", "all"] > 0
    assert not found(tmp_path / "run", "second_moment", 2)  # of vectors alone, and no average of fixed length
