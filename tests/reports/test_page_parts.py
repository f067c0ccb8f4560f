"""Parts of pages: ticks at whole layers, the sentence on scale, the units of a loss, and the palette."""

import base64
import gzip
import itertools
import json
import math
import re
from dataclasses import replace

import numpy as np
import plotly.graph_objects as go
import pytest

from lamina import placements
from lamina.reports.figures import loss_curves
from lamina.reports.records import Trial
from lamina.reports.style import Shown, colors, log_ticks, look, looks, to_html


def trial(folder, seed, speed, flops=600.0):
    folder = folder / str(seed)
    folder.mkdir()
    lines = [
        {"step": s, "tokens": 10 * s, "loss": 3.0, "tokens_per_second": speed, "eval_loss": 2.0 + seed} for s in (1, 2)
    ]
    (folder / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    (folder / "result.json").write_text(json.dumps({"tokens": 20, "flops": flops}))
    return Trial(name=str(seed), placement="keel", folder=folder)


def test_a_loss_can_be_drawn_against_flops_and_seconds_with_a_band_over_the_seeds(tmp_path):
    item = Shown(placement="keel", color="#e69f00", trials=(trial(tmp_path, 0, 5.0), trial(tmp_path, 1, 10.0)))
    figure = loss_curves([item])
    units = {unit["label"]: unit["factors"] for unit in figure.layout.meta["against"]}
    assert len(figure.data) == 4  # two runs, the band, the mean
    assert units == {
        "tokens": [1.0] * 4,
        "FLOPs": [30.0] * 4,
        "seconds": pytest.approx([0.2, 0.1, 0.15, 0.15]),
    }
    band = next(trace for trace in figure.data if trace.fill == "toself")
    assert np.allclose(band.y, [2.5 + 0.5**0.5] * 2 + [2.5 - 0.5**0.5] * 2)


def test_a_run_without_flops_is_drawn_against_what_it_has(tmp_path):
    item = Shown(placement="keel", color="#e69f00", trials=(trial(tmp_path, 0, 5.0, flops=None),))
    assert [unit["label"] for unit in loss_curves([item]).layout.meta["against"]] == ["tokens", "seconds"]


@pytest.mark.parametrize("flops", [0, "many", -1.0])
def test_numbers_without_a_meaning_leave_the_loss_against_tokens(tmp_path, flops):
    item = Shown(placement="keel", color="#e69f00", trials=(trial(tmp_path, 0, 0.0, flops=flops),))
    assert list(loss_curves([item]).layout.meta["against"]) == []


def test_a_page_holds_a_figures_data_packed_so_that_nothing_in_it_can_end_its_element():
    html = to_html(go.Figure(go.Scatter(x=[1], y=[1], name="</script><b>&")))
    data = html.partition('<script type="text/plain">')[2].rpartition("</script>")[0]
    assert re.fullmatch(r"[A-Za-z0-9+/=]+", data)
    assert json.loads(gzip.decompress(base64.b64decode(data)))["data"][0]["name"] == "</script><b>&"
    assert html == to_html(go.Figure(go.Scatter(x=[1], y=[1], name="</script><b>&"))), "the same figure, the same page"


def drawn(html):
    data = html.partition('<script type="text/plain">')[2].partition("</script>")[0]
    return json.loads(gzip.decompress(base64.b64decode(data)))["data"]


def test_lines_of_the_same_values_take_turns_so_that_each_color_shows():
    figure, layers = go.Figure(), list(range(8))
    for color, factor in (("#111111", 1), ("#222222", 1.001), ("#333333", 50), ("#444444", 1)):
        figure.add_scatter(x=layers, y=[factor * 10**layer for layer in layers], mode="lines", line={"color": color})
    html = to_html(figure.update_yaxes(type="log"))
    assert [line["line"].get("dash") for line in drawn(html)] == [None, "18px,9px", None, "9px,18px"]
    assert "take turns" in html


def test_the_text_of_a_tick_is_the_value_of_the_tick():
    ticks, texts = log_ticks(-4.1, -3.1)
    assert dict(zip(texts, ticks, strict=True)) == pytest.approx(
        {"10<sup>-4</sup>": -4, **{f"{m}·10<sup>-4</sup>": math.log10(m) - 4 for m in (2, 3, 5, 7)}}
    )
    assert log_ticks(3.9, 4.8)[1] == ["10<sup>4</sup>", "2·10<sup>4</sup>", "3·10<sup>4</sup>", "5·10<sup>4</sup>"]
    assert log_ticks(-1.1, 0.2)[1] == ["0.1", "0.2", "0.5", "1"]


def test_the_drawn_eval_loss_is_the_rankings_of_the_seeds_that_finished(tmp_path):
    trials = [trial(tmp_path, seed, 5.0) for seed in (0, 1)]

    def drawn(*ends):
        ended = tuple(replace(one, status=end) for one, end in zip(trials, ends, strict=True))
        figure = loss_curves([Shown(placement="keel", color="#e69f00", trials=ended)])
        return next(list(trace.y) for trace in figure.data if trace.mode == "lines+markers")

    assert drawn("finished", "stuck") == [2.0, 2.0]
    assert drawn("stuck", "stuck") == [2.5, 2.5]


PAPERS = ("pre_ln", "post_ln", "fusenorm", "mix_ln", "keel", "peri_ln")
# Machado, Oliveira and Fernandes 2009, severity 1, on linear RGB.
BLINDNESS = {
    "none": np.eye(3),
    "protanopia": [[0.152286, 1.052583, -0.204868], [0.114503, 0.786281, 0.099216], [-0.003882, -0.048116, 1.051998]],
    "deuteranopia": [[0.367322, 0.860646, -0.227968], [0.280085, 0.672501, 0.047413], [-0.011820, 0.042940, 0.968881]],
    "tritanopia": [[1.255528, -0.076749, -0.178779], [-0.078411, 0.930809, 0.147602], [0.004733, 0.691367, 0.303900]],
}
XYZ = np.array([[0.4124, 0.3576, 0.1805], [0.2126, 0.7152, 0.0722], [0.0193, 0.1192, 0.9505]])


def lab(color: str, blindness: str) -> np.ndarray:
    """A color as someone with a color blindness sees it, in CIELAB."""
    rgb = np.array([int(color[i : i + 2], 16) / 255 for i in (1, 3, 5)])
    linear = np.where(rgb <= 0.04045, rgb / 12.92, ((rgb + 0.055) / 1.055) ** 2.4)
    x, y, z = XYZ @ np.clip(np.asarray(BLINDNESS[blindness]) @ linear, 0, 1) / [0.9505, 1, 1.089]
    fx, fy, fz = (np.cbrt(v) if v > 0.008856 else 7.787 * v + 16 / 116 for v in (x, y, z))
    return np.array([116 * fy - 16, 500 * (fx - fy), 200 * (fy - fz)])


@pytest.mark.parametrize("blindness", BLINDNESS)
def test_the_papers_own_are_told_apart_by_color_alone(blindness):
    seen = {name: lab(color, blindness) for name, color in colors(PAPERS).items()}
    near = {pair for pair in itertools.combinations(seen, 2) if np.linalg.norm(seen[pair[0]] - seen[pair[1]]) < 10}
    assert not near


def test_every_placement_has_a_color_and_a_form_of_its_own():
    all_looks = looks(placements.names())
    assert None not in {look(name) for name in placements.names()}
    assert len({chosen.color for chosen in all_looks.values()}) == len(all_looks)
    assert len({(chosen.dash, chosen.marker) for chosen in all_looks.values()}) == len(all_looks)


def test_a_placements_look_does_not_depend_on_the_others():
    assert looks(placements.names())["olmo2"] == looks(["mine.yaml", "olmo2"])["olmo2"]
    assert looks(["keel(alpha=3)"])["keel(alpha=3)"] == look("keel")


def test_those_of_the_users_own_get_a_look_that_nothing_else_on_the_page_has():
    chosen = looks([*PAPERS, "mine.yaml", "yours.yaml", "keel(alpha=3)", "deepnorm"])
    assert len(set(chosen.values())) == 10
