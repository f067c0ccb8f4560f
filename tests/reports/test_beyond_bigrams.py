"""What has not beaten a bigram table is listed without a rank, on the page and in the terminal."""

import pandas as pd
import pytest
from synthetic_study import write_study

from lamina.core.initializers import check, unsuited
from lamina.jobs.names import PAGE
from lamina.reports import notices, page, sections, summarize
from lamina.reports.records import read_study
from lamina.reports.registry import report
from lamina.reports.sentences import sentences
from lamina.reports.terminal import ranking

BIGRAM = 2.5


def results(bigram=BIGRAM, init="scaled", **losses):
    rows = [{"placement": name, "eval_loss": loss} for name, loss in losses.items()]
    shared = {"learning_rate": 3e-3, "seed": 0, "status": "finished", "unigram_entropy": 3.06, "init": init}
    frame = pd.DataFrame(rows).assign(**shared, bigram_entropy=bigram)
    frame.loc[frame["eval_loss"] > 3.0, "status"] = "stuck"
    return frame


MIXED = results(keel=2.6, post_ln=3.2, fusenorm=2.4, pre_ln=2.5)


def test_only_what_is_below_the_bigram_table_is_ranked():
    table = summarize(MIXED)
    assert list(table["placement"]) == ["fusenorm", "pre_ln", "keel", "post_ln"]
    assert table["rank"][0] == 1
    assert table["rank"][1:].isna().all()
    assert list(table["status"]) == ["finished", "finished", "finished", "stuck"]  # a stored status stays as it is


def test_results_without_the_entropy_are_ranked_as_before():
    older = MIXED.drop(columns="bigram_entropy")
    assert list(summarize(older)["placement"]) == ["fusenorm", "pre_ln", "keel", "post_ln"]
    assert list(summarize(older)["rank"].dropna()) == [1, 2, 3]
    assert "bigram" not in ranking(older)
    assert not any("bigram" in sentence for sentence in sentences(summarize(older)))


def test_who_is_not_past_it_is_said():
    nobody = sentences(summarize(results(keel=2.6, pre_ln=2.7)))
    assert nobody[0].startswith("None of 2 placements has beaten a bigram table")
    assert "note: Not ranked, since a bigram table of the text that was read does as well: pre_ln, keel." in ranking(
        MIXED
    )


def test_the_page_draws_the_line_beside_the_unigrams(tmp_path, monkeypatch):
    folder = write_study(tmp_path / "study", num_layers=4, steps=20, logged=3, failed=False)
    table = pd.read_csv(folder / "results.csv")
    table.assign(bigram_entropy=2.55).to_csv(folder / "results.csv", index=False)
    report(folder)
    html = (folder / PAGE).read_text(encoding="utf-8")
    assert "The dotted line is the loss of a table" in html
    assert "above a bigram table" in html
    study = read_study(folder)
    _, items, _ = sections.prepare(study)
    drawn = []
    monkeypatch.setattr(page, "to_html", lambda figure: drawn.append(figure) or "")
    sections.loss(study, items, several=False)
    lines = {line.text for line in drawn[0].layout.annotations}
    assert {"unigram entropy 3.24", "bigram entropy 2.55"} <= lines


@pytest.mark.parametrize(
    ("init", "width", "suits"),
    [
        ("scaled", 48, False),
        ("normal", 1024, True),
        ("normal", 4096, True),
        ("normal(std=0.0924)", 48, True),
        ("normal(std=0.5)", 48, False),
        ("small_scaled", 48, True),
        ("lecun", 64, True),
        ("he", 4096, True),
        ("xavier", 64, True),
        ("deepnorm", 64, True),
        ("10/d", 64, False),
        ("checkpoint", 64, True),
    ],
)
def test_a_standard_deviation_suits_a_width_or_not(init, width, suits):
    assert (unsuited(init, width) is None) == suits


def test_a_misfit_is_noticed_on_the_backbones_width_unless_a_scheme_scales_it():
    frame = results(keel=2.4, pre_ln=2.3)
    said = notices(summarize(frame), frame, settings={"backbone": "llama-nano", "hidden_size": None})
    assert "standard deviation of 0.02 in the blocks; the width of 48 wants about 0.0913" in said[0] + said[1] + said[2]
    for settings in (
        {"backbone": "llama-nano", "hidden_size": 1024},
        {"backbone": "llama-nano", "width_scaling": "mup"},
        {"backbone": "a/folder"},
        {},
    ):
        assert not any("standard deviation" in notice for notice in notices(summarize(frame), frame, settings=settings))


def test_compare_and_max_lr_start_from_an_initializer_that_suits_their_width():
    from lamina.core.backbone_presets import PRESETS
    from lamina.studies.settings import CompareSettings, MaxRateStudySettings

    for job in (CompareSettings, MaxRateStudySettings):
        init = str(job.default("init")).removeprefix("same:")
        assert check(init)
        assert unsuited(init, PRESETS[str(job.default("backbone"))].fields["hidden_size"]) is None
