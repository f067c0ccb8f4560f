"""The jobs from Python, as the command line does them: train or measure, then write the page."""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import pandas as pd


def compare(*, resume: bool = False, overwrite: bool = False, bar: bool = True, **settings: Any) -> pd.DataFrame:
    """Train placements side by side, as `lamina compare` does; ``settings`` are its flags with underscores.

    Returns the rows of results.csv; OUTPUT/report.html is the page. In a script, call it under
    ``if __name__ == "__main__":``, since its worker processes import the script.

    Raises:
        UserError: (a ValueError) for settings with no meaning, a corpus that can't be read, an output folder in use.
    """
    from lamina.reports import study_report
    from lamina.studies.compare import compare as run
    from lamina.studies.settings import CompareSettings

    made = CompareSettings.from_dict(settings)
    try:
        results = run(made, resume=resume, overwrite=overwrite, bar=bar)
    except KeyboardInterrupt:  # an interrupted study gets its page of what is there
        if (Path(made.output) / "results.csv").is_file():
            study_report(Path(made.output))
        raise
    study_report(Path(made.output))
    return results


def probe_folder(
    *, png: bool = False, resume: bool = False, overwrite: bool = False, bar: bool = True, **settings: Any
) -> dict[str, Any]:
    """Measure a checkpoint into a folder, as `lamina probe` does; ``settings`` are its flags with underscores.

    Returns what result.json holds; OUTPUT/report.html is the page, OUTPUT/NAME.parquet the table of the probe NAME.
    ``lamina.probe`` gives the tables alone and writes nothing.

    Raises:
        UserError: (a ValueError) for settings with no meaning, a checkpoint or a corpus that can't be read, an output
            folder in use.
    """
    from lamina.probes.settings import ProbeSettings
    from lamina.reports import probing_report
    from lamina.reports.pictures import draw
    from lamina.studies.probing import probe_folder as run

    made = ProbeSettings.from_dict(settings)
    folder = Path(made.output)
    try:
        result = run(made, resume=resume, overwrite=overwrite, bar=bar)
    except KeyboardInterrupt:  # what is there gets its page
        if (folder / "result.json").is_file():
            probing_report(folder)
        raise
    probing_report(folder)
    if png:
        draw(folder)
    return result


def pretrain(*, resume: bool = False, overwrite: bool = False, bar: bool = True, **settings: Any) -> dict[str, Any]:
    """Train one model from scratch, as `lamina pretrain` does; ``settings`` are its flags with underscores.

    Returns what result.json holds; OUTPUT/model is the model, OUTPUT/report.html the page.

    Raises:
        UserError: (a ValueError) for settings with no meaning, a corpus that can't be read, an output folder in use.
    """
    from lamina.reports import run_report
    from lamina.training.pretrain import pretrain as run
    from lamina.training.settings import PretrainSettings

    made = PretrainSettings.from_dict(settings)
    result = run(made, resume=resume, overwrite=overwrite, bar=bar)
    if os.environ.get("RANK", "0") == "0":  # of several processes the first one writes
        run_report(Path(made.output))
    return result
