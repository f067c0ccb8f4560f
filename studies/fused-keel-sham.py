"""The race's sham arm: FuseNorm's losses here against those of gate A, with other seeds for tuning and for the test."""

from pathlib import Path

from lamina.lab.papers.judging import Finding, Trials, claim, same_as_recorded

RECORD = Path(__file__).parent / "records" / "fused-keel-a-cpu"


@claim(says="FuseNorm under another name, with other seeds, does not differ from FuseNorm")
def fused_keel_sham(trials: Trials) -> Finding:
    return same_as_recorded(trials.tuned(), "sham", record=RECORD, axis="arm", value="fusenorm", where="gate A")
