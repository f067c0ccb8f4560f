"""The race's sham arm: FuseNorm's losses here against those of gate B, with other seeds for tuning and for the test."""

from pathlib import Path

from lamina.papers.judging import Finding, Trials, claim, same_as_recorded

RECORD = Path(__file__).parent / "records" / "fused-keel-b-cpu"


@claim(says="FuseNorm under another name, with other seeds, does not differ from FuseNorm")
def fused_keel_sham_b(trials: Trials) -> Finding:
    return same_as_recorded(trials.tuned(), "sham", record=RECORD, axis="arm", value="fusenorm", where="gate B")
