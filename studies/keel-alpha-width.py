"""Whether wider models want a larger alpha on Keel's skip."""

from lamina.lab.papers.judging import Finding, Trials, claim, compare_values, lower, values_of

NARROW, WIDE = 48, 192


@claim(
    says="The loss with alpha = 4 L, minus the loss with alpha = L, is smaller at width 192 than at width 48",
    paper='"wider models may need a larger alpha"',
)
def keel_alpha_width(trials: Trials) -> Finding:
    gaps = []
    for width in (WIDE, NARROW):
        large, plain = (values_of(trials.tuned().where(hidden_size=width), alpha) for alpha in ("4 L", "L"))
        gaps.append({seed: large[seed] - plain[seed] for seed in large if seed in plain})
    return compare_values(*gaps, by=0.01, names=(f"4 L - L at width {WIDE}", f"at {NARROW}"))


@claim(says="At width 192, alpha = 4 L gives a lower loss than alpha = L")
def keel_alpha_width__large(trials: Trials) -> Finding:
    return lower(trials.tuned().where(hidden_size=WIDE), "4 L", than="L")


@claim(says="At width 192, alpha = L gives a lower loss than alpha = L/4")
def keel_alpha_width__small(trials: Trials) -> Finding:
    return lower(trials.tuned().where(hidden_size=WIDE), "L", than="L/4")
