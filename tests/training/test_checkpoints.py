"""Checkpoints are whole or not there; what a kill, a full disk, a flipped bit or --overwrite leaves.

So are those that are written while training goes on.
"""

import errno
import json
import os
import re
import shutil
import signal
from pathlib import Path
from unittest import mock

import pytest
import torch
from safetensors.torch import load_file, save_file
from training.tiny_runs import (
    SMALL,
    assert_same_records,
    assert_same_weights,
    cut_at,
    flags,
    in_a_child,
    layers,
    records,
    result,
    settings,
    wait_for,
)
from transformers import AutoTokenizer

from lamina.cli import main
from lamina.errors import UserError
from lamina.jobs.folder import REPLACES, hold, lock
from lamina.jobs.manifest import refuse_damaged
from lamina.training import pretrain as pretraining
from lamina.training.checkpointing import checkpoints
from lamina.training.checkpointing import state as saving
from lamina.training.checkpointing.checkpoints import Background, Checkpoints, what_is_broken
from lamina.training.pretrain import Pretraining
from lamina.training.trainer import LaminaTrainer

LONG = {"steps": 12, "logging_steps": 2, "save_steps": 2, "eval_steps": 4, "ema_decay": 0.9}
ASYNC = {**LONG, "async_checkpoints": True}


@pytest.fixture(scope="module")
def whole(corpus, tmp_path_factory):
    """The folder of a run that nothing disturbed, and that waits for its checkpoints."""
    folder = tmp_path_factory.mktemp("whole") / "run"
    pretraining.pretrain(settings(corpus, folder, **LONG), bar=False)
    return folder


def test_a_checkpoint_holds_the_tokenizer_and_a_run_from_one_without_it_is_refused(whole, corpus, tmp_path):
    folder = shutil.copytree(whole / "checkpoints" / "checkpoint-12", tmp_path / "checkpoint-12")
    load = AutoTokenizer.from_pretrained
    assert load(folder).get_vocab() == load(whole / "model").get_vocab()
    for file in [folder / "manifest.json", *folder.glob("tokenizer*")]:  # as an earlier version wrote it
        file.unlink()
    config = json.loads((folder / "config.json").read_text())
    config["backbone_config"]["vocab_size"] = config["vocab_size"] = 512
    (folder / "config.json").write_text(json.dumps(config))
    given = {"from_model": str(folder), "corpus": str(corpus), "steps": 1, "output": str(tmp_path / "run")}
    with pytest.raises(UserError, match=r"from: .*checkpoint-12' holds no tokenizer.* 512 tokens"):
        pretraining.pretrain(given, bar=False)


@pytest.fixture
def copied(whole, tmp_path):
    return shutil.copytree(whole / "checkpoints", tmp_path / "checkpoints")


FILES = (
    "config.json", "model.safetensors", "optimizer/states.safetensors", "optimizer.pt", "scheduler.pt",
    "average.safetensors", "rng_state.pth", "trainer_state.json", "run_state.json", "manifest.json",
)  # fmt: skip


def cut(path):
    path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])


def gone(path):
    path.unlink()


def flip(path):
    """One bit in the middle: the size stays."""
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(bytes(content))


def named(folder):
    return sorted(path.name for path in (folder / "checkpoints").iterdir())


def once(number):
    """For ``before_step``: a signal, at the first run that gets there."""
    left = [number]
    return lambda trainer, model: os.kill(os.getpid(), left.pop()) if left else None


@pytest.mark.parametrize("harm", [cut, flip, gone])
@pytest.mark.parametrize("name", FILES)
def test_a_harmed_file_is_named_and_the_checkpoint_before_is_used(copied, caplog, name, harm):
    assert Checkpoints(copied).newest().name == "checkpoint-12"
    harm(copied / "checkpoint-12" / name)
    assert Checkpoints(copied).newest().name == "checkpoint-10"
    assert name in caplog.text
    assert "checkpoint-12" in caplog.text


def test_only_the_newest_are_kept_and_the_manifest_lists_every_file(whole):
    assert named(whole) == ["checkpoint-10", "checkpoint-12"]
    newest = whole / "checkpoints" / "checkpoint-12"
    listed = json.loads((newest / "manifest.json").read_text())["files"]
    there = {str(path.relative_to(newest)) for path in newest.rglob("*") if path.is_file()}
    assert set(listed) == there - {"manifest.json"}


def test_the_old_ones_go_only_when_the_new_one_is_whole(trained, tmp_path, monkeypatch):
    seen = []
    publish = checkpoints._publish

    def look(path, final, listed):
        seen.append(sorted(p.name for p in final.parent.glob("checkpoint-*")))
        publish(path, final, listed)
        assert what_is_broken(final) is None

    monkeypatch.setattr(checkpoints, "_publish", look)
    trained(**{**LONG, "steps": 6}, keep=1)
    assert seen == [[], ["checkpoint-2"], ["checkpoint-4"]]


@pytest.mark.parametrize(
    ("module", "name", "options"),
    [(torch, "save", LONG), (checkpoints, "sync_and_hash", ASYNC)],
    ids=["pickles", "sync while training"],
)
def test_a_disk_that_fills_during_a_save_leaves_the_last_good_checkpoint(
    trained, whole, tmp_path, monkeypatch, module, name, options
):
    original = getattr(module, name)

    def full(*args, **kwargs):
        if (tmp_path / "run" / "checkpoints" / "checkpoint-4").is_dir():  # so this is the third save
            raise OSError(errno.ENOSPC, "No space left on device", str(tmp_path))
        return original(*args, **kwargs)

    with monkeypatch.context() as patch:
        patch.setattr(module, name, full)
        with pytest.raises(OSError, match="No space left"):
            trained(**options)
    assert named(tmp_path / "run") == ["checkpoint-2", "checkpoint-4"]
    assert Checkpoints(tmp_path / "run" / "checkpoints").newest().name == "checkpoint-4"
    trained(resume=True, **options)
    assert_same_records(tmp_path / "run", whole)


def test_a_kill_while_a_checkpoint_is_written_leaves_a_draft_that_is_cleared(trained, whole, tmp_path, monkeypatch):
    write = saving.write

    def die(trainer, processes, folder, state, *rest, **options):
        tensor_files = write(trainer, processes, folder, state, *rest, **options)
        return tensor_files if state["step"] < 6 else (lambda: (tensor_files(), os.kill(os.getpid(), signal.SIGKILL)))

    with monkeypatch.context() as patch:
        patch.setattr(saving, "write", die)
        in_a_child(lambda: trained(**LONG))
    assert named(tmp_path / "run") == [".draft-6", "checkpoint-2", "checkpoint-4"]
    trained(resume=True, **LONG)
    assert named(tmp_path / "run") == named(whole)
    assert_same_records(tmp_path / "run", whole)


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGUSR1])
def test_a_warning_of_the_cluster_saves_between_two_records_and_changes_no_record(
    trained, whole, tmp_path, before_step, number
):
    """At step 7, where records are of two steps: the loss of the one before the checkpoint is kept in it."""
    before_step(7, once(number))
    found = trained(**LONG)
    assert found["status"] == "interrupted"
    assert signal.Signals(number).name in found["reason"]
    assert found["steps"] == 7
    trained(resume=True, **LONG)
    assert records(tmp_path / "run") == records(whole)
    assert last_state(tmp_path / "run") == last_state(whole)  # what the guard and the alarms saw, among others


def last_state(folder):
    """The run state of the last checkpoint, without what differs by the folder."""
    state = json.loads((folder / "checkpoints" / "checkpoint-12" / "run_state.json").read_text())
    return {name: value for name, value in state.items() if name not in ("settings", "records", "layer_parts")}


@pytest.fixture
def held(monkeypatch, before_each_pass):
    """Holds each checkpoint until training is two steps on; gives the steps held for good, and those that were let go
    then.
    """
    chosen, overtaken, begun = set(), [], [0]
    begin = Background.begin

    def begin_late(self, act):
        saved = begun[0]

        def later():
            wait_for(lambda: saved not in chosen and (begun[0] > saved + 1 or saved >= LONG["steps"]))
            overtaken.append(saved)
            act()

        begin(self, later)

    before_each_pass(lambda trainer, model, inputs: begun.__setitem__(0, trainer.state.global_step + 1))
    monkeypatch.setattr(Background, "begin", begin_late)
    return chosen, overtaken


def test_the_files_of_a_run_that_does_not_wait_are_the_same(trained, whole, tmp_path, held):
    trained(**ASYNC)
    assert held[1] == [2, 4, 6, 8, 10, 12]
    assert named(tmp_path / "run") == named(whole) == ["checkpoint-10", "checkpoint-12"]
    for name in named(whole):
        one, other = (folder / "checkpoints" / name for folder in (whole, tmp_path / "run"))
        assert what_is_broken(other) is None
        files = [sorted(p.relative_to(path) for p in path.rglob("*") if p.is_file()) for path in (one, other)]
        assert files[0] == files[1]
        for file in (file for file in files[0] if file.name not in ("run_state.json", "manifest.json")):
            assert (one / file).read_bytes() == (other / file).read_bytes(), file
    assert last_state(whole) == last_state(tmp_path / "run")
    assert records(tmp_path / "run") == records(whole)
    assert_same_weights(tmp_path / "run", whole)


def test_a_kill_while_one_waits_leaves_the_one_before(trained, whole, tmp_path, held, before_step):
    held[0].add(6)

    def killed():
        before_step(8, die)
        trained(**ASYNC)

    in_a_child(killed)
    assert named(tmp_path / "run") == [".draft-6", "checkpoint-2", "checkpoint-4"]
    held[0].clear()
    trained(resume=True, **ASYNC)
    assert named(tmp_path / "run") == named(whole)
    assert_same_records(tmp_path / "run", whole)


def test_a_run_that_is_stopped_ends_with_a_whole_one(trained, whole, tmp_path, before_step):
    before_step(7, once(signal.SIGTERM))
    assert trained(**ASYNC)["status"] == "interrupted"
    assert named(tmp_path / "run") == ["checkpoint-6", "checkpoint-7"]
    trained(resume=True, **LONG)  # whether training waits decides nothing
    assert_same_records(tmp_path / "run", whole)
    assert_same_weights(tmp_path / "run", whole)


def test_a_device_that_is_not_there_is_refused(tmp_path, capsys):
    if torch.cuda.is_available():
        pytest.skip("there is one")
    assert main(["pretrain", "--device", "cuda", "--output", str(tmp_path / "run")]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert line == "lamina: device: this machine has no 'cuda' (allowed here: auto, cpu)"


@pytest.mark.parametrize(
    ("source", "name"),
    [
        ("model.safetensors", "stray.safetensors"),
        ("model.safetensors", "model/model.safetensors"),
        ("rng_state.pth", "rng_state_1.pth"),
    ],
)
def test_a_file_that_the_manifest_does_not_list_is_not_read(run, runs, source, name, caplog):
    source, target = (run / "checkpoints" / "checkpoint-6" / path for path in (source, name))
    target.parent.mkdir(exist_ok=True)
    if source.suffix == ".safetensors":  # a copy with other numbers in it
        save_file({key: torch.full_like(value, 0.5) for key, value in load_file(source).items()}, target)
    else:
        shutil.copyfile(source, target)
    assert go_on(run) == 0
    assert f"ignores these files: {name}" in caplog.text
    assert_same_records(run, runs / "whole")
    assert_same_weights(runs / "whole", run)


@pytest.mark.parametrize("name", ["checkpoint-99", "checkpoint-4"])
def test_a_checkpoint_under_another_steps_name_is_said_and_left_alone(run, runs, name, caplog):
    (run / "checkpoints" / "checkpoint-6").rename(run / "checkpoints" / name)
    assert go_on(run) == 0
    assert f"{name}: Lamina saved this checkpoint at step 6" in caplog.text
    assert records(run) == records(runs / "whole")
    assert (run / "checkpoints" / name / "model.safetensors").is_file()


OPTIONS = {"steps": 10, "logging_steps": 1, "save_steps": 3, "eval_steps": 3, "learning_rate": 2e-3, "keep": 2}


@pytest.fixture(scope="module")
def runs(corpus, tmp_path_factory):
    """A whole run, and the same one stopped at step 8; tests copy it."""
    folder = tmp_path_factory.mktemp("runs")
    pretraining.pretrain(settings(corpus, folder / "whole", **OPTIONS), bar=False)
    with cut_at(8):
        pretraining.pretrain(settings(corpus, folder / "stopped", **OPTIONS), bar=False)
    return folder


@pytest.fixture
def run(runs, tmp_path):
    return shutil.copytree(runs / "stopped", tmp_path / "run")


def spoil(path):
    """A byte in the middle that no UTF-8 text has."""
    content = bytearray(path.read_bytes())
    content[len(content) // 2] = 0xFF
    path.write_bytes(bytes(content))


def empty(path):
    path.write_bytes(b"")


def digit(path):
    """Put another digit in the place of the last one."""
    content = bytearray(path.read_bytes())
    at = max(i for i, byte in enumerate(content) if chr(byte).isdecimal())
    content[at] = ord("0") + (content[at] - ord("0") + 1) % 10
    path.write_bytes(bytes(content))


def go_on(run):
    return main(["pretrain", "--output", str(run), "--resume"])


def refused(run, capsys):
    """The one line of a refusal, which changes no checkpoint and no record."""

    def there():
        return {p: p.stat().st_mtime_ns for p in run.rglob("*") if p.is_file() and "config.yaml" not in p.name}

    kept = {p: t for p, t in there().items() if "checkpoints" in p.parts or p.name.startswith(("metrics", "part-"))}
    capsys.readouterr()
    assert go_on(run) == 2
    assert kept.items() <= there().items()
    err = capsys.readouterr().err
    assert "Traceback" not in err
    (line,) = [line for line in err.splitlines() if line.startswith("lamina:")]
    return line


def test_with_no_whole_checkpoint_left_the_run_is_not_begun_again(run, capsys, caplog):
    spoil(run / "checkpoints" / "checkpoint-3" / "optimizer.pt")
    cut(run / "checkpoints" / "checkpoint-6" / "model.safetensors")
    line = refused(run, capsys)
    assert "checkpoint-3, checkpoint-6" in line
    assert "--overwrite" in line
    assert "optimizer.pt" in caplog.text
    assert "model.safetensors" in caplog.text


def test_checkpoints_that_may_not_be_read_are_not_taken_for_none(run, capsys, monkeypatch):
    """Root may read everything, so the system's refusal is made up here."""
    original = Path.iterdir

    def iterdir(path):
        if path.name == "checkpoints":
            raise PermissionError(errno.EACCES, os.strerror(errno.EACCES), str(path))
        return original(path)

    with monkeypatch.context() as patch:
        patch.setattr(Path, "iterdir", iterdir)
        assert "Permission denied" in refused(run, capsys)


def test_a_manifest_that_cannot_be_read_says_why(run, runs, caplog):
    path = run / "checkpoints" / "checkpoint-6" / "manifest.json"
    path.unlink()
    path.mkdir()
    assert go_on(run) == 0
    assert "checkpoint-6: manifest.json: Is a directory. Lamina resumes from the previous checkpoint" in caplog.text
    assert records(run) == records(runs / "whole")


def edited(edit):
    """A harm that puts another text in the place of a file's."""
    return lambda path: path.write_text(edit(path.read_text()))


@pytest.mark.parametrize("harm", [cut, gone, edited(lambda text: text.replace("\nlearning_rate: 0.002\n", "\n"))])
def test_settings_that_are_lost_are_those_of_the_checkpoint(run, runs, harm):
    harm(run / "config.yaml")
    assert go_on(run) == 0
    assert records(run) == records(runs / "whole")
    texts = [(folder / "config.yaml").read_text() for folder in (runs / "whole", run)]
    whole, ours = [re.sub("(?m)^(output|digest):.*", "", text) for text in texts]
    assert whole == ours


@pytest.mark.parametrize("harm", [cut, spoil, empty])
def test_settings_that_are_not_whole_without_a_checkpoint_are_one_line(run, capsys, harm):
    shutil.rmtree(run / "checkpoints")
    harm(run / "config.yaml")
    assert "config.yaml" in refused(run, capsys)


def test_edited_settings_are_refused_by_name(run, capsys):
    path = run / "config.yaml"
    path.write_text(path.read_text().replace("\nsteps: 10\n", "\nsteps: 90\n"))
    line = refused(run, capsys)
    assert line.startswith("lamina: steps: 90")
    assert "checkpoint-6 was trained with 10" in line


def test_a_setting_that_was_written_into_a_runs_file_is_named_with_the_file(run, capsys):
    path = run / "config.yaml"
    path.write_text("paralmel: ddp\n" + re.sub("(?m)^digest:.*", "", path.read_text()))  # an older run's has none
    assert "run': unknown setting 'paralmel'; did you mean 'parallel'" in refused(run, capsys)


@pytest.mark.parametrize("harm", [spoil, gone])
def test_what_the_checkpoint_knows_too_is_written_again(run, runs, harm):
    for name in ("data.json", "plan.json", "result.json", "environment.json"):
        harm(run / name)
    assert go_on(run) == 0
    assert records(run) == records(runs / "whole")
    assert result(run)["eval_loss"] == result(runs / "whole")["eval_loss"]
    for name in ("data.json", "plan.json"):
        assert (run / name).read_bytes() == (runs / "whole" / name).read_bytes()


@pytest.mark.parametrize("harm", [cut, gone, Path.exists])
def test_a_changed_text_is_refused_even_if_the_note_of_the_old_one_is_damaged(corpus, tmp_path, capsys, harm):
    text = tmp_path / "text.txt"
    text.write_text(corpus.read_text())
    with cut_at(4):
        pretraining.pretrain(settings(text, tmp_path / "run", **OPTIONS), bar=False)
    harm(tmp_path / "run" / "data.json")
    text.write_text(corpus.read_text() + "one line more\n")
    line = refused(tmp_path / "run", capsys)
    assert line.startswith("lamina: corpus:")
    assert "since the run" in line


@pytest.mark.parametrize("harm", [cut, empty, gone])
def test_records_that_were_lost_are_said_and_the_rest_goes_on(run, runs, harm, caplog):
    harm(run / "metrics.jsonl")
    assert go_on(run) == 0
    whole, ours = records(runs / "whole"), records(run)
    assert all(record in whole for record in ours)
    assert [r for r in ours if r["step"] > 6] == [r for r in whole if r["step"] > 6]
    assert len(ours) < len(whole)
    assert "to 6 are missing" in caplog.text


@pytest.mark.parametrize(
    ("harm", "fault"),
    [
        (spoil, r"line \d+ of metrics\.jsonl is not a record"),
        (edited(lambda text: f"17\n{text}"), r"line 1 of metrics\.jsonl is not a record"),
        (edited(lambda text: text * 2), r"line \d+ of metrics\.jsonl goes back from step 7 to step 1"),
    ],
)
def test_records_that_are_damaged_within_are_named(run, capsys, harm, fault):
    harm(run / "metrics.jsonl")
    assert re.search(fault, refused(run, capsys))
    assert main(["report", str(run)]) == 0
    assert re.search(fault, (run / "report.html").read_text())


def test_the_best_evaluation_is_known_without_its_record(run, monkeypatch):
    (run / "metrics.jsonl").unlink()
    path = run / "checkpoints" / "checkpoint-6" / "run_state.json"
    step, last, best = json.loads(path.read_text())["evaluations"]
    assert (step, last) == (6, best)
    seen = []

    original = Pretraining.verdict

    def verdict(stage, run):
        seen.append((run.recorder.evaluation.step, run.recorder.best_eval))
        return original(stage, run)

    monkeypatch.setattr(Pretraining, "verdict", verdict)
    monkeypatch.setattr(LaminaTrainer, "evaluate", lambda self, **ignored: {})
    go_on(run)
    assert seen == [(6, best)]


def test_a_damaged_part_of_the_layers_is_named(run, runs, capsys, caplog):
    part = run / "layers" / "part-00000.parquet"
    cut(part)
    assert "part-00000.parquet" in refused(run, capsys)
    assert main(["report", str(run)]) == 0
    assert "part-00000.parquet is not readable" in (run / "report.html").read_text()
    part.unlink()
    assert go_on(run) == 0
    assert "1 files are missing" in caplog.text
    whole, ours = layers(runs / "whole"), layers(run)
    assert len(ours) < len(whole)
    assert len(ours.merge(whole)) == len(ours)


def test_a_part_of_the_layers_that_the_checkpoint_does_not_know_is_recorded_again(run, runs):
    shutil.copyfile(run / "layers" / "part-00000.parquet", run / "layers" / "part-00077.parquet")
    assert go_on(run) == 0
    assert layers(run).equals(layers(runs / "whole"))


@pytest.mark.parametrize("harm", [cut, gone])
def test_a_result_that_is_lost_is_made_again(runs, tmp_path, harm):
    ended = shutil.copytree(runs / "whole", tmp_path / "ended")
    harm(ended / "result.json")
    assert go_on(ended) == 0
    timing = ("seconds", "tokens_per_second")
    whole, ours = ({k: v for k, v in result(f).items() if k not in timing} for f in (runs / "whole", ended))
    assert ours == whole
    assert_same_records(ended, runs / "whole")
    assert_same_weights(ended, runs / "whole")


@pytest.mark.parametrize(
    ("name", "harm"),
    [("model.safetensors", digit), ("model.safetensors", gone), ("config.json", cut), ("manifest.json", gone)],
)
def test_a_damaged_model_is_refused_and_written_again(runs, tmp_path, name, harm, capsys):
    ended = shutil.copytree(runs / "whole", tmp_path / "ended")
    harm(ended / "model" / name)
    for argv in (["generate", ended], ["probe", ended, "--output", tmp_path / "probed"]):
        assert main([str(word) for word in argv]) == 2
        (line,) = capsys.readouterr().err.splitlines()
        assert name in line
    assert go_on(ended) == 0
    refuse_damaged(ended / "model")
    weights, ours = ((folder / "model" / "model.safetensors").read_bytes() for folder in (runs / "whole", ended))
    assert ours == weights


ROLLED_BACK = {**OPTIONS, "rollback": 1}


@pytest.mark.parametrize("harm", [cut, gone])
def test_damaged_rollbacks_are_refused(trained, tmp_path, before_each_pass, capsys, harm):
    def spoil(trainer, model, inputs):
        step = trainer.state.global_step + 1
        if trainer.order.data_step(step) == 5:
            trainer.guard.see_loss(step, float("nan"))

    before_each_pass(spoil)
    with cut_at(8):
        trained(**ROLLED_BACK)
    path = tmp_path / "run" / "rollbacks.json"
    whole = path.read_bytes()
    harm(path)
    assert "rollbacks.json" in refused(tmp_path / "run", capsys)
    path.write_bytes(whole)
    assert go_on(tmp_path / "run") == 0


def test_a_kill_while_the_first_file_is_written_leaves_a_folder_to_begin_in(corpus, tmp_path):
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / ".environment.json.1234").write_text('{"versions": {')
    assert main(["pretrain", *flags(**SMALL, corpus=corpus, output=tmp_path / "run")]) == 0


@pytest.fixture
def old(runs, tmp_path):
    return shutil.copytree(runs / "whole", tmp_path / "run")


@pytest.fixture
def aside(old):
    return old.with_name("run.old")


def there(folder):
    return {
        p.relative_to(folder): p.read_bytes()
        for p in folder.rglob("*")
        if p.is_file() and p.name not in (".lock", "report.html")
    }


def overwrite(corpus, old, **changed):
    return main(["pretrain", *flags(**{**SMALL, **changed}, corpus=corpus, output=old), "--overwrite"])


def die(*args, **kwargs):
    os.kill(os.getpid(), signal.SIGKILL)


@pytest.mark.parametrize(
    "error", [RuntimeError("no"), KeyboardInterrupt(), OSError(errno.ENOSPC, "No space left on device")]
)
def test_a_run_that_fails_before_its_first_checkpoint_leaves_the_old_one(
    old, aside, corpus, monkeypatch, error, caplog
):
    before = there(old)
    for _ in range(2):  # a second try keeps the same old content
        with monkeypatch.context() as patch:
            patch.setattr(pretraining, "initial_model", mock.Mock(side_effect=error))
            if isinstance(error, RuntimeError):
                with pytest.raises(RuntimeError):
                    pretraining.pretrain(settings(corpus, old), overwrite=True, bar=False)
            else:
                assert overwrite(corpus, old) in (2, 130)
        assert there(aside) == before
        assert f"so Lamina keeps the replaced files in {aside}" in caplog.text
    assert overwrite(corpus, old) == 0
    assert not aside.exists()


def test_a_killed_run_leaves_the_old_one_until_a_resumed_one_has_a_result(old, aside, corpus, monkeypatch):
    before = there(old)
    with monkeypatch.context() as patch:
        patch.setattr(pretraining, "initial_model", die)
        in_a_child(lambda: overwrite(corpus, old))
    assert there(aside) == before
    assert main(["pretrain", "--output", str(old), "--resume"]) == 0
    assert not aside.exists()
    assert not (old / REPLACES).exists()


def test_the_old_run_goes_with_the_first_checkpoint(old, aside, corpus, monkeypatch):
    seen = []
    drop = checkpoints.drop_old

    def look(folder):
        seen.append([aside.exists(), *(p.name for p in folder.glob("checkpoints/*"))])
        drop(folder)

    monkeypatch.setattr(checkpoints, "drop_old", look)
    assert overwrite(corpus, old, save_steps=2, placement="keel") == 0
    assert seen[:2] == [[True, "checkpoint-2"], [False, "checkpoint-2", "checkpoint-4"]]
    assert not aside.exists()
    assert "placement: keel" in (old / "config.yaml").read_text()


def test_a_kill_after_the_first_checkpoint_leaves_the_new_run(old, aside, corpus, monkeypatch):
    with monkeypatch.context() as patch:
        patch.setattr(checkpoints, "drop_old", die)
        in_a_child(lambda: overwrite(corpus, old, save_steps=2, placement="keel"))
    assert aside.exists()
    assert overwrite(corpus, old) == 0  # the run with a checkpoint is now what is replaced
    assert not aside.exists()


def test_somebodys_folder_in_the_way_is_left_alone(old, aside):
    aside.mkdir()
    (aside / "thesis.tex").write_text("years of work")
    with (
        pytest.raises(UserError, match=r"first renames the folder to '.*run\.old', but this name already exists"),
        hold(old, overwrite=True),
    ):
        pass
    assert (aside / "thesis.tex").exists()
    assert (old / "result.json").exists()


def test_the_current_folder_is_not_renamed(old, aside, monkeypatch):
    monkeypatch.chdir(old / "model")
    with pytest.raises(UserError, match="contains the current folder"), hold(old, overwrite=True):
        pass
    assert not aside.exists()


def test_a_process_that_waited_holds_the_new_folder(old, aside):
    with hold(old, overwrite=True):
        with pytest.raises(UserError, match="another process"), lock(old):
            pass
        for name in ("config.yaml", "environment.json"):
            shutil.copy(aside / name, old)
    with hold(old, resume="auto"):
        assert not (aside / ".lock").exists()
