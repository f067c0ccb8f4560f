"""The presets, the table of model types, sizes that are refused, and a backbone by its name on the hub."""

import pytest
import torch
import transformers
from modeling.tiny import SIZES, llama, token_ids
from test_backbone_parity import ALIKE, BACKBONES, configuration
from transformers import ModernBertConfig

import lamina
from lamina.cli import main
from lamina.core.architectures import ARCHITECTURES
from lamina.errors import UserError
from lamina.modeling import (
    LaminaConfig,
    LaminaForCausalLM,
    LaminaForImageClassification,
    backbones,
    building,
    modeling_lamina,
)
from lamina.modeling.backbones import resolve_backbone
from lamina.modeling.configuration_lamina import backbone_of
from lamina.modeling.modeling_lamina import ADAPTERS, HEADS
from lamina.training.resolve import resolve_run
from lamina.training.settings import PretrainSettings

# Parameters in millions, within 5 per cent: the papers state two or three digits and leave open what is counted (norms,
# a padded vocabulary). "blocks": without embeddings, where only that fits. FuseNorm's 1.3B is its 740M with twice
# the blocks: 1387M by its own table.
PAPER = {
    "llama-71m": (71, "all"),
    "llama-130m": (134, "all"),
    "llama-250m": (247, "all"),
    "llama-1b": (1340, "all"),
    "llama-7b": (6738, "all"),
    "llama-310m-proxy": (310, "blocks"),
    "llama-740m": (743, "all"),
    "llama-1.3b": (1387, "blocks"),
    "llama-5b": (5000, "all"),
    "llama-400m": (403, "blocks"),
    "llama-1.5b": (1610, "blocks"),
    "llama-3.2b": (3360, "blocks"),
    "llama-6.5b-deep": (6500, "all"),
    # Derived: what Keel's stated sizes give; the paper calls both of them 3B.
    "llama-3b-wide": (3220, "blocks"),
    "llama-3b-deep": (3220, "blocks"),
    # 4 d^2 + 3 d FFN = 1.77M a block; the paper states the width and the depths only.
    **{f"llama-stress-384x{depth}": (1.7695 * depth, "blocks") for depth in (32, 64, 128, 256, 512)},
    "16b-a2.4b": (15706, "all"),  # DeepSeek-V2-Lite's 15.7B
    "vit-tiny": (5.72, "all"),
    "vit-small": (22.05, "all"),
}


def on_meta(preset, config):
    """A pre_ln model, which has the backbone's own parameters."""
    plan = lamina.placements.resolve("pre_ln", config.num_hidden_layers)
    head = LaminaForImageClassification if preset.startswith("vit") else LaminaForCausalLM
    with torch.device("meta"):
        return head(LaminaConfig(backbone_config=config, plan=plan.to_dict()))


def test_every_preset_of_a_paper_is_checked_here():
    assert {name for name in backbones.names() if not name.endswith(("nano", "micro"))} <= set(PAPER)
    assert all(backbones.get(name).source for name in backbones.names())


@pytest.mark.parametrize("preset", PAPER)
def test_a_preset_has_the_papers_number_of_parameters_and_the_list_those_of_the_whole_model(preset):
    """The list's are transformers' own, counted from two depths."""
    depth = backbones.preset_config(preset).num_hidden_layers
    built = 16 if depth % 16 == 0 else depth  # blocks are alike but in the mixture, of 27
    config = resolve_backbone(preset, num_layers=built)
    model = on_meta(preset, config)
    model.tie_weights()
    total = sum(p.numel() for p in model.parameters())
    assert backbones.count_parameters(config).total == total
    blocks = sum(p.numel() for key, p in model.named_parameters() if ".layers." in key)
    expected, count = PAPER[preset]
    outside = total - blocks if count == "all" else 0
    assert (outside + depth / built * blocks) / 1e6 == pytest.approx(expected, rel=0.05)


def test_active_parameters_leave_out_the_experts_that_a_token_does_not_take():
    """58 of 64 experts of 26 blocks: 3 matrices of 2048 x 1408 each. What is left, without the embedding, is 2.4B."""
    total, active = backbones.count_parameters(backbones.preset_config("16b-a2.4b"))
    assert total - active == 26 * 58 * 3 * 2048 * 1408
    assert (active - 102400 * 2048) / 1e9 == pytest.approx(2.4, rel=0.03)
    dense = backbones.count_parameters(backbones.preset_config("llama-130m"))
    assert dense.total == dense.active


def test_the_command_lists_every_preset_in_a_line_with_both_counts(capsys):
    assert main(["backbones"]) == 0
    lines = {line.split()[0]: line for line in capsys.readouterr().out.splitlines() if line}
    assert set(backbones.names()) <= set(lines)
    assert "15.71B    2.66B" in lines["16b-a2.4b"]
    assert "134.1M   134.1M" in lines["llama-130m"]


def test_a_narrower_mixture_has_narrower_experts():
    config = resolve_backbone("16b-a2.4b", hidden_size=64, num_layers=2, vocab_size=61)
    assert config.moe_intermediate_size == 48  # 1408 / 2048 * 64 = 44, a multiple of 8
    model = lamina.build(config, "fusenorm")
    assert model(input_ids=torch.arange(3, 12)[None]).logits.isfinite().all()


def test_an_unknown_preset_suggests_the_nearest():
    with pytest.raises(UserError, match=r"'llama-130'; did you mean 'llama-130m'"):
        lamina.build("llama-130", "pre_ln")


@pytest.mark.parametrize("model_type", ["qwen3", "gemma2"])
def test_a_backbone_with_a_type_for_each_layer_gets_types_for_the_new_depth(model_type):
    config = resolve_backbone(configuration(model_type), num_layers=5)
    assert len(config.layer_types) == 5


HEAD_FIELDS = ("num_attention_heads", "num_key_value_heads", "head_dim")


@pytest.mark.parametrize(
    ("backbone", "sizes", "heads"),
    [
        ("llama-130m", {"hidden_size": 384}, (6, 6, 64)),
        ("llama-130m", {"num_heads": 24}, (24, 24, 32)),
        (llama(), {"hidden_size": 64}, (8, 4, 8)),
        (configuration("qwen3", head_dim=16), {"hidden_size": 64}, (4, 2, 16)),
    ],
)
def test_another_size_keeps_the_width_of_the_heads_and_their_sharing(backbone, sizes, heads):
    config = resolve_backbone(backbone, **sizes)
    assert tuple(getattr(config, field) for field in HEAD_FIELDS) == heads
    assert config.intermediate_size * 768 == 2048 * config.hidden_size or backbone != "llama-130m"


@pytest.mark.parametrize(
    ("field", "value"),
    [
        *(("num_layers", 2.5), ("num_layers", True), ("hidden_size", 33), ("num_heads", 5)),
        *(("vocab_size", 0), ("vocab_size", 99999999999), ("max_position_embeddings", 0)),
    ],
)
def test_a_size_with_no_meaning_or_beyond_all_bounds_is_refused_by_its_field(field, value):
    with pytest.raises(UserError, match=rf"{field}.*{value}"):
        resolve_backbone("llama-nano", **{field: value})


@pytest.mark.parametrize("size", ["num_layers", "hidden_size", "num_heads"])
def test_sizes_that_a_multi_latent_attention_derives_are_right(size):
    config = configuration("deepseek_v3")
    value = {"num_layers": 2, "hidden_size": 64, "num_heads": 2}[size]
    model = lamina.build(config, "pre_ln", **{size: value})
    assert model(input_ids=torch.arange(3, 12)[None]).logits.isfinite().all()


def test_a_folder_with_a_configuration_or_a_lamina_checkpoint_is_a_backbone(tmp_path):
    configuration("qwen3").save_pretrained(tmp_path / "config")
    lamina.build(configuration("qwen3"), "keel").save_pretrained(tmp_path / "model")
    for folder in ("config", "model"):
        model = lamina.build(tmp_path / folder, "pre_ln", num_layers=2)
        assert backbone_of(model.config).model_type == "qwen3"
        assert len(model.model.layers) == 2


def test_a_folder_that_is_called_like_a_preset_does_not_hide_it(tmp_path, monkeypatch):
    (tmp_path / "llama-130m").mkdir()
    monkeypatch.chdir(tmp_path)
    assert resolve_backbone("llama-130m").hidden_size == 768


def test_the_users_choice_of_attention_kernel_is_kept():
    config = llama(2)
    config._attn_implementation = "eager"
    assert lamina.build(config, "pre_ln").config._attn_implementation == "eager"


def test_a_plan_of_another_depth_or_with_options_is_refused():
    plan = lamina.placements.resolve("keel", 3)
    with pytest.raises(UserError, match=r"3 layers, .* Set num_layers to 3"):
        lamina.build(llama(2), plan)
    with pytest.raises(UserError, match="final_norm"):
        lamina.build(llama(3), plan, final_norm=True)


def test_a_backbone_that_builds_and_then_fails_is_refused():
    """Gemma 4's model hands its layers more than the stream: wired, it raised a TypeError at its first token."""
    from transformers import Gemma4TextConfig

    config = Gemma4TextConfig(
        **SIZES, head_dim=8, global_head_dim=8, vocab_size=64, vocab_size_per_layer_input=64, num_kv_shared_layers=0
    )
    with pytest.raises(UserError, match=r"with a placement, the model does not run \(TypeError"):
        lamina.build(config, "pre_ln")


@pytest.mark.parametrize("factor", [0.5, 4])
def test_heads_of_latent_attention_keep_their_width(factor):
    """DeepSeek's head_dim is only the part of a head that is rotated."""
    own = resolve_backbone("16b-a2.4b")
    width = int(own.hidden_size * factor)
    config = resolve_backbone("16b-a2.4b", hidden_size=width)
    assert config.num_attention_heads == own.num_attention_heads * factor


def test_special_tokens_outside_of_a_smaller_vocabulary_are_dropped_without_a_word(capfd):
    config = ModernBertConfig(hidden_size=16, intermediate_size=24, num_hidden_layers=1, num_attention_heads=2)
    capfd.readouterr()
    smaller = resolve_backbone(config, vocab_size=config.sep_token_id)
    assert "within the vocabulary" not in capfd.readouterr().err
    assert (smaller.bos_token_id, smaller.cls_token_id) == (config.bos_token_id, config.cls_token_id)
    assert smaller.eos_token_id is smaller.sep_token_id is smaller.pad_token_id is None


def test_a_padding_outside_of_a_smaller_vocabulary_is_dropped():
    config = llama()
    config.pad_token_id = config.vocab_size - 1
    assert lamina.build(config, "pre_ln").get_input_embeddings().padding_idx == config.vocab_size - 1
    smaller = lamina.build(config, "pre_ln", vocab_size=config.vocab_size - 1)
    assert smaller.get_input_embeddings().padding_idx is None
    config.pad_token_id = config.vocab_size
    with pytest.raises(UserError, match="cannot build this backbone"):
        lamina.build(config, "pre_ln")


def test_what_travels_and_what_stays_are_rows_of_the_same_model_types():
    assert list(ADAPTERS) == list(ARCHITECTURES)
    assert set(ARCHITECTURES) == {*BACKBONES, *ALIKE, "vit", "modernbert"}  # those two in test_encoders.py


def test_the_heads_of_every_row_exist():
    for adapter in ADAPTERS.values():
        assert adapter.is_decoder == ("causal_lm" in adapter.heads)
        assert set(adapter.heads) <= set(HEADS)


def test_every_head_is_loaded_by_its_auto_class():
    config = LaminaConfig()
    for head in HEADS.values():
        auto = getattr(transformers, head.auto_class)
        assert auto._model_mapping[LaminaConfig] is head.model
        assert config.auto_map[head.auto_class] == f"modeling_lamina.{head.model.__name__}"


TINY = {"num_layers": 2, "hidden_size": 16, "num_heads": 2, "sequence_length": 16, "batch_size": 2}


@pytest.fixture
def a_gigabyte(monkeypatch):
    monkeypatch.setattr(building, "available_memory", lambda device="cpu": 2**30)


@pytest.mark.parametrize(
    ("sizes", "field"),
    [
        ({"num_layers": 5000, "hidden_size": 512, "num_heads": 8}, "num_layers"),
        ({"hidden_size": 2**16, "num_heads": 512}, "hidden_size"),
        ({"batch_size": 2**17, "sequence_length": 2**12}, "batch_size"),
    ],
)
def test_a_run_that_does_not_fit_is_refused(a_gigabyte, sizes, field):
    with pytest.raises(UserError, match=field) as error:
        resolve_run(PretrainSettings(**{**TINY, **sizes}))
    assert "this machine has 1.0 GiB free" in str(error.value)
    resolve_run(PretrainSettings(**{**TINY, **sizes}), trained=False)  # another run stands in for it


def test_the_states_of_the_optimizer_count(a_gigabyte):
    sizes = {**TINY, "num_layers": 32, "hidden_size": 512, "num_heads": 8}  # 0.4 GB of weights, 1.6 GB with AdamW
    with pytest.raises(UserError, match="hidden_size"):
        resolve_run(PretrainSettings(**sizes))
    resolve_run(PretrainSettings(**sizes, trainer={"optim": "sgd"}))


def test_a_model_that_does_not_fit_is_refused_unless_it_has_no_memory(a_gigabyte):
    with pytest.raises(UserError, match="hidden_size"):
        lamina.build("llama-7b", "keel")
    with torch.device("meta"):
        assert lamina.build("llama-7b", "keel", num_layers=1).device.type == "meta"


NAME = "somebody/tiny.llama-3"


@pytest.fixture
def cached(tmp_path, monkeypatch):
    """The hub's cache with the configuration of one model."""
    place = tmp_path / "hub" / f"models--{NAME.replace('/', '--')}"
    llama(3).save_pretrained(place / "snapshots" / "0123abcd")
    (place / "refs").mkdir()
    (place / "refs" / "main").write_text("0123abcd")
    for module in ("huggingface_hub.constants", "transformers.utils.hub.constants"):
        monkeypatch.setattr(f"{module}.HF_HUB_CACHE", str(tmp_path / "hub"))
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)


@pytest.mark.usefixtures("cached")
def test_a_name_on_the_hub_is_a_backbone():
    torch.manual_seed(0)
    model = lamina.build(NAME, "keel", num_layers=2).eval()
    assert (model.config.num_hidden_layers, model.config.vocab_size) == (2, 61)
    torch.manual_seed(0)
    same = lamina.build(llama(2), "keel").eval()
    with torch.no_grad():
        assert torch.equal(model(token_ids()).logits, same(token_ids()).logits)


@pytest.mark.usefixtures("cached")
def test_a_name_on_the_hub_has_a_placement():
    assert lamina.placement_of(NAME).placement == "pre_ln"
    with pytest.raises(UserError, match=r"model: 'a/b/c' is neither a folder nor a model"):
        lamina.placement_of("a/b/c")
    with pytest.raises(UserError, match=r"backbone: 'nobody/nothing' is neither a folder nor a model on the hub"):
        lamina.build("nobody/nothing", "keel")


@pytest.mark.parametrize("model_type", ["mixtral", "olmoe", "qwen3_moe", "deepseek_v3", "granitemoe"])
def test_experts_run_as_in_the_familys_own_model(model_type, monkeypatch):
    """Whatever was built before: transformers reads it off a class's own file and keeps the answer."""
    config = configuration(model_type)
    base = transformers.MODEL_MAPPING[type(config)]
    monkeypatch.delattr(base, "_can_set_experts_implementation_cached_value", raising=False)
    monkeypatch.delattr(modeling_lamina, f"Lamina{base.__name__}", raising=False)
    ours = lamina.build(config, "pre_ln").model.backbone
    assert ours.config._experts_implementation == base(configuration(model_type)).config._experts_implementation
