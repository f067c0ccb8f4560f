"""Judge a study's claims. The claims are functions in a Python file next to the study's YAML file.

Lamina records which runs a claim reads, and checks whether these runs can decide the claim. For example, a model's loss
must be below the loss of a bigram table. Claims about untrained models skip this check.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from lamina.core.frames import Frame
from lamina.core.intervals import ALPHA, holm, t_interval
from lamina.core.json_types import Json
from lamina.core.python_files import guarded, run_file
from lamina.errors import UserError
from lamina.evaluation.generated import CHANCES
from lamina.lab.papers.judging.checks import NOT_TRAINED, TRAINED
from lamina.lab.papers.judging.findings import MOST, TOO_FEW, Finding, Verdict, in_words, inconclusive
from lamina.lab.papers.judging.trials import NO_ARM, NotMeasured, Reads, Trials

ENOUGH = 5  # the fewest seeds that must remain without the tuning seeds
STAGE = "stage"
_SCORE, _GAIN = "score", "reward_gain"


def judgeable(results: Frame, axes: Sequence[str], tuning: Sequence[int], seeds: Sequence[int]) -> Frame:
    """Return the runs that claims may read in a study that searches for learning rates.

    At the chosen learning rates, Lamina removes the runs with seeds of the search (``tuning``). If the study has fewer
    than 5 other seeds, Lamina keeps these runs, and marks the runs in the column "tuned_on". The column "rates" is the
    number of learning rates that a configuration tried.
    """
    if not tuning or not len(results):
        return results
    results = results.copy()
    arms = _arms(axes)
    swept = results[results["seed"].isin(tuning)]
    for values, rows in swept.groupby(arms, dropna=False) if arms else [((), swept)]:
        of_arm = (results[arms] == values).all(axis=1) if arms else results["seed"].notna()
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
    """Replace the verdict if the runs that a claim has read cannot decide the claim.

    The verdict becomes "needs scale" if a configuration has learned too little. Too little means that the loss is not
    below a bigram table's loss, the score is not above chance, or the reward has not risen. The verdict becomes
    inconclusive if the tested seeds also tuned the learning rates. The verdict also becomes inconclusive if a best
    learning rate is the lowest or highest that ran.

    Args:
        reads: the columns that the claim has read.
        exact: whether the claim follows from the model's equations. Lamina then checks nothing.
        one_learned: whether one configuration with a loss below the bigram table's loss is enough.
    """
    if exact or not reads.columns or "key" not in results or "status" not in results:
        return finding
    keys = results["key"].astype(str)
    rows = results[keys.isin(list(reads.columns))]
    beyond = results[keys.isin([key for key, columns in reads.columns.items() if columns != {"status"}])]
    arms = _arms(axes)
    unlearned = _unlearned(beyond, results, arms, enough=one_learned)
    for why in dict.fromkeys([*unlearned, *_by_chance(beyond, arms, reads), *_unmoved(beyond, arms)]):
        finding = replace(finding, verdict=Verdict.NEEDS_SCALE).noted(why)
    if finding.verdict == Verdict.NEEDS_SCALE:
        return finding
    for why in _badly_tuned(rows, beyond, arms, reads):
        finding = finding.undecided(why) if finding.verdict.decided else finding.noted(why)
    if "rates" in beyond and len(tried := sorted(set(beyond["rates"].dropna().astype(int)))) > 1:
        finding = finding.noted(
            f"settings were tuned over different numbers of learning rates: {', '.join(map(str, tried))}"
        )
    return finding


def _unlearned(rows: Frame, results: Frame, arms: list[str], *, enough: bool) -> Iterator[str]:
    """Yield a note that names the configurations with a loss that is not below a bigram table's loss.

    With ``enough``, there is no note if one configuration's loss is below the bigram table's loss.
    """
    if "bigram_entropy" not in results or "eval_loss" not in results or not len(rows):
        return
    several = not arms or rows.groupby(arms, dropna=False)["learning_rate"].nunique().max() > 1
    short, tables, past = [], [], 0
    for name, part in _each(rows, [*arms, "learning_rate"] if several else arms):
        if STAGE in part and part["bigram_entropy"].isna().all():  # use the models that the stage began with
            root = results[results["bigram_entropy"].notna() & results["seed"].isin(part["seed"])]
            part = root[(root[arms] == part[arms].iloc[0]).all(axis=1) & root["tuned"].astype(bool)]
        trained = part[part["status"].isin(TRAINED)].dropna(subset=["eval_loss", "bigram_entropy"])
        lost = int(part["status"].isin(NOT_TRAINED).sum())
        loss, bigrams = trained["eval_loss"].mean(), trained["bigram_entropy"].mean()
        if lost < MOST * (lost + len(trained)) and loss >= bigrams:
            short.append(f"{name} ({loss:.3f})")
            tables.append(f"{bigrams:.3f}")
        past += loss < bigrams
    if short and not (enough and past):
        table = " to ".join(dict.fromkeys((min(tables), max(tables))))
        yield f"the loss is above the loss of a bigram table ({table}) in these settings: {', '.join(short)}"


def _by_chance(rows: Frame, arms: Sequence[str], reads: Reads) -> Iterator[str]:
    tasks = {column for columns in reads.columns.values() for column in columns if column.startswith(_SCORE)}
    for column in sorted(tasks & set(rows)):
        scores = [each for each in rows if each.startswith(f"{_SCORE}_") and rows[each].notna().any()]
        named = [each.removeprefix(f"{_SCORE}_") for each in (scores if column == _SCORE else [column])]
        if not named or any(name not in CHANCES for name in named):
            continue
        chance = 100 * sum(CHANCES[name] for name in named) / len(named)
        samples = {arm: part[column].dropna().tolist() for arm, part in _each(rows, arms)}
        lows = {arm: t_interval(values)[0] for arm, values in samples.items() if len(values) >= TOO_FEW}
        if low := ", ".join(f"{arm} ({value:.1f} %)" for arm, value in lows.items() if value <= chance):
            yield f"{column} is not clearly above chance ({chance:.1f} %). The 95 % interval starts at: {low}"


def _unmoved(rows: Frame, arms: Sequence[str]) -> Iterator[str]:
    for arm, part in _each(rows, arms) if _GAIN in rows else ():
        gains = part[_GAIN].dropna().tolist()
        if len(gains) >= TOO_FEW and (low := t_interval(gains)[0]) <= 0:
            start = f"the 95 % interval of the rise starts at {low:.2g}"
            yield f"in the setting {arm}, the reward has not clearly risen ({start})"


def _badly_tuned(rows: Frame, beyond: Frame, arms: Sequence[str], reads: Reads) -> Iterator[str]:
    if reads.chose_rate or ("tuned_on" in rows and rows["tuned_on"].fillna(False).astype(bool).any()):
        yield "the learning rates were chosen on the seeds that the test compares"
    if "at_edge" in beyond:
        tuned_rows = beyond[beyond["tuned"].astype(bool) & beyond["status"].isin(TRAINED)]
        if edges := [
            name for name, part in _each(tuned_rows, arms) if part["at_edge"].fillna(False).astype(bool).any()
        ]:
            yield f"the best learning rate is the lowest or highest of the sweep in these settings: {', '.join(edges)}"


def _arms(axes: Sequence[str]) -> list[str]:
    return [axis for axis in axes if axis not in (*NO_ARM, STAGE)]


def _each(rows: Frame, by: Sequence[str]) -> Iterator[tuple[str, Frame]]:
    """Yield each configuration's name and rows. The name lists the values that differ between configurations."""
    by = [column for column in by if column in rows]
    named = [column for column in by if rows[column].nunique(dropna=False) > 1] or by[:1]
    for _, part in rows.groupby(by, dropna=False, sort=False) if by and len(rows) else ():
        values = part[named].iloc[0]
        yield " ".join(f"{value:g}" if isinstance(value, float) else str(value) for value in values), part


logger = logging.getLogger(__name__)
Check = Callable[[Trials], Finding]


@dataclass(frozen=True, kw_only=True)
class Claim:
    """A paper's statement, and the function that judges the statement.

    Attributes:
        name: the study's name, or STUDY/PART for a part of the study's claim ("mix-ppl/post-fails").
        check: the function that judges the runs.
    """

    name: str
    says: str
    paper: str
    check: Check
    quantity: str = ""
    exact: bool = False
    one_learned: bool = False


@dataclass(frozen=True, kw_only=True)
class Judged(Finding):
    """A claim's finding, with a p value that is corrected for the numbers of claims and judgments.

    Attributes:
        p: the p value that decides the verdict, for the claim or against the claim.
        p_holm: ``p`` after the correction.
    """

    claim: str
    says: str
    paper: str
    p_holm: float | None

    def record(self) -> Json:
        """Return the finding as JSON. Numbers that JSON cannot hold become null."""

        def plain(value: float | None) -> float | None:
            return None if value is None or not math.isfinite(value) else float(f"{value:.6g}")

        interval = None if self.interval is None else [plain(end) for end in self.interval]
        entry: Json = {"verdict": self.verdict.value, "ours": self.ours, "parts": list(self.parts), "paper": self.paper}
        numbers: Json = {"margin": plain(self.margin), "interval": interval, "p": plain(self.p)}
        rest: Json = {"p_holm": plain(self.p_holm), "seeds": self.seeds, "note": self.note}
        return {"claim": self.claim, "says": self.says, **entry, **numbers, **rest}


_loading: list[dict[str, Claim]] = []  # the claims of each file that is being read, the innermost file last


def claim(
    *, says: str, paper: str = "", quantity: str = "", exact: bool = False, one_learned: bool = False
) -> Callable[[Check], Check]:
    """Register a function as a claim. The function takes a study's runs and returns a finding.

    The function's name is the claim's name, with "_" in place of "-" and "__" in place of "/": ``mix_ppl__post_fails``.

    Args:
        says: the claim in one sentence.
        paper: the paper's numbers, which reports show beside Lamina's numbers.
        quantity: the name and unit of the compared numbers.
        exact: whether the claim follows from equations that hold even for untrained models. Lamina then does not check
            whether the models have learned enough.
        one_learned: whether the claim is about a cause that stops a configuration from learning, such as an
            initializer. Only one configuration then needs a loss below a bigram table's loss.
    """

    def register(check: Check) -> Check:
        name = check.__name__.replace("__", "/").replace("_", "-")
        if _loading:
            if name in _loading[-1]:
                raise UserError(f"claim {name!r}: defined twice. Keep one function per claim.")
            texts = {"name": name, "says": says, "paper": paper, "quantity": quantity}
            _loading[-1][name] = Claim(**texts, check=check, exact=exact, one_learned=one_learned)
        return check

    return register


def load_claims(path: Path, *, trusted: bool = False) -> list[Claim]:
    """Execute a Python file, and return the file's claims in order. Lamina warns first unless the file is trusted.

    Raises UserError if the file fails to run, or if a claim in the file belongs to another study.
    """
    if not path.is_file():
        raise UserError(f"claims {str(path)!r}: no such file. Write the study's claims to this file.")
    claims: dict[str, Claim] = {}
    _loading.append(claims)
    try:
        run_file("claims", path, announced=trusted)
    finally:
        _loading.pop()
    study = path.stem.replace("_", "-")
    for name in claims:
        if name.split("/")[0] != study:
            expected = study.replace("-", "_")
            raise UserError(
                f"claims {str(path)!r}: {name!r} is not a claim of the study {study!r}. Name the functions "
                f"{expected} or {expected}__part."
            )
    return list(claims.values())


def judge(claims: Sequence[Claim], trials: Trials, *, looks: int = 1) -> list[Judged]:
    """Judge all claims of a study, and correct the p values for the number of claims.

    Holm's method corrects two sets of p values separately: for the claims and against the claims. A claim without a
    test has p = 1. If a claim's function raises an error, or reads something that was not measured, the verdict is
    inconclusive.

    Args:
        looks: how often the claims have been judged, each time with more seeds. Lamina multiplies the corrected p
            values by this number (Bonferroni).

    Raises:
        UserError: if no claim can be judged, because every claim's function raises an error.
    """
    findings, errors = [], []
    for claim in claims:
        part = trials.afresh()
        try:
            found = _find(claim, part)
            findings.append(
                limited(found, trials.rows, trials.axes, part.reads, exact=claim.exact, one_learned=claim.one_learned)
            )
        except UserError as error:
            errors.append(error)
            logger.warning("%s", error)
            findings.append(inconclusive("not judged", str(error)))
    if claims and len(errors) == len(claims):
        raise errors[0]
    tested = [finding.verdict not in (Verdict.NEEDS_SCALE, Verdict.NOT_RUN) for finding in findings]
    corrected = []
    for family in ([finding.p for finding in findings], [finding.p_not for finding in findings]):
        ps = [1.0 if p is None or not able else p for p, able in zip(family, tested, strict=True)]
        corrected.append([min(1.0, looks * p) for p in holm(ps)])
    return [_judged(claim, finding, p, looks) for claim, finding, *p in zip(claims, findings, *corrected, strict=True)]


def _find(claim: Claim, trials: Trials) -> Finding:
    with guarded(f"claim {claim.name!r}: its code"):
        try:
            finding = claim.check(trials)
        except NotMeasured as error:
            raise UserError(
                f"claim {claim.name!r}: the study does not measure {error.args[0]}. Add it to the study's axes or "
                "measures"
            ) from error
    if not isinstance(finding, Finding):
        raise UserError(f"claim {claim.name!r}: its code returned {finding!r}. Return a Finding.")
    return finding


def _judged(claim: Claim, finding: Finding, corrected: Sequence[float], looks: int) -> Judged:
    over = "the study's claims" + (f" and {looks} judgments" if looks > 1 else "")
    p, p_holm = (finding.p_not, corrected[1]) if finding.verdict.failed else (finding.p, corrected[0])
    if p is not None and finding.verdict.decided:
        if p_holm >= ALPHA:
            finding = finding.undecided(
                f'the verdict is "{in_words(finding.verdict)}" only before Holm\'s correction for {over}: p is {p:.2g} '
                f"before the correction, and {p_holm:.2g} after it"
            )
        elif looks > 1:
            finding = finding.noted(f"seeds were added after a judgment, so p is corrected for {over}: {p_holm:.2g}")
    named: Json = {"claim": claim.name, "says": claim.says, "paper": claim.paper}
    return Judged(**{**vars(finding), "p": p}, **named, p_holm=None if p is None else p_holm)
