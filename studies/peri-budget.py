"""Peri-LN Appendix G.1."""

from lamina.jobs.status import Status
from lamina.lab.papers.judging import Finding, Trials, Verdict, all_of, claim, compare_values, needs_scale

LOST = (Status.DIVERGED.value, Status.STUCK.value)


def lost(trials: Trials, budget: str) -> dict[int, float]:
    """By seed the share of runs at the highest rate, over the placements, that diverged or got stuck."""
    rate = max(float(str(rate)) for rate in trials.values("learning_rate"))
    table = trials.where(budget=budget, learning_rate=rate).table
    return table["status"].isin(LOST).groupby(table["seed"]).mean().to_dict()


def fewer(trials: Trials, a: str, b: str) -> Finding:
    """Whether budget ``a`` loses fewer runs than ``b``."""
    shares = [lost(trials, budget) for budget in (a, b)]
    if not any(shares[0].values()) and not any(shares[1].values()):
        scale = {"cpu": "gpu"}.get(trials.scale, "paper")
        if trials.scale == "paper":
            return Finding(verdict=Verdict.FAILS, ours="no run is lost at any budget", seeds=len(shares[0]))
        return needs_scale(scale, "no run diverges or gets stuck at the highest rate here")
    return compare_values(*shares, by=0.1, names=(f"share of failed runs: {a}", b))


@claim(
    says="At a high learning rate and with a warm-up of 10 % of the steps, long runs fail less often than short runs",
    paper="At a learning rate of 5e-3, runs diverge with 8B and 16B tokens, but not with 30B",
)
def peri_budget(trials: Trials) -> Finding:
    return fewer(trials, "large", "small")


@claim(
    says="The number of warm-up steps is the cause: a longer warm-up saves short runs, and a shorter warm-up makes "
    "long runs fail",
    paper="Appendix G.1 supposes this cause, and does not test it",
)
def peri_budget__warmup(trials: Trials) -> Finding:
    return all_of(fewer(trials, "small, long warm-up", "small"), fewer(trials, "large", "large, short warm-up"))
