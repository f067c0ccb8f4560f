"""The settings for training language models, reward models and policies after pretraining."""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path
from typing import ClassVar, Literal, Self

from lamina.core.json_types import Json
from lamina.core.values import comma_separated, entries, examples_name, existing_file, factors, mapping, place, text
from lamina.errors import UserError, unknown
from lamina.jobs.setting_groups import OutputSettings, SeedSettings, ThreadSettings
from lamina.jobs.settings import Settings, above, at_least, between, changed, not_below, setting
from lamina.training.setting_groups import (
    GuardSettings,
    LearningRateSettings,
    OptimizerSettings,
    RecordSettings,
    ScheduleSettings,
    SpeedSettings,
    TrainerSettings,
)
from lamina.training.settings import EndSettings, ParallelSettings, PretrainSettings, SourceSettings

HELD_OUT = "held_out.jsonl"  # reward, KL and length of the answer to each held-out prompt, by evaluation
_FILES = r"\.(jsonl?|ndjson|csv|parquet|txt)(\.(gz|xz|zst))?$"
PRESETS: dict[str, Mapping[str, object]] = {
    # OwLore's script (Li et al. 2024), which Mix-LN Table 2 follows. It packs the examples and trains on all tokens.
    "commonsense170k": {
        "template": "plain",
        "epochs": 1.0,
        "learning_rate": 3e-4,
        "batch_size": 16,
        "sequence_length": 512,
        "packing": True,
        "trl": {"completion_only_loss": False},
    },
    # LLM-Adapters (Hu et al. 2023). Its code trains on the question, too, and LoRA's rank is 8.
    "commonsense170k-adapters": {
        "template": "alpaca",
        "epochs": 3.0,
        "learning_rate": 3e-4,
        "batch_size": 4,
        "gradient_accumulation": 4,
        "sequence_length": 256,
        "warmup": 100.0,
        "eval_examples": 120,
        "trl": {"completion_only_loss": False},
        "lora_rank": 8,
        "lora_alpha": 16.0,
        "lora_dropout": 0.05,
        "lora_targets": "q_proj,v_proj",
    },
    # LIMA after pretraining, as in Peri-LN (appendix D.2), which chooses the best checkpoint by held-out tasks. The
    # micro-batch of 8 is ours.
    "lima": {
        "data": "hf:GAIR/lima",
        "template": "chat",
        "epochs": 15.0,
        "learning_rate": 1e-5,
        "batch_size": 8,
        "gradient_accumulation": 16,
        "best_by": "loss",
    },
}
"""Published recipes for `lamina sft`, by name. A recipe names a dataset only if the dataset is on the hub."""


LORA = (
    *("use_dora", "use_rslora", "modules_to_save", "target_parameters", "init_lora_weights", "layers_to_transform"),
    *("layers_pattern", "rank_pattern", "alpha_pattern", "bias"),
)
"""The arguments of peft's LoraConfig that the setting ``lora`` accepts."""


def of_hub(source: str) -> bool:
    """Return whether a data source is a dataset's name on the hub (OWNER/NAME) rather than a local path."""
    named = re.fullmatch(r"[\w-][\w.-]*/[\w.-]+", source) is not None
    return named and not re.search(_FILES, source) and not Path(source).exists()


class DataSettings(Settings, group="data"):
    """The settings that choose the examples and turn them into text."""

    data: str | None = setting(
        None,
        "the examples: a .jsonl, .json, .csv or .parquet file, a folder, a name on the hub (trl-lib/Capybara), "
        "hf:NAME[:CONFIG][@SPLIT], generated:answers or generated:preferences",
        examples_name,
    )
    eval_data: str | None = setting(None, "held-out examples (default: a part of the data)", examples_name)
    eval_fraction: float = setting(
        0.05, "fraction of the data to hold out, if you do not set eval_data", between(0.0, 0.5, open_low=True)
    )
    eval_examples: int = setting(256, "maximum number of held-out examples per evaluation (0 for all)", at_least(0))
    template: str = setting(
        "auto",
        "prompt or chat template: tokenizer, alpaca, human, chat, plain, none, a Jinja file, or auto (for "
        "conversations and Alpaca's rows, the tokenizer's template; if the tokenizer has none, sft uses chat for "
        "conversations and alpaca for Alpaca's rows; for plain texts, no template)",
        place,
    )
    sequence_length: int | None = setting(
        None,
        "maximum number of tokens per example; Lamina cuts longer examples (default: the model's maximum; with packing "
        "at most 1024)",
        at_least(4),
    )
    skip_bad: bool = setting(False, "skip unusable rows, instead of stopping with an error")

    def check_names(self) -> None:
        super().check_names()
        for name in ("data", "eval_data"):
            source = getattr(self, name)
            if source is not None and not of_hub(source):
                existing_file(name, source)


class LoraSettings(Settings, group="LoRA"):
    """The settings of LoRA, which trains small added matrices instead of the model's weights."""

    lora_rank: int = setting(0, "train LoRA matrices of this rank (0: train all weights)", at_least(0))
    lora_alpha: float | None = setting(None, "LoRA's scaling parameter alpha (default: twice the rank)", above(0.0))
    lora_dropout: float = setting(
        0.0, "dropout probability on the input of the LoRA matrices", between(0.0, 1.0, open_high=True)
    )
    lora_targets: str = setting(
        "all-linear", "linear layers that get LoRA: all-linear, or comma-separated names such as q_proj,v_proj",
        comma_separated,
    )  # fmt: skip
    lora: Json = setting({}, "any other argument of peft's LoraConfig, e.g. --lora.use_dora true", mapping)


class MemorySettings(Settings, group="machine"):
    """The settings of the weights' number format and of the attention kernel."""

    weights: Literal["fp32", "bf16", "nf4", "int8"] = setting(
        "fp32",
        "number format of the weights in memory: fp32 or bf16; for LoRA also nf4 or int8 (needs bitsandbytes)",
    )
    attn_implementation: str = setting(
        "auto",
        "attention kernel: auto (transformers' choice), sdpa, eager, flash_attention_2, or any other name that "
        "transformers knows",
        text,
    )

    @property
    def quantized(self) -> bool:
        return self.weights in ("nf4", "int8")


def _outside(*kinds: str) -> dict[str, tuple[str, ...]]:
    """Return the arguments that ``lora``, ``trl`` and ``trainer`` accept, as names or as files that define names."""
    return {
        "lora": (*LORA, "use_peft", "task_type"),
        "trl": tuple(f"trl/trainer/{kind}_config.py" for kind in kinds),
        **TrainerSettings.outside,
    }


class TuningSettings(
    SourceSettings,
    DataSettings,
    ScheduleSettings,
    LearningRateSettings,
    OptimizerSettings,
    LoraSettings,
    MemorySettings,
    RecordSettings,
    GuardSettings,
    SpeedSettings,
    ThreadSettings,
    TrainerSettings,
    SeedSettings,
    ParallelSettings,
    EndSettings,
    OutputSettings,
):
    """The settings that all training jobs after pretraining share."""

    outside: ClassVar[Mapping[str, tuple[str, ...]]] = _outside("sft")

    without: ClassVar[frozenset[str]] = frozenset(
        {"eval_blocks", "probe_every", "monitor_blocks", "stuck_margin", "compile", "cuda_graphs", "tensor_parallel"}
    )
    order: ClassVar[tuple[str, ...]] = ("from_model", "data")
    needed: ClassVar[tuple[str, ...]] = ("from_model", "data")

    from_model: str | None = changed(
        None,
        help="the model to start from: a run's folder, or a causal language model of Lamina or transformers",
    )
    steps: int = changed(0, help="optimizer steps (0: as many as the epochs need)", check=at_least(0))
    epochs: float = setting(1.0, "passes over the examples, unless you set --steps", above(0.0))
    group_by_length: bool = setting(False, "put examples of similar length into one batch, which saves padding")
    trl: Json = setting({}, "any other argument of TRL's own configuration, e.g. --trl.loss_type dft", mapping)
    batch_size: int = changed(8, help="examples per micro-batch, over all processes")
    warmup: float = changed(0.03)
    weight_decay: float = changed(0.0)
    beta2: float = changed(0.999)
    min_learning_rate: float = changed(0.0)
    precision: Literal["auto", "fp32", "bf16", "fp16"] = changed(
        "auto", help="number format of the computation: auto (bf16 on a GPU, otherwise fp32), fp32, bf16 or fp16"
    )
    seed: int = changed(0, help="seed of the examples' order and of all other random numbers")

    @property
    def changes_base(self) -> bool:
        """Whether LoRA changes weights of the initial model, besides adding its own matrices."""
        return bool(self.lora.keys() & {"bias", "init_lora_weights"})

    def check(self) -> None:
        """Raise UserError for contradictory values. With ``steps`` 0, skip the checks that need the number of steps."""
        if self.steps:
            super().check()
            self.as_run()
        if self.quantized and not self.lora_rank:
            raise UserError(
                f"weights: {self.weights!r} needs LoRA, because quantized weights cannot be "
                "trained. Set weights to fp32 or bf16, or add --lora-rank."
            )
        if self.weights == "bf16" and self.precision == "fp16":
            raise UserError(
                "precision: 'fp16' needs float32 weights. Set weights to fp32, or set precision to bf16 or fp32."
            )
        if self.lora_rank == 0:
            lora = ("lora_alpha", "lora_dropout", "lora_targets", "lora")
            self.refuse_unused(*lora, here="without LoRA", allowed="with --lora-rank")

    def as_run(self) -> PretrainSettings:
        other = ("from_model", "packing")  # these have another meaning in pretraining
        shared = {name: value for name, value in self.shared_with(PretrainSettings).items() if name not in other}
        shared["sequence_length"] = self.sequence_length or PretrainSettings.sequence_length
        return PretrainSettings.from_dict(shared)


_MAIN = ("from_model", "data", "template", "sequence_length", "epochs", "batch_size", "learning_rate", "lora_rank")


class SftSettings(TuningSettings):
    """The settings of a fine-tuning run."""

    command_name = "sft"
    main = (*_MAIN, "preset", "output")

    preset: str | None = setting(
        None,
        f"settings of a published recipe ({', '.join(PRESETS)}); your flags override the recipe's settings",
        decides=False,
    )
    epochs: float = changed(3.0)
    learning_rate: float = changed(2e-5)
    packing: bool = setting(
        False, "fill each sequence of sequence_length tokens with several examples, which do not attend to one another"
    )
    best_by: str = setting(
        "last",
        "the checkpoint to keep: last, loss (the lowest held-out loss), or the name of a task in eval_tasks (the best "
        "score)",
        text,
    )
    output: str = changed("runs/sft")

    def check(self) -> None:
        super().check()
        if self.eval_tasks is None and self.best_by not in ("last", "loss"):
            raise unknown("best_by", self.best_by, ("last", "loss"))
        if self.group_by_length and self.packing:
            raise UserError(
                "group_by_length: this setting has no effect on packed sequences. Leave out --packing or "
                "--group-by-length."
            )

    @classmethod
    def from_dict(cls, data: Mapping[str, object]) -> Self:
        """Build the settings from a mapping. The mapping's values override the preset's values."""
        return super().from_dict(with_preset(data))


def with_preset(given: Mapping[str, object]) -> Json:
    """Add the preset's values for all settings that are not given. Raises UserError for an unknown preset."""
    name = given.get("preset")
    if name is None:
        return dict(given)
    if name not in PRESETS:
        raise unknown("preset", str(name), PRESETS)
    preset = PRESETS[str(name)]
    trl = {"trl": {**preset["trl"], **given["trl"]}} if "trl" in preset and "trl" in given else {}  # type: ignore[dict-item]
    return {**preset, **given, **trl}


class RewardSettings(TuningSettings):
    """The settings for training a reward model."""

    command_name = "reward"
    outside = _outside("reward")
    without = TuningSettings.without | {"eval_corpus", "eval_tasks", "eval_task_limit", "eval_data_dir", "run_code"}
    main = (*_MAIN, "precision", "output")

    learning_rate: float = changed(2e-5)
    output: str = changed("runs/reward")


class DpoSettings(TuningSettings):
    """The settings of direct preference optimization."""

    command_name = "dpo"
    outside = _outside("dpo")
    main = (*_MAIN, "beta", "output")

    learning_rate: float = changed(1e-6)
    beta: float = setting(
        0.1, "beta of the DPO loss: a larger value keeps the policy closer to the starting model", above(0.0)
    )
    output: str = changed("runs/dpo")


BETAS = {"remax": 0.1, "rloo": 0.05, "grpo": 0.0}
REWARD_CLIPS = {"remax": 5.0, "rloo": 0.0, "grpo": 0.0}
"""The defaults by algorithm, from the code of Adam-mini (remax) and from TRL."""


class RlhfSettings(TuningSettings):
    """The settings for training a policy by reinforcement learning."""

    command_name = "rlhf"
    outside = _outside("rloo", "grpo")
    without = TuningSettings.without | {"group_by_length"}
    main = (
        *("from_model", "data", "reward_model", "reward_function", "algorithm", "num_generations"),
        *("max_answer", "steps", "learning_rate", "output"),
    )

    data: str | None = changed(
        None,
        help="the prompts: a .jsonl, .json, .csv or .parquet file, hf:NAME[:CONFIG][@SPLIT], or generated:answers",
    )
    reward_model: str | None = setting(
        None, "comma-separated folders of reward models that `lamina reward` wrote", place
    )
    reward_function: str | None = setting(
        None,
        "comma-separated reward functions, each as FILE.py:NAME; a function takes (prompt, answer, row) and returns a "
        "number, or has the signature of a TRL reward function; Lamina executes the files",
        place,
    )
    reward_weights: str | None = setting(
        None,
        "comma-separated weights of the rewards: first the weights of all reward models, then of all reward functions "
        "(default: 1 each)",
        factors,
    )
    reward_timeout: float = setting(
        0.0,
        "time limit of a reward function per answer, in seconds; after the limit, the reward is 0 (0: no limit)",
        not_below(0.0),
    )
    algorithm: Literal["remax", "rloo", "grpo"] = setting(
        "remax", "reinforcement learning algorithm: remax, rloo or grpo"
    )
    kl_per: Literal["step", "sequence"] = setting(
        "step",
        "with remax, 'step' applies the KL penalty per token (as in Adam-mini's code), and 'sequence' per answer "
        "(as in TRL's code)",
    )
    beta: float | None = setting(
        None,
        "factor on the KL penalty, which keeps the policy close to the starting model (default: 0.1 for remax, and "
        "as in TRL 0.05 for rloo and 0 for grpo)",
        not_below(0.0),
    )
    reward_clip: float | None = setting(
        None,
        "clip rewards to this magnitude; 0 means no clipping (default: 5 for remax, and as in TRL 0 for rloo and grpo)",
        not_below(0.0),
    )
    num_generations: int = setting(
        2, "sampled answers per prompt; remax always takes one sampled and one greedy answer", at_least(2)
    )
    max_answer: int = setting(128, "maximum number of tokens per answer", at_least(1))
    temperature: float = setting(1.0, "sampling temperature of the answers", above(0.0))
    learning_rate: float = changed(2e-7)
    batch_size: int = changed(8, help="prompts per micro-batch, over all processes")
    output: str = changed("runs/rlhf")

    def check(self) -> None:
        super().check()
        for name, defaults in (("beta", BETAS), ("reward_clip", REWARD_CLIPS)):
            if getattr(self, name) is None:
                object.__setattr__(self, name, defaults[self.algorithm])
        count = len(self.reward_models()) + len(self.reward_functions())
        if self.reward_weights is not None and len(self.weights_of_rewards()) != count:
            raise UserError(
                f"reward_weights: {self.reward_weights!r} does not fit. Give one number per reward (rewards: {count})."
            )
        if not self.reward_functions():
            self.refuse_unused("reward_timeout", allowed="with --reward-function")
        if self.epsilon > 1e-5:
            raise UserError(
                f"epsilon: {self.epsilon:g} is too large for Adam's epsilon. Give at most 1e-05. To set "
                "the clipping range of the policy ratio, use trl.epsilon."
            )
        if self.algorithm == "remax" and self.num_generations != 2:
            raise UserError(
                f"num_generations: {self.num_generations} does not work with remax, which takes one sampled and one "
                "greedy answer. Set num_generations to 2."
            )
        if self.algorithm != "remax":
            self.refuse_unused("kl_per", allowed="with --algorithm remax")

    def reward_models(self) -> list[str]:
        return entries(self.reward_model)

    def reward_functions(self) -> list[str]:
        return entries(self.reward_function)

    def weights_of_rewards(self) -> list[float]:
        """Return the weight of each reward model, then of each reward function."""
        if self.reward_weights is None:
            return [1.0] * (len(self.reward_models()) + len(self.reward_functions()))
        return [float(part) for part in entries(self.reward_weights)]
