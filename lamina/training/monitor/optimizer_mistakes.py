"""Find mistakes in a training's optimizers."""

from __future__ import annotations

import math
import re
import statistics
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import pairwise

import torch
from torch import nn

from lamina.probes.structure.hooks import Output
from lamina.probes.structure.sites import is_norm
from lamina.training.monitor.before_training import NARROW, BeforeTraining, Mistake, adapter_of, checks, listing
from lamina.training.monitor.first_pass import whole

HEAD_ONLY = 0.1  # an optimizer with less than this fraction of the trainable elements trains a head on purpose
DECAY = 0.05  # a weight decay that shrinks a gain within a run. torch's default is 0.01
ERASING = 5e-3  # learning rate times decay: the fraction of the weights that decay removes at each step
USUAL = 0.2  # up to this weight decay of AdamW, weights are erased because the learning rate is too high
STRONG = 5.0  # a weight decay that is too strong for AdamW at any learning rate. Lion's decays are larger
SWAPPED = 0.98  # from this value on, a first beta is probably the second beta
LOW = 0.5  # below this value, a second beta is probably 1 minus a beta
EPSILON, UNSEEN_EPSILON = 1e-4, 1e-2  # limits of Adam's epsilon, with and without known gradients
SWAPPED_RATE = 1e3  # epsilon and learning rate are probably swapped if epsilon is this many times larger
FADED = 1e-4  # a gradient below this fraction of the largest gradient's norm has almost vanished
LOST = 0.6  # the fraction of the matrices' elements from which rounded updates are reported
USUAL_RATE = 1e-6  # a usual learning rate of fine-tuning in bfloat16, at which small weights still change
RATES = ("lr", "initial_lr", "max_lr")  # keys of a group: its learning rate, and the learning rates of a schedule
_SAMPLE = 65536  # elements of a matrix
LARGE_SCALE = 64.0  # a scale alpha / r of LoRA that is too large. Usual scales are 1 to 4
_LOGARITHM = re.compile(r"(?:^|[._])(?:A_log|log_\w+|logit_scale|\w+_log)$")
_BASES = ("weight", "base.weight", "base_layer.weight", "linear.weight", "original.weight", "layer.weight")
LARGE_STEP = 2.0  # times a matrix's root mean square: a step of Adam that replaces the weights


@checks
def in_no_optimizer(setup: BeforeTraining) -> Iterator[Mistake]:
    """Find trainable parameters that are in no optimizer. An optimizer that trains only a head is no mistake."""
    missing = [p for p in setup.trained if id(p) not in setup.groups] if setup.optimizers else []
    foreign = sum(id(p) not in setup.names for _, group in setup.settings for p in group["params"])
    all_of, left_out = (sum(p.numel() for p in part) for part in (setup.trained, missing))
    if missing and (left_out == all_of or all_of - left_out >= HEAD_ONLY * all_of):
        yield Mistake(
            what=f"no optimizer has {len(missing)} of the trainable parameters ({setup.listed(missing)})",
            why="training never changes these parameters"
            + f"; {foreign} of the optimizer's parameters are not in the model" * bool(foreign),
            do="Create the optimizer from all parameters after your last change of the model, or freeze "
            "these parameters",
        )


@checks
def in_two_optimizers(setup: BeforeTraining) -> Iterator[Mistake]:
    """Find parameters that each step updates several times."""
    twice = [p for p in setup.trained if len(setup.groups.get(id(p), ())) > 1]
    if twice:
        most = max(len(setup.groups[id(p)]) for p in twice)
        yield Mistake(
            what=f"{len(twice)} parameters occur {most} times in the optimizers' groups ({setup.listed(twice)})",
            why=f"each step updates these parameters {most} times",
            do="Put each parameter into only one group of one optimizer",
        )


def _is_gain(module: nn.Module, name: str, parameter: nn.Parameter) -> bool:
    """Return whether a parameter is a bias, a gain or a vector of positive factors, or has _no_weight_decay."""
    values = whole(parameter)
    norm = is_norm(module) or "rms" in type(module).__name__.lower()
    vector = 1 < parameter.numel() == max(parameter.shape)  # weight_norm's are matrices of a column
    vector = vector and (parameter.ndim < 3 or float(values.std()) < 1e-3 * float(values.mean()))  # RWKV's are shares
    gain = parameter.ndim == 1 and norm and float(values.mean()) > 0.5
    return name == "bias" or gain or (vector and bool((values > 0).all())) or hasattr(parameter, "_no_weight_decay")


@checks
def decayed_gains(setup: BeforeTraining) -> Iterator[Mistake]:
    """Find biases and gains with weight decay. A gain that is stored as a difference from 1 may have weight decay."""
    gains: list[nn.Parameter] = []
    decay = 0.0
    spared = any(g.get("weight_decay") == 0 and all(p.ndim < 2 for p in g["params"]) for _, g in setup.settings)
    least = 1e-9 if spared else DECAY  # a group was meant for them
    for module in setup.model.modules():
        for name, parameter in module.named_parameters(recurse=False):
            values = [float(group.get("weight_decay") or 0.0) for group in setup.groups.get(id(parameter), ())]
            if parameter.requires_grad and max(values, default=0.0) >= least and _is_gain(module, name, parameter):
                gains.append(parameter)
                decay = max(decay, *values)
    if gains:
        yield Mistake(
            what=f"the weight decay is {decay:g} for {len(gains)} of the gains and biases ({setup.listed(gains)})",
            why="weight decay pulls each gain, and with it the layer's contribution, toward 0",
            do="Put gains and biases into a group with weight_decay=0.0",
        )


@checks
def decayed_logarithms(setup: BeforeTraining) -> Iterator[Mistake]:
    """Find weight decay on parameters that hold logarithms, such as Mamba's A_log and CLIP's logit_scale."""
    decays = {
        id(p): max(float(g.get("weight_decay") or 0.0) for g in groups)
        for p in setup.trained
        if (groups := setup.groups.get(id(p)))
    }
    found = [
        p
        for name, p in setup.model.named_parameters()
        if decays.get(id(p), 0.0) >= DECAY and _LOGARITHM.search(name) and not hasattr(p, "_no_weight_decay")
    ]
    if found:
        yield Mistake(
            what=f"the weight decay is {max(decays[id(p)] for p in found):g} for {len(found)} parameters that hold "
            f"logarithms ({setup.listed(found)})",
            why="weight decay pulls each logarithm toward 0, and so the rate or scale that it stands for toward 1",
            do="Put these parameters into a group with weight_decay=0.0",
        )


@checks
def float16_gradients(setup: BeforeTraining) -> Iterator[Mistake]:
    """Find float16 training without a loss scaler, and trainable weights in float16."""
    weights, off = [p for p in setup.trained if p.dtype == torch.float16], setup.scaler_is_off
    if weights:
        yield Mistake(
            what=f"{len(weights)} of the trainable parameters are float16 ({setup.listed(weights)})",
            why="small gradients and updates round to 0, and a GradScaler rejects float16 gradients",
            do="Keep weights in float32 and compute under autocast, or load the model in bfloat16",
        )
    elif setup.half and setup.scaler is False:
        yield Mistake(
            what="autocast computes in float16"
            + (", but the GradScaler is disabled" if off else " without a GradScaler"),
            why="gradients below 6e-8 become 0",
            do=f"Scale the loss (torch.amp.GradScaler{' with enabled=True' * off}), or use bfloat16",
        )


def _rate_of(groups: Iterable[Mapping[str, Output]], names: Sequence[str] = RATES) -> float:
    """Return the highest learning rate of groups and their schedules, or infinity if a group has no learning rate."""
    rates = [group.get(name, 0.0) for group in groups for name in names]
    return max((math.inf if rate is None else float(rate) for rate in rates), default=0.0)


@checks
def idle_groups(setup: BeforeTraining) -> Iterator[Mistake]:
    """Find parameters with a learning rate that is 0 or has fallen to 0. A schedule may start at 0."""
    begun = any(float(state.get("step", 0)) > 0 for o in setup.optimizers for state in o.state.values())
    names = ("lr",) if begun else RATES
    rates = {id(p): _rate_of(setup.groups[id(p)], names) for p in setup.trained if id(p) in setup.groups}
    idle = [p for p in setup.trained if rates.get(id(p)) == 0]
    if idle and (any(rates.values()) or not setup.running):
        yield Mistake(
            what=f"the learning rate is 0 for {len(idle)} of the trainable parameters ({setup.listed(idle)})",
            why="training never changes these parameters" + "; a schedule has ended" * begun,
            do="Give these parameters a learning rate at all steps, or set requires_grad of these parameters to False",
        )


@checks
def rate_of_adam(setup: BeforeTraining) -> Iterator[Mistake]:
    """Find a learning rate of Adam or SGD at which a single step changes most matrices by more than their size."""
    steps = {
        id(p): _rate_of([group])
        for optimizer in setup.optimizers
        if isinstance(optimizer, torch.optim.Adam | torch.optim.AdamW | torch.optim.NAdam | torch.optim.RAdam)
        for group in optimizer.param_groups
        for p in group["params"]
    }
    seen = setup.trial.gradients if setup.trial is not None else {}
    plain = [group for optimizer, group in setup.settings if isinstance(optimizer, torch.optim.SGD)]
    steps |= {id(p): _rate_of([group]) * seen.get(id(p), 0.0) for group in plain for p in group["params"]}
    inside = [p for _, layers in setup.blocks for layer in layers for p in layer.parameters()]
    matrices = [p for p in inside if p.ndim > 1 and p.requires_grad and id(p) in steps]
    sizes = [(steps[id(p)], float(whole(p).float().square().mean().sqrt()), p.shape[-1]) for p in matrices]
    over = [(rate, size) for rate, size, inputs in sizes if rate > LARGE_STEP * max(size, NARROW * inputs**-0.5)]
    if len(over) > len(sizes) / 2:
        step, size = statistics.median_low(over)
        rate = _rate_of(group for p in matrices for group in setup.groups[id(p)])
        yield Mistake(
            what=f"the learning rate is {rate:g}, but the layers' weights are only about {size:.2g}",
            why=f"the first step changes each weight by about {step:.2g}, which is more than a typical weight",
            do="Lower the learning rate, to 1e-2 or less" + (", and use a mean loss" if plain else ""),
        )


@checks
def coefficients(setup: BeforeTraining) -> Iterator[Mistake]:
    """Find an optimizer's two betas in the wrong order. Optimizers with three betas (Adan) use another order."""
    pairs = (group["betas"] for _, group in setup.settings if len(group.get("betas") or ()) == 2)
    if betas := next((pair for pair in pairs if pair[0] > pair[1] and (pair[0] >= SWAPPED or pair[1] < LOW)), None):
        lag = f"each step follows gradients that are about {1 / max(1 - float(betas[0]), 1e-9):.0f} steps old"
        yield Mistake(
            what=f"the optimizer's betas are ({betas[0]:g}, {betas[1]:g})",
            why="beta1 averages gradients, and beta2 averages squared gradients, so "
            + (
                lag
                if betas[1] >= LOW
                else "each step follows the last gradients. Beta is the fraction of the average that each step keeps"
            ),
            do="Pass betas=(0.9, 0.95) or (0.9, 0.999)",
        )


def _is_adam(group: Mapping[str, Output]) -> bool:
    return len(group.get("betas") or ()) == 2 and group.get("eps") is not None


@checks
def large_epsilon(setup: BeforeTraining) -> Iterator[Mistake]:
    """Find an epsilon of Adam that is far above the gradients or the learning rate."""
    groups = [group for _, group in setup.settings if _is_adam(group)]
    epsilon = max((float(group["eps"]) for group in groups), default=0.0)
    seen = setup.trial.gradients if setup.trial is not None else {}
    matrices = [p for group in groups for p in group["params"] if p.ndim > 1]
    sizes = [size for p in matrices if (size := seen.get(id(p), 0.0)) > 0]
    large = epsilon >= UNSEEN_EPSILON if not sizes else epsilon >= EPSILON and epsilon > 3 * statistics.median(sizes)
    rate = _rate_of(groups)
    swapped = epsilon >= EPSILON and 0 < rate <= epsilon / SWAPPED_RATE
    if large or swapped:
        yield Mistake(
            what=f"the optimizer's eps is {epsilon:g}"
            + (f", and its learning rate {rate:g}" if swapped else "")
            + (f", and the gradients' elements are about {statistics.median(sizes):.1g}" if sizes else ""),
            why="Adam divides by the gradient's size plus eps, so an eps above the gradient's size makes steps tiny",
            do="Pass eps=1e-8" + (", and check whether eps and learning rate are swapped" if swapped else ""),
        )


@checks
def strong_decay(setup: BeforeTraining) -> Iterator[Mistake]:
    """Find mistakes in weight decay: a decay that erases the weights, and Adam that adds the decay to gradients."""
    for optimizer, group in setup.settings:
        decay, rate = float(group.get("weight_decay") or 0.0), _rate_of([group])
        if not any(p.requires_grad and p.ndim > 1 for p in group["params"]) or not math.isfinite(rate):
            continue
        if group.get("decoupled_weight_decay") is False and decay >= DECAY:
            yield Mistake(
                what=f"Adam adds the weight decay of {decay:g} to the gradients",
                why="Adam normalizes the sum, so the decay decides the update of weights with small gradients",
                do="Use AdamW, which does not add the decay to the gradients",
            )
            return
        added = isinstance(optimizer, torch.optim.SGD)  # to the gradients, which its momentum multiplies
        share = rate * decay / (max(1 - float(group["momentum"]), 0.01) if added else 1.0)
        erased = share >= ERASING and (decay > USUAL or not _is_adam(group))
        if "d" not in group and (erased or (_is_adam(group) and decay >= STRONG)):  # "d" finds its own rate
            yield Mistake(
                what=f"the weight decay is {decay:g} at a learning rate of {rate:g}",
                why=f"weight decay removes {share:.1g} of each weight at every step",
                do="Use a weight decay of 0.01 to 0.1",
            )
            return


def _faded(setup: BeforeTraining) -> float:
    """Return the gradient of the first matrix and most others, divided by the largest. With norms, return 1.

    Gradients of 0 do not count, because matrices of zeros cause them.
    """
    seen = setup.trial.gradients if setup.trial is not None else {}
    norms = {id(p): size * p.numel() ** 0.5 for p in setup.trained if (size := seen.get(id(p), 0.0)) > 0}
    matrices = [norms[id(p)] for p in setup.trained if p.ndim > 1 and id(p) in norms]
    if not matrices or any(is_norm(m) or hasattr(m, "running_mean") for m in setup.model.modules()):
        return 1.0
    return max(matrices[0], statistics.median(matrices)) / max(norms.values())


@checks
def faded_gradients(setup: BeforeTraining) -> Iterator[Mistake]:
    """Find a deep model in which almost no gradient reaches the matrices, because its layers weaken the signal."""
    if (share := _faded(setup)) < FADED:
        yield Mistake(
            what=f"the gradients of most matrices are only {share:.1g} of the largest gradient, or less",
            why="each layer makes its input smaller, so the outputs hardly depend on the inputs: SGD does not learn, "
            "and Adam begins to learn late",
            do="Initialize each layer with a standard deviation of sqrt(2/inputs) (nn.init.kaiming_normal_), or add "
            "norms and residual connections",
        )


@checks
def rounded_updates(setup: BeforeTraining) -> Iterator[Mistake]:
    """Find learning rates at which most updates round to 0 in the weights' dtype."""
    lost = total = 0
    rates, types = [], set[torch.dtype]()
    for optimizer, group in setup.settings:
        rate = _rate_of([group])
        for p in group["params"]:
            if isinstance(optimizer, torch.optim.Adam | torch.optim.NAdam | torch.optim.RAdam):
                step = rate
            else:  # only a step without a state is known
                size = setup.trial.gradients.get(id(p), 0.0) if setup.trial is not None else 0.0
                plain = isinstance(optimizer, torch.optim.SGD)
                step = rate * size / max(1 - float(group["momentum"]), 0.01) if plain else 0.0
            if p.requires_grad and p.ndim > 1 and 0 < step < math.inf:
                weights = whole(p).flatten()
                weights = weights[:: max(1, weights.numel() // _SAMPLE)]
                moved = [(weights.double() + sign * step).to(p.dtype) != weights for sign in (1, -1)]
                stays = 1 - float((moved[0] | moved[1]).float().mean())
                lost, total = lost + stays * p.numel(), total + p.numel()
                rates.append(rate)
                types.add(p.dtype)
    if total and lost >= LOST * total and _faded(setup) >= FADED:
        kept = "Raise the learning rate"
        if types != {torch.float32}:
            kept = (
                "Keep the weights in float32 and compute under autocast, or use an optimizer with stochastic rounding"
            )
        yield Mistake(
            what=f"{lost / total:.0%} of the weights do not change at a learning rate of {max(rates):g}",
            why=f"{' and '.join(sorted(str(each).removeprefix('torch.') for each in types))} rounds small updates to 0",
            do=kept,
            note=types == {torch.bfloat16} and max(rates) >= USUAL_RATE,
        )


@checks
def rates_by_depth(setup: BeforeTraining) -> Iterator[Mistake]:
    """Find layer-wise learning rate decay in the wrong direction: later layers have lower learning rates."""
    for path, layers in setup.blocks:
        rates = [_rate_of(g for p in layer.parameters() for g in setup.groups.get(id(p), ())) for layer in layers]
        falls = all(first > second for first, second in pairwise(rates))
        if len(rates) > 2 and falls and math.isfinite(rates[0]) and rates[0] >= 2 * rates[-1] > 0:
            yield Mistake(
                what=f"the learning rates of {path} fall from {rates[0]:g} (layer 0) to {rates[-1]:g} "
                f"(layer {len(rates) - 1})",
                why="layer-wise decay should slow the layers near the input, but here the decay slows the last layers",
                do="Reverse the order of the learning rates",
            )


def _is_low_rank(module: nn.Module) -> bool:
    """Return whether an adapter is a product of two matrices instead of a sum of fixed matrices (RandLoRA)."""
    ends = getattr(module, "in_features", None), getattr(module, "out_features", None)
    shapes = [p.shape for p in adapter_of(module).values() if p.ndim == 2]
    return ends == (None, None) or any(
        (one[1], other[0]) == ends and one[0] == other[1] for one in shapes for other in shapes
    )


@checks
def adapters(setup: BeforeTraining) -> Iterator[Mistake]:
    """Find adapters that are merged, frozen or scaled too much, and base matrices that the optimizer trains."""
    scales, base, frozen = dict[str, float](), list[nn.Parameter](), list[nn.Parameter]()
    for path, module in setup.model.named_modules():
        scaling = vars(module).get("scaling")
        values = scaling.values() if isinstance(scaling, dict) else [scaling]
        scale = max((float(x) for x in values if isinstance(x, int | float)), default=0.0)
        if scale > LARGE_SCALE and _is_low_rank(module):
            scales[path] = scale
        own = [name for name, _ in [*module.named_parameters(recurse=False), *module.named_children()]]
        named_so = any("lora" in name.lower() for name in (type(module).__name__, *own))
        if named_so or hasattr(module, "adapter_layer_names"):
            named, adapter = dict(module.named_parameters()), adapter_of(module).values()
            frozen += adapter if not any(p.requires_grad for p in adapter) else []
            base += [p for name in _BASES if (p := named.get(name)) is not None and id(p) in setup.groups]
    if setup.merged:
        yield Mistake(
            what=f"an adapter is merged into the base matrices ({listing([*setup.merged.values()])})",
            why="forward uses only the merged matrices, so the adapter gets no gradient",
            do="Call model.unmerge_adapter() before training",
        )
    if scales:
        yield Mistake(
            what=f"LoRA is scaled by {max(scales.values()):g} ({listing(list(scales))})",
            why="this scale multiplies every change that the adapter makes to the model",
            do="Choose lora_alpha between r and 2 r, or divide the learning rate by this scale",
        )
    if frozen and setup.trained:
        yield Mistake(
            what=f"{len(frozen)} of the adapters' parameters are frozen ({setup.listed(frozen)})",
            why="requires_grad of these parameters is False, so the adapter does not learn",
            do="Freeze the base model before you add the adapter, or set requires_grad of the adapter's parameters to "
            "True",
        )
    if any(p.requires_grad for p in base):
        yield Mistake(
            what=f"the optimizer trains {len(base)} of the adapters' base matrices ({setup.listed(base)})",
            why="only the adapter should learn, and a frozen matrix needs no optimizer state",
            do="Set requires_grad of the model's own weights to False",
        )
