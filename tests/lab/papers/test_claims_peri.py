"""Every claim of Peri-LN's studies, on trials that show what it says and on trials that show the opposite."""

import functools

import pandas as pd
import pytest
from lab.papers.synthetic_claims import STUDIES, claims_of, rows, study_of, trials_of

from lamina.lab.papers.judging import Verdict

BOTH = ("pre_ln", "peri_ln")


def made(study, outcome=lambda arm: 2.5, spread=1e-4, **tables):
    """The trials of a study's cpu scale; ``tables``: by time and name, the table of an arm."""
    named = {tuple(key.split("_", 1))[::-1]: table for key, table in tables.items()}
    return trials_of(study, "cpu", outcome, named, spread)


def losses(study, axis="placement", **by_label):
    """The trials of a study whose arms have these losses, or end so, by an axis."""
    return made(study, lambda arm: by_label.get(arm[axis], 2.9))


def states(variances, noise, added=None, line=0.99, exponential=0.9):
    """Variances of states and of what is added, and how well two courses fit them."""
    added = variances[-1] - variances[0] if added is None else added
    parts = [rows("variance", [v * (1 + noise) for v in variances], role="state")]
    parts += [rows("variance", [added], "attention", "contribution"), rows("growth_linear_r2", [line + noise])]
    return pd.concat([*parts, rows("growth_exponential_r2", [exponential + noise])])


def norms(values, noise):
    return rows("gradient_norm", [value * (1 + place * noise) for place, value in enumerate(values)])


def linear(**end):
    tables = {"init_hidden_states": {}, "end_hidden_states": end}
    tables = {at: lambda arm, noise, more=more: states([1, 2, 3], noise, **more) for at, more in tables.items()}
    return made("peri-linear", lambda arm: {"placement": "peri_ln"}, **tables)


def growth(pre=100.0, peri=5.0, post=1.2, pre_fits=(0.8, 0.95), peri_fits=(0.99, 0.9), post_ends=2.5):
    """The factor by which training multiplies each placement's variance, and its fits after training."""
    after = {"pre_ln": (pre, *pre_fits), "peri_ln": (peri, *peri_fits), "post_ln": (post, 0.5, 0.5)}

    def end(arm, noise):
        factor, line, exponential = after[arm["placement"]]
        return states([1.0, 2.0 * factor], noise, None, line, exponential)

    def outcome(arm):
        return post_ends if arm["placement"] == "post_ln" else 2.5

    before = {"init_hidden_states": lambda arm, noise: states([1.0, 2.0], noise)}
    return made("peri-growth", outcome, **before, end_hidden_states=end)


def sweep(*, peri=0.1, post_best=3, setup="as it is"):
    """Parabolas over the rate: in a setup Peri-LN's lies ``peri`` nats below Pre-LN's; the place of Post-LN's best."""

    def outcome(arm):
        if arm["placement"] == "post_ln":
            return 2.6 + 0.1 * (arm["place"] - post_best) ** 2
        gap = {"pre_ln": 0.0, "peri_ln": peri if arm["setup"] == setup else 0.1}[arm["placement"]]
        return 2.5 - gap + 0.1 * (arm["place"] - 2) ** 2

    return made("peri-lr", outcome)


def spiking(pre, peri, last=(3.0, 2.0, 1.0)):
    surges = {"post_ln": 0, "pre_ln": pre, "peri_ln": peri}
    ends = dict(zip(surges, last, strict=True))

    def table(arm, noise):
        return norms([1.0, ends[arm["placement"]]], noise)

    return made("peri-instability", lambda arm: {"gradient_surges": surges[arm["placement"]]}, end_gradients=table)


def evenness(post=(1.0, 5.0, 50.0), pre=(9.0, 3.0, 1.0), peri=(1.0, 1.1, 1.0)):
    by_layer = {"post_ln": post, "pre_ln": pre, "peri_ln": peri}

    def table(arm, noise):
        return norms(by_layer[arm["placement"]], noise)

    return made("peri-gradients", init_gradients=table, end_gradients=table)


def gamma(fixed=2.5, spikes=(5, 0), gains=(1.0, 1.2, 1.4, 1.6)):
    arms = ("pre", 2.6, spikes[0]), ("fixed", fixed, spikes[1]), ("learned", 2.49, 0)
    ends = {name: {"loss": loss, "gradient_surges": count} for name, loss, count in arms}

    def table(arm, noise):
        found = [gain + noise for gain in (gains if arm["scheme"] == "learned" else [1.0])]
        return pd.concat([rows("gain_mean", found, half, "out_norm") for half in ("attention", "feed_forward")])

    return made("peri-gamma", lambda arm: ends[arm["scheme"]], end_gains=table)


def turning(pre=0.1, fixed=0.1, pre_init=0.2):
    after = {"pre_ln": [pre] * 6, "peri_ln": [0.2] * 6, "post_ln": [0.05] * 6}
    after["peri_ln(learnable_gain=false)"] = [0.2] * 4 + [fixed] * 2
    before = {"pre_ln": pre_init, "post_ln": 0.05}

    def table(angles, noise):
        return rows("angular_distance", [angle + noise for angle in angles], layer="start", size=1)

    return made(
        "peri-angular",
        init_angular_distance=lambda arm, noise: table([before.get(arm["placement"], 0.2)] * 6, noise),
        end_angular_distance=lambda arm, noise: table(after[arm["placement"]], noise),
    )


def decaying(pre=(100.0, 80.0, 40.0, 5.0), peri=(5.0, 5.0, 4.9, 4.0), gap=0.1, saved=2.5):
    """The variance of the last state by decay; at the middle rate, Peri-LN's best, Pre-LN diverges with the usual."""
    last = {"pre_ln": pre, "peri_ln": peri}

    def outcome(arm):
        if arm["placement"] == "pre_ln" and arm["place"] == 1 and arm["weight_decay"] >= 2.0:
            return "diverged" if arm["weight_decay"] == 2.0 else saved
        peri = arm["placement"] == "peri_ln"
        return 2.5 + 0.05 * abs(arm["place"] - peri) - gap * peri

    def table(arm, noise):
        place = [0.0, 0.2, 2.0, 20.0].index(arm["weight_decay"])
        return states([1.0, last[arm["placement"]][place]], noise)

    return made("peri-decay", outcome, end_hidden_states=table)


def initialized(peri=(2.52, 2.5, 2.5, 2.5, 2.51, 2.45), pre=(4.0, 2.6, 2.6, 2.6, 2.65, 2.55)):
    names, ends = ("10/d", "he", "lecun", "1/(10d)", "normal", "xavier"), {"peri_ln": peri, "pre_ln": pre}
    return made("peri-init", lambda arm: ends[arm["placement"]][names.index(arm["init"])])


def magnitudes(pre=(1.0, 9e4), peri=(1.0, 100.0)):
    def table(arm, noise):
        top = {"pre_ln": pre, "peri_ln": peri}[arm["placement"]]
        steps = zip((0, 100), top, strict=True)
        return pd.concat([rows("hidden_top_abs", [value * (1 + noise)], step=step) for step, value in steps])

    return made("peri-fp16", records_layers=table)


def scores(peri_ln=2.4, pre_ln=2.5):
    return losses("peri-scores", peri_ln=peri_ln, pre_ln=pre_ln)


def spread(share):
    """Losses that rise by 0.01 from seed to seed in Pre-LN, and by a share of that in Peri-LN."""
    return made("peri-scores", lambda arm: 2.5 + 0.01 * (share - 1) * arm["seed"] * (arm["placement"] == "peri_ln"))


def embedded(*gains_by_size):
    gains = dict(zip(("d24", "d48", "d96"), gains_by_size, strict=True))
    return made("peri-embed", lambda arm: 2.5 - gains[arm["size"]] * (arm["scheme"] == "with"))


def optimized(gap, adam=2.4):
    def outcome(arm):
        name, rate = arm["optimizer"].split()
        loss = adam if name == "adamw" else 2.9 - 0.1 * float(rate)
        return {"loss": loss - gap * (arm["placement"] == "peri_ln"), "learning_rate": float(rate)}

    return made("peri-sgd", outcome)


def bounded(peri=0.4, pre=1.0):
    roles = {"pre_ln": ("c1", pre), "peri_ln": ("c2", peri), "post_ln": ("c3", 0.5)}

    def table(arm, noise):
        statement, ratio = roles[arm["placement"]]
        return rows("ratio", [ratio], "feed_forward", f"peri_ln_{statement}_token")

    return made("peri-bound", **{f"{at}_bounds(sequences=4)": table for at in ("init", "end")})


def budgeted(*lost):
    """Budgets whose runs diverge."""
    return made("peri-budget", lambda arm: "diverged" if arm["budget"] in lost else 2.5)


SHORT = "large, short warm-up"
CASES = {  # claim: trials where it holds, trials where it fails
    "peri-linear": (linear(), linear(line=0.8, exponential=0.99)),
    "peri-linear/uncorrelated": (linear(), linear(added=0.5)),
    "peri-growth": (growth(), growth(pre=4.0, peri=50.0)),
    "peri-growth/exponential": (growth(), growth(pre_fits=(0.99, 0.8))),
    "peri-growth/post-constant": (growth(), growth(post=20.0)),
    "peri-lr": (sweep(), sweep(peri=-0.1)),
    "peri-lr/setups": (sweep(setup="longer warm-up"), sweep(peri=-0.1, setup="longer warm-up")),
    "peri-lr/post": (sweep(post_best=1), sweep(post_best=3)),
    "peri-instability": (spiking(5, 0), spiking(0, 5)),
    "peri-instability/final-layer": (spiking(5, 0), spiking(5, 0, last=(1.0, 2.0, 3.0))),
    "peri-gradients": (evenness(), evenness(peri=(1.0, 10.0, 100.0))),
    "peri-gradients/init": (evenness(), evenness(peri=(1.0, 10.0, 100.0))),
    "peri-gradients/post": (evenness(), evenness(post=(50.0, 5.0, 1.0))),
    "peri-gamma": (gamma(), gamma(fixed=2.7)),
    "peri-gamma/spikes": (gamma(), gamma(spikes=(0, 5))),
    "peri-gamma/depth": (gamma(), gamma(gains=(1.0, 1.001, 1.002, 1.003))),
    "peri-angular": (turning(), turning(pre=0.3)),
    "peri-angular/init": (turning(), turning(pre_init=0.4)),
    "peri-angular/fixed": (turning(), turning(fixed=0.3)),
    "peri-decay": (decaying(), decaying(pre=(5.0, 40.0, 80.0, 100.0))),
    "peri-decay/gap": (decaying(), decaying(gap=-0.1)),
    "peri-decay/rescue": (decaying(), decaying(saved="diverged")),
    "peri-init": (initialized(), initialized(peri=(5.0, 2.5, 2.5, 2.5, 2.5, 2.45))),
    "peri-init/reach": (initialized(), initialized(peri=(2.9, 2.5, 2.5, 2.5, 2.5, 2.45))),
    "peri-init/xavier": (initialized(), initialized(peri=(2.5,) * 5 + (2.6,), pre=(2.6,) * 5 + (2.7,))),
    "peri-fp16": (magnitudes(), magnitudes(peri=(1.0, 1e5))),
    "peri-fp16/growth": (magnitudes(), magnitudes(pre=(1.0, 10.0))),
    "peri-scores": (scores(), scores(pre_ln=2.3)),
    "peri-scores/spread": (spread(0.1), spread(2.5)),
    "peri-scores/diverged": (scores(pre_ln="diverged"), scores(peri_ln="diverged")),
    "peri-places": tuple(losses("peri-places", peri_ln=2.4, pre_post_ln=x, post_ln=2.6) for x in (2.5, 2.7)),
    "peri-places/b-alone": tuple(losses("peri-places", out_ln=x) for x in ("stuck", 2.5)),
    "peri-qk": tuple(losses("peri-qk", "scheme", peri=2.5, qk=x) for x in (2.49, 2.6)),
    "peri-norm": tuple(losses("peri-norm", "scheme", rms=2.5, layer=x) for x in (2.505, 2.6)),
    "peri-embed": (embedded(0.1, 0.05, 0.02), embedded(0.1, 0.05, -0.02)),
    "peri-embed/size": (embedded(0.1, 0.05, 0.02), embedded(0.02, 0.05, 0.1)),
    "peri-olmo2": tuple(losses("peri-olmo2", peri_ln=2.5, olmo2=x) for x in (2.51, 2.7)),
    "peri-olmo2/better": tuple(losses("peri-olmo2", peri_ln=2.5, olmo2=x) for x in (2.53, 2.4)),
    "peri-sgd": (optimized(0.1), optimized(-0.1)),
    "peri-sgd/worse": (optimized(0.0), optimized(0.0, adam=3.0)),
    "peri-bound": (bounded(), bounded(peri=1.1)),
    "peri-bound/proportional": (bounded(), bounded(pre=0.9)),
    "peri-budget": (budgeted("small", SHORT), budgeted("large")),
    "peri-budget/warmup": (budgeted("small", SHORT), budgeted("small, long warm-up", "large")),
}
ELSEWHERE = {"peri-sft", "peri-sft/above-pre", "peri-scores/tasks"}  # test_claims.py


@functools.cache
def claim_of(name):
    return claims_of(study_of(name))[name]


def test_every_claim_is_tried_here():
    claims = {name: claim for path in STUDIES.glob("peri-*.py") for name, claim in claims_of(path.stem).items()}
    assert set(claims) == set(CASES) | ELSEWHERE
    assert all(claim.says and claim.paper for claim in claims.values())


@pytest.mark.parametrize("name", CASES)
def test_a_claim_holds_where_the_trials_show_it_and_fails_where_they_show_the_opposite(name):
    right, wrong = map(claim_of(name).check, CASES[name])
    assert right.verdict == Verdict.HOLDS, right
    assert right.ours
    assert wrong.verdict.failed, wrong


def test_a_variance_that_stuck_runs_keep_decides_nothing():
    finding = claim_of("peri-growth/post-constant").check(growth(post_ends="stuck"))
    assert finding.verdict == Verdict.INCONCLUSIVE
    assert "does not train" in finding.note


def test_a_scale_without_the_event_says_which_one_may_have_it():
    calm = {"peri-instability": spiking(0, 0), "peri-gamma/spikes": gamma(spikes=(0, 0))}
    calm |= {"peri-fp16": magnitudes(pre=(1.0, 10.0)), "peri-budget": budgeted(), "peri-scores/diverged": scores()}
    for name, table in calm.items():
        assert claim_of(name).check(table).verdict == Verdict.NEEDS_SCALE, name
