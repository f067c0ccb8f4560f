"""Precision and compilation: what a trial decides, that it disturbs nothing, and that a run keeps to it."""

import json
import resource
import sys
from functools import partial

import pytest
import torch
import yaml
from training.tiny_runs import SMALL, settings

import lamina
from lamina.errors import UserError
from lamina.modeling.linear_cross_entropy import LinearLoss
from lamina.studies.compare import compare
from lamina.studies.settings import CompareSettings
from lamina.training.execution import speed
from lamina.training.execution.compiling import compile_blocks, compiled
from lamina.training.pretrain import pretrain
from lamina.training.resolve import resolve_run
from lamina.training.settings import PretrainSettings

CPU = torch.device("cpu")


def model():
    torch.manual_seed(0)
    return lamina.build("llama-nano", "keel", num_layers=2, hidden_size=16, num_heads=2, vocab_size=32)


def of(**changed):
    return PretrainSettings(**{**SMALL, **changed})


def never():
    raise AssertionError("a trial was made")


@pytest.fixture
def timed(monkeypatch):
    """Trials that take what this table says: (first step, each step after it)."""
    table = {}

    def time(model, settings, precision, compile, device, limit):
        tried.append((precision, compile))
        first, step = table[precision, compile]
        return speed.Timed(precision, compile, first, step)

    tried = []
    monkeypatch.setattr(speed, "_time", time)
    monkeypatch.setattr(speed, "half_precision_pays", lambda device: True)
    monkeypatch.setattr(speed, "missing_compiler", lambda device: None)
    return table, tried


def test_what_is_asked_for_is_not_tried():
    choice = speed.choose(of(precision="bf16", compile="on", steps=10**6), never, CPU)
    assert (choice.precision, choice.compile) == ("bf16", "on")


def test_a_short_run_is_not_tried_and_stays_plain():
    choice = speed.choose(of(steps=speed.SHORT_RUN - 1), never, CPU)
    assert (choice.precision, choice.compile) == ("fp32", "off")
    assert "too few" in choice.why


def test_a_run_of_seconds_is_not_worth_a_compiler(timed):
    table, tried = timed
    table["fp32", "off"] = (0.1, 0.1)
    choice = speed.choose(of(steps=1000), model, CPU)
    assert (choice.precision, choice.compile, tried) == ("fp32", "off", [("fp32", "off")])
    assert "100 s" in choice.why


def test_the_fastest_for_all_steps_wins(timed):
    """A compiler's first step counts: 60 s + 1000 * 0.5 s are less than 1000 * 1 s, but not than 1000 * 0.51 s."""
    table, tried = timed
    table |= {("fp32", "off"): (1, 1), ("bf16", "off"): (1, 0.6), ("fp32", "on"): (60, 0.7), ("bf16", "on"): (60, 0.5)}
    choice = speed.choose(of(steps=1000), model, CPU)
    assert (choice.precision, choice.compile) == ("bf16", "on")
    assert len(tried) == 4
    assert all(part in choice.why for part in ("fp32, eager 1 s", "bf16, compiled 0.5 s", "60 s"))
    table["bf16", "off"] = (1, 0.51)
    assert speed.choose(of(steps=1000), model, CPU).compile == "off"


def test_only_what_is_open_is_tried(timed):
    table, tried = timed
    table |= {("bf16", "off"): (1, 1), ("bf16", "on"): (2, 0.7)}
    choice = speed.choose(of(steps=1000, precision="bf16"), model, CPU)
    assert (choice.precision, choice.compile) == ("bf16", "on")
    assert tried == [("bf16", "off"), ("bf16", "on")]


def test_half_precision_is_left_out_where_its_products_are_slower(timed, monkeypatch):
    table, tried = timed
    monkeypatch.setattr(speed, "half_precision_pays", lambda device: False)
    table |= {("fp32", "off"): (1, 1), ("fp32", "on"): (60, 0.5)}
    choice = speed.choose(of(steps=1000), model, CPU)
    assert (choice.precision, choice.compile) == ("fp32", "on")
    assert "bf16 left out" in choice.why
    assert ("bf16", "off") not in tried


def test_without_a_compiler_it_says_so(timed, monkeypatch):
    table, _ = timed
    monkeypatch.setattr(speed, "missing_compiler", lambda device: "there is no C++ compiler")
    table |= {("fp32", "off"): (1, 1), ("bf16", "off"): (1, 0.5)}
    choice = speed.choose(of(steps=1000), model, CPU)
    assert (choice.precision, choice.compile) == ("bf16", "off")
    assert "there is no C++ compiler" in choice.why


def test_a_candidate_that_fails_is_named_and_left(timed, monkeypatch, caplog):
    table, _ = timed
    table |= {("fp32", "off"): (1, 1), ("bf16", "off"): (1, 1.2)}

    def fails(*args, **kwargs):
        if args[3] == "on":
            raise RuntimeError("ld: cannot find -lm\nand more")
        return speed.Timed(args[2], args[3], *table[args[2], args[3]])

    monkeypatch.setattr(speed, "_time", fails)
    choice = speed.choose(of(steps=1000), model, CPU)
    assert (choice.precision, choice.compile) == ("fp32", "off")
    assert "ld: cannot find -lm" in choice.why
    assert "and more" not in choice.why


def test_a_trial_changes_neither_weights_nor_random_state(monkeypatch):
    """With dropout, which draws; and with checkpointing, which draws again."""
    monkeypatch.setattr(speed, "TRIAL_STEPS", 3)
    tried = model().eval()
    tried.config.get_text_config().attention_dropout = 0.1
    for block in tried.model.layers:
        block.attention.dropout = torch.nn.Dropout(0.5)
    before = {name: value.clone() for name, value in tried.state_dict().items()}
    state = torch.random.get_rng_state()
    found = speed._time(tried, of(gradient_checkpointing=True), "bf16", "off", CPU, limit=None)
    assert found.step > 0
    assert torch.equal(torch.random.get_rng_state(), state)
    assert all(torch.equal(value, before[name]) for name, value in tried.state_dict().items())
    assert all(p.grad is None for p in tried.parameters())
    assert not tried.training
    assert not tried.is_gradient_checkpointing


def test_the_probe_sees_slow_products(monkeypatch):
    seconds = {torch.float32: 1.0, torch.bfloat16: 0.5}
    clock = [0.0]
    monkeypatch.setattr(speed.time, "perf_counter", lambda: clock[0])

    def mm(a, b):
        clock[0] += seconds[a.dtype]

    monkeypatch.setattr(torch, "mm", mm)
    assert speed.half_precision_pays(CPU)
    seconds[torch.bfloat16] = 80.0
    assert not speed.half_precision_pays(CPU)


def test_prepare_sets_the_loss_and_the_blocks():
    prepared = model()
    speed.prepare(prepared, of(compile="on"))
    assert isinstance(prepared.linear_loss, LinearLoss)
    assert compiled(prepared)
    speed.prepare(prepared, of(compile="off"))
    assert not compiled(prepared)


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="glibc's")
def test_freed_memory_is_kept_for_the_next_step():
    speed.keep_freed_memory()

    def faults():
        before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
        kept = [torch.ones(2**21) for _ in range(8)]  # 8 MiB each, 2,048 pages
        del kept
        return resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before

    faults()
    assert min(faults() for _ in range(3)) < 2048


def test_a_compiler_asked_for_must_be_there(monkeypatch):
    monkeypatch.setattr("lamina.training.checks.missing_compiler", lambda device: "there is no C++ compiler")
    with pytest.raises(UserError, match=r"compile: 'on', but there is no C\+\+ compiler \(allowed here: auto, off\)"):
        resolve_run(of(compile="on"))
    resolve_run(of(compile="auto"))


@pytest.mark.parametrize(("name", "value"), [("precision", "int8"), ("precision", "32"), ("compile", "yes")])
def test_values_without_a_meaning(name, value):
    with pytest.raises(UserError, match=rf"{name}: '{value}'.* \(allowed: auto, "):
        of(**{name: value})


def test_trainers_own_switches_are_ours():
    for name, flag in (("bf16", "precision"), ("fp16", "precision"), ("torch_compile", "compile")):
        with pytest.raises(UserError, match=rf"trainer.{name}: set by --{flag}"):
            resolve_run(of(trainer={name: True}))


@pytest.fixture(params=["aot_eager", pytest.param("inductor", marks=pytest.mark.slow)])
def _backend(request, monkeypatch):
    """All that Inductor needs but its C++ compiler, and with it."""
    monkeypatch.setattr(speed, "compile_blocks", partial(compile_blocks, backend=request.param))


def losses(folder):
    lines = (folder / "metrics.jsonl").read_text().splitlines()
    return {(r["step"], k): r[k] for r in map(json.loads, lines) for k in ("loss", "eval_loss", "grad_norm") if k in r}


def test_a_run_keeps_what_was_decided(corpus, tmp_path, timed, monkeypatch):
    """A long run's trial is made once: the resumed one finds its outcome in config.yaml."""
    table, tried = timed
    table |= {("fp32", "off"): (1, 100), ("bf16", "off"): (1, 50), ("fp32", "on"): (1, 90), ("bf16", "on"): (1, 60)}
    monkeypatch.setattr(speed, "SHORT_RUN", 4)
    run = settings(corpus, tmp_path / "run", save_steps=2)
    pretrain(run, bar=False)
    stored = yaml.safe_load((tmp_path / "run" / "config.yaml").read_text())
    assert (stored["precision"], stored["compile"]) == ("bf16", "off")
    found = json.loads((tmp_path / "run" / "speed.json").read_text())
    assert [t["step"] for t in found["trial"]] == [100, 50, 90, 60]
    tried.clear()
    (tmp_path / "run" / "result.json").unlink()
    pretrain(run, resume=True, bar=False)
    assert tried == []
    plain = settings(corpus, tmp_path / "plain", precision="fp32")
    pretrain(plain, bar=False)
    half, full = losses(tmp_path / "run"), losses(tmp_path / "plain")
    assert half != full
    for key, value in full.items():
        assert half[key] == pytest.approx(value, rel=0.02), key  # bfloat16's 8 bits


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
    newest = max((tmp_path / "cut" / "checkpoints").iterdir(), key=lambda p: int(p.name.split("-")[1]))
    for path in sorted(newest.rglob("*"), reverse=True):
        path.unlink() if path.is_file() else path.rmdir()
    newest.rmdir()
    (tmp_path / "cut" / "result.json").unlink()
    pretrain(cut, resume=True, bar=False)
    assert losses(tmp_path / "cut") == losses(tmp_path / "whole")


def test_a_study_decides_once_for_all_its_trials(corpus, tmp_path, timed, monkeypatch):
    table, tried = timed
    table |= {("fp32", "off"): (1, 100), ("bf16", "off"): (1, 50), ("fp32", "on"): (1, 90), ("bf16", "on"): (1, 60)}
    monkeypatch.setattr(speed, "SHORT_RUN", 4)
    study = CompareSettings(
        **{**SMALL, "corpus": str(corpus), "output": str(tmp_path / "study"), "placements": "pre_ln,keel", "workers": 2}
    )
    compare(study, bar=False)
    assert len(tried) == 4
    for path in (tmp_path / "study" / "trials").glob("*/config.yaml"):
        stored = yaml.safe_load(path.read_text())
        assert (stored["precision"], stored["compile"]) == ("bf16", "off")
    compare(study, resume=True, bar=False)
    assert len(tried) == 4
