"""Check whether a module's output grows with the model's width or depth (the coordinate check).

Models of several sizes take a few optimizer steps on the same batch. Lamina records the mean magnitude of every
module's output before each step and after the last step. With the right scaling, the magnitude is equal at all sizes.
The check comes from the muP package (Yang et al. 2022, Appendix D.1).
"""

from __future__ import annotations

import datetime
import math
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import replace
from pathlib import Path
from typing import Any, TypeAlias

import numpy as np
import pandas as pd
import torch
from torch import nn
from tqdm.auto import tqdm

from lamina.core.frames import Frame
from lamina.core.json_types import Json
from lamina.core.progress import has_bars
from lamina.data.blocks import ArrayBlocks, TokenBlock
from lamina.data.encoding import vocab_size_of
from lamina.data.packed import prepare_blocks
from lamina.jobs.files import write_parquet
from lamina.jobs.folder import Resume
from lamina.jobs.job import ResumePolicy, open_job
from lamina.jobs.kinds import Kind
from lamina.jobs.names import COORDINATES, RESULT, SLOPES
from lamina.jobs.seals import altered, write_result
from lamina.modeling.building import build
from lamina.modeling.parts import temporary_hooks
from lamina.studies.record import has_study, stored_study, write_study
from lamina.studies.settings import CoordCheckSettings
from lamina.training.objectives.objective import objective_of
from lamina.training.objectives.text import CausalLM
from lamina.training.optimization.optimizer import scaling_of, step_factors
from lamina.training.resolve import backbone_config, resolve_run
from lamina.training.settings import PretrainSettings
from lamina.training.short_run import ShortRun
from lamina.training.source import plan_of

Measurement: TypeAlias = tuple[int, int, str, str, float]
"""One measurement: step, layer, module, metric, value. Layers count from 0, and -1 means outside the blocks.

The module "block" is a whole block. The metric "size" is the output's mean magnitude. The metric "change" is the mean
magnitude of the difference between the output now and the output before the first step.
"""
COLUMNS = ("seed", "step", "layer", "module", "metric", "value")  # after the width or depth
STREAMS = ("attention", "feed_forward", "block")  # the modules of a block whose output is the stream
_LAYER = re.compile(r"(?:model\.)?(?:backbone\.)?(?:layers\.(\d+)\.?)?(.*)")


def coord_check(
    settings: CoordCheckSettings | Mapping[str, Any],
    *,
    resume: Resume = False,
    overwrite: bool = False,
    bar: bool = True,
) -> Frame:
    """Run the coordinate check and write the results into its folder. Returns the table of slopes.

    Raises:
        UserError: a setting is invalid, Lamina cannot read the corpus, or the output folder holds files.
        OSError: the disk is full.
    """

    def stored(folder: Path) -> Json | None:
        return stored_study(folder) if has_study(folder) else None

    policy = ResumePolicy(what="check", free=CoordCheckSettings.free())
    modes: Json = {"resume": resume, "overwrite": overwrite, "policy": policy, "stored": stored}
    job = open_job(Kind.COORD_CHECK, CoordCheckSettings, settings, **modes)
    checked, folder, runs = job.settings, job.folder, job.settings.runs()
    columns = [checked.axis, *COLUMNS]
    for run in (runs[size, checked.all_seeds[0]] for size in checked.all_sizes):
        objective_of(backbone_config(run)).refuse_for("coord-check", CausalLM.head, run.backbone)
        resolve_run(run)
    blocks, tokenizer = prepare_blocks(
        checked.corpus, checked.tokenizer, checked.sequence_length, text_field=checked.text_field, progress=bar
    )
    ids, vocabulary = blocks.train.sample(checked.batch_size), vocab_size_of(tokenizer)
    if checked.threads:
        torch.set_num_threads(checked.threads)
    with job:
        created = datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds")
        header = {"kind": str(Kind.COORD_CHECK), "command": checked.command(), "created": created}
        write_study(folder, {**header, "settings": checked.to_dict()})
        table = pd.DataFrame(columns=columns)
        with suppress(OSError, ValueError, KeyError):
            if job.resumes and COORDINATES not in altered(folder):  # keep the measurements, unless a bit has flipped
                path = (folder / COORDINATES).absolute()
                table = pd.read_parquet(path, page_checksum_verification=True)[columns]
        (folder / RESULT).unlink(missing_ok=True)  # its checksums of the coordinates will be outdated
        done = set(zip(table[checked.axis], table["seed"], strict=True))
        todo = {pair: run for pair, run in runs.items() if pair not in done}
        with tqdm(
            total=len(todo) * (checked.steps + 1), unit="step", disable=not (bar and has_bars()), dynamic_ncols=True
        ) as progress:
            for (size, seed), run in todo.items():
                progress.set_description(f"{checked.axis} {size}, seed {seed}")
                rows = [(size, seed, *row) for row in measure(run, ids, vocabulary, progress.update)]
                new = pd.DataFrame(rows, columns=columns)
                table = new if table.empty else pd.concat([table, new], ignore_index=True)
                # checksums: reading detects a flipped bit
                write_parquet(folder / COORDINATES, table, write_page_checksum=True)
        wanted = [pair in runs for pair in zip(table[checked.axis], table["seed"], strict=True)]
        result = slopes(table[wanted], checked.tolerance)
        job.write_text(SLOPES, result.to_csv(index=False))
        write_result(folder, verdict(result, checked))
    return result


def measure(
    settings: PretrainSettings, ids: torch.Tensor, vocab_size: int, tick: Callable[[], object] = lambda: None
) -> list[Measurement]:
    """Train a model on one batch ``ids`` [blocks, tokens] at a constant learning rate, and measure all outputs."""
    torch.manual_seed(settings.seed)
    config = backbone_config(settings, vocab_size=vocab_size)
    scaling = scaling_of(settings)
    plan = plan_of(settings, config.num_hidden_layers)
    model = build(config, plan, head=CausalLM.head, init=settings.init, profile_ids=ids, scaling=scaling)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    run = ShortRun(
        replace(settings, batch_size=len(ids), trainer={"optim": "adamw_torch"}),
        model,
        OneBatch(ids.numpy()),
        device=device,
        step_factors=None if scaling is None else step_factors(model, scaling),
        schedule=lambda done: 1.0,
    )
    first: dict[str, torch.Tensor] = {}
    measurements: list[Measurement] = []

    def record(step: int) -> None:
        first.update(outputs if step == 0 else {})
        for name, value in outputs.items():
            match = _LAYER.fullmatch(name)
            assert match is not None
            location = step, -1 if match[1] is None else int(match[1]), match[2] or "block"
            measurements.append((*location, "size", value.abs().mean().item()))
            if step:
                measurements.append((*location, "change", (value - first[name]).abs().mean().item()))
        tick()

    def after_step(done: int) -> bool:
        record(done - 1)
        return True

    with outputs_of(model) as outputs:
        run.train(after_step)
        if run.stopped:
            taken = len(run.losses)
            record(taken - 1)
            outputs.update({name: torch.full_like(value, math.nan) for name, value in outputs.items()})
            for step in range(taken, settings.steps + 1):  # the weights are not finite
                record(step)
        else:
            with torch.no_grad():
                model.train()(input_ids=ids.to(device))
            record(settings.steps)
    return measurements


class OneBatch(ArrayBlocks):
    """Repeat one batch of token ids [blocks, tokens] endlessly."""

    in_order = True

    def __getitems__(self, indices: Sequence[int]) -> list[TokenBlock]:
        return super().__getitems__([index % len(self) for index in indices])


@contextmanager
def outputs_of(model: nn.Module) -> Iterator[dict[str, torch.Tensor]]:
    """In a ``with`` block, hold the latest output of each module in float32, by the module's name."""
    outputs: dict[str, torch.Tensor] = {}

    def keep(name: str) -> Callable[[nn.Module, object, object], None]:
        def hook(module: nn.Module, args: object, output: object) -> None:
            value = output[0] if isinstance(output, tuple) else output
            if torch.is_tensor(value) and value.is_floating_point():
                outputs[name] = value.detach().float()

        return hook

    excluded = ("", "model", "model.backbone")  # the whole model, because the table has all its parts
    with temporary_hooks() as hooks:
        for name, module in model.named_modules():
            if name not in excluded and "rotary" not in name:
                hooks.append(module.register_forward_hook(keep(name)))
        yield outputs


def slopes(table: Frame, tolerance: float) -> Frame:
    """Fit the exponent e in |x| ~ size^e for each module and step. The size is the width or the depth.

    The exponent is the least-squares slope of log |x| (averaged over seeds) against log size, averaged over layers.
    Each row also has the smallest and largest slope of a layer, and a verdict (flat, grows, shrinks or broken).
    "Broken" means that a value is 0 or not finite. The metric "change" has no verdict.
    """
    axis = "depth" if "depth" in table else "width"
    table = shares(table) if axis == "depth" else table
    safe = table.assign(log=np.log(table["value"].astype(float).where(table["value"] > 0)))
    keys = ["metric", "module", "layer", "step"]
    means: Frame = safe.groupby([*keys, axis], sort=False)["log"].agg(lambda v: v.mean(skipna=False)).unstack(axis)
    x = np.log(np.asarray(means.columns, dtype=float))
    x = (x - x.mean()) / ((x - x.mean()) ** 2).sum()
    each = pd.Series(means.to_numpy(dtype=float) @ x, index=means.index)
    groups = each.groupby(level=["metric", "module", "step"], sort=False)
    rows: Frame = groups.agg(slope=lambda v: v.mean(skipna=False), low="min", high="max", layers="size").reset_index()
    verdicts = []
    for metric, slope in zip(rows["metric"], rows["slope"], strict=True):
        word = "grows" if slope > tolerance else "shrinks" if slope < -tolerance else "flat"
        verdicts.append(None if metric != "size" else word if math.isfinite(slope) else "broken")
    return rows.assign(verdict=verdicts)


def shares(table: Frame) -> Frame:
    """Keep one block for each equal part of the depth, so that models of different depths have the same rows.

    The shallowest model has D blocks, and every model has D parts. In a model of L blocks, part k ends with block
    ceil(k L / D). The result has the rows of these last blocks, with the part's number as the layer.
    """
    depth, layer, count = table["depth"].astype(int), table["layer"].astype(int), int(table["depth"].min())
    share = (layer + 1) * count // depth
    ends = (share * depth + count - 1) // count == layer + 1
    return table.assign(layer=share - 1)[ends & (layer >= 0)].pipe(lambda kept: pd.concat([table[layer < 0], kept]))


def verdict(rows: Frame, settings: CoordCheckSettings) -> Json:
    """Return the content of result.json: the worst verdict, and the modules with this verdict.

    The logits under muP and the residual stream under CompleteP may shrink with the size n, down to n^-1/2. Training
    makes both grow again.
    """
    sizes = rows[rows["metric"] == "size"]
    smaller: tuple[str, ...] = ()
    if settings.axis == "width" and settings.width_scaling.startswith("mup"):
        smaller = ("lm_head",)
    elif settings.axis == "depth" and settings.depth_scaling == "completep":
        smaller = STREAMS
    expected = sizes["module"].isin(smaller) & sizes["slope"].between(-0.5 - settings.tolerance, 0)
    faults = sizes[sizes["verdict"].ne("flat") & ~expected]
    worst = next((v for v in ("broken", "grows", "shrinks") if faults["verdict"].eq(v).any()), "flat")
    steepest = sizes.loc[sizes["slope"].abs().idxmax()] if sizes["slope"].notna().any() else None
    return {
        "status": "finished",
        "verdict": worst,
        "modules": sorted(set(faults.loc[faults["verdict"].eq(worst), "module"])),
        "steepest": None
        if steepest is None
        else {"module": steepest["module"], "step": int(steepest["step"]), "slope": float(steepest["slope"])},
        "tolerance": settings.tolerance,
    }
