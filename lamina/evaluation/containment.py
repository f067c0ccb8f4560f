"""Containment of task files: without `--run-code` they may use only the harness's names, and templates."""

# pyright: reportMissingImports=false
from __future__ import annotations

import contextlib
import datetime
import importlib.util
import re
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from types import ModuleType

from jinja2 import StrictUndefined, TemplateError
from jinja2.exceptions import SecurityError
from jinja2.sandbox import ImmutableSandboxedEnvironment

from lamina.core.json_types import Json
from lamina.errors import UserError, one_line, shortened

ALLOWED = "(allowed with --run-code)"
LARGEST = 100_000  # values in a file, an alias counted wherever it stands
_PLAIN = (str, int, float, bool, bytes, datetime.date, type(None))
_DATA = re.compile(r"((https|hf)://)?[^:]*")  # fsspec reads a chain of file systems out of more colons
_READERS = ("json", "csv", "text", "arrow", "parquet")
_PROMPT = ("doc_to_text", "doc_to_target", "doc_to_choice", "gen_prefix", "target_delimiter", "fewshot_delimiter")
_FIELDS = (
    *("task", "task_alias", "tag", "dataset_path", "dataset_name", "description", "output_type", *_PROMPT),
    *("training_split", "validation_split", "test_split", "fewshot_split", "num_fewshot", "repeats"),
    *("should_decontaminate", "doc_to_decontamination_query", "metric_list", "filter_list"),
)
_INNER = {
    "dataset_kwargs": ("data_files", "field"),
    "fewshot_config": ("sampler", "split", "fewshot_indices", "samples", *_PROMPT),
    "generation_kwargs": (
        *("until", "do_sample", "temperature", "top_p", "top_k", "min_p", "repetition_penalty", "num_beams"),
        *("max_gen_toks", "max_new_tokens", "max_tokens", "max_completion_tokens"),
    ),
}
_GROUP = ("group", "group_alias", "aggregate_metric_list")


@dataclass(frozen=True)
class Function:
    """A function that a task file names with `!function`; reading the file does not import it."""

    name: str


@contextlib.contextmanager
def contained(run_code: bool) -> Iterator[None]:
    """Sandbox the harness inside the context, where it reads and scores tasks, unless ``run_code``.

    A sandbox fills in templates, and no metric of the `evaluate` library (a script in the working folder or on the hub)
    is loaded.
    """
    if run_code:
        yield
        return
    from lm_eval import utils

    sandbox = ImmutableSandboxedEnvironment(undefined=StrictUndefined, keep_trailing_newline=True)
    sandbox.filters["regex_replace"] = utils.regex_replace
    environment, module, inside = utils.env, sys.modules.get("evaluate"), [True]
    utils.env, sys.modules["evaluate"] = sandbox, _no_scripts(inside)
    try:
        yield
    finally:
        inside.clear()
        utils.env = environment
        del sys.modules["evaluate"]
        if module is not None:
            sys.modules["evaluate"] = module


def _no_scripts(inside: list[bool]) -> ModuleType:
    """Make a stand-in for `evaluate` that refuses scripts until ``inside`` is empty and then loads metrics as usual."""

    def load(path: str, *args: object, **options: object) -> object:
        if inside:
            raise UserError(f"tasks: the metric {str(path)!r} is a Python script {ALLOWED}")
        return importlib.import_module("evaluate").load(path, *args, **options)

    module = ModuleType("evaluate")
    module.__spec__ = importlib.util.find_spec("evaluate")  # transformers looks whether it is installed
    module.__dict__["load"] = load
    return module


def template_error(error: TemplateError) -> str:
    """Return the reason why a task's template could not be filled in."""
    allowed = f" {ALLOWED}" if isinstance(error, SecurityError) else ""
    return f"its template can't be filled in: {one_line(error)}{allowed}"


def check_plain(config: Json, name: str) -> None:
    """Raise UserError if the file of a task or group holds more than plain values, in fields that run nothing.

    Args:
        config: the file's content, merged with its includes.
    """
    waiting: list[object] = [config]
    for _ in range(LARGEST):
        if not waiting:
            break
        value = waiting.pop()
        if isinstance(value, dict):
            waiting += [*value, *value.values()]
        elif isinstance(value, list):
            waiting += value
        elif isinstance(value, Function):
            raise UserError(f"tasks: the file of {name!r} runs Python code: {shortened(value.name, 100)!r} {ALLOWED}")
        elif not isinstance(value, _PLAIN):
            raise _refusal(name, f"{value!r} is a {type(value).__name__}")
    else:
        raise UserError(f"tasks: the file of {name!r} holds more than {LARGEST:,} values")
    _check_fields({key: value for key, value in config.items() if key != "metadata"}, name)


def check_shipped(config: Json, name: str) -> None:
    """Raise UserError if one of the harness's tasks would run code that a model writes, or a metric's script."""
    if config.get("unsafe_code"):
        raise UserError(f"tasks: {name!r} runs the code that a model writes {ALLOWED}")
    _check_names(config, name)


def check_reader(config: Json, name: str) -> None:
    """Raise UserError for a reader of data that may unpickle; one on the hub passes, as it has an owner."""
    reader = config.get("dataset_path")
    if isinstance(reader, str) and "/" not in reader and reader not in _READERS:
        raise _refusal(name, f"the reader {reader!r} is none of {', '.join(_READERS)}")


def _check_fields(config: Json, name: str) -> None:
    allowed = (*_FIELDS, *_INNER, *(_GROUP if "group" in config else ()))
    used = [str(key) for key in config if key not in allowed]
    for key, fields in _INNER.items():
        used += [f"{key}: {inner}" for inner in _mapping(config.get(key), name, key) if inner not in fields]
    if used:
        raise _refusal(name, used[0])
    waiting = [config.get("dataset_path"), _mapping(config.get("dataset_kwargs"), name, "data").get("data_files")]
    while waiting:
        value = waiting.pop()
        waiting += value.values() if isinstance(value, dict) else value if isinstance(value, list) else ()
        if isinstance(value, str) and not _DATA.fullmatch(value):
            raise _refusal(name, f"data at {value!r}")
    _check_names(config, name)
    for member in config["task"] if isinstance(config.get("task"), list) else ():
        if isinstance(member, dict):
            _check_fields(member, name)
            check_reader(member, name)


def _check_names(config: Json, name: str) -> None:
    """Raise UserError for a metric, aggregation or filter that is not one of the harness's."""
    import lm_eval.api.metrics
    import lm_eval.filters  # noqa: F401  (both fill the registries)
    from lm_eval.api.registry import aggregation_registry, filter_registry, metric_registry

    used = []
    for metric in _rows(config, "metric_list") if config.get("process_results") is None else ():
        used += [("metric", metric.get("metric"), metric_registry)]
        used += [("aggregation", metric.get("aggregation", "mean"), aggregation_registry)]
        if metric.get("hf_evaluate"):
            raise _refusal(name, f"the metric {metric.get('metric')!r} of hf_evaluate")
    for pipeline in _rows(config, "filter_list"):
        used += [("filter", step.get("function"), filter_registry) for step in _rows(pipeline, "filter")]
    for what, value, registry in used:
        if not (isinstance(value, Function) or (isinstance(value, str) and value in registry)):
            raise _refusal(name, f"the {what} {value!r} is not the harness's")


def _refusal(name: str, what: str) -> UserError:
    return UserError(f"tasks: the file of {name!r} could run Python code: {shortened(what, 200)} {ALLOWED}")


def _mapping(value: object, name: str, key: str) -> Json:
    if value is not None and not isinstance(value, dict):
        raise UserError(f"tasks: the file of {name!r}: {key} is not a mapping")
    return value or {}


def _rows(config: Json, key: str) -> list[Json]:
    """Return the mappings in a list; a single mapping counts as a list of one."""
    value = config.get(key)
    rows = value if isinstance(value, list) else [value]
    return [row if isinstance(row, dict) else {} for row in rows if row is not None]
