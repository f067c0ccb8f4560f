"""The progress of a study at the terminal."""

from __future__ import annotations

from collections.abc import Mapping

from tqdm.auto import tqdm

from lamina.core.json_types import Json
from lamina.core.progress import ProgressLines, has_bars
from lamina.jobs.run_folder import RunFolder
from lamina.studies.task import Task


class Progress:
    """One bar over all the steps of all trials, or a line every so often, and one line per trial that ends."""

    def __init__(self, trials: Mapping[str, Task], *, done: int, waiting: int = 0, show: bool):
        self.trials, self.show = trials, show
        self.steps, self.ended_here = dict.fromkeys(trials, 0), 0
        total = sum(s.steps for s in trials.values())
        self.bar = tqdm(total=total, unit="step", disable=not (show and has_bars()), dynamic_ncols=True)
        self.lines = ProgressLines(total, show=show and not has_bars(), every=30.0)
        self.count, self.all = done, done + len(trials) + waiting
        self.bar.set_description(f"{self.count}/{self.all} trials")

    def tick(self, running: list[str]) -> None:
        for trial in running:
            self._advance(trial, RunFolder(self.trials[trial].folder).last_step())
        if running:  # the last line comes with the end of the last trial
            self._write_line()

    def ended(self, trial: str, result: Json) -> None:
        self._advance(trial, self.trials[trial].steps)
        self.count, self.ended_here = self.count + 1, self.ended_here + 1
        self.bar.set_description(f"{self.count}/{self.all} trials")
        if self.show:
            loss = result.get("eval_loss")
            text = f"eval loss {loss:.3f}" if loss is not None else result.get("reason", "")
            self.bar.write(f"{result['status']:>11}  {trial}  {text}")
        self._write_line()

    def close(self) -> None:
        self.bar.close()

    def _write_line(self) -> None:
        steps = sum(self.steps.values())
        if steps and (steps < self.lines.total or self.ended_here == len(self.trials)):
            self.lines.see(steps, {"trials done": f"{self.count}/{self.all}"})

    def _advance(self, trial: str, step: int) -> None:
        self.bar.update(max(0, step - self.steps[trial]))
        self.steps[trial] = max(step, self.steps[trial])
