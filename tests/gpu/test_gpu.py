"""What runs otherwise on a GPU: the models' numbers, precisions, compiled blocks, the forks of a study, NCCL."""

import json
import subprocess
import sys

import pandas as pd
import pytest
import torch
from modeling.tiny import built, token_ids
from training.tiny_runs import cut_back, records, result, settings

import lamina
from lamina.placements import registry
from lamina.placements.wirings import WIRINGS
from lamina.training import pretrain as pretraining
from lamina.training.execution import compiling, devices
from lamina.training.settings import PretrainSettings
from lamina.training.trainer import LaminaTrainer

FUSED = {"atol": 1e-5, "rtol": 2e-4}  # sums in another order


@pytest.fixture
def trained(corpus, tmp_path):
    """Run a tiny run on the GPU; gives its result."""
    return lambda name="run", resume=False, **changed: pretraining.pretrain(
        settings(corpus, tmp_path / name, **changed), resume=resume, bar=False
    )


def loss_and_gradients(model, ids):
    model.zero_grad()
    loss = model(input_ids=ids, labels=ids, use_cache=False).loss
    loss.backward()
    gradients = {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
    return loss.detach().cpu(), {name: gradient.cpu().clone() for name, gradient in gradients.items()}


def compare(theirs, gradients):
    scale = max(float(gradient.abs().max()) for gradient in gradients.values())
    for name, gradient in gradients.items():
        torch.testing.assert_close(theirs[name], gradient, atol=1e-4 * scale, rtol=1e-3, msg=f"{name}: {{}}".format)


OTHERS = [wiring for wiring in WIRINGS.names() if wiring != "residual"]
SCHEMES = [*registry.PLACEMENTS.names(), *(f"pre_ln(wiring={wiring})" for wiring in OTHERS)]


@pytest.mark.parametrize("placement", SCHEMES)
def test_a_models_loss_and_gradients_are_those_of_the_cpu(placement):
    model, ids = built(placement, 4), token_ids()
    loss, gradients = loss_and_gradients(model, ids)
    there, theirs = loss_and_gradients(model.cuda(), ids.cuda())
    torch.testing.assert_close(there, loss, **FUSED)
    compare(theirs, gradients)


@pytest.mark.parametrize("placement", ["pre_ln", "keel", "fusenorm", "pre_ln(wiring=mhc)"])
def test_compiled_blocks_give_what_eager_ones_do(placement):
    model, ids = built(placement, 4).cuda().train(), token_ids().cuda()
    compiling.prepare(model, compiled=False)
    loss, gradients = loss_and_gradients(model, ids)
    compiling.prepare(model, compiled=True)
    compiled, theirs = loss_and_gradients(model, ids)
    torch.testing.assert_close(compiled, loss, **FUSED)
    compare(theirs, gradients)


GRAPHED = ["pre_ln", "keel", "fusenorm", "peri_ln", "post_ln", "pre_ln(wiring=mhc)", "pre_ln(wiring=denseformer)"]


@pytest.mark.parametrize("placement", GRAPHED)
def test_graphs_of_blocks_give_the_eager_numbers_to_the_bit(placement):
    model, batches = built(placement, 4).cuda().train(), [token_ids(seed=seed).cuda() for seed in range(3)]
    eager = [loss_and_gradients(model, ids) for ids in batches]
    compiling.prepare(model, compiled=False, replayed=True)
    for ids, (loss, gradients) in zip(batches, eager, strict=True):
        replayed, theirs = loss_and_gradients(model, ids)
        assert torch.equal(replayed, loss)
        assert all(torch.equal(theirs[name], gradient) for name, gradient in gradients.items())


@pytest.mark.slow
@pytest.mark.parametrize("precision", ["fp32", "bf16", "fp16"])
def test_a_run_of_graphs_ends_with_the_eager_runs_bytes(trained, tmp_path, precision):
    for name in ("eager", "graphs"):
        trained(name, steps=8, precision=precision, compile="off", cuda_graphs=name == "graphs")
    weights = [(tmp_path / name / "model" / "model.safetensors").read_bytes() for name in ("eager", "graphs")]
    assert weights[0] == weights[1]


@pytest.mark.parametrize(("steps", "compile"), [(299, "off"), (300, "on")])
def test_precision_and_compilation_are_decided_by_the_rule(steps, compile):
    decided = devices.decided(PretrainSettings(steps=steps))
    assert (decided.precision, decided.compile) == ("bf16", compile)


@pytest.mark.parametrize("compile", ["off", "on"])
def test_a_step_that_is_not_recorded_does_not_wait_for_the_gpu(trained, monkeypatch, compile):
    step = LaminaTrainer.training_step

    def strict(self, *args):
        torch.cuda.set_sync_debug_mode("error" if 3 <= self.state.global_step + 1 <= 6 else "default")
        return step(self, *args)

    monkeypatch.setattr(LaminaTrainer, "training_step", strict)
    try:
        trained(steps=8, logging_steps=8, eval_steps=8, precision="bf16", compile=compile, gradient_accumulation=2)
    finally:
        torch.cuda.set_sync_debug_mode("default")


def test_fp16_trains_with_its_scaler(trained, tmp_path):
    assert trained(steps=8, logging_steps=1, precision="fp16")["status"] in ("finished", "short", "stuck")
    assert all(row["loss_scale"] >= 1 for row in records(tmp_path / "run") if "loss" in row)


@pytest.mark.slow
@pytest.mark.parametrize("precision", ["fp32", "bf16", "fp16"])
def test_a_killed_run_resumes_to_the_same_bytes(trained, tmp_path, precision):
    for name in ("whole", "cut"):
        trained(name, steps=8, save_steps=4, precision=precision)
    cut_back(tmp_path / "cut", 4)
    trained("cut", resume=True, steps=8, save_steps=4, precision=precision)
    weights = [(tmp_path / name / "model" / "model.safetensors").read_bytes() for name in ("whole", "cut")]
    assert weights[0] == weights[1]


@pytest.mark.slow
def test_a_studys_trials_are_forked_and_train_on_the_gpu(corpus, tmp_path):
    sizes = {"num_layers": 2, "hidden_size": 16, "sequence_length": 16, "batch_size": 2, "steps": 4, "eval_blocks": 4}
    lamina.compare(
        placements="pre_ln,keel", corpus=str(corpus), output=str(tmp_path / "both"), workers=2, bar=False, **sizes
    )
    rows = pd.read_csv(tmp_path / "both" / "results.csv")
    assert not set(rows["status"]) & {"failed"}


def test_a_watched_loop_records_what_the_cpu_does(tmp_path):
    def norms(device):
        torch.manual_seed(0)
        model = built("peri_ln", 2).to(device).train()
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
        with lamina.watch(model, optimizer, output=str(tmp_path / device), every=1) as monitor:
            for step in range(3):
                ids = token_ids(seed=step).to(device)
                loss = model(input_ids=ids, labels=ids, use_cache=False).loss
                loss.backward()
                optimizer.step()
                optimizer.zero_grad()
                monitor.step(loss)
        return pd.concat(map(pd.read_parquet, sorted((tmp_path / device / "layers").glob("*.parquet"))))

    cpu, gpu = norms("cpu"), norms("cuda")
    both = cpu.merge(gpu, on=["step", "layer", "sublayer", "role", "index", "metric"], suffixes=("", "_there"))
    both = both[both["metric"] == "gradient_norm"]
    assert len(both) > 10
    torch.testing.assert_close(torch.tensor(both["value_there"].values), torch.tensor(both["value"].values),
                               rtol=1e-3, atol=1e-6)  # fmt: skip


@pytest.mark.slow
def test_fsdp2_trains_through_nccl_as_one_process_does(corpus, tmp_path, trained):
    sizes = {"num_layers": 2, "hidden_size": 16, "num_heads": 2, "steps": 4, "sequence_length": 16, "batch_size": 2}
    sizes |= {"eval_blocks": 4, "precision": "fp32", "parallel": "fsdp2"}
    flags = [word for name, value in sizes.items() for word in (f"--{name.replace('_', '-')}", str(value))]
    command = [sys.executable, "-m", "torch.distributed.run", "--nproc_per_node", "1", "--no-python", sys.executable]
    command += ["-m", "lamina", "pretrain", "--corpus", str(corpus), "--output", str(tmp_path / "sharded"), *flags]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=240)
    assert ended.returncode == 0, ended.stderr[-2000:]
    one = trained("one", precision="fp32")
    assert json.loads((tmp_path / "sharded" / "result.json").read_text())["status"] == one["status"]
    assert abs(result(tmp_path / "sharded")["eval_loss"] - one["eval_loss"]) < 1e-4
