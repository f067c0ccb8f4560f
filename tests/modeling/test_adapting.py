"""PEFT's methods on Lamina models, with the targets that PEFT looks up, and on quantized weights."""

import pytest
import torch
from modeling.tiny import LATENT, SIZES, VOCABULARY, built, llama, shake, token_ids
from spread import spread
from torch import nn
from transformers import AutoConfig, AutoModelForCausalLM, LlamaForCausalLM, QuantoConfig, TorchAoConfig

from lamina.modeling.wiring_lamina import LaminaNorm
from lamina.placements import names

peft = pytest.importorskip("peft")

BACKBONES = {
    "llama": {"vocab_size": VOCABULARY},
    "deepseek_v2": {**LATENT, "vocab_size": VOCABULARY, "n_shared_experts": 1, "q_lora_rank": None},
    "deepseek_v3": {**LATENT, "vocab_size": VOCABULARY, "n_shared_experts": 1, "q_lora_rank": 8},
    "vit": {"image_size": 8, "patch_size": 4},
}
LORA = {"llama": {"q_proj", "v_proj"}, "deepseek_v2": {"q_proj", "kv_b_proj"}}
LORA |= {"deepseek_v3": {"q_b_proj", "kv_b_proj"}, "vit": {"q_proj", "v_proj"}}
IA3 = {"llama": {"k_proj", "v_proj", "down_proj"}, "deepseek_v2": {"kv_b_proj", "down_proj"}}
IA3 |= {"deepseek_v3": {"kv_b_proj", "down_proj"}, "vit": {"k_proj", "v_proj", "fc2"}}
NORMS = {"pre_norm", "out_norm", "embedding_norm"}  # of peri_ln


def targeted(backbone, config):
    model = built("peri_ln", config=AutoConfig.for_model(backbone, **SIZES, **BACKBONES[backbone]))
    return {name.rpartition(".")[2] for name in peft.get_peft_model(model, config).targeted_module_names}


@pytest.mark.parametrize("backbone", BACKBONES)
def test_a_method_finds_its_targets_in_any_backbone(backbone):
    assert targeted(backbone, peft.LoraConfig()) == LORA[backbone]
    assert targeted(backbone, peft.IA3Config()) == IA3[backbone]
    assert targeted(backbone, peft.LNTuningConfig()) == NORMS


@pytest.mark.parametrize("placement", ["post_ln", "pre_ln"])
def test_norms_alone_are_tuned_and_merged(placement):
    """Post-LN has no final norm: what is in its place has no weights, at which PEFT would fail."""
    model = built(placement)
    tuned = peft.get_peft_model(model, peft.LNTuningConfig())
    trained = {name.rpartition(".ln_tuning")[0] for name, p in tuned.named_parameters() if p.requires_grad}
    assert {name.rpartition(".")[2] for name in trained} == {"post_norm" if placement == "post_ln" else "pre_norm"}
    before = model(token_ids()).logits.detach()
    optimizer = torch.optim.SGD([p for p in tuned.parameters() if p.requires_grad], lr=0.1)
    tuned(input_ids=token_ids(), labels=token_ids()).loss.backward()
    optimizer.step()
    after = tuned(token_ids()).logits.detach()
    assert (after - before).abs().max() > 1e-3
    assert torch.equal(tuned.merge_and_unload()(token_ids()).logits, after)


TIMES = 5.0


METHODS = {
    "quanto": lambda: pytest.importorskip("optimum.quanto") and QuantoConfig(weights="int8"),
    "torchao": lambda: TorchAoConfig(pytest.importorskip("torchao.quantization").Int8WeightOnlyConfig()),
}


def quantized(folder, method):
    """The model in a folder, its weights quantized as they are loaded."""
    return AutoModelForCausalLM.from_pretrained(folder, quantization_config=METHODS[method]()).eval()


@torch.no_grad()
def logits(model):
    return model.eval()(input_ids=token_ids()).logits


def error(found, exact):
    return float((found - exact).norm() / exact.norm())


@pytest.fixture(scope="module", params=METHODS)
def method(request):
    METHODS[request.param]()
    return request.param


@pytest.fixture(scope="module")
def llamas_error(method, tmp_path_factory):
    torch.manual_seed(0)
    model = LlamaForCausalLM(llama()).eval()
    shake(model)
    model.save_pretrained(folder := tmp_path_factory.mktemp("llama"))
    return error(logits(quantized(folder, method)), logits(model))


@pytest.mark.parametrize("placement", spread(names()))
def test_a_placement_loses_what_a_llama_loses(placement, method, llamas_error, tmp_path):
    model = built(placement)
    model.save_pretrained(tmp_path)
    loaded = quantized(tmp_path, method)
    linear = {name: m for name, m in loaded.named_modules() if isinstance(m, nn.Linear) and name != "lm_head"}
    assert len(linear) == 2 * 7
    for module in linear.values():  # the weight is a tensor of the library's own class
        assert type(module.weight.data) is not torch.Tensor or type(module) is not nn.Linear
    assert type(loaded.lm_head) is nn.Linear
    norms = [name for name, module in model.named_modules() if isinstance(module, LaminaNorm)]
    assert bool(norms) == (placement not in ("rezero", "skipinit"))
    for name in norms:
        kept = loaded.get_submodule(name).state_dict()
        assert all(torch.equal(kept[key], value) for key, value in model.get_submodule(name).state_dict().items()), name
    exact, found = logits(model), logits(loaded)
    assert 0 < error(found, exact) < TIMES * llamas_error
    with torch.no_grad():
        for name, module in linear.items():
            model.get_submodule(name).weight.copy_(module.weight.dequantize())
    torch.testing.assert_close(found, logits(model), rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("placement", spread(names(), ("fusenorm", "hybridnorm")))
def test_an_adapter_is_trained_on_quantized_weights(placement, method, tmp_path):
    """As QLoRA does it; what was trained is loaded again on top of the weights as they are quantized anew."""
    built(placement).save_pretrained(tmp_path / "model")
    tuned = peft.get_peft_model(quantized(tmp_path / "model", method), peft.LoraConfig(r=4))
    trained = [p for p in tuned.parameters() if p.requires_grad]
    assert all(p.dtype is torch.float32 for p in trained)
    optimizer = torch.optim.AdamW(trained, lr=1e-2)
    losses = []
    for _ in range(4):
        loss = tuned.train()(input_ids=token_ids(), labels=token_ids()).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(float(loss))
    assert losses == sorted(losses, reverse=True)
    tuned.save_pretrained(tmp_path / "adapter")
    again = peft.PeftModel.from_pretrained(quantized(tmp_path / "model", method), tmp_path / "adapter")
    assert torch.equal(logits(again), logits(tuned))


@pytest.mark.parametrize("placement", ["keel", "hybridnorm"])
def test_torchao_saves_what_it_quantized(placement, tmp_path):
    METHODS["torchao"]()
    built(placement).save_pretrained(tmp_path / "model")
    model = quantized(tmp_path / "model", "torchao")
    model.save_pretrained(tmp_path / "quantized")
    assert torch.equal(logits(AutoModelForCausalLM.from_pretrained(tmp_path / "quantized")), logits(model))
