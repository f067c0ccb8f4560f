"""The page of a study with claims, and docs/results."""

import json
import math
import re
import statistics
from pathlib import Path
from types import SimpleNamespace

import pandas as pd
import pytest
import yaml
from readable import readable
from scipy import stats
from scripts import loaded
from synthetic_claims import CLAIMS, write_claims_study

from lamina.commands import report as command
from lamina.errors import UserError
from lamina.lab.papers.pages.folder import StudyFolder
from lamina.lab.papers.pages.matplotlib_figures import write_all
from lamina.reports import report


@pytest.fixture(scope="module")
def page(tmp_path_factory) -> str:
    folder = tmp_path_factory.mktemp("pages") / "study"
    tables = ("gradients", "angles", "metrics")
    return readable(report(write_claims_study(folder, tables=tables)).read_text("utf-8"))


def test_it_has_the_verdicts_the_figures_and_the_arms(page):
    assert re.findall(r'<section id="([^"]+)"', page) == ["verdicts", "figures", "arms", "settings"]
    assert "<h1>Supported: Mix-LN&#39;s loss is below Pre-LN&#39;s</h1>" in page
    assert 'class="chip finished">supported<' in page
    assert 'class="chip diverged">not supported<' in page
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
    with pytest.raises(UserError, match="does not hold a list of verdicts"):
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


pages = loaded("docs/results_pages.py")
plain = pages.plain


def study(name: str, paper: str = "mix_ln", scales=("cpu",), needs: str = "", file: Path = Path()):
    about = {"name": name, "file": file, "paper": paper, "source": "Mix-LN <Table> 1", "title": f"Title of {name}"}
    none = {"tuning": None, "tuning_seeds": (), "settings": {}}
    of_a_scale = SimpleNamespace(needs=needs, axis_names=("placement",), seeds=(0, 1, 2), **none)
    return SimpleNamespace(**about, scales=dict.fromkeys(scales, of_a_scale))


def not_run(name: str, scale: str = "cpu") -> dict:
    return {
        "claim": name, "says": "It is so", "study": name, "scale": scale, "verdict": "not run yet", "ours": "",
        "paper": "1 < 2", "seeds": 0, "date": None, "note": f"lamina study run {name}",
    }  # fmt: skip


def write_results(root, **changed):
    """Write the pages; ``changed``: what the study's file says otherwise than when its trials were recorded."""
    header = yaml.safe_load((root / "records" / "mix-ppl-cpu" / "study.yaml").read_text("utf-8"))
    header["definition"]["scales"]["cpu"] |= changed
    (root / "mix-ppl.yaml").write_text(yaml.safe_dump(header["definition"]), encoding="utf-8")
    verdicts = json.loads((root / "records" / "mix-ppl-cpu" / "claims.json").read_text("utf-8"))
    verdicts += [not_run("keel-lr"), {**not_run("peri-lr"), "verdict": "needs scale", "note": "gpu: too small"}]
    studies = [
        study("mix-ppl", scales=("cpu", "gpu"), file=root / "mix-ppl.yaml"),
        study("keel-lr", "keel"),
        study("peri-lr", "peri_ln", needs="gpu: too small"),
    ]
    pages.write_results(verdicts, studies, root / "records", root / "docs")


@pytest.fixture(scope="module")
def results(tmp_path_factory):
    root = tmp_path_factory.mktemp("results")
    write_claims_study(root / "records" / "mix-ppl-cpu", tables=("gradients",))
    (root / "docs").mkdir()
    (root / "docs" / "old.md").write_text("of a study that is gone")
    write_results(root)
    return root


def page_of(results, name: str) -> str:
    return (results / "docs" / f"{name}.md").read_text("utf-8")


def test_texts_of_claims_show_as_they_are(results):
    text = page_of(results, "mix-ln")
    assert "Post-LN &lt;b&gt;does not&lt;/b&gt; train &#124; at all" in text
    assert "&#91;a&#93;(b) \\*c\\*" in text
    cells = [re.split(r" ?\| ?", line) for line in text.splitlines() if line.startswith("|")]
    assert {len(row) for row in cells} <= {4, 5, 6, 7, 8, 9}
    markdown = pytest.importorskip("markdown")
    for words in ("a_b *c* _d_ `e` [f](g) <h> & | i", "# x", "1. y", "- z", "2 * 3 < 4"):
        shown = markdown.markdown(plain(words), extensions=["tables", "sane_lists"])
        assert shown.count("<") == 2
        assert shown.startswith("<p>")


def test_every_figure_is_there_for_the_page_and_for_a_paper(results):
    files = {path.name for path in (results / "docs" / "figures").iterdir()}
    names = {path.removesuffix(".svg") for path in files if path.endswith(".svg")}
    assert len(names) == 3
    assert files == {f"{name}{ending}" for name in names for ending in (".svg", ".json")}
    figure = json.loads((results / "docs" / "figures" / "mix-ppl-cpu-sweep.json").read_text("utf-8"))
    line = next(trace for trace in figure["data"] if trace["name"] == "mix_ln")
    assert line["y"] == pytest.approx([2.4447, 2.41, 2.4447], abs=1e-4)


def test_the_pages_are_the_same_again_and_what_is_gone_goes(results):
    before = {path: path.read_bytes() for path in (results / "docs").rglob("*") if path.is_file()}
    assert results / "docs" / "old.md" not in before
    write_results(results)
    assert {path: path.read_bytes() for path in (results / "docs").rglob("*") if path.is_file()} == before
    assert len(CLAIMS) == 2


def test_a_record_of_an_earlier_design_says_so(results):
    earlier = "**These trials come from an earlier version of the study.** To train the current version, run `lamina"
    assert earlier not in page_of(results, "mix-ln")
    write_results(results, looks=3)
    assert earlier in page_of(results, "mix-ln")
    write_results(results)


def test_an_arms_tolerance_is_of_the_seeds_that_all_its_rates_have(tmp_path):
    losses = {"keel": {1e-3: 2.40, 2e-3: 2.31, 4e-3: 2.30, 8e-3: 2.32}, "pre_ln": {1e-3: 2.5, 2e-3: 2.6, 4e-3: None}}
    rows = [
        {"placement": arm, "learning_rate": rate, "seed": seed, "status": "finished" if loss else "diverged"}
        | {"eval_loss": loss, "tuned": False}
        for arm, sweep in losses.items()
        for rate, loss in sweep.items()
        for seed in (100, 101)
    ]
    rows.append({**rows[2], "seed": 7, "eval_loss": 9.0, "tuned": True})  # a test seed, at one rate alone
    header = {"definition": {"scales": {"cpu": {"axes": {"placement": {}, "learning_rate": {}, "seed": {}}}}}}
    folder = StudyFolder(folder=tmp_path, header=header, results=pd.DataFrame(rows), claims=[])
    # Keel: from a ninth of a factor below 2e-3 to the edge at 8e-3, whose 2.32 is exactly within 0.02.
    assert pages.tolerances(folder) == {"keel": "≥ 2.1", "pre_ln": "≥ 0.2"}


LOSSES = {"pre_ln": {1e-3: 2.7, 2e-3: 2.6, 4e-3: 2.7}, "keel": {1e-3: 2.6, 2e-3: 2.5, 4e-3: 2.45}}
NOISE = {"pre_ln": (-0.02, 0.0, 0.02), "keel": (-0.01, 0.02, -0.01)}


def sweep() -> StudyFolder:
    rows = []
    for placement in ("pre_ln", "keel", "post_ln"):
        for rate in (1e-3, 2e-3, 4e-3):
            for seed in range(3):
                loss = LOSSES.get(placement, {}).get(rate, 3.0) + NOISE.get(placement, (0, 0, 0))[seed]
                status = "stuck" if placement == "post_ln" and seed == 2 else "finished"
                rows.append({"placement": placement, "depth": 8, "learning_rate": rate, "seed": seed, "tuned": False})
                rows[-1] |= {"status": status, "eval_loss": loss}
    definition = {"study": "sweep", "scales": {"cpu": {"axes": dict.fromkeys(("placement", "learning_rate", "seed"))}}}
    header = {"definition": definition, "settings": {"scale": "cpu"}}
    return StudyFolder(folder=Path(), header=header, results=pd.DataFrame(rows), claims=[])


def test_the_table_has_optima_spreads_and_what_five_pairs_show():
    heading, table, sentence = pages.resolution(sweep())
    assert heading == "**Which differences these models can show**"
    keel, pre = table.splitlines()[2:]  # the lowest loss first
    differences = [(2.45 + k) - (2.6 + p) for k, p in zip(NOISE["keel"], NOISE["pre_ln"], strict=True)]
    std = statistics.stdev(differences)
    shown = (stats.t.ppf(0.975, 4) + stats.t.ppf(0.9, 4)) * std / math.sqrt(5)
    assert keel.startswith("| keel | 0.004 |")
    assert "(at the edge)" in keel
    assert f"| 2.450 ± {statistics.stdev(NOISE['keel']):.3f} | 3 | −0.150 | {std:.3f} | {shown:.3f} |" in keel
    assert pre.startswith("| pre_ln | 0.002 | 0.002 |")
    assert pre.endswith("| 3 | – | – | – |")
    assert "post_ln" in sentence
    assert f"{shown:.3f} nats" in sentence
