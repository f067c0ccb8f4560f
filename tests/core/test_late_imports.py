import importlib
import sys

import pytest

from lamina.core.late_imports import when_imported


@pytest.fixture
def module(tmp_path, monkeypatch):
    (tmp_path / "imported_late.py").write_text("value = 1\n")
    monkeypatch.syspath_prepend(tmp_path)
    before = list(sys.meta_path)
    yield "imported_late"
    assert sys.meta_path == before, "nothing may stay behind"
    sys.modules.pop("imported_late", None)


@pytest.mark.parametrize("first", [True, False])
def test_it_is_done_once_in_either_order(module, first):
    seen = []
    if first:
        importlib.import_module(module)
    for _ in range(1 if first else 2):  # asked twice for the same, it is done once
        when_imported(module, seen.append)
    assert len(seen) == first
    imported = importlib.import_module(module)
    importlib.import_module(module)
    assert seen == [imported]
    assert seen[0].value == 1


def test_the_module_is_whole_when_it_is_seen(module):
    seen = []
    when_imported(module, lambda imported: seen.append(imported.value))
    importlib.import_module(module)
    assert seen == [1]
