"""Folders whose names look like something else: a run in each is written, resumed and reported whole."""

from dataclasses import replace
from pathlib import Path

import pytest
from training.tiny_runs import cut_at, layers, records

from lamina.reports import report
from lamina.reports.records import Trial
from lamina.training import pretrain as pretraining

NAMES = ["lr:3e-3", "file:x", "http:a", "-a b%20c#d?e ünï"]


@pytest.mark.parametrize("name", [NAMES[0], *(pytest.param(name, marks=pytest.mark.slow) for name in NAMES[1:])])
def test_a_run_in_a_folder_of_any_name(tiny, trained, tmp_path, monkeypatch, caplog, name):
    monkeypatch.chdir(tmp_path)
    chosen = tiny(save_steps=2, steps=4, probe_every=2, probes="hidden_states", logging_steps=1)
    chosen = replace(chosen, output=name)  # relative, as on a command line
    with cut_at(4):
        pretraining.pretrain(chosen, bar=False)
    assert pretraining.pretrain(chosen, resume=True, bar=False)["steps"] == 4
    trained("plain", save_steps=2, steps=4, logging_steps=1)
    assert records(tmp_path / name) == records(tmp_path / "plain")
    assert layers(tmp_path / name).equals(layers(tmp_path / "plain"))
    page = report(Path(name)).read_text(encoding="utf-8")
    assert "No records by layer" not in page
    trial = Trial(name=name, placement="pre_ln", folder=Path(name))
    assert sorted(trial.layers.step.unique()) == [0, 1, 2, 3, 4]
    assert sorted(trial.probes["hidden_states"].step.unique()) == [0, 2, 4]
    assert "left out of the report" not in caplog.text
