"""The model that a job after pretraining starts from, and its tokenizer."""

from __future__ import annotations

import copy
import shutil
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, cast

import torch
from safetensors.torch import save_file
from transformers import PreTrainedConfig, PreTrainedModel, PreTrainedTokenizerBase
from transformers.pytorch_utils import Conv1D

from lamina.data.encoding import vocab_size_of
from lamina.data.tokenizers import load_tokenizer
from lamina.errors import UserError, unknown
from lamina.jobs.files import writing
from lamina.jobs.manifest import content_hash, model_folder, refuse_as_output, refuse_damaged
from lamina.modeling.backbones.loading import read_config, refuse_scores
from lamina.modeling.building import build
from lamina.modeling.configuration_lamina import LaminaConfig
from lamina.modeling.modeling_lamina import LaminaForCausalLM, LaminaForSequenceClassification, adapter_of
from lamina.placements import Plan
from lamina.posttraining.settings import TuningSettings
from lamina.training import source

if TYPE_CHECKING:
    from peft.tuners.lora import LoraModel


ALL_LINEAR = "all-linear"
NOT_TARGETED = ("lm_head", "score")  # a readout, which LoRA does not stand beside


@dataclass(frozen=True, kw_only=True)
class Start:
    """What a job starts from.

    Attributes:
        path: as the user gave it.
        tokenizer: the model's, with an end-of-text and a padding token.
        plan: where the norms sit.
        longest: the longest that the job uses.
    """

    path: str
    tokenizer: PreTrainedTokenizerBase
    plan: Plan
    longest: int

    @cached_property
    def fingerprint(self) -> str:
        """A hash of the model."""
        return content_hash(self.path)

    def policy(self) -> LaminaForCausalLM:
        """The model in float32, to be trained."""
        model = cast("LaminaForCausalLM", source.load(self.path, source.config_of(self.path), "causal_lm"))
        model.config.get_text_config().pad_token_id = self.tokenizer.pad_token_id
        model.generation_config.pad_token_id = self.tokenizer.pad_token_id
        model.generation_config.eos_token_id = self.tokenizer.eos_token_id
        return model

    def scorer(self) -> LaminaForSequenceClassification:
        """Return the model with a score at the last token in place of its readout; the score's weights are new."""
        policy = self.policy()
        config = copy.deepcopy(policy.config)
        config.num_labels = 1
        config.pad_token_id = self.tokenizer.pad_token_id
        with torch.device("meta"):
            model = LaminaForSequenceClassification(cast(LaminaConfig, config))
        model.model = policy.model
        std = float(getattr(config.get_text_config(), "initializer_range", 0.02))
        model.score = torch.nn.Linear(config.get_text_config().hidden_size, 1, bias=False)
        torch.nn.init.normal_(model.score.weight, std=std)
        return model.train()


def find_start(settings: TuningSettings) -> Start:
    """Look at the model of ``from_model``. Raises UserError if it can't be read or its tokenizer does not fit."""
    path = str(settings.from_model)
    refuse_as_output(str(settings.output), path)
    folder = model_folder(path)
    if folder.is_dir():
        refuse_damaged(folder)
    try:
        config = source.config_of(path)
        if "causal_lm" not in adapter_of(config).heads:
            raise UserError(
                f"from: {path!r} is a {config.model_type} model, which writes no text (allowed: one that does)"
            )
        tokenizer = load_tokenizer(str(folder) if folder.is_dir() else path)
        source.check_vocabulary(config, vocab_size_of(tokenizer), path)
    except UserError as error:
        raise UserError(f"from: {error}" if str(error).startswith(("tokenizer", "model")) else str(error)) from None
    refuse_scores(read_config(folder if folder.is_dir() else path, "from"), f"from: {path!r}")
    positions = int(config.max_position_embeddings)
    longest = settings.sequence_length or positions
    if longest > positions:
        raise UserError(f"sequence_length: {longest} is more than the model's {positions} (allowed: at most that)")
    plan = source.stored_plan(path)
    if settings.lora_rank and settings.lora_targets != ALL_LINEAR:
        _check_targets(settings.lora_targets, config, plan)
    return Start(path=path, tokenizer=tokenizer, plan=plan, longest=longest)


def _check_targets(named: str, config: PreTrainedConfig, plan: Plan) -> None:
    """Raise UserError for a name that is no linear layer's: beside others, peft passes over it."""
    with torch.device("meta"):
        model = build(config, plan, init="normal")
    kinds = (torch.nn.Linear, torch.nn.Embedding, Conv1D)
    layers = [name for name, layer in model.named_modules() if isinstance(layer, kinds)]
    targeted = [name for name in layers if name.rpartition(".")[2] not in NOT_TARGETED]
    for target in _names(named):
        if not any(f".{name}".endswith(f".{target}") for name in targeted):
            raise unknown("lora_targets", target, [ALL_LINEAR, *{name.rpartition(".")[2] for name in targeted}])


def _names(named: str) -> list[str]:
    return [name.strip() for name in named.split(",")]


def add_lora(model: torch.nn.Module, settings: TuningSettings) -> LoraModel | None:
    """Add LoRA matrices to a model's linear layers, which are then frozen; None if none are requested.

    A reward model's score stays trainable.
    """
    if settings.lora_rank == 0:
        return None
    from peft import LoraConfig
    from peft.tuners.lora import LoraModel

    named = settings.lora_targets
    config = LoraConfig(
        r=settings.lora_rank,
        lora_alpha=settings.lora_alpha or 2.0 * settings.lora_rank,  # pyright: ignore[reportArgumentType]
        lora_dropout=settings.lora_dropout,
        target_modules=named if named == ALL_LINEAR else _names(named),
        exclude_modules=list(NOT_TARGETED),
    )
    config.base_model_name_or_path = str(settings.from_model)
    tuner = LoraModel(model, config, "default")
    if isinstance(model, LaminaForSequenceClassification):
        model.score.requires_grad_(True)
    return tuner


def merged(model: PreTrainedModel, tuner: LoraModel | None, adapter: Path | None = None) -> PreTrainedModel:
    """Add the LoRA matrices to the model's weights; ``adapter``: the folder that keeps them in peft's form."""
    if tuner is None:
        return model
    if adapter is not None:
        _save_adapter(model, tuner, adapter)
    return cast(PreTrainedModel, tuner.merge_and_unload())


def _save_adapter(model: PreTrainedModel, tuner: LoraModel, folder: Path) -> None:
    """Write the LoRA matrices, and a reward model's score, which is trained whole, as peft reads them."""
    config, whole = copy.deepcopy(tuner.peft_config["default"]), ()
    if isinstance(model, LaminaForSequenceClassification):
        whole = ("score.weight",)
        config.task_type, config.modules_to_save = "SEQ_CLS", ["score"]  # pyright: ignore[reportAttributeAccessIssue]
    folder.mkdir(parents=True, exist_ok=True)
    tensors = {name: value for name, value in model.named_parameters() if ".lora_" in name or name in whole}
    stored = {name: value.detach().cpu().contiguous() for name, value in tensors.items()}
    with writing(folder / "adapter_model.safetensors") as temporary:
        save_file({f"base_model.model.{k.replace('.default.', '.')}": value for k, value in stored.items()}, temporary)
    with writing(folder / "adapter_config.json") as temporary, TemporaryDirectory() as apart:
        config.save_pretrained(apart)
        shutil.copyfile(Path(apart, "adapter_config.json"), temporary)
