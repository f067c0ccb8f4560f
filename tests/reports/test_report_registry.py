"""Every kind of folder has its page, whoever asks for it."""

import json

import pytest

from lamina.errors import UserError
from lamina.jobs.kinds import Kind
from lamina.reports import registry, report


def test_the_kinds_with_a_page():
    assert registry.kinds() == [
        *(
            "claims",
            "coord-check",
            "dpo",
            "evaluation",
            "max-lr",
            "preflight",
            "probing",
            "reward",
            "rlhf",
            "run",
            "sft",
        ),
        *("study", "transfer", "watched"),
    ]


def test_a_kind_is_looked_up_and_nothing_else(tmp_path, monkeypatch):
    (tmp_path / "environment.json").write_text(json.dumps({"kind": "run"}))
    registry.kinds()  # all registered
    monkeypatch.setitem(registry._pages, Kind.RUN, lambda folder: folder / "mine.html")
    assert report(tmp_path) == tmp_path / "mine.html"


@pytest.mark.parametrize("content", [{}, {"notes.txt": "mine"}])
def test_a_folder_that_no_job_wrote_is_refused(tmp_path, content):
    for name, text in content.items():
        (tmp_path / name).write_text(text)
    with pytest.raises(
        UserError, match=r"holds no job.*\(allowed: a folder of: claims, coord-check, dpo, evaluation, "
    ):
        report(tmp_path)


def test_a_transfer_killed_before_it_had_numbers_gets_the_page_of_its_trials(study):
    (study / "environment.json").write_text(json.dumps({"kind": "transfer"}))
    page = report(study).read_text(encoding="utf-8")
    assert "Ranking by eval loss" in page
