"""seal.json: what a job computed is sealed at its end, lifted while a job writes, and read as it is without a seal."""

import json

import pytest

from lamina.errors import UserError
from lamina.jobs.files import read_sealed, write_sealed
from lamina.jobs.job import open_job
from lamina.jobs.kinds import Kind
from lamina.jobs.seals import refuse_tables
from lamina.jobs.settings import Settings, setting
from lamina.lab.papers.engine.verdicts import looks_of
from lamina.lab.papers.trials.store import Records
from lamina.studies.evaluated import runs_of

TABLES = {"results.csv": "trial,eval_loss\na,2.5\n", "claims.json": '[{"verdict": "holds"}]\n'}
TABLES |= {"transfer.json": '{"rate": 0.5}\n', "slopes.csv": "slope\n0.5\n"}
TABLES |= {"table.md": "| 2.5 |\n", "tables/end-gains.parquet": "PAR1 5"}


class JobSettings(Settings):
    output: str = setting("unused", "the folder")


def opened(folder, resume=False):
    return open_job(Kind.COMPARE, JobSettings, {"output": str(folder)}, resume=resume)


def write(folder, tables):
    write_sealed(folder / "study.yaml", {"settings": {"steps": 4}})
    (folder / "tables").mkdir(exist_ok=True)
    for name, text in tables.items():
        (folder / name).write_text(text)


@pytest.fixture
def study(tmp_path):
    with opened(tmp_path / "records" / "study") as job:
        write(job.folder, TABLES)
    return job.folder


def edit(path):
    path.write_text(path.read_text().replace("5", "4").replace("holds", "fails"))


@pytest.mark.parametrize("name", TABLES)
def test_an_edited_table_is_named_before_a_page_is_drawn(study, refused, name):
    edit(study / name)
    line = refused("report", str(study))
    assert name in line
    assert "altered since Lamina wrote seal.json" in line
    assert "--resume to rewrite the file" in line


@pytest.mark.parametrize(
    "read",
    [lambda study: runs_of(str(study)), lambda study: Records(study.parent).rows, lambda study: looks_of(study, ["a"])],
)
def test_whoever_ranks_evaluates_or_judges_names_an_edited_table(study, read):
    edit(study / "results.csv")
    with pytest.raises(UserError, match=r"results\.csv.*altered"):
        read(study)


def test_another_studys_record_is_named_and_is_nothing_to_resume(study):
    write_sealed(study / "study.yaml", {"settings": {"steps": 5}})
    with pytest.raises(UserError, match=r"study\.yaml.*from another run"), opened(study, "auto"):
        pass
    with pytest.raises(UserError, match=r"study\.yaml"):
        refuse_tables(study)


def test_a_cut_study_record_is_left_to_its_own_digest(study):
    (study / "study.yaml").write_text((study / "study.yaml").read_text()[:80])
    refuse_tables(study)
    with pytest.raises(UserError, match=r"study\.yaml"):
        read_sealed(study / "study.yaml")


def test_an_edited_seal_is_named_and_a_folder_without_one_is_read(study):
    seal = study / "seal.json"
    whole = json.loads(seal.read_text())
    whole["seal"]["files"].pop("results.csv")
    seal.write_text(json.dumps(whole))
    with pytest.raises(UserError, match=r"seal\.json.*altered"):
        refuse_tables(study)
    seal.unlink()  # an older version wrote none
    edit(study / "results.csv")
    refuse_tables(study)


def test_a_resumed_job_names_an_edited_table_and_writes_and_seals_it_again(study, caplog):
    edit(study / "results.csv")
    with opened(study, "auto") as job:
        assert "results.csv: altered" in caplog.text
        write(job.folder, TABLES)
    refuse_tables(study)
    assert (study / "seal.json").is_file()


def test_a_killed_job_leaves_tables_without_a_seal(study):
    with opened(study, "auto"):
        assert not (study / "seal.json").exists()


@pytest.mark.parametrize("error", [ZeroDivisionError, KeyboardInterrupt])
def test_a_job_that_fails_seals_its_tables_but_no_edited_one(study, error):
    with pytest.raises(error), opened(study, "auto"):
        raise error
    assert (study / "seal.json").is_file()
    edit(study / "results.csv")
    for _ in range(2):
        with pytest.raises(error), opened(study, "auto"):
            raise error
    with pytest.raises(UserError, match=r"results\.csv"):
        refuse_tables(study)


def test_a_job_without_tables_has_no_seal(tmp_path):
    with opened(tmp_path / "job") as job:
        job.write_text("plan.json", "{}")
    assert not (tmp_path / "job" / "seal.json").exists()
