"""A job is settings, a function, a page, its last lines and a row; its flags, help and Python function are made."""

import pytest

import lamina
from lamina.catalog import COMMANDS, JOBS
from lamina.cli import main
from lamina.jobs.job import ResumePolicy, open_job
from lamina.jobs.row import JobRow
from lamina.jobs.setting_groups import OutputSettings, SeedSettings
from lamina.jobs.settings import Settings, at_least, changed, setting
from lamina.reports import registry


class ToySettings(SeedSettings, OutputSettings, Settings):
    command_name = "toy"
    main = ("count", "output")

    count: int = setting(2, "words to write", at_least(1))
    word: str = setting("toy", "which word", decides=False)
    output: str = changed("toy")


def toy(settings, *, resume=False, overwrite=False, bar=True):
    policy = ResumePolicy(what="toy", free=ToySettings.free())
    job = open_job(
        "toy", ToySettings, settings, resume=resume, overwrite=overwrite, policy=policy, stored=lambda folder:
        ToySettings.from_dict({"count": len((folder / "words.txt").read_text().split())}).to_dict(),
    )  # fmt: skip
    with job:
        job.write_text("words.txt", f"{job.settings.word} " * job.settings.count)
        job.write_json("result.json", {"status": "finished", "count": job.settings.count})
    return {"status": "finished", "count": job.settings.count}


def page(folder):
    path = folder / "report.html"
    path.write_text((folder / "words.txt").read_text())
    return path


ROW = JobRow(
    name="toy",
    kind="toy",
    summary="write words",
    about="Write words.",
    examples="\n  lamina toy --count 3\n",
    settings=lambda: ToySettings,
    run=toy,
    returns="Returns what result.json holds.",
)


@pytest.fixture(autouse=True)
def added(monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setitem(JOBS, "toy", ROW)
    monkeypatch.setitem(registry._pages, "toy", page)  # as @report_of("toy") does
    # as @ending_of("toy") does
    monkeypatch.setitem(registry._endings, ("toy", ""), lambda folder, result: f"{result['count']} words in {folder}")
    monkeypatch.setitem(COMMANDS, "toy", ROW.summary)


def test_it_has_flags_and_a_help(capsys, refused):
    assert main(["toy", "--count", "3"]) == 0
    assert capsys.readouterr().out == "3 words in toy\n"
    assert "did you mean '--count'?" in refused("toy", "--cuont", "3")
    with pytest.raises(SystemExit):
        main(["toy", "--help"])
    out = capsys.readouterr().out
    assert "  --count N                 words to write (default: 2)\n" in out
    assert "  lamina toy --count 3" in out


def test_it_is_a_function_and_has_a_page(tmp_path):
    result = lamina.api.toy(count=4, output=tmp_path / "four")
    assert (result["count"], result.folder) == (4, tmp_path / "four")
    assert result.report().read_text() == "toy toy toy toy "
    assert lamina.api.toy.__name__ == "toy"
    result.report().unlink()
    assert lamina.report(tmp_path / "four").is_file()
    with pytest.raises(lamina.errors.UserError, match=r"count: 0\. Give a whole number"):
        lamina.api.toy(count=0)


def test_it_resumes_with_what_decides_nothing_changed(tmp_path, refused):
    lamina.api.toy(count=2)
    assert main(["toy", "--resume", "--word", "other"]) == 0
    assert (tmp_path / "toy" / "words.txt").read_text() == "other other "
    assert "count: 3 differs from the toy's 2" in refused("toy", "--resume", "--count", "3")
    wrong = refused("compare", "--output", "toy", "--resume")
    assert "'toy' was written by lamina toy, so lamina compare can't resume it" in wrong


def test_where_a_job_writes_decides_no_number():
    for row in JOBS.values():
        assert "output" in row.settings().free(), row.name


def test_every_job_has_a_page_and_says_how_it_ended():
    known = registry.kinds()
    for row in JOBS.values():
        assert row.kind in known, row.name
        assert row.own_command or callable(registry.ending(row.kind)), row.name
        assert all(callable(registry.ending(row.kind, switch.name)) for switch in row.switches if switch.prints)
        assert row.kind in registry._drawings or not any(switch.draws for switch in row.switches)
