"""`lamina report --follow`: the page of a run that is still at work."""

import json

import pytest

from lamina.errors import UserError
from lamina.jobs.folder import is_locked, lock
from lamina.reports import registry as following


@pytest.fixture
def folder(tmp_path):
    (tmp_path / "environment.json").write_text(json.dumps({"kind": "run", "versions": {"lamina": "0"}}))
    return tmp_path


def test_a_folder_of_no_job_is_refused(tmp_path):
    with pytest.raises(UserError, match="holds no job"):
        list(following.follow(tmp_path / "nowhere"))


def test_the_page_is_written_whenever_the_records_grow_until_the_run_ends(folder, monkeypatch):
    written, looks = [], []
    monkeypatch.setattr(following, "report", lambda place: written.append(place) or place / "report.html")
    held = lock(folder)
    held.__enter__()

    def wait(seconds):
        looks.append(seconds)
        if len(looks) in (1, 3):
            with (folder / "metrics.jsonl").open("a") as file:
                file.write("{}\n")
        if len(looks) == 4:
            (folder / "result.json").write_text("{}")
            held.__exit__(None, None, None)

    pages = list(following.follow(folder, every=2.0, wait=wait))
    # at the start, after each record, and with the result; not at the look without news
    assert len(written) == len(pages) == 4
    assert looks == [2.0] * 4


def test_too_few_records_are_waited_for_and_a_damaged_end_is_told(folder, monkeypatch):
    def report(place):
        raise UserError("too few records")

    monkeypatch.setattr(following, "report", report)

    def wait(seconds):
        (folder / "result.json").write_text("{}")

    pages = following.follow(folder, wait=wait)
    assert next(pages) == (None, "too few records")
    with pytest.raises(UserError, match="too few"):
        next(pages)


def test_a_lock_is_seen_and_not_taken(tmp_path):
    assert not is_locked(tmp_path)
    with lock(tmp_path):
        assert is_locked(tmp_path)
    assert not is_locked(tmp_path)
