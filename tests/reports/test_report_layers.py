"""What the layer monitor and scheduled probes record is drawn, every metric of it."""

import json
from html import escape

import numpy as np
import pandas as pd
import pytest
import torch
from readable import readable
from synthetic_study import write_study
from training.tiny_experts import moe

from lamina.reports import charts, layer_rows, layers, report
from lamina.reports.depth import by_steps
from lamina.reports.metrics import METRICS, Metric
from lamina.reports.records import Trial, read_study
from lamina.reports.scheduled_probes import quantities, sections
from lamina.reports.sections import prepare
from lamina.reports.style import Shown
from lamina.training.monitor.gain_measures import gain_rows
from lamina.training.monitor.parameter_measures import GradientNorms, UpdateRatios
from lamina.training.monitor.stream_measures import hidden_state_rows
from lamina.training.monitor.writers import LAYER_COLUMNS, LOSS, NORM


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return write_study(tmp_path_factory.mktemp("monitored") / "study", num_layers=4, logged=5, seeds=(0, 1))


@pytest.fixture(scope="module")
def shown(folder):
    return prepare(read_study(folder))[1]


def recorded() -> pd.DataFrame:
    model, ids = moe(), torch.randint(0, 61, (2, 8))
    rows, ratios = [], UpdateRatios(GradientNorms(model))
    optimizer = torch.optim.Adam(model.parameters(), lr=0.1)
    for step in (1, 2):
        model(input_ids=ids, labels=ids).loss.backward()
        norms = GradientNorms(model)
        ratios.before_step()
        optimizer.step()
        ratios.after_step([optimizer])
        rows += ratios.rows(step)
        rows += [*norms.rows(step, norms.squares()), *hidden_state_rows(model, ids, step), *gain_rows(model, step)]
        rows += [(step, -1, "model", role, 0, "row_norm_abs_max", 2.0) for role in ("embedding", "readout")]
        rows += [(step, 1, "feed_forward", "expert", expert, "expert_load", 0.1 + expert) for expert in range(8)]
        rows += [(step, -1, "model", "all", 0, name, 3.0 - step) for name in (LOSS, NORM, "learning_rate")]
        policy = [name for name, metric in METRICS.items() if metric.section == "Policy"]
        rows += [(step, -1, "model", "all", 0, name, 0.5) for name in policy]
        outside = ("rate_ratio", "written_ratio", "forgotten_share")
        for name in ("attention_logit", "stream_rms", "stream_cosine", *outside):
            rows += [(step, layer, "attention", "all", 0, name, 1.0 + step) for layer in range(2)]
    return pd.DataFrame(rows, columns=list(LAYER_COLUMNS))


def write_rows(folder, rows) -> Shown:
    """A run with these rows of the monitor."""
    (folder / "layers").mkdir(parents=True)
    rows.to_parquet(folder / "layers" / "part-00000.parquet")
    return Shown(placement="pre_ln", color="#000000", trials=(Trial(name="t", placement="pre_ln", folder=folder),))


def test_every_recorded_metric_is_in_the_table_and_drawn(tmp_path):
    rows = recorded()
    assert set(rows["metric"]) == set(METRICS)
    html = "".join(section.html for section in layers.sections([write_rows(tmp_path, rows)]))
    for name, metric in METRICS.items():
        assert f"<figcaption>{escape(metric.caption)}</figcaption>" in html, name
    axes = readable(html).replace("\\u002f", "/")
    for quantity in ("mean (attention)", "gradient norm (feed-forward)", "final norm", "load / balanced load"):
        assert quantity in axes, quantity


def test_a_new_metric_is_drawn_by_its_row_alone(tmp_path, monkeypatch):
    row = Metric(name="entropy", section="Variances", title="<Entropy>", quantity="nats", caption="<Of> each block.")
    monkeypatch.setitem(METRICS, "entropy", row)
    rows = [(step, layer, "block", "all", 0, "entropy", 1.0 + layer) for step in (1, 2) for layer in range(3)]
    rows = pd.DataFrame(rows, columns=list(LAYER_COLUMNS))
    (section,) = layers.sections([write_rows(tmp_path, rows)])
    assert section.name == "Variances"
    assert section.html.count("plotly-graph-div") == 2
    assert "<figcaption>&lt;Of&gt; each block.</figcaption>" in section.html


def test_the_band_goes_from_the_100th_largest_to_the_largest_and_the_limit_is_drawn(shown):
    drawn = {trace.get("name"): trace for trace in layers._outside(shown, METRICS["hidden_top_abs"]).data}
    steps = drawn["keel"]["x"]
    assert list(drawn["keel"]["y"]) == pytest.approx([(step + 1) * 7e4 for step in steps])
    assert list(drawn["keel"]["customdata"]) == pytest.approx([(step + 1) * 700 for step in steps])
    assert list(drawn["FP16's limit, 65,504"]["y"]) == [65504, 65504]


def test_a_series_with_too_many_steps_keeps_its_spikes(tmp_path):
    values = np.ones(2000)
    values[1234] = 9.0
    rows = [(step, -1, "model", "all", 0, "step_loss", value) for step, value in enumerate(values)]
    item = write_rows(tmp_path, pd.DataFrame(rows, columns=list(LAYER_COLUMNS)))
    line = layers._outside([item], METRICS["step_loss"]).data[-1]
    assert len(line["y"]) < 500
    assert max(line["y"]) == 9.0


def test_of_a_long_run_each_metric_has_few_steps_with_both_ends_and_the_one_that_failed(tmp_path, monkeypatch):
    monkeypatch.setattr(layer_rows, "MOST_STEPS", 5)
    (tmp_path / "layers").mkdir()
    for number in range(10):  # parts of 20 steps; attention is recorded at every 20th only
        rows = [(step, -1, "model", "all", 0, LOSS, 1.0) for step in range(20 * number, 20 * number + 20)]
        rows += [(row[0], at, "block", "all", 0, "gradient_norm", row[0] + at) for row in rows for at in (-1, 0)]
        rows += [(20 * number, 0, "attention", "all", 0, "attention_logit", 7.0)]
        columns = dict(zip(LAYER_COLUMNS, zip(*rows, strict=True), strict=True))
        pd.DataFrame(columns).astype({"value": float}).to_parquet(tmp_path / f"layers/part-{number:05d}.parquet")
    trial = Trial(name="t", placement="pre_ln", folder=tmp_path, failed=77)
    norms = trial.layers.table("gradient_norm", "all", ("block",))
    assert list(norms.columns) == [0, 50, 77, 100, 149, 199]
    assert list(norms.loc[0]) == list(norms.columns)
    assert list(trial.layers.table("attention_logit", "all", ("attention",)).columns) == [0, 40, 80, 140, 180]
    assert len(trial.layers.of(LOSS)) == 200


def test_a_part_that_cannot_be_read_is_left_out_and_said_once(tmp_path, caplog):
    item = write_rows(tmp_path, recorded())
    (tmp_path / "layers" / "part-00001.parquet").write_bytes(b"PAR1")
    recorded().drop(columns="metric").to_parquet(tmp_path / "layers" / "part-00002.parquet")
    holes = recorded().assign(metric="gradient_norm", step=9)
    holes.loc[0, "metric"] = None
    holes.to_parquet(tmp_path / "layers" / "part-00003.parquet")
    assert len(item.trials[0].layers.frame) == 2 * len(recorded()) - 1
    assert [r.message.partition(" ")[0] for r in caplog.records] == ["part-00001.parquet", "part-00002.parquet"]


def test_a_line_of_many_steps_keeps_its_lowest_and_highest_values():
    values = dict.fromkeys(range(1, 200_001), 2.0) | {77: 9.0, 150_000: -4.0, 150_001: float("nan")}
    steps, heights = charts.series(values)
    assert len(steps) < 5000
    assert (steps[heights == 9.0], steps[heights == -4.0]) == ([77], [150_000])
    assert steps[0] == 1
    assert list(charts.series({3: 1.0, 1: 2.0})[0]) == [1, 3]


def test_the_busiest_experts_load_is_over_the_balanced_one(shown):
    keel = next(item for item in shown if item.placement == "keel")
    table = layers.blocks(METRICS["expert_load"]).table(keel.trials[0])
    assert table.to_numpy() == pytest.approx(0.8 / (2 / 3))
    assert list(table.index) == [0, 1, 2, 3]


def test_a_folder_without_these_records_is_a_page_without_their_sections(tmp_path):
    folder = write_study(tmp_path / "study", num_layers=4, logged=3)
    results = pd.read_csv(folder / "results.csv")
    results.drop(columns=[name for name in results if "spike" in name]).to_csv(folder / "results.csv", index=False)
    for part in folder.glob("trials/*/layers/*.parquet"):
        table = pd.read_parquet(part)
        old = table[table.metric.isin(["gradient_norm", "hidden_variance"]) & table.sublayer.eq("block")]
        old.to_parquet(part)
    for page in (report(folder), report(folder / "trials" / "keel-0.003-0")):
        body = readable(page.read_text(encoding="utf-8"))
        assert "spikes" not in body
        assert not any(f'<section id="{name}"' in body for name in ("magnitudes", "norm-gains", "experts"))


STEPS, LAYERS = (0, 10, 20, 30), 5


def value(step: int, layer: int) -> float:
    return 0.5 + step * layer


def write_parts(run, scale: float = 1.0):
    """Parts as a run writes them: a probe by layer with a number of the model, and one of pairs."""
    for step in STEPS:
        rows = [(step, layer, "block", "variance", scale * value(step, layer)) for layer in range(LAYERS)]
        rows += [(step, layer, "attention", "variance", 7.0) for layer in range(LAYERS)]
        rows += [(step, -1, "model", "final_layer", 100.0 + step)]
        frame = pd.DataFrame(rows, columns=["step", "layer", "sublayer", "metric", "value"])
        pairs = [(step, s, n, "angle", 0.1 * n + 0.001 * s) for s in range(LAYERS) for n in range(1, LAYERS - s)]
        for name, table in (
            ("tiny_states", frame),
            ("tiny_pairs", pd.DataFrame(pairs, columns=["step", "start", "size", "metric", "value"])),
        ):
            folder = run / "probes" / name
            folder.mkdir(parents=True, exist_ok=True)
            table.to_parquet(folder / f"part-{step:08d}.parquet")


@pytest.fixture
def run(tmp_path):
    folder = tmp_path / "study" / "trials"
    write_study(tmp_path / "study", courses={"pre_ln": (2.7, -0.6, 40.0, "finished")}, num_layers=LAYERS, logged=3)
    (run,) = [path for path in folder.iterdir() if path.is_dir()]
    write_parts(run)
    return run


def shown_of(*folders) -> list[Shown]:
    return [
        Shown(placement=f"p{i}", color="#0072b2", trials=(Trial(name="t", placement=f"p{i}", folder=folder),))
        for i, folder in enumerate(folders)
    ]


def test_a_run_and_a_study_have_a_section_for_each_probe(run):
    for folder in (run, run.parent.parent):
        page = report(folder).read_text(encoding="utf-8")
        assert "tiny_states during training" in page
        assert "tiny_pairs during training" in page


def test_the_lines_are_the_values_by_layer_at_the_probed_steps(run):
    frame = Trial(name="t", placement="p", folder=run).probes["tiny_states"]
    quantity = quantities("tiny_states", frame)[0]
    assert quantity.label == "variance"
    figure = by_steps(shown_of(run), quantity)
    assert [trace["name"] for trace in figure.data] == [f"step {step}" for step in STEPS]
    for trace, step in zip(figure.data, STEPS, strict=True):
        assert list(trace["y"]) == [value(step, layer) for layer in range(LAYERS)]


def test_pairs_are_averaged_over_their_start(run):
    trial = Trial(name="t", placement="p", folder=run)
    (quantity,) = quantities("tiny_pairs", trial.probes["tiny_pairs"])
    values = quantity.table(trial)
    assert quantity.by == "size"
    for size in range(1, LAYERS):
        expected = np.mean([0.1 * size + 0.001 * start for start in range(LAYERS - size)])
        assert values.loc[size, 10] == pytest.approx(expected)


def test_placements_stand_side_by_side_on_one_scale(run, tmp_path):
    other = tmp_path / "other"
    write_parts(other, scale=3.0)
    quantity = quantities("tiny_states", Trial(name="t", placement="p", folder=run).probes["tiny_states"])[0]
    figure = by_steps(shown_of(run, other), quantity)
    assert len(figure.data) == 2 * len(STEPS)
    assert list(figure.data[-1]["y"]) == [pytest.approx(3 * value(30, layer)) for layer in range(LAYERS)]
    assert figure.layout["yaxis2"]["matches"] == "y"


def test_a_torn_part_is_left_out_and_notes_are_shown(run):
    (run / "probes" / "tiny_states" / f"part-{STEPS[1]:08d}.parquet").write_bytes(b"PAR1")
    note = json.dumps({"step": 20, "note": "<b>no</b> head"})
    (run / "probes" / "tiny_states" / "notes.jsonl").write_text(f"{note}\n{note}\n", encoding="utf-8")
    made = {section.name: section for section in sections(shown_of(run))}
    html = readable(made["tiny_states"].html)
    assert "step 20: &lt;b&gt;no&lt;/b&gt; head" in html
    assert html.count("head</p>") == 1
    assert '"step 10"' not in html
    assert '"step 20"' in html


def test_each_of_several_norms_is_a_quantity_and_heads_are_one():
    rows = [(0, layer, "attention", "inner norm", index, 1.0) for layer in (0, 1) for index in (0, 1)]
    frame = pd.DataFrame(rows, columns=["step", "layer", "sublayer", "role", "index", "value"]).assign(metric="gain")
    norms = quantities("gains", frame.assign(path="some.module"))
    assert [q.label for q in norms] == ["gain (attention, inner norm)", "gain (attention, inner norm 2)"]
    assert len(quantities("attention", frame)) == 1
