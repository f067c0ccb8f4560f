"""Figures and sentences for the result of dropping layers."""

from __future__ import annotations

import math

import pandas as pd

from lamina.core.frames import Frame
from lamina.core.text import ranges
from lamina.probes.engine.figures import Figure, lines
from lamina.probes.engine.removal import BRANCH, REMOVE

_MEANT = {REMOVE: "the layer skipped", BRANCH: "its branches set to zero, its norms kept"}


def figures(frame: Frame) -> list[tuple[Figure, str]]:
    """One line over the layers per metric, and per meaning where the meanings differ."""
    drawn = []
    for metric, group in _harm(frame).groupby("metric", sort=False):
        several, size = _differ(group), int(group["size"].iloc[0])
        rows = group if several else group[group["meaning"] == group["meaning"].iloc[0]]
        figure = lines(
            rows,
            x="layer",
            y="value",
            color="meaning" if several else None,
            title=f"{_words(metric).capitalize()} without {'each layer' if size == 1 else f'{size} layers'}",
            x_title="layer dropped" if size == 1 else "first layer dropped",
            y_title=_words(metric),
            band="standard_error",
        )
        drawn.append((figure, "Positive is harm. Bars are standard errors, where they are known."))
    return drawn


def sentences(frame: Frame) -> list[str]:
    """Which layers matter least and most, which could be dropped, and whether the angular distance agrees."""
    harm = _harm(frame)
    harm = harm[harm["metric"] == harm["metric"].iloc[0]]
    metric = str(harm["metric"].iloc[0])
    whole = float(frame.loc[frame["layer"] == -1, "value"].iloc[0])
    unit = " nats" if metric == "loss_increase" else ""
    several, text = _differ(harm), []
    for meaning, group in harm.groupby("meaning", sort=False):
        if meaning != harm["meaning"].iloc[0] and not several:
            continue
        group = group.dropna(subset="value").sort_values("value")
        if not len(group):
            text.append(f"The {_words(metric)} is NaN for every layer.")
            continue
        least, most, size = group.iloc[0], group.iloc[-1], int(group["size"].iloc[0])
        meant = f" ({_MEANT[str(meaning)]})" if several else ""
        if most["value"] - least["value"] < 1e-5 * abs(whole):
            dropped = "any one layer" if size == 1 else f"any {size} layers in a row"
            text.append(f"Dropping {dropped} does equal harm ({_words(metric)} {least['value']:.3g}{unit}){meant}.")
        else:
            text.append(
                f"Dropping {_which(least['layer'], size)} harms least ({_words(metric)} {least['value']:.3g}{unit}), "
                f"dropping {_which(most['layer'], size)} most ({most['value']:.3g}{unit}){meant}."
            )
        text += _could_go(group, whole, unit) if size == 1 else []
    return text + _agreement(frame, harm)


def _harm(frame: Frame) -> Frame:
    return frame[frame["metric"].str.endswith(("_increase", "_drop"))]


def _words(metric: str) -> str:
    return str(metric).replace("_", " ")


def _differ(harm: Frame) -> bool:
    wide = harm.pivot_table(index=["metric", "layer"], columns="meaning", values="value")
    return len(wide.columns) > 1 and bool((wide.nunique(axis=1) > 1).any())


def _which(layer: float, size: int) -> str:
    first = int(layer)
    return f"layer {first}" if size == 1 else f"layers {first} to {first + size - 1}"


def _could_go(group: Frame, whole: float, unit: str) -> list[str]:
    """The layers whose harm is below 1 % of the whole model's value, or within the noise."""
    errors = group["standard_error"].replace(math.inf, math.nan)  # of one sequence it is unknown
    border = (2 * errors.fillna(0.0)).clip(lower=0.01 * abs(whole))
    harmless = group[group["value"] < border]
    if not len(harmless):
        return [
            "No layer could be dropped unnoticed: each costs more than 1 % of the whole and over two standard errors."
        ]
    layers = ranges([int(layer) for layer in harmless["layer"]])
    return [
        f"Layers that could be dropped, one at a time: {layers} (harm below 1 % of the whole's {whole:.3g}{unit}, or "
        "below two "
        "standard errors)."
    ]


def _agreement(frame: Frame, harm: Frame) -> list[str]:
    angles = frame[frame["metric"] == "angular_distance"].set_index("layer")["value"]
    first = harm[harm["meaning"] == harm["meaning"].iloc[0]].set_index("layer")["value"]
    paired: Frame = pd.concat([angles, first], axis=1, keys=["angle", "harm"]).dropna()
    if len(paired) < 4 or paired.nunique().min() < 2:
        return []
    size = int(harm["size"].iloc[0])
    agreement = float(paired["angle"].rank().corr(paired["harm"].rank()))
    turned, missed = paired["angle"].idxmin(), paired["harm"].idxmin()
    same = "the same" if turned == missed else _which(missed, size)
    return [
        f"The angular distance would drop {_which(turned, size)} first, the measured harm {same}; over all starts the "
        f"two rank alike with a Spearman correlation of {agreement:.2f}."
    ]
