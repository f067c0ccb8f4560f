"""What a study's trials say about its claims: claims.json, and the verdicts of all records."""

from __future__ import annotations

import datetime
import json
from pathlib import Path
from typing import TYPE_CHECKING

from lamina.core import specs
from lamina.core.frames import Frame
from lamina.core.json_types import Json
from lamina.errors import UserError
from lamina.jobs.environment import environment
from lamina.studies.catalog.places import catalog_folder, names
from lamina.studies.catalog.study import Scale, Study, read_study
from lamina.studies.judging.claims import Claim, judge, load_claims
from lamina.studies.judging.findings import Verdict
from lamina.studies.judging.trials import Reader, Trials

if TYPE_CHECKING:
    import pandas as pd

    from lamina.studies.trials.store import Store

CLAIMS = "claims.json"


def judge_study(study: Study, scale: Scale, results: pd.DataFrame, store: Store) -> list[Json]:
    """The verdict on each of a study's claims. Raises UserError for a claim over something that was not measured."""
    if not study.claims_file.is_file():
        return []
    claims = _load(study)
    if scale.needs:
        judged = [
            {"claim": claim.name, "says": claim.says, "verdict": str(Verdict.NEEDS_SCALE), "ours": "", "seeds": 0}
            | {"paper": claim.paper, "note": scale.needs}
            for claim in claims
        ]
    else:
        trials = Trials(
            results,
            axes=list(scale.axis_names),
            scale=scale.name,
            measures=_reader(scale, store),
        )
        judged = [one.record() for one in judge(claims, trials, looks=scale.looks)]
    return [{**one, **_provenance(study, scale)} for one in judged]


def _reader(scale: Scale, store: Store) -> Reader:
    """Reads a trial's table under the name that a claim gives it: as in the YAML, or the probe's name alone."""

    def read(key: str, name: str, at: str) -> Frame | None:
        listed = scale.all_measures.get(at, ())
        fits = [one for one in listed if name in (one, specs.parse(one, "probe")[0])]
        return store.table(key, f"{at}/{fits[0]}") if fits else None

    return read


def _provenance(study: Study, scale: Scale) -> Json:
    known = environment(0)
    return {
        "study": study.name,
        "scale": scale.name,
        "date": datetime.datetime.now(datetime.UTC).date().isoformat(),
        "revision": known["git_revision"],
        "machine": known["machine"]["processor"],
        "versions": known["versions"],
    }


def all_verdicts(records: Path | None = None) -> list[Json]:
    """Every claim of the catalog with its verdict at every scale that was run, or `not run yet` and the command.

    Raises UserError for a file of the catalog that can't be read.
    """
    folder = catalog_folder() / "records" if records is None else records
    return [one for name in names() for one in verdicts_of(read_study(name), folder)]


def verdicts_of(study: Study, records: Path) -> list[Json]:
    """Every claim of a study with its verdict at every scale that was recorded.

    Of a study of the catalog, a claim without one is `not run yet`, with the command. Raises UserError for a file that
    can't be read.
    """
    found = []
    for scale in study.scales:
        stored = read_claims(records / f"{study.name}-{scale}")
        if stored is not None:
            found += stored
        elif scale == "cpu" and study.file.parent == catalog_folder():
            found += [_not_run(study, scale, claim) for claim in _claims(study)]
    return found


def read_claims(folder: Path) -> list[Json] | None:
    """The verdicts in a study's folder; None if it holds none. Raises UserError for a file that can't be read."""
    path = folder / CLAIMS
    if not path.is_file():
        return None
    try:
        claims = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise UserError(f"{str(path)!r}: not readable ({error})") from None
    if not isinstance(claims, list):
        raise UserError(f"{str(path)!r}: {type(claims).__name__} (allowed: a list of verdicts)")
    return claims


def _claims(study: Study) -> list[Json]:
    if not study.claims_file.is_file():
        return []
    return [{"claim": claim.name, "says": claim.says, "paper": claim.paper} for claim in _load(study)]


def _load(study: Study) -> list[Claim]:
    """The claims of a study; only a user's own file is said to run as code."""
    return load_claims(study.claims_file, trusted=study.file.parent == catalog_folder())


def _not_run(study: Study, scale: str, claim: Json) -> Json:
    return {
        **claim,
        "study": study.name,
        "scale": scale,
        "verdict": str(Verdict.NOT_RUN),
        "ours": "",
        "seeds": 0,
        "date": None,
        "note": f"lamina study run {study.name} --scale {scale}",
    }
