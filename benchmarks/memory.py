"""Calculate how much memory a training run needs, from models on the meta device. --check measures real runs.

The calculation counts weights, gradients, AdamW's two moments, and a copy of the trained weights at recorded steps. It
also counts the activations of a batch of one sequence of 1,024 tokens with gradient checkpointing: the input of each
block, and what autograd keeps for one block. It does not count logits, a CUDA context (about 0.5 GB), fragmentation,
or the gathered block with FSDP2.

    python benchmarks/memory.py                  # print the table
    python benchmarks/memory.py --check          # compare with the peak memory of `lamina sft` on this CPU
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import torch
from common import high_water_mark
from torch import nn
from transformers import AutoModelForCausalLM, LlamaConfig

SHAPES: dict[str, dict[str, Any]] = {
    "130M": {"hidden_size": 768, "intermediate_size": 2048, "num_hidden_layers": 12, "num_attention_heads": 12,
             "vocab_size": 32000},
    "1.3B": {"hidden_size": 2048, "intermediate_size": 5461, "num_hidden_layers": 24, "num_attention_heads": 32,
             "vocab_size": 32000},
    "1.7B": {"hidden_size": 2048, "intermediate_size": 8192, "num_hidden_layers": 24, "num_attention_heads": 32,
             "num_key_value_heads": 32, "vocab_size": 49152, "tie_word_embeddings": True},
    "3B": {"hidden_size": 3072, "intermediate_size": 8192, "num_hidden_layers": 28, "num_attention_heads": 24,
           "num_key_value_heads": 8, "vocab_size": 128256, "tie_word_embeddings": True},
    "8B": {"hidden_size": 4096, "intermediate_size": 14336, "num_hidden_layers": 32, "num_attention_heads": 32,
           "num_key_value_heads": 8, "vocab_size": 128256},
    "14B": {"hidden_size": 5120, "intermediate_size": 17408, "num_hidden_layers": 40, "num_attention_heads": 40,
            "num_key_value_heads": 8, "vocab_size": 151936},
    "32B": {"hidden_size": 5120, "intermediate_size": 25600, "num_hidden_layers": 64, "num_attention_heads": 64,
            "num_key_value_heads": 8, "head_dim": 128, "vocab_size": 151936},
    "70B": {"hidden_size": 8192, "intermediate_size": 28672, "num_hidden_layers": 80, "num_attention_heads": 64,
            "num_key_value_heads": 8, "vocab_size": 128256},
}  # fmt: skip
# Bytes per weight, in linear layers and elsewhere. nf4 has a scale of 8 bits for each 64 weights, and a scale of
# 32 bits for each 256 of these scales.
METHODS: dict[str, dict[str, Any]] = {
    "`pretrain` or `sft`, all weights": {"linear": 4.0, "other": 4.0},
    "`sft --weights bf16`": {"linear": 2.0, "other": 2.0},
    "`dpo`, all weights": {"linear": 4.0, "other": 4.0, "models": 2},
    "`--lora-rank 16`": {"linear": 4.0, "other": 4.0, "rank": 16},
    "`--lora-rank 16 --weights bf16`": {"linear": 2.0, "other": 2.0, "rank": 16},
    "`--lora-rank 16 --weights nf4`": {"linear": 0.5 + 1 / 64 + 4 / (64 * 256), "other": 2.0, "rank": 16},
}
ALL = next(iter(METHODS))
TOKENS = 1024


def on_meta(config: LlamaConfig) -> nn.Module:
    with torch.device("meta"):
        return AutoModelForCausalLM.from_config(config, dtype=torch.float32)


def kept(module: nn.Module, *inputs: torch.Tensor, **more: torch.Tensor) -> int:
    """Return the bytes that autograd keeps for the backward pass, without the weights. Each tensor counts once."""
    seen: dict[int, torch.Tensor] = {}

    def keep(tensor: torch.Tensor) -> torch.Tensor:
        if not isinstance(tensor, nn.Parameter) and tensor._base is None:
            seen[id(tensor)] = tensor
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        module(*inputs, **more)
    return sum(tensor.numel() * tensor.element_size() for tensor in seen.values())


def activations(model: Any, config: LlamaConfig, tokens: int, bytes_each: float) -> float:
    """Return the bytes of activations with gradient checkpointing: each block's input, and one block's activations."""
    width, layers = config.hidden_size, config.num_hidden_layers
    with torch.device("meta"):
        stream = torch.zeros(1, tokens, width, requires_grad=True)
        places = torch.arange(tokens)[None]
        around = model.model.rotary_emb(stream, places)
    inside = kept(model.model.layers[0], stream, position_embeddings=around)
    return (layers * tokens * width + inside / 4) * bytes_each


def needed(config: LlamaConfig, method: dict[str, Any], tokens: int = TOKENS, processes: int = 1) -> float:
    """Return the peak bytes of a process."""
    model = on_meta(config)
    sizes = {name: parameter.numel() for name, parameter in model.named_parameters()}
    layers = {name for name, layer in model.named_modules() if isinstance(layer, nn.Linear) and name != "lm_head"}
    linear = sum(count for name, count in sizes.items() if name.removesuffix(".weight") in layers)
    other = sum(sizes.values()) - linear
    held = (linear * method["linear"] + other * method["other"]) * method.get("models", 1)
    if rank := method.get("rank"):
        trained = sum(rank * sum(model.get_submodule(name).weight.shape) for name in layers)
        each = 4.0  # LoRA's matrices
        held += trained * each
    else:
        trained, each = linear + other, method["other"]
    forward = activations(model, config, tokens, method["other"])
    states = trained * each * 3  # the gradient and two moments
    return held / processes + states / processes + max(forward, trained * each / processes)


def gigabytes(count: float) -> str:
    return f"{count / 1e9:.{0 if count >= 1.5e9 else 1}f}"


def table() -> str:
    names = list(SHAPES)
    lines = [f"| GB | {' | '.join(names)} |", "|---|" + "---:|" * len(names)]
    configs = [LlamaConfig(**shape, max_position_embeddings=8192) for shape in SHAPES.values()]
    for title, method in METHODS.items():
        numbers = [gigabytes(needed(config, method)) for config in configs]
        lines.append(f"| {title} | {' | '.join(numbers)} |")
    sharded = [gigabytes(needed(config, METHODS[ALL], processes=8)) for config in configs]
    return "\n".join([*lines, f"| `pretrain --parallel fsdp2`, each of 8 | {' | '.join(sharded)} |"])


def peak(config: LlamaConfig, **more: Any) -> float:
    """Return the peak MiB of a process in which `lamina sft` trains a model of this config on the CPU."""
    command = [sys.executable, __file__, "--worker", json.dumps({"config": config.to_dict(), "more": more})]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        raise SystemExit(done.stderr[-4000:])
    return float(next(line[1:] for line in done.stdout.splitlines() if line.startswith("@")))


def train(task: dict[str, Any]) -> None:
    import lamina
    from lamina.data.tokenizers import load_tokenizer

    with tempfile.TemporaryDirectory() as place:
        folder = Path(place)
        AutoModelForCausalLM.from_config(LlamaConfig.from_dict(task["config"])).save_pretrained(folder / "model")
        load_tokenizer("bytes").save_pretrained(folder / "model")
        rows = "".join(json.dumps({"text": "a layer " * 300}) + "\n" for _ in range(2))
        (folder / "rows.jsonl").write_text(rows, encoding="utf-8")
        lamina.sft(
            from_model=str(folder / "model"), data=str(folder / "rows.jsonl"), output=str(folder / "run"), steps=2,
            batch_size=1, sequence_length=TOKENS, eval_fraction=0.5, gradient_checkpointing=True, precision="fp32",
            device="cpu", bar=False, **task["more"],
        )  # fmt: skip
    print(f"@{high_water_mark()}")


def check() -> None:
    """Print the calculated and the measured memory. Both are relative to a model with almost no weights."""
    sizes = {"num_attention_heads": 8, "num_key_value_heads": 8, "vocab_size": 8192, "max_position_embeddings": TOKENS}
    sizes |= {"bos_token_id": 256, "eos_token_id": 256, "pad_token_id": 256}
    large = LlamaConfig(hidden_size=768, intermediate_size=2048, num_hidden_layers=12, **sizes)
    small = LlamaConfig(hidden_size=16, intermediate_size=16, num_hidden_layers=1, **sizes)
    empty = peak(small)
    for title, more in ((ALL, {}), ("`--lora-rank 16`", {"lora_rank": 16})):
        found = peak(large, **more) - empty
        said = (needed(large, METHODS[title]) - needed(small, METHODS[title])) / 2**20
        print(f"{title}: {said:,.0f} MiB by arithmetic, {found:,.0f} MiB at the peak ({found / said - 1:+.0%})")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--check", action="store_true")
    parser.add_argument("--worker", help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.worker:
        train(json.loads(given.worker))
    elif given.check:
        check()
    else:
        print(table())


if __name__ == "__main__":
    main()
