"""A run made when the norms on q, k and v had other names goes on as if nothing had been renamed."""

import re
import shutil

import torch
from safetensors.torch import load_file, save_file
from training.tiny_runs import result

from lamina.jobs.manifest import MANIFEST, seal
from lamina.training.settings import PretrainSettings

NEW = re.compile(r"\.([qkv])_norm\.")


def former(key):
    """The name that revision fed9630 gave."""
    return NEW.sub(r".\1_proj.norm.", key)


def rename(path):
    """Give a checkpoint the former names, and the optimiser the order that the parameters had."""
    for file in (path / "model.safetensors", path / "optimizer" / "states.safetensors"):
        tensors = load_file(file)
        assert any(NEW.search(key) for key in tensors)
        save_file({former(key): value for key, value in tensors.items()}, file, metadata={"format": "pt"})
    rest = torch.load(path / "optimizer.pt", weights_only=True)
    rest["state"] = {former(key): entries for key, entries in rest["state"].items()}
    for group in rest["groups"]:
        group["params"] = sorted(former(key) for key in group["params"])
    torch.save(rest, path / "optimizer.pt")
    (path / MANIFEST).unlink()
    seal(path)


def test_a_run_of_former_names_is_resumed_bit_for_bit(trained, tmp_path):
    trained("whole", placement="hybridnorm", steps=4, save_steps=2)
    shutil.copytree(tmp_path / "whole", tmp_path / "former")
    shutil.rmtree(tmp_path / "former" / "checkpoints" / "checkpoint-4")
    (tmp_path / "former" / "result.json").unlink()
    rename(tmp_path / "former" / "checkpoints" / "checkpoint-2")

    trained("former", resume=True, placement="hybridnorm", steps=4, save_steps=2)
    assert result(tmp_path / "former")["eval_loss"] == result(tmp_path / "whole")["eval_loss"]
    one, other = (
        load_file(tmp_path / name / "checkpoints" / "checkpoint-4" / "model.safetensors")
        for name in ("whole", "former")
    )
    assert one.keys() == other.keys()
    assert all(torch.equal(one[key], other[key]) for key in one)


def test_the_last_setting_stays_the_last():
    """A run's config.yaml without it counts as cut short: with another, no earlier run could be resumed or measured."""
    assert PretrainSettings.names()[-1] == "rollback_skip"
