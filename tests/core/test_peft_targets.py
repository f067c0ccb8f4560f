"""PEFT's tables: what a method adapts in a Llama, it adapts in a Lamina model of any backbone."""

from types import ModuleType

import pytest

from lamina.core import peft_targets
from lamina.core.architectures import ARCHITECTURES


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
