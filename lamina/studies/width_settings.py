"""The settings of `lamina coord-check` and `lamina transfer`."""

from __future__ import annotations

from pathlib import Path

from lamina.core.values import Numbers, comma_separated, numbers, takes
from lamina.core.width_schemes import SCHEMES
from lamina.errors import UserError
from lamina.jobs.setting_groups import OutputSettings, ThreadSettings, WorkerSettings
from lamina.jobs.settings import above, at_least, changed, not_below, setting
from lamina.studies.settings import SeedsSettings
from lamina.training.setting_groups import (
    BlockSettings,
    LearningRateSettings,
    ModelSettings,
    OptimizerSettings,
    PlacementSettings,
    StepSettings,
    WidthSettings,
)
from lamina.training.settings import PretrainSettings, RatesSettings, RunSettings, rate_list


@takes(Numbers)
def width_list(name: str, value: object) -> str:
    """Comma-separated hidden sizes, at least two."""
    listed = comma_separated(name, value)
    if len(numbers(name, listed, int)) < 2:
        raise UserError(f"{name}: {listed!r} is one width (allowed: two or more, comma-separated)")
    return listed


class CoordCheckSettings(
    PlacementSettings,
    ModelSettings,
    WidthSettings,
    LearningRateSettings,
    StepSettings,
    SeedsSettings,
    BlockSettings,
    OptimizerSettings,
    OutputSettings,
    ThreadSettings,
):
    """A coordinate check: every width takes a few steps on one batch, once per seed."""

    command_name = "coord-check"
    main = (
        *("placement", "backbone", "widths", "width_scaling", "num_layers", "learning_rate"),
        *("steps", "seeds", "corpus", "output"),
    )
    without = frozenset({"hidden_size", "num_heads", "gradient_accumulation", "eval_fraction"})
    order = ("placement", "backbone", "widths")

    widths: str = setting(
        "48,96,192,384",
        "comma-separated hidden sizes, at least two; the feed-forward and the heads scale with them",
        width_list,
    )
    num_layers: int = changed(6, help="number of blocks")
    width_scaling: str = changed("standard")
    base_width: int | None = changed(
        None, help="hidden size at which width scaling changes nothing (default: the smallest of the widths)"
    )
    learning_rate: float = changed(1e-3, help="at the base width; constant")
    steps: int = changed(3, help="optimizer steps, all on the same batch")
    seeds: str | int | tuple[int | str, ...] = changed("0,1,2", help="comma-separated seeds of the weights")
    batch_size: int = changed(8, help="blocks in the batch")
    tolerance: float = setting(
        0.3, "exponents of the width within plus or minus this count as flat", above(0.0), decides=False
    )
    output: str = changed("runs/coord-check")

    def check(self) -> None:
        """Raise UserError for a value that is invalid at one of the widths."""
        super().check()
        self.runs()

    @property
    def all_widths(self) -> list[int]:
        """The widths from narrow to wide."""
        return sorted(numbers("widths", self.widths, int))

    @property
    def reference_width(self) -> int:
        """The hidden size at which nothing changes."""
        return self.base_width or self.all_widths[0]

    def runs(self) -> dict[tuple[int, int], PretrainSettings]:
        """The run of each width and seed. Raises UserError for a value that is invalid in one of them."""
        common = self.shared_with(PretrainSettings)
        if self.width_scaling != "none":
            common["base_width"] = self.reference_width
        return {
            (width, seed): PretrainSettings(**common, hidden_size=width, seed=seed)
            for width in self.all_widths
            for seed in self.all_seeds
        }


@takes(Numbers)
def rates_or_none(name: str, value: object) -> str:
    """Comma-separated learning rates, or an empty text."""
    listed = comma_separated(name, value)
    return rate_list(name, listed) if listed else listed


class TransferSettings(RunSettings, PlacementSettings, RatesSettings, SeedsSettings, OutputSettings, WorkerSettings):
    """A transfer: learning rates are tried on a narrow proxy and carried over to a wide target."""

    command_name = "transfer"
    main = (
        *("placement", "backbone", "hidden_size", "proxy_width", "learning_rates", "verify_rates"),
        *("steps", "seeds", "corpus", "output"),
    )
    order = (*RunSettings.names(), "placement", "proxy_width")

    placement: str = changed("fusenorm")
    backbone: str = changed("llama-71m")
    hidden_size: int | None = changed(
        None, help="the target's width (default: the backbone's); it is trained only for verify_rates", decides=False
    )
    proxy_width: int = setting(
        64, "the proxy's hidden size, at which the rates are tried; also the base of width scaling", at_least(1)
    )
    learning_rates: str | float | tuple[float | str, ...] = changed(
        "1e-3,2e-3,4e-3,8e-3,1.6e-2,3.2e-2,6.4e-2", help="comma-separated peak learning rates to try on the proxy"
    )
    verify_rates: str = setting(
        "", "comma-separated learning rates to try also at verify_width (default: none)", rates_or_none, decides=False
    )
    verify_width: int | None = setting(
        None, "hidden size for these rates (default: the target's)", at_least(1), decides=False
    )
    width_scaling: str = changed("standard", help=f"{', '.join(SCHEMES)} (Everett et al. 2024)")
    base_width: int | None = changed(None, help="always proxy_width")
    best_margin: float = setting(
        0.02, "nats above the lowest eval loss up to which a rate counts among the best", not_below(0.0), decides=False
    )
    output: str = changed("runs/transfer")

    def check(self) -> None:
        """Raise UserError for contradictory widths, and for an invalid value in a trial."""
        if self.width_scaling == "none":
            raise UserError("width_scaling: 'none' transfers nothing (allowed: standard, mup and their -no-alignment)")
        if self.base_width not in (None, self.proxy_width):
            raise UserError(f"base_width: {self.base_width!r} is not proxy_width {self.proxy_width} (allowed: none)")
        object.__setattr__(self, "base_width", self.proxy_width)
        super().check()
        if self.num_heads is not None:
            raise UserError(f"num_heads: {self.num_heads!r} (allowed: none; the width of a head is fixed)")
        if self.proxy_width >= self.target_width:
            raise UserError(
                f"proxy_width: {self.proxy_width} is not below the target's hidden_size {self.target_width} "
                "(allowed: a narrower one)"
            )
        if self.verify_width is not None and not self.verify_rates:
            raise UserError(f"verify_width: {self.verify_width} without verify_rates (allowed: both, or neither)")
        self.trials()

    def trials(self) -> dict[str, PretrainSettings]:
        """The trials by id, the proxy's first. Raises UserError for an invalid value in one."""
        grid = [(self.proxy_width, rate) for rate in numbers("learning_rates", self.learning_rates, float)]
        if self.verify_rates:
            wide = self.verify_width or self.target_width
            if wide == self.proxy_width:
                raise UserError(f"verify_width: {wide} is also proxy_width (allowed: another)")
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
        """The target's hidden size. Raises UserError for a backbone that does not exist."""
        if self.hidden_size is not None:
            return self.hidden_size
        from lamina.modeling.backbones import resolve_backbone

        return int(resolve_backbone(self.backbone).hidden_size)

    def command(self) -> str:
        """The command line for these settings; the base width follows from the proxy's."""
        return super().command().replace(f" --base-width {self.base_width}", "")
