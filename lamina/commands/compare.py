"""`lamina compare`: the main job."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from lamina.api import compare
from lamina.commands.arguments import add_output_modes, add_settings, given_settings, make_parser

if TYPE_CHECKING:
    import pandas as pd

EXAMPLES = """
  lamina compare
  lamina compare --placements pre_ln,peri_ln,keel --num-layers 48 --hidden-size 64 --steps 200
  lamina compare --corpus books/ --tokenizer bpe:4096 --learning-rates 1e-3,3e-3,1e-2 --seeds 0,1,2 --output runs/books
  lamina compare --placements "mix_ln(alpha=0.5),my_placement.yaml" --init same:scaled
  lamina compare --output runs/books --resume
"""


def run(argv: list[str]) -> int:
    """Parse, train, write the page, say where it is."""
    from lamina.studies.settings import CompareSettings

    parser = make_parser(
        "compare",
        "Train placements side by side on your text; OUTPUT/report.html shows which is best, which failed, and why.",
        EXAMPLES,
    )
    add_settings(parser, CompareSettings)
    add_output_modes(parser, "go on with the study in the output folder")
    given, others = given_settings(parser, argv, "resume", "overwrite")
    folder = Path(given.get("output", CompareSettings.output))
    if others.resume and (folder / "study.yaml").is_file():
        from lamina.studies.compare import refuse_changes

        given = refuse_changes(folder, given)
    results = compare(**given, resume=others.resume, overwrite=others.overwrite)
    print(summary(results))
    print(f"\nthe page:    {folder / 'report.html'}\nthe numbers: {folder / 'results.csv'}")
    return int(set(results["status"]) == {"failed"})  # where no trial ran, a script should stop


def summary(results: pd.DataFrame) -> str:
    """The ranking of a study's results as lines for the terminal."""
    from lamina.reports import summarize

    lines = [f"{'placement':<24} {'status':<20} {'eval loss':>17} {'learning rate':>13}"]
    for row in summarize(results).to_dict("records"):
        loss, spread = row["eval_loss"], row["eval_loss_std"]
        shown = "-" if loss != loss else f"{loss:.4f}" + (f" ± {spread:.4f}" if spread == spread else "")
        lines.append(f"{row['placement']:<24} {row['status_text']:<20} {shown:>17} {row['learning_rate']:>13g}")
    return "\n".join(lines)
