"""`lamina compare`: the main job."""

from __future__ import annotations

from pathlib import Path

from lamina.commands.arguments import add_settings, given_settings, make_parser

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
    parser.add_argument("--resume", action="store_true", help="go on with the study in the output folder")
    parser.add_argument("--overwrite", action="store_true", help="delete what the output folder holds first")
    given, others = given_settings(parser, argv, "resume", "overwrite")
    folder = Path(given.get("output", CompareSettings.output))
    if others.resume and (folder / "study.yaml").is_file():
        from lamina.studies.compare import refuse_changes

        given = refuse_changes(folder, given)
    settings = CompareSettings.from_dict(given)
    return compare_and_report(settings, resume=others.resume, overwrite=others.overwrite)


def compare_and_report(settings: object, *, resume: bool = False, overwrite: bool = False) -> int:
    """Run the study, then write its page; an interrupted study gets its page of what is there, and 130."""
    from lamina.reports import study_report
    from lamina.studies.compare import compare

    folder = Path(settings.output)  # type: ignore[attr-defined]
    try:
        compare(settings, resume=resume, overwrite=overwrite)  # type: ignore[arg-type]
    except KeyboardInterrupt:
        if (folder / "results.csv").is_file():
            study_report(folder)
        raise
    page = study_report(folder)
    print(summary(folder))
    print(f"\nthe page:    {page}\nthe numbers: {folder / 'results.csv'}")
    return 0


def summary(folder: Path) -> str:
    """The ranking of a study's results.csv as lines for the terminal."""
    import pandas as pd

    from lamina.reports import summarize

    lines = [f"{'placement':<24} {'status':<20} {'eval loss':>17} {'learning rate':>13}"]
    for row in summarize(pd.read_csv(folder / "results.csv")).to_dict("records"):
        loss, spread = row["eval_loss"], row["eval_loss_std"]
        shown = "-" if loss != loss else f"{loss:.4f}" + (f" ± {spread:.4f}" if spread == spread else "")
        lines.append(f"{row['placement']:<24} {row['status_text']:<20} {shown:>17} {row['learning_rate']:>13g}")
    return "\n".join(lines)
