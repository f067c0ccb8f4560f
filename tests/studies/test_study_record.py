"""study.yaml that is cut short or altered is not believed; trials of other settings do not enter a ranking."""

import contextlib
import json
import shutil

import pytest
import yaml
from training.tiny_runs import SMALL, write_corpus

from lamina.cli import main
from lamina.errors import UserError
from lamina.jobs.names import STUDY
from lamina.reports import report
from lamina.studies.compare import compare
from lamina.studies.record import read_record, refuse_mixture, write_study
from lamina.studies.settings import CompareSettings

SETTINGS = {"steps": 16, "init": "same:scaled", "epsilon": 1e-08, "seeds": "0,1", "trainer": {}, "base_width": None}


@pytest.fixture
def folder(tmp_path):
    write_study(tmp_path, {"command": "lamina compare", "created": "2026-11-21T05:40:00+00:00", "settings": SETTINGS})
    return tmp_path


def test_what_is_written_is_read(folder):
    assert read_record(folder)["settings"] == SETTINGS


def test_every_cut_and_every_changed_byte_is_known(folder):
    whole = (folder / STUDY).read_bytes()
    meaning = yaml.safe_load(whole)
    believed = []
    for at in range(len(whole)):
        for damaged in (whole[:at], whole[:at] + bytes([whole[at] ^ 1]) + whole[at + 1 :]):
            (folder / STUDY).write_bytes(damaged)
            with contextlib.suppress(UserError):
                believed.append(read_record(folder) == {k: v for k, v in meaning.items() if k != "digest"})
    assert all(believed)  # a blank at the end of a line, say: it reads the same
    assert len(believed) < len(whole) / 20


@pytest.mark.parametrize(
    ("one", "other", "named"),
    [
        ({"steps": 16}, {"steps": 36}, "steps 36"),
        ({"init": "scaled"}, {"init": "normal"}, "init 'normal'"),
        ({"corpus": "a"}, {"corpus": "b"}, "corpus 'b'"),
        ({"precision": "fp32"}, {"precision": "bf16"}, "precision"),
    ],
)
def test_trials_of_two_experiments_are_refused_by_name(one, other, named):
    with pytest.raises(UserError, match=f"^trials: b was trained with {named}"):
        refuse_mixture({"a": one, "b": other}, {})
    refuse_mixture({"a": one, "b": one | {"seed": 1, "learning_rate": 1.0, "threads": 4, "output": "x"}}, {})


@pytest.fixture(scope="module")
def ended(tmp_path_factory):
    """A study that has ended, to be copied and damaged."""
    where = tmp_path_factory.mktemp("ended")
    corpus = write_corpus(where / "words.txt")
    given = {**SMALL, "placements": "pre_ln,keel", "learning_rates": "3e-3", "workers": 2}
    compare(CompareSettings(corpus=str(corpus), output=str(where / "study"), **given), bar=False)
    return where / "study"


@pytest.fixture
def study(ended, tmp_path):
    return shutil.copytree(ended, tmp_path / "study")


def resumed(study):
    return ["compare", "--output", str(study), "--resume"]


def alter(path, old, new):
    text = path.read_text()
    assert text.count(old) == 1, text
    path.write_text(text.replace(old, new))


def trial(study, name="keel"):
    return next(study.glob(f"trials/{name}*"))


@pytest.mark.parametrize("damage", ["digit", "cut"])
def test_a_damaged_study_is_one_line_and_nothing_is_trained(study, damage, refused):
    if damage == "cut":
        (study / STUDY).write_text((study / STUDY).read_text()[:200])
    else:
        alter(study / STUDY, "\n  steps: 4\n", "\n  steps: 6\n")
    assert str(study / STUDY) in refused(*resumed(study))
    assert report(study).is_file()


def test_a_damaged_environment_does_not_end_a_study(study):
    (study / "environment.json").write_text('{"vers')
    assert main(resumed(study)) == 0
    assert "lamina" in json.loads((study / "environment.json").read_text())["versions"]


def test_a_trial_of_other_settings_does_not_enter_the_ranking_nor_the_page(study, refused):
    alter(trial(study) / "config.yaml", "\nsteps: 4\n", "\nsteps: 36\n")
    line = refused(*resumed(study))
    assert "config.yaml': cut short or altered" in line
    assert trial(study).name in line
    assert "result.json': not from the same run as the config.yaml in this folder" in refused("report", study)
