"""What a size can decide, on a study's page: numbers against ones made by hand."""

import math
import statistics
from pathlib import Path

import pandas as pd
from scipy import stats
from scripts import loaded

from lamina.papers.pages.folder import StudyFolder

resolution = loaded("docs/results_pages.py").resolution

LOSSES = {"pre_ln": {1e-3: 2.7, 2e-3: 2.6, 4e-3: 2.7}, "keel": {1e-3: 2.6, 2e-3: 2.5, 4e-3: 2.45}}
NOISE = {"pre_ln": (-0.02, 0.0, 0.02), "keel": (-0.01, 0.02, -0.01)}


def sweep() -> StudyFolder:
    rows = []
    for placement in ("pre_ln", "keel", "post_ln"):
        for rate in (1e-3, 2e-3, 4e-3):
            for seed in range(3):
                loss = LOSSES.get(placement, {}).get(rate, 3.0) + NOISE.get(placement, (0, 0, 0))[seed]
                status = "stuck" if placement == "post_ln" and seed == 2 else "finished"
                rows.append({"placement": placement, "depth": 8, "learning_rate": rate, "seed": seed, "tuned": False})
                rows[-1] |= {"status": status, "eval_loss": loss}
    definition = {"study": "sweep", "scales": {"cpu": {"axes": dict.fromkeys(("placement", "learning_rate", "seed"))}}}
    header = {"definition": definition, "settings": {"scale": "cpu"}}
    return StudyFolder(folder=Path(), header=header, results=pd.DataFrame(rows), claims=[])


def test_the_table_has_optima_spreads_and_what_five_pairs_show():
    heading, table, sentence = resolution(sweep())
    assert heading == "### What this size can decide"
    keel, pre = table.splitlines()[2:]  # the lowest loss first
    differences = [(2.45 + k) - (2.6 + p) for k, p in zip(NOISE["keel"], NOISE["pre_ln"], strict=True)]
    std = statistics.stdev(differences)
    shown = (stats.t.ppf(0.975, 4) + stats.t.ppf(0.9, 4)) * std / math.sqrt(5)
    assert keel.startswith("| keel | 0.004 |")
    assert "(at the edge)" in keel
    assert f"| 2.450 ± {statistics.stdev(NOISE['keel']):.3f} | 3 | −0.150 | {std:.3f} | {shown:.3f} |" in keel
    assert pre.startswith("| pre_ln | 0.002 | 0.002 |")
    assert pre.endswith("| 3 | – | – | – |")
    assert "post_ln" in sentence
    assert f"{shown:.3f} nats" in sentence
