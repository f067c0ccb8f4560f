"""What a reader takes from a study's figures: units, order, titles, spreads and ticks say what the numbers are."""

import pandas as pd
from synthetic_claims import write_claims_study

from lamina.papers.pages.drawing import Request
from lamina.papers.pages.folder import read_folder
from lamina.papers.pages.lines import value_title
from lamina.papers.pages.page import claims_report
from lamina.papers.pages.study_figures import KINDS, drawings


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
