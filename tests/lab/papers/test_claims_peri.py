"""Every claim of Peri-LN's studies, on trials that show what it says and on trials that show the opposite."""

import itertools
from pathlib import Path

import pandas as pd
import pytest

from lamina.lab.papers.judging import Trials, Verdict, load_claims

STUDIES = Path(__file__).parents[3] / "studies"
SEEDS = 8


def noise(seed, arm):
    """A small number, different for each seed and arm."""
    return 0.0004 * ((7 * seed + 3 * arm) % 5 - 2)


def trials(*arms, axes=("placement",), scale="cpu", **measures):
    """Trials of arms, each a mapping of axis values and columns; ``loss`` varies a little over the seeds.

    ``measures``: "end_hidden_states" and the like: a function from an arm's mapping and a seed to a probe's table.
    """
    rows = []
    for number, arm in enumerate(arms):
        for seed in range(arm.get("seeds", SEEDS)):
            loss = arm.get("loss", 2.5)
            loss = loss[seed % len(loss)] if isinstance(loss, list) else loss + noise(seed, number)
            row = {"placement": "peri_ln", "learning_rate": 5e-3, "status": "finished", "tuned": True} | arm
            rows.append(row | {"seed": seed, "eval_loss": loss, "key": f"{number}/{seed}"})

    def read(key, name, at):
        number, seed = map(int, key.split("/"))
        made = measures.get(f"{at}_{name.split('(')[0]}")
        return None if made is None else made(arms[number], seed)

    return Trials(pd.DataFrame(rows), axes=axes, scale=scale, measures=read)


def named(axis, **losses):
    """One arm per label of an axis."""
    return [{axis: label, "loss": loss} for label, loss in losses.items()]


def frame(*rows):
    """A probe's table of (layer, sublayer, role, metric, value), a record's with its step, too."""
    return pd.DataFrame(rows, columns=["layer", "sublayer", "role", "metric", "value"]).assign(index=0, step=0)


# --- tables of probes, from an arm's own numbers ---


def states(arm, seed):
    """Variances of states and of what is added, and how well two courses fit them."""
    jitter = noise(seed, 1)
    variances = [v * (1 + jitter) for v in arm.get("variances", [1.0, 2.0, 3.0])]
    rows = [(layer, "block", "state", "variance", v) for layer, v in enumerate(variances)]
    rows += [(0, "attention", "contribution", "variance", arm.get("added", variances[-1] - variances[0] + jitter))]
    for name, default in (("line", 0.99), ("exponential", 0.9)):
        fit = f"growth_{ {'line': 'linear'}.get(name, name) }_r2"
        rows.append((-1, "model", "model", fit, arm.get(name, default) + jitter))
    return frame(*rows)


def gradients(arm, seed):
    norms = arm["norms"]
    return frame(*((i, "block", "all", "gradient_norm", n * (1 + i * noise(seed, i))) for i, n in enumerate(norms)))


def gains(arm, seed):
    found = [gain + 0.01 * noise(seed, layer) for layer, gain in enumerate(arm.get("gains", [1.0]))]
    halves = itertools.product(("attention", "feed_forward"), enumerate(found))
    return frame(*((layer, half, "out_norm", "gain_mean", gain) for half, (layer, gain) in halves))


def angles(arm, seed):
    rows = [(start, 1, "angular_distance", angle + noise(seed, start)) for start, angle in enumerate(arm["angles"])]
    return pd.DataFrame(rows, columns=["start", "size", "metric", "value"])


def top(arm, seed):
    values = zip((0, 100), arm["top"], strict=True)
    rows = [(step, value * (1 + noise(seed, step))) for step, value in values]
    return pd.DataFrame(rows, columns=["step", "value"]).assign(metric="hidden_top_abs", layer=-1)


def ratios(arm, seed):
    return frame((11, "feed_forward", arm["statement"] + "_token", "ratio", arm["ratio"]))


# --- trials of each study ---


def growth(pre=100.0, peri=5.0, post=1.2, pre_fits=(0.8, 0.95), peri_fits=(0.99, 0.9)):
    """The factor by which training multiplies each placement's variance, and its fits after training."""
    measured = (("pre_ln", pre, pre_fits), ("peri_ln", peri, peri_fits), ("post_ln", post, (0.5, 0.5)))
    arms = [
        {"placement": name, "factor": factor, "line": line, "exponential": exponential}
        for name, factor, (line, exponential) in measured
    ]
    return trials(
        *arms,
        init_hidden_states=lambda arm, seed: states(arm | {"variances": [1.0, 2.0]}, seed),
        end_hidden_states=lambda arm, seed: states(arm | {"variances": [1.0, 2.0 * arm["factor"]]}, seed),
    )


def linear(**end):
    return trials({}, init_hidden_states=states, end_hidden_states=lambda arm, seed: states(arm | end, seed))


def sweep(*, peri=0.1, post_best=0.01, setup="as it is"):
    """Parabolas over the rate: Peri-LN's lies ``peri`` nats below Pre-LN's, Post-LN's has another best rate."""
    arms = []
    for place, rate in enumerate((1.25e-3, 2.5e-3, 5e-3, 1e-2, 2e-2)):
        bowl = 0.1 * (place - 2) ** 2
        shifted = 0.1 * (place - {0.01: 3, 0.0025: 1}[post_best]) ** 2
        for placement, where, loss in (
            ("pre_ln", setup, 2.5 + bowl),
            ("peri_ln", setup, 2.5 - peri + bowl),
            ("pre_ln", "shallow", 2.5 + bowl),
            ("post_ln", "shallow", 2.6 + shifted),
            ("pre_ln", "as it is", 2.5 + bowl),
            ("peri_ln", "as it is", 2.4 + bowl),
        ):
            arm = {"placement": placement, "setup": where, "learning_rate": rate, "loss": loss + 0.003 * place}
            if not any({**arm, "loss": 0} == {**other, "loss": 0} for other in arms):
                arms.append(arm)
    return trials(*arms, axes=("placement", "setup"))


def spiking(pre, peri, norms=(3.0, 2.0, 1.0)):
    arms = [
        {"placement": placement, "depth": depth, "learning_rate": rate, "norms": [1.0, norm], "gradient_surges": spikes}
        for (placement, spikes, norm), depth, rate in itertools.product(
            (("post_ln", 0, norms[0]), ("pre_ln", pre, norms[1]), ("peri_ln", peri, norms[2])),
            ("as it is", "shallow"),
            (0.0025, 0.08),
        )
        if (placement, depth) != ("post_ln", "as it is")
    ]
    found = trials(*arms, axes=("placement", "depth"), end_gradients=gradients)
    found.table["gradient_surges"] += found.table["seed"] * (found.table["gradient_surges"] > 0)
    return found


def evenness(post=(1.0, 5.0, 50.0), pre=(9.0, 3.0, 1.0), peri=(1.0, 1.1, 1.0)):
    arms = [
        {"placement": placement, "depth": depth, "norms": list(norms)}
        for placement, norms in (("post_ln", post), ("pre_ln", pre), ("peri_ln", peri))
        for depth in ("as it is", "shallow")
        if (placement, depth) != ("post_ln", "as it is")
    ]
    return trials(*arms, axes=("placement", "depth"), init_gradients=gradients, end_gradients=gradients)


def gamma(pre=2.6, fixed=2.5, learned=2.49, spikes=(5, 0), gains_by_layer=(1.0, 1.2, 1.4, 1.6)):
    arms = named("scheme", pre=pre, fixed=fixed, learned=learned)
    for arm, count in zip(arms, (*spikes, 0), strict=True):
        arm["gradient_surges"] = count
    arms[2]["gains"] = list(gains_by_layer)
    found = trials(*arms, axes=("scheme",), end_gains=gains)
    found.table["gradient_surges"] += found.table["seed"] * (found.table["gradient_surges"] > 0)
    return found


def turning(pre=0.1, peri=0.2, post=0.05, fixed=0.1, pre_init=0.2):
    arms = [
        {"placement": "pre_ln", "angles": [pre] * 6, "init": pre_init},
        {"placement": "peri_ln", "angles": [peri] * 6, "init": 0.2},
        {"placement": "post_ln", "angles": [post] * 6, "init": 0.05},
        {"placement": "peri_ln(learnable_gain=false)", "angles": [peri] * 4 + [fixed] * 2, "init": 0.2},
    ]

    def initial(arm, seed):
        return angles({"angles": [arm["init"]] * 6}, seed)

    return trials(*arms, init_angular_distance=initial, end_angular_distance=angles)


def decaying(pre=(100.0, 80.0, 40.0, 5.0), peri=(5.0, 5.0, 4.9, 4.0), gap=0.1, saved="finished"):
    """The variance of the last state by decay; at the highest rate Pre-LN diverges with the usual decay."""
    arms = []
    for decay, pre_variance, peri_variance in zip((0.0, 0.2, 2.0, 20.0), pre, peri, strict=True):
        for rate in (0.005, 0.01):
            arms += [
                {"placement": "pre_ln", "weight_decay": decay, "learning_rate": rate, "variances": [1.0, pre_variance]},
                {"placement": "peri_ln", "weight_decay": decay, "learning_rate": rate, "loss": 2.5 - gap}
                | {"variances": [1.0, peri_variance]},
            ]
            if rate == 0.01 and decay >= 2.0:
                arms[-2]["status"] = "diverged" if decay == 2.0 else saved
    return trials(*arms, axes=("placement", "weight_decay"), end_hidden_states=states)


def initialized(peri=(2.52, 2.5, 2.5, 2.5, 2.51), pre=(4.0, 2.6, 2.6, 2.6, 2.65), xavier=(2.45, 2.55)):
    names = ("10/d", "he", "lecun", "1/(10d)", "normal")
    arms = [{"placement": "peri_ln", "init": name, "loss": loss} for name, loss in zip(names, peri, strict=True)]
    arms += [{"placement": "pre_ln", "init": name, "loss": loss} for name, loss in zip(names, pre, strict=True)]
    arms += [{"placement": p, "init": "xavier", "loss": x} for p, x in zip(("peri_ln", "pre_ln"), xavier, strict=True)]
    return trials(*arms, axes=("placement", "init"))


def magnitudes(pre=(1.0, 9e4), peri=(1.0, 100.0)):
    arms = [{"placement": "pre_ln", "top": pre}, {"placement": "peri_ln", "top": peri}]
    return trials(*arms, records_layers=top)


def scores(peri=2.4, pre=2.5, post=2.9, status="finished", peri_status="finished"):
    arms = named("placement", peri_ln=peri, pre_ln=pre, post_ln=post)
    arms[0]["status"], arms[1]["status"] = peri_status, status
    return trials(*arms)


def spread(share):
    center = [-2.0, 1.0, -1.0, 2.0, 0.0, 0.5]
    wide, narrow = ([2.5 + 0.01 * scale * x for x in center] for scale in (1.0, share))
    return trials(*named("placement", peri_ln=narrow, pre_ln=wide))


def embedded(*gains_by_size):
    sizes = dict(zip(("d24", "d48", "d96"), gains_by_size, strict=True))
    arms = [
        {"size": size, "scheme": scheme, "loss": 2.5 - (gain if scheme == "with" else 0.0)}
        for size, gain in sizes.items()
        for scheme in ("with", "without")
    ]
    return trials(*arms, axes=("size", "scheme"))


def optimized(sgd_peri, adam=2.4):
    losses = {"adamw 5e-3": adam, "sgd 0.1": 2.9, "sgd 1": 2.8}
    arms = [
        {"placement": placement, "optimizer": label, "loss": loss - (sgd_peri if placement == "peri_ln" else 0)}
        | {"learning_rate": 1.0 if label == "sgd 1" else 0.1}
        for label, loss in losses.items()
        for placement in ("pre_ln", "peri_ln")
    ]
    return trials(*arms, axes=("placement", "optimizer"))


def bounded(peri=0.4, pre=1.0):
    values = (("pre_ln", "peri_ln_c1", pre), ("peri_ln", "peri_ln_c2", peri), ("post_ln", "peri_ln_c3", 0.5))
    arms = [{"placement": name, "statement": role, "ratio": ratio} for name, role, ratio in values]
    return trials(*arms, init_bounds=ratios, end_bounds=ratios)


def budgeted(**lost):
    arms = [
        {"placement": p, "budget": budget.replace("_long", ", long warm-up").replace("_short", ", short warm-up")}
        | {"status": "diverged" if p in placements else "finished"}
        for budget, placements in {"small": (), "small_long": (), "large": (), "large_short": (), **lost}.items()
        for p in ("pre_ln", "peri_ln")
    ]
    return trials(*arms, axes=("placement", "budget"))


BOTH = ("pre_ln", "peri_ln")
CASES = {  # claim: trials where it holds, trials where it fails
    "peri-linear": (linear(), linear(line=0.8, exponential=0.99)),
    "peri-linear/uncorrelated": (linear(), linear(added=0.5)),
    "peri-growth": (growth(), growth(pre=4.0, peri=50.0)),
    "peri-growth/exponential": (growth(), growth(pre_fits=(0.99, 0.8))),
    "peri-growth/post-constant": (growth(), growth(post=20.0)),
    "peri-lr": (sweep(), sweep(peri=-0.1)),
    "peri-lr/setups": (sweep(setup="longer warm-up"), sweep(peri=-0.1, setup="longer warm-up")),
    "peri-lr/post": (sweep(post_best=0.0025), sweep(post_best=0.01)),
    "peri-instability": (spiking(5, 0), spiking(0, 5)),
    "peri-instability/final-layer": (spiking(5, 0), spiking(5, 0, norms=(1.0, 2.0, 3.0))),
    "peri-gradients": (evenness(), evenness(peri=(1.0, 10.0, 100.0))),
    "peri-gradients/init": (evenness(), evenness(peri=(1.0, 10.0, 100.0))),
    "peri-gradients/post": (evenness(), evenness(post=(50.0, 5.0, 1.0))),
    "peri-gamma": (gamma(), gamma(fixed=2.7)),
    "peri-gamma/spikes": (gamma(), gamma(spikes=(0, 5))),
    "peri-gamma/depth": (gamma(), gamma(gains_by_layer=(1.0, 1.001, 1.002, 1.003))),
    "peri-angular": (turning(), turning(pre=0.3)),
    "peri-angular/init": (turning(), turning(pre_init=0.4)),
    "peri-angular/fixed": (turning(), turning(fixed=0.3)),
    "peri-decay": (decaying(), decaying(pre=(5.0, 40.0, 80.0, 100.0))),
    "peri-decay/gap": (decaying(), decaying(gap=-0.1)),
    "peri-decay/rescue": (decaying(), decaying(saved="diverged")),
    "peri-init": (initialized(), initialized(peri=(5.0, 2.5, 2.5, 2.5, 2.5))),
    "peri-init/reach": (initialized(), initialized(peri=(2.9, 2.5, 2.5, 2.5, 2.5))),
    "peri-init/xavier": (initialized(), initialized(xavier=(2.6, 2.7))),
    "peri-fp16": (magnitudes(), magnitudes(peri=(1.0, 1e5))),
    "peri-fp16/growth": (magnitudes(), magnitudes(pre=(1.0, 10.0))),
    "peri-scores": (scores(), scores(pre=2.3)),
    "peri-scores/spread": (spread(0.1), spread(2.5)),
    "peri-scores/diverged": (scores(status="diverged"), scores(peri_status="diverged")),
    "peri-places": (
        trials(*named("placement", peri_ln=2.4, pre_post_ln=2.5, post_ln=2.6)),
        trials(*named("placement", peri_ln=2.4, pre_post_ln=2.7, post_ln=2.6)),
    ),
    "peri-places/b-alone": (
        trials({"placement": "peri_ln"}, {"placement": "out_ln", "status": "stuck"}),
        trials({"placement": "peri_ln"}, {"placement": "out_ln"}),
    ),
    "peri-qk": tuple(trials(*named("scheme", peri=2.5, qk=qk), axes=("scheme",)) for qk in (2.49, 2.6)),
    "peri-norm": tuple(trials(*named("scheme", rms=2.5, layer=x), axes=("scheme",)) for x in (2.505, 2.6)),
    "peri-embed": (embedded(0.1, 0.05, 0.02), embedded(0.1, 0.05, -0.02)),
    "peri-embed/size": (embedded(0.1, 0.05, 0.02), embedded(0.02, 0.05, 0.1)),
    "peri-olmo2": tuple(trials(*named("placement", peri_ln=2.5, olmo2=x)) for x in (2.51, 2.7)),
    "peri-olmo2/better": tuple(trials(*named("placement", peri_ln=2.5, olmo2=x)) for x in (2.53, 2.4)),
    "peri-sgd": (optimized(0.1), optimized(-0.1)),
    "peri-sgd/worse": (optimized(0.0), optimized(0.0, adam=3.0)),
    "peri-bound": (bounded(), bounded(peri=1.1)),
    "peri-bound/proportional": (bounded(), bounded(pre=0.9)),
    "peri-budget": (budgeted(small=BOTH, large_short=BOTH), budgeted(large=BOTH)),
    "peri-budget/warmup": (budgeted(small=BOTH, large_short=BOTH), budgeted(small_long=BOTH, large=BOTH)),
}
ELSEWHERE = {"peri-sft", "peri-sft/above-pre", "peri-scores/tasks"}  # test_claims.py


@pytest.fixture(scope="module")
def claims():
    files = sorted(STUDIES.glob("peri-*.py"))
    return {claim.name: claim for path in files for claim in load_claims(path, trusted=True)}


def test_every_claim_is_tried_here(claims):
    assert set(claims) == set(CASES) | ELSEWHERE
    assert all(claim.says and claim.paper for claim in claims.values())


@pytest.mark.parametrize("name", CASES)
def test_a_claim_holds_where_the_trials_show_it_and_fails_where_they_show_the_opposite(claims, name):
    right, wrong = map(claims[name].check, CASES[name])
    assert right.verdict == Verdict.HOLDS, right
    assert right.ours
    assert wrong.verdict.failed, wrong


def test_a_variance_that_stuck_runs_keep_decides_nothing(claims):
    table = growth()
    table.rows.loc[table.rows["placement"] == "post_ln", "status"] = "stuck"
    finding = claims["peri-growth/post-constant"].check(table)
    assert finding.verdict == Verdict.INCONCLUSIVE
    assert "does not train" in finding.note


def test_a_scale_without_the_event_says_which_one_may_have_it(claims):
    calm = {"peri-instability": spiking(0, 0), "peri-gamma/spikes": gamma(spikes=(0, 0))}
    calm |= {"peri-fp16": magnitudes(pre=(1.0, 10.0)), "peri-budget": budgeted(), "peri-scores/diverged": scores()}
    for name, table in calm.items():
        assert claims[name].check(table).verdict == Verdict.NEEDS_SCALE, name
