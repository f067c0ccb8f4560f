"""What a checkpoint's manifest does not list is never read, and a checkpoint under another step's name never used."""

import shutil

import pytest
import torch
from safetensors.torch import load_file, save_file
from training.test_damage import go_on, run, runs  # noqa: F401 (fixtures)
from training.tiny_runs import assert_same_weights, layers, records


@pytest.mark.parametrize(
    ("source", "name"),
    [
        ("model.safetensors", "stray.safetensors"),
        ("model.safetensors", "model/model.safetensors"),
        ("optimizer/states.safetensors", "optimizer/another.safetensors"),
        ("rng_state.pth", "rng_state_1.pth"),
    ],
)
def test_a_file_that_the_manifest_does_not_list_is_not_read(run, runs, source, name, caplog):  # noqa: F811
    source, target = (run / "checkpoints" / "checkpoint-6" / path for path in (source, name))
    target.parent.mkdir(exist_ok=True)
    if source.suffix == ".safetensors":  # a copy with other numbers in it
        save_file({key: torch.full_like(value, 0.5) for key, value in load_file(source).items()}, target)
    else:
        shutil.copyfile(source, target)
    assert go_on(run) == 0
    assert f"not read: {name}" in caplog.text
    assert records(run) == records(runs / "whole")
    assert layers(run).equals(layers(runs / "whole"))
    assert_same_weights(runs / "whole", run)


@pytest.mark.parametrize("name", ["checkpoint-99", "checkpoint-4"])
def test_a_checkpoint_under_another_steps_name_is_said_and_left_alone(run, runs, name, caplog):  # noqa: F811
    (run / "checkpoints" / "checkpoint-6").rename(run / "checkpoints" / name)
    assert go_on(run) == 0
    assert f"{name}: it was taken at step 6" in caplog.text
    assert records(run) == records(runs / "whole")
    assert (run / "checkpoints" / name / "model.safetensors").is_file()
