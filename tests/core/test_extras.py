"""What to install is named by where this installation came from: the bare name may be another's on an index."""

import json
import re
from importlib import metadata
from pathlib import Path

import pytest

from lamina.core import extras

ROOT = Path(__file__).parents[2]


def origin(monkeypatch, tmp_path, written):
    """Stand in for an installation whose direct_url.json is this."""

    class Installed:
        def read_text(self, name):
            assert name == "direct_url.json"
            return written

    monkeypatch.setattr(extras, "__file__", str(tmp_path / "site-packages" / "lamina" / "core" / "extras.py"))
    monkeypatch.setattr(metadata, "distribution", lambda name: Installed())


def test_in_a_checkout_the_extra_is_the_checkouts():
    assert extras.install("train") == f"pip install '{ROOT}[train]'"


@pytest.mark.parametrize(
    ("written", "expected"),
    [
        ({"url": "file:///my%20work/lamina", "dir_info": {"editable": True}}, "'/my work/lamina[train]'"),
        (
            {"url": "https://forge.org/l.git", "vcs_info": {"vcs": "git", "commit_id": "abc"}},
            "'lamina[train] @ git+https://forge.org/l.git@abc'",
        ),
        ({"url": "file:///tmp/l.whl", "archive_info": {}}, "'lamina[train] @ file:///tmp/l.whl'"),
        (None, "'lamina[train]'"),  # of an index: there the name is ours
    ],
)
def test_elsewhere_it_is_where_the_installation_came_from(monkeypatch, tmp_path, written, expected):
    origin(monkeypatch, tmp_path, written and json.dumps(written))
    assert extras.install("train") == f"pip install {expected}"


def test_nothing_says_to_install_a_name_that_is_on_no_index():
    rooms = ("lamina", "docs", "tests", "examples", "benchmarks", "tools", "recipes", "studies", ".github", ".ci")
    kinds = {".py", ".pyi", ".md", ".yaml", ".yml", ".toml", ".ipynb", ".sh", ".json", ""}
    files = [path for room in rooms for path in (ROOT / room).rglob("*") if path.suffix in kinds]
    files += [ROOT / name for name in ("README.md", "CONTRIBUTING.md", "SECURITY.md", "Makefile", "mkdocs.yml")]
    known = {Path(__file__)}
    there = r"(?!\S* @ )"  # an address says from where
    wrong = re.compile(rf"pip install (?:-\S+ )*[\"']?lamina{there}|[\"'`]lamina\[{there}")
    read = [path for path in files if path.is_file() and path not in known and path.stat().st_size < 2_000_000]
    texts = {path: path.read_bytes().decode(errors="replace") for path in read}
    assert len(texts) > 500
    assert not {str(path.relative_to(ROOT)) for path, text in texts.items() if wrong.search(text)}
    assert wrong.search("pip install lamina")
