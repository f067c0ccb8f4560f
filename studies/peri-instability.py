"""Peri-LN Figures 4 and 5."""

import math

from lamina.core.frames import Frame
from lamina.jobs.status import Status
from lamina.lab.papers.judging import Finding, Trials, all_of, claim, compare_values, needs_scale
from lamina.lab.papers.judging.curves import numbers, rows, split


def without_post(trials: Trials) -> Trials:
    """The trials of both placements at the rates that both have, of full depth."""
    trials = trials if "depth" not in trials.axes else trials.where(depth="as it is")
    rates = [set(trials.arm(placement).values("learning_rate")) for placement in ("pre_ln", "peri_ln")]
    return trials.where(placement=["pre_ln", "peri_ln"], learning_rate=list(set.intersection(*rates)))


def spikes(trials: Trials, placement: str) -> dict[int, float]:
    """By seed, the surges of the gradient's norm over all steps of all its runs, however they ended."""
    return trials.arm(placement).table.groupby("seed")["gradient_surges"].sum().astype(float).to_dict()


def diverged(trials: Trials, placement: str) -> int:
    return int((trials.arm(placement).table["status"] == Status.DIVERGED.value).sum())


def last_gradient(table: Frame) -> float:
    """log10 of the norm of the gradient of the last layer's parameters."""
    norms = rows(table, metric="gradient_norm", sublayer="block", role="all").set_index("layer")["value"].sort_index()
    return math.log10(norms.iloc[-1])


@claim(
    says="Over all seeds and learning rates, Peri-LN has fewer gradient spikes than Pre-LN",
    paper="Figures 3 to 5: many spikes in Pre-LN, and few in Peri-LN. The figures print no counts",
)
def peri_instability(trials: Trials) -> Finding:
    found = []
    for part in split(without_post(trials), "size"):
        counts = [spikes(part, placement) for placement in ("peri_ln", "pre_ln")]
        if not any(counts[0].values()) and not any(counts[1].values()):
            found.append(needs_scale("gpu" if trials.scale == "cpu" else "paper", "no run here has a spike"))
            continue
        finding = compare_values(*counts, by=1.0, names=("gradient spikes per seed: Peri-LN", "Pre-LN"))
        ends = [diverged(part, placement) for placement in ("peri_ln", "pre_ln")]
        found.append(finding.noted(f"diverged: Peri-LN {ends[0]}, Pre-LN {ends[1]} runs"))
    return all_of(*found)


@claim(
    says="At the lowest learning rate, the gradient norm of the last layer is largest in Post-LN, smaller in Pre-LN "
    "and smallest in Peri-LN",
    paper="Figure 5a (400M): largest in Post-LN, smallest in Peri-LN",
    quantity="log10 of the last layer's gradient norm",
)
def peri_instability__final_layer(trials: Trials) -> Finding:
    """At the lowest rate, where each of them trains."""
    found = []
    for part in split(trials if "depth" not in trials.axes else trials.where(depth="shallow"), "size"):
        rate = min(float(str(rate)) for rate in part.arm("post_ln").values("learning_rate"))
        stable = part.where(learning_rate=rate)
        norms = {p: numbers(stable, p, "gradients", last_gradient) for p in stable.values("placement")}
        for large, small in (("post_ln", "pre_ln"), ("pre_ln", "peri_ln")):
            found.append(compare_values(norms[small], norms[large], by=0.05, names=(small, large)))
    return all_of(*found)
