"""`lamina study`: repeat the papers' tables and figures as studies, and judge their claims."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable

from lamina.api import study
from lamina.catalog import JOBS
from lamina.commands.arguments import Parser
from lamina.core.json_types import Json
from lamina.core.terminal import show, show_error
from lamina.core.values import entries, path
from lamina.errors import UserError, one_line, unknown
from lamina.jobs.names import PAGE
from lamina.lab.papers.engine.settings import StudySettings
from lamina.lab.papers.judging.findings import in_words

_WIDEST = 23  # the maximum number of letters in a verdict

EXAMPLES = """
  lamina study list
  lamina study show mix-ppl
  lamina study run mix-ppl
  lamina study run mix-ppl,keel-lr --resume=auto
  lamina study run all --resume=auto --record
  lamina study run peri-lr --seeds 10,11,12,13,14 --corpus my_text.txt --output runs/peri-lr-mine
  lamina study run keel-maxlr --scale paper --dry-run
  lamina study worker mix-ppl --scale gpu --store /shared/trials
"""
_HELP = f"""lamina study: repeat the papers' tables and figures as studies, each with a verdict on the paper's claim

usage: lamina study list|show|run|worker [STUDY] [OPTIONS]      (for the options: lamina study run --help)

  list     list all studies with their claims and verdicts (--json: as JSON)
  show     show one study: the question, its settings and runs, the verdicts so far
  run      train the missing runs, measure them, and judge the claims; OUTPUT/report.html shows the verdicts
  worker   train some of a study's runs on this machine; several machines can use the same --store

examples:
{EXAMPLES.strip(chr(10))}
"""


def run(argv: list[str]) -> int:
    commands: dict[str, Callable[[list[str]], int]] = {"list": _list, "show": _show, "run": _run, "worker": _worker}
    if not argv or argv[0] in ("-h", "--help", "help"):
        show(_HELP)
        raise SystemExit(0)
    if argv[0] not in commands:
        raise unknown("command", argv[0], commands, "lamina study")
    return commands[argv[0]](argv[1:])


def _list(argv: list[str]) -> int:
    parser = Parser("study list", "List all studies with their claims and verdicts.", "lamina study list --json")
    parser.add_flag("--json", "print a list of verdicts as JSON", False)
    parser.add_flag("--records", "folder with the studies' records (default: Lamina's records)")
    options = parser.parse(argv)
    from pathlib import Path

    from lamina.lab.papers.engine.verdicts import all_verdicts
    from lamina.lab.papers.study_catalog import records_folder

    records = None if options.records is None else Path(path("records", options.records))
    if records is not None and not records.is_dir():
        raise UserError(f"records: {options.records!r} is not a folder. Give a folder of studies' records.")
    verdicts = all_verdicts(records)
    if options.json:
        show(json.dumps(verdicts, indent=1, ensure_ascii=False))
        return 0
    for judged in verdicts:
        parts = judged.get("parts") or [judged["ours"]]
        said = in_words(parts[0] or judged.get("note") or "") + f" (and {len(parts) - 1} more)" * (len(parts) > 1)
        show(f"{in_words(judged['verdict']):<{_WIDEST}} {judged['claim']:<28} {judged['scale']:<5} {said}")
    counts = Counter(in_words(judged["verdict"]) for judged in verdicts)
    show("\n" + ", ".join(f"{count} {verdict}" for verdict, count in sorted(counts.items())))
    if records is None and not records_folder().is_dir():
        show_error("the records are not installed. Run in a checkout: pip install ./studies/records")
    return 0


def _show(argv: list[str]) -> int:
    flags = _parser("show", "Show a study's question, its trials, and the verdicts so far.")
    from lamina.lab.papers.engine.describe_study import description

    show(description(_record(flags.settings_from(argv)[0])))
    return 0


def _run(argv: list[str]) -> int:
    typed, options = parser().settings_from(argv)
    from lamina.lab.papers.study_catalog import names

    listed = str(typed.pop("study", None) or "")
    studies = names() if listed == "all" else list(dict.fromkeys(entries(listed)))
    if not studies:
        raise UserError("study: not given. Give a name, several names with commas, a YAML file, or 'all'.")
    if len(studies) > 1 and "output" in typed:
        raise UserError("output: one folder cannot hold several studies. Give --output with one study only.")
    if options.dry_run:
        from lamina.lab.papers.engine.describe_study import dry_run_text

        for record in [_record({**typed, "study": name}) for name in studies]:
            show(dry_run_text(record))
        return 0
    code = 0
    for name in studies:
        try:
            code = max(code, _run_one({**typed, "study": name}, options.resume, options.overwrite, options.record))
        except UserError as error:
            if len(studies) == 1:
                raise
            show_error(f"{name}: {one_line(error)}")
            code = 2
    return code


def _failures(reasons: list[str]) -> int:
    if not reasons:
        return 0
    show_error(f"{len(reasons)} trials failed. The first trial failed for this reason: {reasons[0]}")
    return 1


def _run_one(settings: Json, resume: bool, overwrite: bool, record: bool) -> int:
    outcome = study(**settings, resume=resume, overwrite=overwrite, record=record)
    show(f"\n{settings['study']}: {len(outcome.results)} trials")
    for verdict in outcome.claims:
        show(f"  {in_words(verdict['verdict']):<{_WIDEST}} {verdict['claim']}: {verdict['says']}")
        ours = [("ours", part) for part in verdict.get("parts") or [verdict.get("ours")]]
        for label, text in (*ours, ("paper", verdict.get("paper")), ("note", verdict.get("note"))):
            if text:
                show(f"  {'':<{_WIDEST}} {label}: {in_words(text)}")
    show(f"the page: {outcome.folder / PAGE}")
    rows = outcome.results.to_dict("records")
    return _failures([str(row.get("reason")) for row in rows if row.get("status") == "failed"])


def _worker(argv: list[str]) -> int:
    flags = _parser("worker", "Train some of a study's trials. Other workers with the same --store train the rest.")
    from lamina.jobs.status import ENDED
    from lamina.lab.papers.engine.study_run import work

    outcome = work(_record(flags.settings_from(argv)[0]))
    ended = sum(result["status"] in ENDED for result in outcome.values())
    show(f"{ended} trials are done")
    return _failures([str(end.get("reason")) for end in outcome.values() if end["status"] not in ENDED])


def _record(settings: Json) -> StudySettings:
    record = StudySettings.from_dict(settings)
    if record.study is None:
        raise UserError("study: not given. Give a name from `lamina study list`.")
    return record


def parser() -> Parser:
    return _parser("run", "Train the missing runs, measure them, and judge the claims.")


def _parser(command: str, what: str) -> Parser:
    flags = Parser(f"study {command}", what, EXAMPLES, positional="STUDY ")
    flags.add_settings(StudySettings, positional=("study",))
    if command == "run":
        row = JOBS["study"]
        flags.add_output_modes(row.resumes)
        for switch in row.switches:
            flags.add_flag(f"--{switch.name.replace('_', '-')}", switch.help, False)
    return flags
