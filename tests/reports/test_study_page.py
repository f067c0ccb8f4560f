"""The page of a study with claims."""

import re

import pandas as pd
import pytest
from readable import readable
from synthetic_claims import write_claims_study

from lamina.commands import report as command
from lamina.errors import UserError
from lamina.papers.pages.matplotlib_figures import write_all
from lamina.reports import report


@pytest.fixture(scope="module")
def page(tmp_path_factory) -> str:
    folder = tmp_path_factory.mktemp("pages") / "study"
    tables = ("gradients", "angles", "metrics")
    return readable(report(write_claims_study(folder, tables=tables)).read_text("utf-8"))


def test_it_has_the_verdicts_the_figures_and_the_arms(page):
    assert re.findall(r'<section id="([^"]+)"', page) == ["verdicts", "figures", "arms", "settings"]
    assert 'class="chip finished">holds<' in page
    assert 'class="chip diverged">fails<' in page
    assert '-0.1 <span class="spread">[-0.12, -0.08]</span>' in page
    assert page.count('class="plotly-graph-div"') == 5
    assert "4 finished, 1 stuck" in page


def test_what_a_claim_says_is_escaped(page):
    assert "<b>does not</b>" not in page
    assert "&lt;b&gt;does not&lt;/b&gt; train | at all" in page
    assert "Perplexity of &lt;Mix-LN&gt;, Pre-LN &amp; others" in page


def test_a_study_that_trains_nothing_or_has_no_trial_yet_is_a_page(tmp_path):
    folder = write_claims_study(tmp_path / "study", tables=("gradients",))
    results = pd.read_csv(folder / "results.csv")
    results = results[results["tuned"]].drop(columns=["eval_loss", "learning_rate"])
    results.to_csv(folder / "results.csv", index=False)
    assert "before training" in readable(report(folder).read_text("utf-8"))
    (folder / "results.csv").write_text("key,placement,learning_rate,seed,tuned,status\n", "utf-8")
    assert "No trial has ended yet" in readable(report(folder).read_text("utf-8"))


def test_what_another_job_measured_stands_in_the_losss_place(tmp_path):
    folder = write_claims_study(tmp_path / "study")
    results = pd.read_csv(folder / "results.csv").drop(columns=["eval_loss"])
    results.assign(max_learning_rate=0.01, status="diverged").to_csv(folder / "results.csv", index=False)
    page = readable(report(folder).read_text("utf-8"))
    assert "largest learning rate" in page.lower()
    assert "0.0100" in page


def test_damaged_verdicts_are_refused_in_one_line(tmp_path):
    folder = write_claims_study(tmp_path / "study")
    (folder / "claims.json").write_text("[1", "utf-8")
    with pytest.raises(UserError, match=r"claims\.json'.*not readable"):
        report(folder)
    (folder / "claims.json").write_text("{}", "utf-8")
    with pytest.raises(UserError, match="no list of verdicts"):
        report(folder)


def test_report_writes_the_figures_for_a_paper(tmp_path, capsys):
    pytest.importorskip("matplotlib")
    folder = write_claims_study(tmp_path / "study")
    assert command.run([str(folder), "--figures"]) == 0
    names = {path.name for path in (folder / "figures").iterdir()}
    stems = ("mix-ppl-cpu-by-axis-placement", "mix-ppl-cpu-sweep")
    assert names == {f"{stem}.{form}" for stem in stems for form in ("svg", "pdf")}
    assert "mix-ppl-cpu-sweep.pdf" in capsys.readouterr().out
    (tmp_path / "other").mkdir()
    with pytest.raises(UserError, match="no study with claims"):
        write_all(tmp_path / "other")
