"""Read and write Megatron-Core's checkpoints in the format torch_dist."""

from __future__ import annotations

import io
import json
import pickle
import re
import zipfile
from argparse import Namespace
from collections import OrderedDict
from pathlib import Path

import torch
from torch.distributed.checkpoint.state_dict_saver import save as save_distributed
from transformers import LlamaConfig

from lamina.errors import UserError
from lamina.modeling.configuration_lamina import backbone_of
from lamina.modeling.modeling_lamina import LaminaForCausalLM
from lamina.placements import Plan
from lamina.ports.foreign import ForeignCheckpoint, distributed, file_of
from lamina.ports.weights import weights_for

LATEST = "latest_checkpointed_iteration.txt"
_METADATA = {"sharded_backend": "torch_dist", "sharded_backend_version": 1}
_METADATA |= {"common_backend": "torch", "common_backend_version": 1}
# Megatron stores a norm before a linear layer under Transformer Engine's name, whichever code computes the norm.
_STORED = {"input_layernorm.": "self_attention.linear_qkv.layer_norm_"}
_STORED["pre_mlp_layernorm."] = "mlp.linear_fc1.layer_norm_"
_EXTRA = ("self_attention.linear_proj", "self_attention.linear_qkv", "mlp.linear_fc1", "mlp.linear_fc2")
# Megatron's arguments for a Llama of transformers.
_LLAMA: dict[str, object] = {
    "swiglu": True,
    "add_bias_linear": False,
    "normalization": "RMSNorm",
    "position_embedding_type": "rope",
    "rotary_percent": 1.0,
    "rotary_interleaved": False,
    "apply_layernorm_1p": False,
    "num_experts": None,
    "multi_latent_attention": False,
}


class _Unread:
    """A stand-in for a class in a pickle that Lamina does not need. The code of the real class does not run."""

    def __init__(self, *args: object, **kwargs: object):
        pass

    def __setstate__(self, state: object) -> None:
        pass


class _Arguments(pickle.Unpickler):
    """An unpickler for common.pt. For safety, the unpickler loads only argparse's Namespace and OrderedDict."""

    def find_class(self, module: str, name: str, /) -> type:
        return {"Namespace": Namespace, "OrderedDict": OrderedDict}.get(name, _Unread)

    def persistent_load(self, pid: object, /) -> None:
        """Skip tensors."""


def _arguments(file: Path) -> Namespace:
    try:
        with zipfile.ZipFile(file) as archive:
            (name,) = (name for name in archive.namelist() if name.endswith("/data.pkl"))
            stored = _Arguments(io.BytesIO(archive.read(name))).load()
    except (zipfile.BadZipFile, ValueError, pickle.UnpicklingError, EOFError) as error:
        raise UserError(
            f"source: {str(file)!r} cannot be read ({error}). Give a checkpoint that Megatron wrote."
        ) from error
    if not isinstance(stored, dict) or not isinstance(stored.get("args"), Namespace):
        raise UserError(
            f"source: {str(file)!r} has no 'args', from which Lamina reads the model's sizes. Give a checkpoint "
            "that Megatron wrote."
        )
    return stored["args"]


def read(folder: Path) -> ForeignCheckpoint:
    """Read a folder that Megatron saved, or the folder of one iteration. The result names no norm placement.

    Raises UserError if Megatron's arguments do not describe a Llama.
    """
    if (folder / LATEST).is_file():
        latest = (folder / LATEST).read_text("utf-8").strip()
        folder /= latest if latest == "release" else f"iter_{int(latest):07d}"
    args = vars(_arguments(file_of(folder, "common.pt")))
    for name, expected in _LLAMA.items():
        if (value := args.get(name, expected)) != expected:
            raise UserError(
                f"source: the checkpoint's args have {name} = {value!r}, but Lamina reads only {expected!r}. Choose "
                "another checkpoint."
            )
    tensors = distributed(folder, "embedding.", "decoder.", "output_layer.")
    count, heads = args["num_layers"], args["num_attention_heads"]
    tied = not args.get("untie_embeddings_and_output_weights", False)
    config = LlamaConfig(
        vocab_size=len(tensors["embedding.word_embeddings.weight"]),  # Megatron pads the vocabulary
        hidden_size=args["hidden_size"],
        intermediate_size=args["ffn_hidden_size"],
        num_hidden_layers=count,
        num_attention_heads=heads,
        num_key_value_heads=args["num_query_groups"] if args.get("group_query_attention") else heads,
        head_dim=args.get("kv_channels") or args["hidden_size"] // heads,
        rms_norm_eps=args.get("norm_epsilon", 1e-5),
        rope_parameters={"rope_type": "default", "rope_theta": float(args.get("rotary_base", 10000))},
        max_position_embeddings=args.get("max_position_embeddings") or 2048,
        tie_word_embeddings=tied,
    )
    weights = {}
    for name, tensor in tensors.items():
        for ours, theirs in _STORED.items():
            name = name.replace(theirs, ours)
        name = re.sub(r"([qk]_layernorm)\.(?!norm\.)", r"\1.norm.", name)
        if re.match(r"decoder\.layers\.\D", name):  # older versions save one tensor for all layers
            weights |= {name.replace("layers.", f"layers.{layer}."): row for layer, row in enumerate(tensor)}
        else:
            weights[name] = tensor
    if tied:
        weights["output_layer.weight"] = weights["embedding.word_embeddings.weight"]
    options: dict[str, object] = {
        "final_norm": "decoder.final_layernorm.weight" in weights,
        "embedding_norm": "decoder.layers.0.embedding_norm.weight" in weights,
    }
    if args.get("qk_layernorm"):
        options["qk_norm"] = "head"
    return ForeignCheckpoint(weights=weights, config=config, options=options)


def write(model: LaminaForCausalLM, folder: Path) -> None:
    """Write a Lamina model as a folder for Megatron's ``--load``. Raises UserError for a model other than a Llama."""
    config, plan = backbone_of(model.config), Plan.from_dict(model.config.plan or {})
    if config.model_type != "llama" or config.attention_bias or config.mlp_bias:
        raise UserError(
            f"source: Lamina cannot write this {config.model_type!r} backbone for Megatron. Choose a 'llama' "
            "model without biases."
        )
    stored: dict[str, object] = {}
    nothing = [None]  # Megatron's linear layers save this beside their weights
    for name, tensor in weights_for(model, "megatron").items():
        for ours, theirs in _STORED.items():
            name = name.replace(ours, theirs)
        stored[name] = tensor
    if config.tie_word_embeddings:
        del stored["output_layer.weight"]
    else:
        stored["output_layer._extra_state/shard_0_1"] = nothing
    for layer in range(plan.num_layers):
        stored |= {f"decoder.layers.{layer}.{module}._extra_state/shard_0_1": nothing for module in _EXTRA}
    args = {
        **{name: value for name, value in _LLAMA.items() if value is not None},
        "num_layers": plan.num_layers,
        "hidden_size": config.hidden_size,
        "ffn_hidden_size": config.intermediate_size,
        "num_attention_heads": config.num_attention_heads,
        "group_query_attention": config.num_key_value_heads != config.num_attention_heads,
        "num_query_groups": config.num_key_value_heads,
        "kv_channels": config.head_dim,
        "norm_epsilon": config.rms_norm_eps,
        "rotary_base": int(config.rope_parameters["rope_theta"]),
        "max_position_embeddings": config.max_position_embeddings,
        "padded_vocab_size": config.vocab_size,
        "untie_embeddings_and_output_weights": not config.tie_word_embeddings,
    }
    release = folder / "release"
    save_distributed(stored, checkpoint_id=release, no_dist=True)
    torch.save({"args": Namespace(**args), "checkpoint_version": 3.0, "iteration": 0}, release / "common.pt")
    (release / "metadata.json").write_text(json.dumps(_METADATA), "utf-8")
    (folder / LATEST).write_text("release", "utf-8")
