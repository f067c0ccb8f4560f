"""The card of a trained model, and its way to the hub: only if asked for, never without a token."""

import json
import re
from dataclasses import replace

import huggingface_hub
import pytest
from huggingface_hub import ModelCard as HubCard
from training.tiny_runs import result
from transformers import LlamaConfig

from lamina import build
from lamina.errors import UserError
from lamina.modeling.building import make_plan
from lamina.training import pretrain as pretraining
from lamina.training.checkpointing import saved_model
from lamina.training.checkpointing.saved_model import ModelCard

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


def test_a_name_cannot_break_out_of_its_cell(tiny, tmp_path, corpus):
    odd = tmp_path / "a | b `c`.txt"
    odd.write_text(corpus.read_text())
    pretraining.pretrain(replace(tiny(**PLAIN), corpus=str(odd)), bar=False)
    row = next(r for r in (tmp_path / "run/model/README.md").read_text().splitlines() if r.startswith("| corpus"))
    assert row.endswith("a \\| b 'c'.txt` |")


def test_a_placements_name_and_the_machines_folders_stay_out_of_a_card(tmp_path):
    """A placement's name comes from somebody's YAML; the hub cleans what a card holds, other viewers do not."""
    name = "pl <script>alert(1)</script> [x](javascript:1)"
    sizes = {"hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 2, "num_attention_heads": 2}
    model = build(LlamaConfig(vocab_size=61, **sizes), replace(make_plan("pre_ln", 2), placement=name))
    card = ModelCard(
        head="causal_lm",
        data={"corpus": "/home/me/a b.txt:0.7,/home/me/c.txt:0.3", "data": "hf:GAIR/lima"},
        result={},
        command="lamina sft --from-model /home/me/base --placement '/home/me/p.yaml(alpha=1)' --data 'my rows.jsonl'",
        base_model="/home/me/base",
    )
    card.write(model, tmp_path)
    text = (tmp_path / "README.md").read_text()
    assert "/home" not in text
    assert "| corpus | `a b.txt:0.7,c.txt:0.3` |" in text
    assert "| data | `hf:GAIR/lima` |" in text
    assert "lamina sft --from-model base --placement 'p.yaml(alpha=1)' --data 'my rows.jsonl'" in text
    outside = re.sub(r"```.*?```|`[^`\n]*`", "", HubCard(text).content, flags=re.DOTALL)
    assert not re.search(r"<script|[^\\]\[x", outside), outside
    assert "&lt;script&gt;" in outside
    assert "<script" not in (tmp_path / "placement.svg").read_text()


def test_a_model_is_pushed_when_it_is_asked_for(trained, token, uploads):
    trained(push_to_hub="me/model", **PLAIN)
    assert uploads[0] == ("create", "me/model", {"private": True, "exist_ok": True})
    assert {"README.md", "model.safetensors"} <= set(uploads[1][2])


def test_a_finished_run_is_pushed_later(trained, tmp_path, token, uploads):
    trained(**PLAIN)
    later = {"output": str(tmp_path / "run"), "push_to_hub": "me/model"}
    pretraining.pretrain(later, resume=True, bar=False)
    assert [entry[0] for entry in uploads] == ["create", "upload"]


def test_without_a_token_nothing_is_trained(tiny, monkeypatch, tmp_path):
    monkeypatch.setattr(huggingface_hub, "get_token", lambda: None)
    with pytest.raises(UserError, match="push_to_hub: 'me/model' needs a token") as error:
        pretraining.pretrain(tiny(push_to_hub="me/model"), bar=False)
    assert "\n" not in str(error.value)
    assert not (tmp_path / "run").exists()


def test_a_hub_that_fails_costs_nothing_but_a_line(trained, tmp_path, token, monkeypatch, caplog):
    class Broken:
        def create_repo(self, name, **options):
            raise OSError("no network")

    monkeypatch.setattr(huggingface_hub, "HfApi", Broken)
    assert trained(push_to_hub="me/model", **PLAIN)["status"] in ("short", "finished", "stuck")
    assert (tmp_path / "run" / "model" / "model.safetensors").is_file()
    assert "later: hf upload me/model" in caplog.text
    assert not saved_model.push(tmp_path / "run" / "model", "me/model")
