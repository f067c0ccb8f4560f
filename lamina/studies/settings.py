"""The settings of the studies: `lamina compare`, `max-lr`, `coord-check` and `transfer`."""

from __future__ import annotations

import hashlib
import re
from collections.abc import Mapping
from functools import partial
from itertools import product, zip_longest
from pathlib import Path
from typing import Literal

from lamina.core.backbone_presets import get as get_preset
from lamina.core.backbone_presets import is_place
from lamina.core.initializers import SAME, SUITS
from lamina.core.json_types import Json
from lamina.core.scaling_schemes import SCHEMES
from lamina.core.values import Numbers, comma_separated, numbers, seed_number, steps_or_share, takes
from lamina.errors import UserError, unknown
from lamina.jobs.setting_groups import OutputSettings, SeedSettings, ThreadSettings, WorkerSettings
from lamina.jobs.settings import Settings, above, at_least, changed, not_below, setting
from lamina.training.setting_groups import (
    BlockSettings,
    LearningRateSettings,
    ModelSettings,
    OptimizerSettings,
    PlacementSettings,
    ScalingSettings,
    StepSettings,
    StreamSettings,
)
from lamina.training.settings import (
    ParallelSettings,
    PlacementsSettings,
    PretrainSettings,
    RatesSettings,
    RunSettings,
    rate_list,
)

_ONE_INIT = (
    "initializer: same:NAME (one for all placements; see `lamina pretrain --init` for names), or recommended (each "
    "placement's recommended initializer)"
)


@takes(Numbers)
def seed_list(name: str, value: object) -> str:
    """Check that a list has at least one seed and no seed twice. Returns the seeds, separated by commas."""
    listed = comma_separated(name, value)
    for seed in numbers(name, listed, int):
        seed_number(name, seed)
    return listed


class SeedsSettings(Settings, group="steps and learning rate"):
    """The seeds to try."""

    seeds: str | int | tuple[int | str, ...] = setting("0", "comma-separated seeds", seed_list, decides=False)

    @property
    def all_seeds(self) -> list[int]:
        return numbers("seeds", self.seeds, int)


def rates_by_placement(name: str, value: object) -> str | dict[str, str]:
    """Check learning rates by placement. The value is a mapping, or text like "keel=3e-3,1e-2; post_ln=1e-4"."""
    if isinstance(value, str):
        return value
    if not isinstance(value, Mapping):
        raise UserError(
            f"{name}: {value!r} does not give learning rates by placement. Give a mapping, or text like "
            "keel=3e-3,1e-2; post_ln=1e-4."
        )
    return {str(placement): comma_separated(name, rates) for placement, rates in value.items()}


class CompareSettings(RunSettings, PlacementsSettings, RatesSettings, SeedsSettings, OutputSettings, WorkerSettings):
    """The settings of a comparison: each placement, learning rate and seed is a training run."""

    command_name = "compare"
    main = (
        *("placements", "corpus", "tokenizer", "backbone", "num_layers", "hidden_size"),
        *("steps", "learning_rates", "seeds", "output"),
    )
    order = (*RunSettings.names(), "placements", "learning_rates", "learning_rates_of")

    backbone: str = changed("llama-micro")
    steps: int = changed(240)
    batch_size: int = changed(8)
    placements: str | tuple[str, ...] = changed("post_ln,pre_ln,peri_ln,mix_ln,fusenorm,keel")
    learning_rates: str | float | tuple[float | str, ...] = changed(
        "3e-3", help="comma-separated peak learning rates; Lamina ranks each placement at its best learning rate"
    )
    learning_rates_of: str | Json = setting(
        "",
        'learning rates for some placements, such as "keel=3e-3,1e-2; post_ln=1e-4,1e-3" (in YAML and Python also a '
        "mapping); the other placements use learning_rates",
        rates_by_placement,
        decides=False,
    )
    init: str = changed(SAME + SUITS, help=_ONE_INIT)
    output: str = changed("runs/compare")

    def check(self) -> None:
        """Normalize ``learning_rates_of``. Raises UserError for a placement outside the comparison."""
        super().check()
        rates_by_placement = self._own_rates()
        object.__setattr__(
            self, "learning_rates_of", "; ".join(f"{spec}={rates}" for spec, rates in rates_by_placement.items())
        )

    def rates(self, spec: str) -> list[float]:
        """Return a placement's learning rates from ``learning_rates_of``, or otherwise from ``learning_rates``."""
        rates_text = self._own_rates().get(spec)
        return numbers(
            "learning_rates" if rates_text is None else "learning_rates_of", rates_text or self.learning_rates, float
        )

    def _own_rates(self) -> dict[str, str]:
        rates_of = self.learning_rates_of
        if isinstance(rates_of, str):  # at the last "=", because a placement's options also contain "="
            parts = [part.rpartition("=") for part in rates_of.split(";") if part.strip()]
            if not all(equals for _, equals, _ in parts):
                raise UserError(
                    f"learning_rates_of: {rates_of!r} is not PLACEMENT=RATES. Give text like keel=3e-3,1e-2; "
                    "post_ln=1e-4."
                )
            by_name = {name.strip(): rates for name, _, rates in parts}
            if len(by_name) < len(parts):
                raise UserError(f"learning_rates_of: {rates_of!r} names a placement twice. Name each placement once.")
        else:
            by_name = rates_of
        rates_by_placement = {}
        for name, rates in by_name.items():
            if name not in self.specs:
                raise unknown("placement", name, self.specs, "learning_rates_of")
            rates_by_placement[name] = rates.strip()
            rate_list("learning_rates_of", rates_by_placement[name])
        return rates_by_placement

    def trials(self) -> dict[str, PretrainSettings]:
        """Return the settings of all runs, by the name of the run's folder. Raises UserError for invalid values."""
        trials: dict[str, PretrainSettings] = {}
        common = self.shared_with(PretrainSettings) | {"init": self.init.removeprefix(SAME)}
        rates = {spec: self.rates(spec) for spec in self.specs}
        rows = [zip(rates, row, strict=True) for row in zip_longest(*rates.values())]
        grid = [(spec, rate) for row in rows for spec, rate in row if rate is not None]
        # Seeds outermost: a study that stops early has every placement once before any twice.
        for seed, (spec, rate) in product(self.all_seeds, grid):
            trial = f"{slug(spec)}-lr{rate!r}-seed{seed}"
            varied = {"placement": spec, "learning_rate": rate, "seed": seed}
            folder = str(Path(self.output) / "trials" / trial)
            trials[trial] = PretrainSettings(**{**common, **varied, "output": folder})
        return trials


def slug(spec: str) -> str:
    """Convert a placement to a folder's name, such as "mix_ln(alpha=0.5)" to "mix_ln-alpha-0.5"."""
    target = re.sub(r"[^(]*/", "", spec)
    slug = re.sub(r"[^\w.]+", "-", target).strip("-.")
    # Two specs that differ only in punctuation or folders need different slugs.
    return slug if slug == spec else f"{slug}-{hashlib.sha256(spec.encode()).hexdigest()[:6]}"


class RisingSettings(RunSettings):
    """The settings of a run in which the learning rate rises until training fails."""

    without = frozenset(
        (
            *("schedule", "min_learning_rate", "warmup", "decay", "decay_shape"),
            *("divergence_margin", "divergence_patience"),
        )
    )
    order = ("max_learning_rate",)

    max_learning_rate: float = setting(
        0.15,
        "learning rate at the last step, after a linear rise from 0 (Keel's paper: 5e-2 over 5000 steps)",
        above(0.0),
    )
    steps: int = changed(300, help="optimizer steps of the warm-up")
    window: int = setting(8, "number of steps over which Lamina averages the loss", at_least(1))
    spike_margin: float = setting(
        0.5,
        "spike: how far the loss must rise above its lowest averaged value to count as a spike, in nats",
        above(0.0),
    )
    spike_patience: float = setting(
        0.05,
        "spike: how long the loss must stay high to count as a spike, in steps (1 or more) or as a fraction of all "
        "steps (below 1)",
        partial(steps_or_share, open_low=True),
    )
    plateau_margin: float = setting(
        0.05,
        "plateau: the averaged loss falls by less than this many nats while the learning rate grows by plateau_factor",
        not_below(0.0),
    )
    plateau_factor: float = setting(
        2.0,
        "plateau: factor by which the learning rate must grow while the loss falls by less than plateau_margin",
        above(1.0),
    )
    stuck_margin: float = changed(
        help="stuck: a plateau counts as stuck if the loss is not this many nats below the corpus's unigram entropy",
        default=0.1,
    )

    def check(self) -> None:
        super().check()
        if self.spike_patience >= 1 and self.spike_patience > self.steps:
            raise UserError(
                f"spike_patience: {self.spike_patience:g} steps are more than steps = {self.steps}. Set "
                f"spike_patience to at most {self.steps}."
            )


class MaxRateSettings(
    RisingSettings, PlacementSettings, OutputSettings, SeedSettings, ParallelSettings, StreamSettings
):
    """The settings of one run of `lamina max-lr`."""

    order = (*RisingSettings.names(), "placement")

    output: str = changed("runs/max-lr-trial")
    seed: int = changed(0, help="seed of the weights, the data's order and everything else that is random")

    def run(self) -> PretrainSettings:
        """Return the settings of a pretraining run in which the warm-up lasts to the end."""
        shared = self.shared_with(PretrainSettings)
        return PretrainSettings(**shared, learning_rate=self.max_learning_rate, warmup=float(self.steps))


class MaxRateStudySettings(RisingSettings, PlacementsSettings, SeedsSettings, OutputSettings, WorkerSettings):
    """The settings of `lamina max-lr`: each placement and seed is a training run."""

    command_name = "max-lr"
    main = (
        *("placements", "backbone", "num_layers", "hidden_size", "corpus", "steps"),
        *("max_learning_rate", "seeds", "workers", "output"),
    )
    order = ("placements", *RisingSettings.names())

    placements: str | tuple[str, ...] = changed("post_ln,pre_ln,keel")
    seeds: str | int | tuple[int | str, ...] = changed("0,1,2")
    init: str = changed(SAME + SUITS, help=_ONE_INIT)
    output: str = changed("runs/max-lr")

    def check(self) -> None:
        super().check()
        for trial in self.trials().values():
            trial.run()

    def trials(self) -> dict[str, MaxRateSettings]:
        """Return the settings of all runs, by the name of the run's folder. Raises UserError for invalid values."""
        common: Json = self.shared_with(MaxRateSettings) | {"init": self.init.removeprefix(SAME)}
        trials = {}
        # Seeds outermost: a study that stops early has every placement once before any twice.
        for seed, spec in product(self.all_seeds, self.specs):
            trial = f"{slug(spec)}-seed{seed}"
            folder = str(Path(self.output) / "trials" / trial)
            trials[trial] = MaxRateSettings(**{**common, "placement": spec, "seed": seed, "output": folder})
        return trials


@takes(Numbers)
def sizes_list(name: str, value: object) -> str:
    """Check that a list has at least two widths or depths. Returns the list, separated by commas."""
    listed = comma_separated(name, value)
    if len(numbers(name, listed, int)) < 2:
        raise UserError(
            f"{name}: {listed!r} is a single {name.rstrip('s')}. Give two or more, with commas between them."
        )
    return listed


@takes(Numbers)
def depths_or_none(name: str, value: object) -> str:
    """Check that a list of depths is empty or has at least two depths."""
    return sizes_list(name, value) if comma_separated(name, value) else ""


class CoordCheckSettings(
    PlacementSettings,
    ModelSettings,
    ScalingSettings,
    LearningRateSettings,
    StepSettings,
    SeedsSettings,
    BlockSettings,
    OptimizerSettings,
    OutputSettings,
    ThreadSettings,
):
    """The settings of a coordinate check: models of several sizes take a few steps on one batch."""

    command_name = "coord-check"
    main = (
        *("placement", "backbone", "widths", "depths", "width_scaling", "depth_scaling"),
        *("learning_rate", "steps", "seeds", "output"),
    )
    without = frozenset({"num_heads", "gradient_accumulation", "eval_fraction"})
    order = ("placement", "backbone", "widths", "depths")

    widths: str = setting(
        "48,96,192,384",
        "comma-separated hidden sizes, at least two; the feed-forward and the heads scale with the hidden size",
        sizes_list,
    )
    depths: str = setting(
        "", "comma-separated numbers of blocks, at least two, to compare instead of widths", depths_or_none
    )
    hidden_size: int | None = changed(None, help="with --depths, the width of all models (default: the backbone's)")
    num_layers: int = changed(6, help="number of blocks (do not combine with --depths)")
    width_scaling: str = changed(
        "standard",
        help=(
            f"width scaling: {', '.join(SCHEMES)} or none (with depths, the default is none unless you set base_width)"
        ),
    )
    base_width: int | None = changed(
        None, help="base width: hidden size at which width scaling changes nothing (default: the smallest width)"
    )
    base_depth: int | None = changed(
        None, help="base depth: number of blocks at which depth scaling changes nothing (default: the smallest depth)"
    )
    learning_rate: float = changed(1e-3, help="constant learning rate at the base width and depth")
    steps: int = changed(3, help="optimizer steps, all on the same batch")
    seeds: str | int | tuple[int | str, ...] = changed("0,1,2", help="comma-separated seeds of the weights")
    batch_size: int = changed(8, help="number of text blocks in the batch")
    tolerance: float = setting(
        0.3,
        "largest |e| at which an output counts as flat, where e is the exponent in mean |x| ~ size^e",
        above(0.0),
        decides=False,
    )
    output: str = changed("runs/coord-check")

    def check(self) -> None:
        if self.depths and self.base_width is None and self.width_scaling == self.default("width_scaling"):
            object.__setattr__(self, "width_scaling", "none")
        super().check()
        if self.depths:
            self.refuse_unused("widths", "num_layers", here="with depths", allowed="without --depths")
        else:
            self.refuse_unused("hidden_size", here="without depths", allowed="with --depths")
        self.runs()

    @property
    def axis(self) -> Literal["width", "depth"]:
        """Return "width" or "depth": the dimension in which the models differ."""
        return "depth" if self.depths else "width"

    @property
    def all_sizes(self) -> list[int]:
        """The widths or depths, in ascending order."""
        return sorted(numbers(f"{self.axis}s", getattr(self, f"{self.axis}s"), int))

    @property
    def reference_width(self) -> int | None:
        """The hidden size at which width scaling changes nothing."""
        return self.base_width or (None if self.depths else self.all_sizes[0])

    @property
    def reference_depth(self) -> int | None:
        """The number of blocks at which depth scaling changes nothing."""
        return self.base_depth or (self.all_sizes[0] if self.depths else None)

    def runs(self) -> dict[tuple[int, int], PretrainSettings]:
        """Return the settings of each size and seed. Raises UserError for invalid values."""
        common = self.shared_with(PretrainSettings)
        if self.width_scaling != "none":
            common["base_width"] = self.reference_width
        if self.depth_scaling != "none":
            common["base_depth"] = self.reference_depth
        varied = {"depth": "num_layers", "width": "hidden_size"}[self.axis]
        return {
            (size, seed): PretrainSettings(**{**common, varied: size, "seed": seed})
            for size in self.all_sizes
            for seed in self.all_seeds
        }


@takes(Numbers)
def rates_or_none(name: str, value: object) -> str:
    """Check a list of learning rates. The list may be empty."""
    listed = comma_separated(name, value)
    return rate_list(name, listed) if listed else listed


class TransferSettings(RunSettings, PlacementSettings, RatesSettings, SeedsSettings, OutputSettings, WorkerSettings):
    """The settings of `lamina transfer`, which tries learning rates on a narrow model for a wide model."""

    command_name = "transfer"
    main = (
        *("placement", "backbone", "hidden_size", "proxy_width", "learning_rates", "verify_rates"),
        *("steps", "seeds", "corpus", "output"),
    )
    without = frozenset(
        {"depth_scaling", "base_depth", "optimizer"}
    )  # the learning rates by kind of weight hold for Adam
    order = (*RunSettings.names(), "placement", "proxy_width")

    placement: str = changed("fusenorm")
    backbone: str = changed("llama-71m")
    hidden_size: int | None = changed(
        None,
        help="the target's width (default: the backbone's); Lamina trains this width only for verify_rates",
        decides=False,
    )
    proxy_width: int = setting(64, "hidden size of the proxy, which is also the base width", at_least(1))
    learning_rates: str | float | tuple[float | str, ...] = changed(
        "1e-3,2e-3,4e-3,8e-3,1.6e-2,3.2e-2,6.4e-2", help="comma-separated peak learning rates to try on the proxy"
    )
    verify_rates: str = setting(
        "",
        "comma-separated learning rates that Lamina also tries on a model of another width (default: none)",
        rates_or_none,
        decides=False,
    )
    verify_width: int | None = setting(
        None,
        "hidden size of the model that trains with verify_rates (default: the target's hidden size)",
        at_least(1),
        decides=False,
    )
    width_scaling: str = changed("standard", help=f"width scaling: {', '.join(SCHEMES)} (Everett et al. 2024)")
    base_width: int | None = changed(None, help="base width of width scaling, which always equals proxy_width")
    best_margin: float = setting(
        0.02,
        "a learning rate counts as best if its eval loss is within this many nats of the lowest eval loss",
        not_below(0.0),
        decides=False,
    )
    output: str = changed("runs/transfer")

    def check(self) -> None:
        if self.width_scaling == "none":
            raise UserError(
                "width_scaling: 'none' does not convert learning rates. Set width_scaling to standard, mup, "
                "standard-no-alignment or mup-no-alignment."
            )
        if self.base_width not in (None, self.proxy_width):
            raise UserError(
                f"base_width: {self.base_width!r} differs from proxy_width {self.proxy_width}. Leave base_width out."
            )
        object.__setattr__(self, "base_width", self.proxy_width)
        super().check()
        if self.num_heads is not None:
            raise UserError(
                f"num_heads: {self.num_heads!r} has no effect, because the narrow and the wide model have heads of "
                "equal width. Leave num_heads out."
            )
        if self.proxy_width >= self.target_width:
            raise UserError(
                f"proxy_width: {self.proxy_width} is not below the target's hidden_size {self.target_width}. Choose "
                "a smaller proxy_width."
            )
        if self.verify_width is not None and not self.verify_rates:
            raise UserError(f"verify_width: {self.verify_width} needs verify_rates. Give both, or neither.")
        self.trials()

    def trials(self) -> dict[str, PretrainSettings]:
        """Return the settings of all runs, by the name of the run's folder, with the narrow models first."""
        grid = [(self.proxy_width, rate) for rate in numbers("learning_rates", self.learning_rates, float)]
        if self.verify_rates:
            wide = self.verify_width or self.target_width
            if wide == self.proxy_width:
                raise UserError(f"verify_width: {wide} is also proxy_width. Choose another width.")
            grid += [(wide, rate) for rate in numbers("verify_rates", self.verify_rates, float)]
        common, trials = self.shared_with(PretrainSettings), {}
        for seed in self.all_seeds:
            for width, rate in grid:
                trial = f"d{width}-lr{rate!r}-seed{seed}"
                varied = {"hidden_size": width, "learning_rate": rate, "seed": seed}
                folder = str(Path(self.output) / "trials" / trial)
                trials[trial] = PretrainSettings(**{**common, **varied, "output": folder})
        return trials

    @property
    def target_width(self) -> int:
        """The wide model's hidden size. Raises UserError for an unknown backbone."""
        if self.hidden_size is not None:
            return self.hidden_size
        if not is_place(self.backbone):
            return int(str(get_preset(self.backbone).fields["hidden_size"]))
        from lamina.modeling.backbones import resolve_backbone

        return int(resolve_backbone(self.backbone).hidden_size)

    def command(self) -> str:
        """Return the command line for these settings, without the base width, which always equals proxy_width."""
        return super().command().replace(f" --base-width {self.base_width}", "")
