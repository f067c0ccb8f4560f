"""Build a command's parser and help text from the command's settings class."""

from __future__ import annotations

import inspect
import re
import shutil
import sys
import textwrap
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from types import NoneType, SimpleNamespace, UnionType
from typing import Literal, NoReturn, Union, get_args, get_origin

from lamina.core.json_types import Json
from lamina.core.specs import read_value
from lamina.core.values import comma_separated, factors, path, refuse_special
from lamina.errors import UserError, did_you_mean, shortened
from lamina.jobs.aliases import in_our_words, is_text, meaning, passed_on, suggestion
from lamina.jobs.folder import Resume
from lamina.jobs.settings import Settings

WIDTHS = (80, 110, 120)  # the help's minimum width, width without a terminal, and maximum width
INDENT = 28
OWN, OUTSIDE = "options", "files, folders and help"  # groups: a command's own flags, and all that is not a setting
ORDER = (
    *(
        OWN,
        "model",
        "data",
        "images",
        "objective",
        "steps and learning rate",
        "optimizer",
        "LoRA",
        "width and depth scaling",
    ),
    *("records", "divergence", "experts", "machine", "output", "trackers and the Trainer", OUTSIDE),
)
SHORTER = {"from_model": ("--from",)}  # "from" is a keyword of Python, so no field can have that name


_NEGATIVE = r"-(\.?\d.*|inf|nan)"  # -1e-3, or the list -1,2
_SWITCH = {"true": True, "false": False}


@dataclass(frozen=True)
class Argument:
    """A command-line option with its flags, its help text and the type of its value."""

    name: str  # the name of the setting or option
    kind: object  # the type of the value. If the type is a mapping, each use of the flag adds one entry ``KEY=VALUE``
    about: str
    flags: tuple[str, ...] = ()  # the option's flags, or an empty tuple for a positional argument
    # the default to show in the help. The parser returns the default of an omitted option, but no value for an omitted
    # setting
    default: object = None
    metavar: str = ""  # the placeholder in the help, such as FILE (default: a placeholder for the type)
    is_setting: bool = False  # whether the option is a field of the command's settings class
    is_needed: bool = False  # whether the command requires this positional argument
    is_list: bool = False  # whether the option takes all words up to the next flag
    adds: bool = False  # whether a repeated flag adds a value instead of replacing the earlier value
    # the source files of another library in which Lamina finds the types of that library's options
    files: tuple[str, ...] = ()
    key: str = ""  # the name of another library's option that the flag sets, or "" for Lamina's options
    alone: str = ""  # the option's value, as text, if no word follows the flag

    @property
    def kinds(self) -> tuple[object, ...]:
        """The types that the option's value may have. Literals count as text, because the settings check them."""
        kinds = get_args(self.kind) if get_origin(self.kind) in (Union, UnionType) else (self.kind,)
        return tuple(str if get_origin(kind) is Literal else get_origin(kind) or kind for kind in kinds)

    def take(self, values: Json, flag: str, inner: str, text: str | None, left: list[str]) -> None:
        """Read the option's value from the command line into ``values``. Raises UserError for an invalid value.

        For ``--trainer.optim=sgd``, ``flag`` is --trainer, ``inner`` is optim, and ``text`` is sgd. ``left`` holds the
        words after the flag. This method removes the words of the value from ``left``.
        """
        names = "/".join(self.flags)
        if self.kind is bool:
            has_negative = len(self.flags) > 1
            if has_negative and text is None and left and left[0].lower() in _SWITCH:
                text = left.pop(0)
            if text is not None and not (has_negative and text.lower() in _SWITCH):
                fix = (
                    " is not true or false." if has_negative else ", but the flag takes no value. Leave the value out."
                )
                raise UserError(f"{names}: {shortened(repr(text), 200)}{fix}")
            values[self.name] = (not flag.startswith("--no-")) == _SWITCH[(text or "true").lower()]
            return
        if text is None and (self.is_list or self.key):
            count = next((number for number, word in enumerate(left) if word.startswith("--")), len(left))
            words, left[:count] = left[:count], []
            text = f"[{', '.join(words)}]" if self.key and len(words) > 1 else ",".join(words) or None
        if text is None and self.alone:
            text = self.alone
        elif text is None and left and _is_value(left[0]):
            text = left.pop(0)
        if text is None:
            raise UserError(f"{names}: no value follows. Write: {''.join(self.shown)}")
        value = self.read(f"{self.key or inner}={text}" if self.key or inner else text, names)
        if isinstance(value, dict):
            value = {**values.get(self.name, {}), **value}
        values[self.name] = [*values[self.name], value] if self.adds else value

    def read(self, text: str, says: str) -> object:
        """Convert a text to the option's type. ``says`` is the beginning of error messages.

        In a mapping, Lamina reads each value as YAML. If another library declares an option as text, Lamina leaves the
        value unchanged.
        """
        kinds = self.kinds
        if NoneType in kinds and text in ("null", "None"):
            return None
        if bool in kinds:
            if text not in ("yes", "auto"):
                raise UserError(f"{says}: {text!r}. Write {says} or {says}=auto.")
            return text if text == "auto" else True
        if str in kinds:
            return text
        key, equals, value = text.partition("=")
        if dict in kinds and key and equals:
            return {key: value if is_text(key, self.files) else read_value(value)}
        try:
            if dict not in kinds and "_" not in text:  # Python would read 1_000 as 1000
                return float(text) if float in kinds else int(text)
        except ValueError:
            pass
        allowed = "a number" if float in kinds else "a whole number"
        allowed = f"KEY VALUE, as in {self.flags[0]}.KEY VALUE" if dict in kinds else allowed
        null = " or null" if NoneType in kinds else ""
        raise UserError(f"{says}: {shortened(repr(text), 200)}. Give {allowed}{null}.")

    @property
    def shown(self) -> tuple[str, str]:
        """The shortest flag and the placeholder for its value, for the help text."""
        if not self.flags:
            return self.name.upper(), ""
        flag, kinds = min(self.flags, key=len), self.kinds
        if self.kind is bool or self.metavar:
            return flag, self.metavar
        if str in kinds:
            is_word = any(get_origin(kind) is Literal for kind in (self.kind, *get_args(self.kind)))
            return flag, " WORD" if is_word else " TEXT"
        return flag, ".KEY VALUE" if dict in kinds else " X" if float in kinds else " N"

    def help_rows(self) -> Iterator[str]:
        narrowest, without, widest = WIDTHS
        width = min(max(shutil.get_terminal_size((without, 24)).columns, narrowest), widest)
        about = self.about
        if self.default is True:
            about += f" (default; --no-{self.name.replace('_', '-')} turns it off)"
        elif "default:" not in about and not isinstance(self.default, NoneType | bool | dict | list):
            about += f" (default: {self.default})" if self.default != "" else ""
        head = f"  {''.join(self.shown)}"
        if len(head) > INDENT - 2:
            yield head
            head = ""
        for line in textwrap.wrap(about, width - INDENT, break_on_hyphens=False) or [""]:
            yield f"{head:<{INDENT}}{line}".rstrip()
            head = ""


class Parser:
    """The parser of one command, which also reads YAML files, and accepts other tools' names for settings."""

    def __init__(self, command: str, description: str, examples: str, positional: str = "") -> None:
        self.prog, self.usage = f"lamina {command}", f"lamina {command} {positional}[OPTIONS]"
        self.description, self.examples = description, inspect.cleandoc(examples)
        self.record: type[Settings] | None = None
        self.arguments: list[Argument] = []

    def add_settings(self, record: type[Settings], positional: Sequence[str] = ()) -> None:
        """Add the flag ``--config`` and a flag for each field of a settings class, such as ``--num-layers``.

        The fields in ``positional`` get no flag. If a name in ``positional`` ends in "...", the field takes any number
        of words.
        """
        self.record = record
        self.add_flag("--config", "a YAML file with any of these settings", metavar="YAML")
        two_words = rf"\b({'|'.join(name for name in record.names() if '_' in name) or '(?!)'})\b"
        for name in record.names():
            about = re.sub(two_words, lambda found: f"--{found[0].replace('_', '-')}", record.help(name))
            flag, kind = f"--{name.replace('_', '-')}", record.kind(name)
            flags = (flag, f"--no-{flag[2:]}") if kind is bool else (flag, *SHORTER.get(name, ()))
            more: Json = {"default": record.default(name), "is_setting": True}
            if name in positional or f"{name}..." in positional:
                self.arguments.append(Argument(name, str, about, is_list=name not in positional, **more))
                continue
            is_list = not positional and record.check_of(name) in (comma_separated, factors)
            files = record.outside.get(name, ())
            self.arguments.append(Argument(name, kind, about, flags, is_list=is_list, files=files, **more))

    def add_word(self, name: str, about: str, *, needed: bool = True) -> None:
        self.arguments.append(Argument(name, str, about, is_needed=needed))

    def add_flag(
        self, flag: str, about: str, default: object = None, metavar: str = "", *, name: str = "", kind: object = str
    ) -> None:
        """Add a flag. A flag with a boolean default is a switch. Any other value has the default's type."""
        flags = (flag, f"--no-{flag[2:]}") if default is True else (flag,)
        name, metavar = name or flag[2:].replace("-", "_"), metavar and f" {metavar}"
        kind = type(default) if isinstance(default, int | float) else kind
        self.arguments.append(Argument(name, kind, about, flags, default, metavar, adds=default == []))

    def add_text_flags(self) -> None:
        """Add flags for the text to measure on, as in `lamina probe`."""
        self.add_flag("--corpus", "text to use: embedded, a .txt/.jsonl file, a folder, or hf:NAME", "embedded", "TEXT")
        self.add_flag("--tokenizer", "tokenizer to use if the model has none", metavar="TEXT")
        self.add_flag("--sequences", "number of text blocks", 64)
        length = "tokens per text block (default: 256, or the model's maximum if it is lower)"
        self.add_flag("--sequence-length", length, kind=int)
        self.add_flag("--batch-size", "text blocks per forward pass", 4)
        self.add_flag(
            "--device", "device to use: cpu, cuda, ... (default: the fastest available device)", metavar="TEXT"
        )
        self.add_flag("--overwrite", "first delete the files that Lamina wrote into the output folder", False)

    def add_output_modes(self, resume: str) -> None:
        """Add ``--overwrite``. If ``resume`` is not empty, also add ``--resume`` with the help text ``resume``."""
        if resume:
            about = f"{resume}; --resume=auto starts a new job if the output folder is empty"
            self.arguments.append(Argument("resume", Resume, about, ("--resume",), False, "[=auto]", alone="yes"))
        self.add_flag("--overwrite", "replace the content of the output folder", False)

    def settings_from(self, argv: Sequence[str]) -> tuple[Json, SimpleNamespace]:
        """Return the user's settings by name, and the values of all flags. Flags override the file of --config."""
        assert self.record is not None
        options = self.parse(argv)
        typed = {name: value for name, value in vars(options).items() if name in self.record.names()}
        if options.config is None:
            return typed, options
        return {**_from_yaml(Path(path("config", options.config)), self.record), **typed}, options

    def parse(self, argv: Sequence[str]) -> SimpleNamespace:
        """Parse a command line. Raises UserError for an unknown flag."""
        values = {argument.name: argument.default for argument in self.arguments if not argument.is_setting}
        words, left, names = list[str](), list(argv), dict[tuple[str, bool], str]()
        options = left[: left.index("--")] if "--" in left else left
        if asked := [number for number, word in enumerate(options) if word in ("-h", "--help", "--help=all")]:
            self._print_help(in_full=options[asked[0]] == "--help=all" or options[asked[0] + 1 :][:1] == ["all"])
        while left:
            word = left.pop(0)
            if word == "--" or _is_value(word):
                words += left if word == "--" else [word]
                left = [] if word == "--" else left
                continue
            name, equals, text = word.partition("=")
            outer, _, inner = name.partition(".")
            outer = outer.replace("_", "-")
            argument = self._argument(outer)
            if argument is None or (inner and dict not in argument.kinds):
                raise self._unknown(word)
            if not argument.key:
                earlier = names.setdefault((argument.name, outer.startswith("--no-")), outer)
                if earlier != outer:
                    raise UserError(f"{earlier} and {outer} are the same setting. Give one of them.")
            argument.take(values, outer, inner, text if equals else None, left)
        values |= self._lone_words(words)
        for name, value in values.items():
            if isinstance(value, str) and value.isprintable():
                refuse_special(name, value)
        return SimpleNamespace(**values)

    def _lone_words(self, words: list[str]) -> Json:
        """Return the positional arguments by name. Raises UserError if words are missing or left over."""
        values, missing = dict[str, object](), list[str]()
        for argument in self.arguments:
            if not argument.flags and words:
                values[argument.name] = words[:] if argument.is_list else words[0]
                del words[: None if argument.is_list else 1]
            elif argument.is_needed:
                missing.append(argument.name)
        if missing:
            raise UserError(f"the following arguments are required: {', '.join(missing)}")
        if words:
            raise UserError(f"unexpected argument {shortened(repr(words[0]), 80)} (see `{self.prog} --help`)")
        return values

    def _unknown(self, word: str) -> UserError:
        flag, full = word.partition("=")[0], " all" if self.record and self.record.main else ""
        shown = {argument.name: argument.shown[0] for argument in self.arguments}
        near = suggestion(flag.strip("-").replace("-", "_"), shown)
        meant = None if near is None else shown[near]
        is_word = meant is not None and not meant.startswith("-")
        hint = f". Write {meant} without a flag" if is_word else did_you_mean(meant)
        return UserError(f"unknown option {shortened(flag, 80)}{hint} (see `{self.prog} --help{full}`)")

    def _argument(self, flag: str) -> Argument | None:
        """Find the option of a flag. The flag may have another library's name for the option."""
        by_flag = {ours: argument for argument in self.arguments for ours in argument.flags}
        if flag in by_flag or not flag.startswith("--"):
            return by_flag.get(flag)
        name, offered = flag[2:].replace("-", "_"), {argument.name: argument for argument in self.arguments}
        if (setting := meaning(name, offered)) and offered[setting].flags:
            return offered[setting]
        for key, alone in ((name, "true"), (name.removeprefix("no_"), "false")):
            if self.record is not None and (where := passed_on(key, offered, self.record.outside)):
                return replace(offered[where[0]], key=where[1], alone=alone)
        return None

    def _print_help(self, *, in_full: bool) -> NoReturn:
        sys.stdout.write(self.format_help(in_full=in_full))
        raise SystemExit(0)

    def format_help(self, *, in_full: bool = False) -> str:
        """Return the help text with the main settings, or with all settings in groups if ``in_full`` is true."""
        main = () if in_full or self.record is None else self.record.main
        rows: dict[str, list[tuple[int, str]]] = {group: [] for group in ORDER}
        hidden = 0
        for argument in (Argument("help", bool, "show this help message and exit", ("--help",)), *self.arguments):
            group = OUTSIDE if self.record else OWN
            if argument.is_setting and self.record is not None:
                group = OWN if main else self.record.group_of(argument.name) or OWN
            if argument.is_setting and main and argument.name not in main:
                hidden += 1
                continue
            last = len(main) + (argument.name == "help") if argument.flags else -1
            order = main.index(argument.name) if argument.name in main else last
            rows[group] += [(order, row) for row in argument.help_rows()]
        parts = [f"usage: {self.usage}", self.description]
        for group, lines in rows.items():
            if lines:
                parts.append("\n".join([f"{group}:", *(row for _, row in sorted(lines, key=lambda line: line[0]))]))
        if hidden:
            parts.append(f"{hidden} more settings: {self.prog} --help all")
        return "\n\n".join([*parts, f"examples:\n{textwrap.indent(self.examples, '  ')}"]) + "\n"


def _is_value(word: str) -> bool:
    """Return whether a word is a value and not a flag. A value may be a negative number, or contain spaces."""
    return not word.startswith("-") or word == "-" or " " in word or re.fullmatch(_NEGATIVE, word) is not None


def _from_yaml(file: Path, record: type[Settings]) -> Json:
    from lamina.core.yaml_files import read_mapping

    data, names = read_mapping(file), record.names()
    if isinstance(data.get("settings"), Mapping):  # a study.yaml is also a configuration
        data = dict(data["settings"])
    data.pop("digest", None)  # a run's config.yaml has a digest, but the user may have edited the file
    passed: dict[str, Json] = {}
    data = in_our_words({str(key): value for key, value in data.items()}, names, f"{str(file)!r}: ")
    for name, value in data.items():
        if where := passed_on(name, names, record.outside):
            passed.setdefault(where[0], {})[where[1]] = value
            continue
        if name not in names:
            hint = did_you_mean(suggestion(name, names))
            raise UserError(f"{str(file)!r}: unknown setting {name!r}{hint}")
        argument = Argument(name, record.kind(name), "")
        if isinstance(value, str) and {int, float} & set(argument.kinds):  # YAML 1.1 reads 1e-3 as text
            data[name] = argument.read(value, f"{str(file)!r}: {name}")
    kept: Json = {name: value for name, value in data.items() if name in names}
    return kept | {name: {**options, **kept.get(name, {})} for name, options in passed.items()}
