"""The resolved run: settings, plan and backbone, worked out once, checked and frozen."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from transformers import PreTrainedConfig, PreTrainedModel

from lamina.data.blocks import Splits
from lamina.jobs.resume import ResumePolicy
from lamina.modeling.backbones import resolve_backbone
from lamina.modeling.backbones.presets import used_by_a_token
from lamina.modeling.building import build
from lamina.modeling.configuration_lamina import backbone_of
from lamina.modeling.width import WidthScaling
from lamina.placements import Plan
from lamina.training import source
from lamina.training.checks import check_modules, check_settings, check_sharded
from lamina.training.execution.devices import decided, device_of
from lamina.training.objectives.objective import Objective, Processor, objective_of
from lamina.training.optimization.optimizer import rate_factors, width_scaling_of
from lamina.training.settings import PretrainSettings

POLICY = ResumePolicy(what="run", free=PretrainSettings.undecided() | {"rollback"})


@dataclass(frozen=True)
class ResolvedRun:
    """A run as it will be trained; the same in every process.

    Attributes:
        settings: complete and checked; precision and compilation are decided.
        plan: where the norms sit.
        backbone: the backbone's configuration with the settings' sizes; the objective adds what the data decides.
    """

    settings: PretrainSettings
    plan: Plan
    backbone: PreTrainedConfig

    @property
    def device(self) -> str:
        """The type of device that the run trains on: cpu, cuda or mps."""
        return device_of(self.settings.device)

    @property
    def width_scaling(self) -> WidthScaling | None:
        """The scheme that scales rates and weights with the width; None without one."""
        return width_scaling_of(self.settings)

    @property
    def objective(self) -> Objective:
        """What the model is trained to predict."""
        return objective_of(self.backbone, self.settings.objective)

    @property
    def item_tokens(self) -> int:
        """Tokens of one item: of a block, or the patches of an image with the class token."""
        return self.objective.item_tokens(self.backbone, self.settings)

    @property
    def tokens_per_step(self) -> int:
        """Tokens of one optimizer step, over all processes."""
        return self.settings.batch_size * self.settings.gradient_accumulation * self.item_tokens


def resolve_run(
    settings: PretrainSettings, processes: int = 1, *, parallel: str = "ddp", trained: bool = True
) -> ResolvedRun:
    """Work out a run's plan and backbone, and check everything that can be known before the corpus is read.

    Args:
        settings: of the run.
        processes: how many train it together.
        parallel: how they share the work, "ddp" or "fsdp2".
        trained: whether this machine trains the model as it is, so that it has to fit into its memory.

    Raises:
        UserError: that names the field.
    """
    settings = decided(settings)
    config = backbone_config(settings)
    objective_of(config, settings.objective).check(settings)
    plan = source.plan_of(settings, config.num_hidden_layers)
    arguments = check_settings(settings, plan, processes)
    check_modules(settings, config, plan, arguments, processes, trained=trained)
    if processes > 1 and parallel == "fsdp2":
        check_sharded(settings)
    return ResolvedRun(settings, plan, config)


def backbone_config(settings: PretrainSettings, vocab_size: int | None = None) -> PreTrainedConfig:
    """The backbone's configuration with the settings' sizes and room for the objective's items. Raises UserError."""
    if settings.from_model is not None:
        config = source.config_of(settings.from_model, vocab_size)
        objective_of(config, settings.objective, settings.from_model).fit(config, settings)
        return config
    config = resolve_backbone(
        settings.backbone,
        num_layers=settings.num_layers,
        hidden_size=settings.hidden_size,
        num_heads=settings.num_heads,
        vocab_size=vocab_size,
    )
    if settings.untie_embeddings:
        config.tie_word_embeddings = False
    objective_of(config, settings.objective, settings.backbone).fit(config, settings)
    return config


def initial_model(
    resolved: ResolvedRun, splits: Splits, processor: Processor
) -> tuple[PreTrainedModel, dict[str, float] | None]:
    """Build a run's model, and under width scaling each parameter's factor on the learning rate."""
    settings, scaling, objective = resolved.settings, resolved.width_scaling, resolved.objective
    config = objective.complete(resolved.backbone, splits, processor, settings.from_model)
    torch.manual_seed(settings.seed)
    profile = splits.train.sample(settings.batch_size)
    if settings.from_model is None:
        model = build(
            config,
            resolved.plan,
            head=objective.head,
            init=settings.init,
            profile_ids=profile,
            width_scaling=scaling,
        )
    else:
        model = source.load(settings.from_model, config, objective.head)
    return model, None if scaling is None else rate_factors(model, scaling)


def training_flops(model: PreTrainedModel, plan: Plan, sequence_length: int) -> float:
    """Forward and backward FLOPs per token: 6 per weight outside the embedding and 12 N d T for full attention.

    Of routed experts, those that one token uses.
    """
    config = backbone_of(model.config)
    embedding = model.get_input_embeddings()
    # A parameter with a first axis of 1 is added to every item: a position's embedding, the class token.
    matrices = [(name, p.numel()) for name, p in model.named_parameters() if p.ndim >= 2 and p.shape[0] > 1]
    weights = sum(int(size * used_by_a_token(name, config)) for name, size in matrices)
    if isinstance(embedding, torch.nn.Embedding) and not config.tie_word_embeddings:
        weights -= embedding.weight.numel()  # looked up; images are multiplied by theirs
    return 6.0 * weights + 12.0 * plan.num_layers * config.hidden_size * sequence_length
