"""Policies by reinforcement learning: ReMax, RLOO and GRPO, with a reward model or a verifiable reward."""

from __future__ import annotations

from collections.abc import Mapping

from lamina.core.json_types import Json
from lamina.jobs.folder import Resume
from lamina.jobs.kinds import Kind
from lamina.posttraining import policy
from lamina.posttraining.held_out import FILE, gain
from lamina.posttraining.job import tune
from lamina.posttraining.prompts import PromptOrder, read_prompts
from lamina.posttraining.rewards import check_rewards, make_rewards
from lamina.posttraining.settings import RlhfSettings
from lamina.posttraining.stage import Examples, Setup, Stage, arguments_for
from lamina.posttraining.starting import Start
from lamina.posttraining.trainer import Parts, Passed, TunedTrainer, trl
from lamina.training.optimization.order import TrainOrder


def rlhf(
    settings: RlhfSettings | Mapping[str, object], *, resume: Resume = False, overwrite: bool = False, bar: bool = True
) -> Json:
    """Train a policy on prompts and rewards; see ``lamina.posttraining.job.tune``."""
    return tune(PolicyOptimization(), settings, resume=resume, overwrite=overwrite, bar=bar)


class PolicyOptimization(Stage[RlhfSettings]):
    """InstructGPT's third step; by default ReMax with Adam-mini's KL and clipping."""

    kind = Kind.RLHF
    settings = RlhfSettings
    guarded = False
    measure = "eval_reward"

    def examples(self, settings: RlhfSettings, start: Start) -> Examples:
        return read_prompts(settings, start)

    def others(self, settings: RlhfSettings, start: Start) -> str:
        return check_rewards(settings, start)

    def order(self, settings: RlhfSettings, examples: int, **options: Passed) -> TrainOrder:
        return PromptOrder(examples, copies=settings.num_generations, **options)

    def trainer(self, setup: Setup[RlhfSettings], parts: Parts) -> TunedTrainer:
        settings = setup.settings
        grpo = settings.algorithm == "grpo"
        arguments = arguments_for(
            trl("GRPOConfig" if grpo else "RLOOConfig"),
            setup,
            per_device_train_batch_size=settings.batch_size * settings.num_generations // setup.processes.size,
            num_generations=settings.num_generations,
            num_generations_eval=1,  # TRL's own evaluation is not used; its check would refuse an odd batch size
            max_completion_length=settings.max_answer,
            temperature=settings.temperature,
            beta=0.0,
        )
        chosen = {"grpo": policy.grpo_class, "rloo": policy.rloo_class, "remax": policy.remax_class}
        own: Json = {"kl_per": settings.kl_per} if settings.algorithm == "remax" else {}
        return chosen[settings.algorithm]()(
            **setup.trainer_options(arguments, parts),
            rewards=make_rewards(settings, arguments.device),
            clip=settings.reward_clip,
            beta=settings.beta,
            reference=setup.start.policy().eval().requires_grad_(False),
            **own,
        )

    def finish(self, setup: Setup[RlhfSettings], trainer: TunedTrainer) -> Json:
        return gain(setup.folder / FILE)
