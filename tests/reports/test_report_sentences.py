"""The sentences above the ranking and the notices below it: what they say of which results, and what they do not."""

import math
import re

import numpy as np
import pandas as pd
import pytest

from lamina.reports import notices, summarize
from lamina.reports.sentences import sentences


def results(*rows, **more):
    names = ("placement", "learning_rate", "seed", "status", "eval_loss", "reason")
    frame = pd.DataFrame([dict(zip(names, row, strict=False)) for row in rows])
    reason = frame.get("reason", pd.Series("", frame.index)).fillna("")
    return frame.assign(unigram_entropy=3.24, reason=reason, **more)


def each(status, reason="", **losses):
    """A trial for each placement."""
    return results(*((name, 1, 0, status, loss, reason) for name, loss in losses.items()))


def seeds(*losses):
    """Two placements, a and b, of several seeds with these losses each."""
    return results(*((name, 1, seed, "finished", x) for name, of in zip("ab", losses, strict=True)
                     for seed, x in enumerate(of)))  # fmt: skip


def by_layer(first, last):
    return pd.DataFrame({1: np.geomspace(first, last, 8), 100: np.geomspace(first, last, 8)}, index=range(1, 9))


THREE = results(
    ("fusenorm", 3e-3, 0, "finished", 2.49),
    ("keel", 3e-3, 0, "finished", 2.53),
    ("pre_ln", 3e-3, 0, "finished", 2.73),
    ("post_ln", 3e-3, 0, "stuck", 3.25),
    ("mix_ln", 3e-3, 0, "diverged", math.nan, "NaN at step 60 in layer 9"),
)
HALVES = results(
    ("post_ln", 3e-3, 0, "finished", 2.17),
    ("post_ln", 3e-3, 1, "stuck", 3.25),
    ("peri_ln", 3e-3, 0, "finished", 2.25),
    ("peri_ln", 3e-3, 1, "finished", 2.27),
)
SHORT = each("short", a=3.9, b=4.1, c=4.0).assign(steps=20, init="scaled", tokens=20480, parameters=900_000)
EVEN = {name: by_layer(0.5, 0.5) for name in ("a", "b", "c", "fusenorm", "post_ln")}
# results; gradients and variances by placement and layer; what is said; what is not, as a pattern
SAID = {
    "the lead is told against the next and Pre-LN": (
        THREE,
        {},
        ["fusenorm has the lowest eval loss, 2.490, 0.040 below keel (2.530) and 0.240 below pre_ln (2.730)."],
        "gradient norm|hidden variance",
    ),
    "stuck and diverged ones are named with the reason": (
        THREE,
        {},
        ["post_ln is stuck: at 3.25", "3.24 nats", "mix_ln diverged (NaN at step 60 in layer 9)"],
        None,
    ),
    "the reason comes from gradients and variances": (
        THREE,
        {
            "gradients": {"fusenorm": by_layer(0.5, 0.5), "post_ln": by_layer(1e-4, 1.0)},
            "variances": {"fusenorm": by_layer(1, 1), "pre_ln": by_layer(1, 40)},
        },
        ["gradient norm in post_ln is 10,000 times as large as the first block's (1 against 0.0001)",
         "in fusenorm the two are about equal", "grows 40-fold from the first block to the last in pre_ln"],
        None,
    ),
    "what falls is not called level": (
        THREE,
        {
            "gradients": {"fusenorm": by_layer(1, 1.05), "post_ln": by_layer(1, 1.4)},
            "variances": {"fusenorm": by_layer(1, 0.02), "post_ln": by_layer(1, 1.1)},
        },
        ["nearly even in post_ln, too", "falls 50-fold from the first block to the last in fusenorm"],
        None,
    ),
    "zeros and NaN are no reason": (
        THREE,
        {"gradients": {"fusenorm": by_layer(1, 1) * 0, "post_ln": by_layer(1, 1) * math.nan}},
        ["fusenorm has the lowest"],
        "gradient norm",
    ),
    "a gap within the spread": (
        seeds([2.5, 2.6, 2.7], [2.5, 2.6, 2.7]), {}, ["within the seeds' spread (0.141, 3 seeds)"], None,
    ),
    "a gap beyond the spread": (seeds([2.5, 2.51], [2.6, 2.61]), {}, ["times the seeds' spread (2 seeds)"], None),
    "nothing finished": (
        results(("a", 1, 0, "diverged", math.nan), ("b", 1, 0, "stuck", 3.3)),
        {},
        ["None of 2 placements finished, so none can be called the best.", "a diverged",
         "b is stuck: at 3.30 its eval loss is no better than the unigram entropy of 3.24 nats"],
        None,
    ),
    "short runs are told from stuck ones": (
        SHORT,
        {"gradients": EVEN, "variances": EVEN},
        ["After 20 steps the losses of all 3 placements still fall: too short to tell",
         "a, c and b ran too short to tell: at 3.90, 4.00 and 4.10",
         "The hidden variance stays about the same from the first block to the last."],
        "stuck:|lowest|even than|nothing to rank",
    ),
    "one reason is said once": (
        each("failed", "no GPU", a=math.nan, b=math.nan, c=math.nan),
        {},
        ["All 3 placements failed, so there is nothing to compare.\na, b and c failed (no GPU)."],
        None,
    ),
    "a leader that lost a seed": (
        HALVES,
        {"gradients": {"post_ln": by_layer(0.5, 0.6), "peri_ln": by_layer(0.5, 0.5)}},
        ["post_ln has the lowest eval loss, 2.170 over 1 of 2 seeds, 0.090 below peri_ln (2.260 ±",
         "no less even in peri_ln than in post_ln"],
        None,
    ),
}  # fmt: skip


@pytest.mark.parametrize("case", SAID)
def test_what_the_sentences_say(case):
    frame, layers, said, unsaid = SAID[case]
    text = "\n".join(sentences(summarize(frame), **layers))
    assert all(words in text for words in said), text
    assert unsaid is None or not re.search(unsaid, text), text


@pytest.mark.parametrize(
    ("row", "expected"),
    [
        (("a", 1, 0, "finished", 2.5), "a ended at an eval loss of 2.500."),
        (("a", 1, 0, "short", 4.0), "a ran too short to tell: at 4.00 its eval loss is not clearly below the unigram"),
        (("a", 1, 0, "stuck", 3.24), "a is stuck: at 3.24 its eval loss is no better than the unigram entropy of 3.24"),
        (("a", 1, 0, "stuck", 5.4), "a is stuck: at 5.40 its eval loss is above the unigram entropy of 3.24 nats and"),
        (("a", 1, 0, "failed", math.nan, "KeyError: '{x}'"), "a failed (KeyError: '{x}')."),
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


def few(tokens):
    return THREE.assign(tokens=tokens, parameters=900_000, steps=100)


GRID = results(*((p, rate, s, "finished", 2 + abs(rate - 2)) for p in "ab" for rate in (1, 2, 3) for s in (0, 1)))
UNEVEN = results(("a", 1, 0, "finished", 2.5), ("a", 2, 0, "finished", 2.4), ("b", 1, 0, "finished", 2.6))
NOTICED = [  # results, the papers' initializers, a pattern, whether a notice has it
    (THREE.assign(init=["scaled", "normal", "scaled", "scaled", ""]), {},
     r"^The initializers differ \(scaled: fusenorm, pre_ln and post_ln; normal: keel\), .* is not paired", True),
    (THREE.assign(init="scaled"), {"keel": "normal", "pre_ln": "scaled"},
     r"^All placements have one initializer, scaled\. The sources of keel \(normal\) have another", True),
    (THREE.assign(init="scaled"), {}, "nitializer", False),
    (few(102_400), {}, "100 steps are 0.11 tokens per parameter", True),
    (UNEVEN, {}, "a 2 and b 1.*favors", True),
    (results(("a", 1, 0, "finished", 2.5), ("b", 2, 0, "finished", 2.6)), {}, "^One learning rate:", True),
    (THREE, {}, "confounded.*--learning-rates 1e-3,3e-3,1e-2", True),
    (GRID.assign(eval_loss=GRID["learning_rate"]), {}, r"^For a \(1\) and b \(1\) the best .* lowest one tried", True),
    (GRID, {}, "", False),
]  # fmt: skip


@pytest.mark.parametrize(("frame", "sources", "words", "noticed"), NOTICED)
def test_what_is_noticed(frame, sources, words, noticed):
    given = [sources] if sources else []
    found = notices(summarize(frame), frame, *given)
    assert any(re.search(words, notice, re.DOTALL) for notice in found) == noticed, found
