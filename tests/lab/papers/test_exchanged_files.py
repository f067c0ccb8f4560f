"""Single files of a study's trials, exchanged or edited by a digit: each is named before anything is ranked by it."""

import json
import re
import shutil

import pandas as pd
import pytest
from lab.papers.study_files import exchange, plan_of, store_of
from training.tiny_runs import SMALL

from lamina.cli import main
from lamina.errors import UserError
from lamina.jobs.files import read_config, write_yaml
from lamina.lab.papers.trials.store import Records
from lamina.studies.compare import compare
from lamina.studies.settings import CompareSettings

GAINS = "end/gains"


@pytest.fixture(scope="module")
def compared(tmp_path_factory, corpus):
    """A comparison of two trials that has ended."""
    folder = tmp_path_factory.mktemp("compared") / "study"
    compare(CompareSettings(corpus=str(corpus), output=str(folder), placements="pre_ln,keel", **SMALL), bar=False)
    return folder


@pytest.fixture
def folder(compared, tmp_path):
    return shutil.copytree(compared, tmp_path / "study")


def trials_of(folder):
    return sorted((folder / "trials").glob("*/"))


def edit(path):
    """Change one digit of a number with a point; of a table one bit."""
    content = path.read_bytes()
    if path.suffix in (".parquet", ".safetensors"):
        path.write_bytes(content[:-60] + bytes([content[-60] ^ 1]) + content[-59:])
    else:
        changed = re.sub(rb"\.(\d)", lambda m: b"." + str((int(m[1]) + 1) % 10).encode(), content, count=1)
        assert changed != content
        path.write_bytes(changed)


def refused(argv, capsys, *words):
    before = capsys.readouterr()
    assert main(argv) == 2, before
    lines = capsys.readouterr().err.strip().splitlines()
    assert len(lines) == 1
    assert all(word in lines[0] for word in words), lines[0]
    assert "Restore the" in lines[0]


@pytest.mark.parametrize("name", ["result.json", "metrics.jsonl", "layers/part-00000.parquet"])
@pytest.mark.parametrize("harm", ["exchanged", "edited"])
@pytest.mark.parametrize("command", ["compare", "report"])
def test_a_file_of_another_trial_or_an_edited_one_is_named(folder, capsys, name, harm, command):
    one, other = trials_of(folder)
    exchange(one / name, other / name) if harm == "exchanged" else edit(one / name)
    argv = ["compare", "--output", str(folder), "--resume"] if command == "compare" else ["report", str(folder)]
    refused(argv, capsys, "trials" if harm == "exchanged" else one.name, name, "altered")


@pytest.mark.parametrize("harm", ["deleted", "emptied", "linked"])
@pytest.mark.parametrize("name", ["metrics.jsonl", "layers/part-00000.parquet", "plan.json"])
def test_a_resume_of_an_ended_run_looks_at_its_records(folder, capsys, harm, name):
    one, other = trials_of(folder)
    if harm == "emptied":
        (one / name).write_bytes(b"")
    else:
        (one / name).unlink()
    if harm == "linked":
        (one / name).symlink_to(other / name)
    refused(["pretrain", "--output", str(one), "--resume"], capsys, name)


@pytest.mark.slow
def test_an_exchanged_model_is_named_by_its_readers_and_its_trial_runs_again(folder, caplog, capsys):
    one, other = trials_of(folder)
    exchange(one / "model", other / "model")
    refused(["generate", str(one)], capsys, "model", "not the run's model")
    losses = pd.read_csv(folder / "results.csv")["eval_loss"].tolist()
    assert main(["compare", "--output", str(folder), "--resume"]) == 0
    assert caplog.text.count("not the run's model") >= 2
    assert pd.read_csv(folder / "results.csv")["eval_loss"].tolist() == losses
    assert main(["generate", str(one), "--max-new-tokens", "1"]) == 0


@pytest.mark.parametrize("harm", ["exchanged", "edited"])
@pytest.mark.parametrize(
    "name",
    ["result.json", "metrics.jsonl", "measures/end-gains.parquet", "measures/records-layers.parquet", "measures.json"],
)
def test_a_store_names_a_file_of_another_trial_or_an_edited_one(ended, tmp_path, name, harm):
    where = shutil.copytree(ended, tmp_path / "stored")
    trials = {trial.placement: trial for trial in plan_of(where / "mine.yaml").wanted(lambda trial: None)}
    one, other = (where / "trials" / trial.key for trial in trials.values())
    if harm == "exchanged":
        exchange(one / name, other / name)
    elif name == "measures.json":
        (one / name).write_text((one / name).read_text().replace("measured", "measurer", 1))
    else:
        edit(one / name)
    store = store_of(where)
    for read in (store.result, store.complete, lambda trial: store.table(trial.key, GAINS)):
        with pytest.raises(UserError, match=re.escape(name.partition("/")[0])):
            read(next(iter(trials.values())))


@pytest.mark.slow
def test_an_edited_configuration_is_named_and_may_be_passed_as_config(folder, capsys, tmp_path):
    one = trials_of(folder)[0]
    path = one / "config.yaml"
    assert path.read_text().startswith("digest: ")
    path.write_text(path.read_text().replace("steps: 4\n", "steps: 5\n"))
    refused(["pretrain", "--output", str(one), "--resume"], capsys, "config.yaml")
    assert main(["pretrain", "--config", str(path), "--output", str(tmp_path / "new")]) == 0
    assert read_config(tmp_path / "new")["steps"] == 5


@pytest.mark.slow
def test_a_folder_of_an_older_version_is_still_read(folder, capsys):
    for one in trials_of(folder):
        data = json.loads((one / "result.json").read_text())
        del data["seal"]
        write_yaml(one / "config.yaml", read_config(one))
        (one / "result.json").write_text(json.dumps(data))
    assert main(["compare", "--output", str(folder), "--resume"]) == 0
    assert main(["report", str(folder)]) == 0


def test_a_result_whose_seal_was_cut_out_is_named(folder, capsys):
    one = trials_of(folder)[0]
    data = json.loads((one / "result.json").read_text())
    del data["seal"]
    (one / "result.json").write_text(json.dumps(data))
    refused(["compare", "--output", str(folder), "--resume"], capsys, "result.json", "altered")


@pytest.mark.slow
def test_an_edited_table_of_a_comparison_is_named_and_written_again(folder, corpus, capsys, caplog, tmp_path):
    whole = (folder / "results.csv").read_bytes()
    edit(folder / "results.csv")
    for argv in (
        ["report", str(folder)],
        ["eval", str(folder), "--corpus", str(corpus), "--output", str(tmp_path / "eval")],
    ):
        refused(argv, capsys, "results.csv", "altered", "--resume to rewrite the file")
    assert main(["compare", "--output", str(folder), "--resume"]) == 0
    assert "results.csv: altered" in caplog.text
    assert (folder / "results.csv").read_bytes() == whole
    assert main(["report", str(folder)]) == 0


@pytest.mark.parametrize("name", ["results.csv", "claims.json", "tables/end-gains.parquet"])
def test_a_studys_tables_are_sealed_in_its_folder_and_among_the_records(ended, tmp_path, capsys, name):
    folder = shutil.copytree(ended / "out", tmp_path / "out")
    if name == "claims.json":
        (folder / name).write_text('[{"verdict": "holds"}]')
    else:
        edit(folder / name)
    refused(["report", str(folder)], capsys, name, "altered")
    records = tmp_path / "records" / "mine-cpu"
    shutil.copytree(folder, records)
    with pytest.raises(UserError, match=re.escape(name)):
        _ = Records(records.parent).rows
