"""The learning rates of a scale: one, a sweep, or a search for the best one of each arm."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal, cast, get_args

from lamina.core.values import is_finite
from lamina.errors import UserError, unknown
from lamina.papers.catalog.entries import known, mapping, read_seeds, whole

Rule = Literal["best", "one-se"]
WIDENINGS = 2
"""How often a sweep is widened whose best rate is at its edge, where the study does not say it."""


@dataclass(frozen=True, kw_only=True)
class Tuning:
    """A search for each arm's best learning rate.

    Attributes:
        rates: each is tried with every tuning seed.
        seeds: the tuning seeds: the first so many of the study's, or a list of others that no claim sees.
        rule: which rate is an arm's: the ``best``, or with ``one-se`` the lowest that is as good but for noise.
        widen: how often a sweep is widened whose best rate is at its edge.
        also: per label of an axis, another label of it. The first's arms are trained at the best rate of the second's,
            too, with all seeds: the papers compare at one rate for all.
    """

    rates: tuple[float, ...]
    seeds: int | tuple[int, ...]
    rule: Rule = "best"
    widen: int = WIDENINGS
    also: Mapping[str, str] = field(default_factory=dict)

    def sweep(self, seeds: tuple[int, ...]) -> tuple[int, ...]:
        """The tuning seeds of a study with these seeds."""
        return seeds[: self.seeds] if isinstance(self.seeds, int) else self.seeds

    def other(self, values: Mapping[str, str]) -> dict[str, str] | None:
        """The values of the arm at whose best rate an arm with these values is trained, too; None if there is none."""
        for axis, label in values.items():
            if label in self.also:
                return {**values, axis: self.also[label]}
        return None


def read_rates(where: str, given: object) -> tuple[tuple[float, ...], Tuning | None]:
    """A scale's ``learning_rate``: the rates of a sweep, or a search. Raises UserError."""
    if given is None:
        return (), None
    if isinstance(given, Mapping):
        place = f"{where}learning_rate: "
        known(place, given, {"tune", "seeds", "rule", "widen", "also"})
        seeds = given.get("seeds", 1)
        if (rule := given.get("rule", "best")) not in get_args(Rule):
            raise unknown(f"rule in {place.strip().rstrip(':')}", str(rule), get_args(Rule))
        pairs = {str(label): str(other) for label, other in mapping(place, given, "also").items()}
        return (), Tuning(
            rates=_numbers(where, given.get("tune")),
            seeds=whole(f"{place}seeds", seeds, 1) if isinstance(seeds, int) else read_seeds(f"{place}seeds", seeds),
            rule=cast(Rule, rule),
            widen=whole(f"{place}widen", given.get("widen", WIDENINGS), 0),
            also=pairs,
        )
    return _numbers(where, given), None


def check_seeds(where: str, tuning: Tuning | None, seeds: tuple[int, ...]) -> None:
    """Raise UserError for tuning seeds that a study with these seeds can't have."""
    if tuning is None:
        return
    if isinstance(tuning.seeds, tuple) and (both := [seed for seed in tuning.seeds if seed in seeds]):
        raise UserError(f"{where}seed {both[0]} tunes the rates (allowed: seeds that are not among {[*tuning.seeds]})")
    if tuning.rule == "one-se" and len(tuning.sweep(seeds)) < 2:
        raise UserError(f"{where}learning_rate: rule: 'one-se' with one tuning seed (allowed: with at least two)")


def check_also(where: str, tuning: Tuning | None, axes: Mapping[str, Mapping[str, object]]) -> None:
    """Raise UserError for an entry of ``also`` whose two labels are not two of one axis."""
    for label, other in ({} if tuning is None else tuning.also).items():
        labels = next((labels for labels in axes.values() if label in labels), None)
        if labels is None:
            raise unknown(
                f"label in {where}learning_rate: also", label, [name for each in axes.values() for name in each]
            )
        if other not in labels or other == label:
            rest = [name for name in labels if name != label]
            raise unknown(f"label in {where}learning_rate: also: {label}", other, rest)


def _numbers(where: str, values: object) -> tuple[float, ...]:
    if not isinstance(values, Sequence) or isinstance(values, str) or not values:
        raise UserError(f"{where}learning_rate: {values!r} (allowed: a list of rates, or tune: with one)")
    read = []
    for value in values:
        number = float(value) if isinstance(value, str) and _is_number(value) else value
        if not is_finite(number) or number <= 0:
            raise UserError(f"{where}learning_rate: {value!r} (allowed: numbers above 0)")
        read.append(float(number))
    if len(set(read)) < len(read):
        raise UserError(f"{where}learning_rate: {values!r} names one twice")
    return tuple(read)


def _is_number(text: str) -> bool:
    try:  # YAML reads 1e-3 as a text
        float(text)
    except ValueError:
        return False
    return True
