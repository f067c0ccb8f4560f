"""A text continued by a saved model."""

from __future__ import annotations

from pathlib import Path
from typing import Protocol, cast

import torch
from transformers import (
    MODEL_FOR_CAUSAL_LM_MAPPING,
    AutoModelForCausalLM,
    PreTrainedTokenizerBase,
)

from lamina.errors import UserError, one_line
from lamina.jobs.digests import refuse_damaged
from lamina.jobs.model_folder import model_folder
from lamina.modeling.backbones.configurations import read_config
from lamina.modeling.backbones.loading import load_tokenizer, load_weights


class Generator(Protocol):
    """A model that continues token ids [batch, tokens]."""

    def generate(self, **options: object) -> torch.Tensor:
        """The token ids and their continuation."""
        ...


def continuation(
    path: str,
    prompt: str,
    max_new_tokens: int,
    temperature: float,
    seed: int,
    *,
    trust_remote_code: bool = False,
) -> str:
    """The prompt and its continuation by the model in a folder. Raises UserError if the folder has no such model."""
    folder = model_folder(path)
    if not folder.exists():
        raise UserError(f"model: {path!r} holds no saved model (config.json is missing)")
    refuse_damaged(folder)
    model, tokenizer = _load(path, folder, trust_remote_code)
    inputs = tokenizer(prompt, return_tensors="pt", return_token_type_ids=False)
    if not inputs["input_ids"].numel():
        raise UserError(f"prompt: {prompt!r} has no tokens (allowed: a text to continue)")
    torch.manual_seed(seed)
    sampling = {"do_sample": True, "temperature": temperature} if temperature > 0 else {"do_sample": False}
    pad = tokenizer.pad_token_id if tokenizer.pad_token_id is not None else tokenizer.eos_token_id
    try:
        ids = model.generate(**inputs, max_new_tokens=max_new_tokens, pad_token_id=pad, **sampling)
    except Exception as error:  # whatever the files ask for, transformers has tried it
        raise UserError(f"model {path!r}: it loads, but does not run: {one_line(error)}") from error
    return str(tokenizer.decode(ids[0], skip_special_tokens=True))


def _load(path: str, folder: Path, trust_remote_code: bool) -> tuple[Generator, PreTrainedTokenizerBase]:
    config = read_config(folder, "model", trust_remote_code=trust_remote_code)
    if type(config) not in MODEL_FOR_CAUSAL_LM_MAPPING and not trust_remote_code:
        raise UserError(f"model: {path!r} is a {config.model_type}, which continues no text")
    model, _ = load_weights(folder, config, AutoModelForCausalLM, "model", trust_remote_code=trust_remote_code)
    tokenizer = load_tokenizer(folder, config, "model", trust_remote_code=trust_remote_code)
    return cast(Generator, model), tokenizer
