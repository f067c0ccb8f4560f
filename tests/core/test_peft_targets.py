"""What a method of PEFT adapts in a Llama, it adapts in any Lamina model; code that runs once a module is imported."""

import importlib
import sys
from types import ModuleType

import pytest

from lamina.core import peft_targets
from lamina.core.architectures import ARCHITECTURES
from lamina.core.late_imports import when_imported


def names_of(model_type, adapted):
    """What a method's row for Llama reaches in a backbone of the table."""
    row = {name.rpartition(".")[2] for name in ARCHITECTURES[model_type].roles}
    return {target.rpartition(".")[2] for target in peft_targets.targets(adapted)} & row


@pytest.mark.parametrize(
    ("model_type", "reached"),
    [
        ("llama", {"q_proj", "v_proj"}),
        ("deepseek_v3", {"q_proj", "q_b_proj", "v_proj", "kv_b_proj", "qkv_proj"}),
        ("modernbert", {"Wqkv"}),
        ("vit", {"q_proj", "v_proj"}),
    ],
)
def test_queries_and_values_have_other_names_elsewhere(model_type, reached):
    assert names_of(model_type, ["q_proj", "v_proj"]) - {"qkv_proj"} == reached - {"qkv_proj"}


def test_one_name_that_means_two_things_keeps_its_sublayer():
    assert "feed_forward.module.Wo" in peft_targets.targets(["down_proj"])
    assert "attention.module.Wo" in peft_targets.targets(["o_proj"])
    assert not {"Wo", "attention.module.Wo"} & set(peft_targets.targets(["down_proj"]))


def test_a_table_that_is_still_to_come_gets_its_row():
    constants = ModuleType("constants")
    constants.TRANSFORMERS_MODELS_TO_NEW_TARGET_MODULES_MAPPING = {"llama": ["down_proj"], "gpt2": ["c_proj"]}
    constants.TRANSFORMERS_MODELS_TO_OLD_TARGET_MODULES_MAPPING = {"gpt2": ["c_proj"]}
    constants.TRANSFORMERS_MODELS_TO_ODD_TARGET_MODULES_MAPPING = {"llama": ".*proj"}
    peft_targets.put_rows(constants)
    assert "down_proj" in constants.TRANSFORMERS_MODELS_TO_NEW_TARGET_MODULES_MAPPING["lamina"]
    assert "lamina" not in constants.TRANSFORMERS_MODELS_TO_OLD_TARGET_MODULES_MAPPING
    assert "lamina" not in constants.TRANSFORMERS_MODELS_TO_ODD_TARGET_MODULES_MAPPING


def test_every_table_of_peft_that_knows_llama_knows_lamina():
    constants = pytest.importorskip("peft.utils.constants")
    tables = {name: table for name, table in vars(constants).items() if name.endswith("_MODULES_MAPPING")}
    known = [name for name, table in tables.items() if "llama" in table]
    assert len(known) > 20
    assert all("lamina" in tables[name] for name in known)


@pytest.fixture
def module(tmp_path, monkeypatch):
    (tmp_path / "imported_late.py").write_text("value = 1\n")
    monkeypatch.syspath_prepend(tmp_path)
    before = list(sys.meta_path)
    yield "imported_late"
    assert sys.meta_path == before, "nothing may stay behind"
    sys.modules.pop("imported_late", None)


@pytest.mark.parametrize("first", [True, False])
def test_it_is_done_once_in_either_order(module, first):
    seen = []
    if first:
        importlib.import_module(module)
    for _ in range(1 if first else 2):  # asked twice for the same, it is done once
        when_imported(module, seen.append)
    assert len(seen) == first
    imported = importlib.import_module(module)
    importlib.import_module(module)
    assert seen == [imported]
    assert seen[0].value == 1


def test_the_module_is_whole_when_it_is_seen(module):
    seen = []
    when_imported(module, lambda imported: seen.append(imported.value))
    importlib.import_module(module)
    assert seen == [1]
