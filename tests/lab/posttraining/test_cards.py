"""Every model after pretraining has a card, and goes to the hub only if that is asked for."""

import json

import huggingface_hub
import pytest
from huggingface_hub import ModelCard as HubCard
from lab.posttraining.tiny import common, preferences, sorting, write_rows

from lamina.errors import UserError
from lamina.lab.posttraining.pairs import reward
from lamina.lab.posttraining.sft import sft
from lamina.training import run


@pytest.fixture
def uploads(monkeypatch):
    pushed = []
    monkeypatch.setattr(run, "push", lambda folder, name: pushed.append((folder.name, name)))
    monkeypatch.setattr(huggingface_hub, "get_token", lambda: "a token")
    return pushed


def test_a_fine_tuned_model_says_what_it_was_tuned_from_and_on_what(base, tmp_path, uploads):
    data = write_rows(tmp_path / "a | b.jsonl", sorting(12))
    result = sft({**common(base, data, tmp_path / "run"), "template": "plain", "steps": 1}, bar=False)
    card = HubCard.load(tmp_path / "run" / "model" / "README.md")
    assert card.data.pipeline_tag == "text-generation"
    assert card.data.base_model is None, "the hub refuses a card with a folder there"
    assert f"Trained with Lamina, from `{base.name}`." in card.content
    assert {"lamina", "keel"} <= set(card.data.tags)
    assert f"| held-out loss | `{result['eval_loss']:.4f}` |" in card.content
    assert "| examples | `9` |" in card.content
    assert "| held-out accuracy |" in card.content
    assert "pairs" not in card.content
    assert "a \\| b.jsonl" in card.content
    assert "lamina sft --from-model" in card.content
    files = json.loads((tmp_path / "run" / "model" / "manifest.json").read_text())["files"]
    assert {"README.md", "placement.svg"} <= set(files)
    for file in files:
        for folder in (tmp_path, base.parent):
            assert str(folder).encode() not in (tmp_path / "run" / "model" / file).read_bytes(), (
                "a folder of the machine"
            )
    assert uploads == []


def test_a_reward_model_is_a_classifier_and_is_pushed_if_asked_for(base, tmp_path, uploads):
    data = write_rows(tmp_path / "pairs.jsonl", preferences(12))
    reward({**common(base, data, tmp_path / "run"), "push_to_hub": "me/judge", "steps": 1}, bar=False)
    card = HubCard.load(tmp_path / "run" / "model" / "README.md")
    assert card.data.pipeline_tag == "text-classification"
    assert "AutoModelForSequenceClassification" in card.content
    assert "| held-out accuracy |" in card.content
    assert uploads == [("model", "me/judge")]


def test_without_a_token_nothing_is_trained(base, tmp_path, monkeypatch):
    monkeypatch.setattr(huggingface_hub, "get_token", lambda: None)
    data = write_rows(tmp_path / "rows.jsonl", sorting(4))
    with pytest.raises(UserError, match="push_to_hub: 'me/model' needs a token"):
        sft({**common(base, data, tmp_path / "run"), "push_to_hub": "me/model"}, bar=False)
    assert not (tmp_path / "run").exists()
