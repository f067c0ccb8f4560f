"""Command-line flags from a settings record: its fields, defaults and help, a YAML file and dotted overrides."""

from __future__ import annotations

import contextlib
import inspect
import re
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import UnionType
from typing import Any, Literal, NoReturn, Union, get_args, get_origin

from jsonargparse import ActionYesNo, ArgumentParser, Namespace

from lamina.commands.help import OUTSIDE, OWN, help_text
from lamina.commands.translation import nearest_flag, translated
from lamina.core.values import path
from lamina.errors import UserError, shortened
from lamina.jobs.aliases import in_our_words, suggestion
from lamina.jobs.settings import Settings

# "from" is a keyword of Python, so no field can have that name.
SHORTER = {"from_model": ("--from",)}
KINDS = {int: "N", float: "X"}


class Parser(ArgumentParser):
    """An ArgumentParser that takes other tools' names, and whose errors are one UserError with the nearest option.

    Attributes:
        examples: command lines, for the help.
        main: the settings that ``--help`` shows.
        headings: of the settings' flags, by setting.
        full_help: whether to show all.
    """

    examples: str = ""
    main: tuple[str, ...] = ()
    full_help: bool = False

    def __init__(self, *given: Any, **named: Any) -> None:
        super().__init__(*given, **named)
        self.headings: dict[str, str] = {}
        self.words: list[str] = []

    def parse_args(self, args: Sequence[str] | None = None, *more: Any, **named: Any) -> Namespace:  # type: ignore[override]
        """Parse a command line, of which other tools' names have become Lamina's."""
        words = self._without_all(sys.argv[1:] if args is None else args)
        positionals = [action.dest for action in self._actions if not action.option_strings]
        words = translated(words, self._option_string_actions, positionals)
        self.words = words
        return super().parse_args(words, *more, **named)

    def _without_all(self, words: Sequence[str]) -> list[str]:
        """The words without the ``all`` of ``--help all``."""
        kept: list[str] = []
        for word in words:
            after = bool(kept) and kept[-1] in ("-h", "--help")
            self.full_help |= (after and word == "all") or word == "--help=all"
            if not (after and word == "all"):
                kept.append("--help" if word == "--help=all" else word)
        return kept

    def format_help(self, formatter: object = None) -> str:
        """The help, with the flags that matter or, after ``--help all``, with all."""
        actions = [
            (self.headings.get(action.dest, OUTSIDE if self.headings else OWN), action) for action in self._actions
        ]
        text = help_text(
            self.prog,
            str(self.usage),
            str(self.description),
            actions,
            self.examples,
            main=self.main,
            full=self.full_help,
        )
        self.full_help = False
        return text

    def _typed(self, flag: str, value: str) -> str:
        """A flag's value as the user typed it: the first that reads as ``value``, else ``value``."""
        typed = [
            after if before == flag else before.partition("=")[2]
            for before, after in zip(self.words, [*self.words[1:], ""], strict=True)
            if before == flag or before.startswith(f"{flag}=")
        ]
        same = [word for word in typed if _reads_as(word, value)]
        return [*same, value][0]

    def error(self, message: str, ex: Exception | None = None) -> NoReturn:  # type: ignore[override]
        """Raise UserError instead of printing the usage."""
        line = " ".join(str(message).split())
        unknown = re.search(
            r"(?:[Uu]nrecognized arguments?:|does not accept nested key|[Nn]o action for key)\s*(\S+)", line
        )
        if unknown:
            name = unknown[1].strip("'\"").split("=")[0]
            if "nrecognized" in unknown[0] and not name.startswith("-"):
                raise UserError(f"unexpected argument {shortened(name, 80)!r} (see `{self.prog} --help`)")
            option = name if name.startswith("-") else f"--{name.replace('_', '-')}"
            hint = nearest_flag(option, self._option_string_actions)
            every = " all" if self.main else ""
            raise UserError(f"unknown option {option}{hint} (see `{self.prog} --help{every}`)")
        value = re.search(r".*Given value: (.*)", line) or re.search(r"Got value:\s*(.*)", line)
        key = re.search(r"(?:Parser key|[Aa]rgument) [\"'/]?(-{0,2}[\w-]+)", line)
        if value and key:
            name = key[1].lstrip("-").replace("_", "-")
            kinds = {
                str(a.option_strings[-1]): getattr(a, "_typehint", None) for a in self._actions if a.option_strings
            }
            allowed = _kind_names(kinds.get(f"--{name}")).replace("--FLAG", f"--{name}")
            raise UserError(f"--{name}: {self._typed(f'--{name}', value[1])!r} (allowed: {allowed})")
        raise UserError(line)


def _reads_as(word: str, value: str) -> bool:
    """Whether the parser shows a word of the command line as ``value``: 1e2 as 100.0, true as True."""
    with contextlib.suppress(ValueError):
        return float(word) == float(value)
    return word.casefold() == value.casefold() or (not word and value == "None")


def _kind_names(kind: Any) -> str:
    if dict in (kind, get_origin(kind)):
        return "KEY VALUE, as in --FLAG.KEY VALUE"
    named = {int: "a whole number", float: "a number", str: "text", type(None): "null"}
    return " or ".join(named.get(k, getattr(k, "__name__", str(k))) for k in (get_args(kind) or (kind,)))


def make_parser(command: str, description: str, examples: str, positional: str = "") -> Parser:
    """A parser for ``lamina COMMAND`` with its examples in the help."""
    from jsonargparse import set_parsing_settings

    set_parsing_settings(parse_optionals_as_positionals=False)
    parser = Parser(
        prog=f"lamina {command}",
        usage=f"lamina {command} {positional}[OPTIONS]",
        description=description,
        exit_on_error=True,
        default_env=False,
        allow_abbrev=False,
    )
    parser.examples = inspect.cleandoc(examples)
    return parser


def add_settings(
    parser: Parser, settings: type[Settings], *, positional: tuple[str, ...] = (), several: str | None = None
) -> None:
    """Add a flag for every field of a settings record: ``--num-layers`` for ``num_layers``; ``--config`` reads YAML.

    The fields in ``positional`` have no flag; the field ``several`` has none either, and takes any number of words.
    """
    parser.add_argument("--config", default=None, metavar="YAML", help="a YAML file with any of these settings")
    parser.main = settings.main
    for name in settings.names():
        default, kind, help = settings.default(name), parsed_kind(settings.kind(name)), settings.help(name)
        flag = f"--{name.replace('_', '-')}"
        parser.headings[name] = settings.group_of(name) or OWN
        if name in positional:
            parser.add_argument(name, nargs="?", type=str, default=default, help=help)
        elif name == several:
            parser.add_argument(name, nargs="*", type=str, default=[], help=help)
        elif kind is bool:
            parser.add_argument(flag, action=ActionYesNo(no_prefix="no-"), default=default, help=help)
        else:
            value = value_name(settings, name)
            parser.add_argument(flag, *SHORTER.get(name, ()), type=kind, default=default, help=help, metavar=value)


def value_name(settings: type[Settings], name: str) -> str:
    """What the help calls a field's value: N, X, WORD, PLACE, or a key of its own."""
    kind = settings.kind(name)
    kinds = get_args(kind) if get_origin(kind) in (Union, UnionType) else (kind,)
    if any(get_origin(part) is dict for part in kinds) and str not in kinds:
        return ".KEY VALUE"
    if any(get_origin(part) is Literal for part in kinds):
        return "WORD"
    return next((KINDS[part] for part in kinds if part in KINDS), "TEXT") if str not in kinds else "TEXT"


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
        if everything.resume and everything.output is not None:
            from lamina.jobs.folder import recover

            recover(Path(everything.output))
    typed = parser.parse_args(argv, defaults=False).as_dict()
    typed = {k.replace("-", "_"): v for k, v in typed.items() if k not in ("config", *others)}
    typed = {k: v for k, v in typed.items() if k not in _positionals(parser) or v not in (None, "", [])}
    file = everything.get("config")
    if file is None:
        return typed, everything
    return {**_from_yaml(parser, Path(path("config", file)), others), **typed}, everything


def _from_yaml(parser: Parser, file: Path, others: tuple[str, ...]) -> dict[str, Any]:
    from lamina.jobs.files import read_yaml

    data = read_yaml(file)
    if isinstance(data.get("settings"), Mapping):  # a study.yaml is also a configuration
        data = dict(data["settings"])
    known = {action.dest.replace("-", "_") for action in parser._actions} - {"config", "help", *others}
    data = in_our_words({str(key): value for key, value in data.items()}, known, file=str(file))
    for key in data:
        if key not in known:
            near = suggestion(key, known)
            hint = f"; did you mean {near!r}?" if near else ""
            raise UserError(f"{str(file)!r}: unknown setting {key!r}{hint}")
    flags = {k: v for k, v in data.items() if v is not None and k not in _positionals(parser)}
    checked = parser.parse_object(flags, defaults=False).as_dict()
    return {k: checked.get(k, v) for k, v in data.items()}


def _positionals(parser: Parser) -> set[str]:
    """The settings that are words without a flag."""
    return {action.dest for action in parser._actions if not action.option_strings}
