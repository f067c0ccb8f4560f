"""What a reader takes from a study's figures: units, order, titles, spreads and ticks say what the numbers are."""

import re

import pandas as pd
from synthetic_claims import write_claims_study

from lamina.papers.pages import matplotlib_figures
from lamina.papers.pages.drawing import Axis, Drawing, Panel, Request, Series
from lamina.papers.pages.folder import read_folder
from lamina.papers.pages.lines import value_title
from lamina.papers.pages.page import claims_report
from lamina.papers.pages.plotly_figures import plot
from lamina.papers.pages.study_figures import KINDS, drawings
from lamina.reports.style import Look


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
    images = changed(write_claims_study(tmp_path / "images"), lambda rows: rows.assign(accuracy=0.7, top5_accuracy=0.9))
    assert {drawing.y.title for drawing in drawings(images)} == {"eval loss (nats per image)"}
    assert "eval loss (nats per image)" in claims_report(tmp_path / "images").read_text("utf-8")
    pairs = write_claims_study(tmp_path / "pairs", then={"reward": {"from": "sft"}, "sft": {}})
    assert value_title(read_folder(pairs), "eval_loss") == "eval loss (nats)"


def test_panels_and_lines_come_in_the_order_of_the_study_not_of_its_rates(tmp_path):
    folder = write_claims_study(tmp_path / "study", extra={"num_layers": [64, 8, 16]})
    study = changed(folder, lambda rows: rows.sort_values("learning_rate", ascending=False))
    (sweep,) = (drawing for drawing in drawings(study) if drawing.name.endswith("sweep"))
    assert [panel.title for panel in sweep.panels] == ["8 layers", "16 layers", "64 layers"]
    order = list(dict.fromkeys(study.results["placement"]))
    assert [[series.label for series in panel.series] for panel in sweep.panels] == [order] * 3


def test_an_axis_with_a_single_value_has_no_figure(tmp_path):
    folder = write_claims_study(tmp_path / "study")
    study = changed(folder, lambda rows: rows[rows["placement"].eq("keel")])
    assert [drawing.name for drawing in drawings(study)] == ["mix-ppl-cpu-sweep"]


def test_the_band_of_a_record_by_prompt_is_the_range_over_seeds(tmp_path):
    folder = write_claims_study(tmp_path / "study")
    rows = [{"step": step, "prompt": prompt, "reward": 100.0 * prompt} for step in (0, 10) for prompt in (0, 1)]
    study = with_measure(folder, "records-held_out", rows)
    (panel,) = KINDS["curves"](study, Request(kind="curves", measure="records-held_out", y="reward")).panels
    assert {value for series in panel.series for value in (*series.y, *series.low, *series.high)} == {50.0}


def test_a_curve_of_a_record_by_layer_says_that_it_is_of_the_largest(tmp_path):
    folder = write_claims_study(tmp_path / "study")
    rows = [
        {"step": step, "layer": layer, "metric": m, "value": 1.0 + layer}
        for step in (0, 10)
        for layer in (0, 1)
        for m in ("hidden_variance", "hidden_top_abs")
    ]
    study = with_measure(folder, "records-layers", rows)
    for metric, title in (
        ("hidden_variance", "largest hidden variance of all layers"),
        ("hidden_top_abs", "largest |x|"),
    ):
        drawing = KINDS["curves"](study, Request(kind="curves", measure="records-layers", y=metric))
        assert drawing.y.title == title
        assert drawing.panels[0].series[0].y == (2.0, 2.0)


def test_a_logarithm_is_not_drawn_on_a_logarithmic_axis(tmp_path):
    folder = write_claims_study(tmp_path / "study")
    rows = [
        {"layer": layer, "sublayer": "block", "role": "jacobian", "metric": metric, "value": 1.0 + layer}
        for layer in (0, 1)
        for metric in ("norm", "log10_product")
    ]
    study = with_measure(folder, "init-jacobian", rows)
    lines = KINDS["lines_over_layers"]
    assert lines(study, Request(kind="lines_over_layers", measure="init-jacobian")).y.log
    assert not lines(study, Request(kind="lines_over_layers", measure="init-jacobian", y="log10_product")).y.log


def panelled(titles, y=(0.01, 1e-9)):
    """A figure with a falling line in each panel, on a logarithmic axis."""
    look = Look("#1f2933")
    panels = [
        Panel(title=title, series=(Series(label="pre_ln", look=look, x=(0.0, 12.0), y=tuple(v * 10**-n for v in y)),))
        for n, title in enumerate(titles)
    ]
    return Drawing(
        name="f", title="F", caption="", x=Axis(title="layer"), y=Axis(title="y", log=True), panels=tuple(panels)
    )


def test_a_long_title_of_a_panel_takes_two_lines(tmp_path):
    drawing = panelled(["8 layers, feed-forward, before training", "after training"])
    assert [panel.heading for panel in drawing.panels] == ["8 layers, feed-forward,\nbefore training", "after training"]
    assert "1" in plot(panelled(["a", "b"], y=(1.0, 0.2))).layout.yaxis.ticktext  # not plotly's bare 2 and 5
    titles = [each.text for each in plot(drawing).layout.annotations]
    assert titles == ["8 layers, feed-forward,<br>before training", "after training"]


def test_a_printed_logarithmic_axis_reaches_over_all_panels_and_layers_are_whole(tmp_path):
    (path,) = matplotlib_figures.write(panelled(["a", "b", "c"]), tmp_path, formats=("svg",))
    texts = re.findall(r"<text[^>]*>(?:<tspan[^>]*>)?([^<]+)", path.read_text(encoding="utf-8"))
    assert not [text for text in texts if re.fullmatch(r"\d+\.5", text)]
    from matplotlib.figure import Figure

    axes = matplotlib_figures._figure(panelled(["a", "b", "c"]), Figure).axes
    bottom, top = axes[0].get_ylim()
    assert bottom < 1e-11
    assert top > 0.01
