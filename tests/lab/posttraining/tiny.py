"""Tiny models and examples for the jobs after pretraining."""

import json
import random
from pathlib import Path

import torch
from transformers import AutoConfig, AutoModelForCausalLM, LlamaConfig

import lamina
from lamina.data.tokenizers import load_tokenizer

POSITIONS = 128
SIZES = {"hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2}


def write_model(folder: Path, placement="keel", seed=0, template=None, head="causal_lm", positions=POSITIONS) -> Path:
    """A model of two layers over bytes, with its tokenizer, as a run leaves it."""
    tokenizer = load_tokenizer("bytes")
    tokenizer.chat_template = template
    ends = {"vocab_size": len(tokenizer), "bos_token_id": 256, "eos_token_id": 256}
    config = LlamaConfig(**SIZES, **ends, max_position_embeddings=positions)
    torch.manual_seed(seed)
    lamina.build(config, placement, head=head).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


def write_foreign(folder: Path, kind="llama", tokenizer=None, **changed) -> Path:
    """A tiny model of transformers, with random weights, and its tokenizer."""
    tokenizer = tokenizer or load_tokenizer("bytes")
    ends = {"vocab_size": len(tokenizer), "bos_token_id": 256, "eos_token_id": 256, "pad_token_id": 256}
    sizes = {**SIZES, "num_key_value_heads": 2, "head_dim": 8, "max_position_embeddings": 512, **changed}
    torch.manual_seed(0)
    AutoModelForCausalLM.from_config(AutoConfig.for_model(kind, **sizes, **ends)).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


def write_rows(path: Path, rows: list) -> Path:
    path.write_text("".join(row if isinstance(row, str) else json.dumps(row) + "\n" for row in rows))
    return path


def sorting(count: int, seed: int = 0) -> list[dict]:
    """Instructions to sort letters."""
    draw = random.Random(seed)
    words = ["".join(draw.choice("abcd") for _ in range(3)) for _ in range(count)]
    return [{"instruction": f"Sort {word}", "input": "", "output": "".join(sorted(word))} for word in words]


def preferences(count: int, seed: int = 0) -> list[dict]:
    """Prompts whose better answer has an a, and whose worse one a z."""
    draw = random.Random(seed)
    words = ["".join(draw.choice("mnop") for _ in range(3)) for _ in range(count)]
    return [{"prompt": f"{word}?", "chosen": f" a{word}", "rejected": f" z{word}"} for word in words]


def answers(count: int) -> list[dict]:
    return [{"prompt": row["instruction"], "completion": row["output"]} for row in sorting(count)]


def uneven() -> list[dict]:
    """Pairs of several lengths, which neither batches of four nor two processes divide."""
    rows = preferences(7, seed=1)
    for row in rows[3:]:
        row["rejected"] = row["chosen"] + " and more" * len(row["prompt"][:2])
    return rows


def write_reward(folder: Path, value: str) -> str:
    """Write a function of an answer's reward, and give it as a setting names it."""
    (folder / "reward.py").write_text(f"def own(prompt, answer, row):\n    return {value}\n")
    return f"{folder / 'reward.py'}:own"


def common(base, data, folder):
    given = {"from_model": str(base), "data": str(data), "output": str(folder), "batch_size": 4, "steps": 4}
    return {**given, "eval_fraction": 0.25, "learning_rate": 1e-3, "logging_steps": 1}


def same_weights(one, other):
    first, second = (AutoModelForCausalLM.from_pretrained(f / "model").state_dict() for f in (one, other))
    return all(torch.equal(tensor, second[name]) for name, tensor in first.items())
