"""Train the runs with which the monitor's alarms are fitted and judged: healthy runs, and broken copies of these runs.

`make_runs` trains every set-up of ``SETUPS`` with several seeds. In some set-ups, `make_runs` also trains every failure
of ``KINDS``. Each broken run has a healthy twin with the same seed and batches. A run's file holds everything that the
monitor passed to its alarms, so `alarms.py` can judge a run again without training. Set-ups and failures that are not
``fitted`` serve only to judge.
"""

from __future__ import annotations

import argparse
import copy
import json
import logging
import math
import os
import random
import sys
import sysconfig
import tempfile
import time
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

import pyarrow as pa
import pyarrow.parquet as pq
import torch
import transformers
from torch import nn
from torch.nn import functional

import lamina
from lamina.core.json_types import Json
from lamina.data.corpus import single_corpus
from lamina.data.tokenizers import load_tokenizer
from lamina.training.monitor.gain_measures import tables_of
from tools.calibration.alarm_habits import FITTED, HABITS, SKIPPING

STEPS, BREAKS, RATE = 200, 100, 2e-3
LATER = 7  # steps by which the break of the next seed comes later, so most breaks lie between two records
AFTER, FROM_START = 60, 90  # steps after the break, and of runs that are broken from the start
BROKEN_SEEDS = 2
SEEN = (6, 10, 14, 18, 22, 26, 30, 32, 34, 36, 40, 44)  # first seeds of runs that have already judged earlier rules
FRESH = 48  # the first seed of the runs that judge the rules
HELD, HELD_EVERY = 4, 2  # sequences in the fixed batch that compares a model with its twin, and steps between losses
VOCABULARY, TOKENS = 256, 2048  # bytes; tokens of text
COLUMNS = ("call", "step", "layer", "sublayer", "role", "index", "metric", "value")


@dataclass(frozen=True, kw_only=True)
class Setup:
    """How a healthy model is trained. ``fitted``: whether rules may be fitted on this set-up."""

    family: str
    layers: int = 4
    width: int = 48
    batch: int = 4
    length: int = 32
    data: str = "text"
    vocabulary: int = VOCABULARY
    schedule: str = "cosine"
    warmup: int = 40
    optimizer: str = "adamw"
    rate: float = RATE
    beta2: float = 0.95
    clip: float | None = 1.0
    precision: str = "fp32"
    every: int = 20
    steps: int = STEPS
    seeds: int = 4
    fitted: bool = True
    habit: str = ""
    lora: bool = False
    trainer: bool = False

    @property
    def text(self) -> str:
        """Return the name of the text in ``corpus``."""
        return self.data if self.data in ("code", "tokens") else "text"


SETUPS: dict[str, Setup] = {
    "llama-cosine": Setup(family="llama", layers=5, width=64, batch=8),
    "llama-batch1": Setup(family="llama", batch=1, length=48, schedule="constant", rate=5e-4, warmup=20),
    "llama-restarts": Setup(family="llama", schedule="restarts", every=10),
    "llama-muon": Setup(family="llama", layers=3, optimizer="muon"),
    "llama-noclip": Setup(family="llama", layers=3, batch=64, length=12, schedule="linear", clip=None),
    "llama-fp16": Setup(family="llama", layers=3, precision="fp16"),
    "llama-bf16-code": Setup(family="llama", layers=3, batch=16, data="code", precision="bf16"),
    "qwen3-wsd": Setup(family="qwen3", layers=6, width=32, schedule="wsd"),
    "gpt2-linear": Setup(family="gpt2", width=96, schedule="linear", beta2=0.999),
    "gpt2-repeated": Setup(family="gpt2", layers=3, data="repeated", every=5),
    "mixtral-cosine": Setup(family="mixtral", layers=3, batch=6),
    "dpo": Setup(family="llama", layers=3, rate=5e-4, steps=120, seeds=2, data="trl"),
    "llama-deep": Setup(family="llama", layers=12, width=32, warmup=100, fitted=False),
    "llama-code": Setup(family="llama", width=80, batch=2, data="code", schedule="wsd", fitted=False),
    "nano-batch1": Setup(family="nano", layers=10, batch=1, schedule="constant", rate=5e-4, fitted=False),
    "qwen3-sft": Setup(family="qwen3", batch=2, data="sft", schedule="linear", rate=1e-3, fitted=False),
    "gpt2-sgd": Setup(family="gpt2", layers=3, optimizer="sgd", rate=0.3, fitted=False),
    "gpt2-fp16": Setup(family="gpt2", layers=3, precision="fp16", schedule="wsd", every=10, fitted=False),
    "mixtral-code": Setup(family="mixtral", layers=3, batch=3, data="code", schedule="linear", fitted=False),
    "t5": Setup(family="t5", layers=3, schedule="constant", fitted=False),
    "mamba": Setup(family="mamba", layers=3, length=16, fitted=False),
    "grpo": Setup(family="llama", layers=2, rate=5e-4, steps=80, seeds=2, data="trl", fitted=False),
    "olmo2": Setup(family="olmo2", layers=5, width=56, batch=6, schedule="linear", fitted=False),
}


def drawn(number: int, fitted: bool) -> Setup:
    """Return a random healthy set-up with usual choices."""
    draw = random.Random(number if fitted else 1000 + number)  # seeds that were never tried before
    family = draw.choice(("llama", "olmo2", "qwen3", "mixtral", "gpt2", "t5", "mamba", "nano"))
    batch = draw.choice((1, 2, 3, 4, 6, 8, 12))
    clip = draw.choice((1.0, 1.0, 0.5, None))
    rates = (5e-4, 1e-3) if batch < 4 or clip is None else (5e-4, 1e-3, 2e-3)
    return Setup(
        family=family,
        layers=draw.randint(2, 8),
        width=draw.choice((32, 48, 64)),
        batch=batch,
        length=draw.choice((24, 32, 48)) if batch < 8 else 24,
        data=draw.choice(("text", "text", "code", "sft", "repeated")),
        schedule=draw.choice(("constant", "linear", "cosine", "restarts", "wsd")),
        warmup=draw.choice((10, 20, 40, 80)),
        optimizer="muon" if family == "llama" and draw.random() < 0.3 else "adamw",
        rate=draw.choice(rates),
        beta2=draw.choice((0.95, 0.95, 0.99, 0.999)),
        clip=clip,
        precision=draw.choice(("fp32", "bf16") if family in ("t5", "mamba") else ("fp32", "fp32", "bf16", "fp16")),
        every=draw.choice((5, 10, 20, 20)),
        seeds=1,
        fitted=fitted,
    )


HABIT = "habit"
LORA = Setup(family="llama", layers=4, width=32, batch=2, every=10, warmup=20, lora=True, seeds=1)
SETUPS |= {"llama-lora": LORA}
SETUPS |= {
    f"{HABIT}-{habit}-{family}": Setup(
        family=family,
        layers=layers,
        width=32,
        batch=3,
        every=every,
        schedule="wsd",
        fitted=habit in FITTED,
        habit=habit,
        seeds=4 if habit in SKIPPING else 1 if habit in FITTED else 3,
    )
    for habit in HABITS
    for family, layers, every in (("llama", 4, 10), ("gpt2", 4, 20), ("olmo2", 8, 20), ("qwen3", 6, 10))
    if family in ("llama", "gpt2") or habit in SKIPPING
}
DRAWN = "drawn"
SETUPS |= {f"{DRAWN}-{number}": drawn(number, fitted=number < 60) for number in range(80)}
EVERYTHING = ("olmo2", f"{HABIT}-layerdrop-half-llama", f"{HABIT}-stochastic-linear-gpt2")
"""Set-ups that get every failure that is possible everywhere."""

OTHERS = {
    **dict.fromkeys(("cohere", "exaone4", "gemma2", "gpt_neox", "granite", "olmoe"), True),
    **dict.fromkeys(("opt", "phi", "qwen2", "seed_oss", "stablelm", "starcoder2"), True),
    **dict.fromkeys(("arcee", "bloom", "ernie4_5", "gemma3_text"), False),
    **dict.fromkeys(("glm", "helium", "nemotron", "olmo", "persimmon", "smollm3"), False),
}
"""More model families of transformers, and whether rules may be fitted on each family."""
TRIED = 3  # kinds of failures in each set-up of OTHERS that is not fitted


def other(family: str, number: int, fitted: bool) -> Setup:
    """Return a random healthy set-up with tokens instead of bytes, larger models and learning rates, and more steps."""
    draw = random.Random(f"{family} {number}")
    batch = draw.choice((1, 2, 4, 8, 16))
    return Setup(
        family=family,
        layers=draw.randint(3, 8),
        width=draw.choice((64, 80, 96)),
        batch=batch,
        length=draw.choice((32, 48, 64)) if batch < 16 else 32,
        data="tokens",
        vocabulary=TOKENS,
        schedule=draw.choice(("constant", "linear", "cosine", "wsd")),
        warmup=draw.choice((10, 30, 100)),
        rate=draw.choice((3e-4, 1e-3) if batch < 4 else (1e-3, 2e-3, 3e-3)),
        beta2=draw.choice((0.95, 0.99, 0.999)),
        clip=draw.choice((1.0, 1.0, None)),
        precision=draw.choice(("fp32", "fp32", "bf16")),
        every=draw.choice((10, 20, 20, 50)),
        steps=2 * STEPS,
        seeds=1,
        fitted=fitted,
    )


OTHER = "other"
SETUPS |= {
    f"{OTHER}-{family}-{number}": other(family, number, fitted)
    for family, fitted in OTHERS.items()
    for number in range(2 if fitted else 16)
}

USUAL = "usual"
USUAL_FAMILIES = (
    *("apertus", "biogpt", "cohere2", "diffllama", "doge", "flex_olmo", "gemma", "glm4", "gpt_oss", "granitemoe"),
    *("hunyuan_v1_dense", "jais2", "ministral", "mistral", "nanochat", "olmo3", "vaultgemma", "xglm"),
    *("llama", "gpt2", "qwen3", "t5", "mamba", "nano"),
)
NEXT_FAMILIES = (
    *("hunyuan_v1_dense", "t5", "bitnet", "hyperclovax", "lfm2", "cwm", "afmoe", "gpt_neox_japanese"),
    *("arcee", "helium", "persimmon", "smollm3"),
)
RATES = {
    **dict.fromkeys(("adamw", "Adam", "NAdam", "RAdam", "Adamax"), (3e-4, 1e-3, 2e-3)),
    "Adafactor": (3e-3, 1e-2),
    "muon": (5e-4, 1e-3),
    "RMSprop": (1e-4, 3e-4),
    "sgd": (0.03, 0.1),
}
DECOUPLED = ("adamw", "adamw_torch", "adamw_torch_fused", "Adafactor", "muon", "sgd")
FIRST_NEXT = 72  # the first set-up of the seed 45
TRAINERS = {"adamw_torch": "adamw", "adamw_torch_fused": "adamw", "sgd": "sgd", "rmsprop": "RMSprop"}


def usual(number: int) -> Setup:
    """Return a random healthy set-up without intentional changes. Every third set-up trains with Trainer.

    From ``FIRST_NEXT`` on, no set-up has an optimizer that adds the weight decay to the gradients.
    """
    draw, later = random.Random(f"usual {number}"), number >= FIRST_NEXT
    families = NEXT_FAMILIES if later else USUAL_FAMILIES
    family, batch = families[number % len(families)], draw.choice((1, 2, 4, 8, 12))
    trainer = number % 3 == number // FIRST_NEXT and family != "nano"
    moe, text_only = family in ("flex_olmo", "gpt_oss", "granitemoe", "afmoe"), family in ("t5", "mamba")
    optimizers = tuple(TRAINERS) if trainer else ("adamw", "adamw", *list(RATES)[1:])
    optimizers = [each for each in optimizers if each in DECOUPLED] if later else optimizers
    optimizer = draw.choice(optimizers)
    if optimizer == "muon" and (moe or text_only or family in ("biogpt", "xglm", "gpt2", "nano", "gpt_neox_japanese")):
        optimizer = "adamw"  # Muon needs matrices below ".layers."
    rates = RATES[TRAINERS.get(optimizer, optimizer)]
    return Setup(
        family=family,
        layers=draw.randint(2, 5 if moe else 8),
        width=draw.choice((32, 64, 96, 128)),
        batch=batch,
        length=draw.choice((24, 32, 48)) if batch < 8 else 24,
        data=draw.choice(("text", "text", "code", "sft")),
        schedule=draw.choice(("constant", "linear", "cosine", "restarts", "wsd")),
        warmup=draw.choice((10, 20, 40, 80)),
        optimizer=optimizer,
        rate=draw.choice(rates[:-1] if batch < 4 else rates),
        beta2=draw.choice((0.95, 0.98, 0.99, 0.999)),
        clip=draw.choice((1.0, 1.0, 0.5, None)),
        precision=draw.choice(("fp32", "bf16") if trainer or text_only else ("fp32", "fp32", "bf16", "bf16w", "fp16")),
        every=draw.choice((5, 10, 20, 20, 50)),
        steps=draw.choice((STEPS, STEPS, 2 * STEPS)),
        seeds=1,
        fitted=False,
        trainer=trainer,
    )


SETUPS |= {f"{USUAL}-{number}": usual(number) for number in range(FIRST_NEXT + 36)}


class NanoLayer(nn.Module):
    """A layer as in nanoGPT, with unusual names."""

    def __init__(self, width: int, heads: int):
        super().__init__()
        self.calm_a, self.calm_b = nn.LayerNorm(width), nn.LayerNorm(width)
        self.talk, self.told = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.think, self.thought = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)
        self.heads = heads

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        batch, tokens, width = x.shape
        split = (t.view(batch, tokens, self.heads, -1).transpose(1, 2) for t in self.talk(self.calm_a(x)).chunk(3, -1))
        seen = functional.scaled_dot_product_attention(*split, is_causal=True)
        x = x + self.told(seen.transpose(1, 2).reshape(batch, tokens, width))
        return x + self.thought(functional.gelu(self.think(self.calm_b(x))))


class Nano(nn.Module):
    """A custom model. The forward pass takes ``idx`` and ``targets``, and returns logits and a loss."""

    def __init__(self, layers: int, width: int):
        super().__init__()
        self.words, self.places = nn.Embedding(VOCABULARY, width), nn.Embedding(64, width)
        self.floors = nn.ModuleList(NanoLayer(width, 4) for _ in range(layers))
        self.calm, self.speak = nn.LayerNorm(width), nn.Linear(width, VOCABULARY, bias=False)
        for module in self.modules():
            if isinstance(module, nn.Linear | nn.Embedding):
                nn.init.normal_(module.weight, std=0.02)

    def forward(self, idx: torch.Tensor, targets: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        x = self.words(idx) + self.places(torch.arange(idx.shape[1]))
        for layer in self.floors:
            x = layer(x)
        logits = self.speak(self.calm(x))[:, :-1]
        return logits, functional.cross_entropy(logits.flatten(0, 1), targets[:, 1:].flatten(), ignore_index=-100)


def model_of(setup: Setup) -> nn.Module:
    layers, width = setup.layers, setup.width
    common: dict[str, Any] = {"vocab_size": setup.vocabulary, "bos_token_id": 0, "eos_token_id": 0, "pad_token_id": 0}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2}
    modern = {**common, **heads, "hidden_size": width, "num_hidden_layers": layers, "intermediate_size": 2 * width}
    t5 = {"d_model": width, "d_kv": width // 4, "d_ff": 2 * width, "num_heads": 4, "decoder_start_token_id": 0}
    made: dict[str, Callable[[], nn.Module]] = {
        "llama": lambda: transformers.LlamaForCausalLM(transformers.LlamaConfig(**modern)),
        "olmo2": lambda: transformers.Olmo2ForCausalLM(transformers.Olmo2Config(**modern)),
        "qwen3": lambda: transformers.Qwen3ForCausalLM(
            transformers.Qwen3Config(**modern, head_dim=width // 4, tie_word_embeddings=True)
        ),
        "mixtral": lambda: transformers.MixtralForCausalLM(
            transformers.MixtralConfig(**modern, num_local_experts=4, output_router_logits=True)
        ),
        "gpt2": lambda: transformers.GPT2LMHeadModel(
            transformers.GPT2Config(**common, n_embd=width, n_layer=layers, n_head=4, n_positions=64)
        ),
        "t5": lambda: transformers.T5ForConditionalGeneration(
            transformers.T5Config(**{**common, **t5}, num_layers=layers, dropout_rate=0.0)
        ),
        "mamba": lambda: transformers.MambaForCausalLM(
            transformers.MambaConfig(**common, hidden_size=width, num_hidden_layers=layers, state_size=8)
        ),
        "nano": lambda: Nano(layers, width),
    }
    if setup.family in made:
        return made[setup.family]()
    own = {"n_layer": layers, "n_head": 4, "ffn_dim": 4 * width, "word_embed_proj_dim": width, "head_dim": width // 4}
    few = {"num_experts": 4, "num_experts_per_tok": 2}
    config = transformers.AutoConfig.for_model(setup.family, **modern, **own, **few, tie_word_embeddings=False)
    return transformers.AutoModelForCausalLM.from_config(config)


@dataclass(frozen=True)
class Parts:
    """The paths of the modules and weights that failures break: the layers, and weights inside a layer."""

    layers: str
    query: str
    out: str
    down: str
    up: str
    embedding: str
    readout: str

    def layer(self, model: nn.Module, index: int) -> nn.Module:
        return model.get_submodule(f"{self.layers}.{index}")

    def weight(self, model: nn.Module, index: int, name: str) -> torch.Tensor:
        return self.layer(model, index).get_parameter(getattr(self, name)).data


_MODERN = Parts(
    "model.layers",
    "self_attn.q_proj.weight",
    "self_attn.o_proj.weight",
    "mlp.down_proj.weight",
    "mlp.up_proj.weight",
    "model.embed_tokens.weight",
    "lm_head.weight",
)
PARTS: Mapping[str, Parts] = {
    "llama": _MODERN,
    "qwen3": _MODERN,
    "olmo2": _MODERN,
    "mixtral": replace(_MODERN, down="mlp.experts.down_proj", up="mlp.experts.gate_up_proj"),
    "gpt2": Parts(
        "transformer.h",
        "attn.c_attn.weight",
        "attn.c_proj.weight",
        "mlp.c_proj.weight",
        "mlp.c_fc.weight",
        "transformer.wte.weight",
        "lm_head.weight",
    ),
    "nano": Parts(
        "floors", "talk.weight", "told.weight", "thought.weight", "think.weight", "words.weight", "speak.weight"
    ),
    "t5": Parts(
        "encoder.block",
        "layer.0.SelfAttention.q.weight",
        "layer.0.SelfAttention.o.weight",
        "layer.1.DenseReluDense.wo.weight",
        "layer.1.DenseReluDense.wi.weight",
        "shared.weight",
        "lm_head.weight",
    ),
    "mamba": Parts(
        "backbone.layers",
        "mixer.in_proj.weight",
        "mixer.out_proj.weight",
        "mixer.out_proj.weight",
        "mixer.in_proj.weight",
        "backbone.embeddings.weight",
        "lm_head.weight",
    ),
}


def parts_of(model: nn.Module, family: str) -> Parts:
    """Return the paths for a model, either from ``PARTS`` or by common names."""
    if family in PARTS:
        return PARTS[family]
    layers = next(name for name, module in model.named_modules() if isinstance(module, nn.ModuleList))
    names = [name for name, p in model.get_submodule(layers)[1].named_parameters() if p.ndim > 1]
    tables = {id(p): name for name, p in model.named_parameters()}
    query, out, down, up = (
        next(name for name in names if {*usual} & {*name.split(".")})
        for usual in (
            ("q_proj", "query_key_value"),
            ("o_proj", "out_proj", "dense"),
            ("down_proj", "fc2", "c_proj", "dense_4h_to_h"),
            ("up_proj", "fc1", "c_fc", "dense_h_to_4h", "gate_up_proj"),
        )
    )
    return Parts(layers, query, out, down, up, tables[id(model.get_input_embeddings().weight)], "lm_head.weight")


@cache
def corpus(data: str) -> torch.Tensor:
    """Return a text as bytes (novels, or the source of Python's standard library), or the novels as tokens."""
    if data == "code":
        files = sorted(Path(sysconfig.get_paths()["stdlib"]).glob("*.py"))
        return torch.frombuffer(bytearray(b"".join(file.read_bytes() for file in files)), dtype=torch.uint8).long()
    embedded = single_corpus("embedded")
    text = "\n\n".join(document.text for document in embedded.documents())
    if data == "tokens":
        tokenizer = load_tokenizer(f"bpe:{TOKENS}", corpus=embedded)
        return torch.tensor(
            [token for line in tokenizer(text.splitlines(keepends=True))["input_ids"] for token in line]
        )
    return torch.frombuffer(bytearray(text.encode()), dtype=torch.uint8).long()


class Batches:
    """The batches of a run: ids and labels [batch, length]. The same seed gives the same batches."""

    def __init__(self, setup: Setup, seed: int):
        self.setup, self.text = setup, corpus(setup.text)
        self.draw = torch.Generator().manual_seed(seed)
        self.few = self._drawn(12 * setup.batch) if setup.data == "repeated" else None
        self.at = 0

    def _drawn(self, count: int) -> torch.Tensor:
        starts = torch.randint(0, len(self.text) - self.setup.length, (count,), generator=self.draw).tolist()
        return torch.stack([self.text[start : start + self.setup.length] for start in starts])

    def next(self, count: int | None = None) -> tuple[torch.Tensor, torch.Tensor]:
        count = count or self.setup.batch
        if self.few is not None:
            ids = self.few[torch.arange(self.at, self.at + count) % len(self.few)]
            self.at += count
        else:
            ids = self._drawn(count)
        labels = ids.clone()
        if self.setup.data == "sft":  # a prompt of another length in every sequence
            prompts = torch.randint(8, self.setup.length - 8, (count, 1), generator=self.draw)
            labels[torch.arange(self.setup.length)[None] < prompts] = -100
        return ids, labels


def loss_of(model: nn.Module, setup: Setup, ids: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    if setup.family == "nano":
        return model(ids, labels)[1]
    if setup.family == "t5":  # the second half from the first
        half = setup.length // 2
        return model(input_ids=ids[:, :half], labels=labels[:, half:].contiguous()).loss
    return model(input_ids=ids, labels=labels, use_cache=False).loss


def rate_at(setup: Setup, step: int) -> float:
    """Return the learning rate of a step, relative to the peak."""
    rising, done = min(1.0, step / max(1, setup.warmup)), step / setup.steps
    shape = {
        "constant": 1.0,
        "linear": 1.0 - 0.9 * done,
        "cosine": 0.1 + 0.45 * (1 + math.cos(math.pi * done)),
        "restarts": 0.1 + 0.45 * (1 + math.cos(math.pi * (step % 90) / 90)),
        "wsd": 1.0 if done < 0.8 else max(0.05, (1.0 - done) / 0.2),
    }
    return rising * shape[setup.schedule]


def optimizers_of(model: nn.Module, setup: Setup, groups: list[dict[str, Any]]) -> list[torch.optim.Optimizer]:
    """Return the optimizers of a set-up. Each group has parameters, and settings that differ from the others."""
    if isinstance(kind := getattr(torch.optim, setup.optimizer, None), type):
        return [kind(groups, lr=setup.rate, weight_decay=0.01)]
    if setup.optimizer == "sgd":
        return [torch.optim.SGD(groups, lr=setup.rate, momentum=0.9)]
    fused = setup.precision != "fp16"  # a GradScaler on a CPU
    adam: dict[str, Any] = {"fused": fused, "lr": setup.rate, "betas": (0.9, setup.beta2), "weight_decay": 0.1}
    if setup.optimizer == "muon":
        taken = [p for group in groups for p in group["params"]]
        inside = {id(p) for name, p in model.named_parameters() if p.ndim == 2 and ".layers." in name}
        return [
            torch.optim.Muon([p for p in taken if id(p) in inside], lr=5 * setup.rate, weight_decay=0.1),
            torch.optim.AdamW([p for p in taken if id(p) not in inside], **adam),
        ]
    return [torch.optim.AdamW(groups, **adam)]


class Run:
    """A training run that a failure may break. The failure's hooks receive this object.

    Attributes:
        model, optimizers, setup, parts: the parts of the training run
        layer: the number of the layer that breaks
        strength: the strength of the failure
        draw: the random generator for failures
    """

    def __init__(self, setup: Setup, kind: str, strength: float, seed: int):
        later = seed if seed < SEEN[0] else 1 + (seed - SEEN[0]) % (SEEN[1] - SEEN[0])
        self.setup, self.break_step = setup, BREAKS + LATER * later
        self.breaks_as(kind, strength)
        torch.manual_seed(seed)
        self.model = model_of(setup)
        if setup.precision == "bf16w":
            self.model.bfloat16()
        self.parts = parts_of(self.model, setup.family)
        if setup.lora:
            self._wrap()
        self.draw = torch.Generator().manual_seed(1000 + seed)
        self.layer = 1 + int(torch.randint(0, setup.layers - 1, (), generator=self.draw))
        self.held: dict[str, Any] = {}
        failure = self.kind
        if failure is not None and failure.prepare is not None:
            with torch.no_grad():
                failure.prepare(self)
        given = None if failure is None or failure.groups is None else failure.groups(self)
        groups = [{"params": list(self.model.parameters())}] if given is None else given
        if failure is not None and failure.beta2 is not None:
            setup = replace(setup, beta2=failure.beta2)
        self.optimizers = optimizers_of(self.model, setup, groups)
        self.peaks = [[group["lr"] for group in optimizer.param_groups] for optimizer in self.optimizers]
        self.scaler = torch.amp.GradScaler("cpu", enabled=setup.precision == "fp16")
        self.number = 0
        self.habit = HABITS[setup.habit] if setup.habit else None
        if self.habit is not None and self.habit.begin is not None:
            self.habit.begin(self)
        self.optimizers[-1].register_step_post_hook(lambda *_: self._after())  # before the monitor's hook

    def _wrap(self) -> None:
        """Train only LoRA matrices and the output head."""
        from peft import LoraConfig, get_peft_model

        settings = LoraConfig(r=4, target_modules=["q_proj", "v_proj", "up_proj"])
        self.model = get_peft_model(self.model, settings)  # type: ignore[arg-type]
        self.parts = replace(
            self.parts,
            layers=f"base_model.model.{self.parts.layers}",
            embedding=f"base_model.model.{self.parts.embedding}",
            readout=f"base_model.model.{self.parts.readout}",
        )
        names = dict(self.model.named_parameters(remove_duplicate=False))
        names[self.parts.readout].requires_grad_(True)

    def _after(self) -> None:
        if self.kind is not None and self.kind.inside is not None and self.number >= self.breaks:
            with torch.no_grad():
                self.kind.inside(self, self.number)

    def breaks_as(self, kind: str, strength: float) -> None:
        """Set the failure, and the steps at which the run breaks and ends."""
        self.name, self.kind, self.strength = kind, KINDS[kind] if kind else None, strength
        late = self.kind is not None and not self.kind.from_start
        self.breaks = self.break_step if late else 1
        self.last = self.setup.steps if self.kind is None else self.break_step + AFTER if late else FROM_START

    def weight(self, name: str) -> torch.Tensor:
        return self.parts.weight(self.model, self.layer, name)

    def embedding(self) -> torch.Tensor:
        return self.model.get_parameter(self.parts.embedding).data

    def readout(self) -> torch.Tensor:
        names = dict(self.model.named_parameters(remove_duplicate=False))
        return names[self.parts.readout].data

    def of_layer(self) -> list[nn.Parameter]:
        return list(self.parts.layer(self.model, self.layer).parameters())

    def precise(self) -> Any:
        kinds = {"bf16": torch.bfloat16, "fp16": torch.float16}
        return torch.autocast("cpu", kinds[self.setup.precision]) if self.setup.precision in kinds else nullcontext()

    def _on_purpose(self, habit: Any, *batch: torch.Tensor) -> Any:
        if habit.before is not None:
            habit.before(self, self.number)
        return batch if habit.batch is None else [habit.batch(self.number, each) for each in batch]

    def step(self, number: int, ids: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        """Train for one step, and return the loss."""
        self.number = number
        failure, broken = self.kind, number >= self.breaks
        factor = rate_at(self.setup, number)
        if failure is not None and failure.rate is not None:
            factor = failure.rate(self, number)
        for optimizer, peaks in zip(self.optimizers, self.peaks, strict=True):
            for group, peak in zip(optimizer.param_groups, peaks, strict=True):
                group["lr"] = peak * factor
        if self.habit is not None:
            ids, labels = self._on_purpose(self.habit, ids, labels)
        if failure is not None and broken:
            if failure.before is not None:
                with torch.no_grad():
                    failure.before(self, number)
            if failure.batch is not None:
                ids, labels = failure.batch(self, number, ids, labels)
        with self.precise():
            loss = loss_of(self.model, self.setup, ids, labels)
        weight = failure.weight(self, number) if failure is not None and broken and failure.weight else 1.0
        self.scaler.scale(weight * loss).backward()
        if failure is not None and broken and failure.gradients is not None:
            failure.gradients(self, number)
        for optimizer in self.optimizers:
            self.scaler.unscale_(optimizer)
        if self.setup.clip is not None and not (failure is not None and failure.unclipped):
            nn.utils.clip_grad_norm_(self.model.parameters(), self.setup.clip)
        for optimizer in self.optimizers:
            self.scaler.step(optimizer)
        self.scaler.update()
        if failure is None or not failure.keeps or not broken:
            for optimizer in self.optimizers:
                optimizer.zero_grad()
        if self.habit is not None and self.habit.after is not None:
            self.habit.after(self, number)
        return loss


Hook = Callable[[Run, int], None]


@dataclass(frozen=True, kw_only=True)
class Kind:
    """A kind of failure.

    Attributes:
        cause: the causes that count as a correct diagnosis
        where: the sub-layer that the alarm should name, or the part outside the layers. None stands for the whole model
        runs: the strengths to try, for each set-up
        fitted: whether rules may be fitted on this failure
        from_start: whether the failure begins at the first step
        keeps: whether the gradients are not set to zero
        everywhere: whether the failure is possible in any set-up
        prepare, groups, rate, before, batch, weight, gradients: the hooks that change the run
        inside: a hook whose changes look like changes by the optimizer
    """

    cause: tuple[str, ...]
    what: str
    runs: Mapping[str, tuple[float, ...]]
    where: str | None = None
    fitted: bool = True
    from_start: bool = False
    unclipped: bool = False
    keeps: bool = False
    everywhere: bool = True
    beta2: float | None = None
    prepare: Callable[[Run], None] | None = None
    groups: Callable[[Run], list[dict[str, Any]] | None] | None = None
    rate: Callable[[Run, int], float] | None = None
    before: Hook | None = None
    inside: Hook | None = None
    batch: Callable[[Run, int, torch.Tensor, torch.Tensor], tuple[torch.Tensor, torch.Tensor]] | None = None
    weight: Hook | Callable[[Run, int], float] | None = None
    gradients: Hook | None = None


def norms_of(model: nn.Module) -> list[nn.Parameter]:
    return [p for m in model.modules() if "norm" in type(m).__name__.lower() for p in m.parameters(recurse=False)]


def apart(run: Run, some: list[nn.Parameter], **changed: float) -> list[dict[str, Any]]:
    """Return two groups for an optimizer: all other parameters, and ``some`` with the settings ``changed``."""
    mine = {id(p) for p in some}
    return [{"params": [p for p in run.model.parameters() if id(p) not in mine]}, {"params": some, **changed}]


def decaying(which: Callable[[Run], list[nn.Parameter]]) -> Hook:
    """When the failure begins, move some parameters to a group with the strength as weight decay."""

    def act(run: Run, step: int) -> None:
        if step == run.breaks:
            optimizer, some = run.optimizers[0], which(run)
            (group,) = optimizer.param_groups
            group["params"] = apart(run, some)[0]["params"]
            optimizer.add_param_group({**group, "params": some, "weight_decay": run.strength})
            run.peaks = [2 * run.peaks[0]]

    return act


def table_of(run: Run) -> list[nn.Parameter]:
    return [run.model.get_parameter(run.parts.embedding)]


def grow_head(run: Run, step: int) -> None:
    width = run.setup.width // 4
    weight = run.weight("query")
    (weight[:, :width] if run.setup.family == "gpt2" else weight[:width]).mul_(run.strength)


def grow_keys(run: Run, step: int) -> None:
    weight, width = run.weight("query"), run.setup.width
    (weight[:, :width] if run.setup.family == "gpt2" else weight[:width]).mul_(run.strength)


def grow_row(run: Run, step: int) -> None:
    run.embedding()[ord("e")].mul_(run.strength)


def scaled_layer(run: Run) -> None:
    for parameter in run.of_layer():
        if parameter.ndim > 1:
            parameter.data.mul_(run.strength)


def scaled_readout(run: Run) -> None:
    run.readout().mul_(run.strength)


def dead_feed_forward(run: Run) -> None:
    run.weight("down").zero_()
    run.weight("up").zero_()


def cut_off(run: Run, step: int) -> None:
    if step != run.breaks:
        return
    name = run.parts.out.rpartition(".")[0]
    run.parts.layer(run.model, run.layer).get_submodule(name).register_forward_hook(
        lambda m, a, out: 0.0 * out.detach()
    )


def matrices_of(run: Run) -> list[nn.Parameter]:
    names = {getattr(run.parts, name).rpartition(".")[0].rpartition(".")[0] for name in ("down", "up")}
    return [
        p
        for name in names
        for p in run.parts.layer(run.model, run.layer).get_submodule(name).parameters()
        if p.ndim > 1
    ]


def replace_layer(run: Run, step: int) -> None:
    if step == run.breaks:
        layers = run.model.get_submodule(run.parts.layers)
        layers[run.layer] = copy.deepcopy(layers[run.layer])  # type: ignore[operator, index]


def checkpoint_reentrantly(run: Run) -> None:
    model: Any = run.model
    model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": True})
    model.disable_input_require_grads()
    model.train()


def shrink_gains(run: Run, step: int) -> None:
    for gain in norms_of(run.model):
        if gain.mean() > 0.001:  # no bias
            gain.mul_(run.strength)


def lose_state(run: Run, step: int) -> None:
    if step == run.breaks:
        for optimizer in run.optimizers:
            optimizer.state.clear()


def lose_moments(run: Run, step: int) -> None:
    if step == run.breaks:
        for optimizer in run.optimizers:
            for state in optimizer.state.values():
                state["exp_avg_sq"].mul_(0.0 if run.strength > 1 else run.strength)


def spoil_gradient(run: Run, step: int) -> None:
    """Spoil a gradient at the first step after the break at which the layer has gradients."""
    gradient = run.parts.layer(run.model, run.layer).get_parameter(run.parts.down).grad
    if gradient is not None and "spoiled" not in run.held:
        gradient.flatten()[0] = run.held["spoiled"] = run.strength


def spoil_weight(run: Run, step: int) -> None:
    if step == run.breaks:
        run.weight("out").flatten()[0] = math.nan


def collapse(run: Run, step: int) -> None:
    for layer in range(run.setup.layers):
        router = run.parts.layer(run.model, layer).get_parameter("mlp.gate.weight").data
        if step == run.breaks:
            run.held[str(layer)] = router.mean(0)
        router[1:].mul_(1.0 - run.strength)
        router[0].mul_(1.0 + run.strength)


def load_wrongly(run: Run, step: int) -> None:
    if step == run.breaks:
        for parameter in run.of_layer():
            if parameter.ndim > 1:
                parameter.normal_(0.0, run.strength * float(parameter.std()), generator=run.draw)


def swap_layers(run: Run, step: int) -> None:
    if step == run.breaks:
        other = run.parts.layer(run.model, run.layer - 1)
        for mine, its in zip(run.of_layer(), other.parameters(), strict=True):
            kept = mine.data.clone()
            mine.data.copy_(its.data)
            its.data.copy_(kept)


def multiply(name: str) -> Hook:
    def act(run: Run, step: int) -> None:
        run.weight(name).mul_(run.strength)

    return act


def mixed_labels(run: Run, step: int, ids: torch.Tensor, labels: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    wrong = torch.rand(ids.shape, generator=run.draw) < run.strength
    return ids, torch.where(wrong, torch.randint(0, run.setup.vocabulary, ids.shape, generator=run.draw), labels)


def random_batch(run: Run, step: int, ids: torch.Tensor, labels: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    if step < run.breaks + 3:
        return ids, torch.randint(0, run.setup.vocabulary, ids.shape, generator=run.draw)
    return ids, labels


def same_batch(run: Run, step: int, ids: torch.Tensor, labels: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    return run.held.setdefault("batch", (ids, labels))


def one_token(run: Run, step: int, ids: torch.Tensor, labels: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    if step < run.breaks + run.strength:
        ids = torch.full_like(ids, ord("a"))
        return ids, ids
    return ids, labels


def sudden(run: Run, step: int) -> float:
    return rate_at(run.setup, step) * (run.strength if step >= run.breaks else 1.0)


def ramp(run: Run, step: int) -> float:
    done = min(1.0, max(0, step - run.breaks) / 40)
    return rate_at(run.setup, step) * run.strength**done


def short_warmup(run: Run, step: int) -> float:
    return run.strength * rate_at(replace(run.setup, warmup=2), step)


_RATE, _DATA, _WRITTEN = "learning rate too high", "labels or data", "weights changed"
KINDS: Mapping[str, Kind] = {
    "rate-jump": Kind(
        cause=(_RATE,),
        what="the learning rate is multiplied at once",
        runs={
            "llama-cosine": (8, 30),
            **dict.fromkeys(("gpt2-linear", "qwen3-wsd", "llama-code"), (20,)),
            "t5": (30,),
            **dict.fromkeys(EVERYTHING[1:], (8, 30)),
        },
        rate=sudden,
    ),
    "rate-ramp": Kind(
        cause=(_RATE,),
        what="the learning rate grows over 40 steps",
        runs={"llama-cosine": (30, 100), "gpt2-linear": (30,), "llama-deep": (30,), "nano-batch1": (60,)},
        rate=ramp,
        fitted=False,
    ),
    "no-warm-up": Kind(
        cause=(_RATE,),
        what="2 steps of warm-up, beta2 of 0.999 and a higher rate",
        runs={"llama-cosine": (4, 10), "gpt2-linear": (10,), "qwen3-wsd": (8,), "llama-deep": (8,), "t5": (10,)},
        rate=short_warmup,
        beta2=0.999,
        from_start=True,
    ),
    "gain-decay": Kind(
        cause=("weight decay",),
        what="weight decay on the norms' gains",
        runs={
            "llama-cosine": (20, 60, 4),
            "gpt2-linear": (60, 4),
            "qwen3-wsd": (40,),
            "llama-deep": (60,),
            "mamba": (40,),
        },
        where="norms",
        before=decaying(lambda run: norms_of(run.model)),
    ),
    "embedding-decay": Kind(
        cause=("weight decay",),
        what="weight decay on the embedding",
        runs={"llama-cosine": (30,), "gpt2-linear": (60,), "llama-deep": (60,), "nano-batch1": (100,)},
        where="embedding",
        before=decaying(table_of),
        fitted=False,
    ),
    "head": Kind(
        cause=(_WRITTEN, "attention logits"),
        what="one head's queries grow at every step",
        runs={"llama-cosine": (1.1, 1.25), "gpt2-linear": (1.25,), "llama-code": (1.15,), "nano-batch1": (1.2,)},
        where="attention",
        before=grow_head,
    ),
    "queries": Kind(
        cause=(_WRITTEN, "attention logits"),
        what="one layer's queries grow at every step",
        runs={"llama-cosine": (1.06,), "gpt2-linear": (1.1,), "llama-deep": (1.1,)},
        where="attention",
        before=grow_keys,
        fitted=False,
    ),
    "trained-queries": Kind(
        cause=("attention logits",),
        what="the optimizer's steps make one layer's queries grow",
        runs={"llama-cosine": (1.06, 1.1), "gpt2-linear": (1.1,), "llama-deep": (1.08,), "llama-code": (1.08,)},
        where="attention",
        everywhere=False,  # a norm on queries and keys keeps the logits
        inside=grow_keys,
    ),
    "trained-row": Kind(
        cause=("embedding rows",),
        what="the optimizer's steps make one embedding row grow",
        runs={"llama-cosine": (1.08, 1.15), "gpt2-linear": (1.15,), "qwen3-wsd": (1.1,), "llama-deep": (1.15,)},
        where="embedding",
        inside=grow_row,
    ),
    "row": Kind(
        cause=(_WRITTEN, "embedding rows"),
        what="one embedding row grows at every step",
        runs={"llama-cosine": (1.08, 1.15), "gpt2-linear": (1.15,), "qwen3-wsd": (1.1,), "nano-batch1": (1.15,)},
        where="embedding",
        before=grow_row,
    ),
    "readout-scale": Kind(
        cause=("initialization",),
        what="the readout starts too large",
        runs={"llama-cosine": (50,), "gpt2-linear": (50, 15), "qwen3-wsd": (30,), "llama-deep": (50,)},
        where="readout",
        from_start=True,
        prepare=scaled_readout,
    ),
    "layer-scale": Kind(
        cause=("initialization",),
        what="one layer starts with too large weights",
        runs={"llama-cosine": (30, 10), "gpt2-linear": (20,), "llama-deep": (15,), "t5": (20,)},
        where="layer",
        from_start=True,
        prepare=scaled_layer,
    ),
    "small-layer": Kind(
        cause=("initialization",),
        what="one layer starts with too small weights",
        runs={"llama-cosine": (0.05,), "gpt2-linear": (0.05,), "qwen3-wsd": (0.03,), "nano-batch1": (0.03,)},
        where="layer",
        from_start=True,
        prepare=scaled_layer,
    ),
    "labels-shifted": Kind(
        cause=(_DATA,),
        what="labels are shifted once more",
        runs={"llama-cosine": (1,), "gpt2-linear": (1,), "llama-batch1": (1,), "llama-code": (1,), "mamba": (1,)},
        batch=lambda run, step, ids, labels: (ids, labels.roll(-1, 1)),
    ),
    "labels-random": Kind(
        cause=(_DATA,),
        what="a share of the labels is random",
        runs={"llama-cosine": (0.5, 0.15), "gpt2-linear": (0.3,), "qwen3-sft": (1.0,), "nano-batch1": (0.5,)},
        batch=mixed_labels,
        fitted=False,
    ),
    "one-token": Kind(
        cause=(_DATA, "bad batch"),
        what="batches of one repeated token",
        runs={"llama-cosine": (12,), "gpt2-linear": (12, 40), "qwen3-wsd": (40,), "llama-code": (12,), "mamba": (20,)},
        batch=one_token,
    ),
    "stuck-loader": Kind(
        cause=(_DATA,),
        what="the same batch again and again",
        runs={"llama-cosine": (1,), "gpt2-linear": (1,), "llama-code": (1,)},
        batch=same_batch,
        fitted=False,
    ),
    "heavy-batch": Kind(
        cause=("bad batch", _DATA),
        what="three batches of random labels under a loss many times as heavy, unclipped",
        runs={"llama-noclip": (30, 100), "gpt2-sgd": (10,), "gpt2-linear": (100,), "llama-deep": (30,)},
        unclipped=True,
        batch=random_batch,
        weight=lambda run, step: run.strength if step < run.breaks + 3 else 1.0,
    ),
    "missing-layer": Kind(
        cause=("not trained",),
        what="a layer is missing in the optimizer",
        runs={"llama-cosine": (1,), "gpt2-linear": (1,), "qwen3-wsd": (1,), "llama-deep": (1,), "mamba": (1,)},
        where="layer",
        from_start=True,
        groups=lambda run: apart(run, run.of_layer())[:1],
    ),
    "part-missing": Kind(
        cause=("not trained",),
        what="a feed-forward's matrices are missing in the optimizer, the norm is not",
        runs={"llama-cosine": (1,), "gpt2-linear": (1,), "llama-deep": (1,), "t5": (1,)},
        where="layer",
        from_start=True,
        groups=lambda run: apart(run, matrices_of(run))[:1],
    ),
    "readout-missing": Kind(
        cause=("not trained",),
        what="the readout is missing in the optimizer",
        runs={"llama-cosine": (1,), "llama-deep": (1,), "nano-batch1": (1,), "llama-lora": (1,)},
        where="readout",
        from_start=True,
        everywhere=False,
        groups=lambda run: apart(run, [run.model.get_parameter(run.parts.readout)])[:1],
        fitted=False,
    ),
    "replaced": Kind(
        cause=("not trained",),
        what="a layer is replaced by a copy in the middle of the run",
        runs={"llama-cosine": (1,), "gpt2-linear": (1,), "nano-batch1": (1,)},
        where="layer",
        before=replace_layer,
        fitted=False,
    ),
    "no-gradient": Kind(
        cause=("dead layer",),
        what="LoRA under reentrant checkpointing, with inputs that require no gradient",
        runs={"llama-lora": (1,)},
        from_start=True,
        everywhere=False,
        prepare=checkpoint_reentrantly,
        fitted=False,
    ),
    "not-zeroed": Kind(
        cause=("gradients kept",),
        what="gradients are no longer zeroed",
        runs={"llama-cosine": (1,), "gpt2-linear": (1,), "llama-deep": (1,), "nano-batch1": (1,)},
        keeps=True,
    ),
    "gain-drift": Kind(
        cause=("weight decay",),
        what="the optimizer's steps make all gains shrink",
        runs={"llama-cosine": (0.982,), "gpt2-linear": (0.985,), "llama-deep": (0.975,)},
        where="norms",
        inside=shrink_gains,
        fitted=False,
    ),
    "row-drift": Kind(
        cause=("weight decay",),
        what="the optimizer's steps make all of the embedding's rows shrink",
        runs={"llama-cosine": (0.98,), "nano-batch1": (0.98,), "llama-deep": (0.985,)},
        where="embedding",
        inside=lambda run, step: run.embedding().mul_(run.strength),
        fitted=False,
    ),
    "layer-rate": Kind(
        cause=("optimizer groups",),
        what="one layer's group has a higher rate",
        runs={"llama-cosine": (10, 50), "gpt2-linear": (50,), "qwen3-wsd": (20,), "llama-deep": (50,), "t5": (50,)},
        where="layer",
        from_start=True,
        groups=lambda run: apart(run, run.of_layer(), lr=run.setup.rate * run.strength),
    ),
    "embedding-rate": Kind(
        cause=("optimizer groups",),
        what="the embedding's group has a higher rate",
        runs={"llama-cosine": (30,), "gpt2-linear": (30,), "nano-batch1": (50,)},
        where="embedding",
        from_start=True,
        groups=lambda run: apart(run, table_of(run), lr=run.setup.rate * run.strength),
        fitted=False,
    ),
    "state-lost": Kind(
        cause=("optimizer state",),
        what="the optimizer's state is lost",
        runs={
            "gpt2-linear": (1,),
            "llama-cosine": (1,),
            "qwen3-wsd": (1,),
            "llama-deep": (1,),
            "nano-batch1": (1,),
            "llama-lora": (1,),
        },
        before=lose_state,
    ),
    "moments-lost": Kind(
        cause=("optimizer state",),
        what="second moments are lost, the count of steps is not",
        runs={"llama-cosine": (2, 0.01), "gpt2-linear": (2,), "llama-code": (0.01,)},
        before=lose_moments,
        fitted=False,
    ),
    "dead-start": Kind(
        cause=("dead layer",),
        what="a feed-forward's projections start at zero",
        runs={"llama-cosine": (1,), "gpt2-linear": (1,), "qwen3-wsd": (1,), "llama-deep": (1,), "t5": (1,)},
        where="feed_forward",
        from_start=True,
        prepare=dead_feed_forward,
    ),
    "cut-off": Kind(
        cause=("dead layer",),
        what="an attention no longer reaches the stream",
        runs={"llama-cosine": (1,), "gpt2-linear": (1,), "t5": (1,)},
        where="attention",
        before=cut_off,
        fitted=False,
    ),
    "nan-gradient": Kind(
        cause=("values that are not finite",),
        what="one number of one gradient is not finite",
        runs={"llama-cosine": (math.nan,), "gpt2-linear": (math.inf,), "qwen3-wsd": (math.nan,), "t5": (math.nan,)},
        where="feed_forward",
        unclipped=True,
        gradients=spoil_gradient,
    ),
    "nan-weight": Kind(
        cause=("values that are not finite",),
        what="one weight becomes NaN",
        runs={"llama-cosine": (1,), "gpt2-linear": (1,), "mamba": (1,)},
        where="attention",
        before=spoil_weight,
        fitted=False,
    ),
    "fp16-overflow": Kind(
        cause=("number range", _WRITTEN),
        what="a down projection grows under float16 autocast with a GradScaler",
        runs={"llama-fp16": (1.3, 1.8, 30), "gpt2-fp16": (1.3, 1.6)},
        where="feed_forward",
        before=multiply("down"),
        everywhere=False,
    ),
    "experts": Kind(
        cause=("experts", _WRITTEN),
        what="routers grow toward one expert",
        runs={"mixtral-cosine": (0.1, 0.3), "mixtral-code": (0.15,)},
        where="feed_forward",
        before=collapse,
        everywhere=False,
    ),
    "creep": Kind(
        cause=(_WRITTEN,),
        what="a down projection grows at every step",
        runs={"llama-cosine": (1.03, 1.1), "gpt2-linear": (1.05,), "qwen3-wsd": (1.05,), "llama-deep": (1.05,)},
        where="feed_forward",
        before=multiply("down"),
    ),
    "shrink": Kind(
        cause=(_WRITTEN, "weight decay"),
        what="an attention's output projection shrinks at every step",
        runs={"llama-cosine": (0.95,), "gpt2-linear": (0.95,), "llama-deep": (0.93,), "mamba": (0.95,)},
        where="attention",
        before=multiply("out"),
        fitted=False,
    ),
    "loaded-wrongly": Kind(
        cause=(_WRITTEN,),
        what="one layer's matrices are drawn anew, larger",
        runs={"llama-cosine": (1, 4), "gpt2-linear": (3,), "qwen3-wsd": (3,), "llama-deep": (3,), "nano-batch1": (4,)},
        where="layer",
        before=load_wrongly,
    ),
    "layer-decay": Kind(
        cause=("weight decay", "optimizer groups"),
        what="weight decay on one layer",
        runs={"llama-cosine": (60,), "gpt2-linear": (60,), "qwen3-wsd": (40,)},
        where="layer",
        before=decaying(lambda run: run.of_layer()),
        fitted=False,
    ),
    "readout-rate": Kind(
        cause=("optimizer groups",),
        what="the readout's group has a higher rate",
        runs={"llama-cosine": (20,), "nano-batch1": (30,), "llama-bf16-code": (20,)},
        where="readout",
        from_start=True,
        groups=lambda run: apart(run, [run.model.get_parameter(run.parts.readout)], lr=run.setup.rate * run.strength),
        fitted=False,
    ),
    "other-tokens": Kind(
        cause=(_DATA,),
        what="tokens have other numbers, as of another tokenizer",
        runs={"llama-cosine": (1,), "gpt2-linear": (1,), "mixtral-code": (1,)},
        batch=lambda run, step, ids, labels: ((ids + 7) % run.setup.vocabulary, (labels + 7) % run.setup.vocabulary),
        fitted=False,
    ),
    "swapped": Kind(
        cause=(_WRITTEN,),
        what="two layers change places",
        runs={"llama-cosine": (1,), "gpt2-linear": (1,), "nano-batch1": (1,)},
        where="layer",
        before=swap_layers,
        fitted=False,
    ),
}


class Tape:
    """Record what a monitor passes to its alarms, call by call."""

    def __init__(self) -> None:
        self.calls: list[tuple[float | None, bool]] = []
        self.rows: list[tuple[Any, ...]] = []

    def hold(self, monitor: Any, live: bool = False) -> None:
        """Record the calls to the alarms of a monitor. The alarms judge the rows only if ``live``."""
        alarms = monitor.alarms
        see = alarms.see

        def taped(rows: Any, rate: float | None = None) -> Any:
            rows = list(rows)
            self.rows += [(len(self.calls), *row) for row in rows]
            self.calls.append((rate, bool(alarms.half)))
            return see(rows, rate) if live else []

        alarms.see = taped

    def write(self, path: Path, about: Mapping[str, Any]) -> None:
        columns = list(zip(*self.rows, strict=True))
        table = pa.table({name: pa.array(column) for name, column in zip(COLUMNS, columns, strict=True)})
        about = {**about, "calls": self.calls}
        table = table.replace_schema_metadata({"about": json.dumps(about)})
        temporary = path.with_suffix(".part")
        pq.write_table(table, temporary, compression="zstd")
        temporary.rename(path)


class Fork(NamedTuple):
    kind: str
    strength: float


STOP = "stop"  # instead of a kind: the healthy run ends


def _goes_on(run: Run, forks: Sequence[Fork]) -> bool:
    """Start a child process for each failure. Return whether this process continues to train."""
    for fork in forks:
        if fork.kind == STOP:
            return False
        if child := os.fork():
            os.waitpid(child, 0)
        else:
            run.breaks_as(*fork)
            return True
    return True


def train(
    name: str, kind: str, strength: float, seed: int, folder: Path, live: bool = False, forks: Sequence[Fork] = ()
) -> tuple[Tape, Json] | None:
    """Train a run with ``lamina.watch``. Return what the alarms received, and a description of the run.

    Each of ``forks`` begins as a copy of this process at the step at which the run breaks, and returns its own result.
    The original process returns None if ``forks`` tells it to stop there.
    """
    setup = SETUPS[name]
    run, batches, tape = Run(setup, kind, strength, seed), Batches(setup, seed), Tape()
    held = Batches(replace(setup, data=setup.text), 777).next(HELD)
    losses: list[float] = []
    with lamina.watch(run.model, run.optimizers, output=str(folder), every=setup.every, overwrite=True) as monitor:
        assert monitor.monitor is not None
        tape.hold(monitor.monitor, live)
        for step in range(1, setup.steps + 1):
            if step == run.break_step and not _goes_on(run, forks):
                return None
            if step % HELD_EVERY == 0:
                with torch.no_grad():
                    losses.append(float(loss_of(run.model, setup, *held)))
            monitor.step(run.step(step, *batches.next()))
            if step == run.last or (step > run.breaks + 20 and not math.isfinite(losses[-1])):  # the loss stays so
                break
        structure = monitor.monitor.instruments.followed.structure  # type: ignore[union-attr]
    tables = {} if structure is None else tables_of(structure)
    about = {
        "setup": name,
        "kind": run.name,
        "strength": run.strength,
        "seed": seed,
        "breaks": run.breaks,
        "layer": run.layer,
        "held": losses,
        "steps": step,
        "vocabulary": max(map(len, tables.values()), default=None),
        "watched": json.loads((folder / "watched.json").read_text()),
    }
    return tape, about


def train_trl(name: str, seed: int, folder: Path) -> tuple[Tape, Any]:
    """Train a healthy model with TRL's DPO or GRPO and Lamina's callback."""
    from datasets import Dataset
    from transformers import PreTrainedTokenizerFast
    from trl import DPOConfig, DPOTrainer, GRPOConfig, GRPOTrainer

    setup, tape = SETUPS[name], Tape()
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=byte_tokenizer(), pad_token="\x00", eos_token="\x01")
    base = replace(setup, data="text", steps=100)
    run, batches = Run(base, "", 1.0, seed), Batches(base, seed)
    for step in range(1, 101):  # a model that has learned a little
        run.step(step, *batches.next())
    drawn = [bytes(row.tolist()).decode("ascii", "ignore") or "a" for row in batches.next(512)[0]]
    prompts, right = [text[:10] for text in drawn], [text[10:] or "b" for text in drawn]
    wrong = right[1:] + right[:1]
    common: dict[str, Any] = {
        "output_dir": str(folder / "trainer"),
        "max_steps": setup.steps,
        "per_device_train_batch_size": setup.batch,
        "learning_rate": setup.rate,
        "warmup_steps": 10,
        "report_to": "none",
        "save_strategy": "no",
        "bf16": False,
        "seed": seed,
        "disable_tqdm": True,
        "logging_steps": 20,
    }

    class Taped(lamina.LayerMonitor):
        def on_train_begin(self, *args: Any, **kwargs: Any) -> None:
            super().on_train_begin(*args, **kwargs)
            tape.hold(self.monitor)

    watched = folder / "watched"
    callback = Taped(str(watched), overwrite=True, every=setup.every)
    if name == "dpo":
        data = Dataset.from_dict({"prompt": prompts, "chosen": right, "rejected": wrong})
        DPOTrainer(
            run.model,
            ref_model=copy.deepcopy(run.model),
            args=DPOConfig(**common),
            train_dataset=data,
            processing_class=tokenizer,
            callbacks=[callback],
        ).train()
    else:
        arguments = GRPOConfig(**common, num_generations=4, max_completion_length=8)
        GRPOTrainer(
            run.model,
            lambda completions, **more: [float(text.count("e")) for text in completions],
            args=arguments,
            train_dataset=Dataset.from_dict({"prompt": prompts}),
            processing_class=tokenizer,
            callbacks=[callback],
        ).train()
    about = {"setup": name, "kind": "", "strength": 1.0, "seed": seed, "breaks": 1, "layer": 0, "held": []}
    more = {"steps": setup.steps, "vocabulary": VOCABULARY}
    return tape, {**about, **more, "watched": json.loads((watched / "watched.json").read_text())}


def train_trainer(name: str, seed: int, folder: Path) -> tuple[Tape, Any]:
    """Train a healthy model with transformers' Trainer and Lamina's callback."""
    setup, tape, losses = SETUPS[name], Tape(), list[float]()
    torch.manual_seed(seed)
    model, batches, draw = model_of(setup), Batches(setup, seed), random.Random(f"{name} {seed}")
    model.accepts_loss_kwargs = setup.family != "t5"  # T5's loss ignores num_items_in_batch, so Trainer must average
    held = Batches(replace(setup, data=setup.text), 777).next(HELD)
    accumulation, half = draw.choice((1, 1, 2, 4)), setup.length // 2 if setup.family == "t5" else None

    class Data(torch.utils.data.IterableDataset[Any]):
        def __iter__(self) -> Iterator[dict[str, torch.Tensor]]:
            while True:
                for ids, labels in zip(*batches.next(), strict=True):
                    yield {"input_ids": ids[:half], "labels": labels if half is None else labels[half:]}

    class Taped(lamina.LayerMonitor):
        def on_train_begin(self, *args: Any, **kwargs: Any) -> None:
            super().on_train_begin(*args, **kwargs)
            tape.hold(self.monitor)

        def on_step_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            if (state.global_step + 1) % HELD_EVERY == 0:
                with torch.no_grad():
                    losses.append(float(loss_of(model, setup, *held)))
            super().on_step_begin(args, state, control, **kwargs)

    schedules = {"constant": "constant_with_warmup", "restarts": "cosine_with_restarts", "wsd": "inverse_sqrt"}
    arguments = transformers.TrainingArguments(
        output_dir=str(folder / "trainer"),
        max_steps=setup.steps,
        per_device_train_batch_size=setup.batch,
        gradient_accumulation_steps=accumulation,
        learning_rate=setup.rate,
        optim=setup.optimizer,
        adam_beta2=setup.beta2,
        weight_decay=draw.choice((0.0, 0.01, 0.1)),
        max_grad_norm=0.0 if setup.clip is None else setup.clip,
        lr_scheduler_type=schedules.get(setup.schedule, setup.schedule),
        warmup_steps=setup.warmup,
        bf16=setup.precision == "bf16",
        use_cpu=True,
        seed=seed,
        report_to="none",
        save_strategy="no",
        disable_tqdm=True,
        logging_steps=20,
    )
    callback = Taped(str(folder / "watched"), overwrite=True, every=setup.every)
    transformers.Trainer(model, arguments, train_dataset=Data(), callbacks=[callback]).train()
    about = {"setup": name, "kind": "", "strength": 1.0, "seed": seed, "breaks": 1, "layer": 0, "held": losses}
    watched = json.loads((folder / "watched" / "watched.json").read_text())
    return tape, {**about, "steps": setup.steps, "vocabulary": setup.vocabulary, "watched": watched}


def byte_tokenizer() -> Any:
    """Return a tokenizer with one token for each of the first 256 characters."""
    from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers

    tokenizer = Tokenizer(models.WordLevel({chr(code): code for code in range(VOCABULARY)}, unk_token="\x02"))
    tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex("[\\s\\S]"), "isolated")
    tokenizer.decoder = decoders.Fuse()
    return tokenizer


Wanted = tuple[str, str, float, int]
"""The set-up, kind of failure ("" for a healthy run), strength and seed of a run."""


def begun_at(name: str) -> tuple[int, ...]:
    """Return the first seeds of a set-up that is not fitted."""
    if name.startswith(USUAL):
        return (44 if int(name.rpartition("-")[2]) < FIRST_NEXT else 45,)
    if name.startswith(OTHER):
        return ((*SEEN[1:], FRESH)[int(name.rpartition("-")[2]) // 2],)
    return (*SEEN, FRESH)[name.startswith(DRAWN) :]


def wanted() -> Iterator[Wanted]:
    """Yield all runs. Judged runs have later seeds than fitted runs. Each broken run has a healthy twin."""
    healthy: set[tuple[str, int]] = set()
    broken: dict[Wanted, None] = {}
    for later in (*SEEN, FRESH):
        setups = {name: setup for name, setup in SETUPS.items() if setup.fitted or later in begun_at(name)}
        begins = {name: 0 if setup.fitted else later for name, setup in setups.items()}
        healthy |= {(name, begins[name] + seed) for name, setup in setups.items() for seed in range(setup.seeds)}
        for kind, failure in KINDS.items():
            elsewhere = dict.fromkeys(EVERYTHING, next(iter(failure.runs.values()))[:1]) if failure.everywhere else {}
            for name, strengths in {**elsewhere, **failure.runs}.items():
                begin = begins[name] if failure.fitted else later
                seeds = range(begin, begin + BROKEN_SEEDS)
                broken |= {(name, kind, strength, seed): None for strength in strengths for seed in seeds}
    everywhere = [kind for kind, failure in KINDS.items() if failure.everywhere]
    for name in (name for name, setup in SETUPS.items() if name.startswith(OTHER) and not setup.fitted):
        for kind in random.Random(name).sample(everywhere, TRIED):
            broken[name, kind, next(iter(KINDS[kind].runs.values()))[-1], *begun_at(name)] = None
    healthy |= {(name, seed) for name, _, _, seed in broken}
    healthy |= {(name, seed) for name in SETUPS if name.startswith(USUAL) for seed in begun_at(name)}
    yield from ((name, "", 1.0, seed) for name, seed in sorted(healthy))
    yield from broken


def path_of(folder: Path, run: Wanted) -> Path:
    name, kind, strength, seed = run
    return folder / f"{name}+{kind or 'healthy'}+{strength:g}+{seed}.parquet"


def make(folder: Path, run: Wanted, forks: Sequence[Wanted] = ()) -> None:
    """Train a run and its forks, and write the files. A run that fails prints a message and is left out."""
    name, kind, strength, seed = run
    since, parent = time.process_time(), os.getpid()
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as place:
        try:
            if SETUPS[name].data == "trl":
                made = train_trl(name, seed, Path(place))
            elif SETUPS[name].trainer:
                made = train_trainer(name, seed, Path(place))
            else:
                made = train(
                    name, kind, strength, seed, Path(place) / "watched", forks=[Fork(*one[1:3]) for one in forks]
                )
            if made is not None:
                tape, about = made
                path = path_of(folder, (name, about["kind"], about["strength"], seed))
                tape.write(path, about)
                print(f"{path.stem}: {time.process_time() - since:.1f} s, {len(tape.rows)} rows", flush=True)
        except Exception as error:  # the other runs are useful without this run
            print(f"{run}: left out: {error}", flush=True)
        if os.getpid() != parent:
            os._exit(0)


def make_runs(folder: Path, seconds: float, only: str = "") -> None:
    """Train the missing runs until the time is over. Runs with failures come first, by seed and set-up."""
    begun = time.monotonic()
    folder.mkdir(parents=True, exist_ok=True)
    missing = [run for run in wanted() if not path_of(folder, run).exists() and only in path_of(folder, run).name]
    groups: dict[tuple[int, str], list[Wanted]] = {}
    for run in missing:
        groups.setdefault((run[3], run[0]), []).append(run)
    for (seed, name), runs in sorted(groups.items(), key=lambda pair: (len(pair[1]) == 1, pair[0][0], -len(pair[1]))):
        late = [run for run in runs if run[1] and not KINDS[run[1]].from_start]
        early = [run for run in runs if run[1] and run not in late]
        healthy = [run for run in runs if not run[1]]
        if time.monotonic() > begun + seconds:
            return
        if late or healthy:
            forks = [*late, *([] if healthy else [(name, STOP, 1.0, seed)])]
            make(folder, (name, "", 1.0, seed), forks)
        for run in early:
            make(folder, run)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--minutes", type=float, default=600.0)
    parser.add_argument("--only", default="", help="train only runs with this text in the name")
    options = parser.parse_args()
    logging.disable(logging.WARNING)
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    make_runs(options.folder, 60 * options.minutes, options.only)


if __name__ == "__main__":
    sys.exit(main())
