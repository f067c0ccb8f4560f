"""Estimate the sizes and costs of a study's models without training (a dry run).

Lamina builds each model on PyTorch's meta device, so a dry run needs no text, tokenizer, weights or network.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import TYPE_CHECKING

from lamina.core.frames import Frame
from lamina.errors import UserError

if TYPE_CHECKING:
    from transformers import PreTrainedConfig

    from lamina.placements import Plan
    from lamina.training.objectives.objective import Objective
    from lamina.training.settings import PretrainSettings

TERAFLOPS = 989.0
"""The peak speed of an H100 or H200 (SXM) in dense bfloat16, in TFLOP/s."""
UTILIZATION = 0.4
"""The expected fraction of the peak speed on one host, without gradient checkpointing. Deep, narrow models reach less.
"""
VOCABULARIES = {
    "mistralai/Mistral-7B-v0.1": 32_000,
    "meta-llama/Llama-2-7b-hf": 32_000,
    "t5-base": 32_100,
    "google-t5/t5-base": 32_100,
    "Xenova/gpt-4": 100_277,  # cl100k_base
    "openai-community/gpt2": 50_257,
    "EleutherAI/gpt-neox-20b": 50_277,
    "Qwen/Qwen3-0.6B": 151_669,
    "deepseek-ai/DeepSeek-V2-Lite": 100_002,
}
"""The vocabulary sizes of the Hub tokenizers that the studies use."""
BYTES = 257
MOST_TRIED = 20e6
"""The number of parameters above which Lamina does not time a training step."""
COLUMNS = (*("arm", "trials", "parameters", "active", "vocabulary", "tokens", "flops", "gpu_hours", "total_gpu_hours"),)
"""The columns of the dry run's table. Only "trials" and "total_gpu_hours" cover all runs of a configuration."""


def dry_run(arms: Mapping[str, Mapping[str, PretrainSettings]]) -> Frame:
    """Count the parameters and FLOPs of each configuration's model. Return a table with one row per configuration."""
    import pandas as pd

    counts: dict[str, tuple[int, int, float]] = {}
    rows = []
    for arm, trials in arms.items():
        name, settings = next(iter(trials.items()))
        try:
            parameters, active, vocabulary, length, flops = _counted(settings, counts)
        except UserError as error:
            raise UserError(f"{name}: {error}") from None
        tokens = settings.steps * settings.batch_size * settings.gradient_accumulation * length
        hours = flops * tokens / (TERAFLOPS * 1e12 * UTILIZATION) / 3600
        sizes = (arm, len(trials), parameters, active, vocabulary, tokens)
        rows.append((*sizes, flops * tokens, hours, hours * len(trials)))
    return pd.DataFrame(rows, columns=list(COLUMNS))


def table(frame: Frame) -> str:
    """Format a dry run's table as text, with the study's total cost."""
    width = max([len("arm"), *(len(str(arm)) for arm in frame["arm"])])
    lines = [
        f"{'arm':<{width}} {'trials':>6} {'parameters':>10} {'active':>8} {'vocabulary':>10} {'tokens':>8} "
        f"{'FLOPs':>9} {'GPU-hours':>10} {'all trials':>10}"
    ]
    for row in frame.to_dict("records"):
        lines.append(
            f"{row['arm']:<{width}} {row['trials']:>6} {_short(row['parameters']):>10} {_short(row['active']):>8} "
            f"{row['vocabulary']:>10} {_short(row['tokens']):>8} {row['flops']:>9.3g} {row['gpu_hours']:>10,.4g} "
            f"{row['total_gpu_hours']:>10,.4g}"
        )
    tokens, flops = (float((frame[name] * frame["trials"]).sum()) for name in ("tokens", "flops"))
    lines.append(
        f"\n{int(frame['trials'].sum())} trials: {_short(tokens)} tokens, {flops:.3g} FLOPs, "
        f"{frame['total_gpu_hours'].sum():,.4g} GPU-hours at {UTILIZATION:.0%} of a bfloat16 peak of {TERAFLOPS:g} "
        "TFLOP/s."
    )
    return "\n".join(lines)


def minutes_here(
    arms: Mapping[str, Mapping[str, PretrainSettings]], frame: Frame, *, workers: int, threads: int | None
) -> str:
    """Estimate the study's duration here, from two training steps of the first run, or return "" for a large model."""
    import time

    import torch

    from lamina.modeling.building import build
    from lamina.training.optimization.optimizer import scaling_of

    name, settings = next(iter(next(iter(arms.values())).items()))
    first = frame.iloc[0]
    if max(frame["parameters"]) > MOST_TRIED or not first["vocabulary"]:
        return ""
    before = torch.get_num_threads()
    torch.set_num_threads(threads or before)
    try:
        config, plan, objective, vocabulary, length = _resolved(settings)
        model = build(config, plan, head=objective.head, init="normal", scaling=scaling_of(settings))
        optimizer = torch.optim.AdamW(model.parameters())
        ids, seconds = torch.randint(vocabulary, (settings.batch_size, length)), []
        for _ in range(3):
            begun = time.monotonic()
            model(input_ids=ids, labels=ids).loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            seconds.append(time.monotonic() - begun)
    finally:
        torch.set_num_threads(before)
    step = min(seconds[1:]) * settings.gradient_accumulation * settings.steps
    minutes = float((frame["flops"] * frame["trials"]).sum()) / float(first["flops"]) * step / workers / 60
    rounded = float(f"{minutes:.2g}")  # two digits, never 2.1e+03
    return (
        f"About {rounded:,.10g} minutes on this machine with {workers} workers. Lamina timed two steps of {name} "
        "and multiplied by the ratio of FLOPs. The estimate leaves out evaluations, probes and start-up."
    )


def vocabulary_of(settings: PretrainSettings, config: PreTrainedConfig) -> int:
    """Return a tokenizer's vocabulary size without loading the tokenizer (default: the backbone's size)."""
    from lamina.data.tokenizers import is_trained

    tokenizer = settings.tokenizer
    if tokenizer is None or tokenizer == "bytes":
        return BYTES
    if is_trained(tokenizer):
        return int(tokenizer.partition(":")[2])
    return VOCABULARIES.get(tokenizer, int(config.vocab_size))


def _counted(settings: PretrainSettings, counts: dict[str, tuple[int, int, float]]) -> tuple[int, int, int, int, float]:
    """Return the parameters, parameters used per token, vocabulary size, tokens per item, and FLOPs per token."""
    import torch

    from lamina.modeling.backbones.presets import parameters_of
    from lamina.modeling.building import build
    from lamina.training.optimization.optimizer import scaling_of
    from lamina.training.resolve import check_settings, training_flops

    config, plan, objective, vocabulary, length = _resolved(settings)
    # these settings depend on the machine, so Lamina checks them when the trial runs
    check_settings(replace(settings, precision="fp32", compile="off", report_to="none"), plan)
    key = repr((config.to_dict(), plan.to_dict(), length, objective.head, scaling_of(settings)))
    if key not in counts:
        with torch.device("meta"):
            model = build(config, plan, head=objective.head, init="normal", scaling=scaling_of(settings))
        count = parameters_of(model)
        counts[key] = count.total, count.active, training_flops(model, plan, length)
    parameters, active, flops = counts[key]
    return parameters, active, vocabulary, length, flops


def _resolved(settings: PretrainSettings) -> tuple[PreTrainedConfig, Plan, Objective, int, int]:
    """Return a run's backbone, norm placement, objective, vocabulary size (0 for images), and tokens per item."""
    from lamina.training.objectives.objective import objective_of
    from lamina.training.objectives.text import TextObjective, with_vocabulary
    from lamina.training.resolve import backbone_config
    from lamina.training.source import plan_of

    config = backbone_config(settings)
    objective, vocabulary = objective_of(config, settings.objective), 0
    if isinstance(objective, TextObjective):
        config = with_vocabulary(config, vocabulary := vocabulary_of(settings, config))
    plan = plan_of(settings, config.num_hidden_layers)
    return config, plan, objective, vocabulary, objective.item_tokens(config, settings)


def _short(count: float) -> str:
    for unit, size in (("T", 1e12), ("B", 1e9), ("M", 1e6)):
        if count >= size:
            return f"{count / size:.3g}{unit}"
    return f"{count:,.0f}"
