"""Command-line flags from a settings record: its fields, defaults and help, a YAML file and dotted overrides."""

from __future__ import annotations

import inspect
import re
import textwrap
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal, NoReturn, get_args, get_origin

from jsonargparse import ActionYesNo, ArgumentParser, Namespace

from lamina.core.values import path
from lamina.errors import UserError, nearest
from lamina.jobs.settings import Settings

# "from" is a keyword of Python, so no field can have that name.
ALIASES = {"from_model": ("--from",)}


class Parser(ArgumentParser):
    """An ArgumentParser whose errors are one UserError that suggests the nearest option."""

    def error(self, message: str, ex: Exception | None = None) -> NoReturn:  # type: ignore[override]
        """Raise UserError instead of printing the usage."""
        options = [o for action in self._actions for o in action.option_strings if o.startswith("--")]
        line = " ".join(str(message).split())
        unknown = re.search(
            r"(?:[Uu]nrecognized arguments?:|does not accept nested key|[Nn]o action for key)\s*(\S+)", line
        )
        if unknown:
            name = unknown[1].strip("'\"").split("=")[0]
            option = name if name.startswith("-") else f"--{name.replace('_', '-')}"
            raise UserError(f"unknown option {option}{nearest(option, options)} (see `{self.prog} --help`)")
        value = re.search(r".*Given value: (.*)", line) or re.search(r"Got value: (.*)", line)
        key = re.search(r"(?:Parser key|[Aa]rgument) [\"'/]?(-{0,2}[\w-]+)", line)
        if value and key:
            name = key[1].lstrip("-").replace("_", "-")
            kinds = {
                str(a.option_strings[-1]): getattr(a, "_typehint", None) for a in self._actions if a.option_strings
            }
            raise UserError(f"--{name}: {value[1]!r} (allowed: {_kind_names(kinds.get(f'--{name}'))})")
        raise UserError(line)


def _kind_names(kind: Any) -> str:
    named = {int: "a whole number", float: "a number", str: "text", type(None): "null"}
    return " or ".join(named.get(k, getattr(k, "__name__", str(k))) for k in (get_args(kind) or (kind,)))


def make_parser(command: str, description: str, examples: str, positional: str = "") -> Parser:
    """A parser for ``lamina COMMAND`` with its examples in the help."""
    from jsonargparse import set_parsing_settings

    set_parsing_settings(parse_optionals_as_positionals=False)
    return Parser(
        prog=f"lamina {command}",
        usage=f"lamina {command} {positional}[OPTIONS]",
        description=f"{description}\n\nexamples:\n{textwrap.indent(inspect.cleandoc(examples), '  ')}",
        formatter_class=_formatter(),
        exit_on_error=True,
        default_env=False,
        allow_abbrev=False,
    )


def _formatter() -> Any:
    from argparse import RawDescriptionHelpFormatter

    from jsonargparse import DefaultHelpFormatter

    class Formatter(DefaultHelpFormatter, RawDescriptionHelpFormatter):
        """Keeps the examples' line breaks."""

    return Formatter


def add_settings(
    parser: Parser, settings: type[Settings], *, positional: tuple[str, ...] = (), several: str | None = None
) -> None:
    """Add a flag for every field of a settings record: ``--num-layers`` for ``num_layers``; ``--config`` reads YAML.

    A command's own flags come first, then those of all training runs. The fields in ``positional`` have no flag; the
    field ``several`` has none either, and takes any number of words.
    """
    from lamina.training.settings import RunSettings

    parser.add_argument("--config", default=None, metavar="YAML", help="a YAML file with any of these settings")
    general = RunSettings.names() if issubclass(settings, RunSettings) else ()
    for name in sorted(settings.names(), key=lambda name: name in general):
        default, kind, help = settings.default(name), parsed_kind(settings.kind(name)), settings.help(name)
        flag = f"--{name.replace('_', '-')}"
        if name in positional:
            parser.add_argument(name, nargs="?", type=str, default=default, help=help)
        elif name == several:
            parser.add_argument(name, nargs="*", type=str, default=[], help=help)
        elif kind is bool:
            parser.add_argument(flag, action=ActionYesNo(no_prefix="no-"), default=default, help=help)
        else:
            parser.add_argument(flag, *ALIASES.get(name, ()), type=kind, default=default, help=help)


def parsed_kind(kind: object) -> object:
    """The type that the parser reads a field as: any text for a Literal, whose own error suggests the nearest value."""
    return str if get_origin(kind) is Literal else kind


def add_output_modes(parser: Parser, resume: str) -> None:
    """Add ``--resume``, ``--resume=auto`` and ``--overwrite``: what happens to the output folder's content."""
    auto = "with =auto, begin if the output folder is still empty"
    parser.add_argument("--resume", type=str, default="", metavar="[=auto]", help=f"{resume}; {auto}")
    parser.add_argument("--overwrite", action="store_true", help="replace what the output folder holds")


def given_settings(parser: Parser, argv: list[str], *others: str) -> tuple[dict[str, Any], Namespace]:
    """The settings from the command line and --config (the command line wins), and the values of ``others``.

    Among ``others``, ``resume`` is True, False or "auto".
    """
    argv = ["--resume=yes" if word == "--resume" else word for word in argv]  # else it takes the next word
    if "resume" in others and "--resume=" in argv:
        raise UserError("--resume: '' (allowed: --resume, --resume=auto)")
    everything = parser.parse_args(argv)
    if "resume" in others:
        if everything.resume not in ("", "yes", "auto"):
            raise UserError(f"--resume: {everything.resume!r} (allowed: --resume, --resume=auto)")
        everything.resume = everything.resume if everything.resume == "auto" else everything.resume == "yes"
        if everything.resume:
            from lamina.jobs.folder import recover

            recover(Path(everything.output))
    typed = parser.parse_args(argv, defaults=False).as_dict()
    typed = {k.replace("-", "_"): v for k, v in typed.items() if k not in ("config", *others)}
    file = everything.get("config")
    if file is None:
        return typed, everything
    return {**_from_yaml(parser, Path(path("config", file)), others), **typed}, everything


def _from_yaml(parser: Parser, file: Path, others: tuple[str, ...]) -> dict[str, Any]:
    from lamina.jobs.files import read_yaml

    data = read_yaml(file)
    if isinstance(data.get("settings"), Mapping):  # a study.yaml is also a configuration
        data = dict(data["settings"])
    known = {action.dest for action in parser._actions} - {"config", "help", *others}
    for key in data:
        if key not in known:
            raise UserError(f"{str(file)!r}: unknown setting {key!r}{nearest(str(key), known)}")
    checked = parser.parse_object({k: v for k, v in data.items() if v is not None}, defaults=False).as_dict()
    return {k: checked.get(k, v) for k, v in data.items()}
