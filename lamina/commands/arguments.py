"""A command's flags: those of its settings record, a YAML file, other names of settings; and the help text."""

from __future__ import annotations

import inspect
import re
import shutil
import textwrap
from argparse import SUPPRESS, Action, ArgumentParser, ArgumentTypeError, BooleanOptionalAction, Namespace
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from types import NoneType, UnionType
from typing import Literal, NoReturn, Union, cast, get_args, get_origin

from lamina.core.json_types import Json
from lamina.core.specs import read_value
from lamina.core.values import comma_separated, factors, path, refuse_special
from lamina.errors import UserError, did_you_mean, shortened
from lamina.jobs.aliases import in_our_words, is_text, meaning, passed_on, suggestion
from lamina.jobs.settings import Settings

WIDTHS = (80, 110, 120)  # of the help: narrowest, without a terminal, widest
INDENT = 28
OWN, OUTSIDE = "options", "files, folders and help"  # the groups of a command's own flags, and of what is no setting
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


@dataclass(frozen=True)
class Reader:
    """Reads a flag's text as a value of a setting's type; errors say what is allowed. The settings check the rest.

    A mapping is read one entry at a time, ``KEY=VALUE``, by YAML's rules, except what ``files`` declare to be text.
    """

    kind: object
    flag: str = ""
    files: tuple[str, ...] = ()

    @property
    def kinds(self) -> tuple[object, ...]:
        """The allowed types. A Literal counts as text, since its own check suggests the nearest word."""
        kinds = get_args(self.kind) if get_origin(self.kind) in (Union, UnionType) else (self.kind,)
        return tuple(str if get_origin(kind) is Literal else get_origin(kind) or kind for kind in kinds)

    def __call__(self, text: str) -> object:
        """Read the value. Raises ArgumentTypeError."""
        if NoneType in self.kinds and text in ("null", "None"):
            return None
        if str in self.kinds:
            return text
        key, equals, value = text.partition("=")
        if dict in self.kinds and key and equals:
            return key, value if is_text(key, self.files) else read_value(value)
        try:
            if dict not in self.kinds and "_" not in text:  # Python would read 1_000 as 1000
                return float(text) if float in self.kinds else int(text)
        except ValueError:
            pass
        allowed = "a number" if float in self.kinds else "a whole number"
        allowed = f"KEY VALUE, as in {self.flag}.KEY VALUE" if dict in self.kinds else allowed
        null = " or null" if NoneType in self.kinds else ""
        raise ArgumentTypeError(f"{shortened(repr(text), 200)} (allowed: {allowed}{null})")

    @property
    def shown(self) -> str:
        """The placeholder of the value in the help."""
        if str in self.kinds:
            return "WORD" if any(get_origin(k) is Literal for k in (self.kind, *get_args(self.kind))) else "TEXT"
        return " .KEY VALUE" if dict in self.kinds else "X" if float in self.kinds else "N"


@dataclass(frozen=True)
class Reading:
    """How the words of a flag become a value.

    Attributes:
        action: the setting or option that gets the value.
        flag: our flag for it, which may be the negative of a switch.
        is_list: whether all words up to the next flag are its values.
        adds: whether each use adds a value to the earlier ones.
        key: another library's option that the setting passes on; the flag is then that library's.
        alone: the value of that option where no word follows.
    """

    action: Action
    flag: str = ""
    is_list: bool = False
    adds: bool = False
    key: str | None = None
    alone: str = ""

    def take(self, options: Namespace, inner: str, text: str | None, left: list[str]) -> None:
        """Put the value into ``options``.

        Args:
            inner: what follows a dot in the flag, a mapping's key.
            text: what follows an equals sign; None without one.
            left: the words behind the flag, of which the value's are removed.
        """
        action, names = self.action, "/".join(self.action.option_strings)
        if self.key is not None:
            words = _values(left) if text is None else [text]
            text = f"[{', '.join(words)}]" if len(words) > 1 else (*words, self.alone)[0]
            text = f"{self.key}={text}"
        elif isinstance(action, BooleanOptionalAction) or action.nargs == 0:
            value = not self.flag.startswith("--no-")
            if isinstance(action, BooleanOptionalAction):
                if text is None and left and left[0].lower() in _SWITCH:
                    text = left.pop(0)
                if text is not None and text.lower() in _SWITCH:
                    value, text = value == _SWITCH[text.lower()], None
            if text is not None:
                raise UserError(f"{names}: ignored explicit argument {text!r}")
            setattr(options, action.dest, value)
            return
        elif text is None and action.type is _resume:  # it takes no word of its own
            text = "yes"
        elif text is None and self.is_list:
            text = ",".join(_values(left)) or None
        if text is None and left and _is_value(left[0]):
            text = left.pop(0)
        if text is None:
            raise UserError(f"{names}: expected one argument")
        read = cast(Callable[[str], object], action.type or str)
        try:
            value = read(f"{inner}={text}" if inner else text)
        except ArgumentTypeError as error:
            raise UserError(f"{names}: {error}") from None
        earlier = getattr(options, action.dest, [])
        setattr(options, action.dest, [*earlier, value] if self.adds else value)


_SWITCH = {"true": True, "false": False}


class Parser(ArgumentParser):
    """A command's parser: accepts other names of settings, and raises UserError that suggests the nearest option.

    Args:
        command: its name, of one or two words.
        positional: the words before the options in the usage line.
    """

    def __init__(self, command: str, description: str, examples: str, positional: str = "") -> None:
        usage = f"lamina {command} {positional}[OPTIONS]"
        super().__init__(prog=f"lamina {command}", usage=usage, description=description, allow_abbrev=False)
        self.examples = inspect.cleandoc(examples)
        self.record: type[Settings] | None = None
        self.full_help = False
        self._readings: dict[str, Reading] = {}  # by flag; made when the first line is parsed

    def add_settings(self, record: type[Settings], positional: Sequence[str] = ()) -> None:
        """Add a flag for each field, ``--num-layers`` for ``num_layers``, and ``--config``, which reads YAML.

        The fields in ``positional`` have no flag; one that ends in "..." takes any number of words.
        """
        self.record = record
        self.add_argument("--config", default=None, metavar="YAML", help="a YAML file with any of these settings")
        for name in record.names():
            flag, about = f"--{name.replace('_', '-')}", _explained(record.help(name), record.default(name), name)
            reader = Reader(record.kind(name), flag, record.outside.get(name, ()))
            if name in positional or f"{name}..." in positional:
                self.add_argument(name, nargs="?" if name in positional else "*", default=SUPPRESS, help=about)
            elif record.kind(name) is bool:
                self.add_argument(flag, action=BooleanOptionalAction, default=SUPPRESS, help=about)
            else:
                more: Json = {"action": "append"} if reader.shown == " .KEY VALUE" else {}
                flags = (flag, *SHORTER.get(name, ()))
                self.add_argument(*flags, type=reader, default=SUPPRESS, help=about, metavar=reader.shown, **more)

    def add_flag(self, flag: str, about: str, default: object = None, metavar: str | None = None) -> None:
        """Add a flag: a switch for a boolean default, else one that takes a number or text, like its default."""
        if isinstance(default, bool):
            action = BooleanOptionalAction if default else "store_true"
            self.add_argument(flag, action=action, default=default, help=about)
        else:
            reader = Reader(type(default) if isinstance(default, int | float) else str)
            self.add_argument(flag, type=reader, default=default, metavar=metavar or reader.shown, help=about)

    def add_text_flags(self) -> None:
        """Add the flags for the text on which a trained model is measured, as in `lamina probe`."""
        self.add_flag("--corpus", "embedded, a .txt/.jsonl file, a folder, hf:NAME", "embedded", "TEXT")
        self.add_flag("--tokenizer", "tokenizer, for a model that has none", metavar="TEXT")
        self.add_flag("--sequences", "how many blocks of the text", 64)
        length = "tokens in a block (default: 256, or the model's positions where they are fewer)"
        self.add_argument("--sequence-length", type=Reader(int), default=None, metavar="N", help=length)
        self.add_flag("--batch-size", "blocks in a forward pass", 4)
        self.add_flag("--device", "cpu, cuda, ... (default: the fastest)", metavar="TEXT")
        self.add_flag("--overwrite", "first delete the files that Lamina wrote into the output", False)

    def add_output_modes(self, resume: str) -> None:
        """Add ``--resume``, ``--resume=auto`` and ``--overwrite``, for an output folder with content."""
        auto = "with =auto, begin if the output folder is still empty"
        self.add_argument("--resume", type=_resume, default=False, metavar="[=auto]", help=f"{resume}; {auto}")
        self.add_flag("--overwrite", "replace the content of the output folder", False)

    def settings_from(self, argv: Sequence[str]) -> tuple[Json, Namespace]:
        """Parse the settings by name (the command line overrides --config), and all options."""
        assert self.record is not None
        options = self.parse(argv)
        typed = {name: value for name, value in vars(options).items() if name in self.record.names() and value != []}
        typed = {name: dict(value) if self.record.kind(name) == Json else value for name, value in typed.items()}
        if options.config is None:
            return typed, options
        return {**_from_yaml(Path(path("config", options.config)), self.record), **typed}, options

    def parse(self, argv: Sequence[str]) -> Namespace:
        """Parse a command line: the words of its flags by the table of readings, the others by their order.

        Raises UserError for an unknown flag.
        """
        options, rest, left, names = Namespace(), list[str](), list(argv), dict[str, str]()
        while left:
            word = left.pop(0)
            if word in ("-h", "--help", "--help=all"):
                self.full_help = word == "--help=all" or left[:1] == ["all"]
                self.print_help()
                self.exit()
            if not word.startswith("--") or word == "--":
                rest.append(word)
                continue
            name, equals, text = word.partition("=")
            outer, _, inner = name.partition(".")
            reading = self._reading(outer.replace("_", "-"))
            if reading is None:
                raise self._unknown(word)
            if reading.key is None and (before := names.setdefault(reading.flag, _hyphens(outer))) != _hyphens(outer):
                raise UserError(f"{before} and {outer} are the same setting. Give one of them.")
            reading.take(options, inner, text if equals else None, left)
        options, unknown = self.parse_known_args(rest, options)
        for word in unknown:
            raise self._unknown(word)
        for option, value in vars(options).items():
            if isinstance(value, str) and value.isprintable():
                refuse_special(option, value)
        return options

    def _unknown(self, word: str) -> UserError:
        if not word.startswith("-"):
            return UserError(f"unexpected argument {shortened(repr(word), 80)} (see `{self.prog} --help`)")
        option, full = word.partition("=")[0], " all" if self.record and self.record.main else ""
        near = suggestion(option.strip("-").replace("-", "_"), self._dests())
        hint = did_you_mean(near and self._flag(near))
        return UserError(f"unknown option {shortened(option, 80)}{hint} (see `{self.prog} --help{full}`)")

    def error(self, message: str) -> NoReturn:
        """Raise UserError instead of printing the usage."""
        raise UserError(message.removeprefix("argument "))

    def _dests(self) -> list[str]:
        return [action.dest for action in self._actions if action.dest != "help"]

    def _flag(self, dest: str) -> str:
        action = next(action for action in self._actions if action.dest == dest)
        return _named(action)[0]

    def _reading(self, flag: str) -> Reading | None:
        """Return how a flag is read: ours, another library's name for it, or an option that a setting passes on."""
        if not self._readings:
            checks = {} if self.record is None else {name: self.record.check_of(name) for name in self.record.names()}
            lists = all(action.option_strings for action in self._actions)  # else words of their own may follow
            for action in self._actions:
                is_list = lists and checks.get(action.dest) in (comma_separated, factors)
                adds = action.default == [] or action.metavar == " .KEY VALUE"
                row = Reading(action, is_list=is_list, adds=adds)
                self._readings |= {ours: replace(row, flag=ours) for ours in action.option_strings}
        if flag in self._readings:
            return self._readings[flag]
        name = flag[2:].replace("-", "_")
        setting = meaning(name, self._dests())
        if setting and (ours := self._flag(setting)).startswith("--"):
            return self._readings[ours]
        for option, value in ((name, "true"), (name.removeprefix("no_"), "false")):
            if self.record is not None and (where := passed_on(option, self._dests(), self.record.outside)):
                return replace(self._readings[f"--{where[0]}"], key=where[1], alone=value)
        return None

    def format_help(self) -> str:
        """Return the help: the main settings or, after ``--help all``, all of them in groups."""
        main = () if self.full_help or self.record is None else self.record.main
        rows: dict[str, list[tuple[int, str]]] = {group: [] for group in ORDER}
        hidden = 0
        for action in self._actions:
            is_setting = self.record is not None and action.dest in self.record.names()
            group = OUTSIDE if self.record else OWN
            if is_setting and self.record is not None:
                group = OWN if main else self.record.group_of(action.dest) or OWN
            if is_setting and main and action.dest not in main:
                hidden += 1
            elif action.help != SUPPRESS:
                last = len(main) + (action.dest == "help") if action.option_strings else -1
                order = main.index(action.dest) if action.dest in main else last
                rows[group] += [(order, row) for row in help_rows(action)]
        parts = [f"usage: {self.usage}", str(self.description)]
        for group, lines in rows.items():
            if lines:
                parts.append("\n".join([f"{group}:", *(row for _, row in sorted(lines, key=lambda line: line[0]))]))
        if hidden:
            parts.append(f"{hidden} more settings: {self.prog} --help all")
        return "\n\n".join([*parts, f"examples:\n{textwrap.indent(self.examples, '  ')}"]) + "\n"


def help_rows(action: Action) -> Iterator[str]:
    """Yield the lines of the help about a flag."""
    narrowest, without, widest = WIDTHS
    width = min(max(shutil.get_terminal_size((without, 24)).columns, narrowest), widest)
    about = _explained(str(action.help or ""), action.default, action.dest)
    flag, value = _named(action)
    head = f"  {flag}{value}"
    if len(head) > INDENT - 2:
        yield head
        head = ""
    for line in textwrap.wrap(about, width - INDENT, break_on_hyphens=False) or [""]:
        yield f"{head:<{INDENT}}{line}".rstrip()
        head = ""


def _hyphens(name: str) -> str:
    return name.replace("_", "-")


def _is_value(word: str) -> bool:
    """Return whether a word behind a flag is its value: no flag, but perhaps a negative number or a sentence."""
    return not word.startswith("-") or word == "-" or " " in word or re.fullmatch(r"-\d+|-\d*\.\d+", word) is not None


def _values(left: list[str]) -> list[str]:
    """Remove the words before the next flag from the list, and return them."""
    count = next((number for number, word in enumerate(left) if word.startswith("--")), len(left))
    taken, left[:count] = left[:count], []
    return taken


def _named(action: Action) -> tuple[str, str]:
    """Return an action's shortest flag and its value's placeholder."""
    flags = [flag for flag in action.option_strings if len(flag) > 2 and not flag.startswith("--no-")]
    if not flags:
        return str(action.metavar or action.dest).upper(), ""
    value = "" if action.nargs == 0 else str(action.metavar or getattr(action.type, "shown", ""))
    value = value.strip() if value.startswith((" .", "[")) else f" {value}" if value else ""
    return min(flags, key=len), value


def _explained(text: str, default: object, name: str) -> str:
    if "default:" in text or default is False or default in (None, "", SUPPRESS) or isinstance(default, dict | list):
        return text
    if default is True:
        return f"{text} (default; --no-{name.replace('_', '-')} turns it off)"
    return f"{text} (default: {default})"


def _resume(text: str) -> bool | str:
    if text not in ("yes", "auto"):
        raise ArgumentTypeError(f"{text!r} (allowed: --resume, --resume=auto)")
    return text if text == "auto" else True


def _from_yaml(file: Path, record: type[Settings]) -> Json:
    from lamina.core.yaml_files import read_mapping

    data, names = read_mapping(file), record.names()
    if isinstance(data.get("settings"), Mapping):  # a study.yaml is also a configuration
        data = dict(data["settings"])
    data.pop("digest", None)  # of a run's config.yaml: here it may have been edited
    passed: dict[str, Json] = {}
    data = in_our_words({str(key): value for key, value in data.items()}, names, f"{str(file)!r}: ")
    for name, value in data.items():
        if where := passed_on(name, names, record.outside):
            passed.setdefault(where[0], {})[where[1]] = value
            continue
        if name not in names:
            hint = did_you_mean(suggestion(name, names))
            raise UserError(f"{str(file)!r}: unknown setting {name!r}{hint}")
        reader = Reader(record.kind(name))
        if isinstance(value, str) and {int, float} & set(reader.kinds):  # YAML 1.1 takes 1e-3 for text
            try:
                data[name] = reader(value)
            except ArgumentTypeError as error:
                raise UserError(f"{str(file)!r}: {name}: {error}") from None
    kept: Json = {name: value for name, value in data.items() if name in names}
    return kept | {name: {**options, **kept.get(name, {})} for name, options in passed.items()}
