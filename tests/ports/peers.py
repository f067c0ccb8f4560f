"""What the tests of emitted files share: the module that a file makes, and models to compare with Lamina's."""

import contextlib
import sys
import types
from unittest import mock

import model_of_nanogpts_form
import torch
from torch import nn
from transformers import GPT2Config, LlamaConfig, LlamaForCausalLM
from transformers.models.llama.modeling_llama import LlamaAttention

import lamina
from lamina.modeling.modeling_lamina import GPT2_ADAPTER
from lamina.placements import names, resolve
from lamina.ports import emit

VOCABULARY, WIDTH, LAYERS = 61, 32, 5
SINGLE_STREAM = [name for name in names() if (plan := resolve(name, 5)).streams == 1 and not plan.has_memory]
GPT2 = GPT2_ADAPTER
TOKENS = {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}


def llama(num_layers=LAYERS, **changes):
    sizes = {"hidden_size": WIDTH, "intermediate_size": 48, "num_attention_heads": 4, "num_key_value_heads": 2}
    return LlamaConfig(
        **{**sizes, "num_hidden_layers": num_layers, "vocab_size": VOCABULARY, "max_position_embeddings": 64, **changes}
    )


def gpt2(num_layers=LAYERS, **changes):
    sizes = {"n_embd": WIDTH, "n_head": 4, "n_layer": num_layers, "n_positions": 64, "vocab_size": VOCABULARY}
    drops = dict.fromkeys(("resid_pdrop", "embd_pdrop", "attn_pdrop"), 0.0)
    return GPT2Config(**{**sizes, **TOKENS, **drops, "activation_function": "gelu", **changes})


def module_of(code, **beside):
    """Run an emitted file; ``beside`` are the modules that it finds by name."""
    module = types.ModuleType("emitted")
    before = {name: sys.modules.get(name) for name in beside}
    sys.modules.update(beside)
    try:
        exec(compile(code, "emitted.py", "exec"), module.__dict__)
    finally:
        for name, old in before.items():
            sys.modules.pop(name) if old is None else sys.modules.update({name: old})
    return module


def shaken(model, seed=1):
    """The model with weights and gains that are all different, so that no mistake is too small to see."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in model.parameters():
            noise = torch.randn(parameter.shape, generator=generator)
            if parameter.ndim > 1:
                parameter.copy_(noise / parameter.shape[-1] ** 0.5)
            else:
                parameter.mul_(1 + 0.2 * noise).add_(0.1 * torch.rand(parameter.shape, generator=generator))
    return model.eval()


class Attention(LlamaAttention):
    """One's own attention: it returns the states alone."""

    def forward(self, *args, **kwargs):
        return super().forward(*args, **kwargs)[0]


class OnPyTorch(nn.Module):
    """An embedding, an emitted Stack around transformers' modules, a head."""

    def __init__(self, emitted, config):
        super().__init__()
        self.theirs = LlamaForCausalLM(config).model
        self.embed_tokens, self.rotary = self.theirs.embed_tokens, self.theirs.rotary_emb
        for layer in self.theirs.layers:
            layer.self_attn.__class__ = Attention
        modules = [(layer.self_attn, layer.mlp) for layer in self.theirs.layers]
        heads = (config.head_dim,) if "head_dim: int" in emitted.source else ()
        self.stack = emitted.Stack(modules, config.hidden_size, *heads, eps=config.rms_norm_eps)
        self.lm_head = nn.Linear(config.hidden_size, config.vocab_size, bias=False)
        del self.theirs

    def forward(self, ids):
        x = self.embed_tokens(ids)
        positions = self.rotary(x, torch.arange(ids.shape[1])[None])
        return self.lm_head(self.stack(x, position_embeddings=positions, attention_mask=None))


def on_pytorch(spec, config, num_layers=LAYERS):
    code = emit(spec, "pytorch", num_layers).code
    module = module_of(code)
    module.source = code
    return module, OnPyTorch(module, config)


def on_nanogpt(spec, config, num_layers=LAYERS, **changes):
    code = emit(spec, "nanogpt", num_layers).code
    module = module_of(code, model=model_of_nanogpts_form)
    module.source = code
    sizes = {"block_size": config.n_positions, "vocab_size": config.vocab_size, "n_layer": config.n_layer}
    theirs = model_of_nanogpts_form.GPTConfig(**sizes, n_head=config.n_head, n_embd=config.n_embd, **changes)
    model = model_of_nanogpts_form.GPT(theirs)
    module.rewire(model)
    return module, model


def ours(spec, config, num_layers=LAYERS, **more):
    """Lamina's model of the same placement, shaken."""
    more |= {"adapter": GPT2} if config.model_type == "gpt2" else {}
    return shaken(lamina.build(config, spec, num_layers=num_layers, **more))


def on_megatron(spec, config, num_layers=LAYERS):
    """Megatron-Core's own GPTModel with emitted blocks, on a CPU: one process, and no CUDA generators."""
    from megatron.core import parallel_state
    from megatron.core.models.gpt import GPTModel
    from megatron.core.tensor_parallel import get_cuda_rng_tracker
    from megatron.core.transformer import TransformerConfig

    class Model(GPTModel):
        def forward(self, ids):
            count = ids.shape[1]
            mask = torch.ones(count, count, dtype=torch.bool).triu(1)[None, None]
            with mock.patch("torch.cuda.current_device", return_value="cpu"):  # it asks on a CPU, too
                return super().forward(ids, torch.arange(count)[None].expand(len(ids), -1), mask)

        def load_state_dict(self, weights):
            kept = super().load_state_dict(weights, strict=False)
            assert set(kept.unexpected_keys) <= ({"output_layer.weight"} if config.tie_word_embeddings else set())
            assert all(name.endswith("_extra_state") for name in kept.missing_keys)

    if not torch.distributed.is_initialized():
        torch.distributed.init_process_group("gloo", store=torch.distributed.HashStore(), rank=0, world_size=1)
        parallel_state.initialize_model_parallel()
        get_cuda_rng_tracker().fork = contextlib.nullcontext  # of dropout's generators
    emitted = emit(spec, "megatron", num_layers)
    module = module_of(emitted.code)
    theirs = TransformerConfig(
        num_layers=num_layers, hidden_size=config.hidden_size, ffn_hidden_size=config.intermediate_size,
        num_attention_heads=config.num_attention_heads, num_query_groups=config.num_key_value_heads,
        hidden_dropout=0.0, attention_dropout=0.0, activation_func=nn.functional.silu, gated_linear_unit=True,
        add_bias_linear=False, normalization="RMSNorm", layernorm_epsilon=config.rms_norm_eps,
        use_cpu_initialization=True,
    )  # fmt: skip
    blocks = getattr(module, emitted.plan.placement)(theirs)
    return module, Model(
        theirs, blocks, config.vocab_size, 64, position_embedding_type="rope",
        share_embeddings_and_output_weights=config.tie_word_embeddings,
    )  # fmt: skip


def on_torchtitan(spec, config, num_layers=LAYERS):
    """torchtitan's own Llama 3 with emitted blocks; its weights are those that it and the file draw."""
    from torchtitan.models.common import ComplexRoPE, Embedding, Linear, RMSNorm
    from torchtitan.models.common.attention import ScaledDotProductAttention
    from torchtitan.models.llama3 import Llama3Model, _build_llama3_layers

    width, head_dim = config.hidden_size, config.hidden_size // config.num_attention_heads
    layers = _build_llama3_layers(
        n_layers=num_layers, dim=width, n_heads=config.num_attention_heads, n_kv_heads=config.num_key_value_heads,
        hidden_dim=config.intermediate_size, fuse_qkv=False, attn_backend="flex",
        rope=ComplexRoPE.Config(dim=head_dim, max_seq_len=64, theta=10000.0),
    )  # fmt: skip
    for layer in layers:
        layer.attention_norm.eps = layer.ffn_norm.eps = config.rms_norm_eps
        layer.attention.inner_attention = ScaledDotProductAttention.Config()  # flex attention is compiled on a CPU
    emitted = emit(spec, "torchtitan", num_layers)
    module = module_of(emitted.code)
    theirs = Llama3Model.Config(
        dim=width, vocab_size=config.vocab_size, layers=layers, enable_weight_tying=config.tie_word_embeddings,
        tok_embeddings=Embedding.Config(num_embeddings=config.vocab_size, embedding_dim=width),
        norm=RMSNorm.Config(normalized_shape=width, eps=config.rms_norm_eps),
        lm_head=Linear.Config(in_features=width, out_features=config.vocab_size),
    )  # fmt: skip
    model = getattr(module, emitted.plan.placement)(theirs).build()
    model.init_states()
    return module, model
