"""Remove layers from a trained model: layers that you choose, or the least important layers by a probe's metric."""

from __future__ import annotations

import copy
import logging
import math
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import TypedDict, cast

import torch
from torch import nn
from transformers import PreTrainedConfig, PreTrainedModel

from lamina.core.frames import Frame
from lamina.core.progress import duration
from lamina.core.text import ranges
from lamina.errors import UserError, unknown
from lamina.jobs.files import write_json
from lamina.modeling.backbones.conversion import saved, written_model
from lamina.modeling.backbones.loading import read_config
from lamina.modeling.backbones.presets import cut_config
from lamina.modeling.configuration_lamina import backbone_of
from lamina.probes.engine.context import Context
from lamina.probes.engine.measure import make_context, run
from lamina.probes.engine.probe_settings import ProbeSettings
from lamina.probes.engine.registry import make_all
from lamina.probes.engine.statistics import free_layers, ranking, tied
from lamina.probes.job.probe_folder import Bars
from lamina.probes.layer_drop import removed
from lamina.probes.structure.hooks import evaluating
from lamina.surgery.layer_lists import ANGLE, HARM, measure_of, refuse_twice

logger = logging.getLogger(__name__)
_INDEX = ("layer_idx", "layer_id", "layer_index", "idx")
_LONG = 120.0  # seconds, above which Lamina prints the expected time of the measurement
_SAME = 1e-4  # the allowed difference of the written model's logits, relative to the largest logit


class Choice(TypedDict):
    """The layers to remove, and the measured values that determined the choice."""

    dropped: list[int]
    measured: dict[str, float | None]  # the value of each layer that decided which layers to remove
    errors: dict[str, float | None]  # the standard error of each value, or None if it is unknown
    measured_tokens: int | None  # the tokens behind these values
    undecided: list[int]  # the layers that remain, although two standard errors cannot tell them from a removed layer


class Pruning(Choice):
    """The content of pruning.json. Losses are in nats per token, on ``tokens`` tokens."""

    source: str
    by: str | None
    notes: list[str]  # reasons to doubt or to trust the choice
    num_layers: int
    parameters_before: int
    parameters: int
    loss_before: float
    loss: float
    tokens: int
    largest_difference: float


def prune(
    source: str,
    output: Path,
    settings: ProbeSettings,
    *,
    layers: Sequence[int] = (),
    by: str | None = None,
    drop: int = 0,
    overwrite: bool = False,
) -> Pruning:
    """Write a model without some layers into a new folder (see ``lamina.api.models.prune``).

    The text in ``settings`` measures layers and losses. After an error, ``output`` stays unchanged.
    """
    stored = read_config(source, "model").dtype
    context = make_context(source, settings)
    context.warn()
    count = context.structure.num_layers
    if context.structure.has_memory:
        raise UserError(
            f"model: the layers of {source!r} read earlier layers by number, and a removal changes these numbers. "
            "Choose another model."
        )
    with evaluating(context.model):
        choice = _choice(refuse_twice(layers)) if by is None else chosen_layers(context, by, drop)
        gone = choice["dropped"]
        _refuse_layers(gone, count)
        before, tokens = mean_loss(context)
        few = context.on_device(context.batches[0], 1)
        with torch.no_grad(), removed(context, gone):
            expected = context.forward(few).logits.float()
    model = cast(PreTrainedModel, context.model)
    whole, config = sum(parameter.numel() for parameter in model.parameters()), copy.deepcopy(model.config)
    by_index = partial(_by_index, type(model), config, context.structure.layers[0].path.rpartition(".")[0], count)
    cut_layers(context, gone)
    with written_model(source, output, overwrite=overwrite) as draft:
        try:
            again = saved(model, draft, stored, dtype=torch.float32)
        except UserError as error:
            why = by_index() or str(error).replace(str(draft), str(output))
            raise UserError(
                f"layers: the model does not load without {ranges(gone)}: {why}. Choose other layers."
            ) from error
        context.model = context.base = nn.Module.to(again, context.device)
        record: Pruning = {
            "source": source,
            **choice,
            "by": by,
            "notes": _doubts(context, choice, by, before),
            "num_layers": count - len(gone),
            "parameters_before": whole,
            "parameters": sum(parameter.numel() for parameter in again.parameters()),
            "loss_before": before,
            "loss": mean_loss(context)[0],
            "tokens": tokens,
            "largest_difference": _difference(context, few, expected, gone, by_index),
        }
        write_json(draft / "pruning.json", record)
    return record


def _refuse_layers(gone: Sequence[int], count: int) -> None:
    if outside := [layer for layer in gone if layer >= count]:
        raise UserError(f"layers: the model has no layer {ranges(outside)}. Choose layers from 0 to {count - 1}.")
    if not 0 < len(gone) < count:
        raise UserError(
            f"layers: you chose {len(gone)} layers of {count}. Choose at least one layer, and fewer than all."
        )


def _doubts(context: Context, choice: Choice, by: str | None, loss: float) -> list[str]:
    """Return sentences about weak evidence, such as layers whose values differ by less than the noise."""
    if by is None:
        return []
    notes, layers = [context.no_better_than_guessing(loss)], choice["dropped"]
    if by == HARM and (free := [layer for layer in layers if choice["errors"][str(layer)] == 0]):
        notes.append(f"Without layer {ranges(free)}, no loss changes, so the removal is free.")
    if choice["undecided"]:
        blocks = "Layers" if by != ANGLE or len(layers) == 1 else f"The blocks of {len(layers)} layers from layers"
        compared = [*(layers if by != ANGLE else layers[:1]), *choice["undecided"]]
        tokens = f" on {choice['measured_tokens']:,} tokens" if choice["measured_tokens"] else ""
        sequences = 16 * sum(len(next(iter(batch.values()))) for batch in context.batches)
        notes.append(
            f"{blocks} {ranges(compared)} cannot be told apart{tokens}. To measure more text, add --sequences "
            f"{sequences}, or give a longer --corpus."
        )
    return [note for note in notes if note]


def mean_loss(context: Context) -> tuple[float, int]:
    """Return the mean cross-entropy in nats per token, and the number of tokens."""
    with torch.no_grad():
        losses = torch.cat([context.token_losses(context.on_device(batch)).flatten() for batch in context.batches])
    return float(losses.double().mean()), losses.numel()


def chosen_layers(context: Context, by: str, drop: int) -> Choice:
    """Choose the layers to remove. Layers whose removal changes no loss come first."""
    count = context.structure.num_layers
    if not 0 < drop < count:
        raise UserError(f"drop: {drop} does not fit a model of {count} layers. Give a number from 1 to {count - 1}.")
    spec, metric = measure_of(by)
    (probe,) = make_all(spec)
    name = probe.name

    def warn(seconds: dict[str, float]) -> None:
        if (total := sum(seconds.values())) > _LONG:
            logger.warning(f"{name} takes about {duration(total)}. To measure less text, add a smaller --sequences")

    context.progress = bars = Bars(show=True)
    frame: Frame = run(context, [probe], estimated=warn)[name]
    bars.close()
    tokens = int(frame["tokens"].max()) if "tokens" in frame else None
    if by == ANGLE:
        groups: Frame = frame[(frame["metric"] == metric) & (frame["size"] == drop)].set_index("start")
        values, errors = groups["value"], groups["standard_error"]
        start = int(values.idxmin())
        layers = list(range(start, start + drop))
        return _choice(layers, values, errors, tokens, tied(values, errors, [start]))
    metrics = sorted(set(frame["metric"])) if "metric" in frame else []
    rows = _of_layers(frame, metric, count)
    if rows is None:
        if metric not in metrics:
            raise unknown("metric", f"{name}.{metric}", [f"{name}.{measured}" for measured in metrics])
        fitting = [f"{name}.{other}" for other in metrics if _of_layers(frame, other, count) is not None]
        raise UserError(
            f"by: {by!r} does not have one value for each of {count} layers. Give {ANGLE}, {HARM}, or "
            f"{', '.join(fitting) or 'a metric of another probe'}."
        )
    values = rows["value"]
    errors = rows["standard_error"] if "standard_error" in rows else values * math.nan
    free = free_layers(values, errors) if metric in ("loss_increase", "perplexity_increase") else []
    layers = sorted(ranking(values, errors, free)[:drop])
    return _choice(layers, values, errors, tokens, tied(values, errors, layers, free))


def _of_layers(frame: Frame, metric: str, count: int) -> Frame | None:
    """Return one row per layer with a metric's value, or None if the metric has no single value for each layer."""
    if not {"metric", "layer", "value"} <= {*frame}:
        return None
    rows = frame.query("metric == @metric and 0 <= layer < @count")
    if bool(rows.duplicated("layer").any()) and "sublayer" in rows:
        # keep the values of whole blocks
        rows = rows.query("sublayer == 'block'")
    rows = rows.set_index("layer")
    return None if rows.index.has_duplicates or len(rows) != count or rows["value"].isna().any() else rows


def _choice(
    layers: list[int],
    values: Frame | None = None,
    errors: Frame | None = None,
    tokens: int | None = None,
    undecided: Sequence[int] = (),
) -> Choice:
    measured, spread = (
        {str(int(layer)): float(value) if math.isfinite(value) else None for layer, value in series.items()}
        for series in ({} if values is None else values, {} if errors is None else errors)
    )
    return {
        "dropped": layers,
        "measured": measured,
        "errors": spread,
        "measured_tokens": tokens,
        "undecided": list(undecided),
    }


def cut_layers(context: Context, gone: Sequence[int]) -> None:
    """Remove layers from the model. Raises UserError if no ModuleList has exactly these layers."""
    model, sites = context.model, context.structure.layers
    parents = {site.path.rpartition(".")[0] for site in sites}
    holder = model.get_submodule(parents.pop()) if len(parents) == 1 else None
    if not isinstance(holder, nn.ModuleList) or len(holder) != len(sites):
        raise UserError(
            f"model: {type(model).__name__} has no ModuleList of exactly these layers. Choose another model."
        )
    kept = [index for index in range(len(holder)) if index not in set(gone)]
    layers = [holder[index] for index in kept]
    del holder[:]
    holder.extend(layers)
    for index, layer in enumerate(layers):  # the index of the layer's keys and values in the cache
        for module in layer.modules():
            if hasattr(module, "layer_idx"):
                vars(module)["layer_idx"] = index
    config = model.config
    assert isinstance(config, PreTrainedConfig)
    cut_config(config, kept, len(sites))


def _by_index(cls: type[PreTrainedModel], config: PreTrainedConfig, holder: str, count: int) -> str:
    """Return a sentence about the fields of config.json that describe layers by index, or "" if there are none."""

    def kinds(changed: PreTrainedConfig) -> list[str]:
        with torch.device("meta"):
            layers = cast(nn.ModuleList, cls(changed).get_submodule(holder))
        return [
            str(
                [
                    (n, {k: v for k, v in vars(m).items() if isinstance(v, int | str) and k not in _INDEX}, type(m))
                    for n, m in layer.named_modules()
                ]
            )
            for layer in layers
        ]

    text, fields = backbone_of(config), list[str]()
    usual = kinds(config)
    for name, value in list(vars(text).items()):
        index = isinstance(value, int) and not isinstance(value, bool) and 0 < value <= count
        if not (index or isinstance(value, list)) or name in ("num_hidden_layers", "layer_types"):
            continue
        other = copy.deepcopy(config)
        setattr(backbone_of(other), name, [*value[1:]] if isinstance(value, list) else value % count + 1)
        try:
            same = [a == b for a, b in zip(usual, kinds(other), strict=True)]
        except Exception:  # the model rejects this value
            continue
        if not all(same) and any(same):
            fields.append(f"{name}: {value}")
    return f"config.json describes layers by their index ({', '.join(fields)})" if fields else ""


def _difference(
    context: Context,
    few: dict[str, torch.Tensor],
    expected: torch.Tensor,
    gone: Sequence[int],
    by_index: Callable[[], str],
) -> float:
    """Return the largest difference from the expected logits. Raises UserError for a difference above the tolerance."""
    with torch.no_grad():
        difference = float((context.forward(few).logits.float() - expected).abs().max())
    if not difference <= _SAME * float(expected.abs().max()):
        raise UserError(
            f"layers: after the removal of {ranges(gone)}, the written model's logits are wrong by {difference:.3g}: "
            f"{by_index() or 'the layers depend on their index'}. Choose other layers."
        )
    return difference
