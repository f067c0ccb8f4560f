"""FuseNorm Figures 2, 3 and 13."""

from lamina.core.frames import Frame
from lamina.lab.papers.judging import Finding, Trials, above, all_of, below, claim, fails_to_train, trains
from lamina.lab.papers.judging.curves import layer_means, log10_mean, rows, shallow

MIDDLE = "24 blocks"


def _arm(depth: str, start: str, placement: str = "fusenorm") -> dict[str, object]:
    return {"placement": placement, "depth": depth, "start": start}


def shallow_gradient(table: Frame) -> float:
    """log10 of the gradient norm of the first third of the blocks, at the last recorded step."""
    table = rows(table, metric="gradient_norm", sublayer="block", role="all")
    return log10_mean(shallow(layer_means(table[table["step"] == table["step"].max()])))


def _gradients(trials: Trials, arm: dict[str, object]) -> dict[int, float]:
    """Of every run, however it ended: those that collapse are the point."""
    return {int(str(seed)): shallow_gradient(t) for seed, t in trials.arm(arm).record("layers").groupby("seed")}


@claim(
    says="With the plain initializer, FuseNorm trains with 12 blocks and collapses with 24 and 48 blocks. With the "
    "scaled initializer, FuseNorm trains with all three depths",
    paper="Figure 2: a collapse at 24 layers with the plain initializer, and stable training at 48 layers with the "
    "scaled initializer",
)
def fuse_init(trials: Trials) -> Finding:
    plain = [trains(trials, _arm("12 blocks", "plain"))]
    plain += [fails_to_train(trials, _arm(depth, "plain")) for depth in (MIDDLE, "48 blocks")]
    return all_of(*plain, *(trains(trials, _arm(d, "scaled")) for d in ("12 blocks", MIDDLE, "48 blocks")))


@claim(
    says="With 48 blocks, FuseNorm collapses with the plain initializer and trains with the scaled initializer",
    paper="Figure 2: stable training at 48 layers with the scaled initializer, and a collapse at 24 layers with the "
    "plain initializer",
)
def fuse_init__deepest(trials: Trials) -> Finding:
    return all_of(fails_to_train(trials, _arm("48 blocks", "plain")), trains(trials, _arm("48 blocks", "scaled")))


@claim(
    says="With 24 blocks, the gradients of the first layers vanish with the plain initializer, but not with the scaled "
    "initializer",
    paper="Figure 13: gradients below 1e-12 (plain) and of about 1e-1 (scaled)",
)
def fuse_init__gradients(trials: Trials) -> Finding:
    """Vanished: below a millionth of a healthy gradient; healthy: above a thousandth."""
    plain, scaled = (_gradients(trials, _arm(MIDDLE, start)) for start in ("plain", "scaled"))
    return all_of(
        below(plain, -6.0, name="log10 of the first layers' gradient norm, initializer plain"),
        above(scaled, -3.0, name="log10 of the first layers' gradient norm, initializer scaled"),
    )


@claim(
    says="Pre-LN trains with either initializer",
    paper="Figure 13: Pre-LN trains with both initializers, with 3 seeds",
)
def fuse_init__pre(trials: Trials) -> Finding:
    return all_of(*(trains(trials, _arm(MIDDLE, start, "pre_ln")) for start in ("plain", "scaled")))
