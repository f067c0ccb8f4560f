"""A folder as `lamina probe` leaves it, made without a model."""

import json
from pathlib import Path

import numpy as np
import pandas as pd
import plotly.graph_objects as go
import plotly.io

from lamina.probes.job.compact import compact

HOSTILE = "<script>alert(1)</script><a href='javascript:alert(2)'>the</a>"


def frames(num_layers: int) -> dict[str, pd.DataFrame]:
    """A streaming probe's frame by layer, and a pairwise one."""
    layers = np.arange(num_layers + 1)
    courses = {"variance": 0.01 * 1.5 ** (20 * layers / num_layers), "abs_max": 3.0 + 40 * layers / num_layers}
    place = {"layer": layers, "sublayer": "model", "role": "state"}
    both = (pd.DataFrame({**place, "metric": name, "value": values}) for name, values in courses.items())
    states = pd.concat(both, ignore_index=True).assign(standard_error=0.001)
    start, other = np.meshgrid(layers, layers, indexing="ij")
    pairs = pd.DataFrame({"layer": start.ravel(), "other": other.ravel(), "metric": "cosine"})
    pairs["value"] = np.exp(-np.abs(start - other) / num_layers).ravel()
    return {"dummy_states": states, "dummy_pairs": pairs}


def write_probing(folder: Path, num_layers: int = 12, **changed) -> Path:
    """A finished probing of two probes, and a third that does not apply to the model."""
    (folder / "figures").mkdir(parents=True)
    probes = {}
    for name, frame in frames(num_layers).items():
        frame.to_parquet(folder / f"{name}.parquet")
        figure, left_out = compact(_figure(name, frame))
        plotly.io.write_json(figure, folder / "figures" / f"{name}-1.json")
        said = [f"The variance grows from 0.01 to 33 at the token {HOSTILE}.", "A second sentence."]
        drawn = {"file": f"figures/{name}-1.json", "title": "By <b>layer</b>", "caption": f"{HOSTILE} {left_out}"}
        about = {"spec": name, "title": name.replace("_", " ").capitalize(), "summary": f"What {HOSTILE} says."}
        about |= {"source": "A paper, Eq 3", "definition": f"x = y\n\n{HOSTILE}", "status": "finished"}
        about |= {"sentences": said, "figures": [drawn], "notes": [f"beware of {HOSTILE}"]}
        probes[name] = {**about, "seconds": 1.25, "forwards": 8, "standard_error": 0.012}
    probes["no_head"] = {"title": "No head", "summary": "Needs one.", "status": "skipped", "reason": "it has no head"}
    model = {"name": "models/tiny", "model_type": "llama", "num_layers": num_layers, "hidden_size": 32}
    model |= {"parameters": 12345, "placement": "Pre-LN", "notes": ["a note on the model"]}
    result = {"status": "finished", "reason": "", "created": "2026-11-21", "inputs": {"text": "64 × 256 tokens"}}
    result |= {"model": model, "settings": {"checkpoint": "models/tiny", "probes": "all"}}
    result |= {"notes": [f"a note with {HOSTILE}"], "probes": probes, **changed}
    (folder / "result.json").write_text(json.dumps(result), encoding="utf-8")
    environment = {"kind": "probing", "versions": {"lamina": "0.1.0"}}
    environment |= {"command": f"lamina probe models/tiny --corpus '{HOSTILE}'"}
    (folder / "environment.json").write_text(json.dumps(environment), encoding="utf-8")
    return folder


def _figure(name: str, frame: pd.DataFrame) -> go.Figure:
    figure = go.Figure()
    if name == "dummy_states":
        for metric, rows in frame.groupby("metric"):
            figure.add_scatter(x=rows.layer, y=rows.value, name=str(metric), text=[HOSTILE] * len(rows))
        figure.update_yaxes(type="log", title="value")
        figure.update_xaxes(title=f"layer {HOSTILE}")
    else:
        cells = frame.pivot(index="layer", columns="other", values="value")
        figure.add_heatmap(x=cells.columns, y=cells.index, z=cells.to_numpy(), hovertemplate="%{z:.2f}<extra></extra>")
    return figure.update_layout(title="Its own title")
