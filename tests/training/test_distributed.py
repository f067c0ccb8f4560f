"""Two processes train what one does: DDP and FSDP2 on gloo, their checkpoints, stops and verdicts."""

import errno
import json
import os
import subprocess
import sys
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path

import pandas as pd
import pytest
import torch
from spread import spread
from training.tiny_runs import (
    SMALL,
    at_step,
    cut_at,
    flags,
    free_port,
    last_step,
    layers,
    records,
    result,
    settings,
    start,
    torchrun,
    wait_for,
)  # fmt: skip
from transformers import AutoModelForCausalLM

from lamina.cli import main
from lamina.errors import UserError
from lamina.jobs.files import disk_full
from lamina.modeling import processes
from lamina.modeling.processes import _sendable, launched, lost_another, parallel_of
from lamina.training import pretrain as pretraining
from lamina.training.checkpointing.checkpoints import what_is_broken
from lamina.training.resolve import SHARDED_OPTIMIZERS, check_sharded
from lamina.training.settings import PretrainSettings

STEPS = 8
OPTIONS = {
    **SMALL, "hidden_size": 20, "placement": "keel(qk_norm=head)", "steps": STEPS, "batch_size": 4,
    "gradient_accumulation": 2,
    "logging_steps": 1, "eval_steps": 4, "save_steps": 4, "learning_rate": 1e-2, "eval_blocks": 5, "keep": 3,
}  # fmt: skip
WAYS = ("ddp", "fsdp2", "one-then-two", "tensor")
MORE = ("two-then-one", "tensor-then-one", "streamed-ddp", "streamed-two-then-one", "padded-ddp")
TENSOR = {"parallel": "fsdp2", "tensor_parallel": 2}
REFUSED = [
    ({"parallel": "ddp"}, "tensor_parallel: 2 does not work with 2 processes and ddp. Give a divisor"),
    ({"tensor_parallel": 3}, "tensor_parallel: 3 does not work with 2 processes and fsdp2. Give a divisor"),
    ({"num_heads": 1}, "tensor_parallel: 2 does not divide the 1 key-value heads"),
    (
        {"backbone": "deepseek-nano", "placement": "keel", **dict.fromkeys(("num_layers", "hidden_size", "num_heads"))},
        "tensor_parallel: 2 does not work with deepseek_v3. Set tensor_parallel to 1, or choose",
    ),
]
ASYNC = ("ddp", "fsdp2")
STREAMED = {"streaming": True, "shuffle_buffer": 6}


def train(folder, runs):
    """The runs in two processes; gives what each process said of each."""
    plan = folder / "plan.json"
    plan.write_text(json.dumps(runs))
    done = torchrun(Path(__file__).with_name("two_processes.py"), plan)
    assert done.returncode == 0, done.stderr[-4000:]
    return json.loads(plan.with_suffix(".said").read_text())


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp("runs")


@pytest.fixture(scope="module")
def given(corpus, folder):
    """The settings of a run with this name."""
    return lambda name, **changed: settings(corpus, folder / name, **{**OPTIONS, **changed})


@pytest.fixture(scope="module")
def runs(folder, given):
    """One process; two, stopped on the way and gone on with; another number of them in the middle. What each said."""
    for name in ("one", "one-then-two"):
        with cut_at(6) if name == "one-then-two" else nullcontext():
            pretraining.pretrain(given(name), bar=False)
    with at_step(4, spoil):
        pretraining.pretrain(given("spoiled-one"), bar=False)
    plan = [
        {"settings": given("ddp", parallel="ddp").to_dict()},
        {"settings": given("fsdp2", parallel="fsdp2").to_dict(), "terminate": 6},
        {"settings": given("tensor", **TENSOR).to_dict(), "terminate": 6},
        {"settings": given("fsdp2", parallel="fsdp2").to_dict(), "resume": True},
        {"settings": given("one-then-two", parallel="fsdp2").to_dict(), "resume": True},
        {"settings": given("tensor", **TENSOR).to_dict(), "resume": True},
        {"settings": given("odd", batch_size=3).to_dict()},
        {"settings": given("spoiled", parallel="fsdp2").to_dict(), "spoil": 4},
        *({"settings": given("refused", **{**TENSOR, **changed}).to_dict()} for changed, _ in REFUSED),
    ]
    return train(folder, plan)


@pytest.fixture(scope="module")
def more(folder, given, corpus):
    """Streams, padded rows, checkpoints that training does not wait for, and fewer processes in the middle."""
    rows = folder / "rows.jsonl"
    rows.write_text("".join(json.dumps({"text": x[: 5 + 7 * n % 50]}) + "\n" for n, x in enumerate(corpus.open())))
    padded = {"corpus": str(rows), "packing": "off"}
    plan = [
        {"settings": given("two-then-one", parallel="fsdp2").to_dict(), "terminate": 6},
        {"settings": given("streamed-ddp", **STREAMED).to_dict()},
        {"settings": given("streamed-two-then-one", parallel="fsdp2", **STREAMED).to_dict(), "terminate": 6},
        {"settings": {**given("padded-ddp").to_dict(), **padded}},
        {"settings": given("tensor-then-one", **TENSOR).to_dict(), "terminate": 6},
        *({"settings": given(f"{way}-async", parallel=way, async_checkpoints=True).to_dict()} for way in ASYNC),
    ]
    train(folder, plan)
    pretraining.pretrain(replace(given("padded-one"), **padded), bar=False)
    pretraining.pretrain(given("streamed-one", **STREAMED), bar=False)
    pretraining.pretrain(given("streamed-two-then-one", **STREAMED), resume=True, bar=False)
    pretraining.pretrain(given("two-then-one"), resume=True, bar=False)
    pretraining.pretrain(given("tensor-then-one"), resume=True, bar=False)


def spoil(trainer, model):
    """Spoil the rows that are the second process' shard."""
    with torch.no_grad():
        model.get_parameter("model.backbone.layers.1.feed_forward.module.up_proj.weight")[-1].fill_(float("nan"))


def curve(folder, name):
    return [r[name] for r in records(folder) if name in r]


@pytest.mark.parametrize("name", spread([*WAYS, *MORE], WAYS))
def test_two_processes_take_the_steps_of_one(runs, folder, name, request):
    """Also where they were stopped at step 6 (by a signal to one of them) or another number of them went on."""
    text = name.partition("-")[0]
    if name in MORE:
        request.getfixturevalue("more")
    one = f"{text}-one" if text in ("streamed", "padded") else "one"
    for metric in ("loss", "grad_norm", "eval_loss", "learning_rate"):
        ours, theirs = curve(folder / name, metric), curve(folder / one, metric)
        assert len(ours) == len(theirs) == (2 if metric == "eval_loss" else STEPS)
        assert ours == pytest.approx(theirs, abs=1e-4)
    assert [r["tokens"] for r in records(folder / name)] == [r["tokens"] for r in records(folder / one)]


@pytest.mark.slow
def test_a_stream_has_other_blocks(runs, more, folder):
    assert curve(folder / "streamed-one", "loss") != pytest.approx(curve(folder / "one", "loss"), abs=1e-3)


@pytest.mark.parametrize("name", WAYS)
def test_every_layers_records_are_those_of_one_process(runs, folder, name):
    ours, theirs = layers(folder / name), layers(folder / "one")
    keys = ["step", "layer", "sublayer", "role", "index", "metric"]
    pd.testing.assert_frame_equal(ours[keys], theirs[keys])
    assert {"gradient_norm", "gain_mean", "hidden_variance"} <= set(ours.metric)
    # rounding of float32 sums in another order, over the steps
    assert torch.allclose(torch.tensor(ours.value), torch.tensor(theirs.value), rtol=1e-4, atol=1e-5)


def test_what_cannot_share_matrices_is_refused(runs, folder):
    for process in runs:
        for line, (_, says) in zip(process[-len(REFUSED) :], REFUSED, strict=True):
            assert says in line
    assert not (folder / "refused").exists()


@pytest.mark.parametrize("name", ["ddp", "fsdp2", "tensor"])
def test_the_model_of_two_processes_loads_as_any_other(runs, folder, name):
    models = [AutoModelForCausalLM.from_pretrained(folder / run / "model") for run in (name, "one")]
    assert type(models[0]) is type(models[1])
    ids = torch.arange(12).reshape(1, 12)
    assert torch.allclose(*(model(ids).logits for model in models), atol=1e-4)
    files = [sorted(p.name for p in (folder / run / "model").iterdir()) for run in (name, "one")]
    assert files[0] == files[1]
    configs = [json.loads((folder / run / "model" / "config.json").read_text()) for run in (name, "one")]
    assert configs[0] == configs[1]


def test_the_processes_agree_on_how_each_run_ended(runs, folder):
    first, second = runs
    assert first[:6] == second[:6]
    assert first[1:3] == ["interrupted", "interrupted"]
    assert {first[0], *first[3:6]} == {result(folder / "one")["status"]}


def test_a_sharded_runs_checkpoints_are_sharded_safetensors(runs, folder):
    path = folder / "fsdp2" / "checkpoints" / f"checkpoint-{STEPS}"
    assert len(list((path / "model").glob("*.safetensors"))) == 2
    assert len(list((path / "optimizer").glob("*.safetensors"))) == 2
    assert not list(path.rglob("*.distcp"))


def content(path):
    """A safetensors file's header, whose metadata have a random order, and the bytes of its tensors."""
    whole = path.read_bytes()
    end = 8 + int.from_bytes(whole[:8], "little")
    return json.loads(whole[8:end]), whole[end:]


@pytest.mark.slow
@pytest.mark.parametrize("way", ASYNC)
def test_checkpoints_that_training_does_not_wait_for_are_the_same(runs, more, folder, way):
    assert curve(folder / f"{way}-async", "loss") == curve(folder / way, "loss")
    for name in ("checkpoint-4", f"checkpoint-{STEPS}"):
        one, other = (folder / run / "checkpoints" / name for run in (way, f"{way}-async"))
        assert what_is_broken(other) is None
        files = [sorted(p.relative_to(path) for p in path.rglob("*.safetensors")) for path in (one, other)]
        assert files[0] == files[1] != []
        assert all(content(one / file) == content(other / file) for file in files[0])


def test_processes_that_do_not_divide_the_batch_are_refused(runs, folder):
    for line in (process[6] for process in runs):
        assert "batch_size: 3" in line
        assert "2 processes" in line
        assert "multiple of 2" in line
    assert not (folder / "odd" / "config.yaml").exists()


def test_the_guards_verdict_under_sharding_is_that_of_one_process(runs, folder):
    assert [process[7] for process in runs] == ["diverged", "diverged"]
    assert result(folder / "spoiled")["reason"] == result(folder / "spoiled-one")["reason"]
    assert "the loss is nan at step 4" in result(folder / "spoiled")["reason"]


def test_the_launchers_numbers_are_checked(monkeypatch):
    monkeypatch.setenv("WORLD_SIZE", "2")
    monkeypatch.setenv("RANK", "2")
    with pytest.raises(UserError, match="RANK: 2 does not fit WORLD_SIZE = 2"):
        launched()


@pytest.mark.parametrize(
    ("environment", "parallel", "found"),
    [
        ({}, "auto", "ddp"),
        ({}, "fsdp2", "fsdp2"),
        ({"ACCELERATE_USE_FSDP": "true", "FSDP_VERSION": "2"}, "auto", "fsdp2"),
        ({"ACCELERATE_USE_FSDP": "true", "FSDP_VERSION": "1"}, "auto", "fsdp_version: '1'"),
        ({"ACCELERATE_USE_FSDP": "true", "FSDP_VERSION": "2"}, "ddp", "parallel: 'ddp'"),
        ({"ACCELERATE_USE_DEEPSPEED": "true"}, "auto", "DEEPSPEED"),
    ],
)
def test_accelerates_configuration_decides_how_the_work_is_shared(monkeypatch, environment, parallel, found):
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    if found in ("ddp", "fsdp2"):
        assert parallel_of(parallel) == found
        assert "ACCELERATE_USE_FSDP" not in os.environ  # or Trainer would shard once more
    else:
        with pytest.raises(UserError, match=found):
            parallel_of(parallel)


def test_an_optimiser_that_needs_whole_matrices_is_refused_on_shared_out_ones():
    for name in SHARDED_OPTIMIZERS:
        check_sharded(PretrainSettings(parallel="fsdp2", trainer={"optim": name}))
    with pytest.raises(UserError, match=r"trainer.optim: 'adafactor' .*adamw_torch_fused"):
        check_sharded(PretrainSettings(parallel="fsdp2", trainer={"optim": "adafactor"}))


@pytest.mark.slow
@pytest.mark.parametrize("victim", [0, 1])
def test_one_that_is_killed_ends_the_others_with_one_line(corpus, tmp_path, monkeypatch, victim):
    """And the run goes on from its last checkpoint; the processes here have no launcher that would tidy up."""
    options = {**SMALL, "steps": 400, "logging_steps": 1, "save_steps": 20, "parallel": "ddp", "device": "cpu"}
    launch = {"WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}
    argv = ["pretrain", *flags(**options, corpus=corpus, output=tmp_path / "run")]
    crew = []
    for rank in range(2):
        for name, value in {**launch, "RANK": str(rank), "LOCAL_RANK": str(rank)}.items():
            monkeypatch.setenv(name, value)
        crew.append(start(*argv))
    for name in (*launch, "RANK", "LOCAL_RANK"):
        monkeypatch.delenv(name)
    wait_for(lambda: last_step(tmp_path / "run") >= 30, 120)
    crew[victim].kill()
    _, err = crew[1 - victim].communicate(timeout=60)
    crew[victim].communicate(timeout=60)
    assert crew[1 - victim].returncode == 2, err
    assert "Traceback" not in err
    lines = [line for line in err.splitlines() if "lamina:" in line]
    assert [line[line.index("lamina:") :] for line in lines] == [
        "lamina: another process of the run has ended. Finished work is kept"
    ]
    if victim:
        assert result(tmp_path / "run")["status"] == "failed"
    assert main(["pretrain", "--output", str(tmp_path / "run"), "--resume"]) == 0
    assert [r["step"] for r in records(tmp_path / "run") if "loss" in r] == list(range(1, 401))


def test_an_error_of_ones_own_is_not_the_end_of_another():
    """What gloo says when the other end of a connection is gone, and what only looks like trouble."""
    pair = "gloo/gloo/transport/tcp/pair.cc:537"
    gone = RuntimeError(f"[/pytorch/third_party/{pair}] Read error: Connection reset by peer")
    wrapped = ValueError("a save failed")
    wrapped.__cause__ = gone
    assert lost_another(gone)
    assert lost_another(wrapped)
    assert not lost_another(RuntimeError("mat1 and mat2 shapes cannot be multiplied"))


def test_a_full_disk_behind_a_librarys_error_is_one_to_the_other_processes_too():
    """torch.save turns it into a RuntimeError of its own."""
    failed = RuntimeError("[enforce fail at inline_container.cc:672] . unexpected pos 8384 vs 8278")
    failed.__context__ = OSError(errno.ENOSPC, "No space left on device")
    assert disk_full(_sendable(failed))
    assert isinstance(_sendable(failed), OSError)
    assert isinstance(_sendable(RuntimeError("shapes differ")), RuntimeError)


FEW = {**SMALL, "steps": 4, "save_steps": 2}
DOCS = Path(__file__).resolve().parents[2] / "docs"


def scripts(folder):
    """An environment in which ``lamina`` is this checkout's."""
    folder.mkdir(exist_ok=True)
    (folder / "lamina").write_text(f'#!/bin/sh\nexec "{sys.executable}" -m lamina.cli "$@"\n')
    (folder / "lamina").chmod(0o755)
    path = os.pathsep.join([str(folder), str(Path(sys.executable).parent), os.environ["PATH"]])
    return {**os.environ, "PATH": path, "OMP_NUM_THREADS": "1", "PYTHONPATH": os.pathsep.join(sys.path)}


@pytest.mark.slow
@pytest.mark.parametrize(("name", "sharded"), [("single", False), ("ddp", False), ("fsdp2", True)])
def test_accelerate_launch_runs_with_the_configurations_of_the_docs(corpus, tmp_path, name, sharded):
    command = ["accelerate", "launch", "--config_file", DOCS / "accelerate" / f"{name}.yaml"]
    command += ["--main_process_port", str(free_port()), "--no_python", "lamina", "pretrain"]
    command += flags(**FEW, corpus=corpus, output=tmp_path / "run", device="cpu")
    done = subprocess.run(command, env=scripts(tmp_path / "bin"), capture_output=True, text=True, timeout=240)
    assert done.returncode == 0, done.stderr[-3000:]
    assert done.stdout.count("the model:") == 1
    path = tmp_path / "run" / "checkpoints" / "checkpoint-4"
    assert len(list(path.glob("rng_state*.pth"))) == (1 if name == "single" else 2)
    assert (path / "model").is_dir() == sharded


@pytest.mark.slow
def test_the_slurm_job_of_the_docs_runs_its_processes_and_queues_itself_again(corpus, tmp_path):
    """With stand-ins for Slurm's commands: two tasks on this machine, told to stop as Slurm tells them."""
    environment = scripts(tmp_path / "bin")
    (tmp_path / "bin" / "srun").write_text(
        '#!/bin/bash\npids=()\nfor i in 0 1; do SLURM_PROCID=$i SLURM_LOCALID=$i "$@" & pids+=($!); done\n'
        f"if [ ! -e {tmp_path}/told ]; then\n  touch {tmp_path}/told\n"
        f"  while ! grep -q '\"step\": 5,' {tmp_path}/run/metrics.jsonl 2>/dev/null; do sleep 0.1; done\n"
        '  kill -USR1 "${pids[@]}"\nfi\ncode=0\nfor p in "${pids[@]}"; do wait $p || code=$?; done\nexit $code\n'
    )
    (tmp_path / "bin" / "scontrol").write_text(
        f'#!/bin/sh\n[ "$1" = show ] && echo 127.0.0.1\n[ "$1" = requeue ] && echo "$2" >> {tmp_path}/queue\nexit 0\n'
    )
    for name in ("srun", "scontrol"):
        (tmp_path / "bin" / name).chmod(0o755)
    environment |= {"SLURM_JOB_ID": str(free_port()), "SLURM_NTASKS": "2", "SLURM_NTASKS_PER_NODE": "2"}
    environment |= {"SLURM_JOB_NODELIST": "here"}
    options = {**FEW, "steps": 400, "save_steps": 100, "logging_steps": 1, "eval_steps": 400}
    given = flags(**options, corpus=corpus, output=tmp_path / "run", device="cpu", parallel="fsdp2")
    command = ["bash", str(DOCS / "slurm.sh"), *given]
    first = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=240)
    assert first.returncode == 130, first.stderr[-3000:]
    assert (tmp_path / "queue").read_text().strip() == environment["SLURM_JOB_ID"]
    assert "SIGUSR1" in result(tmp_path / "run")["reason"]
    second = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=240)
    assert second.returncode == 0, second.stderr[-3000:]
    assert [r["step"] for r in records(tmp_path / "run") if "loss" in r] == list(range(1, 401))


def test_a_finished_process_waits_for_the_threads_of_gloo_before_it_ends(monkeypatch):
    """Or one of them aborts it now and then, and torchrun calls a finished run failed."""
    registered = []
    monkeypatch.setattr(processes.atexit, "register", registered.append)
    monkeypatch.setattr(processes.distributed, "is_initialized", lambda: True)
    monkeypatch.setenv("RANK", "0")
    monkeypatch.setenv("WORLD_SIZE", "2")
    with processes.join_processes("cpu", "ddp"):
        assert registered == [processes._settle]


@pytest.mark.slow
@pytest.mark.parametrize("ways", [("fsdp2", "fsdp2"), ("fsdp2", "ddp", "fsdp2")], ids="-".join)
def test_a_program_may_train_more_than_once_in_its_processes(corpus, tmp_path, ways):
    """Each run's curve is the first one's: DTensor's caches keep the group of the first sharded run."""
    given = ({**OPTIONS, "steps": 4, "parallel": way} for way in ways)
    plan = [settings(corpus, tmp_path / f"{at}-{one['parallel']}", **one).to_dict() for at, one in enumerate(given)]
    script = tmp_path / "program.py"
    script.write_text(
        "import json, lamina\n"
        f"for given in json.loads({json.dumps(plan)!r}):\n"
        "    print(lamina.pretrain(**given, bar=False))\n"
    )
    done = torchrun(script, timeout=200)
    assert done.returncode == 0, done.stderr[-3000:]
    curves = [[r["loss"] for r in records(folder) if "loss" in r] for folder in (Path(p["output"]) for p in plan)]
    assert all(curve == pytest.approx(curves[0], abs=1e-4) for curve in curves)
