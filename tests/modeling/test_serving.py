"""What vLLM asks of a model that it runs by transformers' code.

vLLM is not installed here. What its sources ask for (vllm/model_executor/models/transformers/base.py, causal.py,
utils.py; vllm/config/model.py; vllm/compilation/decorators.py) is done here by hand: the model is built on the meta
device with the attention named "vllm", its linear layers and its embedding are replaced, and it is called as vLLM does.
"""

import re

import pytest
import torch
from modeling.tiny import OF_TEXT, built, llama, token_ids
from torch import nn
from transformers import AutoConfig, AutoModel, Qwen3Config
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from lamina.placements import names

STYLES = {"colwise", "colwise_rep", "colwise_gather_output", "rowwise", "rowwise_rep", "rowwise_split_input"}


class Linear(nn.Module):
    """In place of vLLM's linear layers, which are none of torch's."""

    def __init__(self, replaced: nn.Linear):
        super().__init__()
        self.weight = nn.Parameter(torch.empty_like(replaced.weight))
        self.bias = None if replaced.bias is None else nn.Parameter(torch.empty_like(replaced.bias))

    def forward(self, x):
        return nn.functional.linear(x, self.weight, self.bias)


class Attention:
    """In place of vLLM's: one per layer, that the attention function finds by ``module.layer_idx``."""

    def __init__(self):
        self.calls = 0


@pytest.fixture
def engine(monkeypatch):
    """The attention function as vLLM registers it; here over whole sequences, as a causal mask would have it."""

    def forward(module, query, key, value, attention_mask, *, attention_instances=None, **kwargs):
        assert attention_mask is None  # the engine knows which tokens belong together
        attention_instances[module.layer_idx].calls += 1
        causal = {**kwargs, "is_causal": True}
        return sdpa_attention_forward(module, query, key, value, None, **causal)

    monkeypatch.setitem(ALL_ATTENTION_FUNCTIONS._global_mapping, "vllm", forward)


def as_the_engine_builds(folder):
    """The base model with the checkpoint's weights, its parts replaced."""
    config = AutoConfig.from_pretrained(folder)
    assert config == config.get_text_config(), "it would be taken for a multimodal model"
    config.get_text_config()._attn_implementation = "vllm"
    config.dtype = torch.get_default_dtype()
    with torch.device("meta"):
        model = AutoModel.from_config(config, dtype=torch.float32)
    assert type(model)._supports_attention_backend
    plan = {f"model.{key}": style for key, style in model.tp_plan.items()}
    for name, module in list(model.named_modules()):
        if isinstance(module, nn.Linear):
            style = next((plan[key] for key in plan if re.match(key, f"model.{name}")), "replicate")
            assert style in STYLES, name
            model.set_submodule(name, Linear(module))
    model.set_input_embeddings(nn.Embedding(config.vocab_size, config.hidden_size, device="meta"))
    return config, model


@torch.no_grad()
def check(model, folder):
    model.save_pretrained(folder)
    config, served = as_the_engine_builds(folder)
    weights = {
        name.removeprefix("model."): value for name, value in model.state_dict().items() if "lm_head" not in name
    }
    missing, unexpected = served.load_state_dict(weights, assign=True, strict=False)
    assert not unexpected
    assert all("rotary_emb" in name for name in missing)
    rotary = {name: b for name, b in model.model.named_buffers() if "rotary_emb" in name}  # the engine keeps buffers
    for name, buffer in rotary.items():
        served.get_buffer(name)
        parent, _, own = name.rpartition(".")
        served.get_submodule(parent).register_buffer(own, buffer, persistent=False)
    instances = {index: Attention() for index in range(config.num_hidden_layers)}
    ids = token_ids(batch=1)
    positions = torch.arange(ids.shape[1])[None]
    output = served.eval()(
        input_ids=ids,
        inputs_embeds=None,
        use_cache=False,
        position_ids=positions,
        attention_instances=instances,
        return_dict=False,
    )
    logits = model.lm_head(output[0])
    assert torch.allclose(logits, model(ids).logits, atol=1e-5)
    assert [attention.calls for attention in instances.values()] == [1] * config.num_hidden_layers


@pytest.mark.usefixtures("engine")
@pytest.mark.parametrize("placement", names())
def test_every_placement_runs_as_vllm_runs_it(placement, tmp_path):
    check(built(placement, 4, config=llama(4)), tmp_path)


@pytest.mark.usefixtures("engine")
def test_so_does_another_backbone(tmp_path):
    check(built("keel", config=Qwen3Config(**OF_TEXT, head_dim=8)), tmp_path)


@pytest.mark.parametrize("placement", names())
def test_a_plan_for_stages_only_where_a_stage_may_take_the_stream(placement):
    model = built(placement, 4)
    assert all(model.get_submodule(name) is not None for name in model.pp_plan)
    # a later stage hands the stream in as embeddings, which a norm on the embedding would norm again
    stages = "model.backbone.layers" in model.pp_plan
    assert stages is (model.model.embedding_norm is None and model.model.embedding_scale == 1.0)
