"""`lamina transfer`: the interval, the target's rates by role, the risk, and real runs through the workers."""

import json
import math

import pandas as pd
import pytest
from training.tiny_runs import flags

from lamina.cli import main
from lamina.errors import UserError
from lamina.reports import report
from lamina.reports.pages.transfer import headline, sentences
from lamina.reports.terminal import transferred
from lamina.studies.settings import TransferSettings
from lamina.studies.transfer import role_rates, summarize

SIZES = {"backbone": "llama-nano", "num_layers": 2, "sequence_length": 16, "batch_size": 2, "threads": 1}


def results(rows):
    """(width, rate, seed, status, loss)"""
    return pd.DataFrame(rows, columns=["hidden_size", "learning_rate", "seed", "status", "eval_loss"])


def of(rates, width=64):
    rows = []
    for rate, (*statuses, loss) in rates.items():
        rows += [(width, rate, seed, status, loss) for seed, status in enumerate(statuses)]
    return rows


CHOSEN = TransferSettings(backbone="llama-71m", proxy_width=64, hidden_size=256, best_margin=0.05)
FACTORS = {"embedding": 1.0, "hidden": 0.25, "readout": 0.25, "vector": 1.0}
FOUND = {1e-4: ("stuck", 5.0), 1e-3: ("finished", 3.04), 2e-3: ("finished", 3.0)}
FOUND |= {4e-3: ("finished", 3.2), 8e-3: ("diverged", math.nan), 1.6e-2: ("finished", 3.3)}


def test_the_interval_is_the_stretch_around_the_best_and_ends_at_the_first_that_fails():
    summary = summarize(results(of(FOUND)), CHOSEN, FACTORS)
    assert summary["stable"] == [1e-3, 4e-3]
    assert summary["first_failing_above"] == 8e-3
    assert summary["best"] == [1e-3, 2e-3]
    assert summary["learning_rate"] == 2e-3
    assert not summary["at_the_grids_edge"]


def test_the_targets_rates_are_the_factors_times_the_best_and_rate_times_decay_stays():
    roles = summarize(results(of(FOUND)), CHOSEN, FACTORS)["roles"]
    rates = {"embedding": 2e-3, "hidden": 5e-4, "readout": 5e-4, "vector": 2e-3}
    assert {kind: row["learning_rate"] for kind, row in roles.items()} == rates
    assert roles["hidden"]["learning_rate"] * roles["hidden"]["weight_decay"] == pytest.approx(2e-3 * 0.1)
    assert roles["vector"]["weight_decay"] == 0.0


def test_a_seed_that_fails_makes_the_rate_fail():
    rates = {1e-3: ("finished", "finished", 3.1), 2e-3: ("finished", "diverged", 3.0)}
    summary = summarize(results(of(rates)), CHOSEN, FACTORS)
    assert summary["learning_rate"] == 1e-3
    assert summary["stable"] == [1e-3, 1e-3]
    assert summary["at_the_grids_edge"]


def test_where_nothing_finishes_no_rate_is_named():
    summary = summarize(results(of({1e-3: ("diverged", math.nan), 2e-3: ("failed", math.nan)})), CHOSEN, FACTORS)
    assert (summary["learning_rate"], summary["stable"], summary["best"]) == (None, None, None)
    assert "No learning rate finished at width 64" in transferred(json.loads(json.dumps(summary)))


def test_a_wider_run_is_compared_with_the_proxy_at_the_same_rate():
    lost = ("diverged", math.nan)
    wide = of({2e-3: ("finished", 2.8), 4e-3: lost, 8e-3: lost, 5e-3: ("finished", 3)}, 256)
    summary = summarize(results(of(FOUND) + wide), CHOSEN, FACTORS)
    agrees = {rate["learning_rate"]: rate["agrees"] for rate in summary["verified"]["256"]}
    assert agrees == {2e-3: True, 4e-3: False, 8e-3: True, 5e-3: None}
    assert summary["learning_rate"] == 2e-3  # the wide ones do not choose


STABLE = (
    "At a learning rate of 0.001, training is stable at width 64. The highest learning rate in the list is stable, too."
)
FAILS = "From a learning rate of 0.001 to 0.004, training is stable at width 64. The run at 0.008 fails."
SAID = (
    ("no learning rate finished on the proxy", {1e-3: ("stuck", 5.0)}, [],
     ["No learning rate finished at width 64, so Lamina cannot convert a learning rate. Try smaller learning rates, or "
      "more steps."]),
    ("train at a learning rate of 0.002", FOUND, [],
     [FAILS, "A learning rate of 0.002 has the lowest loss at width 64, but the losses from 0.001 to 0.002 are too "
      "close to tell apart.",
      "Is 0.002 safe at width 256? It is RISK."]),
    ("train at a learning rate of 0.001", {1e-3: ("finished", 3)}, of({1e-3: ("diverged", 9), 2e-3: ("stuck", 5)}, 256),
     [STABLE, "A learning rate of 0.001 has the lowest loss at width 64.", "Is 0.001 safe at width 256? It is RISK.",
      "The best learning rate is at the edge of the list, so a learning rate beyond the list may be better. Add "
      "values to --learning-rates.", "At width 256, 0 of 1 learning rates have the same outcome as at width 64."]),
)  # fmt: skip


@pytest.mark.parametrize(("title", "narrow", "wide", "expected"), SAID)
def test_the_page_says_what_was_found_and_what_to_do(title, narrow, wide, expected):
    summary = summarize(results(of(narrow) + wide), CHOSEN, FACTORS)
    assert sentences(summary) == [text.replace("RISK", summary["risk"]) for text in expected]
    assert headline(summary) == f"{CHOSEN.placement}, width 256: {title}"


def test_the_factors_are_those_of_the_paper_at_the_targets_width():
    assert role_rates(CHOSEN) == FACTORS
    half = TransferSettings(proxy_width=64, hidden_size=256, width_scaling="standard-no-alignment", k_hidden=3.0)
    assert role_rates(half) == {"embedding": 1.0, "hidden": 1.5, "readout": 0.5, "vector": 1.0}


@pytest.fixture
def command(corpus, tmp_path):
    given = {**SIZES, "placement": "pre_ln", "hidden_size": 64, "proxy_width": 16, "steps": 30, "workers": 2}
    given |= {"batch_size": 8, "sequence_length": 32, "learning_rates": "3e-2,1e6"}
    return ["transfer", *flags(**given, corpus=corpus, output=tmp_path / "transfer")]


def test_real_runs_end_as_they_should(command, tmp_path, capsys, refused):
    folder = tmp_path / "transfer"
    assert main(command) == 0
    assert "at width 64" in capsys.readouterr().out
    table = pd.read_csv(folder / "results.csv").set_index(["hidden_size", "learning_rate"])
    assert table.status[16, 3e-2] == "finished"
    assert table.status[16, 1e6] in ("diverged", "stuck")
    summary = json.loads((folder / "transfer.json").read_text())
    assert summary["learning_rate"] == 3e-2
    assert summary["roles"]["hidden"]["learning_rate"] == pytest.approx(3e-2 / 4)
    assert "fails on the proxy" in summary["rates"][1]["risk"]
    assert "<figure>" in (folder / "report.html").read_text()
    (folder / "transfer.json").write_text(json.dumps({**summary, "verified": []}))
    with pytest.raises(UserError, match=r"transfer\.json.*altered"):
        report(folder)
    (folder / "seal.json").unlink()
    with pytest.raises(UserError, match="the records of the transfer are incomplete"):
        report(folder)
    assert "is not empty" in refused(*command)


@pytest.mark.slow
def test_rates_are_verified_at_another_width_and_what_had_ended_is_not_run_again(command, tmp_path, capsys, refused):
    folder = tmp_path / "transfer"
    assert main(command) == 0
    seconds = list(pd.read_csv(folder / "results.csv").seconds)
    again = ["transfer", "--output", str(folder), "--resume"]
    assert main([*again, "--verify-rates", "3e-2,1e6", "--verify-width", "32"]) == 0
    table = pd.read_csv(folder / "results.csv")
    assert list(table.seconds[:2]) == seconds
    assert set(table.hidden_size) == {16, 32}
    assert "At width 32, 2 of 2" in capsys.readouterr().out
    assert "steps: 20 differs" in refused(*again, "--steps", "20")
