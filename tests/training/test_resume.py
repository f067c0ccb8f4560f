"""A run that was cut short goes on as if it had not been; branches of one, and runs from a model."""

import contextlib
import json
import os
import signal
import subprocess
import sys

import pytest
import torch
from lab.posttraining.tiny import write_model
from safetensors.torch import load_file
from training.tiny_runs import (
    SMALL,
    alive,
    assert_same_records,
    assert_same_run,
    assert_same_weights,
    at_step,
    cut_at,
    cut_back,
    flags,
    last_step,
    layers,
    pull_the_plug,
    records,
    result,
    settings,
    start,
    wait_for,
)
from transformers import LlamaConfig, LlamaForCausalLM

from lamina.cli import main
from lamina.data.tokenizers import load_tokenizer
from lamina.errors import UserError
from lamina.training import pretrain as pretraining
from lamina.training import source
from lamina.training.trainer import LaminaTrainer

LONG = {"steps": 12, "logging_steps": 2, "save_steps": 2, "eval_steps": 4}


@pytest.fixture(scope="module")
def whole(corpus, tmp_path_factory):
    """The folder of a run that nothing interrupts, by what it has other than ``LONG``; each is trained once."""
    folders = {}

    def trained(**changed):
        name = str(changed)
        if name not in folders:
            folders[name] = tmp_path_factory.mktemp("whole") / "run"
            pretraining.pretrain(settings(corpus, folders[name], **LONG, **changed), bar=False)
        return folders[name]

    return trained


def interrupt(trainer, model):
    os.kill(os.getpid(), signal.SIGINT)


def assert_no_duplicates(folder):
    logged = [(r["step"], "loss" in r) for r in records(folder)]
    assert len(logged) == len(set(logged))
    assert not layers(folder).duplicated(["step", "layer", "sublayer", "role", "index", "metric"]).any()


@pytest.mark.parametrize(
    ("act", "step", "changed"),
    [
        *((interrupt, step, {}) for step in (6, 7, 8)),
        (interrupt, 6, {"save_steps": 0}),
        (interrupt, 6, {"gradient_accumulation": 2, "placement": "keel"}),
        (pull_the_plug, 8, {}),
        (pull_the_plug, 6, {"save_steps": 0}),
    ],
)
def test_a_run_that_was_cut_resumes_bit_for_bit(trained, whole, tmp_path, act, step, changed):
    """From the checkpoint of its interruption, or from its last one; without one it begins again."""
    run, options = tmp_path / "run", {**LONG, **changed}
    with at_step(step, act), contextlib.suppress(RuntimeError):
        trained(**options)
    interrupted = act is interrupt
    assert result(run)["status"] == ("interrupted" if interrupted else "failed")
    assert (f"at step {step}" if interrupted else "pulled the plug") in result(run)["reason"]
    assert (run / "checkpoints" / f"checkpoint-{step}").is_dir() == interrupted
    trained(resume=True, **options)
    different = {name: value for name, value in changed.items() if name != "save_steps"}
    assert_same_run(run, whole(**different))
    assert_no_duplicates(run)
    if step % 2 == 0:  # else the interruption is between two records
        assert_same_records(run, whole(**different))


def test_an_interruption_in_the_last_evaluation_loses_nothing(trained, tmp_path, whole, monkeypatch):
    options = {**LONG, "save_steps": 0}
    original = LaminaTrainer.evaluate

    def evaluate(self, *args, **kwargs):
        if self.state.global_step == 12:
            monkeypatch.setattr(LaminaTrainer, "evaluate", original)
            interrupt(self, self.model)
        return original(self, *args, **kwargs)

    monkeypatch.setattr(LaminaTrainer, "evaluate", evaluate)
    found = trained(**options)
    assert found["status"] != "interrupted" or list((tmp_path / "run" / "checkpoints").glob("checkpoint-12"))
    trained(resume=True, **options)
    assert_same_run(tmp_path / "run", whole())


def test_the_speed_of_a_resumed_run_counts_only_what_it_timed(trained, tmp_path):
    options = {**LONG, "steps": 40, "eval_steps": 40, "save_steps": 38}
    with at_step(39, interrupt):
        trained(**options)
    speed = trained(resume=True, **options)["tokens_per_second"]
    lines = (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()
    assert speed <= 2 * max(json.loads(line).get("tokens_per_second", 0) for line in lines)


def test_the_speed_does_not_depend_on_whether_evaluations_and_records_align(trained, tmp_path):
    trained(steps=40, logging_steps=40, eval_steps=3)
    lines = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    fastest = max(line["tokens_per_second"] for line in lines if "loss" in line and line["step"] == 1)
    assert result(tmp_path / "run")["tokens_per_second"] < 4 * fastest


def test_resuming_a_finished_run_changes_nothing(trained, tmp_path):
    trained()
    before = {p: p.stat().st_mtime_ns for p in (tmp_path / "run").rglob("*") if p.name != "report.html"}
    trained(resume=True)
    assert {p: p.stat().st_mtime_ns for p in before} == before


def test_resuming_nothing_is_refused_and_auto_begins(trained, tmp_path):
    with pytest.raises(UserError, match=r"run' holds nothing to resume\..*--resume=auto"):
        trained(resume=True)
    assert not (tmp_path / "run").exists()
    assert trained(resume="auto")["steps"] == 4
    before = (tmp_path / "run" / "result.json").stat().st_mtime_ns
    trained(resume="auto")
    assert (tmp_path / "run" / "result.json").stat().st_mtime_ns == before


def test_a_changed_setting_is_refused_by_name(trained, tmp_path, corpus, refused):
    trained()
    for name, value in {"steps": 5, "placement": "keel", "corpus": "embedded"}.items():
        given = {**SMALL, "corpus": corpus, name: value}
        line = refused("pretrain", *flags(**given, output=tmp_path / "run", resume=True))
        assert line.startswith(f"lamina: {name}:")


def test_a_pause_between_evaluations_changes_no_random_number(trained, tmp_path):
    """The pause brings an evaluation of its own, whose data loader draws a seed."""
    trained("whole", **LONG, drop_path=0.5)
    assert trained("paused", **LONG, drop_path=0.5, pause_step=6)["status"] == "interrupted"
    pretraining.pretrain({"output": str(tmp_path / "paused")}, resume=True, bar=False)
    assert_same_run(tmp_path / "whole", tmp_path / "paused")


WSD = {"schedule": "wsd", "warmup": 2, "decay": 0.25, "steps": 16, "init": "small_scaled"}


def without_branches(folder):
    return [record for record in records(folder) if "branch_steps" not in record]


def test_a_branch_is_the_shorter_run_and_the_trunk_does_not_notice(trained, tmp_path):
    more = {"gradient_accumulation": 2, "max_grad_norm": 0.1, "placement": "fusenorm"}
    trunk = trained("trunk", branches="0.25,8,12", logging_steps=1, eval_steps=5, **WSD, **more)
    assert [row["branch_steps"] for row in trunk["branches"]] == [4, 8, 12]
    for row in trunk["branches"]:
        shorter = trained(f"short-{row['branch_steps']}", **{**WSD, "steps": row["branch_steps"]}, **more)
        assert row["branch_loss"] == shorter["eval_loss"]
        assert row["tokens"] == shorter["tokens"]
        assert row["branch_bigram_entropy"] == shorter["bigram_entropy"]
    plain = trained("plain", logging_steps=1, eval_steps=5, **WSD, **more)
    assert plain["eval_loss"] == trunk["eval_loss"]
    assert "branches" not in plain
    assert without_branches(tmp_path / "plain") == without_branches(tmp_path / "trunk")
    assert_same_weights(tmp_path / "plain", tmp_path / "trunk")


def test_a_resumed_trunk_keeps_its_branches(trained, tmp_path):
    chosen = {"branches": "4,12", "save_steps": 6, **WSD}
    whole = trained("whole", **chosen)
    with cut_at(8):
        trained("cut", **chosen)
    cut = trained("cut", resume=True, **chosen)
    assert cut["branches"] == whole["branches"]
    assert without_branches(tmp_path / "cut") == without_branches(tmp_path / "whole")


def test_a_branch_of_a_model_with_experts_is_refused(trained):
    with pytest.raises(UserError, match="branches: '8' does not work with experts"):
        trained(backbone="deepseek-nano", branches="8", **WSD)


NEW = {"steps": 3, "sequence_length": 16, "batch_size": 2, "eval_blocks": 4, "threads": 1}


@pytest.fixture(scope="module")
def first(corpus, tmp_path_factory):
    folder = tmp_path_factory.mktemp("source") / "first"
    pretraining.pretrain(settings(corpus, folder, learning_rate=1e-2, placement="mix_ln(alpha=0.5)"), bar=False)
    return folder


def going_on(corpus, source, output, **changed):
    return main(["pretrain", "--from", str(source), *flags(**{**NEW, **changed}, corpus=corpus, output=output)])


def test_it_starts_with_the_checkpoints_weights_and_keeps_its_plan(first, corpus, tmp_path, before_step):
    seen = {}
    before_step(1, lambda _, model: seen.update({n: p.detach().clone() for n, p in model.named_parameters()}))
    assert going_on(corpus, first, tmp_path / "second", steps=2, learning_rate=1e-3) == 0
    saved = load_file(first / "model" / "model.safetensors")
    assert saved.keys() == seen.keys()
    for name, tensor in saved.items():
        assert torch.equal(tensor, seen[name]), name
    plans = [json.loads((folder / "plan.json").read_text()) for folder in (first, tmp_path / "second")]
    assert plans[0] == plans[1]
    result = json.loads((tmp_path / "second" / "result.json").read_text())
    assert (result["init"], result["from"]) == ("checkpoint", str(first))
    steps = [r["step"] for r in records(tmp_path / "second") if "loss" in r]
    assert steps[-1] == 2  # a schedule of its own
    moved = load_file(tmp_path / "second" / "model" / "model.safetensors")
    assert any(not torch.equal(moved[name], saved[name]) for name in saved)


def test_a_folder_that_is_written_anew_is_read_anew(tmp_path):
    for placement in ("pre_ln", "keel"):
        write_model(tmp_path / "model", placement)
        assert source.stored_plan(str(tmp_path / "model")).placement == placement


def test_a_source_on_the_hub_is_not_asked_for_again_and_again(tmp_path, corpus, capsys, monkeypatch):
    monkeypatch.setattr("lamina.core.hub_access.hub_resolves", lambda: False)
    monkeypatch.setattr("time.sleep", lambda seconds: pytest.fail("the hub's client waits to ask again"))
    assert going_on(corpus, "no-such-model", tmp_path / "run") == 2
    assert capsys.readouterr().err.count("\n") == 1


def test_a_transformers_checkpoint_is_taken_as_convert_does(corpus, tmp_path, before_step):
    torch.manual_seed(5)
    sizes = {"intermediate_size": 24, "num_attention_heads": 2, "num_key_value_heads": 2, "num_hidden_layers": 2}
    theirs = LlamaForCausalLM(LlamaConfig(vocab_size=257, hidden_size=16, **sizes)).eval()
    theirs.save_pretrained(tmp_path / "llama")
    load_tokenizer("bytes").save_pretrained(tmp_path / "llama")
    ids = torch.arange(12)[None]
    logits = {}
    before_step(1, lambda _, model: logits.update(ours=model(input_ids=ids).logits.detach()))
    assert going_on(corpus, tmp_path / "llama", tmp_path / "run") == 0
    torch.testing.assert_close(logits["ours"], theirs(ids).logits, atol=1e-5, rtol=1e-5)
    config = (tmp_path / "run" / "config.yaml").read_text()
    assert "placement: pre_ln" in config
    assert "hidden_size: 16" in config


DECIDED = {"placement": "pre_ln", "num_layers": 3, "hidden_size": 32, "num_heads": 4}  # "pre_ln": also the default
DECIDED |= {"backbone": "llama-1.5b", "init": "small", "tokenizer": "bpe:300"}


@pytest.mark.parametrize("name", DECIDED)
def test_what_the_checkpoint_decides_is_refused_if_given_and_different(first, corpus, tmp_path, refused, name):
    given = {**NEW, name: DECIDED[name]}
    line = refused("pretrain", "--from", first, *flags(**given, corpus=corpus, output=tmp_path / "second"))
    assert line.startswith(f"lamina: {name}: {DECIDED[name]!r}")
    assert "the checkpoint" in line


def test_the_same_given_again_is_fine_and_so_is_a_mix(first, corpus, tmp_path):
    other = tmp_path / "other.txt"
    other.write_text("few words, other ones\n" * 200)
    same = {"placement": "mix_ln(alpha=0.5)", "num_layers": 2, "hidden_size": 16, "tokenizer": "bytes"}
    assert going_on(f"{corpus}:1,{other}:3", first, tmp_path / "second", **same, batch_size=4) == 0
    result = json.loads((tmp_path / "second" / "result.json").read_text())
    assert result["mix"][str(other)]["share"] == 0.75


def test_it_can_be_resumed(first, corpus, tmp_path):
    given = {"steps": 4, "save_steps": 2, "logging_steps": 1}
    assert going_on(corpus, first, tmp_path / "whole", **given) == 0
    assert going_on(corpus, first, tmp_path / "cut", **given) == 0
    cut_back(tmp_path / "cut", 2)
    assert main(["pretrain", "--output", str(tmp_path / "cut"), "--resume"]) == 0
    assert records(tmp_path / "cut") == records(tmp_path / "whole")


@pytest.mark.parametrize("output", [".", "model", ".."])
def test_the_folder_that_holds_the_source_is_no_output(first, corpus, refused, output):
    given = flags(**NEW, corpus=corpus, output=first / output)
    assert "holds the model that this job reads" in refused("pretrain", "--from", first, *given, "--overwrite")
    assert (first / "model" / "model.safetensors").is_file()


LASTING = {**SMALL, "steps": 240, "logging_steps": 10, "save_steps": 40, "eval_steps": 80}


@pytest.fixture
def argv(corpus, tmp_path):
    return ["pretrain", *flags(**LASTING, corpus=corpus, output=tmp_path / "run")]


def test_ctrl_c_saves_and_says_how_to_go_on(corpus, tmp_path, capsys):
    folder = tmp_path / "run"
    with at_step(3, interrupt):
        assert main(["pretrain", *flags(**SMALL, corpus=corpus, output=folder)]) == 130
    said = "\n".join(capsys.readouterr())
    assert result(folder)["status"] == "interrupted"
    assert "SIGINT" in result(folder)["reason"]
    assert sum("interrupted" in line for line in said.splitlines()) == 1
    assert "--resume" in said
    assert (folder / "checkpoints" / f"checkpoint-{result(folder)['steps']}").is_dir()
    assert main(["pretrain", "--output", str(folder), "--resume"]) == 0


@pytest.mark.slow
def test_a_second_ctrl_c_ends_at_once(argv, tmp_path):
    process = start(*argv)
    wait_for(lambda: last_step(tmp_path / "run") >= 10)
    process.send_signal(signal.SIGINT)
    process.send_signal(signal.SIGINT)
    _, err = process.communicate(timeout=30)
    assert process.returncode == 130
    assert "Traceback" not in err
    assert result(tmp_path / "run")["status"] == "interrupted"


@pytest.mark.skipif(sys.platform == "win32", reason="a POSIX shell")
def test_a_run_goes_on_when_the_shell_that_started_it_is_gone(argv, tmp_path):
    """`nohup lamina pretrain &`, then the terminal is closed."""
    folder = tmp_path / "run"
    script = '"$@" >/dev/null 2>&1 & echo $!; read wait_for_a_line'
    shell = subprocess.Popen(
        ["sh", "-c", script, "sh", sys.executable, "-m", "lamina", *argv],
        stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, start_new_session=True,
    )  # fmt: skip
    run = int(shell.stdout.readline())
    wait_for(lambda: last_step(folder) >= 10)
    shell.communicate("\n", timeout=10)
    wait_for(lambda: not alive(run))
    assert result(folder)["status"] in ("finished", "short", "stuck"), result(folder)["reason"]
    assert result(folder)["steps"] == LASTING["steps"]
