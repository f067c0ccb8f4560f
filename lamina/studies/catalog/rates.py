"""The learning rates of a scale: one, a sweep, or a search for the best one of each arm."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from lamina.core.values import is_finite
from lamina.errors import UserError, unknown
from lamina.studies.catalog.entries import known, mapping


@dataclass(frozen=True, kw_only=True)
class Tuning:
    """A search for each arm's best learning rate.

    Attributes:
        rates: each is tried with the first ``seeds`` seeds.
        seeds: how many.
        also: per label of an axis, another label of it. The first's arms are trained at the best rate of the second's,
            too, with all seeds: the papers compare at one rate for all.
    """

    rates: tuple[float, ...]
    seeds: int
    also: Mapping[str, str] = field(default_factory=dict)

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
        known(f"{where}learning_rate: ", given, {"tune", "seeds", "also"})
        seeds = given.get("seeds", 1)
        if isinstance(seeds, bool) or not isinstance(seeds, int) or seeds < 1:
            raise UserError(f"{where}learning_rate: seeds: {seeds!r} (allowed: a whole number of at least 1)")
        also = mapping(f"{where}learning_rate: ", given, "also")
        pairs = {str(label): str(other) for label, other in also.items()}
        return (), Tuning(rates=_numbers(where, given.get("tune")), seeds=seeds, also=pairs)
    return _numbers(where, given), None


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
