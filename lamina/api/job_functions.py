"""Create the Python function of each job. The function checks the settings, runs the job and writes the report page."""

from __future__ import annotations

import hashlib
import inspect
import json
import os
import re
import textwrap
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import cache, partial
from pathlib import Path
from typing import Any, get_args

from lamina.api import results
from lamina.core.extras import require
from lamina.core.hub_access import refuse_missing_model
from lamina.core.json_types import Json
from lamina.core.values import PathLike, Rows, path, taken
from lamina.errors import UserError, did_you_mean
from lamina.jobs.aliases import in_our_words, suggestion
from lamina.jobs.folder import in_use, refuse
from lamina.jobs.manifest import model_folder, refuse_as_output
from lamina.jobs.names import RESULT, RESULTS, TRANSFER
from lamina.jobs.row import JobRow, refuse_other_kind
from lamina.jobs.settings import Settings

_PLACE = re.compile(r"hf:\S+|\S*/\S*|\S+\.(txt|jsonl?|parquet|gz|xz|zst)")  # texts that look like a path
_REPORTED = (RESULT, RESULTS, TRANSFER)  # an interrupted job gets a page if one of these files exists


@cache
def function_of(row: JobRow) -> Callable[..., Any]:
    """Create the Python function of a job, such as ``lamina.pretrain``.

    The function takes the settings as keyword arguments, under Lamina's names or other tools' names. Values may be
    lists, paths or datasets. The function also takes ``resume``, ``overwrite``, ``bar`` and the job's own flags.
    """
    record, modes = row.settings(), _modes(row)

    def act(**given: Any) -> Any:
        require(row.name, row.extra)  # before Lamina writes the given rows to a file
        chosen = {mode.name: given.pop(mode.name, mode.default) for mode in modes}
        settings = as_settings(in_our_words(given, record.names()))
        for name in settings:
            if name not in record.names():
                hint = did_you_mean(suggestion(name, record.names()))
                raise UserError(f"unknown setting {name!r}{hint} (see `lamina {record.command_name} --help all`)")
        return run_row(row, settings, chosen)

    act.__name__ = act.__qualname__ = row.function_name
    act.__doc__ = _documentation(row)
    act.__dict__["__signature__"] = _signature(row, record, modes)
    act.__dict__["record"] = record
    return act


def run_row(row: JobRow, settings: Json, modes: Json) -> Any:
    """Check the settings (under Lamina's names), run the job, write its report page, and return the result."""
    require(row.name, row.extra)
    if settings.get("output") is not None:
        settings["output"] = path("output", settings["output"])
    folder = row.folder_of(settings)
    # with several processes, the job checks this in the first process
    if os.environ.get("WORLD_SIZE", "1") in ("", "1"):
        _refuse(row, settings, folder, modes)
    draws = [switch.name for switch in row.switches if switch.draws]
    with _page_of(folder):
        result = row.run(settings, **{name: value for name, value in modes.items() if name not in draws})
    if folder is not None and any(modes.get(name) for name in draws):
        from lamina.reports import draw

        draw(folder)
    kind = getattr(results, row.outcome, None)
    return result if kind is None else kind.of(result, folder)


def _modes(row: JobRow) -> list[inspect.Parameter]:
    of_row = [(switch.name, False, "bool") for switch in row.switches if switch.draws or switch.passed]
    resume = [("resume", False, "Resume")] if row.resumes else []
    return [
        inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, default=default, annotation=kind)
        for name, default, kind in (*of_row, *resume, ("overwrite", False, "bool"), ("bar", True, "bool"))
    ]


def _signature(row: JobRow, record: type[Settings], modes: list[inspect.Parameter]) -> inspect.Signature:
    settings = []
    for name in record.names():
        kind, wanted = record.kind(name), taken(record.check_of(name))
        if wanted is not None:
            kind = wanted | None if type(None) in get_args(kind) else wanted
        default = record.default(name)
        settings.append(inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, default=default, annotation=kind))
    return inspect.Signature([*settings, *modes], return_annotation=row.outcome)


def _documentation(row: JobRow) -> str:
    about = " ".join(row.about.split("\n\n")[0].split())
    about = re.sub(r"(?<=\.) [^.]*:$", "", about)  # drop the introduction of a list that is only in the help
    returns = f"The keywords are the settings of `lamina {row.name}`. {row.returns}"
    raises = f"UserError: (a ValueError) for invalid settings, {row.raises}, or an output folder that is not empty."
    failed = ["TrialsFailed: (a UserError) if every trial failed. Lamina still writes the report page."]
    errors = [raises, *(failed if row.outcome == "Comparison" else [])]
    fill = partial(textwrap.fill, width=110, break_on_hyphens=False)  # do not break flags
    listed = [fill(error, initial_indent="    ", subsequent_indent=" " * 8) for error in errors]
    return "\n".join([fill(about), "", fill(returns), "", "Raises:", *listed, ""])


def _refuse(row: JobRow, given: Json, folder: Path | None, modes: Json) -> None:
    """Raise UserError for invalid settings, then for an output folder with files, before Lamina loads torch."""
    resume = modes.get("resume", False)
    continues = folder is not None and resume and in_use(folder)  # the job checks the settings in the folder
    inputs = {name: given.get(name) for name in row.inputs}
    listed = {name: value if isinstance(value, list | tuple) else [value] for name, value in inputs.items()}
    models = [(name, model) for name, value in listed.items() for model in value if isinstance(model, str)]
    if not continues:
        settings = row.settings().from_dict(given)
        settings.require(*row.settings().needed)
        settings.check_names()
        for name, model in models:
            if "," not in model:
                refuse_missing_model("from" if name == "from_model" else name, str(model_folder(model)))
    if folder is not None:
        for _, model in models:
            refuse_as_output(str(folder), model)
        refuse(folder, resume=resume, overwrite=modes["overwrite"], resumes=bool(row.resumes))
        if continues:
            refuse_other_kind(folder, row)


@contextmanager
def _page_of(folder: Path | None) -> Iterator[None]:
    """Write the report page when the with block ends. After Ctrl-C, write the page if the folder holds a result."""
    try:
        yield
    except KeyboardInterrupt:
        if folder is not None and any((folder / name).is_file() for name in _REPORTED):
            write_page(folder)
        raise
    if folder is not None:
        write_page(folder)


def write_page(folder: Path) -> None:
    """Write a folder's report page, unless another process of the run writes it."""
    from lamina.modeling.processes import launched
    from lamina.reports import report

    if launched()[0] == 0:
        report(folder)


def as_settings(given: Mapping[str, object]) -> dict[str, object]:
    """Convert settings to values that config.yaml can hold. Texts and datasets become files in the cache.

    Raises UserError for an object that holds neither texts nor rows.
    """
    settings = dict(given)
    for name in ("corpus", "eval_corpus", "data", "eval_data"):
        value = settings.get(name)
        if value is not None and not isinstance(value, str | os.PathLike):
            _refuse_splits(name, value)
            field = str(given.get("text_field", "text"))
            settings[name] = _corpus(name, value, field) if "corpus" in name else _examples(name, value)
    return {name: os.fspath(value) if isinstance(value, os.PathLike) else value for name, value in settings.items()}


def _refuse_splits(name: str, value: object) -> None:
    """Raise UserError for a datasets.DatasetDict, which `load_dataset(NAME)` returns if the user chooses no split."""
    if isinstance(splits := getattr(value, "column_names", None), Mapping):
        names = [str(split) for split in splits]
        allowed = f"one split, as in data[{names[0]!r}]" if names else "a datasets.Dataset"
        raise UserError(f"{name}: a DatasetDict holds several splits ({', '.join(names) or 'none'}). Give {allowed}.")


def _corpus(name: str, value: object, field: str) -> str:
    if isinstance(value, Rows):
        if field not in value.column_names:
            listed = ", ".join(value.column_names)
            raise UserError(f"{name}: the dataset has no column {field!r}. Set text_field to one of: {listed}")
        return _file(name, lambda: ({field: row[field]} for row in value))
    if not isinstance(value, Sequence) or not value or not all(isinstance(x, str | os.PathLike) for x in value):
        raise _refused(name, value, "a path, a list of paths or of texts, or a datasets.Dataset")
    are_paths = [isinstance(x, os.PathLike) or _exists(x) for x in value]
    if all(are_paths):
        return os.fspath(value[0]) if len(value) == 1 else _file(name, lambda: _documents(value, field))
    if any(are_paths):
        missing = value[are_paths.index(False)]
        raise UserError(
            f"{name}: {missing[:80]!r} is not a file, but other entries are files. Give only paths, or only texts."
        )
    if all(_PLACE.fullmatch(str(x)) for x in value):
        raise UserError(f"{name}: {str(value[0])[:80]!r}: no such file. Give a list of paths, or a list of texts.")
    return _file(name, lambda: ({field: text} for text in value))


def _examples(name: str, value: object) -> str:
    listed = isinstance(value, Sequence) and value and all(isinstance(row, Mapping) for row in value)
    if not (listed or isinstance(value, Rows)):
        raise _refused(name, value, "a path, a list of rows, or a datasets.Dataset")
    return _file(name, lambda: value)


def _refused(name: str, value: object, allowed: str) -> UserError:
    return UserError(f"{name}: {type(value).__name__} {str(value)[:60]!r}. Give {allowed}.")


def _exists(text: str) -> bool:
    try:
        return len(text) < 4096 and Path(text).expanduser().exists()
    except (OSError, ValueError, RuntimeError):
        return False


def _documents(paths: Iterable[PathLike], field: str) -> Iterator[Mapping[str, object]]:
    from lamina.data.corpus import single_corpus

    for place in paths:
        for document in single_corpus(os.fspath(place), field).documents():
            yield {field: document.text}


def _file(name: str, rows: Callable[[], Any]) -> str:
    """Write rows to a .jsonl file in the cache and return its path. ``rows`` must return the same rows each time."""
    from lamina.data.cache import cache_root, publish

    digest = hashlib.sha256()
    for line in _lines(name, rows()):
        digest.update(line.encode("utf-8", "surrogatepass"))
    folder = cache_root() / "given" / digest.hexdigest()[:32]

    def write(draft: Path) -> None:
        with (draft / "rows.jsonl").open("w", encoding="utf-8") as file:
            file.writelines(_lines(name, rows()))

    publish(folder, write)
    return str(folder / "rows.jsonl")


def _lines(name: str, rows: Iterable[Mapping[str, object]]) -> Iterator[str]:
    for row in rows:
        try:
            yield json.dumps(dict(row)) + "\n"
        except (TypeError, ValueError) as error:
            raise UserError(
                f"{name}: a row holds a value that JSON cannot hold ({error}). Convert this value to text, numbers, "
                "lists or mappings."
            ) from None
