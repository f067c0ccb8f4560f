"""The page's figures of what the layer monitor records: what they draw, and that old folders are pages still."""

import pandas as pd
import pytest
from readable import readable
from synthetic_study import write_study

from lamina.reports import experts, monitored, report
from lamina.reports.records import read_study
from lamina.reports.sections import prepare


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return write_study(tmp_path_factory.mktemp("monitored") / "study", num_layers=4, logged=5, seeds=(0, 1))


@pytest.fixture(scope="module")
def shown(folder):
    return prepare(read_study(folder))[1]


def test_the_band_goes_from_the_100th_largest_to_the_largest_and_the_limit_is_drawn(shown):
    drawn = {trace.name: trace for trace in monitored.largest(shown).data if trace.name}
    steps = drawn["keel"].x
    assert list(drawn["keel"].y) == pytest.approx([(step + 1) * 7e4 for step in steps])
    assert list(drawn["keel"].customdata) == pytest.approx([(step + 1) * 700 for step in steps])
    assert list(drawn["FP16's limit, 65,504"].y) == [65504, 65504]


def test_everything_that_is_recorded_is_drawn(folder):
    body = readable(report(folder).read_text(encoding="utf-8"))
    for quantity in (
        *("the 100 largest |x|", "largest |x|", "mean |x|", "mean (attention)", "gradient norm (feed-forward)"),
        *("hidden variance (attention)", "mean gain, pre norm (attention)", "largest |gain|, pre norm (attention)"),
        *("final norm", "embedding", "readout", "busiest expert's load / balanced load", "load / balanced load"),
    ):
        assert quantity in body.replace("\\u002f", "/"), quantity


def test_the_busiest_experts_load_is_over_the_balanced_one(shown):
    keel = next(item for item in shown if item.placement == "keel")
    table = experts.imbalance(keel.trials[0])
    assert table.to_numpy() == pytest.approx(0.8 / (2 / 3))
    assert list(table.index) == [1, 2, 3, 4]


def test_spikes_stand_in_both_tables_with_their_definition(folder):
    body = readable(report(folder).read_text(encoding="utf-8"))
    assert body.count('<th scope="col" class="number">loss spikes</th>') == 2
    assert '3.5 <span class="spread">2.9 %</span>' in body  # the mean of two seeds: 3 and 4 of 120 steps
    assert "OLMo 2" in body


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
