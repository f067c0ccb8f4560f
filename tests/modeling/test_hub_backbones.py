"""A backbone by its name on the hub, as a machine without a network has it: in the hub's local cache."""

import pytest
import torch
from modeling.tiny import llama, token_ids

import lamina
from lamina.cli import main
from lamina.errors import UserError

NAME = "somebody/tiny.llama-3"


@pytest.fixture
def cached(tmp_path, monkeypatch):
    """The hub's cache with the configuration of one model."""
    place = tmp_path / "hub" / f"models--{NAME.replace('/', '--')}"
    llama(3).save_pretrained(place / "snapshots" / "0123abcd")
    (place / "refs").mkdir()
    (place / "refs" / "main").write_text("0123abcd")
    for module in ("huggingface_hub.constants", "transformers.utils.hub.constants"):
        monkeypatch.setattr(f"{module}.HF_HUB_CACHE", str(tmp_path / "hub"))
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)


@pytest.mark.usefixtures("cached")
def test_a_name_on_the_hub_is_a_backbone():
    torch.manual_seed(0)
    model = lamina.build(NAME, "keel", num_layers=2).eval()
    assert (model.config.num_hidden_layers, model.config.vocab_size) == (2, 61)
    torch.manual_seed(0)
    same = lamina.build(llama(2), "keel").eval()
    with torch.no_grad():
        assert torch.equal(model(token_ids()).logits, same(token_ids()).logits)


@pytest.mark.usefixtures("cached")
def test_a_model_that_is_not_there_is_one_line(capsys, tmp_path):
    with pytest.raises(UserError, match=r"backbone: 'nobody/nothing' is neither a folder nor a readable model"):
        lamina.build("nobody/nothing", "keel")
    command = ["pretrain", "--backbone", "nobody/nothing", "--output", str(tmp_path / "run"), "--steps", "1"]
    assert main(command) == 2
    assert "backbone: 'nobody/nothing'" in capsys.readouterr().err
    assert not (tmp_path / "run" / "result.json").exists()
