"""FuseNorm Table 1, the rows with and without width scaling."""

import math

from lamina.studies.judging import Finding, Trials, claim, equivalent, fraction, needs_scale, optimum

WITH, WITHOUT, PROXY = ({"width": name} for name in ("with", "without", "proxy"))


@claim(
    says="With and without width scaling FuseNorm is level",
    paper="perplexity 11.7 and 11.8 (0.0085 nats), mean accuracy 65.9 and 66.6, at 5B",
)
def fuse_ws(trials: Trials) -> Finding:
    return equivalent(trials.tuned(), WITH, WITHOUT, within=0.02)


@claim(
    says="With width scaling the rate that is best on the narrow proxy is best on the wide model, within a factor of 2",
    paper="2.4e-4 from the proxy, taken as it is at 5B",
)
def fuse_ws__transfer(trials: Trials) -> Finding:
    if "proxy" not in trials.values("width"):
        return needs_scale("gpu", "the proxy's sweep is not part of the paper's two runs")
    narrow, wide = optimum(trials, PROXY), optimum(trials, WITH)
    apart = abs(math.log2(narrow.rate / wide.rate))
    finding = fraction([apart <= 1.0], at_least=1.0, name="optimum within a factor of 2:", seeds=len(trials.seeds))
    edges = [name for name, best in (("proxy", narrow), ("wide", wide)) if best.at_edge]
    finding = finding.noted(f"best rates {narrow.rate:.2g} (proxy) and {wide.rate:.2g} (wide)")
    return finding.noted(f"at the sweep's edge: {', '.join(edges)}") if edges else finding
