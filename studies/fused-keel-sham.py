"""The race's sham arm: FuseNorm's losses here against those of gate A, with other seeds for tuning and for the test."""

from pathlib import Path

from lamina.lab.papers.judging import Finding, Trials, claim, same_as_recorded

RECORD = Path(__file__).parent / "records" / "fused-keel-a-cpu"


@claim(says="Two groups of identical FuseNorm runs with different seeds have the same mean loss (a check of our test)")
def fused_keel_sham(trials: Trials) -> Finding:
    return same_as_recorded(trials.tuned(), "sham", record=RECORD, axis="arm", value="fusenorm", where="gate A")
