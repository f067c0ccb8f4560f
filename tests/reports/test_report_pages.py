"""The pages of runs and studies, which kinds have one, their parts, and one that follows a run."""

import base64
import gzip
import itertools
import json
import math
import re
import shutil
from dataclasses import replace

import numpy as np
import pandas as pd
import pytest
from readable import readable
from synthetic_study import COURSES, write_study

from lamina import placements
from lamina.errors import UserError
from lamina.jobs import columns
from lamina.jobs.folder import is_locked, lock
from lamina.reports import figures, report, summarize
from lamina.reports import registry as following
from lamina.reports.figures import loss_curves
from lamina.reports.pages import diagnosis
from lamina.reports.plotting import Figure
from lamina.reports.records import Trial, read_study
from lamina.reports.screenshot import screenshot
from lamina.reports.style import Shown, colors, log_ticks, look, looks, polish, to_html


@pytest.fixture(scope="module")
def page(tmp_path_factory) -> str:
    """The default demo's shape: six placements and one that failed, 32 layers, 12 logged steps."""
    return report(write_study(tmp_path_factory.mktemp("demo"))).read_text(encoding="utf-8")


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
    later = ("magnitudes", "norm-gains", "experts", "placements", "settings")
    assert ids == ["ranking", "loss", "by-layer", "gradients", "variances", "updates", *later]
    assert "<title>fusenorm has the lowest eval loss of 7 placements</title>" in page
    assert "best at this learning rate" in page
    folded = re.sub(r"<details>(?:(?!<details>).)*?</details>", "", page, flags=re.DOTALL)
    while folded != (less := re.sub(r"<details>(?:(?!<details>).)*?</details>", "", folded, flags=re.DOTALL)):
        folded = less
    assert len(re.findall(r'class="plotly-graph-div"', folded)) == 3  # the loss, gradients and variances
    assert page.count("their dashes alternate") <= 1
    assert len(re.findall(r'class="plotly-graph-div"', page)) == 28
    body = readable(page)
    assert body.count("<svg") == 7
    assert "Keel (arXiv 2601.19895)" in body
    assert "optimizer.weight decay" in body


def test_what_all_placements_have_in_common_is_folded_below_the_ranking(page):
    table = page[page.index('<table class="ranking"') : page.index("</table>")]
    common = page[page.index("The same for all 7 placements") :].partition("</details>")[0]
    assert ">learning rate</th>" not in table
    assert "<dt>learning rate</dt><dd>0.003</dd>" in common
    assert ">status</th>" in table  # not all finished


def test_what_users_wrote_is_escaped(tmp_path):
    evil = "<script>alert(1)</script>"
    courses = {evil: (2.5, 0.1, 1.0, "finished"), "pre_ln": COURSES["pre_ln"]}
    folder = write_study(tmp_path / "study", courses=courses, num_layers=4, logged=3, backbone=evil)
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
    assert "Ranking by eval loss" in report(study).read_text(encoding="utf-8")


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
    courses = {"mine.py": (2.5, 0.1, 1.0, "finished")}
    folder = write_study(tmp_path / "study", courses=courses, num_layers=4, logged=3, failed=False)
    for plan in folder.glob("trials/*/plan.json"):
        plan.write_text(plan.read_text("utf-8").replace('"placement": "pre_ln"', '"placement": "mine"'), "utf-8")
    body = readable(report(folder).read_text(encoding="utf-8"))
    assert "├─ blocks 0-3" in body
    assert body.count("<svg") == 1


def test_a_single_run_has_a_page_of_its_own(study):
    run = study / "trials" / "keel-0.003-0"
    page = report(run).read_text(encoding="utf-8")
    assert page.count("<section") == 12
    assert "Learning rate and gradient norm" in page
    assert "<title>keel ended at an eval loss of " in page
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
    with pytest.raises(UserError, match="no browser is on PATH"):
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
    low, high = drawn.layout["yaxis"]["range"]
    ends = [trial.known("eval_loss")[0][-1] for trial in study.trials]
    assert all(low < end < high for end in ends)
    page = readable(report(folder).read_text(encoding="utf-8"))
    assert "ran too short to tell" in page
    assert 'class="chip short"' in page
    assert not re.search(r"nothing to rank|is stuck:|are stuck|has the lowest|even than", page)


def test_several_rates_give_u_curves_and_short_runs_are_their_points(tmp_path):
    folder = write_study(tmp_path / "study", courses=SHORT, rates=(1e-3, 3e-3), num_layers=4, logged=3, failed=False)
    study = read_study(folder)
    drawn = figures.u_curves(study.results, colors(SHORT), list(SHORT))
    low, high = drawn.layout["yaxis"]["range"]
    points = [y for trace in drawn.data for y in trace["y"] if y is not None]
    assert set(study.results.eval_loss) <= set(points)
    assert all(low < y < high for y in points)
    assert "at its best learning rate" in readable(report(folder).read_text(encoding="utf-8"))


@pytest.mark.parametrize("content", [{}, {"notes.txt": "mine"}])
def test_a_folder_that_no_job_wrote_is_refused(tmp_path, content):
    for name, text in content.items():
        (tmp_path / name).write_text(text)
    with pytest.raises(
        UserError, match=r"holds no job.*Give a folder of one of these kinds: claims, coord-check, dpo, evaluation, "
    ):
        report(tmp_path)


def test_a_transfer_killed_before_it_had_numbers_gets_the_page_of_its_trials(study):
    (study / "environment.json").write_text(json.dumps({"kind": "transfer"}))
    page = report(study).read_text(encoding="utf-8")
    assert "Ranking by eval loss" in page


def test_a_value_without_a_column_is_refused():
    measured = {column.name: 0 for column in columns.RESULT_COLUMNS if column.measured}
    assert columns.checked(measured) is measured
    for column in columns.RESULT_COLUMNS:  # also one that only some runs measure
        assert column.name in columns.checked({**measured, column.name: 0})
    with pytest.raises(KeyError, match=r"\['surprise'\] have no column"):
        columns.checked({**measured, "surprise": 1})


def test_every_aggregated_column_is_in_the_ranking():
    row = dict.fromkeys(columns.NUMBERS, 1.0) | dict.fromkeys(columns.TEXTS, "x") | {"status": "finished"}
    summary = summarize(pd.DataFrame([row]))
    assert {c.name for c in columns.RESULT_COLUMNS if c.aggregate} <= set(summary)
    assert {c.name for c in columns.RANKING} <= set(summary)


def trial(folder, seed, speed, flops=600.0):
    folder = folder / str(seed)
    folder.mkdir()
    line = {"loss": 3.0, "tokens_per_second": speed, "eval_loss": 2.0 + seed}
    lines = [{"step": s, "tokens": 10 * s, **line} for s in (1, 2)]
    (folder / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    (folder / "result.json").write_text(json.dumps({"tokens": 20, "flops": flops}))
    return Trial(name=str(seed), placement="keel", folder=folder)


def test_a_loss_can_be_drawn_against_flops_and_seconds_with_a_band_over_the_seeds(tmp_path):
    item = Shown(placement="keel", color="#e69f00", trials=(trial(tmp_path, 0, 5.0), trial(tmp_path, 1, 10.0)))
    figure = loss_curves([item])
    units = {unit["label"]: unit["factors"] for unit in figure.layout["meta"]["against"]}
    assert len(figure.data) == 4  # two runs, the band, the mean
    assert units == {"tokens": [1.0] * 4, "FLOPs": [30.0] * 4, "seconds": pytest.approx([0.2, 0.1, 0.15, 0.15])}
    band = next(trace for trace in figure.data if trace.get("fill") == "toself")
    assert np.allclose(band["y"], [2.5 + 0.5**0.5] * 2 + [2.5 - 0.5**0.5] * 2)


@pytest.mark.parametrize(
    ("speed", "flops", "units"), [(5.0, None, ["tokens", "seconds"]), (0.0, "many", []), (0.0, -1.0, [])]
)
def test_a_loss_is_drawn_against_what_its_run_has(tmp_path, speed, flops, units):
    item = Shown(placement="keel", color="#e69f00", trials=(trial(tmp_path, 0, speed, flops=flops),))
    assert [unit["label"] for unit in loss_curves([item]).layout["meta"]["against"]] == units


def test_a_page_holds_a_figures_data_packed_so_that_nothing_in_it_can_end_its_element():
    html = to_html(Figure().add_scatter(x=[1], y=[1], name="</script><b>&"))
    data = html.partition('<script type="text/plain">')[2].rpartition("</script>")[0]
    assert re.fullmatch(r"[A-Za-z0-9+/=]+", data)
    assert json.loads(gzip.decompress(base64.b64decode(data)))["data"][0]["name"] == "</script><b>&"
    assert html == to_html(Figure().add_scatter(x=[1], y=[1], name="</script><b>&")), "the same figure, the same page"


def drawn(html):
    data = html.partition('<script type="text/plain">')[2].partition("</script>")[0]
    return json.loads(gzip.decompress(base64.b64decode(data)))["data"]


def test_lines_of_the_same_values_take_turns_so_that_each_color_shows():
    figure, layers = Figure(), list(range(8))
    for color, factor in (("#111111", 1), ("#222222", 1.001), ("#333333", 50), ("#444444", 1)):
        figure.add_scatter(x=layers, y=[factor * 10**layer for layer in layers], mode="lines", line={"color": color})
    html = to_html(figure.update_yaxes(type="log"))
    assert [line["line"].get("dash") for line in drawn(html)] == [None, "18px,9px", None, "9px,18px"]
    assert "their dashes alternate" in html


def test_the_text_of_a_tick_is_the_value_of_the_tick():
    ticks, texts = log_ticks(-4.1, -3.1)
    assert dict(zip(texts, ticks, strict=True)) == pytest.approx(
        {"10<sup>-4</sup>": -4, **{f"{m}·10<sup>-4</sup>": math.log10(m) - 4 for m in (2, 3, 5, 7)}}
    )
    assert log_ticks(3.9, 4.8)[1] == ["10<sup>4</sup>", "2·10<sup>4</sup>", "3·10<sup>4</sup>", "5·10<sup>4</sup>"]
    assert log_ticks(-1.1, 0.2)[1] == ["0.1", "0.2", "0.5", "1"]


def test_the_drawn_eval_loss_is_the_rankings_of_the_seeds_that_finished(tmp_path):
    trials = [trial(tmp_path, seed, 5.0) for seed in (0, 1)]

    def drawn(*ends):
        ended = tuple(replace(one, status=end) for one, end in zip(trials, ends, strict=True))
        figure = loss_curves([Shown(placement="keel", color="#e69f00", trials=ended)])
        return next(list(trace["y"]) for trace in figure.data if trace["mode"] == "lines+markers")

    assert drawn("finished", "stuck") == [2.0, 2.0]
    assert drawn("stuck", "stuck") == [2.5, 2.5]


PAPERS = ("pre_ln", "post_ln", "fusenorm", "mix_ln", "keel", "peri_ln")
# Machado, Oliveira and Fernandes 2009, severity 1, on linear RGB.
BLINDNESS = {
    "none": np.eye(3),
    "protanopia": [[0.152286, 1.052583, -0.204868], [0.114503, 0.786281, 0.099216], [-0.003882, -0.048116, 1.051998]],
    "deuteranopia": [[0.367322, 0.860646, -0.227968], [0.280085, 0.672501, 0.047413], [-0.011820, 0.042940, 0.968881]],
    "tritanopia": [[1.255528, -0.076749, -0.178779], [-0.078411, 0.930809, 0.147602], [0.004733, 0.691367, 0.303900]],
}
XYZ = np.array([[0.4124, 0.3576, 0.1805], [0.2126, 0.7152, 0.0722], [0.0193, 0.1192, 0.9505]])


def lab(color: str, blindness: str) -> np.ndarray:
    """A color as someone with a color blindness sees it, in CIELAB."""
    rgb = np.array([int(color[i : i + 2], 16) / 255 for i in (1, 3, 5)])
    linear = np.where(rgb <= 0.04045, rgb / 12.92, ((rgb + 0.055) / 1.055) ** 2.4)
    x, y, z = XYZ @ np.clip(np.asarray(BLINDNESS[blindness]) @ linear, 0, 1) / [0.9505, 1, 1.089]
    fx, fy, fz = (np.cbrt(v) if v > 0.008856 else 7.787 * v + 16 / 116 for v in (x, y, z))
    return np.array([116 * fy - 16, 500 * (fx - fy), 200 * (fy - fz)])


@pytest.mark.parametrize("blindness", BLINDNESS)
def test_the_papers_own_are_told_apart_by_color_alone(blindness):
    seen = {name: lab(color, blindness) for name, color in colors(PAPERS).items()}
    near = {pair for pair in itertools.combinations(seen, 2) if np.linalg.norm(seen[pair[0]] - seen[pair[1]]) < 10}
    assert not near


def test_every_placement_has_a_color_and_a_form_of_its_own():
    all_looks = looks(placements.names())
    assert None not in {look(name) for name in placements.names()}
    assert len({chosen.color for chosen in all_looks.values()}) == len(all_looks)
    assert len({(chosen.dash, chosen.marker) for chosen in all_looks.values()}) == len(all_looks)


def test_a_placements_look_does_not_depend_on_the_others():
    assert looks(placements.names())["olmo2"] == looks(["mine.yaml", "olmo2"])["olmo2"]
    assert looks(["keel(alpha=3)"])["keel(alpha=3)"] == look("keel")


def test_those_of_the_users_own_get_a_look_that_nothing_else_on_the_page_has():
    chosen = looks([*PAPERS, "mine.yaml", "yours.yaml", "keel(alpha=3)", "deepnorm"])
    assert len(set(chosen.values())) == 10


@pytest.fixture
def folder(tmp_path):
    (tmp_path / "environment.json").write_text(json.dumps({"kind": "run", "versions": {"lamina": "0"}}))
    return tmp_path


def test_a_folder_of_no_job_is_refused(tmp_path):
    with pytest.raises(UserError, match="does not exist"):
        list(following.follow(tmp_path / "nowhere"))


def test_the_page_is_written_whenever_the_records_grow_until_the_run_ends(folder, monkeypatch):
    written, looks = [], []
    monkeypatch.setattr(following, "report", lambda place: written.append(place) or place / "report.html")
    held = lock(folder)
    held.__enter__()

    def wait(seconds):
        looks.append(seconds)
        if len(looks) in (1, 3):
            with (folder / "metrics.jsonl").open("a") as file:
                file.write("{}\n")
        if len(looks) == 4:
            (folder / "result.json").write_text("{}")
            held.__exit__(None, None, None)

    pages = list(following.follow(folder, every=2.0, wait=wait))
    # at the start, after each record, and with the result; not at the look without news
    assert len(written) == len(pages) == 4
    assert looks == [2.0] * 4


def test_too_few_records_are_waited_for_and_a_damaged_end_is_told(folder, monkeypatch):
    def report(place):
        raise UserError("too few records")

    monkeypatch.setattr(following, "report", report)

    def wait(seconds):
        (folder / "result.json").write_text("{}")

    pages = following.follow(folder, wait=wait)
    assert next(pages) == (None, "too few records")
    with pytest.raises(UserError, match="too few"):
        next(pages)


def test_a_lock_is_seen_and_not_taken(tmp_path):
    assert not is_locked(tmp_path)
    with lock(tmp_path):
        assert is_locked(tmp_path)
    assert not is_locked(tmp_path)


INTEGERS = "layer", "state", "later layer", "number of the sub-layer (-1: the embedding)", "distance between the layers"


@pytest.mark.parametrize("title", [*INTEGERS, "rank", "statement", "headroom in layer 1"])
def test_an_axis_of_layers_or_states_has_no_ticks_between_them(title):
    figure = Figure()
    figure.add_scatter(x=[0, 1, 2], y=[0.1, 0.2, 0.3])
    figure.update_xaxes(title=title)
    assert polish(figure, 300).axes("x")[0].get("dtick") == (1 if title in INTEGERS else None)


def test_the_first_anomaly_and_the_rise_do_not_differ_by_color_alone():
    marks = [(3, diagnosis._COLORS[1]), (4, diagnosis._COLORS[0])]
    drawn = diagnosis._lines([("loss", "#000", range(9), [1.0] * 9)], "loss", marks)
    assert [shape["line"]["dash"] for shape in drawn.layout["shapes"]] == ["dot", "dash"]
