"""Judge a study's claims, and read the recorded verdicts of all studies."""

from __future__ import annotations

import datetime
import math
from collections.abc import Collection
from pathlib import Path
from typing import TYPE_CHECKING, cast

from lamina.core import specs
from lamina.core.frames import Frame
from lamina.core.json_types import Json
from lamina.errors import UserError
from lamina.jobs.environment import environment
from lamina.jobs.files import read_claims, read_sealed
from lamina.jobs.names import STUDY
from lamina.jobs.seals import refuse_tables
from lamina.lab.papers.judging.claims import Claim, judge, judgeable, load_claims
from lamina.lab.papers.judging.findings import Verdict
from lamina.lab.papers.judging.trials import Reader, Trials
from lamina.lab.papers.study_catalog import Scale, StudyDefinition, catalog_folder, names, read_study, records_folder
from lamina.lab.papers.trials.store import recorded_keys

if TYPE_CHECKING:
    import pandas as pd

    from lamina.lab.papers.trials.store import Store


def judge_study(
    study: StudyDefinition, scale: Scale, results: pd.DataFrame, store: Store, *, missing: int = 0, looks: int = 1
) -> list[Json]:
    """Judge a study's claims. Returns the content of claims.json.

    Args:
        missing: the number of unfinished runs. Lamina judges nothing before all runs have finished.
        looks: the number of judgments with different sets of runs, including this judgment.

    Raises:
        UserError: a claim needs something that the study does not measure.
    """
    if not study.claims_file.is_file():
        return []
    claims, machine = _load(study), environment(0)
    if scale.needs:
        judged = [_unjudged(claim, Verdict.NEEDS_SCALE, scale.needs) for claim in claims]
    elif missing:
        seconds = float(cast(float, results["seconds"].mean())) if "seconds" in results else math.nan
        cost = "" if math.isnan(seconds) else f" (about {missing * seconds / 60:.0f} core-minutes)"
        note = f"{missing} of {len(results)} planned trials have not ended{cost}"
        judged = [_unjudged(claim, Verdict.NOT_RUN, note) for claim in claims]
    else:
        axes = list(scale.axis_names)
        rows = judgeable(results, axes, scale.tuning_seeds, scale.seeds)
        trials = Trials(rows, axes=axes, scale=scale.name, measures=_reader(scale, store))
        judged = [verdict.record() for verdict in judge(claims, trials, looks=max(looks, scale.looks))]
    provenance: Json = {
        "study": study.name,
        "scale": scale.name,
        "date": datetime.datetime.now(datetime.UTC).date().isoformat(),
        "revision": machine["git_revision"],
        "machine": machine["machine"]["processor"],
        "versions": machine["versions"],
    }
    return [{**verdict, **provenance} for verdict in judged]


def _reader(scale: Scale, store: Store) -> Reader:
    """Return a function that reads a run's table by the name in the YAML file, or by the probe's name."""

    def read(key: str, name: str, at: str) -> Frame | None:
        listed = scale.all_measures.get(at, ())
        fits = [measure for measure in listed if name in (measure, specs.parse(measure, "probe")[0])]
        return store.table(key, f"{at}/{fits[0]}") if fits else None

    return read


def _unjudged(claim: Claim, verdict: Verdict, note: str) -> Json:
    shared = {"claim": claim.name, "says": claim.says, "verdict": str(verdict), "ours": "", "seeds": 0}
    return {**shared, "paper": claim.paper, "note": note}


def looks_of(record: Path, trials: Collection[str]) -> list[int]:
    """Return the number of runs in each earlier judgment of the claims, and in this judgment."""
    before: list[int] = []
    # not the record of another experiment
    if (record / STUDY).is_file() and set(trials) & set(recorded_keys(record)):
        before = [int(each) for each in read_sealed(record / STUDY).get("looks", [])]
    return sorted({*before, len(set(trials))})


def all_verdicts(records: Path | None = None) -> list[Json]:
    """Return the recorded verdicts of all of Lamina's studies. A claim without a verdict is `not run yet`."""
    folder = records_folder() if records is None else records
    return [verdict for name in names() for verdict in verdicts_of(read_study(name), folder)]


def verdicts_of(study: StudyDefinition, records: Path) -> list[Json]:
    """Return a study's claims with the recorded verdicts at every scale. Raises UserError for an unreadable file."""
    listed = study.file.parent == catalog_folder() and study.claims_file.is_file()
    claims = _load(study) if listed else []
    texts = {one.name: {"says": one.says, "paper": one.paper, "quantity": one.quantity} for one in claims}
    verdicts = []
    for scale in study.scales:
        folder = records / f"{study.name}-{scale}"
        refuse_tables(folder)
        stored = read_claims(folder)
        if stored is None and scale == "cpu":
            note, labels = f"lamina study run {study.name} --scale {scale}", {"study": study.name, "scale": scale}
            verdicts += [{**_unjudged(claim, Verdict.NOT_RUN, note), **labels, "date": None} for claim in claims]
        for entry in stored or ():
            if (owner := (entry.get("study"), entry.get("scale"))) != (
                study.name,
                scale,
            ):  # somebody exchanged the folder
                raise UserError(
                    f"records: {str(folder)!r} holds a verdict of {owner[0]}-{owner[1]}. Keep each study's record "
                    "under the study's name."
                )
            # the study's file has the latest words
            verdicts.append({**entry, **texts.get(entry["claim"], {})})
    return verdicts


def _load(study: StudyDefinition) -> list[Claim]:
    return load_claims(study.claims_file, trusted=study.file.parent == catalog_folder())
