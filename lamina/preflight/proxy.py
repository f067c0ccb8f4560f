"""The model that is measured: the planned one, or one of the same depth that is narrow enough to be trained at once."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import Any

import torch
from transformers import PreTrainedModel

from lamina.errors import UserError
from lamina.modeling import initialization
from lamina.modeling.backbones import count_parameters
from lamina.modeling.building import build, make_plan, recommended
from lamina.modeling.profiling import profile_admin
from lamina.placements import Plan
from lamina.training.pretrain import backbone_config
from lamina.training.settings import PretrainSettings

NARROWEST, FEWEST_TOKENS = 64, 256


@dataclass(frozen=True, kw_only=True)
class Proxy:
    """What stands in for the planned run: ``ratio`` is the planned width over the measured one (1.0: the same)."""

    settings: PretrainSettings
    plan: Plan
    hidden_size: int
    ratio: float

    @property
    def note(self) -> str:
        """A sentence on what differs from the planned run; empty where nothing does."""
        return (
            f"measured at width {self.hidden_size} and batch size {self.settings.batch_size} in place of "
            f"{round(self.hidden_size * self.ratio)}: weights' std times {math.sqrt(self.ratio):.3g}, their learning "
            f"rate times {self.ratio:.3g}"
            if self.ratio > 1
            else ""
        )


def choose(settings: PretrainSettings, vocab_size: int, steps: int, flops: float) -> Proxy:
    """The planned run, or with fewer blocks a batch and then narrower until ``steps`` of it take at most ``flops``.

    Depth is never reduced; width is halved as long as the heads allow and to no less than 64.
    """
    config = backbone_config(settings, vocab_size)
    plan = make_plan(settings.placement, config.num_hidden_layers)
    width = planned = int(config.hidden_size)
    fewest = max(1, FEWEST_TOKENS // settings.sequence_length)
    while True:
        cost = 6.0 * count_parameters(config).active * settings.sequence_length * steps
        batch = min(settings.batch_size, max(fewest, int(flops // cost)))
        half = None if width // 2 < NARROWEST or width % 2 else _narrower(settings, width // 2, vocab_size)
        if cost * batch <= flops or half is None:
            made = replace(settings, hidden_size=width, batch_size=batch)
            made = made if width == planned else replace(made, num_heads=None)
            return Proxy(settings=made, plan=plan, hidden_size=width, ratio=planned / width)
        width, config = width // 2, half


def _narrower(settings: PretrainSettings, width: int, vocab_size: int) -> Any:
    try:
        return backbone_config(replace(settings, hidden_size=width, num_heads=None), vocab_size)
    except UserError:
        return None


def build_model(proxy: Proxy, planned: PretrainSettings, vocab_size: int, profile: torch.Tensor) -> PreTrainedModel:
    """The model to measure, drawn as `lamina pretrain` draws it for this seed.

    In a narrower one every weight matrix inside the blocks and the readout gets the planned model's standard deviation
    times the root of the ratio of their fan-ins, so that what comes out of it has the planned model's variance.
    """
    torch.manual_seed(proxy.settings.seed)
    config = backbone_config(proxy.settings, vocab_size)
    model = build(config, proxy.plan, head="causal_lm", init=proxy.settings.init, profile_ids=profile)
    if proxy.ratio == 1.0:
        return model
    name = recommended(proxy.plan) if planned.init == "recommended" else planned.init
    with torch.device("meta"):
        full = build(backbone_config(planned, vocab_size), proxy.plan, head="causal_lm", init="normal")
    wide = {weight.name: weight for weight in initialization.weights(full)}
    with torch.no_grad():
        for weight in initialization.weights(model):
            if weight.layer < 0 and weight.sublayer == "embedding" or weight.role in ("bias", "vector"):
                continue
            target = wide[weight.name]
            std = initialization.std_of(target, name) / initialization.std_of(weight, name)
            weight.parameter.mul_(std * math.sqrt(target.fan_in / weight.fan_in))
    if initialization.check(name)[0] == "admin":
        profile_admin(model, profile)
    return model


def parameter_groups(model: PreTrainedModel, proxy: Proxy) -> list[dict[str, Any]]:
    """AdamW's groups as pretraining has them (matrices decay, gains and biases don't), the rate of matrices scaled.

    Widening a model by m at an unchanged effect of a step takes 1/m of the rate in hidden and readout weights (Everett
    et al. 2024, standard parametrisation, full alignment); a narrower stand-in takes m times the planned one.
    """
    rate, decay = proxy.settings.learning_rate, proxy.settings.weight_decay
    groups: dict[tuple[float, float], list[torch.Tensor]] = {}
    for weight in initialization.weights(model):
        vector = weight.parameter.ndim < 2
        like_embedding = vector or weight.sublayer == "embedding"
        key = (rate if like_embedding else rate * proxy.ratio, 0.0 if vector else decay)
        groups.setdefault(key, []).append(weight.parameter)
    # decoupled decay takes rate * decay a step: what the planned run's is
    return [
        {"params": parameters, "lr": lr, "weight_decay": decay * rate / lr} for (lr, decay), parameters in groups.items()
    ]
