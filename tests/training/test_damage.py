"""Files of a stopped run that were damaged: the run goes on as it was, or one line says why not and nothing is lost."""

import errno
import json
import os
import shutil
from pathlib import Path

import pytest
from training.tiny_runs import SMALL, flags, layers, records, result, settings

from lamina.cli import main
from lamina.training import outcome, pretrain
from lamina.training import pretrain as pretraining
from lamina.training.trainer import LaminaTrainer

OPTIONS = {"steps": 10, "logging_steps": 1, "save_steps": 3, "eval_steps": 3, "learning_rate": 2e-3, "keep": 2}


def stopped_at(step):
    original = LaminaTrainer.training_step

    def training_step(self, *args, **kwargs):
        if self.state.global_step + 1 == step:
            raise RuntimeError("pulled the plug")
        return original(self, *args, **kwargs)

    return training_step


@pytest.fixture(scope="module")
def runs(corpus, session_cache, tmp_path_factory):
    """A whole run, and the same one stopped at step 8; tests copy it."""
    folder = tmp_path_factory.mktemp("runs")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("LAMINA_CACHE", str(session_cache))
        pretraining.pretrain(settings(corpus, folder / "whole", **OPTIONS), bar=False)
        patch.setattr(LaminaTrainer, "training_step", stopped_at(8))
        with pytest.raises(RuntimeError, match="plug"):
            pretraining.pretrain(settings(corpus, folder / "stopped", **OPTIONS), bar=False)
    return folder


@pytest.fixture
def run(runs, tmp_path):
    return shutil.copytree(runs / "stopped", tmp_path / "run")


def cut(path):
    path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])


def spoil(path):
    """A byte in the middle that no UTF-8 text has."""
    content = bytearray(path.read_bytes())
    content[len(content) // 2] = 0xFF
    path.write_bytes(bytes(content))


def empty(path):
    path.write_bytes(b"")


def gone(path):
    path.unlink()


HARMS = pytest.mark.parametrize("harm", [cut, spoil, empty, gone])


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
    assert "checkpoint-6: manifest.json: Is a directory; resuming from the one before" in caplog.text
    assert records(run) == records(runs / "whole")


@HARMS
def test_settings_that_are_not_whole_are_those_of_the_checkpoint(run, runs, harm, caplog):
    harm(run / "config.yaml")
    assert go_on(run) == 0
    assert records(run) == records(runs / "whole")
    assert caplog.text.count("config.yaml") == 1
    assert "taken from checkpoint-6" in caplog.text
    whole, ours = [(folder / "config.yaml").read_text() for folder in (runs / "whole", run)]
    assert [x for x in whole.splitlines() if "output" not in x] == [x for x in ours.splitlines() if "output" not in x]


@pytest.mark.parametrize("harm", [cut, spoil, empty])
def test_settings_that_are_not_whole_without_a_checkpoint_are_one_line(run, capsys, harm):
    shutil.rmtree(run / "checkpoints")
    harm(run / "config.yaml")
    assert "config.yaml" in refused(run, capsys)


def test_a_setting_whose_line_is_lost_is_the_checkpoints(run, runs):
    path = run / "config.yaml"
    path.write_text(path.read_text().replace("\nlearning_rate: 0.002\n", "\n"))
    assert go_on(run) == 0
    assert records(run) == records(runs / "whole")
    assert "learning_rate: 0.002" in path.read_text()


def test_edited_settings_are_refused_by_name(run, capsys):
    path = run / "config.yaml"
    path.write_text(path.read_text().replace("\nsteps: 10\n", "\nsteps: 90\n"))
    line = refused(run, capsys)
    assert line.startswith("lamina: steps: 90")
    assert "checkpoint-6 was trained with 10" in line


@HARMS
def test_what_the_checkpoint_knows_too_is_written_again(run, runs, harm):
    names = ("data.json", "plan.json", "environment.json", "result.json")
    for name in names:
        harm(run / name)
    assert go_on(run) == 0
    assert records(run) == records(runs / "whole")
    assert result(run)["eval_loss"] == result(runs / "whole")["eval_loss"]
    for name in ("data.json", "plan.json"):
        assert (run / name).read_bytes() == (runs / "whole" / name).read_bytes()


@pytest.mark.parametrize("harm", [cut, gone])
def test_a_changed_text_is_refused_though_the_note_of_the_old_one_is_damaged(
    corpus, tmp_path, monkeypatch, capsys, harm
):
    text = tmp_path / "text.txt"
    text.write_text(corpus.read_text())
    with monkeypatch.context() as patch:
        patch.setattr(LaminaTrainer, "training_step", stopped_at(4))
        with pytest.raises(RuntimeError, match="plug"):
            pretraining.pretrain(settings(text, tmp_path / "run", **OPTIONS), bar=False)
    harm(tmp_path / "run" / "data.json")
    text.write_text(corpus.read_text() + "one line more\n")
    assert refused(tmp_path / "run", capsys).startswith("lamina: corpus:")


@HARMS
def test_records_that_were_lost_are_said_and_the_rest_goes_on(run, runs, harm, caplog):
    before = (run / "metrics.jsonl").read_bytes()
    harm(run / "metrics.jsonl")
    damaged = (run / "metrics.jsonl").read_bytes() if harm is spoil else None
    assert go_on(run) == 0
    whole, ours = records(runs / "whole"), records(run)
    assert all(record in whole for record in ours)
    assert [r for r in ours if r["step"] > 6] == [r for r in whole if r["step"] > 6]
    assert "metrics.jsonl" in caplog.text
    assert len(ours) < len(whole)
    if damaged is not None:
        assert (run / "metrics.jsonl.damaged").read_bytes() == damaged != before
        assert len(ours) == len(whole) - 1
    else:
        assert "to 6 are gone" in caplog.text
    # the verdict rests on the best evaluation, which the checkpoint knows
    assert result(run)["status"] == result(runs / "whole")["status"]


def test_the_best_evaluation_is_known_without_its_record(run, monkeypatch):
    (run / "metrics.jsonl").unlink()
    path = run / "checkpoints" / "checkpoint-6" / "run_state.json"
    step, last, best = json.loads(path.read_text())["evaluations"]
    assert (step, last) == (6, best)
    seen = []

    def verdict(run, complete):
        seen.append((run.recorder.evaluation.step, run.recorder.best_eval))
        return outcome.verdict(run, complete)

    monkeypatch.setattr(pretrain, "verdict", verdict)
    monkeypatch.setattr(LaminaTrainer, "evaluate", lambda self, **ignored: {})
    go_on(run)
    assert seen == [(6, best)]


@pytest.mark.parametrize("harm", [cut, spoil])
def test_a_damaged_part_of_the_layers_is_set_aside(run, runs, harm, caplog):
    parts = sorted((run / "layers").glob("part-*.parquet"))
    harm(parts[0])
    if harm is spoil:  # parquet has no sum over all its bytes: make it one that cannot be read
        parts[0].write_bytes(b"PAR1" + parts[0].read_bytes()[4:-8] + b"\xff" * 8)
    damaged = parts[0].read_bytes()
    assert go_on(run) == 0
    assert parts[0].with_name(f"{parts[0].name}.damaged").read_bytes() == damaged
    assert f"{parts[0].name}.damaged" in caplog.text
    whole, ours = layers(runs / "whole"), layers(run)
    later = ours[ours.step > 6].reset_index(drop=True)
    assert later.equals(whole[whole.step > 6].reset_index(drop=True))
    assert len(later) < len(ours) < len(whole)


ROLLED_BACK = {**OPTIONS, "rollback": 1}


def digit(path):
    """Another digit in the place of the last one."""
    text = path.read_text()
    at = max(i for i, character in enumerate(text) if character.isdigit())
    path.write_text(f"{text[:at]}{(int(text[at]) + 1) % 10}{text[at + 1 :]}")


@pytest.mark.parametrize("harm", [cut, gone, digit])
def test_damaged_rollbacks_are_written_again_from_a_later_checkpoint_or_refused(
    trained, tmp_path, monkeypatch, capsys, caplog, harm
):
    original, left = LaminaTrainer.training_step, [RuntimeError("pulled the plug")]
    stop = {"step": 5}

    def training_step(self, *args, **kwargs):
        step = self.state.global_step + 1
        if self.order.data_step(step) == 5:
            self.guard.see_loss(step, float("nan"))
        if step == stop["step"] and self.order.data_step(step) > step and left:
            raise left.pop()
        return original(self, *args, **kwargs)

    monkeypatch.setattr(LaminaTrainer, "training_step", training_step)
    with pytest.raises(RuntimeError, match="plug"):
        trained(**ROLLED_BACK)
    path = tmp_path / "run" / "rollbacks.json"
    whole = path.read_bytes()
    harm(path)
    assert "rollbacks.json" in refused(tmp_path / "run", capsys)
    path.write_bytes(whole)
    stop["step"], left[:] = 8, [RuntimeError("pulled the plug")]
    with pytest.raises(RuntimeError, match="plug"):
        trained(resume=True, **ROLLED_BACK)
    harm(path)
    assert go_on(tmp_path / "run") == 0
    assert "written again from checkpoint-6" in caplog.text
    assert path.read_bytes() == whole


def test_a_kill_while_the_first_file_is_written_leaves_a_folder_to_begin_in(corpus, tmp_path):
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / ".environment.json.1234").write_text('{"versions": {')
    assert main(["pretrain", *flags(**SMALL, corpus=corpus, output=tmp_path / "run")]) == 0
