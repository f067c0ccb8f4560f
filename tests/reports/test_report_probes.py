"""What scheduled probes leave in a run's folder, as the run's and the study's pages show it."""

import json
import re

import numpy as np
import pandas as pd
import pytest
from readable import readable
from synthetic_study import write_study

from lamina.reports import report
from lamina.reports.depth import by_steps
from lamina.reports.records import Trial
from lamina.reports.scheduled_probes import quantities, sections
from lamina.reports.style import Shown

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


def shown(*folders) -> list[Shown]:
    return [
        Shown(placement=f"p{i}", color="#0072b2", trials=(Trial(name="t", placement=f"p{i}", folder=folder),))
        for i, folder in enumerate(folders)
    ]


def test_a_run_and_a_study_have_a_section_for_each_probe(run):
    for folder in (run, run.parent.parent):
        page = report(folder).read_text(encoding="utf-8")
        assert "tiny_states during training" in page
        assert "tiny_pairs during training" in page


def test_a_run_without_probes_has_no_such_section(study):
    assert "during training" not in re.sub(r"<script>.*?</script>", "", report(study).read_text("utf-8"), flags=re.S)


def test_the_lines_are_the_values_by_layer_at_the_probed_steps(run):
    frame = Trial(name="t", placement="p", folder=run).probes["tiny_states"]
    quantity = quantities("tiny_states", frame)[0]
    assert quantity.label == "variance"
    figure = by_steps(shown(run), quantity)
    assert [trace.name for trace in figure.data] == [f"step {step}" for step in STEPS]
    for trace, step in zip(figure.data, STEPS, strict=True):
        assert list(trace.y) == [value(step, layer) for layer in range(LAYERS)]


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
    figure = by_steps(shown(run, other), quantity)
    assert len(figure.data) == 2 * len(STEPS)
    assert list(figure.data[-1].y) == [pytest.approx(3 * value(30, layer)) for layer in range(LAYERS)]
    assert figure.layout.yaxis2.matches == "y"


def test_a_torn_part_is_left_out_and_notes_are_shown(run):
    (run / "probes" / "tiny_states" / f"part-{STEPS[1]:08d}.parquet").write_bytes(b"PAR1")
    note = json.dumps({"step": 20, "note": "<b>no</b> head"})
    (run / "probes" / "tiny_states" / "notes.jsonl").write_text(f"{note}\n{note}\n", encoding="utf-8")
    made = {section.name: section for section in sections(shown(run))}
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
