"""Precision and compilation: what `auto` means, a graph per kind of layer, and fp16's loss scaler."""

import json
import resource
import sys
from functools import partial
from itertools import product
from types import SimpleNamespace

import pytest
import torch
import yaml
from spread import spread
from torch import nn
from torch._dynamo.utils import counters
from training.tiny_runs import SMALL, cut_back, settings
from transformers import Gemma2Config, LlamaConfig

import lamina
from lamina.errors import UserError
from lamina.modeling.parts import uncompiled
from lamina.modeling.processes import Processes
from lamina.placements import names
from lamina.studies.compare import compare
from lamina.studies.settings import CompareSettings
from lamina.training.execution import compiling, devices
from lamina.training.execution.compiling import compile_blocks, discard, structure
from lamina.training.monitor.guard import Diverged, DivergenceGuard
from lamina.training.monitor.monitor import StepSeries
from lamina.training.monitor.stream_measures import hidden_state_rows
from lamina.training.monitor.training_hooks import is_compiled
from lamina.training.monitor.writers import Row
from lamina.training.pretrain import pretrain
from lamina.training.resolve import resolve_run
from lamina.training.settings import PretrainSettings
from lamina.training.trainer import MonitoredTrainer, RunTrainer


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


INDUCTOR = pytest.param("inductor", marks=pytest.mark.slow)  # its C++ compiler takes a minute on a busy machine


@pytest.mark.parametrize("backend", ["aot_eager", INDUCTOR])
def test_a_compiled_run_has_the_losses_of_an_uncompiled_one_and_resumes_exactly(corpus, tmp_path, monkeypatch, backend):
    """With evaluations among the steps."""
    monkeypatch.setattr(compiling, "compile_blocks", partial(compile_blocks, backend=backend))
    runs = {}
    for compile in ("off", "on"):
        runs[compile] = settings(corpus, tmp_path / compile, compile=compile, placement="keel", save_steps=2)
        pretrain(runs[compile], bar=False)
    off, on = losses(tmp_path / "off"), losses(tmp_path / "on")
    assert off.keys() == on.keys()
    for key, value in off.items():
        assert on[key] == pytest.approx(value, rel=1e-4), key  # sums in another order, over 4 steps
    cut_back(tmp_path / "on", 2)
    pretrain(runs["on"], resume=True, bar=False)
    assert losses(tmp_path / "on") == on


def test_a_study_decides_once_for_all_its_trials(corpus, tmp_path):
    more = {"corpus": str(corpus), "output": str(tmp_path / "study"), "placements": "pre_ln,keel", "workers": 2}
    study = CompareSettings(**{**SMALL, **more})
    for resume in (False, True):
        compare(study, resume=resume, bar=False)
        for path in (tmp_path / "study" / "study.yaml", *(tmp_path / "study" / "trials").glob("*/config.yaml")):
            stored = yaml.safe_load(path.read_text())
            stored = stored.get("settings", stored)
            assert (stored["precision"], stored["compile"]) == ("fp32", "off")


SIZES = {"hidden_size": 8, "intermediate_size": 8, "num_attention_heads": 2, "num_key_value_heads": 2, "vocab_size": 16}
IDS = torch.arange(8).view(2, 4)


@pytest.fixture(autouse=True)
def _fresh_dynamo():
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


def tiny(placement, num_layers, backbone=LlamaConfig, **more):
    torch.manual_seed(0)
    config = backbone(**{**SIZES, **more}, num_hidden_layers=num_layers)
    return lamina.build(config, placement, init="normal").train()


def graphs(model, backend="eager"):
    """The graphs that a forward and backward pass of a model with compiled blocks are made of."""
    torch._dynamo.reset()
    counters.clear()
    compile_blocks(model, backend=backend)
    model(input_ids=IDS, labels=IDS).loss.backward()
    assert not counters["graph_break"]
    return counters["stats"]["unique_graphs"]


@pytest.mark.parametrize("placement", spread(names(), ["keel", "mix_ln", "layernorm_scaling", "muse_spark"]))
def test_a_graph_for_each_kind_of_layer(placement):
    with torch.device("meta"):
        deep = tiny(placement, 64)
    kinds = len({structure(block) for block in deep.model.layers})
    assert kinds <= 2
    # One more where a scale differs by layer: the first value is compiled in, then any value is.
    assert kinds <= graphs(tiny(placement, 4)) <= kinds + 1


@pytest.mark.parametrize("placement", spread(["fusenorm", "layernorm_scaling"], ["layernorm_scaling"]))
def test_deeper_models_compile_no_more_graphs(placement):
    assert graphs(tiny(placement, 2)) == graphs(tiny(placement, 16)) == 2


def test_a_scale_by_layer_is_no_kind_of_its_own():
    """LayerNorm Scaling's 1/sqrt(l) is 1 in the first layer: multiplied by all the same, to the bit."""
    scaled, plain = tiny("layernorm_scaling", 1), tiny("pre_ln", 1)
    assert torch.equal(scaled(input_ids=IDS).logits, plain(input_ids=IDS).logits)
    assert len({structure(block) for block in tiny("layernorm_scaling", 6).model.layers}) == 1


def test_kinds_of_attention_count():
    """Gemma 2 alternates windowed and full attention; Keel's first layer is a kind of its own (here it is windowed).

    Where the masks alone tell them apart, the two have one graph.
    """
    model = tiny("keel", 8, Gemma2Config, head_dim=4, sliding_window=2)
    assert len({structure(block) for block in model.model.layers}) == 3
    assert 2 <= graphs(model) <= 3


def test_a_plan_of_many_kinds_compiles_them_all():
    """More than the 8 graphs after which dynamo gives up."""
    plan = lamina.placements.resolve("pre_ln", 12)
    positions = [(a, b) for a in ("pre_norm", "out_norm", "post_norm") for b in ("pre_norm", "out_norm", "post_norm")]
    layers = []
    for attention, feed_forward in [*positions, *positions[:3]]:
        kind = {"attention": {attention: {"kind": "rms"}}, "feed_forward": {feed_forward: {"kind": "rms"}}}
        layers.append({part: {"pre_norm": None, **fields} for part, fields in kind.items()})
    plan = lamina.placements.Plan.from_dict({**plan.to_dict(), "layers": layers})
    assert graphs(tiny(plan, 12)) == 9


@pytest.mark.parametrize("backend", ["aot_eager", INDUCTOR])
@pytest.mark.parametrize(
    ("placement", "checkpointing"),
    spread(product(("keel", "layernorm_scaling"), (True, False)), [("keel", True), ("layernorm_scaling", False)]),
)
def test_losses_and_gradients_are_those_of_the_uncompiled_model(placement, checkpointing, backend):
    model = tiny(placement, 3)
    if checkpointing:
        model.gradient_checkpointing_enable()

    def step():
        model.zero_grad()
        loss = model(input_ids=IDS, labels=IDS).loss
        loss.backward()
        return loss.detach(), [p.grad.clone() for p in model.parameters()]

    expected, expected_gradients = step()
    compile_blocks(model, backend=backend)
    loss, gradients = step()
    torch.testing.assert_close(loss, expected, rtol=1e-6, atol=0)
    for one, other in zip(gradients, expected_gradients, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-6)  # sums in another order
    assert list(model.state_dict()) == list(tiny(placement, 3).state_dict())


def test_compiled_blocks_keep_few_activations():
    """In states of the stream: 17.6 would be kept if the products' inputs were not computed again."""
    model = tiny("keel", 3, hidden_size=64, intermediate_size=172)
    compile_blocks(model, backend="aot_eager_decomp_partition")
    weights = {p.data_ptr() for p in model.parameters()}
    kept = {}

    def pack(tensor):
        if tensor.data_ptr() not in weights:
            kept[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage().nbytes()
        return tensor

    x = torch.randn(2, 32, 64, requires_grad=True)
    positions = model.model.backbone.rotary_emb(x, torch.arange(32)[None])
    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        model.model.layers[2](x, position_embeddings=positions)
    assert sum(kept.values()) < 13.5 * x.numel() * 4


def test_hooks_see_every_layer_and_evaluations_compile_nothing():
    model = tiny("keel", 4)
    expected = hidden_state_rows(model, IDS, step=1)
    first = graphs(model)
    seen = []
    for block in model.model.layers:
        block.register_forward_hook(lambda module, args, output: seen.append(module))
    model(input_ids=IDS, labels=IDS).loss.backward()
    assert seen == list(model.model.layers)
    assert hidden_state_rows(model, IDS, step=1) == expected
    with uncompiled(model):
        assert not is_compiled(model)
        model(input_ids=IDS[:1])
    assert is_compiled(model)
    assert counters["stats"]["unique_graphs"] == first
    discard(model)
    assert not is_compiled(model)


PATIENCE = 3


class Base:
    """What Trainer does in a step, as far as the scaler and the norm go."""

    def _clip_grad_norm(self, model):
        self.accelerator.scaler.unscale_(self.optimizer)
        return nn.utils.clip_grad_norm_(model.parameters(), 1.0)


class Norms:
    def __init__(self, model):
        self.model = model

    def squares(self):
        return torch.stack([p.grad.square().sum() for p in self.model.parameters()])

    def rows(self, step, squares):
        return [Row(step, i, "attention", "all", 0, "gradient_norm", s.sqrt().item()) for i, s in enumerate(squares)]


class Scaled(MonitoredTrainer, Base):
    def __init__(self):
        self.model = nn.Linear(3, 1, bias=False)
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.1)
        self.guard = DivergenceGuard(margin=1.0, patience=PATIENCE)
        scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
        self.accelerator = SimpleNamespace(scaler=scaler, optimizer_step_was_skipped=False, unwrap_model=lambda m: m)
        self.state, self.args = SimpleNamespace(global_step=0), SimpleNamespace(logging_steps=1)
        self.processes = Processes()
        self.gradient_norms, self.series = Norms(self.model), StepSeries(self.processes)

    def step(self, x):
        scaler = self.accelerator.scaler
        self.optimizer.zero_grad()
        scaler.scale(self.model(x).sum()).backward()
        self._clip_grad_norm(self.model)
        before = scaler.get_scale()
        scaler.step(self.optimizer)
        scaler.update()
        self.accelerator.optimizer_step_was_skipped = scaler.get_scale() < before  # as accelerate tells it
        self.count_overflow()
        self.state.global_step += 1


def test_an_overflow_is_counted_and_leaves_the_weights_and_the_run_alone():
    trainer = Scaled()
    before = trainer.model.weight.detach().clone()
    trainer.step(torch.tensor([[torch.inf, 1.0, 1.0]]))
    assert torch.equal(trainer.model.weight, before)
    assert (trainer.overflows, trainer.accelerator.scaler.get_scale()) == (1, 512.0)
    trainer.step(torch.ones(1, 3))
    assert not torch.equal(trainer.model.weight, before)
    assert (trainer.overflows, trainer.overflows_in_a_row) == (1, 0)


def test_the_layers_norms_are_those_of_the_loss_that_is_not_scaled():
    trainer = Scaled()
    trainer.step(torch.tensor([[3.0, 4.0, 0.0]]))
    assert trainer.layer_rows[0][-1] == pytest.approx(5.0)


def test_overflows_without_end_are_a_divergence():
    trainer = Scaled()
    for _ in range(PATIENCE):
        trainer.step(torch.full((1, 3), torch.inf))
    assert trainer.overflows == PATIENCE
    with pytest.raises(Diverged):
        trainer.step(torch.full((1, 3), torch.inf))


class Resumed(RunTrainer, Scaled):
    processes, _tr_loss, _globalstep_last_logged = Processes(), 0.0, 0


def test_a_checkpoint_has_the_overflows_and_an_older_one_none():
    trainer, resumed = Resumed(), Resumed()
    for x in (torch.inf, 1.0, torch.inf, torch.inf):
        trainer.step(torch.full((1, 3), x))
    state = {**trainer.state_dict(), **trainer.guard.state_dict()}
    resumed.load_state_dict(state)
    assert (resumed.overflows, resumed.overflows_in_a_row) == (3, 2)
    del state["overflows"]
    resumed.load_state_dict(state)
    assert (resumed.overflows, resumed.overflows_in_a_row) == (0, 0)
