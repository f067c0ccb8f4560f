"""What `lamina compare` can be told."""

from __future__ import annotations

import hashlib
import re
import shlex
from collections.abc import Iterator
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

from lamina.errors import UserError
from lamina.placements.custom import split_specs
from lamina.training.settings import PretrainSettings, RunSettings
from lamina.values import path, seed_number, whole_number

DEFAULT_PLACEMENTS = "post_ln,pre_ln,peri_ln,mix_ln,fusenorm,keel"


@dataclass(frozen=True, kw_only=True)
class CompareSettings(RunSettings):
    """Settings of a comparison: every placement at every learning rate and seed is a trial.

    Args:
        placements: comma-separated: names (see `lamina placements`), name(option=value, ...), YAML or Python files
            (a Python file runs as code)
        learning_rates: comma-separated peak learning rates; each placement is ranked at its best one
        seeds: comma-separated seeds
        init: recommended (each placement's own), or one for all: same:NAME with NAME as in --init of `lamina pretrain`
        output: the study's folder
        workers: trials that run at a time, each in a process of its own (default: one a core)
    """

    placements: str = DEFAULT_PLACEMENTS
    learning_rates: str = "5e-3"
    seeds: str = "0"
    output: str = "runs/compare"
    workers: int | None = None

    def __post_init__(self) -> None:
        """Raise UserError that names the setting whose value has no meaning."""
        super().__post_init__()
        if self.workers is not None:
            whole_number("workers", self.workers)
        object.__setattr__(self, "output", path("output", self.output))
        if not split_specs(self.placements):
            raise UserError("placements: none given (see `lamina placements` for the names)")
        numbers("learning_rates", self.learning_rates, float)
        for one in numbers("seeds", self.seeds, int):
            seed_number("seeds", one)

    def command(self) -> str:
        """The command line that gives these settings: every flag that is not at its default."""
        return command_line("compare", self)

    def trials(self) -> dict[str, PretrainSettings]:
        """The trials by their ids, which are also their folders' names. Raises UserError for a bad value in one."""
        specs = split_specs(self.placements)
        if len(set(specs)) < len(specs):
            raise UserError(f"placements: {self.placements!r} names one twice")
        trials: dict[str, PretrainSettings] = {}
        for spec, rate, seed in self._grid(specs):
            trial = f"{_slug(spec)}-lr{rate!r}-seed{seed}"
            common = {k: v for k, v in self.to_dict().items() if k not in _STUDY_ONLY}
            common |= {"placement": spec, "learning_rate": rate, "seed": seed, "init": self.init.removeprefix("same:")}
            trials[trial] = PretrainSettings(**common, output=str(Path(self.output) / "trials" / trial))
        return trials

    def _grid(self, specs: list[str]) -> Iterator[tuple[str, float, int]]:
        # Seeds outermost: a study that is stopped early has every placement once before any twice.
        for seed in numbers("seeds", self.seeds, int):
            for rate in numbers("learning_rates", self.learning_rates, float):
                for spec in specs:
                    yield spec, rate, seed


def numbers(name: str, text: str, kind: type) -> list:
    """A comma-separated list of different numbers. Raises UserError that names the setting."""
    try:
        values = [kind(part) for part in str(text).split(",") if part.strip()]
    except ValueError:
        values = []
    if not values or len(set(values)) < len(values):
        what = "whole numbers" if kind is int else "numbers"
        raise UserError(f"{name}: {text!r} is not a comma-separated list of different {what}")
    return values


def command_line(command: str, settings: Any) -> str:
    """The command line that gives a settings record: every flag that is not at its default."""
    words = ["lamina", command]
    for entry in fields(settings):
        value = getattr(settings, entry.name)
        default = {} if entry.name == "trainer" else entry.default
        if value == default:
            continue
        flag = f"--{entry.name.replace('_', '-')}"
        if isinstance(value, bool):
            words.append(flag if value else f"--no-{flag[2:]}")
        elif isinstance(value, dict):
            words += [f"{flag}.{key} {shlex.quote(str(item))}" for key, item in value.items()]
        else:
            words += [flag, shlex.quote(str(value))]
    return " ".join(words)


_STUDY_ONLY = {"placements", "learning_rates", "seeds", "workers", "output"}


def _slug(spec: str) -> str:
    """A spec as a folder's name: ``mix_ln(alpha=0.5)`` becomes ``mix_ln-alpha-0.5``."""
    target = re.sub(r"[^(]*/", "", spec)
    slug = re.sub(r"[^\w.]+", "-", target).strip("-.")
    # Two specs that differ in signs or folders only must not share a folder, whatever their order.
    return slug if slug == spec else f"{slug}-{hashlib.sha256(spec.encode()).hexdigest()[:6]}"
