"""Files of a stopped run that were damaged: the run goes on as it was, or one line says why not and nothing is lost."""

import errno
import json
import os
import re
import shutil
from pathlib import Path

import pytest
from training.tiny_runs import SMALL, cut_at, flags, layers, records, result, settings

from lamina.cli import main
from lamina.jobs.manifest import refuse_damaged
from lamina.training import pretrain as pretraining
from lamina.training.pretrain import Pretraining
from lamina.training.trainer import LaminaTrainer

OPTIONS = {"steps": 10, "logging_steps": 1, "save_steps": 3, "eval_steps": 3, "learning_rate": 2e-3, "keep": 2}


@pytest.fixture(scope="module")
def runs(corpus, session_cache, tmp_path_factory):
    """A whole run, and the same one stopped at step 8; tests copy it."""
    folder = tmp_path_factory.mktemp("runs")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("LAMINA_CACHE", str(session_cache))
        pretraining.pretrain(settings(corpus, folder / "whole", **OPTIONS), bar=False)
        with cut_at(8):
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


def digit(path):
    """Put another digit in the place of the last one."""
    content = bytearray(path.read_bytes())
    at = max(i for i, byte in enumerate(content) if chr(byte).isdecimal())
    content[at] = ord("0") + (content[at] - ord("0") + 1) % 10
    path.write_bytes(bytes(content))


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


def one_line_less(path):
    path.write_text(path.read_text().replace("\nlearning_rate: 0.002\n", "\n"))


@pytest.mark.parametrize("harm", [cut, gone, one_line_less])
def test_settings_that_are_lost_are_those_of_the_checkpoint(run, runs, harm):
    harm(run / "config.yaml")
    assert go_on(run) == 0
    assert records(run) == records(runs / "whole")
    whole, ours = [(folder / "config.yaml").read_text() for folder in (runs / "whole", run)]
    assert [x for x in whole.splitlines() if "output" not in x] == [x for x in ours.splitlines() if "output" not in x]


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


@HARMS
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
    assert "when the run" in line


@pytest.mark.parametrize("harm", [cut, empty, gone])
def test_records_that_were_lost_are_said_and_the_rest_goes_on(run, runs, harm, caplog):
    harm(run / "metrics.jsonl")
    assert go_on(run) == 0
    whole, ours = records(runs / "whole"), records(run)
    assert all(record in whole for record in ours)
    assert [r for r in ours if r["step"] > 6] == [r for r in whole if r["step"] > 6]
    assert len(ours) < len(whole)
    assert "to 6 are gone" in caplog.text


def doubled(path):
    path.write_text(path.read_text() * 2)


def not_an_object(path):
    path.write_text("17\n" + path.read_text())


@pytest.mark.parametrize(
    ("harm", "fault"),
    [
        (spoil, r"line \d+ of metrics\.jsonl is not a record"),
        (not_an_object, r"line 1 of metrics\.jsonl is not a record"),
        (doubled, r"line \d+ of metrics\.jsonl goes back from step 7 to step 1"),
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

    def verdict(stage, run, complete):
        seen.append((run.recorder.evaluation.step, run.recorder.best_eval))
        return original(stage, run, complete)

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
    assert "1 of its parts are missing" in caplog.text
    whole, ours = layers(runs / "whole"), layers(run)
    assert len(ours) < len(whole)
    assert len(ours.merge(whole)) == len(ours)


def test_a_part_of_the_layers_that_the_checkpoint_does_not_know_is_recorded_again(run, runs):
    shutil.copyfile(run / "layers" / "part-00000.parquet", run / "layers" / "part-00077.parquet")
    assert go_on(run) == 0
    assert layers(run).equals(layers(runs / "whole"))


@pytest.mark.parametrize("harm", [cut, gone, empty])
def test_a_result_that_is_lost_is_made_again(runs, tmp_path, harm):
    ended = shutil.copytree(runs / "whole", tmp_path / "ended")
    harm(ended / "result.json")
    assert go_on(ended) == 0
    timing = ("seconds", "tokens_per_second")
    whole, ours = ({k: v for k, v in result(f).items() if k not in timing} for f in (runs / "whole", ended))
    assert ours == whole
    assert records(ended) == records(runs / "whole")
    assert layers(ended).equals(layers(runs / "whole"))


@pytest.mark.parametrize("harm", [cut, digit, gone])
@pytest.mark.parametrize("name", ["model.safetensors", "config.json", "manifest.json"])
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
def test_damaged_rollbacks_are_refused(trained, tmp_path, monkeypatch, capsys, harm):
    original, left = LaminaTrainer.training_step, [RuntimeError("pulled the plug")]

    def training_step(self, *args, **kwargs):
        step = self.state.global_step + 1
        if self.order.data_step(step) == 5:
            self.guard.see_loss(step, float("nan"))
        if step == 8 and self.order.data_step(step) > step and left:
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
    assert go_on(tmp_path / "run") == 0


def test_a_kill_while_the_first_file_is_written_leaves_a_folder_to_begin_in(corpus, tmp_path):
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / ".environment.json.1234").write_text('{"versions": {')
    assert main(["pretrain", *flags(**SMALL, corpus=corpus, output=tmp_path / "run")]) == 0
