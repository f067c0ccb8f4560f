"""Find mistakes in a model's weights, norms and gradients."""

from __future__ import annotations

import math
import re
import statistics
from collections.abc import Iterator

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from lamina.probes.structure.hooks import Output
from lamina.probes.structure.sites import effective_gain, is_norm
from lamina.training.monitor.before_training import NARROW, BeforeTraining, Mistake, checks, listing
from lamina.training.monitor.first_pass import FirstPass, whole
from lamina.training.monitor.silent_parameters import named_alike

NEAR_ZERO, TWICE = 0.05, (1.9, 2.1)  # mean gains that switch a norm off, or count the 1 of a "1 + weight" twice
_LINEAR = ("Linear", "Conv1D", "NonDynamicallyQuantizableLinear")
_NUMBER = r"(?<![^.])\d+(?![^.])"  # a layer's or an expert's number in a path
LIBRARIES = ("torch.", "transformers.")
WIDE, SOLE = 4.0, 8.0  # limits of a standard deviation: over 1/sqrt(inputs), and over the same matrix in other layers


@checks
def no_gradient_to_blocks(setup: BeforeTraining) -> Iterator[Mistake]:
    """Find layers that run but get no gradient because of a detach or because of reentrant checkpointing."""
    reentrant = _is_reentrant(setup.model)
    for path, layers in setup.blocks:
        trained = [[p for p in layer.parameters() if p.requires_grad and id(p) not in setup.merged] for layer in layers]
        if not any(trained):
            continue
        dead = [str(at) for at, parameters in enumerate(trained) if parameters]
        if setup.trial is not None:
            ran = [at for at, layer in enumerate(layers) if id(layer) in setup.trial.ran]
            dead = [str(at) for at in ran if trained[at] and not {id(p) for p in trained[at]} & setup.trial.reached]
        elif not (reentrant and _inputs_are_frozen(setup.model)):
            continue
        if dead and (setup.trial is None or setup.trial.reached):
            inner = [m for at in dead for m in layers[int(at)].modules() if next(m.children(), None) is None]
            calls = [setup.trial.ran.get(id(m), ()) for m in inner] if setup.trial is not None else []
            unrecorded = any(calls) and not any(map(any, calls))
            why, do = (
                "an operation after these layers detaches the residual stream, or nothing reads their outputs",
                "Look for .detach(), .data, argmax or torch.no_grad() after these layers, and for a loop that "
                "gives each layer the same input",
            )
            if reentrant:
                why = "reentrant checkpointing needs an input that requires a gradient, but these inputs are frozen"
                do = "Call model.enable_input_require_grads(), or checkpoint with use_reentrant=False"
            elif unrecorded:
                why = "these layers run under torch.no_grad(), or in reentrant checkpoints with frozen inputs"
                do = "Checkpoint with use_reentrant=False, and run the layers outside of torch.no_grad()"
            yield Mistake(
                what=f"layers {', '.join(dead[:8])}{' ...' * (len(dead) > 8)} of {path} get no gradient",
                why=why,
                do=do,
            )


@checks
def no_gradient_to_parts(setup: BeforeTraining) -> Iterator[Mistake]:
    """Find parameters that get no gradient or a gradient of 0, although other parameters learn."""
    trial = setup.trial
    if trial is None or not any(trial.gradients.values()):
        return
    unused = [*_unused(setup, trial)]
    wanted = (*_silent(setup, trial), *(p for p, sure in unused if sure))
    every = {id(p): p for p in wanted if id(p) not in setup.merged}
    silent = [p for p in every.values() if p.requires_grad]
    cut, idle, none = trial.zero.cut, trial.zero.idle, "the loss does not use {} of the parameters ({})"
    optional = [p for p, sure in unused if not sure and id(p) not in every.keys() | setup.merged.keys()]
    for found, what, why, do in (
        (
            [p for p in silent if id(p) in cut],
            "no gradient reaches {} of the parameters ({}), although the loss depends on these parameters",
            "an operation after these parameters detaches their output",
            "Look for .detach(), .data, torch.no_grad(), argmax or .item() after these parameters",
        ),
        (
            [p for p in silent if id(p) in idle],
            "the gradient is 0 for {} of the parameters ({})",
            "the model multiplies the output of these parameters by 0, or the output changes nothing",
            "Check that no scale is 0 (alpha // r is 0 if r is larger). Check that no mask is empty, such as the mask "
            "of image tokens. Check that router probabilities below 1 multiply the experts' outputs",
        ),
        (
            [p for p in silent if id(p) not in cut | idle],
            none,
            "forward calls other modules, or drops the output of these parameters",
            "Call these modules and use what they return. Choose an adapter with model.set_adapter(name)",
        ),
        (optional, none, "forward does not call these modules for this batch", "Call these modules, or remove them"),
    ):
        if found:
            what = what.format(len(found), setup.listed(found))
            yield Mistake(what=what, why=why, do=do, note=found is optional)


def _silent(setup: BeforeTraining, trial: FirstPass) -> Iterator[torch.Tensor]:
    """Yield the parameters that should get a gradient, but get none. A parameter may appear twice."""
    living, spared = trial.reached - trial.zero.idle, set[int]()
    moving = {key for key in living if trial.gradients[key] > 0}
    peers: dict[str, list[nn.Parameter]] = {}
    for path, layers in setup.blocks:
        for layer in layers:
            alive = any(id(p) in living for p in layer.parameters())
            for name, module, parameter in named_alike(layer) if alive else ():
                own = {*map(id, module.parameters(recurse=False))}  # of them, XLNet's forward may not need all
                spared |= own if own & moving else set()
                if parameter.requires_grad and id(module) in trial.ran:
                    peers.setdefault(path + name, []).append(parameter)
    alive = [sum(id(p) in living for p in of) for of in peers.values()]
    of_layers = [of for of, count in zip(peers.values(), alive, strict=True) if not 0 < count <= len(of) / 2]
    yield from (p for of in of_layers for p in of if id(p) not in living | spared)
    every = [layer for _, layers in setup.blocks for layer in layers]
    inside = set(map(id, (p for layer in every for p in layer.parameters())))
    for layer in every:
        alike: dict[str, list[nn.Parameter]] = {}  # an expert may get no tokens
        for name, p in layer.named_parameters():
            alike.setdefault(re.sub(r"\d+", "", name), []).append(p)
        still = (of for of in alike.values() if not any(id(p) in living for p in of))
        yield from (p for of in still for p in of if id(p) in trial.zero.idle and trial.gradients[id(p)] == 0)
    ran = [{id(p) for p in layer.parameters() if p.requires_grad} for layer in every if id(layer) in trial.ran]
    dead = [layer for layer in ran if layer and not layer & trial.reached]  # what lies before them is silent, too
    cut = trial.zero.cut.difference(spared, *dead) & (inside if dead else trial.zero.cut)
    yield from (p for p in setup.trained if id(p) in cut | (trial.zero.idle - inside))


def _unused(setup: BeforeTraining, trial: FirstPass) -> Iterator[tuple[torch.Tensor, bool]]:
    """Yield each parameter of the modules that are never called, and whether this is certainly a mistake."""
    every, met = dict(setup.model.named_modules()), trial.ran.keys() | trial.reached
    run = {
        name: [p.shape for p in m.parameters()]
        for name, m in every.items()
        if not met.isdisjoint(map(id, (*m.modules(), *m.parameters())))
    }
    used = {re.sub(_NUMBER, "", name) for name in run}
    layers = {id(m) for _, layers in setup.blocks for layer in layers for m in layer.modules()}
    for name, module in every.items():
        path, _, child = name.rpartition(".")
        holder, weights = every[path], [*module.parameters()]
        own = [p for p in weights if p.requires_grad and (id(p) in setup.groups or not setup.optimizers)]
        if not own or id(holder) not in trial.ran or re.sub(_NUMBER, "", name) in used:
            continue
        adapts = child in getattr(holder, "adapter_layer_names", ())
        if type(holder).__module__.startswith((*LIBRARIES, "peft.")) and not adapts:  # they may need no cross-attention
            yield from ((p, True) for p in own if id(holder) in layers and isinstance(module, nn.Linear))
        else:
            alike = any(run[x] == [p.shape for p in weights] for x in run if x.rpartition(".")[0] == path)
            sure = alike or id(holder) in layers or is_norm(module) or adapts
            yield from ((p, sure) for p in own)
    table = setup.ends[0] if setup.ends is not None and "input_ids" in setup.batch else None
    if table is not None and id(table) not in trial.ran and id(table.weight) not in trial.reached:
        yield table.weight, True


@checks
def untied(setup: BeforeTraining) -> Iterator[Mistake]:
    """Find an untied embedding and output head: two tensors that should be one tensor."""
    config = setup.config
    if setup.ends is not None and callable(getattr(config, "get_text_config", None)):
        table, head = (module.weight for module in setup.ends)
        tied = bool(getattr(config.get_text_config(), "tie_word_embeddings", False))
        wanted = tied and bool(getattr(setup.model, "_tied_weights_keys", None))
        same = table is head or table.data_ptr() == head.data_ptr()
        if wanted and not same and table.shape[1:] == head.shape[1:]:
            yield _untied("config.tie_word_embeddings is true, but embedding and output head are two tensors")
            return
    tables, heads = (
        [m.weight for m in setup.model.modules() if isinstance(m, of) and not isinstance(m.weight, DTensor)]
        for of in (nn.Embedding, nn.Linear)
    )
    pairs = ((x, y) for x in tables for y in heads if x.shape == y.shape and x.data_ptr() != y.data_ptr())
    if pair := next(((x, y) for x, y in pairs if bool(x.any()) and torch.equal(x, y)), None):
        yield _untied(f"{' and '.join(setup.listed([x]) for x in pair)} have equal values but are two tensors")


def _untied(what: str) -> Mistake:
    return Mistake(
        what=what,
        why="training makes the two tensors differ more and more",
        do="Tie the tensors before you create the optimizer (model.tie_weights(), or head.weight = embedding.weight)",
    )


@checks
def norm_gains(setup: BeforeTraining) -> Iterator[Mistake]:
    """Find norms with an initial gain of 0, 2 or 1/sqrt(channels). A norm at the end of a branch may start at 0."""
    sites = list(setup.structure.norms()) if setup.structure is not None else []
    roles = {id(site.module): site.role for _, _, site in sites}
    gains = {m: gain for m in setup.model.modules() if (gain := gain_of(m)) is not None and gain.numel() > 1}
    off = [m for m, gain in gains.items() if is_off(gain) and roles.get(id(m)) != "out_norm"]
    zero = [m for m in off if not bool(gains[m].any()) and any(bool(p.any()) for p in m.parameters())]
    if not 1 < len(gains) == sum(map(is_off, gains.values())):  # else a class may start at 0 for the ends of branches
        known = {m for m in off if id(m) in roles and (roles[id(m)] == "pre_norm" or not _is_as_made(m))}
        off = [m for m in off if m in known or m in zero]
    flat = {m: float(gain.mean()) for m, gain in gains.items() if float(gain.std()) < 1e-3}
    known = {m for m in flat if type(m).__module__.startswith(LIBRARIES) and _is_as_made(m)}
    double = [m for m, mean in flat.items() if TWICE[0] < mean < TWICE[1] and m not in known]
    roots = [m for m, mean in flat.items() if (d := gains[m].numel()) >= 16 and abs(mean * d**0.5 - 1) < 0.01]
    for found, size, why, do in (
        (off, 0, "the next layer sees only zeros", "Start gains at 1, or at 0 if the norm computes 1 + weight"),
        (double, 2, "the norms compute 1 + weight, and the weights start at 1", "Start these weights at 0"),
        (
            roots,
            "1/sqrt(channels)",
            "such a norm divides by the length of the input vector instead of the root mean square",
            "Use x.pow(2).mean(-1), not the sum",
        ),
    ):
        if found:
            names = listing([setup.modules[id(m)] for m in found])
            what = f"the gain is about {size} in {len(found)} of the norms ({names})"
            yield Mistake(what=what, why=why, do=do)


@checks
def weight_scales(setup: BeforeTraining) -> Iterator[Mistake]:
    """Find matrices with a standard deviation that does not fit the width, or differs much from other layers."""
    scales: dict[str, dict[str, float]] = {}
    own: dict[str, float] = {}  # matrices whose inputs may be either dimension
    for path, layers in setup.blocks:
        for at, layer in enumerate(layers):
            experts = {p.shape[0] for p in layer.parameters() if p.ndim == 3}
            experts |= {len(m) for m in layer.modules() if isinstance(m, nn.ModuleList | nn.ModuleDict)}
            for name, module in layer.named_modules():
                if not {p.shape[0] for p in module.parameters(recurse=False) if p.ndim == 2}.isdisjoint(experts):
                    continue  # a router: its outputs are choices, and no part of the residual stream
                if type(module).__name__ in _LINEAR:
                    if (scale := scale_of(module)) is not None:
                        scales.setdefault(f"{path}.N.{name}", {})[f"{path}.{at}.{name}"] = scale
                elif not isinstance(module, nn.Embedding):
                    for of, p in module.named_parameters(recurse=False):
                        values = whole(p).float()
                        if p.ndim in (2, 3) and float(values.std()) > 3 * abs(float(values.mean())):
                            own[f"{path}.{at}.{name}.{of}"] = float(values.std()) * math.prod(p.shape[-2:]) ** 0.25
    flat = {name: scale for of in scales.values() for name, scale in of.items() if scale > 0}
    usual = statistics.median(flat.values()) if flat else NARROW
    wide = [name for name, scale in (flat | own).items() if scale > WIDE]
    odd = []
    for of in scales.values():
        middle = statistics.median(of.values())
        apart = [n for n, s in of.items() if s > 0 and middle > 0 and not 1 / SOLE < s / middle < SOLE]
        odd += apart if len(of) > 3 and len(apart) <= len(of) / 4 else []
    for paths, what, why in (
        (
            wide,
            f"a standard deviation of more than {WIDE:g}/sqrt(inputs)",
            "the residual stream's variance explodes with depth",
        ),
        (
            [*flat] if usual < NARROW else [],
            f"a standard deviation of less than {NARROW:g}/sqrt(inputs)",
            "the layers add almost nothing, and their gradients vanish",
        ),
        (
            [n for n in odd if n not in wide],
            f"more than {SOLE:g} times (or less than 1/{SOLE:g} of) the other layers' standard deviation",
            "one layer will dominate the others, or have no effect",
        ),
    ):
        if paths:
            yield Mistake(
                what=f"{len(paths)} matrices have {what} ({listing(paths)})",
                why=why,
                do=(
                    "Initialize these matrices with a standard deviation of 0.02 or 1/sqrt(inputs), and divide output "
                    "projections by sqrt(2 layers)"
                ),
            )


def scale_of(module: nn.Module) -> float | None:
    """Return a linear layer's standard deviation times sqrt(inputs), or None for another module."""
    weight = getattr(module, "weight", None) if type(module).__name__ in _LINEAR else None
    if not isinstance(weight, torch.Tensor) or weight.ndim != 2 or not weight.is_floating_point():
        return None
    inputs = weight.shape[0] if type(module).__name__ == "Conv1D" else weight.shape[1]
    return float(whole(weight).float().std()) * math.sqrt(inputs)


@checks
def stuck_at_zero(setup: BeforeTraining) -> Iterator[Mistake]:
    """Find all-zero parameters that cannot change, because other all-zero parameters multiply them."""
    stuck = [p for p in setup.trained if setup.trial is not None and id(p) in setup.trial.zero.stuck]
    if stuck:
        yield Mistake(
            what=f"{len(stuck)} parameters are all 0 and get a gradient of 0 ({setup.listed(stuck)})",
            why="another matrix, gate or gain of zeros multiplies these parameters, so the gradients of both are 0",
            do="Initialize one of the two matrices at random, or start the gate or gain at 1",
        )


def is_off(gain: torch.Tensor) -> bool:
    """Return whether gains are near 0, or lie around 0 with both signs."""
    size = float(gain.square().mean().sqrt())
    return float(gain.abs().max()) < NEAR_ZERO or (size < NEAR_ZERO and abs(float(gain.mean())) < size / 2)


def gain_of(module: nn.Module) -> torch.Tensor | None:
    """Measure a norm's gain. Return None if the output grows with the input, because the module is then no norm."""
    vectors = [p for p in module.parameters(recurse=False) if p.ndim == 1]
    if not vectors or next(module.children(), None) is not None or hasattr(module, "running_mean"):
        return None  # a pass would change a batch norm's statistics
    try:
        if is_norm(module):
            return effective_gain(module)
        sign = torch.ones_like(max(vectors, key=torch.numel).detach())
        sign[::2] = -1
        with torch.no_grad():
            outputs = [module(sign[None, None] * size).flatten().float() for size in (8, 16, -8)]
    except Exception:  # a sharded weight, or a module that takes other inputs
        return None
    scales = outputs[0].shape == sign.shape and torch.allclose(outputs[0], outputs[1], rtol=1e-2)
    if outputs[0].shape == sign.shape and not any(bool(each.any()) for each in outputs):  # such as tanh(0 * x)
        return torch.zeros_like(sign)
    return (outputs[0] - outputs[2]) / 2 * sign if scales and bool((outputs[0] != outputs[2]).any()) else None


def _is_as_made(norm: nn.Module) -> bool:
    """Return whether a norm's weight has the initial value of the norm's class."""
    try:
        weight: Output = norm.weight
        new: Output = type(norm)(len(weight))
        return bool(torch.equal(new.weight.detach(), weight.detach().cpu()))
    except (TypeError, ValueError, AttributeError, RuntimeError):
        return False


def _is_reentrant(model: nn.Module) -> bool:
    for module in model.modules():
        inner = getattr(module, "_gradient_checkpointing_func", None)
        if getattr(module, "gradient_checkpointing", False) and inner is not None:
            return bool(getattr(inner, "keywords", {}).get("use_reentrant", False))
    return False


def _inputs_are_frozen(model: nn.Module) -> bool:
    """Return whether the layers' inputs require no gradient because the embeddings are frozen."""
    tables = [module for module in model.modules() if isinstance(module, nn.Embedding)]
    hooked = any(module._forward_hooks for module in tables)
    return bool(tables) and not hooked and not any(p.requires_grad for module in tables for p in module.parameters())
