"""What a run leaves in its folder, whatever the folder's name, its model's card, and who may write there."""

import json
import math
import re
import shutil
from dataclasses import replace
from pathlib import Path

import huggingface_hub
import pytest
import torch
import yaml
from huggingface_hub import ModelCard as HubCard
from training.tiny_runs import assert_same_records, assert_same_weights, cut_at, layers, result, settings
from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaConfig

from lamina import build
from lamina.errors import UserError
from lamina.jobs import folder as run_folder
from lamina.jobs.files import read_config
from lamina.modeling.building import make_plan
from lamina.modeling.modeling_lamina import HEADS
from lamina.reports import report
from lamina.reports.records import Trial
from lamina.training import pretrain as pretraining
from lamina.training.checkpointing import saved_model
from lamina.training.checkpointing.saved_model import ModelCard
from lamina.training.settings import PretrainSettings


@pytest.fixture(scope="module")
def run(corpus, tmp_path_factory):
    folder = tmp_path_factory.mktemp("run") / "run"
    pretraining.pretrain(settings(corpus, folder, logging_steps=2, eval_steps=4), bar=False)
    return folder


@pytest.fixture
def copied(run, tmp_path):
    return shutil.copytree(run, tmp_path / "run")


def test_metrics_hold_the_fields_of_the_design(run):
    lines = [yaml.safe_load(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    logged = [line for line in lines if "loss" in line]
    assert [line["step"] for line in logged] == [1, 2, 4]
    for line in logged:
        assert list(line) == ["step", "tokens", "loss", "learning_rate", "grad_norm", "tokens_per_second"]
        assert line["tokens"] == line["step"] * 2 * 16
        assert line["loss"] > 0
        assert line["tokens_per_second"] > 0


def test_layers_are_a_tidy_table(run):
    table = layers(run)
    assert list(table.columns) == ["step", "layer", "sublayer", "role", "index", "metric", "value"]
    every_step = table.metric.str.startswith("step_")
    assert set(table.step[~every_step]) == {0, 1, 2, 4}
    assert set(table.step[every_step]) == {1, 2, 3, 4}
    assert set(table.sublayer) == {"attention", "feed_forward", "block", "model"}
    assert not table.duplicated(list(table.columns[:-1])).any()
    assert table.value.notna().all()


def test_the_result_holds_the_fields_of_the_design(run):
    found = result(run)
    for key in ("status", "eval_loss", "perplexity", "tokens", "seconds", "flops", "reason"):
        assert key in found
    assert found["perplexity"] == pytest.approx(math.exp(found["eval_loss"]))
    assert found["tokens"] == 4 * 2 * 16
    assert found["flops"] > 0
    assert found["seconds"] > 0


def test_the_saved_model_has_the_reported_eval_loss(run, tiny):
    from lamina.data.blocks import spread
    from lamina.data.packed import prepare_blocks

    model = AutoModelForCausalLM.from_pretrained(run / "model").eval()
    tokenizer = AutoTokenizer.from_pretrained(run / "model")
    blocks, _ = prepare_blocks(tiny().corpus, "bytes", 16, progress=False)
    ids = torch.stack([blocks.eval[i]["input_ids"] for i in spread(len(blocks.eval), 4)])
    assert model.config.get_text_config().vocab_size == len(tokenizer)
    with torch.no_grad():
        logits = model(input_ids=ids).logits[:, :-1].double()
    naive = torch.nn.functional.cross_entropy(logits.flatten(0, 1), ids[:, 1:].flatten()).item()
    assert result(run)["eval_loss"] == pytest.approx(naive, rel=1e-5)


def test_the_configuration_runs_again_and_gives_the_same(run, trained, tmp_path):
    stored = PretrainSettings.from_dict(read_config(run))
    again = stored.to_dict()
    del again["output"], again["corpus"]
    assert trained("again", **again)["eval_loss"] == result(run)["eval_loss"]
    assert_same_weights(run, tmp_path / "again")


def test_the_environment_names_versions_machine_seed_and_revision(run):
    found = yaml.safe_load((run / "environment.json").read_text())
    assert found["versions"]["torch"] in (torch.__version__.split("+")[0], torch.__version__)
    assert {"python", "lamina", "transformers", "accelerate"} <= set(found["versions"])
    assert found["machine"]["cores"]
    assert found["seed"] == 0
    assert "git_revision" in found


def scalars(folder) -> dict:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    events = EventAccumulator(str(folder), size_guidance={"scalars": 0})
    events.Reload()
    return {tag: [(e.step, e.value) for e in events.Scalars(tag)] for tag in events.Tags()["scalars"]}


def test_tensorboard_gets_the_layers_metrics_of_each_run_of_a_process(trained, tmp_path, monkeypatch):
    pytest.importorskip("tensorboard")
    monkeypatch.setenv("TENSORBOARD_LOGGING_DIR", "")  # what a run writes into the environment is undone
    monkeypatch.delenv("TENSORBOARD_LOGGING_DIR")
    trained("before", report_to="tensorboard", steps=1)
    trained(report_to="tensorboard", logging_steps=2)
    (events,) = (tmp_path / "run").rglob("events.out.tfevents.*")
    tags = scalars(events.parent)
    layered = {tag: v for tag, v in tags.items() if "gradient_norm" in tag and "001.attention" in tag}
    assert len(layered) == 1
    recorded = layers(tmp_path / "run").query("metric == 'gradient_norm' and layer == 1 and sublayer == 'attention'")
    (found,) = layered.values()
    assert found == [(step, pytest.approx(value, rel=1e-5)) for step, value in zip(recorded.step, recorded.value)]  # noqa: B905
    assert any(tag.endswith("/loss") for tag in tags)


def test_overwrite_deletes_what_lamina_wrote(copied):
    (copied / "old").touch()
    with run_folder.hold(copied, overwrite=True) as resumes:
        assert not resumes
        assert sorted(p.name for p in copied.iterdir()) == [".lock", ".replaces"]
        (copied / "config.yaml").touch()
    assert sorted(p.name for p in copied.iterdir()) == [".lock", "config.yaml"]
    assert not copied.with_name("run.old").exists()


@pytest.mark.parametrize("name", ["notes.txt", "config.yaml", "result.json"])
def test_overwrite_leaves_alone_what_lamina_did_not_write(tmp_path, name):
    """Many programs keep a config.yaml or a result.json."""
    theirs = tmp_path / "theirs"
    theirs.mkdir()
    (theirs / name).write_text("debug: true\n")
    (theirs / "thesis.tex").write_text("years of work")
    with pytest.raises(UserError, match="did not write"), run_folder.hold(theirs, overwrite=True):
        pass
    assert (theirs / "thesis.tex").read_text() == "years of work"


def test_a_bad_corpus_with_overwrite_deletes_nothing(copied, refused):
    assert "no such file" in refused("pretrain", "--corpus", "no/such.txt", "--output", copied, "--overwrite")
    assert (copied / "result.json").is_file()


NAMES = ["lr:3e-3", "file:x", "http:a", "-a b%20c#d?e ünï"]


@pytest.mark.parametrize("name", [NAMES[0], *(pytest.param(name, marks=pytest.mark.slow) for name in NAMES[1:])])
def test_a_run_in_a_folder_of_any_name(tiny, trained, tmp_path, monkeypatch, caplog, name):
    monkeypatch.chdir(tmp_path)
    chosen = tiny(save_steps=2, steps=4, probe_every=2, probes="hidden_states", logging_steps=1)
    chosen = replace(chosen, output=name)  # relative, as on a command line
    with cut_at(4):
        pretraining.pretrain(chosen, bar=False)
    assert pretraining.pretrain(chosen, resume=True, bar=False)["steps"] == 4
    trained("plain", save_steps=2, steps=4, logging_steps=1)
    assert_same_records(tmp_path / name, tmp_path / "plain")
    page = report(Path(name)).read_text(encoding="utf-8")
    assert "No records by layer" not in page
    trial = Trial(name=name, placement="pre_ln", folder=Path(name))
    assert sorted(trial.layers.frame.step.unique()) == [0, 1, 2, 3, 4]
    assert sorted(trial.probes["hidden_states"].step.unique()) == [0, 2, 4]
    assert "is not readable" not in caplog.text


PLAIN = {"precision": "fp32", "compile": "off"}


@pytest.fixture
def token(monkeypatch):
    monkeypatch.setattr(huggingface_hub, "get_token", lambda: "a token")


@pytest.fixture
def uploads(monkeypatch):
    """What would go to the hub."""
    seen = []

    class Api:
        def create_repo(self, name, **options):
            seen.append(("create", name, options))

        def upload_folder(self, *, repo_id, folder_path, commit_message):
            seen.append(("upload", repo_id, sorted(p.name for p in folder_path.iterdir())))

    monkeypatch.setattr(huggingface_hub, "HfApi", Api)
    return seen


def test_every_model_has_a_card_that_the_hub_can_read(trained, tmp_path, uploads):
    trained(placement="mix_ln(alpha=0.5)", **PLAIN)
    folder = tmp_path / "run" / "model"
    card = HubCard.load(folder / "README.md")
    assert card.data.library_name == "transformers"
    assert card.data.pipeline_tag == "text-generation"
    assert {"lamina", "mix_ln", "llama"} <= set(card.data.tags)
    text = card.content
    assert "![Where the norms sit](placement.svg)" in text
    assert (folder / "placement.svg").read_text(encoding="utf-8").startswith("<svg")
    outcome = result(tmp_path / "run")
    assert f"| eval loss | `{outcome['eval_loss']:.4f}` |" in text
    assert "words.txt" in text
    assert "AutoModelForCausalLM" in text
    assert "lamina pretrain" in text
    assert {"README.md", "placement.svg"} <= set(json.loads((folder / "manifest.json").read_text())["files"])
    assert uploads == []  # never by default


def test_a_placements_name_and_the_machines_folders_stay_out_of_a_card(tmp_path):
    """A placement's name comes from somebody's YAML; the hub cleans what a card holds, other viewers do not."""
    name = "pl <script>alert(1)</script> [x](javascript:1)"
    sizes = {"hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 2, "num_attention_heads": 2}
    model = build(LlamaConfig(vocab_size=61, **sizes), replace(make_plan("pre_ln", 2), placement=name))
    data = {"corpus": "/home/me/a | b `c`.txt:0.7,/home/me/c.txt:0.3", "data": "hf:GAIR/lima"}
    words = "lamina sft --from-model /home/me/base --placement '/home/me/p.yaml(alpha=1)' --data 'my rows.jsonl'"
    card = ModelCard(head="causal_lm", data=data, result={}, command=words, base_model="/home/me/base")
    card.write(model, tmp_path)
    text = (tmp_path / "README.md").read_text()
    assert "/home" not in text
    assert "| corpus | `a \\| b 'c'.txt:0.7,c.txt:0.3` |" in text  # a name does not break out of its cell
    assert "| data | `hf:GAIR/lima` |" in text
    assert "lamina sft --from-model base --placement 'p.yaml(alpha=1)' --data 'my rows.jsonl'" in text
    outside = re.sub(r"```.*?```|`[^`\n]*`", "", HubCard(text).content, flags=re.DOTALL)
    assert not re.search(r"<script|[^\\]\[x", outside), outside
    assert "&lt;script&gt;" in outside
    assert "<script" not in (tmp_path / "placement.svg").read_text()


def test_a_head_of_ones_own_has_a_card(tmp_path, monkeypatch):
    """The hub knows no task for it, and the run has ended: it must not fail over its card."""
    monkeypatch.setitem(HEADS, "own", HEADS["causal_lm"])
    sizes = {"hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 1, "num_attention_heads": 2}
    model = build(LlamaConfig(vocab_size=61, **sizes), "pre_ln")
    ModelCard(head="own", data={}, result={}, command="lamina pretrain").write(model, tmp_path)
    assert "pipeline_tag" not in (tmp_path / "README.md").read_text()


def test_a_model_is_pushed_when_it_is_asked_for(trained, token, uploads):
    trained(push_to_hub="me/model", **PLAIN)
    assert uploads[0] == ("create", "me/model", {"private": True, "exist_ok": True})
    assert {"README.md", "model.safetensors"} <= set(uploads[1][2])


def test_a_finished_run_is_pushed_later(trained, tmp_path, token, uploads):
    trained(**PLAIN)
    later = {"output": str(tmp_path / "run"), "push_to_hub": "me/model"}
    pretraining.pretrain(later, resume=True, bar=False)
    assert [entry[0] for entry in uploads] == ["create", "upload"]


def test_a_hub_that_fails_costs_nothing_but_a_line(trained, tmp_path, token, monkeypatch, caplog):
    class Broken:
        def create_repo(self, name, **options):
            raise OSError("no network")

    monkeypatch.setattr(huggingface_hub, "HfApi", Broken)
    assert trained(push_to_hub="me/model", **PLAIN)["status"] in ("short", "finished", "stuck")
    assert (tmp_path / "run" / "model" / "model.safetensors").is_file()
    assert "To upload later, run: hf upload me/model" in caplog.text
    assert not saved_model.push(tmp_path / "run" / "model", "me/model")
