"""The card of a model after pretraining: what it was tuned from, on what, and what came of it."""

from __future__ import annotations

from lamina.core.json_types import Json
from lamina.posttraining.settings import TuningSettings
from lamina.training.checkpointing.saved_model import ModelCard

MEASURES = {
    "status": ("status", ""),
    "steps": ("steps", ",.0f"),
    "tokens": ("tokens", ",.0f"),
    "parameters": ("parameters", ",.0f"),
    "trained_parameters": ("trained parameters", ",.0f"),
    "eval_loss": ("held-out loss", ".4f"),
    "eval_accuracy": ("accuracy on held-out pairs", ".2%"),
    "eval_rewards_accuracies": ("accuracy on held-out pairs", ".2%"),
    "eval_reward": ("held-out reward", ".4f"),
    "reward_gain": ("gain of the held-out reward", "+.4f"),
    "eval_kl": ("KL to the model at the start, nats per answer", ".3f"),
}
"""The title and the format of each measure that a job may have."""
_FACTS = {
    "data": "data",
    "eval_data": "held-out data",
    "reward_model": "reward model",
    "reward_function": "reward function",
    "template": "template",
}
_COUNTS = {"examples": "examples to train on", "held_out": "examples held out", "skipped": "rows left out"}


def card_of(settings: TuningSettings, result: Json, head: str) -> ModelCard:
    """The card of a run's model; ``head``: the name of the model's head."""
    given = settings.to_dict()
    facts = {title: given[name] for name, title in _FACTS.items() if given.get(name) is not None}
    counts = {title: f"{result[name]:,}" for name, title in _COUNTS.items() if name in result}
    measures = dict(MEASURES)
    if settings.command_name == "sft":
        measures["eval_accuracy"] = ("accuracy of the answers' tokens", ".2%")
    return ModelCard(
        head=head,
        data={**facts, **counts},
        result=result,
        command=settings.command(),
        base_model=settings.from_model,
        measures=measures,
    )
