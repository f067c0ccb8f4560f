"""Mix-LN Figures 3e and 6a: each layer's gradient norm before training."""

from lamina.core.frames import Frame
from lamina.lab.papers.judging import Finding, Trials, all_of, claim, compare_values
from lamina.lab.papers.judging.curves import deep, layer_means, log10_mean, numbers, rows, shallow

PROBE = "gradients"


def norms(table: Frame) -> Frame:
    """The gradient norm of each layer's parameters."""
    return layer_means(rows(table, metric="gradient_norm", sublayer="block", role="all"))


def unevenness(table: Frame) -> float:
    """The standard deviation over the layers of log10 of their gradient norms."""
    by_layer = norms(table)
    middle = log10_mean(by_layer)
    return (sum((log10_mean(by_layer.iloc[[i]]) - middle) ** 2 for i in range(len(by_layer))) / len(by_layer)) ** 0.5


def _halves(trials: Trials, arm: str, *, deep_is_lower: bool) -> Finding:
    early = numbers(trials, arm, PROBE, lambda table: log10_mean(shallow(norms(table))), at="init")
    late = numbers(trials, arm, PROBE, lambda table: log10_mean(deep(norms(table))), at="init")
    names = (f"log10 of {arm}'s deepest third", "its first third")
    return compare_values(late, early, lower=deep_is_lower, by=0.05, names=names)


@claim(
    says="Before training, the gradients are larger in deep layers of Post-LN and in early layers of Pre-LN. In "
    "Mix-LN, all layers' gradients are similar",
    paper="Figures 3e (130M) and 6a (250M) show curves without numbers",
    quantity="gradient norms",
)
def mix_gradients(trials: Trials) -> Finding:
    return all_of(mix_gradients__ends(trials), mix_gradients__even(trials))


@claim(
    says="Before training, the gradients are larger in deep layers of Post-LN and in early layers of Pre-LN",
    paper="Figure 3e",
    quantity="gradient norms",
)
def mix_gradients__ends(trials: Trials) -> Finding:
    post, pre = _halves(trials, "post_ln", deep_is_lower=False), _halves(trials, "pre_ln", deep_is_lower=True)
    return all_of(post, pre)


@claim(
    says="Before training, the gradients differ less between layers in Mix-LN than in Pre-LN and in Post-LN",
    paper="Figure 6a",
    quantity="gradient norms",
)
def mix_gradients__even(trials: Trials) -> Finding:
    mix, *others = (numbers(trials, arm, PROBE, unevenness, at="init") for arm in ("mix_ln", "pre_ln", "post_ln"))
    names = [("mix_ln's standard deviation of log10", f"{arm}'s") for arm in ("pre_ln", "post_ln")]
    return all_of(*(compare_values(mix, other, by=0.05, names=each) for other, each in zip(others, names, strict=True)))
