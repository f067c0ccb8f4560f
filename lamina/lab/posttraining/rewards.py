"""Rewards of answers: reward models, a user's functions, and their weighted sum."""

from __future__ import annotations

import inspect
import json
import logging
import math
import re
import signal
import threading
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import TypeAlias, TypeVar

import torch
from torch.nn.utils.rnn import pad_sequence
from transformers import AutoModelForSequenceClassification

from lamina.core.python_files import guarded, run_file
from lamina.data.encoding import TextEncoder
from lamina.data.tokenizers import load_tokenizer
from lamina.errors import UserError, one_line
from lamina.jobs.manifest import content_hash, model_folder, sha256
from lamina.lab.posttraining.examples import Fields
from lamina.lab.posttraining.settings import RlhfSettings
from lamina.lab.posttraining.starting import Start
from lamina.lab.posttraining.trainer import Passed
from lamina.modeling.backbones.loading import load_weights, read_config

logger = logging.getLogger(__name__)

T = TypeVar("T")
Score: TypeAlias = Callable[[Sequence[Fields], Sequence[Sequence[int]], Sequence[str]], list[float]]
"""Rewards of answers: takes the prompts (prompt, prompt_ids, text, row), the answers' token ids and their texts."""
Parts: TypeAlias = Mapping[str, Sequence[float]]
"""Rewards of answers, by the reward's name."""
BATCH = 32


def check_rewards(settings: RlhfSettings, start: Start) -> str:
    """Hash the reward models and functions. Raises UserError if one is missing or a model's vocabulary differs."""
    models, functions, seconds = settings.reward_models(), settings.reward_functions(), settings.reward_timeout
    if seconds and threading.current_thread() is not threading.main_thread():
        raise UserError(f"reward_timeout: {seconds:g} (allowed outside a process's main thread: 0)")
    if not models and not functions:
        raise UserError("reward_model: none given (needed: a folder as lamina reward leaves it, or --reward-function)")
    digests = [_check_model(named, start) for named in models]
    for named in functions:
        path, _ = _parts(named)
        _of_function(named)
        digests.append(sha256(path))
    return "+".join(digests)


def _check_model(named: str, start: Start) -> str:
    folder = model_folder(named)
    if not (folder / "config.json").is_file():
        raise UserError(f"reward_model: {named!r} holds no saved model (config.json is missing)")
    config = read_config(folder, "reward_model")
    if not any("SequenceClassification" in name for name in config.architectures or ()):
        raise UserError(f"reward_model: {named!r} gives no score (allowed: a folder as lamina reward leaves it)")
    positions = getattr(config.get_text_config(), "max_position_embeddings", None)
    if positions is not None and positions < start.longest:
        raise UserError(
            f"reward_model: {named!r} reads {positions} tokens, and a prompt with its answer may have "
            f"{start.longest} (allowed: --sequence-length {positions})"
        )
    try:
        theirs = load_tokenizer(str(folder))
    except UserError as error:
        raise UserError(f"reward_model: {error}") from None
    if TextEncoder(theirs).content_hash() != TextEncoder(start.tokenizer).content_hash():
        raise UserError(
            f"reward_model: {named!r} has another vocabulary than the model {start.path!r} (allowed: "
            "a reward model that was trained from it or has its tokenizer)"
        )
    return content_hash(folder)


@dataclass(frozen=True, kw_only=True)
class Rewards:
    """The weighted sum of several rewards of an answer.

    Attributes:
        scores: each reward, by its name in the records.
    """

    scores: Mapping[str, Score]
    weights: Sequence[float]

    def parts(self, rows: Sequence[Fields], answers: Sequence[Sequence[int]], texts: Sequence[str]) -> Parts:
        """Compute each reward of each answer, by the reward's name."""
        return {name: score(rows, answers, texts) for name, score in self.scores.items()}

    def total(self, parts: Parts) -> list[float]:
        """Compute the weighted sum of each answer's rewards."""
        return [
            sum(weight * one for weight, one in zip(self.weights, each, strict=True))
            for each in zip(*parts.values(), strict=True)
        ]


def make_rewards(settings: RlhfSettings, device: torch.device, dtype: torch.dtype = torch.float32) -> Rewards:
    """Load the settings' reward models on this device, and their reward functions."""
    made: dict[str, Score] = {}
    for path in settings.reward_models():
        folder = model_folder(path)
        name = folder.parent.name if folder.name == "model" else folder.name
        made[_unused(name, made)] = _of_model(path, device, dtype)
    for function in settings.reward_functions():
        made[_unused(_parts(function)[1], made)] = _of_function(
            function, seconds=settings.reward_timeout, announced=True
        )
    return Rewards(scores=made, weights=settings.weights_of_rewards())


def _unused(name: str, known: Mapping[str, object]) -> str:
    """Return a name for a reward's records; append a number if another reward has the name."""
    plain = re.sub(r"\W", "_", name)
    return plain if plain not in known else _unused(f"{plain}_{len(known) + 1}", known)


def _of_model(named: str, device: torch.device, dtype: torch.dtype) -> Score:
    folder = model_folder(named)
    config = read_config(folder, "reward_model")
    model, _ = load_weights(folder, config, AutoModelForSequenceClassification, "reward_model", dtype=dtype)
    if model.config.num_labels != 1:
        raise UserError(f"reward_model: it gives {model.config.num_labels} scores (needed: one)")
    torch.nn.Module.to(model, device).requires_grad_(False)

    @torch.no_grad()
    def score(rows: Sequence[Fields], answers: Sequence[Sequence[int]], texts: Sequence[str]) -> list[float]:
        scores: list[float] = []
        whole = [[*row["prompt_ids"], *answer] for row, answer in zip(rows, answers, strict=True)]
        for first in range(0, len(whole), BATCH):
            ids, mask = padded(whole[first : first + BATCH], 0, model.device)
            scores += model(input_ids=ids, attention_mask=mask, use_cache=False).logits[:, 0].float().tolist()
        return scores

    return score


def in_time(act: Callable[[], T], seconds: float) -> T | None:
    """Return the result of ``act``, or None after ``seconds`` (0: no limit), when its Python code is interrupted.

    Only the main thread of a process can have a limit.
    """
    if not seconds:
        return act()
    rang = False

    def ring(number: int, frame: FrameType | None) -> None:
        nonlocal rang
        rang = True
        raise TimeoutError

    result, before = None, signal.signal(signal.SIGALRM, ring)
    try:
        try:
            signal.setitimer(signal.ITIMER_REAL, seconds)
            result = act()
        finally:
            signal.setitimer(signal.ITIMER_REAL, 0)
    except (UserError, TimeoutError):  # ``act`` may have caught the bell, and raised an error of its own
        if not rang:
            raise
    finally:
        signal.signal(signal.SIGALRM, before)
    return None if rang else result


def _of_function(named: str, *, seconds: float = 0.0, announced: bool = False) -> Score:
    path, name = _parts(named)
    function = getattr(run_file("reward_function", path, announced=announced), name, None)
    if not callable(function):
        raise UserError(f"reward_function: {str(path)!r} has no function {name!r}")
    trls = False
    with suppress(ValueError, TypeError):  # a built-in has no signature
        trls = "completions" in inspect.signature(function).parameters

    def of(row: Fields, ids: Sequence[int], text: str) -> float | None:
        def ask() -> float:
            whole = json.loads(row["row"])
            with guarded(f"reward_function {named!r}"):
                if trls:
                    reward = _as_trl_asks(function, row["prompt"], ids, text, whole)
                else:
                    reward = function(row["text"], text, whole)
            return _number(named, reward)

        return in_time(ask, seconds)

    def score(rows: Sequence[Fields], answers: Sequence[Sequence[int]], texts: Sequence[str]) -> list[float]:
        rewards = [of(*each) for each in zip(rows, answers, texts, strict=True)]
        if late := rewards.count(None):
            logger.warning("%s: %d of %d answers took more than %g s: 0", named, late, len(rewards), seconds)
        return [reward or 0.0 for reward in rewards]

    return score


def _as_trl_asks(function: Callable[..., Passed], asked: Passed, ids: Sequence[int], text: str, row: Fields) -> Passed:
    """Call a reward function of TRL's form, which takes lists by name and the row's fields, on one answer.

    A result of None, which TRL leaves out of the sum, counts as 0.
    """
    answer = [{"role": "assistant", "content": text}] if isinstance(asked, list) else text
    fields = {name: [value] for name, value in row.items() if name not in ("prompt", "completion", "completion_ids")}
    (reward,) = function(prompts=[asked], completions=[answer], completion_ids=[list(ids)], **fields)
    return 0.0 if reward is None else reward


def _number(named: str, reward: Passed) -> float:
    """Convert a function's reward to a float. Raises UserError for anything but a finite number."""
    with suppress(TypeError, ValueError, RuntimeError, OverflowError):  # of an integer that no float can hold
        if not isinstance(reward, str | bytes) and math.isfinite(number := float(reward)):
            return number
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
    """Pad token ids on the right, or on the left; return ids and mask, [sequences, tokens] each."""
    side = "left" if left else "right"
    ids = pad_sequence([torch.tensor(s) for s in sequences], batch_first=True, padding_value=pad, padding_side=side)
    mask = pad_sequence([torch.ones(len(s), dtype=torch.long) for s in sequences], batch_first=True, padding_side=side)
    return ids.to(device), mask.to(device)
