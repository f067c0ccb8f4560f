"""Read and write other trainers' checkpoints.

``FORMATS`` lists the trainers. The tables in ``targets/`` have the trainers' weight names.
"""

from __future__ import annotations

import contextlib
import json
import re
from collections.abc import Callable, Mapping
from pathlib import Path

import torch
from safetensors.torch import save_file
from torch.distributed.checkpoint.state_dict_saver import save as save_distributed
from transformers import GPT2Config, LlamaConfig

from lamina.core.json_types import Json
from lamina.data.tokenizers import load_tokenizer
from lamina.errors import UserError
from lamina.jobs.files import write_json
from lamina.modeling.backbones.conversion import RECORD, ConversionRecord, load, written_model
from lamina.modeling.backbones.loading import check_vocabulary
from lamina.modeling.building import build
from lamina.modeling.configuration_lamina import backbone_of
from lamina.modeling.modeling_lamina import GPT2_ADAPTER, LaminaForCausalLM
from lamina.placements import Plan
from lamina.placements.registry import names
from lamina.placements.resolution import resolve
from lamina.ports import depthbench, megatron
from lamina.ports.emitting import emit
from lamina.ports.foreign import ForeignCheckpoint, alone, distributed, reading
from lamina.ports.foreign import file_of as _file
from lamina.ports.weights import Names, load_weights, weights_for

# The placements of the block types in OLMo-core and DepthBench. None of these types includes an embedding norm.
OLMO_BLOCKS = {
    "default": "pre_ln",
    "default_scaled": "layernorm_scaling",
    "reordered_norm": "out_ln",
    "peri_norm": "peri_ln",
    "keel": "keel",
    "deepnorm": "deepnorm",
    "post_norm": "post_ln",
}


def nanogpt_backbone(arguments: Mapping[str, object]) -> tuple[GPT2Config, dict[str, object]]:
    """Return the GPT-2 configuration for the fields of nanoGPT's GPTConfig, and the adapter for lamina.build."""
    names = {"n_layer": "n_layer", "n_head": "n_head", "n_embd": "n_embd", "block_size": "n_positions"}
    fields = {ours: arguments[theirs] for theirs, ours in (names | {"vocab_size": "vocab_size"}).items()}
    fields |= dict.fromkeys(("resid_pdrop", "embd_pdrop", "attn_pdrop"), arguments.get("dropout", 0.0))
    fields |= {"bos_token_id": None, "eos_token_id": None, "activation_function": "gelu"}
    # GPT-2 always has biases, so the biases that a nanoGPT model lacks are 0.
    return GPT2Config.from_dict(fields), dict(GPT2_ADAPTER)


def _read_olmo(folder: Path) -> ForeignCheckpoint:
    data: Json = json.loads(_file(folder, "config.json").read_text("utf-8"))
    model: Json = data.get("model", data)
    block = model["block"]
    mixer, norm, inner = block.get("sequence_mixer") or block["attention"], block["layer_norm"], block["feed_forward"]
    rope = mixer.get("rope") or {}
    for name, value, allowed in (
        ("lm_head.bias", model["lm_head"].get("bias", True), False),
        ("block.layer_norm.name", norm["name"].removeprefix("fused_"), "rms"),
        ("block.layer_norm.bias", norm.get("bias", True), False),
        ("block.attention.rope", bool(rope), True),
        ("block.attention.rope.scaling", rope.get("scaling"), None),
        ("block.attention.sliding_window", mixer.get("sliding_window"), None),
        ("block.attention.clip_qkv", mixer.get("clip_qkv"), None),
        ("block_overrides", model.get("block_overrides"), None),
    ):
        if value != allowed:
            raise UserError(f"config.json: model.{name} is {value!r}. Choose a checkpoint with {allowed!r}.")
    heads, eps = mixer["n_heads"], float(norm.get("eps") or 1e-5)
    connections = depthbench.Connections(block, eps)
    config = LlamaConfig(
        vocab_size=model["vocab_size"],
        hidden_size=model["d_model"],
        intermediate_size=inner["hidden_size"],
        num_hidden_layers=model["n_layers"],
        num_attention_heads=heads,
        num_key_value_heads=mixer.get("n_kv_heads") or heads,
        head_dim=mixer.get("head_dim") or model["d_model"] // heads,
        attention_bias=mixer.get("bias", True),
        mlp_bias=inner.get("bias", True),
        rms_norm_eps=depthbench.FUSED_EPS if connections.attends else eps,
        rope_parameters={"rope_type": "default", "rope_theta": float(rope.get("theta", 500_000))},
        max_position_embeddings=data.get("dataset", {}).get("sequence_length") or 2048,
        tie_word_embeddings=bool(model.get("tie_word_embeddings")),
    )
    is_olmo = str(block.get("_CLASS_", "olmo_core.")).startswith("olmo_core.")
    options: dict[str, object] = {
        "final_norm": model["lm_head"].get("layer_norm") is not None,
        "embedding_norm": model.get("embedding_norm") is not None,
    }
    if model.get("embed_scale"):
        options["embedding_scale"] = model["embed_scale"]
    if mixer.get("qk_norm"):
        options["qk_norm"] = "head" if mixer.get("use_head_qk_norm") else "full"
    weights = {}
    for key, tensor in distributed(folder / "model_and_optim", "model.").items():
        name = key.removeprefix("model.")
        if scale := re.fullmatch(r"blocks\.(\d+)\.ln_scale", name):  # a buffer. The plan has this factor as a number
            if abs(float(tensor) - (expected := (int(scale[1]) + 1) ** -0.5)) > 1e-6:
                raise UserError(
                    f"source: the factor {name} is {float(tensor):.3g}, but Lamina supports only {expected:.3g}. "
                    f"Choose a run of an OLMo-core version that uses {expected:.3g}."
                )
        else:
            weights[re.sub(r"\.attention\.([qk])_norm\.", r".attention.w_\1.norm.", name)] = tensor
    placement = connections.spec or (OLMO_BLOCKS.get(str(block.get("name", "default")), "") if is_olmo else "")
    weights, wiring = connections.split(weights)
    facts = {"placement": placement, "options": options, "wiring": wiring, "settled": connections.settled}
    return ForeignCheckpoint(weights=weights, config=config, **facts)


def _write_olmo(model: LaminaForCausalLM, folder: Path) -> None:
    config, plan = backbone_of(model.config), Plan.from_dict(model.config.plan or {})
    count, weights = plan.num_layers, weights_for(model, "olmo-core")
    norm = {
        "name": "rms",
        "eps": config.rms_norm_eps,
        "bias": False,
        "_CLASS_": _CLASSES + "layer_norm.LayerNormConfig",
    }
    rope = {"name": "default", "theta": int(config.rope_parameters["rope_theta"])}
    head_dim = getattr(config, "head_dim", None)
    mixer = {
        "name": "default",
        "n_heads": config.num_attention_heads,
        "n_kv_heads": config.num_key_value_heads,
        "bias": config.attention_bias,
        "rope": rope | {"_CLASS_": _CLASSES + "rope.RoPEConfig"},
        "type": "attention",
        **({"head_dim": head_dim} if head_dim else {}),
        "_CLASS_": _CLASSES + "attention.AttentionConfig",
    }
    if plan.qk_norm != "off" and plan.v_norm == "off":  # OLMo-core's attention has norms on queries and keys
        mixer |= {"qk_norm": norm, "use_head_qk_norm": plan.qk_norm == "head"}
        weights = {re.sub(r"\.w_([qk])\.norm\.", r".\1_norm.", name): tensor for name, tensor in weights.items()}
    inner = {"hidden_size": config.intermediate_size, "bias": config.mlp_bias}
    block = {
        "sequence_mixer": mixer,
        "layer_norm": norm,
        "feed_forward": inner | {"_CLASS_": _CLASSES + "feed_forward.FeedForwardConfig"},
        "name": next(
            (n for n, spec in OLMO_BLOCKS.items() if plan.layers == resolve(spec, count).layers), plan.placement
        ),
        "_CLASS_": _CLASSES + "transformer.config.TransformerBlockConfig",
    }
    head = {
        "layer_norm": norm if plan.final_norm else None,
        "bias": False,
        "_CLASS_": _CLASSES + "lm_head.LMHeadConfig",
    }
    sizes = {"d_model": config.hidden_size, "vocab_size": config.vocab_size, "n_layers": config.num_hidden_layers}
    fields = {**sizes, "block": block, "lm_head": head, "embedding_norm": norm if plan.embedding_norm else None}
    fields |= {"tie_word_embeddings": config.tie_word_embeddings}
    if plan.embedding_scale != 1.0:
        scale = plan.embedding_scale
        fields["embed_scale"] = config.hidden_size**0.5 if scale == "sqrt_hidden_size" else scale
    fields["_CLASS_"] = _CLASSES + "transformer.config.TransformerConfig"
    (folder / "config.json").write_text(json.dumps({"model": fields}, indent=2) + "\n", "utf-8")
    save_distributed({"model": weights}, checkpoint_id=folder / "model_and_optim", no_dist=True)


_CLASSES = "olmo_core.nn."


def _read_nanogpt(folder: Path) -> ForeignCheckpoint:
    saved = torch.load(_file(folder, "ckpt.pt"), map_location="cpu", weights_only=True)
    weights = {name.removeprefix("_orig_mod."): tensor for name, tensor in saved["model"].items()}
    config, adapter = nanogpt_backbone(saved["model_args"])
    has_biases = bool(saved["model_args"].get("bias", True))
    return ForeignCheckpoint(weights=weights, config=config, adapter=adapter, has_biases=has_biases)


def _write_nanogpt(model: LaminaForCausalLM, folder: Path) -> None:
    config = backbone_of(model.config)
    if config.model_type != "gpt2" or not config.tie_word_embeddings:
        raise UserError(
            f"source: Lamina cannot write this {config.model_type!r} backbone for nanoGPT. Choose a 'gpt2' model "
            "with tied embeddings."
        )
    sizes = {"n_layer": config.n_layer, "n_head": config.n_head, "n_embd": config.n_embd, "dropout": config.resid_pdrop}
    sizes |= {"block_size": config.n_positions, "vocab_size": config.vocab_size, "bias": True}
    torch.save({"model": weights_for(model, "nanogpt"), "model_args": sizes}, folder / "ckpt.pt")


def _write_mlx(model: LaminaForCausalLM, folder: Path) -> None:
    """Write a model's code, configuration and weights for mlx_lm. To load them, use trust_remote_code."""
    config, plan = backbone_of(model.config), Plan.from_dict(model.config.plan or {})
    if config.model_type != "llama":
        raise UserError(
            f"source: Lamina cannot write a {config.model_type!r} backbone for mlx-lm. Choose a 'llama' model."
        )
    file = f"{plan.placement}_model.py"
    (folder / file).write_text(emit(plan, "mlx", plan.num_layers).code, "utf-8")
    fields = {**config.to_dict(), "model_type": "llama", "model_file": file}
    rope = fields.pop("rope_parameters")
    fields |= {"rope_theta": rope["rope_theta"], "rope_scaling": None if rope["rope_type"] == "default" else rope}
    (folder / "config.json").write_text(json.dumps(fields, indent=2) + "\n", "utf-8")
    weights = weights_for(model, "mlx")
    if config.tie_word_embeddings:
        del weights["lm_head.weight"]
    save_file(
        {name: tensor.clone() for name, tensor in weights.items()}, folder / "model.safetensors", {"format": "mlx"}
    )


def _read_torchtitan(folder: Path) -> ForeignCheckpoint:
    if not (folder / "config.json").is_file():
        raise UserError(
            f"source: {str(folder)!r} holds no config.json, and torchtitan does not save the model's sizes. "
            "Add the config.json of a transformers Llama with the same sizes to this folder."
        )
    fields: Json = json.loads((folder / "config.json").read_text("utf-8"))
    if fields.get("model_type") != "llama":
        raise UserError(
            f"config.json: model_type is {fields.get('model_type')!r}. Replace the file with the config.json of a "
            "'llama' model."
        )
    config = LlamaConfig.from_dict(fields)
    weights = distributed(folder, "tok_embeddings.", "layers.", "norm.", "lm_head.")
    tied = ("tok_embeddings.weight", "lm_head.weight")
    if config.tie_word_embeddings and (stored := [weights[name] for name in tied if name in weights]):
        weights |= dict.fromkeys(tied, stored[0])
    options: dict[str, object] = {
        "final_norm": "norm.weight" in weights,
        "embedding_norm": "layers.0.embedding_norm.weight" in weights,
    }
    return ForeignCheckpoint(weights=weights, config=config, options=options)


def _write_torchtitan(model: LaminaForCausalLM, folder: Path) -> None:
    config = backbone_of(model.config)
    if config.model_type != "llama":
        raise UserError(
            f"source: Lamina cannot write a {config.model_type!r} backbone for torchtitan. Choose a 'llama' model."
        )
    (folder / "config.json").write_text(json.dumps(config.to_dict(), indent=2) + "\n", "utf-8")
    save_distributed(dict(weights_for(model, "torchtitan")), checkpoint_id=folder, no_dist=True)


FORMATS: dict[str, tuple[Callable[[Path], ForeignCheckpoint] | None, Callable[[LaminaForCausalLM, Path], None]]] = {
    "olmo-core": (_read_olmo, _write_olmo),
    "nanogpt": (_read_nanogpt, _write_nanogpt),
    "megatron": (megatron.read, megatron.write),
    "torchtitan": (_read_torchtitan, _write_torchtitan),
    "mlx": (None, _write_mlx),
}


def from_trainer(folder: Path, target: str, placement: str | None) -> LaminaForCausalLM:
    """Return the Lamina model of a trainer's checkpoint, with bit-identical weights."""
    read, _ = FORMATS[target]
    assert read is not None
    with reading(folder, target), alone():
        stored = read(folder)
    spec = placement or stored.placement
    if not spec:
        raise UserError(
            f"placement: the {target} checkpoint names no placement. {_advice(stored, target)} Run the command again "
            "with --placement NAME."
        )
    options = {} if placement and "(" in placement else stored.options
    model = _built(stored, spec, options, "recommended")
    torch.nn.Module.to(model, next(iter(stored.weights.values())).dtype)
    try:
        load_weights(model, _completed(stored, model, target), target, stored.wiring)
    except UserError as error:
        if not placement:
            raise
        raise UserError(
            f"placement: {placement!r} does not fit the checkpoint ({str(error).rstrip('.')}). "
            f"{_advice(stored, target)}"
        ) from None
    return model.eval()


def _built(stored: ForeignCheckpoint, spec: str, options: Mapping[str, object], init: str) -> LaminaForCausalLM:
    plan = stored.settled(resolve(spec, stored.config.num_hidden_layers, **options))
    model = build(stored.config, plan, init=init, adapter=stored.adapter)
    assert isinstance(model, LaminaForCausalLM)
    return model


def _completed(stored: ForeignCheckpoint, model: LaminaForCausalLM, target: str) -> Mapping[str, torch.Tensor]:
    """Return the checkpoint's weights, with a bias of 0 for each bias that a checkpoint without biases lacks."""
    if stored.has_biases:
        return stored.weights
    lacking = Names(model, target, writes=False).stored_names(stored.wiring) - set(stored.weights)
    owners = {name: stored.weights.get(f"{name.removesuffix('bias')}weight") for name in lacking}
    zeros = {n: w.new_zeros(len(w)) for n, w in owners.items() if w is not None and n.endswith(".bias")}
    return {**stored.weights, **zeros}


def _advice(stored: ForeignCheckpoint, target: str) -> str:
    """Return a sentence that names the placements that need exactly the checkpoint's tensors."""
    fitting = []
    for name in names():
        with contextlib.suppress(ValueError), torch.device("meta"):
            model = _built(stored, name, stored.options, "normal")
            completed = _completed(stored, model, target)
            if Names(model, target, writes=False).stored_names(stored.wiring) == set(completed):
                fitting.append(name)
    if not fitting:
        return "No placement gives a model with exactly the checkpoint's tensors. Check the files and the sizes."
    return f"Models with these placements have exactly the checkpoint's tensors: {', '.join(fitting)}."


def convert(
    source: str,
    output: Path,
    target: str,
    placement: str | None,
    tokenizer: str | None,
    *,
    reads: bool,
    overwrite: bool,
) -> ConversionRecord:
    """Convert a trainer's checkpoint to Lamina, or back if not ``reads``. After an error, leave ``output`` as it is."""
    own = None if tokenizer is None else load_tokenizer(tokenizer)
    if reads:
        model = from_trainer(Path(source), target, placement)
    else:
        loaded = load(source)
        if not isinstance(loaded, LaminaForCausalLM):
            raise UserError(f"source: {source!r} is a {type(loaded).__name__}. Give a folder with a Lamina model.")
        model = loaded
    if own is not None:
        check_vocabulary(own, model.config, "tokenizer: the tokenizer")
    plan = Plan.from_dict(model.config.plan or {})
    record: ConversionRecord = {
        "source": source,
        "to": "lamina" if reads else target,
        "model_type": target,
        "backbone": backbone_of(model.config).model_type,
        "placement": plan.placement,
        "placement_options": dict(plan.options),
        "num_layers": plan.num_layers,
        "dtype": str(model.dtype).removeprefix("torch."),
        "largest_difference": None,
    }
    with written_model(source, output, overwrite=overwrite) as draft, alone():
        if reads:
            model.save_pretrained(draft)
            if own is not None:
                own.save_pretrained(draft)
        else:
            FORMATS[target][1](model, draft)
        write_json(draft / RECORD, record)
    return record
