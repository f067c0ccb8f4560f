"""The race's sham arm: FuseNorm's losses here against those of gate B, with other seeds for tuning and for the test."""

from pathlib import Path

import pandas as pd
from scipy import stats

from lamina.papers.judging import Finding, Trials, Verdict, claim, values_of

GATE_B = Path(__file__).parent / "records" / "fused-keel-b-cpu" / "results.csv"


@claim(says="FuseNorm under another name, with other seeds, does not differ from FuseNorm")
def fused_keel_sham_b(trials: Trials) -> Finding:
    ours = list(values_of(trials.tuned(), "sham").values())
    rows = pd.read_csv(GATE_B) if GATE_B.is_file() else pd.DataFrame({"arm": [], "tuned": [], "eval_loss": []})
    other = rows[(rows["arm"] == "fusenorm") & rows["tuned"].astype(bool)]["eval_loss"].dropna().tolist()
    if min(len(ours), len(other)) < 3:
        return Finding(verdict=Verdict.INCONCLUSIVE, ours=f"{len(ours)} runs here, {len(other)} recorded at gate B")
    p = float(stats.ttest_ind(ours, other, equal_var=False).pvalue)
    gap = sum(ours) / len(ours) - sum(other) / len(other)
    text = f"{len(ours)} runs here, {len(other)} at gate B: means {gap:+.4f} apart, Welch's t test p {p:.2g}"
    return Finding(verdict=Verdict.HOLDS if p >= 0.05 else Verdict.FAILS, ours=text, margin=gap, seeds=len(ours))
