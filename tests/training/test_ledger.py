"""Every file of a run is known by its digest: what differs is named, restored from a checkpoint, or refused."""

import json
import shutil
from pathlib import Path

import pytest
from training.test_damage import cut, digit, empty, go_on, gone, run, runs  # noqa: F401 (fixtures)
from training.tiny_runs import layers, records, result

from lamina.cli import main
from lamina.jobs import digests
from lamina.jobs.files import write_json, write_text
from lamina.jobs.ledger import ALTERED, LEDGER


@pytest.fixture
def ended(runs, tmp_path):  # noqa: F811
    return shutil.copytree(runs / "whole", tmp_path / "ended")


def flip(path):
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(bytes(content))


def test_an_undamaged_folder_differs_in_nothing(run, ended):  # noqa: F811
    assert digests.differences(ended) == digests.differences(run) == []
    listed = digests.entries(ended)
    for name in ("config.yaml", "plan.json", "metrics.jsonl", "result.json", "layers/part-00000.parquet"):
        assert name in listed


def test_a_folder_without_a_ledger_is_not_checked(ended, caplog):
    """One of an older Lamina."""
    (ended / LEDGER).unlink()
    environment = json.loads((ended / "environment.json").read_text())
    del environment["digests"]
    (ended / "environment.json").write_text(json.dumps(environment))
    (ended / "model" / "manifest.json").unlink()
    digit(ended / "result.json")
    assert digests.differences(ended) == []
    assert go_on(ended) == 0
    assert not caplog.text


@pytest.mark.parametrize("harm", [cut, flip, digit, gone, empty])
def test_an_altered_result_is_made_again(ended, runs, harm, caplog):  # noqa: F811
    harm(ended / "result.json")
    assert go_on(ended) == 0
    whole, ours = result(runs / "whole"), result(ended)
    timing = ("seconds", "tokens_per_second")
    assert {k: v for k, v in ours.items() if k not in timing} == {k: v for k, v in whole.items() if k not in timing}
    assert records(ended) == records(runs / "whole")
    assert layers(ended).equals(layers(runs / "whole"))
    assert "result.json" in caplog.text


@pytest.mark.parametrize("harm", [cut, flip, gone])
@pytest.mark.parametrize("name", ["model.safetensors", "config.json", "tokenizer.json"])
def test_a_damaged_model_is_refused_and_written_again(ended, runs, name, harm, capsys):  # noqa: F811
    harm(ended / "model" / name)
    for argv in (["generate", ended], ["probe", ended, "--output", ended.parent / "probed"]):
        assert main([str(word) for word in argv]) == 2
        (line,) = capsys.readouterr().err.splitlines()
        assert name in line
    assert go_on(ended) == 0
    assert (ended / "model" / name).read_bytes() == (runs / "whole" / "model" / name).read_bytes()


@pytest.mark.parametrize("harm", [cut, flip, gone])
def test_a_damaged_part_of_the_layers_is_named_and_left_out(run, runs, harm, caplog):  # noqa: F811
    harm(run / "layers" / "part-00000.parquet")
    assert go_on(run) == 0
    assert "part-00000.parquet" in caplog.text
    ours, whole = layers(run), layers(runs / "whole")
    assert len(ours) < len(whole)
    assert len(ours.merge(whole)) == len(ours)


def test_a_doubled_part_of_the_layers_is_left_out(run, runs, caplog):  # noqa: F811
    shutil.copyfile(run / "layers" / "part-00000.parquet", run / "layers" / "part-00077.parquet")
    assert go_on(run) == 0
    assert "part-00077.parquet" in caplog.text
    assert layers(run).equals(layers(runs / "whole"))


def drop_a_line(path):
    lines = path.read_text().splitlines(keepends=True)
    path.write_text("".join(lines[:2] + lines[3:]))


@pytest.mark.parametrize("harm", [drop_a_line, lambda path: digit(path), flip], ids=["dropped", "digit", "flipped"])
def test_records_that_were_changed_within_are_named(run, harm, caplog):  # noqa: F811
    path = run / "metrics.jsonl"
    path.write_text(
        "".join(line for line in path.read_text().splitlines(keepends=True) if json.loads(line)["step"] < 7)
    )
    harm(path)
    damaged = path.read_bytes()
    assert go_on(run) == 0
    assert "metrics.jsonl is altered" in caplog.text
    assert path.with_name("metrics.jsonl.damaged").read_bytes() == damaged


def test_records_that_were_doubled_are_mended(run, runs):  # noqa: F811
    path = run / "metrics.jsonl"
    path.write_text(path.read_text() + path.read_text())
    assert go_on(run) == 0
    assert records(run) == records(runs / "whole")


@pytest.mark.parametrize("harm", [cut, flip, gone, empty])
def test_a_damaged_ledger_stops_nothing(run, runs, harm, caplog):  # noqa: F811
    harm(run / LEDGER)
    assert go_on(run) == 0
    assert records(run) == records(runs / "whole")
    assert layers(run).equals(layers(runs / "whole"))
    assert digests.differences(run) == []


@pytest.mark.parametrize("name", ["result.json", "metrics.jsonl", "layers/part-00000.parquet", "plan.json"])
def test_the_page_names_what_is_not_as_it_was_written(ended, name, capsys, caplog):
    flip(ended / name)
    assert main(["report", str(ended)]) == 0
    assert f"{name} is altered" in caplog.text
    assert f"{name} is altered" in (ended / "report.html").read_text()


def test_a_kill_between_the_ledger_and_the_file_is_no_damage(tmp_path):
    path = tmp_path / "a.json"
    digests.begin(tmp_path)
    write_text(path, "1")
    digests.note(path, (1, "of the new content"))
    assert digests.differences(tmp_path) == []
    digests.begin(tmp_path)  # the next command finds the old content, and that is what counts now
    path.write_text("2")
    assert digests.differences(tmp_path) == [f"a.json {ALTERED}"]


def test_every_line_of_a_ledger_vouches_for_those_before(tmp_path):
    digests.begin(tmp_path)
    for name in "abc":
        write_text(tmp_path / f"{name}.json", name)
    lines = (tmp_path / LEDGER).read_text().splitlines(keepends=True)
    for kept in (lines[:2] + lines[3:], [lines[1], lines[0], *lines[2:]]):
        Path(tmp_path / LEDGER).write_text("".join(kept))
        (said,) = digests.differences(tmp_path)
        assert "digests.jsonl is" in said


def test_a_folder_in_a_files_place_is_kept_beside_it(tmp_path):
    path = tmp_path / "result.json"
    (path / "inner").mkdir(parents=True)
    write_json(path, {"status": "finished"})
    assert json.loads(path.read_text())["status"] == "finished"
    assert (tmp_path / "result.json.damaged" / "inner").is_dir()
