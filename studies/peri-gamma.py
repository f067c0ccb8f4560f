"""Peri-LN Figures 8 and 9b."""

from lamina.lab.papers.judging import (
    Finding,
    Trials,
    Verdict,
    above,
    all_of,
    any_of,
    claim,
    compare_values,
    equivalent,
    lower,
    monotone,
    needs_scale,
)
from lamina.lab.papers.judging.curves import rows, trained

DIFFERENT = 0.01
PRE, FIXED, LEARNED = ({"scheme": name} for name in ("pre", "fixed", "learned"))


@claim(
    says="With output gains fixed at 1, Peri-LN has a lower loss than Pre-LN. Learned gains give a lower loss than "
    "fixed gains, or the same loss within 0.02 nats",
    paper="Figure 8 (400M, 1.5B): Peri-LN with fixed gains is better than Pre-LN, and learned gains are slightly "
    "better than fixed gains",
)
def peri_gamma(trials: Trials) -> Finding:
    tuned = trials.tuned()
    slightly = any_of(lower(tuned, LEARNED, than=FIXED), equivalent(tuned, LEARNED, FIXED))
    return all_of(lower(tuned, FIXED, than=PRE), slightly)


@claim(
    says="With output gains fixed at 1, Peri-LN has fewer gradient spikes than Pre-LN",
    paper="Figure 8: fixed gains suppress the spikes",
)
def peri_gamma__spikes(trials: Trials) -> Finding:
    """Each at its own best rate; a spike is a surge: above 3 times the median of the 20 steps before."""
    tuned = trials.tuned()
    counts = [tuned.arm(arm).table.set_index("seed")["gradient_surges"].astype(float).to_dict() for arm in (FIXED, PRE)]
    if not any(counts[0].values()) and not any(counts[1].values()):
        return needs_scale("gpu" if trials.scale == "cpu" else "paper", "no run here has a spike")
    return compare_values(*counts, by=1.0, names=("gradient spikes per seed: fixed", "Pre-LN"))


@claim(
    says="During training, the output norms' gains (1 at first) rise or fall with depth. Their standard deviation "
    "between layers exceeds 0.01",
    paper="Figure 9b: the gains are near 1 early in training, and then change gradually with depth",
)
def peri_gamma__depth(trials: Trials) -> Finding:
    found = []
    learned = trained(trials.tuned().arm(LEARNED))
    if not len(learned):
        return Finding(verdict=Verdict.INCONCLUSIVE, ours="no run with learned gains trained")
    table = learned.measure("gains")
    for sublayer, gains in rows(table, role="out_norm", metric="gain_mean").groupby("sublayer"):
        name = f"mean gain of the {sublayer}'s output norm"
        spread = gains.groupby("seed")["value"].std().to_dict()
        by_layer = {float(layer): part.set_index("seed")["value"].to_dict() for layer, part in gains.groupby("layer")}
        ways = (monotone(by_layer, rising=way, name=name, at_least=0.3) for way in (True, False))
        found += [above(spread, DIFFERENT, name=f"{name}, spread over layers"), any_of(*ways)]
    return all_of(*found)
