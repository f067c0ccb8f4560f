"""What the README says is what the program does now."""

import importlib.util
import re
from pathlib import Path

import pytest

import lamina

ROOT = Path(__file__).resolve().parent.parent
README = (ROOT / "README.md").read_text(encoding="utf-8")


def test_the_generated_tables_are_up_to_date():
    spec = importlib.util.spec_from_file_location("readme_tables", ROOT / "docs" / "tables.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    for page in (ROOT / name for name in module.PAGES):
        text = page.read_text(encoding="utf-8")
        assert module.filled(text) == text, "run python docs/tables.py"


def test_the_first_python_example_runs():
    code = re.findall(r"```python\n(.*?)```", README, re.DOTALL)[0]
    names: dict = {}
    exec(code, names)
    assert names["loss"].isfinite()


@pytest.mark.parametrize("link", sorted(set(re.findall(r"\]\((?!http)([^)#]+)\)", README))))
def test_every_local_link_leads_somewhere(link):
    assert (ROOT / link).exists()


def test_the_version_is_one():
    assert f'version = "{lamina.__version__}"' in (ROOT / "pyproject.toml").read_text(encoding="utf-8")
