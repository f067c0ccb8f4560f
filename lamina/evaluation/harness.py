"""Compute a model's scores with lm-evaluation-harness's Python API."""

# pyright: reportMissingImports=false
from __future__ import annotations

import contextlib
import io
import logging
import random
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import cached_property, partial
from typing import TYPE_CHECKING, TypeVar, cast

import numpy as np
from jinja2 import TemplateError
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from lamina.core.json_types import Json
from lamina.errors import UserError, mark_reported, one_line, out_of_memory
from lamina.jobs.files import disk_full
from lamina.modeling.processes import ALONE, Processes

if TYPE_CHECKING:
    from lm_eval.models.huggingface import HFLM
    from lm_eval.tasks.manager import TaskDict

T = TypeVar("T")
A = TypeVar("A")
FEWSHOT_SEED = 1234  # the harness's default, to which Lamina adds its seed
WRITES = "generate_until"  # the output type of a task in which the model writes the answers
BOOTSTRAPS = 1000  # resamples for standard errors without a formula, such as a perplexity's
SCORING_ERRORS = (AssertionError, ValueError, RuntimeError, KeyError, IndexError, TypeError, ArithmeticError)


@dataclass(frozen=True, kw_only=True)
class Runner:
    """A model, and the options with which lm-evaluation-harness evaluates the model."""

    model: PreTrainedModel  # a causal language model, on its device
    tokenizer: PreTrainedTokenizerBase
    # the number of sequences per forward pass. "auto" means 8 on a CPU, and as many as fit on a GPU
    batch_size: int | str = 8
    limit: int | None = None  # the maximum number of items per task, or None for all items
    seed: int = 0  # the seed of the few-shot examples
    chat_template: bool = False  # whether to put questions into the tokenizer's chat template
    system: str | None = None  # the system message in the chat template
    # arguments of ``generate`` that replace the tasks' arguments
    generation: Mapping[str, object] = field(default_factory=dict)
    run_code: bool = False  # whether the harness may run code that the model writes
    processes: Processes = ALONE  # the processes over which Lamina splits the items

    @cached_property
    def language_model(self) -> HFLM:
        from lm_eval.models.huggingface import HFLM

        network: Json = {  # the harness's decorators hide its parameters from a type checker
            "pretrained": self.model,
            "backend": "causal",  # the harness would guess for an unknown model_type
            "tokenizer": self.tokenizer,
            "device": str(self.model.device),
            "dtype": self.model.dtype,
            "batch_size": 8 if self.batch_size == "auto" and self.model.device.type == "cpu" else self.batch_size,
            "max_length": self._longest,
        }
        wrapped = HFLM(**network)
        for name in ("loglikelihood", "loglikelihood_rolling", "generate_until") if self.processes.size > 1 else ():
            setattr(wrapped, name, partial(self._shared, getattr(wrapped, name)))
        return wrapped

    def _shared(self, answer: Callable[[list[T]], list[A]], requests: list[T]) -> list[A]:
        """Answer this process's part of the requests, and return all processes' answers in order."""
        # If the harness divided the requests, each process would draw different few-shot examples.
        rank, size = self.processes.rank, self.processes.size
        mine = self.processes.together(lambda: answer(requests[rank::size]) if requests[rank::size] else [])
        answers: dict[int, A] = {}
        for first, part in enumerate(self.processes.everyones(mine)):
            answers |= dict(zip(range(first, len(requests), size), part, strict=True))
        return [answers[index] for index in range(len(requests))]

    def run(self, built: TaskDict, num_fewshot: int | None, *, bar: bool = False) -> tuple[Json, list[str]]:
        """Run tasks on the model. Returns the harness's results, and notes. Raises UserError if the harness fails."""
        from lm_eval import evaluate

        options: Json = {
            "task_dict": built,
            "limit": self.limit,
            "bootstrap_iters": BOOTSTRAPS,
            "log_samples": True,
            "apply_chat_template": self.chat_template,
            "system_instruction": self.system,
            "fewshot_as_multiturn": True,
            "confirm_run_unsafe_code": self.run_code,
        }
        with quiet_harness(bar) as warnings, without_cache(self.model):
            try:
                self._prepare(built, num_fewshot)
                options["lm"] = self.language_model
                results = cast("Json", evaluate(**options))
            except (*SCORING_ERRORS, TemplateError) as error:
                if isinstance(error, UserError) or disk_full(error) or out_of_memory(error):
                    raise
                names = ", ".join([*built.get("groups", {}), *built["tasks"]][:3])
                refused = UserError(f"tasks: {names}: {self._reason(error)}")
                if not self.processes.first:
                    mark_reported(refused)  # all processes fail, and the first process reports it
                raise refused from error
        cut = sum(self.processes.everyones(sum("exceeds model's maximum length" in text for text in warnings)))
        notes = (
            [f"{cut} questions are longer than the model's context, so Lamina cut off the beginning of each of them"]
            if cut
            else []
        )
        zero = sorted(str(name) for name, shots in results.get("n-shot", {}).items() if shots == 0)
        if num_fewshot and zero:
            notes.append(
                f"{', '.join(zero)}: the task's file sets 0 examples, so Lamina ignores num_fewshot = {num_fewshot}"
            )
        return results, notes

    def _prepare(self, built: TaskDict, num_fewshot: int | None) -> None:
        """Prepare the tasks like the harness's ``simple_evaluate``, but without `pip list` and without the hub."""
        from lm_eval.utils import set_torch_seed

        for task in built["tasks"].values():
            default = task.get_config("num_fewshot")
            if num_fewshot is not None and default != 0:  # keep a 0 in the task's file
                task.set_config(key="num_fewshot", value=num_fewshot)
            elif default is None:
                task.set_config(key="num_fewshot", value=0)
            if self.generation and task.get_config("output_type") == WRITES:
                sampled = (
                    {"do_sample": True} if self.generation.get("temperature") else {}
                )  # otherwise, a task's False remains
                task.set_config(key="generation_kwargs", value={**sampled, **self.generation}, update=True)
            task.set_fewshot_seed(seed=FEWSHOT_SEED + self.seed)
        random.seed(self.seed)
        np.random.seed(FEWSHOT_SEED + self.seed)
        set_torch_seed(FEWSHOT_SEED + self.seed)

    @property
    def _longest(self) -> int | None:
        return getattr(self.model.config.get_text_config(), "max_position_embeddings", None)

    def _reason(self, error: Exception) -> str:
        if isinstance(error, TemplateError):
            return f"the task's template can't be filled in: {one_line(error)}"
        if isinstance(error, AssertionError) and not str(error):
            return (
                f"an answer is empty, or longer than the model's context of {self._longest} tokens. Leave the task "
                "out, or train with a larger --sequence-length"
            )
        return f"lm-evaluation-harness can't score the task: {one_line(error)}"


@contextlib.contextmanager
def without_cache(model: PreTrainedModel) -> Iterator[None]:
    """Turn off the model's key-value cache in a ``with`` block. ``generate`` still uses the cache."""
    configs = [model.config, model.config.get_text_config()]
    before = [getattr(config, "use_cache", None) for config in configs]
    for config in configs:
        config.use_cache = False
    try:
        yield
    finally:
        for config, value in zip(configs, before, strict=True):
            config.use_cache = value


@contextlib.contextmanager
def quiet_harness(bar: bool = False) -> Iterator[list[str]]:
    """Suppress the harness's output in a ``with`` block, and yield the warnings. ``bar`` keeps progress bars."""
    logger, handler = logging.getLogger("lm_eval"), logging.Handler(logging.WARNING)
    warnings: list[str] = []
    handler.emit = lambda record: warnings.append(record.getMessage())
    level, spread = logger.level, logger.propagate
    logger.setLevel(logging.WARNING)
    logger.propagate = False
    logger.addHandler(handler)
    hidden = contextlib.nullcontext() if bar else contextlib.redirect_stderr(io.StringIO())
    try:
        with hidden, contextlib.redirect_stdout(io.StringIO()):
            yield warnings
    finally:
        logger.removeHandler(handler)
        logger.setLevel(level)
        logger.propagate = spread
