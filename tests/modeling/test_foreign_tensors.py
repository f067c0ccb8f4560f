"""Checkpoints whose tensors are not the model's: every reader refuses them in one line, and keeps what belongs."""

from __future__ import annotations

import json

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import GPT2Config, GPT2LMHeadModel, LlamaConfig, LlamaForCausalLM

import lamina
from lamina.data.tokenizers import load_tokenizer
from lamina.errors import UserError
from lamina.jobs.manifest import seal
from lamina.modeling.backbones.stored import refuse_foreign
from lamina.modeling.checkpoint import load
from lamina.training import source

SIZES = {"hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 2, "num_attention_heads": 2}
GATE = "model.layers.1.mlp.gate_proj.weight"


@pytest.fixture
def folder(tmp_path):
    torch.manual_seed(0)
    place = tmp_path / "checkpoint"
    LlamaForCausalLM(LlamaConfig(vocab_size=300, eos_token_id=256, **SIZES)).save_pretrained(place)
    load_tokenizer("bytes").save_pretrained(place)
    return place


def changed(folder, change):
    """Write the folder's weights again, as ``change`` leaves the dictionary of its tensors."""
    tensors = load_file(folder / "model.safetensors")
    change(tensors)
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    return folder


def in_float8(tensors):
    tensors[GATE] = tensors[GATE].to(torch.float8_e4m3fn)
    tensors[f"{GATE}_scale_inv"] = torch.ones(1, 1)


ROWS = [{"prompt": "a", "completion": "b"}] * 4
READERS = {
    "probe": lambda path, out: lamina.probe(path, "gains"),
    "prune": lambda path, out: lamina.prune(path, out, layers=[0]),
    "graft": lambda path, out: lamina.graft(path, out, placement="peri_ln"),
    "convert": lambda path, out: lamina.convert(path, out),
    "generate": lambda path, out: lamina.generate(path, max_new_tokens=1),
    "placements --of": lambda path, out: lamina.placement_of(path),
    "evaluate": lambda path, out: lamina.evaluate(models=path, output=out, corpus="embedded", bar=False),
    "sft": lambda path, out: lamina.sft(from_model=path, output=out, data=ROWS, steps=1, bar=False),
    "pretrain": lambda path, out: lamina.pretrain(from_model=str(path), output=out, steps=1, bar=False),
    "weights": lambda path, out: source.load(str(path), None, "causal_lm"),
}


@pytest.mark.parametrize("reader", READERS)
def test_every_reader_refuses_float8_weights_without_an_entry_that_explains_them(reader, folder, tmp_path):
    changed(folder, in_float8)
    with pytest.raises(UserError, match=rf"{GATE}' is F8_E4M3.*no quantization_config") as caught:
        READERS[reader](folder, tmp_path / "out")
    assert "\n" not in str(caught.value)
    assert not (tmp_path / "out").exists() or not any((tmp_path / "out").glob("*.safetensors"))


@pytest.mark.parametrize("reader", READERS)
def test_every_reader_refuses_a_folder_that_its_own_manifest_calls_damaged(reader, folder, tmp_path):
    seal(folder)
    with (folder / "model.safetensors").open("r+b") as file:
        file.seek(-1, 2)
        file.write(b"\x07")
    with pytest.raises(UserError, match=r"model\.safetensors is altered"):
        READERS[reader](folder, tmp_path / "out")


def test_a_manifest_is_compared_again_when_a_file_changes(folder):
    seal(folder)
    load(folder)
    (folder / "config.json").write_text((folder / "config.json").read_text() + " ")
    with pytest.raises(UserError, match=r"config\.json has \d+ bytes"):
        load(folder)


FOREIGN = [f"{GATE}_scale_inv", "model.layers.0.self_attn.q_proj.bias", "model.layers.0.self_attn.k_scale"]
FOREIGN += ["model.layers.0.extra_norm.weight", "model.layers.0.self_attn.q_proj.lora_A.weight"]
FOREIGN += ["lm_head.bias", "lm_head.weight_scale", "model.embed_positions.weight", "projector.weight"]


@pytest.mark.parametrize("key", FOREIGN)
def test_a_tensor_that_the_model_has_no_place_for_is_named(key, folder):
    changed(folder, lambda tensors: tensors.update({key: torch.ones(16)}))
    with pytest.raises(UserError, match=rf"extra tensor '{key}': it does not belong to the model type 'llama'"):
        load(folder)


@pytest.mark.parametrize("dtype", [torch.int32, torch.bool])
def test_a_header_of_whole_numbers_for_floats_is_named(dtype, folder):
    changed(folder, lambda tensors: tensors.update({GATE: tensors[GATE].to(dtype)}))
    with pytest.raises(UserError, match=rf"tensor '{GATE}' is stored as (I32|BOOL), but the model needs floats"):
        load(folder)


def test_old_weights_in_bin_files_are_compared_too(folder):
    tensors = load_file(folder / "model.safetensors")
    (folder / "model.safetensors").unlink()
    torch.save({**tensors, GATE: tensors[GATE].int()}, folder / "pytorch_model.bin")
    with pytest.raises(UserError, match=rf"tensor '{GATE}' is stored as I32"):
        load(folder)
    torch.save({**tensors, f"{GATE}_scale_inv": torch.ones(1)}, folder / "pytorch_model.bin")
    with pytest.raises(UserError, match=rf"extra tensor '{GATE}_scale_inv'"):
        load(folder)


@pytest.mark.parametrize(
    "legitimate",
    [
        {"model.layers.0.self_attn.rotary_emb.inv_freq": torch.ones(4)},
        {"model.rotary_emb.inv_freq": torch.ones(4)},
        {"score.weight": torch.ones(2, 16)},
        {"v_head.summary.weight": torch.ones(1, 16), "v_head.summary.bias": torch.ones(1)},
    ],
    ids=["old rotary buffers", "rotary buffer", "score", "value head"],
)
def test_buffers_and_other_heads_are_no_fault(legitimate, folder):
    expected = load_file(folder / "model.safetensors")[GATE]
    changed(folder, lambda tensors: tensors.update(legitimate))
    assert torch.equal(load(folder).model.get_parameter(GATE), expected)


def test_the_masks_of_old_gpt2_checkpoints_are_no_fault_and_a_new_bias_is(tmp_path):
    GPT2LMHeadModel(GPT2Config(vocab_size=40, n_embd=16, n_layer=1, n_head=2)).save_pretrained(tmp_path)
    masks = {"transformer.h.0.attn.bias": torch.ones(1, 1, 8, 8, dtype=torch.uint8)}
    masks["transformer.h.0.attn.masked_bias"] = torch.tensor(-1e4)
    changed(tmp_path, lambda tensors: tensors.update(masks))
    load(tmp_path)
    changed(tmp_path, lambda tensors: tensors.update({"transformer.h.0.attn.c_gate.bias": torch.ones(16)}))
    with pytest.raises(UserError, match=r"extra tensor 'transformer\.h\.0\.attn\.c_gate\.bias'"):
        load(tmp_path)


def test_tied_weights_may_be_stored_once_or_twice(tmp_path):
    model = LlamaForCausalLM(LlamaConfig(vocab_size=40, tie_word_embeddings=True, **SIZES))
    model.save_pretrained(tmp_path)
    assert load(tmp_path).notes == []
    table = load_file(tmp_path / "model.safetensors")["model.embed_tokens.weight"]
    changed(tmp_path, lambda tensors: tensors.update({"lm_head.weight": table.clone()}))
    assert load(tmp_path).notes == []


def test_a_reward_model_goes_through_the_same_check(tmp_path):
    pytest.importorskip("trl")
    from lab.posttraining.tiny import write_model

    from lamina.lab.posttraining.rewards import judge
    from lamina.lab.posttraining.settings import RlhfSettings
    from lamina.lab.posttraining.starting import find_start

    start = find_start(RlhfSettings(from_model=str(write_model(tmp_path / "start"))))
    folder = write_model(tmp_path / "reward", head="sequence_classification")
    changed(folder, lambda tensors: tensors.update({"score.bias": torch.ones(1)}))
    with pytest.raises(UserError, match=r"reward_model.*extra tensor 'score\.bias'"):
        judge(str(folder), start)


def test_what_may_not_be_read_is_no_damage(folder, monkeypatch):
    from pathlib import Path

    opened = Path.open

    def refuse(path, *args, **kwargs):
        if path.name == "model.safetensors":
            raise PermissionError(13, "Permission denied", str(path))
        return opened(path, *args, **kwargs)

    monkeypatch.setattr(Path, "open", refuse)
    with pytest.raises(UserError, match=r"model\.safetensors: Permission denied"):
        load(folder)


def test_one_function_of_lamina_reads_weights():
    """The loading path is one: nothing else calls a model's from_pretrained."""
    from pathlib import Path

    package = Path(lamina.__file__).parent
    calls = [
        f"{path.relative_to(package)}: {line.strip()}"
        for path in package.rglob("*.py")
        for line in path.read_text().splitlines()
        if ".from_pretrained(" in line and "Tokenizer" not in line and "Processor" not in line
    ]
    assert {call.split(":")[0] for call in calls} <= {
        "modeling/backbones/loading.py",
        "jobs/manifest.py",  # the line that tells how to load a new model
        "training/checkpointing/saved_model.py",  # a line of a model card
    }


@pytest.mark.parametrize("key", ["projector.weight", "model.layers.0.extra_norm.weight", f"{GATE}.lora_A.weight"])
def test_a_quantized_model_has_no_place_for_other_weights_either(key):
    model = LlamaForCausalLM(LlamaConfig(vocab_size=300, **SIZES))
    model.config.quantization_config = {"quant_method": "bitsandbytes"}
    module = GATE.removesuffix(".weight")
    packed = [f"{GATE}.absmax", f"{GATE}.quant_state.bitsandbytes__nf4", f"{GATE}_scale_inv", f"{module}.g_idx"]
    refuse_foreign(model, {}, [*packed, "model.layers.0.self_attn.k_scale"], "model 'm'")
    with pytest.raises(
        UserError, match=rf"model 'm': extra tensor '{key}': it does not belong to the model type 'llama'"
    ):
        refuse_foreign(model, {}, [*packed, key], "model 'm'")


LORA = "base_model.model.model.layers.{}.{}.lora_A.weight"


@pytest.mark.parametrize(
    ("layer", "module", "tensor", "base", "said"),
    [
        (0, "mlp.gate_proj", torch.ones(2, 16), None, r"extra tensor .*gate_proj\.lora_A"),
        (7, "self_attn.q_proj", torch.ones(2, 16), "", "but config.json has no such layer"),
        (0, "self_attn.q_proj", torch.ones(3, 16), None, r"its shape is \[3, 16\], but the co"),
        (0, "self_attn.q_proj", None, "", r"missing tensor .*q_proj\.lora_A.*not in the checkpoint"),
    ],
    ids=["extra", "layer", "shape", "missing"],
)
def test_an_adapter_beside_its_base_has_the_models_tensors_or_is_refused(layer, module, tensor, base, said, folder):
    peft = pytest.importorskip("peft")
    tuned = peft.get_peft_model(load(folder).model, peft.LoraConfig(r=2, target_modules=["q_proj", "v_proj"]))
    tuned.save_pretrained(folder)
    about = json.loads((folder / "adapter_config.json").read_text())
    (folder / "adapter_config.json").write_text(json.dumps({**about, "base_model_name_or_path": base}))
    assert any("lora_A" in name for name in load(folder).model.state_dict())
    tensors = load_file(folder / "adapter_model.safetensors") | {LORA.format(layer, module): tensor}
    kept = {name: value for name, value in tensors.items() if value is not None}
    save_file(kept, folder / "adapter_model.safetensors", metadata={"format": "pt"})
    with pytest.raises(UserError, match=said):
        load(folder)
