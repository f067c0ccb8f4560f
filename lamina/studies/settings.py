"""The settings of `lamina compare`."""

from __future__ import annotations

import hashlib
import re
from collections.abc import Iterator, Mapping
from itertools import zip_longest
from pathlib import Path

from lamina.core.initializers import SAME, SUITS
from lamina.core.json_types import Json
from lamina.core.values import Numbers, comma_separated, numbers, seed_number, takes
from lamina.errors import UserError, unknown
from lamina.jobs.setting_groups import OutputSettings, WorkerSettings
from lamina.jobs.settings import Settings, changed, setting
from lamina.training.settings import PlacementsSettings, PretrainSettings, RatesSettings, RunSettings, rate_list


@takes(Numbers)
def seed_list(name: str, value: object) -> str:
    """Comma-separated seeds, at least one and none twice."""
    listed = comma_separated(name, value)
    for seed in numbers(name, listed, int):
        seed_number(name, seed)
    return listed


class SeedsSettings(Settings, group="steps and learning rate"):
    """The seeds to try."""

    seeds: str | int | tuple[int | str, ...] = setting("0", "comma-separated seeds", seed_list, decides=False)

    @property
    def all_seeds(self) -> list[int]:
        """The seeds as a list."""
        return numbers("seeds", self.seeds, int)


def rates_by_placement(name: str, value: object) -> str | dict[str, str]:
    """A mapping from placements to comma-separated rates, or its text form."""
    if isinstance(value, str):
        return value
    if not isinstance(value, Mapping):
        raise UserError(f"{name}: {value!r} (allowed: a mapping, or PLACEMENT=RATES; ...)")
    return {str(placement): comma_separated(name, rates) for placement, rates in value.items()}


class CompareSettings(RunSettings, PlacementsSettings, RatesSettings, SeedsSettings, OutputSettings, WorkerSettings):
    """A comparison: every placement at every learning rate and seed is a trial."""

    command_name = "compare"
    main = (
        *("placements", "corpus", "tokenizer", "backbone", "num_layers", "hidden_size"),
        *("steps", "learning_rates", "seeds", "output"),
    )
    order = (*RunSettings.names(), "placements", "learning_rates", "learning_rates_of")

    backbone: str = changed("llama-micro")
    steps: int = changed(240)
    batch_size: int = changed(8)
    placements: str | tuple[str, ...] = changed("post_ln,pre_ln,peri_ln,mix_ln,fusenorm,keel")
    learning_rates: str | float | tuple[float | str, ...] = changed(
        "3e-3", help="comma-separated peak learning rates; each placement is ranked at its best one"
    )
    learning_rates_of: str | Json = setting(
        "",
        'placements with their own rates instead of these: "keel=3e-3,1e-2; post_ln=1e-4,1e-3" (in YAML and Python '
        "also a mapping from placements to rates)",
        rates_by_placement,
        decides=False,
    )
    init: str = changed(
        SAME + SUITS,
        help="one initializer for all: same:NAME (of `lamina pretrain --init`); or recommended: each placement's "
        "own, which compares both together",
    )
    output: str = changed("runs/compare")

    def check(self) -> None:
        """Raise UserError for rates of a placement that is not compared; normalizes the text of the rates."""
        super().check()
        own = self._own_rates()
        object.__setattr__(self, "learning_rates_of", "; ".join(f"{spec}={rates}" for spec, rates in own.items()))

    def rates(self, spec: str) -> list[float]:
        """The learning rates of a placement: its own, or the common ones."""
        own = self._own_rates().get(spec)
        return numbers("learning_rates" if own is None else "learning_rates_of", own or self.learning_rates, float)

    def _own_rates(self) -> dict[str, str]:
        """Comma-separated rates by placement. Raises UserError for one that is not compared, and for invalid rates."""
        rates_of = self.learning_rates_of
        if isinstance(rates_of, str):  # the last "=": a placement's options contain others
            parts = [part.rpartition("=") for part in rates_of.split(";") if part.strip()]
            if not all(equals for _, equals, _ in parts):
                raise UserError(f"learning_rates_of: {rates_of!r} (allowed: PLACEMENT=RATES; ...)")
            by_name = {name.strip(): rates for name, _, rates in parts}
            if len(by_name) < len(parts):
                raise UserError(f"learning_rates_of: {rates_of!r} names a placement twice")
        else:
            by_name = rates_of
        own = {}
        for name, rates in by_name.items():
            if name not in self.specs:
                raise unknown("placement in learning_rates_of", name, self.specs)
            own[name] = rates.strip()
            rate_list("learning_rates_of", own[name])
        return own

    def trials(self) -> dict[str, PretrainSettings]:
        """The trials by id, which is also the folder's name. Raises UserError for an invalid value in one."""
        trials: dict[str, PretrainSettings] = {}
        common = self.shared_with(PretrainSettings) | {"init": self.init.removeprefix(SAME)}
        for spec, rate, seed in self._grid():
            trial = f"{slug(spec)}-lr{rate!r}-seed{seed}"
            varied = {"placement": spec, "learning_rate": rate, "seed": seed}
            folder = str(Path(self.output) / "trials" / trial)
            trials[trial] = PretrainSettings(**{**common, **varied, "output": folder})
        return trials

    def _grid(self) -> Iterator[tuple[str, float, int]]:
        rates = {spec: self.rates(spec) for spec in self.specs}
        # Seeds outermost: a study that stops early has every placement once before any twice.
        for seed in self.all_seeds:
            for row in zip_longest(*rates.values()):
                for spec, rate in zip(rates, row, strict=True):
                    if rate is not None:
                        yield spec, rate, seed


def slug(spec: str) -> str:
    """A spec as a folder's name: ``mix_ln(alpha=0.5)`` becomes ``mix_ln-alpha-0.5``."""
    target = re.sub(r"[^(]*/", "", spec)
    slug = re.sub(r"[^\w.]+", "-", target).strip("-.")
    # Two specs that differ only in signs or folders must not share a folder, whatever their order.
    return slug if slug == spec else f"{slug}-{hashlib.sha256(spec.encode()).hexdigest()[:6]}"
