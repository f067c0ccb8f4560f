"""The scripts of examples/ run at a size that takes seconds. The notebooks run when the site is built (test_site)."""

import json
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
    here = Path(__file__).read_text("utf-8")
    examples = [path.stem for path in (ROOT / "examples").glob("*.py")]
    assert len(examples) == 5
    assert all(f"test_{name}_" in here for name in examples)


def test_wire_own_modules_trains_and_writes_the_page(tmp_path, monkeypatch, capsys):
    arguments = ["--folder", str(tmp_path / "run"), "--steps", "3", "--num-layers", "2", "--placement", "keel"]
    monkeypatch.setattr(sys, "argv", ["wire_own_modules.py", *arguments])
    loaded("examples/wire_own_modules.py").main()
    assert re.search(r"loss \d\.\d+; the page is ", capsys.readouterr().out)
    assert (tmp_path / "run" / "report.html").is_file()


def run_example(name, arguments, monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", [f"{name}.py", *map(str, arguments)])
    loaded(f"examples/{name}.py").main()
    return capsys.readouterr().out


def test_build_keel_finds_no_difference(tmp_path, monkeypatch, capsys):
    block = tmp_path / "keel_block.py"
    out = run_example("build_keel", ["--num-layers", 3, "--output", block], monkeypatch, capsys)
    assert out.count("largest difference 0.0e+00") == 3
    assert "alpha" in block.read_text("utf-8")


@pytest.mark.slow
def test_find_the_spike_names_the_planted_step_and_the_rate(tmp_path, monkeypatch, capsys):
    out = run_example("find_the_spike", ["--folder", tmp_path / "run", "--steps", 60], monkeypatch, capsys)
    assert "times 40 at step 40" in out
    assert "learning rate too high" in out
    assert "from 0.003 to 0.12 at step 41" in out
    assert (tmp_path / "run" / "diagnosis.html").is_file()


def test_inspect_and_prune_names_the_placement_and_removes_a_layer(tmp_path, monkeypatch, capsys, tiny_checkpoint):
    arguments = [tiny_checkpoint, "--folder", tmp_path / "seen", "--tokenizer", "bytes"]
    out = run_example("inspect_and_prune", arguments, monkeypatch, capsys)
    assert "placement: peri_ln" in out
    assert "Removing layer" in out
    assert re.search(r"without layers \[\d\] the loss is \d\.\d+", out)
    assert (tmp_path / "seen" / "probed" / "report.html").is_file()
    pruned = json.loads((tmp_path / "seen" / "pruned" / "config.json").read_text("utf-8"))
    assert pruned["num_hidden_layers"] == 2


@pytest.fixture
def tiny_checkpoint(tmp_path):
    """A Peri-LN model of bytes with 3 layers, saved."""
    from transformers import LlamaConfig

    import lamina

    sizes = {"hidden_size": 32, "intermediate_size": 64, "num_attention_heads": 2, "vocab_size": 258}
    config = LlamaConfig(num_hidden_layers=3, **sizes)
    lamina.build(config, "peri_ln").save_pretrained(tmp_path / "model")
    return tmp_path / "model"


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
    with pytest.raises(SystemExit, match="no placement trained with every seed"):
        loaded("examples/choose_and_pretrain.py").best(results[results["placement"] == "b"])
