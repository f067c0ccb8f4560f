import json
import socket
import sys

import datasets
import pytest

from lamina.data.corpus import Corpus
from lamina.data.sources.hub_datasets import parse
from lamina.errors import UserError


@pytest.fixture
def saved(tmp_path):
    parts = {"train": ["one", "two", None], "test": ["three"]}
    splits = {name: datasets.Dataset.from_dict({"text": rows}) for name, rows in parts.items()}
    datasets.DatasetDict(splits).save_to_disk(str(tmp_path / "saved"))
    return tmp_path / "saved"


def texts(corpus, **options):
    return [document.text for document in Corpus.parse(corpus, **options).documents()]


def fingerprint(corpus):
    return Corpus.parse(corpus).fingerprint()


@pytest.mark.parametrize(
    ("corpus", "parts"),
    [
        ("hf:me/text", ("me/text", None, None)),
        ("hf:me/text:en", ("me/text", "en", None)),
        ("hf:me/text@test", ("me/text", None, "test")),
        ("hf:me/text:en@train[:1%]", ("me/text", "en", "train[:1%]")),
    ],
)
def test_name_configuration_and_split_are_taken_apart(corpus, parts):
    source = parse(corpus)
    assert (source.name, source.config, source.split) == parts


def test_a_folder_that_datasets_saved_gives_its_train_split_or_another_one(saved):
    assert texts(f"hf:{saved}") == ["one", "two"]
    assert texts(f"hf:{saved}@test") == ["three"]


def test_a_folder_of_files_is_loaded_as_a_data_set(tmp_path, monkeypatch):
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "hf-cache")
    folder = tmp_path / "rows"
    folder.mkdir()
    (folder / "train.jsonl").write_text("".join(json.dumps({"body": word}) + "\n" for word in ("one", "two")))
    assert texts(f"hf:{folder}", text_field="body") == ["one", "two"]


def test_an_unknown_split_and_an_unknown_column_are_refused_with_what_there_is(saved):
    with pytest.raises(UserError, match="allowed: test, train"):
        texts(f"hf:{saved}@tset")
    with pytest.raises(UserError, match="allowed: text"):
        texts(f"hf:{saved}", text_field="body")


def test_the_fingerprint_of_a_local_data_set_follows_content_and_split(saved):
    first = fingerprint(f"hf:{saved}")
    assert first == fingerprint(f"hf:{saved}")
    assert first != fingerprint(f"hf:{saved}@test")
    (saved / "train/more.txt").write_text("x")
    assert first != fingerprint(f"hf:{saved}")


def test_a_name_is_needed():
    with pytest.raises(UserError, match="names no data set"):
        Corpus.parse("hf:")


def test_a_missing_library_names_the_extra_to_install(monkeypatch):
    monkeypatch.setitem(sys.modules, "datasets", None)
    with pytest.raises(UserError, match=r"pip install lamina\[hub\]"):
        texts("hf:me/text")


def test_without_a_network_one_clear_line_comes_at_once_and_the_offline_switches_are_turned_back(tmp_path, monkeypatch):
    def no_address(*_args, **_options):
        raise socket.gaierror("Name or service not known")

    monkeypatch.setattr(socket, "getaddrinfo", no_address)
    monkeypatch.setattr("lamina.core.hub_access.getproxies", dict)
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "hf-cache")
    before = datasets.config.HF_HUB_OFFLINE
    with pytest.raises(UserError, match="hub cannot be reached") as caught:
        texts("hf:nobody/nothing-at-all")
    assert "\n" not in str(caught.value)
    assert datasets.config.HF_HUB_OFFLINE is before


def test_an_error_of_the_library_becomes_one_line(monkeypatch):
    def fail(*_args, **_options):
        raise ValueError("BuilderConfig 'fr' not found.\nAvailable: ['en']")

    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", False)
    monkeypatch.setattr("lamina.core.hub_access.hub_resolves", lambda: True)
    monkeypatch.setattr(datasets, "load_dataset", fail)
    with pytest.raises(UserError, match="BuilderConfig 'fr' not found") as caught:
        texts("hf:me/text:fr")
    assert "\n" not in str(caught.value)
