"""The scripts of examples/ run at a size that takes seconds. The notebooks run when the site is built (test_site)."""

import re
import sys
from pathlib import Path

import pytest
from scripts import ROOT, loaded

NOTEBOOKS = sorted((ROOT / "docs" / "notebooks").glob("*.ipynb"))


def test_notebooks_are_committed_without_outputs():
    nbformat = pytest.importorskip("nbformat")
    assert len(NOTEBOOKS) == 3
    for path in NOTEBOOKS:
        cells = nbformat.read(path, as_version=4).cells
        assert not any(cell.get("outputs") or cell.get("execution_count") for cell in cells), path.name


def test_every_example_has_a_test():
    here = Path(__file__).read_text("utf-8") + (ROOT / "tests/lab/posttraining/test_whole_path.py").read_text("utf-8")
    examples = list((ROOT / "examples").glob("*.py"))
    assert len(examples) > 1
    assert all(path.stem in here for path in examples)


def test_watch_a_loop_trains_and_writes_the_page(tmp_path, monkeypatch, capsys):
    arguments = ["--folder", str(tmp_path / "run"), "--steps", "3", "--num-layers", "2", "--placement", "keel"]
    monkeypatch.setattr(sys, "argv", ["watch_a_loop.py", *arguments])
    loaded("examples/watch_a_loop.py").main()
    assert re.search(r"loss \d\.\d+; the page is ", capsys.readouterr().out)
    assert (tmp_path / "run" / "report.html").is_file()


@pytest.mark.slow
def test_choose_and_pretrain_trains_what_it_chose(tmp_path, monkeypatch, capsys):
    module = loaded("examples/choose_and_pretrain.py")
    size = {"num_layers": 2, "hidden_size": 16, "num_heads": 2, "sequence_length": 16, "batch_size": 2}
    monkeypatch.setattr(module, "SIZE", {**size, "eval_blocks": 4})
    monkeypatch.setattr(module, "best", lambda results: tuple(results.iloc[0][["placement", "learning_rate"]]))
    words = tmp_path / "words.txt"
    words.write_text("The norm sits before, after and between.\n" * 400, encoding="utf-8")
    arguments = ["--corpus", str(words), "--folder", str(tmp_path / "runs"), "--scale", "0.01"]
    monkeypatch.setattr(sys, "argv", ["choose_and_pretrain.py", *arguments])
    module.main()
    assert "the model is" in capsys.readouterr().out
    assert (tmp_path / "runs" / "run" / "model" / "config.json").is_file()


def test_what_is_chosen_has_trained_with_every_seed():
    import pandas as pd

    rows = [("a", 1e-3, "finished", 2.0), ("a", 1e-3, "short", 2.2), ("b", 1e-3, "finished", 1.0)]
    rows += [("b", 1e-3, "stuck", 3.0), ("a", 1e-2, "finished", 2.4), ("a", 1e-2, "finished", 2.5)]
    results = pd.DataFrame(rows, columns=["placement", "learning_rate", "status", "eval_loss"])
    assert loaded("examples/choose_and_pretrain.py").best(results) == ("a", 1e-3)
    with pytest.raises(SystemExit, match="more steps"):
        loaded("examples/choose_and_pretrain.py").best(results[results["placement"] == "b"])
