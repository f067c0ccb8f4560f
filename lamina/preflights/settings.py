"""What `lamina preflight` can be told: the run that is planned, and how much may be spent on looking at it."""

from __future__ import annotations

import shlex
from dataclasses import asdict, dataclass, fields
from typing import Any, Self

from lamina.core.values import check_kinds, number, path, whole_number
from lamina.errors import UserError, unknown
from lamina.placements.resolution import split_specs
from lamina.training.settings import PretrainSettings

_OWN = ("placements", "learning_rates", "output", "burn_in", "sequences", "flops")


@dataclass(frozen=True, kw_only=True)
class PreflightSettings:
    """A planned run, or several that differ in placement and learning rate.

    Args:
        placements: comma-separated: names (see `lamina placements`), name(option=value, ...), YAML or Python files
            (a Python file runs as code)
        learning_rates: comma-separated peak learning rates of the planned run
        backbone: a preset's name (see `lamina backbones`), or a folder with a transformers config.json
        num_layers: number of blocks (default: the backbone's); always measured in full
        hidden_size: width (default: the backbone's); the feed-forward keeps its ratio
        num_heads: attention heads (default: the backbone's, or what keeps a head's width)
        init: initialiser: recommended (that of the placement's main source), normal, scaled, deepnorm, xavier, small
        corpus: embedded, a .txt/.jsonl file (.gz/.xz/.zst too), a folder, or hf:NAME
        text_field: the field of a .jsonl row or of a dataset that holds the text
        tokenizer: bytes, bpe:SIZE (trained on the corpus), or a transformers tokenizer's name or folder
        sequence_length: tokens in a block
        eval_fraction: share of the corpus that is held out
        streaming: read, tokenise and pack the corpus as the run does, while it goes on
        shuffle_buffer: with streaming, how many blocks are shuffled among themselves (1 for none)
        steps: optimiser steps of the planned run
        batch_size: blocks in a micro-batch
        gradient_accumulation: micro-batches in an optimiser step
        precision: auto and fp32 (single), or bf16 (mixed: weights and losses stay fp32, and so do the measurements)
        min_learning_rate: the cosine's end, as a share of the peak
        warmup: linear warm-up, in steps (1 or more) or as a share of all steps (below 1)
        weight_decay: AdamW's, on weight matrices only
        beta1: AdamW's first beta
        beta2: AdamW's second beta
        epsilon: AdamW's epsilon
        max_grad_norm: gradient clipping (0 for none)
        width_scaling: learning rates and initial weights by width: none, standard, standard-no-alignment, mup,
            mup-no-alignment (Everett et al. 2024)
        base_width: hidden size at which the learning rate was chosen, where width scaling changes nothing
        expert_balance: of a backbone with experts: auto (bias where its routers have one, else loss), none, bias, loss
        seed: of the weights and the data's order
        burn_in: optimiser steps taken before the verdict
        sequences: held-out blocks (2 or more) that the layers are measured on
        flops: floating-point operations of a burn-in at most (default: 1e12 on a CPU, 1e14 on a GPU); where the run
            needs more, fewer blocks a batch and a narrower model of the same depth stand in for it
        threads: CPU threads (default: PyTorch's)
        output: a folder for the page, the figures and the numbers (default: none is written)
    """

    placements: str = "pre_ln"
    learning_rates: str = "5e-3"
    backbone: str = "llama-nano"
    num_layers: int | None = None
    hidden_size: int | None = None
    num_heads: int | None = None
    init: str = "recommended"
    corpus: str = "embedded"
    text_field: str = "text"
    tokenizer: str = "bytes"
    sequence_length: int = 64
    eval_fraction: float = 0.05
    streaming: bool = False
    shuffle_buffer: int = 2048
    steps: int = 100
    batch_size: int = 16
    gradient_accumulation: int = 1
    precision: str = "auto"
    min_learning_rate: float = 0.1
    warmup: float = 0.1
    weight_decay: float = 0.1
    beta1: float = 0.9
    beta2: float = 0.95
    epsilon: float = 1e-8
    max_grad_norm: float = 1.0
    width_scaling: str = "none"
    base_width: int | None = None
    expert_balance: str = "auto"
    seed: int = 0
    burn_in: int = 32
    sequences: int = 16
    flops: float | None = None
    threads: int | None = None
    output: str | None = None

    def __post_init__(self) -> None:
        """Raise UserError that names the setting whose value has no meaning."""
        check_kinds(self, lists=("placements", "learning_rates"))
        for name in ("burn_in", "sequences"):
            whole_number(name, getattr(self, name), 4 if name == "burn_in" else 2)
        if self.flops is not None:
            number("flops", self.flops, 0.0, open_low=True)
        if self.output is not None:
            object.__setattr__(self, "output", path("output", self.output))
        if self.precision == "fp16":
            raise UserError("precision: 'fp16' (allowed in a preflight: auto, fp32, bf16)")
        self.runs()

    def rates(self) -> list[float]:
        """The learning rates. Raises UserError where the text is no list of different numbers."""
        try:
            values = [float(part) for part in str(self.learning_rates).split(",") if part.strip()]
        except ValueError:
            values = []
        if not values or len(set(values)) < len(values):
            raise UserError(
                f"learning_rates: {self.learning_rates!r} is not a comma-separated list of different numbers"
            )
        return values

    def runs(self) -> list[PretrainSettings]:
        """The planned runs. Raises UserError for a value with no meaning."""
        specs = split_specs(self.placements)
        if not specs:
            raise UserError("placements: none given (see `lamina placements` for the names)")
        if len(set(specs)) < len(specs):
            raise UserError(f"placements: {self.placements!r} names one twice")
        common = {name: value for name, value in asdict(self).items() if name not in _OWN}
        return [
            PretrainSettings(placement=spec, learning_rate=rate, **common) for spec in specs for rate in self.rates()
        ]

    def command(self) -> str:
        """The command line that gives these settings: every flag that is not at its default."""
        words = ["lamina", "preflight"]
        for entry in fields(self):
            value = getattr(self, entry.name)
            if value != entry.default:
                words += [f"--{entry.name.replace('_', '-')}", shlex.quote(str(value))]
        return " ".join(words)

    @classmethod
    def from_dict(cls, data: dict[str, Any]) -> Self:
        """Settings by their names; ``placement`` and ``learning_rate`` (as `pretrain` has them) are those of one run.

        Raises UserError for an unknown name.
        """
        data = dict(data)
        for one, several in (("placement", "placements"), ("learning_rate", "learning_rates")):
            if one in data:
                if several in data:
                    raise UserError(f"{one} and {several} are given (allowed: one of them)")
                data[several] = str(data.pop(one))
        known = {entry.name for entry in fields(cls)}
        for key in data:
            if key not in known:
                raise unknown("setting", key, known)
        return cls(**data)
