"""`lamina compare`: the main job."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING

from lamina.api import compare
from lamina.commands.arguments import Parser, add_output_modes, add_settings, given_settings, make_parser
from lamina.errors import TrialsFailed
from lamina.studies.record import read_study
from lamina.studies.settings import CompareSettings

if TYPE_CHECKING:
    import pandas as pd

EXAMPLES = """
  lamina compare
  lamina compare --placements pre_ln,peri_ln,keel --num-layers 48 --hidden-size 64 --steps 200
  lamina compare --corpus books/ --tokenizer bpe:4096 --learning-rates 1e-3,3e-3,1e-2 --seeds 0,1,2 --output runs/books
  lamina compare --learning-rates 3e-3,1e-2 --learning-rates-of "keel=1e-2,3e-2; post_ln=1e-4,1e-3"
  lamina compare --placements "mix_ln(alpha=0.5),my_placement.yaml" --init same:normal
  lamina compare --output runs/books --resume
"""


def parser() -> Parser:
    """The command's flags."""
    flags = make_parser(
        "compare",
        "Train placements side by side on your text; OUTPUT/report.html shows which is best, which failed, and why.",
        EXAMPLES,
    )
    add_settings(flags, CompareSettings)
    add_output_modes(flags, "continue the study in the output folder")
    return flags


def run(argv: list[str]) -> int:
    """Parse, train, write the page, print the ranking and the page's path."""
    typed, others = given_settings(parser(), argv, "resume", "overwrite")
    folder = Path(typed.get("output", CompareSettings.output))
    try:
        results, failure = compare(**typed, resume=others.resume, overwrite=others.overwrite).results, None
    except TrialsFailed as error:
        results, failure = error.results, error
    print(summary(results, read_study(folder)["settings"]))
    print(f"\nthe page:    {folder / 'report.html'}\nthe numbers: {folder / 'results.csv'}")
    return 0 if failure is None else failed(failure)


def failed(failure: TrialsFailed) -> int:
    """Print that every trial failed; returns the exit code, which stops a script."""
    print(f"lamina: {' '.join(str(failure).split())}", file=sys.stderr)
    return 1


def summary(results: pd.DataFrame, settings: Mapping[str, object] | None = None) -> str:
    """The ranking of a study's results as lines for the terminal, with the notices; ``settings``: the study's."""
    from lamina.reports import notices, summarize
    from lamina.reports.ranking import is_above_bigram

    ranking = summarize(results)
    lines = [f"{'':>3} {'placement':<24} {'status':<20} {'eval loss':>17} {'learning rate':>13}"]
    above = []
    for row in ranking.to_dict("records"):
        loss, spread, rank = row["eval_loss"], row["eval_loss_std"], row["rank"]
        place = f"{rank:>3.0f}" if rank == rank else "  -"
        loss_text = "-" if loss != loss else f"{loss:.4f}" + (f" ± {spread:.4f}" if spread == spread else "")
        lines.append(
            f"{place} {row['placement']:<24} {row['status_text']:<20} {loss_text:>17} {row['learning_rate']:>13g}"
        )
        above += [row["placement"]] if row["finished"] and is_above_bigram(row) else []
    bigram = ranking["bigram_entropy"].mean()
    if bigram == bigram:
        lines.append(f"    {'a bigram table':<24} {'':<20} {bigram:>17.4f}")
    texts = notices(ranking, results, settings=settings)
    if above:
        texts.insert(0, f"Not ranked, since a bigram table of the text that was read does as well: {', '.join(above)}.")
    return "\n".join([*lines, "", *(f"note: {notice}" for notice in texts)])
