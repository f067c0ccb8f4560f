"""The figures of a study: their numbers are those of its tables, on a page and for a paper."""

import math
import xml.etree.ElementTree as ElementTree

import pandas as pd
import pytest
from synthetic_claims import BEST, PLACEMENTS, write_claims_study

from lamina.lab.papers.pages import matplotlib_figures, page, study_figures
from lamina.lab.papers.pages.drawing import Request
from lamina.lab.papers.pages.folder import arms, read_folder
from lamina.lab.papers.pages.lines import value_title
from lamina.lab.papers.pages.page import _figures, claims_report
from lamina.lab.papers.pages.study_figures import KINDS, _parts, _rows, chosen, sweep
from lamina.lab.papers.study_catalog import names, read_study
from lamina.reports.style import look


def kinds(study) -> list[str]:
    return [drawing.name.removeprefix("mix-ppl-cpu-") for drawing in chosen(study)[0]]


def drawn(study, name: str):
    return next(drawing for drawing in chosen(study)[0] if drawing.name == f"mix-ppl-cpu-{name}")


def test_an_arms_mean_is_that_of_the_trials_that_trained_at_its_rate(tmp_path):
    folder = write_claims_study(tmp_path / "study")
    table = arms(read_folder(folder)).set_index("label")
    rows = pd.read_csv(folder / "results.csv")
    rows = rows[rows["tuned"] & rows["status"].eq("finished")]
    for placement, group in rows.groupby("placement"):
        assert table.loc[placement, "mean"] == pytest.approx(group["eval_loss"].mean())
        assert table.loc[placement, "std"] == pytest.approx(group["eval_loss"].std(ddof=1))
        assert table.loc[placement, "learning_rate"] == BEST
    assert table.loc["post_ln", "ended"] == "4 finished, 1 stuck"
    assert list(table.index) == list(PLACEMENTS)


def test_a_sweep_shows_every_rates_mean_and_marks_where_no_seed_trained(tmp_path):
    folder = write_claims_study(tmp_path / "study")
    sweep = drawn(read_folder(folder), "sweep")
    rows = pd.read_csv(folder / "results.csv").query("seed < 3")
    lines = {series.label: series for series in sweep.panels[0].series}
    expected = rows[rows["placement"].eq("mix_ln")].groupby("learning_rate")["eval_loss"].mean()
    assert lines["mix_ln"].x == tuple(expected.index)
    assert lines["mix_ln"].y == pytest.approx(list(expected))
    assert lines["post_ln"].x == (BEST,)
    assert [ended for _, ended in lines["post_ln"].lost] == ["3 stuck", "3 stuck"]
    assert sweep.x.log
    assert {name: line.look for name, line in lines.items()} == {name: look(name) for name in PLACEMENTS}


def test_the_parts_of_a_layer_are_panels_and_what_is_outside_is_left_out(tmp_path):
    rows = [
        {"key": key, "metric": "gain", "layer": layer, "sublayer": sub, "role": "pre_norm", "value": value}
        for key in pd.read_csv(write_claims_study(tmp_path / "study") / "results.csv")["key"]
        for layer, sub, value in ((0, "attention", 1.0), (0, "feed_forward", 3.0), (-1, "model", 100.0))
    ]
    table = _rows(pd.DataFrame(rows), "gain", {})
    table = table[table["layer"] >= 0]
    assert {n: part["value"].mean() for n, part in _parts(table, "layer")} == {"attention": 1.0, "feed-forward": 3.0}
    assert [name for name, _ in _parts(table[table["sublayer"] == "attention"], "layer")] == [""]


def test_the_axes_decide_the_figures(tmp_path):
    assert kinds(read_folder(write_claims_study(tmp_path / "one"))) == ["by-axis-placement", "sweep"]
    deep = read_folder(write_claims_study(tmp_path / "deep", extra={"num_layers": [8, 16, 64]}))
    assert kinds(deep) == ["by-depth", "sweep"]
    by_depth = drawn(deep, "by-depth")
    assert by_depth.x.log
    (panel,) = by_depth.panels
    keel = next(series for series in panel.series if series.label == "keel")
    assert keel.x == (8.0, 16.0, 64.0)
    assert keel.y == pytest.approx((2.46, 2.56, 2.66))
    labels = read_folder(write_claims_study(tmp_path / "arms", extra={"arm": ["deep", "wide"]}))
    by_arm = drawn(labels, "by-axis-arm")
    assert by_arm.x.ticks == ("deep", "wide")
    assert len(drawn(labels, "sweep").panels) == 2


def test_measures_are_lines_over_layers_maps_and_curves(tmp_path):
    study = read_folder(write_claims_study(tmp_path / "study", tables=("gradients", "angles", "metrics")))
    assert kinds(study)[2:] == ["end-angular-distance", "gradients-gradient-norm", "curves-loss"]
    lines = drawn(study, "gradients-gradient-norm")
    assert [panel.title for panel in lines.panels] == ["before training", "after training"]
    keel = next(series for series in lines.panels[1].series if series.label == "keel")
    assert keel.y == pytest.approx([2 * layer * 3 for layer in (1, 2, 3, 4)])  # the mean over seeds 0 to 4
    assert keel.low == pytest.approx([2, 4, 6, 8])
    cells = drawn(study, "end-angular-distance").panels[0].cells
    assert cells.columns == (0.0, 1.0, 2.0, 3.0)
    assert cells.values[2][:2] == pytest.approx((0.3, 0.3))
    curve = drawn(study, "curves-loss").panels[0].series[0]
    assert curve.y == pytest.approx((5.0, 4.2, 3.2))


def test_steps_that_span_decades_from_the_start_are_numbers(tmp_path):
    folder = write_claims_study(tmp_path / "study", tables=("metrics",))
    path = folder / "tables" / "records-metrics.parquet"
    rows = pd.read_parquet(path)
    steps = dict(zip(sorted(rows["step"].unique()), (0, 1, 2000), strict=True))
    rows.assign(step=rows["step"].map(steps).astype("int64")).to_parquet(path, index=False)
    drawing = drawn(read_folder(folder), "curves-loss")
    assert drawing.panels[0].series[0].x == (0.0, 1.0, 2000.0)
    (written,) = matplotlib_figures.write(drawing, tmp_path / "figures", formats=("svg",))
    assert written.stat().st_size > 1000


def test_the_yaml_chooses_the_first_figure_and_a_kind_that_is_none_is_left_out(tmp_path, caplog):
    wanted = [{"kind": "sweeep"}, {"kind": "curves", "y": "tokens"}]
    study = read_folder(write_claims_study(tmp_path / "study", tables=("metrics",), figures=wanted))
    assert kinds(study)[:2] == ["curves-tokens", "by-axis-placement"]
    assert "'sweeep'" in caplog.text


@pytest.fixture(scope="module")
def everything(tmp_path_factory):
    folder = tmp_path_factory.mktemp("everything") / "study"
    return read_folder(write_claims_study(folder, tables=("gradients", "angles", "metrics")))


def test_the_pages_figures_have_the_same_points(everything):
    sweep = drawn(everything, "sweep")
    traces = {trace["name"]: trace for trace in page.plot(sweep).data if trace["mode"] == "lines+markers"}
    for series in sweep.panels[0].series:
        assert tuple(traces[series.label]["x"]) == series.x
        assert tuple(traces[series.label]["y"]) == series.y
        assert traces[series.label]["line"].get("dash") == series.look.dash
    for drawing in chosen(everything)[0]:
        assert page.plot(drawing).data


def test_figures_beyond_the_first_few_are_named_and_written_for_a_paper(tmp_path, monkeypatch):
    pytest.importorskip("matplotlib")
    folder = write_claims_study(tmp_path / "study")
    study = read_folder(folder)
    everything = [drawing.name for drawing in chosen(study)[0]]
    assert len(everything) > 1
    monkeypatch.setattr(study_figures, "_MOST", 1)
    shown, left_out = study_figures.chosen(study)
    assert [drawing.name for drawing in (*shown, *left_out)] == everything
    assert len(shown) == max(1, len(study_figures._written(study)))
    [section] = _figures(study)
    assert all(drawing.title in section.html.split("This also draws:")[1] for drawing in left_out)
    assert {path.stem for path in matplotlib_figures.write_all(folder)} == set(everything)


def test_figures_for_a_paper_are_svg_and_pdf_and_the_same_again(everything, tmp_path):
    pytest.importorskip("matplotlib")
    for drawing in chosen(everything)[0][1:4]:  # points over an axis, a map, and lines in panels
        svg, pdf = matplotlib_figures.write(drawing, tmp_path)
        assert ElementTree.parse(svg).getroot().tag.endswith("svg")
        assert svg.stat().st_size > 3000
        assert pdf.read_bytes().startswith(b"%PDF")
        before = svg.read_bytes()
        assert matplotlib_figures.write(drawing, tmp_path, ["svg"])[0].read_bytes() == before


def test_arms_of_one_placement_share_its_color_and_differ_in_form(tmp_path):
    folder = write_claims_study(tmp_path / "study", extra={"arm": ["a"]})
    results = pd.read_csv(folder / "results.csv")
    results["arm"] = results["placement"].replace({"mix_ln": "pre_ln, scaled"})
    results["placement"] = results["placement"].replace({"mix_ln": "pre_ln"})
    results.to_csv(folder / "results.csv", index=False)
    drawing = sweep(read_folder(folder), Request(kind="sweep", color="arm"))
    lines = {line.label: line.look for panel in drawing.panels for line in panel.series}
    assert lines["pre_ln"].color == lines["pre_ln, scaled"].color == look("pre_ln").color
    assert lines["pre_ln"].dash != lines["pre_ln, scaled"].dash
    assert lines["keel"] == look("keel")


@pytest.mark.parametrize("name", names())
def test_every_figure_that_the_catalog_asks_for_is_of_a_known_kind_and_of_what_its_study_measures(name):
    study = read_study(name)
    for figure in study.figures:
        assert figure["kind"] in KINDS
        for axis in {figure.get("x"), figure.get("color")} - {None, "none", "placement", "learning_rate"}:
            known = {"layer", "start", "size", "index", "step"}
            assert axis in known or any(axis in scale.axes for scale in study.scales.values())
        wanted = str(figure.get("measure", "")).partition("(")[0].rpartition("/")[2]
        listed = [one for scale in study.scales.values() for time in scale.measures.values() for one in time]
        listed += [one for scale in study.scales.values() for stage in scale.stages for one in stage.measures]
        assert not wanted or wanted in {one.partition("(")[0].rpartition("/")[2] for one in listed}


def test_a_role_is_known_by_the_end_of_its_path_and_the_whole_is_not_mixed_with_its_parts(tmp_path):
    folder = write_claims_study(tmp_path / "study", tables=("gradients",))
    path = folder / "tables" / "end-gradients.parquet"
    rows = pd.read_parquet(path)
    parts = rows.assign(role="feed_forward.module.up_proj", value=7.0)
    pd.concat([rows, parts]).to_parquet(path, index=False)
    study = read_folder(folder)
    request = {"kind": "lines_over_layers", "measure": "end-gradients"}
    whole = KINDS["lines_over_layers"](study, Request(**request, y="gradient_norm", more={"sublayer": "block"}))
    assert whole.panels[0].series[0].y == pytest.approx([2 * layer * 3 for layer in (1, 2, 3, 4)])
    part = KINDS["lines_over_layers"](study, Request(**request, y="gradient_norm", more={"role": "mlp.up_proj"}))
    assert set(part.panels[0].series[0].y) == {7.0}


def test_each_stage_of_a_study_shows_its_own_value(tmp_path):
    folder = write_claims_study(tmp_path / "study", then={"tasks": {"job": "eval"}})
    first = pd.read_csv(folder / "results.csv").assign(stage="pretrain", score=float("nan"))
    tuned = first[first["tuned"] & first["status"].eq("finished")]
    tasks = tuned.assign(stage="tasks", eval_loss=float("nan"), score=30.0 + tuned["seed"], key=tuned["key"] + "-tasks")
    pd.concat([first, tasks]).to_csv(folder / "results.csv", index=False)
    study = read_folder(folder)
    table = arms(study).set_index("label")
    assert table.loc["keel, tasks", "mean"] == 32.0
    assert table.loc["keel, pretrain", "mean"] == pytest.approx(tuned.query("placement == 'keel'")["eval_loss"].mean())
    scores = KINDS["by_axis"](study, Request(kind="by_axis", x="placement", y="score"))
    assert [panel.title for panel in scores.panels] == ["tasks"]
    assert {value for series in scores.panels[0].series for value in series.y} == {32.0, 32.5}
    (panel,) = sweep(study, Request(kind="sweep")).panels
    assert len({series.label for series in panel.series}) == len(PLACEMENTS)


def changed(folder, change):
    """The study of a folder whose results.csv was changed."""
    rows = pd.read_csv(folder / "results.csv")
    change(rows).to_csv(folder / "results.csv", index=False)
    return read_folder(folder)


def with_measure(folder, name, rows):
    """A study with one more table: ``rows`` of each of its tuned trials."""
    keys = pd.read_csv(folder / "results.csv").query("tuned")["key"]
    table = pd.concat([pd.DataFrame(rows).assign(key=key, trial=place) for place, key in enumerate(keys)])
    (folder / "tables").mkdir(exist_ok=True)
    table.to_parquet(folder / "tables" / f"{name}.parquet", index=False)
    return read_folder(folder)


def test_a_loss_has_the_unit_of_what_was_trained(tmp_path):
    study = read_folder(write_claims_study(tmp_path / "text"))
    assert value_title(study, "eval_loss") == "eval loss (nats per token)"
    for bits, unit in ((1.0001, "byte"), (0.9, "token")):  # bits per byte, for each bit of loss per token
        rate = bits / math.log(2)
        study = changed(tmp_path / "text", lambda rows, rate=rate: rows.assign(bits_per_byte=rate * rows["eval_loss"]))
        assert value_title(study, "eval_loss") == f"eval loss (nats per {unit})"
    images = changed(write_claims_study(tmp_path / "images"), lambda rows: rows.assign(accuracy=0.7, top5_accuracy=0.9))
    assert {drawing.y.title for drawing in chosen(images)[0]} == {"eval loss (nats per image)"}
    assert "eval loss (nats per image)" in claims_report(tmp_path / "images").read_text("utf-8")
    pairs = write_claims_study(tmp_path / "pairs", then={"reward": {"from": "sft"}, "sft": {}})
    assert value_title(read_folder(pairs), "eval_loss") == "eval loss (nats)"


def test_the_band_of_a_record_by_prompt_is_the_range_over_seeds(tmp_path):
    folder = write_claims_study(tmp_path / "study")
    rows = [{"step": step, "prompt": prompt, "reward": 100.0 * prompt} for step in (0, 10) for prompt in (0, 1)]
    study = with_measure(folder, "records-held_out", rows)
    (panel,) = KINDS["curves"](study, Request(kind="curves", measure="records-held_out", y="reward")).panels
    assert {value for series in panel.series for value in (*series.y, *series.low, *series.high)} == {50.0}


def test_a_curve_of_a_record_by_layer_says_that_it_is_of_the_largest(tmp_path):
    folder = write_claims_study(tmp_path / "study")
    at = [(step, layer, m) for step in (0, 10) for layer in (0, 1) for m in ("hidden_variance", "hidden_top_abs")]
    rows = [{"step": step, "layer": layer, "metric": m, "value": 1.0 + layer} for step, layer, m in at]
    study = with_measure(folder, "records-layers", rows)
    for metric, title in (
        ("hidden_variance", "largest hidden variance of all layers"),
        ("hidden_top_abs", "largest |x|"),
    ):
        drawing = KINDS["curves"](study, Request(kind="curves", measure="records-layers", y=metric))
        assert drawing.y.title == title
        assert drawing.panels[0].series[0].y == (2.0, 2.0)
