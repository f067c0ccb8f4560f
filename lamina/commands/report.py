"""`lamina report FOLDER`: write a folder's report page from its records."""

from __future__ import annotations

import time
from pathlib import Path

from lamina.commands.arguments import Parser
from lamina.core.extras import require
from lamina.core.terminal import show
from lamina.core.values import number, path, whole_number
from lamina.errors import renamed_setting

EXAMPLES = """
  lamina report runs/compare
  lamina report runs/compare --screenshot report.png
  lamina report runs/keel-64 --follow              while the run trains; reload the page in the browser
  lamina report runs/studies/mix-ppl-cpu --figures
"""


def parser() -> Parser:
    flags = Parser("report", "Rewrite the report page of an output folder.", EXAMPLES, "FOLDER ")
    flags.add_word("folder", "the output folder of any command, of lamina.watch or of lamina.LayerMonitor")
    flags.add_flag("--screenshot", "also take a screenshot of the page (needs Chromium or Chrome)", metavar="PNG")
    flags.add_flag("--height", "the screenshot's height in pixels, from the top of the page", 2300)
    about = "rewrite the page whenever new records arrive, until the run or study has ended"
    flags.add_flag("--follow", about, False)
    flags.add_flag("--every", "with --follow, seconds between two checks of the folder", 10.0, "X")
    about = "also save the figures of `lamina study` (as SVG and PDF; needs matplotlib) or of `lamina probe` (as PNG)"
    flags.add_flag("--figures", about, False)
    return flags


@renamed_setting("folder")
def run(argv: list[str]) -> int:
    options = parser().parse(argv)
    whole_number("height", options.height)
    number("every", options.every, 1.0)
    for name in ("folder", "screenshot"):
        if getattr(options, name) is not None:
            setattr(options, name, path(name, getattr(options, name)))
    require("report", "report")
    from lamina.reports import report

    if options.follow:
        page = _follow(Path(options.folder), options.every)
    else:
        page = report(Path(options.folder))
        show(f"the page: {page}")
    if options.screenshot:
        from lamina.reports.screenshot import screenshot

        screenshot(page, Path(options.screenshot), height=options.height)
        show(f"the picture: {options.screenshot}")
    if options.figures:
        from lamina.reports import draw

        for written in draw(Path(options.folder)):
            show(f"a figure: {written}")
    return 0


def _follow(folder: Path, every: float) -> Path:
    """Write the page whenever new records arrive, until the job ends. Return the page's path."""
    from lamina.reports.registry import follow

    written: Path | None = None
    said = ""
    for page, why in follow(folder, every=every):
        if page is not None:
            written = page
            show(f"{time.strftime('%H:%M:%S')}  the page: {page}")
        elif why != said:
            said = why
            show(f"{time.strftime('%H:%M:%S')}  no page yet: {why}")
    assert written is not None  # ``follow`` ends with a page or with an error
    return written
