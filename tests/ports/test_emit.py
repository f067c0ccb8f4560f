"""An emitted file computes what Lamina's model does: logits and every gradient, on the same weights."""

import random
import re
import subprocess
import sys
import types
from pathlib import Path
from unittest import mock

import pytest
import torch
import yaml
from peers import GPT2, LAYERS, SINGLE_STREAM, VOCABULARY, gpt2, llama, module_of, on_nanogpt, on_pytorch, ours
from spread import spread
from torch.nn import functional as F

import lamina
from lamina.cli import main
from lamina.errors import UserError
from lamina.modeling.initialization import profile_admin
from lamina.placements import Layer, Norm, Plan, Sublayer
from lamina.ports import TARGETS, emit
from lamina.ports.port import WIDTH, choose, condition
from lamina.ports.weights import load_weights, weights_for

ROOT = Path(__file__).parents[2]
IDS = torch.randint(3, VOCABULARY, (2, 9), generator=torch.Generator().manual_seed(1))
CLOSE = 1e-6  # of the largest logit, and of the largest gradient of each tensor


def logits_of(model, ids):
    out = model(ids, ids) if hasattr(model, "transformer") else model(ids)
    return out[0] if isinstance(out, tuple) else out.logits if hasattr(out, "logits") else out


def off(one, other):
    return float((one - other).detach().abs().max() / one.detach().abs().max().clamp(min=1e-30))


def gradients(model, ids):
    logits = logits_of(model, ids)
    F.cross_entropy(logits[:, :-1].flatten(0, 1), ids[:, 1:].flatten()).backward()
    return {name: p.grad for name, p in model.named_parameters()}, logits


def check(model, theirs, target, close=CLOSE):
    theirs.load_state_dict(weights_for(model, target))
    _, logits = gradients(model, IDS)
    found, same = gradients(theirs.eval(), IDS)
    expected = weights_for(model, target, gradients=True)
    assert off(logits, same) < close
    assert expected.keys() == found.keys()
    worst = max((off(expected[name], found[name]), name) for name in found)
    assert worst[0] < close, worst


@pytest.mark.parametrize("spec", spread(SINGLE_STREAM))
def test_on_pytorch(spec):
    config = llama()
    model = ours(spec, config)
    check(model, on_pytorch(spec, config)[1], "pytorch")


@pytest.mark.parametrize(("build", "config"), [(on_pytorch, llama), (on_nanogpt, gpt2)])
def test_blocks_for_another_depth_are_an_error(build, config):
    with pytest.raises(ValueError, match=f"these blocks are for {LAYERS + 1}"):
        build("keel", config(), LAYERS + 1)


@pytest.mark.parametrize("spec", spread(SINGLE_STREAM))
def test_on_nanogpt(spec):
    config = gpt2()
    model = ours(spec, config)
    check(model, on_nanogpt(spec, config)[1], "nanogpt")


def random_plan(seed):
    """A plan whose layers differ in every field that a single stream has, as a user's own may."""
    choose = random.Random(seed).choice

    def norm(*kinds):
        kind = choose(kinds)
        if kind is None:
            return None
        gain = choose((1.0, 0.3))
        return Norm(
            kind=kind, groups=4 if kind == "group" else 1, initial_gain=gain, zero_centered=kind == "rms" and gain == 1
        )

    learned = choose((("no",), ("no", "scalar", "vector")))
    same = choose((True, False))

    def half(name):
        kinds = (None, "rms", "layer", "group", "dyt", "l2")
        positions = {p: norm(*kinds) for p in ("pre_norm", "out_norm", "post_norm")}
        scales = {s: choose((1.0, 0.7, 1.4)) for s in ("skip_scale", "pre_scale", "out_scale")}
        kept = {f"{s}_learned": choose(learned) for s in scales}
        more = {}
        if name == "feed_forward":
            more = {"skip": choose(("stream", "block_input", "both"))}
            more |= {"read": choose(("stream", "block_input"))} if more["skip"] == "stream" else {}
        return Sublayer(**positions, **scales, **kept, **more)

    kinds = [Layer(attention=half("attention"), feed_forward=half("feed_forward")) for _ in range(1 if same else 3)]
    layers = tuple(kinds[0] if same else choose(kinds) for _ in range(LAYERS))
    qk, v = choose(("off", "head", "full")), choose(("off", "head"))
    scale = choose((1.0, 2.5, "sqrt_hidden_size"))
    return Plan(
        placement="mine", layers=layers, final_norm=Norm(), embedding_norm=norm(None, "rms"), embedding_scale=scale,
        qk_norm=qk, v_norm=v,
    )  # fmt: skip


@pytest.mark.parametrize("target", ["pytorch", "nanogpt"])
@pytest.mark.parametrize("seed", spread(range(8), range(3)))
def test_plans_of_ones_own(seed, target, tmp_path):
    plan = random_plan(seed)
    file = tmp_path / "mine.yaml"
    file.write_text(yaml.safe_dump(plan.to_dict()), "utf-8")
    config = llama() if target == "pytorch" else gpt2()
    model = ours(str(file), config)
    build = on_pytorch if target == "pytorch" else on_nanogpt
    check(model, build(str(file), config)[1], target, close=5e-6)


def drawn(seed, folder):
    """A file with rules and learned scales, and the sizes of a model: odd depths, grouped heads, tied or not."""
    choose = random.Random(seed).choice
    halves = {
        name: {
            choose(("pre_norm", "out_norm")): choose(("rms", True, {"kind": "rms", "initial_gain": 0.3})),
            "out_scale": choose(("num_layers ** -0.5", "1 / num_sublayers", 0.5)),
            "out_scale_learned": choose(("no", "scalar", "vector")),
            "skip_scale": choose((1.0, "num_sublayers ** 0.25")),
            "skip_scale_learned": choose(("no", "scalar", "vector")),
        }
        for name in ("attention", "feed_forward")
    }
    rules = [{**halves}, {"layers": "0", "attention": {"post_norm": "rms"}}]
    rules += choose(([], [{"layers": "::2", "feed_forward": {"pre_scale": "(layer + 1) ** -0.5"}}]))
    file = folder / "mine.yaml"
    file.write_text(yaml.safe_dump({"rules": rules, "final_norm": choose((True, False))}), "utf-8")
    layers, heads, tied = choose((1, 2, 3, 5, 7)), choose((1, 2, 4)), choose((True, False))
    return str(file), layers, {"num_key_value_heads": heads, "tie_word_embeddings": tied}


@pytest.mark.parametrize("target", ["pytorch", "nanogpt"])
@pytest.mark.parametrize("seed", spread(range(10), range(4)))
def test_drawn_plans_and_sizes(seed, target, tmp_path):
    spec, layers, more = drawn(seed, tmp_path)
    if target == "nanogpt":
        config, build = gpt2(layers), on_nanogpt
    else:
        config, build = llama(layers, **{**more, "tie_word_embeddings": False}), on_pytorch
    module, theirs = build(spec, config, layers)
    assert lamina.emit(spec, to=target, num_layers=layers) == module.source
    check(ours(spec, config, layers), theirs, target, close=3e-6)


INITIALIZERS = ["pre_ln", "fusenorm", "hybridnorm", "deepnorm", "minimax_01", "olmo2", "sandwich_depth_scaled", "keel"]


@pytest.mark.parametrize("target", ["pytorch", "nanogpt"])
@pytest.mark.parametrize("spec", [*INITIALIZERS, "rezero", "muse_spark", "layerscale"])
def test_the_initial_weights_are_drawn_as_lamina_draws_them(spec, target):
    """By role: the standard deviation of each matrix, the value of each gain and learned scale."""
    torch.manual_seed(0)
    config = llama(hidden_size=64) if target == "pytorch" else gpt2(n_embd=64)
    more = {"adapter": GPT2} if target == "nanogpt" else {}
    expected = weights_for(lamina.build(config, spec, num_layers=LAYERS, **more), target)
    module, model = (on_pytorch if target == "pytorch" else on_nanogpt)(spec, config)
    width = (64,) if "std = (" in module.source and target == "pytorch" else ()
    module.init_weights(model, *width)
    for name, tensor in model.state_dict().items():
        if tensor.ndim == 2:
            for one, other in zip(tensor.chunk(3), expected[name].chunk(3), strict=True):
                assert one.std() / other.std() == pytest.approx(1, abs=0.15), name
        else:
            torch.testing.assert_close(tensor, expected[name], msg=name)


@pytest.mark.parametrize("init", ["he", "normal(std=0.01)", "xavier", "small_scaled"])
def test_another_initializer_can_be_chosen(init):
    torch.manual_seed(0)
    config = llama(hidden_size=64)
    expected = weights_for(lamina.build(config, "keel", num_layers=LAYERS, init=init), "pytorch")
    code, (_, model) = emit("keel", "pytorch", LAYERS, init=init).code, on_pytorch("keel", config)
    module = module_of(code)
    module.init_weights(model, *((64,) if "std = (" in code else ()))
    for name, tensor in model.state_dict().items():
        if tensor.ndim == 2:
            assert tensor.std() / expected[name].std() == pytest.approx(1, abs=0.15), name
    assert f"--init {init}" in code.replace('"', "")


def test_scaled_weights_are_drawn_under_nanogpts_names_too_and_unknown_names_are_an_error():
    module = module_of(emit("keel", "pytorch", LAYERS, init="small_scaled").code)
    assert "`init_weights(model, dim)`" in module.__doc__
    names = ("c_attn", "c_proj")
    model = torch.nn.ModuleDict({name: torch.nn.Linear(64, 64) for name in names})
    module.init_weights(model, 64)
    plain, scaled = (model[name].weight.detach().std() for name in names)
    assert plain / scaled == pytest.approx((2 * LAYERS) ** 0.5, rel=0.1)
    with pytest.raises(ValueError, match="no module's name ends with one of"):
        module.init_weights(torch.nn.ModuleDict({"last": torch.nn.Linear(64, 64)}), 64)


def test_an_initializer_that_a_file_cannot_have_is_refused():
    with pytest.raises(UserError, match="unknown init 'hee'; did you mean 'he'"):
        emit("keel", "pytorch", LAYERS, init="hee")
    with pytest.raises(UserError, match="'admin' sets learned skip scales"):
        emit("keel", "pytorch", LAYERS, init="admin")
    with pytest.raises(UserError, match="a file for mlx-lm initializes no weights"):
        emit("keel", "mlx", LAYERS, init="he")


@pytest.mark.parametrize(
    ("target", "needs"),
    [
        ("nanogpt", ", put nanoGPT's model.py beside the test and run"),
        ("olmo-core", ", install OLMo-core and run"),
        ("pytorch", ""),
    ],
)
def test_the_command_says_how_to_run_the_test(tmp_path, capsys, target, needs):
    file = tmp_path / "keel_block.py"
    assert main(["emit", "keel", "--to", target, "--num-layers", "4", "--output", str(file), "--with-test"]) == 0
    *_, line = capsys.readouterr().out.splitlines()
    assert line == f"To run the test{needs}: pytest {tmp_path / 'test_keel_block.py'}"


def test_admins_omegas_are_profiled_as_lamina_profiles_them():
    model = ours("admin", gpt2())
    module, theirs = on_nanogpt("admin", gpt2())
    theirs.load_state_dict(weights_for(model, "nanogpt"))
    profile_admin(model, IDS)
    module.profile(theirs, IDS)
    for name, tensor in weights_for(model, "nanogpt").items():
        if name.endswith("skip_scale"):
            torch.testing.assert_close(theirs.state_dict()[name], tensor, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("target", ["pytorch", "nanogpt"])
def test_a_model_comes_back_with_every_weight(target):
    model = ours("keel", llama() if target == "pytorch" else gpt2())
    again = ours("keel", llama() if target == "pytorch" else gpt2())
    for parameter in again.parameters():
        torch.nn.init.zeros_(parameter)
    weights = weights_for(model, target)
    load_weights(again, weights, target)
    assert all(torch.equal(one, again.state_dict()[name]) for name, one in model.state_dict().items())
    first, *rest = weights
    with pytest.raises(UserError, match=f"missing tensor '{first}': it is not in the checkpoint"):
        load_weights(again, {name: weights[name] for name in rest}, target)
    with pytest.raises(UserError, match="extra tensor 'stray': it does not exist in Lamina's model"):
        load_weights(again, {**weights, "stray": torch.ones(1)}, target)


@pytest.mark.parametrize("every", [4, pytest.param(1, marks=pytest.mark.slow)])
def test_emitted_files_need_no_formatting(every, tmp_path):
    """At ruff's own defaults, by which most repositories go; and none is longer than a page or two."""
    for first, target in enumerate(TARGETS):
        folder, lines = tmp_path / target, []
        folder.mkdir()
        for spec in SINGLE_STREAM[first % every :: every]:
            emitted = emit(spec, target, 12)
            (folder / f"{spec}_block.py").write_text(emitted.code, "utf-8")
            (folder / f"test_{spec}_block.py").write_text(emitted.test, "utf-8")
            lines.append(len(emitted.code.splitlines()))
            assert not {"{{", "{%"} & set(emitted.code.split()), spec
            written = [*emitted.code.splitlines(), *emitted.test.splitlines()]
            assert all(len(line) <= WIDTH or line.startswith("Written by Lamina") for line in written), spec
        assert max(lines) <= 156  # OLMo-core's Admin, which profiles, and Gemma 3; the usual file has 60 to 120
        assert sorted(lines)[len(lines) // 2] <= 120
    (tmp_path / "nanogpt" / "model.py").write_text("", "utf-8")  # nanoGPT's is beside it
    ruff = [sys.executable, "-m", "ruff"]
    for words in (["format", "--check"], ["check", "--select", "E4,E7,E9,F,I,B,UP,RUF,SIM,C4"]):
        own = ("--isolated", "--target-version", "py311", "--config", 'src = ["*"]')  # a file and its test: one folder
        command = [*ruff, words[0], *own, *words[1:], "."]
        done = subprocess.run(command, capture_output=True, text=True, cwd=tmp_path)
        assert done.returncode == 0, done.stdout + done.stderr


class Anything(types.ModuleType):
    """A trainer's module that is not installed: every name is a class."""

    def __getattr__(self, name):
        return type(name, (), {})


def without(trainer, code):
    modules = re.findall(rf"^from ({trainer}[\w.]*) import", code, re.MULTILINE)
    return module_of(code, **{name: Anything(name) for name in modules})


@pytest.mark.parametrize(
    ("spec", "option", "value"),
    [
        ("keel", "normalization", "LayerNorm"),
        ("keel", "layernorm_zero_centered_gamma", True),
        ("keel", "multi_latent_attention", True),
        ("keel", "apply_residual_connection_post_layernorm", True),
        ("deepnorm", "num_moe_experts", 4),
        ("subln", "num_moe_experts", 4),
        ("gemma3", "qk_l2_norm", True),
    ],
)
def test_megatrons_options_that_a_block_cannot_follow_are_an_error(spec, option, value):
    module = without("megatron", emit(spec, "megatron", LAYERS).code)
    fields = {"num_layers": LAYERS, "normalization": "RMSNorm", "tensor_model_parallel_size": 1, option: value}
    with pytest.raises(ValueError, match=option):
        getattr(module, spec)(types.SimpleNamespace(**fields))


def test_megatron_builds_the_attention_and_feed_forward_of_the_configuration():
    """The parts come from Megatron's own function, which gets the whole configuration."""
    module = without("megatron", emit("keel", "megatron", LAYERS).code)
    config = types.SimpleNamespace(num_layers=LAYERS, normalization="RMSNorm", qk_l2_norm=False, num_moe_experts=4)
    layers = [types.SimpleNamespace(module=None, submodules=module.TransformerLayerSubmodules()) for _ in range(2)]
    module.get_gpt_decoder_block_spec = mock.Mock(return_value=types.SimpleNamespace(layer_specs=layers))
    assert [layer.module for layer in module.keel(config, 1).layer_specs] == [module.Block] * 2
    module.get_gpt_decoder_block_spec.assert_called_once_with(config, False, "RMSNorm", False, vp_stage=1)


@pytest.mark.parametrize("option", ["dropout", "feed_forward_moe", "block_overrides"])
def test_olmo_cores_options_that_a_block_cannot_follow_are_an_error(option):
    module = without("olmo_core", emit("keel", "olmo-core", LAYERS).code)
    fields = dict.fromkeys(("sequence_mixer", "feed_forward", "layer_norm", "name", "dropout", "feed_forward_moe"))
    block = module.TransformerBlockConfig()
    vars(block).update(fields)
    module.BlockConfig = lambda **given: types.SimpleNamespace(**{**fields, **given})
    config = types.SimpleNamespace(block=block, block_overrides=None, lm_head=None)
    setattr(config if option == "block_overrides" else block, option, 0.5)
    with pytest.raises(ValueError, match=option):
        module.keel(config)


def test_a_norm_with_an_epsilon_of_its_own_is_refused():
    plan = Plan(placement="mine", layers=(Layer.of(Sublayer(pre_norm=Norm(eps=1e-3))),))
    with pytest.raises(UserError, match=r"a norm has the epsilon 0.001, which a block for nanoGPT"):
        emit(plan, "nanogpt", 1)


def test_a_file_says_the_numbers_of_its_equations_and_what_it_draws():
    code = emit("mix_ln", "pytorch", 12).code
    assert "Here N = 12 and alpha = 0.25;" in code
    assert "alpha = 0.25" not in emit("mix_ln(num_post_layers=2)", "pytorch", 12).code
    assert "Here N = 12 and alpha = 0.5;" in emit("mix_ln(alpha=0.5)", "pytorch", 12).code
    keel = emit("keel", "nanogpt", 4).code
    assert "alpha = 2 N, the number of sub-layers" in keel
    assert "Here N = 4; layers" in keel  # the block has 8, and no default says 2
    keel = emit("keel(alpha=3)", "nanogpt", 4).code
    assert "alpha = 2 N" not in keel
    assert "Here N = 4 and alpha = 3;" in keel
    assert "Draw all weights from N(0, 0.02^2)." in code
    assert "s = 0.02 / 24**0.5 if ends_branch else 0.02" in emit("fusenorm", "pytorch", 12).code
    assert "last norm" not in emit("keel", "mlx", 12).code


def test_unequal_layers_are_told_by_conditions_and_tables_only_where_they_must():
    assert "self.skip_scale = 24.0 if layer > 0 else 1.0" in emit("keel", "pytorch", 12).code
    assert "self.pre_scale = (layer + 1) ** -0.5" in emit("layernorm_scaling", "pytorch", 12).code
    assert "layer >= 3" in emit("mix_ln", "pytorch", 12).code
    assert "Identity" not in emit("peri_ln", "pytorch", 12).code
    assert choose(["a", "b"] * 3) == "b if layer % 2 == 1 else a"
    assert choose(["a", "a", "b", "c"]) == "a if layer < 2 else b if layer == 2 else c"
    assert "(" in condition([1, 4, 5], 8, "layer")


def test_the_command_writes_the_file_and_its_test(tmp_path, monkeypatch, capsys, refused):
    file = tmp_path / "keel_block.py"
    words = ["emit", "keel(alpha=3)", "--to", "pytorch", "--num-layers", "3", "--output", str(file), "--with-test"]
    assert main(words) == 0
    assert f"the test: {tmp_path / 'test_keel_block.py'}" in capsys.readouterr().out
    assert "3.0 if layer > 0 else 1.0" in file.read_text("utf-8")
    assert 'lamina emit "keel(alpha=3)" --to pytorch --num-layers 3' in file.read_text("utf-8")
    monkeypatch.syspath_prepend(tmp_path)
    assert pytest.main(["-q", "-p", "no:cacheprovider", str(tmp_path)]) == 0
    assert "exists. Add --overwrite" in refused(*words)
    assert main([*words, "--overwrite"]) == 0


def test_a_suggested_command_has_no_unknown_trainer(capsys):
    assert main(["emit", "keel", "--to", "bogus"]) == 2
    assert "unknown --to 'bogus'" in capsys.readouterr().err
