"""The docs as a site: every link leads somewhere, and no page asks anything of a server."""

import json
import logging
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import yaml
from scripts import loaded

from lamina.lab.papers.engine.verdicts import all_verdicts
from lamina.lab.papers.judging.findings import FAILED
from lamina.reports.diagnosis import FINDINGS

ROOT = Path(__file__).resolve().parent.parent
_OUTSIDE = r"""["']?(?:https?:)?//"""
FROM_A_SERVER = re.compile(rf"(?:src|srcset)={_OUTSIDE}|<link[^>]*href={_OUTSIDE}|url\({_OUTSIDE}")


@pytest.fixture(scope="module")
def hooks():
    pytest.importorskip("mkdocs")
    return loaded("docs/hooks.py")


@pytest.fixture(scope="module", params=["no notebook", pytest.param("as make docs does", marks=pytest.mark.slow)])
def site(hooks, tmp_path_factory, request):
    """The whole site, with no notebook run or, as `make check` does it, all of them."""
    folder = tmp_path_factory.mktemp("site")
    if request.param != "no notebook":
        words = [sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", str(folder)]
        environment = {**os.environ, "NO_MKDOCS_2_WARNING": "1"}
        done = subprocess.run(words, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=600)
        assert done.returncode == 0, done.stdout + done.stderr
        return folder
    from mkdocs.commands.build import build
    from mkdocs.config import load_config
    from nbclient import NotebookClient

    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("NO_MKDOCS_2_WARNING", "1")
        patch.setattr(NotebookClient, "execute", lambda client: client.nb)
        config = load_config(str(ROOT / "mkdocs.yml"), strict=True, site_dir=str(folder))
        config.plugins.on_startup(command="build", dirty=False)
        build(config)
    return folder


def test_the_check_builds_the_site_as_make_docs_does():
    """Not ``--quiet``: it raises the level of the log, and mkdocs counts no warning that is not logged."""
    builds = {}
    for target in ("check", "docs"):
        done = subprocess.run(["make", "-n", target], cwd=ROOT, capture_output=True, text=True)
        assert done.returncode == 0, done.stderr
        builds[target] = [line for line in done.stdout.splitlines() if "mkdocs build" in line]
    assert len(builds["docs"]) == 1
    assert builds["check"] == builds["docs"]
    assert builds["docs"][0].split("mkdocs build")[1].split() == ["--strict"]


def test_a_page_that_the_navigation_leaves_out_is_a_warning():
    config = yaml.safe_load((ROOT / "mkdocs.yml").read_text("utf-8"))
    assert config["validation"]["nav"]["omitted_files"] == "warn"
    named = set(re.findall(r"[\w/-]+\.md", yaml.safe_dump(config["nav"])))
    pages = {path.relative_to(ROOT / "docs").as_posix() for path in (ROOT / "docs").rglob("*.md")}
    patterns = f"{config['not_in_nav']} {config['exclude_docs']}".split()
    unlisted = tuple(pattern[1:].removesuffix("*.md") for pattern in patterns if pattern.startswith("/"))
    assert len(pages) > 15
    assert len(named) <= 30
    assert not {page for page in pages - named if not page.startswith(unlisted)}


def test_the_results_are_five_pages_beside_the_navigation_and_the_search(site):
    pages = {path.stem for path in (site / "results").glob("*.html")}
    assert pages == {"fusenorm", "keel", "mix-ln", "peri-ln", "ours"}
    found = re.findall(r'"location":\s*"([^"#]+)', (site / "search" / "search_index.js").read_text("utf-8"))
    assert "compare.html" in found
    assert not [page for page in found if page.startswith("results/")]
    keel = (site / "results" / "keel.html").read_text("utf-8")
    assert 'id="keel-maxlr"' in keel
    assert "<title>Keel: the paper&#39;s claims" in keel or "<title>Keel: the paper's claims" in keel
    assert "<title>Choose where the norms sit" in (site / "index.html").read_text("utf-8")
    assert "<title>My loss spiked - Lamina" in (site / "loss-spiked.html").read_text("utf-8")
    assert keel.count("<details") == (ROOT / "docs" / "results" / "keel.md").read_text("utf-8").count("<details") > 9
    assert "markdown=" not in keel, "what is folded is Markdown, too"
    assert keel.index("<details") < keel.index("Plotly.newPlot") < keel.rindex("</details>")


def test_links_and_code_of_the_dark_scheme_have_contrast():
    """Material's palette sets its colors at two attributes, and overrides a rule with one."""
    style = (ROOT / "docs" / "assets" / "site.css").read_text("utf-8")
    (colors,) = re.findall(
        r'^\[data-md-color-scheme="slate"\]\[data-md-color-primary\] \{([^}]*)\}', style, re.MULTILINE
    )

    def luminance(color):
        parts = [int(color[at : at + 2], 16) / 255 for at in (1, 3, 5)]
        parts = [part / 12.92 if part <= 0.03928 else ((part + 0.055) / 1.055) ** 2.4 for part in parts]
        return 0.2126 * parts[0] + 0.7152 * parts[1] + 0.0722 * parts[2]

    code = luminance("#272a35")  # the ground of code
    names = dict(re.findall(r"(--[\w-]+): (#\w{6})", colors))
    assert names.keys() >= {"--md-typeset-a-color", "--md-code-hl-constant-color"}
    assert {name: color for name, color in names.items() if (luminance(color) + 0.05) / (code + 0.05) < 4.5} == {}


def test_no_page_asks_anything_of_a_server(site):
    pages = sorted(site.rglob("*.html"))
    assert len(pages) > 15
    asked = {f"{page.name}: {found[0]}" for page in pages for found in FROM_A_SERVER.finditer(page.read_text("utf-8"))}
    assert not asked
    assert FROM_A_SERVER.search('<script src="https://unpkg.com/x">')


def test_the_reference_is_generated_from_the_program(site):
    import lamina
    from lamina.cli import COMMANDS

    pages = (site / "reference" / f"{name}.html" for name in ("python", "command-line", "settings"))
    python, commands, settings = (page.read_text("utf-8") for page in pages)
    for name in set(lamina.__all__) - {"__version__", "eval", "placements"}:
        assert f'id="lamina.{name}"' in python or f'id="lamina.api.{name}"' in python, name
    assert "lamina.eval, lamina.evaluate" in python
    assert all(f'id="lamina-{name}"' in commands for name in COMMANDS)
    assert "--num-layers" in commands
    assert "<code>num_layers</code>" in settings
    assert "Could not" not in python


@pytest.mark.parametrize(
    ("name", "printed"), [("compare", "<td>short"), ("probe", "<th>standard_error"), ("watch", "the page:")]
)
def test_a_notebook_is_a_file_and_a_page_with_what_it_prints(site, request, name, printed):
    page = (site / "notebooks" / f"{name}.html").read_text("utf-8")
    assert f'href="{name}.ipynb"' in page
    assert (site / "notebooks" / f"{name}.ipynb").is_file()
    if request.node.callspec.params["site"] != "no notebook":
        assert printed in page
        assert "Plotly.newPlot" in page
    assert "site-packages" not in page


def test_the_reference_has_every_command_and_function_with_its_guide():
    import lamina
    from lamina.cli import COMMANDS

    page = (ROOT / "docs" / "reference.md").read_text("utf-8")
    table = [line for line in page.splitlines() if line.startswith("| ")]
    assert {f"lamina {name}" for name in COMMANDS} == set(re.findall(r"`(lamina [\w-]+)`", "\n".join(table)))
    functions = set(re.findall(r"`(\w+)`", "\n".join(line.split("|")[3] for line in table)))
    assert functions == set(lamina.__all__) - {"__version__"}


def test_the_search_runs_from_files(site):
    assert (site / "search" / "search_index.js").read_text("utf-8").startswith("var __index")
    assert "iframe-worker.js" in (site / "compare.html").read_text("utf-8")
    assert "assets/keyboard.js" in (site / "compare.html").read_text("utf-8")  # wide tables scroll by keyboard


def test_the_readme_is_the_first_page_and_its_links_are_those_of_the_site(site, hooks):
    first = (site / "index.html").read_text("utf-8")
    assert 'href="own.html"' in first
    assert 'src="placements.svg"' in first
    assert "<code>" in first


def files_of(hooks, *paths):
    from mkdocs.structure.files import File, Files

    return Files([File(path, "docs", "site", use_directory_urls=False) for path in paths])


@pytest.mark.parametrize(
    ("source", "markdown", "expected"),
    [
        ("README.md", "[a](docs/compare.md#x)", "[a](compare.md#x)"),
        ("docs/results/mix.md", "[a](../compare.md)", "[a](../compare.md)"),
        ("docs/compare.md", "[a](notebooks/mine.ipynb)", "[a](notebooks/mine.md)"),
        ("docs/compare.md", "[a](../benchmarks/results/mine.json)", "[a](records/mine.json)"),
        ("docs/compare.md", "[a](../README.md)", "[a](index.md)"),
        ("docs/compare.md", "[`rules`](../pyproject.toml)", "`rules`"),
        ("README.md", "[a](LICENSE) [b](https://x.org/issues)", "a [b](https://x.org/issues)"),
        ("docs/compare.md", "`[a](nowhere.md)` [a](https://x.org) [a](#here)", None),
        ("docs/compare.md", "```\n[a](nowhere.md)\n```", None),
    ],
)
def test_links_of_the_repository_become_links_of_the_site(hooks, caplog, source, markdown, expected):
    files = files_of(hooks, "index.md", "compare.md", "results/mix.md", "notebooks/mine.md", "records/mine.json")
    assert hooks.site_links(markdown, source, files) == (expected or markdown)
    assert not caplog.records


def test_a_link_that_leads_nowhere_is_a_warning_which_the_strict_build_counts(hooks, caplog):
    with caplog.at_level(logging.WARNING, logger="mkdocs"):
        assert hooks.site_links("[a](compare.md)", "README.md", files_of(hooks, "compare.md")) == "a"
    assert "README.md: the link to compare.md leads nowhere" in caplog.text
    assert caplog.records[0].name.startswith("mkdocs.")


def test_every_verdict_of_the_records_is_on_its_page_and_in_what_diagnose_cites():
    words, verdicts = loaded("docs/verdict_words.py"), all_verdicts()
    cited, findings = json.loads(FINDINGS.read_text("utf-8")), words.findings(verdicts)
    assert cited.items() <= findings.items(), "run make results-docs"
    lines = [line for page in (ROOT / "docs" / "results").glob("*.md") for line in page.read_text("utf-8").splitlines()]
    found = 0
    for one in words.best(verdicts):
        said = [line for line in lines if f"[{one['claim']}](#{one['study']})" in line]
        assert not said or any(f"| {words.verdict(one)} |" in line for line in said), "run make results-docs"
        found += bool(said)
    assert found > 100
    recorded = re.compile(r"(\| |<br>)(holds|excluded|reversed|inconclusive|fails): ")
    assert not any(recorded.search(line) for line in lines), "the details have the verdicts' words of the pages, too"


def test_settings_by_chance_share_a_note():
    words, note = loaded("docs/verdict_words.py"), "{} is not above chance: score from {} % (95 %), chance 25.0 %"
    said = words.notes({"note": "; ".join(["a run failed", note.format("keel 1x", 14.0), note.format("pre_ln", 9.5)])})
    by_end = "score is not clearly above chance (25.0 %). The 95 % interval starts at"
    assert said == ["a run failed", f"{by_end}: keel 1x (14.0 %), pre_ln (9.5 %)"]


LINES = {
    "holds: a 1.2 vs b 1.5: difference -0.3 (95 % -0.5 to -0.1, 5 seeds, p < 0.001), claimed at most 0.01": (
        "loss<br>a: 1.2<br>b: 1.5",
        ("−0.3", "at most 0.01", "−0.5 to −0.1", "5", "&lt; 0.001", "supported"),
    ),
    "a vs b, runs that failed last: lower in 5 of 6 pairs, median difference -0.2 (6 seeds, p 0.4)": (
        "loss<br>a is lower than b in 5 of 6 pairs",
        ("−0.2 (median)", "", "", "6", "0.4", ""),
    ),
    "inconclusive: a: 5 of 8 seeds did not train (5 stuck, 3 short), share 95 % 24% to 91%": (
        "loss, a, seeds that did not train",
        ("5 of 8 (5 stuck, 3 short)", "", "24 % to 91 %", "", "", "cannot tell"),
    ),
    "a's path 0.33 against 1: off by at most 91 %": (
        "loss, a's path",
        ("0.33 (largest error 91 %)", "1", "", "", "", ""),
    ),
    "a and b: Kendall's tau 0.87 over 6 arms (95 % 0.20 to 1.00, 3 seeds, p 0.38), claimed at least 0.6": (
        "loss, a and b: Kendall's tau, over 6 settings",
        ("0.87", "at least 0.6", "0.20 to 1.00", "3", "0.38", ""),
    ),
    "blocks below the bound 56 of 56 (claimed: at least 95%)": (
        "loss, blocks below the bound",
        ("56 of 56", "at least 95 %", "", "", "", ""),
    ),
    "neither a nor b": ("loss, neither a nor b", ("", "", "", "", "", "")),
}


@pytest.mark.parametrize("line", LINES)
def test_a_line_of_a_record_becomes_the_cells_of_a_table(line):
    found = loaded("docs/comparisons.py").read(line, "loss")
    assert (found.what, found.cells) == LINES[line]


@pytest.mark.parametrize(
    ("recorded", "said"),
    [
        (
            "keel trains at [3.0, 12.0] rates by seed",
            "the setting keel trains at 3, 12 learning rates (one number per seed)",
        ),
        ("gain at 64.0 blocks 0.1 vs at 8.0 0.25", "gain at 64 blocks 0.1 vs at 8 0.25"),
        ("decided at scale gpu: too small", "only --scale gpu can decide this claim, because too small"),
        ("this claim needs scale gpu: too small", "only --scale gpu can decide this claim, because too small"),
    ],
)
def test_a_records_words_are_those_of_the_pages(recorded, said):
    assert loaded("docs/verdict_words.py").in_todays_words(recorded) == said


def test_a_claim_shows_the_comparison_that_has_its_margin():
    comparisons = loaded("docs/comparisons.py")
    lines = [f"a 1 vs {name}: difference {gap} (95 % -1 to 1, 5 seeds, p 1)" for name, gap in (("b", -0.2), ("c", 0.3))]
    claim = {"claim": "x", "study": "x", "verdict": "needs scale", "parts": lines, "note": "lost; lost more"}
    assert comparisons.deciding({**claim, "margin": 0.3}).what == "a 1 vs c"
    assert comparisons.deciding({**claim, "margin": None}).what == "a 1 vs b"
    line = 'without layer 0, the verdict is "opposite": a 2 vs b 1: difference 1 (95 % 0 to 2, 5 seeds, p 1)'
    part = {**claim, "claim": "x/y", "note": line}
    shown = comparisons.compared([claim, part]).splitlines()
    row = "| `x`<br>`x/y` | a 1 vs {} | {} | −1 to 1 | 5 | 1 |"
    whole = [row.format(*one) for one in (("b", "−0.2"), ("c", "0.3"))]
    assert shown[2:4] == [f"{row} cannot tell at this size |" for row in whole]
    assert shown[4] == "| `x/y` | without layer 0<br>a: 2<br>b: 1 | 1 | 0 to 2 | 5 | 1 | opposite |"
    notes = comparisons.noted([claim, {**claim, "claim": "x/y", "note": f"lost; {line}"}])
    assert notes.splitlines()[2:] == ["| `x`<br>`x/y` | Lost. |", "| `x` | Lost more. |"]


WHOLE = {
    "pre_ln's deepest third 1 vs its first third 2: difference 1": "pre_ln's last third of layers: 1<br>"
    "pre_ln's first third of layers: 2",
    "mix_ln's deepest third 1 vs pre_ln's 2: difference 1": "mix_ln's last third of layers: 1<br>"
    "pre_ln's last third of layers: 2",
    "gain after 50 steps 1 vs after 200 2: difference 1": "Pre-LN's loss minus Keel's loss after 50 steps: 1<br>"
    "Pre-LN's loss minus Keel's loss after 200 steps: 2",
    "x's growth 3 vs exactly 1: difference 2": "x's growth: 3<br>exact value: 1",
    "loss 2.5, 2.6 at 8, 16: falling with tau -0.5": "loss (falling, by Kendall's tau)<br>at 8: 2.5<br>at 16: 2.6",
}


@pytest.mark.parametrize("line", WHOLE)
def test_each_line_of_a_cell_names_the_value(line):
    assert loaded("docs/comparisons.py").read(line).what == WHOLE[line]


def test_a_claim_that_names_no_quantity_compares_the_quantity_of_its_words():
    comparisons, claim = loaded("docs/comparisons.py"), {"claim": "x", "study": "x", "verdict": "holds", "note": ""}
    line = "a 2 vs b 1: difference 1 (95 % 0 to 2, 5 seeds, p 1)"
    told = [("A has a lower loss than B", "loss<br>"), ("A's accuracy rises", "mean score over all tasks (%)<br>")]
    for says, start in [*told, ("A is deeper than B", "")]:
        assert comparisons.deciding({**claim, "says": says, "parts": [line]}).what == f"{start}a: 2<br>b: 1"
    parts = ["a: 5 of 8 seeds trained (5 finished), share 95 % 24% to 91%"]
    count = {**claim, "says": "A has a lower loss", "parts": parts}
    assert comparisons.deciding(count).what == "a, seeds that trained"


@pytest.mark.slow  # every table and figure is made again
def test_the_results_and_the_advice_are_those_of_the_records(tmp_path):
    advice = tmp_path / "advice" / "which-placement.md"
    advice.parent.mkdir()
    pages = loaded("docs/results.py").write(tmp_path, draw=False, advice=advice, cited=tmp_path / FINDINGS.name)
    assert (tmp_path / FINDINGS.name).read_text("utf-8") == FINDINGS.read_text("utf-8"), "run make results-docs"
    assert advice.read_text("utf-8") == (ROOT / "docs" / advice.name).read_text("utf-8"), "run make results-docs"
    committed = ROOT / "docs" / "results"
    assert {page.name for page in pages} == {page.name for page in committed.glob("*.md")}
    stale = [page.name for page in pages if page.read_text("utf-8") != (committed / page.name).read_text("utf-8")]
    assert not stale, "run make results-docs"
    pictures = {found for page in pages for found in re.findall(r"\((figures/[^)]+)\)", page.read_text("utf-8"))}
    assert all((committed / picture).is_file() for picture in pictures), "run make results-docs"


def test_a_verdict_on_a_difference_in_loss_has_five_pairs_of_seeds():
    fewer, judged = set(), 0
    for file in sorted((ROOT / "studies" / "records").glob("*-cpu/claims.json")):
        for claim in json.loads(file.read_text("utf-8")):
            pairs = [int(found) for p in claim["parts"] for found in re.findall(r": difference .* (\d+) seeds", p)]
            decided = claim["verdict"] not in ("inconclusive", "needs scale", "not run yet")
            judged += decided and bool(pairs)
            if decided and pairs and min(pairs) < 5:
                fewer.add(claim["claim"])
    assert judged > 30
    assert not fewer, "give the study more seeds"


def one(claim, verdict, **more):
    study = claim.split("/")[0]
    return {"claim": claim, "study": study, "scale": "cpu", "verdict": verdict, "says": f"{claim} says", **more}


@pytest.fixture
def advice(monkeypatch, tmp_path):
    """The page of one question whose only rule is about a claim, or several, with these verdicts."""
    module = loaded("docs/decisions.py")
    monkeypatch.setattr(module, "HERE", tmp_path)

    def page(*verdicts, claims=("a/b",), rule=(), **more):
        sentences = {"holds": "Take A.", "fails": "Leave A."}
        rule = {"claim": claims[0] if len(claims) == 1 else list(claims), **sentences, **dict(rule)}
        rules = yaml.safe_dump([{"if": "Speed", "else": "Measure it.", "rules": [rule]}])
        (tmp_path / "decisions.yaml").write_text(rules, encoding="utf-8")
        links = {claim.split("/")[0]: f"results/ours.md#{claim.split('/')[0]}" for claim in claims}
        known = [one(c, v, paper="+3", **more) for c, v in zip(claims, verdicts, strict=True)]
        return module.page(known, "Small.", links)

    return page


UNDECIDED = (
    ("inconclusive", ""),
    ("needs scale", ""),
    ("not run yet", "We have not tried it yet. "),
    ("explained by loss", "A lower loss of pretraining explains the effect. "),
)


def test_advice_is_on_the_page_only_with_its_verdict(advice):
    held = advice("holds")
    assert "## Speed\n\n- Take A. ([evidence](results/ours.md#a))\n" in held
    assert "Leave A." not in held
    for verdict in ("fails", "reversed", "excluded", "a part failed"):
        assert "- Leave A. ([evidence](results/ours.md#a))" in advice(verdict)
        assert "Take A." not in advice(verdict)
    for verdict, head in UNDECIDED:
        assert (
            f"## What we cannot tell yet\n\n- **Speed** Measure it. {head}([evidence](results/ours.md#a))\n"
            in advice(verdict)
        )
    for verdict, key in (("explained by loss", "explained"), ("inconclusive", "inconclusive")):
        assert "- Train B. ([evidence](results/ours.md#a))" in advice(verdict, rule={key: "Train B."})
        assert "Train B." not in advice("holds", rule={key: "Train B."})


def test_advice_that_rests_on_two_claims_needs_the_verdicts_of_both(advice):
    two = {"claims": ("a/b", "c"), "rule": {"reversed": "Take B."}}
    held, reversed_ = advice("holds", "holds", **two), advice("reversed", "reversed", **two)
    assert "Take A. (evidence: [a](results/ours.md#a), [c](results/ours.md#c))" in held
    assert "Take B. (evidence: [a](results/ours.md#a), [c](results/ours.md#c))" in reversed_
    for second in ("inconclusive", "reversed"):  # a sentence outlives neither verdict
        assert not any(text in advice("holds", second, **two) for text in ("Take A.", "Take B."))


def test_advice_is_about_claims_of_the_catalog():
    from lamina.lab.papers.engine.verdicts import all_verdicts

    claims = {verdict["claim"] for verdict in all_verdicts()}
    questions = yaml.safe_load((ROOT / "docs" / "decisions.yaml").read_text("utf-8"))
    rules = [rule for question in questions for rule in question["rules"]]
    named = [rule["claim"] if isinstance(rule["claim"], list) else [rule["claim"]] for rule in rules]
    assert {claim for each in named for claim in each} <= claims
    allowed = {"claim", "holds", "fails", "inconclusive", "explained", *map(str, FAILED)}
    assert all({"claim", "holds"} <= set(rule) <= allowed for rule in rules)
    assert all(set(question) - {"models"} == {"if", "else", "rules"} for question in questions)


def test_a_figure_with_its_data_beside_it_is_interactive(hooks, tmp_path, monkeypatch):
    monkeypatch.setattr(hooks, "DOCS", tmp_path)
    (tmp_path / "results").mkdir()
    (tmp_path / "results" / "a.json").write_text('{"data": [{"name": "</script>"}], "layout": {"height": 300}}')
    page = files_of(hooks, "results/x.md").get_file_from_path("results/x.md")
    drawn = hooks.with_figures("Text\n\n![A](a.svg)\n\n![B](b.svg)\n", page)
    assert '<script src="../assets/plotly.min.js"></script>' in drawn
    assert 'id="a" style="height:300px"' in drawn
    assert "\\u003c/script>" in drawn
    assert "[For a paper: SVG](a.svg)" in drawn
    assert "![B](b.svg)" in drawn
    assert hooks.with_figures("![B](b.svg)", page) == "![B](b.svg)"
