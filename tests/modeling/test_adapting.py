"""PEFT's methods on Lamina models, with the targets that PEFT looks up itself."""

import pytest
import torch
from tiny import LATENT, SIZES, VOCABULARY, built, token_ids
from transformers import AutoConfig

peft = pytest.importorskip("peft")

BACKBONES = {
    "llama": {"vocab_size": VOCABULARY},
    "deepseek_v2": {**LATENT, "vocab_size": VOCABULARY, "n_shared_experts": 1, "q_lora_rank": None},
    "deepseek_v3": {**LATENT, "vocab_size": VOCABULARY, "n_shared_experts": 1, "q_lora_rank": 8},
    "vit": {"image_size": 8, "patch_size": 4},
}
LORA = {
    "llama": {"q_proj", "v_proj"},
    "deepseek_v2": {"q_proj", "kv_b_proj"},
    "deepseek_v3": {"q_b_proj", "kv_b_proj"},
    "vit": {"q_proj", "v_proj"},
}
IA3 = {
    "llama": {"k_proj", "v_proj", "down_proj"},
    "deepseek_v2": {"kv_b_proj", "down_proj"},
    "deepseek_v3": {"kv_b_proj", "down_proj"},
    "vit": {"k_proj", "v_proj", "fc2"},
}
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
