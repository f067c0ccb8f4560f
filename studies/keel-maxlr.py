"""KEEL Table 1."""

from itertools import pairwise

from lamina.lab.papers.judging import Finding, Trials, all_of, claim, higher

ORDER = ("post_ln", "deepnorm", "hybridnorm", "mix_ln", "pre_ln", "keel")
POST = ("post_ln", "deepnorm", "hybridnorm", "mix_ln")
TABLE = "64 layers: Post-LN 3.0e-4, DeepNorm 3.5e-4, HybridNorm 4.9e-4, Mix-LN 8.6e-4, Pre-LN 7.65e-3, Keel 1.01e-2"


@claim(
    says="Keel trains at higher learning rates than Pre-LN. Pre-LN trains at higher learning rates than Mix-LN, "
    "HybridNorm, DeepNorm and Post-LN",
    paper=TABLE,
    quantity="highest learning rate",
)
def keel_maxlr(trials: Trials) -> Finding:
    return all_of(_higher(trials, "keel", "pre_ln"), *(_higher(trials, "pre_ln", arm) for arm in POST))


@claim(
    says="Keel trains at higher learning rates than Pre-LN",
    paper="Keel 1.01e-2, Pre-LN 7.65e-3 (64 layers). Keel 6.31e-3, Pre-LN 4.67e-3 (512 layers)",
    quantity="highest learning rate",
)
def keel_maxlr__keel(trials: Trials) -> Finding:
    return _higher(trials, "keel", "pre_ln")


@claim(
    says="The highest learning rates rise in this order: Post-LN, DeepNorm, HybridNorm, Mix-LN, Pre-LN, Keel",
    paper=TABLE,
    quantity="highest learning rate",
)
def keel_maxlr__order(trials: Trials) -> Finding:
    return all_of(*(_higher(trials, upper, than) for than, upper in pairwise(ORDER)))


@claim(says="Keel trains at higher learning rates than FuseNorm", quantity="highest learning rate")
def keel_maxlr__fusenorm(trials: Trials) -> Finding:
    return _higher(trials, "keel", "fusenorm")


@claim(says="Peri-LN trains at higher learning rates than Pre-LN", quantity="highest learning rate")
def keel_maxlr__peri_ln(trials: Trials) -> Finding:
    return _higher(trials, "peri_ln", "pre_ln")


def _higher(trials: Trials, arm: str, than: str) -> Finding:
    """At the paper's scale, at each depth; on the one ramp that all arms have: a steeper one stops at another rate.

    A difference of 2e-4 is about a step of the warm-up to 5e-2.
    """
    if "num_layers" in trials.axes:
        return all_of(*(_on_one_ramp(trials.where(num_layers=n), arm, than) for n in trials.values("num_layers")))
    return _on_one_ramp(trials, arm, than)


def _on_one_ramp(trials: Trials, arm: str, than: str) -> Finding:
    trials = trials.where(ceiling="0.05") if "ceiling" in trials.axes else trials
    finding = higher(trials, arm, than=than, column="max_learning_rate", by=2e-4, any_status=True)
    if "stop_rule" not in trials.table:
        return finding
    ended = {name: trials.where(placement=name).table["stop_rule"].eq("none") for name in (arm, than)}
    capped = [f"{name} {at_end.sum()} of {len(at_end)}" for name, at_end in ended.items() if at_end.any()]
    note = f"the loss still falls at the end of the warm-up, so the limit may be higher: {', '.join(capped)}"
    return finding.noted(note) if capped else finding
