"""`lamina max-lr`: one rising rate per placement and seed, stopped by a rule, resumed to the same result."""

import pandas as pd
import pytest
from training.tiny_runs import SMALL, TIMING, cut_at, layers, records, result

import lamina
from lamina.cli import main
from lamina.errors import UserError
from lamina.jobs.kinds import Kind, kind_of
from lamina.reports.pages.max_rate import headline, spread, summarize
from lamina.studies.compare import run_max_rate
from lamina.studies.max_rate_rules import MaxRateRules, find_stop
from lamina.studies.settings import MaxRateSettings

FAST = {"precision": "fp32", "compile": "off"}
QUICK = {**SMALL, "steps": 60, "logging_steps": 5, "eval_steps": 60, "window": 2, "init": "normal"} | FAST
HIGH = {**QUICK, "max_learning_rate": 20.0}  # so high that any run fails
OPEN = {"max_learning_rate": 1e-2, "plateau_factor": 1e6, "spike_margin": 50.0}  # no run fails
STUDY = {**HIGH, "placements": "post_ln,pre_ln", "seeds": "0,1", "workers": 2, "init": "same:normal"}


@pytest.fixture
def trial(corpus, tmp_path):
    def make(name="trial", **changed):
        given = {**HIGH, "placement": "pre_ln", **changed}
        return MaxRateSettings(corpus=str(corpus), output=str(tmp_path / name), **given)

    return make


@pytest.fixture(scope="module")
def studied(corpus, tmp_path_factory):
    folder = tmp_path_factory.mktemp("max-lr") / "study"
    results = lamina.max_lr(**STUDY, corpus=str(corpus), output=str(folder), bar=False)
    return folder, results


def losses_of(folder):
    rows = layers(folder)
    return rows[rows["metric"] == "step_loss"].sort_values("step")["value"].tolist()


def test_a_trial_stops_and_reports_the_rate_by_its_own_losses(trial, tmp_path):
    settings = trial()
    found = run_max_rate(settings, bar=False)
    folder = tmp_path / "trial"
    assert result(folder)["max_learning_rate"] == found["max_learning_rate"]
    assert found["status"] == "finished"
    assert found["stop_rule"] in ("spike", "plateau", "stuck", "non-finite")
    assert 0 < found["max_learning_rate"] < settings.max_learning_rate
    assert found["steps"] < settings.steps
    losses = losses_of(folder)
    stop = find_stop(losses, MaxRateRules(settings, found["unigram_entropy"]))
    assert stop is not None
    assert (stop.rate, stop.rule, stop.loss) == (found["max_learning_rate"], found["stop_rule"], found["loss_at_stop"])
    assert stop.reason == found["reason"]


def test_a_run_that_is_not_stopped_trains_as_pretrain_does_at_rates_that_rise_linearly(trial, corpus, tmp_path):
    settings = trial(**OPEN)
    found = run_max_rate(settings, bar=False)
    assert (found["stop_rule"], found["max_learning_rate"], found["steps"]) == ("none", 1e-2, 60)
    rates = {r["step"]: r["learning_rate"] for r in records(tmp_path / "trial") if r.get("learning_rate") is not None}
    assert rates == pytest.approx({step: MaxRateRules(settings, 0.0).rate(step) for step in rates})
    same = {name: value for name, value in QUICK.items() if name != "window"}
    same |= {"placement": "pre_ln", "learning_rate": 1e-2, "warmup": 60, "corpus": str(corpus)}
    lamina.pretrain(**same, output=str(tmp_path / "plain"), bar=False)
    assert losses_of(tmp_path / "trial") == losses_of(tmp_path / "plain")


def test_a_killed_trial_resumes_to_the_same_result(trial, tmp_path):
    whole = run_max_rate(trial("whole", save_steps=7), bar=False)
    settings = trial("cut", save_steps=7)
    with cut_at(whole["steps"] - 1):
        run_max_rate(settings, bar=False)
    assert list((tmp_path / "cut" / "checkpoints").glob("checkpoint-*"))
    run_max_rate(settings, resume=True, bar=False)
    resumed, straight = (result(tmp_path / name) for name in ("cut", "whole"))
    assert {**resumed, **dict.fromkeys(TIMING)} == {**straight, **dict.fromkeys(TIMING)}
    assert losses_of(tmp_path / "cut") == losses_of(tmp_path / "whole")
    again = run_max_rate(settings, resume=True, bar=False)  # it has ended; result.json has null for NaN
    assert {name: None if value != value else value for name, value in again.items()} == result(tmp_path / "cut")


def test_a_study_has_a_trial_per_placement_and_seed(studied):
    folder, results = studied
    assert kind_of(folder) == Kind.MAX_LR
    found = set(zip(results["placement"], results["seed"], strict=True))
    assert found == {(placement, seed) for placement in ("post_ln", "pre_ln") for seed in (0, 1)}
    assert set(results["status"]) == {"finished"}
    assert results["max_learning_rate"].between(0, 20, inclusive="right").all()
    written = pd.read_csv(folder / "results.csv")
    assert written["max_learning_rate"].tolist() == pytest.approx(results["max_learning_rate"].tolist())
    assert written["stop_rule"].tolist() == results["stop_rule"].tolist()


def test_the_table_has_mean_and_spread_over_the_seeds(studied):
    _, results = studied
    for row in summarize(results):
        rates = results.loc[results["placement"] == row["placement"], "max_learning_rate"]
        assert row["mean"] == pytest.approx(rates.mean())
        assert row["std"] == pytest.approx(rates.std(ddof=1))
        assert (row["low"], row["high"], row["seeds"]) == (rates.min(), rates.max(), 2)
        assert f"{rates.mean():.3g} ± " in spread(row)
    means = [row["mean"] for row in summarize(results)]
    assert means == sorted(means, reverse=True)


def test_the_command_prints_the_table_and_resumes(studied, capsys, refused):
    folder, results = studied
    written = (folder / "results.csv").read_bytes()
    assert main(["max-lr", "--output", str(folder), "--resume"]) == 0
    out = capsys.readouterr().out
    assert "largest learning rate" in out
    assert "report.html" in out
    assert "Loss against learning rate" in (folder / "report.html").read_text(encoding="utf-8")
    assert all(spread(row) in out for row in summarize(results))
    assert (folder / "results.csv").read_bytes() == written
    stored = (folder / "study.yaml").read_bytes()
    (folder / "study.yaml").write_text("[]")
    assert "the records of the study of largest rates are incomplete" in refused("report", str(folder))
    (folder / "study.yaml").write_bytes(stored)


def test_other_thresholds_do_not_mix_with_finished_trials(studied):
    folder, _ = studied
    with pytest.raises(UserError, match=r"plateau_margin: 0.2 differs from the study's 0.05"):
        lamina.max_lr(output=str(folder), plateau_margin=0.2, resume=True, bar=False)


def test_a_rate_that_never_failed_has_no_spread_and_the_title_names_who_failed_first():
    row = {"seeds": 2, "std": 0.0, "ends": "", "open": 0}
    rows = [{**row, "placement": name, "mean": 0.15, "open": 2} for name in ("pre_ln", "keel")]
    rows += [{**row, "placement": "post_ln", "mean": 0.035, "std": 0.0035}]
    assert [spread(each) for each in rows] == ["≥ 0.15", "≥ 0.15", "0.035 ± 0.0035"]
    assert headline(rows) == "pre_ln and keel tolerate a learning rate of at least 0.15, post_ln only 0.035"
    assert headline(rows[:2]) == "pre_ln and keel tolerate a learning rate of at least 0.15"
