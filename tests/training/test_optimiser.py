"""The optimiser, the schedule and Trainer's other arguments."""

import math

import pytest
import torch
from training.tiny_runs import SMALL, flags, records

from lamina.cli import main
from lamina.errors import UserError
from lamina.training.arguments import _FIXED, _OURS, training_arguments
from lamina.training.settings import PretrainSettings


def test_adamw_with_the_papers_constants_decays_matrices_only(trained, trainers):
    trained(placement="peri_ln")
    (trainer,) = trainers
    optimizer = trainer.optimizer.optimizer if hasattr(trainer.optimizer, "optimizer") else trainer.optimizer
    assert type(optimizer) is torch.optim.AdamW
    assert trainer.args.max_grad_norm == 1.0
    decays = {}
    for group in optimizer.param_groups:
        assert group["betas"] == (0.9, 0.95)
        assert group["eps"] == 1e-8
        for parameter in group["params"]:
            assert id(parameter) not in decays, "a parameter in two groups"
            decays[id(parameter)] = group["weight_decay"]
    parameters = list(trainer.model.parameters())
    assert set(decays) == {id(p) for p in parameters}
    assert {decays[id(p)] for p in parameters if p.ndim >= 2} == {0.1}
    assert {decays[id(p)] for p in parameters if p.ndim < 2} == {0.0}


@pytest.mark.parametrize(("warmup", "warm_steps"), [(0.2, 4), (5, 5), (0, 0)])
@pytest.mark.parametrize("minimum", [0.1, 0.0, 0.5])
def test_the_learning_rate_warms_up_linearly_and_falls_as_a_cosine(trained, tmp_path, warmup, warm_steps, minimum):
    steps, peak = 20, 3e-3
    trained(steps=steps, warmup=warmup, min_learning_rate=minimum, learning_rate=peak, eval_steps=20, logging_steps=1)
    rates = [r["learning_rate"] for r in records(tmp_path / "run") if "loss" in r]
    expected = []
    for done in range(steps):
        if done < warm_steps:
            expected.append(peak * done / warm_steps)
        else:
            cosine = 0.5 * (1 + math.cos(math.pi * (done - warm_steps) / (steps - warm_steps)))
            expected.append(peak * (minimum + (1 - minimum) * cosine))
    assert rates == pytest.approx(expected, rel=1e-6)


def test_weights_move_by_the_naive_adamw_step(trained, trainers, first_step):
    """One step from known gradients, computed by the papers' equations."""
    before, grads = first_step
    trained(steps=1, warmup=0, max_grad_norm=0, learning_rate=1e-2)
    for name, parameter in trainers[0].model.named_parameters():
        start, gradient = before[name].double(), grads[name].double()
        decay = 0.1 if start.ndim >= 2 else 0.0
        expected = start * (1 - 1e-2 * decay) - 1e-2 * gradient / (gradient.abs() + 1e-8)
        assert torch.allclose(parameter.detach().double(), expected, atol=1e-5), name


def test_any_other_trainer_argument_is_passed_through(tmp_path, trainers, corpus):
    given = flags(**SMALL, corpus=corpus, output=tmp_path / "run")
    assert main(["pretrain", *given, "--trainer.optim", "adafactor", "--trainer.dataloader_pin_memory", "false"]) == 0
    assert trainers[0].args.dataloader_pin_memory is False
    assert type(trainers[0].optimizer.optimizer).__name__ == "Adafactor"
    assert "optim: adafactor" in (tmp_path / "run" / "config.yaml").read_text()


@pytest.mark.parametrize(("argument", "setting"), sorted(_OURS.items()))
def test_a_trainer_argument_that_lamina_sets_is_refused_with_the_flags_name(argument, setting):
    assert hasattr(PretrainSettings(), setting)
    with pytest.raises(UserError, match=rf"trainer\.{argument}: .*--{setting.replace('_', '-')}\b"):
        training_arguments(PretrainSettings(trainer={argument: 1}))


@pytest.mark.parametrize("argument", _FIXED)
def test_a_trainer_argument_that_the_records_rest_on_is_refused(argument):
    with pytest.raises(UserError, match=rf"trainer\.{argument}: fixed"):
        training_arguments(PretrainSettings(trainer={argument: "other"}))
    said = training_arguments(PretrainSettings(trainer={argument: _FIXED[argument]}))
    assert getattr(said, argument) == getattr(training_arguments(PretrainSettings()), argument)
