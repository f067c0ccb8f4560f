import re
import shutil

import pandas as pd
import pytest
from readable import readable
from synthetic_study import COURSES, write_study
from training.tiny_runs import SMALL, write_corpus

import lamina
from lamina.errors import UserError
from lamina.reports import figures, report
from lamina.reports.records import read_study
from lamina.reports.screenshot import screenshot
from lamina.reports.style import Shown, colors


@pytest.fixture(scope="module")
def page(tmp_path_factory) -> str:
    """The default demo's shape: six placements and one that failed, 32 layers, 12 logged steps."""
    return report(write_study(tmp_path_factory.mktemp("demo"))).read_text(encoding="utf-8")


def test_the_page_is_written_in_place_and_leaves_no_other_file(study):
    before = {p.name for p in study.iterdir()}
    assert report(study) == study / "report.html"
    assert {p.name for p in study.iterdir()} - before == {"report.html"}


def test_the_page_asks_nothing_of_any_server_and_holds_plotly_once(page):
    body = readable(page)
    assert not re.findall(r"""(?:src|href)=["']?(?!["']?(?:#|data:))\S+""", body)
    assert "default-src 'none'" in body
    assert page.count('id="plotly"') == 1
    assert len(page) < 1_500_000


def test_the_ranking_goes_from_best_to_failed(page):
    table = page[page.index('<table class="ranking"') : page.index("</table>")]
    names = re.findall(r'class="name"><span[^>]*></span>([^<]+)<', table)
    assert names == ["fusenorm", "keel", "peri_ln", "pre_ln", "post_ln", "mix_ln(alpha=0.25)", "deepnorm"]


def test_all_sections_are_there_and_one_rate_is_called_confounded(page):
    ids = re.findall(r'<section id="([^"]+)"', page)
    assert ids == [
        *("what-happened", "ranking", "loss", "gradients", "variances", "updates"),
        *("magnitudes", "norm-gains", "experts", "placements", "settings"),
    ]
    assert "confounded" in page
    assert len(re.findall(r'class="plotly-graph-div"', page)) == 28
    body = readable(page)
    assert body.count("<svg") == 7
    assert "Keel (arXiv 2601.19895)" in body
    assert "optimizer.weight decay" in body


def test_what_users_wrote_is_escaped(tmp_path):
    evil = "<script>alert(1)</script>"
    folder = write_study(
        tmp_path / "study",
        courses={evil: (2.5, 0.1, 1.0, "finished"), "pre_ln": COURSES["pre_ln"]},
        num_layers=4,
        logged=3,
        backbone=evil,
    )
    page = readable(report(folder).read_text(encoding="utf-8"))
    assert "<script>alert" not in page
    assert "</script>alert" not in page
    assert "<b>out of memory" not in page
    assert "&lt;b&gt;out of memory&lt;/b&gt; &amp; no more" in page
    assert "&lt;script&gt;alert(1)" in page


def test_missing_and_broken_trial_files_do_not_break_the_page(study):
    trials = sorted((study / "trials").iterdir())
    shutil.rmtree(trials[0])
    shutil.rmtree(trials[1] / "layers")
    (trials[2] / "layers" / "part-00000.parquet").write_bytes(b"no parquet")
    (trials[3] / "metrics.jsonl").write_text('{"step": 1, "tokens": 10, "loss": 5}\n{"step": 2, "tok', "utf-8")
    (trials[3] / "plan.json").write_text("[", encoding="utf-8")
    rows = pd.read_parquet(part := trials[3] / "layers" / "part-00000.parquet")
    rows.assign(layer="first").to_parquet(part)
    rows.assign(role=None).to_parquet(part.with_name("part-00001.parquet"))
    assert "What happened" in report(study).read_text(encoding="utf-8")


def rename_trials(study):
    results = pd.read_csv(study / "results.csv")
    results.assign(trial="../../elsewhere").to_csv(study / "results.csv", index=False)


@pytest.mark.parametrize("change", [lambda study: shutil.rmtree(study / "trials"), rename_trials])
def test_a_study_with_results_alone_or_trials_that_lead_out_of_it_is_a_page(study, change):
    change(study)
    page = report(study).read_text(encoding="utf-8")
    assert "This folder has no records by layer" in page
    assert "fusenorm" in page


def test_a_placement_of_the_users_own_shows_its_plan_and_is_not_loaded(tmp_path):
    folder = write_study(
        tmp_path / "study", courses={"mine.py": (2.5, 0.1, 1.0, "finished")}, num_layers=4, logged=3, failed=False
    )
    for plan in folder.glob("trials/*/plan.json"):
        plan.write_text(plan.read_text("utf-8").replace('"placement": "pre_ln"', '"placement": "mine"'), "utf-8")
    body = readable(report(folder).read_text(encoding="utf-8"))
    assert "├─ blocks 1-4" in body
    assert body.count("<svg") == 1


def test_a_single_run_has_a_page_of_its_own(study):
    run = study / "trials" / "keel-0.003-0"
    page = report(run).read_text(encoding="utf-8")
    assert page.count("<section") == 12
    assert "Learning rate and gradient norm" in page
    assert "A run with keel" in page
    assert "2.13.0" in page
    assert "diverged" in report(study / "trials" / "mix_ln-0.003-0").read_text(encoding="utf-8")


def test_a_run_without_any_result_yet_is_a_page(tmp_path):
    (tmp_path / "environment.json").write_text('{"kind": "run"}', encoding="utf-8")
    (tmp_path / "config.yaml").write_text("placement: keel\n", encoding="utf-8")
    assert "unfinished" in report(tmp_path).read_text(encoding="utf-8")


def test_a_study_without_results_is_refused(tmp_path):
    (tmp_path / "environment.json").write_text('{"kind": "study"}', encoding="utf-8")
    with pytest.raises(UserError, match=r"no results\.csv"):
        report(tmp_path)


def test_a_screenshot_without_a_browser_is_refused(tmp_path, monkeypatch):
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(UserError, match="no browser on PATH"):
        screenshot(tmp_path / "page.html", tmp_path / "page.png")


@pytest.mark.skipif(not shutil.which("chromium"), reason="no chromium on this machine")
def test_a_screenshot_is_a_picture(tmp_path):
    (tmp_path / "page.html").write_text("<!doctype html><h1>Lamina</h1>", encoding="utf-8")
    target = screenshot(tmp_path / "page.html", tmp_path / "page.png", width=400, height=300)
    assert target.read_bytes().startswith(b"\x89PNG")


SHORT = {"keel": (3.9, 0.2, 1.0, "short"), "pre_ln": (4.2, -0.3, 3.0, "short"), "post_ln": (4.4, 1.0, 1.0, "short")}


def test_a_study_of_short_runs_shows_where_each_one_ended(tmp_path):
    folder = write_study(tmp_path / "study", courses=SHORT, num_layers=4, steps=20, logged=3, failed=False)
    study = read_study(folder)
    shown = [Shown(placement=t.placement, color="#0072b2", trials=(t,), status_text="short") for t in study.trials]
    drawn = figures.loss_curves(shown, known={"unigram entropy": 3.24})
    low, high = drawn.layout.yaxis.range
    ends = [trial.metrics["eval_loss"].dropna().iloc[-1] for trial in study.trials]
    assert all(low < end < high for end in ends)
    page = readable(report(folder).read_text(encoding="utf-8"))
    assert "ran too short to tell" in page
    assert 'class="chip short"' in page
    assert not re.search(r"nothing to rank|is stuck:|are stuck|has the lowest|even than", page)


def test_several_rates_give_u_curves_and_short_runs_are_their_points(tmp_path):
    folder = write_study(tmp_path / "study", courses=SHORT, rates=(1e-3, 3e-3), num_layers=4, logged=3, failed=False)
    study = read_study(folder)
    drawn = figures.u_curves(study.results, colors(SHORT), list(SHORT))
    low, high = drawn.layout.yaxis.range
    points = [y for trace in drawn.data for y in trace.y if y is not None]
    assert set(study.results.eval_loss) <= set(points)
    assert all(low < y < high for y in points)
    assert "at its best learning rate" in readable(report(folder).read_text(encoding="utf-8"))


def test_a_run_ends_with_its_page(tmp_path):
    corpus = write_corpus(tmp_path / "words.txt")
    lamina.pretrain(**{**SMALL, "corpus": str(corpus), "output": str(tmp_path / "run")}, bar=False)
    assert "<figure>" in (tmp_path / "run" / "report.html").read_text(encoding="utf-8")
