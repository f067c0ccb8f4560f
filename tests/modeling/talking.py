"""A user's own architecture: a Llama whose modules have other names, all of them."""

import torch
from torch import nn
from transformers import AutoConfig, AutoModel, LlamaConfig, PreTrainedModel
from transformers.cache_utils import DynamicCache
from transformers.masking_utils import create_causal_mask
from transformers.modeling_outputs import BaseModelOutputWithPast
from transformers.models.llama.modeling_llama import LlamaAttention, LlamaRMSNorm, LlamaRotaryEmbedding

NAMES = {"layers": "tower.turns", "attention": "talk", "feed_forward": "think", "norm": "last"}
NAMES |= {"roles": {"feed_forward.gate": "gate", "wide": "feed_forward_in", "narrow": "feed_forward_out"}}


class TalkConfig(LlamaConfig):
    model_type = "talk"


class Think(nn.Module):
    def __init__(self, config):
        super().__init__()
        self.gate = nn.Linear(config.hidden_size, config.intermediate_size, bias=False)
        self.wide = nn.Linear(config.hidden_size, config.intermediate_size, bias=False)
        self.narrow = nn.Linear(config.intermediate_size, config.hidden_size, bias=False)

    def forward(self, x):
        return self.narrow(nn.functional.silu(self.gate(x)) * self.wide(x))


class Scale(LlamaRMSNorm):
    pass


class Turn(nn.Module):
    def __init__(self, config, index):
        super().__init__()
        self.one, self.two = (Scale(config.hidden_size, eps=config.rms_norm_eps) for _ in range(2))
        self.talk, self.think = LlamaAttention(config, index), Think(config)

    def forward(self, x, **kwargs):
        x = x + self.talk(self.one(x), **kwargs)[0]
        return x + self.think(self.two(x))


class Tower(nn.Module):
    def __init__(self, config):
        super().__init__()
        self.turns = nn.ModuleList(Turn(config, index) for index in range(config.num_hidden_layers))


class Model(PreTrainedModel):  # "Lamina" + this name is a class of Lamina's own
    config_class = TalkConfig
    base_model_prefix = "model"
    _input_embed_layer = "words"
    _supports_sdpa = True

    def __init__(self, config):
        super().__init__(config)
        self.words = nn.Embedding(config.vocab_size, config.hidden_size)
        self.tower = Tower(config)
        self.last = Scale(config.hidden_size, eps=config.rms_norm_eps)
        self.rotary = LlamaRotaryEmbedding(config)
        self.post_init()

    def forward(
        self,
        input_ids=None,
        attention_mask=None,
        position_ids=None,
        past_key_values=None,
        inputs_embeds=None,
        use_cache=None,
        **kwargs,
    ):
        x = self.words(input_ids) if inputs_embeds is None else inputs_embeds
        if use_cache and past_key_values is None:
            past_key_values = DynamicCache(config=self.config)
        if position_ids is None:
            seen = 0 if past_key_values is None else past_key_values.get_seq_length()
            position_ids = (torch.arange(x.shape[1], device=x.device) + seen)[None]
        mask = create_causal_mask(
            config=self.config,
            inputs_embeds=x,
            attention_mask=attention_mask,
            past_key_values=past_key_values,
            position_ids=position_ids,
        )
        rotary = self.rotary(x, position_ids=position_ids)
        for turn in self.tower.turns:
            x = turn(x, attention_mask=mask, position_embeddings=rotary, past_key_values=past_key_values, **kwargs)
        return BaseModelOutputWithPast(last_hidden_state=self.last(x), past_key_values=past_key_values)


AutoConfig.register("talk", TalkConfig, exist_ok=True)
AutoModel.register(TalkConfig, Model, exist_ok=True)
