"""What the README says is what the program does now."""

import importlib.util
import os
import re
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest
import yaml

import lamina
from lamina.placements import names

ROOT = Path(__file__).resolve().parent.parent
README = (ROOT / "README.md").read_text(encoding="utf-8")
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
HOME = PROJECT["urls"]["Repository"]
BLOCKS = re.findall(r"```python\n(.*?)```", README, re.DOTALL)


def test_the_generated_tables_are_up_to_date(monkeypatch):
    monkeypatch.syspath_prepend(ROOT / "docs")
    spec = importlib.util.spec_from_file_location("readme_tables", ROOT / "docs" / "tables.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    for page in (ROOT / name for name in module.PAGES):
        text = page.read_text(encoding="utf-8")
        assert module.filled(text) == text, "run python docs/tables.py"


def run_as_a_script(code: str, folder: Path) -> str:
    """What a file of the code prints, run as a reader would: in a folder of its own, without a main guard."""
    (folder / "mine.py").write_text(code, encoding="utf-8")
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    done = subprocess.run(
        [sys.executable, "mine.py"], cwd=folder, env=environment, capture_output=True, text=True, timeout=600
    )
    assert done.returncode == 0, done.stderr
    assert "Traceback" not in done.stderr
    return done.stdout


def smaller(code: str) -> str:
    """The same code for a model and a run of a size that takes a second."""
    code, count = re.subn(r"num_layers=24, steps=200", "num_layers=2, steps=4, sequence_length=16, eval_blocks=8", code)
    assert count == ("lamina.compare" in code)
    return code


@pytest.mark.parametrize("code", BLOCKS)
def test_a_python_example_runs_as_a_script(code, tmp_path):
    out = run_as_a_script(smaller(code), tmp_path)
    if "lamina.compare" in code:
        assert "failed" not in out
        assert (tmp_path / "runs" / "deep" / "report.html").is_file()


@pytest.mark.slow
@pytest.mark.parametrize("code", BLOCKS)
def test_a_python_example_runs_as_it_stands(code, tmp_path):
    assert "failed" not in run_as_a_script(code, tmp_path)


def test_every_link_leads_to_a_file_by_its_address_in_the_public_home():
    links = re.findall(r"\]\(([^)]+)\)", README)
    assert len(links) > 20
    for link in links:
        found = re.fullmatch(rf"{re.escape(HOME)}/(?:blob|raw)/main/([^#]+)(?:#.*)?", link)
        assert found, f"{link}: a package index shows the README, so a link has to be absolute"
        assert (ROOT / found[1]).is_file(), link


def test_the_public_home_is_one():
    """It is said in pyproject.toml, and repeated by these alone."""
    assert all(address.startswith(HOME) for address in PROJECT["urls"].values())
    assert set(re.findall(r"https://[\w.]*example[^\s)]*?/lamina", README)) == {HOME}


def test_the_number_of_placements_is_right():
    assert f"any of {len(names())} norm placements" in README


def test_the_files_of_a_public_forge_are_read():
    citation = yaml.safe_load((ROOT / "CITATION.cff").read_text("utf-8"))
    assert citation["version"] == lamina.__version__
    assert citation["repository-code"] == HOME
    forms = sorted((ROOT / ".github" / "ISSUE_TEMPLATE").glob("*.yml"))
    for form in (yaml.safe_load(path.read_text("utf-8")) for path in forms if path.stem != "config"):
        assert {"name", "description", "body"} <= set(form)
        assert all(part["type"] in ("textarea", "input") and part["attributes"]["label"] for part in form["body"])
    workflow = yaml.safe_load((ROOT / ".github" / "workflows" / "check.yml").read_text("utf-8"))
    assert {"run": ".ci/run"}.items() <= workflow["jobs"]["check"]["steps"][-1].items()


def test_the_version_is_one():
    assert f'version = "{lamina.__version__}"' in (ROOT / "pyproject.toml").read_text(encoding="utf-8")
