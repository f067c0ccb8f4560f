"""What the probes should find, by plain formulas on states that hooks of this file caught. Nothing here is lamina's
but the positions at which a masked model is asked, which are a choice and not a measurement.
"""

from __future__ import annotations

import copy
import inspect
import math
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
from torch import nn

from lamina.probes.engine.losses import masked_positions

UNCHECKED = "unchecked"
ONE_PLUS = re.compile(r"1(\.0)? \+ self\.weight|self\.weight(\.float\(\))? \+ 1")  # a gain stored without its 1


class Facts:
    """A model, its layers in the order of their calls, and its states x^0 ... x^N on the inputs."""

    def __init__(self, model: nn.Module, layers: Sequence[nn.Module], inputs: Mapping[str, torch.Tensor], mask: int):
        self.model, self.layers, self.inputs, self.mask = model, layers, dict(inputs), mask
        self.states = self.run_states(self.inputs)
        self.causal = self._is_causal() if "input_ids" in inputs else None

    def run(self, inputs: Mapping[str, torch.Tensor]) -> Any:
        more = {"use_cache": False} if hasattr(self.model.config, "use_cache") else {}
        try:
            return self.model(**inputs, **more)
        except TypeError:
            return self.model(**inputs)

    @contextmanager
    def changed(self, change: Callable[[int, str, torch.Tensor], Any]) -> Iterator[None]:
        """``change(layer, "in" | "out", stream)`` sees and may replace what goes into and comes out of each layer."""
        calls: dict[nn.Module, list[int]] = {}
        for index, layer in enumerate(self.layers):
            calls.setdefault(layer, []).append(index)
        done = dict.fromkeys(calls, 0)

        def before(module: nn.Module, args: tuple, kwargs: dict) -> tuple:
            index = calls[module][done[module] % len(calls[module])]
            if args and isinstance(args[0], torch.Tensor):
                new = change(index, "in", args[0])
                return (args if new is None else (new, *args[1:])), kwargs
            key = next(k for k, v in kwargs.items() if isinstance(v, torch.Tensor) and v.is_floating_point())
            new = change(index, "in", kwargs[key])
            return args, kwargs if new is None else {**kwargs, key: new}

        def after(module: nn.Module, args: tuple, output: Any) -> Any:
            index = calls[module][done[module] % len(calls[module])]
            done[module] += 1
            if isinstance(output, torch.Tensor):
                return change(index, "out", output)
            new = change(index, "out", output[0])
            return None if new is None else type(output)([new, *output[1:]])

        handles = [m.register_forward_pre_hook(before, with_kwargs=True) for m in calls]
        handles += [m.register_forward_hook(after) for m in calls]
        try:
            yield
        finally:
            for handle in handles:
                handle.remove()

    def run_states(self, inputs: Mapping[str, torch.Tensor]) -> list[torch.Tensor]:
        states: dict[int, torch.Tensor] = {}

        def keep(index: int, side: str, x: torch.Tensor) -> None:
            states[index if side == "in" else index + 1] = x.detach().clone()

        with (
            torch.no_grad(),
            self.changed(lambda i, side, x: keep(i, side, x) if i == len(self.layers) - 1 or side == "in" else None),
        ):
            self.run(inputs)
        return [states[index] for index in range(len(self.layers) + 1)]

    def _is_causal(self) -> bool:
        ids = self.inputs["input_ids"][:1]
        other = ids.clone()
        other[0, -1] = 6 + (other[0, -1] - 5) % 50
        with torch.no_grad():
            first, second = (self.run({"input_ids": x})[0] for x in (ids, other))
        changed = (first - second).abs()
        return bool(changed[:, :-1].max() < 1e-3 * changed[:, -1].max())

    def losses(self, rows: slice = slice(None)) -> torch.Tensor:
        """Mean cross-entropy of each sequence."""
        ids = self.inputs["input_ids"][rows]
        if self.causal:
            logits, targets = self.run({"input_ids": ids}).logits[:, :-1], ids[:, 1:]
        else:
            chosen = masked_positions(ids.shape[1])
            hidden = ids.clone()
            hidden[:, chosen] = self.mask
            logits, targets = self.run({"input_ids": hidden}).logits[:, chosen], ids[:, chosen]
        each = -logits.double().log_softmax(-1).gather(-1, targets[..., None])[..., 0]
        return each.mean(1)


def hidden_states(frame: Any, facts: Facts) -> str:
    told = _count(frame, facts)
    rows = frame[(frame.role == "state") & (frame["index"].isin([0, 1]))]
    for state, x in enumerate(facts.states):
        x = x.double()
        for metric, expected in (
            ("variance", x.var(correction=0)),
            ("mean", x.mean()),
            ("abs_max", x.abs().max()),
            ("rms", x.square().mean().sqrt()),
            ("token_variance", x.var(-1, correction=0).mean()),
        ):
            told = told or _apart(f"{metric} of state {state}", _row(rows, layer=state, metric=metric), expected, 1e-4)
    return told


def angular_distance(frame: Any, facts: Facts) -> str:
    unit = _unit(facts.states)
    told = ""
    for i in range(len(unit)):
        for j in range(i + 1, len(unit)):
            expected = ((unit[i] * unit[j]).sum(-1).clamp(-1, 1).arccos() / math.pi).mean()
            value = _row(frame, start=i, size=j - i, metric="angular_distance")
            told = told or _apart(f"angle {i}, {j}", value, expected, 1e-3, 1e-4)
    return told


def similarity(frame: Any, facts: Facts) -> str:
    unit = _unit(facts.states)
    cosines = {(i, j): float((unit[i] * unit[j]).sum(-1).mean()) for i in range(len(unit)) for j in range(i)}
    told = ""
    for (j, i), value in cosines.items():
        told = told or _apart(f"cosine {i}, {j}", _row(frame, start=i, size=j - i, metric="cosine"), value, 1e-4, 1e-5)
    for distance in range(1, len(unit) - 1):
        mean = np.mean([c for (j, i), c in cosines.items() if j - i == distance and i > 0])
        value = _row(frame, size=distance, metric="cosine_by_distance")
        told = told or _apart(f"cosine at distance {distance}", value, mean, 1e-4, 1e-5)
    return told


def gradients(frame: Any, facts: Facts) -> str:
    kept: dict[int, torch.Tensor] = {}

    def keep(index: int, side: str, x: torch.Tensor) -> None:
        if side == "in" or index == len(facts.layers) - 1:
            x.retain_grad()
            kept[index + (side == "out")] = x

    parameters = list(facts.model.parameters())
    for parameter in parameters:
        parameter.requires_grad_(True)
        parameter.grad = None
    with facts.changed(keep), torch.enable_grad():
        facts.losses().mean().backward()
    norm = math.sqrt(sum(float(p.grad.double().square().sum()) for p in parameters if p.grad is not None))
    told = _apart("total norm", _row(frame, layer=-1, sublayer="model", role="all", metric="gradient_norm"), norm, 1e-3)
    for state, x in kept.items():
        value = _row(frame, layer=state, sublayer="block", role="state", metric="gradient_norm")
        expected = 0.0 if x.grad is None else float(x.grad.double().norm())
        told = told or _apart(f"gradient of state {state}", value, expected, 2e-3, 1e-9)
    if len(set(facts.layers)) == len(facts.layers):
        for index, layer in enumerate(facts.layers):
            squares = [float(p.grad.double().square().sum()) for p in layer.parameters() if p.grad is not None]
            value = _row(frame, layer=index, sublayer="block", role="all", metric="gradient_norm")
            told = told or _apart(f"gradient of layer {index}", value, math.sqrt(sum(squares)), 2e-3)
    for parameter in parameters:
        parameter.grad = None
    # MobileBERT's random weights: two float32 ways to one loss differ by half, and float64 is far from both.
    return UNCHECKED if told and abs(_exact_norm(facts) / norm - 1) > 1e-2 else told


def _exact_norm(facts: Facts) -> float:
    """The gradient's norm in float64."""
    exact = copy.copy(facts)
    exact.model = copy.deepcopy(facts.model).double()
    with torch.enable_grad():
        exact.losses().mean().backward()
    return math.sqrt(sum(float(p.grad.square().sum()) for p in exact.model.parameters() if p.grad is not None))


def layer_drop(frame: Any, facts: Facts) -> str:
    told = ""
    with torch.no_grad():
        whole = facts.losses().mean()
        for layer in range(len(facts.layers)):
            given: list[torch.Tensor] = []

            def skip(index: int, side: str, x: torch.Tensor, layer: int = layer, given: list = given) -> Any:
                if index != layer:
                    return None
                if side == "in":
                    given.append(x.clone())
                    return None
                return given[-1]

            with facts.changed(skip):
                harm = facts.losses().mean() - whole
            value = _row(frame, layer=layer, meaning="remove", metric="loss_increase")
            told = told or _apart(f"loss without layer {layer}", value, harm, 1e-3, 1e-4)
    return told


def logit_lens(frame: Any, facts: Facts) -> str:
    ids, told = facts.inputs["input_ids"], ""
    if not facts.causal:
        ids = ids.clone()
        ids[:, masked_positions(ids.shape[1])] = facts.mask
    states, last = facts.run_states({"input_ids": ids}), len(facts.layers) - 1
    for state, x in enumerate(states):
        with torch.no_grad(), facts.changed(lambda i, side, y, x=x: x if (i, side) == (last, "out") else None):
            expected = facts.losses().mean()
        value = _row(frame, layer=state, metric="cross_entropy")
        told = told or _apart(f"loss read off state {state}", value, expected, 1e-3, 1e-5)
    return told


def low_precision(frame: Any, facts: Facts) -> str:
    told, states = "", frame[frame.role == "state"]
    for state, x in enumerate(facts.states):
        x = x.float()
        for kind, dtype in (("bf16", torch.bfloat16), ("fp16", torch.float16)):
            error = (x.to(dtype).float() - x).double()
            value = _row(states, layer=state, format=kind, metric="relative_error")
            expected = (error.flatten(1).norm(dim=1) / x.double().flatten(1).norm(dim=1)).mean()
            told = told or _apart(f"{kind} of state {state}", value, expected, 1e-3, 1e-9)
        step = (x.abs().amax(-1, keepdim=True) / 127).clamp_min(1e-30)
        error = ((x / step).round() * step - x).double().norm(dim=-1) / x.double().norm(dim=-1).clamp_min(1e-30)
        value = _row(states, layer=state, format="int8_token", metric="token_error")
        told = told or _apart(f"int8 of state {state}", value, error.mean(), 1e-3, 1e-9)
    losses = frame[frame.metric == "loss"]
    if len(losses):
        with torch.no_grad():
            expected = facts.losses(slice(0, 4)).mean()
        told = told or _apart("loss", _row(losses, format="none"), expected, 1e-4)
        rounded = {"bf16": torch.bfloat16}
        for kind, dtype in rounded.items():
            last = len(facts.layers) - 1

            def change(i: int, side: str, x: torch.Tensor, dtype: torch.dtype = dtype, last: int = last) -> Any:
                return x.to(dtype).to(x.dtype) if side == "in" or i == last else None

            with torch.no_grad(), facts.changed(change):
                expected = facts.losses(slice(0, 4)).mean()
            told = told or _apart(f"loss in {kind}", _row(losses, format=kind), expected, 1e-3)
    return told


def gains(frame: Any, facts: Facts) -> str:
    told = ""
    for row in frame[frame.metric.isin(["gain_mean", "gain_max"])].itertuples():
        module = facts.model.get_submodule(row.path)
        name = "weight" if row.role.endswith("_norm") else row.role
        values = getattr(module, name).detach().double().flatten()
        if name == "weight" and ONE_PLUS.search(inspect.getsource(type(module))):
            values = values + 1
        expected = values.mean() if row.metric == "gain_mean" else values.max()
        told = told or _apart(f"{row.metric} of {row.path}", float(row.value), expected, 1e-3, 1e-5)
    return told


def spectra(frame: Any, facts: Facts) -> str:
    told = ""
    values = frame[frame.metric == "eigenvalue"].sort_values("index")["value"].to_numpy()
    if len(values):
        weight = facts.model.get_input_embeddings().weight.detach().double().numpy()
        expected = np.linalg.eigvalsh(np.cov(weight.T))[::-1]
        told = _apart("eigenvalues", float(np.abs(values - expected).max() / expected[0]), 0.0, 0, 1e-6)
    rows = frame[(frame.metric == "condition_number") & ~frame.role.str.contains("[", regex=False)]
    for row in rows.itertuples():
        module = facts.layers[row.layer].get_submodule(row.role)
        found = np.linalg.svd(module.weight.detach().double().numpy(), compute_uv=False)
        told = told or _apart(f"condition number of {row.layer} {row.role}", row.value, found[0] / found[-1], 1e-3)
    return told


def jacobian(frame: Any, facts: Facts) -> str:
    """The first layer's Jacobian, as a whole matrix from one row of it after the other."""
    few = {"input_ids": facts.inputs["input_ids"][:1, :3]} if facts.causal is not None else {}
    few = few or {name: x[:1] for name, x in facts.inputs.items()}
    start, last = facts.run_states(few)[0], []
    if start.numel() > 2000:  # the whole matrix is what the probe is checked against
        return UNCHECKED

    def function(x: torch.Tensor) -> torch.Tensor:
        last.clear()

        def change(index: int, side: str, y: torch.Tensor) -> Any:
            if index == 0 and side == "in":
                return x
            if index == 0:
                last.append(y)
            return None

        with facts.changed(change), torch.enable_grad():
            facts.run(few)
        return last[0]

    with _eager(facts.model):
        matrix = torch.autograd.functional.jacobian(function, start).reshape(-1, start.numel()).double()
    told = ""
    for role, shift in (("jacobian", 0.0), ("identity", 1.0)):
        expected = torch.linalg.matrix_norm(matrix - shift * torch.eye(len(matrix)), ord=2)
        value = _row(frame, layer=0, sublayer="block", role=role, metric="norm")
        told = told or _apart(f"{role} of layer 0", value, expected, 1e-2)
    return told


def attention(frame: Any, facts: Facts) -> str:
    with _eager(facts.model), torch.no_grad():
        try:
            weights = facts.model(**facts.inputs, output_attentions=True).attentions
        except (TypeError, AttributeError, ValueError):
            weights = None
    if not weights or any(w is None or w.ndim != 4 or len(w) != len(facts.states[0]) for w in weights):
        return UNCHECKED  # the family hands its weights to nobody
    if facts.causal and any(float(w.triu(1).abs().max()) > 1e-6 for w in weights):
        return UNCHECKED  # what it hands over (Falcon) is not what it computes with: it looks ahead
    if any(float((w.sum(-1) - 1).abs().max()) > 1e-4 for w in weights):
        return UNCHECKED  # learned sinks (GPT-OSS), which the probe counts as a key, are left out of what it hands over
    layers = sorted(frame.layer.unique())
    if len(weights) != len(layers):
        return f"{len(layers)} layers with attention, the model gives {len(weights)}"
    told = ""
    for layer, weight in zip(layers, weights, strict=True):
        p = weight.double()
        expected = -(p * p.clamp_min(1e-300).log()).sum(-1).mean()
        value = _row(frame, layer=layer, role="all", metric="entropy")
        told = told or _apart(f"entropy of layer {layer}", value, expected, 1e-3, 1e-6)
    return told


def bounds(frame: Any, facts: Facts) -> str:
    """What the theorems say: C.1 is an equality of each token, C.2 and C.3 and the chain rule are bounds."""
    ratios = frame[frame.metric == "ratio"]
    for row in ratios.itertuples():
        if row.role == "peri_ln_c1_token" and abs(row.value - 1) > 1e-3:
            return f"C.1 is {row.value}"
        if (row.role.startswith("peri_ln") or row.role == "fusenorm_eq_19_chain") and row.value > 1 + 1e-3:
            return f"{row.role} is {row.value}"
    return ""


CHECKS: dict[str, Callable[[Any, Facts], str]] = {
    check.__name__: check
    for check in (
        *(
            hidden_states,
            angular_distance,
            similarity,
            gradients,
            layer_drop,
            logit_lens,
            low_precision,
            gains,
            spectra,
        ),
        *(jacobian, attention, bounds),
    )
}


def _unit(states: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """Unit vectors; one of zeros (an untrained class token) has no direction and stays."""
    return [x.double() / x.double().norm(dim=-1, keepdim=True).clamp_min(1e-30) for x in states]


def _count(frame: Any, facts: Facts) -> str:
    found = int(frame[(frame.role == "state") & (frame.metric == "variance")].layer.max())
    return "" if found == len(facts.layers) else f"{found} layers, the family has {len(facts.layers)}"


def _row(frame: Any, **where: Any) -> float:
    for name, wanted in where.items():
        frame = frame[frame[name] == wanted]
    if len(frame) != 1:
        raise LookupError(f"{len(frame)} rows where {where}")
    return float(frame["value"].iloc[0])


def _apart(what: str, value: float, expected: Any, relative: float, absolute: float = 1e-8) -> str:
    expected = float(expected)
    if math.isclose(value, expected, rel_tol=relative, abs_tol=absolute) or (
        math.isnan(value) and math.isnan(expected)
    ):
        return ""
    return f"{what}: {value:.6g}, expected {expected:.6g}"


@contextmanager
def _eager(model: nn.Module) -> Iterator[None]:
    """Attention by plain operations; then as before, or the next probe would measure a model with other roundings."""
    used = getattr(getattr(model, "config", None), "_attn_implementation", None)
    if used is None or not hasattr(model, "set_attn_implementation"):
        yield
        return
    model.set_attn_implementation("eager")
    try:
        yield
    finally:
        model.set_attn_implementation(used)
