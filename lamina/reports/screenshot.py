from __future__ import annotations

import shutil
import subprocess
import tempfile
from pathlib import Path

from lamina.errors import UserError
from lamina.jobs.files import writing

BROWSERS = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable", "chrome")
SECONDS = 120  # until a browser that draws nothing is stopped


def screenshot(page: Path, target: Path, width: int = 1200, height: int = 1600) -> Path:
    """Save the top ``height`` pixels of a page as a PNG. Raises UserError if no working browser is installed."""
    browser = next((path for name in BROWSERS if (path := shutil.which(name))), None)
    if browser is None:
        raise UserError(f"screenshot: no browser is on PATH. Install one of {', '.join(BROWSERS)}.")
    if not page.is_file():
        raise UserError(f"screenshot: no such page: {str(page)!r}. Give the path of a page.")
    target.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory() as folder:
        picture = Path(folder) / "picture.png"
        command = [
            browser,
            *("--headless", "--no-sandbox", "--disable-gpu", "--hide-scrollbars", "--disable-background-networking"),
            f"--user-data-dir={folder}/profile",
            f"--window-size={width},{height}",
            "--virtual-time-budget=10000",  # lets the figures draw before the picture is taken
            f"--screenshot={picture}",
            page.resolve().as_uri(),
        ]
        try:
            completed = subprocess.run(command, capture_output=True, text=True, timeout=SECONDS, check=False)
        except subprocess.TimeoutExpired:
            raise UserError(
                f"screenshot: {Path(browser).name} took longer than {SECONDS} s. Try again, or use another browser."
            ) from None
        if not picture.is_file():
            last = completed.stderr.strip().splitlines()[-1:] or ["no message"]
            raise UserError(f"screenshot: {Path(browser).name} made no picture ({last[0]}). Try another browser.")
        with writing(target) as temporary:
            shutil.copyfile(picture, temporary)
    return target
