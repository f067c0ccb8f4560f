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
from lamina.training.monitor.model_mistakes import WIDE, gain_of, is_off, scale_of

APART, DROWNED = 0.2, 0.05  # the lowest usual cosine, and the lowest usual variation of the first layer's input
MUCH_DROPPED = 0.8  # the dropout rate that is too high
MOSTLY, LARGE_EPS = 0.5, 0.05  # the largest usual momentum of a batch norm, and the eps of a norm that is too large
TRAINED = 0.05  # the range of a norm's gains that shows more than a few steps of training
_TASKS = re.compile(r"For(\w*Classification|QuestionAnswering|MultipleChoice)$")
_HEADS = ("classifier", "score", "qa_outputs", "classification_head")


@checks
def no_gradient(setup: BeforeTraining) -> Iterator[Mistake]:
    """Find training in which nothing learns: weights are frozen, gradients are off, or the loss uses no weight."""
    trial = setup.trial
    if setup.names and not setup.trained:
        yield Mistake(
            what="no parameter requires a gradient",
            why="nothing can learn",
            do="Unfreeze the parameters that you want to train. For an adapter, pass is_trainable=True to "
            "PeftModel.from_pretrained",
        )
    elif not setup.recording and not setup.running:
        yield Mistake(
            what="gradients are switched off",
            why="torch.no_grad() or torch.set_grad_enabled(False) is active, so backward() fails",
            do="Switch gradients on with torch.set_grad_enabled(True)",
        )
    elif trial is not None and not trial.zero.stuck and not setup.merged and not any(trial.gradients.values()):
        if trial.loss == 0 and trial.reached:
            yield Mistake(
                what="the first loss is 0, and so are all gradients",
                why="the batch has nothing to teach: its margins are already met (as in a triplet loss), or its labels "
                "are left out of the loss",
                do="Check another batch, and choose harder examples if its loss is 0, too",
                note=True,
            )
            return
        yield Mistake(
            what="all gradients are 0" if trial.reached else "no parameter gets a gradient",
            why="the loss depends on no trainable weight",
            do="Look for .detach(), .item(), argmax or torch.no_grad() between the model and the loss. Also look for "
            "adapters that are disabled, merged or scaled by 0, for pairs of equal inputs, and for a dropout rate of 1",
        )


@checks
def unregistered(setup: BeforeTraining) -> Iterator[Mistake]:
    """Find trainable tensors that model.parameters() lacks, such as tensors in lists or parameters of the loss."""
    foreign = [p for p in setup.trial.foreign if id(p) not in setup.groups] if setup.trial is not None else []
    seen = setup.trial.reached if setup.trial is not None else {id(tensor) for tensor in setup.unregistered.values()}
    names = [name for name, tensor in setup.unregistered.items() if id(tensor) in seen]
    if names:
        yield Mistake(
            what=f"{listing(names)} hold trainable tensors that are not among model.parameters()",
            why="an optimizer of model.parameters() does not train these tensors, and checkpoints do not store them",
            do="Use nn.ModuleList, nn.ModuleDict or nn.Parameter instead of a list, a dict or a tensor",
        )
    elif foreign and not setup.unregistered:
        yield Mistake(
            what=f"the loss depends on {len(foreign)} parameters that are not among model.parameters() (such as a "
            f"parameter of shape {[*foreign[0].shape]})",
            why="no optimizer trains these parameters, which belong to the loss, another model, or a layer that "
            "forward creates at each call",
            do="Add the loss's parameters to the optimizer, create layers in __init__, and run other models under "
            "torch.no_grad()",
        )


@checks
def repeated_layer(setup: BeforeTraining) -> Iterator[Mistake]:
    """Find lists of layers that contain the same layer, or the same module of a layer, several times."""
    held = nn.ParameterDict | nn.ParameterList  # such as VB-LoRA's shared vectors
    for path, layers in setup.blocks:
        parts = [
            {
                n: id(m)
                for n, m in layer.named_modules()
                if any(True for _ in m.parameters()) and not isinstance(m, held)
            }
            for layer in layers
        ]
        one = [name for name, of in parts[0].items() if all(each.get(name) == of for each in parts)]
        if one:
            yield Mistake(
                what=f"{path} contains the same layer {len(layers)} times"
                if not one[0]
                else f"the {len(layers)} layers of {path} share a single {one[0]}",
                why="the layers share all weights of this module, as after nn.ModuleList([layer] * n)",
                do="Create each layer in a comprehension, or run one layer in a loop if it should be shared",
            )


@checks
def skip_connections(setup: BeforeTraining) -> Iterator[Mistake]:
    """Find missing or doubled residual connections, and inputs that other terms (such as positions) drown out."""
    seen = setup.trial.skips if setup.trial is not None else {}
    for path, layers in setup.blocks:
        skips = [seen[id(layer)] for layer in layers if id(layer) in seen]
        without = all(max(abs(skip.cosine), abs(skip.next_input)) < APART for skip in skips)
        middle = sorted(skips, key=lambda skip: skip.factor)[len(skips) // 2 :][:1]
        twice = all(skip.cosine > 1 - APART and abs(skip.factor - 2) < APART for skip in middle)
        if without and any((scale_of(m) or 0.0) > WIDE for layer in layers for m in layer.modules()):
            without = False  # large outputs drown the inputs
        gains = [gain_of(m) for m in layers[0].modules() if is_norm(m)] if without or twice else []
        scaled = gains and not any(gain is not None and is_off(gain) for gain in gains)  # else a norm hides the input
        if len(skips) >= max(3, len(layers) - 1) and scaled:
            yield Mistake(
                what=f"the outputs of the layers of {path} contain their inputs {'twice' if twice else 'not at all'}",
                why=f"the residual stream {'doubles' if twice else 'and its gradient fade'} at each layer",
                do="Return x + f(norm(x)) once for attention and once for the feed-forward",
            )
    first = seen.get(id(setup.blocks[0][1][0])) if setup.blocks else None
    inside = {id(p) for _, layers in setup.blocks for layer in layers for p in layer.parameters()}
    tables = [m for m in setup.model.modules() if not isinstance(m, nn.Linear)]
    learned = {id(p) for m in tables for p in m.parameters(recurse=False) if p.ndim > 1 and p.requires_grad} - inside
    if first is not None and 1e-4 < first.by_row < DROWNED and len(learned) < 2:  # learned positions may shrink
        yield Mistake(
            what=f"only {first.by_row:.1%} of the first layer's input differs between the batch's rows",
            why="a term that is equal in all rows, such as positions, is much larger than the inputs",
            do="Scale the inputs up (embeddings by sqrt(width), images to a standard deviation of 1)",
        )


@checks
def shared_memory(setup: BeforeTraining) -> Iterator[Mistake]:
    """Find different parameters that use the same memory. Each optimizer step changes this memory several times."""
    places: dict[tuple[int, torch.Size], list[nn.Parameter]] = {}
    for p in setup.trained:
        if not isinstance(p, DTensor) and p.numel() and p.data_ptr():
            places.setdefault((p.data_ptr(), p.shape), []).append(p)
    for shared in (found for found in places.values() if len(found) > 1):
        yield Mistake(
            what=f"{setup.listed(shared)} are different parameters that share the same memory",
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
            do="Load an earlier checkpoint, and initialize tensors from torch.empty",
        )
    seen = setup.trial.gradients if setup.trial is not None and math.isfinite(setup.trial.loss) else {}
    if not broken and (nan := [p for p in setup.trained if not math.isfinite(seen.get(id(p), 0.0))]):
        yield Mistake(
            what=f"the loss is finite, but the gradients of {len(nan)} parameters are not ({setup.listed(nan)})",
            why="a step writes NaN to these weights. At 0, sqrt and norm have no finite gradient, and torch.where "
            "does not remove the NaN of log or of a division by 0",
            do="Add a small number inside the root, the logarithm or the divisor",
        )


@checks
def equal_units(setup: BeforeTraining) -> Iterator[Mistake]:
    """Find nonzero matrices in which all rows are equal."""
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
    """Find dropouts that drop almost all inputs. The user may have meant the rate as the fraction to keep."""
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
            why="almost nothing passes, because a dropout's rate is the fraction to drop, not the fraction to keep",
            do="Use 0 to 0.3",
        )


@checks
def freezing_without_effect(setup: BeforeTraining) -> Iterator[Mistake]:
    """Find modules with an attribute requires_grad, and parameters with a misspelled one. torch ignores both."""
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
            why="torch reads requires_grad only from parameters, so this attribute freezes or unfreezes nothing",
            do="Call module.requires_grad_(False), or set requires_grad of each parameter",
        )


@checks
def statistics_of_norms(setup: BeforeTraining) -> Iterator[Mistake]:
    """Find batch norms that keep only the last batch's statistics, and norms with a large eps."""
    named = [(path, m) for path, m in setup.model.named_modules() if is_norm(m) or hasattr(m, "running_mean")]
    moving = [path for path, m in named if hasattr(m, "running_mean") and (getattr(m, "momentum", 0) or 0) > MOSTLY]
    large = [path for path, m in named if isinstance(eps := getattr(m, "eps", None), float) and eps >= LARGE_EPS]
    for found, what, why, do in (
        (
            moving,
            f"the momentum is above {MOSTLY:g}",
            "torch's momentum is the weight of the newest batch's statistics, so evaluation uses only the last few "
            "batches. Keras's momentum is 1 minus torch's momentum",
            "Use 0.01 to 0.1",
        ),
        (
            large,
            f"eps is {LARGE_EPS:g} or more",
            "the norm divides by sqrt(variance + eps), so such an eps hides the variance of small inputs",
            "Use 1e-5, and check the order of eps and momentum",
        ),
    ):
        if found:
            yield Mistake(what=f"{what} in {len(found)} norms ({listing(found)})", why=why, do=do)


def _is_new(weight: torch.Tensor, deviation: float | None) -> bool:
    """Return whether a matrix looks newly initialized: a usual standard deviation, and rows of similar norm."""
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
    """Find layers and output heads that look newly initialized, in a model in which other layers look trained."""
    deviation = getattr(setup.config, "initializer_range", None)
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
    if loaded and setup.ends is not None and not _TASKS.search(type(setup.inner).__name__):
        table, head = setup.ends  # an embedding's rare rows stay as they were initialized
        tied = head.weight is table.weight
        new += [setup.modules[id(head)]] if not tied and _is_new(head.weight, deviation) else []
    if new:
        yield Mistake(
            what=f"{listing(new)} look newly initialized, and other layers look trained",
            why="the checkpoint probably lacked the weights of these layers, or used other names",
            do="Compare the checkpoint's names with the model's names (load_state_dict with strict=True)",
        )


@checks
def frozen_head(setup: BeforeTraining) -> Iterator[Mistake]:
    """Find a frozen head that looks newly initialized, in a classification model with trainable parameters."""
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
                why="the model's outputs come from random weights",
                do='Unfreeze the head. With LoRA, set task_type="SEQ_CLS" or modules_to_save',
            )
