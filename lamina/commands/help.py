"""The help text of a command: its flags in groups, the ten that matter or all of them."""

from __future__ import annotations

import shutil
import textwrap
from argparse import SUPPRESS, Action
from collections.abc import Iterable, Sequence

WIDTHS = (80, 110, 120)  # narrowest, without a terminal, widest
INDENT = 28
# after the command's own, which have no heading of their own here
ORDER = (
    *("model", "data", "images", "objective", "steps and learning rate", "optimizer", "LoRA", "width scaling"),
    *("records", "divergence", "experts", "machine", "output", "trackers and the Trainer"),
)
OWN = "options"


def line_width() -> int:
    """The width of the terminal, within limits."""
    narrowest, without, widest = WIDTHS
    return min(max(shutil.get_terminal_size((without, 24)).columns, narrowest), widest)


def help_text(
    prog: str,
    usage: str,
    description: str,
    actions: Sequence[tuple[str, Action]],
    examples: str,
    *,
    main: Sequence[str] = (),
    full: bool = False,
) -> str:
    """The whole help.

    Args:
        prog: the command.
        usage: its line.
        description: what it does.
        actions: the flags and the words without a flag, each with its group.
        examples: command lines.
        main: the settings to show unless ``full``; all if empty.
        full: show all settings.
    """
    some = bool(main) and not full
    hidden = {action.dest for group, action in actions if group != OUTSIDE and some and action.dest not in main}
    shown = [(group, action) for group, action in actions if action.dest not in hidden and action.help != SUPPRESS]
    if some:
        order = {name: place for place, name in enumerate(main)}
        shown = [(OWN if group != OUTSIDE else group, action) for group, action in shown]
        shown.sort(key=lambda pair: order.get(pair[1].dest, len(order)))
    parts = [f"usage: {usage}", description]
    for title in (OWN, *ORDER, OUTSIDE):
        rows = [row for group, action in shown if group == title for row in _rows(action)]
        if rows:
            parts.append("\n".join([f"{title}:", *rows]))
    if hidden:
        parts.append(f"{len(hidden)} more settings: {prog} --help all")
    parts.append(f"examples:\n{textwrap.indent(examples, '  ')}")
    return "\n\n".join(parts) + "\n"


OUTSIDE = "files, folders and help"
"""The group of what is no setting."""


def _rows(action: Action) -> Iterable[str]:
    text = explained(action)
    lines = textwrap.wrap(text, line_width() - INDENT, break_on_hyphens=False) or [""]
    head = f"  {named(action)}"
    if len(head) > INDENT - 2:
        yield head
        head = ""
    for line in lines:
        yield f"{head:<{INDENT}}{line}".rstrip()
        head = ""


def named(action: Action) -> str:
    """The flags of an action, with the kind of its value."""
    flags = [flag for flag in action.option_strings if len(flag) > 2 and not flag.startswith("--no-")]
    if not flags:
        return str(action.metavar or action.dest).upper()
    shortest = min(flags, key=len)
    value = "" if action.nargs == 0 or _is_switch(action) else action.metavar
    if value in (None, ""):
        return shortest
    joined = str(value[0] if isinstance(value, tuple) else value)
    return f"{shortest}{joined}" if joined.startswith(("[", ".")) else f"{shortest} {joined}"


def explained(action: Action) -> str:
    """The help text of an action, with its default."""
    text, default = str(action.help or ""), action.default
    if "default:" in text or default is False or default in (None, "", SUPPRESS) or isinstance(default, dict | list):
        return text
    if default is True:
        return f"{text} (default; --no-{action.option_strings[0][2:]} turns it off)"
    return f"{text} (default: {default})"


def _is_switch(action: Action) -> bool:
    return type(action).__name__ == "ActionYesNo"
