"""What `lamina compare` can be told."""

from __future__ import annotations

import hashlib
import math
import re
import shlex
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, fields
from itertools import zip_longest
from pathlib import Path
from typing import Any

from lamina.core.values import path, seed_number, whole_number
from lamina.errors import UserError, unknown
from lamina.placements.resolution import split_specs
from lamina.training.settings import PretrainSettings, RunSettings

DEFAULT_PLACEMENTS = "post_ln,pre_ln,peri_ln,mix_ln,fusenorm,keel"


@dataclass(frozen=True, kw_only=True)
class CompareSettings(RunSettings):
    """Settings of a comparison: every placement at every learning rate and seed is a trial.

    Args:
        placements: comma-separated: names (see `lamina placements`), name(option=value, ...), YAML or Python files
            (a Python file runs as code)
        learning_rates: comma-separated peak learning rates; each placement is ranked at its best one
        learning_rates_of: placements with rates of their own in place of these: "keel=3e-3,1e-2; post_ln=1e-4,1e-3"
            (in YAML and Python also a mapping from the placement to its rates)
        seeds: comma-separated seeds
        init: one initialiser for all: same:NAME with NAME as in --init of `lamina pretrain`; or recommended, which
            gives each placement its own and so compares the two together
        output: the study's folder
        workers: trials that run at a time, each in a process of its own (default: one a core)
    """

    placements: str | tuple[str, ...] = DEFAULT_PLACEMENTS
    learning_rates: str | float | tuple[float | str, ...] = "5e-3"
    learning_rates_of: str | dict[str, Any] = ""
    seeds: str | int | tuple[int | str, ...] = "0"
    init: str = "same:scaled"
    output: str = "runs/compare"
    workers: int | None = None

    def __post_init__(self) -> None:
        """Raise UserError that names the setting whose value has no meaning."""
        super().__post_init__()
        for name in ("placements", "learning_rates", "seeds"):
            object.__setattr__(self, name, comma_separated(name, getattr(self, name)))
        if self.workers is not None:
            whole_number("workers", self.workers)
        object.__setattr__(self, "output", path("output", self.output))
        if not self.specs:
            raise UserError("placements: none given (see `lamina placements` for the names)")
        numbers("learning_rates", self.learning_rates, float)
        for one in numbers("seeds", self.seeds, int):
            seed_number("seeds", one)
        own = self._own_rates()
        object.__setattr__(self, "learning_rates_of", "; ".join(f"{spec}={rates}" for spec, rates in own.items()))

    @property
    def specs(self) -> list[str]:
        """The placements, one by one."""
        return split_specs(str(self.placements))

    def rates(self, spec: str) -> list[float]:
        """The learning rates of one of the placements: its own, or those of all."""
        own = self._own_rates().get(spec)
        return numbers("learning_rates" if own is None else "learning_rates_of", own or self.learning_rates, float)

    def _own_rates(self) -> dict[str, str]:
        """Comma-separated rates by placement. Raises UserError for one that is not compared, or not a list of rates."""
        given = self.learning_rates_of
        if isinstance(given, str):  # the last "=": the options in a placement's brackets have theirs
            parts = [part.rpartition("=") for part in given.split(";") if part.strip()]
            given = {name.strip(): rates for name, _, rates in parts}
            if not all(equals for _, equals, _ in parts):
                raise UserError(f"learning_rates_of: {self.learning_rates_of!r} (allowed: PLACEMENT=RATES; ...)")
            if len(given) < len(parts):
                raise UserError(f"learning_rates_of: {self.learning_rates_of!r} names a placement twice")
        if not isinstance(given, Mapping):
            raise UserError(f"learning_rates_of: {given!r} (allowed: a mapping, or PLACEMENT=RATES; ...)")
        own = {}
        for name, rates in given.items():
            if name not in self.specs:
                raise unknown("placement in learning_rates_of", str(name), self.specs)
            own[name] = comma_separated("learning_rates_of", rates).strip()
            numbers("learning_rates_of", own[name], float)
        return own

    def command(self) -> str:
        """The command line that gives these settings: every flag that is not at its default."""
        return command_line("compare", self)

    def trials(self) -> dict[str, PretrainSettings]:
        """The trials by their ids, which are also their folders' names. Raises UserError for a bad value in one."""
        if len(set(self.specs)) < len(self.specs):
            raise UserError(f"placements: {self.placements!r} names one twice")
        trials: dict[str, PretrainSettings] = {}
        for spec, rate, seed in self._grid():
            trial = f"{_slug(spec)}-lr{rate!r}-seed{seed}"
            common = {k: v for k, v in self.to_dict().items() if k not in _STUDY_ONLY}
            common |= {"placement": spec, "learning_rate": rate, "seed": seed, "init": self.init.removeprefix("same:")}
            trials[trial] = PretrainSettings(**common, output=str(Path(self.output) / "trials" / trial))
        return trials

    def _grid(self) -> Iterator[tuple[str, float, int]]:
        rates = {spec: self.rates(spec) for spec in self.specs}
        # Seeds outermost: a study that is stopped early has every placement once before any twice.
        for seed in numbers("seeds", self.seeds, int):
            for row in zip_longest(*rates.values()):
                for spec, rate in zip(rates, row, strict=True):
                    if rate is not None:
                        yield spec, rate, seed


def comma_separated(name: str, value: Any) -> str:
    """A list as it is written on the command line; what is written so already stays. Raises UserError otherwise."""
    number = isinstance(value, int | float) and not isinstance(value, bool) and name != "placements"
    if isinstance(value, str) or number:
        return str(value)
    if isinstance(value, Mapping | bytes | bytearray | memoryview) or not isinstance(value, Iterable):
        raise UserError(f"{name}: {value!r} (allowed: a list, or text with commas between the entries)")
    return ",".join(str(part) for part in value)


def numbers(name: str, text: Any, kind: type) -> list:
    """A comma-separated list of different numbers. Raises UserError that names the setting."""
    try:
        values = [kind(part) for part in str(text).split(",") if part.strip()]
    except ValueError:
        values = []
    if not values or len(set(values)) < len(values) or (kind is float and not all(map(math.isfinite, values))):
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


_STUDY_ONLY = {"placements", "learning_rates", "learning_rates_of", "seeds", "workers", "output"}


def _slug(spec: str) -> str:
    """A spec as a folder's name: ``mix_ln(alpha=0.5)`` becomes ``mix_ln-alpha-0.5``."""
    target = re.sub(r"[^(]*/", "", spec)
    slug = re.sub(r"[^\w.]+", "-", target).strip("-.")
    # Two specs that differ in signs or folders only must not share a folder, whatever their order.
    return slug if slug == spec else f"{slug}-{hashlib.sha256(spec.encode()).hexdigest()[:6]}"
