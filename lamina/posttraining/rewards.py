"""The rewards of answers: a reward model's score, or a function of the user's."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path

import numpy as np
import torch
from safetensors import SafetensorError
from transformers import AutoModelForSequenceClassification, PreTrainedModel

from lamina.core.python_files import guarded, run_file
from lamina.data.encoding import TextEncoder
from lamina.data.tokenizers import load_tokenizer
from lamina.errors import UserError, one_line
from lamina.jobs.manifest import refuse_damaged, sha256
from lamina.jobs.model_folder import content_hash, model_folder
from lamina.modeling.backbones.loading import read_config
from lamina.posttraining.rows import Fields as Row
from lamina.posttraining.settings import RlhfSettings
from lamina.posttraining.starting import Start

Score = Callable[[Sequence[Row], Sequence[Sequence[int]], Sequence[str]], list[float]]
"""Rewards of answers: takes the prompts' rows (prompt, prompt_ids, row), the answers' token ids and their texts."""
BATCH = 32


def check_rewards(settings: RlhfSettings, start: Start) -> str:
    """Hash the reward model or function. Raises UserError if it is missing or the model's vocabulary differs."""
    if settings.reward_function is not None:
        path, _ = _parts(settings.reward_function)
        _of_function(settings.reward_function)
        return sha256(path)
    if settings.reward_model is None:
        raise UserError("reward_model: none given (needed: a folder as lamina reward leaves it, or --reward-function)")
    folder = model_folder(settings.reward_model)
    if not (folder / "config.json").is_file():
        raise UserError(f"reward_model: {settings.reward_model!r} holds no saved model (config.json is missing)")
    refuse_damaged(folder)
    config = read_config(folder, "reward_model")
    if not any("SequenceClassification" in name for name in config.architectures or ()):
        raise UserError(
            f"reward_model: {settings.reward_model!r} gives no score (allowed: a folder as lamina reward leaves it)"
        )
    positions = getattr(config.get_text_config(), "max_position_embeddings", None)
    if positions is not None and positions < start.longest:
        raise UserError(
            f"reward_model: {settings.reward_model!r} reads {positions} tokens, and a prompt with its answer may have "
            f"{start.longest} (allowed: --sequence-length {positions})"
        )
    try:
        theirs = load_tokenizer(str(folder))
    except UserError as error:
        raise UserError(f"reward_model: {error}") from None
    if TextEncoder(theirs).content_hash() != TextEncoder(start.tokenizer).content_hash():
        raise UserError(
            f"reward_model: {settings.reward_model!r} has another vocabulary than the model {start.path!r} (allowed: "
            "a reward model that was trained from it or has its tokenizer)"
        )
    return content_hash(folder)


def make_rewards(settings: RlhfSettings, device: torch.device) -> Score:
    """Make the rewards of the settings' reward model, on this device, or of their function."""
    if settings.reward_function is not None:
        return _of_function(settings.reward_function, announced=True)
    folder = model_folder(str(settings.reward_model))
    try:
        model = AutoModelForSequenceClassification.from_pretrained(folder, dtype=torch.float32, use_safetensors=True)
    except (OSError, ValueError, RuntimeError, SafetensorError) as error:
        raise UserError(f"reward_model: {settings.reward_model!r} can't be loaded ({one_line(error)})") from error
    if model.config.num_labels != 1:
        raise UserError(f"reward_model: it gives {model.config.num_labels} scores (needed: one)")
    return _of_model(model.to(device).eval().requires_grad_(False))


def _of_model(model: PreTrainedModel) -> Score:
    @torch.no_grad()
    def score(rows: Sequence[Row], answers: Sequence[Sequence[int]], texts: Sequence[str]) -> list[float]:
        scores: list[float] = []
        whole = [[*row["prompt_ids"], *answer] for row, answer in zip(rows, answers, strict=True)]
        for first in range(0, len(whole), BATCH):
            ids, mask = padded(whole[first : first + BATCH], 0, model.device)
            scores += model(input_ids=ids, attention_mask=mask, use_cache=False).logits[:, 0].float().tolist()
        return scores

    return score


def _of_function(named: str, *, announced: bool = False) -> Score:
    path, name = _parts(named)
    function = getattr(run_file("reward_function", path, announced=announced), name, None)
    if not callable(function):
        raise UserError(f"reward_function: {str(path)!r} has no function {name!r}")

    def score(rows: Sequence[Row], answers: Sequence[Sequence[int]], texts: Sequence[str]) -> list[float]:
        rewards = []
        with guarded(f"reward_function {named!r}"):
            for row, text in zip(rows, texts, strict=True):
                rewards.append(function(row["prompt"], text, json.loads(row["row"])))
        return [_number(named, reward) for reward in rewards]

    return score


def _number(named: str, reward: object) -> float:
    """Return a function's reward as a number of Python's. Raises UserError for anything but a number."""
    value: object = reward
    if isinstance(reward, np.generic) or (isinstance(reward, torch.Tensor) and reward.numel() == 1):
        value = reward.item()
    if isinstance(value, bool | int | float):
        with suppress(OverflowError):  # of an integer that no float can hold
            if math.isfinite(value):
                return float(value)
    try:
        shown = one_line(repr(reward))
    except Exception:  # of the user's object; of an integer of more than 4,300 digits, too
        shown = f"a {type(reward).__name__} that can't be printed"
    raise UserError(f"reward_function: {named!r} returned {shown} (allowed: a finite number)")


def _parts(named: str) -> tuple[Path, str]:
    file, _, name = named.rpartition(":")
    path = Path(file)
    if path.suffix != ".py" or not name.isidentifier():
        raise UserError(f"reward_function: {named!r} (allowed: FILE.py:NAME)")
    if not path.is_file():
        raise UserError(f"reward_function: {file!r}: no such file")
    return path, name


def padded(
    sequences: Sequence[Sequence[int]], pad: int, device: torch.device, *, left: bool = False
) -> tuple[torch.Tensor, torch.Tensor]:
    """Token ids and their mask, [sequences, tokens], padded on the right, or on the left."""
    longest = max(map(len, sequences))
    rows, masks = [], []
    for ids in sequences:
        blank, ones = [0] * (longest - len(ids)), [1] * len(ids)
        padding = [pad] * len(blank)
        rows.append([*padding, *ids] if left else [*ids, *padding])
        masks.append([*blank, *ones] if left else [*ones, *blank])
    return torch.tensor(rows, device=device), torch.tensor(masks, device=device)
