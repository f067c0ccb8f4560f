"""Keel, Section 5.4."""

from lamina.lab.papers.judging import Finding, Trials, claim, compare_values, no_worse, values_of


@claim(
    says="The difference between the losses of Keel and Pre-LN is smaller with the least data than with the most data",
    paper="The paper expects no benefit with little data (10B and 40B tokens)",
)
def keel_lowdata(trials: Trials) -> Finding:
    budgets = _budgets(trials)
    gains = {steps: _gains(trials, steps) for steps in (budgets[0], budgets[-1])}
    names = (f"gain after {budgets[0]} steps", f"after {budgets[-1]}")
    return compare_values(gains[budgets[0]], gains[budgets[-1]], by=0.01, names=names)


@claim(says="With the least data, Pre-LN's loss is at most 0.01 nats above Keel's loss")
def keel_lowdata__vanishes(trials: Trials) -> Finding:
    least = trials.tuned().where(steps=_budgets(trials)[0])
    return no_worse(least, "pre_ln", than="keel")


def _budgets(trials: Trials) -> list[int]:
    return sorted(int(str(steps)) for steps in trials.values("steps"))


def _gains(trials: Trials, steps: int) -> dict[int, float]:
    """Pre-LN's loss minus Keel's, by seed."""
    keel, pre = (values_of(trials.tuned().where(steps=steps), arm) for arm in ("keel", "pre_ln"))
    return {seed: pre[seed] - keel[seed] for seed in keel if seed in pre}
