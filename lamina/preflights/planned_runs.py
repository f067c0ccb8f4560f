"""Measure and judge planned runs for `lamina preflight`, and write the page's records."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import closing, contextmanager
from dataclasses import asdict, dataclass, replace
from typing import Any

import pandas as pd
import torch
from tqdm.auto import tqdm

from lamina.core.initializers import SUITS
from lamina.core.json_types import Json
from lamina.core.progress import ProgressLines, has_bars
from lamina.core.terminal import show_line
from lamina.data.blocks import Blocks
from lamina.jobs.files import write_parquet
from lamina.jobs.job import open_job
from lamina.jobs.kinds import Kind
from lamina.jobs.names import LAYERS, PREFLIGHT, PREFLIGHT_ROWS
from lamina.placements.resolution import find
from lamina.preflights.burn_in import BurnIn, BurningIn, Snapshot, choose
from lamina.preflights.settings import PreflightSettings
from lamina.preflights.verdict import (
    VERDICTS,
    Features,
    PreflightVerdict,
    VerdictWord,
    calibration,
    disconnected,
    features,
    judge,
    verdict_of,
)
from lamina.training.monitor.writers import LAYER_COLUMNS
from lamina.training.objectives.objective import objective_of
from lamina.training.objectives.text import CausalLM, read_text
from lamina.training.resolve import backbone_config, resolve_run
from lamina.training.setting_groups import in_steps
from lamina.training.settings import PretrainSettings

FLOPS = {"cpu": 1e12, "cuda": 1e14}


@dataclass(frozen=True, kw_only=True)
class Preflight:
    """The result for one planned run: the record of its first steps, the measured numbers and the verdict."""

    run: PretrainSettings
    advice: str
    burn_in: BurnIn
    features: Features
    verdict: PreflightVerdict

    def row(self) -> Json:
        proxy, first = self.burn_in.proxy, self.burn_in.snapshots[0]
        return {
            "placement": self.run.placement,
            "num_layers": proxy.plan.num_layers,
            "hidden_size": proxy.planned_hidden_size,
            "init": proxy.init,
            "learning_rate": self.run.learning_rate,
            "warmup": self.run.warmup,
            "steps": self.run.steps,
            "seed": self.run.seed,
            "verdict": self.verdict.verdict,
            "reason": self.verdict.reason,
            "change": self.verdict.change,
            "chance": self.verdict.chance,
            "deciding_steps": self.verdict.deciding_steps,
            "advice": self.advice,
            "fp16_headroom": self.features.headroom,
            "ffn_variance_share": ffn_share(first),
            "loss": self.burn_in.snapshots[-1].loss,
            "unigram_loss": first.unigram,
            **asdict(self.features),
            "burn_in_steps": len(self.burn_in.losses),
            "burn_in_warmup": self.burn_in.warmup,
            "measured_hidden_size": proxy.hidden_size,
            "measured_batch_size": proxy.settings.batch_size,
            "note": proxy.note,
        }


def ffn_share(shot: Snapshot) -> float:
    """Sum, over all layers, the ratio of the feed-forward's added variance to the skip's variance.

    FuseNorm's Theorem 1 requires a variance of O(1 / L) in each of L layers, so the sum is about 1 at any depth.
    """
    added, skip = shot.series("added_variance", "feed_forward"), shot.series("skip_variance", "feed_forward")
    return sum(added[layer] / skip[layer] if skip[layer] > 0 else math.inf for layer in added)


class PlanProgress:
    """Show the progress over the steps of all planned runs, and print a line when a run ends."""

    def __init__(self, plans: int, steps: int, *, show: bool):
        self.plans, self.steps, self.show = plans, steps, show
        self.done, self.begun, self.count = 0, 0, 0  # begun: the steps before the current run
        off = not (show and has_bars())
        self.bar = tqdm(
            total=plans * steps, desc=f"0/{plans} plans", unit="step", disable=off, leave=False, dynamic_ncols=True
        )
        self.lines = ProgressLines(plans * steps, show=show and off)
        self._write()

    def tick(self) -> None:
        self.done += 1
        burn_ins = math.ceil((self.done - self.begun) / self.steps)  # more than one, while no verdict is certain
        total = self.begun + (burn_ins + self.plans - self.count - 1) * self.steps
        self.lines.total = max(total, self.done + 1)
        self._write()

    def ended(self, run: PretrainSettings, verdict: VerdictWord) -> None:
        self.count += 1
        self.begun = self.done
        self.lines.total = self.done + (self.plans - self.count) * self.steps
        if self.show:
            which = f"{run.placement} at {run.learning_rate:g}"
            show_line(f"{verdict:>{max(map(len, VERDICTS))}}  {which}  plans done {self.count}/{self.plans}")

    def close(self) -> None:
        self.bar.close()

    def _write(self) -> None:
        self.bar.total = self.lines.total
        self.bar.set_description(f"{self.count}/{self.plans} plans", refresh=False)
        self.bar.update(self.done - self.bar.n)
        self.lines.see(self.done, {"plans done": f"{self.count}/{self.plans}"})


def run_preflight(settings: PreflightSettings, *, bar: bool = True) -> list[Preflight]:
    """Measure and judge every planned run. Raises UserError for invalid settings or an unreadable corpus."""
    runs = settings.runs()
    for run in runs:
        objective_of(backbone_config(run)).refuse_for("preflight", CausalLM.head, run.backbone)
        # a run that exceeds the memory is allowed, because Lamina trains a narrower model
        resolve_run(run, trained=False)
    with _threads(settings.threads):
        blocks, _ = read_text(runs[0], bar)
        device = "cuda" if torch.cuda.is_available() else "cpu"
        preflights = []
        with closing(PlanProgress(len(runs), burn_in_steps(settings, runs[0])[0], show=bar)) as progress:
            for run in runs:
                burn_in = burn_in_of(settings, run, blocks, is_open, device=device, tick=progress.tick)
                numbers, advice = features(burn_in), find(run.placement).advice
                verdict = judge(numbers, burn_in)
                if verdict.verdict != "fine" and (disconnected(numbers) or not numbers.finite):
                    others = other_settings(run, burn_in.proxy.init, 3 if numbers.finite else 10)
                    better = best_of(others, verdict.verdict, settings, blocks, device=device, tick=progress.tick)
                    verdict = judge(numbers, burn_in, better)
                preflights.append(Preflight(run=run, advice=advice, burn_in=burn_in, features=numbers, verdict=verdict))
                progress.ended(run, verdict.verdict)
    return preflights


def other_settings(run: PretrainSettings, init: str, divisor: int) -> Iterator[tuple[str, PretrainSettings]]:
    """Yield variants of the run with their flags: another initializer, a lower learning rate, and both."""
    rate = float(f"{run.learning_rate / divisor:.1g}")
    for changed in ({"init": SUITS}, {"learning_rate": rate}, {"init": SUITS, "learning_rate": rate}):
        if changed.get("init") != init:
            flags = " ".join(f"--{name.replace('_', '-')} {value}" for name, value in changed.items())
            yield flags, replace(run, **changed)


def best_of(
    runs: Iterable[tuple[str, PretrainSettings]],
    verdict: VerdictWord,
    settings: PreflightSettings,
    blocks: Blocks,
    *,
    device: str = "cpu",
    tick: Callable[[], object] = lambda: None,
) -> str:
    """Return the flags and the verdict of the best run, or "" if no run has a better verdict than ``verdict``."""
    best = ""
    for flags, run in runs:
        burn_in = burn_in_of(settings, run, blocks, is_open, device=device, tick=tick)
        found = verdict_of(features(burn_in), calibration())
        if VERDICTS.index(found) < VERDICTS.index(verdict):
            best, verdict = f"{flags} (preflight's new verdict: {found})", found
        if found == "fine":
            break
    return best


def burn_in_of(
    settings: PreflightSettings,
    run: PretrainSettings,
    blocks: Blocks,
    is_undecided: Callable[[Features], bool],
    *,
    device: str = "cpu",
    tick: Callable[[], object] = lambda: None,
) -> BurnIn:
    """Train a planned run's first steps. Measure the model halfway, at the end, and after each extension."""
    steps, warmup = burn_in_steps(settings, run)
    flops = FLOPS[device] if settings.flops is None else settings.flops
    burning = BurningIn(
        choose(run, blocks.stats.vocab_size, steps, flops),
        blocks,
        sequences=settings.sequences,
        longest_warmup=warmup,
        device=device,
        tick=tick,
    )

    def stops() -> Iterator[int]:
        yield steps // 2
        yield steps
        step, more = steps, max(1, settings.burn_in // 4)
        # a quarter more, up to three times the requested steps or 60 % of the run
        while step + more <= min(3 * settings.burn_in, 0.6 * run.steps) and is_undecided(features(burning.record())):
            step += more
            yield step

    burning.train(stops())
    return burning.record()


def burn_in_steps(settings: PreflightSettings, run: PretrainSettings) -> tuple[int, int]:
    """Return the number of steps to train, and the number of warm-up steps among them."""
    # With a short warm-up, placements that need a long warm-up would get a bad verdict.
    warmup = min(in_steps(run.warmup, run.steps), 2 * settings.burn_in)
    return min(max(settings.burn_in, warmup + settings.burn_in // 2), run.steps), warmup


def is_open(numbers: Features) -> bool:
    """Return whether the verdict so far is "risky" or "undecided", so that further steps may change it."""
    return verdict_of(numbers, calibration()) in ("risky", "undecided")


@contextmanager
def _threads(number: int | None) -> Iterator[None]:
    before = torch.get_num_threads()
    if number:
        torch.set_num_threads(number)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def preflight(
    settings: PreflightSettings | Mapping[str, Any], *, overwrite: bool = False, bar: bool = True
) -> pd.DataFrame:
    """Judge planned runs, write the output folder if the settings name one, and return a row per run.

    Raises:
        UserError: if the settings are invalid, Lamina cannot read the corpus, or the output folder has files
        OSError: if the disk is full
    """
    complete = settings if isinstance(settings, PreflightSettings) else PreflightSettings.from_dict(settings)
    job = None
    if complete.output is not None:
        job = open_job(Kind.PREFLIGHT, PreflightSettings, complete, overwrite=overwrite)
    results = run_preflight(complete, bar=bar)
    rows = pd.DataFrame([result.row() for result in results])
    if job is None:
        return rows
    with job:
        job.write_text(PREFLIGHT_ROWS, rows.to_csv(index=False))
        layers = [  # the planned run's placement and learning rate, then the monitor's columns
            (result.run.placement, result.run.learning_rate, *row)
            for result in results
            for shot in result.burn_in.snapshots
            for row in shot.rows
        ]
        table = pd.DataFrame(layers, columns=["placement", "learning_rate", *LAYER_COLUMNS])
        write_parquet(job.folder / LAYERS, table)
        losses = [result.burn_in.losses for result in results]
        command = complete.command()
        job.write_json(PREFLIGHT, {"command": command, "rows": rows.to_dict("records"), "losses": losses})
    return rows
