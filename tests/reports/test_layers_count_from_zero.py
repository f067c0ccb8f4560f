"""On every page a layer has its number in ``model.layers``: the first is 0, and -1 is outside of them all."""

import base64
import json
import re
from pathlib import Path

import numpy as np
import pytest
import torch
from readable import readable
from synthetic_study import write_study

import lamina
from lamina.cli import main
from lamina.placements import resolve
from lamina.placements.diagram import text
from lamina.reports import registry, report

LAYERS = 3
TINY = f"--num-layers {LAYERS} --hidden-size 16 --num-heads 2 --sequence-length 16 --batch-size 2 --threads 1".split()
# No axis of layers, or the page of a run.
WITHOUT = {"claims", "coord-check", "dpo", "evaluation", "max-lr", "reward", "rlhf", "sft", "transfer"}
FIGURES = Path(__file__).parents[2] / "docs" / "results" / "figures"


def compared(folder):
    return write_study(folder, num_layers=LAYERS, logged=3)


def run(folder):
    return next(path for path in sorted((compared(folder) / "trials").iterdir()) if (path / "layers").is_dir())


def watched(folder):
    model = lamina.build("llama-nano", "pre_ln", num_layers=LAYERS, hidden_size=16, num_heads=2, vocab_size=23)
    optimizer = torch.optim.AdamW(model.parameters())
    with lamina.watch(model, optimizer, output=str(folder), every=2) as monitor:
        for _ in range(6):
            loss = model(input_ids=(ids := torch.randint(0, 23, (2, 8))), labels=ids).loss
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            monitor.step(loss)
    return folder


def preflight(folder):
    words = ["preflight", "--placements", "pre_ln", *TINY, "--steps", "20", "--sequences", "2"]
    assert main([*words, "--output", str(folder)]) == 0
    return folder


def probe(folder):
    model = lamina.build("llama-nano", "pre_ln", num_layers=LAYERS, hidden_size=16, num_heads=2, vocab_size=260)
    model.save_pretrained(folder / "model")
    words = ["--probes", "gradients,similarity,hidden_states,depth_mixing", "--tokenizer", "bytes", "--sequences", "2"]
    assert main(["probe", str(folder / "model"), *words, "--output", str(folder / "probed"), "--threads", "1"]) == 0
    return folder / "probed"


PAGES = {"study": compared, "run": run, "watched": watched, "preflight": preflight, "probing": probe}


def numbers(values):
    """A trace's coordinates: a list, or an array as Plotly packs it."""
    if isinstance(values, dict):
        return np.frombuffer(base64.b64decode(values["bdata"]), dtype=values["dtype"]).tolist()
    return [value for value in values or () if isinstance(value, int | float)]


def axes_of(figure):
    """The title of the axis and the numbers along it, of each trace."""
    for trace in figure["data"]:
        for way in "xy":
            axis = f"{way}axis{trace.get(f'{way}axis', way)[1:]}"
            title = figure["layout"].get(axis, {}).get("title", {}).get("text") or ""
            matched = figure["layout"].get(axis, {}).get("matches", way)
            title = title or figure["layout"].get(f"{way}axis{matched[1:]}", {}).get("title", {}).get("text") or ""
            if values := numbers(trace.get(way)):
                yield title, values


def figures_of(page: str):
    for found in re.finditer(r'\{"data":\s?\[', page):
        yield json.JSONDecoder().raw_decode(page[found.start() :])[0]


def test_every_kind_of_page_is_here():
    assert set(PAGES) | WITHOUT == set(registry.kinds())


@pytest.mark.parametrize("kind", PAGES)
def test_the_layers_of_a_pages_figures_are_those_of_the_model(kind, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    page = readable(report(PAGES[kind](tmp_path / kind)).read_text("utf-8"))
    along = [(title, values) for figure in figures_of(page) for title, values in axes_of(figure)]
    layers = [values for title, values in along if re.match(r"(first )?layer\b", title)]
    assert layers
    assert {max(values) for values in layers} == {LAYERS - 1}
    assert {min(values) for values in layers} <= {0, -1}
    states = [values for title, values in along if title.startswith("state")]
    assert not states or (min(map(min, states)), max(map(max, states))) == (0, LAYERS)


def test_the_figures_of_the_studies_count_layers_and_states_from_0():
    shown = 0
    for path in sorted(FIGURES.glob("*.json")):
        firsts = []  # a panel may lack the first layers, where its quantity is not defined
        for title, values in axes_of(json.loads(path.read_text("utf-8"))):
            if title in ("layer", "first layer", "state (0: the embedding)"):
                firsts.append(min(values))
                assert max(values) % 2 == (not title.startswith("state")), path.name  # all the depths are even
                shown += 1
        assert not firsts or min(firsts) == 0, path.name
    assert shown > 20


def test_the_blocks_of_a_drawing_are_counted_from_0():
    drawn = text(resolve("keel", 8))
    assert "block 0" in drawn
    assert "blocks 1-7" in drawn
    assert any("block 0:" in line for line in lamina.placements.get("keel").equation)
