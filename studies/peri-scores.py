"""Peri-LN Table 1."""

import math

from lamina.jobs.status import Status
from lamina.lab.papers.judging import Finding, Trials, Verdict, all_of, claim, higher, needs_scale, ordered
from lamina.lab.papers.judging.curves import at_stage, split, trained

HALF = 0.5


@claim(
    says="Peri-LN has a lower loss than Pre-LN, and Pre-LN has a lower loss than Post-LN",
    paper="Table 1, loss on C4: Peri-LN 3.34, Pre-LN 3.43, Post-LN 7.46 (400M). Peri-LN 3.18, Pre-LN 3.29, "
    "Post-LN 5.38 (1.5B). Peri-LN 3.11, Pre-LN 3.20, Post-LN 4.43 (3.2B)",
)
def peri_scores(trials: Trials) -> Finding:
    parts = split(at_stage(trials.tuned(), "pretrain"), "size")
    return all_of(*(ordered(part, ["peri_ln", "pre_ln", "post_ln"]) for part in parts))


@claim(
    says="The standard deviation of the loss over seeds is less than half as large in Peri-LN as in Pre-LN",
    paper="Table 1, standard deviation of task scores, Peri-LN and Pre-LN: 0.54 and 1.51 (400M), 0.45 and 1.33 (1.5B), "
    "0.54 and 1.64 (3.2B)",
)
def peri_scores__spread(trials: Trials) -> Finding:
    return all_of(*(half_the_spread(part) for part in split(at_stage(trials.tuned(), "pretrain"), "size")))


def half_the_spread(trials: Trials) -> Finding:
    """The ratio of two standard deviations with the 95 % interval of the F distribution.

    Holds if the interval lies below 1/2, is reversed if it lies above.
    """
    from scipy import stats

    losses = [trained(trials.arm(placement)).table["eval_loss"].dropna() for placement in ("peri_ln", "pre_ln")]
    seeds = min(map(len, losses))
    if seeds < 3:
        return Finding(verdict=Verdict.INCONCLUSIVE, ours="fewer than 3 seeds that trained", seeds=seeds)
    peri, pre = (float(values.std()) for values in losses)
    freedom = [len(values) - 1 for values in losses]
    ratio = peri / pre
    low, high = (ratio / math.sqrt(stats.f.ppf(share, *freedom)) for share in (0.975, 0.025))
    below = stats.f.cdf((ratio / HALF) ** 2, *freedom)
    verdict = Verdict.HOLDS if high < HALF else Verdict.REVERSED if low > HALF else Verdict.INCONCLUSIVE
    return Finding(
        verdict=verdict,
        ours=f"Peri-LN {peri:.3g}, Pre-LN {pre:.3g}: ratio {ratio:.2f} (95 % {low:.2f} to {high:.2f}, {seeds} seeds)",
        margin=ratio,
        interval=(low, high),
        p=min(1.0, 2 * below),
        p_not=min(1.0, 2 * (1 - below)),
        seeds=seeds,
    )


@claim(
    says="No seed of Peri-LN diverges, but some seeds of Pre-LN diverge",
    paper="Diverged seeds of 5 at 400M, 1.5B and 3.2B: 0, 0 and 0 (Peri-LN), 2, 0 and 3 (Pre-LN), 0, 1 and 0 (Post-LN)",
)
def peri_scores__diverged(trials: Trials) -> Finding:
    tuned = at_stage(trials.tuned(), "pretrain")
    runs = {p: tuned.arm(p).table["status"] for p in ("peri_ln", "pre_ln")}
    peri, pre = (int((statuses == Status.DIVERGED.value).sum()) for statuses in runs.values())
    ours = f"diverged: Peri-LN {peri} of {len(runs['peri_ln'])}, Pre-LN {pre} of {len(runs['pre_ln'])}"
    seeds = len(tuned.seeds)
    if peri:
        return Finding(verdict=Verdict.FAILS, ours=ours, seeds=seeds)
    if pre or trials.scale == "paper":
        return Finding(verdict=Verdict.HOLDS if pre else Verdict.FAILS, ours=ours, seeds=seeds)
    return needs_scale("paper", f"no run of either diverges at its own best rate ({ours})")


@claim(
    says="Peri-LN has a higher average score over five tasks than Pre-LN, and Pre-LN has a higher score than Post-LN",
    paper="Peri-LN 51.57, Pre-LN 49.69, Post-LN 42.45 (400M). Peri-LN 56.55, Pre-LN 53.71, Post-LN 45.49 "
    "(1.5B). Peri-LN 58.56, Pre-LN 56.69, Post-LN 46.45 (3.2B)",
)
def peri_scores__tasks(trials: Trials) -> Finding:
    parts = split(at_stage(trials.tuned(), "tasks"), "size")
    return all_of(
        *(
            higher(part, better, than=worse, column="score", by=1.0)
            for part in parts
            for better, worse in (("peri_ln", "pre_ln"), ("pre_ln", "post_ln"))
        )
    )
