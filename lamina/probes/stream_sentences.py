"""The sentences on the hidden states' numbers."""

from __future__ import annotations

import math

import numpy as np

from lamina.core.frames import Frame

FP16_MAX = 65504.0
FITS = 0.7  # R^2 from which a curve's shape is named


def growth(variance: Frame, linear: float, exponential: float) -> str:
    """How the variance changes with depth; ``variance`` is a series by state, the others R^2."""
    last = variance.index[-1]
    if not np.isfinite(variance).all():
        return f"The hidden states are not finite from state {variance.index[~np.isfinite(variance)][0]} on."
    if variance.min() > 0 and variance.max() < 4 * variance.min():
        return f"The hidden states' variance stays between {variance.min():.3g} and {variance.max():.3g}."
    goes = "grows" if variance.iloc[-1] > variance.iloc[0] else "goes"
    text = f"The hidden states' variance {goes} from {variance.iloc[0]:.3g} (state 0) to {variance.iloc[-1]:.3g} "
    text += f"(state {last}), largest at state {variance.idxmax()} with {variance.max():.3g}"
    if math.isnan(linear) or math.isnan(exponential):
        return text + "."
    fits = f"(R^2 {linear:.2f} linear, {exponential:.2f} exponential)"
    if max(linear, exponential) < FITS:
        return text + f"; over depth it follows neither a line nor an exponential {fits}."
    kind = "linear" if linear >= exponential else "exponential"
    return text + f"; over depth it is closer to {kind} {fits}."


def headroom(peak: Frame) -> str:
    """The largest |x|, a row of the frame, and FP16's limit."""
    token = f" ({peak['token']!r})" if isinstance(peak["token"], str) else ""
    text = f"The largest |x| is {peak['value']:.4g}, in state {peak['layer']} at channel {peak['channel']}, token "
    text += f"{peak['position']}{token}: "
    if not peak["value"] > 0:
        return text + "the stream is 0."
    factor = FP16_MAX / peak["value"]
    if factor < 1:
        return text + f"{1 / factor:.3g} times FP16's limit of 65504, which overflows."
    return text + f"FP16's limit of 65504 is {factor:.3g} times as large ({math.log2(factor):.1f} bits of headroom)."


def massive(states: Frame) -> str:
    """Where the states' rows have massive activations."""
    activations = states[states["metric"] == "massive_activation"]
    ratio = states[states["metric"] == "max_to_median"].sort_values("value").iloc[-1]
    if activations.empty:
        return (
            "No massive activations (|x| > 100 and at least 1000 times the median); the largest |x| is at most "
            f"{ratio['value']:.3g} times its sequence's median (state {ratio['layer']})."
        )
    layers = sorted(activations["layer"].unique())
    most = activations.loc[activations["value"].abs().idxmax()]
    channels = activations["channel"].nunique()
    return (
        f"Massive activations (|x| > 100 and at least 1000 times the median) in {len(layers)} states, {layers[0]} to "
        f"{layers[-1]}, in {channels} channel{'s' * (channels > 1)}; the largest is {most['value']:.4g} at channel "
        f"{most['channel']}, token {most['position']} (state {most['layer']})."
    )
