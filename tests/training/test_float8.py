"""Float8 in the blocks' linear layers: which ones, what a run leaves, and what is refused. Emulated, on a CPU."""

import importlib.util
import json

import pytest
import torch
from safetensors.torch import load_file
from torch import nn
from torch._dynamo.utils import counters
from training.tiny_runs import SMALL, assert_same_weights, cut_at, flags, records, settings, torchrun
from transformers import AutoModelForCausalLM, LlamaConfig

import lamina
from lamina.cli import main
from lamina.core.extras import install
from lamina.errors import UserError
from lamina.training.execution.compiling import compile_blocks
from lamina.training.execution.float8 import check_float8, to_float8
from lamina.training.pretrain import pretrain

FLOAT8 = {"precision": "float8", "steps": 6, "save_steps": 2, "logging_steps": 1, "learning_rate": 1e-2}


@pytest.mark.skipif(importlib.util.find_spec("torchao") is not None, reason="torchao is installed")
def test_without_torchao_it_is_one_line(corpus, tmp_path, capsys):
    given = flags(corpus=corpus, steps=1, output=tmp_path / "run", precision="float8")
    assert main(["pretrain", *given]) == 2
    line = f"lamina: precision: 'float8' needs torchao. Run: {install('quantize')}"
    assert capsys.readouterr().err.strip().splitlines()[-1] == line
    assert not (tmp_path / "run").exists()


@pytest.fixture(scope="module")
def torchao():
    return pytest.importorskip("torchao.float8.float8_linear")


def test_the_blocks_linear_layers_multiply_in_float8(torchao):
    sizes = {"hidden_size": 32, "intermediate_size": 72, "num_hidden_layers": 2, "num_attention_heads": 2}
    model = lamina.build(LlamaConfig(**sizes, vocab_size=64), "keel")
    names = [name for name, _ in model.named_parameters()]
    to_float8(model, "cpu")
    found = {name.rpartition(".")[2] for name, layer in model.named_modules() if type(layer) is torchao.Float8Linear}
    assert found == {"q_proj", "k_proj", "v_proj", "o_proj"}  # 72 is no multiple of 16
    assert type(model.get_output_embeddings()) is nn.Linear
    assert [name for name, _ in model.named_parameters()] == names
    x = torch.randn(16, 32)
    layer = next(layer for layer in model.modules() if type(layer) is torchao.Float8Linear)
    exact = x @ layer.weight.T
    error = (layer(x) - exact).norm() / exact.norm()
    assert 1e-3 < error < 0.06  # 3 bits of mantissa: up to 2^-4 of each factor


def test_a_run_resumes_exactly_and_leaves_plain_weights(torchao, corpus, tmp_path):
    whole, part = (settings(corpus, tmp_path / name, **FLOAT8) for name in ("whole", "part"))
    pretrain(whole, bar=False)
    with cut_at(5):
        pretrain(part, bar=False)
    pretrain(part, resume=True, bar=False)
    assert records(tmp_path / "whole") == records(tmp_path / "part")
    assert_same_weights(tmp_path / "whole", tmp_path / "part")
    pretrain(settings(corpus, tmp_path / "bf16", **{**FLOAT8, "precision": "bf16"}), bar=False)
    losses = [[r["loss"] for r in records(tmp_path / name) if "loss" in r] for name in ("whole", "bf16")]
    assert losses[0] != losses[1]
    assert losses[0] == pytest.approx(losses[1], rel=2e-2)
    stored = [load_file(tmp_path / name / "model" / "model.safetensors") for name in ("whole", "bf16")]
    assert stored[0].keys() == stored[1].keys()
    assert {tensor.dtype for tensor in stored[0].values()} == {torch.float32}
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path / "whole" / "model")
    assert not any(isinstance(layer, torchao.Float8Linear) for layer in loaded.modules())
    configs = [json.loads((tmp_path / name / "model" / "config.json").read_text()) for name in ("whole", "bf16")]
    assert configs[0] == configs[1]


def test_a_compiled_block_is_one_graph_and_computes_the_same(torchao):
    sizes = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 3, "num_attention_heads": 2}
    model, ids = lamina.build(LlamaConfig(**sizes, vocab_size=64), "keel"), torch.arange(32).reshape(2, 16)
    to_float8(model, "cpu")
    plain = model(input_ids=ids, labels=ids).loss.detach()
    counters.clear()
    kinds = compile_blocks(model, backend="aot_eager")
    compiled = model(input_ids=ids, labels=ids).loss
    compiled.backward()
    assert (compiled.item(), counters["stats"]["unique_graphs"]) == (plain.item(), kinds)
    assert not counters["graph_break"]


@pytest.mark.slow
def test_two_processes_that_share_the_weights_train_nearly_the_same(torchao, corpus, tmp_path):
    """Each scales its own activations."""
    given = {**SMALL, **FLOAT8, "corpus": corpus, "batch_size": 4, "device": "cpu", "async_checkpoints": True}
    assert main(["pretrain", *flags(**given, output=tmp_path / "one")]) == 0
    command = ["-m", "lamina", "pretrain", *flags(**given, parallel="fsdp2", output=tmp_path / "two")]
    done = torchrun(*command)
    assert done.returncode == 0, done.stderr[-4000:]
    one, two = ([r["loss"] for r in records(tmp_path / name) if "loss" in r] for name in ("one", "two"))
    assert one == pytest.approx(two, abs=1e-3)


@pytest.mark.parametrize(
    ("device", "tokens", "tensor", "says"),
    [
        ("cpu", 24, 1, "24 tokens in a process's micro-batch. Choose batch_size and sequence_length"),
        ("mps", 32, 1, "precision: 'float8' does not work on mps (allowed here: auto"),
        ("cuda", 32, 1, "on a GPU of compute capability 8.0 (needed: 8.9; allowed here: auto, fp32, bf16, fp16)"),
        ("cpu", 32, 2, "precision: 'float8' does not work with tensor_parallel = 2. Use --tensor-parallel 1, or bf16."),
    ],
)
def test_what_can_not_be_is_said(torchao, device, tokens, tensor, says, monkeypatch):
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (8, 0))
    with pytest.raises(UserError) as caught:
        check_float8(torch.device(device), tokens, tensor)
    assert says in str(caught.value)
