"""A command line in other words: underscores, other names of settings, switches with a value."""

from __future__ import annotations

from argparse import Action
from collections.abc import Collection, Mapping, Sequence

from lamina.errors import UserError
from lamina.jobs.aliases import Alias, answer, meaning, refuse_twice, suggestion

TRUE, FALSE = ("true", "yes", "1", "on"), ("false", "no", "0", "off")


def translated(words: Sequence[str], options: Mapping[str, Action], positionals: Collection[str]) -> list[str]:
    """The command line in Lamina's words; unknown flags stay, for the parser.

    Args:
        words: the command line.
        options: the parser's flags.
        positionals: what the parser takes without a flag; such values come first.

    Raises:
        UserError: for a name that does not mean the same, and for two names of one setting.
    """
    offered = {action.dest for action in options.values()} | set(positionals)
    left, first, rest, said = list(words), [], [], {}
    while left:
        word = left.pop(0)
        name, equals, value = word.partition("=")
        outer, dot, inner = name.partition(".")
        flag = outer.replace("_", "-")
        if not word.startswith("--") or word == "--":
            rest.append(word)
        elif flag in options:
            refuse_twice(said, options[flag].dest + dot + inner, flag + dot + inner)
            rest += _with_switch(options[flag], flag + dot + inner + equals + value, left)
        elif (found := meaning(outer[2:].replace("-", "_"), offered)) is not None and not dot:
            alias, setting = found
            given = value if equals else None
            if alias.switch is not None and not _switched(outer, given, left):
                continue
            refuse_twice(said, setting, outer)
            if setting in positionals and not alias.differs:
                first.append(_value(outer, given, left))
            else:
                rest += _renamed(outer, alias, setting, options, given, left)
        else:
            rest.append(flag + dot + inner + equals + value)
    return [*first, *rest]


def nearest_flag(name: str, options: Mapping[str, Action]) -> str:
    """A hint with the flag that a misspelled one most likely means; empty if nothing is near."""
    known = {action.dest: flag for flag, action in reversed(list(options.items())) if action.dest != "help"}
    found = suggestion(
        name.strip("-").replace("-", "_"), {dest.replace("-", "_"): flag for dest, flag in known.items()}
    )
    return f"; did you mean {_flag_of(found, options)!r}?" if found else ""


def _renamed(
    written: str, alias: Alias, setting: str, options: Mapping[str, Action], given: str | None, left: list[str]
) -> list[str]:
    flag = _flag_of(setting, options)
    if alias.differs:
        raise answer(written, alias, flag)
    if alias.switch is not None:
        return [flag, alias.switch]
    if alias.change is not None:
        return [flag, str(alias.change(written, _value(written, given, left)))]
    if given is not None:
        return [f"{flag}={given}"]
    return _with_switch(options[flag], flag, left) if flag in options else [flag]


def _flag_of(setting: str, options: Mapping[str, Action]) -> str:
    outer, dot, inner = setting.partition(".")
    flags = [flag for flag, action in options.items() if action.dest.replace("-", "_") == outer and flag[:2] == "--"]
    shortest = min((flag for flag in flags if not flag.startswith("--no-")), key=len, default=f"--{outer}")
    return shortest.replace("_", "-") + dot + inner


def _value(written: str, given: str | None, left: list[str]) -> str:
    if given is not None:
        return given
    if not left or left[0].startswith("--"):
        raise UserError(f"{written}: no value (allowed: {written} VALUE)")
    return left.pop(0)


def _switched(written: str, given: str | None, left: list[str]) -> bool:
    """A switch of other tools: alone, or with true or false."""
    value = given if given is not None else left.pop(0) if left and not left[0].startswith("-") else "true"
    if value.lower() not in TRUE + FALSE:
        raise UserError(f"{written}: {value!r} (allowed: true, false)")
    return value.lower() in TRUE


def _with_switch(action: Action, word: str, left: list[str]) -> list[str]:
    """A flag, with the ``true`` or ``false`` that other tools write after a switch."""
    if type(action).__name__ != "ActionYesNo" or "=" in word or not left or left[0].lower() not in TRUE + FALSE:
        return [word]
    wanted = left.pop(0).lower() in TRUE
    bare = word[2:].removeprefix("no-")
    return [f"--{bare}" if wanted == (word == f"--{bare}") else f"--no-{bare}"]
