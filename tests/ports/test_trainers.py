"""Emitted files in the trainers themselves, from the folder that LAMINA_TRAINERS names; skipped without it.

    pip install --no-deps --target FOLDER ai2-olmo-core==3.0.0 cached-path dataclass-extensions bettermap \
        importlib_resources boto3 botocore s3transfer jmespath einops google-cloud-storage google-api-core google-auth \
        google-cloud-core google-resumable-media google-crc32c googleapis-common-protos proto-plus cryptography cffi \
        pycparser pyasn1 pyasn1-modules \
        megatron-core==0.16.1 mlx==0.32.4 mlx-cpu mlx-lm==0.32.2 \
        torchtitan==0.3.0 spmd_types==0.2.3 tyro docstring-parser typeguard torchdata torch_checkpointing triton
    LAMINA_TRAINERS=FOLDER pytest -m slow tests/ports

One command, since pip adds nothing to a folder ``google`` that is there already.
"""

import importlib
import json
import os
import shutil
import subprocess
import sys

import pytest
import torch
from peers import LAYERS, SINGLE_STREAM, VOCABULARY, WIDTH, llama, module_of, on_megatron, on_torchtitan, ours
from test_emit import IDS, INITIALIZERS, ROOT, check, drawn, off, random_plan
from transformers import AutoModelForCausalLM

import lamina
from lamina.cli import main
from lamina.ports import TARGETS, emit
from lamina.ports.weights import weights_for

FOLDER = os.environ.get("LAMINA_TRAINERS")
pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(FOLDER is None, reason="LAMINA_TRAINERS names no folder with the trainers' packages"),
]


@pytest.fixture(autouse=True)
def packages(monkeypatch):
    monkeypatch.setattr(sys, "path", [*sys.path, str(FOLDER)])


def needs(package):
    try:
        importlib.import_module(package)
    except ImportError as error:
        pytest.skip(f"{package} is not in LAMINA_TRAINERS: {error}")


def on_olmo(spec, num_layers=LAYERS, tied=False, key_heads=2):
    """OLMo-core's own model with an emitted block, and the configuration of the same Llama."""
    needs("olmo_core")
    from olmo_core.nn.transformer import TransformerConfig

    emitted = emit(spec, "olmo-core", num_layers)
    module = module_of(emitted.code)
    config = TransformerConfig.llama_like(
        d_model=WIDTH, vocab_size=VOCABULARY, n_layers=num_layers, n_heads=4, n_kv_heads=key_heads, rope_theta=10000,
        layer_norm_eps=1e-5, hidden_size_multiplier=1.5,
    )  # fmt: skip
    config.tie_word_embeddings = tied
    model = getattr(module, emitted.plan.placement)(config).build(init_device="meta")
    if hasattr(module, "replace_norms"):
        module.replace_norms(model)
    model.init_weights(device=torch.device("cpu"), max_seq_len=16)
    module.init_weights(model)
    inner = model.blocks["0"].feed_forward.hidden_size
    more = {"num_key_value_heads": key_heads, "tie_word_embeddings": tied}
    return module, model, llama(num_layers, intermediate_size=inner, rms_norm_eps=1e-5, **more)


@pytest.mark.parametrize("spec", SINGLE_STREAM)
def test_on_olmo_core(spec):
    _, model, config = on_olmo(spec)
    check(ours(spec, config), model, "olmo-core")


@pytest.mark.parametrize("seed", range(10))
def test_drawn_plans_on_olmo_core(seed, tmp_path):
    spec, layers, more = drawn(seed, tmp_path)
    _, theirs, config = on_olmo(spec, layers, more["tie_word_embeddings"], more["num_key_value_heads"])
    check(ours(spec, config, layers), theirs, "olmo-core")


OPTIONS = ["pre_ln(qk_norm=head)", "pre_ln(qk_norm=full,v_norm=head)", "peri_ln(embedding_norm=true)"]
OPTIONS += ["keel(embedding_scale=sqrt_hidden_size,final_norm=true)"]


BUILD = {"megatron": (on_megatron, "megatron.core"), "torchtitan": (on_torchtitan, "torchtitan.models.llama3")}


def built(target, spec, config):
    build, package = BUILD[target]
    needs(package)
    return build(spec, config)


def check_in_float64(target, spec, monkeypatch):
    """Nothing but rounding may differ: norms and rotary embeddings compute in float64 on both sides."""
    model, (_, theirs) = ours(spec, llama()), built(target, spec, llama())
    monkeypatch.setattr(torch.Tensor, "float", torch.Tensor.double)
    for name in ("float", "float32"):
        monkeypatch.setattr(torch, name, torch.float64)
    model, theirs = model.double(), theirs.double()
    half = WIDTH // 4 // 2
    frequencies = 10000.0 ** -(torch.arange(half, dtype=torch.float64) / half)
    model.model.backbone.rotary_emb.inv_freq = frequencies
    if target == "megatron":
        theirs.rotary_pos_emb.inv_freq = frequencies
    else:
        for layer in theirs.layers.values():
            layer.attention.rope.cache = layer.attention.rope._precompute_cache()
    check(model, theirs, target, close=1e-12)


@pytest.mark.parametrize("spec", [*SINGLE_STREAM, *OPTIONS])
@pytest.mark.parametrize("target", BUILD)
def test_on_megatron_and_torchtitan(target, spec, monkeypatch):
    check_in_float64(target, spec, monkeypatch)


@pytest.mark.parametrize("seed", range(8))
@pytest.mark.parametrize("target", BUILD)
def test_plans_of_ones_own_on_megatron_and_torchtitan(target, seed, tmp_path, monkeypatch):
    file = tmp_path / "mine.yaml"
    plan = random_plan(seed).to_dict()
    if target == "torchtitan":  # it has no LayerNorm with a gain
        plan = json.loads(json.dumps(plan).replace('"layer"', '"rms"'))
    file.write_text(json.dumps(plan), "utf-8")
    check_in_float64(target, str(file), monkeypatch)


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("spec", [*SINGLE_STREAM, *OPTIONS])
@pytest.mark.parametrize("target", BUILD)
def test_on_megatron_and_torchtitan_in_float32(target, spec, tied):
    """Their attention rounds elsewhere than transformers'."""
    config = llama(tie_word_embeddings=tied)
    _, theirs = built(target, spec, config)
    model = ours(spec, config)
    theirs.load_state_dict(weights_for(model, target))
    with torch.no_grad():
        assert off(model(input_ids=IDS).logits, theirs.eval()(IDS)) < 2e-6


@pytest.mark.parametrize("spec", [*INITIALIZERS, "rezero", "muse_spark", "layerscale"])
@pytest.mark.parametrize("target", BUILD)
def test_megatron_and_torchtitan_draw_the_initial_weights_as_lamina_does(target, spec):
    torch.manual_seed(0)
    config = llama(hidden_size=64)
    expected = weights_for(lamina.build(config, spec, num_layers=LAYERS), target)
    module, model = built(target, spec, config)
    if hasattr(module, "init_weights"):
        module.init_weights(model)
    for name, tensor in model.state_dict().items():
        if name.endswith("_extra_state"):
            continue
        if tensor.ndim == 2:
            parts = 8 if "linear_qkv" in name else 2  # by key head: queries, key and value
            for one, other in zip(tensor.chunk(parts), expected[name].chunk(parts), strict=True):
                assert one.std() / other.std() == pytest.approx(1, abs=0.15), name
        else:
            torch.testing.assert_close(tensor, expected[name], msg=name)


@pytest.mark.parametrize("spec", ["keel", "fusenorm", "pre_ln(qk_norm=head)"])
@pytest.mark.parametrize("tied", [False, True])
def test_a_checkpoint_goes_to_megatron_and_comes_back(spec, tied, tmp_path, monkeypatch):
    """Megatron's own dist_checkpointing loads the folder that Lamina wrote, and saves what Lamina reads."""
    needs("megatron.core")
    from megatron.core import dist_checkpointing

    config = llama(tie_word_embeddings=tied)
    model = ours(spec, config)
    model.save_pretrained(tmp_path / "ours")
    assert main(["convert", str(tmp_path / "ours"), str(tmp_path / "megatron"), "--to", "megatron"]) == 0
    _, theirs = on_megatron(spec, config)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: "cpu")
    monkeypatch.setattr(torch.cuda, "synchronize", lambda *args: None)
    release = tmp_path / "megatron" / "release"
    loaded = dist_checkpointing.load(theirs.sharded_state_dict(), str(release))
    arguments = loaded.pop("args")
    for name in ("checkpoint_version", "iteration"):
        del loaded[name]
    theirs.load_state_dict(loaded)
    with torch.no_grad():
        assert off(model(input_ids=IDS).logits, theirs.eval()(IDS)) < 2e-6

    saved = tmp_path / "theirs" / "iter_0000007"
    saved.mkdir(parents=True)
    (saved.parent / "latest_checkpointed_iteration.txt").write_text("7")
    dist_checkpointing.save({**theirs.sharded_state_dict(), "args": arguments}, str(saved))
    words = ["--from", "megatron", "--placement", spec]
    assert main(["convert", str(saved.parent), str(tmp_path / "back"), *words]) == 0
    back = AutoModelForCausalLM.from_pretrained(tmp_path / "back")
    assert all(torch.equal(one, back.state_dict()[name]) for name, one in model.state_dict().items())


@pytest.mark.parametrize("spec", ["keel", "fusenorm", "peri_ln", "mix_ln", "gemma3"])
@pytest.mark.parametrize("target", BUILD)
def test_the_test_beside_a_file_passes_as_printed(target, spec, tmp_path):
    needs(BUILD[target][1])
    file = tmp_path / f"{spec}_block.py"
    words = ["emit", spec, "--to", target, "--num-layers", "4", "--with-test", "--output", str(file)]
    assert main(words) == 0
    paths = os.pathsep.join((str(ROOT), str(tmp_path), str(FOLDER)))
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", str(tmp_path)],
        capture_output=True, text=True, cwd=tmp_path, env={**os.environ, "PYTHONPATH": paths},
    )  # fmt: skip
    assert done.returncode == 0, done.stdout


@pytest.mark.parametrize("spec", ["keel", "fusenorm", "peri_ln", "mix_ln"])
def test_emitted_files_and_their_tests_have_right_types(spec, tmp_path):
    for target in TARGETS:
        emitted = emit(spec, target, 12, module=f"{spec}_{target.replace('-', '_')}")
        name = f"{spec}_{target.replace('-', '_')}.py"
        (tmp_path / name).write_text(emitted.code, "utf-8")
        (tmp_path / f"test_{name}").write_text(emitted.test, "utf-8")
    shutil.copy(ROOT / "tests/ports/model_of_nanogpts_form.py", tmp_path / "model.py")
    settings = {"extraPaths": [str(tmp_path), str(FOLDER), str(ROOT)], "ignore": ["model.py"]}
    (tmp_path / "pyrightconfig.json").write_text(json.dumps({"typeCheckingMode": "basic", **settings}), "utf-8")
    command = [sys.executable, "-m", "pyright", "--pythonpath", sys.executable, "--outputjson", "-p", str(tmp_path)]
    done = json.loads(subprocess.run(command, capture_output=True, text=True).stdout)
    assert done["summary"]["filesAnalyzed"] >= 12
    absent = {"reportMissingImports", "reportMissingModuleSource"}
    found = [(one["file"], one["message"]) for one in done["generalDiagnostics"] if one.get("rule") not in absent]
    assert not found


@pytest.mark.parametrize(("rank", "stage", "layers"), [(0, 0, [0]), (1, 0, [1]), (0, 1, [2]), (1, 1, [3])])
def test_a_pipeline_stage_has_the_blocks_of_its_layers(rank, stage, layers, monkeypatch):
    """Two stages of two virtual ones each: Keel's exception is for the first layer of the model alone."""
    on_megatron("keel", llama(4), 4)  # process groups
    from megatron.core import parallel_state
    from megatron.core.transformer import TransformerConfig, transformer_layer
    from megatron.core.transformer.spec_utils import build_module

    monkeypatch.setattr(parallel_state, "get_pipeline_model_parallel_rank", lambda: rank)
    monkeypatch.setattr(transformer_layer, "get_pg_rank", lambda group: rank)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: "cpu")
    config = TransformerConfig(
        num_layers=4, hidden_size=WIDTH, num_attention_heads=4, use_cpu_initialization=True,
        pipeline_model_parallel_size=2, virtual_pipeline_model_parallel_size=2, pipeline_dtype=torch.float32,
        normalization="RMSNorm",
    )  # fmt: skip
    specs = module_of(emit("keel", "megatron", 4).code).keel(config, vp_stage=stage).layer_specs
    blocks = [build_module(spec, config=config, layer_number=i + 1, vp_stage=stage) for i, spec in enumerate(specs)]
    assert [block.layer_number - 1 for block in blocks] == layers
    assert [block.skip_scale for block in blocks] == [8.0 if layer else 1.0 for layer in layers]


OF_MEGATRON = {
    "experts": {"num_moe_experts": 4, "moe_layer_freq": 2},
    "norms on queries and keys": {"qk_layernorm": True},
    "biases": {"add_bias_linear": True, "add_qkv_bias": True},
}


@pytest.mark.parametrize("options", OF_MEGATRON.values(), ids=OF_MEGATRON)
def test_megatrons_options_reach_the_blocks(options, monkeypatch):
    """Pre-LN is Megatron's placement, so its own model has the same weights and bit-identical logits."""
    needs("megatron.core")
    on_megatron("pre_ln", llama())  # process groups
    from megatron.core.models.gpt import GPTModel
    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_decoder_block_spec
    from megatron.core.transformer import TransformerConfig
    from megatron.core.transformer.moe import moe_utils

    monkeypatch.setattr(torch.cuda, "current_device", lambda: "cpu")
    monkeypatch.setattr(moe_utils, "te_general_gemm", None, raising=False)  # undefined without Transformer Engine
    config = TransformerConfig(
        num_layers=LAYERS, hidden_size=WIDTH, num_attention_heads=4, hidden_dropout=0.0, attention_dropout=0.0,
        normalization="RMSNorm", use_cpu_initialization=True, **options,
    )  # fmt: skip
    blocks = module_of(emit("pre_ln", "megatron", LAYERS).code).pre_ln(config)
    own = get_gpt_decoder_block_spec(config, False, "RMSNorm")
    theirs, here = (
        GPTModel(config, spec, VOCABULARY, 64, position_embedding_type="rope").eval() for spec in (own, blocks)
    )
    here.load_state_dict(theirs.state_dict())
    mask = torch.ones(9, 9, dtype=torch.bool).triu(1)[None, None]
    places = torch.arange(9)[None].expand(2, -1)
    with torch.no_grad():
        assert torch.equal(here(IDS, places, mask), theirs(IDS, places, mask))


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("spec", ["keel", "fusenorm"])
def test_a_checkpoint_goes_to_torchtitan_and_comes_back(spec, tied, tmp_path):
    """By torch.distributed.checkpoint, as torchtitan loads and saves: the model's names at the top, others beside."""
    from torch.distributed import checkpoint

    config = llama(tie_word_embeddings=tied)
    model = ours(spec, config)
    model.save_pretrained(tmp_path / "ours")
    assert main(["convert", str(tmp_path / "ours"), str(tmp_path / "titan"), "--to", "torchtitan"]) == 0
    _, theirs = built("torchtitan", spec, config)
    state = theirs.state_dict()
    checkpoint.load(state, checkpoint_id=tmp_path / "titan", no_dist=True)
    theirs.load_state_dict(state)
    with torch.no_grad():
        assert off(model(input_ids=IDS).logits, theirs.eval()(IDS)) < 2e-6
    saved = tmp_path / "step-7"
    checkpoint.save(
        {**theirs.state_dict(), "optimizer": {"step": torch.ones(1)}, "train_state": {"step": torch.tensor(7)}},
        checkpoint_id=saved, no_dist=True,
    )  # fmt: skip
    (saved / "config.json").write_text(json.dumps(config.to_dict()), "utf-8")
    words = ["--from", "torchtitan", "--placement", spec]
    assert main(["convert", str(saved), str(tmp_path / "back"), *words]) == 0
    back = AutoModelForCausalLM.from_pretrained(tmp_path / "back")
    assert all(torch.equal(one, back.state_dict()[name]) for name, one in model.state_dict().items())


@pytest.mark.parametrize("spec", SINGLE_STREAM)
def test_on_mlx(spec):
    needs("mlx_lm.models.llama")
    import mlx.core as mx
    import numpy as np

    module = module_of(emit(spec, "mlx", LAYERS).code)
    config = llama()
    model = ours(spec, config)
    args = module.ModelArgs.from_dict({**config.to_dict(), "rope_theta": 10000.0})
    theirs = module.Model(args)
    theirs.load_weights([(name, mx.array(w.numpy())) for name, w in weights_for(model, "mlx").items()])
    with torch.no_grad():
        logits = model(input_ids=IDS).logits.numpy()
    same = np.array(theirs(mx.array(IDS.numpy())))
    assert np.abs(same - logits).max() / np.abs(logits).max() < 1e-4
    cache = importlib.import_module("mlx_lm.models.cache").make_prompt_cache(theirs)
    theirs(mx.array(IDS[:, :5].numpy()), cache=cache)
    cached = np.array(theirs(mx.array(IDS[:, 5:].numpy()), cache=cache))
    assert np.abs(cached[:, -1] - logits[:, -1]).max() / np.abs(logits).max() < 1e-4


BLOCKS = {"default": {}, "default_scaled": {}, "reordered_norm": {"qk_norm": True}, "peri_norm": {}}
BLOCKS["default"] = {"qk_norm": True, "use_head_qk_norm": True}


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("block", BLOCKS)
def test_a_checkpoint_that_olmo_core_saved_has_the_same_logits_here(block, tied, tmp_path):
    needs("olmo_core")
    from olmo_core.distributed.checkpoint import load_model_and_optim_state, save_model_and_optim_state
    from olmo_core.nn.transformer import TransformerBlockType, TransformerConfig

    config = TransformerConfig.llama_like(
        d_model=WIDTH, vocab_size=VOCABULARY, n_layers=3, n_heads=4, n_kv_heads=2, rope_theta=20000,
        block_name=TransformerBlockType(block), **BLOCKS[block],
    )  # fmt: skip
    config.tie_word_embeddings = tied
    model = config.build(init_device="cpu")
    model.init_weights(max_seq_len=16)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.1 * torch.randn_like(parameter))
        for name, buffer in model.named_buffers():  # 3.0.0 leaves it undefined after init_weights
            if name.endswith("ln_scale"):
                buffer.fill_((int(name.split(".")[1]) + 1) ** -0.5)
    save_model_and_optim_state(str(tmp_path / "olmo" / "model_and_optim"), model)
    (tmp_path / "olmo" / "config.json").write_text(json.dumps({"model": config.as_config_dict()}), "utf-8")
    assert main(["convert", str(tmp_path / "olmo"), str(tmp_path / "ours"), "--from", "olmo-core"]) == 0
    converted = AutoModelForCausalLM.from_pretrained(tmp_path / "ours")
    with torch.no_grad():
        assert off(model(IDS), converted(input_ids=IDS).logits) == 0.0
    assert main(["convert", str(tmp_path / "ours"), str(tmp_path / "back"), "--to", "olmo-core"]) == 0
    written = json.loads((tmp_path / "back" / "config.json").read_text("utf-8"))["model"]
    again = TransformerConfig.from_dict(written).build(init_device="cpu")
    again.init_weights(max_seq_len=16)
    if block == "default_scaled":  # whose own loader wants the buffer, too
        return
    load_model_and_optim_state(str(tmp_path / "back" / "model_and_optim"), again)
    with torch.no_grad():
        assert torch.equal(model(IDS), again(IDS))


@pytest.mark.parametrize("spec", ["keel(final_norm=true)", "deepnorm(final_norm=true)", "fusenorm"])
def test_a_checkpoint_of_an_emitted_block_has_the_same_logits_here(spec, tmp_path):
    """Keel's and DeepNorm's weights have DepthBench's names."""
    _, model, config = on_olmo(spec)
    from olmo_core.distributed.checkpoint import save_model_and_optim_state

    ours(spec, config).save_pretrained(tmp_path / "named")
    assert main(["convert", str(tmp_path / "named"), str(tmp_path / "olmo"), "--to", "olmo-core"]) == 0
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.1 * torch.randn_like(parameter))
    save_model_and_optim_state(str(tmp_path / "olmo" / "model_and_optim"), model, save_overwrite=True)
    words = ["--from", "olmo-core", "--placement", spec]
    assert main(["convert", str(tmp_path / "olmo"), str(tmp_path / "ours"), *words]) == 0
    converted = AutoModelForCausalLM.from_pretrained(tmp_path / "ours")
    with torch.no_grad():
        assert off(model(IDS), converted(input_ids=IDS).logits) < 1e-6
    if spec.startswith("keel"):
        norms = {"blocks.1.post_attention_norm.weight", "blocks.0.post_feed_forward_norm.weight"}
        assert norms <= {*model.state_dict()}
        assert "blocks.0.post_attention_norm.weight" not in model.state_dict()


@pytest.mark.parametrize("spec", ["keel", "gemma3", "hybridnorm"])
def test_mlx_lm_loads_a_converted_folder(spec, tmp_path):
    needs("mlx_lm.utils")
    import mlx.core as mx
    import numpy as np
    from mlx_lm.utils import load_model

    model = ours(spec, llama(tie_word_embeddings=spec == "gemma3"))
    model.save_pretrained(tmp_path / "ours")
    assert main(["convert", str(tmp_path / "ours"), str(tmp_path / "mlx"), "--to", "mlx"]) == 0
    theirs, _ = load_model(tmp_path / "mlx", trust_remote_code=True)
    with torch.no_grad():
        logits = model(input_ids=IDS).logits.numpy()
    assert np.abs(np.array(theirs(mx.array(IDS.numpy()))) - logits).max() / np.abs(logits).max() < 1e-4
