"""The columns of a run's result, each declared once: result.json, results.csv, the ranking and the pages use them.

To add a scalar, add its ``Column`` here and its value in ``lamina.training.pretrain``; nothing else. A value without a
column, or a column without a value, is an error when the first run ends.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Literal


@dataclass(frozen=True, kw_only=True)
class Column:
    """A number or a text that each trial has.

    Attributes:
        name: its key in result.json and its column in results.csv.
        title: its heading on the pages.
        format: how the pages print the number; None for a text.
        aggregate: how the ranking combines a placement's seeds: their mean or maximum, the first seed's text, or
            a value that ``lamina.reports.ranking`` computes itself ("own"); None: the ranking omits the column.
        measured: whether ``outcome`` measures it; the others come from the settings or from whoever runs the trial.
        in_ranking: its position in the table of placements, from the left; 0 for a column that is not in it.
        in_trials: whether it is in the table of all trials.
        share: the column whose number follows this one, as a percentage.
        optional: whether the pages omit it if no trial has it.
    """

    name: str
    title: str = ""
    format: str | None = None
    aggregate: Literal["mean", "max", "first", "own"] | None = None
    measured: bool = True
    in_ranking: int = 0
    in_trials: bool = False
    share: str | None = None
    optional: bool = False

    @property
    def is_number(self) -> bool:
        """Whether its values are numbers."""
        return self.format is not None


SCORES = {"accuracy": "accuracy", "top5_accuracy": "top-5 accuracy"}
"""What an objective may measure on held-out items beside the loss, with the heading of each."""


def _spikes(name: str, title: str, place: int) -> tuple[Column, Column]:
    score = f"{name}_spike_score"
    count = Column(
        name=f"{name}_spikes",
        title=title,
        format=".3g",
        aggregate="mean",
        in_ranking=place,
        in_trials=True,
        share=score,
        optional=True,
    )
    return count, Column(name=score, format=".2g", aggregate="mean")


# In the order of results.csv, which is also the order of the table of trials.
RESULT_COLUMNS: tuple[Column, ...] = (
    Column(name="trial", title="trial", measured=False, in_trials=True),
    Column(name="placement", title="placement", aggregate="first", in_ranking=10, measured=False, in_trials=True),
    Column(
        name="learning_rate",
        title="learning rate",
        format="g",
        aggregate="first",
        in_ranking=60,
        measured=False,
        in_trials=True,
    ),
    Column(name="seed", title="seed", format=".0f", measured=False, in_trials=True),
    Column(name="init", title="init", aggregate="first", in_ranking=70, in_trials=True),
    Column(name="status", title="status", aggregate="own", in_ranking=20, in_trials=True),
    Column(name="eval_loss", title="eval loss", format=".4f", aggregate="own", in_ranking=30, in_trials=True),
    Column(
        name="perplexity",
        title="perplexity",
        format=".2f",
        aggregate="mean",
        in_ranking=40,
        in_trials=True,
        optional=True,
    ),
    Column(name="bits_per_byte", title="bits/byte", format=".3f", aggregate="mean", in_ranking=50, optional=True),
    Column(
        name="eval_corpus_loss",
        title="loss on the second corpus",
        format=".4f",
        aggregate="mean",
        measured=False,  # only with --eval-corpus
        in_ranking=45,
        in_trials=True,
        optional=True,
    ),
    *(
        Column(
            name=name,
            title=title,
            format=".2%",
            aggregate="mean",
            measured=False,  # only with objectives that score predictions
            in_ranking=place,
            in_trials=True,
            optional=True,
        )
        for name, title, place in zip(SCORES, SCORES.values(), (32, 34), strict=True)
    ),
    *_spikes("loss", "loss spikes", 80),
    *_spikes("gradient", "gradient spikes", 90),
    Column(name="loss_surges", title="loss surges", format=".3g", aggregate="mean"),
    Column(name="gradient_surges", title="gradient surges", format=".3g", aggregate="mean"),
    Column(name="unigram_entropy", title="unigram entropy", format=".2f", aggregate="mean"),
    Column(
        name="bigram_entropy",
        title="bigram entropy",
        format=".3f",
        aggregate="mean",
        in_ranking=35,
        in_trials=True,
        optional=True,
    ),
    Column(name="tokens", title="tokens", format=",.0f", aggregate="mean", in_ranking=100, in_trials=True),
    Column(name="steps", title="steps", format=",.0f", aggregate="mean", in_trials=True),
    Column(
        name="seconds", title="seconds", format=",.0f", aggregate="mean", in_ranking=120, measured=False, in_trials=True
    ),
    Column(name="tokens_per_second", title="tokens/s", format=",.0f", aggregate="mean", in_ranking=110),
    Column(name="parameters", title="parameters", format=",.0f", aggregate="max"),
    Column(name="flops", title="FLOPs", format=".3g", aggregate="max"),
    # Of the trials of `lamina max-lr` only: ``lamina.training.monitor.max_rate_rules`` adds them.
    Column(name="max_learning_rate", title="largest learning rate", format=".3g", measured=False, optional=True),
    Column(name="stop_rule", title="stopped by", measured=False, optional=True),
    Column(name="loss_at_stop", title="loss there", format=".3f", measured=False, optional=True),
    Column(name="reason", title="reason", aggregate="own", in_trials=True),
)
NOTES = ("from", "mix", "tasks")
"""What result.json holds besides the columns, for some runs."""


def names(columns: Iterable[Column] = RESULT_COLUMNS) -> tuple[str, ...]:
    """The names of these columns, in their order."""
    return tuple(column.name for column in columns)


def aggregated(aggregate: str) -> tuple[str, ...]:
    """List the columns that the ranking aggregates in this way."""
    return names(column for column in RESULT_COLUMNS if column.aggregate == aggregate)


TEXTS = names(column for column in RESULT_COLUMNS if not column.is_number)
NUMBERS = names(column for column in RESULT_COLUMNS if column.is_number)
SPIKES = names(column for column in RESULT_COLUMNS if "_spike" in column.name or "_surges" in column.name)
RANKING = tuple(
    sorted((column for column in RESULT_COLUMNS if column.in_ranking), key=lambda column: column.in_ranking)
)
TRIALS = tuple(column for column in RESULT_COLUMNS if column.in_trials)


def checked(result: dict[str, object]) -> dict[str, object]:
    """Return ``result``. Raises KeyError if a measured column has no value, or a value has no column."""
    measured = {column.name for column in RESULT_COLUMNS if column.measured}
    missing, extra = measured - set(result), set(result) - measured - {"eval_corpus_loss", *SCORES, *NOTES}
    if missing or extra:
        raise KeyError(
            f"result.json: no value for {sorted(missing)} and no column for {sorted(extra)} "
            "(lamina/jobs/columns.py and lamina/training/pretrain.py must agree)"
        )
    return result
