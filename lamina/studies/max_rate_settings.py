"""The settings of `lamina max-lr`, and of one of its trials: a run whose learning rate rises until it fails."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from pathlib import Path

from lamina.core.initializers import SAME, SUITS
from lamina.core.json_types import Json
from lamina.core.values import steps_or_share
from lamina.errors import UserError
from lamina.jobs.setting_groups import OutputSettings, SeedSettings, WorkerSettings
from lamina.jobs.settings import above, at_least, changed, not_below, setting
from lamina.studies.settings import SeedsSettings, slug
from lamina.training.monitor.max_rate_rules import MaxRateRules
from lamina.training.setting_groups import PlacementSettings, StreamSettings, in_steps
from lamina.training.settings import ParallelSettings, PlacementsSettings, PretrainSettings, RunSettings


class RisingSettings(RunSettings):
    """How far the learning rate rises, and the rules that say where it failed."""

    without = frozenset(
        (
            *("schedule", "min_learning_rate", "warmup", "decay", "decay_shape"),
            *("divergence_margin", "divergence_patience"),
        )
    )
    order = ("max_learning_rate",)

    max_learning_rate: float = setting(
        0.15,
        "learning rate at the end of the linear warm-up, which begins at 0 and takes all steps (Keel: 5e-2 over 5000)",
        above(0.0),
    )
    steps: int = changed(300, help="optimizer steps of the warm-up")
    window: int = setting(8, "steps whose mean is the smoothed loss", at_least(1))
    spike_margin: float = setting(
        0.5, "a spike is a loss that stays this many nats above the lowest smoothed loss ...", above(0.0)
    )
    spike_patience: float = setting(
        0.05,
        "... for this long, in steps (1 or more) or as a share of all steps (below 1)",
        partial(steps_or_share, open_low=True),
    )
    plateau_margin: float = setting(
        0.05, "a plateau: the smoothed loss does not fall by this many nats ...", not_below(0.0)
    )
    plateau_factor: float = setting(2.0, "... while the learning rate grows by this factor", above(1.0))
    stuck_margin: float = changed(
        help="a plateau counts as stuck if the loss is not this many nats below the corpus's unigram entropy",
        default=0.1,
    )

    def check(self) -> None:
        """Raise UserError for more patience than steps."""
        super().check()
        if self.spike_patience >= 1 and self.spike_patience > self.steps:
            raise UserError(
                f"spike_patience: {self.spike_patience:g} steps are more than steps = {self.steps} (allowed: at most "
                "that)"
            )

    def rules(self, unigram_entropy: float) -> MaxRateRules:
        """The rules for a corpus with this unigram entropy, in nats per token."""
        return MaxRateRules(
            top=self.max_learning_rate,
            steps=self.steps,
            unigram_entropy=unigram_entropy,
            window=self.window,
            spike_margin=self.spike_margin,
            spike_patience=in_steps(self.spike_patience, self.steps),
            plateau_margin=self.plateau_margin,
            plateau_factor=self.plateau_factor,
            stuck_margin=self.stuck_margin,
        )


class MaxRateSettings(
    RisingSettings, PlacementSettings, OutputSettings, SeedSettings, ParallelSettings, StreamSettings
):
    """One run whose learning rate rises until it fails: a trial of `lamina max-lr`."""

    order = (*RisingSettings.names(), "placement")

    output: str = changed("runs/max-lr-trial")
    seed: int = changed(0, help="seed of the weights, the data's order and everything else that is random")

    def run(self) -> PretrainSettings:
        """The run's settings: the warm-up takes all steps, so that nothing decays. Raises UserError."""
        shared = self.shared_with(PretrainSettings)
        return PretrainSettings(**shared, learning_rate=self.max_learning_rate, warmup=float(self.steps))


class MaxRateStudySettings(RisingSettings, PlacementsSettings, SeedsSettings, OutputSettings, WorkerSettings):
    """The largest learning rate of several placements: every placement and seed is a trial."""

    command_name = "max-lr"
    main = (
        *("placements", "backbone", "num_layers", "hidden_size", "corpus", "steps"),
        *("max_learning_rate", "seeds", "workers", "output"),
    )
    order = ("placements", *RisingSettings.names())

    placements: str | tuple[str, ...] = changed("post_ln,pre_ln,keel")
    seeds: str | int | tuple[int | str, ...] = changed("0,1,2")
    init: str = changed(
        SAME + SUITS,
        help="one initializer for all: same:NAME (of `lamina pretrain --init`); or recommended: each placement's "
        "own, which compares both together",
    )
    output: str = changed("runs/max-lr")

    def check(self) -> None:
        """Raise UserError for an invalid value in a trial."""
        super().check()
        for trial in self.trials().values():
            trial.run()

    def trials(self) -> dict[str, MaxRateSettings]:
        """The trials by id, which is also the folder's name. Raises UserError for an invalid value in one."""
        common: Json = self.shared_with(MaxRateSettings) | {"init": self.init.removeprefix(SAME)}
        trials = {}
        for spec, seed in self._grid():
            trial = f"{slug(spec)}-seed{seed}"
            folder = str(Path(self.output) / "trials" / trial)
            trials[trial] = MaxRateSettings(**{**common, "placement": spec, "seed": seed, "output": folder})
        return trials

    def _grid(self) -> Iterator[tuple[str, int]]:
        # Seeds outermost: a study that stops early has every placement once before any twice.
        for seed in self.all_seeds:
            for spec in self.specs:
                yield spec, seed
