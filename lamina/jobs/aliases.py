"""Other names of settings: those of transformers, TRL, lm-evaluation-harness, litgpt and nanoGPT.

One table for all commands, for YAML files and for Python. A name that means the same is taken; one that does not is
answered with Lamina's name and the difference.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from functools import partial

from lamina.core.values import switch
from lamina.errors import UserError, nearest, shortened

Change = Callable[[str, object], object]
"""Takes the name as the user wrote it and the value; returns the value of Lamina's setting."""


@dataclass(frozen=True)
class Alias:
    """What another name stands for.

    Attributes:
        settings: Lamina's names for it; a command takes the first one that it has. ``trainer.NAME`` is an argument of
            transformers' Trainer.
        change: turns the value into Lamina's, where it is written in another way.
        switch: the value that the name sets as a switch; without it, the name takes a value.
        differs: how Lamina's setting differs; such a name is answered, not taken.
    """

    settings: tuple[str, ...]
    change: Change | None = None
    switch: str | None = None
    differs: str = ""

    def setting(self, offered: Collection[str]) -> str | None:
        """The first of the settings that is offered."""
        return next((name for name in self.settings if name.partition(".")[0] in offered), None)


def _same(*settings: str, change: Change | None = None) -> Alias:
    return Alias(settings, change)


def _sets(setting: str, value: str) -> Alias:
    return Alias((setting,), switch=value)


def _differs(*settings: str, how: str) -> Alias:
    return Alias(settings, differs=how)


def _on_the_hub(name: str, value: object) -> str:
    return f"hf:{value}"


def _share(name: str, value: object) -> object:
    if isinstance(value, int | float | str):
        try:
            if 0 <= float(value) < 1:
                return value
        except ValueError:
            pass
    raise UserError(f"{name}: {value!r} (allowed: a number of at least 0 and below 1, a share of all steps)")


def _single(name: str, value: object, *, what: str) -> object:
    """The only entry of a list. Raises UserError for several: this command takes one."""
    entries = value if isinstance(value, Sequence) and not isinstance(value, str) else [value]
    inner = str(entries[0]) if len(entries) == 1 else ","
    if "," in inner.partition("(")[0] or ")," in inner:
        raise UserError(
            f"{name}: {shortened(str(value), 200)!r} (allowed here: one {what}; `lamina compare` has several)"
        )
    return entries[0]


def _first_of(settings: str, what: str) -> Alias:
    return _same(settings, change=partial(_single, what=what))


_EVERY = "is a number of steps"
_BATCH = "counts the blocks of a micro-batch over all processes, not per device"
_EPOCHS = "counts optimizer steps: blocks of the corpus / (batch size x gradient accumulation) are one epoch"
_STRATEGY = "is a number of steps; there are no strategies by epoch"
_PARALLEL = "is fsdp2 or ddp; the processes come from torchrun or accelerate"
_MODEL = "names the architecture only; weights start anew (lamina pretrain --from MODEL continues from a model's)"

_TABLE: dict[str, tuple[Alias, ...]] = {
    # the same words in all commands
    "placement": (_same("placements"),),
    "placements": (_first_of("placement", "placement"),),
    "learning_rates": (_first_of("learning_rate", "learning rate"),),
    "seed": (_same("seeds"),),
    "seeds": (_first_of("seed", "seed"),),
    "from": (_same("from_model"),),
    "data": (_same("corpus"),),
    "model": (_same("from_model", "checkpoint", "models", "model", "source"), _differs("backbone", how=_MODEL)),
    "corpus": (_differs("data", how="holds examples: rows with a prompt and an answer, or with messages"),),
    # the model
    "config_name": (_same("backbone"),),
    "tokenizer_name": (_same("tokenizer"),),
    "use_peft": (_differs("lora_rank", how="is 0 for all weights, or the rank of LoRA's matrices"),),
    "torch_dtype": (_differs("dtype", "precision", how="is fp32, bf16 or fp16, mixed: weights and losses stay fp32"),),
    # the text and the examples
    "dataset_name": (_same("corpus", "data", change=_on_the_hub),),
    "dataset": (_differs("corpus", "data", how="is a file, a folder, or hf:NAME for a data set of the hub"),),
    "dataset_config_name": (_differs("corpus", "data", how="has it in the name: hf:NAME:CONFIG@SPLIT"),),
    "train_file": (_same("corpus", "data"),),
    "validation_file": (
        _same("eval_data"),
        _differs("eval_corpus", how="is a second text to evaluate on, beside the held-out share of the corpus"),
    ),
    "validation_split_percentage": (_differs("eval_fraction", how="is a share, not a percentage"),),
    "eval_iters": (_differs("eval_blocks", how="counts held-out blocks, not batches"),),
    "preprocessing_num_workers": (_differs("streaming", how="tokenizes while the model trains"),),
    # the steps
    "num_train_epochs": (_same("epochs"), _differs("steps", how=_EPOCHS)),
    "epochs": (_differs("steps", how=_EPOCHS),),
    "per_device_train_batch_size": (_differs("batch_size", how=_BATCH),),
    "micro_batch_size": (_differs("batch_size", how=_BATCH),),
    "train_batch_size": (_differs("batch_size", how=_BATCH),),
    "global_batch_size": (_differs("batch_size", how="counts the blocks of one micro-batch, over all processes"),),
    "eval_batch_size": (_differs("trainer.per_device_eval_batch_size", how="counts the blocks per device"),),
    "lr_scheduler_type": (
        _same("trainer.lr_scheduler_type"),
        _differs("schedule", how="is cosine or wsd, and ends at --min-learning-rate, a share of the peak"),
    ),
    "warmup_ratio": (_same("warmup", change=_share),),
    "min_lr": (_differs("min_learning_rate", how="is a share of the peak, not a rate"),),
    "data_seed": (_differs("seed", "seeds", how="also seeds the order of the data"),),
    # what is recorded
    "logging_strategy": (_differs("logging_steps", how=_STRATEGY),),
    "eval_strategy": (_differs("eval_steps", how=_STRATEGY),),
    "evaluation_strategy": (_differs("eval_steps", how=_STRATEGY),),
    "save_strategy": (_differs("save_steps", how=f"{_EVERY} (0: only the final model)"),),
    "load_best_model_at_end": (
        _differs("best_by", how="is last, or loss for the model with the lowest held-out loss"),
    ),
    "resume_from_checkpoint": (_differs("resume", how="continues from the output folder's last whole checkpoint"),),
    "overwrite_output_dir": (_differs("overwrite", how="replaces the whole content of the output folder"),),
    "hub_model_id": (_same("push_to_hub"),),
    # the machine
    "bf16": (_sets("precision", "bf16"),),
    "fp16": (_sets("precision", "fp16"),),
    "torch_compile": (_sets("compile", "on"),),
    "use_cpu": (_sets("device", "cpu"),),
    "no_cuda": (_sets("device", "cpu"),),
    "fsdp": (_differs("parallel", how=_PARALLEL),),
    "fsdp_config": (_differs("parallel", how=_PARALLEL),),
    "deepspeed": (_differs("parallel", how=f"{_PARALLEL}; DeepSpeed is not supported"),),
    "parallelism_config": (_differs("parallel", how=_PARALLEL),),
    "torch_compile_backend": (_differs("compile", how="is auto, on or off, with torch's own backend"),),
    "torch_compile_mode": (_differs("compile", how="is auto, on or off, in torch's default mode"),),
    # after pretraining
    "completion_only_loss": (_differs("loss_on", how="is answer or all"),),
    "assistant_only_loss": (_differs("loss_on", how="is answer or all"),),
    # models' generation and evaluation
    "max_length": (_same("sequence_length"), _differs("max_new_tokens", how="does not count the prompt")),
    "model_args": (_differs("models", how="is a word of its own: lamina eval MODEL --tasks ..."),),
}
_TABLE |= {
    other: (_same(*settings),)
    for settings, others in {
        ("num_layers",): ("num_hidden_layers", "n_layer", "n_layers"),
        ("hidden_size",): ("n_embd", "d_model", "width"),
        ("num_heads",): ("num_attention_heads", "n_head", "n_heads"),
        ("learning_rate", "learning_rates"): ("lr", "learning_rate", "peak_lr"),
        ("steps",): ("max_steps", "max_train_steps", "max_iters", "num_steps", "train_steps"),
        ("gradient_accumulation",): ("gradient_accumulation_steps", "grad_accum_steps"),
        ("sequence_length",): ("block_size", "max_seq_length", "max_seq_len", "seq_length", "seq_len"),
        ("output",): ("output_dir", "output_path", "out_dir"),
        ("warmup",): ("warmup_steps", "num_warmup_steps"),
        ("beta1",): ("adam_beta1",),
        ("beta2",): ("adam_beta2",),
        ("epsilon",): ("adam_epsilon", "eps"),
        ("max_grad_norm",): ("grad_clip", "clip_grad", "gradient_clip_val"),
        ("save_steps",): ("save_interval", "checkpointing_steps"),
        ("eval_steps",): ("eval_interval",),
        ("logging_steps",): ("log_interval", "log_steps"),
        ("keep",): ("save_total_limit",),
        ("gradient_checkpointing",): ("activation_checkpointing",),
        ("text_field",): ("dataset_text_field", "text_column", "text_column_name"),
        ("lora_rank",): ("lora_r",),
        ("lora_targets",): ("lora_target_modules",),
        ("label_smoothing",): ("label_smoothing_factor",),
        ("max_answer",): ("max_completion_length", "response_length"),
        ("reward_model",): ("reward_model_path", "reward_model_name_or_path"),
        ("chat_template",): ("apply_chat_template",),
        ("trainer.optim",): ("optim", "optimizer"),
    }.items()
    for other in others
}
_TABLE |= dict.fromkeys(("model_name_or_path", "model_name", "pretrained", "model_path"), _TABLE["model"])
_TABLE |= {
    name: (_same(f"trainer.{name}"),)
    for name in (
        *("optim_args", "lr_scheduler_kwargs", "neftune_noise_alpha", "tf32"),
        *("full_determinism", "per_device_eval_batch_size", "dataloader_num_workers", "dataloader_pin_memory"),
        *("dataloader_persistent_workers", "dataloader_prefetch_factor", "ddp_find_unused_parameters", "ddp_timeout"),
        *("log_level", "run_name"),
    )
}
NAMES = tuple(_TABLE)


def listed() -> list[tuple[str, Alias]]:
    """Every other name with what it stands for, by name; a name may have one row per kind of command."""
    return [(name, alias) for name in sorted(_TABLE) for alias in _TABLE[name]]


def meaning(name: str, offered: Collection[str]) -> tuple[Alias, str] | None:
    """What a name stands for where the settings ``offered`` exist, and which of them; None for an unknown name."""
    for alias in _TABLE.get(name, ()):
        if (setting := alias.setting(offered)) is not None:
            return alias, setting
    return None


def answer(written: str, alias: Alias, ours: str) -> UserError:
    """The error for a name that does not mean the same; both names as the user writes them."""
    return UserError(f"{written}: use {ours}, which {alias.differs}")


def suggestion(name: str, offered: Collection[str]) -> str | None:
    """The offered setting whose name, or another name of it, is nearest to a misspelled one."""
    near = nearest(name, [*offered, *(other for other in NAMES if meaning(other, offered) is not None)])
    if not near:
        return None
    found = near.split("'")[1]
    known = None if found in offered else meaning(found, offered)
    return found if known is None else known[1]


def in_our_words(given: Mapping[str, object], offered: Collection[str], *, file: str = "") -> dict[str, object]:
    """Settings by Lamina's names; names that are in no table stay, for whoever checks them.

    ``file``: where they come from, for the messages. Raises UserError for a name that does not mean the same, and for
    two names of one setting.
    """
    ours: dict[str, object] = {}
    said: dict[str, str] = {}
    where = f"{file!r}: " if file else ""
    for name, value in given.items():
        found = None if name in offered else meaning(name, offered)
        setting = name
        if found is not None:
            alias, setting = found
            if alias.differs:
                raise answer(f"{where}{name}", alias, setting)
            if alias.switch is not None:
                if not switch(f"{where}{name}", False if value is None else value):
                    continue
                value = alias.switch
            elif alias.change is not None:
                value = alias.change(f"{where}{name}", value)
        refuse_twice(said, setting, f"{where}{name}")
        outer, _, inner = setting.partition(".")
        if inner:
            held = ours.get(outer)
            ours[outer] = {**(held if isinstance(held, Mapping) else {}), inner: value}
        elif isinstance(value, Mapping) and isinstance(held := ours.get(setting), Mapping):
            ours[setting] = {**held, **value}
        else:
            ours[setting] = value
    return ours


def refuse_twice(said: dict[str, str], setting: str, written: str) -> None:
    """Note the name that a setting was given by. Raises UserError where it was given by another name before."""
    before = said.setdefault(setting, written)
    if before != written:
        raise UserError(f"{before} and {written} are the same setting (allowed: one of them)")
