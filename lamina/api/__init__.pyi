"""Every setting of every job, for editors; written by docs/stubs.py."""

from typing import Literal

import pandas as pd

from lamina.api.models import backbones as backbones
from lamina.api.models import convert as convert
from lamina.api.models import diagnose as diagnose
from lamina.api.models import emit as emit
from lamina.api.models import generate as generate
from lamina.api.models import graft as graft
from lamina.api.models import placement_of as placement_of
from lamina.api.models import prune as prune
from lamina.api.models import report as report
from lamina.api.results import Comparison as Comparison
from lamina.api.results import Diagnosis as Diagnosis
from lamina.api.results import RunResult as RunResult
from lamina.api.results import StudyOutcome as StudyOutcome
from lamina.core.json_types import Json
from lamina.core.values import Examples, Names, Numbers, PathLike, Text
from lamina.jobs.folder import Resume

WRITTEN: tuple[str, ...]

def compare(
    *,
    backbone: PathLike = "llama-micro",
    num_layers: int | None = None,
    hidden_size: int | None = None,
    num_heads: int | None = None,
    untie_embeddings: bool = False,
    init: str = "same:small_scaled",
    corpus: Text = "embedded",
    text_field: str = "text",
    tokenizer: PathLike = "bytes",
    sequence_length: int = 64,
    eval_fraction: float = 0.05,
    packing: Literal["on", "off"] = "on",
    objective: Literal["auto", "causal_lm", "masked_lm", "image_classification"] = "auto",
    mask_ratio: float = 0.3,
    image_size: int | None = None,
    patch_size: int | None = None,
    center_crop: float = 1.0,
    crop_scale: float = 1.0,
    flip: float = 0.0,
    rand_augment: float = 0.0,
    random_erasing: float = 0.0,
    repeated_augmentation: int = 1,
    mixup: float = 0.0,
    cutmix: float = 0.0,
    label_smoothing: float = 0.0,
    steps: int = 240,
    batch_size: int = 8,
    gradient_accumulation: int = 1,
    schedule: Literal["cosine", "wsd"] = "cosine",
    min_learning_rate: float = 0.1,
    warmup: float = 0.1,
    decay: float = 0.2,
    decay_shape: Literal["linear", "1-sqrt", "cosine"] = "linear",
    weight_decay: float = 0.1,
    beta1: float = 0.9,
    beta2: float = 0.95,
    epsilon: float = 1e-08,
    max_grad_norm: float = 1.0,
    width_scaling: str = "none",
    base_width: int | None = None,
    k_embedding: float = 1.0,
    k_hidden: float = 1.0,
    k_readout: float = 1.0,
    depth_scaling: Literal["none", "depth-mup", "completep"] = "none",
    base_depth: int | None = None,
    optimizer: Literal["adamw", "muon"] = "adamw",
    drop_path: float = 0.0,
    ema_decay: float = 0.0,
    logging_steps: int | None = None,
    eval_steps: int | None = None,
    eval_blocks: int = 256,
    eval_corpus: Text | None = None,
    eval_tasks: Names | None = None,
    eval_task_limit: int = 100,
    eval_data_dir: PathLike | None = None,
    run_code: bool = False,
    save_steps: int = 0,
    keep: int = 2,
    async_checkpoints: bool = False,
    monitor_blocks: int | None = None,
    probe_every: int = 0,
    probes: Names = "hidden_states,angular_distance,gradients",
    divergence_margin: float = 1.0,
    divergence_patience: int = 20,
    stuck_margin: float = 0.1,
    expert_balance: Literal["auto", "none", "bias", "loss"] = "auto",
    expert_balance_rate: float = 0.001,
    gradient_checkpointing: bool = False,
    precision: Literal["auto", "fp32", "bf16", "fp16", "float8"] = "auto",
    compile: Literal["auto", "on", "off"] = "auto",
    cuda_graphs: bool = False,
    threads: int | None = None,
    report_to: str = "none",
    trainer: Json = {},
    placements: Names = "post_ln,pre_ln,peri_ln,mix_ln,fusenorm,keel",
    learning_rates: Numbers = "3e-3",
    learning_rates_of: str | Json = "",
    seeds: Numbers = "0",
    output: PathLike = "runs/compare",
    workers: int | None = None,
    resume: Resume = False,
    overwrite: bool = False,
    bar: bool = True,
) -> Comparison:
    """Train models that differ only in where their norms sit, all on your text. OUTPUT/report.html shows which
    placement is best, which placements failed, and why.

    The keywords are the settings of `lamina compare`. Returns the rows of results.csv and the report page.
    ``placements``, ``learning_rates`` and ``seeds`` may also be lists. ``corpus`` may be a path, a list of paths
    or texts, or a datasets.Dataset. The worker processes do not import your script.

    Raises:
        UserError: (a ValueError) for invalid settings, a corpus that can't be read, or an output folder that is
            not empty.
        TrialsFailed: (a UserError) if every trial failed. Lamina still writes the report page.
    """

def preflight(
    *,
    placements: Names = "pre_ln",
    learning_rates: Numbers = "5e-3",
    backbone: PathLike = "llama-nano",
    num_layers: int | None = None,
    hidden_size: int | None = None,
    num_heads: int | None = None,
    init: str = "recommended",
    corpus: Text = "embedded",
    text_field: str = "text",
    tokenizer: PathLike = "bytes",
    sequence_length: int = 64,
    eval_fraction: float = 0.05,
    streaming: bool = False,
    shuffle_buffer: int = 2048,
    steps: int = 100,
    batch_size: int = 16,
    gradient_accumulation: int = 1,
    min_learning_rate: float = 0.1,
    warmup: float = 0.1,
    weight_decay: float = 0.1,
    beta1: float = 0.9,
    beta2: float = 0.95,
    epsilon: float = 1e-08,
    max_grad_norm: float = 1.0,
    width_scaling: str = "none",
    base_width: int | None = None,
    depth_scaling: Literal["none", "depth-mup", "completep"] = "none",
    base_depth: int | None = None,
    expert_balance: Literal["auto", "none", "bias", "loss"] = "auto",
    precision: Literal["auto", "fp32", "bf16"] = "auto",
    seed: int = 0,
    sequences: int = 16,
    threads: int | None = None,
    output: PathLike | None = None,
    burn_in: int = 32,
    flops: float | None = None,
    overwrite: bool = False,
    bar: bool = True,
) -> pd.DataFrame:
    """Check a run before you start it. Lamina trains the run's first steps at full depth, measures the layers, and
    reports whether the run will train, why, and what to change. If an early layer hardly affects the output, or a
    loss is not finite, Lamina also tries the initializer small_scaled and a lower learning rate.

    The keywords are the settings of `lamina preflight`. Returns one row per planned run: the verdict, the reason,
    what to change, and the measured numbers (docs/evidence/preflight.md). With ``output``, the function also
    writes a folder with preflight.csv, layers.parquet, preflight.json and report.html. `lamina report` makes the
    page from preflight.json.

    Raises:
        UserError: (a ValueError) for invalid settings, a corpus that can't be read, or an output folder that is
            not empty.
    """

def pretrain(
    *,
    backbone: PathLike = "llama-nano",
    num_layers: int | None = None,
    hidden_size: int | None = None,
    num_heads: int | None = None,
    untie_embeddings: bool = False,
    init: str = "recommended",
    corpus: Text = "embedded",
    text_field: str = "text",
    tokenizer: PathLike = "bytes",
    sequence_length: int = 64,
    eval_fraction: float = 0.05,
    packing: Literal["on", "off"] = "on",
    objective: Literal["auto", "causal_lm", "masked_lm", "image_classification"] = "auto",
    mask_ratio: float = 0.3,
    image_size: int | None = None,
    patch_size: int | None = None,
    center_crop: float = 1.0,
    crop_scale: float = 1.0,
    flip: float = 0.0,
    rand_augment: float = 0.0,
    random_erasing: float = 0.0,
    repeated_augmentation: int = 1,
    mixup: float = 0.0,
    cutmix: float = 0.0,
    label_smoothing: float = 0.0,
    steps: int = 100,
    batch_size: int = 16,
    gradient_accumulation: int = 1,
    schedule: Literal["cosine", "wsd"] = "cosine",
    min_learning_rate: float = 0.1,
    warmup: float = 0.1,
    decay: float = 0.2,
    decay_shape: Literal["linear", "1-sqrt", "cosine"] = "linear",
    weight_decay: float = 0.1,
    beta1: float = 0.9,
    beta2: float = 0.95,
    epsilon: float = 1e-08,
    max_grad_norm: float = 1.0,
    width_scaling: str = "none",
    base_width: int | None = None,
    k_embedding: float = 1.0,
    k_hidden: float = 1.0,
    k_readout: float = 1.0,
    depth_scaling: Literal["none", "depth-mup", "completep"] = "none",
    base_depth: int | None = None,
    optimizer: Literal["adamw", "muon"] = "adamw",
    drop_path: float = 0.0,
    ema_decay: float = 0.0,
    logging_steps: int | None = None,
    eval_steps: int | None = None,
    eval_blocks: int = 256,
    eval_corpus: Text | None = None,
    eval_tasks: Names | None = None,
    eval_task_limit: int = 100,
    eval_data_dir: PathLike | None = None,
    run_code: bool = False,
    save_steps: int = 0,
    keep: int = 2,
    async_checkpoints: bool = False,
    monitor_blocks: int | None = None,
    probe_every: int = 0,
    probes: Names = "hidden_states,angular_distance,gradients",
    divergence_margin: float = 1.0,
    divergence_patience: int = 20,
    stuck_margin: float = 0.1,
    expert_balance: Literal["auto", "none", "bias", "loss"] = "auto",
    expert_balance_rate: float = 0.001,
    gradient_checkpointing: bool = False,
    precision: Literal["auto", "fp32", "bf16", "fp16", "float8"] = "auto",
    compile: Literal["auto", "on", "off"] = "auto",
    cuda_graphs: bool = False,
    threads: int | None = None,
    report_to: str = "none",
    trainer: Json = {},
    placement: str = "pre_ln",
    from_model: PathLike | None = None,
    output: PathLike = "runs/pretrain",
    learning_rate: float = 0.003,
    seed: int = 0,
    parallel: Literal["auto", "ddp", "fsdp2"] = "auto",
    tensor_parallel: int = 1,
    device: Literal["auto", "cpu", "cuda", "mps"] = "auto",
    streaming: bool = False,
    shuffle_buffer: int = 2048,
    branches: str | float | tuple | None = None,
    pause_step: int | None = None,
    push_to_hub: PathLike | None = None,
    rollback: int = 0,
    rollback_factor: float = 0.5,
    rollback_skip: int | None = None,
    resume: Resume = False,
    overwrite: bool = False,
    bar: bool = True,
) -> RunResult:
    """Train one model on text or images. Load the model from OUTPUT/model with transformers' Auto classes.

    The keywords are the settings of `lamina pretrain`. Returns the content of result.json; OUTPUT/model is the
    model, and OUTPUT/report.html shows the run. ``corpus`` may also be a path, a list of paths or texts, or a
    datasets.Dataset.

    Raises:
        UserError: (a ValueError) for invalid settings, a corpus that can't be read, or an output folder that is
            not empty.
    """

def sft(
    *,
    from_model: PathLike | None = None,
    data: Examples | None = None,
    eval_data: Examples | None = None,
    eval_fraction: float = 0.05,
    eval_examples: int = 256,
    template: PathLike = "auto",
    sequence_length: int | None = None,
    skip_bad: bool = False,
    steps: int = 0,
    batch_size: int = 8,
    gradient_accumulation: int = 1,
    schedule: Literal["cosine", "wsd"] = "cosine",
    min_learning_rate: float = 0.0,
    warmup: float = 0.03,
    decay: float = 0.2,
    decay_shape: Literal["linear", "1-sqrt", "cosine"] = "linear",
    learning_rate: float = 2e-05,
    weight_decay: float = 0.0,
    beta1: float = 0.9,
    beta2: float = 0.999,
    epsilon: float = 1e-08,
    max_grad_norm: float = 1.0,
    lora_rank: int = 0,
    lora_alpha: float | None = None,
    lora_dropout: float = 0.0,
    lora_targets: Names = "all-linear",
    lora: Json = {},
    weights: Literal["fp32", "bf16", "nf4", "int8"] = "fp32",
    attn_implementation: str = "auto",
    logging_steps: int | None = None,
    eval_steps: int | None = None,
    eval_corpus: Text | None = None,
    eval_tasks: Names | None = None,
    eval_task_limit: int = 100,
    eval_data_dir: PathLike | None = None,
    run_code: bool = False,
    save_steps: int = 0,
    keep: int = 2,
    async_checkpoints: bool = False,
    divergence_margin: float = 1.0,
    divergence_patience: int = 20,
    gradient_checkpointing: bool = False,
    precision: Literal["auto", "fp32", "bf16", "fp16"] = "auto",
    threads: int | None = None,
    report_to: str = "none",
    trainer: Json = {},
    seed: int = 0,
    parallel: Literal["auto", "ddp", "fsdp2"] = "auto",
    device: Literal["auto", "cpu", "cuda", "mps"] = "auto",
    pause_step: int | None = None,
    push_to_hub: PathLike | None = None,
    output: PathLike = "runs/sft",
    epochs: float = 3.0,
    group_by_length: bool = False,
    trl: Json = {},
    preset: str | None = None,
    packing: bool = False,
    best_by: str = "last",
    resume: Resume = False,
    overwrite: bool = False,
    bar: bool = True,
) -> RunResult:
    """Fine-tune a model on instructions or conversations. To chat with the model, run `lamina generate OUTPUT
    --chat`.

    The keywords are the settings of `lamina sft`. ``data`` may also be a list of rows or a datasets.Dataset.
    Returns the content of result.json; OUTPUT/model is the model, and OUTPUT/report.html shows the run.

    Raises:
        UserError: (a ValueError) for invalid settings, data or a model that can't be read, or an output folder
            that is not empty.
    """

def reward(
    *,
    from_model: PathLike | None = None,
    data: Examples | None = None,
    eval_data: Examples | None = None,
    eval_fraction: float = 0.05,
    eval_examples: int = 256,
    template: PathLike = "auto",
    sequence_length: int | None = None,
    skip_bad: bool = False,
    steps: int = 0,
    batch_size: int = 8,
    gradient_accumulation: int = 1,
    schedule: Literal["cosine", "wsd"] = "cosine",
    min_learning_rate: float = 0.0,
    warmup: float = 0.03,
    decay: float = 0.2,
    decay_shape: Literal["linear", "1-sqrt", "cosine"] = "linear",
    learning_rate: float = 2e-05,
    weight_decay: float = 0.0,
    beta1: float = 0.9,
    beta2: float = 0.999,
    epsilon: float = 1e-08,
    max_grad_norm: float = 1.0,
    lora_rank: int = 0,
    lora_alpha: float | None = None,
    lora_dropout: float = 0.0,
    lora_targets: Names = "all-linear",
    lora: Json = {},
    weights: Literal["fp32", "bf16", "nf4", "int8"] = "fp32",
    attn_implementation: str = "auto",
    logging_steps: int | None = None,
    eval_steps: int | None = None,
    save_steps: int = 0,
    keep: int = 2,
    async_checkpoints: bool = False,
    divergence_margin: float = 1.0,
    divergence_patience: int = 20,
    gradient_checkpointing: bool = False,
    precision: Literal["auto", "fp32", "bf16", "fp16"] = "auto",
    threads: int | None = None,
    report_to: str = "none",
    trainer: Json = {},
    seed: int = 0,
    parallel: Literal["auto", "ddp", "fsdp2"] = "auto",
    device: Literal["auto", "cpu", "cuda", "mps"] = "auto",
    pause_step: int | None = None,
    push_to_hub: PathLike | None = None,
    output: PathLike = "runs/reward",
    epochs: float = 1.0,
    group_by_length: bool = False,
    trl: Json = {},
    resume: Resume = False,
    overwrite: bool = False,
    bar: bool = True,
) -> RunResult:
    """Train a reward model on preferences (prompt, chosen, rejected), from a fine-tuned model.

    The keywords are the settings of `lamina reward`. ``data`` may also be a list of rows or a datasets.Dataset.
    Returns the content of result.json; OUTPUT/model is the model, and OUTPUT/report.html shows the run.

    Raises:
        UserError: (a ValueError) for invalid settings, data or a model that can't be read, or an output folder
            that is not empty.
    """

def rlhf(
    *,
    from_model: PathLike | None = None,
    data: Examples | None = None,
    eval_data: Examples | None = None,
    eval_fraction: float = 0.05,
    eval_examples: int = 256,
    template: PathLike = "auto",
    sequence_length: int | None = None,
    skip_bad: bool = False,
    steps: int = 0,
    batch_size: int = 8,
    gradient_accumulation: int = 1,
    schedule: Literal["cosine", "wsd"] = "cosine",
    min_learning_rate: float = 0.0,
    warmup: float = 0.03,
    decay: float = 0.2,
    decay_shape: Literal["linear", "1-sqrt", "cosine"] = "linear",
    learning_rate: float = 2e-07,
    weight_decay: float = 0.0,
    beta1: float = 0.9,
    beta2: float = 0.999,
    epsilon: float = 1e-08,
    max_grad_norm: float = 1.0,
    lora_rank: int = 0,
    lora_alpha: float | None = None,
    lora_dropout: float = 0.0,
    lora_targets: Names = "all-linear",
    lora: Json = {},
    weights: Literal["fp32", "bf16", "nf4", "int8"] = "fp32",
    attn_implementation: str = "auto",
    logging_steps: int | None = None,
    eval_steps: int | None = None,
    eval_corpus: Text | None = None,
    eval_tasks: Names | None = None,
    eval_task_limit: int = 100,
    eval_data_dir: PathLike | None = None,
    run_code: bool = False,
    save_steps: int = 0,
    keep: int = 2,
    async_checkpoints: bool = False,
    divergence_margin: float = 1.0,
    divergence_patience: int = 20,
    gradient_checkpointing: bool = False,
    precision: Literal["auto", "fp32", "bf16", "fp16"] = "auto",
    threads: int | None = None,
    report_to: str = "none",
    trainer: Json = {},
    seed: int = 0,
    parallel: Literal["auto", "ddp", "fsdp2"] = "auto",
    device: Literal["auto", "cpu", "cuda", "mps"] = "auto",
    pause_step: int | None = None,
    push_to_hub: PathLike | None = None,
    output: PathLike = "runs/rlhf",
    epochs: float = 1.0,
    trl: Json = {},
    reward_model: PathLike | None = None,
    reward_function: PathLike | None = None,
    reward_weights: str | None = None,
    reward_timeout: float = 0.0,
    algorithm: Literal["remax", "rloo", "grpo"] = "remax",
    kl_per: Literal["step", "sequence"] = "step",
    beta: float | None = None,
    reward_clip: float | None = None,
    num_generations: int = 2,
    max_answer: int = 128,
    temperature: float = 1.0,
    resume: Resume = False,
    overwrite: bool = False,
    bar: bool = True,
) -> RunResult:
    """Train a policy with ReMax, RLOO or GRPO, on rewards from a model or a function.

    The keywords are the settings of `lamina rlhf`. ``data`` may also be a list of rows or a datasets.Dataset.
    Returns the content of result.json; OUTPUT/model is the model, and OUTPUT/report.html shows the run.

    Raises:
        UserError: (a ValueError) for invalid settings, data or a model that can't be read, or an output folder
            that is not empty.
    """

def dpo(
    *,
    from_model: PathLike | None = None,
    data: Examples | None = None,
    eval_data: Examples | None = None,
    eval_fraction: float = 0.05,
    eval_examples: int = 256,
    template: PathLike = "auto",
    sequence_length: int | None = None,
    skip_bad: bool = False,
    steps: int = 0,
    batch_size: int = 8,
    gradient_accumulation: int = 1,
    schedule: Literal["cosine", "wsd"] = "cosine",
    min_learning_rate: float = 0.0,
    warmup: float = 0.03,
    decay: float = 0.2,
    decay_shape: Literal["linear", "1-sqrt", "cosine"] = "linear",
    learning_rate: float = 1e-06,
    weight_decay: float = 0.0,
    beta1: float = 0.9,
    beta2: float = 0.999,
    epsilon: float = 1e-08,
    max_grad_norm: float = 1.0,
    lora_rank: int = 0,
    lora_alpha: float | None = None,
    lora_dropout: float = 0.0,
    lora_targets: Names = "all-linear",
    lora: Json = {},
    weights: Literal["fp32", "bf16", "nf4", "int8"] = "fp32",
    attn_implementation: str = "auto",
    logging_steps: int | None = None,
    eval_steps: int | None = None,
    eval_corpus: Text | None = None,
    eval_tasks: Names | None = None,
    eval_task_limit: int = 100,
    eval_data_dir: PathLike | None = None,
    run_code: bool = False,
    save_steps: int = 0,
    keep: int = 2,
    async_checkpoints: bool = False,
    divergence_margin: float = 1.0,
    divergence_patience: int = 20,
    gradient_checkpointing: bool = False,
    precision: Literal["auto", "fp32", "bf16", "fp16"] = "auto",
    threads: int | None = None,
    report_to: str = "none",
    trainer: Json = {},
    seed: int = 0,
    parallel: Literal["auto", "ddp", "fsdp2"] = "auto",
    device: Literal["auto", "cpu", "cuda", "mps"] = "auto",
    pause_step: int | None = None,
    push_to_hub: PathLike | None = None,
    output: PathLike = "runs/dpo",
    epochs: float = 1.0,
    group_by_length: bool = False,
    trl: Json = {},
    beta: float = 0.1,
    resume: Resume = False,
    overwrite: bool = False,
    bar: bool = True,
) -> RunResult:
    """Train a policy on preferences (prompt, chosen, rejected), without a reward model.

    The keywords are the settings of `lamina dpo`. ``data`` may also be a list of rows or a datasets.Dataset.
    Returns the content of result.json; OUTPUT/model is the model, and OUTPUT/report.html shows the run.

    Raises:
        UserError: (a ValueError) for invalid settings, data or a model that can't be read, or an output folder
            that is not empty.
    """

def coord_check(
    *,
    placement: str = "pre_ln",
    backbone: PathLike = "llama-nano",
    widths: Numbers = "48,96,192,384",
    depths: Numbers = "",
    num_layers: int = 6,
    hidden_size: int | None = None,
    untie_embeddings: bool = False,
    init: str = "recommended",
    width_scaling: str = "standard",
    base_width: int | None = None,
    k_embedding: float = 1.0,
    k_hidden: float = 1.0,
    k_readout: float = 1.0,
    depth_scaling: Literal["none", "depth-mup", "completep"] = "none",
    base_depth: int | None = None,
    learning_rate: float = 0.001,
    steps: int = 3,
    batch_size: int = 8,
    seeds: Numbers = "0,1,2",
    corpus: Text = "embedded",
    text_field: str = "text",
    tokenizer: PathLike = "bytes",
    sequence_length: int = 64,
    weight_decay: float = 0.1,
    beta1: float = 0.9,
    beta2: float = 0.95,
    epsilon: float = 1e-08,
    max_grad_norm: float = 1.0,
    output: PathLike = "runs/coord-check",
    threads: int | None = None,
    tolerance: float = 0.3,
    resume: Resume = False,
    overwrite: bool = False,
    bar: bool = True,
) -> Comparison:
    """Check whether a module's output grows with the model's width or depth. Lamina trains several sizes for a few
    steps on one batch and prints the exponent e of mean |x| ~ size^e for each output x. If e is 0, the output
    keeps its size. If e is above 0, the output of a large model will blow up.

    The keywords are the settings of `lamina coord-check`. Returns the rows of slopes.csv and the report page;
    OUTPUT/result.json has the verdict.

    Raises:
        UserError: (a ValueError) for invalid settings, a corpus that can't be read, or an output folder that is
            not empty.
        TrialsFailed: (a UserError) if every trial failed. Lamina still writes the report page.
    """

def transfer(
    *,
    backbone: PathLike = "llama-71m",
    num_layers: int | None = None,
    hidden_size: int | None = None,
    num_heads: int | None = None,
    untie_embeddings: bool = False,
    init: str = "recommended",
    corpus: Text = "embedded",
    text_field: str = "text",
    tokenizer: PathLike = "bytes",
    sequence_length: int = 64,
    eval_fraction: float = 0.05,
    packing: Literal["on", "off"] = "on",
    objective: Literal["auto", "causal_lm", "masked_lm", "image_classification"] = "auto",
    mask_ratio: float = 0.3,
    image_size: int | None = None,
    patch_size: int | None = None,
    center_crop: float = 1.0,
    crop_scale: float = 1.0,
    flip: float = 0.0,
    rand_augment: float = 0.0,
    random_erasing: float = 0.0,
    repeated_augmentation: int = 1,
    mixup: float = 0.0,
    cutmix: float = 0.0,
    label_smoothing: float = 0.0,
    steps: int = 100,
    batch_size: int = 16,
    gradient_accumulation: int = 1,
    schedule: Literal["cosine", "wsd"] = "cosine",
    min_learning_rate: float = 0.1,
    warmup: float = 0.1,
    decay: float = 0.2,
    decay_shape: Literal["linear", "1-sqrt", "cosine"] = "linear",
    weight_decay: float = 0.1,
    beta1: float = 0.9,
    beta2: float = 0.95,
    epsilon: float = 1e-08,
    max_grad_norm: float = 1.0,
    width_scaling: str = "standard",
    base_width: int | None = None,
    k_embedding: float = 1.0,
    k_hidden: float = 1.0,
    k_readout: float = 1.0,
    drop_path: float = 0.0,
    ema_decay: float = 0.0,
    logging_steps: int | None = None,
    eval_steps: int | None = None,
    eval_blocks: int = 256,
    eval_corpus: Text | None = None,
    eval_tasks: Names | None = None,
    eval_task_limit: int = 100,
    eval_data_dir: PathLike | None = None,
    run_code: bool = False,
    save_steps: int = 0,
    keep: int = 2,
    async_checkpoints: bool = False,
    monitor_blocks: int | None = None,
    probe_every: int = 0,
    probes: Names = "hidden_states,angular_distance,gradients",
    divergence_margin: float = 1.0,
    divergence_patience: int = 20,
    stuck_margin: float = 0.1,
    expert_balance: Literal["auto", "none", "bias", "loss"] = "auto",
    expert_balance_rate: float = 0.001,
    gradient_checkpointing: bool = False,
    precision: Literal["auto", "fp32", "bf16", "fp16", "float8"] = "auto",
    compile: Literal["auto", "on", "off"] = "auto",
    cuda_graphs: bool = False,
    threads: int | None = None,
    report_to: str = "none",
    trainer: Json = {},
    placement: str = "fusenorm",
    proxy_width: int = 64,
    learning_rates: Numbers = "1e-3,2e-3,4e-3,8e-3,1.6e-2,3.2e-2,6.4e-2",
    seeds: Numbers = "0",
    output: PathLike = "runs/transfer",
    workers: int | None = None,
    verify_rates: Numbers = "",
    verify_width: int | None = None,
    best_margin: float = 0.02,
    resume: Resume = False,
    overwrite: bool = False,
    bar: bool = True,
) -> Comparison:
    """Find learning rates for a wide model by training a narrow proxy model. Lamina prints the stable and the best
    learning rates on the proxy. For each kind of weight, Lamina also prints the learning rate at the target's
    width. A learning rate that fails on the proxy also fails on the target (FuseNorm Figure 4).

    The keywords are the settings of `lamina transfer`. Returns the rows of results.csv and the report page;
    OUTPUT/transfer.json holds the interval of stable learning rates, the target's learning rates, and the risk of
    failure.

    Raises:
        UserError: (a ValueError) for invalid settings, a corpus that can't be read, or an output folder that is
            not empty.
        TrialsFailed: (a UserError) if every trial failed. Lamina still writes the report page.
    """

def max_lr(
    *,
    placements: Names = "post_ln,pre_ln,keel",
    max_learning_rate: float = 0.15,
    backbone: PathLike = "llama-nano",
    num_layers: int | None = None,
    hidden_size: int | None = None,
    num_heads: int | None = None,
    untie_embeddings: bool = False,
    init: str = "same:small_scaled",
    corpus: Text = "embedded",
    text_field: str = "text",
    tokenizer: PathLike = "bytes",
    sequence_length: int = 64,
    eval_fraction: float = 0.05,
    packing: Literal["on", "off"] = "on",
    objective: Literal["auto", "causal_lm", "masked_lm", "image_classification"] = "auto",
    mask_ratio: float = 0.3,
    image_size: int | None = None,
    patch_size: int | None = None,
    center_crop: float = 1.0,
    crop_scale: float = 1.0,
    flip: float = 0.0,
    rand_augment: float = 0.0,
    random_erasing: float = 0.0,
    repeated_augmentation: int = 1,
    mixup: float = 0.0,
    cutmix: float = 0.0,
    label_smoothing: float = 0.0,
    steps: int = 300,
    batch_size: int = 16,
    gradient_accumulation: int = 1,
    weight_decay: float = 0.1,
    beta1: float = 0.9,
    beta2: float = 0.95,
    epsilon: float = 1e-08,
    max_grad_norm: float = 1.0,
    width_scaling: str = "none",
    base_width: int | None = None,
    k_embedding: float = 1.0,
    k_hidden: float = 1.0,
    k_readout: float = 1.0,
    depth_scaling: Literal["none", "depth-mup", "completep"] = "none",
    base_depth: int | None = None,
    optimizer: Literal["adamw", "muon"] = "adamw",
    drop_path: float = 0.0,
    ema_decay: float = 0.0,
    logging_steps: int | None = None,
    eval_steps: int | None = None,
    eval_blocks: int = 256,
    eval_corpus: Text | None = None,
    eval_tasks: Names | None = None,
    eval_task_limit: int = 100,
    eval_data_dir: PathLike | None = None,
    run_code: bool = False,
    save_steps: int = 0,
    keep: int = 2,
    async_checkpoints: bool = False,
    monitor_blocks: int | None = None,
    probe_every: int = 0,
    probes: Names = "hidden_states,angular_distance,gradients",
    stuck_margin: float = 0.1,
    expert_balance: Literal["auto", "none", "bias", "loss"] = "auto",
    expert_balance_rate: float = 0.001,
    gradient_checkpointing: bool = False,
    precision: Literal["auto", "fp32", "bf16", "fp16", "float8"] = "auto",
    compile: Literal["auto", "on", "off"] = "auto",
    cuda_graphs: bool = False,
    threads: int | None = None,
    report_to: str = "none",
    trainer: Json = {},
    window: int = 8,
    spike_margin: float = 0.5,
    spike_patience: float = 0.05,
    plateau_margin: float = 0.05,
    plateau_factor: float = 2.0,
    seeds: Numbers = "0,1,2",
    output: PathLike = "runs/max-lr",
    workers: int | None = None,
    resume: Resume = False,
    overwrite: bool = False,
    bar: bool = True,
) -> Comparison:
    """Find the largest learning rate that each placement tolerates. Each placement and seed has one run, whose
    learning rate rises from 0 to --max-learning-rate in --steps steps (Keel's protocol). A run ends if

    The keywords are the settings of `lamina max-lr`. Returns the rows of results.csv (``max_learning_rate``,
    ``stop_rule`` and ``loss_at_stop`` of every placement and seed) and the report page. ``placements`` and
    ``seeds`` may also be lists.

    Raises:
        UserError: (a ValueError) for invalid settings, a corpus that can't be read, or an output folder that is
            not empty.
        TrialsFailed: (a UserError) if every trial failed. Lamina still writes the report page.
    """

def study(
    *,
    study: PathLike | None = None,
    scale: Literal["cpu", "gpu", "paper"] = "cpu",
    store: PathLike = "runs/trials",
    records: PathLike | None = None,
    output: PathLike | None = None,
    workers: int | None = None,
    threads: int | None = 1,
    seeds: Numbers | None = None,
    corpus: Text | None = None,
    set: Json = {},
    engine: Literal["local", "ray"] = "local",
    address: str | None = None,
    gpus: float = 0.0,
    processes: int = 1,
    run_code: bool = False,
    record: bool = False,
    resume: Resume = False,
    overwrite: bool = False,
    bar: bool = True,
) -> StudyOutcome:
    """Run a study and judge its claims, as `lamina study run` does.

    The keywords are the settings of `lamina study`. ``study`` is a name from `lamina study list`, or your YAML
    file. OUTPUT/report.html shows the verdicts.

    Raises:
        UserError: (a ValueError) for invalid settings, a study that can't be read or has changed since it ran, or
            an output folder that is not empty.
    """

def probe_folder(
    *,
    checkpoint: PathLike = "",
    probes: Names = "all",
    corpus: Text = "embedded",
    text_field: str = "text",
    tokenizer: PathLike | None = None,
    sequence_length: int | None = None,
    sequences: int | None = None,
    batch_size: int = 4,
    tolerance: float | None = None,
    layers: str | None = None,
    device: str | None = None,
    dtype: Literal["auto", "float32", "bfloat16", "float16"] = "float32",
    seed: int = 0,
    threads: int | None = None,
    output: PathLike = "probe",
    png: bool = False,
    resume: Resume = False,
    overwrite: bool = False,
    bar: bool = True,
) -> RunResult:
    """Measure what each layer of a checkpoint does: one table and one figure per probe, and OUTPUT/report.html.

    The keywords are the settings of `lamina probe`. Returns the content of result.json. OUTPUT/NAME.parquet is
    the table of the probe NAME. ``lamina.probe`` returns only the tables and writes nothing.

    Raises:
        UserError: (a ValueError) for invalid settings, a checkpoint or a corpus that can't be read, or an output
            folder that is not empty.
    """

def evaluate(
    *,
    models: Names = "",
    compare: bool = False,
    tasks: Names = "",
    num_fewshot: int | None = None,
    limit: int | None = None,
    data_dir: PathLike | None = None,
    corpus: Text | None = None,
    text_field: str = "text",
    window: int | None = None,
    stride: int | None = None,
    tokenizer: PathLike | None = None,
    batch_size: int | str = 8,
    dtype: Literal["auto", "float32", "bfloat16", "float16"] = "float32",
    device: str | None = None,
    seed: int = 0,
    threads: int | None = None,
    output: PathLike = "eval",
    chat_template: bool = False,
    system: str | None = None,
    generation: Json = {},
    run_code: bool = False,
    resume: Resume = False,
    overwrite: bool = False,
    bar: bool = True,
) -> RunResult:
    """Evaluate trained models: their perplexity per token, word and byte on a text (--corpus), and their scores on
    tasks of lm-evaluation-harness (--tasks). MODEL is a Lamina or transformers checkpoint, a run's folder, or a
    study's folder. For a study, Lamina reports the mean and the standard deviation over the seeds.

    The keywords are the settings of `lamina eval`. ``models`` (paths of checkpoints, runs and studies) and
    ``tasks`` may also be lists. Returns the content of result.json.

    Raises:
        UserError: (a ValueError) for invalid settings, an unknown task, or data or a checkpoint that Lamina can't
            read, or an output folder that is not empty.
    """
