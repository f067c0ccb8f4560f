"""Find mistakes in a model's modules, in its loaded weights, and in the choice of weights that learn."""

from __future__ import annotations

import math
import re
from collections.abc import Iterator

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from lamina.probes.structure.hooks import Output
from lamina.probes.structure.sites import is_norm
from lamina.training.monitor.before_training import BeforeTraining, Mistake, checks, listing
from lamina.training.monitor.first_pass import whole

MUCH_DROPPED = 0.8  # of a dropout's elements
LARGE_EPSILON = 1e-2  # of a norm; keras's batch norms have 1e-3
TRAINED = 0.05  # the range of a norm's gains after more than a few steps
_TASKS = re.compile(r"For(\w*Classification|QuestionAnswering|MultipleChoice)$")
_HEADS = ("classifier", "score", "qa_outputs", "classification_head")


@checks
def no_gradient(setup: BeforeTraining) -> Iterator[Mistake]:
    """Find a training in which nothing learns: all weights are frozen, gradients are off, or the loss uses none."""
    trial = setup.trial
    if setup.names and not setup.trained:
        yield Mistake(
            what="no parameter requires a gradient",
            why="nothing can learn",
            do="Unfreeze what you want to train. For an adapter, pass is_trainable=True to PeftModel.from_pretrained",
        )
    elif not setup.recording and not setup.running:
        yield Mistake(
            what="gradients are switched off",
            why="torch.no_grad() or torch.set_grad_enabled(False) is active, so backward() fails",
            do="Switch gradients on with torch.set_grad_enabled(True)",
        )
    elif trial is not None and not trial.stuck and not any(trial.gradients.values()):
        yield Mistake(
            what="all gradients are 0" if trial.reached else "no parameter gets a gradient",
            why="the loss depends on no trainable weight",
            do="Look for .detach(), .item(), argmax or torch.no_grad() between the model and the loss, for adapters "
            "that are disabled, merged or scaled by 0, for pairs whose two sides are equal, and for a dropout of 1",
        )


@checks
def without_effect(setup: BeforeTraining) -> Iterator[Mistake]:
    """Find matrices outside the layers whose gradient is 0, because no later module uses their outputs."""
    inside = {id(p) for _, layers in setup.blocks for layer in layers for p in layer.parameters()}
    idle = [p for p in setup.trained if setup.trial is not None and id(p) in setup.trial.idle - inside]
    if idle and setup.trial is not None and any(setup.trial.gradients.values()):
        yield Mistake(
            what=f"the gradient is exactly 0 for {len(idle)} matrices ({setup.listed(idle)})",
            why="nothing that they compute has an effect on the loss",
            do="Look for a mask that selects nothing (an image token that the batch lacks), and for inputs that are "
            "all padding",
        )


@checks
def never_run(setup: BeforeTraining) -> Iterator[Mistake]:
    """Find trained matrices and adapters whose modules the forward pass calls in none of the layers."""
    if setup.trial is None or not setup.trial.reached:
        return
    ran, reached = setup.trial.ran, setup.trial.reached
    parts = {n: m for n, m in setup.model.named_modules() if isinstance(m, nn.Linear) and id(m.weight) in setup.groups}
    used = {re.sub(r"\d+", "", n) for n, m in parts.items() if id(m) in ran or id(m.weight) in reached}
    run = (m for _, layers in setup.blocks for layer in layers for m in layer.modules() if id(m) in ran)
    inside = {id(child) for module in run for child in module.children()}  # a decoder alone has no cross-attention
    unused = [
        m.weight for n, m in parts.items() if re.sub(r"\d+", "", n) not in used and (id(m) in inside or "lora" in n)
    ]
    if unused := [p for p in unused if p.requires_grad]:
        yield Mistake(
            what=f"forward never uses {len(unused)} of the trained matrices ({setup.listed(unused)})",
            why="it calls another module twice instead of theirs, or the loss reads a weight without its module",
            do="Call their modules, or remove them",
        )


@checks
def made_in_forward(setup: BeforeTraining) -> Iterator[Mistake]:
    """Find parameters that the loss depends on, and that neither the model nor an optimizer has."""
    foreign = [p for p in setup.trial.foreign if id(p) not in setup.groups] if setup.trial is not None else []
    if foreign and not setup.unregistered:
        yield Mistake(
            what=f"the loss depends on {len(foreign)} parameters that are not among model.parameters() (such as one of "
            f"shape {[*foreign[0].shape]})",
            why="a layer made inside forward is new at each call, and no optimizer trains it",
            do="Make layers in __init__, and run other models under torch.no_grad()",
        )


@checks
def no_gradient_to_tables(setup: BeforeTraining) -> Iterator[Mistake]:
    """Find embeddings that run but get no gradient, while other parameters do."""
    if setup.trial is None or not setup.trial.reached:
        return
    tables = [m for m in setup.model.modules() if isinstance(m, nn.Embedding) and m.weight.requires_grad]
    silent = [m for m in tables if id(m) in setup.trial.ran and id(m.weight) not in setup.trial.reached]
    inside = [{id(p) for p in layer.parameters() if p.requires_grad} for _, layers in setup.blocks for layer in layers]
    if silent and all(layer & setup.trial.reached for layer in inside if layer):
        yield Mistake(
            what=f"{len(silent)} embeddings get no gradient ({listing([setup.modules[id(m)] for m in silent])})",
            why="an operation after the embeddings detaches their outputs",
            do="Look for .detach(), .data or torch.no_grad() after them, or set their requires_grad to False",
        )


@checks
def unregistered(setup: BeforeTraining) -> Iterator[Mistake]:
    """Find trainable tensors in plain lists and attributes, which model.parameters() does not return."""
    seen = setup.trial.reached if setup.trial is not None else {id(tensor) for tensor in setup.unregistered.values()}
    names = [name for name, tensor in setup.unregistered.items() if id(tensor) in seen]
    if names:
        yield Mistake(
            what=f"{listing(names)} hold trainable tensors that are not among model.parameters()",
            why="an optimizer of model.parameters() does not train them, and checkpoints do not keep them",
            do="Use nn.ModuleList, nn.ModuleDict or nn.Parameter instead of a list, a dict or a tensor",
        )


@checks
def repeated_layer(setup: BeforeTraining) -> Iterator[Mistake]:
    """Find lists of layers that hold a single layer several times."""
    for path, layers in setup.blocks:
        if len({id(layer) for layer in layers}) == 1:
            yield Mistake(
                what=f"the {len(layers)} layers of {path} are one module",
                why="they share all weights, as after nn.ModuleList([layer] * n)",
                do="Create each layer in a comprehension, or run one layer in a loop if it should be shared",
            )


@checks
def shared_memory(setup: BeforeTraining) -> Iterator[Mistake]:
    """Find different parameters that share memory. Each optimizer step changes such memory several times."""
    places: dict[tuple[int, torch.Size], list[nn.Parameter]] = {}
    for p in setup.trained:
        if not isinstance(p, DTensor) and p.numel() and p.data_ptr():
            places.setdefault((p.data_ptr(), p.shape), []).append(p)
    for shared in (found for found in places.values() if len(found) > 1):
        yield Mistake(
            what=f"{setup.listed(shared)} are different parameters over the same memory",
            why="a copy of .data ties the values but not the parameters, so each step changes the memory twice",
            do="Assign the parameter itself (head.weight = embedding.weight) before you create the optimizer",
        )


@checks
def not_finite(setup: BeforeTraining) -> Iterator[Mistake]:
    """Find weights that are NaN or infinite."""
    broken = [p for p in setup.model.parameters() if p.is_floating_point() and not bool(whole(p).isfinite().all())]
    if broken:
        yield Mistake(
            what=f"{len(broken)} parameters are not finite ({setup.listed(broken)})",
            why="NaN or infinity reaches the loss and then all weights",
            do="Load an earlier checkpoint, and initialize what torch.empty created",
        )
    seen = setup.trial.gradients if setup.trial is not None and math.isfinite(setup.trial.loss) else {}
    if not broken and (nan := [p for p in setup.trained if not math.isfinite(seen.get(id(p), 0.0))]):
        yield Mistake(
            what=f"the loss is finite, but the gradients of {len(nan)} parameters are not ({setup.listed(nan)})",
            why="a step writes NaN to these weights. The gradient of sqrt and norm is not finite at 0, and torch.where "
            "does not help against log or division by 0",
            do="Add a small number inside the root, the logarithm or the divisor",
        )


@checks
def equal_units(setup: BeforeTraining) -> Iterator[Mistake]:
    """Find nonzero matrices whose rows are all equal or whose columns are all equal."""
    equal = []
    for module in setup.model.modules():
        weight = getattr(module, "weight", None)
        if type(module).__name__ in ("Linear", "Conv1D", "Embedding") and isinstance(weight, nn.Parameter):
            values = whole(weight)
            if values.ndim == 2 and min(values.shape) > 1 and weight.requires_grad and bool(values[0].any()):
                equal += [weight] if bool((values == values[0]).all()) else []
    if equal:
        yield Mistake(
            what=f"all rows are equal in {len(equal)} matrices ({setup.listed(equal)})",
            why="equal rows compute equal values and get similar gradients, so the layer acts like a single unit",
            do="Initialize these matrices at random",
        )


@checks
def high_dropout(setup: BeforeTraining) -> Iterator[Mistake]:
    """Find dropouts that drop almost all inputs, as if the share to keep had been passed as the share to drop."""
    found = {}
    for path, module in setup.model.named_modules():
        rates = {name: value for name, value in vars(module).items() if isinstance(value, float) and "drop" in name}
        if "dropout" in type(module).__name__.lower():
            rates["p"] = float(getattr(module, "p", 0.0))
        if (rate := max(rates.values(), default=0.0)) >= MUCH_DROPPED:
            found[path] = rate
    if found:
        yield Mistake(
            what=f"{len(found)} dropouts drop {max(found.values()):.0%} of their inputs ({listing(list(found))})",
            why="almost nothing passes; a dropout's rate is the share that it drops, not the share that it keeps",
            do="Use 0 to 0.3",
        )


@checks
def freezing_without_effect(setup: BeforeTraining) -> Iterator[Mistake]:
    """Find a requires_grad attribute set on a module, or misspelled on a parameter. torch ignores such attributes."""
    wrong = [
        f"{path or 'model'}.requires_grad = {vars(module)['requires_grad']}"
        for path, module in setup.model.named_modules()
        if "requires_grad" in vars(module)
        and any(p.requires_grad is not vars(module)["requires_grad"] for p in module.parameters())
    ]
    wrong += [
        f"{name}.{key} = {value}"
        for name, parameter in setup.model.named_parameters()
        for key, value in vars(parameter).items()
        if re.fullmatch(r"requires?_?grads?|requieres_grad|trainable", key) and value is not parameter.requires_grad
    ]
    if wrong:
        yield Mistake(
            what=f"{listing(wrong)} has no effect",
            why="torch reads requires_grad only from parameters, so the attribute freezes or unfreezes nothing",
            do="Call module.requires_grad_(False), or set requires_grad of each parameter",
        )


def _is_new(weight: torch.Tensor, deviation: float | None) -> bool:
    """Return whether a matrix looks newly initialized, with a usual standard deviation and rows of equal size."""
    values = whole(weight).float()
    if values.ndim != 2 or values.numel() < 2:
        return False
    near = max(0.02, 4 * (2 * values.numel()) ** -0.5)
    usual = [(3 * values.shape[1]) ** -0.5, *([deviation] if deviation else [])]
    sizes = values.square().mean(1).sqrt()
    even = len(sizes) < 8 or float(sizes.std()) < 1.5 * float(sizes.mean()) * (2 * values.shape[1]) ** -0.5
    return even and any(abs(float(values.square().mean().sqrt()) / size - 1) < near for size in usual)


def _spread_of_gains(layer: nn.Module) -> float:
    norms = [getattr(m, "weight", None) for m in layer.modules() if is_norm(m)]
    gains = [whole(weight).float() for weight in norms if isinstance(weight, nn.Parameter) and weight.ndim == 1]
    return max((float(gain.max() - gain.min()) for gain in gains), default=0.0)


@checks
def partly_loaded(setup: BeforeTraining) -> Iterator[Mistake]:
    """Find layers and output heads that look newly initialized, in a model whose other layers look trained."""
    model: Output = setup.model
    deviation = getattr(getattr(model, "config", None), "initializer_range", None)
    new: list[str] = []
    loaded = False
    for path, layers in setup.blocks:
        weights: list[list[Output]] = [
            [m.weight for m in layer.modules() if type(m).__name__ in ("Linear", "Conv1D")] for layer in layers
        ]
        fresh = [2 * sum(_is_new(weight, deviation) for weight in of) >= max(len(of), 1) for of in weights]
        spread = [_spread_of_gains(layer) for layer in layers]
        trained = [size > 0 and not unused for size, unused in zip(spread, fresh, strict=True)]
        loaded = loaded or (all(trained) and min(spread) > TRAINED)
        new += [f"{path}.{at}" for at, unused in enumerate(fresh) if any(trained) and unused and not spread[at]]
    if loaded and setup.ends is not None and not _TASKS.search(type(model).__name__):
        table, head = setup.ends  # an embedding's rare rows stay as they were initialized
        tied = head.weight is table.weight
        new += [setup.modules[id(head)]] if not tied and _is_new(head.weight, deviation) else []
    if new:
        yield Mistake(
            what=f"{listing(new)} look newly initialized, and other layers look trained",
            why="their weights were probably not in the checkpoint, or had other names",
            do="Compare the checkpoint's names with the model's (load_state_dict with strict=True)",
        )


@checks
def frozen_head(setup: BeforeTraining) -> Iterator[Mistake]:
    """Find a frozen, newly initialized head of a classification model whose other parts are trained."""
    if not setup.trained:
        return
    for model in (m for m in setup.model.modules() if _TASKS.search(type(m).__name__)):
        heads = [child for name, child in model.named_children() if name in _HEADS]
        layers = [m for head in heads for m in head.modules() if isinstance(m, nn.Linear)]
        parameters = [p for layer in layers for p in layer.parameters()]
        deviation = getattr(getattr(model, "config", None), "initializer_range", None)
        fresh = all(_is_new(m.weight, deviation) and (m.bias is None or not bool(m.bias.any())) for m in layers)
        if layers and fresh and not any(p.requires_grad for p in parameters):
            yield Mistake(
                what=f"the head is frozen, and looks newly initialized ({setup.listed(parameters)})",
                why="the model must answer through a random head",
                do='Unfreeze it. With LoRA, set task_type="SEQ_CLS" or modules_to_save',
            )


@checks
def norm_epsilon(setup: BeforeTraining) -> Iterator[Mistake]:
    """Find norms whose epsilon is as large as the variance of their input."""
    large = {}
    for path, module in setup.model.named_modules():
        values = [getattr(module, name, None) for name in ("eps", "variance_epsilon", "epsilon")]
        if is_norm(module) and (size := max((x for x in values if isinstance(x, float)), default=0)) >= LARGE_EPSILON:
            large[path] = size
    if large:
        yield Mistake(
            what=f"the eps is {max(large.values()):g} in {len(large)} of the norms ({listing(list(large))})",
            why="norms add eps to the variance, so small inputs are not normalized",
            do="Use 1e-5 or 1e-6",
        )
