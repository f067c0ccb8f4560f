"""The base class of every job's settings. Each field declares a default, a help text and limits.

From a field, Lamina derives the command-line flag with its help, the key in YAML files, the check of the value, and the
command line that reproduces the settings:

    class StepSettings(Settings, group="steps"):
        steps: int = setting(100, "optimizer steps", at_least(1))
        precision: Literal["auto", "fp32"] = setting("auto", "precision of the computation")

A class inherits the fields of its base classes. ``changed`` changes the default or help text of an inherited field, and
``without`` omits an inherited field.
"""

from __future__ import annotations

import copy
import inspect
import shlex
from collections.abc import Callable, Mapping
from dataclasses import MISSING, Field, dataclass, field, fields
from functools import cache, partial
from types import MappingProxyType, NoneType, UnionType
from typing import (
    Any,
    ClassVar,
    Literal,
    Self,
    TypeVar,
    Union,
    dataclass_transform,
    get_args,
    get_origin,
    get_type_hints,
)

from lamina.core.json_types import Json
from lamina.core.values import mapping, number, one_of, switch, text, whole_number
from lamina.errors import UserError, unknown

T = TypeVar("T")
_types_of = cache(get_type_hints)
# A function of a field's name and a value. It returns the value to store, or raises UserError for an invalid value.
Check = Callable[[str, object], object]


def setting(default: T, help: str, check: Check | None = None, *, decides: bool = True) -> T:
    """Declare a field of a settings class.

    Args:
        check: the check of the value. Numeric fields need a check. Without a check, Lamina tests only the value's type.
        decides: whether the field affects the job's numbers. If false, a resumed job may change the field.
    """
    return _field(default, {"help": help, "check": check, "decides": decides})


def changed(default: T, *, help: str | None = None, check: Check | None = None, decides: bool | None = None) -> T:
    """Change the default of an inherited field. The help text, check and ``decides`` change only if you give them."""
    given = {"help": help, "check": check, "decides": decides, "changed": True}
    return _field(default, {key: value for key, value in given.items() if value is not None})


def _field(default: Any, metadata: dict[str, object]) -> Any:
    if isinstance(default, dict):
        return field(default_factory=default.copy, metadata=metadata)
    return field(default=default, metadata=metadata)


def at_least(low: int) -> Check:
    """Return a check for whole numbers from ``low`` to the field's limit in ``values.LIMITS``."""
    return partial(whole_number, low=low)


def between(low: float, high: float, *, open_low: bool = False, open_high: bool = False) -> Check:
    """Return a check for finite numbers between two bounds. ``open_low`` and ``open_high`` exclude the bounds."""
    return partial(number, low=low, high=high, open_low=open_low, open_high=open_high)


def above(low: float) -> Check:
    return partial(number, low=low, open_low=True)


def not_below(low: float) -> Check:
    return partial(number, low=low)


@dataclass_transform(frozen_default=True, kw_only_default=True)
@dataclass(frozen=True, kw_only=True)
class Settings:
    """The base class of all settings.

    Attributes:
        command_name: the ``lamina`` command that takes the settings.
        group: the heading of the flags in ``--help all``. The class statement has this keyword.
        main: the settings that the short ``--help`` shows.
        needed: the settings that a job must have before it begins.
        without: the inherited fields to omit. Omitted fields keep their defaults, and have no flag and no YAML key.
        order: the fields that come first in files and help texts.
        outside: for each setting that passes options on to another library, the options' names, or the source files
            that declare the options.
    """

    command_name: ClassVar[str] = ""
    group: ClassVar[str] = ""
    main: ClassVar[tuple[str, ...]] = ()
    needed: ClassVar[tuple[str, ...]] = ()
    without: ClassVar[frozenset[str]] = frozenset()
    order: ClassVar[tuple[str, ...]] = ()
    outside: ClassVar[Mapping[str, tuple[str, ...]]] = {}

    def __init_subclass__(cls, *, group: str = "") -> None:
        """Convert a subclass to a frozen dataclass. ``changed`` keeps the other properties of a field."""
        super().__init_subclass__()
        cls.group = group
        inherited = {entry.name: entry for base in reversed(cls.__mro__[1:-1]) for entry in fields(base)}
        for name, made in vars(cls).items():
            if isinstance(made, Field) and name in inherited:
                made.metadata = MappingProxyType({**inherited[name].metadata, **made.metadata})
        dataclass(frozen=True, kw_only=True)(cls)

    def __post_init__(self) -> None:
        for name, (check, may_be_none) in _checks_of(type(self)).items():
            value = getattr(self, name)
            if name in self.without and value != self.default(name):
                raise unknown("setting", name, self.names())
            stored = None if value is None and may_be_none else check(name, value)
            if stored is not value:
                object.__setattr__(self, name, stored)
        self.check()

    def check(self) -> None:
        """Raise UserError if values contradict each other. A subclass adds its checks after ``super().check()``."""

    def check_names(self) -> None:
        """Raise UserError for a missing file or an unknown name. Lamina calls this method only before a job begins.

        A subclass adds its checks after ``super().check_names()``, and loads no torch.
        """

    @classmethod
    @cache
    def names(cls) -> tuple[str, ...]:
        """Return the names of the fields, without omitted fields, in the order of config.yaml and the help texts."""
        ordered = dict.fromkeys(cls.__dict__.get("order", ()))
        for base in cls.__bases__:
            if issubclass(base, Settings):
                ordered.update(dict.fromkeys(base.names()))
        ordered.update(dict.fromkeys(entry.name for entry in fields(cls)))
        return tuple(name for name in ordered if name not in cls.without)

    @classmethod
    def default(cls, name: str) -> Any:
        """Return a field's default, as a copy if it is a mapping."""
        entry = cls.__dataclass_fields__[name]
        return entry.default if entry.default_factory is MISSING else entry.default_factory()

    @classmethod
    def help(cls, name: str) -> str:
        return cls.__dataclass_fields__[name].metadata["help"]

    @classmethod
    def kind(cls, name: str) -> object:
        return _types_of(cls)[name]

    @classmethod
    def check_of(cls, name: str) -> Check | None:
        return cls.__dataclass_fields__[name].metadata["check"]

    @classmethod
    @cache
    def free(cls) -> frozenset[str]:
        """Return the settings that a resumed job may change, because they do not affect the job's numbers."""
        return frozenset(name for name in cls.names() if not cls.__dataclass_fields__[name].metadata["decides"])

    def require(self, *names: str) -> None:
        for name in names:
            if getattr(self, name) is None:
                flag = "from" if name == "from_model" else name.replace("_", "-")
                raise UserError(f"{name.removesuffix('_model')}: none given. Add --{flag} ({self.help(name)}).")

    def refuse_unused(self, *names: str, allowed: str, here: str = "here") -> None:
        """Raise UserError if a named setting differs from its default, because the setting would have no effect."""
        for name in names:
            if (value := getattr(self, name)) != self.default(name):
                raise UserError(
                    f"{name}: {value!r} has no effect {here}. Use {name!r} only {allowed}, or leave {name!r} out."
                )

    @classmethod
    def group_of(cls, name: str) -> str:
        """Return a field's group in the help. Return "" if the command's own settings class declares the field."""
        declaring = [base for base in cls.__mro__ if name in inspect.get_annotations(base)]
        return declaring[-1].group

    def to_dict(self) -> Json:
        return {name: copy.deepcopy(getattr(self, name)) for name in self.names()}

    @classmethod
    def from_dict(cls, data: Mapping[str, object]) -> Self:
        """Create settings from a mapping of names to values. Raises UserError for an unknown name."""
        names = cls.names()
        for key in data:
            if key not in names:
                raise unknown("setting", str(key), names)
        return cls(**data)

    def shared_with(self, other: type[Settings]) -> Json:
        names = other.names()
        return {name: value for name, value in self.to_dict().items() if name in names}

    def command(self) -> str:
        """Return the command line for these settings, with a flag for each value other than the default."""
        words = ["lamina", self.command_name]
        for name, value in self.to_dict().items():
            if value == self.default(name):
                continue
            flag = f"--{name.replace('_', '-')}"
            if isinstance(value, bool):
                words.append(flag if value else f"--no-{flag[2:]}")
            elif isinstance(value, dict):
                for key, item in value.items():
                    written = str(item).lower() if item is None or isinstance(item, bool) else str(item)
                    words.append(f"{flag}.{key} {shlex.quote(written)}")
            else:
                words += [flag, shlex.quote(str(value))]
        return " ".join(words)


_OF_TYPES: dict[object, Check] = {bool: switch, str: text, dict: mapping}


@cache
def _checks_of(cls: type[Settings]) -> dict[str, tuple[Check, bool]]:
    """Return each field's check, and whether the field may be None."""
    checks: dict[str, tuple[Check, bool]] = {}
    for name in (entry.name for entry in fields(cls)):
        hint = cls.kind(name)
        kinds = get_args(hint) if get_origin(hint) in (Union, UnionType) else (hint,)
        kind = next(kind for kind in kinds if kind is not NoneType)
        is_closed = get_origin(kind) is Literal
        of_type = partial(one_of, allowed=get_args(kind)) if is_closed else _OF_TYPES.get(get_origin(kind) or kind)
        check = cls.check_of(name) or of_type
        if check is None:
            raise TypeError(f"{name}: a field of type {hint} needs a check")
        checks[name] = check, NoneType in kinds
    return checks
