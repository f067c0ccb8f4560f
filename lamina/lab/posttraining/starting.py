"""Load the model and the tokenizer from which a training job after pretraining starts."""

from __future__ import annotations

import copy
import importlib
import logging
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeAlias, cast

import torch
from torch import nn
from torch.nn.utils import skip_init
from transformers import (
    MODEL_FOR_CAUSAL_LM_MAPPING,
    MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING,
    AutoModelForCausalLM,
    AutoModelForSequenceClassification,
    PreTrainedConfig,
    PreTrainedModel,
    PreTrainedTokenizerBase,
)
from transformers.utils.import_utils import is_liger_kernel_available

from lamina.core.architectures import conversions
from lamina.core.hub_access import local_when_unreachable
from lamina.core.values import entries
from lamina.data.encoding import vocab_size_of
from lamina.data.tokenizers import load_tokenizer
from lamina.errors import UserError, one_line, unknown
from lamina.jobs.manifest import model_folder, refuse_as_output
from lamina.lab.posttraining.settings import LORA, TuningSettings
from lamina.modeling.backbones.loading import load_weights, quiet, read_config, refuse_scores
from lamina.modeling.configuration_lamina import LaminaConfig
from lamina.modeling.modeling_lamina import LaminaForSequenceClassification, adapter_of
from lamina.modeling.processes import device_of
from lamina.placements import Plan
from lamina.training import source
from lamina.training.checkpointing.sharding import only_trained, reshard, set_whole
from lamina.training.execution.devices import decided

if TYPE_CHECKING:
    from peft import LoraConfig, PeftModel


Passed: TypeAlias = Any
ALL_LINEAR = "all-linear"
NOT_TARGETED = ("lm_head", "score")  # LoRA does not change the output head or score head
PACKED = 1024  # default tokens of a packed sequence, as in TRL
_PLACED = (
    LaminaConfig.model_type,
    *conversions(),
    "gemma3",
)  # Lamina's own models, and models that Lamina converts or rejects


@dataclass(frozen=True, kw_only=True)
class Start:
    """The model from which a training job starts."""

    path: str
    tokenizer: PreTrainedTokenizerBase  # the model's tokenizer, with an end-of-text and a padding token
    plan: Plan | None  # the placement of the model's norms, or None for a model that keeps its transformers class
    config: PreTrainedConfig
    longest: int  # the maximum sequence length in tokens
    dtype: torch.dtype = torch.float32  # the dtype of the weights that are not quantized
    attention: str = "auto"  # the attention kernel. "auto" means the model's default

    def policy(self, ends: Sequence[int] = ()) -> PreTrainedModel:
        """Load the language model. Generated text ends at ``ends`` and at the end tokens of model and tokenizer."""
        if self.plan is not None:
            model = source.load(self.path, self.config, "causal_lm", self.dtype)
        else:
            model = self._loaded(AutoModelForCausalLM, self.config)
        generation: Passed = model.generation_config
        model.config.get_text_config().pad_token_id = self.tokenizer.pad_token_id
        if generation.pad_token_id is None:
            generation.pad_token_id = self.tokenizer.pad_token_id
        eos_ids = generation.eos_token_id
        eos_ids = [] if eos_ids is None else eos_ids if isinstance(eos_ids, list) else [eos_ids]
        every = list(dict.fromkeys([*eos_ids, self.tokenizer.eos_token_id, *ends]))
        generation.eos_token_id = every if len(every) > 1 else every[0]
        return self._attending(model)

    def scorer(self) -> PreTrainedModel:
        """Load the model with a new score head in place of its output head. The head scores a text's last token."""
        if self.plan is None:
            config = copy.deepcopy(self.config)
            config.num_labels, config.pad_token_id = 1, self.tokenizer.pad_token_id
            return self._attending(self._loaded(AutoModelForSequenceClassification, config))
        policy = self.policy()
        config = copy.deepcopy(policy.config)
        config.num_labels, config.pad_token_id = 1, self.tokenizer.pad_token_id
        with torch.device("meta"):
            model: Passed = LaminaForSequenceClassification(cast(LaminaConfig, config))
        model.model = policy.model
        # drawn once, as in transformers: the same seed gives the same score head and LoRA matrices as in TRL
        score = skip_init(nn.Linear, model.score.in_features, 1, bias=False, dtype=self.dtype)
        model.score = cast(nn.Linear, score)
        nn.init.normal_(model.score.weight, std=float(getattr(config.get_text_config(), "initializer_range", 0.02)))
        return model.train()

    def _loaded(self, auto: type, config: PreTrainedConfig) -> PreTrainedModel:
        folder = model_folder(self.path)
        with local_when_unreachable():
            model, _ = load_weights(
                folder if folder.is_dir() else self.path,
                config,
                auto,
                "from",
                dtype=self.dtype,
                optional=lambda model, name: name == "score.weight",
            )
        return model.train()

    def _attending(self, model: PreTrainedModel) -> PreTrainedModel:
        if self.attention != "auto":
            try:
                with quiet():
                    model.set_attn_implementation(self.attention)
            except Exception as error:  # transformers and the kernel's library raise many types
                raise UserError(
                    f"attn_implementation: {self.attention!r} does not work ({one_line(error)}). Choose another kernel."
                ) from None
        return model


def find_start(settings: TuningSettings, head: str = "causal_lm") -> Start:
    """Read the starting model's configuration and tokenizer. Raises UserError if the model is unusable for the job."""
    path = str(settings.from_model)
    refuse_as_output(str(settings.output), path)
    folder = model_folder(path)
    checkpoint = folder if folder.is_dir() else path
    with local_when_unreachable():
        outer = read_config(checkpoint, "from")
    refuse_scores(outer, f"from: {path!r}")
    plan, config = None, outer
    if outer.model_type in _PLACED:
        plan, config = source.stored_plan(path), source.config_of(path)
    _check_writes(config, plan, path, head)
    try:
        tokenizer = load_tokenizer(str(checkpoint))
        source.check_vocabulary(config.get_text_config(), vocab_size_of(tokenizer), path)
    except UserError as error:
        raise UserError(f"from: {error}") from None
    if (end := settings.trl.get("eos_token")) is not None:
        if not isinstance(end, str) or end not in tokenizer.get_vocab():
            raise UserError(f"trl.eos_token: {end!r} is not in the tokenizer. Give a token of the tokenizer.")
        tokenizer.eos_token = end
    positions = getattr(config.get_text_config(), "max_position_embeddings", None)
    limit = min(PACKED, positions or PACKED) if getattr(settings, "packing", False) else positions or PACKED
    longest = settings.sequence_length or int(limit)
    if positions is not None and longest > positions:
        raise UserError(
            f"sequence_length: {longest} is more than the model's {positions} positions. Choose at most {positions}."
        )
    dtypes = {"fp32": torch.float32, "bf16": torch.bfloat16}
    rest = "bf16" if decided(settings).precision == "bf16" else "fp32"
    dtype = dtypes[rest if settings.quantized else settings.weights]
    if settings.trainer.get("use_liger_kernel"):
        if plan is not None:
            raise UserError(
                "trainer.use_liger_kernel: Liger has no layers for Lamina's models. Leave out trainer.use_liger_kernel."
            )
        if not is_liger_kernel_available():
            raise UserError("trainer.use_liger_kernel: liger-kernel is not installed. Run: pip install liger-kernel")
    return Start(
        path=path, tokenizer=tokenizer, plan=plan, config=config, longest=longest, dtype=dtype,
        attention=settings.attn_implementation,
    )  # fmt: skip


def _check_writes(config: PreTrainedConfig, plan: Plan | None, path: str, head: str) -> None:
    if plan is None:  # transformers also has causal classes for BERT, which sees later tokens
        causal = getattr(config, "is_decoder", True) or any("CausalLM" in name for name in config.architectures or ())
        writes = causal and type(config) in MODEL_FOR_CAUSAL_LM_MAPPING
    else:
        writes = "causal_lm" in adapter_of(config).heads
    if not writes:
        raise UserError(
            f"from: {path!r} is a {config.model_type} model, which does not generate text. Give a causal language "
            "model."
        )
    if plan is None and getattr(config, "quantization_config", None):
        raise UserError(f"from: {path!r} has quantized weights. Give the original model, with --weights nf4 or int8.")
    if plan is None and head != "causal_lm" and type(config) not in MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING:
        raise UserError(f"from: transformers has no {config.model_type} model with a score head. Give another model.")


def quantize(model: PreTrainedModel, settings: TuningSettings, dtype: torch.dtype) -> None:
    """Quantize the linear layers with bitsandbytes if ``weights`` is nf4 or int8. The output head stays unquantized.

    nf4 is QLoRA's NormalFloat with quantized scales (Dettmers et al. 2023), and computes in ``dtype``. int8 is
    LLM.int8().
    """
    if not settings.quantized:
        return
    bnb = importlib.import_module("bitsandbytes")  # an optional package without types

    logging.getLogger("bitsandbytes").setLevel(logging.ERROR)  # LLM.int8() logs at every call that it rounds to float16
    device = device_of(settings.device)
    for name, layer in list(model.named_modules()):
        if type(layer) is not nn.Linear or name.rpartition(".")[2] in NOT_TARGETED:
            continue
        size, held = (layer.in_features, layer.out_features, layer.bias is not None), layer.weight.data
        if settings.weights == "nf4":
            options = {"quant_type": "nf4", "compress_statistics": True}
            made = bnb.nn.Linear4bit(*size, compute_dtype=dtype, **options, device="meta")
            made.weight = bnb.nn.Params4bit(held, requires_grad=False, **options)
            made.support_avx512bf16_for_cpu = False  # otherwise, an evaluation rounds the scales permanently
        else:
            made = bnb.nn.Linear8bitLt(*size, has_fp16_weights=False, device="meta")
            made.weight = bnb.nn.Int8Params(held, requires_grad=False, has_fp16_weights=False)
        made.bias = layer.bias
        model.set_submodule(name, made.to(device))
    only_trained(model)


def lora_of(settings: TuningSettings) -> LoraConfig:
    """Build peft's configuration of LoRA. Raises UserError for an option that Lamina or peft rejects."""
    from peft import LoraConfig

    named, given = settings.lora_targets, {name: value for name, value in settings.lora.items() if name in LORA}
    if unsupported := settings.lora.keys() - {*LORA, "use_peft", "task_type"}:
        raise unknown("lora argument", min(unsupported), LORA)
    names = {name: given[name] for name in ("modules_to_save", "target_parameters") if name in given}
    given |= {name: entries(value) if isinstance(value, str) else value for name, value in names.items()}
    try:
        return LoraConfig(
            r=settings.lora_rank,
            lora_alpha=settings.lora_alpha or 2.0 * settings.lora_rank,  # pyright: ignore[reportArgumentType]
            lora_dropout=settings.lora_dropout,
            target_modules=named if named == ALL_LINEAR else entries(named),
            exclude_modules=list(NOT_TARGETED),
            base_model_name_or_path=str(settings.from_model),
            **given,
        )
    except Exception as error:  # peft's checks raise many types
        raise UserError(f"lora: {one_line(error)}") from None


def add_lora(model: PreTrainedModel, settings: TuningSettings) -> PeftModel | None:
    """Add LoRA matrices and freeze the model's weights, except a new score head. Returns None if LoRA is off."""
    if settings.lora_rank == 0:
        return None
    from peft import PeftModel

    config = lora_of(settings)
    if settings.command_name == "reward":
        config.task_type = "SEQ_CLS"  # pyright: ignore[reportAttributeAccessIssue]
        config.modules_to_save = [*(config.modules_to_save or ()), "score"]
    bits = {"nf4": "is_loaded_in_4bit", "int8": "is_loaded_in_8bit"}.get(settings.weights, "")
    if bits:  # peft recognizes bitsandbytes' layers by this attribute
        setattr(model, bits, True)
    try:
        tuner = PeftModel(model, config)
    except ValueError as error:  # for example, no module has the name
        raise UserError(f"lora: {one_line(error)}") from None
    finally:
        if bits:
            delattr(model, bits)
    targeted = tuner.targeted_module_names
    for target in entries(settings.lora_targets) if settings.lora_targets != ALL_LINEAR else ():
        if not any(f".{name}".endswith(f".{target}") for name in targeted):  # peft ignores it beside valid names
            raise UserError(
                f"lora_targets: the model has no linear layer {target!r}. Name a linear layer of the model, or set "
                "all-linear."
            )
    return tuner


def set_trained(model: PreTrainedModel, trained: Mapping[str, torch.Tensor]) -> None:
    for name, parameter in trained_of(model).items():
        set_whole(parameter, trained[name])


def numel(parameter: torch.Tensor) -> int:
    """Return the number of values in a parameter. Bitsandbytes stores two 4-bit values in one byte."""
    state = getattr(parameter, "quant_state", None)
    return parameter.numel() if state is None else math.prod(state.shape)


def trained_of(model: PreTrainedModel) -> dict[str, nn.Parameter]:
    """Return the trainable weights by name. For a sharded model, return only this process's shards."""
    reshard(model)
    return {name: parameter for name, parameter in model.named_parameters() if parameter.requires_grad}


def save_adapter(tuner: PeftModel, folder: Path) -> None:
    """Save the LoRA matrices and the other trained weights in peft's format."""
    config: Passed = tuner.peft_config["default"]
    for name in ("target_modules", "exclude_modules"):  # the order of a set differs between processes
        if (modules := getattr(config, name)) is not None:
            setattr(config, name, sorted(modules))
    tuner.save_pretrained(str(folder), save_embedding_layers=False)
