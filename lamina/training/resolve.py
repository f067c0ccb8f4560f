"""Complete and check a run's settings, norm placement and backbone."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import torch
from transformers import PreTrainedConfig, PreTrainedModel, TrainingArguments

from lamina.core import initializers
from lamina.data.blocks import Splits
from lamina.data.packed import single_corpus_of
from lamina.errors import UserError, renamed_setting
from lamina.jobs.job import ResumePolicy
from lamina.modeling.backbones import resolve_backbone
from lamina.modeling.backbones.presets import used_by_a_token
from lamina.modeling.building import build, recommended, refuse_beyond_memory
from lamina.modeling.configuration_lamina import backbone_of
from lamina.modeling.processes import device_of
from lamina.modeling.scaling import Scaling, StepFactors
from lamina.placements import Plan
from lamina.probes.engine import registry
from lamina.training import source
from lamina.training.arguments import training_arguments
from lamina.training.checkpointing.saved_model import check_repository
from lamina.training.execution.devices import decided, missing_compiler
from lamina.training.execution.float8 import check_float8
from lamina.training.monitor.experts import choose, find_routers
from lamina.training.monitor.trackers import installed
from lamina.training.objectives.objective import Objective, Processor, objective_of
from lamina.training.optimization.optimizer import check_optimizer, scaling_of, step_factors
from lamina.training.setting_groups import TrainerSettings
from lamina.training.settings import PretrainSettings

if TYPE_CHECKING:
    from lamina.evaluation.job import TaskMeasure

POLICY = ResumePolicy(what="run", free=PretrainSettings.free() | {"rollback"})

# optimizers that treat each element of a weight independently
SHARDED_OPTIMIZERS = ("adamw_torch_fused", "adamw_torch", "sgd", "adagrad", "rmsprop")


@dataclass(frozen=True)
class ResolvedRun:
    """A run with final settings, which are equal in every process."""

    settings: PretrainSettings  # the checked settings, with a choice in place of "auto" for precision and compilation
    plan: Plan  # the placement of the norms
    # the backbone's configuration with the settings' sizes. The objective later adds sizes that depend on the data
    backbone: PreTrainedConfig

    @property
    def device(self) -> str:
        return device_of(self.settings.device)

    @property
    def scaling(self) -> Scaling | None:
        """The width and depth scaling of learning rates and weights, or None."""
        return scaling_of(self.settings)

    @property
    def objective(self) -> Objective:
        return objective_of(self.backbone, self.settings.objective)

    @property
    def item_tokens(self) -> int:
        """The number of tokens per training example. An image has a token per patch and a token for the class."""
        return self.objective.item_tokens(self.backbone, self.settings)

    @property
    def tokens_per_step(self) -> int:
        """The number of tokens in an optimizer step, over all processes."""
        return self.settings.batch_size * self.settings.gradient_accumulation * self.item_tokens

    def read(self, *, bar: bool = False) -> tuple[Splits, Processor]:
        """Read the data, and the tokenizer or image processor. Raises UserError if the data are unusable."""
        return self.objective.read(self.settings, self.backbone, bar=bar)


def resolve_run(
    settings: PretrainSettings, processes: int = 1, *, parallel: str = "ddp", trained: bool = True
) -> ResolvedRun:
    """Complete and check a run's settings without reading the corpus. Raises UserError for an invalid setting."""
    settings = decided(settings)
    config = backbone_config(settings)
    objective_of(config, settings.objective).check(settings)
    plan = source.plan_of(settings, config.num_hidden_layers)
    arguments = check_settings(settings, plan, processes)
    # ``trained``: this machine trains the model, so Lamina checks its memory
    check_modules(settings, config, plan, arguments, processes, trained=trained)
    if parallel == "fsdp2" and (processes > 1 or settings.tensor_parallel > 1):
        check_sharded(settings)
        check_tensor_parallel(settings, config)
    resolved = ResolvedRun(settings, plan, config)
    if settings.precision == "float8":
        tokens = settings.batch_size // processes * resolved.item_tokens
        check_float8(arguments.device, tokens, settings.tensor_parallel)
    return resolved


def backbone_config(settings: PretrainSettings, vocab_size: int | None = None) -> PreTrainedConfig:
    """Build the backbone's configuration with the settings' sizes. Raises UserError for invalid sizes."""
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
) -> tuple[PreTrainedModel, dict[str, StepFactors] | None]:
    """Build a run's model. Return the model and each parameter's learning rate factors, or None if all are equal."""
    settings, scaling, objective = resolved.settings, resolved.scaling, resolved.objective
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
            scaling=scaling,
        )
    else:
        model = source.load(settings.from_model, config, objective.head)
    if scaling is None and settings.optimizer == "adamw":
        return model, None
    return model, step_factors(model, scaling or Scaling(), settings.optimizer)


def training_flops(model: PreTrainedModel, plan: Plan, sequence_length: int) -> float:
    """Count the FLOPs of the forward and backward pass per token:

        6 P + 12 N d T

    P is the number of weights in the matrix products of the blocks and the output head. For routed experts, P includes
    only the weights that one token uses. N is the number of blocks, d is the width, and T is the sequence length. As in
    PaLM (2204.02311) and nanoGPT, attention counts all T tokens despite a causal mask. The recomputation in gradient
    checkpointing is not included.
    """
    config = backbone_of(model.config)
    embedding = model.get_input_embeddings()
    # A parameter with a first axis of 1 is added to every item, as position embeddings and the class token are.
    matrices = [(name, p.numel()) for name, p in model.named_parameters() if p.ndim >= 2 and p.shape[0] > 1]
    weights = sum(int(size * used_by_a_token(name, config)) for name, size in matrices)
    if isinstance(embedding, torch.nn.Embedding) and not config.tie_word_embeddings:
        weights -= embedding.weight.numel()  # an embedding is a look-up; only images are multiplied by an embedding
    weights += wiring_multiplications(plan) * config.hidden_size
    return 6.0 * weights + 12.0 * plan.num_layers * config.hidden_size * sequence_length


def wiring_multiplications(plan: Plan) -> int:
    """Count the multiplications per token that combine residual streams or earlier hidden states."""
    total = memory = 0
    for layer in plan.layers:
        memory += layer.boundary
        total += 0 if layer.sources is None else (1 + len(layer.sources.states)) * (4 if layer.sources.multiway else 1)
        for half in (layer.attention, layer.feed_forward):
            memory += layer.inner_boundary and half is layer.feed_forward
            n = len(half.streams.read) if half.streams else 0
            total += 2 * n + (n * n if half.streams and half.streams.mix != "identity" else 0)
            total += 2 * (memory + (half.read == "depth")) if half.reads_memory else 0
    return total


def check_settings(settings: PretrainSettings, plan: Plan, processes: int = 1) -> TrainingArguments:
    """Return the Trainer's arguments. Raises UserError for a setting that the machine or the placement rules out."""
    if settings.push_to_hub is not None:
        check_repository(settings.push_to_hub)
    if settings.eval_corpus is not None:
        with renamed_setting("corpus", "eval_corpus"):
            single_corpus_of(settings.eval_corpus, settings.text_field)
    task_measure(settings)
    installed(settings.report_to)
    if settings.probe_every or settings.probes != PretrainSettings.probes:
        registry.make_all(settings.probes)
    if settings.init != "recommended":
        initializers.check(settings.init)
    # even if the run uses another initializer, because a placement file may name an unknown initializer
    if settings.from_model is None:
        initializers.check(recommended(plan))
    arguments = training_arguments(settings, processes)
    if settings.optimizer == "muon" and "optim" in settings.trainer:
        raise UserError(
            f"optimizer: 'muon' and trainer.optim = {settings.trainer['optim']!r} both choose the optimizer. Give "
            "only one of the two."
        )
    if arguments.use_liger_kernel:
        raise UserError(
            "trainer.use_liger_kernel: Liger has no layers for Lamina's models. Leave out trainer.use_liger_kernel."
        )
    if scaling_of(settings) is not None:
        check_optimizer(arguments)
    if settings.precision == "fp16" and arguments.device.type == "cpu":
        # accelerate has no loss scaler on the CPU and would silently train in float32
        raise UserError("precision: 'fp16' needs a GPU. On the CPU, choose auto, fp32 or bf16.")
    if settings.cuda_graphs and processes > 1:
        raise UserError(
            f"cuda_graphs: true does not work in {processes} processes. Leave out cuda_graphs, or run one process."
        )
    if settings.compile == "on" and (missing := missing_compiler(arguments.device)):
        raise UserError(f"compile: 'on', but {missing} (allowed here: auto, off)")
    return arguments


def task_measure(settings: PretrainSettings) -> TaskMeasure | None:
    """Return the function that scores eval_tasks, or None. Raises UserError for missing tasks or data."""
    if settings.eval_tasks is None:
        return None
    from lamina.evaluation.job import TaskMeasure  # imported here, because the import needs the harness

    return TaskMeasure.find(
        settings.eval_tasks,
        settings.eval_data_dir,
        settings.eval_task_limit,
        settings.batch_size,
        settings.seed,
        run_code=settings.run_code,
    )


def check_modules(
    settings: PretrainSettings,
    config: PreTrainedConfig,
    plan: Plan,
    arguments: TrainingArguments,
    processes: int = 1,
    *,
    trained: bool = True,
) -> None:
    """Raise UserError for errors that show only when Lamina builds modules, such as too little memory."""
    # one layer of each kind, on the meta device
    # ``sources`` would name layers that do not exist here
    kinds = tuple(replace(layer, sources=None) for layer, _ in plan.kinds()[:4])
    with torch.device("meta"):
        few = resolve_backbone(config, num_layers=len(kinds))
        small = build(few, replace(plan, layers=kinds, final_sources=None), init="normal", scaling=scaling_of(settings))
    if trained:
        _check_memory(settings, config, small, arguments, processes)
    if settings.cuda_graphs or settings.packing == "off" or settings.expert_balance in ("bias", "loss"):
        with torch.device("meta"):
            routers = find_routers(build(config, plan, init="normal"))
        if settings.cuda_graphs and routers:
            raise UserError(
                "cuda_graphs: true does not work with experts, because the experts' load changes from step to step. "
                "Leave --cuda-graphs out."
            )
        if settings.packing == "off" and routers:
            raise UserError(
                "packing: 'off' does not work with experts, because padding would change the experts' load. Leave out "
                "--packing off."
            )
        choose(settings.expert_balance, routers)


def _check_memory(
    settings: PretrainSettings,
    whole: PreTrainedConfig,
    small: PreTrainedModel,
    arguments: TrainingArguments,
    processes: int,
) -> None:
    """Raise UserError if a step needs more than the memory. ``small`` is a shallower model on the meta device."""
    num_layers, length = whole.num_hidden_layers, objective_of(whole, settings.objective).item_tokens(whole, settings)
    config = backbone_of(small.config)
    device = "cuda" if arguments.device.type == "cuda" else "cpu"
    parts = processes * settings.tensor_parallel if settings.parallel == "fsdp2" else 1
    weights = sum(w.numel() for name, w in small.named_parameters() if ".layers." in name)
    weights = weights * num_layers // config.num_hidden_layers // parts
    optimizer = str(getattr(arguments.optim, "value", arguments.optim))
    adamw = settings.optimizer == "adamw" and optimizer.startswith("adamw_torch")
    copies = 4 if adamw else 2  # the weight, the gradient, and AdamW's two averages
    states = settings.batch_size // processes * length * config.hidden_size * num_layers
    refuse_beyond_memory(
        "hidden_size, num_layers", f"training {weights:.3g} weights in the blocks takes", 4.0 * copies * weights, device
    )
    refuse_beyond_memory(
        "batch_size, sequence_length",
        f"the backward pass of {settings.batch_size // processes} × {length} tokens through {num_layers} blocks takes",
        2.0 * states,
        device,
    )


def check_tensor_parallel(settings: PretrainSettings, config: PreTrainedConfig) -> None:
    """Raise UserError if the processes cannot share the model's matrices."""
    size, text = settings.tensor_parallel, config.get_text_config()
    if size == 1:
        return
    plan = getattr(text, "base_model_tp_plan", None)
    if not plan or any("expert" in name for name in plan):
        raise UserError(
            f"tensor_parallel: {size} does not work with {config.model_type}. Set tensor_parallel to 1, or choose "
            "a text model without experts."
        )
    heads = getattr(text, "num_key_value_heads", None) or text.num_attention_heads
    if heads % size:
        raise UserError(
            f"tensor_parallel: {size} does not divide the {heads} key-value heads. Choose a divisor of {heads}."
        )


def check_sharded(settings: TrainerSettings) -> None:
    """Raise UserError for settings that do not work with FSDP2."""
    for name, none, command in (("eval_tasks", "none", "eval"), ("probe_every", "0", "probe")):
        if value := getattr(settings, name, None):
            raise UserError(
                f"{name}: {value!r} needs the whole model in one process. Use --parallel ddp, or set {name} to {none} "
                f"and run lamina {command} afterwards."
            )
    if average := getattr(settings, "ema_decay", 0.0):
        raise UserError(
            f"ema_decay: {average} needs whole weights in each process. Set ema_decay to 0, or use --parallel ddp."
        )
    optimizer, name = str(settings.trainer.get("optim", SHARDED_OPTIMIZERS[0])), "trainer.optim"
    if getattr(settings, "optimizer", "adamw") == "muon":
        optimizer, name = "muon", "optimizer"
    if optimizer not in SHARDED_OPTIMIZERS:
        raise UserError(
            f"{name}: {optimizer!r} does not work on sharded weights. Choose one of {', '.join(SHARDED_OPTIMIZERS)}, "
            "or use --parallel ddp."
        )
