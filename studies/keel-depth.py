"""Keel against Pre-LN by depth."""

from lamina.lab.papers.judging import (
    Finding,
    Trials,
    all_of,
    claim,
    compare_values,
    lower,
    monotone,
    needs_scale,
    trains,
    values_of,
)

THOUSAND = 500  # blocks: 1,000 sub-layers


@claim(
    says="As the depth grows, Keel's loss falls further below Pre-LN's loss",
    paper="GSM-8K: Keel 43.8, Pre-LN 38.1 (512 layers). Keel 58.6, Pre-LN 49.8 (1,024 layers)",
)
def keel_depth(trials: Trials) -> Finding:
    gaps = _gaps(trials)
    shallow, deep = min(gaps), max(gaps)
    names = (f"gain at {deep} blocks", f"at {shallow}")
    return all_of(
        monotone(gaps, name="gain"), compare_values(gaps[deep], gaps[shallow], lower=False, by=0.01, names=names)
    )


@claim(says="In the deepest model, Keel has a lower loss than Pre-LN")
def keel_depth__deepest(trials: Trials) -> Finding:
    return lower(trials.tuned().where(num_layers=max(_depths(trials))), "keel", than="pre_ln")


@claim(says="Keel trains with more than 1,000 sub-layers", paper="Keel trains with 1,024 layers")
def keel_depth__thousand(trials: Trials) -> Finding:
    if max(_depths(trials)) < THOUSAND:
        return needs_scale("gpu", "a trial of 512 blocks takes several minutes on one core")
    return trains(trials.tuned().where(num_layers=max(_depths(trials))), "keel")


def _depths(trials: Trials) -> list[int]:
    return [int(str(depth)) for depth in trials.values("num_layers")]


def _gaps(trials: Trials) -> dict[float, dict[int, float]]:
    """By depth, Pre-LN's loss minus Keel's, by seed."""
    gaps = {}
    for depth in _depths(trials):
        keel, pre = (values_of(trials.tuned().where(num_layers=depth), arm) for arm in ("keel", "pre_ln"))
        gaps[float(depth)] = {seed: pre[seed] - keel[seed] for seed in keel if seed in pre}
    return gaps
