import math

import numpy as np
import pandas as pd

from lamina.reports import notices, sentences, summarize


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
    assert "in fusenorm the two are of one size" in why
    assert "grows 40-fold from the first block to the last in pre_ln and stays level in fusenorm" in why


def test_even_gradients_are_not_made_a_reason():
    even = {name: by_layer(0.5, 0.5) for name in ("fusenorm", "post_ln")}
    why = sentences(summarize(THREE), gradients=even)[-1]
    assert why.startswith("Gradients by layer do not set")


def test_gradients_that_are_zero_or_nan_do_not_break_the_sentences():
    broken = {"fusenorm": by_layer(0.5, 0.5) * 0, "post_ln": by_layer(1, 1) * math.nan}
    assert len(sentences(summarize(THREE), gradients=broken, variances=broken)) == 2


def test_a_gap_within_the_seeds_spread_is_called_so():
    frame = results(*((name, 1, seed, "finished", 2.5 + 0.1 * seed) for name in ("a", "b") for seed in range(3)))
    assert "within the seeds' spread (0.141, 3 seeds)" in sentences(summarize(frame))[0]


def test_no_finished_trial_says_so():
    frame = results(("a", 1, 0, "diverged", math.nan), ("b", 1, 0, "stuck", 3.3))
    assert sentences(summarize(frame))[0].startswith("No trial finished")


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
    assert "For a and b the best learning rate is the lowest" in notices(summarize(grid), grid)[0]
