"""All commands: the jobs of ``lamina.catalog``, and those with their own modules."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING

from lamina.catalog import JOBS

if TYPE_CHECKING:
    from lamina.commands.arguments import Parser

GROUPS: dict[str, dict[str, str]] = {
    "watch and diagnose": {
        "diagnose": "find out why a run went wrong: the likely cause, its step and layer, and what to change",
        "report": "rewrite the page of a folder, whichever command wrote the folder",
    },
    "look inside": {
        "probe": JOBS["probe"].summary,
        "placements": "list the placements, or show one: equation, diagram, options, source",
        "eval": JOBS["eval"].summary,
        "generate": "continue a text with a trained model",
        "prune": "remove layers from a trained model: the ones you name, or the ones a probe finds least needed",
        "graft": "put another placement on a trained model, its norms fitted so that the loss changes little",
        "convert": "turn a transformers checkpoint into a Lamina one with the same logits, or back",
    },
    "compare and train": {
        **{name: JOBS[name].summary for name in ("compare", "preflight", "pretrain")},
        **{name: JOBS[name].summary for name in ("coord-check", "transfer", "max-lr")},
        "emit": "write a placement as one file for the trainer that you use",
        "backbones": "list the backbones that a placement can be put on",
    },
    "after pretraining": {name: JOBS[name].summary for name in ("sft", "reward", "dpo", "rlhf")},
    "the papers": {"study": JOBS["study"].summary},
}
"""What each command does, by what a person wants to do: `lamina --help` lists them so."""
COMMANDS = {name: about for commands in GROUPS.values() for name, about in commands.items()}


def run(name: str, argv: list[str]) -> int:
    """Run a command and return the exit code."""
    if name in JOBS and not JOBS[name].own_command:
        from lamina.commands import run_job

        return run_job.run(JOBS[name], argv)
    return importlib.import_module(f"lamina.commands.{name}").run(argv) or 0


def parser(name: str) -> Parser:
    if name in JOBS and not JOBS[name].own_command:
        from lamina.commands import run_job

        return run_job.parser_of(JOBS[name])
    return importlib.import_module(f"lamina.commands.{name}").parser()
