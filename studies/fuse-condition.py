"""FuseNorm Figure 10: condition numbers of the up- and the down-projection."""

from lamina.core.frames import Frame
from lamina.lab.papers.judging import Finding, Trials, all_of, claim, compare_values
from lamina.lab.papers.judging.curves import deep, layer_means, log10_mean, numbers, rows, shallow

OTHERS = ("pre_ln", "hybridnorm", "mix_ln")
BOTTOM, TOP = 6 / 64, 15 / 64


def conditions(table: Frame, projection: str) -> Frame:
    """s_max / s_min by layer of the projection whose name holds this word."""
    all_rows = rows(table, metric="condition_number")
    return layer_means(all_rows[all_rows["role"].astype(str).str.contains(projection)])


def up(table: Frame) -> float:
    """The mean over the layers of log10 of the up-projection's condition number."""
    return log10_mean(conditions(table, "up"))


def up_deep(table: Frame) -> float:
    """The same over the deepest third."""
    return log10_mean(deep(conditions(table, "up")))


def down_ends(table: Frame) -> float:
    """The same of the down-projection, over the bottom 6 and the top 15 of 64 layers."""
    by_layer = conditions(table, "down")
    return (log10_mean(shallow(by_layer, BOTTOM)) + log10_mean(deep(by_layer, TOP))) / 2


def _smallest(trials: Trials, value, what: str) -> Finding:
    fuse = numbers(trials, "fusenorm", "spectra", value)
    checks = []
    for arm in OTHERS:
        other = numbers(trials, arm, "spectra", value)
        checks.append(
            compare_values(fuse, other, by=0.05, names=(f"log10 of the condition number, {what}: fusenorm", arm))
        )
    return all_of(*checks)


@claim(
    says="FuseNorm's up-projections have lower condition numbers than the up-projections of Pre-LN, HybridNorm and "
    "Mix-LN, also in the deeper layers",
    paper="Figure 10 shows curves without numbers",
)
def fuse_condition(trials: Trials) -> Finding:
    tuned = trials.tuned()
    return all_of(_smallest(tuned, up, "up"), _smallest(tuned, up_deep, "up, deepest third"))


@claim(
    says="FuseNorm's up-projections have lower condition numbers than the up-projections of Pre-LN, and the "
    "difference is larger in the deeper layers",
    paper="Figure 10 shows curves without numbers",
)
def fuse_condition__pre(trials: Trials) -> Finding:
    """The gap to Pre-LN in the deepest third is larger than over all layers."""
    tuned = trials.tuned()
    fuse, pre = ([numbers(tuned, arm, "spectra", value) for value in (up, up_deep)] for arm in ("fusenorm", "pre_ln"))
    gaps = [{seed: pre[i][seed] - fuse[i][seed] for seed in fuse[i] if seed in pre[i]} for i in (0, 1)]
    below_pre = compare_values(
        fuse[0], pre[0], by=0.05, names=("log10 of the condition number, up: fusenorm", "pre_ln")
    )
    return all_of(
        below_pre,
        compare_values(
            gaps[1], gaps[0], lower=False, by=0.05, names=("gap in the deepest third of the layers", "in all")
        ),
    )


@claim(
    says="In the first and in the last layers, FuseNorm's down-projections have the lowest condition numbers",
    paper="Figure 10: the first 6 and the last 15 of 64 layers",
)
def fuse_condition__down(trials: Trials) -> Finding:
    return _smallest(trials.tuned(), down_ends, "down, both ends")
