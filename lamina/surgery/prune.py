"""Remove layers from a trained model: layers that you choose, or the least important layers by a probe's metric."""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import TypedDict, cast

import pandas as pd
import torch
from torch import nn
from transformers import PreTrainedConfig, PreTrainedModel

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
from lamina.probes.layer_drop import removed
from lamina.probes.structure.hooks import evaluating
from lamina.surgery.layer_lists import refuse_twice

ANGLE, HARM = "angular_distance", "layer_drop"
_MEASURES = {ANGLE: (ANGLE, ANGLE), HARM: (f"{HARM}(meaning=remove, metric=loss)", "loss_increase")}  # probe, metric
_INDEX = ("layer_idx", "layer_id", "layer_index", "idx")
_SAME = 1e-4  # the allowed difference of the written model's logits, relative to the largest logit


class Pruning(TypedDict):
    """The content of pruning.json. Losses are in nats per token, on ``tokens`` tokens."""

    source: str
    dropped: list[int]
    by: str | None
    measured: dict[str, float]  # the value of each layer that decided which layers to remove
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

    Lamina measures layers and losses on the text in ``settings``. Raises UserError if the removal fails, and leaves
    ``output`` unchanged.
    """
    stored = read_config(source, "model").dtype
    context = make_context(source, settings)
    context.warn_of_unread()
    count = context.structure.num_layers
    if context.structure.has_memory:
        raise UserError(
            f"model: the layers of {source!r} read earlier layers by number, and a removal changes these numbers. "
            "Choose another model."
        )
    with evaluating(context.model):
        gone, measured = (refuse_twice(layers), {}) if by is None else chosen_layers(context, by, drop)
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
        difference = _difference(context, few, expected, gone, by_index)
        record: Pruning = {
            "source": source,
            "dropped": gone,
            "by": by,
            "measured": measured,
            "num_layers": count - len(gone),
            "parameters_before": whole,
            "parameters": sum(parameter.numel() for parameter in again.parameters()),
            "loss_before": before,
            "loss": mean_loss(context)[0],
            "tokens": tokens,
            "largest_difference": difference,
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


def mean_loss(context: Context) -> tuple[float, int]:
    """Return the mean cross-entropy in nats per token, and the number of tokens."""
    with torch.no_grad():
        losses = torch.cat([context.token_losses(context.on_device(batch)).flatten() for batch in context.batches])
    return float(losses.double().mean()), losses.numel()


def chosen_layers(context: Context, by: str, drop: int) -> tuple[list[int], dict[str, float]]:
    """Choose the layers to remove. Return these layers, and the measured value of each layer.

    If a probe measures groups of consecutive layers, the value of a group belongs to the group's first layer.
    """
    count = context.structure.num_layers
    if not 0 < drop < count:
        raise UserError(f"drop: {drop} does not fit a model of {count} layers. Give a number from 1 to {count - 1}.")
    spec, metric = _MEASURES.get(by) or (by.rpartition(".")[::2] if "." in by else (by, ""))
    probes = make_all(spec)
    if len(probes) > 1:
        raise UserError(f"by: {by!r} names more than one probe. Give {ANGLE}, {HARM}, or PROBE.METRIC.")
    name = probes[0].name
    frame = run(context, probes)[name]
    if by == ANGLE:
        groups = cast(pd.DataFrame, frame[frame["metric"] == metric]).query("size == @drop")
        values = cast(pd.Series, groups.set_index("start")["value"])
        start = int(cast(int, values.idxmin()))
        return list(range(start, start + drop)), _by_layer(values)
    metrics = sorted(set(frame["metric"])) if "metric" in frame else []
    values = _of_layers(frame, metric, count)
    if values is None:
        if metric not in metrics:
            raise unknown("metric", f"{name}.{metric}", [f"{name}.{measured}" for measured in metrics])
        fitting = [f"{name}.{other}" for other in metrics if _of_layers(frame, other, count) is not None]
        raise UserError(
            f"by: {by!r} does not have one value for each of {count} layers. Give {ANGLE}, {HARM}, or "
            f"{', '.join(fitting) or 'a metric of another probe'}."
        )
    return sorted(int(str(layer)) for layer in values.nsmallest(drop).index), _by_layer(values)


def _of_layers(frame: pd.DataFrame, metric: str, count: int) -> pd.Series | None:
    """Return a metric's values by layer. Return None unless the metric has exactly one value for each layer.

    If a metric has values for sub-layers, the values of the whole blocks count.
    """
    if not {"metric", "layer", "value"} <= {*frame}:
        return None
    rows = frame.query("metric == @metric and 0 <= layer < @count")
    if bool(rows.duplicated("layer").any()) and "sublayer" in rows:
        rows = rows.query("sublayer == 'block'")
    values = cast(pd.Series, rows.set_index("layer")["value"])
    return None if values.index.has_duplicates or len(values) != count or values.isna().any() else values


def _by_layer(values: pd.Series) -> dict[str, float]:
    return {str(int(str(layer))): float(value) for layer, value in values.items()}


def cut_layers(context: Context, gone: Sequence[int]) -> None:
    """Remove layers from the model. Raises UserError unless one ModuleList has exactly these layers."""
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
    """Return a sentence about the fields of config.json that describe layers by index, or ""."""

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
    """Return the largest difference from the expected logits. Raises UserError if this exceeds the tolerance."""
    with torch.no_grad():
        difference = float((context.forward(few).logits.float() - expected).abs().max())
    if not difference <= _SAME * float(expected.abs().max()):
        raise UserError(
            f"layers: after the removal of {ranges(gone)}, the written model's logits are wrong by {difference:.3g}: "
            f"{by_index() or 'the layers depend on their index'}. Choose other layers."
        )
    return difference
