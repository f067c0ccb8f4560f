"""All commands: the jobs of ``lamina.jobs.catalog``, and those with their own modules."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING

from lamina.jobs.catalog import JOBS

if TYPE_CHECKING:
    from lamina.commands.arguments import Parser

COMMANDS = {row.name: row.summary for row in JOBS.values()} | {
    "placements": "list the placements, or show one: equation, diagram, options, source",
    "backbones": "list the backbones that a placement can be put on",
    "diagnose": "say what went wrong first in a run: in which layer, at which step, and what to change",
    "report": "rewrite the page of a folder, whichever command wrote the folder",
    "generate": "continue a text with a trained model",
    "convert": "turn a transformers checkpoint into a Lamina one with the same logits, or back",
    "emit": "write a placement as one file for the trainer that you use",
    "prune": "take layers out of a trained model: those you name, or those a probe finds least needed",
    "graft": "put another placement on a trained model, its norms fitted so that the loss changes little",
}
"""Each with what it does: `lamina --help` lists them."""


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
