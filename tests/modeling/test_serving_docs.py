"""docs/serving.md works as written: its Python blocks run in order in a folder of their own."""

import importlib.util
import re
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM

from lamina.modeling.backbones.conversion import EQUIVALENTS
from lamina.placements import names

PAGE = Path(__file__).parents[2] / "docs" / "serving.md"
TEXT = PAGE.read_text(encoding="utf-8")
BLOCKS = re.findall(r"^```python\n(.*?)^```$", TEXT, re.M | re.S)
SLOW = ("torch.export", "onnxruntime")
LIBRARIES = ("peft", "optimum.quanto", "torchao", "onnxruntime", "onnxscript")


def run(blocks, folder, monkeypatch):
    """What the blocks define; a block that imports what is not installed is left out."""
    monkeypatch.chdir(folder)
    page: dict = {"__name__": "serving_page"}
    for block in blocks:
        if all(importlib.util.find_spec(name) for name in LIBRARIES if re.search(rf"(from|import) {name}\b", block)):
            exec(compile(block, str(PAGE), "exec"), page)
    return page


def test_the_page_has_the_blocks_that_are_run_here():
    assert len(BLOCKS) == 7
    assert "DistributedConfig" in BLOCKS[-1]  # run by test_tensor_parallel in two processes


def test_models_are_adapted_merged_and_quantized(tmp_path, monkeypatch):
    pytest.importorskip("peft")
    pytest.importorskip("optimum.quanto")
    fast = [block for block in BLOCKS[:-1] if not any(word in block for word in SLOW)]
    page = run(fast, tmp_path, monkeypatch)
    merged = AutoModelForCausalLM.from_pretrained("models/merged")
    assert torch.isfinite(merged(page["ids"]).logits).all()
    assert Path("models/adapter/adapter_model.safetensors").is_file()


@pytest.mark.slow
def test_models_are_exported(tmp_path, monkeypatch):
    pytest.importorskip("onnxruntime")
    page = run([BLOCKS[0], *(b for b in BLOCKS[:-1] if any(word in b for word in SLOW))], tmp_path, monkeypatch)
    with torch.no_grad():
        expected = page["model"](page["ids"]).logits
    torch.testing.assert_close(torch.from_numpy(page["logits"]), expected, rtol=1e-4, atol=1e-4)


def test_the_table_of_equal_architectures_names_placements_and_architectures():
    convert = PAGE.with_name("convert.md").read_text(encoding="utf-8")
    table = convert[convert.index("| placement on a Llama |") :]
    rows = re.findall(r"^\| `(.+?)` \| `(.+?)` \|", table, re.M)
    assert {architecture for _, architecture in rows} == EQUIVALENTS.keys() - {"qwen2"}  # that needs biases
    assert {placement.partition("(")[0] for placement, _ in rows} <= set(names())
