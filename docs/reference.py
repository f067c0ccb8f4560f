"""The generated pages of the reference: the Python API, the command line, and the settings. The site's hooks add them.

Nothing is written to disk: each build of the site makes the pages anew from the program.
"""

from __future__ import annotations

import contextlib
import importlib
import inspect
import io
import os
import pkgutil
import typing
from collections.abc import Iterator
from dataclasses import fields
from types import NoneType, UnionType

import lamina
import lamina.api
from lamina.cli import COMMANDS, main
from lamina.jobs import aliases
from lamina.jobs.settings import Settings

_SUBCOMMANDS = {"study": ("list", "show", "run", "worker")}


def pages() -> dict[str, str]:
    """Each page's Markdown by its path in the site."""
    return {
        "reference/python.md": python_page(),
        "reference/command-line.md": command_line_page(),
        "reference/settings.md": settings_page(),
    }


def python_page() -> str:
    """A section per public name; mkdocstrings fills it from signature and docstring."""
    names = [name for name in lamina.__all__ if name not in ("__version__", "placements", "eval")]
    parts = [
        "# Python",
        "`import lamina` loads neither torch nor transformers. Each name loads other packages when you first use it. "
        "Each job takes its command's settings as keywords, with underscores ([all settings](settings.md)).",
        *(_of_lamina(name) for name in names),
        "## lamina.placements",
        *(_of_placements(name) for name in lamina.placements.__all__),
    ]
    return "\n\n".join(parts) + "\n"


def _of_lamina(name: str) -> str:
    """A section; mkdocstrings does not find in ``lamina`` what only the stub of ``lamina.api`` declares."""
    if name not in lamina.api.__all__:
        return f"::: lamina.{name}"
    heading = "lamina.eval, lamina.evaluate" if name == "evaluate" else f"lamina.{name}"
    return f"::: lamina.api.{name}\n    options: {{heading: '{heading}'}}"


def _of_placements(name: str) -> str:
    """A section; the registry's bound methods have no definition that mkdocstrings could find."""
    value = getattr(lamina.placements, name)
    if inspect.isfunction(value) or inspect.isclass(value):
        return f"::: lamina.placements.{name}\n    options: {{heading_level: 3}}"
    return f"### lamina.placements.{name}\n\n`{name}{inspect.signature(value)}`\n\n{inspect.getdoc(value)}"


def command_line_page() -> str:
    """Each command's help, as it prints it."""
    parts = ["# Command line", "Each command's help, as `lamina COMMAND --help` prints it.", _fenced([])]
    for name in COMMANDS:
        parts += [f"## lamina {name}", *([_fenced([name, "--help", "all"])] if name not in _SUBCOMMANDS else [])]
        parts += [
            part
            for sub in _SUBCOMMANDS.get(name, ())
            for part in (f"### lamina {name} {sub}", _fenced([name, sub, "--help", "all"]))
        ]
    return "\n\n".join(parts) + "\n"


def _fenced(argv: list[str]) -> str:
    """What ``lamina ARGV`` prints, as a block."""
    text, width = io.StringIO(), os.environ.get("COLUMNS")
    os.environ["COLUMNS"] = "100"
    try:
        with contextlib.redirect_stdout(text), contextlib.suppress(SystemExit):
            main(argv)
    finally:
        os.environ.pop("COLUMNS")
        os.environ |= {} if width is None else {"COLUMNS": width}
    return f"```text\n{text.getvalue().strip()}\n```"


def settings_page() -> str:
    """Each group of settings with its fields, and which commands take it."""
    records = sorted(
        {record for record in _records() if record.command_name and _command(record) in COMMANDS},
        key=lambda r: list(COMMANDS).index(_command(r)),
    )
    groups: dict[type[Settings], list[type[Settings]]] = {}
    for record in records:
        for cls in record.__mro__:
            if issubclass(cls, Settings) and _declared(cls):
                groups.setdefault(cls, []).append(record)
    parts = [
        "# Settings",
        "A setting has one name everywhere: `--num-layers` on the command line, `num_layers` in a YAML file for "
        "`--config` and in Python. Each group names the commands that take its settings. Some commands leave out a "
        "few of these settings ([list](#left-out)).",
    ]
    for cls, takers in sorted(groups.items(), key=lambda item: -len(item[1])):
        parts += [f"## {_title(cls)}", _takers(takers), _table(cls)]
    parts += ["## Left out", _left_out(records), "## Names of other tools", _other_names()]
    return "\n\n".join(parts) + "\n"


def _other_names() -> str:
    """A row per setting: what other tools call it."""
    rows = ["| setting | other names |", "|---|---|"]
    for setting in sorted({*aliases.TAKEN, *aliases.NEAR}):
        taken = [f"`{name}`" for name in aliases.TAKEN.get(setting, ())]
        near = [f"`{name}`\\*" for name in aliases.NEAR.get(setting, ())]
        rows.append(f"| `{setting}` | {', '.join([*taken, *near])} |")
    return "\n".join([*rows, "", "\\* Lamina rejects this name, and the error suggests the setting."])


def _records() -> Iterator[type[Settings]]:
    """Every settings record of the package."""
    for module in pkgutil.walk_packages(lamina.__path__, "lamina."):
        if module.name.endswith(("settings", "setting_groups")):
            importlib.import_module(module.name)
    waiting = [Settings]
    while waiting:
        record = waiting.pop()
        waiting += record.__subclasses__()
        yield record


def _command(record: type[Settings]) -> str:
    return record.command_name.split()[0]


def _declared(cls: type[Settings]) -> list[str]:
    """The fields that a class declares itself, or gives another default."""
    return [entry.name for entry in fields(cls) if entry.name in inspect.get_annotations(cls)]


def _title(cls: type[Settings]) -> str:
    return (cls.__doc__ or cls.__name__).strip().splitlines()[0].split(":")[0].rstrip(".")


def _takers(takers: list[type[Settings]]) -> str:
    return "For " + ", ".join(f"`lamina {record.command_name}`" for record in takers) + "."


def _left_out(records: list[type[Settings]]) -> str:
    lines = [
        f"- `lamina {record.command_name}` leaves out {', '.join(f'`{name}`' for name in sorted(record.without))}"
        for record in records
        if record.without
    ]
    return "\n".join(lines)


def _table(cls: type[Settings]) -> str:
    rows = [
        f"| `{name}` | {_kind(cls.kind(name))} | {_default(cls.default(name))} | {_plain(cls.help(name))} |"
        for name in _declared(cls)
    ]
    return "\n".join(["| setting | kind | default | meaning |", "|---|---|---|---|", *rows])


def _kind(kind: object) -> str:
    if typing.get_origin(kind) in (typing.Union, UnionType):
        return " or ".join(_kind(part) for part in typing.get_args(kind) if part is not NoneType)
    if typing.get_origin(kind) is typing.Literal:
        return ", ".join(f"`{value}`" for value in typing.get_args(kind))
    words = {int: "whole number", float: "number", str: "text", bool: "switch"}
    return words.get(typing.cast(type, kind), "mapping" if "dict" in str(kind).lower() else "list")


def _default(value: object) -> str:
    return "–" if value is None or value == {} else f"`{str(value).lower() if isinstance(value, bool) else value}`"


def _plain(text: str) -> str:
    return text.replace("|", "&#124;").replace("<", "&lt;").replace("*", "\\*").replace("[", "&#91;")
