"""README, the recipes and docs/dev/architecture.md say what the program does now."""

import atexit
import functools
import json
import re
import shutil
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest
import yaml
from scripts import ROOT, loaded

import lamina
from lamina.commands.arguments import Parser
from lamina.lab.papers.dry_run import dry_run
from lamina.placements import names
from lamina.training.settings import PretrainSettings

README = (ROOT / "README.md").read_text(encoding="utf-8")

BLOCKS = re.findall(r"```python\n(.*?)```", README, re.DOTALL)


def test_the_generated_tables_are_up_to_date():
    module = loaded("docs/tables.py")
    assert len(module.PAGES) > 10
    for page in (ROOT / name for name in module.PAGES):
        text = page.read_text(encoding="utf-8")
        assert module.filled(text, page) == text, "run python docs/tables.py"


# What the README takes for granted: a model and its loop.
BEFORE = """
import torch
from transformers import LlamaConfig, LlamaForCausalLM

sizes = dict(hidden_size=16, intermediate_size=24, num_attention_heads=2, num_hidden_layers=2)
model = LlamaForCausalLM(LlamaConfig(vocab_size=61, **sizes))
optimizer = torch.optim.AdamW(model.parameters())
"""
AFTER = """
for ids in torch.randint(0, 61, (3, 4, 8)):
    model(input_ids=ids, labels=ids).loss.backward()
    optimizer.step()
    optimizer.zero_grad()
"""


@pytest.mark.parametrize("code", BLOCKS)
def test_a_python_example_runs_as_it_stands(code, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    ends, names = [], {}
    monkeypatch.setattr(atexit, "register", ends.append)
    watches = "lamina.watch" in code
    exec(f"{BEFORE}\n{code}\n{AFTER}" if watches else code, names)
    for end in ends:
        end()
    assert names["model"].generate is not None
    assert (tmp_path / "runs" / "mine" / "metrics.jsonl").is_file() == watches


def test_the_page_is_short_and_leaves_provenance_to_the_results():
    assert len(README.splitlines()) <= 130
    assert len(BLOCKS) == 2
    blocks = re.findall(r"```\w+\n(.*?)```", README, re.DOTALL)
    assert all(len(block.splitlines()) <= 5 for block in blocks)
    assert not re.search(r"95 %|\bseeds?\b|revision|registered|\b20\d\d-\d\d|\b[0-9a-f]{8,}\b", README)
    assert README.count("FuseNorm") == README.count("FuseNorm (SpanNorm)")
    for target in ("demo", "test"):
        assert re.search(rf"^make {target}\b", README, re.MULTILINE)


LINK = re.compile(r"(!?)\[[^\]]*\]\(([^)#]+)(#[^)]*)?\)")


@pytest.mark.parametrize("page", ["README.md", "CONTRIBUTING.md", "CHANGELOG.md", "SECURITY.md"])
def test_every_link_of_a_page_at_the_root_leads_to_a_file_of_the_repository(page):
    text = (ROOT / page).read_text("utf-8")
    links = LINK.findall(text)
    assert page != "README.md" or len(links) > 20
    for _, target, anchor in links:
        assert (ROOT / target).is_file(), f"{page}: {target}"
        headings = re.findall(r"^#+ (.+)$", (ROOT / target).read_text("utf-8"), re.MULTILINE) if anchor else []
        assert not anchor or anchor[1:] in [re.sub(r"[^\w -]", "", each.lower()).replace(" ", "-") for each in headings]
    assert ".example" not in text


def described(folder: Path) -> str:
    """The description that a package index would show."""
    words = [sys.executable, "setup.py", "egg_info", "-e", "."]
    done = subprocess.run(words, cwd=folder, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return (folder / "lamina.egg-info" / "PKG-INFO").read_text("utf-8").replace("\n        ", "\n")


@pytest.fixture
def checkout(tmp_path):
    """The files of this checkout that name its public home, or would."""
    for name in ("README.md", "LICENSE", "setup.py", "pyproject.toml", "CITATION.cff", "mkdocs.yml"):
        shutil.copy(ROOT / name, tmp_path)
    for folder in ("lamina", "studies"):
        (tmp_path / folder).mkdir()
    shutil.copytree(ROOT / "docs" / "notebooks", tmp_path / "docs" / "notebooks")
    return tmp_path


def test_the_package_shows_the_readme_with_links_to_the_public_home(checkout):
    assert README.strip() in described(checkout)  # no public home yet
    give = loaded("docs/home.py").give
    give("https://github.com/first/try", checkout)
    give("https://github.com/owner/lamina.git", checkout)
    text = described(checkout)
    assert len(LINK.findall(text)) == len(LINK.findall(README))
    for image, target, _ in LINK.findall(text):
        assert target.startswith(f"https://github.com/owner/lamina/{'raw' if image else 'blob'}/main/"), target
    project = tomllib.loads((checkout / "pyproject.toml").read_text("utf-8"))
    assert project["project"]["urls"]["Repository"] == "https://github.com/owner/lamina"
    assert yaml.safe_load((checkout / "CITATION.cff").read_text("utf-8"))["repository-code"].endswith("owner/lamina")
    assert "first/try" not in "".join(path.read_text("utf-8") for path in checkout.rglob("*.*") if path.is_file())
    with pytest.raises(SystemExit, match="OWNER/NAME"):
        give("https://example.org/lamina", checkout)


def test_notebooks_get_a_badge_and_install_lamina_in_colab(checkout):
    loaded("docs/home.py").give("https://github.com/owner/lamina", checkout)
    for path in sorted((ROOT / "docs" / "notebooks").glob("*.ipynb")):
        before = json.loads(path.read_text("utf-8"))["cells"]
        file = checkout / "docs" / "notebooks" / path.name
        title, badge, install, *rest = json.loads(file.read_text("utf-8"))["cells"]
        assert f"/github/owner/lamina/blob/main/docs/notebooks/{path.name})" in badge["source"][0]
        assert install["source"] == ['%pip install -q "lamina[train] @ git+https://github.com/owner/lamina"']
        assert [title, *rest] == before


def test_the_number_of_placements_is_right():
    assert f"any of {len(names())} norm placements" in README


def test_the_files_of_a_public_forge_are_read():
    citation = yaml.safe_load((ROOT / "CITATION.cff").read_text("utf-8"))
    assert citation["version"] == lamina.__version__
    forms = sorted((ROOT / ".github" / "ISSUE_TEMPLATE").glob("*.yml"))
    for form in (yaml.safe_load(path.read_text("utf-8")) for path in forms if path.stem != "config"):
        assert {"name", "description", "body"} <= set(form)
        assert all(part["type"] in ("textarea", "input") and part["attributes"]["label"] for part in form["body"])
    workflow = yaml.safe_load((ROOT / ".github" / "workflows" / "check.yml").read_text("utf-8"))
    assert {"run": ".ci/run"}.items() <= workflow["jobs"]["check"]["steps"][-1].items()


def test_the_version_is_one():
    assert f'version = "{lamina.__version__}"' in (ROOT / "pyproject.toml").read_text(encoding="utf-8")


RECIPES = sorted((ROOT / "recipes").glob("*.yaml"))
BASES = yaml.safe_load((ROOT / "studies" / "bases.yaml").read_text(encoding="utf-8"))


def settings_of(path: Path) -> PretrainSettings:
    """What the command line makes of the file."""
    parser = Parser("pretrain", "", "")
    parser.add_settings(PretrainSettings)
    parser.add_output_modes("")
    typed, _ = parser.settings_from(["--config", str(path)])
    return PretrainSettings(**typed)


def test_there_are_recipes():
    assert len(RECIPES) >= 3


@pytest.mark.parametrize("path", RECIPES, ids=lambda path: path.stem)
def test_a_recipe_is_a_whole_configuration(path):
    text = path.read_text(encoding="utf-8")
    assert text.startswith("# "), "a recipe says first whose it is"
    assert f"--config recipes/{path.name}" in text
    settings = settings_of(path)
    assert settings.placement
    cost = dry_run({path.stem: {path.stem: settings}}).iloc[0]
    if settings.corpus == "mnist":  # for two cores; no paper's
        assert cost["tokens"] < 1e7
        return
    assert settings.corpus.startswith("hf:")
    assert cost["parameters"] > (5e6 if settings.image_size else 5e7)
    assert cost["tokens"] > 1e9


@pytest.mark.parametrize("path", RECIPES, ids=lambda path: path.stem)
def test_a_recipe_trains_what_the_studies_train(path):
    """Where studies/bases.yaml has a base of the same name, the recipe is that base with a placement."""
    if path.stem not in BASES:
        pytest.skip("the studies have no such base")
    base = {name: value for name, value in BASES[path.stem].items() if name != "base"}
    ours = settings_of(path)
    assert {n: getattr(ours, n) for n in base} == {n: getattr(PretrainSettings(**base), n) for n in base}


PAGE = (ROOT / "docs" / "dev" / "architecture.md").read_text(encoding="utf-8")


@pytest.fixture(scope="module")
def script():
    """The one that draws the rooms, and reads each package once."""
    script = loaded("docs/rooms.py")
    script.imports = functools.cache(script.imports)
    return script


def test_the_picture_of_the_rooms_is_up_to_date(script):
    assert script.PICTURE.read_text(encoding="utf-8") == script.picture(), "run python docs/rooms.py"


def test_the_picture_shows_a_new_import(tmp_path):
    script = loaded("docs/rooms.py")
    for room, imported in (("data", "errors"), ("modeling", "errors"), ("errors", "")):
        (tmp_path / "lamina" / room).mkdir(parents=True)
        line = f"from lamina.{imported} import UserError\n" if imported else ""
        (tmp_path / "lamina" / room / "__init__.py").write_text(line)
    before = script.picture(tmp_path / "lamina")
    (tmp_path / "lamina" / "modeling" / "uses.py").write_text("def f():\n    from lamina import data\n")
    assert script.picture(tmp_path / "lamina") != before
    assert script.floors(script.imports(tmp_path / "lamina")) == [["errors"], ["data"], ["modeling"]]


def test_every_room_is_described(script):
    table = PAGE.split("## The rooms")[1].split("## Where")[0]
    described = set(re.findall(r"`(\w+)`", " ".join(line.split("|")[1] for line in table.splitlines() if "|" in line)))
    assert described == set(script.imports(ROOT / "lamina"))


def test_every_file_that_the_page_names_is_there():
    package = ROOT / "lamina"
    of_a_run = {"layers/", "model/"}
    named = set(re.findall(r"`([\w/]+(?:/|\.py))`", PAGE)) - of_a_run
    assert len(named) > 20
    for name in named:
        assert any(package.rglob(name.rstrip("/"))) or (ROOT / name).exists(), name
