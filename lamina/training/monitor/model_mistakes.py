"""Find mistakes in a model's weights, norms and gradients."""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterator

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from lamina.probes.structure.hooks import Output
from lamina.probes.structure.sites import effective_gain, is_norm
from lamina.training.monitor.before_training import NARROW, BeforeTraining, Mistake, checks, listing
from lamina.training.monitor.first_pass import whole
from lamina.training.monitor.silent_parameters import named_alike

NEAR_ZERO, TWICE = 0.05, (1.9, 2.1)  # mean gains that switch a norm off, or count the 1 of a "1 + weight" twice
WIDE, SOLE = 4.0, 8.0  # standard deviations times sqrt(inputs); and times that of the same part elsewhere


@checks
def no_gradient_to_blocks(setup: BeforeTraining) -> Iterator[Mistake]:
    """Find layers that run but get no gradient, because of a detach or reentrant checkpointing with frozen inputs."""
    reentrant = _is_reentrant(setup.model)
    for path, layers in setup.blocks:
        trained = [[p for p in layer.parameters() if p.requires_grad] for layer in layers]
        if not any(trained):
            continue
        dead = [str(at) for at, parameters in enumerate(trained) if parameters]
        if setup.trial is not None:
            ran = [at for at, layer in enumerate(layers) if id(layer) in setup.trial.ran]
            dead = [str(at) for at in ran if trained[at] and not {id(p) for p in trained[at]} & setup.trial.reached]
        elif not (reentrant and _inputs_are_frozen(setup.model)):
            continue
        if dead and (setup.trial is None or setup.trial.reached):
            do = "Call model.enable_input_require_grads(), or checkpoint with use_reentrant=False"
            yield Mistake(
                what=f"layers {', '.join(dead[:8])}{' ...' * (len(dead) > 8)} of {path} get no gradient",
                why="reentrant checkpointing needs an input that requires a gradient, but these layers' inputs are "
                "frozen"
                if reentrant
                else "an operation after these layers detaches the residual stream, or nothing reads their outputs",
                do=do
                if reentrant
                else "Look for .detach(), .data, argmax or torch.no_grad() after these layers, and for a loop that "
                "gives each layer the same input",
            )


@checks
def no_gradient_to_parts(setup: BeforeTraining) -> Iterator[Mistake]:
    """Find parameters without a gradient in layers where all modules run and other parameters get a gradient."""
    if setup.trial is None:
        return
    for _, layers in setup.blocks:
        peers: dict[str, list[nn.Parameter]] = {}
        spared = set[int]()
        for layer in layers:
            for name, module, parameter in named_alike(layer):
                own = {*map(id, module.parameters(recurse=False))}  # of them, XLNet's forward may not need all
                spared |= own if own & setup.trial.reached else set()
                if parameter.requires_grad and id(module) in setup.trial.ran:
                    peers.setdefault(name, []).append(parameter)
        alive = {id(layer): {*map(id, layer.parameters())} & setup.trial.reached for layer in layers}
        inside = {id(p) for layer in layers if alive[id(layer)] for p in layer.parameters()}
        silent = [
            p
            for of in peers.values()
            if not 0 < sum(id(p) in setup.trial.reached for p in of) <= len(of) / 2
            for p in of
            if id(p) not in setup.trial.reached | spared and id(p) in inside
        ]
        if silent:
            yield Mistake(
                what=f"no gradient reaches {len(silent)} of the layers' parameters ({setup.listed(silent)})",
                why="their modules run, and the layers' other parameters get a gradient: an operation detaches their "
                "outputs",
                do="Look for .detach(), .data, torch.no_grad() or .item() after their modules, and for router "
                "probabilities that do not multiply the experts' outputs",
            )


@checks
def untied(setup: BeforeTraining) -> Iterator[Mistake]:
    """Find an embedding and an output head that should be one tensor but are two."""
    config: Output = getattr(setup.model, "config", None)
    if setup.ends is not None and hasattr(config, "get_text_config"):
        table, head = (module.weight for module in setup.ends)
        tied = bool(getattr(config.get_text_config(), "tie_word_embeddings", False))
        wanted = tied and bool(getattr(setup.model, "_tied_weights_keys", None))
        same = table is head or table.data_ptr() == head.data_ptr()
        if wanted and not same and table.shape == head.shape:
            yield _untied("config.tie_word_embeddings is true, but embedding and output head are two tensors")
            return
    tables = [m.weight for m in setup.model.modules() if isinstance(m, nn.Embedding)]
    heads = [m.weight for m in setup.model.modules() if isinstance(m, nn.Linear)]
    for table in tables:
        for head in heads:
            if isinstance(table, DTensor) or isinstance(head, DTensor):
                continue
            if table is head or table.shape != head.shape or table.data_ptr() == head.data_ptr():
                continue
            if bool(table.any()) and torch.equal(table, head):
                yield _untied(
                    f"{setup.listed([table])} and {setup.listed([head])} have equal values but are two tensors"
                )
                return


def _untied(what: str) -> Mistake:
    return Mistake(
        what=what,
        why="training will make the two tensors, which were tied, differ more and more",
        do="Tie both again before you create the optimizer (model.tie_weights(), or head.weight = embedding.weight)",
    )


@checks
def norm_gains(setup: BeforeTraining) -> Iterator[Mistake]:
    """Find norms whose gain starts at 0 or at 2. Only a norm at the end of a branch may start at 0."""
    sites = list(setup.structure.norms()) if setup.structure is not None else []
    ends = {id(site.module) for _, _, site in sites if site.role == "out_norm"}
    norm_ids = {id(site.module) for _, _, site in sites}
    norms = [module for module in setup.model.modules() if is_norm(module)]
    gains = {module: gain for module in norms if (gain := _gain(module)) is not None and gain.numel() > 1}
    off = [module for module, gain in gains.items() if float(gain.abs().max()) < NEAR_ZERO and id(module) not in ends]
    off = [module for module in off if id(module) in norm_ids] if len(off) < len(gains) else off
    off = [module for module in off if not _is_as_made(module)]
    flat = {m: float(gain.mean()) for m, gain in gains.items() if float(gain.std()) < 1e-3 and not _is_as_made(m)}
    double = [module for module, mean in flat.items() if TWICE[0] < mean < TWICE[1]]
    for found, size, why, do in (
        (off, 0, "the norm's layer sees only zeros", "Start gains at 1 (at 0 only if the norm computes 1 + weight)"),
        (double, 2, "the weights of norms that compute 1 + weight start at 1", "Start such weights at 0"),
    ):
        if found:
            names = listing([setup.modules[id(m)] for m in found])
            what = f"the gain is about {size} in {len(found)} of the norms ({names})"
            yield Mistake(what=what, why=why, do=do)


@checks
def weight_scales(setup: BeforeTraining) -> Iterator[Mistake]:
    """Find layers' matrices with a standard deviation that does not suit the width, or that differs between layers."""
    scales: dict[str, dict[str, float]] = {}
    for path, layers in setup.blocks:
        for at, layer in enumerate(layers):
            for name, module in layer.named_modules():
                weight = getattr(module, "weight", None)
                if type(module).__name__ not in ("Linear", "Conv1D", "NonDynamicallyQuantizableLinear"):
                    continue
                if isinstance(weight, torch.Tensor) and weight.ndim == 2 and weight.is_floating_point():
                    inputs = weight.shape[0] if type(module).__name__ == "Conv1D" else weight.shape[1]
                    scale = float(whole(weight).float().std()) * math.sqrt(inputs)
                    scales.setdefault(f"{path}.N.{name}", {})[f"{path}.{at}.{name}"] = scale
    flat = {name: scale for of in scales.values() for name, scale in of.items() if scale > 0}
    if not flat:
        return
    usual = statistics.median(flat.values())
    wide = [name for name, scale in flat.items() if scale > WIDE]
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
            f"over {SOLE:g} times, or under 1/{SOLE:g} of, the other layers' scale",
            "one layer will dominate, or have no effect",
        ),
    ):
        if paths:
            yield Mistake(
                what=f"{len(paths)} matrices have {what} ({listing(paths)})",
                why=why,
                do=(
                    "Initialize them with a standard deviation of 0.02 or 1/sqrt(inputs), and divide output "
                    "projections by sqrt(2 layers)"
                ),
            )


@checks
def stuck_at_zero(setup: BeforeTraining) -> Iterator[Mistake]:
    """Find matrices of zeros whose gradient stays 0, because the matrix that multiplies them is also 0."""
    stuck = [p for p in setup.trained if setup.trial is not None and id(p) in setup.trial.stuck]
    if stuck:
        yield Mistake(
            what=f"{len(stuck)} matrices of zeros get a gradient of 0 ({setup.listed(stuck)})",
            why="each is multiplied by another matrix of zeros, so both stay 0",
            do="Initialize one of the two at random",
        )


def _gain(norm: nn.Module) -> torch.Tensor | None:
    if hasattr(norm, "running_mean"):  # a pass through a batch norm changes its statistics
        return None
    try:
        return effective_gain(norm)
    except (RuntimeError, ValueError):  # a sharded weight, or one that takes other shapes
        return None


def _is_as_made(norm: nn.Module) -> bool:
    """Return whether a norm's weight equals its class's initial value (1 even for Nemotron's 1 + weight)."""
    weight: Output = norm.weight
    try:
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
    """Return whether embeddings are frozen and no hook makes the layers' inputs require a gradient."""
    tables = [module for module in model.modules() if isinstance(module, nn.Embedding)]
    hooked = any(module._forward_hooks for module in tables)
    return bool(tables) and not hooked and not any(p.requires_grad for module in tables for p in module.parameters())
