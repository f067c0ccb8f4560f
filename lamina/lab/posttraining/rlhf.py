"""Train policies by reinforcement learning with ReMax, RLOO or GRPO, on TRL's trainers.

ReMax (Li et al. 2024, arXiv 2310.10505) samples one answer per prompt, and takes the greedy answer's reward as the
baseline. The loss follows the code of Adam-mini:

    advantage = r(sampled) - r(greedy)
    weight_t  = advantage - beta * (logp_t - ref_t)             (KL penalty per step)
    weight_t  = advantage - beta * sum_s (logp_s - ref_s)       (KL penalty per sequence, as in TRL's RLOO)
    loss      = - sum_t weight_t * logp_t / number of tokens    (the sum is over the tokens of all answers)

r is a clipped reward. logp_t is the policy's log-probability of token t in the sampled answer. ref_t is the same
token's log-probability under the initial model. The weights have no gradient.
"""

from __future__ import annotations

import base64
import copy
import logging
import math
from collections.abc import Iterator, Sequence
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any, cast

import pandas as pd
import torch
from safetensors.torch import load, save
from torch.utils.data import DataLoader
from transformers import PreTrainedModel, TrainingArguments
from trl.trainer.grpo_config import GRPOConfig
from trl.trainer.grpo_trainer import GRPOTrainer
from trl.trainer.rloo_config import RLOOConfig
from trl.trainer.rloo_trainer import RLOOTrainer
from trl.trainer.utils import add_fused_lm_head

from lamina.core.json_types import Json
from lamina.errors import UserError
from lamina.jobs.files import write_lines
from lamina.jobs.job import Job
from lamina.jobs.kinds import Kind
from lamina.jobs.run_folder import parse_lines
from lamina.jobs.settings import at_least
from lamina.jobs.status import Status
from lamina.lab.posttraining.examples import Fields, Messages, prompts
from lamina.lab.posttraining.rewards import Rewards, make_rewards, padded
from lamina.lab.posttraining.settings import HELD_OUT, RlhfSettings
from lamina.lab.posttraining.trainer import NoReference, Passed, TunedTrainer
from lamina.lab.posttraining.tuning import TuningStage, tune
from lamina.modeling.parts import patched
from lamina.modeling.processes import Processes
from lamina.training.checkpointing.checkpoints import RunState
from lamina.training.optimization.order import TrainOrder
from lamina.training.run import TrainingRun

if TYPE_CHECKING:
    from datasets import Dataset

logger = logging.getLogger(__name__)

_Online: Passed = object  # RLOOTrainer or GRPOTrainer in the subclasses

REUSE = {"steps_per_generation", "num_iterations"}  # TRL's arguments for training on the same answers again
SAMPLING = {"top_p", "top_k", "min_p", "repetition_penalty", "chat_template_kwargs"}  # TRL's arguments
_ENTROPY = ("entropy_coef", "_last_world_entropy")  # the values that TRL's GRPOTrainer adapts


class PolicyTrainer(TunedTrainer, _Online):
    """Add Lamina's rewards and reference model to TRL's RLOOTrainer and GRPOTrainer.

    Args:
        rewards: the reward models and functions.
        clip: the largest magnitude of a reward. 0 means no clipping.
        beta: the factor on the KL penalty.
        reference: the frozen initial model. With LoRA, the trainer uses the policy without its LoRA matrices.
    """

    warned: bool = False  # whether Lamina has warned about clipped rewards

    def __init__(
        self,
        *args: Passed,
        rewards: Rewards,
        clip: float,
        beta: float,
        reference: PreTrainedModel | NoReference,
        **kwargs: Passed,
    ):
        self.rewards, self.clip = rewards, clip
        super().__init__(*args, reward_funcs=self._rewards, **kwargs)
        if self.sharded:  # every process generates until all processes have their answers
            self.bare_model().generate = partial(self.bare_model().generate, synced_gpus=True)
        self.beta = beta
        self.ref_model: Passed = self.without_adapters  # Lamina measures the KL even if beta is 0
        if not isinstance(reference, NoReference):
            add_fused_lm_head(cast(PreTrainedModel, reference), temperature=self.temperature)
            self.ref_model = self.accelerator.prepare_model(reference, evaluation_mode=True)

    def get_train_dataloader(self) -> DataLoader:
        """Return a loader that gives batches of prompts in Lamina's order. A batch is a list of rows."""
        return DataLoader(
            self.train_dataset,  # type: ignore[arg-type]
            batch_sampler=self.order,
            collate_fn=list,
            generator=torch.Generator().manual_seed(
                self.args.seed
            ),  # otherwise, the loader changes the model's random state
        )

    @property
    def tokens_seen(self) -> int:
        """The number of tokens so far in all prompts and answers."""
        return int(self.state.num_input_tokens_seen)

    def state_dict(self) -> Json:
        """Return the trainer's state, GRPO's entropy weight, and the answers that later steps train on again."""
        state = {**super().state_dict(), "entropy": [getattr(self, name) for name in _ENTROPY if hasattr(self, name)]}
        options: Passed = self.args
        if self._step % (options.steps_per_generation * self.num_iterations):
            tensors = {
                f"{part}.{name}": value.detach().cpu().clone().contiguous()
                for part, batch in enumerate(self._buffered_inputs)
                for name, value in batch.items()
            }
            state["answers"] = self.processes.everyones(base64.b64encode(save(tensors)).decode())
        return state

    def load_state_dict(self, state: RunState) -> None:
        super().load_state_dict(state)
        options: Passed = self.args
        self._step = max(0, int(state.get("step", 0))) * options.gradient_accumulation_steps
        for name, value in zip(_ENTROPY, state.get("entropy", ()), strict=False):
            setattr(self, name, value)
        if len(answers := state.get("answers", ())) == self.processes.size:  # otherwise, TRL samples new answers
            self._buffered_inputs = [{} for _ in range(options.steps_per_generation)]
            for name, value in load(base64.b64decode(answers[self.processes.rank])).items():
                part, _, field = name.partition(".")
                self._buffered_inputs[int(part)][field] = value.to(self.args.device)

    def _rewards(
        self,
        completions: Sequence[str | Messages],
        completion_ids: Sequence[Sequence[int]],
        prompts: Sequence[str | Messages],
        **columns: Sequence[Passed],
    ) -> list[float]:
        names = ("text", "prompt_ids", "row")
        rows = [
            {"prompt": prompt, **dict(zip(names, values, strict=True))}
            for prompt, *values in zip(prompts, *(columns[name] for name in names), strict=True)
        ]
        texts = [answer if isinstance(answer, str) else answer[0]["content"] for answer in completions]
        parts = self.rewards.parts(rows, completion_ids, texts)
        for name, values in parts.items() if len(parts) > 1 else ():
            self._metrics["train"][f"reward_{name}"].append(self.processes.mean(sum(values) / len(values)))
        rewards = self.rewards.total(parts)
        return self._clipped(rewards) if self.clip else rewards

    def _clipped(self, rewards: Sequence[float]) -> list[float]:
        """Clip a batch's rewards, and record the fraction of clipped rewards. Warn once about a fraction above 1/2."""
        share = self.processes.mean(sum(abs(reward) > self.clip for reward in rewards) / len(rewards))
        self._metrics["train"]["clipped_rewards"].append(share)
        if share > 0.5 and not self.warned and self.processes.first:
            self.warned = True
            logger.warning(
                "reward_clip: at step %d, Lamina clips %.0f%% of the rewards to ±%g, which removes their differences. "
                "Scale the rewards, or raise --reward-clip (0: no clipping)",
                *(self.state.global_step + 1, 100 * share, self.clip),
            )
        return [max(-self.clip, min(self.clip, reward)) for reward in rewards]

    def held_out(self) -> dict[str, float]:
        """Sample an answer to every held-out prompt. Write the metrics of each answer, and return the mean metrics.

        "eval_kl" estimates KL(policy || initial model) in nats per answer. All evaluations use the same random numbers.
        """
        data: Passed = self.eval_dataset

        def measure(chosen: list[int]) -> list[Json]:
            answers = self._held_out_answers([data[i] for i in chosen])
            return [{"prompt": i, **answer} for i, answer in zip(chosen, answers, strict=True)]

        with torch.random.fork_rng(devices=[self.args.device] if self.args.device.type == "cuda" else []):
            torch.manual_seed(self.args.seed)
            numbers = [number for batch in self.held_out_batches(measure) for number in batch]
        everyone = [number for part in self.processes.everyones(numbers) for number in part]
        everyone.sort(key=lambda number: number["prompt"])
        if self.processes.first:
            write_held_out(Path(str(self.args.output_dir)).parent / HELD_OUT, self.state.global_step, everyone)
        names = [name for name in everyone[0] if name != "prompt"]
        return {f"eval_{name}": sum(n[name] for n in everyone) / len(everyone) for name in names}

    def _held_out_answers(self, rows: Sequence[Fields]) -> list[Json]:
        """Sample an answer to each prompt, and return the metrics of each answer."""
        tokenizer: Passed = self.processing_class
        model, device, ends = self.bare_model(), self.args.device, self.eos_token_ids
        ids, mask = padded([row["prompt_ids"] for row in rows], tokenizer.pad_token_id, device, left=True)
        options = {"max_new_tokens": self.max_completion_length, "temperature": self.temperature, "do_sample": True}
        stops = {"pad_token_id": tokenizer.pad_token_id, "eos_token_id": ends}
        whole = model.generate(input_ids=ids, attention_mask=mask, top_k=0, top_p=1.0, **options, **stops)  # type: ignore[operator]
        answers = []
        for answer in whole[:, ids.shape[1] :].tolist():
            answers.append(answer[: next((i for i, token in enumerate(answer, 1) if token in ends), None)])
        texts = tokenizer.batch_decode(answers, skip_special_tokens=True)
        parts = self.rewards.parts(rows, answers, texts)
        after, answered = padded(answers, tokenizer.pad_token_id, device)
        sequence = torch.cat([ids, after], 1), torch.cat([mask, answered], 1), after.shape[1]
        ours, theirs = (self._get_per_token_logps_and_entropies(m, *sequence)[0] for m in (model, self.ref_model))
        kl = ((ours - theirs) * answered).sum(1).cpu()
        every = zip(self.rewards.total(parts), kl, answers, strict=True)
        measured: list[Json] = [
            {"reward": reward, "kl": float(k), "length": len(answer), "ended": float(answer[-1] in ends)}
            for reward, k, answer in every
        ]
        for name, values in parts.items() if len(parts) > 1 else ():
            for one, value in zip(measured, values, strict=True):
                one[f"reward_{name}"] = value
        return measured


class RlooTrainer(PolicyTrainer, RLOOTrainer):
    """TRL's RLOOTrainer with Lamina's additions."""


class GrpoTrainer(PolicyTrainer, GRPOTrainer):
    """TRL's GRPOTrainer with Lamina's additions."""


class ReMaxTrainer(RlooTrainer):
    """Train with ReMax on TRL's RLOOTrainer. The equations are at the top of this file.

    RLOO's baseline for an answer is the mean reward of the prompt's other answers. Lamina gives RLOO a sampled answer
    and the greedy answer, so the greedy answer's reward is the baseline. The loss uses only the sampled answer.
    """

    def __init__(self, *args: Passed, kl_per: str, **kwargs: Passed):
        super().__init__(*args, **kwargs)
        self.kl_per = kl_per

    def _generate_single_turn(self, prompt_ids: list, images: Passed, multimodal_fields: Passed) -> list[list[int]]:
        if not self.bare_model().training:
            return super()._generate_single_turn(prompt_ids, images, multimodal_fields)
        sampled = super()._generate_single_turn(prompt_ids[0::2], images, multimodal_fields)
        greedy = {"do_sample": False, "temperature": None, "top_p": None, "top_k": None, "min_p": None}
        config = copy.deepcopy(self.generation_config)
        config.update(**greedy)
        with patched(self, generation_config=config, generation_kwargs={**self.generation_kwargs, **greedy}):
            best = super()._generate_single_turn(prompt_ids[1::2], images, multimodal_fields)
        return [answer for pair in zip(sampled, best, strict=True) for answer in pair]

    def _generate_and_score_completions(self, inputs: Passed) -> Passed:
        with patched(self, beta=0.0):  # TRL would add the KL penalty to the baseline, too
            output = super()._generate_and_score_completions(inputs)
        output = {name: value[0::2] for name, value in output.items()}  # without the greedy answers
        with torch.no_grad():
            output["reference"] = self._logps(self.ref_model, output)
        return output

    def _logps(self, model: Passed, inputs: dict[str, torch.Tensor]) -> torch.Tensor:
        """Return the log-probabilities of the answers' tokens: [answers, tokens]."""
        ids, mask = (torch.cat([inputs[f"prompt_{n}"], inputs[f"completion_{n}"]], dim=1) for n in ("ids", "mask"))
        return self._get_per_token_logps_and_entropies(model, ids, mask, inputs["completion_ids"].shape[1])[0]

    def _compute_loss(self, model: Passed, inputs: dict[str, torch.Tensor]) -> torch.Tensor:
        logps, answers, reference = self._logps(model, inputs), inputs["completion_mask"], inputs["reference"]
        weight = remax_weights(inputs["advantages"], logps, reference, answers, beta=self.beta, kl_per=self.kl_per)
        kl = ((logps.detach() - reference) * answers).sum()
        sums = torch.stack([kl.float(), answers.sum().float(), torch.tensor(float(len(answers)), device=kl.device)])
        kl, tokens, count = self.accelerator.reduce(sums, reduction="sum")
        self._metrics["train"]["kl"].append(float(kl / tokens.clamp(min=1)))
        self._metrics["train"]["kl_per_answer"].append(float(kl / count.clamp(min=1)))
        return remax_loss(weight, logps, answers)


def remax_weights(
    advantage: torch.Tensor,
    logps: torch.Tensor,
    reference: torch.Tensor,
    mask: torch.Tensor,
    *,
    beta: float,
    kl_per: str,
) -> torch.Tensor:
    """Return the weight of each token's log-probability in the loss: [answers, tokens].

    Args:
        advantage: the advantages of the sampled answers, [answers].
        logps: the policy's log-probabilities of the tokens in nats, [answers, tokens].
        reference: the initial model's log-probabilities of the tokens in nats, [answers, tokens].
        mask: 1 for an answer's tokens and 0 for padding, [answers, tokens].
        kl_per: "step" or "sequence", as in the equations at the top of this file.
    """
    kl = ((logps - reference) * mask).detach()
    if kl_per == "sequence":
        kl = kl.sum(-1, keepdim=True)
    return (advantage[:, None] - beta * kl) * mask


def remax_loss(weight: torch.Tensor, logps: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    """Return a batch's loss from the weight and the log-probability of each token, both [answers, tokens]."""
    return -(weight * logps * mask).sum() / mask.sum().clamp(min=1)


def write_held_out(path: Path, step: int, numbers: list[Json]) -> None:
    """Add an evaluation's metrics to a file. A resumed run replaces the lines of repeated steps."""
    lines, fault = parse_lines(path)
    if fault is not None:
        logger.warning("%s; Lamina skips lines that are not records", fault)
    earlier = [line for line in lines if line["step"] < step]
    write_lines(path, [*earlier, *({"step": step, **number} for number in numbers)])


def reward_gain(path: Path) -> Json:
    """Return the gain in held-out reward from the first to the last evaluation, with Student's 95 % interval, or {}.

    If all prompts gain the same, the interval has a width of 0.
    """
    from scipy import stats

    lines = pd.DataFrame(parse_lines(path)[0], columns=pd.Index(("step", "prompt", "reward")))
    rewards = lines.pivot_table(index="prompt", columns="step", values="reward", aggfunc="last")
    pairs = rewards.iloc[:, [0, -1]].dropna() if len(rewards.columns) > 1 else rewards.iloc[:0]
    if len(pairs) < 2:
        return {}
    test: Passed = stats.ttest_rel(pairs.iloc[:, 1], pairs.iloc[:, 0])
    low, high = test.confidence_interval(0.95)
    mean = float((pairs.iloc[:, 1] - pairs.iloc[:, 0]).mean())
    low, high = (mean if math.isnan(end) else float(end) for end in (low, high))
    return {"reward_gain": mean, "reward_gain_low": low, "reward_gain_high": high}


class PolicyOptimization(TuningStage[RlhfSettings]):
    """Train a policy on rewards, as in InstructGPT's third step."""

    kind = Kind.RLHF
    record = RlhfSettings
    made_by, configured_by = ReMaxTrainer, RLOOConfig
    forms = (("prompt",),)
    columns = ("prompt", "prompt_ids", "text", "row")
    judges: Rewards
    guarded = False
    measure = "eval_reward"

    def rewards(self) -> str:
        settings, longest = self.settings, self.start.longest
        together = {name: settings.trl[name] for name in REUSE if name in settings.trl}
        self.ordered = partial(PromptOrder, copies=settings.num_generations, **together)
        self.judges = make_rewards(settings, self.start)
        if settings.max_answer >= longest:
            raise UserError(
                f"max_answer: {settings.max_answer} leaves no room for a prompt in {longest} tokens. Lower max_answer, "
                "or raise --sequence-length."
            )
        return self.judges.digest

    def conform(self, rows: Dataset, *, turns: bool) -> tuple[Dataset, tuple[str, ...]]:
        if "tools" in rows.column_names:
            raise UserError(
                "the rows have a column 'tools', but Lamina cannot train a policy to call tools. Remove the column"
            )
        return prompts(rows, turns=turns), ("prompt",)

    def by_trl(self, rows: Dataset, form: Sequence[str]) -> Dataset:
        """Add the text and the token ids of each prompt, as TRL's trainers compute them."""
        tokenizer, options = self.start.tokenizer, self.settings.trl.get("chat_template_kwargs") or {}
        theirs: Passed = SimpleNamespace(processing_class=tokenizer, chat_template_kwargs=options)
        how = {"tokenize": False, "add_generation_prompt": True, **options}

        def encoded(batch: Json) -> Json:
            asked: list[Any] = batch["prompt"]
            texts = [one if isinstance(one, str) else tokenizer.apply_chat_template(one, **how) for one in asked]
            return {"prompt_ids": RLOOTrainer._tokenize_prompts(theirs, asked)[0], "text": texts}

        return rows.map(encoded, batched=True, num_proc=self.config.dataset_num_proc)

    def token_ids(self, row: Fields) -> list[int]:
        return row["prompt_ids"]

    def wrong(self, row: Fields) -> str:
        length, answer, longest = len(row["prompt_ids"]), self.settings.max_answer, self.start.longest
        if length + answer <= longest:
            return ""
        return (
            f"the prompt has {length} tokens and the answer can have {answer}, but the context has room for only "
            f"{longest}"
        )

    def check(self, job: Job[RlhfSettings], processes: Processes) -> None:
        if job.settings.algorithm == "rloo":
            self.made_by = RlooTrainer
        elif job.settings.algorithm == "grpo":
            self.made_by, self.configured_by = GrpoTrainer, GRPOConfig
        elif unsupported := set(job.settings.trl) - SAMPLING:  # TRL's other arguments have no effect
            raise UserError(f"trl.{min(unsupported)} has no effect with remax (allowed: {', '.join(sorted(SAMPLING))})")
        for name in REUSE & job.settings.trl.keys():
            at_least(1)(f"trl.{name}", job.settings.trl[name])
        super().check(job, processes)

    def fields(self, run: TrainingRun) -> Json:
        settings = self.settings
        return {
            "per_device_train_batch_size": settings.batch_size * settings.num_generations // run.processes.size,
            "num_generations": settings.num_generations,
            "num_generations_eval": 1,  # TRL would reject odd batch sizes; Lamina does not use TRL's evaluation
            "max_completion_length": settings.max_answer,
            "temperature": settings.temperature,
            "beta": 0.0,
        }

    def options(self, arguments: TrainingArguments) -> Json:
        settings = self.settings
        for model in self.judges.models:
            torch.nn.Module.to(model, arguments.device)
        return {
            "rewards": self.judges,
            "clip": settings.reward_clip or 0.0,
            "beta": settings.beta or 0.0,
            "reference": self.reference(),
            **({"kl_per": settings.kl_per} if settings.algorithm == "remax" else {}),
        }

    def outcome(self, run: TrainingRun, status: Status, reason: str) -> Json:
        return {**super().outcome(run, status, reason), **reward_gain(run.folder / HELD_OUT)}


class PromptOrder(TrainOrder):
    """The training order of the prompts for TRL's RLOOTrainer and GRPOTrainer.

    Both trainers generate the answers for a group of micro-batches at once. The trainers read all prompts of the
    group at the group's first micro-batch.

    Args:
        copies: the number of consecutive copies of each prompt.
        steps_per_generation: the number of micro-batches in a group (default: all micro-batches of an optimizer step).
        num_iterations: how many times TRL trains on the same answers.
    """

    def __init__(
        self, prompts: int, *, copies: int, steps_per_generation: int = 0, num_iterations: int = 1, **options: Passed
    ):
        super().__init__(prompts, **options)
        self.copies, self.iterations = copies, num_iterations
        self.together = steps_per_generation or self.gradient_accumulation

    def __iter__(self) -> Iterator[list[int]]:
        accumulated = self.gradient_accumulation
        for done in range(self.done * accumulated, self.steps * accumulated):
            first = done // (self.together * self.iterations) * self.together
            places = (divmod(place, accumulated) for place in range(first, first + self.together))
            mine = [index for step, part in places for index in self.micro_batch(step + 1, part)[self.share]]
            yield [index for index in mine for _ in range(self.copies)]


rlhf = partial(tune, PolicyOptimization)
"""Train a policy on prompts and rewards. ``lamina.lab.posttraining.tuning.tune`` lists the arguments."""
