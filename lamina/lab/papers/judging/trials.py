"""Give claims access to the results and measurements of a study's runs."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TypeAlias

from lamina.core.frames import Frame
from lamina.errors import nearest
from lamina.jobs.status import Status

Reader: TypeAlias = Callable[[str, str, str], Frame | None]
"""Maps a run's key, a probe's or record's name, and a time ("init", "end" or "records") to a table, or to None."""
Arm: TypeAlias = str | Mapping[str, object]
"""A configuration: a label such as "keel", or a mapping such as {"placement": "keel", "num_layers": 8}."""

NO_ARM = ("learning_rate", "seed")  # axes that do not define a configuration


class NotMeasured(LookupError):
    """Raised if a claim asks for something that the study does not measure."""


@dataclass
class Reads:
    """The columns and tables that a claim has read.

    Attributes:
        columns: the names of columns and tables, by the run's key. "*" means all columns. Tables of untrained models do
            not count.
        chose_rate: whether the claim chose a learning rate from the results.
    """

    columns: dict[str, set[str]] = field(default_factory=dict)
    chose_rate: bool = False


class Trials:
    """The runs of a study, or some of the runs.

    Args:
        table: one row per run. The columns are the compared settings, the results (``lamina.jobs.columns``), seed,
            learning_rate and key. "tuned" is true for a run with a seed of the study and the chosen learning rate.
            "at_edge" is true if the best learning rate is the lowest or highest that ran.
        axes: the names of the compared settings.
        scale: cpu, gpu or paper.
        measures: a function that returns the tables of probes and records.
    """

    def __init__(
        self,
        table: Frame,
        *,
        axes: Sequence[str],
        scale: str = "cpu",
        measures: Reader | None = None,
        reads: Reads | None = None,
    ) -> None:
        self._table, self.axes, self.scale = table.reset_index(drop=True), tuple(axes), scale
        self._measures = measures
        self.reads = Reads() if reads is None else reads

    @property
    def table(self) -> Frame:
        """The rows of all runs. A claim that uses this property counts as having read all columns."""
        self._note("*")
        return self._table

    @property
    def rows(self) -> Frame:
        """The rows of all runs, for Lamina's own code. This property does not count as reading."""
        return self._table

    def choose_rate(self) -> None:
        """Record that the claim chose a learning rate from the results."""
        self.reads.chose_rate = True

    def afresh(self) -> Trials:
        """Return the same runs, with no column marked as read."""
        return Trials(self._table, axes=self.axes, scale=self.scale, measures=self._measures)

    def statuses(self) -> Frame:
        """Return the status of each run. In a study without training, all statuses are missing."""
        self._note("status")
        return self._table["status"] if "status" in self._table else self._table["seed"].where(False)

    def __len__(self) -> int:
        return len(self._table)

    def where(self, **values: object) -> Trials:
        """Return the runs with the given values in the given columns. A list of values allows each of these values.

        Raises NotMeasured if no run has the column or the value.
        """
        table = self._table
        for column, value in values.items():
            self._require_column(column)
            allowed = list(value) if isinstance(value, list | tuple | set) else [value]
            present = table[column].unique().tolist()
            if missing := [each for each in allowed if each not in present]:
                raise NotMeasured(f"{column} {missing[0]!r} (measured: {_listed(present)})")
            table = table[table[column].isin(allowed)]
        return self._of(table)

    def tuned(self) -> Trials:
        """Return the runs with the study's seeds and the chosen learning rates. Without a search, return all runs."""
        if "tuned" not in self._table:
            return self
        return self._of(self._table[self._table["tuned"].fillna(False).astype(bool)])

    @property
    def at_edge(self) -> bool:
        """Whether a configuration's best learning rate is the lowest or highest that ran."""
        return "at_edge" in self._table and bool(self._table["at_edge"].fillna(False).astype(bool).any())

    @property
    def arm_axes(self) -> tuple[str, ...]:
        """The compared settings, without learning rate and seed."""
        return tuple(axis for axis in self.axes if axis not in NO_ARM)

    def arms(self) -> list[dict[str, object]]:
        """Return the configurations, as mappings from compared settings to values."""
        axes = list(self.arm_axes)
        return [] if not axes else self._table[axes].drop_duplicates().to_dict("records")

    def values(self, column: str) -> list[object]:
        """Return the distinct values of a column in the table's order. Raises NotMeasured for an unknown column."""
        self._require_column(column)
        return self._table[column].drop_duplicates().tolist()

    @property
    def seeds(self) -> list[int]:
        return sorted(int(seed) for seed in self._table["seed"].unique())

    def arm(self, arm: Arm) -> Trials:
        """Return a configuration's runs. A string is a value of "placement", or a value of another compared setting.

        Raises NotMeasured if no run has this configuration.
        """
        if not isinstance(arm, str):
            return self.where(**arm)
        axes = list(dict.fromkeys([*sorted(self.arm_axes, key=lambda axis: axis != "placement"), "placement"]))
        for axis in axes:
            if axis in self._table and arm in self._table[axis].tolist():
                return self.where(**{axis: arm})
        present = [value for axis in axes if axis in self._table for value in self._table[axis].unique().tolist()]
        raise NotMeasured(f"the arm {arm!r}{nearest(arm, map(str, present))} (measured: {_listed(present)})")

    def by_seed(self, arm: Arm, column: str = "eval_loss") -> Frame:
        """Return a column and the status of a configuration's runs, indexed by seed.

        Raises NotMeasured if the column is unknown, or if a seed has several runs (an ambiguous configuration).
        """
        rows = self.arm(arm)
        rows._require_column(column)
        rows._note(column)
        table = rows._table.set_index("seed")
        if table.index.has_duplicates:
            columns = dict.fromkeys([*self.arm_axes, "learning_rate"])
            axes = [axis for axis in columns if axis in table and table[axis].nunique() > 1]
            raise NotMeasured(
                f"{label(arm)} as one configuration, because its trials differ in {_listed(axes)} (use where)"
            )
        if "status" not in table:
            table = table.assign(status=Status.FINISHED.value)  # nothing was trained, so nothing can have diverged
        return table[list(dict.fromkeys([column, "status"]))].sort_index()

    def measure(self, name: str, at: str = "end") -> Frame:
        """Return a probe's tables of all runs as one table.

        Each row begins with the run's compared settings, placement, learning_rate, seed and key. If a probe's column
        has one of these names, Lamina adds the probe's name as a prefix. Raises NotMeasured if no run has a table of
        the probe.

        Args:
            name: the name in the study's YAML file, or only the probe's name.
            at: the time of the measurement: "init", "end" or "records".
        """
        import pandas as pd

        columns = dict.fromkeys([*self.axes, "placement", "learning_rate", "seed", "key"])
        ahead = [column for column in columns if column in self._table]
        frames = []
        for row in self._table.to_dict("records"):
            frame = None if self._measures is None else self._measures(str(row["key"]), name, at)
            if frame is None:
                continue
            frame = frame.rename(columns={column: f"{name}_{column}" for column in ahead if column in frame})
            if at != "init":
                self.reads.columns.setdefault(str(row["key"]), set()).add(f"{at}/{name}")
            columns_of_trial = pd.DataFrame({column: [row[column]] * len(frame) for column in ahead}, index=frame.index)
            frames.append(pd.concat([columns_of_trial, frame], axis=1))
        if not frames:
            where = "as a training record" if at == "records" else f"at {at}"
            raise NotMeasured(f"{name} {where}")
        return pd.concat(frames, ignore_index=True)

    def record(self, name: str) -> Frame:
        """Return a training record ("metrics", "layers" or "held_out") of all runs as one table, like ``measure``."""
        return self.measure(name, at="records")

    def _of(self, table: Frame) -> Trials:
        return Trials(table, axes=self.axes, scale=self.scale, measures=self._measures, reads=self.reads)

    def _note(self, column: str) -> None:
        for key in self._table.get("key", ()):
            self.reads.columns.setdefault(str(key), set()).add(column)

    def _require_column(self, column: str) -> None:
        if column not in self._table:
            raise NotMeasured(f"the column {column!r}{nearest(column, map(str, self._table.columns))}")


def label(arm: Arm) -> str:
    return arm if isinstance(arm, str) else " ".join(f"{value}" for value in arm.values())


def _listed(values: Sequence[object]) -> str:
    shown = [str(value) for value in values]
    return ", ".join(shown[:12] + (["..."] if len(shown) > 12 else [])) or "nothing"
