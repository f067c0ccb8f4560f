"""`lamina completion SHELL`: the script with which a shell completes commands and flags."""

from __future__ import annotations

import argparse
import importlib
import re
from collections.abc import Mapping

from lamina.commands.arguments import Parser, make_parser
from lamina.commands.catalog import COMMANDS
from lamina.commands.help import named
from lamina.errors import UserError, unknown

SHELLS = ("bash", "zsh", "tcsh")
EXAMPLES = """
  lamina completion bash > ~/.local/share/bash-completion/completions/lamina
  lamina completion zsh > ~/.zfunc/_lamina             with ~/.zfunc in fpath, before compinit
"""
FILES = (
    *("config", "corpus", "eval_corpus", "data", "eval_data", "output", "from_model", "checkpoint", "models", "model"),
    *("folder", "run", "source", "backbone", "tokenizer", "store", "records", "data_dir", "svg", "screenshot"),
)


def parser() -> Parser:
    """The command's flags."""
    flags = make_parser(
        "completion", "Print the script with which a shell completes commands and flags.", EXAMPLES, "SHELL "
    )
    flags.add_argument("shell", help=", ".join(SHELLS))
    return flags


def run(argv: list[str]) -> int:
    """Print the script."""
    shell = parser().parse_args(argv).shell
    if shell not in SHELLS:
        raise unknown("shell", shell, SHELLS)
    print(script(shell, COMMANDS))
    return 0


def script(shell: str, commands: Mapping[str, str]) -> str:
    """The script for a shell. Raises UserError without shtab."""
    try:
        import shtab
    except ImportError:
        raise UserError("completion: shtab is not installed (allowed: pip install 'lamina[completion]')") from None
    top = argparse.ArgumentParser(prog="lamina")
    subparsers = top.add_subparsers(dest="command")
    for name, about in commands.items():
        sub = subparsers.add_parser(name, help=about, add_help=False)
        if name == "study":
            sub.add_argument("action", choices=("list", "show", "run", "worker"))
        flags: Parser = importlib.import_module(f"lamina.commands.{name.replace('-', '_')}").parser()
        for action in flags._actions:
            if action.help != argparse.SUPPRESS:
                added = _copy(sub, action)
                if action.dest.replace("-", "_") in FILES:
                    added.__dict__["complete"] = shtab.FILE
    return shtab.complete(top, shell=shell)


def _copy(to: argparse.ArgumentParser, action: argparse.Action) -> argparse.Action:
    """The action in a parser of argparse's own: its flags, whether it takes a value, and which words."""
    summary = re.split(r"[;(]", str(action.help or ""))[0].strip().replace("`", "'")
    flags = [*action.option_strings]
    if not flags:
        return to.add_argument(action.dest, nargs="*" if action.nargs in ("*", "?") else None, help=summary)
    switch = type(action).__name__ == "ActionYesNo" or action.nargs == 0 or action.dest == "resume"
    if switch:
        return to.add_argument(*flags, dest=action.dest, action="store_true", help=summary)
    if named(action).endswith(".KEY VALUE"):
        flags = [f"{flag}." for flag in flags]
    return to.add_argument(*flags, dest=action.dest, help=summary, choices=words(action))


def words(action: argparse.Action) -> tuple[str, ...] | None:
    """The words that a flag takes, where they are few."""
    name = action.dest.replace("-", "_")
    if name in ("placement", "placements"):
        from lamina.placements import names

        return tuple(names())
    return action.__dict__.get("words")
