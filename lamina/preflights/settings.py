"""The settings of `lamina preflight`: the planned runs, and the cost of the preflight."""

from __future__ import annotations

from typing import Literal

from lamina.core.values import numbers
from lamina.errors import UserError
from lamina.jobs.setting_groups import OutputSettings, SeedSettings, SequencesSettings, ThreadSettings
from lamina.jobs.settings import above, at_least, changed, setting
from lamina.training.setting_groups import (
    BlockSettings,
    ExpertSettings,
    ModelSettings,
    OptimizerSettings,
    ScalingSettings,
    ScheduleSettings,
    SpeedSettings,
    StreamSettings,
    in_steps,
)
from lamina.training.settings import PlacementsSettings, PretrainSettings, RatesSettings


class PreflightSettings(
    PlacementsSettings,
    RatesSettings,
    ModelSettings,
    BlockSettings,
    StreamSettings,
    ScheduleSettings,
    OptimizerSettings,
    ScalingSettings,
    ExpertSettings,
    SpeedSettings,
    SeedSettings,
    SequencesSettings,
    ThreadSettings,
    OutputSettings,
):
    """The settings of one or several planned runs, which differ only in placement and learning rate."""

    command_name = "preflight"
    main = (
        *("placements", "learning_rates", "backbone", "num_layers", "hidden_size", "corpus"),
        *("tokenizer", "steps", "precision", "output"),
    )
    without = frozenset(
        {"untie_embeddings", "schedule", "decay", "decay_shape", "k_embedding", "k_hidden", "k_readout"}
        | {"expert_balance_rate", "gradient_checkpointing", "compile", "cuda_graphs"}
    )

    learning_rates: str | float | tuple[float | str, ...] = changed(
        "5e-3", help="comma-separated peak learning rates of the planned run"
    )
    num_layers: int | None = changed(
        None, help="number of blocks (default: the backbone's); Lamina always measures at this depth"
    )
    steps: int = changed(100, help="optimizer steps of the planned run")
    precision: Literal["auto", "fp32", "bf16"] = changed(
        "auto",
        help="precision of the first steps: fp32, or bf16 (weights, losses and measurements stay in fp32). auto means "
        "fp32",
    )
    burn_in: int = setting(32, "number of optimizer steps before the verdict", at_least(4))
    sequences: int = changed(
        16, help="number of held-out text blocks or images (2 or more) to measure the layers on", check=at_least(2)
    )
    flops: float | None = setting(
        None,
        "maximum FLOPs to spend on each planned run (default: 1e12 on a CPU, 1e14 on a GPU). If the first steps cost "
        "more, Lamina trains on fewer text blocks per step, or trains a narrower model of the same depth",
        above(0.0),
    )
    output: str | None = changed(
        None, help="folder for the page, the figures and the numbers (default: Lamina writes no folder)"
    )

    def check(self) -> None:
        super().check()
        for run in self.runs():
            if run.steps == 1 and in_steps(run.warmup, run.steps):
                raise UserError(
                    "steps: a run of 1 step has only warm-up, at a learning rate of 0. Give 2 or more steps, or set "
                    "--warmup 0."
                )

    def runs(self) -> list[PretrainSettings]:
        """Return the settings of each planned run. Raises UserError if a value is invalid."""
        common = {name: value for name, value in self.shared_with(PretrainSettings).items() if name != "output"}
        return [
            PretrainSettings(placement=spec, learning_rate=rate, **common)
            for spec in self.specs
            for rate in numbers("learning_rates", self.learning_rates, float)
        ]
