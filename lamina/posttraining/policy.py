"""Policies on TRL's online trainers: RLOO and GRPO as they are, and ReMax on the former."""

from __future__ import annotations

import copy
from collections.abc import Iterable, Sequence
from functools import cache
from pathlib import Path
from typing import cast

import torch
from torch.utils.data import DataLoader
from transformers import PreTrainedModel

from lamina.core.json_types import Json
from lamina.posttraining import held_out, remax
from lamina.posttraining.rewards import Score, padded
from lamina.posttraining.stage import Row
from lamina.posttraining.trainer import Parts, Passed, TunedTrainer, trl

_Online: Passed = object  # one of TRL's online trainers, in the classes below


MEASURED = ("reward", "kl", "length", "ended")


class PolicyTrainer(TunedTrainer, _Online):
    """A mixin for TRL's RLOOTrainer and GRPOTrainer: encoded prompts, one reward, and a reference model of its own.

    Args:
        rewards: of answers, not clipped.
        clip: the magnitude that rewards are clipped to; 0 for none.
        beta: the factor on the KL. TRL's own argument stays 0 while the trainer is built, since it would load the
            reference model by name.
        reference: the model that the policy starts from, frozen.
    """

    def __init__(
        self,
        *args: Passed,
        parts: Parts,
        rewards: Score,
        clip: float,
        beta: float,
        reference: PreTrainedModel | None,
        **kwargs: Passed,
    ):
        self.rewards, self.clip = rewards, clip
        super().__init__(*args, parts=parts, reward_funcs=self._clipped_rewards, **kwargs)
        self.beta = beta
        if reference is not None:  # with beta 0, too: the KL is measured
            from trl.trainer.utils import add_fused_lm_head

            add_fused_lm_head(reference, temperature=self.temperature)
            self.ref_model = self.accelerator.prepare_model(reference, evaluation_mode=True)

    def get_train_dataloader(self) -> DataLoader:
        """The prompts in Lamina's order; TRL's trainers take them as a list of rows."""
        return DataLoader(
            self.train_dataset,  # type: ignore[arg-type]
            batch_sampler=self.order,
            collate_fn=list,
            generator=torch.Generator().manual_seed(self.args.seed),  # else it draws from the model's random state
        )

    @property
    def tokens_seen(self) -> int:
        """The tokens of all prompts and answers so far."""
        return int(self.state.num_input_tokens_seen)

    def _tokenize_prompts(self, prompts: list[str]) -> tuple[list[list[int]], None, Json]:
        return [self._ids[prompt] for prompt in prompts], None, {}

    def _generate_and_score_completions(self, inputs: list[Row]) -> Passed:
        self._ids = {row["prompt"]: row["prompt_ids"] for row in inputs}
        return super()._generate_and_score_completions(inputs)

    def _clipped_rewards(
        self,
        prompts: Sequence[str],
        completions: Sequence[str],
        completion_ids: Sequence[Sequence[int]],
        row: Sequence[str],
        prompt_ids: Sequence[Sequence[int]],
        **kwargs: object,
    ) -> list[float]:
        """TRL's form of a reward function."""
        rows = [
            {"prompt": prompt, "prompt_ids": ids, "row": whole}
            for prompt, ids, whole in zip(prompts, prompt_ids, row, strict=True)
        ]
        rewards = self.rewards(rows, completion_ids, completions)
        return [max(-self.clip, min(self.clip, reward)) for reward in rewards] if self.clip else rewards

    def evaluate(self, *args: Passed, **kwargs: Passed) -> dict[str, float]:
        """Reward, KL and length of one sampled answer per held-out prompt; writes each answer's to held_out.jsonl.

        ``eval_kl`` is the mean over answers of sum_t (logp_t - ref_t) in nats, whose expectation is the KL of the
        policy's answers to those of the model that it started from. The random numbers are the same at each evaluation,
        and those of training are left as they were.
        """
        rows: list[Row] = list(cast(Iterable[Row], self.eval_dataset))
        batch = max(1, self.args.per_device_eval_batch_size)
        mine = list(range(self.processes.rank, len(rows), self.processes.size))
        numbers: list[Json] = []
        model = self.bare_model()
        was_training = model.training
        model.eval()
        devices = [self.args.device] if self.args.device.type == "cuda" else []
        try:
            with torch.no_grad(), torch.random.fork_rng(devices=devices):
                torch.manual_seed(self.args.seed)
                for first in range(0, len(mine), batch):
                    chosen = mine[first : first + batch]
                    answers = self._held_out_answers([rows[i] for i in chosen])
                    numbers += [{"prompt": i, **answer} for i, answer in zip(chosen, answers, strict=True)]
        finally:
            model.train(was_training)
        everyone = [number for part in self.processes.everyones(numbers) for number in part]
        everyone.sort(key=lambda number: number["prompt"])
        if self.processes.first:
            held_out.write(Path(str(self.args.output_dir)).parent / held_out.FILE, self.state.global_step, everyone)
        metrics = {f"eval_{name}": sum(n[name] for n in everyone) / len(everyone) for name in MEASURED}
        self.log_held_out(metrics)
        self.control = self.callback_handler.on_evaluate(self.args, self.state, self.control, metrics)
        return metrics

    def _held_out_answers(self, rows: Sequence[Row]) -> list[Json]:
        """The numbers of one sampled answer to each prompt."""
        tokenizer: Passed = self.processing_class
        model, device, end = self.bare_model(), self.args.device, tokenizer.eos_token_id
        ids, mask = padded([row["prompt_ids"] for row in rows], tokenizer.pad_token_id, device, left=True)
        options = {"max_new_tokens": self.max_completion_length, "temperature": self.temperature, "do_sample": True}
        ends = {"pad_token_id": tokenizer.pad_token_id, "eos_token_id": end}
        whole = model.generate(input_ids=ids, attention_mask=mask, top_k=0, top_p=1.0, **options, **ends)  # type: ignore[operator]
        answers = []
        for answer in whole[:, ids.shape[1] :].tolist():
            answers.append(answer[: answer.index(end) + 1] if end in answer else answer)
        texts = tokenizer.batch_decode(answers, skip_special_tokens=True)
        rewards = self.rewards(rows, answers, texts)
        after, answered = padded(answers, tokenizer.pad_token_id, device)
        sequence, attended = torch.cat([ids, after], 1), torch.cat([mask, answered], 1)
        kl = torch.zeros(len(rows))
        if self.ref_model is not None:
            ours, theirs = (self.token_logps(m, sequence, attended, after.shape[1]) for m in (model, self.ref_model))
            kl = ((ours - theirs) * answered).sum(1).cpu()
        return [
            {"reward": reward, "kl": float(k), "length": len(answer), "ended": float(answer[-1] == end)}
            for reward, k, answer in zip(rewards, kl, answers, strict=True)
        ]

    def token_logps(self, model: Passed, ids: torch.Tensor, mask: torch.Tensor, answer: int) -> torch.Tensor:
        """The log-probabilities of the last ``answer`` tokens, [sequences, answer]; 0 where the mask has none."""
        labels = ids.masked_fill(mask == 0, -100)
        labels[:, :-answer] = -100
        with self.accelerator.autocast():
            outputs = model(input_ids=ids, attention_mask=mask, labels=labels, fused_lm_head=True)
        return outputs.log_probs[:, -answer:]


@cache
def rloo_class() -> type[PolicyTrainer]:
    """TRL's RLOOTrainer with Lamina's part."""

    class LaminaRLOOTrainer(PolicyTrainer, trl("RLOOTrainer")):
        pass

    return LaminaRLOOTrainer


@cache
def grpo_class() -> type[PolicyTrainer]:
    """TRL's GRPOTrainer with Lamina's part."""

    class LaminaGRPOTrainer(PolicyTrainer, trl("GRPOTrainer")):
        pass

    return LaminaGRPOTrainer


class ReMaxTrainer(PolicyTrainer):
    """ReMax on TRL's RLOOTrainer, which lacks it; see ``lamina.posttraining.remax`` for the equations.

    Of the two answers per prompt the first is sampled, and the second is greedy: RLOO's baseline of the first, the mean
    reward of the others, is then the greedy answer's reward. The greedy answers are dropped before the forward pass
    that has a gradient.
    """

    def __init__(self, *args: Passed, kl_per: str, **kwargs: Passed):
        super().__init__(*args, **kwargs)
        self.kl_per = kl_per

    def _generate_single_turn(self, prompt_ids: list, *others: Passed) -> list[list[int]]:
        if not self.bare_model().training:
            return super()._generate_single_turn(prompt_ids, *others)
        sampled = super()._generate_single_turn(prompt_ids[0::2], *others)
        stochastic = self.generation_config, self.generation_kwargs
        greedy = {"do_sample": False, "temperature": None, "top_p": None, "top_k": None, "min_p": None}
        self.generation_config = copy.deepcopy(stochastic[0])
        self.generation_config.update(**greedy)
        self.generation_kwargs = {**stochastic[1], **greedy}
        try:
            best = super()._generate_single_turn(prompt_ids[1::2], *others)
        finally:
            self.generation_config, self.generation_kwargs = stochastic
        return [answer for pair in zip(sampled, best, strict=True) for answer in pair]

    def _generate_and_score_completions(self, inputs: list[Row]) -> Passed:
        beta, self.beta = self.beta, 0.0  # TRL would charge the KL to the baseline, too
        try:
            output = super()._generate_and_score_completions(inputs)
        finally:
            self.beta = beta
        output = {name: value[0::2] for name, value in output.items()}  # the greedy answers were the baseline
        ids = torch.cat([output["prompt_ids"], output["completion_ids"]], dim=1)
        mask = torch.cat([output["prompt_mask"], output["completion_mask"]], dim=1)
        answer = output["completion_ids"].shape[1]
        if self.ref_model is not None:
            with torch.no_grad():
                output["reference"] = self.token_logps(self.ref_model, ids, mask, answer)
        return output

    def _compute_loss(self, model: Passed, inputs: dict[str, torch.Tensor]) -> torch.Tensor:
        ids = torch.cat([inputs["prompt_ids"], inputs["completion_ids"]], dim=1)
        mask = torch.cat([inputs["prompt_mask"], inputs["completion_mask"]], dim=1)
        answers = inputs["completion_mask"]
        logps = self.token_logps(model, ids, mask, answers.shape[1])
        reference = inputs.get("reference", logps.detach())
        settings = {"beta": self.beta, "kl_per": self.kl_per}
        weight = remax.weights(inputs["advantages"], logps, reference, answers, **settings)
        kl = ((logps.detach() - reference) * answers).sum()
        self._log_answers(kl, answers.sum(), torch.tensor(len(answers), device=kl.device))
        return remax.loss(weight, logps, answers)

    def _log_answers(self, *sums: torch.Tensor) -> None:
        kl, tokens, answers = self.accelerator.reduce(torch.stack([part.float() for part in sums]), reduction="sum")
        measured = self._metrics["train"]
        measured["kl"].append(float(kl / tokens.clamp(min=1)))
        measured["kl_per_answer"].append(float(kl / answers.clamp(min=1)))


@cache
def remax_class() -> type[PolicyTrainer]:
    """ReMax on TRL's RLOOTrainer."""

    class LaminaReMaxTrainer(ReMaxTrainer, trl("RLOOTrainer")):
        pass

    return LaminaReMaxTrainer
