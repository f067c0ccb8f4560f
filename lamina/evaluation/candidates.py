"""The models to evaluate: single checkpoints, runs, and the runs of a study."""

from __future__ import annotations

import hashlib
import logging
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from transformers import PreTrainedConfig, PreTrainedModel, PreTrainedTokenizerBase

from lamina.core.values import real_path
from lamina.data.tokenizers import load_tokenizer, not_bytes
from lamina.errors import UserError, renamed_setting
from lamina.evaluation.settings import EvalSettings
from lamina.jobs.files import read_config, read_result
from lamina.jobs.manifest import model_folder
from lamina.jobs.names import CONFIG, MANIFEST, RESULT
from lamina.jobs.seals import refuse_altered
from lamina.jobs.status import Status
from lamina.modeling.checkpoint import config_of, load, tokenizer_of

logger = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True)
class Candidate:
    """A model to evaluate."""

    name: str  # the model's name in the records
    path: str  # the model's path or name on the hub
    # the label of the model's row in the table, such as a checkpoint's name or the setting that a study varies
    arm: str
    seed: int | None = None  # the seed of the model's run, if known
    # the status of the model's run. The table only counts diverged, failed, stuck and interrupted runs. Lamina does not
    # evaluate these runs
    status: str = str(Status.FINISHED)

    @property
    def left_out(self) -> str:
        """Return the reason why Lamina does not evaluate the model, or "" for a model that Lamina evaluates."""
        if self.status in (Status.DIVERGED, Status.STUCK, Status.FAILED, Status.INTERRUPTED):
            return self.status
        return ""

    def state(self) -> str:
        """Return a hash of the checkpoint's files, or of the model's name on the hub."""
        folder = model_folder(self.path)
        if (folder / MANIFEST).is_file():
            return hashlib.sha256((folder / MANIFEST).read_bytes()).hexdigest()[:16]
        return stamp(folder.rglob("*") if folder.is_dir() else [folder], str(folder))


def stamp(paths: Iterable[Path], about: str = "") -> str:
    """Return a hash of a text and of the names, sizes and modification times of files."""
    digest = hashlib.sha256(about.encode())
    for path in sorted(paths):
        if path.is_file():
            stat = path.stat()
            digest.update(f"{path.name}|{stat.st_size}|{stat.st_mtime_ns}".encode())
    return digest.hexdigest()[:16]


Expand = Callable[[str], Sequence[Candidate] | None]
"""A function that returns the models to evaluate in a study's folder, or None if the path is not a study's folder."""


def candidates_of(paths: Sequence[str], expand: Expand) -> list[Candidate]:
    """Return a candidate for each checkpoint and each run of a study. Raises UserError if no candidate is usable."""
    expanded = {path: expand(path) for path in dict.fromkeys(paths)}
    several = sum(runs is not None for runs in expanded.values()) > 1  # two studies never have a row in common
    listed: list[Candidate] = []
    for path, runs in expanded.items():
        if runs is None:
            listed.append(_single(path))
        else:
            listed += [replace(run, arm=f"{path}: {run.arm}") for run in runs] if several else runs
    if all(candidate.left_out for candidate in listed):
        reasons = ", ".join(sorted({candidate.left_out for candidate in listed}))
        raise UserError(
            f"models: none of the {len(listed)} runs has a model to evaluate ({reasons}). Give finished runs."
        )
    names = [candidate.name for candidate in listed]
    for number, candidate in enumerate(listed):
        if names.count(candidate.name) > 1:
            arm = candidate.path if candidate.arm == candidate.name else candidate.arm
            listed[number] = replace(candidate, name=candidate.path, arm=arm)
    return listed


def _single(path: str) -> Candidate:
    folder, seed, status = Path(path).expanduser(), None, str(Status.FINISHED)
    name = real_path(folder).parent.name if folder.name == "model" else folder.name or str(folder)
    if (folder / RESULT).is_file() and model_folder(folder) == folder:  # a run without a model
        refuse_altered(folder)
        status = str((read_result(folder) or {}).get("status"))
    if (folder / CONFIG).is_file():
        seed = read_config(folder).get("seed")
    name = name if folder.exists() else path
    return Candidate(name=name, path=path, arm=name, seed=seed if isinstance(seed, int) else None, status=status)


def check_candidate(path: str, settings: EvalSettings) -> PreTrainedConfig:
    """Return a checkpoint's configuration without loading the weights.

    Raises UserError if the weights or the tokenizer are missing, or if the tokenizer has more tokens than the model.
    Without tasks, special tokens may exceed the model's vocabulary.
    """
    with renamed_setting("checkpoint", "models"):
        folder = str(model_folder(path))
        config, tokenizer_folder = config_of(folder), tokenizer_of(folder)
    tokenizer = _tokenizer(tokenizer_folder, path, settings)
    if settings.chat_template and settings.tasks and not tokenizer.chat_template:
        raise UserError(
            f"chat_template: the tokenizer of {path!r} has no chat template. Name a --tokenizer with a chat template."
        )
    size = getattr(config.get_text_config(), "vocab_size", None)
    ids = set(tokenizer.get_vocab().values())
    if isinstance(size, int) and max(ids, default=-1) >= size:
        fix = "Use the model's tokenizer."
        if (
            max(ids - set(tokenizer.all_special_ids), default=-1) < size
        ):  # as in a byte-level model with a vocabulary of 256
            if not settings.task_list():
                return config
            fix = (
                f"Tasks need the token {tokenizer.eos_token}, which the model lacks. Leave out --tasks, or choose "
                "another model."
            )
        raise UserError(
            f"tokenizer: the tokenizer has {max(ids) + 1} tokens, but the model {path!r} has embeddings "
            f"for only {size}. {fix}"
        )
    return config


def load_candidate(path: str, settings: EvalSettings, device: str) -> tuple[PreTrainedModel, PreTrainedTokenizerBase]:
    """Load a causal language model and its tokenizer. Raises UserError if the model or the tokenizer is unusable."""
    with renamed_setting("checkpoint", "models"):
        loaded = load(str(model_folder(path)), dtype=settings.dtype, device=device)
    model = loaded.model
    if not (isinstance(model, PreTrainedModel) and model.can_generate()):
        raise UserError(
            f"models: {path!r} is a {type(model).__name__}, which does not predict next tokens. Give a causal "
            "language model."
        )
    if loaded.notes:
        raise UserError(f"models: {path!r}: {loaded.notes[0]}. Choose a checkpoint with all its weights.")
    tokenizer = _tokenizer(loaded.tokenizer, path, settings)
    if warning := not_bytes(settings.tokenizer, model.get_input_embeddings().get_parameter("weight").shape[0]):
        logger.warning(warning)
    return model, tokenizer


def _tokenizer(own: PreTrainedTokenizerBase | None, path: str, settings: EvalSettings) -> PreTrainedTokenizerBase:
    tokenizer = own if settings.tokenizer is None else load_tokenizer(settings.tokenizer)
    if tokenizer is None:
        raise UserError(f"tokenizer: {path!r} holds no tokenizer. Name a tokenizer with --tokenizer.")
    return tokenizer
