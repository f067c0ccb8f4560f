"""Score answers with reward models and with users' functions, and compute the weighted sum of the rewards."""

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
from functools import partial
from pathlib import Path
from types import FrameType
from typing import TypeAlias, TypeVar

import torch
from transformers import AutoModelForSequenceClassification, PreTrainedModel
from trl.trainer.utils import pad

from lamina.core.python_files import guarded, run_file
from lamina.core.values import nearby
from lamina.data.encoding import TextEncoder
from lamina.data.tokenizers import load_tokenizer
from lamina.errors import UserError
from lamina.jobs.manifest import content_hash, model_folder, sha256
from lamina.lab.posttraining.examples import Fields
from lamina.lab.posttraining.settings import RlhfSettings
from lamina.lab.posttraining.starting import Start
from lamina.lab.posttraining.trainer import Passed
from lamina.modeling.backbones.loading import load_weights, read_config

logger = logging.getLogger(__name__)

T = TypeVar("T")
Score: TypeAlias = Callable[[Sequence[Fields], Sequence[Sequence[int]], Sequence[str]], list[float]]
"""A function that returns the reward of each answer.

The arguments are the prompts (with the fields prompt, prompt_ids, text and row), and the answers' token ids and texts.
"""
Parts: TypeAlias = Mapping[str, Sequence[float]]
"""The rewards of all answers, by the name of the reward model or function."""
BATCH = 32


@dataclass(frozen=True, kw_only=True)
class Rewards:
    """Reward models and functions, with the weights of the rewards and a hash of all files."""

    scores: Mapping[str, Score]
    weights: Sequence[float]
    models: Sequence[PreTrainedModel]
    digest: str

    def parts(self, rows: Sequence[Fields], answers: Sequence[Sequence[int]], texts: Sequence[str]) -> Parts:
        """Return the rewards of all answers, for each reward model and function."""
        return {name: score(rows, answers, texts) for name, score in self.scores.items()}

    def total(self, parts: Parts) -> list[float]:
        rewards = torch.tensor(list(parts.values()), dtype=torch.float64)
        return (torch.tensor(self.weights, dtype=torch.float64) @ rewards).tolist()


def make_rewards(settings: RlhfSettings, start: Start) -> Rewards:
    """Load the rewards. Raises UserError if a model or function is missing or does not fit the starting model."""
    named, functions, seconds = settings.reward_models(), settings.reward_functions(), settings.reward_timeout
    if seconds and threading.current_thread() is not threading.main_thread():
        raise UserError(f"reward_timeout: {seconds:g} works only in a process's main thread. Set reward_timeout to 0.")
    if not named and not functions:
        raise UserError(
            "reward_model: none is given. Give a folder that `lamina reward` wrote, or set --reward-function."
        )
    scores: dict[str, Score] = {}
    models, digests = [], []
    for path in named:
        folder = model_folder(path)
        models.append(judge(path, start))
        name = folder.parent.name if folder.name == "model" else folder.name
        scores[_unused(name, scores)] = partial(_scores, models[-1])
        digests.append(content_hash(folder))
    for function in functions:
        path, name = _parts(function)
        scores[_unused(name, scores)] = _of_function(function, seconds)
        digests.append(sha256(path))
    return Rewards(scores=scores, weights=settings.weights_of_rewards(), models=models, digest="+".join(digests))


def judge(named: str, start: Start) -> PreTrainedModel:
    """Load a reward model. Raises UserError if the reward model cannot score the starting model's answers."""
    folder = model_folder(named)
    if not folder.is_dir():
        there = nearby(named)
        raise UserError(f"reward_model: {named!r}: no such folder{there}. Give a folder that `lamina reward` wrote.")
    config = read_config(folder, "reward_model")
    positions = getattr(config.get_text_config(), "max_position_embeddings", None)
    if positions is not None and positions < start.longest:
        raise UserError(
            f"reward_model: {named!r} reads at most {positions} tokens, but a prompt with its answer may have "
            f"{start.longest}. Set --sequence-length {positions}."
        )
    try:
        theirs = load_tokenizer(str(folder))
    except UserError as error:
        raise UserError(f"reward_model: {error}") from None
    if TextEncoder(theirs).content_hash() != TextEncoder(start.tokenizer).content_hash():
        raise UserError(
            f"reward_model: {named!r} has a different vocabulary from the model {start.path!r}. Give a reward model "
            "with the same tokenizer."
        )
    model, _ = load_weights(folder, config, AutoModelForSequenceClassification, "reward_model", dtype=start.dtype)
    if model.config.num_labels != 1:
        raise UserError(
            f"reward_model: {named!r} returns {model.config.num_labels} scores. Give a model with one score."
        )
    return model.requires_grad_(False)


@torch.no_grad()
def _scores(
    model: Passed, rows: Sequence[Fields], answers: Sequence[Sequence[int]], texts: Sequence[str]
) -> list[float]:
    scores: list[float] = []
    whole = [[*row["prompt_ids"], *answer] for row, answer in zip(rows, answers, strict=True)]
    for first in range(0, len(whole), BATCH):
        ids, mask = padded(whole[first : first + BATCH], 0, model.device)
        scores += model(input_ids=ids, attention_mask=mask, use_cache=False).logits[:, 0].float().tolist()
    return scores


def _unused(name: str, known: Mapping[str, object]) -> str:
    """Convert a name to an identifier that ``known`` does not yet contain."""
    plain = re.sub(r"\W", "_", name)
    return plain if plain not in known else _unused(f"{plain}_{len(known) + 1}", known)


def in_time(act: Callable[[], T], seconds: float) -> T | None:
    """Call a function. After ``seconds`` (0: no limit), stop the function and return None."""
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
    except (UserError, TimeoutError):  # ``act`` may have caught TimeoutError and raised another error
        if not rang:
            raise
    finally:
        signal.signal(signal.SIGALRM, before)
    return None if rang else result


def _of_function(named: str, seconds: float) -> Score:
    path, name = _parts(named)
    function = getattr(run_file("reward_function", path), name, None)
    if not callable(function):
        raise UserError(f"reward_function: {str(path)!r} has no function {name!r}. Name a function of this file.")
    trls = _takes_completions(named, function)

    def of(row: Fields, ids: Sequence[int], text: str) -> float | None:
        def ask() -> float:
            whole = json.loads(row["row"])
            with guarded(f"reward_function {named!r}"):
                try:
                    if trls:
                        reward = _as_trl_asks(function, row["prompt"], ids, text, whole)
                    else:
                        reward = function(row["text"], text, whole)
                except KeyError as error:
                    known = ", ".join(whole)
                    why = f"raised KeyError: {error}. The row has the columns {known}"
                    raise UserError(f"reward_function {named!r} {why}.") from error
            return _number(named, reward)

        return in_time(ask, seconds)

    def score(rows: Sequence[Fields], answers: Sequence[Sequence[int]], texts: Sequence[str]) -> list[float]:
        rewards = [of(*each) for each in zip(rows, answers, texts, strict=True)]
        if late := rewards.count(None):
            logger.warning(
                "%s: the rewards of %d of %d answers took more than %g s, so these answers got the reward 0",
                named,
                late,
                len(rewards),
                seconds,
            )
        return [reward or 0.0 for reward in rewards]

    return score


def _takes_completions(named: str, function: Callable[..., Passed]) -> bool:
    """Return whether a reward function has TRL's form. Raises UserError if Lamina cannot call the function."""
    try:
        signature = inspect.signature(function)
    except (ValueError, TypeError):  # a built-in has no signature
        return False
    names = list(signature.parameters)
    trls, ours = "completions" in names, ["prompt", "answer", "row"]
    try:
        if trls:
            signature.bind_partial(prompts=(), completions=(), completion_ids=())
        else:
            signature.bind(*ours)
    except TypeError:
        fits = False
    else:
        fits = trls or names[:3] == ours or sorted(names[:3]) != sorted(ours)
    if not fits:
        raise UserError(
            f"reward_function: {named!r} has the arguments {signature}. Define the function with the arguments "
            "(prompt, answer, row), or as in TRL with (completions, **kwargs)."
        )
    return trls


def _as_trl_asks(function: Callable[..., Passed], asked: Passed, ids: Sequence[int], text: str, row: Fields) -> Passed:
    """Call a reward function on one answer, with the arguments of TRL. A result of None becomes the reward 0."""
    answer = [{"role": "assistant", "content": text}] if isinstance(asked, list) else text
    fields = {name: [value] for name, value in row.items() if name not in ("prompt", "completion", "completion_ids")}
    (reward,) = function(prompts=[asked], completions=[answer], completion_ids=[list(ids)], **fields)
    return 0.0 if reward is None else reward


def _number(named: str, reward: Passed) -> float:
    returned = f"a {type(reward).__name__}"
    with suppress(
        TypeError, ValueError, RuntimeError, OverflowError
    ):  # for example, the integer is too large for a float
        if not isinstance(reward, str | bytes):
            if math.isfinite(number := float(reward)):
                return number
            returned = str(number)
    raise UserError(f"reward_function: {named!r} returned {returned}. Return a finite number.")


def _parts(named: str) -> tuple[Path, str]:
    file, _, name = named.rpartition(":")
    path = Path(file)
    if path.suffix != ".py" or not name.isidentifier():
        raise UserError(f"reward_function: {named!r} names no function. Give FILE.py:NAME.")
    if not path.is_file():
        raise UserError(f"reward_function: {file!r}: no such file. Give FILE.py:NAME.")
    return path, name


def padded(
    sequences: Sequence[Sequence[int]], value: int, device: torch.device, *, left: bool = False
) -> tuple[torch.Tensor, torch.Tensor]:
    """Pad sequences of token ids to equal length. Returns the ids and the mask, both [sequences, tokens]."""
    ids, side = [torch.tensor(sequence, device=device) for sequence in sequences], "left" if left else "right"
    return pad(ids, value, side), pad([torch.ones_like(part) for part in ids], 0, side)
