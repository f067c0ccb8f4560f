"""Find out whether the name of a series means a loss, gradient norm, learning rate, step, epoch or parameter."""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable, Mapping
from functools import cache
from typing import NamedTuple

from lamina.training.monitor.writers import LOSS, NORM

RATE = "learning_rate"
STEPS = (
    "trainer_global_step", "train_global_step", "training_global_step", "global_step_max_steps", "global_step",
    "num_updates", "current_steps", "optimizer_step", "train_step", "step", "steps", "iteration", "iterations",
    "iter", "iter_num", "time_batch", "batch", "ba", "update", "updates", "timestep", "_step", "progress_bar",
)  # fmt: skip
"""Names of columns with steps, in the form that ``plain`` returns. The first name in this list wins."""
EPOCHS = ("epoch", "train_epoch", "ep", "pass")
"""Names of columns with epochs. If a record has no steps, the epochs are the steps."""
EPOCH_STEPS = "_steps of an epoch"
"""The name of the series with the number of steps per epoch. Only a console's lines give this series."""
RUNS = ("run", "run_name", "run_id", "runid", "experiment", "trial_id")
"""Names of columns that tell which run a line belongs to."""
TIMES = ("timestamp", "_timestamp", "_runtime", "wall_time", "time", "created_at")


def _set(words: str) -> frozenset[str]:
    return frozenset(words.split())


_NEUTRAL = _set(
    "train training trainer metric metrics step steps batch global avg average mean reduced learning learner "
    "out running current log logs stats statistics per token tokens micro iter iteration objective performance perf "
    "rank opt optim optimizer optimization monitor state history main task total tot all overall"
)
_HELD_OUT = _set("eval evals evaluation val valid validation test dev heldout holdout best")
_GRADIENT = _set("grad grads gradient gradients gnorm gradnorm")
_LOSSES = _set("loss losses nll ce xent lm trl cost")
_SIDE = _set(
    "aux auxiliary balance balancing lb z zloss router entropy kl reg regularization mtp vf value critic commit "
    "commitment load penalty"
)
_NO_LOSS = _set("scale scaler weight weights coef coefficient ratio std var slope patience delta gap num count")
_RATED = {"lm": 0, "language": 0, "ce": 1, "cross": 1, "xent": 1, "nll": 2}
_PART = 5
"""The rank of a loss that may be only a part of the total loss, such as box_loss."""
_UNCLIPPED = _set("raw unclipped before pre preclip unclip")
_CLIPPED = _set("after clipped post postclip")
_POWERS = _set("l2 2norm 0 1 2")
_NO_RATE = _set("min max decay ratio warmup")


_STEP_WORDS = _set("step steps iter iteration iterations update updates batch episode episodes timesteps")
_NO_STEP = _set("per size ms s sec time number num skipped nan remaining left max warmup progress") | _HELD_OUT
OTHER = _set("epoch eval val valid validation test system perf time wall timestamp runtime")
"""Words in the names of series about the machine, the evaluation or the time."""


class Whole(NamedTuple):
    """A metric of the whole model, with the rank of its series. Lamina uses the series with the lowest rank."""

    metric: str
    rank: int


def words_of(name: str) -> list[str]:
    """Return a name's words in lower case: "optim/LR (group 0)" has optim, lr, group and 0."""
    apart = re.sub(r"(?<=[a-z])(?=[A-Z][a-z])", "_", name.replace("gNorm", "gnorm").replace("L.r.", "lr"))  # Marian's
    joined = re.sub(r"(?<=[a-z0-9])(?=loss(?:es)?(?![a-z]))", "_", apart.lower())  # trainloss, logloss, closs
    return [word for word in re.split(r"[^a-z0-9]+", joined) if word]


@cache
def step_rank(name: str) -> int | None:
    """Return the rank of a column with steps (lowest is best), or None for any other column."""
    known = plain(name)
    if known in STEPS or (known != "train_batch" and (known := known.removeprefix("train_")) in STEPS):
        return STEPS.index(known)
    words = words_of(name)
    named = bool(words) and words[-1] in _STEP_WORDS and not set(words) & _NO_STEP
    return len(STEPS) if named and whole(name) is None else None  # loss_step is a loss


@cache
def plain(name: str) -> str:
    """Return a column's name in lower case, with underscores for characters other than letters and digits."""
    return re.sub(r"[^a-z0-9]+", "_", name.lower()).removesuffix("_")


@cache
def whole(name: str) -> Whole | None:
    """Return the metric of the whole model that a name means, or None if the name means no such metric."""
    words = words_of(name)
    if not words or _HELD_OUT & set(words):
        return None
    return _loss(words) or _norm(words) or _rate(words)


def is_whole_loss(name: str) -> bool:
    """Return whether a name means the task's training loss, or a part of this loss."""
    return (known := whole(name)) is not None and known.metric == LOSS


def is_loss(name: str) -> bool:
    """Return whether a name means a training loss: the task's loss, or an additional loss such as a z loss."""
    words = set(words_of(name))
    named = bool(words & {"loss", "losses"}) and not words & (_HELD_OUT | _NO_LOSS | _GRADIENT)
    return named or is_whole_loss(name)


def are_opposed(name: str, others: Iterable[str]) -> bool:
    """Return whether any loss belongs to a GAN's discriminator, which trains against the other losses."""
    losses = {other: set(words_of(other)) for other in filter(is_loss, {name, *others})}
    named = any(words & _set("disc discriminator") for words in losses.values())
    sides = (_set("g gen generator"), _set("d dis"))
    return len(losses) > 1 and (named or all(any(words & side for words in losses.values()) for side in sides))


def parts_of(name: str, others: Collection[str]) -> list[str]:
    """Return the names of a loss's parts, which differ in one word (box_loss, cls_loss, dfl_loss), or []."""
    if (known := whole(name)) is None or known.rank != _PART or are_opposed(name, others):
        return []
    words = words_of(name)
    parts = [
        other
        for other in others
        if len(own := words_of(other)) == len(words)
        and sum(a != b for a, b in zip(own, words, strict=True)) < 2
        and whole(other) == known
    ]
    return parts if len(parts) > 2 else []


def _loss(words: list[str]) -> Whole | None:
    some = set(words)
    crossed = {"cross", "entropy"} <= some
    if not (some & _LOSSES or crossed) or some & (_NO_LOSS | _GRADIENT):
        return None
    if some & (_SIDE - ({"entropy"} if crossed else set())):
        return None
    if not some & {"loss", "losses"} and not crossed and some - _NEUTRAL - _LOSSES:
        return None  # "lm" and "ce" are parts of other names, too
    if "cost" in some and some - {"cost", "train", "training", "total", "current"}:
        return None  # batch_cost is a time
    if some & {"max", "min", "ema", "smooth", "smoothed", "last"}:
        return Whole(LOSS, 7)
    kinds = [rank for word, rank in _RATED.items() if word in some]
    rest = some - _NEUTRAL - _LOSSES - {"model", "cross", "entropy", *_RATED}
    return Whole(LOSS, min(kinds) if kinds and not rest else _PART if rest else 4 if some & {"total", "tot"} else 3)


def _norm(words: list[str]) -> Whole | None:
    some = set(words)
    rest = some - _NEUTRAL - _GRADIENT - _UNCLIPPED - _CLIPPED - _POWERS - {"norm", "norms", "clip", "clipping"}
    rest -= {"actor", "policy", "critic", "model"} if some & _GRADIENT and words[-1] != "model" else set()
    if rest or not some & (_GRADIENT | {"norm"}) or some & {"num", "max", "min", "std"}:
        return None
    named = bool(some & {"norm", "norms", "gnorm", "gradnorm"} or (some & _GRADIENT and "total" in some))
    if some & _GRADIENT and named and ("clip" not in some or some & (_UNCLIPPED | {"norm"})):
        return Whole(NORM, 0 if some & _UNCLIPPED else 3 if some & (_CLIPPED | {"critic"}) else 1)
    return Whole(NORM, 5) if not some & {"clip", "clipping"} else None


def _rate(words: list[str]) -> Whole | None:
    some = set(words)
    if not ("lr" in some or "lrm" in some or {"learning", "rate"} <= some) or some & _NO_RATE:
        return None
    numbers = [int(word) for word in words if word.isdigit() and len(word) < 4]
    return Whole(RATE, numbers[-1] if numbers else 0)


_AFTER = re.compile(
    r"(?P<before>.+?)[/._ ](?:l2[_-]?)?(?P<kind>grad(?:ient)?)(?:[-_./]?(?:l2[-_]?)?norm)?$", re.IGNORECASE
)
_BEFORE = re.compile(
    r"(?:.*/)?(?:(?P<kind>grad(?:ient)?|param(?:eter)?|weight)s?(?:[-_ ]?(?:[\d.]+|l2)?[-_ ]?norms?)?)"
    r"(?:[/.](?:l2_?)?norms?)?[/._ ](?P<name>.+)",
    re.IGNORECASE,
)
_OTHER = re.compile(
    r"(?:.*/)?(?:updates?|moments?|hist|opt_state|cosine)(?:[-_ ]?norms?)?/|"
    r".*[/._ -](?:mean|std|var|min|max|l1(?:[-_]?norm)?)$",
    re.IGNORECASE,
)
_SETTING = re.compile(r"(?:.*/)?(?:grad(?:ient)?|weight|param(?:eter)?)s?_[a-z_]+", re.IGNORECASE)
"""grad_scale, weight_decay"""


@cache
def parameter_of(name: str) -> tuple[str, str] | None:
    """Return the metric and the parameter in a series' name (gradients/NAME, NAME.grad), or None for other names."""
    if _OTHER.match(name):
        return None
    if (match := _AFTER.fullmatch(name)) is not None:
        return "gradient_norm", _inner(match["before"])
    if (match := _BEFORE.fullmatch(name)) is not None and not _SETTING.fullmatch(name):
        kind = "gradient_norm" if match["kind"].lower().startswith("grad") else "weight_norm"
        return kind, _inner(match["name"])
    return None


def _inner(name: str) -> str:
    return re.sub(r"[./_](l2_?)?norm$", "", name)


def best(names: Mapping[str, tuple[Whole, int]], loss: str = "") -> str:
    """Choose one of several series with the same metric. ``names`` maps a series to its rank and number of values.

    If several series are equally good, prefer a series of the same part of the model as the series ``loss``.
    """
    most = max(length for _, length in names.values())
    long = [name for name, (_, length) in names.items() if 2 * length >= most]
    ranks = {names[name][0].rank for name in long if names[name][0].metric == LOSS}
    if {3, 4} & ranks and _PART in ranks:  # of a sum, a part's CE is no whole
        long = [name for name in long if names[name][0].rank > 2]
    part = set(words_of(loss)) - _LOSSES - _NEUTRAL
    trained = {name: "train" in name.lower() for name in long}  # a bare "loss" beside it may be an evaluation's
    return min(
        long, key=lambda name: (names[name][0].rank, not part & {*words_of(name)}, not trained[name], len(name), name)
    )
