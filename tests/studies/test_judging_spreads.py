import math

import pytest
from scipy import stats
from synthetic_trials import rows, trials

from lamina.papers.judging.rates import detectable, spreads

BASE = [3.000, 3.010, 3.020]


def sweep(arm, losses_by_rate, statuses="finished"):
    return [{**row, "learning_rate": rate} for rate, losses in losses_by_rate.items()
            for row in rows(arm, losses, statuses)]  # fmt: skip


def test_each_placement_has_its_best_rate_and_its_difference_to_pre_ln_there():
    pre = sweep("pre_ln", {1e-3: [3.2, 3.2, 3.2], 2e-3: BASE, 4e-3: [3.2, 3.2, 3.2]})
    keel = sweep("keel", {1e-3: [3.2, 3.2, 3.2], 2e-3: [3.1, 3.1, 3.1], 4e-3: [2.9, 2.92, 2.91]})
    post = sweep("post_ln", {2e-3: BASE}, "stuck")
    table = spreads(trials(pre, keel, post)).set_index("placement")
    assert table.index.tolist() == ["keel", "pre_ln"]
    assert table["best_rate"].tolist() == [4e-3, 2e-3]
    assert table["at_edge"].tolist() == [True, False]
    assert table.loc["pre_ln", "optimum"] == pytest.approx(2e-3)
    assert table.loc["pre_ln", "std"] == pytest.approx(0.01)
    assert table.loc["keel", "difference"] == pytest.approx(-0.1)
    assert table.loc["keel", "paired_std"] == pytest.approx(0.01)
    assert table.loc["keel", "detectable"] == pytest.approx(detectable(0.01, 5))
    assert math.isnan(table.loc["pre_ln", "paired_std"])


def test_what_is_detectable_has_a_power_of_ninety_percent():
    difference = detectable(1.0, 8)
    limit = stats.t.ppf(0.975, 7)
    assert stats.nct.sf(limit, 7, difference * math.sqrt(8)) == pytest.approx(0.9, abs=0.02)
