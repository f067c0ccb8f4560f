"""Groups of a training run's settings: model, data, steps, optimizer, records, divergence, machine."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from functools import partial
from typing import ClassVar, Literal

from lamina.core import initializers
from lamina.core.backbone_presets import get as get_preset
from lamina.core.backbone_presets import is_place
from lamina.core.json_types import Json
from lamina.core.scaling_schemes import DEPTH_SCHEMES, SCHEMES
from lamina.core.specs import split
from lamina.core.values import comma_separated, corpus_name, entries, mapping, one_of, path, place, steps_or_share, text
from lamina.errors import UserError
from lamina.jobs.setting_groups import BatchSettings, TextSettings
from lamina.jobs.settings import Settings, above, at_least, between, changed, not_below, setting
from lamina.placements.resolution import check_spec

Balance = Literal["auto", "none", "bias", "loss"]
TRACKERS = ("tensorboard", "wandb", "trackio")
WIDTH_SCALINGS = ("none", *SCHEMES)
COMPILED_FROM = 300  # the number of steps from which compiling saves more time than it takes


class PlacementSettings(Settings, group="model"):
    """The placement of the norms."""

    placement: str = setting(
        "pre_ln",
        "where the norms sit: a name (see `lamina placements`), name(option=value, ...), a YAML file, or a "
        "Python file, which Lamina executes",
    )


class ModelSettings(Settings, group="model"):
    """The backbone and its sizes."""

    backbone: str = setting(
        "llama-nano", "a preset (see `lamina backbones`), a folder with a config.json, or OWNER/NAME on the hub", place
    )
    num_layers: int | None = setting(None, "number of blocks (default: the backbone's)", at_least(1))
    hidden_size: int | None = setting(
        None, "hidden size (default: the backbone's); the feed-forward's size changes in proportion", at_least(1)
    )
    num_heads: int | None = setting(
        None,
        "number of attention heads (default: the number that keeps the backbone's width per head)",
        at_least(1),
    )
    untie_embeddings: bool = setting(
        False, "give the output head a separate weight, even if the backbone ties the head to the embedding"
    )
    init: str = setting(
        "recommended",
        "initializer: recommended (by the placement's paper or code), normal, scaled, deepnorm, xavier, small",
    )

    def check_names(self) -> None:
        super().check_names()
        specs = split(str(getattr(self, "placements", "") or getattr(self, "placement", "")), "placement")
        # skip Python files here, because Lamina executes them later
        files = [spec for spec in specs if re.search(r"\.py\s*(\(|$)", spec)]
        for spec in specs:
            if spec not in files:
                check_spec(spec)
        if not files and self.init != "recommended":
            initializers.check(self.init.removeprefix(initializers.SAME))
        if not is_place(self.backbone):
            get_preset(self.backbone)


class BlockSettings(TextSettings, group="data"):
    """The training text and the evaluation text."""

    corpus: str = changed(
        "embedded",
        help="text or images to train on. Text: embedded, a .txt/.jsonl file (or .gz/.xz/.zst), a folder, hf:NAME, or "
        "a mix A:0.7,B:0.3. Images: a folder per class, hf:NAME or mnist",
    )
    tokenizer: str = changed(
        "bytes", help="tokenizer: bytes, bpe:SIZE (trained on the corpus), or a transformers tokenizer's name or folder"
    )
    sequence_length: int = changed(64, help="tokens per text block", check=at_least(2))
    eval_fraction: float = setting(
        0.05, "fraction of the corpus to hold out for evaluation", between(0.0, 0.5, open_low=True)
    )

    def check_names(self) -> None:
        super().check_names()
        from lamina.data.corpus import check_corpus
        from lamina.data.tokenizers import validate_spec

        check_corpus(self.corpus)
        validate_spec(self.tokenizer)


class PackingSettings(Settings, group="data"):
    """The packing of documents into text blocks."""

    packing: Literal["on", "off"] = setting(
        "on",
        "on: join the documents and cut them into full blocks; off: one block per document, cut or padded to "
        "sequence_length (padding has no loss and does not count as tokens)",
    )


class StreamSettings(Settings, group="data"):
    """The choice whether Lamina reads the text before or during training."""

    streaming: bool = setting(
        False, "read, tokenize and pack the corpus during training, not before (for very large corpora)"
    )
    shuffle_buffer: int = setting(
        2048, "with streaming, the number of text blocks to shuffle together (1: no shuffling)", at_least(1)
    )

    def check(self) -> None:
        super().check()
        if not self.streaming:
            self.refuse_unused("shuffle_buffer", allowed="with --streaming")


class ObjectiveSettings(Settings, group="objective"):
    """The training objective, which decides what the model predicts."""

    objective: Literal["auto", "causal_lm", "masked_lm", "image_classification"] = setting(
        "auto",
        "training objective: auto (the backbone's), causal_lm (the next token), masked_lm (masked tokens), "
        "image_classification",
    )
    mask_ratio: float = setting(
        0.3, "with masked_lm, the fraction of tokens to predict", between(0.0, 1.0, open_low=True, open_high=True)
    )


class PretrainOptimizerSettings(Settings, group="optimizer"):
    """Pretraining's optimizer, stochastic depth, and the average of the weights."""

    optimizer: Literal["adamw", "muon"] = setting(
        "adamw",
        "optimizer: adamw, or muon (Muon for the blocks' matrices and AdamW for all other weights, with the same "
        "learning rate and weight decay)",
    )
    drop_path: float = setting(
        0.0,
        "stochastic depth: probability that a training example skips the last layer's sub-layers; the probability "
        "grows linearly from 0 at the first layer",
        between(0.0, 1.0, open_high=True),
    )
    ema_decay: float = setting(
        0.0,
        "decay of an exponential moving average of the weights, which Lamina evaluates and saves (0: no average)",
        between(0.0, 1.0, open_high=True),
    )


class StepSettings(BatchSettings, group="steps and learning rate"):
    """The number of steps, and the size of a step."""

    order = ("steps",)

    steps: int = setting(100, "optimizer steps", at_least(1))
    batch_size: int = changed(16, help="text blocks or images per micro-batch, over all processes")
    gradient_accumulation: int = setting(1, "micro-batches per optimizer step", at_least(1))


class LearningRateSettings(Settings, group="steps and learning rate"):
    """The peak learning rate."""

    learning_rate: float = setting(3e-3, "peak learning rate", above(0.0))


class ScheduleSettings(StepSettings, group="steps and learning rate"):
    """The learning rate at each step of a run."""

    schedule: Literal["cosine", "wsd"] = setting(
        "cosine",
        "schedule of the learning rate after the warm-up: cosine, or wsd (warm-up-stable-decay: constant, then a "
        "final decay)",
    )
    min_learning_rate: float = setting(
        0.1, "learning rate at the end of the schedule, as a fraction of the peak", between(0.0, 1.0)
    )
    warmup: float = setting(
        0.1,
        "length of the linear warm-up, in steps (1 or more) or as a fraction of all steps (below 1)",
        steps_or_share,
    )
    decay: float = setting(
        0.2,
        "with wsd, length of the final decay, in steps (1 or more) or as a fraction of all steps (below 1)",
        steps_or_share,
    )
    decay_shape: Literal["linear", "1-sqrt", "cosine"] = setting(
        "linear", "with wsd, shape of the final decay: linear, 1-sqrt or cosine"
    )

    def check(self) -> None:
        super().check()
        if self.warmup >= 1 and self.warmup > self.steps:
            raise UserError(
                f"warmup: {self.warmup:g} steps are more than steps = {self.steps}. Lower --warmup or raise --steps."
            )
        if self.schedule != "wsd":
            self.refuse_unused("decay", "decay_shape", allowed="with --schedule wsd")
            return
        if not self.decay > 0:
            raise UserError(f"decay: {self.decay!r}. Give a number above 0.")
        spans = [in_steps(span, self.steps) for span in (self.warmup, self.decay)]
        if sum(spans) > self.steps:
            raise UserError(
                f"decay: {spans[1]} steps of decay and {spans[0]} steps of warm-up are more than steps = {self.steps}. "
                f"Set decay to at most {self.steps - spans[0]}."
            )


class OptimizerSettings(Settings, group="optimizer"):
    """AdamW's hyperparameters, and gradient clipping."""

    weight_decay: float = setting(0.1, "AdamW's weight decay, on weight matrices only", not_below(0.0))
    beta1: float = setting(0.9, "AdamW's first beta", between(0.0, 1.0, open_high=True))
    beta2: float = setting(0.95, "AdamW's second beta", between(0.0, 1.0, open_high=True))
    epsilon: float = setting(1e-8, "AdamW's epsilon", above(0.0))
    max_grad_norm: float = setting(
        1.0, "maximum gradient norm; larger gradients are scaled down to this norm (0: no clipping)", not_below(0.0)
    )


class ScalingSettings(Settings, group="width and depth scaling"):
    """The scaling of learning rates, weights and branches with width and depth."""

    width_scaling: str = setting(
        "none",
        f"how learning rates and initial weights scale with the width: {', '.join(WIDTH_SCALINGS)} (Everett et "
        "al. 2024)",
        partial(one_of, allowed=WIDTH_SCALINGS),
    )
    base_width: int | None = setting(
        None,
        "hidden size of the model on which you chose the learning rate; width scaling changes nothing at this size",
        at_least(1),
    )
    k_embedding: float = setting(1.0, "with width scaling, a factor on the embedding's learning rate", above(0.0))
    k_hidden: float = setting(
        1.0,
        "with width scaling, a factor on the learning rate of all weights between embedding and output head",
        above(0.0),
    )
    k_readout: float = setting(1.0, "with width scaling, a factor on the output head's learning rate", above(0.0))
    depth_scaling: Literal["none", "depth-mup", "completep"] = setting(
        "none",
        "how branches, learning rates and Adam's epsilon scale with the number of blocks: none, depth-mup (Yang "
        "et al. 2023) or completep (Dey et al. 2025)",
    )
    base_depth: int | None = setting(
        None,
        "number of blocks of the model on which you chose the learning rate; depth scaling changes nothing at this "
        "depth",
        at_least(1),
    )

    @property
    def reference_width(self) -> int | None:
        """The hidden size at which width scaling changes nothing, or None if unknown."""
        return self.base_width

    @property
    def reference_depth(self) -> int | None:
        """The reference number of blocks, at which depth scaling has no effect. None if this number is unknown."""
        return self.base_depth

    def check(self) -> None:
        super().check()
        for scheme, base, of_reference, schemes, numbers in (
            ("width_scaling", "base_width", "hidden size", SCHEMES, ("k_embedding", "k_hidden", "k_readout")),
            ("depth_scaling", "base_depth", "number of blocks", DEPTH_SCHEMES, ()),
        ):
            if (chosen := getattr(self, scheme)) == "none":
                allowed = f"with --{scheme.replace('_', '-')} {' or '.join(schemes)}"
                self.refuse_unused(base, *numbers, here=f"without {scheme}", allowed=allowed)
            elif getattr(self, base.replace("base", "reference")) is None:
                raise UserError(
                    f"{base}: {scheme} {chosen!r} needs this setting. Set {base} to the {of_reference} at which you "
                    "chose the learning rate."
                )


class RecordSettings(Settings, group="records"):
    """The records, evaluations and checkpoints of a run."""

    logging_steps: int | None = setting(
        None, "steps between two records of the losses and of each layer (default: about 20 per run)", at_least(1)
    )
    eval_steps: int | None = setting(None, "steps between two evaluations (default: about 5 per run)", at_least(1))
    eval_blocks: int = setting(256, "held-out text blocks or images per evaluation (0 for all)", at_least(0))
    eval_corpus: str | None = setting(
        None,
        "second text to evaluate on, with the same tokenizer: any corpus that `lamina pretrain` accepts, except a mix",
        corpus_name,
    )
    eval_tasks: str | None = setting(
        None,
        "comma-separated tasks of lm-evaluation-harness to score at every evaluation, as for `lamina eval --tasks`",
        comma_separated,
    )
    eval_task_limit: int = setting(100, "items per task of eval_tasks (0 for all)", at_least(0))
    eval_data_dir: str | None = setting(
        None,
        "folder with the data of eval_tasks (default: the hub), as for `lamina eval --data-dir`",
        path,
        decides=False,
    )
    run_code: bool = setting(
        False,
        "run the code that eval_tasks need: task files in eval_data_dir, and programs that the model writes",
        decides=False,
    )
    save_steps: int = setting(
        0, "steps between two checkpoints (0 for the final model only)", at_least(0), decides=False
    )
    keep: int = setting(2, "number of checkpoints to keep", at_least(1), decides=False)
    async_checkpoints: bool = setting(
        False, "write checkpoints in the background, from a copy in CPU memory, while training continues", decides=False
    )
    monitor_blocks: int | None = setting(
        None,
        "number of held-out text blocks or images for the layer monitor (default: a quarter of the batch)",
        at_least(1),
    )
    probe_every: int = setting(
        0,
        "steps between two runs of the probes on a few held-out text blocks or images (0 for none)",
        at_least(0),
        decides=False,
    )


class GuardSettings(Settings, group="divergence"):
    """The limits beyond which a run counts as diverged or stuck."""

    divergence_margin: float = setting(
        1.0,
        "rise of the loss above its lowest value, in nats; a lasting rise counts as a divergence",
        not_below(0.0),
    )
    divergence_patience: int = setting(
        20, "number of steps that a rise by divergence_margin must last to count as a divergence", at_least(1)
    )
    stuck_margin: float = setting(
        0.1,
        "how far the eval loss must fall below the corpus's unigram entropy, in nats; otherwise the run is stuck",
        not_below(0.0),
    )


class ExpertSettings(Settings, group="experts"):
    """The method that balances a model's experts."""

    expert_balance: Balance = setting(
        "auto",
        "how to balance the load of a backbone's experts: none, bias, loss, or auto (bias if the routers "
        "have a bias, otherwise loss)",
    )
    expert_balance_rate: float = setting(
        1e-3,
        "strength of expert_balance: the change of the bias per step, or the factor on the auxiliary loss",
        not_below(0.0),
    )


class SpeedSettings(Settings, group="machine"):
    """Options that change the speed, the memory and the precision of a run."""

    gradient_checkpointing: bool = setting(False, "recompute activations in the backward pass, to save memory")
    precision: Literal["auto", "fp32", "bf16", "fp16", "float8"] = setting(
        "auto",
        "number format of the computation: auto (bf16 on a GPU, otherwise fp32), fp32, bf16, fp16 or float8 (by "
        "torchao for the blocks' linear layers, otherwise bf16); weights and losses stay fp32",
    )
    compile: Literal["auto", "on", "off"] = setting(
        "auto",
        "compile the blocks with torch.compile, one graph per kind of layer: on, off, or auto (on for a GPU "
        f"and {COMPILED_FROM} steps or more)",
    )
    cuda_graphs: bool = setting(
        False, "on a GPU, replay uncompiled blocks as CUDA graphs (faster for small models)", decides=False
    )


def trackers(name: str, value: object) -> str:
    """Check a setting that is "none" or a comma-separated list of trackers."""
    listed = text(name, value)
    for target in entries(listed):
        one_of(name, target, ("none", *TRACKERS))
    return listed


class TrainerSettings(Settings, group="trackers and the Trainer"):
    """Options that Lamina passes to transformers' Trainer unchanged."""

    outside: ClassVar[Mapping[str, tuple[str, ...]]] = {"trainer": ("transformers/training_args.py",)}

    report_to: str = setting(
        "none",
        f"trackers that receive the metrics: none, or a comma-separated list of {', '.join(TRACKERS)}",
        trackers,
        decides=False,
    )
    trainer: Json = setting(
        {}, "other arguments of transformers' TrainingArguments, e.g. --trainer.optim adafactor", mapping
    )


def in_steps(span: float, steps: int) -> int:
    """Convert a length to steps, rounded up. A length below 1 is a fraction of all steps."""
    return int(span) if span >= 1 else math.ceil(steps * span)
