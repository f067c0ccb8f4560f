"""Two processes train what one does: DDP and FSDP2 on gloo, their checkpoints, stops and verdicts."""

import json
import os
import socket
import subprocess
import sys
from pathlib import Path

import pandas as pd
import pytest
import torch
from training.tiny_runs import SMALL, layers, records, result, settings
from transformers import AutoModelForCausalLM

from lamina.training import pretrain as pretraining

STEPS = 20
OPTIONS = {
    **SMALL, "hidden_size": 20, "placement": "keel", "steps": STEPS, "batch_size": 4, "gradient_accumulation": 2,
    "logging_steps": 1, "eval_steps": 10, "save_steps": 10, "learning_rate": 1e-2, "eval_blocks": 5,
}  # fmt: skip


def free_port():
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        return found.getsockname()[1]


def torchrun(*argv, processes=2, timeout=240):
    """``torchrun ARGV`` to its end."""
    command = [sys.executable, "-m", "torch.distributed.run", "--nproc_per_node", str(processes)]
    command += ["--master_port", str(free_port()), *map(str, argv)]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": os.pathsep.join(sys.path)}
    return subprocess.run(command, env=environment, capture_output=True, text=True, timeout=timeout)


def train(folder, runs):
    """The runs in two processes; gives what each process said of each."""
    plan = folder / "plan.json"
    plan.write_text(json.dumps(runs))
    done = torchrun(Path(__file__).with_name("two_processes.py"), plan)
    assert done.returncode == 0, done.stderr[-4000:]
    return json.loads(plan.with_suffix(".said").read_text())


@pytest.fixture(scope="module")
def runs(corpus, session_cache, tmp_path_factory):
    """One process; both ways of two, one of them stopped on the way and gone on with; a way changed in the middle."""
    folder = tmp_path_factory.mktemp("runs")

    def given(name, **changed):
        return settings(corpus, folder / name, **{**OPTIONS, **changed})

    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("LAMINA_CACHE", str(session_cache))
        pretraining.pretrain(given("one"), bar=False)
        (folder / "one-then-two").mkdir()
        half = pretraining.LaminaTrainer.training_step

        def stop(self, *args, **kwargs):
            if self.state.global_step == 12:
                raise RuntimeError("pulled the plug")
            return half(self, *args, **kwargs)

        patch.setattr(pretraining.LaminaTrainer, "training_step", stop)
        with pytest.raises(RuntimeError, match="plug"):
            pretraining.pretrain(given("one-then-two"), bar=False)
        patch.setattr(pretraining.LaminaTrainer, "training_step", half)
        said = train(
            folder,
            [
                {"settings": given("ddp", parallel="ddp").to_dict()},
                {"settings": given("fsdp2", parallel="fsdp2").to_dict(), "terminate": 13},
                {"settings": given("two-then-one", parallel="fsdp2").to_dict(), "terminate": 13},
                {"settings": given("fsdp2", parallel="fsdp2").to_dict(), "resume": True},
                {"settings": given("one-then-two", parallel="fsdp2").to_dict(), "resume": True},
                {"settings": given("odd", batch_size=3).to_dict()},
                {"settings": given("spoiled", parallel="fsdp2").to_dict(), "spoil": 4},
            ],
        )
        pretraining.pretrain(given("two-then-one"), resume=True, bar=False)
        patch.setattr(pretraining.LaminaTrainer, "training_step", _spoiled(half, 4))
        pretraining.pretrain(given("spoiled-one"), bar=False)
    return folder, said


def _spoiled(original, step):
    def training_step(self, model, *args, **kwargs):
        if self.state.global_step + 1 == step:
            with torch.no_grad():
                # the rows that are the second process' shard
                model.get_parameter("model.backbone.layers.1.feed_forward.module.up_proj.weight")[-1].fill_(
                    float("nan")
                )
        return original(self, model, *args, **kwargs)

    return training_step


def curve(folder, name):
    return [r[name] for r in records(folder) if name in r]


@pytest.mark.parametrize("name", ["ddp", "fsdp2", "one-then-two", "two-then-one"])
def test_two_processes_take_the_steps_of_one(runs, name):
    """Also where they were stopped at step 13 (by a signal to one of them) or another number of them went on."""
    folder, _ = runs
    for metric in ("loss", "grad_norm", "eval_loss", "learning_rate"):
        ours, theirs = curve(folder / name, metric), curve(folder / "one", metric)
        assert len(ours) == len(theirs) == (2 if metric == "eval_loss" else STEPS)
        assert ours == pytest.approx(theirs, abs=1e-4)
    assert [r["tokens"] for r in records(folder / name)] == [r["tokens"] for r in records(folder / "one")]


@pytest.mark.parametrize("name", ["ddp", "fsdp2", "one-then-two", "two-then-one"])
def test_every_layers_records_are_those_of_one_process(runs, name):
    folder, _ = runs
    ours, theirs = layers(folder / name), layers(folder / "one")
    keys = ["step", "layer", "sublayer", "role", "index", "metric"]
    pd.testing.assert_frame_equal(ours[keys], theirs[keys])
    assert {"gradient_norm", "gain_mean", "hidden_variance"} <= set(ours.metric)
    # rounding of float32 sums in another order, over 20 steps
    assert torch.allclose(torch.tensor(ours.value), torch.tensor(theirs.value), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("name", ["ddp", "fsdp2"])
def test_the_model_of_two_processes_loads_as_any_other(runs, name):
    folder, _ = runs
    models = [AutoModelForCausalLM.from_pretrained(folder / run / "model") for run in (name, "one")]
    assert type(models[0]) is type(models[1])
    ids = torch.arange(12).reshape(1, 12)
    assert torch.allclose(*(model(ids).logits for model in models), atol=1e-4)
    files = [sorted(p.name for p in (folder / run / "model").iterdir()) for run in (name, "one")]
    assert files[0] == files[1]
    configs = [json.loads((folder / run / "model" / "config.json").read_text()) for run in (name, "one")]
    assert configs[0] == configs[1]


def test_the_processes_agree_on_how_each_run_ended(runs):
    folder, (first, second) = runs
    assert first[:5] == second[:5]
    assert first[1:3] == ["interrupted", "interrupted"]
    assert first[0] == first[3] == first[4] == result(folder / "one")["status"]


def test_a_sharded_runs_checkpoints_are_sharded_safetensors(runs):
    path = runs[0] / "fsdp2" / "checkpoints" / "checkpoint-20"
    assert len(list((path / "model").glob("*.safetensors"))) == 2
    assert len(list((path / "optimizer").glob("*.safetensors"))) == 2
    assert not list(path.rglob("*.distcp"))


def test_processes_that_do_not_divide_the_batch_are_refused(runs):
    folder, said = runs
    for line in (process[5] for process in said):
        assert "batch_size: 3" in line
        assert "2 processes" in line
        assert "multiple of 2" in line
    assert not (folder / "odd" / "config.yaml").exists()


def test_the_guards_verdict_under_sharding_is_that_of_one_process(runs):
    folder, said = runs
    assert [process[6] for process in said] == ["diverged", "diverged"]
    assert result(folder / "spoiled")["reason"] == result(folder / "spoiled-one")["reason"]
    assert "layers[1]" in result(folder / "spoiled")["reason"]
