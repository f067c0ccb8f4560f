"""Precision and compilation: what `auto` means by device and steps, and that a run keeps to it."""

import json
import resource
import sys
from functools import partial

import pytest
import torch
import yaml
from training.tiny_runs import SMALL, cut_back, settings

import lamina
from lamina.errors import UserError
from lamina.studies.compare import compare
from lamina.studies.settings import CompareSettings
from lamina.training.execution import compiling, devices
from lamina.training.execution.compiling import compile_blocks
from lamina.training.pretrain import pretrain
from lamina.training.resolve import resolve_run
from lamina.training.settings import PretrainSettings


def model():
    torch.manual_seed(0)
    return lamina.build("llama-nano", "keel", num_layers=2, hidden_size=16, num_heads=2, vocab_size=32)


def of(**changed):
    return PretrainSettings(**{**SMALL, **changed})


def rule(monkeypatch, device, missing=None, bf16=True, **changed):
    """Precision and compilation of settings on a device."""
    monkeypatch.setattr(devices, "device_of", lambda device_: device)
    monkeypatch.setattr(torch.cuda, "is_bf16_supported", lambda including_emulation: bf16)
    monkeypatch.setattr(devices, "missing_compiler", lambda device_: missing)
    decided = devices.decided(of(**changed))
    return decided.precision, decided.compile


@pytest.mark.parametrize(
    ("device", "given", "expected"),
    [
        ("cpu", {"steps": 10**6}, ("fp32", "off")),
        ("mps", {"steps": 10**6}, ("fp32", "off")),
        ("cuda", {"steps": 300}, ("bf16", "on")),
        ("cuda", {"steps": 299}, ("bf16", "off")),
        ("cuda", {"steps": 300, "missing": "triton is not installed"}, ("bf16", "off")),
        ("cuda", {"steps": 300, "bf16": False}, ("fp32", "off")),
        ("cuda", {"steps": 300, "precision": "fp32"}, ("fp32", "on")),
        ("cuda", {"steps": 300, "compile": "off"}, ("bf16", "off")),
        ("cpu", {"precision": "bf16", "compile": "on"}, ("bf16", "on")),
    ],
)
def test_device_and_steps_decide_what_is_not_asked_for(monkeypatch, device, given, expected):
    assert rule(monkeypatch, device, **given) == expected


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="glibc's")
def test_freed_memory_is_kept_for_the_next_step():
    compiling.keep_freed_memory()

    def faults():
        before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
        kept = [torch.ones(2**21) for _ in range(8)]  # 8 MiB each, 2,048 pages
        del kept
        return resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before

    faults()
    assert min(faults() for _ in range(3)) < 2048


def test_a_compiler_asked_for_must_be_there(monkeypatch):
    monkeypatch.setattr("lamina.training.resolve.missing_compiler", lambda device: "there is no C++ compiler")
    with pytest.raises(UserError, match=r"compile: 'on', but there is no C\+\+ compiler \(allowed here: auto, off\)"):
        resolve_run(of(compile="on"))
    resolve_run(of(compile="auto"))


@pytest.fixture(params=["aot_eager", pytest.param("inductor", marks=pytest.mark.slow)])
def _backend(request, monkeypatch):
    """All that Inductor needs but its C++ compiler, and with it."""
    monkeypatch.setattr(compiling, "compile_blocks", partial(compile_blocks, backend=request.param))


def losses(folder):
    lines = (folder / "metrics.jsonl").read_text().splitlines()
    return {(r["step"], k): r[k] for r in map(json.loads, lines) for k in ("loss", "eval_loss", "grad_norm") if k in r}


def test_a_run_records_and_keeps_what_was_decided(corpus, tmp_path, monkeypatch, capsys):
    """The choice is printed and stands in config.yaml, where a resumed run finds it, whatever the rule says there."""
    run = settings(corpus, tmp_path / "run", save_steps=2)
    pretrain(run)
    assert "fp32, eager (--precision, --compile)" in capsys.readouterr().err
    stored = yaml.safe_load((tmp_path / "run" / "config.yaml").read_text())
    assert (stored["precision"], stored["compile"]) == ("fp32", "off")
    (tmp_path / "run" / "result.json").unlink()
    monkeypatch.setattr(torch.cuda, "is_bf16_supported", lambda **_: True)
    pretrain(settings(corpus, tmp_path / "run", save_steps=2, precision="auto"), resume=True, bar=False)
    assert yaml.safe_load((tmp_path / "run" / "config.yaml").read_text()) == stored
    with pytest.raises(UserError, match="precision: 'bf16' differs from the run's 'fp32'"):
        pretrain(settings(corpus, tmp_path / "run", save_steps=2, precision="bf16"), resume=True, bar=False)


@pytest.mark.usefixtures("_backend")
def test_a_compiled_run_has_the_losses_of_an_uncompiled_one(corpus, tmp_path):
    """With evaluations among the steps."""
    for compile in ("off", "on"):
        pretrain(settings(corpus, tmp_path / compile, compile=compile, placement="keel"), bar=False)
    off, on = losses(tmp_path / "off"), losses(tmp_path / "on")
    assert off.keys() == on.keys()
    for key, value in off.items():
        assert on[key] == pytest.approx(value, rel=1e-4), key  # sums in another order, over 4 steps


@pytest.mark.usefixtures("_backend")
def test_a_compiled_run_resumes_exactly(corpus, tmp_path):
    whole = settings(corpus, tmp_path / "whole", compile="on", steps=6, save_steps=2, logging_steps=1)
    pretrain(whole, bar=False)
    cut = settings(corpus, tmp_path / "cut", compile="on", steps=6, save_steps=2, logging_steps=1)
    pretrain(cut, bar=False)
    cut_back(tmp_path / "cut", 4)
    pretrain(cut, resume=True, bar=False)
    assert losses(tmp_path / "cut") == losses(tmp_path / "whole")


def test_a_study_decides_once_for_all_its_trials(corpus, tmp_path):
    study = CompareSettings(
        **{**SMALL, "corpus": str(corpus), "output": str(tmp_path / "study"), "placements": "pre_ln,keel", "workers": 2}
    )
    for resume in (False, True):
        compare(study, resume=resume, bar=False)
        for path in (tmp_path / "study" / "study.yaml", *(tmp_path / "study" / "trials").glob("*/config.yaml")):
            stored = yaml.safe_load(path.read_text())
            stored = stored.get("settings", stored)
            assert (stored["precision"], stored["compile"]) == ("fp32", "off")
