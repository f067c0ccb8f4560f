"""`lamina report FOLDER`: write a folder's page from its records."""

from __future__ import annotations

from pathlib import Path

from lamina.commands.arguments import make_parser
from lamina.core.values import path, whole_number

EXAMPLES = """
  lamina report runs/compare
  lamina report runs/compare --screenshot report.png
  lamina report runs/studies/mix-ppl-cpu --figures
"""


def run(argv: list[str]) -> int:
    """Write report.html again and, on request, take a screenshot of it."""
    parser = make_parser(
        "report",
        "Write the page of a folder again, whichever job wrote the folder.",
        EXAMPLES,
        "FOLDER ",
    )
    parser.add_argument(
        "folder", help="the folder of a run, a study, a transfer, a coordinate check, a preflight or a probing"
    )
    parser.add_argument(
        "--screenshot",
        type=str,
        default=None,
        metavar="PNG",
        help="also take a screenshot of the page (needs Chromium or Chrome)",
    )
    parser.add_argument(
        "--height", type=int, default=2300, help="the screenshot's height in pixels, from the top of the page"
    )
    parser.add_argument(
        "--figures",
        action="store_true",
        help="also write the figures of a study with claims as SVG and PDF (needs matplotlib: lamina[figures])",
    )
    options = parser.parse_args(argv)
    whole_number("height", options.height)
    for name in ("folder", "screenshot"):
        if options[name] is not None:
            path(name, options[name])
    from lamina.jobs.folder import recover
    from lamina.reports import report, screenshot

    recover(Path(options.folder))

    page = report(Path(options.folder))
    print(f"the page: {page}")
    if options.screenshot:
        screenshot(page, Path(options.screenshot), height=options.height)
        print(f"the picture: {options.screenshot}")
    if options.figures:
        from lamina.reports.studies.printed import write_all

        for written in write_all(Path(options.folder)):
            print(f"a figure: {written}")
    return 0
