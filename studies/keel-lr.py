"""Keel, Section 5.2."""

from dataclasses import replace

from lamina.lab.papers.judging import Finding, Trials, Verdict, all_of, claim, higher, lower, optimum


@claim(
    says="If the learning rate rises from Pre-LN's best value to Keel's best value, Keel's loss falls and Pre-LN's "
    "loss rises",
    paper="The paper compares 1.5e-3, 3e-3 and 6e-3 at 512 layers",
)
def keel_lr(trials: Trials) -> Finding:
    ours, other = (optimum(trials, arm) for arm in ("keel", "pre_ln"))
    rates = f"best rate {ours.trained:g} (keel), {other.trained:g} (pre_ln)"
    if ours.trained == other.trained:
        note = "the best rates are equal"
        return Finding(verdict=Verdict.INCONCLUSIVE, ours=rates, seeds=len(trials.seeds), note=note)
    finding = all_of(
        lower(trials, _at("keel", ours.trained), than=_at("keel", other.trained)),
        higher(trials, _at("pre_ln", ours.trained), than=_at("pre_ln", other.trained)),
    ).noted(rates)
    if ours.trained < other.trained and finding.verdict.shown:  # both, but over rates that fall
        finding = replace(finding, verdict=Verdict.REVERSED, p_not=finding.p)
    return finding.noted("a best rate lies at the sweep's edge") if ours.at_edge or other.at_edge else finding


@claim(says="With each placement at its best learning rate, Keel has a lower loss than Pre-LN")
def keel_lr__best(trials: Trials) -> Finding:
    arms = [_at(arm, optimum(trials, arm).trained) for arm in ("keel", "pre_ln")]
    return lower(trials, arms[0], than=arms[1])


def _at(placement: str, rate: float) -> dict[str, object]:
    return {"placement": placement, "learning_rate": rate}
