"""What a pretraining run can be told: frozen records, which are also the command line's flags and config.yaml."""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass, field, fields
from typing import Any, Self

from lamina.core.values import check_kinds, number, path, seed_number, whole_number
from lamina.errors import UserError, unknown


@dataclass(frozen=True, kw_only=True)
class RunSettings:
    """What all the runs of a study have in common.

    Args:
        backbone: a preset's name (see `lamina backbones`), or a folder with a transformers config.json
        num_layers: number of blocks (default: the backbone's)
        hidden_size: width (default: the backbone's); the feed-forward keeps its ratio
        num_heads: attention heads (default: the backbone's, or what keeps a head's width)
        untie_embeddings: give the readout a weight of its own where the backbone ties it to the embedding
        init: initialiser: recommended (that of the placement's main source), normal, scaled, deepnorm, xavier, small
        corpus: embedded, a .txt/.jsonl file (.gz/.xz/.zst too), a folder, or hf:NAME; or a mix of them in
            fixed shares: A:0.7,B:0.3
        text_field: the field of a .jsonl row or of a dataset that holds the text
        tokenizer: bytes, bpe:SIZE (trained on the corpus), or a transformers tokenizer's name or folder
        sequence_length: tokens in a block
        eval_fraction: share of the corpus that is held out
        steps: optimiser steps
        batch_size: blocks in a micro-batch, over all processes
        gradient_accumulation: micro-batches in an optimiser step
        schedule: of the learning rate after the warm-up: cosine, or wsd (warm-up, stable, decay: level until the decay)
        min_learning_rate: the schedule's end, as a share of the peak
        warmup: linear warm-up, in steps (1 or more) or as a share of all steps (below 1)
        decay: of the wsd schedule: how long the rate falls at the end, in steps (1 or more) or as a share (below 1)
        decay_shape: of the wsd schedule: linear, 1-sqrt or cosine
        weight_decay: AdamW's, on weight matrices only
        beta1: AdamW's first beta
        beta2: AdamW's second beta
        epsilon: AdamW's epsilon
        max_grad_norm: gradient clipping (0 for none)
        width_scaling: learning rates and initial weights by width: none, standard, standard-no-alignment, mup,
            mup-no-alignment (Everett et al. 2024)
        base_width: hidden size at which the learning rate was chosen, where width scaling changes nothing
        k_embedding: with width scaling, a factor on the embedding's learning rate
        k_hidden: the same for all weights between embedding and readout
        k_readout: the same for the readout
        logging_steps: steps between two records of the metrics and the layers (default: about 20 in a run)
        eval_steps: steps between two evaluations (default: about 5 in a run)
        eval_blocks: held-out blocks in an evaluation (0 for all)
        save_steps: steps between two checkpoints (0 for none but the final model)
        keep: checkpoints kept
        monitor_blocks: held-out blocks of the layer monitor (default: a quarter of the batch)
        probe_every: steps between two runs of the probes on a few held-out blocks (0 for none)
        probes: which (see `lamina probe --list`): comma-separated names or name(option=value, ...), or all; a
            Python file runs as code
        divergence_margin: nats above its best at which a loss counts as diverging
        divergence_patience: steps that it must stay there
        stuck_margin: nats below the unigram entropy that the eval loss must reach for the run not to be stuck
        expert_balance: of a backbone with experts: auto (bias where its routers have one, else loss), none, bias, loss
        expert_balance_rate: the bias' change in a step, or the auxiliary loss' factor
        gradient_checkpointing: recompute activations in the backward pass
        precision: auto (what a short trial finds faster), fp32, bf16 or fp16 (mixed: weights and losses stay fp32)
        compile: auto, on or off: the blocks by torch.compile, one graph for each kind of layer
        threads: CPU threads (default: PyTorch's)
        report_to: none, or a comma-separated list of tensorboard, wandb, trackio
        trainer: any other argument of transformers' TrainingArguments, e.g. --trainer.optim adafactor
    """

    backbone: str = "llama-nano"
    num_layers: int | None = None
    hidden_size: int | None = None
    num_heads: int | None = None
    untie_embeddings: bool = False
    init: str = "recommended"
    corpus: str = "embedded"
    text_field: str = "text"
    tokenizer: str = "bytes"
    sequence_length: int = 64
    eval_fraction: float = 0.05
    steps: int = 100
    batch_size: int = 16
    gradient_accumulation: int = 1
    schedule: str = "cosine"
    min_learning_rate: float = 0.1
    warmup: float = 0.1
    decay: float = 0.2
    decay_shape: str = "linear"
    weight_decay: float = 0.1
    beta1: float = 0.9
    beta2: float = 0.95
    epsilon: float = 1e-8
    max_grad_norm: float = 1.0
    width_scaling: str = "none"
    base_width: int | None = None
    k_embedding: float = 1.0
    k_hidden: float = 1.0
    k_readout: float = 1.0
    logging_steps: int | None = None
    eval_steps: int | None = None
    eval_blocks: int = 256
    save_steps: int = 0
    keep: int = 2
    monitor_blocks: int | None = None
    probe_every: int = 0
    probes: str = "hidden_states,angular_distance,gradients"
    divergence_margin: float = 1.0
    divergence_patience: int = 20
    stuck_margin: float = 0.1
    expert_balance: str = "auto"
    expert_balance_rate: float = 1e-3
    gradient_checkpointing: bool = False
    precision: str = "auto"
    compile: str = "auto"
    threads: int | None = None
    report_to: str = "none"
    trainer: dict[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        """Raise UserError that names the setting whose value has no meaning."""
        check_kinds(self, lists=LISTS)
        for name in ("sequence_length", "steps", "batch_size", "gradient_accumulation", "keep", "divergence_patience"):
            whole_number(name, getattr(self, name))
        for name in (
            "num_layers",
            "hidden_size",
            "num_heads",
            "logging_steps",
            "eval_steps",
            "monitor_blocks",
            "threads",
        ):
            if getattr(self, name) is not None:
                whole_number(name, getattr(self, name))
        for name in ("eval_blocks", "save_steps", "probe_every"):
            whole_number(name, getattr(self, name), 0)
        for name in (
            "weight_decay",
            "max_grad_norm",
            "warmup",
            "decay",
            "min_learning_rate",
            "divergence_margin",
            "stuck_margin",
            "expert_balance_rate",
        ):
            number(name, getattr(self, name), 0.0)
        number("epsilon", self.epsilon, 0.0, open_low=True)
        number("min_learning_rate", self.min_learning_rate, 0.0, 1.0)
        for name in ("beta1", "beta2"):
            number(name, getattr(self, name), 0.0, 1.0, open_high=True)
        number("eval_fraction", self.eval_fraction, 0.0, 0.5, open_low=True)
        self._check_width()
        if self.expert_balance not in BALANCES:
            raise UserError(f"expert_balance: {self.expert_balance!r} (allowed: {', '.join(BALANCES)})")
        for name, allowed in (("precision", PRECISIONS), ("compile", COMPILE)):
            if getattr(self, name) not in allowed:
                raise UserError(f"{name}: {getattr(self, name)!r} (allowed: {', '.join(allowed)})")
        if self.warmup >= 1 and self.warmup > self.steps:
            raise UserError(f"warmup: {self.warmup:g} steps are more than steps = {self.steps} (allowed: at most that)")
        self._check_schedule()
        for target in self.reports():
            if target not in ("tensorboard", "wandb", "trackio"):
                raise UserError(f"report_to: {target!r} (allowed: none, tensorboard, wandb, trackio)")

    def _check_schedule(self) -> None:
        for name, allowed in (("schedule", SCHEDULES), ("decay_shape", DECAYS)):
            if getattr(self, name) not in allowed:
                raise UserError(f"{name}: {getattr(self, name)!r} (allowed: {', '.join(allowed)})")
        if self.schedule != "wsd":
            for name in ("decay", "decay_shape"):
                if getattr(self, name) != getattr(RunSettings, name):
                    raise UserError(f"{name}: {getattr(self, name)!r} has no meaning without --schedule wsd")
            return
        if not self.decay > 0:
            raise UserError(f"decay: {self.decay!r} (allowed: a number above 0)")
        spans = [in_steps(span, self.steps) for span in (self.warmup, self.decay)]
        if sum(spans) > self.steps:
            raise UserError(
                f"decay: {spans[1]} steps and {spans[0]} of warm-up are more than steps = {self.steps} (allowed: "
                f"at most {self.steps - spans[0]})"
            )

    def _check_width(self) -> None:
        constants = ("k_embedding", "k_hidden", "k_readout")
        if self.width_scaling not in WIDTH_SCALINGS:
            raise unknown("width_scaling", self.width_scaling, WIDTH_SCALINGS)
        for name in constants:
            number(name, getattr(self, name), 0.0, open_low=True)
        if self.width_scaling == "none":
            for name in ("base_width", *constants):
                if getattr(self, name) not in (None, 1.0):
                    raise UserError(
                        f"{name}: {getattr(self, name)!r} has no meaning without width_scaling (allowed with one of "
                        f"{', '.join(WIDTH_SCALINGS[1:])})"
                    )
        elif self.base_width is None:
            raise UserError(
                f"base_width: none given (width_scaling {self.width_scaling!r} needs the hidden size at which the "
                "learning rate was chosen)"
            )
        else:
            whole_number("base_width", self.base_width)

    def reports(self) -> list[str]:
        """The trackers of ``report_to`` as a list."""
        return [r.strip() for r in self.report_to.split(",") if r.strip() not in ("", "none")]

    @property
    def log_every(self) -> int:
        """Steps between two records."""
        return self.logging_steps or max(1, round(self.steps / 20))

    @property
    def eval_every(self) -> int:
        """Steps between two evaluations."""
        return self.eval_steps or max(1, round(self.steps / 5))

    def to_dict(self) -> dict[str, Any]:
        """The settings as config.yaml holds them."""
        return asdict(self)

    @classmethod
    def from_dict(cls, data: dict[str, Any]) -> Self:
        """Read config.yaml's mapping. Raises UserError that names an unknown setting."""
        known = {f.name for f in fields(cls)}
        for key in data:
            if key not in known:
                raise UserError(f"config: unknown setting {key!r} (allowed: {', '.join(sorted(known))})")
        return cls(**data)


@dataclass(frozen=True, kw_only=True)
class PretrainSettings(RunSettings):
    """Settings of one pretraining run.

    Args:
        placement: where the norms sit: a name (see `lamina placements`), name(option=value, ...), or a YAML/Python file
            (a Python file runs as code)
        from_model: go on from this model's weights with new data and a new schedule: a run's folder, a Lamina
            checkpoint, or a transformers one that lamina convert takes; it decides placement, sizes and tokenizer
        output: the run's folder
        learning_rate: peak learning rate
        seed: of the weights, the data's order and everything else drawn
        parallel: how several processes (torchrun, accelerate launch) share the work: auto (what accelerate's
            configuration says, else ddp), ddp (each holds the model), fsdp2 (each holds a part of it)
        device: auto, cpu, cuda or mps
        streaming: read, tokenise and pack the corpus while training goes on, not before it; for one too large for that
        shuffle_buffer: with streaming, how many blocks are shuffled among themselves (1 for none)
        rollback: times to go back to the last good checkpoint after a divergence, in place of ending (0 for never)
        rollback_factor: of the learning rate, at each such return
        rollback_skip: steps' worth of data to leave out then (default: from the checkpoint to the step that diverged)
    """

    placement: str = "pre_ln"
    from_model: str | None = None
    output: str = "runs/pretrain"
    learning_rate: float = 3e-3
    seed: int = 0
    parallel: str = "auto"
    device: str = "auto"
    streaming: bool = False
    shuffle_buffer: int = 2048
    rollback: int = 0
    rollback_factor: float = 0.5
    rollback_skip: int | None = None

    def __post_init__(self) -> None:
        """Raise UserError that names the setting whose value has no meaning."""
        super().__post_init__()
        seed_number("seed", self.seed)
        whole_number("rollback", self.rollback, 0)
        whole_number("shuffle_buffer", self.shuffle_buffer)
        object.__setattr__(self, "output", path("output", self.output))
        if self.streaming and (workers := self.trainer.get("dataloader_num_workers")):
            raise UserError(
                f"trainer.dataloader_num_workers: {workers!r} (allowed with streaming: 0, a thread reads ahead)"
            )
        if self.rollback_skip is not None:
            whole_number("rollback_skip", self.rollback_skip, 0)
        number("rollback_factor", self.rollback_factor, 0.0, 1.0, open_low=True)
        for name, allowed in (("parallel", PARALLEL), ("device", DEVICES)):
            if getattr(self, name) not in allowed:
                raise UserError(f"{name}: {getattr(self, name)!r} (allowed: {', '.join(allowed)})")
        if self.rollback and not self.save_steps:
            raise UserError(
                f"rollback: {self.rollback} needs checkpoints to go back to (allowed: 0, or this with --save-steps)"
            )
        number("learning_rate", self.learning_rate, 0.0, open_low=True)


PRECISIONS = ("auto", "fp32", "bf16", "fp16")
COMPILE = ("auto", "on", "off")
SCHEDULES = ("cosine", "wsd")
DECAYS = ("linear", "1-sqrt", "cosine")
WIDTH_SCALINGS = ("none", "standard", "standard-no-alignment", "mup", "mup-no-alignment")
PARALLEL = ("auto", "ddp", "fsdp2")
DEVICES = ("auto", "cpu", "cuda", "mps")
# of studies: what may be a Python list, too
LISTS = ("placements", "learning_rates", "learning_rates_of", "seeds", "verify_rates")
BALANCES = ("auto", "none", "bias", "loss")


def in_steps(span: float, steps: int) -> int:
    """A number of steps (1 or more) or a share of them (below 1) in steps, counted as the Trainer does its warm-up."""
    return int(span) if span >= 1 else math.ceil(steps * span)
