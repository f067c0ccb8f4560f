"""The ranking, what has not beaten a bigram table, and the sentences and notices around it."""

import math
import re

import numpy as np
import pandas as pd
import pytest
from synthetic_study import write_study

from lamina.core.initializers import check, unsuited
from lamina.jobs.names import PAGE
from lamina.reports import notices, page, sections, summarize
from lamina.reports.records import read_study
from lamina.reports.registry import report
from lamina.reports.sentences import differences, headline, sentences
from lamina.reports.terminal import ranking


def results(*rows):
    names = ("placement", "learning_rate", "seed", "status", "eval_loss")
    return pd.DataFrame([dict(zip(names, row, strict=True)) for row in rows])


def test_each_placement_is_ranked_at_its_best_learning_rate():
    rows = [("a", 1e-3, 0, "finished", 2.9), ("a", 3e-3, 0, "finished", 2.5)]
    rows += [("b", 1e-3, 0, "finished", 2.6), ("b", 3e-3, 0, "diverged", math.nan)]
    table = summarize(results(*rows))
    assert list(table["placement"]) == ["a", "b"]
    assert list(table["learning_rate"]) == [3e-3, 1e-3]
    assert list(table["rank"]) == [1, 2]


def test_mean_and_spread_are_over_the_seeds_that_finished():
    of_a = [("a", 1, 0, "finished", 2.0), ("a", 1, 1, "finished", 2.2), ("a", 1, 2, "diverged", math.nan)]
    table = summarize(results(*of_a))
    row = table.iloc[0]
    assert row["eval_loss"] == pytest.approx(2.1)
    assert row["eval_loss_std"] == pytest.approx(math.sqrt(0.02))
    assert row["status_text"] == "2/3 finished, 1 diverged"
    assert row["status"] == "diverged"
    assert math.isnan(summarize(results(("a", 1, 0, "finished", 2.0))).loc[0, "eval_loss_std"])  # of one seed


def test_a_rate_does_not_win_by_losing_its_bad_seeds():
    rows = [("a", 1, 0, "finished", 2.5), ("a", 1, 1, "finished", 2.5), ("a", 2, 0, "finished", 2.4)]
    table = summarize(results(*rows, ("a", 2, 1, "diverged", math.nan)))
    assert table.loc[0, "learning_rate"] == 1


def test_what_did_not_finish_ranks_last_whatever_its_loss():
    losses = {"failed": math.nan, "diverged": 0.0, "interrupted": 1.0, "stuck": 3.2, "short": 3.9, "finished": 3.5}
    table = summarize(results(*((n, 1, 0, n, x) for n, x in losses.items()), ("lossless", 1, 0, "finished", math.nan)))
    order = ["finished", "lossless", "short", "stuck", "interrupted", "diverged", "failed"]
    assert list(table["placement"]) == order


BIGRAM = 2.5


def of_losses(bigram=BIGRAM, init="scaled", **losses):
    rows = [{"placement": name, "eval_loss": loss} for name, loss in losses.items()]
    shared = {"learning_rate": 3e-3, "seed": 0, "status": "finished", "unigram_entropy": 3.06, "init": init}
    frame = pd.DataFrame(rows).assign(**shared, bigram_entropy=bigram)
    frame.loc[frame["eval_loss"] > 3.0, "status"] = "stuck"
    return frame


MIXED = of_losses(keel=2.6, post_ln=3.2, fusenorm=2.4, pre_ln=2.5)


def test_only_what_is_below_the_bigram_table_is_ranked():
    table = summarize(MIXED)
    assert list(table["placement"]) == ["fusenorm", "pre_ln", "keel", "post_ln"]
    assert table["rank"][0] == 1
    assert table["rank"][1:].isna().all()
    assert list(table["status"]) == ["finished", "finished", "finished", "stuck"]  # a stored status stays as it is


def test_results_without_the_entropy_are_ranked_as_before():
    older = MIXED.drop(columns="bigram_entropy")
    assert list(summarize(older)["placement"]) == ["fusenorm", "pre_ln", "keel", "post_ln"]
    assert list(summarize(older)["rank"].dropna()) == [1, 2, 3]
    assert "bigram" not in ranking(older)
    assert not any("bigram" in sentence for sentence in sentences(summarize(older)))


def test_who_is_not_past_it_is_said():
    nobody = sentences(summarize(of_losses(keel=2.6, pre_ln=2.7)))
    assert "have not beaten a bigram table of the training text" in nobody[0]
    assert (
        "note: Lamina does not rank these placements, because their loss is no better than the loss of a bigram table "
        "of the training text: pre_ln, keel." in ranking(MIXED)
    )


def test_the_title_names_no_best_of_placements_that_are_not_compared():
    assert headline(summarize(MIXED)) == "Of 4 placements, only fusenorm beats a bigram table"
    both = headline(summarize(of_losses(keel=2.4, pre_ln=2.3)))
    assert both == "pre_ln has the lowest eval loss of 2 placements"


def test_the_page_draws_the_line_beside_the_unigrams(tmp_path, monkeypatch):
    folder = write_study(tmp_path / "study", num_layers=4, steps=20, logged=3, failed=False)
    table = pd.read_csv(folder / "results.csv")
    table.assign(bigram_entropy=2.55).to_csv(folder / "results.csv", index=False)
    report(folder)
    html = (folder / PAGE).read_text(encoding="utf-8")
    assert "The dotted line is a bigram table" in html
    assert "above a bigram table" in html
    study = read_study(folder)
    _, items, _ = sections.prepare(study)
    drawn = []
    monkeypatch.setattr(page, "to_html", lambda figure: drawn.append(figure) or "")
    sections.loss(study, items, several=False)
    lines = {line["text"] for line in drawn[0].layout["annotations"]}
    assert {"unigram entropy 3.24", "bigram entropy 2.55"} <= lines


SUITED = [("normal", 1024), ("normal", 4096), ("normal(std=0.0924)", 48), ("small_scaled", 48), ("lecun", 64)]
SUITED += [("he", 4096), ("xavier", 64), ("deepnorm", 64), ("checkpoint", 64)]
UNSUITED = [("scaled", 48), ("normal(std=0.5)", 48), ("10/d", 64)]


@pytest.mark.parametrize(("init", "width"), [*SUITED, *UNSUITED])
def test_a_standard_deviation_suits_a_width_or_not(init, width):
    assert (unsuited(init, width) is None) == ((init, width) in SUITED)


def test_a_misfit_is_noticed_on_the_backbones_width_unless_a_scheme_scales_it():
    frame = of_losses(keel=2.4, pre_ln=2.3)
    said = notices(summarize(frame), frame, settings={"backbone": "llama-nano", "hidden_size": None})
    assert "standard deviation of 0.02 in the blocks, but width 48 needs about 0.0913" in said[0] + said[1] + said[2]
    nano = {"backbone": "llama-nano"}
    for settings in ({**nano, "hidden_size": 1024}, {**nano, "width_scaling": "mup"}, {"backbone": "a/folder"}, {}):
        assert not any("standard deviation" in notice for notice in notices(summarize(frame), frame, settings=settings))


def test_compare_and_max_lr_start_from_an_initializer_that_suits_their_width():
    from lamina.core.backbone_presets import PRESETS
    from lamina.studies.settings import CompareSettings, MaxRateStudySettings

    for job in (CompareSettings, MaxRateStudySettings):
        init = str(job.default("init")).removeprefix("same:")
        assert check(init)
        assert unsuited(init, PRESETS[str(job.default("backbone"))].fields["hidden_size"]) is None


@pytest.mark.parametrize(("width", "advised"), [(1024, True), (48, False)])
def test_a_recommended_initializer_that_does_not_suit_the_width_is_not_advised(width, advised):
    frame = of_losses(keel=2.4, pre_ln=2.3, init="small_scaled")
    recommended = {"keel": "normal", "pre_ln": "normal"}
    said = " ".join(notices(summarize(frame), frame, recommended, settings={"hidden_size": width}))
    assert ("add --init recommended" in said) == advised


def trials(*rows, **more):
    names = ("placement", "learning_rate", "seed", "status", "eval_loss", "reason")
    frame = pd.DataFrame([dict(zip(names, row, strict=False)) for row in rows])
    reason = frame.get("reason", pd.Series("", frame.index)).fillna("")
    return frame.assign(unigram_entropy=3.24, reason=reason, **more)


def each(status, reason="", **losses):
    """A trial for each placement."""
    return trials(*((name, 1, 0, status, loss, reason) for name, loss in losses.items()))


def seeds(*losses):
    """Two placements, a and b, of several seeds with these losses each."""
    return trials(*((name, 1, seed, "finished", x) for name, of in zip("ab", losses, strict=True)
                     for seed, x in enumerate(of)))  # fmt: skip


def by_layer(first, last):
    return pd.DataFrame({1: np.geomspace(first, last, 8), 100: np.geomspace(first, last, 8)}, index=range(1, 9))


THREE = trials(
    *((name, 3e-3, 0, "finished", loss) for name, loss in (("fusenorm", 2.49), ("keel", 2.53), ("pre_ln", 2.73))),
    ("post_ln", 3e-3, 0, "stuck", 3.25),
    ("mix_ln", 3e-3, 0, "diverged", math.nan, "NaN at step 60 in layer 9"),
)
HALVES = trials(
    *(("post_ln", 3e-3, 0, "finished", 2.17), ("post_ln", 3e-3, 1, "stuck", 3.25)),
    *(("peri_ln", 3e-3, 0, "finished", 2.25), ("peri_ln", 3e-3, 1, "finished", 2.27)),
)
SHORT = each("short", a=3.9, b=4.1, c=4.0).assign(steps=20, init="scaled", tokens=20480, parameters=900_000)
EVEN = {name: by_layer(0.5, 0.5) for name in ("a", "b", "c", "fusenorm", "post_ln")}


def case(results, *said, never=None, **records):
    """Results; gradients and variances by placement and layer; what is said; what is not, as a pattern."""
    return results, records, said, never


NONE = trials(("a", 1, 0, "diverged", math.nan), ("b", 1, 0, "stuck", 3.3))
GROWING = {"gradients": {"fusenorm": by_layer(0.5, 0.5), "post_ln": by_layer(1e-4, 1.0)}}
GROWING |= {"variances": {"fusenorm": by_layer(1, 1), "pre_ln": by_layer(1, 40)}}
NEARLY = {"gradients": {"fusenorm": by_layer(1, 1.05), "post_ln": by_layer(1, 1.4)}}
NEARLY |= {"variances": {"fusenorm": by_layer(1, 0.02), "post_ln": by_layer(1, 1.1)}}
NOT_FINITE = {"fusenorm": by_layer(1, 1) * 0, "post_ln": by_layer(1, 1) * math.nan}
SAID = {
    "the lead is told against the next and Pre-LN": case(
        THREE, "fusenorm has the lowest eval loss, 2.490, 0.040 below keel (2.530) and 0.240 below pre_ln (2.730).",
        never="gradient norm|variance",
    ),
    "stuck and diverged ones are named with the reason": case(
        THREE, "post_ln is stuck: its eval loss of 3.25", "3.24 nats", "mix_ln diverged (NaN at step 60 in layer 9)",
    ),
    "the reason comes from gradients and variances": case(
        THREE, "gradient norm in post_ln is 10,000 times as large as the first block's (1 against 0.0001)",
        "in fusenorm the two norms are about equal", "grows 40-fold from the first block to the last in pre_ln",
        **GROWING,
    ),
    "what falls is not called level": case(
        THREE, "nearly even in post_ln, too", "falls 50-fold from the first block to the last in fusenorm", **NEARLY,
    ),
    "zeros and NaN are no reason": case(
        THREE, "fusenorm has the lowest", gradients=NOT_FINITE, never="gradient norm",
    ),
    "a gap within the spread": case(
        seeds([2.5, 2.6, 2.7], [2.5, 2.6, 2.7]), "within the standard deviation over seeds (0.141, 3 seeds)",
    ),
    "a gap beyond the spread": case(
        seeds([2.5, 2.51], [2.6, 2.61]), "times the standard deviation over seeds (2 seeds)",
    ),
    "nothing finished": case(
        NONE, "None of 2 placements finished, so Lamina cannot name the best placement.", "a diverged",
        "b is stuck: its eval loss of 3.30 is no better than the unigram entropy of 3.24 nats",
    ),
    "short runs are told from stuck ones": case(
        SHORT, "After 20 steps the losses of all 3 placements still fall, so the runs are too short to tell",
        "a, c and b ran too short to tell: their eval losses of 3.90, 4.00 and 4.10",
        "The hidden states' variance stays about the same from the first block to the last.",
        never="stuck:|lowest|even than|nothing to rank", gradients=EVEN, variances=EVEN,
    ),
    "one reason is said once": case(
        each("failed", "no GPU", a=math.nan, b=math.nan, c=math.nan),
        "All 3 placements failed, so there is nothing to compare.\na, b and c failed (no GPU).",
    ),
    "a leader that lost a seed": case(
        HALVES, "post_ln has the lowest eval loss, 2.170 over 1 of 2 seeds, 0.090 below peri_ln (2.260 ±",
        "at least as even in peri_ln as in post_ln",
        gradients={"post_ln": by_layer(0.5, 0.6), "peri_ln": by_layer(0.5, 0.5)},
    ),
}  # fmt: skip


@pytest.mark.parametrize("case", SAID)
def test_what_the_sentences_say(case):
    frame, layers, said, unsaid = SAID[case]
    by_layers = differences(summarize(frame), layers.get("gradients", {}), layers.get("variances", {}))
    text = "\n".join([*sentences(summarize(frame)), by_layers])
    assert "why" not in text.lower()  # nothing shows that a difference is the reason
    assert all(words in text for words in said), text
    assert unsaid is None or not re.search(unsaid, text), text


@pytest.mark.parametrize(
    ("row", "expected"),
    [
        (("a", 1, 0, "finished", 2.5), "a ended at an eval loss of 2.500."),
        (("a", 1, 0, "short", 4.0), "a ran too short to tell: its eval loss of 4.00 is not clearly below the unigram"),
        (("a", 1, 0, "stuck", 3.24), "a is stuck: its eval loss of 3.24 is no better than the unigram entropy of 3.24"),
        (("a", 1, 0, "stuck", 5.4), "a is stuck: its eval loss of 5.40 is above the unigram entropy of 3.24 nats and"),
        (("a", 1, 0, "failed", math.nan, "KeyError: '{x}'"), "a failed (KeyError: '{x}')."),
    ],
)
def test_a_study_of_one_trial(row, expected):
    frame = trials(row)
    alone = {"a": by_layer(1e-3, 1.0)}
    said = [*sentences(summarize(frame)), differences(summarize(frame), alone, alone)]
    assert headline(summarize(frame)) == expected.partition(":")[0].partition(" (")[0].rstrip(".")
    assert said[0].startswith(expected)
    assert not re.search("none|placements|apart|ranking", " ".join(said).lower())
    known = [notice for notice in notices(summarize(frame), frame) if "interrupted" not in notice]
    assert known == []


GRID = trials(*((p, rate, s, "finished", 2 + abs(rate - 2)) for p in "ab" for rate in (1, 2, 3) for s in (0, 1)))
UNEVEN = trials(("a", 1, 0, "finished", 2.5), ("a", 2, 0, "finished", 2.4), ("b", 1, 0, "finished", 2.6))
NOTICED = [  # results, the papers' initializers, a pattern, whether a notice has it
    (THREE.assign(init=["scaled", "normal", "scaled", "scaled", ""]), {},
     r"^The initializers differ \(scaled: fusenorm, pre_ln and post_ln; normal: keel\), .* effect of the init", True),
    (THREE.assign(init="scaled"), {"keel": "normal", "pre_ln": "scaled"},
     r"^All placements have the same initializer, scaled\. The sources of these placements use another", True),
    (THREE.assign(init="scaled"), {}, "nitializer", False),
    (THREE.assign(tokens=102_400, parameters=900_000, steps=100), {}, "100 steps give 0.11 tokens per parameter", True),
    (UNEVEN, {}, "a 2 and b 1.*favors", True),
    (trials(("a", 1, 0, "finished", 2.5), ("b", 2, 0, "finished", 2.6)), {}, "^A single learning rate suits", True),
    (THREE, {}, "A single learning rate.*--learning-rates 1e-3,3e-3,1e-2", True),
    (GRID.assign(eval_loss=GRID["learning_rate"]), {}, r"^For a \(1\) and b \(1\), the best .* the lowest in", True),
    (GRID, {}, "", False),
]  # fmt: skip


@pytest.mark.parametrize(("frame", "sources", "words", "noticed"), NOTICED)
def test_what_is_noticed(frame, sources, words, noticed):
    given = [sources] if sources else []
    found = notices(summarize(frame), frame, *given)
    assert any(re.search(words, notice, re.DOTALL) for notice in found) == noticed, found
