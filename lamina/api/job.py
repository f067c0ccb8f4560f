"""What the functions of all jobs share: other tools' names, early refusals, and a signature with every setting."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from functools import wraps
from typing import Literal, TypeVar, cast, get_args, get_origin

from lamina.api.early import refuse_early
from lamina.api.given import Examples, Names, Numbers, PathLike, Text, as_settings
from lamina.core.values import comma_separated, path, place
from lamina.jobs.aliases import in_our_words
from lamina.jobs.folder import Resume
from lamina.jobs.settings import Settings

F = TypeVar("F", bound=Callable[..., object])


def job(record: type[Settings]) -> Callable[[F], F]:
    """Make a function of settings a public one.

    The function takes its modes (resume, overwrite, bar, ...) by keyword and the settings as ``**settings``; the public
    one also takes other tools' names, lists, paths and data sets, and refuses early what can be known without torch.
    Its signature names every setting with its type and default.
    """

    def public(act: F) -> F:
        modes = [p for p in inspect.signature(act).parameters.values() if p.kind is p.KEYWORD_ONLY]
        names = {mode.name for mode in modes}

        @wraps(act)
        def call(**given: object) -> object:
            chosen = {name: value for name, value in given.items() if name in names}
            rest = {name: value for name, value in given.items() if name not in names}
            settings = as_settings(in_our_words(rest, record.names()))
            refuse_early(
                record,
                settings,
                resume=cast("Resume", chosen.get("resume", False)),
                overwrite=bool(chosen.get("overwrite", False)),
            )
            return act(**chosen, **settings)

        call.__dict__["__signature__"] = signature(act, record, modes)
        call.__dict__["record"] = record
        return cast(F, call)

    return public


def signature(act: Callable[..., object], record: type[Settings], modes: list[inspect.Parameter]) -> inspect.Signature:
    """A signature with a keyword for every setting of the record, then the modes."""
    settings = [
        inspect.Parameter(
            name, inspect.Parameter.KEYWORD_ONLY, default=record.default(name), annotation=kind_of(record, name)
        )
        for name in record.names()
    ]
    return inspect.Signature([*settings, *modes], return_annotation=inspect.signature(act).return_annotation)


def kind_of(record: type[Settings], name: str) -> object:
    """The type of the values that Python takes for a setting."""
    kind, check = record.kind(name), record.check_of(name)
    if name in ("corpus", "eval_corpus"):
        return _optional(Text, kind)
    if name in ("data", "eval_data"):
        return _optional(Examples, kind)
    parts = get_args(kind)
    if get_origin(kind) is not Literal and any(get_origin(part) is tuple for part in parts):
        return Numbers if float in parts or int in parts else Names
    if kind is str and (check is comma_separated or getattr(check, "__name__", "").endswith(("_list", "_or_none"))):
        return Numbers if "rate" in name or "width" in name else Names
    if check in (path, place):
        return _optional(PathLike, kind)
    return kind


def _optional(wanted: object, kind: object) -> object:
    return wanted | None if type(None) in get_args(kind) else wanted  # type: ignore[operator]
