"""What the trials of a study can decide: the rules of power, and of rates that were tuned on what is tested.

A claim's code asks for numbers; `Reads` says of which trials. So no claim can forget a rule, and one that reads only
models before training is under none of them.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace

from lamina.core.frames import Frame
from lamina.evaluation.generated import CHANCES
from lamina.papers.judging.checks import NOT_TRAINED, TRAINED
from lamina.papers.judging.findings import MOST, TOO_FEW, Finding, Verdict
from lamina.papers.judging.statistics import t_interval
from lamina.papers.judging.trials import NO_ARM, Reads

ENOUGH = 5  # pairs that must remain without the seeds of the sweep
STAGE = "stage"
_SCORE, _GAIN = "score", "reward_gain"


def judgeable(results: Frame, axes: Sequence[str], tuning: Sequence[int], seeds: Sequence[int]) -> Frame:
    """The rows that claims may read, where the seeds ``tuning`` chose each arm's rate.

    At the chosen rates, those of the study's other ``seeds`` alone; where fewer than 5 of these remain, all rows, with
    True in the column ``tuned_on``. ``rates`` says of each row how many rates its arm was tried at.
    """
    if not tuning or not len(results):
        return results
    results = results.copy()
    arms = _arms(axes)
    swept = results[results["seed"].isin(tuning)]
    for place, rows in swept.groupby(arms, dropna=False) if arms else [((), swept)]:
        of_arm = (results[arms] == place).all(axis=1) if arms else results["seed"].notna()
        results.loc[of_arm, "rates"] = rows["learning_rate"].nunique()
    both = results["tuned"].astype(bool) & results["seed"].isin(tuning)
    return results.assign(tuned_on=both) if len(set(seeds) - set(tuning)) < ENOUGH else results[~both]


def limited(
    finding: Finding,
    results: Frame,
    axes: Sequence[str],
    reads: Reads,
    *,
    exact: bool = False,
    one_learned: bool = False,
) -> Finding:
    """The finding within the rules, given what its claim has read of the ``results``.

    Needs scale: an arm that trains and has not learned more than a bigram table, that is not above chance on the tasks,
    or whose policies have not moved. Inconclusive: a rate that the tested seeds chose, or a best rate at the sweep's
    edge. ``exact``: the claim is an identity of any model, and under no rule. ``one_learned``: one arm past the bigram
    table is enough.
    """
    if exact or not reads.columns or "key" not in results or "status" not in results:
        return finding
    keys = results["key"].astype(str)
    rows = results[keys.isin(list(reads.columns))]
    beyond = results[keys.isin([key for key, columns in reads.columns.items() if columns != {"status"}])]
    arms = _arms(axes)
    for why in dict.fromkeys(
        [
            *_unlearned(beyond, results, arms, enough=one_learned),
            *_by_chance(beyond, arms, reads),
            *_unmoved(beyond, arms),
        ]
    ):
        finding = replace(finding, verdict=Verdict.NEEDS_SCALE).noted(why)
    if finding.verdict == Verdict.NEEDS_SCALE:
        return finding
    for why in _badly_tuned(rows, beyond, arms, reads):
        finding = finding.undecided(why) if finding.verdict.decided else finding.noted(why)
    if "rates" in beyond and len(tried := sorted(set(beyond["rates"].dropna().astype(int)))) > 1:
        finding = finding.noted(f"arms were tuned over unequal numbers of rates: {', '.join(map(str, tried))}")
    return finding


def _unlearned(rows: Frame, results: Frame, arms: list[str], *, enough: bool) -> Iterator[str]:
    """The arms that are not past the bigram table; none, where ``enough`` says that one other arm is enough."""
    if "bigram_entropy" not in results or "eval_loss" not in results or not len(rows):
        return
    several = not arms or rows.groupby(arms, dropna=False)["learning_rate"].nunique().max() > 1
    short, past = [], 0
    for name, part in _each(rows, [*arms, "learning_rate"] if several else arms):
        if STAGE in part and part["bigram_entropy"].isna().all():  # the models that the stage began with
            root = results[results["bigram_entropy"].notna() & results["seed"].isin(part["seed"])]
            part = root[(root[arms] == part[arms].iloc[0]).all(axis=1) & root["tuned"].astype(bool)]
        trained = part[part["status"].isin(TRAINED)].dropna(subset=["eval_loss", "bigram_entropy"])
        lost = int(part["status"].isin(NOT_TRAINED).sum())
        loss, bigrams = trained["eval_loss"].mean(), trained["bigram_entropy"].mean()
        if lost < MOST * (lost + len(trained)) and loss >= bigrams:
            short.append(f"{name} {loss:.3f} ({bigrams:.3f})")
        past += loss < bigrams
    if short and not (enough and past):
        yield f"not past the loss of a table of bigrams (in brackets): {', '.join(short)}"


def _by_chance(rows: Frame, arms: Sequence[str], reads: Reads) -> Iterator[str]:
    tasks = {column for columns in reads.columns.values() for column in columns if column.startswith(_SCORE)}
    for column in sorted(tasks & set(rows)):
        named = [column.removeprefix(f"{_SCORE}_")]
        if column == _SCORE:
            named = [
                each.removeprefix(f"{_SCORE}_")
                for each in rows
                if each.startswith(f"{_SCORE}_") and rows[each].notna().any()
            ]
        if not named or any(name not in CHANCES for name in named):
            continue
        chance = 100 * sum(CHANCES[name] for name in named) / len(named)
        for arm, part in _each(rows, arms):
            values = part[column].dropna().tolist()
            if len(values) >= TOO_FEW and (low := t_interval(values)[0]) <= chance:
                yield f"{arm} is not above chance: {column} from {low:.1f} % (95 %), chance {chance:.1f} %"


def _unmoved(rows: Frame, arms: Sequence[str]) -> Iterator[str]:
    for arm, part in _each(rows, arms) if _GAIN in rows else ():
        gains = part[_GAIN].dropna().tolist()
        if len(gains) >= TOO_FEW and (low := t_interval(gains)[0]) <= 0:
            yield f"{arm}: the policy has not moved: its reward's gain is from {low:.2g} (95 %)"


def _badly_tuned(rows: Frame, beyond: Frame, arms: Sequence[str], reads: Reads) -> Iterator[str]:
    if reads.chose_rate or ("tuned_on" in rows and rows["tuned_on"].fillna(False).astype(bool).any()):
        yield "its rates were chosen by seeds that it tests"
    if "at_edge" in beyond:
        own = beyond[beyond["tuned"].astype(bool) & beyond["status"].isin(TRAINED)]
        if edges := [name for name, part in _each(own, arms) if part["at_edge"].fillna(False).astype(bool).any()]:
            yield f"the best rate is at the sweep's edge: {', '.join(edges)}"


def _arms(axes: Sequence[str]) -> list[str]:
    """The axes that tell arms apart."""
    return [axis for axis in axes if axis not in (*NO_ARM, STAGE)]


def _each(rows: Frame, by: Sequence[str]) -> Iterator[tuple[str, Frame]]:
    """The rows of each arm, with its name: the values in which the arms differ."""
    by = [column for column in by if column in rows]
    named = [column for column in by if rows[column].nunique(dropna=False) > 1] or by[:1]
    for _, part in rows.groupby(by, dropna=False, sort=False) if by and len(rows) else ():
        values = part[named].iloc[0]
        yield " ".join(f"{value:g}" if isinstance(value, float) else str(value) for value in values), part
