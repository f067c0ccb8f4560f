"""`lamina probe` from end to end, with probes of the user's own, so that it holds whatever probes there are."""

import json

import pandas as pd
import plotly.io
import pytest
import torch
import yaml
from own_probes import write_probes
from training.tiny_runs import flags
from transformers import LlamaConfig, LlamaForCausalLM

from lamina.cli import main
from lamina.probes.engine import registry

SMALL = ("--tokenizer", "bytes", "--sequence-length", "16", "--sequences", "8", "--batch-size", "2", "--device", "cpu")


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    torch.manual_seed(0)
    sizes = {"hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 3, "num_attention_heads": 2}
    config = LlamaConfig(vocab_size=300, max_position_embeddings=64, **sizes)
    folder = tmp_path_factory.mktemp("checkpoint") / "tiny"
    LlamaForCausalLM(config).save_pretrained(folder)
    return folder


@pytest.fixture(autouse=True)
def own(tmp_path):
    """Two files of probes."""
    return write_probes(tmp_path)


@pytest.fixture
def probe(checkpoint, corpus, tmp_path):
    def call(probes, *more, output="out"):
        argv = ["probe", str(checkpoint), "--probes", probes, "--corpus", str(corpus), *SMALL]
        return main([*argv, "--output", str(tmp_path / output), *more]), tmp_path / output

    return call


def result(folder):
    return json.loads((folder / "result.json").read_text(encoding="utf-8"))


def test_the_folder_holds_settings_tables_figures_and_the_page(probe, own, checkpoint, capsys):
    code, folder = probe(",".join(own))
    assert code == 0
    found = {path.relative_to(folder).as_posix() for path in folder.rglob("*") if path.is_file()} - {".lock"}
    tables = {"mean_square.parquet", "weight_norm.parquet", "figures/mean_square-1.json"}
    assert found == {"config.yaml", "environment.json", "result.json", "report.html"} | tables
    out = capsys.readouterr().out
    assert "3 layers of width 16" in out
    assert "mean_square" in out
    assert "From " in out
    assert str(folder / "report.html") in out
    told = result(folder)
    assert told["status"] == "finished"
    assert told["model"]["num_layers"] == 3
    assert told["model"]["placement"] == "Pre-LN"
    assert told["inputs"]["text"] == "8 × 16 tokens"
    assert told["forwards"] == 4
    assert told["probes"]["mean_square"]["standard_error"] > 0
    assert told["probes"]["weight_norm"]["notes"] == ["weights are <not> activations"]
    assert "weights are &lt;not&gt; activations" in (folder / "report.html").read_text(encoding="utf-8")
    assert yaml.safe_load((folder / "config.yaml").read_text(encoding="utf-8"))["checkpoint"] == str(checkpoint)
    assert len(plotly.io.from_json((folder / "figures/mean_square-1.json").read_text(encoding="utf-8")).data) == 1
    (folder / "report.html").unlink()
    assert main(["report", str(folder)]) == 0
    assert "Mean square" in (folder / "report.html").read_text(encoding="utf-8")


def test_the_table_is_what_the_model_computes(probe, own, checkpoint):
    _, folder = probe(own[1])
    model = LlamaForCausalLM.from_pretrained(checkpoint)
    expected = [sum(p.double().square().sum().item() for p in x.parameters()) ** 0.5 for x in model.model.layers]
    assert pd.read_parquet(folder / "weight_norm.parquet")["value"].tolist() == pytest.approx(expected, rel=1e-5)


def test_options_reach_the_probe_and_a_bad_one_is_named(probe, own, capsys):
    _, folder = probe(f"{own[0]}(power=1)")
    _, other = probe(own[0], output="other")
    one, two = (pd.read_parquet(f / "mean_square.parquet")["value"] for f in (folder, other))
    assert not (one == two).any()
    for spec, said in ((f"{own[0]}(power=-1)", "power: -1"), (f"{own[0]}(powr=1)", "power")):
        assert probe(spec, output="bad")[0] == 2
        assert said in capsys.readouterr().err


def test_a_folder_in_use_is_refused_and_overwrite_starts_afresh(probe, own, capsys):
    _, folder = probe(own[0])
    before = (folder / "result.json").read_bytes()
    assert probe(own[1])[0] == 2
    assert "is not empty" in capsys.readouterr().err
    assert (folder / "result.json").read_bytes() == before
    assert probe(own[1], "--overwrite")[0] == 0
    assert not (folder / "mean_square.parquet").exists()
    assert list(result(folder)["probes"]) == ["weight_norm"]


def test_ctrl_c_keeps_what_is_finished_and_resume_goes_on(probe, own, monkeypatch, capsys, caplog):
    monkeypatch.setenv("INTERRUPT", "1")
    code, folder = probe(",".join(own))
    assert code == 130
    assert "interrupted" in capsys.readouterr().err
    assert "Lamina keeps 1 of 2 probes" in caplog.text
    assert result(folder)["status"] == "interrupted"
    assert list(result(folder)["probes"]) == ["mean_square"]
    assert "status: interrupted" in (folder / "report.html").read_text(encoding="utf-8")
    written = (folder / "mean_square.parquet").stat().st_mtime_ns

    monkeypatch.delenv("INTERRUPT")
    assert main(["probe", "--output", str(folder), "--resume"]) == 0, "the folder says the rest"
    assert (folder / "mean_square.parquet").stat().st_mtime_ns == written
    assert result(folder)["status"] == "finished"
    assert list(result(folder)["probes"]) == ["mean_square", "weight_norm"]


def test_resume_adds_a_probe_and_runs_again_one_whose_options_changed(probe, own):
    _, folder = probe(own[0])
    before = pd.read_parquet(folder / "mean_square.parquet")["value"]
    assert probe(own[1], "--resume")[0] == 0
    assert set(result(folder)["probes"]) == {"mean_square", "weight_norm"}
    assert probe(f"{own[0]}(power=1)", "--resume")[0] == 0
    assert not (pd.read_parquet(folder / "mean_square.parquet")["value"] == before).any()
    assert set(result(folder)["probes"]) == {"mean_square", "weight_norm"}


def test_a_table_that_was_edited_is_measured_again(probe, own, caplog):
    _, folder = probe(own[0])
    before = pd.read_parquet(folder / "mean_square.parquet")
    before.assign(value=before["value"] + 1).to_parquet(folder / "mean_square.parquet")
    assert probe(own[0], "--resume")[0] == 0
    assert pd.read_parquet(folder / "mean_square.parquet").equals(before)
    assert "mean_square.parquet: altered since Lamina wrote result.json" in caplog.text


def test_resume_refuses_other_settings(probe, own, capsys):
    _, folder = probe(own[0])
    before = (folder / "result.json").read_bytes()
    assert probe(own[1], "--resume", "--sequences", "4")[0] == 2
    assert "sequences: 4 differs from the folder's 8" in capsys.readouterr().err
    assert (folder / "result.json").read_bytes() == before


def test_a_probe_that_breaks_leaves_the_others_and_a_status(probe, own, monkeypatch, capsys):
    monkeypatch.setenv("BREAK", "1")
    code, folder = probe(",".join(reversed(own)))
    told, fault = result(folder), "finish (working.py, line 26): RuntimeError: broken"
    assert code == 1
    assert (told["status"], told["reason"]) == ("failed", f"weight_norm: {fault}")
    assert told["probes"]["mean_square"]["status"] == "finished"
    assert f"failed: {fault}" in capsys.readouterr().out
    assert f"Not measured: {fault}" in (folder / "report.html").read_text(encoding="utf-8")
    monkeypatch.delenv("BREAK")
    assert probe(",".join(own), "--resume")[0] == 0
    assert {one["status"] for one in result(folder)["probes"].values()} == {"finished"}


def test_a_named_probe_that_has_no_meaning_is_one_line_and_the_others_are_written(probe, own, monkeypatch, capsys):
    monkeypatch.setenv("REFUSE", "1")
    code, folder = probe(",".join(own))
    assert code == 2
    assert "no weights on Tuesdays" in capsys.readouterr().err
    told = result(folder)
    assert told["status"] == "finished"
    assert told["probes"]["weight_norm"]["status"] == "skipped"
    assert told["probes"]["mean_square"]["status"] == "finished"
    page = (folder / "report.html").read_text(encoding="utf-8")
    assert "Not measured: no weights on Tuesdays" in page
    assert told["probes"]["mean_square"]["notes"] == []


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({"corpus": "no_such.txt"}, "no_such.txt"),
        ({"sequence_length": 65}, "sequence_length: 65"),
        ({"layers": "no.such"}, "no.such"),
    ],
)
def test_bad_input_is_one_line_and_touches_no_folder(given, said, checkpoint, corpus, own, tmp_path, refused):
    settings = {"checkpoint": str(checkpoint), "corpus": str(corpus), "tokenizer": "bytes", "probes": own[0], **given}
    assert said in refused("probe", settings.pop("checkpoint"), *flags(**settings, output=tmp_path / "out"))
    assert not (tmp_path / "out").exists()


@pytest.mark.slow
def test_every_probe_has_its_section_on_a_causal_model(probe):
    code, folder = probe("all")
    assert code == 0
    told = result(folder)["probes"]
    assert set(told) == set(registry.names())
    assert "initial weights are unknown" in told.pop("weight_change")["reason"]
    page = (folder / "report.html").read_text(encoding="utf-8")
    for name, one in told.items():
        assert one["status"] == "finished", (name, one["reason"])
        assert one["sentences"], name
        assert one["figures"], name
        assert (folder / f"{name}.parquet").is_file()
    assert "A figure is missing" not in page


def test_an_overflow_comes_first_in_the_terminal_and_on_the_page(checkpoint, corpus, tmp_path, capsys):
    model = LlamaForCausalLM.from_pretrained(checkpoint)
    with torch.no_grad():
        model.model.layers[1].self_attn.q_proj.weight[3, 3] = 9e4
    model.save_pretrained(tmp_path / "hot")
    argv = ["probe", str(tmp_path / "hot"), "--probes", "gains,low_precision", "--corpus", str(corpus), *SMALL]
    assert main([*argv, "--output", str(tmp_path / "out")]) == 0
    said, page = capsys.readouterr().out, (tmp_path / "out" / "report.html").read_text(encoding="utf-8")
    overflow = "fp16 overflows to inf in the attention's weights in layer 1"
    assert 0 < said.index(overflow) < said.index("\ngains")
    assert "<title>hot: fp16 overflows to inf in the attention&#39;s weights in layer 1</title>" in page
    short = page[page.index('class="short"') :]
    assert short.index("fp16 overflows") < short.index("mean gain")


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["probe", "{gone}"], "checkpoint: '"),
        (["probe", "{model}", "--probes", "hidden_state"], "did you mean 'hidden_states'"),
        (["probe", "{model}", "--sequences", "0"], "sequences: 0"),
        (["eval", "{gone}", "--tasks", "generated"], "'"),
        (["compare", "--placements", "nope"], "unknown placement 'nope'"),
        (["prune", "{gone}", "--layers", "1"], "model: '"),
        (["prune", "{model}", "--by", "layerdrop", "--drop", "1"], "did you mean 'layer_drop'"),
        (["prune", "{model}", "--layers", "1", "--corpus", "{gone}/"], "corpus: "),
        (["graft", "{model}", "--placement", "kel"], "unknown placement 'kel'"),
        (["convert", "{gone}"], "source: '"),
    ],
)
def test_a_mistake_in_a_name_is_reported_before_a_used_output_folder(words, said, checkpoint, tmp_path, capsys):
    used = tmp_path / "used"
    used.mkdir()
    (used / "notes.txt").write_text("mine")
    words = [word.format(gone=tmp_path / "gone", model=checkpoint) for word in words]
    output = [str(used)] if words[0] == "convert" else ["--output", str(used)]
    assert main([*words, *output]) == 2
    error = capsys.readouterr().err
    assert said in error
    assert "is not empty" not in error
