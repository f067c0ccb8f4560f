"""The optimizer, the schedules, the weights' average, Muon, and Trainer's other arguments."""

import math
from dataclasses import fields

import pytest
import torch
from safetensors.torch import save_file
from spread import spread
from torch import nn
from training.tiny_runs import SMALL, flags, llama_of, records
from transformers import TrainingArguments, get_scheduler
from transformers.training_args import OptimizerNames, SchedulerType

import lamina
from lamina.cli import main
from lamina.errors import UserError
from lamina.modeling.scaling import Scaling
from lamina.training.arguments import _FIXED, _OURS, OPTIONS, SCHEDULES, training_arguments
from lamina.training.optimization.optimizer import (
    AVERAGE,
    MuonAdamW,
    WeightAverage,
    parameter_groups,
    schedule_of,
    step_factors,
)
from lamina.training.resolve import POLICY, check_sharded
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


def warmed_cosine(done, steps, warm_steps, minimum):
    if done < warm_steps:
        return done / warm_steps
    return minimum + (1 - minimum) * 0.5 * (1 + math.cos(math.pi * (done - warm_steps) / (steps - warm_steps)))


@pytest.mark.parametrize(("warmup", "warm_steps"), [(0.2, 4), (5, 5), (0, 0)])
@pytest.mark.parametrize("minimum", [0.1, 0.0, 0.5])
def test_the_learning_rate_warms_up_linearly_and_falls_as_a_cosine(warmup, warm_steps, minimum):
    given = training_arguments(PretrainSettings(steps=20, warmup=warmup, min_learning_rate=minimum, learning_rate=1.0))
    optimizer = torch.optim.SGD(nn.Linear(1, 1).parameters(), lr=given.learning_rate)
    made = get_scheduler(given.lr_scheduler_type, optimizer, given.get_warmup_steps(20), 20, given.lr_scheduler_kwargs)
    expected = [warmed_cosine(done, 20, warm_steps, minimum) for done in range(20)]
    assert [made.lr_lambdas[0](done) for done in range(20)] == pytest.approx(expected, rel=1e-6)


@pytest.mark.parametrize("schedule", ["cosine", "wsd"])
def test_a_record_has_the_rate_of_its_own_step(trained, tmp_path, schedule):
    chosen = {"schedule": schedule, "warmup": 2, "steps": 6}
    trained(**chosen, logging_steps=1)
    rates = [r["learning_rate"] for r in records(tmp_path / "run") if "loss" in r]
    rate = schedule_of(PretrainSettings(**chosen)) or (lambda done: warmed_cosine(done, 6, 2, 0.1))
    assert rates == pytest.approx([3e-3 * rate(done) for done in range(6)])


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
    with pytest.raises(UserError, match=rf"trainer\.{argument}: 'other', but Lamina's records need"):
        training_arguments(PretrainSettings(trainer={argument: "other"}))
    said = training_arguments(PretrainSettings(trainer={argument: _FIXED[argument]}))
    assert getattr(said, argument) == getattr(training_arguments(PretrainSettings()), argument)


@pytest.mark.parametrize(
    ("shape", "middle"), [("linear", 0.5), ("1-sqrt", 1 - math.sqrt(0.5)), ("cosine", 0.5)], ids=str
)
def test_it_warms_up_stays_level_and_decays_to_the_lowest_rate(shape, middle):
    given = {"schedule": "wsd", "steps": 100, "warmup": 10, "decay": 0.2, "decay_shape": shape}
    rate = schedule_of(PretrainSettings(**given, min_learning_rate=0.1))
    assert [rate(step) for step in (0, 5, 10, 40, 80)] == [0.0, 0.5, 1.0, 1.0, 1.0]
    assert rate(90) == pytest.approx(0.1 + 0.9 * middle)
    assert rate(100) == pytest.approx(0.1)
    falling = [rate(step) for step in range(80, 101)]
    assert falling == sorted(falling, reverse=True)


def test_a_run_older_than_the_setting_goes_on_with_the_cosine():
    defaults = PretrainSettings().to_dict()
    stored = {k: v for k, v in defaults.items() if k not in ("schedule", "decay", "decay_shape")}
    assert PretrainSettings.from_dict(POLICY.merge(stored, defaults, defaults)).schedule == "cosine"
    with pytest.raises(UserError, match="schedule: 'wsd' differs from the run's 'cosine'"):
        POLICY.merge(stored, {"schedule": "wsd"}, defaults)


VALUES = [
    *(None, True, False, 0, 1, 2, -1, 3.5, 0.5, 1e30, float("nan"), 10**400),
    *("", "x", "no", "auto", "0.5", "cosine", [], [1], ["a"], {}, {"a": 1}),
]
SPECIFIC = {"optim": [name.value for name in OptimizerNames]}
SPECIFIC |= {"lr_scheduler_type": [name.value for name in SchedulerType]}
SPECIFIC |= {"lr_scheduler_kwargs": [{"num_cycles": 2}, {"min_lr": 9.0}, {"min_lr_rate": "x"}]}
SPECIFIC |= {"log_level": ["info"], "log_level_replica": ["info"], "optim_args": ["a=b", "momentum=0.9"]}
NAMES = [entry.name for entry in fields(TrainingArguments) if entry.init]


def refusal(options) -> str | None:
    """What is said of these options; None where they are taken."""
    try:
        training_arguments(PretrainSettings(trainer=options))
    except UserError as error:
        return str(error)
    return None


@pytest.mark.parametrize("name", NAMES)
def test_no_value_of_any_argument_is_a_traceback(name):
    said = [refusal({name: value}) for value in [*VALUES, *SPECIFIC.get(name, [])]]
    assert all(line.startswith("trainer") and "\n" not in line for line in said if line)
    assert (None in said) == (name in OPTIONS or (name in _FIXED and _FIXED[name] in VALUES))


def test_every_argument_is_ours_or_fixed_or_an_option_or_refused_with_the_list():
    assert not set(OPTIONS) & (set(_OURS) | set(_FIXED))
    with pytest.raises(UserError, match=r"trainer\.hub_token has no effect in a run of Lamina \(allowed: optim, "):
        training_arguments(PretrainSettings(trainer={"hub_token": "x"}))


@pytest.mark.parametrize("scheduler", spread(SCHEDULES, ["linear", "cosine_with_min_lr"]))
def test_the_schedules_that_are_allowed_train(trained, scheduler):
    assert trained(trainer={"lr_scheduler_type": scheduler})["steps"] == 4


@pytest.mark.parametrize("name", ["mixup", "cutmix"])
def test_images_are_not_mixed_in_batches_of_one(name):
    settings = PretrainSettings(backbone="vit-tiny", corpus="photos", batch_size=2, **{name: 0.8})
    training_arguments(settings)
    with pytest.raises(UserError, match=f"^{name}: 0.8 needs two images per process.*at least 4"):
        training_arguments(settings, processes=2)


RATE, DECAY = 1e-2, 0.1
MUON = {"placement": "peri_ln", "optimizer": "muon"}


def orthogonalized(gradient):
    """Jordan's five Newton-Schulz steps."""
    x = gradient.double()
    x = x.T if x.shape[0] > x.shape[1] else x
    x = x / x.norm()
    for _ in range(5):
        square = x @ x.T
        x = 3.4445 * x + (-4.7750 * square + 2.0315 * square @ square) @ x
    return (x.T if gradient.shape[0] > gradient.shape[1] else x).float()


def in_a_block(name, parameter):
    return ".layers." in name and parameter.ndim == 2


def test_one_step_is_the_naive_one_of_each_kind(trained, trainers, first_step):
    before, grads = first_step
    trained(**MUON, steps=1, warmup=0, max_grad_norm=0, learning_rate=RATE)
    for name, parameter in trainers[0].model.named_parameters():
        start, gradient = before[name], grads[name]
        decayed = start * (1 - RATE * (DECAY if start.ndim >= 2 else 0.0))
        moved = (decayed - parameter.detach()) / RATE
        if in_a_block(name, start):
            update = 0.2 * math.sqrt(max(start.shape)) * orthogonalized(gradient)
            assert (moved - update).norm() < 0.1 * update.norm(), name  # the steps round to bfloat16
        else:
            torch.testing.assert_close(moved, gradient / (gradient.abs() + 1e-8), atol=1e-3, rtol=0.0)
        assert (parameter != start).any()


def test_steps_are_those_of_pytorchs_two_optimizers(tmp_path):
    torch.manual_seed(0)
    ours, theirs = (lamina.build(llama_of(16), "fusenorm", init="normal") for _ in range(2))
    theirs.load_state_dict(ours.state_dict())
    groups = parameter_groups(ours, step_factors(ours, Scaling(), "muon"), learning_rate=RATE, weight_decay=0.0)
    one = MuonAdamW(groups, betas=(0.9, 0.95))
    named = list(theirs.named_parameters())
    two = [
        torch.optim.Muon([p for n, p in named if in_a_block(n, p)], RATE, 0.0, adjust_lr_fn="match_rms_adamw"),
        torch.optim.AdamW([p for n, p in named if not in_a_block(n, p)], RATE, betas=(0.9, 0.95), weight_decay=0.0),
    ]
    for step in range(4):
        if step == 2:  # goes on from what is stored
            torch.save(one.state_dict(), tmp_path / "state.pt")
            groups = parameter_groups(ours, step_factors(ours, Scaling(), "muon"), learning_rate=9.0, weight_decay=0.0)
            one = MuonAdamW(groups, betas=(0.9, 0.95))
            one.load_state_dict(torch.load(tmp_path / "state.pt", weights_only=True))
        for own, other in zip(ours.parameters(), theirs.parameters(), strict=True):
            own.grad = torch.randn_like(own)
            other.grad = own.grad.clone()
        one.step()
        for optimizer in two:
            optimizer.step()
        assert all(torch.equal(a, b) for a, b in zip(ours.parameters(), theirs.parameters(), strict=True))


@pytest.mark.parametrize("scheme", ["standard", "mup", "standard-no-alignment", "none"])
def test_updates_have_the_spectral_norm_of_the_base_width(scheme):
    """sqrt(out/in) times the base's, Condition 1 of arXiv 2310.17813, from gradients of any kind."""
    norms = {}
    for width in (32, 128):
        torch.manual_seed(0)
        model = lamina.build(llama_of(width), "pre_ln", init="normal")
        factors = step_factors(model, Scaling(width=scheme, base_width=32), "muon")
        optimizer = MuonAdamW(parameter_groups(model, factors, learning_rate=RATE, weight_decay=0.0))
        before = {name: p.detach().clone() for name, p in model.named_parameters() if in_a_block(name, p)}
        for parameter in model.parameters():
            parameter.grad = torch.randn_like(parameter)
        optimizer.step()
        after = dict(model.named_parameters())
        stretch = {n: torch.linalg.matrix_norm(after[n].detach() - p, ord=2).item() for n, p in before.items()}
        norms[width] = [stretch[n] / math.sqrt(p.shape[0] / p.shape[1]) for n, p in before.items()]
    ratios = torch.tensor(norms[128]) / torch.tensor(norms[32])
    assert ratios.median() == pytest.approx(2.0 if scheme == "none" else 1.0, rel=0.1)
    assert ratios.max() / ratios.min() < 1.3


def test_parts_of_weights_are_refused():
    with pytest.raises(UserError, match=r"optimizer: 'muon' .*--parallel ddp"):
        check_sharded(PretrainSettings(optimizer="muon", parallel="fsdp2"))


def test_the_average_is_on_the_trained_model_s_device_without_a_step():
    trained = nn.Linear(2, 2)
    average = WeightAverage(trained, 0.9)
    nn.Module.to(trained, "meta")  # as Trainer moves it to a GPU
    assert {parameter.device.type for parameter in average.model.parameters()} == {"meta"}


def test_a_read_average_follows_the_trained_model(tmp_path):
    trained = nn.Linear(2, 2)
    average = WeightAverage(trained, 0.9)
    save_file(average.tensors(), tmp_path / AVERAGE)
    before = trained.weight.detach().clone()
    nn.init.zeros_(trained.weight)
    average.read(tmp_path)
    assert torch.equal(average.model.weight, before)
    assert next(average.model.parameters()).device == trained.weight.device
