"""Probes of a user's own, as files: one that watches the states, and one that works on the weights alone."""

from pathlib import Path

WATCHING = '''
import pandas as pd
import torch

from lamina.probes.engine.figures import lines
from lamina.probes.engine.registry import Probe, probe
from lamina.probes.engine.statistics import Running


@probe
class MeanSquare(Probe):
    """The mean square of each state: mean of x^2 over channels and tokens, by sequence."""

    name = "mean_square"
    title = "Mean square"
    summary = "The mean square of the stream before every layer."
    source = "a Tuesday"
    over_steps = ("mean_square",)

    def __init__(self, power: float = 2.0):
        if power <= 0:
            raise ValueError(f"power: {power:g} (allowed: above 0)")
        self.power = power

    def begin(self, context):
        self.states = context.structure.states()
        self.found = {layer: Running() for layer in self.states}

    def points(self):
        return self.states

    def see(self, key, value):
        self.found[key].add(value.float().abs().pow(self.power).mean((1, 2)))

    def standard_error(self):
        return max(one.relative_error() for one in self.found.values())

    def finish(self, context):
        rows = [
            (layer, "block", "mean_square", float(one.mean), float(one.standard_error))
            for layer, one in sorted(self.found.items())
        ]
        return pd.DataFrame(rows, columns=["layer", "sublayer", "metric", "value", "standard_error"])

    def figures(self, frame):
        return [(lines(frame, "layer", "value", title="By <layer>", log_y=True), "The mean square by layer.")]

    def sentences(self, frame):
        return [f"From {frame.value.iloc[0]:.3g} to {frame.value.iloc[-1]:.3g}."]
'''

WORKING = '''
import os
import pandas as pd

from lamina.errors import UserError
from lamina.probes.engine.registry import Probe, probe


@probe
class Weights(Probe):
    """The L2 norm of all of a layer's weights."""

    name = "weight_norm"
    title = "Weight norm"
    summary = "The norm of each layer's weights."
    source = "another Tuesday"

    def begin(self, context):
        if "REFUSE" in os.environ:
            raise UserError("weight_norm: no weights on Tuesdays (allowed: another day)")

    def finish(self, context):
        if "INTERRUPT" in os.environ:
            raise KeyboardInterrupt
        if "BREAK" in os.environ:
            raise RuntimeError("broken")
        rows = [
            (site.index, "weight_norm", sum(float(p.detach().square().sum()) for p in site.module.parameters()) ** 0.5)
            for site in context.structure.layers
        ]
        context.notes.append("weights are <not> activations")
        return pd.DataFrame(rows, columns=["layer", "metric", "value"])
'''


def write_probes(folder: Path) -> tuple[str, str]:
    """Write both files; gives what --probes takes for each."""
    paths = folder / "watching.py", folder / "working.py"
    for path, text in zip(paths, (WATCHING, WORKING), strict=True):
        path.write_text(text, encoding="utf-8")
    return str(paths[0]), str(paths[1])
