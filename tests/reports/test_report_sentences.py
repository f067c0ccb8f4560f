import math
import re

import numpy as np
import pandas as pd
import pytest

from lamina.reports import notices, summarize
from lamina.reports.sentences import sentences


def results(*rows):
    names = ("placement", "learning_rate", "seed", "status", "eval_loss", "reason")
    frame = pd.DataFrame([dict(zip(names, row, strict=False)) for row in rows])
    return frame.assign(unigram_entropy=3.24, reason=frame.get("reason", pd.Series("", frame.index)).fillna(""))


def by_layer(first, last):
    return pd.DataFrame({1: np.geomspace(first, last, 8), 100: np.geomspace(first, last, 8)}, index=range(1, 9))


THREE = results(
    ("fusenorm", 3e-3, 0, "finished", 2.49),
    ("keel", 3e-3, 0, "finished", 2.53),
    ("pre_ln", 3e-3, 0, "finished", 2.73),
    ("post_ln", 3e-3, 0, "stuck", 3.25),
    ("mix_ln", 3e-3, 0, "diverged", math.nan, "NaN at step 60 in layer 9"),
)


def test_the_lead_is_told_against_the_next_and_pre_ln():
    lead = sentences(summarize(THREE))[0]
    assert lead == "fusenorm has the lowest eval loss, 2.490, 0.040 below keel (2.530) and 0.240 below pre_ln (2.730)."


def test_stuck_and_diverged_placements_are_named_with_the_reason():
    trouble = sentences(summarize(THREE))[1]
    assert "post_ln is stuck: at 3.25" in trouble
    assert "3.24 nats" in trouble
    assert "mix_ln diverged (NaN at step 60 in layer 9)" in trouble


def test_the_reason_comes_from_gradients_and_variances_by_layer():
    gradients = {"fusenorm": by_layer(0.5, 0.5), "post_ln": by_layer(1e-4, 1.0)}
    variances = {"fusenorm": by_layer(1, 1), "pre_ln": by_layer(1, 40)}
    why = sentences(summarize(THREE), gradients=gradients, variances=variances)[-1]
    assert (
        "last block's gradient norm in post_ln is 10,000 times as large as the first block's (1 against 0.0001)" in why
    )
    assert "in fusenorm the two are about equal" in why
    assert "grows 40-fold from the first block to the last in pre_ln and stays level in fusenorm" in why


def test_even_gradients_are_not_made_a_reason():
    even = {name: by_layer(0.5, 0.5) for name in ("fusenorm", "post_ln")}
    why = sentences(summarize(THREE), gradients=even)[-1]
    assert why.startswith("Gradients by layer do not set")


def test_what_is_less_even_or_falls_is_not_called_even_or_level():
    gradients = {"fusenorm": by_layer(1, 1.05), "post_ln": by_layer(1, 1.4)}
    variances = {"fusenorm": by_layer(1, 0.02), "post_ln": by_layer(1, 1.1)}
    why = sentences(summarize(THREE), gradients=gradients, variances=variances)[-1]
    assert "they are nearly even in post_ln, too" in why
    assert "by the end the hidden variance falls 50-fold from the first block to the last in fusenorm" in why


def test_gradients_that_are_zero_or_nan_do_not_break_the_sentences():
    broken = {"fusenorm": by_layer(0.5, 0.5) * 0, "post_ln": by_layer(1, 1) * math.nan}
    assert len(sentences(summarize(THREE), gradients=broken, variances=broken)) == 2


def test_a_gap_within_the_seeds_spread_is_called_so():
    frame = results(*((name, 1, seed, "finished", 2.5 + 0.1 * seed) for name in ("a", "b") for seed in range(3)))
    assert "within the seeds' spread (0.141, 3 seeds)" in sentences(summarize(frame))[0]


def test_no_finished_trial_says_so():
    frame = results(("a", 1, 0, "diverged", math.nan), ("b", 1, 0, "stuck", 3.3))
    said = sentences(summarize(frame))
    assert said[0] == "None of 2 placements finished, so none can be called the best."
    assert "b is stuck: at 3.30 its eval loss is no better than the unigram entropy of 3.24 nats" in said[1]
    assert "a diverged" in said[1]


def short(*losses):
    rows = [(name, 1, 0, "short", loss) for name, loss in zip("abcdef", losses, strict=False)]
    return results(*rows).assign(steps=20, init="scaled", tokens=20480, parameters=900_000)


def test_short_runs_are_told_from_stuck_ones_and_nobody_leads():
    frame = short(3.9, 4.1, 4.0)
    even = {name: by_layer(0.5, 0.5) for name in "abc"}
    said = sentences(summarize(frame), gradients=even, variances=even)
    assert said[0].startswith("After 20 steps the losses of all 3 placements still fall: too short to tell")
    assert said[1] == (
        "a, c and b ran too short to tell: at 3.90, 4.00 and 4.10 their eval losses are not clearly below the unigram "
        "entropy of 3.24 nats yet, but still fall."
    )
    assert said[2:] == ["The hidden variance stays about the same from the first block to the last."]
    assert not re.search("stuck:|lowest|even than|nothing to rank", " ".join(said))


def test_a_short_placement_stands_behind_the_finished_and_before_the_stuck():
    frame = results(("s", 1, 0, "stuck", 3.2), ("t", 1, 0, "short", 3.9), ("f", 1, 0, "finished", 3.0))
    assert list(summarize(frame).placement) == ["f", "t", "s"]
    assert "f has the lowest eval loss, 3.000; it is the only one of 3" in sentences(summarize(frame))[0]


def test_image_runs_are_told_of_classes():
    frame = results(("a", 1, 0, "stuck", 3.24)).assign(accuracy=0.1, top5_accuracy=0.5)
    assert (
        "no better than the entropy of the classes of 3.24 nats, so it has learned how often each class"
        in sentences(summarize(frame))[0]
    )


@pytest.mark.parametrize(
    ("row", "expected"),
    [
        (("a", 1, 0, "finished", 2.5), "a ended at an eval loss of 2.500."),
        (("a", 1, 0, "short", 4.0), "a ran too short to tell: at 4.00 its eval loss is not clearly below the unigram"),
        (("a", 1, 0, "stuck", 3.24), "a is stuck: at 3.24 its eval loss is no better than the unigram entropy of 3.24"),
        (("a", 1, 0, "stuck", 3.2), "a is stuck: at 3.20 its eval loss is hardly better than the unigram entropy"),
        (("a", 1, 0, "stuck", 5.4), "a is stuck: at 5.40 its eval loss is above the unigram entropy of 3.24 nats and"),
        (("a", 1, 0, "failed", math.nan, "KeyError: '{x}'"), "a failed (KeyError: '{x}')."),
        (("a", 1, 0, "interrupted", 3.0), "a was interrupted."),
    ],
)
def test_a_study_of_one_trial(row, expected):
    frame = results(row)
    alone = {"a": by_layer(1e-3, 1.0)}
    said = sentences(summarize(frame), gradients=alone, variances=alone)
    assert said[0].startswith(expected)
    assert not re.search("none|placements|apart|ranking", " ".join(said).lower())
    known = [notice for notice in notices(summarize(frame), frame) if "interrupted" not in notice]
    assert known == []


def test_placements_that_failed_for_one_reason_are_said_once():
    frame = results(*((name, 1, 0, "failed", math.nan, "no GPU") for name in "abc"))
    said = sentences(summarize(frame))
    assert said == ["All 3 placements failed, so there is nothing to compare.", "a, b and c failed (no GPU)."]


def test_all_stuck_is_not_compared_with_itself():
    frame = results(("a", 1, 0, "stuck", 3.25), ("b", 1, 0, "stuck", 3.26))
    gradients = {name: by_layer(1e-4, 1.0) for name in "ab"}
    said = " ".join(sentences(summarize(frame), gradients=gradients))
    assert "a and b are stuck: at 3.25 and 3.26 their eval losses are no better than" in said
    assert "they have learned how often" in said
    assert "last block's gradient norm in b" in said
    assert "Why" not in said
    assert "apart" not in said


def test_ties_are_level_and_equal_seeds_do_not_divide_by_zero():
    frame = results(*((name, 1, seed, "finished", loss) for name, loss in (("a", 2.5), ("b", 2.5)) for seed in (0, 1)))
    assert "level with b (2.500 ± 0.000)." in sentences(summarize(frame))[0]
    frame = results(*((name, 1, seed, "finished", loss) for name, loss in (("a", 2.5), ("b", 2.6)) for seed in (0, 1)))
    assert "0.100 below b" in sentences(summarize(frame))[0]


def test_initializers_that_differ_are_not_a_paired_comparison():
    frame = THREE.assign(init=["scaled", "normal", "scaled", "scaled", ""])
    assert notices(summarize(frame), frame)[0].startswith(
        "The initializers differ (scaled: fusenorm, pre_ln and post_ln; normal: keel), so this comparison is not paired"
    )
    same = THREE.assign(init="scaled")
    said = notices(summarize(same), same, {"keel": "normal", "pre_ln": "scaled"})
    assert said[0].startswith("All placements have one initializer, scaled. The sources of keel (normal) have another")
    assert not any("nitializer" in notice for notice in notices(summarize(same), same))


def test_so_few_tokens_show_the_start_only():
    frame = THREE.assign(tokens=102_400, parameters=900_000, steps=100)
    assert "100 steps are 0.11 tokens per parameter" in notices(summarize(frame), frame)[-1]
    frame = frame.assign(tokens=30 * 900_000)
    assert not any("tokens per parameter" in notice for notice in notices(summarize(frame), frame))


def test_unequal_numbers_of_rates_are_noticed_and_a_rate_of_ones_own_each_is_one_rate():
    frame = results(("a", 1, 0, "finished", 2.5), ("a", 2, 0, "finished", 2.4), ("b", 1, 0, "finished", 2.6))
    assert any("favors" in notice and "a 2 and b 1" in notice for notice in notices(summarize(frame), frame))
    frame = results(("a", 1, 0, "finished", 2.5), ("b", 2, 0, "finished", 2.6))
    assert any(notice.startswith("One learning rate:") for notice in notices(summarize(frame), frame))


def test_one_rate_and_one_seed_are_noticed_and_several_are_not():
    said = " ".join(notices(summarize(THREE), THREE))
    assert "--learning-rates 1e-3,3e-3,1e-2" in said
    assert "confounded" in said
    assert "--seeds 0,1,2" in said
    grid = results(
        *((p, lr, s, "finished", 2 + abs(lr - 2)) for p in "ab" for lr in (1, 2, 3) for s in (0, 1)),
    )
    assert notices(summarize(grid), grid) == []


def test_a_best_rate_at_the_edge_is_noticed():
    grid = results(*((p, lr, s, "finished", lr) for p in "ab" for lr in (1, 2, 3) for s in (0, 1)))
    assert "For a (1) and b (1) the best learning rate is the lowest one tried" in notices(summarize(grid), grid)[0]


def test_a_leader_that_lost_a_seed_says_so_and_is_not_compared_with_itself():
    halves = results(
        ("post_ln", 3e-3, 0, "finished", 2.17),
        ("post_ln", 3e-3, 1, "stuck", 3.25),
        ("peri_ln", 3e-3, 0, "finished", 2.25),
        ("peri_ln", 3e-3, 1, "finished", 2.27),
    )
    gradients = {"post_ln": by_layer(0.5, 0.6), "peri_ln": by_layer(0.5, 0.5)}
    lead, *_, why = sentences(summarize(halves), gradients=gradients)
    assert lead.startswith("post_ln has the lowest eval loss, 2.170 over 1 of 2 seeds, 0.090 below peri_ln (2.260 ±")
    assert "no less even in peri_ln than in post_ln" in why
