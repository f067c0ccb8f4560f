"""``--trainer.NAME VALUE``: every argument of transformers' works or is refused in one line, never with a traceback."""

from dataclasses import fields

import pytest
from transformers import TrainingArguments
from transformers.training_args import OptimizerNames, SchedulerType

from lamina.errors import UserError
from lamina.training.arguments import _FIXED, _OURS, OPTIONS, SCHEDULES, training_arguments
from lamina.training.settings import PretrainSettings

VALUES = [
    *(None, True, False, 0, 1, 2, -1, 3.5, 0.5, 1e30, float("nan"), 10**400),
    *("", "x", "no", "auto", "0.5", "cosine", [], [1], ["a"], {}, {"a": 1}),
]
SPECIFIC = {
    "optim": [name.value for name in OptimizerNames],
    "lr_scheduler_type": [name.value for name in SchedulerType],
    "lr_scheduler_kwargs": [{"num_cycles": 2}, {"min_lr": 9.0}, {"min_lr_rate": "x"}],
    "log_level": ["info"],
    "log_level_replica": ["info"],
    "optim_args": ["a=b", "momentum=0.9"],
}
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
    with pytest.raises(UserError, match=r"trainer\.hub_token: has no effect in a run of Lamina \(allowed: optim, "):
        training_arguments(PretrainSettings(trainer={"hub_token": "x"}))


@pytest.mark.parametrize("scheduler", SCHEDULES)
def test_the_schedules_that_are_allowed_train(trained, scheduler):
    assert trained(trainer={"lr_scheduler_type": scheduler})["steps"] == 4


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"lr_scheduler_type": "warmup_stable_decay"}, "--schedule wsd"),
        ({"lr_scheduler_type": "reduce_lr_on_plateau"}, "allowed: linear, cosine,"),
        ({"lr_scheduler_type": "greedy"}, "allowed: linear, cosine,"),
        (
            {"lr_scheduler_type": "polynomial", "lr_scheduler_kwargs": {"lr_end": 1.0}},
            "'polynomial' can't be used like",
        ),
        ({"lr_scheduler_kwargs": {"no_such": 1}}, "no_such"),
        ({"optim": "sgd", "optim_args": "momentum=x"}, r"trainer\.optim: 'sgd' can't be used here"),
        ({"optim": "no_such_optimizer"}, r"trainer.*no_such_optimizer"),
        ({"dataloader_prefetch_factor": 2}, "dataloader_num_workers of at least 1"),
        ({"bf16": True}, r"trainer\.bf16: set by --precision"),
        ({"fp16": True}, r"trainer\.fp16: set by --precision"),
        ({"torch_compile": True}, r"trainer\.torch_compile: set by --compile"),
    ],
)
def test_what_can_not_work_is_said_before_the_run(options, said):
    with pytest.raises(UserError, match=said):
        training_arguments(PretrainSettings(trainer=options))


def test_a_schedule_of_trainers_beside_wsd_is_refused():
    with pytest.raises(UserError, match="the run's schedule is 'wsd'"):
        training_arguments(PretrainSettings(schedule="wsd", trainer={"lr_scheduler_type": "linear"}))


@pytest.mark.parametrize("name", ["mixup", "cutmix"])
def test_images_are_not_mixed_in_batches_of_one(name):
    settings = PretrainSettings(backbone="vit-tiny", corpus="photos", batch_size=2, **{name: 0.8})
    training_arguments(settings)
    with pytest.raises(UserError, match=f"^{name}: 0.8 needs a second image.*at least 4"):
        training_arguments(settings, processes=2)
