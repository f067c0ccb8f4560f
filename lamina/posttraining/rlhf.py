"""Policies by reinforcement learning: ReMax, RLOO and GRPO, with a reward model or a verifiable reward."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING

from lamina.core.json_types import Json
from lamina.errors import UserError
from lamina.jobs.folder import Resume
from lamina.jobs.kinds import Kind
from lamina.posttraining import policy
from lamina.posttraining.examples import prompt_of
from lamina.posttraining.policy import HELD_OUT, reward_gain
from lamina.posttraining.rewards import check_rewards, make_rewards
from lamina.posttraining.rows import Fields
from lamina.posttraining.settings import RlhfSettings
from lamina.posttraining.trainer import Passed, TunedTrainer, trl
from lamina.posttraining.tuning import Examples, Row, TuningStage, tune
from lamina.training.optimization.order import TrainOrder
from lamina.training.run import TrainingRun

if TYPE_CHECKING:
    from datasets import Dataset


def rlhf(
    settings: RlhfSettings | Mapping[str, object], *, resume: Resume = False, overwrite: bool = False, bar: bool = True
) -> Json:
    """Train a policy on prompts and rewards; see ``lamina.posttraining.tuning.tune``."""
    return tune(PolicyOptimization(), settings, resume=resume, overwrite=overwrite, bar=bar)


class PolicyOptimization(TuningStage[RlhfSettings]):
    """InstructGPT's third step; by default ReMax with Adam-mini's KL and clipping."""

    kind = Kind.RLHF
    record = RlhfSettings
    guarded = False
    measure = "eval_reward"
    monitored = "prompt_ids"

    def rewards(self) -> str:
        return check_rewards(self.settings, self.start)

    def read_examples(self) -> Examples:
        if self.settings.max_answer >= self.start.longest:
            raise UserError(
                f"max_answer: {self.settings.max_answer} leaves no room for a prompt in the context of "
                f"{self.start.longest} tokens (allowed: less)"
            )
        return super().read_examples()

    def encoded(self, row: Fields) -> Json:
        """A prompt: its text, its token ids, and its row as JSON."""
        prompt = prompt_of(row)
        ids = self.encoder.prompt(prompt, room=self.settings.max_answer)
        try:
            whole = json.dumps(dict(row))
        except TypeError as error:
            raise ValueError(f"not JSON ({error})") from None
        return {"prompt": self.encoder.prompt_text(prompt), "prompt_ids": ids, "row": whole}

    def dataset(self, encoded_rows: Sequence[Row], *, train: bool) -> Dataset:
        from datasets import Dataset

        return Dataset.from_list(list(map(dict, encoded_rows)))

    def order(self, run: TrainingRun) -> TrainOrder:
        copies = self.settings.num_generations
        return PromptOrder(len(self.examples.train), copies=copies, **self.order_options(run))

    def trainer(self, run: TrainingRun) -> TunedTrainer:
        settings = self.settings
        arguments = self.arguments(
            trl("GRPOConfig" if settings.algorithm == "grpo" else "RLOOConfig"),
            run,
            per_device_train_batch_size=settings.batch_size * settings.num_generations // run.processes.size,
            num_generations=settings.num_generations,
            num_generations_eval=1,  # TRL's own evaluation is not used; its check would refuse an odd batch size
            max_completion_length=settings.max_answer,
            temperature=settings.temperature,
            beta=0.0,
        )
        return policy.trainer_class(settings.algorithm)(
            **self.trainer_options(run, arguments),
            rewards=make_rewards(settings, arguments.device),
            clip=settings.reward_clip,
            beta=settings.beta,
            reference=self.start.policy().eval().requires_grad_(False),
            **({"kl_per": settings.kl_per} if settings.algorithm == "remax" else {}),
        )

    def finish(self, run: TrainingRun) -> Json:
        return reward_gain(run.folder / HELD_OUT)


class PromptOrder(TrainOrder):
    """The training order of prompts for TRL's online trainers, each prompt ``copies`` times in a row.

    TRL answers all prompts of a step at its first micro-batch and ignores what it is given at the others.
    """

    def __init__(self, prompts: int, *, copies: int, **options: Passed):
        super().__init__(prompts, **options)
        self.copies = copies

    def __iter__(self) -> Iterator[list[int]]:
        parts = range(self.gradient_accumulation)
        for step in range(self.done + 1, self.steps + 1):
            mine = [index for part in parts for index in self.micro_batch(step, part)[self.share]]
            for _ in parts:
                yield [index for index in mine for _ in range(self.copies)]
