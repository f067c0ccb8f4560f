"""FuseNorm Figure 14."""

from lamina.lab.papers.judging import Finding, Trials, all_of, claim, lower, monotone, trains
from lamina.lab.papers.judging.curves import BySeed, along, trained


def losses(trials: Trials, arm: str) -> dict[float, BySeed]:
    """The eval loss by depth and seed, of the runs that trained."""
    by_depth = {}
    for depth, at_depth in along(trials, "num_layers"):
        table = trained(at_depth.arm(arm)).table
        by_depth[depth] = dict(zip(table["seed"].astype(int), table["eval_loss"].astype(float), strict=True))
    return by_depth


@claim(
    says="At one learning rate, FuseNorm's loss falls as the depth grows to 16 times the smallest depth",
    paper="Figure 14: 32, 64, 128, 256 and 512 layers of width 384 at 2e-4. The figure prints no number",
)
def fuse_depth(trials: Trials) -> Finding:
    """Monotone in all seeds' order on average, and the deepest beats the next: the end of the curve is the claim."""
    depths = [depth for depth, _ in along(trials, "num_layers")]
    numbers = sorted(trials.values("num_layers"), key=lambda depth: float(str(depth)))
    last = [{"placement": "fusenorm", "num_layers": depth} for depth in numbers[-2:]]
    course = monotone(
        losses(trials, "fusenorm"), rising=False, name=f"FuseNorm's loss, {depths[0]:g} to {depths[-1]:g} blocks"
    )
    return all_of(course, lower(trials, last[1], than=last[0]))


@claim(
    says="The deepest model trains at the same learning rate as the shallowest model",
    paper="The training with 512 layers is stable",
)
def fuse_depth__trains(trials: Trials) -> Finding:
    depths = trials.values("num_layers")
    return all_of(*(trains(trials, {"placement": "fusenorm", "num_layers": depth}) for depth in depths))


@claim(
    says="More depth lowers the loss of FuseNorm more than the loss of Pre-LN",
    paper='FuseNorm "avoids the depth degradation commonly observed in deep PreNorm models" (no number)',
)
def fuse_depth__pre(trials: Trials) -> Finding:
    """The gap between the two losses grows with depth."""
    fuse, pre = losses(trials, "fusenorm"), losses(trials, "pre_ln")
    gaps = {
        depth: {seed: pre[depth][seed] - loss for seed, loss in by_seed.items() if seed in pre[depth]}
        for depth, by_seed in fuse.items()
    }
    return monotone(gaps, name="Pre-LN's loss minus FuseNorm's")
