"""`lamina preflight` with a folder: the verdicts, the numbers behind them, and the records for the page."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import pandas as pd

from lamina.jobs.files import writing
from lamina.jobs.job import open_job
from lamina.jobs.kinds import Kind
from lamina.preflights.running import layer_table, run_preflight, table
from lamina.preflights.settings import PreflightSettings

RECORDS, ROWS, LAYERS = "preflight.json", "preflight.csv", "layers.parquet"


def preflight(
    settings: PreflightSettings | Mapping[str, Any], *, overwrite: bool = False, bar: bool = True
) -> pd.DataFrame:
    """Judge planned runs; returns one row per run. Writes the output folder, if there is one.

    Raises:
        UserError: for invalid settings, a corpus that can't be read, an output folder in use.
        OSError: the disk is full.
    """
    complete = settings if isinstance(settings, PreflightSettings) else PreflightSettings.from_dict(settings)
    if complete.output is None:
        return table(run_preflight(complete, bar=bar))
    job = open_job(Kind.PREFLIGHT, PreflightSettings, complete, overwrite=overwrite)
    results = run_preflight(complete, bar=bar)
    rows = table(results)
    with job:
        job.write_text(ROWS, rows.to_csv(index=False))
        with writing(job.folder / LAYERS) as temporary:
            layer_table(results).to_parquet(temporary.absolute(), index=False)
        losses = [result.burn_in.losses for result in results]
        command = complete.command()
        job.write_json(RECORDS, {"command": command, "rows": rows.to_dict("records"), "losses": losses})
    return rows
