"""What `lamina coord-check` and `lamina transfer` can be told."""

from __future__ import annotations

from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any, Self

from lamina.core.values import check_kinds, number, path, whole_number
from lamina.errors import UserError, unknown
from lamina.studies.settings import command_line, numbers
from lamina.training.settings import PretrainSettings, RunSettings


@dataclass(frozen=True, kw_only=True)
class CoordCheckSettings:
    """Settings of a coordinate check: every width is trained a few steps on one batch, once a seed.

    Args:
        placement: where the norms sit: a name (see `lamina placements`), name(option=value, ...), or a YAML/Python file
            (a Python file runs as code)
        backbone: a preset's name (see `lamina backbones`), or a folder with a transformers config.json
        widths: comma-separated hidden sizes, two at the least; the feed-forward and the heads grow along
        num_layers: number of blocks
        untie_embeddings: give the readout a weight of its own where the backbone ties it to the embedding
        init: initialiser: recommended (that of the placement's main source), normal, scaled, deepnorm, xavier, small
        width_scaling: none, standard, standard-no-alignment, mup, mup-no-alignment (Everett et al. 2024)
        base_width: hidden size at which width scaling changes nothing (default: the smallest of the widths)
        k_embedding: with width scaling, a factor on the embedding's learning rate
        k_hidden: the same for all weights between embedding and readout
        k_readout: the same for the readout
        learning_rate: at the base width; constant
        steps: optimiser steps, all on the same batch
        seeds: comma-separated seeds of the weights
        batch_size: blocks in the batch
        sequence_length: tokens in a block
        corpus: embedded, a .txt/.jsonl file (.gz/.xz/.zst too), a folder, or hf:NAME
        text_field: the field of a .jsonl row or of a dataset that holds the text
        tokenizer: bytes, bpe:SIZE (trained on the corpus), or a transformers tokenizer's name or folder
        weight_decay: AdamW's, on weight matrices only
        beta1: AdamW's first beta
        beta2: AdamW's second beta
        epsilon: AdamW's epsilon
        max_grad_norm: gradient clipping (0 for none)
        tolerance: exponents of the width between plus and minus this count as flat
        output: the check's folder
        threads: CPU threads (default: PyTorch's)
    """

    placement: str = "pre_ln"
    backbone: str = "llama-nano"
    widths: str = "48,96,192,384"
    num_layers: int = 6
    untie_embeddings: bool = False
    init: str = "recommended"
    width_scaling: str = "standard"
    base_width: int | None = None
    k_embedding: float = 1.0
    k_hidden: float = 1.0
    k_readout: float = 1.0
    learning_rate: float = 1e-3
    steps: int = 3
    seeds: str = "0,1,2"
    batch_size: int = 8
    sequence_length: int = 64
    corpus: str = "embedded"
    text_field: str = "text"
    tokenizer: str = "bytes"
    weight_decay: float = 0.1
    beta1: float = 0.9
    beta2: float = 0.95
    epsilon: float = 1e-8
    max_grad_norm: float = 1.0
    tolerance: float = 0.3
    output: str = "runs/coord-check"
    threads: int | None = None

    def __post_init__(self) -> None:
        """Raise UserError that names the setting whose value has no meaning."""
        check_kinds(self, lists=("widths", "seeds"))
        if len(self.all_widths) < 2:
            raise UserError(f"widths: {self.widths!r} is one width (allowed: two or more, comma-separated)")
        number("tolerance", self.tolerance, 0.0, open_low=True)
        object.__setattr__(self, "output", path("output", self.output))
        self.runs()

    @property
    def all_widths(self) -> list[int]:
        """The widths from narrow to wide. Raises UserError for what is no list of them."""
        return sorted(numbers("widths", self.widths, int))

    @property
    def all_seeds(self) -> list[int]:
        """The seeds. Raises UserError for what is no list of them."""
        return numbers("seeds", self.seeds, int)

    def runs(self) -> dict[tuple[int, int], PretrainSettings]:
        """What a run of each width and seed would be told. Raises UserError for a bad value in one."""
        own = {entry.name for entry in fields(self)} - {"widths", "seeds", "tolerance"}
        common = {name: getattr(self, name) for name in own}
        if self.width_scaling != "none" and self.base_width is None:
            common["base_width"] = self.all_widths[0]
        return {
            (width, seed): PretrainSettings(**{**common, "hidden_size": width, "seed": seed})
            for width in self.all_widths
            for seed in self.all_seeds
        }

    def command(self) -> str:
        """The command line that gives these settings."""
        return command_line("coord-check", self)

    @classmethod
    def from_dict(cls, data: dict[str, Any]) -> Self:
        """Read a mapping of settings. Raises UserError that names an unknown one."""
        for key in data:
            if key not in {entry.name for entry in fields(cls)}:
                raise unknown("setting", key, [entry.name for entry in fields(cls)])
        return cls(**data)


@dataclass(frozen=True, kw_only=True)
class TransferSettings(RunSettings):
    """Settings of a transfer: learning rates are tried on a narrow proxy and carried over to a wide target.

    Args:
        placement: where the norms sit: a name (see `lamina placements`), name(option=value, ...), or a YAML/Python file
            (a Python file runs as code)
        hidden_size: the target's width (default: the backbone's); it is trained only where verify_rates asks for it
        proxy_width: the proxy's hidden size, at which the rates are tried; also the base of the width scaling
        learning_rates: comma-separated peak learning rates to try on the proxy
        seeds: comma-separated seeds
        verify_rates: comma-separated learning rates to try at verify_width, too (default: none)
        verify_width: hidden size of these (default: the target's)
        width_scaling: standard, standard-no-alignment, mup, mup-no-alignment (Everett et al. 2024)
        base_width: left to proxy_width
        best_margin: nats above the lowest eval loss within which a rate counts among the best
        output: the study's folder
        workers: trials that run at a time, each in a process of its own (default: one a core)
    """

    placement: str = "fusenorm"
    backbone: str = "llama-71m"
    proxy_width: int = 64
    learning_rates: str = "1e-3,2e-3,4e-3,8e-3,1.6e-2,3.2e-2,6.4e-2"
    seeds: str = "0"
    verify_rates: str = ""
    verify_width: int | None = None
    width_scaling: str = "standard"
    best_margin: float = 0.02
    output: str = "runs/transfer"
    workers: int | None = None

    def __post_init__(self) -> None:
        """Raise UserError that names the setting whose value has no meaning."""
        if self.width_scaling == "none":
            raise UserError("width_scaling: 'none' transfers nothing (allowed: standard, mup and their -no-alignment)")
        if self.base_width not in (None, self.proxy_width):
            raise UserError(f"base_width: {self.base_width!r} is not proxy_width {self.proxy_width} (allowed: none)")
        for name in ("proxy_width", "verify_width", "workers"):
            if getattr(self, name) is not None:
                whole_number(name, getattr(self, name))
        object.__setattr__(self, "base_width", self.proxy_width)
        super().__post_init__()
        number("best_margin", self.best_margin, 0.0)
        object.__setattr__(self, "output", path("output", self.output))
        if self.num_heads is not None:
            raise UserError(f"num_heads: {self.num_heads!r} (allowed: none; every width keeps the width of a head)")
        if self.proxy_width >= self.target_width:
            raise UserError(
                f"proxy_width: {self.proxy_width} is not below the target's hidden_size {self.target_width} "
                "(allowed: a narrower one)"
            )
        if self.verify_width is not None and not self.verify_rates:
            raise UserError(f"verify_width: {self.verify_width} without verify_rates (allowed: both, or neither)")
        self.trials()

    def trials(self) -> dict[str, PretrainSettings]:
        """The trials by their ids, the proxy's first. Raises UserError for a bad value in one."""
        seeds, trials = numbers("seeds", self.seeds, int), {}
        grid = [(self.proxy_width, rate) for rate in numbers("learning_rates", self.learning_rates, float)]
        if self.verify_rates:
            wide = self.verify_width or self.target_width
            if wide == self.proxy_width:
                raise UserError(f"verify_width: {wide} is proxy_width, too (allowed: another)")
            grid += [(wide, rate) for rate in numbers("verify_rates", self.verify_rates, float)]
        own = {entry.name for entry in fields(PretrainSettings)}
        for seed in seeds:
            for width, rate in grid:
                trial = f"d{width}-lr{rate!r}-seed{seed}"
                common = {k: v for k, v in self.to_dict().items() if k in own}
                common |= {"hidden_size": width, "learning_rate": rate, "seed": seed}
                trials[trial] = PretrainSettings(**{**common, "output": str(Path(self.output) / "trials" / trial)})
        return trials

    @property
    def target_width(self) -> int:
        """The target's hidden size. Raises UserError for a backbone that there is not."""
        if self.hidden_size is not None:
            return self.hidden_size
        from lamina.modeling.backbones import resolve_backbone

        return int(resolve_backbone(self.backbone).hidden_size)

    def command(self) -> str:
        """The command line that gives these settings."""
        return command_line("transfer", self).replace(f" --base-width {self.base_width}", "")
