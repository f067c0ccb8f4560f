"""Measure a study's models with probes before and after training, and keep training records.

A measurement's name is "TIME/NAME", such as "init/gradients" or "records/layers". Each measurement has a Parquet file
in the run's folder. The file measures.json lists which measurements succeeded, and why the others failed.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, cast

from lamina.errors import UserError, one_line
from lamina.jobs.files import noted, write_parquet
from lamina.jobs.names import MEASURES
from lamina.jobs.run_folder import RunFolder, parse_lines
from lamina.jobs.seals import write_with_seal
from lamina.training.settings import PretrainSettings

if TYPE_CHECKING:
    import pandas as pd

FOLDER = "measures"
MEASURED = "measured"
SEQUENCES = 16
"""The number of held-out text blocks that a probe reads."""


def names(measures: Mapping[str, Iterable[str]]) -> tuple[str, ...]:
    return tuple(f"{time}/{name}" for time, listed in measures.items() for name in listed)


def file_name(measure: str) -> str:
    """Return the file name of a measurement's table, such as "end-angular_distance-tokens-all.parquet"."""
    return re.sub(r"[^\w.]+", "-", measure).strip("-") + ".parquet"


def missing(folder: Path, measures: Iterable[str]) -> list[str]:
    """Return the measurements that Lamina has not tried, and the measurements without a table."""
    state = noted(folder / MEASURES)
    return [
        measure
        for measure in measures
        if measure not in state or (state[measure] == MEASURED and _file(folder, measure) is None)
    ]


def table(folder: Path, measure: str) -> pd.DataFrame | None:
    """Read a measurement's table. Returns None if there is no table. Raises UserError for an unreadable file."""
    path = _file(folder, measure)
    return None if path is None else read_table(path)


def read_table(path: Path) -> pd.DataFrame:
    import pandas as pd

    try:
        return pd.read_parquet(path.absolute())
    except Exception as error:  # pyarrow, pandas and json raise many kinds of errors for damaged files
        raise UserError(
            f"{str(path)!r}: not readable as Parquet ({one_line(error)}). Restore the original file."
        ) from None


def _file(folder: Path, measure: str) -> Path | None:
    path = folder / FOLDER / file_name(measure)
    return path if path.is_file() else None


def measure(folder: Path, settings: PretrainSettings, measures: Iterable[str]) -> None:
    """Make the missing measurements of a run. If a measurement fails, record the reason."""
    wanted = missing(folder, measures)
    if not wanted:
        return
    (folder / FOLDER).mkdir(exist_ok=True)
    for name in wanted:
        try:
            rows, note = _table(folder, settings, name), MEASURED
        except UserError as error:
            rows, note = None, str(error)
        if rows is not None:
            write_parquet(folder / FOLDER / file_name(name), rows, compression="zstd")
        write_with_seal(folder, MEASURES, {**noted(folder / MEASURES), name: note}, [f"{FOLDER}/*.parquet"])


def _table(folder: Path, settings: PretrainSettings, measure: str) -> pd.DataFrame:
    """Make a measurement. Raises UserError if the run has no model, or if the probe does not fit the model."""
    time, name = measure.split("/", 1)
    if time == "records":
        return _records(folder, name)
    import torch
    from transformers import PreTrainedTokenizerBase

    from lamina.modeling.backbones.loading import load_weights, read_config
    from lamina.modeling.modeling_lamina import HEADS
    from lamina.probes.engine.measure import make_context
    from lamina.probes.engine.measure import measure as measured
    from lamina.probes.engine.probe_settings import ProbeSettings
    from lamina.probes.engine.registry import make
    from lamina.training.resolve import initial_model, resolve_run

    resolved = resolve_run(settings)
    splits, processor = resolved.read()
    if time == "init":
        model = cast(torch.nn.Module, initial_model(resolved, splits, processor)[0])
    elif (folder / "model").is_dir():
        stored = folder / "model"
        head = HEADS[resolved.objective.head].model
        model = cast(torch.nn.Module, load_weights(stored, read_config(stored, "model"), head, "model")[0])
    else:
        raise UserError("no model: the run diverged")
    tokenizer = processor if isinstance(processor, PreTrainedTokenizerBase) else None
    model, how = model.to(resolved.device, torch.float32), ProbeSettings()
    context = make_context(model, how, splits.eval.sample(SEQUENCES), tokenizer, sample=True)
    probe = make(name)
    return measured(context, [probe], how, sampled=False)[probe.name]


def _records(folder: Path, name: str) -> pd.DataFrame:
    import pandas as pd

    if name == "layers":
        parts = sorted((folder / "layers").glob("part-*.parquet"))
        if not parts:
            raise UserError("no layer records")
        return pd.concat([pd.read_parquet(part.absolute()) for part in parts], ignore_index=True)
    if name == "held_out":
        from lamina.lab.posttraining.settings import HELD_OUT

        return pd.DataFrame(parse_lines(folder / HELD_OUT)[0])
    if not (records := RunFolder(folder).metrics):
        raise UserError("no training records")
    rows = pd.DataFrame(records)
    return rows.drop(columns=["tokens_per_second"], errors="ignore")
