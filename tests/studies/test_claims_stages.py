"""The claims about tuned models, on made-up trials of their studies' own arms, seeds and stages."""

import random

import pandas as pd
import pytest
from studies.synthetic_claims import STUDIES, agrees, arms_of, claims_of, judged, scales_of

from lamina.core.yaml_files import read_mapping
from lamina.papers.judging import Trials, Verdict

HELD, EXPLAINED, FAILS = Verdict.HOLDS_AT_ISO_LOSS, Verdict.EXPLAINED, "failed"
STEPS = (0, 12, 24)
ABOVE_CHANCE = 40.0


def made(study, scale, value, loss=None):
    """The trials of a study's scale, with ``value`` of an arm as every score, reward and accuracy.

    A policy's KL grows with the steps, and its reward with the KL up to its value. Without ``loss``, the longer budget
    ends at 1.9, Pre-LN's shorter one at 2.1, and the others at 2.0.
    """
    described = read_mapping(STUDIES / f"{study}.yaml")["scales"][scale]
    draw, rows, frontiers = random.Random(0), [], {}
    for arm in arms_of(described):
        for seed in range(described["axes"].get("seed", 3)):
            for stage in ("pretrain", *described.get("then", ())):
                number, key = ABOVE_CHANCE + value(arm) + draw.gauss(0, 1e-4), str(len(rows))
                lost = (loss or usual_loss)(arm) + draw.gauss(0, 1e-4)
                known = {"eval_loss": lost} if stage == "pretrain" else dict.fromkeys(COLUMNS, number)
                known |= {"accuracy": number}
                own = {"seed": seed, "learning_rate": 5e-3, "status": "finished", "tuned": True, "stage": stage}
                rows.append({**arm, **own, **known, "key": key})
                frontiers[key] = pd.DataFrame(
                    [
                        {"step": step, "prompt": 0, "kl": step / 10, "reward": number * step / STEPS[-1]}
                        for step in STEPS
                    ]
                )
    axes = [*described["axes"], *(["stage"] if "then" in described else [])]
    return Trials(pd.DataFrame(rows), axes=axes, scale=scale, measures=lambda key, name, at: frontiers[key])


COLUMNS = ("score", "score_arithmetic", "eval_reward")


def usual_loss(arm):
    if arm.get("budget") == "2x":
        return 1.9
    return 2.1 if arm["placement"] == "pre_ln" else 2.0


def by_arm(longer=None, **scores):
    """A value by placement; ``longer``: that of the longer budget."""
    return lambda arm: longer if longer is not None and arm.get("budget") == "2x" else scores[str(arm["placement"])]


MIX = {"good": by_arm(mix_ln=40.0, pre_ln=30.0, longer=32.0), "bad": by_arm(mix_ln=20.0, pre_ln=30.0, longer=32.0)}
MIX["same"] = by_arm(mix_ln=40.0, pre_ln=30.0, longer=60.0)  # at Mix-LN's loss Pre-LN is at 45
PERI = {
    "good": by_arm(peri_ln=40.0, pre_ln=30.0, post_ln=20.0, longer=32.0),
    "bad": by_arm(peri_ln=20.0, pre_ln=30.0, post_ln=40.0, longer=32.0),
    "same": by_arm(peri_ln=40.0, pre_ln=30.0, post_ln=20.0, longer=60.0),
}
KEEL = {name: (lambda of: lambda arm: of({**arm, "placement": "mix_ln"} if arm["placement"] == "keel" else arm))(value)
        for name, value in MIX.items()}  # fmt: skip
CONTROLLED = {
    "mix-sft": MIX,
    "mix-rlhf": MIX,
    "mix-rlhf/verifiable": MIX,
    "peri-sft/above-pre": PERI,
    "keel-tasks": KEEL,
    "keel-tasks/mean": KEEL,
}
PLAIN = {
    "mix-sft/budget": (MIX["good"], by_arm(mix_ln=40.0, pre_ln=30.0, longer=20.0)),
    "mix-rlhf/final": (MIX["good"], MIX["bad"]),
    "mix-vit": tuple(by_arm(mix_ln=mix, pre_ln=0.9) for mix in (0.95, 0.8)),
    "mix-vit/tiny": tuple(by_arm(mix_ln=mix, pre_ln=0.9) for mix in (0.9, 0.95)),
    "peri-scores/tasks": (PERI["good"], PERI["bad"]),
    "fuse-dense/tasks": tuple(by_arm(fusenorm=fuse, pre_ln=30.0) for fuse in (40.0, 20.0)),
}
JOINT = {"peri-sft": PERI}


def has_control(study, scale):
    return "budget" in read_mapping(STUDIES / f"{study}.yaml")["scales"][scale]["axes"]


@pytest.mark.parametrize("claim", CONTROLLED)
def test_a_claim_with_a_control_holds_is_explained_and_fails(claim):
    study = claim.split("/")[0]
    for scale in scales_of(study):
        expected = (HELD, EXPLAINED, FAILS) if has_control(study, scale) else (Verdict.HOLDS, Verdict.HOLDS, FAILS)
        for name, verdict in zip(("good", "same", "bad"), expected, strict=True):
            found = judged(study, claim, made(study, scale, CONTROLLED[claim][name]))
            assert agrees(found.verdict, verdict), (scale, name, found)


@pytest.mark.parametrize("claim", PLAIN)
def test_a_claim_without_one_holds_and_fails(claim):
    study = claim.split("/")[0]
    for scale in scales_of(study):
        for value, verdict in zip(PLAIN[claim], (Verdict.HOLDS, FAILS), strict=True):
            found = judged(study, claim, made(study, scale, value))
            assert agrees(found.verdict, verdict), (scale, found)


def test_an_order_of_three_is_as_strong_as_its_weaker_half():
    for scale in scales_of("peri-sft"):
        expected = {"good": Verdict.HOLDS, "same": EXPLAINED, "bad": FAILS}
        for name, verdict in expected.items():
            found = judged("peri-sft", "peri-sft", made("peri-sft", scale, PERI[name]))
            assert agrees(found.verdict, verdict), (scale, name, found)


def test_a_lower_loss_does_not_count_against_the_arm_that_has_the_higher_one():
    """Where Mix-LN's loss is above Pre-LN's, Pre-LN's own score is what it is compared with."""
    worse = made(
        "mix-sft", "cpu", MIX["good"], loss=lambda arm: 2.5 if arm["placement"] == "mix_ln" else usual_loss(arm)
    )
    found = judged("mix-sft", "mix-sft", worse)
    assert found.verdict == HELD
    assert found.margin == pytest.approx(10.0, abs=0.01)


def test_policies_are_compared_at_equal_kl_not_at_equal_steps():
    """Pre-LN's policy moves twice as far for its reward: at Mix-LN's KL it has half of it."""
    trials = made("mix-rlhf", "cpu", by_arm(mix_ln=40.0, pre_ln=60.0, longer=60.0))
    read = trials._measures
    fast = set(trials.table.loc[trials.table["placement"] == "pre_ln", "key"])

    def measures(key, name, at):
        table = read(key, name, at)
        return table.assign(kl=table["kl"] * 2) if key in fast else table

    apart = Trials(trials.table, axes=trials.axes, measures=measures)
    assert judged("mix-rlhf", "mix-rlhf", apart).verdict == HELD
    assert judged("mix-rlhf", "mix-rlhf/final", apart).verdict.failed
    assert "at a KL of 2.4 to 2.4 nats" in judged("mix-rlhf", "mix-rlhf", apart).note


def test_no_claim_about_stages_is_left_out():
    staged = ("mix-sft", "mix-rlhf", "mix-vit", "peri-sft", "keel-tasks")
    tried = {*CONTROLLED, *PLAIN, *JOINT}
    assert {claim for study in staged for claim in claims_of(study)} <= tried
