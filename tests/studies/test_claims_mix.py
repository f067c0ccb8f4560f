"""Every claim of the mix-* studies on made-up trials of its own arms: where it holds, and where it fails."""

import pytest
from studies.synthetic_claims import STUDIES, agrees, claims_of, judged, rows, scales_of, trials_of

from lamina.papers.judging import Verdict

LAYERS = 12
FALLING = [1 - layer / LAYERS for layer in range(LAYERS)]
RISING = FALLING[::-1]


def losses(**by_scheme):
    """The outcome of an arm by what names it; another arm's is the last one's."""
    return lambda arm: by_scheme[str(arm.get("scheme", arm.get("placement")))]


def table_one(stuck):
    def outcome(arm):
        if arm["scheme"] == "post_ln" and (arm.get("size") not in ("71m", "130m") or not stuck):
            return "stuck" if stuck else 2.15
        if arm["scheme"] == "deepnorm" and arm.get("size") == "1b":
            return "stuck" if stuck else 2.2
        return {"mix_ln": 2.0, "pre_ln": 2.1, "deepnorm": 2.2, "post_ln": 2.3}[arm["scheme"]]

    return outcome


ALPHAS = ("0 %", "16.7 %", "25 %", "33 %", "41.7 %", "50 %", "100 %")


def by_alpha(*values):
    return lambda arm: dict(zip(ALPHAS, values, strict=True))[arm["alpha"]]


U_SHAPE = by_alpha(2.2, 2.1, 2.0, 2.1, 2.2, 2.3, "stuck")
FLAT = by_alpha(2.0, 2.1, 2.2, 2.3, 2.4, 1.9, 2.0)
OTHERS = ("mix_ln", "group_ln", "sandwich_ln", "pre_ln", "admin")
ORDERED = losses(**dict(zip(OTHERS, (2.0, 2.1, 2.2, 2.3, 2.4), strict=True)))
REVERSED = losses(**dict(zip(OTHERS, (2.4, 2.3, 2.2, 2.1, 2.0), strict=True)))
TABLE_8 = {"pre_ln": 2.3, "mix_ln": 2.2, "pre_ln_scaled": 2.1, "mix_ln_scaled": 2.0}
INIT = losses(**TABLE_8, pre_ln_scaled_embed=2.25, mix_ln_scaled_embed=2.15)
WORSE = {"pre_ln": 2.0, "mix_ln": 2.1, "pre_ln_scaled": 2.3, "mix_ln_scaled": 2.4}
INIT_BAD = losses(**WORSE, pre_ln_scaled_embed=2.05, mix_ln_scaled_embed=2.06)

LOSSES = {
    "mix-ppl": (table_one(stuck=True), losses(mix_ln=2.3, pre_ln=2.2, deepnorm=2.1, post_ln=2.0)),
    "mix-ppl/below-pre": (table_one(stuck=True), losses(mix_ln=2.3, pre_ln=2.2, deepnorm=2.1, post_ln=2.0)),
    "mix-ppl/post-fails": (table_one(stuck=True), table_one(stuck=False)),
    "mix-7b": (losses(mix_ln=2.0, pre_ln=2.1), losses(mix_ln=2.1, pre_ln=2.0)),
    "mix-alpha": (U_SHAPE, FLAT),
    "mix-alpha/quarter": (U_SHAPE, FLAT),
    "mix-alpha/half": (U_SHAPE, FLAT),
    "mix-alpha/all": (U_SHAPE, FLAT),
    "mix-others": (ORDERED, REVERSED),
    "mix-others/best": (ORDERED, REVERSED),
    "mix-others/around-pre": (ORDERED, REVERSED),
    "mix-init": (INIT, INIT_BAD),
    "mix-init/pre": (INIT, INIT_BAD),
    "mix-init/embed": (INIT, INIT_BAD),
    "mix-init/mix": (INIT, INIT_BAD),
}


def angles(right):
    def table(arm, noise):
        course = {"pre_ln": FALLING, "post_ln": RISING, "mix_ln": [2.0] * (LAYERS - 2) + [0.0, 0.0]}
        values = course[arm["placement"]] if right else [1.0 - value for value in course[arm["placement"]]]
        return rows("angular_distance", [value + noise for value in values], layer="start", size=1)

    return {("angular_distance", "end"): table}


def harm(right):
    def table(arm, noise):
        course = {"pre_ln": FALLING, "post_ln": RISING, "mix_ln": RISING}
        values = course[arm["placement"]] if right else [-value for value in course[arm["placement"]]]
        return rows("loss_increase", [value + noise for value in values], meaning="remove")

    return {("layer_drop", "end"): table}


def sigmas(right):
    def at(value):
        return lambda arm, noise: rows("sigma", [value + noise] * LAYERS, role="pre_norm")

    return {("hidden_states", "init"): at(0.5), ("hidden_states", "end"): at(2.0 if right else 0.4)}


def gradients(right):
    def table(arm, noise):
        slope = {"pre_ln": -1, "post_ln": 1, "mix_ln": 0.1}[arm["placement"]]
        slope = slope if right else {"pre_ln": 1, "post_ln": -1, "mix_ln": 3}[arm["placement"]]
        return rows("gradient_norm", [10 ** (slope * (layer + noise) / LAYERS) for layer in range(LAYERS)])

    return {("gradients", "init"): table}


TABLES = {"mix-angular": angles, "mix-drop": harm, "mix-sigma": sigmas, "mix-gradients": gradients}
MEASURED = [(study, claim) for study in TABLES for claim in claims_of(study)]
ELSEWHERE = ("mix-sft", "mix-rlhf", "mix-vit")  # test_claims_stages.py


@pytest.mark.parametrize("claim", LOSSES)
def test_a_claim_about_losses_holds_and_fails(claim):
    study = claim.split("/")[0]
    for scale in ["paper"] if claim == "mix-7b" else scales_of(study):
        good, bad = (judged(study, claim, trials_of(study, scale, outcome)) for outcome in LOSSES[claim])
        assert good.verdict == Verdict.HOLDS, (scale, good)
        if (claim, scale) != ("mix-ppl/post-fails", "paper"):
            assert bad.verdict.failed, (scale, bad)


@pytest.mark.parametrize("scale", ["cpu", "gpu"])
def test_a_claim_about_7b_is_not_decided_by_small_models_and_says_what_they_show(scale):
    found = judged("mix-7b", "mix-7b", trials_of("mix-7b", scale, losses(mix_ln=2.0, pre_ln=2.1)))
    assert (found.verdict, found.p) == (Verdict.NEEDS_SCALE, None)
    assert found.note.startswith("decided at scale paper: these models are far below 7B; in them, mix_ln 2.0")


@pytest.mark.parametrize(("study", "claim"), MEASURED)
def test_a_claim_about_layers_holds_and_fails(study, claim):
    for scale in scales_of(study):
        for right, verdict in ((True, Verdict.HOLDS), (False, "failed")):
            judgment = judged(study, claim, trials_of(study, scale, tables=TABLES[study](right)))
            assert agrees(judgment.verdict, verdict), (scale, judgment)


@pytest.mark.parametrize("study", ["mix-angular", "mix-drop", "mix-sigma"])
def test_layers_of_a_model_that_got_stuck_are_not_judged(study):
    stuck = trials_of(study, "cpu", losses(pre_ln=2.0, mix_ln=2.0, post_ln="stuck"), TABLES[study](True))
    post = f"{study}/post"
    assert judged(study, post, stuck).verdict == Verdict.INCONCLUSIVE


def test_a_sweep_that_was_widened_is_compared_at_the_nearest_rate():
    trials = trials_of("mix-alpha", "cpu", U_SHAPE)
    trials.table.loc[(trials.table["alpha"] == "0 %") & trials.table["tuned"], "learning_rate"] = 6.3e-4
    found = judged("mix-alpha", "mix-alpha/all", trials)
    assert "3 of 3 seeds did not train" in found.ours, "only the sweep has that rate"


def test_no_claim_is_left_out():
    studies = [path.stem for path in STUDIES.glob("mix-*.yaml")]
    assert sorted(studies) == sorted({claim.split("/")[0] for claim in LOSSES} | set(TABLES) | set(ELSEWHERE))
    assert {claim for study in studies if study not in ELSEWHERE for claim in claims_of(study)} == {
        *LOSSES,
        *(claim for _, claim in MEASURED),
    }
