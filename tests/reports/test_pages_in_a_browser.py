"""The page in an installed browser: its figures are drawn, in both schemes, and fit a phone."""

import csv
import io
import json
import re
import shutil
import subprocess
from html import unescape
from pathlib import Path

import pytest

import lamina
from lamina.reports import report
from lamina.reports.screenshot import BROWSERS

BROWSER = next((path for name in BROWSERS if (path := shutil.which(name))), None)
pytestmark = pytest.mark.skipif(BROWSER is None, reason="no browser on PATH")

DARK = ("--force-dark-mode", "--blink-settings=preferredColorScheme=0")
ASKING = """<script>addEventListener("message", () => 0); (function ask() {
  if (!document.documentElement.dataset.ready) return setTimeout(ask, 50);
  parent.postMessage(FOUND, "*");
})();</script>"""
FRAME = """<!doctype html><body style="margin:0"><iframe src="page.html" style="border:0;width:WIDTHpx;height:900px">
</iframe><pre id="found"></pre><script>
addEventListener("message", (event) => { document.getElementById("found").textContent = JSON.stringify(event.data); });
</script></body>"""


@pytest.fixture(scope="module")
def page(tmp_path_factory):
    """The page of a comparison of two placements, two seeds each."""
    folder = tmp_path_factory.mktemp("page")
    text = folder / "text.txt"
    text.write_text("the quick brown fox jumps over the lazy dog\n" * 300)
    sizes = {"num_layers": 3, "hidden_size": 16, "num_heads": 2, "sequence_length": 16, "batch_size": 4, "threads": 1}
    given = {"placements": "pre_ln,keel", "seeds": "0,1", "corpus": str(text), "steps": 6, "workers": 1, **sizes}
    lamina.compare(**given, eval_steps=3, logging_steps=1, compile="off", precision="fp32", output=str(folder / "out"))
    return (folder / "out" / "report.html").read_text(encoding="utf-8")


def asked(page, folder, found, width=1400, *flags):
    """What an expression gives in the page once its figures are drawn; the window is a frame of this width."""
    (folder / "page.html").write_text(page.replace("</body>", ASKING.replace("FOUND", found) + "</body>"))
    (folder / "frame.html").write_text(FRAME.replace("WIDTH", str(width)))
    command = [BROWSER, "--headless", "--no-sandbox", "--disable-gpu", f"--user-data-dir={folder}/profile", *flags]
    command += ["--window-size=1400,1000", "--virtual-time-budget=60000", "--dump-dom"]
    done = subprocess.run(
        [*command, (folder / "frame.html").as_uri()], capture_output=True, text=True, timeout=180, check=False
    )
    text = re.search(r'<pre id="found">(.+?)</pre>', done.stdout, re.DOTALL)
    assert text, done.stderr[-2000:]
    return json.loads(unescape(text[1]))


@pytest.mark.parametrize(("flags", "back"), [((), "rgb(255, 255, 255)"), (DARK, "rgb(20, 24, 29)")])
def test_the_figures_that_can_be_seen_are_drawn_in_the_scheme_of_the_system(page, tmp_path, flags, back):
    found = """[...document.querySelectorAll(".plotly-graph-div")].map((div) =>
      [!!div.offsetParent, div.querySelector(".main-svg")?.style.background || null])"""
    seen = asked(page, tmp_path, found, 1400, *flags)
    assert len(seen) > 4
    assert {background for shown, background in seen if shown} == {back}
    assert {background for shown, background in seen if not shown} <= {None}


def test_a_diagram_stays_on_white_in_the_dark(page, tmp_path):
    """Its lines and names are dark in each scheme."""
    found = """[...document.querySelectorAll(".drawing svg")].map((svg) => getComputedStyle(svg).backgroundColor)"""
    assert set(asked(page, tmp_path, found, 1400, *DARK)) == {"rgb(255, 255, 255)"}


def test_on_a_phone_nothing_is_wider_than_the_screen(page, tmp_path):
    found = """[document.documentElement.scrollWidth,
      [...document.querySelectorAll("main *")].filter((node) => !node.closest(".scroll, pre, svg, nav")
        && node.getBoundingClientRect().right > innerWidth + 1).map((node) => node.outerHTML.slice(0, 100))]"""
    width, beyond = asked(page, tmp_path, found, 400)
    assert width <= 400
    assert beyond == []


@pytest.mark.parametrize("width", [400, 700])
def test_on_a_phone_each_panel_and_each_name_of_a_figure_is_in_sight(page, tmp_path, width):
    found = """[...document.querySelectorAll(".plotly-graph-div")].filter((div) => div.offsetParent).map((div) => [
      div.closest(".scroll").scrollWidth - div.closest(".scroll").clientWidth,
      Object.keys(div._fullLayout._plots).length,
      Math.max(...[...div.querySelectorAll(".subplot, .legend, .annotation, .colorbar")]
        .map((part) => part.getBoundingClientRect().right)),
      Math.min(...[...div.querySelectorAll(".legend")].map((part) => part.getBoundingClientRect().top
        - div.getBoundingClientRect().top)),
      innerWidth])"""
    figures = asked(page, tmp_path, found, width)
    assert max(panels for _, panels, *_ in figures) >= 2
    for scrolled, _, right, top, inner in figures:
        assert scrolled <= 0
        assert right <= inner
        assert top is None or top >= 0


def test_the_table_of_a_studys_claims_fits_its_page(tmp_path):
    records = Path(__file__).resolve().parents[2] / "studies" / "records" / "peri-fp16-cpu"
    folder = shutil.copytree(records, tmp_path / "peri-fp16")
    (folder / "environment.json").write_text('{"kind": "claims"}')
    page = report(folder).read_text("utf-8")
    assert '<th scope="col">note</th>' in page
    found = """(({ scrollWidth, clientWidth }) =>
      [scrollWidth, clientWidth])(document.querySelector(".claims").parentElement)"""
    needed, shown = asked(page, tmp_path, found)
    assert needed <= shown


def test_a_figure_is_redrawn_against_flops_and_saved_as_csv(page, tmp_path):
    found = """(() => {
      const div = document.querySelector("#loss .plotly-graph-div");
      const before = div._fullData.map((trace) => Math.max(...trace.x));
      document.querySelector('#loss [aria-label="Draw against FLOPs"]').click();
      const saved = [];
      URL.createObjectURL = (blob) => { saved.push(blob.type); return "data:,"; };
      document.querySelector('#loss [aria-label$="as CSV"]').click();
      document.querySelector('#ranking [aria-label$="as LaTeX"]').click();
      return [before, saved, document.querySelectorAll("#loss [aria-pressed=true]").length];
    })()"""
    before, saved, pressed = asked(page, tmp_path, found)
    assert max(before) == 6 * 4 * 16
    assert saved == ["text/csv", "text/plain"]
    assert pressed == 1


def saved_rows(page, folder, *clicks):
    """The CSV that each click in the page saves, as dictionaries."""
    press = "".join(f"document.querySelectorAll('{place}')[{number}].click();" for place, number in clicks)
    found = f"""(() => {{
      const [saved, own] = [[], Blob];
      window.Blob = function (parts, kind) {{ saved.push(parts[0]); return new own(parts, kind); }};
      URL.createObjectURL = () => "data:,";
      {press}
      return saved;
    }})()"""
    return [list(csv.DictReader(io.StringIO(text))) for text in asked(page, folder, found)]


def test_the_csv_of_the_loss_is_in_the_unit_that_is_shown_with_its_spread(page, tmp_path):
    save, press = ('#loss [aria-label$="as CSV"]', 0), ('#loss [aria-label="Draw against FLOPs"]', 0)
    tokens, flops = saved_rows(page, tmp_path, save, press, save)
    assert list(tokens[0]) == ["panel", "line", "tokens", "loss (nats per byte)", "low", "high", "note"]
    lines = ("eval loss", "training loss, seed 0", "training loss, seed 1")
    assert {row["line"] for row in tokens} == {f"{name}, {line}" for name in ("pre_ln", "keel") for line in lines}
    assert {row["panel"] for row in tokens} == {""}
    evaluated = [row for row in tokens if row["line"] == "keel, eval loss"]
    assert all(float(row["low"]) <= float(row["loss (nats per byte)"]) <= float(row["high"]) for row in evaluated)
    assert max(float(row["FLOPs"]) for row in flops) > 1e3 * max(float(row["tokens"]) for row in tokens)


def test_the_csv_of_figures_by_layer_names_panels_and_holds_values_not_logarithms(page, tmp_path):
    save = '#gradients [aria-label$="as CSV"]'
    ends, cells = saved_rows(page, tmp_path, (save, 0), (save, 1))
    assert {row["panel"] for row in ends} == {"start: step 1", "end: step 6"}
    assert list(cells[0]) == ["panel", "line", "step", "layer", "gradient norm"]
    assert {row["panel"] for row in cells} == {"pre_ln", "keel"}
    lines = {(row["line"], row["panel"], row["layer"]): float(row["gradient norm"]) for row in ends}
    for row in cells:
        if (panel := {"1": "start: step 1", "6": "end: step 6"}.get(row["step"])) is not None:
            assert float(row["gradient norm"]) == pytest.approx(lines[row["panel"], panel, row["layer"]], rel=1e-5)
