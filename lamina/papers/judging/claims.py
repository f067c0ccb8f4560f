"""Claims: the functions beside a study's YAML that judge its trials, and the judge that runs them."""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path

from lamina.core.json_types import Json
from lamina.core.python_files import guarded, run_file
from lamina.errors import UserError
from lamina.papers.judging.findings import Finding, Verdict
from lamina.papers.judging.power import limited
from lamina.papers.judging.statistics import ALPHA, holm
from lamina.papers.judging.trials import NotMeasured, Trials

logger = logging.getLogger(__name__)
Check = Callable[[Trials], Finding]


@dataclass(frozen=True, kw_only=True)
class Claim:
    """What a paper says, and the code that judges it.

    Attributes:
        name: the study's id, or the id, a slash and the part's name ("mix-ppl/post-fails").
        says: the claim in one sentence.
        paper: the paper's own numbers.
        check: the function that judges trials.
        exact: it is an identity of any model, under no rule of power.
        one_learned: it is about what keeps an arm from learning, so one arm past a bigram table is enough.
    """

    name: str
    says: str
    paper: str
    check: Check
    exact: bool = False
    one_learned: bool = False


@dataclass(frozen=True, kw_only=True)
class Judged:
    """A claim with its verdict after the correction for the study's claims and looks.

    ``p`` is of what the verdict says, for or against the claim, and ``p_holm`` the corrected one. ``record`` is its
    line in a study's verdicts.
    """

    claim: str
    says: str
    verdict: Verdict
    ours: str
    parts: tuple[str, ...]
    paper: str
    margin: float | None
    interval: tuple[float, float] | None
    p: float | None
    p_holm: float | None
    seeds: int
    note: str

    def record(self) -> Json:
        """As plain values for JSON: no number that JSON does not have."""
        values = asdict(self) | {"verdict": self.verdict.value, "parts": list(self.parts)}
        values["interval"] = None if self.interval is None else [_plain(end) for end in self.interval]
        return values | {"margin": _plain(self.margin), "p": _plain(self.p), "p_holm": _plain(self.p_holm)}


_loading: list[dict[str, Claim]] = []  # of the files that are being read, the innermost last


def claim(*, says: str, paper: str = "", exact: bool = False, one_learned: bool = False) -> Callable[[Check], Check]:
    """Register a function ``(trials) -> Finding`` as a claim, for ``load_claims``.

    Its name is the claim's id with ``_`` for ``-`` and ``__`` for ``/``: ``mix_ppl__post_fails``.

    Args:
        says: the claim in one sentence.
        paper: the paper's own numbers, which stand beside ours.
        exact: it is an identity of any model, however little it has learned.
        one_learned: it is about what keeps an arm from learning, such as an initializer: one arm whose loss is below
            that of a bigram table is enough.
    """

    def register(check: Check) -> Check:
        name = check.__name__.replace("__", "/").replace("_", "-")
        if _loading:
            if name in _loading[-1]:
                raise UserError(f"claim {name!r}: defined twice (allowed: one function per claim)")
            _loading[-1][name] = Claim(
                name=name, says=says, paper=paper, check=check, exact=exact, one_learned=one_learned
            )
        return check

    return register


def load_claims(path: Path, *, trusted: bool = False) -> list[Claim]:
    """The claims of a file, in its order. The file runs as code; ``trusted``: no warning says so.

    Raises UserError that names the file: for whatever it raises, and for a claim that is not of the study whose name
    the file has.
    """
    if not path.is_file():
        raise UserError(f"claims {str(path)!r}: no such file")
    with _collected() as claims:
        run_file("claims", path, announced=trusted)
    study = path.stem.replace("_", "-")
    for name in claims:
        if name.split("/")[0] != study:
            expected = study.replace("-", "_")
            raise UserError(
                f"claims {str(path)!r}: {name!r} is no claim of the study {study!r} (allowed: functions named "
                f"{expected} and {expected}__part)"
            )
    return list(claims.values())


def judge(claims: Sequence[Claim], trials: Trials, *, looks: int = 1) -> list[Judged]:
    """Run the claims' checks, hold them to the rules of power, and correct for their number.

    The family is fixed: every claim is in Holm's correction, with p = 1 where it could not be tested. What holds and
    what fails is corrected alike, each side in a family of its own at the same level. If seeds were added after the
    verdicts had been read, each look tests anew: the corrected p values are multiplied by ``looks`` (Bonferroni). A
    claim that asks for what was not measured, or whose code fails, is inconclusive, too, with a warning and a note that
    says why. Raises UserError if that is so of all claims.
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
            findings.append(Finding(verdict=Verdict.INCONCLUSIVE, ours="not judged", note=str(error)))
    if claims and len(errors) == len(claims):
        raise errors[0]
    families = ([finding.p for finding in findings], [finding.p_not for finding in findings])
    tested = [verdict not in (Verdict.NEEDS_SCALE, Verdict.NOT_RUN) for verdict in (each.verdict for each in findings)]
    corrected = [
        [
            min(1.0, looks * p)
            for p in holm([1.0 if p is None or not able else p for p, able in zip(ps, tested, strict=True)])
        ]
        for ps in families
    ]
    return [_judged(claim, finding, p, looks) for claim, finding, *p in zip(claims, findings, *corrected, strict=True)]


def _find(claim: Claim, trials: Trials) -> Finding:
    with guarded(f"claim {claim.name!r}: its code"), _missing_measures(claim):
        finding = claim.check(trials)
    if not isinstance(finding, Finding):
        raise UserError(f"claim {claim.name!r}: its code returned {finding!r} (allowed: a Finding)")
    return finding


@contextmanager
def _missing_measures(claim: Claim) -> Iterator[None]:
    try:
        yield
    except NotMeasured as error:
        raise UserError(
            f"claim {claim.name!r}: the study does not measure {error.args[0]} (allowed: what its axes and measures "
            "give)"
        ) from error


def _judged(claim: Claim, finding: Finding, corrected: Sequence[float], looks: int) -> Judged:
    over = "the study's claims" + (f" and {looks} looks" if looks > 1 else "")
    p, p_holm = (finding.p_not, corrected[1]) if finding.verdict.failed else (finding.p, corrected[0])
    if p is not None and finding.verdict.decided:
        if p_holm >= ALPHA:
            word = finding.verdict.value
            finding = finding.undecided(
                f"'{word}' only before Holm's correction over {over}: p {p:.2g}, corrected {p_holm:.2g}"
            )
        elif looks > 1:
            finding = finding.noted(f"seeds were added after a look: p corrected over {over}, {p_holm:.2g}")
    return Judged(
        claim=claim.name,
        says=claim.says,
        verdict=finding.verdict,
        ours=finding.ours,
        parts=finding.parts,
        paper=claim.paper,
        margin=finding.margin,
        interval=finding.interval,
        p=p,
        p_holm=None if p is None else p_holm,
        seeds=finding.seeds,
        note=finding.note,
    )


@contextmanager
def _collected() -> Iterator[dict[str, Claim]]:
    claims: dict[str, Claim] = {}
    _loading.append(claims)
    try:
        yield claims
    finally:
        _loading.pop()


def _plain(value: float | None) -> float | None:
    return None if value is None or not math.isfinite(value) else float(f"{value:.6g}")
