"""Other names of Lamina's settings: the names in transformers, TRL, lm-eval, litgpt and nanoGPT, and plurals."""

from __future__ import annotations

import importlib.util
import re
from collections.abc import Collection, Mapping
from functools import cache
from pathlib import Path

from lamina.errors import UserError, nearest_name


def _table(rows: str) -> dict[str, list[str]]:
    return {ours.strip(): others.split() for ours, others in (row.split(":") for row in rows.split(";"))}


# For each setting, other names with the same meaning, which Lamina accepts. If a name stands for several settings, a
# command uses the first setting that the command has.
TAKEN = _table("""
num_layers: num_hidden_layers n_layer n_layers; hidden_size: n_embd d_model; num_heads: num_attention_heads n_head;
from_model: from model model_name_or_path; checkpoint: model model_name_or_path; models: model model_name_or_path;
placement: placements; placements: placement; seed: seeds; seeds: seed; corpus: data train_file;
data: train_file dataset_name;
learning_rate: lr learning_rates; learning_rates: lr learning_rate; warmup: warmup_steps num_warmup_steps warmup_ratio;
epochs: num_train_epochs; steps: max_steps max_iters; gradient_accumulation: gradient_accumulation_steps;
sequence_length: block_size max_length max_seq_length seq_len; output: output_dir out_dir output_path;
beta1: adam_beta1; beta2: adam_beta2; epsilon: adam_epsilon eps; max_grad_norm: grad_clip; save_steps: save_interval;
eval_steps: eval_interval; logging_steps: log_interval; keep: save_total_limit; push_to_hub: hub_model_id;
text_field: dataset_text_field; eval_data: validation_file; lora_rank: lora_r; lora_targets: lora_target_modules;
label_smoothing: label_smoothing_factor; max_answer: max_completion_length max_new_tokens max_tokens;
reward_model: reward_model_name_or_path; template: chat_template_path;
gradient_checkpointing: activation_checkpointing; chat_template: apply_chat_template; system: system_instruction
""")
# For each setting, the names with a similar meaning. Lamina rejects such a name and suggests the setting.
NEAR = _table("""
epochs: epoch num_epochs; steps: num_train_epochs epoch num_epochs iters;
batch_size: per_device_train_batch_size micro_batch_size batch bs;
weights: load_in_4bit load_in_8bit dtype torch_dtype; precision: bf16 fp16 torch_dtype;
compile: torch_compile torch_compile_backend torch_compile_mode; device: use_cpu no_cuda; seed: data_seed;
data: corpus; backbone: model model_name_or_path;
parallel: fsdp fsdp_config deepspeed parallelism_config gpus num_gpus;
resume: resume_from_checkpoint;
overwrite: overwrite_output_dir; reward_function: reward_funcs; reward_clip: reward_clip_range;
num_heads: heads n_heads; num_layers: layers depth; hidden_size: hidden_dim dim width; weight_decay: wd;
sequence_length: seqlen max_len context_length; workers: num_workers; learning_rate: learningrate; output: out outdir;
learning_rates: learningrate; max_learning_rate: lr learning_rate max_lr; beta: kl_coef; temperature: temp temperature;
checkpoint: ckpt; from_model: ckpt; drop_path: dropout;
generation: gen_kwargs; data_dir: include_path
""")


def meaning(name: str, offered: Collection[str], *, near: bool = False) -> str | None:
    """Return the setting in ``offered`` that another library calls ``name``, or None. ``near`` allows near meanings."""
    rows = [*TAKEN.items(), *(NEAR.items() if near else ())]
    ours = (setting for setting, others in rows if name in others)
    return None if name in offered else next((setting for setting in ours if setting in offered), None)


@cache
def _declared(files: tuple[str, ...]) -> Mapping[str, str]:
    """Map the options of other libraries to their types as text. Each file is an option, or a source file to read."""
    names = {file: "" for file in files if "/" not in file}
    for package, _, rest in (file.partition("/") for file in files if "/" in file):
        spec = importlib.util.find_spec(package)
        for folder in (spec.submodule_search_locations or ()) if spec is not None else ():
            if (source := Path(folder, rest)).is_file():
                names.update(re.findall(r"^    (\w+): ([^=\n]*)", source.read_text(encoding="utf-8"), re.MULTILINE))
    return names


def is_text(option: str, files: tuple[str, ...]) -> bool:
    """Return whether another library declares an option as text. Lamina must not read such a value as a number."""
    return _declared(files).get(option, "").strip() in ("str", "str | None", "Optional[str]")


def passed_on(name: str, offered: Collection[str], outside: Mapping[str, tuple[str, ...]]) -> tuple[str, str] | None:
    """Return the setting that passes an option on to another library, and the option's name there, or None."""
    if name not in offered and meaning(name, offered, near=True) is None:
        for setting, files in outside.items():
            if (option := name.removeprefix(f"{setting}_")) in _declared(files):
                return setting, option
    return None


def suggestion(name: str, offered: Collection[str]) -> str | None:
    """Return the allowed setting that an unknown name probably means, by meaning or by spelling, or None."""
    others = {other for names in (*TAKEN.values(), *NEAR.values()) for other in names}
    settings_by_name = {
        other: setting for other in others if (setting := meaning(other, offered, near=True)) is not None
    }
    if name in others:
        return settings_by_name.get(name)
    match = nearest_name(name, offered, cutoff=0.67) or nearest_name(name, settings_by_name, cutoff=0.75)
    return settings_by_name.get(match, match) if match else None


def in_our_words(given: Mapping[str, object], offered: Collection[str], where: str = "") -> dict[str, object]:
    """Rename settings to Lamina's names. Raises UserError if the user gave a setting under two names."""
    ours: dict[str, object] = {}
    for name, value in given.items():
        setting = meaning(name, offered) or name
        if setting in ours:
            raise UserError(f"{where}{setting}: you give this setting under two names. Keep one name.")
        ours[setting] = value
    return ours
