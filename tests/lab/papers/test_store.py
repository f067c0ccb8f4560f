"""The store of trials and the records: what is in a folder, whose it is, and what counts."""

import json
import shutil

import pandas as pd
import pytest
from lab.papers.study_files import exchange, plan_of, store_of

from lamina.cli import main
from lamina.errors import UserError
from lamina.lab.papers.engine.study_run import runnable
from lamina.lab.papers.engine.verdicts import all_verdicts
from lamina.lab.papers.trials.store import Records, write_results, write_table
from lamina.studies.task import task_of

GAINS = "end/gains"


@pytest.fixture
def copy(ended, tmp_path):
    """A copy of it to damage."""
    shutil.copytree(ended, tmp_path, dirs_exist_ok=True)
    return tmp_path


def wanted(where):
    trials = plan_of(where / "mine.yaml").wanted(lambda trial: None)
    return {trial.placement: trial for trial in trials}


def folder_of(where, placement="keel"):
    return where / "trials" / wanted(where)[placement].key


def rerun(where):
    places = [f"--{name}={where / folder}" for name, folder in (("store", "trials"), ("records", "records"))]
    return main(["study", "run", str(where / "mine.yaml"), f"--output={where / 'again'}", *places])


def test_a_store_as_it_was_written_is_read(copy, caplog):
    store, trials = store_of(copy), wanted(copy)
    for trial in trials.values():
        assert store.complete(trial)["status"] in ("finished", "short", "stuck")
        assert set(store.table(trial.key, GAINS)["layer"]) >= {0}
    assert store.damage(trials.values()) == []
    assert not caplog.records


def test_two_exchanged_folders_are_named_and_nothing_is_run_or_judged(copy, capsys):
    exchange(folder_of(copy), folder_of(copy, "pre_ln"))
    assert rerun(copy) == 2
    line = capsys.readouterr().err.strip().splitlines()[-1]
    assert all(folder_of(copy, name).name in line for name in ("pre_ln", "keel"))
    assert "trial.json" in line
    assert not (copy / "again").exists()


@pytest.mark.parametrize("damage", ["cut", "byte", "gone"])
def test_a_damaged_identity_is_named(copy, damage):
    path = folder_of(copy) / "trial.json"
    whole = path.read_bytes()
    if damage == "gone":
        path.unlink()
    else:
        path.write_bytes(whole[:90] if damage == "cut" else whole.replace(b'"steps": ', b'"steps": 1', 1))
    trial = wanted(copy)["keel"]
    for read in (store_of(copy).result, store_of(copy).outcome, store_of(copy).has_model):
        with pytest.raises(UserError, match=r"store: .*trial\.json"):
            read(trial)
    with pytest.raises(UserError, match=r"store: .*trial\.json"):
        store_of(copy).table(trial.key, GAINS)


def test_a_trial_stopped_before_it_began_is_run_again(copy):
    folder = folder_of(copy)
    shutil.rmtree(folder)
    folder.mkdir()
    (folder / "result.json").write_text(json.dumps({"status": "interrupted", "reason": "stopped before it started"}))
    trial = wanted(copy)["keel"]
    assert store_of(copy).complete(trial) is None
    assert rerun(copy) == 0
    assert store_of(copy).complete(trial)["status"] in ("finished", "short", "stuck")


def test_a_process_refuses_to_run_a_trial_in_the_folder_of_another(copy):
    exchange(folder_of(copy), folder_of(copy, "pre_ln"))
    task = store_of(copy).task(wanted(copy)["keel"])
    identity = (task.folder / "trial.json").read_bytes()
    with pytest.raises(UserError, match="holds the trial"):
        task_of(json.loads(json.dumps(task.to_request()))).run()
    assert (task.folder / "trial.json").read_bytes() == identity


def test_a_record_that_is_no_parquet_is_one_line(tmp_path):
    write_table(tmp_path / "a-cpu", "probe", pd.DataFrame([{"key": "k", "value": 1.0}]))
    (file,) = tmp_path.glob("a-cpu/tables/*.parquet")
    file.write_bytes(file.read_bytes()[:20])
    with pytest.raises(UserError, match="not readable as Parquet"):
        Records(tmp_path).table("k", "probe")


@pytest.mark.parametrize("changed", [{"placement": "keel"}, {"seed": 7}, {"learning_rate": 0.5}])
def test_a_recorded_row_under_another_trials_key_is_named(copy, changed):
    trial = wanted(copy)["pre_ln"]
    row = {"key": trial.key, "placement": "pre_ln", "learning_rate": 3e-3, "seed": 0, "tuned": True}
    row |= {"status": "finished", "eval_loss": 2.0}
    for spelled in ({}, {"placement": "mix_ln(alpha=0)"}, {"placement": "/elsewhere/mine.yaml"}):
        write_results(copy / "records" / "a-cpu", pd.DataFrame([row | spelled]))
        assert Records(copy / "records").row(trial)["eval_loss"] == 2.0
    write_results(copy / "records" / "a-cpu", pd.DataFrame([row | changed]))
    with pytest.raises(UserError, match=rf"row of the trial {trial.key} has {next(iter(changed))}"):
        store_of(copy, "elsewhere").result(trial)


def test_a_verdict_in_another_studys_record_is_named(tmp_path):
    (tmp_path / "mix-ppl-cpu").mkdir()
    verdict = {"study": "keel-lr", "scale": "cpu", "claim": "best", "verdict": "holds"}
    (tmp_path / "mix-ppl-cpu" / "claims.json").write_text(json.dumps([verdict]))
    with pytest.raises(UserError, match="mix-ppl-cpu' holds a verdict of keel-lr-cpu"):
        all_verdicts(tmp_path)


def test_a_model_that_is_cut_short_in_the_store_is_named_at_the_next_run(copy, caplog):
    folder = folder_of(copy)
    (weights,) = folder.glob("model/*.safetensors")
    weights.write_bytes(weights.read_bytes()[:-7])
    assert rerun(copy) == 0
    assert f"{folder.name}/model: {weights.name} has" in caplog.text


def test_a_stage_does_not_begin_with_weights_that_are_cut_short(copy):
    source = wanted(copy)["keel"]
    (weights,) = folder_of(copy).glob("model/*.safetensors")
    weights.write_bytes(weights.read_bytes()[:-7])
    waiting = type("Waiting", (), {"inputs": {"from_model": source}, "key": "later"})()
    with pytest.raises(UserError, match=rf"store: .*{source.key}/model.*{weights.name} has"):
        runnable([waiting], store_of(copy), lambda trial: None)


@pytest.fixture
def two(tmp_path):
    """Writes two studies' rows of the same trial, in the order in which they are read; returns the trial's row."""

    def write(first, second):
        for name, row in (("a-cpu", first), ("b-cpu", second)):
            write_results(tmp_path / name, pd.DataFrame([{"key": "k", "tuned": True, "status": "finished", **row}]))
        return Records(tmp_path).rows["k"]

    return write


@pytest.mark.parametrize("swap", [1, -1])
@pytest.mark.parametrize("lacks", [{}, {"loss_surges": None}])
def test_what_one_record_lacks_another_fills(two, swap, lacks):
    both = {"eval_loss": 2.5, **lacks}, {"eval_loss": 2.5, "loss_surges": 3.0}
    assert two(*both[::swap])["loss_surges"] == 3


def test_a_trial_trained_again_elsewhere_is_not_mixed_with_the_older_one(two):
    row = two({"eval_loss": 2.5, "loss_surges": 3.0}, {"eval_loss": 2.5001})
    assert row["eval_loss"] == 2.5001
    assert "loss_surges" not in row


def test_a_study_reads_its_own_record_of_a_trial(tmp_path):
    for name, loss in (("a-cpu", 2.5), ("b-cpu", 2.5001)):
        row = {"key": "k", "tuned": True, "status": "finished", "eval_loss": loss}
        write_results(tmp_path / name, pd.DataFrame([row]))
        write_table(tmp_path / name, "probe", pd.DataFrame([{"key": "k", "value": loss}]))
    for own, loss in (("a-cpu", 2.5), ("b-cpu", 2.5001), ("c-cpu", 2.5001)):
        records = Records(tmp_path, own=own)
        assert records.rows["k"]["eval_loss"] == loss
        assert records.table("k", "probe")["value"].tolist() == [loss]


def test_a_trials_place_in_one_study_is_no_result_in_another(tmp_path):
    """A study without stages would be drawn as one with them; a record written before kept such columns at its end."""
    row = {"key": "k", "seed": 0, "tuned": True, "status": "finished", "eval_loss": 2.5, "steps": 9}
    write_results(tmp_path / "a-cpu", pd.DataFrame([row | {"stage": "pretrain", "shelf": "b"}]))
    write_results(tmp_path / "b-cpu", pd.DataFrame([{"key": "k", "stage": "pretrain", "shelf": "b", **row}]))
    write_results(tmp_path / "c-cpu", pd.DataFrame([{"key": "k", "steps": 9, **row}]))
    found = Records(tmp_path).rows["k"]
    assert not {"stage", "shelf"} & set(found)
    assert found["steps"] == 9, "an axis that is a column of every result"


def test_a_file_without_the_columns_of_a_record_is_refused(tmp_path):
    write_results(tmp_path / "a-cpu", pd.DataFrame([{"key": "k", "status": "finished"}]))
    with pytest.raises(UserError, match=r"a-cpu.*not a study's record"):
        _ = Records(tmp_path).rows
