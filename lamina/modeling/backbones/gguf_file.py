"""GGUF, the file of llama.cpp: written from a model of transformers by the names and keys of the gguf package."""

from __future__ import annotations

import importlib.util
import json
import logging
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from transformers import AutoModelForCausalLM, PreTrainedConfig, PreTrainedModel

from lamina.errors import UserError
from lamina.modeling.backbones.equivalent import in_pairs, window_of

if TYPE_CHECKING:
    from gguf import GGUFWriter

logger = logging.getLogger(__name__)

FILE = "model.gguf"


@dataclass(frozen=True, kw_only=True)
class Format:
    """An architecture of llama.cpp.

    Args:
        name: its name there.
        pairs: whether queries and keys are stored in another order than transformers': ``in_pairs``.
        gain_offset: what is added to the gains of norms.
        window: whether every second layer, from the first, sees a sliding window.
    """

    name: str
    pairs: bool = False
    gain_offset: float = 0.0
    window: bool = False


# By transformers' model type: src/models/*.cpp of llama.cpp computes the same.
FORMATS: dict[str, Format] = {
    "llama": Format(name="llama", pairs=True),
    "mistral": Format(name="llama", pairs=True),
    "qwen2": Format(name="qwen2"),
    "qwen3": Format(name="qwen3"),
    "olmo2": Format(name="olmo2"),
    "exaone4": Format(name="exaone4"),
    "glm4": Format(name="glm4"),
    "gemma2": Format(name="gemma2", gain_offset=1.0, window=True),
}


def require_gguf() -> None:
    """Raise UserError that says what to install, where the gguf package is missing."""
    if importlib.util.find_spec("gguf") is None:
        raise UserError("--to gguf: needs gguf (to install it: pip install 'lamina[gguf]')")


def check(config: PreTrainedConfig) -> Format:
    """The format of a model. Raises UserError for a setting that llama.cpp would not compute."""
    model_type = config.model_type
    if model_type not in FORMATS:
        raise UserError(f"--to gguf: not written for {model_type!r} (allowed: {', '.join(FORMATS)})")
    row = FORMATS[model_type]
    rope = dict(config.rope_parameters or {})
    types, window = getattr(config, "layer_types", None), window_of(config)
    heads, width = config.num_attention_heads, config.hidden_size
    says = None
    if rope.get("rope_type", "default") != "default":
        says = f"rope_parameters: {rope['rope_type']!r} scaling (allowed: default)"
    elif not row.window and window is not None:
        says = f"sliding_window: {window} is less than max_position_embeddings (allowed: none)"
    elif model_type == "olmo2" and _head_dim(config) * heads != width:
        says = f"head_dim: {_head_dim(config)} (allowed: hidden_size / num_attention_heads)"
    elif model_type == "exaone4" and config.num_hidden_layers == 64:
        says = "num_hidden_layers: llama.cpp takes an exaone4 of 64 layers for one with sliding windows"
    elif row.window:
        alternate = ["sliding_attention", "full_attention"] * config.num_hidden_layers
        scalar = width / heads if config.num_hidden_layers == 46 else _head_dim(config)  # 46: Gemma 2 27B
        if config.query_pre_attn_scalar != scalar:
            says = f"query_pre_attn_scalar: {config.query_pre_attn_scalar} (allowed: {scalar:g})"
        elif config.hidden_activation != "gelu_pytorch_tanh":
            says = f"hidden_activation: {config.hidden_activation!r} (allowed: gelu_pytorch_tanh)"
        elif None in (config.attn_logit_softcapping, config.final_logit_softcapping):
            says = "attn_logit_softcapping and final_logit_softcapping: None (allowed: numbers)"
        elif types != alternate[: config.num_hidden_layers]:
            says = "layer_types: not sliding and full in turn (allowed: sliding first)"
    if says:
        raise UserError(f"--to gguf: {says}")
    return row


def write(model: PreTrainedModel, path: Path, tokenizer: Path | None) -> bool:
    """Write a model of transformers into a GGUF file. Returns whether its tokenizer is in it.

    Matrices keep the model's dtype, vectors are float32. ``tokenizer``: the folder that holds tokenizer.json. One that
    llama.cpp would not apply as it is leaves the file without: llama.cpp then takes and returns token ids.

    Raises:
        UserError: for a model or a setting that llama.cpp would not compute.
    """
    import gguf

    row, config = check(model.config), model.config
    file_types = {
        torch.float32: (gguf.LlamaFileType.ALL_F32, gguf.GGMLQuantizationType.F32),
        torch.float16: (gguf.LlamaFileType.MOSTLY_F16, gguf.GGMLQuantizationType.F16),
        torch.bfloat16: (gguf.LlamaFileType.MOSTLY_BF16, gguf.GGMLQuantizationType.BF16),
    }
    file_type, matrices = file_types[model.dtype]
    writer = gguf.GGUFWriter(path, row.name)
    writer.add_name(f"lamina-{config.model_type}")
    writer.add_file_type(file_type)
    _add_sizes(writer, config, row)
    has_tokenizer = _add_tokenizer(writer, tokenizer, config.vocab_size)
    for name, tensor in _stored(model, row).items():
        kind = matrices if tensor.ndim > 1 else gguf.GGMLQuantizationType.F32
        writer.add_tensor(name, gguf.quantize(tensor.float().cpu().numpy(), kind), raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return has_tokenizer


@torch.no_grad()
def read(path: Path, config: PreTrainedConfig) -> PreTrainedModel:
    """The model of transformers with the tensors of a GGUF file that ``write`` wrote, in float32."""
    import gguf

    tensors = {t.name: torch.tensor(gguf.dequantize(t.data, t.tensor_type)) for t in gguf.GGUFReader(path).tensors}
    model: PreTrainedModel = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    row = check(config)
    for name, (key, parameter) in _places(model, row).items():
        value = tensors[name]
        if row.pairs and ("attn_q." in name or "attn_k." in name):
            value = value.unflatten(0, (-1, _head_dim(config) // 2, 2)).transpose(1, 2).flatten(0, 2)
        parameter.copy_(value - (row.gain_offset if _is_gain(key) else 0.0))
    return model.eval()


def _stored(model: PreTrainedModel, row: Format) -> dict[str, torch.Tensor]:
    """The tensors by GGUF's names, as llama.cpp stores them."""
    stored = {}
    for name, (key, value) in _places(model, row).items():
        turned = row.pairs and ("attn_q." in name or "attn_k." in name)
        tensor = in_pairs(value.detach(), _head_dim(model.config)) if turned else value.detach()
        stored[name] = tensor + row.gain_offset if _is_gain(key) and row.gain_offset else tensor
    return stored


def _places(model: PreTrainedModel, row: Format) -> dict[str, tuple[str, torch.Tensor]]:
    """Each tensor and its name in transformers, by GGUF's name.

    A head that is the embedding is left out, as llama.cpp takes the embedding where there is none; but not in an olmo2.
    """
    import gguf

    architecture = next(a for a, name in gguf.MODEL_ARCH_NAMES.items() if name == row.name)
    names = gguf.get_tensor_name_map(architecture, model.config.num_hidden_layers)
    tied = model.config.tie_word_embeddings and row.name != "olmo2"
    places = {}
    for key, value in model.state_dict().items():
        if tied and key == "lm_head.weight":
            continue
        name = names.get_name(key, try_suffixes=(".weight", ".bias"))
        if name is None:
            raise UserError(f"--to gguf: {row.name!r} has no tensor for {key!r}")
        places[name] = (key, value)
    return places


def _is_gain(key: str) -> bool:
    return key.endswith("norm.weight")


def _add_sizes(writer: GGUFWriter, config: PreTrainedConfig, row: Format) -> None:
    writer.add_vocab_size(config.vocab_size)
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_block_count(config.num_hidden_layers)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(config.num_key_value_heads)
    writer.add_key_length(_head_dim(config))
    writer.add_value_length(_head_dim(config))
    writer.add_rope_dimension_count(_head_dim(config))
    writer.add_rope_freq_base((config.rope_parameters or {}).get("rope_theta", 10000.0))
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    if row.window:
        writer.add_attn_logit_softcapping(config.attn_logit_softcapping)
        writer.add_final_logit_softcapping(config.final_logit_softcapping)
        writer.add_sliding_window(config.sliding_window)


def _add_tokenizer(writer: GGUFWriter, folder: Path | None, vocab_size: int) -> bool:
    """Add a byte-level BPE that splits words as GPT-2's does; any other is left out. Returns whether it was added."""
    import gguf

    file = None if folder is None else folder / "tokenizer.json"
    content = json.loads(file.read_text(encoding="utf-8")) if file is not None and file.is_file() else {}
    model, splits = content.get("model") or {}, content.get("pre_tokenizer") or {}
    as_gpt2 = {"type": "ByteLevel", "add_prefix_space": False, "use_regex": True}
    same = all(splits.get(name) == value for name, value in as_gpt2.items()) and not content.get("normalizer")
    if model.get("type") != "BPE" or not model.get("merges") or not same:
        writer.add_tokenizer_model("no_vocab")
        return False
    added: list[Mapping] = content.get("added_tokens", [])
    tokens = {index: token for token, index in model["vocab"].items()} | {t["id"]: t["content"] for t in added}
    types = {t["id"]: gguf.TokenType.CONTROL if t["special"] else gguf.TokenType.USER_DEFINED for t in added}
    unused = gguf.TokenType.UNUSED
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("gpt-2")
    writer.add_token_list([tokens.get(i, f"[PAD{i}]") for i in range(vocab_size)])
    writer.add_token_types([types.get(i, gguf.TokenType.NORMAL if i in tokens else unused) for i in range(vocab_size)])
    gguf.SpecialVocab(str(folder), load_merges=True, n_vocab=vocab_size).add_to_gguf(writer, quiet=True)
    return True


def _head_dim(config: PreTrainedConfig) -> int:
    return getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
