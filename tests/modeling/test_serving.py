"""What others ask of a saved model: sharding by name, sizes at the top of its configuration."""

import copy
import importlib.util
import json
import pickle
import re
from pathlib import Path

import pytest
import torch
from modeling.tiny import OTHER_BACKBONES, SIZES, built, llama, token_ids
from training.test_distributed import torchrun
from transformers import AutoConfig, AutoModelForCausalLM, Olmo2Config, PreTrainedConfig, ViTConfig

import lamina
from lamina.modeling.backbones.conversion import EQUIVALENTS
from lamina.modeling.configuration_lamina import FLAT, backbone_of
from lamina.modeling.modeling_lamina import STYLES
from lamina.placements import names


@pytest.mark.parametrize("placement", names())
def test_a_plan_for_stages_only_where_a_stage_may_take_the_stream(placement):
    model = built(placement, 4)
    assert all(model.get_submodule(name) is not None for name in model.pp_plan)
    # a later stage hands the stream in as embeddings, which a norm on the embedding would norm again
    stages = "model.backbone.layers" in model.pp_plan
    assert stages is (model.model.embedding_norm is None and model.model.embedding_scale == 1.0)


PAGE = Path(__file__).parents[2] / "docs" / "evaluate.md"
TEXT = PAGE.read_text(encoding="utf-8")
BLOCKS = re.findall(r"^```python\n(.*?)^```$", TEXT, re.M | re.S)
SLOW = ("torch.export", "onnxruntime")
LIBRARIES = ("peft", "optimum.quanto", "torchao", "onnxruntime", "onnxscript")


def run(blocks, folder, monkeypatch):
    """What the blocks define; a block that imports what is not installed is left out."""
    monkeypatch.chdir(folder)
    page: dict = {"__name__": "serving_page"}
    for block in blocks:
        if all(importlib.util.find_spec(name) for name in LIBRARIES if re.search(rf"(from|import) {name}\b", block)):
            exec(compile(block, str(PAGE), "exec"), page)
    return page


def test_the_page_has_the_blocks_that_are_run_here():
    assert len(BLOCKS) == 7
    assert "DistributedConfig" in BLOCKS[-1]  # run below in two processes


def test_models_are_adapted_merged_and_quantized(tmp_path, monkeypatch):
    pytest.importorskip("peft")
    pytest.importorskip("optimum.quanto")
    fast = [block for block in BLOCKS[:-1] if not any(word in block for word in SLOW)]
    page = run(fast, tmp_path, monkeypatch)
    merged = AutoModelForCausalLM.from_pretrained("models/merged")
    assert torch.isfinite(merged(page["ids"]).logits).all()
    assert Path("models/adapter/adapter_model.safetensors").is_file()


@pytest.mark.slow
def test_models_are_exported(tmp_path, monkeypatch):
    pytest.importorskip("onnxruntime")
    page = run([BLOCKS[0], *(b for b in BLOCKS[:-1] if any(word in b for word in SLOW))], tmp_path, monkeypatch)
    with torch.no_grad():
        expected = page["model"](page["ids"]).logits
    torch.testing.assert_close(torch.from_numpy(page["logits"]), expected, rtol=1e-4, atol=1e-4)


def test_the_table_of_equal_architectures_names_placements_and_architectures():
    convert = PAGE.with_name("edit-layers.md").read_text(encoding="utf-8")
    table = convert[convert.index("| placement on a Llama |") :]
    rows = re.findall(r"^\| `(.+?)` \| `(.+?)` \|", table, re.M)
    assert {architecture for _, architecture in rows} == EQUIVALENTS.keys() - {"qwen2"}  # that needs biases
    assert {placement.partition("(")[0] for placement, _ in rows} <= set(names())


def matching(model, key):
    """The names of modules and parameters that an entry of a plan is about."""
    pattern = re.compile(key.replace(".", r"\.").replace("*", r"\d+"))
    return [name for name, _ in (*model.named_modules(), *model.named_parameters()) if pattern.fullmatch(name)]


@pytest.mark.parametrize("placement", names())
def test_every_projection_is_sharded_and_every_entry_names_something(placement):
    model = built(placement, 4)
    sharded = {name for key in model.tp_plan for name in matching(model, key)}
    projections = {name for name, module in model.named_modules() if isinstance(module, torch.nn.Linear)}
    assert projections <= sharded
    assert all(matching(model, key) for key in model.tp_plan)


@pytest.mark.parametrize("name", OTHER_BACKBONES)
def test_other_backbones_plans_follow(name):
    config = OTHER_BACKBONES[name]
    model, peer = lamina.build(config, "keel"), config.base_model_tp_plan
    inside = [key for key in peer if re.search(r"\.(self_attn|mlp)\.", key)]
    named = [key for key in model.tp_plan if re.search(r"\.(attention|feed_forward)\.module\.", key)]
    assert len(named) == len(inside) > 6
    # a first dense layer lacks experts, but no entry is about nothing
    unused = {key.rpartition("module.")[2] for key in named if not matching(model, key)}
    assert unused <= {key.rpartition("self_attn.")[2] for key in inside if "q_proj" in key}


def test_norms_over_the_full_width_see_all_channels():
    plan = built("olmo2").tp_plan
    prefix = "model.backbone.layers.*.attention.module."
    peer = Olmo2Config.base_model_tp_plan
    for part in ("q_proj", "k_proj", "v_proj", "o_proj"):
        assert plan[prefix + part] == STYLES[peer[f"layers.*.self_attn.{part}"]]


@pytest.mark.slow
def test_two_processes_compute_what_one_does(tmp_path):
    for placement in names():
        model, ids = built(placement, 4, config=llama(4)), token_ids()
        folder = tmp_path / placement
        model.save_pretrained(folder)
        output = model(ids, labels=ids)
        output.loss.backward()
        norm = model.model.layers[1].feed_forward.module.up_proj.weight.grad.norm()
        torch.save({"ids": ids, "logits": output.logits.detach(), "gradient": norm}, folder / "expected.pt")
    done = torchrun(Path(__file__).with_name("sharded_processes.py"), tmp_path)
    assert done.returncode == 0, done.stderr[-4000:]
    for placement in names():
        off = torch.load(tmp_path / placement / "off.pt")
        assert off["sharded"], placement
        # sums over halves of the channels are rounded in another order
        assert off["logits"] < 2e-5, placement
        assert off["gradient"] < 1e-4, placement


VIT = ViTConfig(**SIZES, image_size=8, patch_size=4, num_labels=3)
FLATTENED = {"llama": llama(), "qwen3": OTHER_BACKBONES["qwen3"], "vit": VIT}


@pytest.mark.parametrize("name", FLATTENED)
def test_fields_are_the_backbones_in_python_and_in_json(name, tmp_path):
    config = lamina.build(FLATTENED[name], "keel").config
    config.save_pretrained(tmp_path)
    written = json.loads((tmp_path / "config.json").read_text())
    backbone = backbone_of(config)
    fields = [field for field in FLAT if getattr(backbone, field, None) is not None]
    assert {"hidden_size", "num_hidden_layers"} < set(fields)
    for field in fields:
        assert getattr(config, field) == getattr(backbone, field) == written[field] == config.to_dict()[field]
    assert config.hidden_act == backbone.hidden_act
    assert config.get_text_config() is config
    assert not hasattr(config, "no_such_field")
    assert not hasattr(config, "_no_such_field")


def test_there_is_one_value_whoever_sets_it(tmp_path):
    model = built("keel")
    model.config.max_position_embeddings = 128
    assert backbone_of(model.config).max_position_embeddings == 128
    model.resize_token_embeddings(70, mean_resizing=False)
    assert model.config.vocab_size == 70
    model.save_pretrained(tmp_path)
    loaded = AutoConfig.from_pretrained(tmp_path, max_position_embeddings=256)
    assert (loaded.vocab_size, backbone_of(loaded).max_position_embeddings) == (70, 256)
    for copied in (copy.deepcopy(loaded), pickle.loads(pickle.dumps(loaded))):
        assert copied.to_dict() == loaded.to_dict()


def test_a_copy_that_says_something_else_is_refused(tmp_path):
    built("keel").save_pretrained(tmp_path)
    path = tmp_path / "config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), "hidden_size": 64}))
    with pytest.raises(ValueError, match=r"hidden_size: 64, but backbone_config.hidden_size is 32"):
        AutoConfig.from_pretrained(tmp_path)


def test_a_checkpoint_without_copies_loads(tmp_path):
    model = built("mix_ln", 4)
    model.save_pretrained(tmp_path)
    path = tmp_path / "config.json"
    older = {name: value for name, value in json.loads(path.read_text()).items() if name not in FLAT}
    path.write_text(json.dumps(older))
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path).eval()
    with torch.no_grad():
        assert torch.equal(loaded(token_ids()).logits, model(token_ids()).logits)
    assert loaded.config.hidden_size == 32


def test_the_tokens_stay_the_models_own():
    config = built("keel").config
    config.pad_token_id = 7
    assert backbone_of(config).pad_token_id != 7
    assert isinstance(config.backbone_config, PreTrainedConfig)
