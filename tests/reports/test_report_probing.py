"""The page of `lamina probe`, from the folder's files alone."""

import html
import json
import re

import numpy as np
import pandas as pd
import plotly.graph_objects as go
import plotly.io
import pytest
from synthetic_probing import write_probing

from lamina.probes.job.compact import MOST_CELLS, MOST_LINES, MOST_POINTS, compact, defuse
from lamina.reports import report
from lamina.reports.pages.probing import main_numbers


@pytest.fixture(scope="module")
def page(tmp_path_factory) -> str:
    return report(write_probing(tmp_path_factory.mktemp("probing") / "out")).read_text(encoding="utf-8")


def test_a_section_for_each_probe_and_one_for_the_model(page):
    ids = re.findall(r'<section id="([^"]+)"', page)
    assert ids == ["in-short", "model", "dummy-states", "dummy-pairs", "no-head", "settings"]
    assert len(re.findall(r'class="plotly-graph-div"', page)) == 2
    assert "12 layers of width 32" in page
    assert "12,345 parameters" in page


def test_the_command_to_prune_reads_the_text_that_the_probe_read(tmp_path):
    given = {"corpus": "my text.txt", "tokenizer": "bytes", "sequence_length": 32, "sequences": None}
    folder = write_probing(tmp_path / "out", settings={"checkpoint": "models/tiny", **given})
    written = json.loads((folder / "result.json").read_text())
    written["probes"]["layer_drop"] = {**written["probes"]["dummy_states"], "figures": []}
    (folder / "dummy_states.parquet").rename(folder / "layer_drop.parquet")
    del written["probes"]["dummy_states"]
    (folder / "result.json").write_text(json.dumps(written))
    text = " --corpus 'my text.txt' --tokenizer bytes --sequence-length 32"
    command = f"lamina prune models/tiny --by layer_drop --drop 1{text} --output pruned"
    assert html.escape(command) in report(folder).read_text(encoding="utf-8")


def test_the_charts_of_the_titles_probe_are_open(tmp_path):
    folder = write_probing(tmp_path / "out")
    written = json.loads((folder / "result.json").read_text())
    (name, other), probe = [*written["probes"]][:2], written["probes"]["dummy_states"]
    four = {**written["probes"][other], "figures": [*probe["figures"], *probe["figures"]] * 4}
    written["probes"] = {other: four, name: probe, "layer_drop": {**probe, "title": "Layer drop"}}
    (folder / "result.json").write_text(json.dumps(written))
    page = report(folder).read_text(encoding="utf-8")
    sections = {part.partition('"')[0]: part for part in page.split('<section id="')[1:]}
    folded = [anchor for anchor, part in sections.items() if "<summary>Charts</summary>" in part]
    assert folded == ["dummy-states"]
    assert "plotly-graph-div" in sections["layer-drop"]


def test_what_was_skipped_says_why(page):
    section = page[page.index('id="no-head"') :]
    assert "Not measured: it has no head" in section[: section.index("</section>")]


def test_every_text_is_escaped(page):
    assert "<script>alert" not in page
    assert "<a href='javascript" not in page
    assert page.count("&lt;script&gt;alert(1)&lt;/script&gt;") > 8
    # plotly reads an <a> in its own data; the data's < is \u003c in the page
    assert "\\u003ca href" not in page
    assert "&lt;a href=&#39;javascript" in page


def test_the_main_numbers_are_in_a_folded_table(page):
    section = page[page.index('id="dummy-states"') : page.index('id="dummy-pairs"')]
    table = section[section.index("<details>") :]
    assert "all 26 in dummy_states.parquet" in table
    assert "<td>variance</td>" in table
    assert "layer 12" in table


def test_main_numbers_against_the_frame():
    rows = zip([0, 1, 2, 0, 1], "aaabb", "mmmmm", [3.0, 1.0, np.inf, 5.0, np.nan], strict=True)
    frame = pd.DataFrame(rows, columns=["layer", "sublayer", "metric", "value"])
    found = main_numbers(frame)
    assert found["rows"].tolist() == [3, 2]
    assert found["not finite"].tolist() == [1, 1]
    assert found["lowest"].tolist() == [1.0, 5.0]
    assert found["at"].tolist() == ["layer 1", "layer 0"]
    assert found["highest"].tolist() == [3.0, 5.0]
    assert found["median"].tolist() == [2.0, 5.0]
    apart = pd.DataFrame({"layer": [0, 1] * 2, "metric": "m", "format": ["fp8"] * 2 + ["bf16"] * 2, "value": range(4)})
    for table in (apart, apart.rename(columns={"format": "meaning"})):
        assert main_numbers(table)["median"].tolist() == [0.5, 2.5]


def test_an_interrupted_probing_has_its_page_and_says_so(tmp_path):
    folder = write_probing(tmp_path / "out", status="interrupted", reason="stopped by Ctrl-C")
    page = report(folder).read_text(encoding="utf-8")
    assert "status: interrupted" in page
    assert "stopped by Ctrl-C" in page


def test_a_missing_figure_or_table_is_said_and_the_rest_is_shown(tmp_path):
    folder = write_probing(tmp_path / "out")
    (folder / "figures" / "dummy_states-1.json").unlink()
    (folder / "dummy_pairs.parquet").write_bytes(b"PAR1 torn")
    page = report(folder).read_text(encoding="utf-8")
    assert "A figure is missing" in page
    assert "dummy_pairs.parquet cannot be shown" in page
    assert len(re.findall(r'class="plotly-graph-div"', page)) == 1


def test_a_name_that_leads_out_of_the_folder_is_not_read(tmp_path):
    folder = write_probing(tmp_path / "out")
    (tmp_path / "secret.json").write_text(json.dumps({"data": [], "layout": {"title": "secret"}}), encoding="utf-8")
    result = json.loads((folder / "result.json").read_text(encoding="utf-8"))
    result["probes"]["dummy_states"]["figures"][0]["file"] = "../secret.json"
    (folder / "result.json").write_text(json.dumps(result), encoding="utf-8")
    page = report(folder).read_text(encoding="utf-8")
    assert "is outside of the folder" in page


@pytest.mark.parametrize("num_layers", [2, 1024])
def test_the_page_stays_small_at_any_depth(tmp_path, num_layers):
    page = report(write_probing(tmp_path / "out", num_layers)).read_text(encoding="utf-8")
    assert len(page) < 6_000_000
    assert ("The chart shows 256 × 256 of 1025 × 1025 cells" in page) == (num_layers == 1024)


def test_a_large_heat_map_keeps_every_kth_cell_with_both_ends():
    size = 2 * MOST_CELLS + 1
    cells = np.arange(size * size, dtype=float).reshape(size, size)
    text = cells.astype(int).astype(str)
    figure = go.Figure(go.Heatmap(z=cells, x=np.arange(size) * 10, y=np.arange(size), text=text))
    small, said = compact(figure)
    trace = small.data[0]
    z, x, y = (np.asarray(trace[name]) for name in ("z", "x", "y"))
    assert z.shape == (MOST_CELLS, MOST_CELLS)
    assert (x[0], x[-1], y[0], y[-1]) == (0, 10 * (size - 1), 0, size - 1)
    assert np.array_equal(z, (y[:, None] * size + x[None, :] / 10).astype(np.float32))
    assert np.asarray(trace.text)[3, 5] == str(int(z[3, 5]))
    assert f"{size} × {size}" in said


def test_long_lines_and_many_lines_are_thinned_and_small_figures_are_left_alone():
    count = 2 * MOST_LINES
    small, said = compact(go.Figure([go.Scatter(x=[0, 1], y=[i, i]) for i in range(count)]))
    assert len(small.data) == MOST_LINES
    assert (small.data[0].y[0], small.data[-1].y[0]) == (0, count - 1)
    assert f"{MOST_LINES} of {count} lines" in said

    long = go.Figure(go.Scatter(x=np.arange(3 * MOST_POINTS), y=2.0 * np.arange(3 * MOST_POINTS)))
    small, said = compact(long)
    assert len(small.data[0].x) == MOST_POINTS
    assert np.array_equal(np.asarray(small.data[0].y), 2.0 * np.asarray(small.data[0].x))
    assert "points of a line" in said

    small, said = compact(go.Figure(go.Scatter(x=[0, 1], y=[0.1, 0.2])))
    assert said == ""
    assert np.asarray(small.data[0].y).tolist() == pytest.approx([0.1, 0.2])


def test_a_figure_read_from_its_file_is_thinned_and_drawn_as_it_was():
    size = MOST_CELLS + 1
    cells = np.random.default_rng(0).random((size, size))
    figure = go.Figure([go.Heatmap(z=cells), go.Scatter(x=np.arange(3), y=np.array([1.5, 2.5, 4.0]))])
    read = plotly.io.from_json(figure.to_json())
    small, said = compact(read)
    direct, _ = compact(figure)
    assert f"{size} × {size}" in said
    assert np.array_equal(np.asarray(small.data[0].z), np.asarray(direct.data[0].z))
    assert np.asarray(small.data[1].y).tolist() == [1.5, 2.5, 4.0]


def test_tags_that_plotly_would_follow_are_defused_and_plain_ones_kept():
    kept = "10<sup>3</sup><br>%{y}<extra></extra>"
    assert defuse(kept) == kept
    texts = {"text": ["<a href='x'>y</a>", "<b onclick='x'>"]}
    assert defuse(texts) == {"text": ["&lt;a href='x'>y&lt;/a>", "&lt;b onclick='x'>"]}
