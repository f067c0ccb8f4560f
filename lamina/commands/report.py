"""`lamina report FOLDER`: write a folder's page from its records."""

from __future__ import annotations

from pathlib import Path

from lamina.commands.arguments import make_parser
from lamina.core.values import path, whole_number

EXAMPLES = """
  lamina report runs/compare
  lamina report runs/compare --screenshot report.png
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
    return 0
