"""Check, with small forward passes, that the tensors in the trace are the residual stream."""

from __future__ import annotations

import math
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import replace
from typing import TypeAlias

import torch
from torch import nn

from lamina.core.text import ranges
from lamina.errors import UserError
from lamina.probes.structure.hooks import Key, forward, intercept, observe
from lamina.probes.structure.sites import LayerSite, Point, Structure

Batch: TypeAlias = Mapping[str, torch.Tensor]
Tensors: TypeAlias = Mapping[Hashable, torch.Tensor]  # by the keys of the points
SEQUENCES = 3
_LENGTHS = (11, 13, 7, 5, 4)  # in tokens: the first that fits the text and equals neither the width nor SEQUENCES
_ROUNDINGS = 16  # largest rounding error of a sum of a few terms, in units of the dtype's epsilon
_RANDOM = "the model draws random numbers even in evaluation mode. Choose a deterministic model."
_BATCH = "batch. Choose a model without interaction between sequences."
_SAME = 1e-3  # largest relative difference between passes, because kernels and groups of experts round differently


def prove(structure: Structure, inputs: Batch, root: nn.Module, *, reads_tokens: bool = True) -> Structure:
    """Check with small forward passes that the traced tensors are the residual stream, and return the structure.

    Hidden states must have the shape [batch, tokens, width], and be equal in two passes over the same input. A hidden
    state must depend on its token, and not on other sequences. If an input is not a tensor (such as a block mask),
    Lamina skips the checks that change the input. If a layer's output is not the sum of the skip and the sub-layers'
    outputs, Lamina removes the layer's sub-layers from the structure.

    Args:
        inputs: a batch for ``root``, which is the model or the model without its head
        reads_tokens: false for a decoder after an encoder and for a second tower, which do not read the main input

    Raises:
        UserError: if the hidden states fail a check
    """
    fixed = not all(isinstance(value, torch.Tensor) for value in inputs.values())
    few = dict(inputs) if fixed else few_inputs(inputs, structure.hidden_size)
    states: dict[Hashable, Point] = {**structure.states()}
    try:
        tensors = watched(root, {**states, **_parts(structure)}, few)
        if not reads_tokens and not states.keys() <= tensors.keys():
            raise LookupError("the main input alone does not reach this list of layers")
    except Exception:  # the model needs other inputs, too, such as an encoder with a decoder
        if fixed:
            raise
        ids, length = next(iter(inputs.values())), next(iter(few.values())).shape[1]
        rest = {name: tensor[:1] for name, tensor in inputs.items() if name not in few and tensor.ndim}
        # Cut masks to the length of the tokens.
        cut = {name: t[:, :length] if t.shape == ids[:1].shape else t for name, t in rest.items()}
        few |= {name: torch.cat([tensor] * SEQUENCES) for name, tensor in cut.items()}
        tensors = watched(root, {**states, **_parts(structure)}, few)
    batch = next(value for value in few.values() if isinstance(value, torch.Tensor))
    _check_axes(structure, tensors, batch if reads_tokens else batch[:, :1, None])
    again = watched(root, states, few)
    _check_same(
        structure, tensors, again, "two passes over the same input give different hidden states at {}: " + _RANDOM
    )
    # Check every sequence: if a causal mask is on the batch axis, the first sequence depends on no other.
    for number in range(0 if fixed else SEQUENCES):
        among = {state: tensors[state][number : number + 1] for state in states}
        alone = watched(root, states, {name: tensor[number : number + 1] for name, tensor in few.items()})
        _check_same(
            structure, among, alone, f"a sequence's hidden states at {{}} depend on the other sequences in the {_BATCH}"
        )
    if reads_tokens and not fixed and "input_ids" in few and few["input_ids"].shape[1] > 1:
        _check_tokens(structure, tensors, root, few)
    mixing = _mixing(structure, root, few)
    structure = replace(structure, layers=tuple(_without_others(site, mixing, tensors) for site in structure.layers))
    # A layer that carries more has declared sub-layers, so Lamina does not check their sum.
    traced = [site for site in structure.layers if site.sublayers and not site.carries_more]
    wrong = [site.index for site in traced if not _adds_up(site, tensors)]
    if not wrong:
        return structure
    note = (
        f"the sub-layers' outputs in layer {ranges(wrong)} do not add up to the layer's output. Lamina measures such a "
        "layer only as a whole, without its sub-layers"
    )
    layers = tuple(replace(site, sublayers=()) if site.index in wrong else site for site in structure.layers)
    return replace(structure, layers=layers, notes=[*structure.notes, note])


def few_inputs(inputs: Batch, width: int) -> dict[str, torch.Tensor]:
    """Make three inputs from the first input: shift its tokens, or mirror and shift its image."""
    if "input_ids" not in inputs:
        (name,) = list(inputs)[:1]
        image = inputs[name][:1]
        return {name: torch.cat([image, image.flip(-1), image.roll(1, -2)])}
    ids = inputs["input_ids"][:1]
    fit = [n for n in _LENGTHS if n <= ids.shape[1] and n not in (width, SEQUENCES)]
    ids = ids[:, : fit[0] if fit else 1]
    return {"input_ids": torch.cat([ids.roll(shift, 1) for shift in range(SEQUENCES)])}


def _parts(structure: Structure) -> dict[Hashable, Point]:
    points: dict[Hashable, Point] = {}
    for site in structure.layers:
        points["output", site.index] = site.output
        for number, sublayer in enumerate(site.sublayers):
            points["contribution", site.index, number] = sublayer.contribution
            if sublayer.feed_forward is not None:
                path, module = sublayer.feed_forward.down
                points["down", site.index, number] = Point(module, path, "output", sublayer.feed_forward.post.call)
            for norm in sublayer.norms:
                if norm.role == "out_norm":
                    points["out", site.index, number] = norm.input
                if norm.role == "post_norm":
                    points.setdefault(("sum", site.index, number), norm.input)
                    points["normed", site.index, number] = norm.output
    return points


def watched(root: nn.Module, points: Mapping[Key, Point], inputs: Batch) -> dict[Key, torch.Tensor]:
    tensors: dict[Key, torch.Tensor] = {}
    with torch.no_grad(), observe(points, lambda key, value: tensors.update({key: value.detach().clone()}), root=root):
        forward(root, inputs)
    return tensors


def _check_axes(structure: Structure, tensors: Tensors, batch: torch.Tensor) -> None:
    for state in structure.states():
        if state not in tensors:
            raise UserError(
                f"model: Lamina cannot record the residual stream at layer {state}. Name another list of layers with "
                "--layers."
            )
        shape = tensors[state].shape
        right = len(shape) == 3 and shape[0] == len(batch) and shape[2] == structure.hidden_size
        if right and batch.ndim == 2:
            right = shape[1] == batch.shape[1]
        if not right:
            inputs = f"sequences of {batch.shape[1]} tokens" if batch.ndim == 2 else "images"
            raise UserError(
                f"model: the residual stream at {_path(structure, state)} has the shape {list(shape)} for {len(batch)} "
                f"{inputs}. Choose a model whose layers return [batch, tokens, width]."
            )


def _check_same(structure: Structure, states: Tensors, others: Tensors, text: str) -> None:
    for state in structure.states():
        a, b = states[state], others[state]
        same = a.shape == b.shape
        if same:  # compare the median token, because a single token may change experts
            x, y = a.double().flatten(0, -2), b.double().flatten(0, -2)
            length = torch.maximum(x.norm(dim=-1), y.norm(dim=-1)).clamp_min(1e-30)
            apart = float(((x - y).norm(dim=-1) / length).median().nan_to_num(0.0))
            same = apart <= max(_SAME, _ROUNDINGS * torch.finfo(a.dtype).eps)
        if not same:
            raise UserError(f"model: {text.format(_path(structure, state))}")


def _check_tokens(structure: Structure, tensors: Tensors, root: nn.Module, inputs: Batch) -> None:
    ids = inputs["input_ids"].clone()
    other = ids[0] != ids[0, 0]
    if not bool(other.any()):
        return
    ids[0, 0] = ids[0, other][0]
    changed = watched(root, {0: structure.states()[0]}, {**inputs, "input_ids": ids})
    if torch.equal(changed[0][0, 0], tensors[0][0, 0]):
        raise UserError(
            f"model: another first token gives the same hidden state at {_path(structure, 0)}. Choose a model whose "
            "layers return [batch, tokens, width]."
        )


def _adds_up(site: LayerSite, tensors: Tensors) -> bool:
    """Return whether each sum on the residual stream equals the skip plus the outputs of the sub-layers.

    The sums are the layer's output and the input of each norm on the stream. Lamina fits one factor per channel to the
    skip, because some placements scale the skip. These factors cannot replace a missing output.
    """
    x = tensors[site.index].double().flatten(0, -2)
    output = tensors["output", site.index].double()
    if output.numel() != x.numel():
        return False
    precision = torch.finfo(tensors[site.index].dtype).eps
    skip, parts = x, list[torch.Tensor]()
    for number in range(len(site.sublayers)):
        contribution = tensors.get(("contribution", site.index, number))
        if contribution is None or contribution.numel() != x.numel():
            return False
        parts.append(contribution.double().reshape_as(x))
        if ("sum", site.index, number) in tensors:
            total, normed = (tensors[name, site.index, number] for name in ("sum", "normed"))
            if total.numel() != x.numel() or not _is_made_of(total.double().reshape_as(x), parts, (skip, x), precision):
                return False
            skip, parts = normed.double().reshape_as(x), []
    return _is_made_of(output.reshape_as(x), parts, (skip, x) if parts else (skip,), precision)


def _is_made_of(
    total: torch.Tensor, parts: Sequence[torch.Tensor], skips: Sequence[torch.Tensor], precision: float
) -> bool:
    if _is_sum(total, sum(parts, torch.zeros_like(total)), skips, precision):
        return True
    return len(parts) > 1 and _is_sum(total, parts[-1], (*skips, *parts[:-1]), precision)


def _mixing(structure: Structure, root: nn.Module, inputs: Batch) -> set[tuple[int, int]]:
    """Return (layer, number) of each sub-layer that looks like a feed-forward but mixes tokens, such as RWKV's WKV."""
    points: dict[tuple, Point] = {}
    for site in structure.layers:
        for number, sublayer in enumerate(site.sublayers):
            if sublayer.feed_forward is not None:
                path, module = sublayer.feed_forward.up[0]
                post = sublayer.feed_forward.post
                points["up", site.index, number] = Point(module, path, "input", post.call)
                points["post", site.index, number] = post
    tensors: dict[tuple, torch.Tensor] = {}

    def change(key: tuple, tensor: torch.Tensor) -> torch.Tensor | None:
        if key[0] == "post":
            tensors[key] = tensor
            return None
        tensors[key] = tensor.detach().requires_grad_()
        return tensors[key].clone()

    mixing = set()
    with torch.enable_grad(), intercept(points, change, roots=[root]):
        forward(root, inputs)
    for kind, layer, number in list(tensors):
        start, end = tensors.get(("up", layer, number)), tensors.get(("post", layer, number))
        if kind != "post" or start is None or end is None or not end.requires_grad:
            continue
        with torch.enable_grad():
            rows = end.flatten(0, -2)
            row = len(rows) // 2
            (gradient,) = torch.autograd.grad(rows[row].sum(), start, retain_graph=True, allow_unused=True)
        if gradient is None or gradient.numel() // gradient.shape[-1] != len(rows):
            continue
        each = gradient.flatten(0, -2).abs().amax(-1)
        if float(each.sum() - each[row]) > _SAME * float(each[row]):
            mixing.add((layer, number))
    return mixing


def _without_others(site: LayerSite, mixing: set[tuple[int, int]], tensors: Tensors) -> LayerSite:
    """Set ``feed_forward`` to None in sub-layers that mix tokens, or that have a gate after the last matrix (RWKV)."""
    sublayers = []
    for number, sublayer in enumerate(site.sublayers):
        down = tensors.get(("down", site.index, number))
        end = tensors.get(("out", site.index, number), tensors.get(("contribution", site.index, number)))
        if (site.index, number) in mixing:
            sublayer = replace(sublayer, kind="mixer", feed_forward=None)
        elif sublayer.feed_forward is not None and down is not None and end is not None:
            rows = [t.double().flatten(0, -2) for t in (end, down)]
            precision = torch.finfo(end.dtype).eps
            same = rows[0].shape == rows[1].shape
            if not same or not _is_sum(rows[0], torch.zeros_like(rows[0]), (rows[1],), precision):
                sublayer = replace(sublayer, feed_forward=None)
        sublayers.append(sublayer)
    return replace(site, sublayers=tuple(sublayers))


def _is_sum(total: torch.Tensor, added: torch.Tensor, skips: Sequence[torch.Tensor], precision: float) -> bool:
    """Return whether ``total - added`` is a sum of the skips, each times one factor per channel."""
    rest = total - added
    if not bool(rest.isfinite().all()):
        return True  # Lamina cannot check a sum that overflowed. The probes report the overflow
    largest = max(float(t.abs().max()) for t in (total, added, *skips))
    limit = _ROUNDINGS * precision * max(largest, 1e-30)
    if float((rest - skips[0]).abs().max()) <= limit:
        return True
    _, error = combination(rest, list(dict.fromkeys(skips)), by_channel=True, largest=largest)
    return error * largest <= limit


def combination(
    total: torch.Tensor, terms: Sequence[torch.Tensor], by_channel: bool, largest: float | None = None
) -> tuple[list[torch.Tensor], float]:
    """Fit ``total`` as a weighted sum of ``terms``. All tensors have the shape [tokens, channels].

    Each term has one weight, or with ``by_channel`` one weight per channel. Return the weights, and the largest
    absolute error divided by ``largest`` (default: the largest absolute value of all tensors).
    """
    largest = largest or max(float(tensor.abs().max()) for tensor in (total, *terms)) or 1.0
    if not all(bool(tensor.isfinite().all()) for tensor in (total, *terms)):  # LAPACK would raise an error
        return [torch.ones(1, dtype=total.dtype) for _ in terms], math.inf
    if by_channel:
        basis, aim = torch.stack(list(terms), dim=-1).transpose(0, 1), total.T[..., None]  # [channels, tokens, terms]
    else:
        basis, aim = torch.stack([t.flatten() for t in terms], dim=-1)[None], total.flatten()[None, :, None]
    solution = torch.linalg.lstsq(basis / largest, aim / largest, driver="gelsd").solution  # [1 or channels, terms, 1]
    factors = list(solution[..., 0].unbind(-1))
    rest = total - sum((f * t for f, t in zip(factors, terms, strict=True)), torch.zeros_like(total))
    error = float(rest.abs().max()) / largest
    return factors, error if math.isfinite(error) else math.inf


def _path(structure: Structure, state: int) -> str:
    if state < structure.num_layers:
        return structure.layers[state].path
    return f"{structure.layers[-1].path}'s output"
