"""Learned scales, and norms of one's own: one process, DDP and FSDP2 train them alike, and read each other's."""

import json
from typing import get_args

import pytest
import torch
from safetensors.torch import load_file
from training.test_distributed import curve, train
from training.tiny_runs import SMALL, cut_at, result, settings
from transformers import AutoModelForCausalLM

from lamina.placements.plan import SCALES
from lamina.placements.registry import PLACEMENTS
from lamina.placements.resolution import resolve
from lamina.training import pretrain as pretraining

STEPS = 6
OPTIONS = {
    **SMALL, "steps": STEPS, "gradient_accumulation": 2, "logging_steps": 1, "save_steps": 3, "learning_rate": 1e-2,
}  # fmt: skip
SCALAR = "keel(learnable_alpha=true)"
STEPWISE = ("loss", "grad_norm")


def values(option):
    """What an option can be set to: each of a choice, both of a boolean."""
    if isinstance(option.default, bool):
        return ["true", "false"]
    return [value for value in get_args(option.type) if isinstance(value, str)]


def with_learned_scales():
    """Every placement of the registry, with each option's values, whose plan learns a scale; and a mix of two."""
    names = []
    for name in PLACEMENTS.names():
        options = PLACEMENTS.get(name).options
        names += [name, *(f"{name}({option.name}={value})" for option in options for value in values(option))]
    names.append("keel(learnable_alpha=true, variant=scale_gain)")
    names += ["keel(wiring=mhc)", "pre_ln(wiring=attn_res)", "fusenorm(wiring=x0)", "pre_ln(wiring=mudd)"]
    return [name for name in names if learned(name) or "wiring" in name]


def is_of_the_wiring(name):
    return name.endswith((*SCALES, "gate")) or any(part in name for part in (".mixer.", ".depth.", ".sources."))


def learned(name):
    plan = resolve(name, 3)
    sublayers = [sublayer for layer in plan.layers for sublayer in (layer.attention, layer.feed_forward)]
    return {getattr(s, f"{name}_learned") for s in sublayers for name in SCALES} != {"no"}


PLACEMENTS_THAT_LEARN = with_learned_scales()


@pytest.fixture(scope="module")
def runs(corpus, tmp_path_factory):
    folder = tmp_path_factory.mktemp("runs")

    def given(name, placement=SCALAR, **changed):
        return settings(corpus, folder / name, **{**OPTIONS, "placement": placement, **changed})

    plan = []
    for number, placement in enumerate(PLACEMENTS_THAT_LEARN):
        plan += [{"settings": given(f"{way}-{number}", placement, parallel=way).to_dict()} for way in ("ddp", "fsdp2")]
    plan += [
        {"settings": given("stopped", parallel="fsdp2").to_dict(), "terminate": 4},
        {"settings": given("two-then-one", parallel="fsdp2").to_dict(), "terminate": 4},
        {"settings": given("stopped", parallel="fsdp2").to_dict(), "resume": True},
        {"settings": given("one-then-two", parallel="fsdp2").to_dict(), "resume": True},
    ]
    for number, placement in enumerate(PLACEMENTS_THAT_LEARN):
        pretraining.pretrain(given(f"one-{number}", placement), bar=False)
    with cut_at(4):
        pretraining.pretrain(given("one-then-two"), bar=False)
    said = train(folder, plan)
    pretraining.pretrain(given("two-then-one"), resume=True, bar=False)
    assert said[0] == said[1]
    return folder


@pytest.mark.slow
@pytest.mark.parametrize("way", ["ddp", "fsdp2"])
@pytest.mark.parametrize("number", range(len(PLACEMENTS_THAT_LEARN)), ids=PLACEMENTS_THAT_LEARN)
def test_two_processes_train_learned_scales_as_one_does(runs, number, way):
    ours, theirs = runs / f"{way}-{number}", runs / f"one-{number}"
    assert result(ours)["status"] == result(theirs)["status"]
    for metric in STEPWISE:
        assert len(curve(ours, metric)) == STEPS
        assert curve(ours, metric) == pytest.approx(curve(theirs, metric), abs=1e-4)
    tensors, expected = (load_file(run / "model" / "model.safetensors") for run in (ours, theirs))
    assert {n: tensor.shape for n, tensor in tensors.items()} == {n: tensor.shape for n, tensor in expected.items()}
    scales = [name for name in expected if is_of_the_wiring(name)]
    assert scales
    for name in scales:
        assert torch.allclose(tensors[name], expected[name], atol=1e-4)
    AutoModelForCausalLM.from_pretrained(ours / "model")


@pytest.mark.slow
@pytest.mark.parametrize("name", ["stopped", "two-then-one", "one-then-two"])
def test_a_stopped_run_with_learned_scalars_resumes_in_either_number_of_processes(runs, name):
    theirs = runs / f"one-{PLACEMENTS_THAT_LEARN.index(SCALAR)}"
    for metric in STEPWISE:
        assert curve(runs / name, metric) == pytest.approx(curve(theirs, metric), abs=1e-4)
        assert len(curve(runs / name, metric)) == STEPS
    tensors, expected = (load_file(run / "model" / "model.safetensors") for run in (runs / name, theirs))
    for key, value in expected.items():
        assert torch.allclose(tensors[key], value, atol=1e-4), key


@pytest.mark.slow
def test_a_sharded_checkpoint_holds_scalars_and_their_optimizer_states_as_one_process_does(runs):
    number = PLACEMENTS_THAT_LEARN.index(SCALAR)
    sharded, whole = (runs / f"{way}-{number}" / "checkpoints" / "checkpoint-6" for way in ("fsdp2", "one"))
    tensors = {}
    for part in (sharded / "model").glob("*.safetensors"):
        tensors |= load_file(part)
    expected = load_file(whole / "model.safetensors")
    scalars = [name for name, tensor in expected.items() if tensor.ndim == 0]
    assert scalars
    for name in scalars:
        assert tensors[name].ndim == 0
        assert tensors[name].item() == pytest.approx(expected[name].item(), abs=1e-4)
    states = [torch.load(path / "optimizer.pt", weights_only=True)["state"] for path in (sharded, whole)]
    for name in scalars:
        assert states[0][name].keys() == states[1][name].keys() >= {"exp_avg", "exp_avg_sq", "step"}
        for key, value in states[1][name].items():
            assert states[0][name][key].shape == value.shape
            assert torch.allclose(states[0][name][key], value, rtol=1e-3, atol=1e-6)


OWN = """
from lamina.modeling import LaminaNorm
from lamina.modeling.building import norm
from lamina.placements import Layer, Norm, Plan, Sublayer, placement


@norm("halved")
class Halved(LaminaNorm):
    def forward(self, x):
        return self.apply_gain(x / 2)


@placement("own", title="Own", equation=("x",), source="unpublished", initialization="scaled")
def own(num_layers: int) -> Plan:
    layer = Layer.of(Sublayer(pre_norm=Norm(kind="halved")))
    return Plan(placement="own", layers=(layer,) * num_layers, final_norm=Norm())
"""


@pytest.fixture(scope="module")
def told(corpus, tmp_path_factory):
    """A model with a norm of one's own is trained by two processes; and the types of gathered parameters."""
    folder = tmp_path_factory.mktemp("told")
    (folder / "own.py").write_text(OWN)
    given = settings(corpus, folder / "run", **{**SMALL, "placement": str(folder / "own.py"), "steps": 2})
    (folder / "settings.json").write_text(json.dumps(given.to_dict()))
    placements = ["keel", *PLACEMENTS_THAT_LEARN]
    plan = [{"argv": ["pretrain", "--config", str(folder / "settings.json")]}, *({"gathered": p} for p in placements)]
    (code, *types), (other_code, *_) = train(folder, plan)
    assert code == other_code
    return code, folder / "run", dict(zip(placements, types, strict=True))


@pytest.mark.slow
def test_a_learned_scale_leaves_the_rest_of_its_block_gathered_in_bf16(told):
    for placement, types in told[-1].items():
        in_blocks = {name: kind for name, kind in types.items() if ".layers." in name}
        matrices = {name for name, kind in in_blocks.items() if kind == "torch.bfloat16"}
        assert matrices == {name for name in in_blocks if name.endswith("_proj.weight")}, placement
        scales = {name for name in in_blocks if is_of_the_wiring(name)}
        assert bool(scales) == (placement != "keel")


@pytest.mark.slow
def test_two_processes_train_a_model_with_it(told):
    code, run, _ = told
    assert code == 0
    assert (run / "result.json").is_file()
