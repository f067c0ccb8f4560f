"""Describe a study as text: settings, number of finished trials, recorded verdicts, and cost."""

from __future__ import annotations

from typing import cast

from lamina.errors import UserError
from lamina.lab.papers.engine.plan import StudyPlan
from lamina.lab.papers.engine.settings import StudySettings
from lamina.lab.papers.engine.study_run import record_name, records_are_of, store_of, study_plan
from lamina.lab.papers.engine.verdicts import verdicts_of
from lamina.lab.papers.judging.findings import in_words, seeds_text
from lamina.lab.papers.study_catalog import StudyDefinition, Tuning, read_study
from lamina.lab.papers.trials import measures
from lamina.lab.papers.trials.jobs import TRIAL_JOBS
from lamina.lab.papers.trials.store import recorded_keys
from lamina.studies.running import usual_workers
from lamina.studies.settings import MaxRateSettings
from lamina.training.settings import PretrainSettings


def description(settings: StudySettings) -> str:
    """Describe a study at one scale (cpu, gpu or paper): question, settings, number of trials and recorded verdicts."""
    assert settings.study is not None
    study = read_study(settings.study)
    plan = study_plan(study, settings)
    source = [f"source: {study.source}"] if study.source else []
    lines = [f"{study.name}: {study.title}", *source, f"scales: {', '.join(study.scales)}", ""]
    lines += [f"scale {settings.scale}: {plan.scale.needs}"] if plan.scale.needs else _trials(plan, settings)
    told = verdicts_of(study, settings.records_folder) if records_are_of(study, settings) else []
    lines.append("")
    for verdict in told:
        lines.append(f"{in_words(verdict['verdict'])} ({verdict['scale']}): {verdict['claim']}: {verdict['says']}")
        lines += [f"    ours: {in_words(part)}" for part in verdict.get("parts") or [verdict.get("ours")] if part]
        lines += [f"    {word}: {verdict[word]}" for word in ("paper", "note") if verdict.get(word)]
    return "\n".join(lines)


def _trials(plan: StudyPlan, settings: StudySettings) -> list[str]:
    store = store_of(settings)
    try:
        wanted = plan.wanted(store.result)
    except UserError as error:  # such as a text that is not on this machine
        return [f"scale {plan.scale.name}: Lamina cannot list the trials on this machine: {error}"]
    trials = {trial.key for trial in wanted}
    done = {trial.key for trial in wanted if store.complete(trial) is not None}
    scale, tuning = plan.scale, plan.scale.tuning
    lines = [f"scale {scale.name}: {len(plan.arms)} configurations, {seeds_text(len(scale.seeds))}, job {scale.job}"]
    for axis, values in scale.axes.items():
        lines.append(f"  {axis}: {', '.join(values)}")
    if scale.stages:
        jobs = {stage.name: "" if stage.job == stage.name else f"{stage.job}, " for stage in scale.stages}
        sources = {stage.name: " and ".join(stage.inputs.values()) for stage in scale.stages}
        lines.append(f"  then: {', '.join(f'{name} ({job}from {sources[name]})' for name, job in jobs.items())}")
    rates = tuning.rates if tuning else scale.rates
    if rates:
        how = _tuned(tuning, scale.seeds) if tuning else "a sweep"
        lines.append(f"  learning_rate: {', '.join(f'{rate:g}' for rate in rates)} ({how})")
    if measured := measures.names(scale.measures):
        lines.append(f"  measured: {', '.join(measured)}")
    older = set(recorded_keys(settings.records_folder / record_name(settings))) - trials
    recorded = f", recorded with settings of an earlier version: {len(older)}" if older else ""
    return [*lines, f"  trials needed so far: {len(trials)}, finished: {len(done)}{recorded}"]


def _tuned(tuning: Tuning, seeds: tuple[int, ...]) -> str:
    sweep = tuning.sweep(seeds)
    own = "" if set(sweep) <= set(seeds) else f" that the claims do not use ({', '.join(map(str, sweep))})"
    own += f" at {', '.join(f'{name} {value}' for name, value in tuning.settings.items())}" if tuning.settings else ""
    rule = "" if tuning.rule == "best" else ", choosing the lowest learning rate within one standard error of the best"
    more = ", adding learning rates if the best is the lowest or highest" if tuning.widen else ""
    return f"tuned with {seeds_text(len(sweep))}{own}{more}{rule}"


def dry_run_text(settings: StudySettings) -> str:
    """Describe a study's cost: parameters, tokens, FLOPs, GPU-hours, and minutes on this machine (only scale cpu)."""
    from lamina.lab.papers.dry_run import dry_run, minutes_here, table

    assert settings.study is not None
    study: StudyDefinition = read_study(settings.study)
    scale = study.scale(settings.scale)
    if scale.needs:
        return f"{study.name}, scale {scale.name}: {scale.needs}"
    plan = study_plan(study, settings)
    arms = {
        arm: {
            n: text.run() if isinstance(text, MaxRateSettings) else cast(PretrainSettings, text)
            for n, text in each.items()
        }
        for arm, each in plan.dry().items()
    }
    note = "" if TRIAL_JOBS[scale.job].trains else f"The job {scale.job} only builds the models and trains nothing.\n"
    frame = dry_run(arms)
    here = scale.name == "cpu" and TRIAL_JOBS[scale.job].trains
    workers = settings.workers or usual_workers()
    time = minutes_here(arms, frame, workers=workers, threads=settings.threads) if here else ""
    return "\n".join(filter(None, (f"{study.name}, scale {scale.name}\n{note}{table(frame)}", *_later(plan), time)))


def _later(plan: StudyPlan) -> list[str]:
    """Describe the jobs after pretraining. The table of costs leaves out these jobs."""
    lines = []
    counts = plan.stages()
    for stage in plan.scale.stages:
        settings = stage.trial(seed=0).to_dict()
        steps, rows = settings.get("steps"), settings.get("batch_size")
        of = f", each {steps:,} steps of {rows} rows" if steps else ""
        lines.append(f"then {stage.name} ({stage.job} from {' and '.join(stage.inputs.values())}): ")
        lines[-1] += f"{counts[stage.name]} trials{of}"
    return [*lines, "The totals cover only pretraining. The cost of later stages depends on the data."] if lines else []
