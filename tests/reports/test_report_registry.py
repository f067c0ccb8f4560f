"""Every kind of folder has its page, whoever asks for it."""

import json

import pytest

from lamina.errors import UserError
from lamina.reports import report


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
