"""Run a study, write its tables, and judge its claims (`lamina study run`)."""

from __future__ import annotations

import datetime
import logging
import re
import shutil
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from lamina.core.json_types import Json
from lamina.core.values import writable_folder
from lamina.core.yaml_files import read_mapping
from lamina.errors import UserError
from lamina.jobs import columns
from lamina.jobs.environment import environment
from lamina.jobs.files import write_json, write_sealed
from lamina.jobs.folder import Resume
from lamina.jobs.job import ResumePolicy, open_job
from lamina.jobs.kinds import Kind
from lamina.jobs.names import CLAIMS, RESULTS, SEALED, STUDY
from lamina.jobs.seals import seal_tables
from lamina.jobs.status import ENDED
from lamina.lab.papers.engine import verdicts
from lamina.lab.papers.engine.plan import StudyPlan, refuse_without_effect
from lamina.lab.papers.engine.settings import StudySettings
from lamina.lab.papers.study_catalog import StudyDefinition, catalog_folder, check_seeds, read_study
from lamina.lab.papers.trials import measures
from lamina.lab.papers.trials.jobs import TRIAL_JOBS
from lamina.lab.papers.trials.store import TABLES, Records, Store, recorded_keys, write_results, write_table
from lamina.lab.papers.trials.trial import StudyTrial, read_again
from lamina.studies import processes
from lamina.studies.record import has_study, read_record, stored_study, write_study
from lamina.studies.running import Executor, run_tasks, run_trials

if TYPE_CHECKING:
    import pandas as pd

Known = Callable[[StudyTrial], Json | None]


def runnable(trials: Iterable[StudyTrial], store: Store, known: Known) -> dict[str, StudyTrial]:
    """Return the runs that can start now, by key. For a missing input model, return the run that trains the model."""
    ready: dict[str, StudyTrial] = {}

    def visit(trial: StudyTrial) -> None:
        # a recorded result has no model
        lacking = [source for source in trial.inputs.values() if not store.has_model(source)]
        for source in lacking:
            visit(source)
        if not lacking:
            ready[trial.key] = trial

    for trial in trials:
        if known(trial) is None:
            visit(trial)
    return ready


def blocked(trial: StudyTrial, failed: Mapping[str, Json]) -> Json | None:
    """Return a result with the status "failed" if the training of an input model has failed, otherwise None."""
    for source in trial.inputs.values():
        result = failed.get(source.key)
        if result is None or result["status"] in ENDED:  # the run ended, and only a measurement failed
            result = blocked(source, failed)
        if result is not None:
            return {
                "status": "failed",
                "reason": (f"the trial starts from {source.name}, whose status is {result['status']}"),
            }
    return None


def run_plan(
    plan: StudyPlan,
    store: Store,
    *,
    workers: int | None,
    bar: bool,
    ended: Callable[[], None] = lambda: None,
    execute: Executor = run_trials,
) -> dict[str, Json]:
    """Execute the missing runs, each at most once. Return the results of all runs by key."""
    failed: dict[str, Json] = {}

    def known(trial: StudyTrial) -> Json | None:
        return failed.get(trial.key) or store.complete(trial) or blocked(trial, failed)

    def result(trial: StudyTrial) -> Json | None:
        return store.result(trial) or failed.get(trial.key) or blocked(trial, failed)

    while True:
        wanted = plan.wanted(result)
        todo = runnable(wanted, store, known)
        if not todo:
            return {trial.key: found for trial in wanted if (found := result(trial)) is not None}
        tasks = {trial.name: store.task(trial) for trial in todo.values()}
        keys = {trial.name: trial.key for trial in todo.values()}
        lacking = {trial.key for trial in wanted if known(trial) is None}  # some lack only a measurement
        done = len({trial.key for trial in wanted} - lacking - {*todo})
        waiting = len(lacking - {*todo})

        def one_ended(name: str, outcome: Json, keys: dict[str, str] = keys) -> None:
            if outcome["status"] not in ENDED:
                failed[keys[name]] = outcome
            ended()

        run_tasks(tasks, done=done, waiting=waiting, workers=workers, bar=bar, ended=one_ended, execute=execute)
        # Without this, a run that lacks a measurement or a needed model would run forever.
        for key, trial in todo.items():
            if key not in failed and store.complete(trial) is None and (found := store.result(trial)) is not None:
                failed[key] = found
        needed = {source.key for trial in wanted if known(trial) is None for source in trial.inputs.values()}
        lost = [key for key, trial in todo.items() if key in needed and not store.has_model(trial)]
        failed.update({key: {"status": "failed", "reason": "the trial saved no model"} for key in lost})


logger = logging.getLogger(__name__)
SHOWN = 10
"""The largest number of damaged files that Lamina names."""
POLICY = ResumePolicy(what="study", free=StudySettings.free())


def run_study(
    settings: StudySettings | Mapping[str, object],
    *,
    record: bool = False,
    resume: Resume = False,
    overwrite: bool = False,
    bar: bool = True,
) -> pd.DataFrame:
    """Run a study at one scale. Returns the table of results.csv, with one row per run.

    Lamina skips runs that have a stored or recorded result. Lamina also writes the verdicts to claims.json.

    Args:
        record: whether to copy the study's tables and verdicts to the folder of recorded results.

    Raises:
        UserError: a setting or the study is invalid, the output folder has files, the study has changed since it last
            ran here, or a claim needs something that the study does not measure.
        OSError: the disk is full.
        KeyboardInterrupt: Lamina first ends the current runs with the status "interrupted" and writes results.csv.
    """
    given = settings.to_dict() if isinstance(settings, StudySettings) else dict(settings)
    if record and not given.get("records") and any(given.get(name) for name in ("seeds", "set", "corpus")):
        raise UserError(
            "record: you changed the study's seeds or settings. Give your own folder with --records, or leave out "
            "--seeds, --set and --corpus."
        )
    given["output"] = str(output_of(given))
    study = read_study(str(given["study"]))
    if record and not records_are_of(study, StudySettings.from_dict(given)):
        raise UserError("record: Lamina's records hold only Lamina's studies. Give your own folder with --records.")
    job = open_job(
        Kind.CLAIMS, StudySettings, given, resume=resume, overwrite=overwrite, policy=POLICY, stored=stored_study
    )
    complete, plan = job.settings, study_plan(study, job.settings)
    writable_folder("store", Path(complete.store))
    store = store_of(complete)
    if job.resumes and has_study(job.folder):
        _refuse_edited(read_record(job.folder), read_mapping(study.file), plan, store)
    # before any writing, because a placement or the corpus may be unreadable
    wanted = [] if plan.scale.needs else plan.wanted(store.result)
    damage = store.damage(wanted)  # nothing else reads trials that the study only reuses
    more = [f"{len(damage) - SHOWN} more files are damaged"] if len(damage) > SHOWN else []
    for line in (*damage[:SHOWN], *more):
        logger.warning("store: %s", line)
    if complete.engine == "local" and any(store.complete(trial) is None for trial in wanted):
        processes.prepare()
    with job:
        try:
            results = _run(study, plan, complete, store, job.folder, bar)
        except KeyboardInterrupt:
            if record:
                _write_tables(plan, results_table(plan, store), store, job.folder)
                _record(study, complete, job.folder, store, whole=False)
            raise
    if record:
        _record(study, complete, job.folder, store)
    return results


def output_of(settings: Mapping[str, object]) -> Path:
    """Return the study's output folder (default: runs/studies/STUDY-SCALE). Raises UserError if no study is named."""
    record = StudySettings.from_dict(settings)
    name = record_name(record)
    return Path("runs") / "studies" / name if record.output is None else Path(record.output)


def record_name(settings: StudySettings) -> str:
    if settings.study is None:
        raise UserError("study: no study is given. Choose one from `lamina study list`.")
    return f"{read_study(settings.study).name}-{settings.scale}"


def records_are_of(study: StudyDefinition, settings: StudySettings) -> bool:
    """Return whether Lamina may record the study's results. Lamina's own folder holds only Lamina's studies."""
    return settings.records is not None or study.file.parent == catalog_folder()


def store_of(settings: StudySettings) -> Store:
    records = Records(settings.records_folder, own=record_name(settings))
    return Store(Path(settings.store), records, settings.threads, run_code=settings.run_code)


def work(settings: StudySettings, *, bar: bool = True) -> dict[str, Json]:
    """Execute a study's missing runs together with other processes, and write no tables. Returns all results by key."""
    assert settings.study is not None
    plan, store = study_plan(read_study(settings.study), settings), store_of(settings)
    if plan.scale.needs:
        raise UserError(f"scale: {settings.scale!r} has no trials: {plan.scale.needs}. Choose another scale.")
    writable_folder("store", Path(settings.store))
    Path(settings.store).mkdir(parents=True, exist_ok=True)
    return run_plan(plan, store, workers=settings.workers, bar=bar, execute=_executor(settings))


def study_plan(study: StudyDefinition, settings: StudySettings) -> StudyPlan:
    """Plan a study's runs with the user's seeds and settings. Raises UserError for invalid values."""
    read_again()
    scale = study.scale(settings.scale)
    if settings.seeds is not None:
        seeds = tuple(int(seed) for seed in settings.seeds.split(","))
        check_seeds("seeds: ", scale.tuning, seeds)
        scale = replace(scale, seeds=seeds)
    refuse_without_effect(scale, settings.changes)
    for stage in scale.stages:
        stage.refuse_missing()
    return StudyPlan(scale, settings.changes)


def _executor(settings: StudySettings) -> Executor:
    if settings.engine == "local":
        return run_trials
    from lamina.lab.papers.engine.ray_cluster import executor

    return executor(
        address=settings.address, gpus=settings.gpus, processes=settings.processes, cpus=settings.threads or 1
    )


def _run(
    study: StudyDefinition,
    plan: StudyPlan,
    settings: StudySettings,
    store: Store,
    folder: Path,
    bar: bool,
) -> pd.DataFrame:
    execute = _executor(settings)
    created = datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds")
    header: Json = {
        "command": settings.command(),
        "version": environment(0)["versions"].get("lamina"),
        "created": created,
        "settings": settings.to_dict(),
        "definition": read_mapping(study.file),
    }
    Path(settings.store).mkdir(parents=True, exist_ok=True)

    def write() -> None:
        write_results(folder, results_table(plan, store))

    if plan.scale.needs:
        write_study(folder, {**header, "trials": []})
        write_results(folder, results := results_table(plan, store))
    else:
        write_study(folder, {**header, "trials": sorted({trial.key for trial in plan.wanted(store.result)})})
        try:
            outcome = run_plan(plan, store, workers=settings.workers, bar=bar, ended=write, execute=execute)
        finally:
            write()
        failed = {key: result for key, result in outcome.items() if result["status"] not in ENDED}
        write_results(folder, results := results_table(plan, store, failed))
        write_study(folder, {**header, "trials": sorted(outcome)})
        _write_tables(plan, results, store, folder)
    ended = results[results["status"].isin(ENDED)] if "status" in results else results
    judged = verdicts.judge_study(
        *(study, plan.scale, results, store),
        missing=len(results) - len(ended),
        looks=len(verdicts.looks_of(settings.records_folder / record_name(settings), ended["key"].tolist())),
    )
    write_json(folder / CLAIMS, judged)
    return results


def _write_tables(plan: StudyPlan, results: pd.DataFrame, store: Store, folder: Path) -> None:
    for measure in measures.names(plan.scale.all_measures):
        if (rows := measured_table(results, store, measure)) is not None:
            write_table(folder, measure, rows)


def _refuse_edited(stored: Json, definition: Json, plan: StudyPlan, store: Store) -> None:
    """Raise UserError if the folder lists runs that the changed study no longer contains."""
    allowed = (
        "Restore the study, choose another --output, or add --overwrite, which keeps all stored trials and runs "
        "only new trials."
    )
    written = (
        definition_read.get("scales", {}).get(plan.scale.name) or {}
        for definition_read in (stored.get("definition") or {}, definition)
    )
    told = ("notes", "figures")  # only text or figures
    before, now = (
        {key: value for key, value in definition_read.items() if key not in told} for definition_read in written
    )
    ran = set(stored.get("trials", []))

    # Failed runs count too: their learning rates had already lost when the study ran here.
    def known(trial: StudyTrial) -> Json | None:
        return store.result(trial) or store.outcome(trial)

    wanted = plan.wanted(known)
    if before == now and any(known(trial) is None for trial in wanted):
        return  # with another or an emptied store, later trials are not known yet
    if gone := sorted(ran - {trial.key for trial in wanted}):
        raise UserError(
            f"study: the study has changed since its last run here: {len(gone)} of its {len(ran)} trials no longer "
            f"belong to the study (the first: {gone[0]}). {allowed}"
        )


def _record(study: StudyDefinition, settings: StudySettings, folder: Path, store: Store, *, whole: bool = True) -> None:
    """Copy a study's tables and verdicts to the folder of recorded results, without models and local paths."""
    records = settings.records_folder / record_name(settings)
    if not whole and (records / CLAIMS).is_file():  # an unfinished study never replaces recorded verdicts
        return
    machine = environment(0)  # read the revision before the records in the repository change
    looks = verdicts.looks_of(records, recorded_keys(folder)) if whole else []
    trained = _trained(records, recorded_keys(folder), store)
    (records / SEALED).unlink(missing_ok=True)
    shutil.rmtree(records / TABLES, ignore_errors=True)
    records.mkdir(parents=True, exist_ok=True)
    for name in (RESULTS, CLAIMS) if whole else (RESULTS,):
        shutil.copyfile(folder / name, records / name)
    for path in sorted((folder / TABLES).glob("*.parquet")):
        (records / TABLES).mkdir(exist_ok=True)
        shutil.copyfile(path, records / TABLES / path.name)
    write_sealed(
        records / STUDY,
        {
            "settings": {
                "study": study.name,
                "scale": settings.scale,
                "seeds": settings.seeds,
                "changes": settings.changes,
            },
            "date": datetime.datetime.now(datetime.UTC).date().isoformat(),
            "revision": machine["git_revision"],
            "versions": machine["versions"],
            "machine": machine["machine"],
            "trained": trained,
            **({"looks": looks} if looks else {}),  # the number of trials at each recording of verdicts
            "definition": read_mapping(study.file),
        },
    )
    seal_tables(records)


def _trained(records: Path, keys: Sequence[str], store: Store) -> list[Json]:
    """Return the machines that trained the models, with the number of runs on each machine."""
    machines = [store.machines(keys)]
    if (records / STUDY).is_file() and set(recorded_keys(records)) <= set(keys):
        machines.append(read_mapping(records / STUDY).get("trained", []))
    # the folder of runs may have lost runs
    return max(machines, key=lambda ones: sum(machine["trials"] for machine in ones))


_NOTES = {*columns.BESIDES, "rollbacks", "key", "tuned", "at_edge"}


def results_table(plan: StudyPlan, store: Store, failed: Mapping[str, Json] | None = None) -> pd.DataFrame:
    """Return the table of results.csv, with one row per run that has a result."""
    failed, axes = failed or {}, plan.scale.axes
    rows: dict[tuple[object, ...], Json] = {}  # two arms may share a trial, but each arm has its own rows

    def known(trial: StudyTrial) -> Json | None:
        return failed.get(trial.key) or store.result(trial)

    for trial in plan.wanted(known):
        if (result := known(trial)) is not None:  # a setting's value as written, or a label
            values = {
                axis: axes[axis][name].get(axis, name) if axis in axes else name for axis, name in trial.values.items()
            }
            rows[trial.key, *trial.values.values()] = result_row(trial, result, values, **plan.places(trial))
    return as_table(rows.values(), list(plan.scale.axis_names))


def as_table(rows: Iterable[Json], axes: Sequence[str]) -> pd.DataFrame:
    """Return results as a table with the columns key, compared settings, and results."""
    import pandas as pd

    rows = list(rows)
    names = ["key", *axes, "placement", "learning_rate", "seed", "tuned"]
    rest = [name for name in columns.names() if name not in (*names, "trial")]
    more = list(dict.fromkeys(name for row in rows for name in row if name not in names and name not in rest))
    return pd.DataFrame(rows, columns=list(dict.fromkeys([*names, *rest, *more])))


def result_row(trial: StudyTrial, result: Json, values: Mapping[str, object], **places: object) -> Json:
    """Return a run's row of results.csv. ``places`` has the columns "tuned" and "at_edge"."""
    left_out = {*_NOTES, *values, "trial"}
    numbers = TRIAL_JOBS[trial.job].numbers(result)
    scalars = {n: value for n, value in numbers.items() if n not in left_out and not isinstance(value, dict | list)}
    placement = re.sub(r"^[^(]*/", "", trial.placement)  # without the folder of a local file
    row: Json = {"key": trial.key, "placement": placement, **values, "seed": trial.seed}
    return {**scalars, **row, "learning_rate": trial.learning_rate, **places}


def measured_table(results: pd.DataFrame, store: Store, measure: str) -> pd.DataFrame | None:
    """Return a measurement's rows for all runs, or None. The first column is the run's key."""
    import pandas as pd

    tables = [(str(key), store.table(str(key), measure)) for key in results["key"].unique()]
    rows = [table.assign(key=key) for key, table in tables if table is not None and len(table)]
    if not rows:
        return None
    joined = pd.concat(rows, ignore_index=True)
    return joined.reindex(columns=["key", *(name for name in joined.columns if name != "key")])
