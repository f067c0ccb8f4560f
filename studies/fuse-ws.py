"""FuseNorm Table 1, the rows with and without width scaling."""

import math

from lamina.lab.papers.judging import Finding, Trials, below, claim, equivalent, needs_scale, optimum

WITH, WITHOUT, PROXY = ({"width": name} for name in ("with", "without", "proxy"))


@claim(
    says="FuseNorm has the same loss with width scaling and without it",
    paper="At 5B: perplexity 11.7 and 11.8 (a difference of 0.0085 nats), mean accuracy 65.9 and 66.6",
    quantity="loss",
)
def fuse_ws(trials: Trials) -> Finding:
    return equivalent(trials.tuned(), WITH, WITHOUT, within=0.02)


@claim(
    says="With width scaling, the best learning rates of the narrow and the wide model differ by at most a factor of 2",
    paper="The 5B model uses the narrow model's best learning rate, 2.4e-4",
)
def fuse_ws__transfer(trials: Trials) -> Finding:
    if "proxy" not in trials.values("width"):
        return needs_scale("gpu", "the proxy's sweep is not part of the paper's two runs")
    apart = {}
    for seed in trials.seeds:
        of_seed = trials.where(seed=seed)
        if len(of_seed.values("learning_rate")) < 3:  # it ran at the chosen rates alone
            continue
        try:
            narrow, wide = (optimum(of_seed, arm) for arm in (PROXY, WITH))
        except ValueError:  # no rate trains
            continue
        apart[seed] = abs(math.log2(narrow.rate / wide.rate))
    return below(apart, 1.0, name="|log2(narrow model's best learning rate / wide model's)|")
