"""What a checkpoint's manifest does not list is never read, and a checkpoint under another step's name never used."""

import shutil

import pytest
import torch
from safetensors.torch import load_file, save_file
from training.test_damage import go_on, run, runs  # noqa: F401 (fixtures)
from training.tiny_runs import layers, records


def spoiled(source, target):
    """A copy of a safetensors file with other numbers in it."""
    target.parent.mkdir(exist_ok=True)
    save_file({name: torch.full_like(value, 0.5) for name, value in load_file(source).items()}, target)


def stray_weights(checkpoint):
    spoiled(checkpoint / "model.safetensors", checkpoint / "stray.safetensors")
    return "stray.safetensors"


def a_folder_of_weights(checkpoint):
    spoiled(checkpoint / "model.safetensors", checkpoint / "model" / "model.safetensors")
    return "model/model.safetensors"


def stray_states(checkpoint):
    spoiled(checkpoint / "optimizer" / "states.safetensors", checkpoint / "optimizer" / "another.safetensors")
    return "optimizer/another.safetensors"


def a_random_state(checkpoint):
    shutil.copyfile(checkpoint / "rng_state.pth", checkpoint / "rng_state_1.pth")
    return "rng_state_1.pth"


@pytest.mark.parametrize("add", [stray_weights, a_folder_of_weights, stray_states, a_random_state])
def test_a_file_that_the_manifest_does_not_list_is_not_read(run, runs, add, caplog):  # noqa: F811
    name = add(run / "checkpoints" / "checkpoint-6")
    assert go_on(run) == 0
    assert f"not read: {name}" in caplog.text
    assert records(run) == records(runs / "whole")
    assert layers(run).equals(layers(runs / "whole"))
    whole, ours = (load_file(folder / "model" / "model.safetensors") for folder in (runs / "whole", run))
    assert all(torch.equal(whole[name], ours[name]) for name in whole)


@pytest.mark.parametrize("name", ["checkpoint-99", "checkpoint-4"])
def test_a_checkpoint_under_another_steps_name_is_said_and_left_alone(run, runs, name, caplog):  # noqa: F811
    (run / "checkpoints" / "checkpoint-6").rename(run / "checkpoints" / name)
    assert go_on(run) == 0
    assert f"{name}: it was taken at step 6" in caplog.text
    assert records(run) == records(runs / "whole")
    assert (run / "checkpoints" / name / "model.safetensors").is_file()
