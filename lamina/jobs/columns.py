"""The columns of a run's result, for result.json, results.csv, the ranking and the report pages.

To add a number, add a ``Column`` here, and compute the value in ``lamina.training.pretrain``.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Literal


@dataclass(frozen=True)
class Column:
    """A number or text in the result of a run."""

    name: str  # the key in result.json and the column in results.csv
    title: str = ""  # the column's heading on the report pages
    format: str | None = None  # the format of the number on the report pages, or None for a text
    # how the ranking combines the runs with different seeds: "mean", "max", "first" (the first run's value), or "own"
    # (a rule in ``lamina.reports.ranking``). None omits the column from the ranking
    aggregate: Literal["mean", "max", "first", "own"] | None = None
    measured: bool = True  # whether every run measures the value
    in_ranking: int = 0  # the sort key of the column in the table of placements. 0 omits the column from this table
    in_trials: bool = False  # whether the table of all runs has the column
    # the column with a fraction. The pages print the fraction as a percentage after this number
    share: str | None = None
    optional: bool = False  # whether the pages omit the column if no run has a value

    @property
    def is_number(self) -> bool:
        return self.format is not None


SCORES = {"accuracy": "accuracy", "top5_accuracy": "top-5 accuracy"}
"""The held-out metrics besides the loss, with their headings on the report pages."""


def _spikes(name: str, title: str, place: int) -> tuple[Column, Column]:
    score = f"{name}_spike_score"
    count = Column(f"{name}_spikes", title, ".3g", "mean", in_ranking=place, in_trials=True, share=score, optional=True)
    return count, Column(score, format=".2g", aggregate="mean")


# In the order of results.csv, which is also the order of the table of trials.
RESULT_COLUMNS: tuple[Column, ...] = (
    Column("trial", "trial", measured=False, in_trials=True),
    Column("placement", "placement", aggregate="first", in_ranking=10, measured=False, in_trials=True),
    Column("learning_rate", "learning rate", "g", "first", in_ranking=60, measured=False, in_trials=True),
    Column("seed", "seed", ".0f", measured=False, in_trials=True),
    Column("init", "init", aggregate="first", in_ranking=70, in_trials=True),
    Column("status", "status", aggregate="own", in_ranking=20, in_trials=True),
    Column("eval_loss", "eval loss", ".4f", "own", in_ranking=30, in_trials=True),
    Column("perplexity", "perplexity", ".2f", "mean", in_ranking=40, in_trials=True, optional=True),
    Column("bits_per_byte", "bits/byte", ".3f", "mean", in_ranking=50, optional=True),
    Column(  # measured only with --eval-corpus
        "eval_corpus_loss",
        "loss on the second corpus",
        ".4f",
        "mean",
        measured=False,
        in_ranking=45,
        in_trials=True,
        optional=True,
    ),
    *(  # measured only by objectives that score predictions
        Column(name, title, ".2%", "mean", measured=False, in_ranking=place, in_trials=True, optional=True)
        for name, title, place in zip(SCORES, SCORES.values(), (32, 34), strict=True)
    ),
    *_spikes("loss", "loss spikes", 80),
    *_spikes("gradient", "gradient spikes", 90),
    Column("loss_surges", "loss surges", ".3g", "mean"),
    Column("gradient_surges", "gradient surges", ".3g", "mean"),
    Column("unigram_entropy", "unigram entropy", ".2f", "mean"),
    Column("bigram_entropy", "bigram entropy", ".3f", "mean", in_ranking=35, in_trials=True, optional=True),
    Column("tokens", "tokens", ",.0f", "mean", in_ranking=100, in_trials=True),
    Column("steps", "steps", ",.0f", "mean", in_trials=True),
    Column("seconds", "seconds", ",.0f", "mean", in_ranking=120, measured=False, in_trials=True),
    Column("tokens_per_second", "tokens/s", ",.0f", "mean", in_ranking=110),
    Column("mfu", "MFU", ".1%", "mean", measured=False, in_ranking=115, optional=True),  # only for known GPUs
    Column("parameters", "parameters", ",.0f", "max"),
    Column("flops", "FLOPs", ".3g", "max"),
    # Only for trials of `lamina max-lr`: ``lamina.studies.max_rate_rules`` adds these columns.
    Column("max_learning_rate", "largest learning rate", ".3g", measured=False, optional=True),
    Column("stop_rule", "stopped by", measured=False, optional=True),
    Column("loss_at_stop", "loss at the largest learning rate", ".3f", measured=False, optional=True),
    Column("reason", "reason", aggregate="own", in_trials=True),
)
BESIDES = ("from", "mix", "tasks")
"""The optional fields of result.json that have no column in results.csv."""


def names(columns: Iterable[Column] = RESULT_COLUMNS) -> tuple[str, ...]:
    return tuple(column.name for column in columns)


def aggregated(aggregate: str) -> tuple[str, ...]:
    """Return the names of the columns that the ranking combines by the rule ``aggregate``."""
    return names(column for column in RESULT_COLUMNS if column.aggregate == aggregate)


TEXTS = names(column for column in RESULT_COLUMNS if not column.is_number)
NUMBERS = names(column for column in RESULT_COLUMNS if column.is_number)
SPIKES = names(column for column in RESULT_COLUMNS if "_spike" in column.name or "_surges" in column.name)
RANKING = tuple(
    sorted((column for column in RESULT_COLUMNS if column.in_ranking), key=lambda column: column.in_ranking)
)
TRIALS = tuple(column for column in RESULT_COLUMNS if column.in_trials)


def checked(result: dict[str, object]) -> dict[str, object]:
    """Return a result. Raises KeyError if a measured column has no value, or if a value has no column."""
    measured = {column.name for column in RESULT_COLUMNS if column.measured}
    missing, extra = measured - set(result), set(result) - {*names(), *BESIDES}
    if missing or extra:
        raise KeyError(
            f"result.json: {sorted(missing)} have no value, and {sorted(extra)} have no column "
            "(lamina/jobs/columns.py and lamina/training/pretrain.py must agree)"
        )
    return result
