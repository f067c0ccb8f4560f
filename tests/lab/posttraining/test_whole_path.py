"""tools/runs/whole_path.py runs through, and resumes what was stopped."""

import json

import pytest
from scripts import loaded


def script():
    return loaded("tools/runs/whole_path.py")


@pytest.mark.slow
def test_it_takes_two_placements_through_four_stages(tmp_path, monkeypatch, capsys):
    example = script()
    arguments = ["whole_path.py", "--folder", str(tmp_path), "--rows", "64", "--scale", "0.01"]
    monkeypatch.setattr("sys.argv", arguments)
    example.main()
    assert capsys.readouterr().out.count("finished, held-out reward") == 2
    for placement in example.PLACEMENTS:
        for stage in ("pretrain", "sft", "reward", "rlhf"):
            folder = tmp_path / placement / stage
            assert (folder / "report.html").is_file()
            assert json.loads((folder / "result.json").read_text())["status"] in ("finished", "short", "stuck")
    example.main()  # what has ended is left as it is


def test_preferences_never_pair_an_answer_with_itself():
    example = script()
    rows = list(example.sorting(50))
    assert all(row["chosen"] != row["rejected"] for row in example.preferences(rows))
