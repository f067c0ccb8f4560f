"""The fine-tuning, reward model and policy jobs in Lamina's catalog of jobs."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Unpack

from lamina.core.json_types import Json
from lamina.jobs.row import CHECKPOINT, MODEL, Given, JobRow, Modes

if TYPE_CHECKING:
    from types import ModuleType

    from lamina.jobs.settings import Settings


def tuning(
    name: str,
    settings: Callable[[], type[Settings]],
    run: Callable[..., Json],
    summary: str,
    about: str,
    examples: str,
    *inputs: str,
    files: tuple[str, ...] = (),
) -> JobRow:
    """Build the catalog entry of a training job after pretraining."""
    return JobRow(
        name=name,
        kind=name,
        summary=summary,
        about=about,
        examples=examples,
        settings=settings,
        run=run,
        pages=tuning_pages,
        returns="``data`` may also be a list of rows or a datasets.Dataset. Returns the content of result.json; "
        f"{MODEL}",
        raises="data or a model that can't be read",
        resumes=CHECKPOINT,
        inputs=("from_model", *inputs),
        files=("data", "eval_data", "template", *files),
        extra="posttrain",
    )


def every_settings() -> ModuleType:
    from lamina.lab.posttraining import settings

    return settings


def tuning_pages() -> object:
    from lamina.lab.posttraining import page

    return page


def sft(settings: Given, **modes: Unpack[Modes]) -> Json:
    from lamina.lab.posttraining.sft import sft as train

    return train(settings, **modes)


SFT = tuning(
    "sft",
    lambda: every_settings().SftSettings,
    sft,
    "fine-tune a model on instructions or conversations",
    "Fine-tune a model on instructions or conversations. To chat with the model, run `lamina generate OUTPUT --chat`.",
    """
  lamina sft --from runs/keel-64 --data instructions.jsonl --output runs/keel-64-sft
  lamina sft --from runs/keel-64 --data chats.jsonl --template chat --packing --sequence-length 512 --epochs 2 \\
      --output runs/keel-64-chat
  lamina sft --from HuggingFaceTB/SmolLM2-135M --data questions.jsonl --lora-rank 16 --learning-rate 2e-4 \\
      --output runs/smollm2-lora
  lamina sft --from runs/keel-64 --preset lima --output runs/keel-64-lima
  lamina sft --output runs/keel-64-sft --resume
""",
)


def reward(settings: Given, **modes: Unpack[Modes]) -> Json:
    from lamina.lab.posttraining.pairs import reward as train

    return train(settings, **modes)


REWARD = tuning(
    "reward",
    lambda: every_settings().RewardSettings,
    reward,
    "train a reward model on preferences",
    "Train a reward model on preferences (prompt, chosen, rejected), from a fine-tuned model.",
    """
  lamina reward --from runs/keel-64-sft --data preferences.jsonl --output runs/keel-64-reward
  lamina reward --from runs/keel-64-sft --data hf:trl-lib/ultrafeedback_binarized --batch-size 16 --epochs 1
  lamina reward --output runs/keel-64-reward --resume
""",
)


def rlhf(settings: Given, **modes: Unpack[Modes]) -> Json:
    from lamina.lab.posttraining.rlhf import rlhf as train

    return train(settings, **modes)


RLHF = tuning(
    "rlhf",
    lambda: every_settings().RlhfSettings,
    rlhf,
    "train a policy by reinforcement learning with ReMax, RLOO or GRPO",
    "Train a policy with ReMax, RLOO or GRPO, on rewards from a model or a function.",
    """
  lamina rlhf --from runs/keel-64-sft --reward-model runs/keel-64-reward --data prompts.jsonl --output runs/keel-64-rlhf
  lamina rlhf --from runs/keel-64-sft --reward-function sums.py:is_right --data sums.jsonl --algorithm grpo \\
      --num-generations 8
  lamina rlhf --output runs/keel-64-rlhf --resume
""",
    "reward_model",
    files=("reward_function",),
)


def dpo(settings: Given, **modes: Unpack[Modes]) -> Json:
    from lamina.lab.posttraining.pairs import dpo as train

    return train(settings, **modes)


DPO = tuning(
    "dpo",
    lambda: every_settings().DpoSettings,
    dpo,
    "train a policy on preferences, without a reward model",
    "Train a policy on preferences (prompt, chosen, rejected), without a reward model.",
    """
  lamina dpo --from runs/keel-64-sft --data preferences.jsonl --output runs/keel-64-dpo
  lamina dpo --from runs/keel-64-sft --data preferences.jsonl --beta 0.3 --learning-rate 5e-7 --lora-rank 16
  lamina dpo --output runs/keel-64-dpo --resume
""",
)
