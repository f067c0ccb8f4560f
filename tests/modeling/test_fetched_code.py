"""A configuration that makes transformers fetch code from the hub is refused, whoever reads it."""

from __future__ import annotations

import importlib.util
import json

import pytest
from transformers import LlamaConfig, LlamaForCausalLM

import lamina
from lamina.errors import UserError
from lamina.modeling.backbones import loading
from lamina.modeling.backbones.loading import read_config, refuse_fetched
from lamina.modeling.checkpoint import load

SIZES = {"hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 1, "num_attention_heads": 2}


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    folder = tmp_path_factory.mktemp("saved") / "model"
    LlamaForCausalLM(LlamaConfig(vocab_size=40, **SIZES)).save_pretrained(folder)
    return folder


@pytest.fixture
def with_fields(saved, tmp_path):
    def make(**fields):
        folder = tmp_path / "model"
        folder.mkdir()
        (folder / "model.safetensors").symlink_to(saved / "model.safetensors")
        config = json.loads((saved / "config.json").read_text())
        (folder / "config.json").write_text(json.dumps({**config, **fields}))
        return folder

    return make


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("attn_implementation", "owner/kernel"),
        ("attn_implementation", "owner/kernel@main:function"),
        ("attn_implementation", "paged|owner/kernel"),
        ("attn_implementation", {"text_config": "owner/kernel"}),
        ("_attn_implementation", "owner/kernel"),
        ("_attn_implementation_internal", "owner/kernel"),
        ("experts_implementation", "owner/kernel"),
        ("experts_implementation", "sonicmoe"),
        ("text_config", {"model_type": "llama", "attn_implementation": "owner/kernel"}),
        ("kernel_config", {"RMSNorm": "owner/kernel:RMSNorm"}),
        ("quantization_config", {"quant_method": "fp8", "kernel": "owner/kernel"}),
    ],
)
def test_a_kernel_of_the_hub_is_refused_by_its_field(field, value, with_fields):
    folder = with_fields(**{field: value})
    readers = (
        load,
        lambda path: read_config(path, "backbone", weights=False),
        lambda path: lamina.build(str(path), "pre_ln"),
    )
    for read in readers:
        with pytest.raises(UserError, match=rf"config\.json: \S*{field}\S*: '.*' is code on the hub") as caught:
            read(folder)
        assert "\n" not in str(caught.value)


def test_flash_attention_is_refused_only_where_transformers_would_fetch_it(with_fields, monkeypatch):
    folder = with_fields(attn_implementation="flash_attention_2")
    found = importlib.util.find_spec
    for installed, refused in (({"kernels"}, True), (set(), False), ({"kernels", "flash_attn"}, False)):
        monkeypatch.setattr(
            loading.importlib.util,
            "find_spec",
            lambda name, installed=installed: found("json") if name in installed else None,
        )
        data = json.loads((folder / "config.json").read_text())
        if refused:
            with pytest.raises(UserError, match="'flash_attention_2' is code on the hub"):
                refuse_fetched(data, "config.json")
        else:
            refuse_fetched(data, "config.json")


def test_an_adapter_cannot_name_a_module_that_peft_imports(with_fields):
    folder = with_fields()
    adapter = {"peft_type": "LORA", "megatron_config": {}, "megatron_core": "mine.own"}
    (folder / "adapter_config.json").write_text(json.dumps(adapter))
    with pytest.raises(UserError, match=r"adapter_config\.json: megatron_core: 'mine\.own'"):
        load(folder)


def test_own_kernels_of_transformers_and_paths_in_other_fields_are_no_fault(with_fields):
    folder = with_fields(attn_implementation="eager", _name_or_path="owner/kernel", auto_map={"AutoConfig": "a/b--c.D"})
    assert load(folder).model.config._attn_implementation == "eager"


def test_who_trusts_the_code_may_run_it(with_fields):
    folder = with_fields(attn_implementation="owner/kernel")
    assert read_config(folder, "model", trust_remote_code=True)._attn_implementation == "owner/kernel"
