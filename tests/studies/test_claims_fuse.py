"""Every claim of the fuse-* studies on made-up trials of its own arms: where it holds, and where it fails."""

import pandas as pd
import pytest
from studies.synthetic_claims import SCALES, STUDIES, agrees, claims_of, judged, rows, scales_of, trials_of

from lamina.papers.judging import Verdict

LAYERS = 12
ORDER = {"fusenorm": 2.0, "hybridnorm": 2.1, "peri_ln": 2.2, "mix_ln": 2.2, "pre_ln": 2.3}
ORDER |= {"layernorm_scaling": 2.4, "olmo2": 2.5, "post_ln": "stuck"}
BACKWARD = {"fusenorm": 2.6, "hybridnorm": 2.5, "peri_ln": 2.45, "mix_ln": 2.4, "pre_ln": 2.3}
BACKWARD |= {"layernorm_scaling": 2.2, "olmo2": 2.1, "post_ln": 2.0}
DEEP = {"fusenorm": 2.0, "mix_ln": 2.1, "pre_ln": 2.2, "post_ln": "stuck", "hybridnorm": "stuck"}
DEEP_BAD = {"fusenorm": 2.2, "mix_ln": 2.1, "pre_ln": 2.0, "post_ln": 2.0, "hybridnorm": 2.0}
DENSE, DENSE_BAD = {"fusenorm": 2.0, "pre_ln": 2.1}, {"fusenorm": 2.1, "pre_ln": 2.0}


def by_placement(losses):
    return lambda arm: losses[str(arm.get("scheme", arm.get("placement")))]


def collapse(arm):
    fails = arm["placement"] == "fusenorm" and arm["start"] == "plain" and arm["depth"] != "12 blocks"
    return "stuck" if fails else 2.0


def collapse_of_all(arm):
    return {"plain": 2.0, "scaled": "stuck"}[arm["start"]]


def up_to(axis, **places):
    """What trains at as many of the rates as ``places`` says."""
    return lambda arm: 2.0 if arm["place"] < places[arm[axis]] else "stuck"


def scaled(gap, shift=0):
    """The loss with width scaling is ``gap`` higher, and its best rate lies ``shift`` places above the others'."""

    def outcome(arm):
        away = (arm["place"] - 1 - shift) ** 2 if arm["width"] == "with" and shift else 0.0
        return 2.0 + gap * (arm["width"] == "with") + away

    return outcome


def deeper(sign):
    def outcome(arm):
        depth = int(arm["num_layers"]).bit_length()
        return 3.0 + sign * 0.1 * depth * (1 if arm["placement"] == "fusenorm" else 0.5)

    return outcome


LOSSES = {
    "fuse-variants": [by_placement(ORDER), by_placement(BACKWARD)],
    "fuse-variants/best": [by_placement(ORDER), by_placement(BACKWARD)],
    "fuse-variants/worse": [by_placement(ORDER), by_placement(BACKWARD)],
    "fuse-variants/better": [by_placement(ORDER), by_placement(BACKWARD)],
    "fuse-variants/post-fails": [by_placement(ORDER), by_placement(BACKWARD)],
    "fuse-128": [by_placement(DEEP), by_placement(DEEP_BAD)],
    "fuse-128/order": [by_placement(DEEP), by_placement(DEEP_BAD)],
    "fuse-128/failures": [by_placement(DEEP), by_placement(DEEP_BAD)],
    "fuse-topology": [by_placement(DEEP), by_placement(DEEP_BAD)],
    "fuse-topology/any-rate": [by_placement(DEEP), by_placement(DEEP_BAD)],
    "fuse-dense": [by_placement(DENSE), by_placement(DENSE_BAD)],
    "fuse-moe": [by_placement(DENSE), by_placement(DENSE_BAD)],
    "fuse-init": [collapse, collapse_of_all],
    "fuse-init/deepest": [collapse, collapse_of_all],
    "fuse-init/pre": [collapse, collapse_of_all],
    "fuse-lr-range": [up_to("placement", fusenorm=3, post_ln=2), up_to("placement", fusenorm=2, post_ln=3)],
    "fuse-width": [up_to("width", narrow=3, wide=3), up_to("width", narrow=3, wide=4)],
    "fuse-ws": [scaled(0.001), scaled(0.1)],
    "fuse-depth": [deeper(-1), deeper(1)],
    "fuse-depth/pre": [deeper(-1), deeper(1)],
    "fuse-depth/trains": [deeper(-1), lambda arm: "stuck"],
}


def layers_record(right):
    """The gradient norms of two recorded steps: fading toward the shallow layers where they are to fade."""

    def table(arm, noise):
        fades = arm["placement"] == "post_ln" or (arm.get("start") == "plain" and arm["placement"] == "fusenorm")
        slope = (0.8 if fades else 0.01) if right else (0.01 if fades else 0.8)
        norms = [10 ** (-slope * (LAYERS - layer) + noise) for layer in range(LAYERS)]
        if right and fades:
            norms[-1] = 10.0
        sublayer = "block" if "start" in arm else "feed_forward"
        return pd.concat([rows("gradient_norm", norms, sublayer=sublayer, step=step) for step in (1, 100)])

    return {("layers", "records"): table}


def cosines(right):
    def table(arm, noise):
        falls = (arm["placement"] == "fusenorm") == right
        values = [0.95 - (0.7 if falls else 0.05) * size / LAYERS + noise for size in range(LAYERS)]
        return rows("cosine_by_distance", values, layer="size")

    return {("similarity", "end"): table}


def spectra(right):
    def table(arm, noise):
        name = str(arm.get("scheme", arm.get("placement")))
        rank = ["fusenorm", "mix_ln", "hybridnorm", "pre_ln"].index(name) * (1 if right else -1) + noise
        head = [10 ** ((2 + rank) * (12 - index) / 12) for index in range(25)]
        head[-3:] = [10 ** -(3 + rank)] * 3
        conditions = [10 ** (3 + rank * (1 + layer / LAYERS)) for layer in range(LAYERS)]
        return pd.concat(
            [
                rows("eigenvalue_over_median", head, layer="index", role="embedding"),
                rows("condition_number", conditions, role="mlp.up_proj"),
                rows("condition_number", conditions, role="mlp.down_proj"),
                *(
                    rows(m, [(20 if m == "edr" else 1) * (0.5 - 0.1 * rank)], role="post").assign(layer=-1)
                    for m in ("hard_rank", "edr", "soft_rank")
                ),
            ]
        )

    return {("spectra", "end"): table}


def variances(right):
    def table(arm, noise):
        grows = (arm["placement"] == "pre_ln") == right
        depth = int(arm["num_layers"])
        last = depth * (1 + noise) if grows else 1.0 + noise
        return rows("variance", [1.0] * depth + [last], role="state")

    return {("hidden_states", "init"): table}


def decay(right):
    def jacobian(arm, noise):
        depth, sigma = int(arm["num_layers"]), 1.1
        norms_on_path = 2 if (arm["placement"] == "post_ln") == right else 1
        path = [sigma ** -(norms_on_path * (1 + noise))] * depth
        sigmas = [rows("sigma", [sigma] * depth, sublayer=s, role="post_norm") for s in ("attention", "feed_forward")]
        return pd.concat([rows("norm", path, role="residual_path"), *sigmas])

    def gradients(arm, noise):
        fade = (1.0 if (arm["placement"] == "post_ln") == right else 0.1) + noise
        return rows("gradient_norm", [10 ** (fade * layer) for layer in range(9)], role="state")

    return {("jacobian", "init"): jacobian, ("gradients", "init"): gradients}


def theorem(right):
    def table(arm, noise):
        depth = int(arm["num_layers"])
        falls = (arm["start"] == "fusenorm scaled") == right
        variance = (1 / depth if falls else 1.0) * (1 + noise)
        ratio = 0.9 if right else 1.5
        tables = [rows("left", [variance], sublayer=s, role="fusenorm_eq_21") for s in ("attention", "feed_forward")]
        model = [part.assign(layer=-1) for part in tables]
        sigma = [(layer + 1) ** (0.5 if right else 2.0) for layer in range(depth)]
        model += [rows(side, [(1 + noise) / s for s in sigma], role="fusenorm_eq_9") for side in ("left", "right")]
        blocks = [rows("ratio", [ratio] * depth, role=f"fusenorm_eq_19{end}") for end in ("", "_chain")]
        sums = rows("ratio", [1.0 + noise if right else 1.5 + noise] * depth, role="fusenorm_eq_20")
        return pd.concat([*model, *blocks, sums])

    return {("bounds", "init"): table}


TABLES = {
    "fuse-similarity": cosines,
    "fuse-spectrum": spectra,
    "fuse-condition": spectra,
    "fuse-rank": spectra,
    "fuse-variance": variances,
    "fuse-decay": decay,
    "fuse-theorem": theorem,
}
CASES = {scale: [(True, Verdict.HOLDS)] for scale in SCALES} | {"cpu": [(True, Verdict.HOLDS), (False, "failed")]}
MEASURED = [(study, claim) for study in TABLES for claim in claims_of(study)]
RECORDED = ["fuse-gradients", "fuse-gradients/collapse", "fuse-init/gradients"]
OTHERS = ["fuse-dense/tasks", "fuse-ws/transfer"]  # the first in test_claims_stages.py


@pytest.mark.parametrize("claim", LOSSES)
def test_a_claim_about_losses_holds_and_fails(claim):
    study = claim.split("/")[0]
    for scale in scales_of(study):
        for outcome, verdict in zip(LOSSES[claim], (Verdict.HOLDS, "failed"), strict=True):
            judgment = judged(study, claim, trials_of(study, scale, outcome))
            assert agrees(judgment.verdict, verdict), (scale, judgment)


@pytest.mark.parametrize(("study", "claim"), MEASURED)
def test_a_claim_about_layers_holds_and_fails(study, claim):
    for scale in scales_of(study):
        for right, verdict in CASES[scale]:
            judgment = judged(study, claim, trials_of(study, scale, tables=TABLES[study](right)))
            assert agrees(judgment.verdict, verdict), (scale, judgment)


@pytest.mark.parametrize("claim", RECORDED)
def test_a_claim_about_gradients_in_training_holds_and_fails(claim):
    study = claim.split("/")[0]
    outcome = collapse if study == "fuse-init" else by_placement({"fusenorm": 2.0, "post_ln": "stuck"})
    for scale in scales_of(study):
        for right, verdict in ((True, Verdict.HOLDS), (False, "failed")):
            judgment = judged(study, claim, trials_of(study, scale, outcome, layers_record(right)))
            assert agrees(judgment.verdict, verdict), (scale, judgment)


def test_the_rate_that_width_scaling_carries_over():
    claim = "fuse-ws/transfer"
    assert judged("fuse-ws", claim, trials_of("fuse-ws", "cpu", scaled(0.0))).verdict == Verdict.HOLDS
    assert judged("fuse-ws", claim, trials_of("fuse-ws", "cpu", scaled(0.0, shift=2))).verdict.failed
    assert judged("fuse-ws", claim, trials_of("fuse-ws", "paper", scaled(0.0))).verdict == Verdict.NEEDS_SCALE


@pytest.mark.parametrize("scale", ["cpu", "gpu"])
@pytest.mark.parametrize(
    ("claim", "scaling"),
    [("depth-rates", "completep"), ("depth-rates/depth-mup", "depth-mup"), ("depth-rates/none", "none")],
)
def test_the_rate_that_holds_at_eight_times_the_depth(scale, claim, scaling):
    def verdict(places):
        def outcome(arm):
            moved = places if arm["scaling"] == scaling and arm["num_layers"] == 64 else 0
            return 2.0 + 0.01 * (arm["place"] - 3 + moved) ** 2

        return judged("depth-rates", claim, trials_of("depth-rates", scale, outcome, spread=1e-3)).verdict

    stays, moves = verdict(0), verdict(2)
    assert (moves if scaling == "none" else stays) == Verdict.HOLDS
    assert (stays if scaling == "none" else moves).failed
    assert verdict(3) == Verdict.INCONCLUSIVE  # the sweep's edge


def test_a_sweep_without_a_border_decides_nothing_about_stability():
    assert judged("fuse-width", "fuse-width", trials_of("fuse-width", "cpu")).verdict == Verdict.INCONCLUSIVE


def test_no_claim_is_left_out():
    studies = [path.stem for path in STUDIES.glob("fuse-*.yaml")]
    tried = {*LOSSES, *(claim for _, claim in MEASURED), *RECORDED, *OTHERS}
    assert {claim for study in studies for claim in claims_of(study)} == tried
