"""`lamina diagnose`: it names layer and step, says how early, and what to change; and what it cannot read."""

import json
import math
import re
import shutil

import pandas as pd
import pytest
import torch
from training.watching.loops import NanoGpt, Tokens, loop

import lamina
from lamina.cli import main
from lamina.errors import UserError
from lamina.jobs import seals
from lamina.jobs.files import read_result
from lamina.reports.causes import CAUSES, Learned, causes_of, open_changes, signature
from lamina.reports.diagnosis import gather
from lamina.reports.loss_course import loss_rise
from lamina.reports.signs import Signs
from lamina.training.monitor.alarms import Alarm


@pytest.fixture(scope="module")
def broken(tmp_path_factory):
    """A run whose second layer's feed-forward gets a hundredfold gradient at step 31, and a bad update from it."""
    folder = tmp_path_factory.mktemp("runs") / "broken"
    model = NanoGpt()
    apart = list(model.h[1].mlp.parameters())  # under SGD: Adam would divide the outlier away
    others = [p for p in model.parameters() if all(p is not one for one in apart)]
    optimizers = [torch.optim.AdamW(others, lr=1e-3), torch.optim.SGD(apart, lr=0.05)]

    def spoil(step, model):
        if step == 31:
            for parameter in apart:
                parameter.grad.mul_(3000.0)

    loop(model, folder, optimizer=optimizers, spoil=spoil, batches=[Tokens(items=4).ids] * 40, every=3)
    return folder


def test_it_names_the_layer_and_the_step_and_says_what_to_change(broken, capsys):
    assert main(["diagnose", str(broken)]) == 0
    assert "layer 1 (feed-forward)" in capsys.readouterr().out
    evidence = gather(broken)
    assert (evidence.first.step, evidence.first.layer, evidence.first.sublayer) == (31, 1, "feed_forward")
    found = lamina.diagnose(broken)
    cause, *texts = found.sentences
    assert re.match(r"Likely cause: |The cause is not known", cause)
    assert any(text.startswith("The first anomaly is at step 31, layer 1 (feed-forward)") for text in texts)
    assert "h.1" in " ".join(texts)
    assert texts[-1] == "Lamina counts steps from 1: a loop that counts from 0 prints step 31 as 30."
    changes = [text for text in texts if text.startswith("To change:")]
    assert 1 <= len(changes) <= 3
    assert texts.index(changes[-1]) < next(at for at, text in enumerate(texts) if text.startswith("To check:"))
    assert "odds" not in " ".join(found.sentences)  # counted on small models only
    html = found.page.read_text(encoding="utf-8")
    assert "what to change" in html
    assert "plotly" in html


LEARNED = Learned()
for _ in range(6):
    LEARNED.see("bad batch", {"first": "rise gradient", "layers": "several", "then rise gradient": "yes"})
    LEARNED.see("dead layer", {"first": "dead gradient", "layers": "one", "then dead gradient": "yes"})


def test_odds_are_those_of_bayes_by_the_formula():
    signs = {"first": "dead gradient", "layers": "one", "then dead gradient": "yes"}
    odds = LEARNED.odds(signs)
    # Of 6 runs each, and one more: "first" has 2 known values and any other, "layers" too, each "then" is there or not.
    own, other = ((6 + part) / 7 for part in (1 / 3, 1 / 2)), ((0 + part) / 7 for part in (1 / 3, 1 / 2))
    (own, own_then), (other, other_then) = own, other
    common, common_then = ((own + other) / 2 + 1 / 3) / 2, ((own_then + other_then) / 2 + 1 / 2) / 2
    counted = {"dead layer": (own, own_then), "bad batch": (other, other_then), "not known": (common, common_then)}
    parts = {name: value * (value * then**2) ** 0.5 for name, (value, then) in counted.items()}
    assert odds == pytest.approx({name: part / sum(parts.values()) for name, part in parts.items()})
    assert sum(odds.values()) == pytest.approx(1.0)
    assert Learned(runs=LEARNED.runs, seen=LEARNED.seen).to_dict()["bad batch"]["runs"] == 6


@pytest.mark.parametrize(
    ("rule", "metric", "layers", "said"),
    [("dead", "gradient_norm", (1,), "dead layer"), ("logit", "attention_logit", (1,), "not known")],
)
def test_what_fits_nothing_that_was_learned_is_not_known(rule, metric, layers, said):
    place = {"sublayer": "attention", "role": "all", "value": 0.0, "usual": 1.0}
    alarms = tuple(Alarm(step=40, rule=rule, metric=metric, layer=layer, **place) for layer in layers)
    (best, odds), *_ = causes_of(Signs(alarms=alarms, rose=None), LEARNED)
    assert best == said
    assert 0.4 < odds < 1


def test_a_history_does_not_tell_two_causes_that_share_too_little():
    class Even:
        def odds(self, factors):
            return {"values that are not finite": 0.4, "bad batch": 0.35, "not known": 0.25}

    place = {"layer": 1, "sublayer": "attention", "role": "all"}
    rise = Alarm(step=40, rule="rise", metric="gradient_norm", **place, value=9.0, usual=1.0)
    told = causes_of(Signs(alarms=(rise,), rose=None, half=None, view="loss"), Even())
    assert [name for name, _ in told] == ["not known"]


def test_experts_are_no_cause_in_a_run_that_recorded_none(broken):
    class Experts:
        def odds(self, factors):
            return {"experts": 0.9, "not known": 0.1}

    evidence = gather(broken)
    assert [name for name, _ in causes_of(evidence, Experts())] == ["not known"]
    assert causes_of(Signs(alarms=evidence.alarms, rose=None), Experts())[0][0] == "experts"


@pytest.mark.parametrize(("decay", "said"), [(0, "not known"), (0.0, "not known"), (0.1, "weight decay")])
def test_weight_decay_of_zero_is_no_cause(decay, said):
    class Decay:
        def odds(self, factors):
            return {"weight decay": 0.9, "not known": 0.1}

    place = {"layer": 1, "sublayer": "attention", "role": "all", "value": 0.1, "usual": 1.0}
    shrinks = Alarm(step=40, rule="fall", metric="weight_norm", **place)
    settings = {"weight_decay": decay}
    assert causes_of(Signs(alarms=(shrinks,), rose=None, settings=settings), Decay())[0][0] == said
    assert causes_of(Signs(alarms=(shrinks,), rose=None), Decay())[0][0] == "weight decay"  # not recorded


def test_signs_say_what_loss_and_rate_did():
    place = {"layer": -1, "sublayer": "block", "role": "model", "metric": "step_gradient_norm"}
    alarm = Alarm(step=40, rule="rise", value=9.0, usual=1.0, **place)
    losses = {step: 2.0 + 0.01 * (-1) ** step + (1.0 if step >= 40 else 0.0) for step in range(1, 60)}
    signs = signature(Signs(alarms=(alarm,), rose=41, losses=losses, rates={20: 1e-3, 40: 2e-3}))
    alarms = {"first": "rise gradient", "then rise gradient": "yes", "telling": "none", "layers": "none"}
    place = {"where": "model", "sublayer": "block", "when": "later", "half": "False"}
    assert signs == {**alarms, **place, "loss": "up", "rate": "grown", "after": "short", "jump": "stays"}
    assert set(Learned.read().runs) <= set(CAUSES)
    assert causes_of(Signs(alarms=(), rose=None)) == []


@pytest.mark.parametrize(
    ("after", "said"),
    [
        ([6.0 - 0.1 * at for at in range(20)], "stays"),  # other data, which is learned
        ([6.0, 6.0, 6.0, *[2.1] * 17], "back"),  # three bad batches
        ([*[6.0] * 5, *[4.5] * 5, *[6.5] * 10], "again"),
        ([2.0] * 20, "no"),
        ([6.0] * 8, None),  # not known yet
    ],
)
def test_signs_say_what_followed_a_jump_of_the_loss(after, said):
    place = {"layer": -1, "sublayer": "model", "role": "all"}
    alarm = Alarm(step=40, rule="rise", **place, metric="step_loss", value=6.0, usual=2.0)
    losses = dict(enumerate([*[2.0, 2.01] * 20, *after]))
    assert signature(Signs(alarms=(alarm,), rose=41, losses=losses)).get("jump") == said


@pytest.mark.parametrize("poison", [math.nan, math.inf])
def test_a_run_that_ended_in_numbers_that_are_not_finite(tmp_path, capsys, poison):
    model = NanoGpt()

    def spoil(step, model):
        if step == 6:
            next(model.h[0].mlp.parameters()).grad.mul_(poison)

    loop(model, tmp_path / "run", spoil=spoil, batches=[Tokens(items=4).ids] * 7, every=2)
    assert main(["diagnose", str(tmp_path / "run")]) == 0
    assert "is not finite" in capsys.readouterr().out
    assert main(["report", str(tmp_path / "run")]) == 0


def test_the_page_of_a_watched_run_shows_the_command_as_code(broken):
    page = lamina.report(broken).read_text(encoding="utf-8")
    assert f"For charts of the failure, run: <code>lamina diagnose {broken}</code></p>" in page
    assert "steps count from 1" in page


def test_what_it_cannot_read_is_one_line(tmp_path, broken, refused):
    for command in ("diagnose", "report"):  # no name stands before the path: nobody typed one
        assert refused(command, tmp_path / "nothing").startswith(f"lamina: '{tmp_path / 'nothing'}' does not exist")
    with pytest.raises(UserError, match=r"^run: '.*nothing' does not exist"):  # in Python, the argument has a name
        lamina.diagnose(tmp_path / "nothing")
    assert "is a web address" in refused("diagnose", "https://wandb.ai/me/project/runs/abc")
    assert "has no records by layer. Give" in refused("diagnose", tmp_path)
    (tmp_path / "parent").mkdir()
    (tmp_path / "parent" / "mine").symlink_to(broken)
    assert "by layer, but it holds mine. Give" in refused("diagnose", tmp_path / "parent")
    record = json.loads((broken / "watched.json").read_text())
    (tmp_path / "watched.json").write_text(json.dumps({**record, "record": 2}))
    with pytest.raises(UserError, match="version 2"):
        gather(tmp_path)


@pytest.mark.parametrize("layers", [3, ["h.0"], {"path": "h.0"}])
def test_a_damaged_watched_json_is_one_line(tmp_path, broken, refused, layers):
    damaged = tmp_path / "run"
    shutil.copytree(broken, damaged)
    (damaged / "watched.json").write_text(json.dumps({"record": 1, "layers": layers}))
    (damaged / "result.json").unlink()  # whose seal would tell the change first
    for command in ("diagnose", "report"):
        said = refused(command, damaged)
        assert "layers: " in said
        assert "watched.json" in said


@pytest.mark.parametrize("change", [{"rule": "of a later version"}, {"more": 1}])
def test_an_alarm_of_another_version_is_left_out_and_said(tmp_path, broken, caplog, change):
    folder = tmp_path / "other"
    shutil.copytree(broken, folder)
    path = folder / "alarms.jsonl"
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    path.write_text("".join(json.dumps(line) + "\n" for line in [lines[0] | change, *lines]))
    seals.write_result(folder, read_result(folder))  # as that version would have
    assert gather(folder).alarms == gather(broken).alarms
    assert "alarms.jsonl: this version of Lamina skips 1 alarms with rules that it does not know" in caplog.text


def test_where_a_loss_rises():
    falling = {step: 4.0 - 0.01 * step for step in range(1, 60)}
    assert loss_rise(falling) is None
    assert loss_rise({**falling, 30: 9.0}) is None  # a single step is a spike, not a rise
    assert loss_rise({step: value + (2.0 if step >= 40 else 0.0) for step, value in falling.items()}) == 40
    assert loss_rise({**falling, 25: float("nan")}) == 25
    slow = {step: 3.0 + max(0, step - 100) * 0.02 + 0.05 * (-1) ** step for step in range(1, 201)}
    assert 120 <= loss_rise(slow) <= 135  # no three losses lie above those right before them


@pytest.mark.parametrize(("more", "rose"), [({}, 38), ({"diverged_since": 30}, 30)])
def test_a_run_that_diverged_has_risen(tmp_path, broken, more, rose):
    folder = tmp_path / "other"
    shutil.copytree(broken, folder)
    (folder / "alarms.jsonl").unlink()
    with (folder / "metrics.jsonl").open("a") as file:
        file.write(json.dumps({"step": 38, "tokens": None, "loss": None, "diverged": "a reason", **more}) + "\n")
    for part in (folder / "layers").glob("*.parquet"):
        rows = pd.read_parquet(part)
        rows.loc[rows["metric"] == "step_loss", "value"] = 2.0
        rows.to_parquet(part)
    seals.write_result(folder, {**read_result(folder), "status": "diverged"})
    evidence = gather(folder)
    assert evidence.rose == rose
    assert f"The loss rose at step {rose} of 40 (status: diverged)." in " ".join(lamina.diagnose(folder).sentences)


def test_what_a_run_has_already_is_not_advised():
    cause = CAUSES["learning rate too high"]
    assert any("beta2" in text for text in open_changes(cause, {}))
    assert any("beta2" in text for text in open_changes(cause, {"beta2": 0.999}))
    assert not any("beta2" in text for text in open_changes(cause, {"beta2": 0.95}))
    assert len(open_changes(cause, {"beta2": 0.95})) == len(cause.changes) - 1
    # no clipping is written as 0
    assert any("clip" in text for text in open_changes(CAUSES["bad batch"], {"max_grad_norm": 0.0}))
    assert not any("bfloat16" in text for text in open_changes(CAUSES["number range"], {"precision": "bf16"}))


def test_every_claim_that_the_advice_cites_exists():
    from lamina.lab.papers.engine.verdicts import all_verdicts

    known = {str(one["claim"]).partition("/")[0] for one in all_verdicts(None)}
    assert {claim for cause in CAUSES.values() for claim in cause.claims} <= known


def train_and_write(folder, write=None, steps=40):
    """A healthy run with records every 5 steps, into whose weights ``write(model)`` writes before step 32."""
    model = NanoGpt(layers=3)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, betas=(0.9, 0.95))

    def spoil(step, model):
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)

    def after(step):
        if step == 31 and write:
            write(model)

    loop(model, folder, optimizer=optimizer, spoil=spoil, after=after, batches=[Tokens(items=4).ids] * steps, every=5)
    return folder


@pytest.mark.parametrize("norm", ["ln_1", "ln_2"])
def test_a_gain_that_was_written_is_no_bad_batch_and_its_layer_is_named(tmp_path, norm):
    def write(model):
        with torch.no_grad():
            getattr(model.h[1], norm).weight.fill_(1e4)

    folder = train_and_write(tmp_path / "run", write)
    texts = lamina.diagnose(folder).sentences
    sublayer = {"ln_1": "attention", "ln_2": "feed-forward"}[norm]
    said = " ".join(texts)
    assert "bad batch" not in said
    cause = "code other than the optimizer changed the weights by 100% of their norm"
    assert f"step 31, layer 1 ({sublayer}): {cause}" in said
    gains = [alarm for alarm in gather(folder).alarms if alarm.metric == "gain_abs_max"]
    assert [(alarm.step, alarm.layer) for alarm in gains] == [(34, 1)]


def test_a_weight_that_is_not_a_number_is_no_matter_of_the_number_range(tmp_path):
    def write(model):
        model.h[2].mlp.c_fc.weight.data[0, 0] = math.nan

    folder = train_and_write(tmp_path / "run", write, steps=36)
    assert causes_of(gather(folder))[0][0] == "values that are not finite"


def test_a_healthy_run_has_no_alarm_and_what_its_training_does_already_is_not_advised(tmp_path):
    evidence = gather(train_and_write(tmp_path / "run"))
    assert evidence.alarms == ()
    settings = evidence.settings
    assert (settings["beta2"], settings["max_grad_norm"]) == (0.95, 1.0)
    for name in ("bad batch", "learning rate too high"):
        assert len(open_changes(CAUSES[name], settings)) == len(CAUSES[name].changes) - 1


def test_a_run_that_skips_outliers_is_not_told_to_skip_them():
    cause = CAUSES["values that are not finite"]
    assert any("skip_outliers" in change for change in open_changes(cause, {}))
    assert not any("skip_outliers" in change for change in open_changes(cause, {"skip_outliers": 4.0}))
