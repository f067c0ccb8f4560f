import json
from types import SimpleNamespace

import pytest
from synthetic_trials import rows, trials

from lamina.errors import UserError
from lamina.papers.engine.verdicts import _reader
from lamina.papers.judging import Finding, Verdict, judge, load_claims, lower, needs_scale
from lamina.papers.judging.claims import Claim
from lamina.papers.study_catalog import Scale

CLAIMS = '''
"""Mix-LN Table 1."""
from lamina.papers.judging import Finding, Trials, claim, fails_to_train, lower

@claim(says="Mix-LN's loss is below Pre-LN's", paper="21.39 < 21.92")
def mix_ppl(trials: Trials) -> Finding:
    return lower(trials.tuned(), "mix_ln", than="pre_ln")

@claim(says="Post-LN does not train")
def mix_ppl__post_fails(trials: Trials) -> Finding:
    return fails_to_train(trials, "post_ln")
'''
BASE = [3.000, 3.010, 3.020, 3.005, 3.015]


@pytest.fixture
def file(tmp_path, monkeypatch):
    monkeypatch.setenv("LAMINA_PYTHON_FILES", "")

    def write(text, name="mix-ppl.py"):
        path = tmp_path / name
        path.write_text(text, encoding="utf-8")
        return path

    return write


def test_the_claims_of_a_file_are_judged_and_recorded(file):
    claims = load_claims(file(CLAIMS))
    assert [each.name for each in claims] == ["mix-ppl", "mix-ppl/post-fails"]
    three = trials(
        rows("mix_ln", [loss - 0.02 - loss / 1000 for loss in BASE]), rows("pre_ln", BASE),
        rows("post_ln", BASE, "stuck"),
    )  # fmt: skip
    records = [judged.record() for judged in judge(claims, three)]
    assert [record["verdict"] for record in records] == ["holds", "holds"]
    assert list(records[0]) == [
        "claim", "says", "verdict", "ours", "parts", "paper", "margin", "interval", "p", "p_holm", "seeds", "note",
    ]  # fmt: skip
    assert json.loads(json.dumps(records, allow_nan=False))[0]["paper"] == "21.39 < 21.92"


def holding(p):
    return lambda trials: Finding(verdict=Verdict.HOLDS, ours="", p=p, seeds=5)


def failing(p):
    return lambda trials: Finding(verdict=Verdict.REVERSED, ours="", p=1.0, p_not=p, seeds=5)


def judged(*checks, looks=1):
    claims = [Claim(name=f"a/{i}", says="", paper="", check=check) for i, check in enumerate(checks)]
    return judge(claims, trials(rows("pre_ln", BASE)), looks=looks)


def test_holms_correction_is_over_all_claims_those_without_a_test_too():
    found = judged(holding(0.01), holding(0.04), holding(None), holding(0.03))
    assert [each.p_holm for each in found] == [pytest.approx(0.04), pytest.approx(0.09), None, pytest.approx(0.09)]
    assert [each.verdict for each in found] == ["holds", "inconclusive", "holds", "inconclusive"]
    assert found[1].note == "'holds' only before Holm's correction over the study's claims: p 0.04, corrected 0.09"


def test_a_claim_that_leaves_the_tests_makes_no_other_hold():
    """Mix-drop's layers: the same trials gave `holds` when other claims had become untestable."""
    tested, untested = judged(holding(0.03), holding(0.2)), judged(holding(0.03), lambda trials: needs_scale("gpu", ""))
    assert tested[0].verdict == untested[0].verdict == "inconclusive"
    assert untested[0].p_holm == pytest.approx(0.06)


@pytest.mark.parametrize("check", [holding, failing])
def test_what_fails_is_corrected_as_what_holds(check):
    found = judged(check(0.005), check(0.02), check(0.9), looks=2)
    assert [each.p_holm for each in found] == [pytest.approx(0.03), pytest.approx(0.08), 1.0]
    word = "holds" if check is holding else "reversed"
    assert [each.verdict for each in found] == [word, "inconclusive", "inconclusive"]
    assert found[0].note == "seeds were added after a look: p corrected over the study's claims and 2 looks, 0.03"
    assert f"'{word}' only before Holm's correction over the study's claims and 2 looks: p 0.02" in found[1].note


def test_a_claim_over_something_not_measured_is_one_line(file):
    one = trials(rows("pre_ln", BASE))
    with pytest.raises(
        UserError, match=r"^claim 'mix-ppl': the study does not measure the arm 'mix_ln' .*\(allowed"
    ) as error:
        judge(load_claims(file(CLAIMS)), one)
    assert "\n" not in str(error.value)
    text = CLAIMS.replace('lower(trials.tuned(), "mix_ln", than="pre_ln")', 'trials.measure("angular_distance")')
    with pytest.raises(UserError, match="claim 'mix-ppl': the study does not measure angular_distance at end"):
        judge(load_claims(file(text)), one)


def test_a_claim_that_cannot_be_judged_takes_no_verdict_from_the_others(caplog):
    def wrong(trials):
        raise ValueError("no layer")

    checks = {"a": holding(0.01), "a/wrong": wrong, "a/missing": lambda trials: lower(trials, "keel", than="pre_ln")}
    claims = [Claim(name=name, says="", paper="", check=check) for name, check in checks.items()]
    first, second, third = judge(claims, trials(rows("pre_ln", BASE)))
    assert first.verdict == "holds"
    assert first.p_holm == pytest.approx(0.03), "a claim that could not be tested stays in the family"
    assert second.verdict == third.verdict == "inconclusive"
    assert "a/wrong" in second.note
    assert "ValueError" in second.note
    assert "does not measure the arm 'keel'" in third.note
    assert [record.message for record in caplog.records] == [second.note, third.note]


@pytest.mark.parametrize(
    ("old", "new", "said"),
    [
        ("return lower", "1 / 0; return lower", "claim 'mix-ppl': its code raised ZeroDivisionError"),
        ("return lower", "lower", "claim 'mix-ppl': its code returned None"),
    ],
)
def test_what_a_claims_code_does_wrong_names_the_claim(file, old, new, said):
    both = trials(rows("mix_ln", BASE), rows("pre_ln", BASE))
    with pytest.raises(UserError, match=said):
        judge(load_claims(file(CLAIMS.replace(old, new))), both)


@pytest.mark.parametrize(
    ("old", "new", "said"),
    [
        ("mix_ppl(", "mix_alpha(", "'mix-alpha' is not a claim of the study 'mix-ppl'"),
        ("mix_ppl__post_fails", "mix_ppl", "'mix-ppl': defined twice"),
        ("import Finding", "import Findings", "raised ImportError"),
    ],
)
def test_a_claims_file_that_is_wrong_is_named(file, old, new, said):
    with pytest.raises(UserError, match=said):
        load_claims(file(CLAIMS.replace(old, new)))
    with pytest.raises(UserError, match="no such file"):
        load_claims(file(CLAIMS).with_name("mine.py"))


def test_a_users_file_runs_with_a_warning_and_the_packages_own_without(file, caplog):
    load_claims(file(CLAIMS), trusted=True)
    assert not caplog.records
    load_claims(file(CLAIMS))
    assert "runs as code" in caplog.text


def test_a_claim_names_a_probe_with_or_without_its_options():
    measures = {"end": ("layer_drop(meaning=remove)", "gains"), "records": ("metrics",)}
    read = _reader(Scale(name="cpu", measures=measures), SimpleNamespace(table=lambda key, measure: (key, measure)))
    assert read("a", "layer_drop", "end") == read("a", "layer_drop(meaning=remove)", "end")
    assert read("a", "layer_drop", "end") == ("a", "end/layer_drop(meaning=remove)")
    assert read("a", "metrics", "records") == ("a", "records/metrics")
    assert read("a", "gains", "init") is None
