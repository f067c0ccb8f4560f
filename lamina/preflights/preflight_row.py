"""The catalog entry of `lamina preflight`."""

from __future__ import annotations

from typing import TYPE_CHECKING

from lamina.core.frames import Frame
from lamina.core.initializers import SUITS
from lamina.jobs.kinds import Kind
from lamina.jobs.row import Given, JobRow, Switch

if TYPE_CHECKING:
    from lamina.preflights.settings import PreflightSettings


def settings() -> type[PreflightSettings]:
    from lamina.preflights.settings import PreflightSettings

    return PreflightSettings


def preflight(settings: Given, *, overwrite: bool = False, bar: bool = True) -> Frame:
    from lamina.preflights.planned_runs import preflight

    return preflight(settings, overwrite=overwrite, bar=bar)


PREFLIGHT = JobRow(
    name="preflight",
    kind=Kind.PREFLIGHT,
    summary="check a planned run: whether it will train, why not, and what to change",
    about=(
        "Check a run before you start it. Lamina trains the run's first steps at full depth, measures the layers, and\n"
        "reports whether the run will train, why, and what to change. If an early layer hardly affects the output,\n"
        f"or a loss is not finite, Lamina also tries the initializer {SUITS} and a lower learning rate.\n"
        "The verdicts:\n\n"
        "  fine             the model learned in these steps, and the run will probably train\n"
        "  risky            the model learned in these steps, but the run may still fail\n"
        '  undecided        too few steps to tell; the line "change" gives a number of steps that should be enough\n'
        "  will not train   we do not expect the model to learn\n\n"
        'The exit code is 0. With --strict, the exit code is 1 if any verdict is "will not train".'
    ),
    examples="""
  lamina preflight --placement keel --num-layers 48 --learning-rate 5e-3
  lamina preflight --placements post_ln,peri_ln,keel --num-layers 32 --hidden-size 48 --num-heads 2
  lamina preflight --placement fusenorm --init normal --learning-rates 3e-3,2e-2 --warmup 0.3 --output runs/preflight
  lamina preflight --backbone llama-71m --placement my_placement.yaml --corpus books/ --tokenizer bpe:8192 --json
""",
    settings=settings,
    run=preflight,
    returns=(
        "Returns one row per planned run: the verdict, the reason, what to change, and the measured numbers "
        "(docs/evidence/preflight.md). With ``output``, the function also writes a folder with preflight.csv, "
        "layers.parquet, preflight.json and report.html. `lamina report` makes the page from preflight.json."
    ),
    outcome="pd.DataFrame",
    resumes="",
    switches=(
        Switch(
            name="json",
            help="print the table as JSON, with every measured number",
            prints=True,
        ),
        Switch(
            name="strict",
            help='exit with 1 if a verdict is "will not train"',
            fails=lambda rows: bool((rows["verdict"] == "will not train").any()),
        ),
    ),
)
