"""Measure the size of the gradient in every layer and sub-layer."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import pandas as pd
import torch
from torch import nn

from lamina.core.architectures import ROLES
from lamina.core.frames import Frame
from lamina.core.text import ranges
from lamina.errors import UserError
from lamina.probes.engine.context import Context
from lamina.probes.engine.figures import Figure, chart
from lamina.probes.engine.registry import Probe, Sample, check_most, probe, sample_of
from lamina.probes.engine.spikes import spike_scores
from lamina.probes.structure.hooks import fresh_gradients, observe
from lamina.probes.structure.sites import Structure

Place = tuple[int, str, str]
_CHUNK = 2**20
_SEQUENCES = 16  # the default for a corpus


@probe
class Gradients(Probe):
    """Measure the norm and the variance of the loss's gradient at the model's current weights, without clipping.

    The loss is the mean over all predicted tokens.

    ``gradient_norm``: the L2 norm of the gradient.
    ``gradient_variance``: the variance of the gradient's elements (Peri-LN Fig 7).
    ``spike_score`` (layer -1, role loss or grad_norm): the fraction of spikes among the values that the model's
        training run logged (OLMo 2). A spike is at least 7 standard deviations above the mean of the 1,000 values
        before the spike.

    The column ``role`` names the parameters or hidden states of a row. In a sub-layer, a role is a kind of parameter,
    such as query or pre_norm, or a parameter's path. Role ``all`` covers all parameters of a sub-layer, of a whole
    layer (sublayer ``block``) or of the whole model (layer -1). The norm of the whole model's gradient equals the
    result of torch.nn.utils.get_total_norm. Outside the layers (sublayer ``model``), the roles are embedding, readout
    (the output head) and final_norm.

    Role ``state`` (sublayer ``block``) describes the gradient of the loss with respect to a hidden state. The row of
    layer l is about the residual stream before layer l, and the row of layer N is about the residual stream after the
    last layer. Role ``state`` covers all tokens and streams. With more tokens, each token has less weight in the mean
    loss, so this gradient is smaller. Compare only values from the same text.

    If layers share parameters (ALBERT), Lamina shows the sum of the layers' gradients at the first of these layers. If
    the output head and the embedding share their weights, Lamina shows the sum of both gradients at the embedding. On a
    short text, noise makes the gradient norm larger.
    """

    name = "gradients"
    title = "Gradients"
    summary = "norm and variance of the gradients by layer, sub-layer and hidden state, and a run's spike score"
    needs = frozenset({"tokens"})
    source = "Peri-LN Fig 4, 5, 7; Mix-LN Fig 3, 6a; FuseNorm Fig 7; OLMo 2 Sec 3.1 (spike score)"
    of_streams = True
    over_steps = ("gradient_norm", "gradient_variance")

    def __init__(self, sequences: int | None = None):
        """Choose the number of sequences to measure (0: all). Raises UserError for an invalid number.

        The default is 16 sequences of a corpus, or all if you set --sequences or --tolerance, or give your own text.
        """
        self.sequences = check_most(self.name, "sequences", sequences)

    def cost(self, context: Context) -> float:
        return 3.5 * context.tokens(context.most_sequences(self.sequences, _SEQUENCES))

    def begin(self, context: Context) -> None:
        context.check_head()

    def measured(self, context: Context) -> Sample:
        return sample_of(context.first(context.most_sequences(self.sequences, _SEQUENCES)))

    def finish(self, context: Context) -> pd.DataFrame:
        states = [_Moments() for _ in range(context.structure.num_layers + 1)]
        place_by_name = places(context.model, context.structure)
        parameters = dict(context.model.named_parameters())
        if shared := shared_layers(context.structure):
            context.notes.append(
                f"The layers {ranges(shared)} share their parameters, so Lamina shows the sum of these layers' "
                "gradients at the first layer. The gradients of the hidden states are separate for each layer."
            )
        weight = getattr(context.structure.head, "weight", None)
        if weight is not None and weight is getattr(context.structure.embedding, "weight", None):
            context.notes.append(
                "The output head is tied to the embedding. Lamina shows the shared gradient at the embedding."
            )
        groups: dict[tuple[int, str, str], _Moments] = {}
        with fresh_gradients(parameters.values()), torch.enable_grad():
            for parameter in parameters.values():
                parameter.requires_grad_(True)
            correction = _accumulate(context, states, context.first(context.most_sequences(self.sequences, _SEQUENCES)))
            for name, parameter in parameters.items():
                moments = _Moments()
                moments.add(parameter.grad, parameter.numel())
                moments.scale(correction)
                layer, sublayer, role = place_by_name[name]
                keys = [(layer, sublayer, role), (-1, "model", "all")]
                keys += [(layer, "block", "all"), (layer, sublayer, "all")] if layer >= 0 else []
                for key in set(keys):
                    groups.setdefault(key, _Moments()).join(moments)
        for index, moments in enumerate(states):
            moments.scale(correction)
            groups[index, "block", "state"] = moments
        order = {"attention": 0, "mixer": 1, "feed_forward": 2, "block": 3, "model": 4}
        rows = []
        for key in sorted(groups, key=lambda key: (key[0], order[key[1]], key[2] == "all", key[2])):
            rows += [(*key, "gradient_norm", groups[key].norm), (*key, "gradient_variance", groups[key].variance)]
        run = context.state.get("run")
        for name, (score, count) in (spike_scores(Path(run)) if run is not None else {}).items():
            context.notes.append(f"The spike score of {name} uses the {count} values that the run logged.")
            rows.append((-1, "model", name, "spike_score", score))
        return pd.DataFrame(rows, columns=["layer", "sublayer", "role", "metric", "value"])

    def figures(self, frame: Frame) -> Iterator[tuple[Figure, str]]:
        layers = frame[frame["layer"] >= 0]
        for word in ("norm", "variance"):
            rows = layers[(layers["role"] == "all") & (layers["metric"] == f"gradient_{word}")]
            yield from chart(
                rows if rows["value"].max() > 0 else rows[:0],
                *(f"Gradient {word} of the layers' parameters", f"gradient {word}"),
                f"Gradient {word} of each layer's parameters at the checkpoint's weights, without clipping.",
                color="sublayer",
                log_y=True,
            )
        yield from chart(
            layers[(layers["role"] == "state") & (layers["metric"] == "gradient_norm")],
            *("Gradient norm of the states", "norm of d loss / d x"),
            "Norm of the loss's gradient with respect to the residual stream before each layer. The last value "
            "belongs to the stream after all layers.",
            x_title="state",
            log_y=True,
        )

    def sentences(self, frame: Frame) -> Iterator[str]:
        norms = frame[frame["metric"] == "gradient_norm"].set_index(["sublayer", "role", "layer"])["value"].sort_index()
        labels = (
            ("all", "The layers' gradient norm", "layer"),
            ("state", "The gradient norm of the residual stream", "state"),
        )
        for role, label, what in labels:
            if ("block", role) in norms.index:
                yield from _along_depth(label, norms["block", role], what)
        layers = norms["block", "all"] if ("block", "all") in norms.index else pd.Series(dtype=float)
        total = norms["model", "all", -1]
        if len(layers):
            shared = layers.index.max() < frame["layer"].max() - 1  # there is one more state than layers
            owner = "the layers' shared" if shared else "the last layer's"
            yield (
                f"The gradient norm of all parameters is {total:.3g}, and the gradient norm of {owner} parameters is "
                f"{layers.iloc[-1]:.3g}."
            )
        for row in frame[frame["metric"] == "spike_score"].itertuples():
            label = {"loss": "training loss", "grad_norm": "gradient norm"}[str(row.role)]
            yield f"In the run's {label}, {100 * float(row.value):.2f} % of the logged values are spikes."


@dataclass
class _Moments:
    count: int = 0
    total: float = 0.0
    squares: float = 0.0

    def add(self, gradient: torch.Tensor | None, count: int) -> None:
        self.count += count
        if gradient is None:  # the parameter does not affect the loss, so the gradient is 0
            return
        if gradient.is_sparse:
            gradient = gradient.coalesce().values()
        for piece in gradient.detach().flatten().split(_CHUNK):
            piece = piece.double()
            self.total += float(piece.sum())
            self.squares += float(torch.dot(piece, piece))

    def join(self, other: _Moments) -> None:
        self.count += other.count
        self.total += other.total
        self.squares += other.squares

    def scale(self, factor: float) -> None:
        self.total, self.squares = self.total * factor, self.squares * factor**2

    @property
    def norm(self) -> float:
        return math.sqrt(self.squares)

    @property
    def variance(self) -> float:
        return max(0.0, self.squares / self.count - (self.total / self.count) ** 2) if self.count else math.nan


def _accumulate(context: Context, states: list[_Moments], batches: Sequence[Mapping[str, torch.Tensor]]) -> float:
    """Fill the parameters' gradients. Return the factor that converts them to the mean loss's gradients."""

    def see(index: int, state: torch.Tensor) -> None:
        if state.requires_grad:
            state.register_hook(lambda gradient: states[index].add(gradient, gradient.numel()))

    points = {index: replace(point, collapse=False) for index, point in context.structure.states().items()}
    sequences = sum(len(batch["input_ids"]) for batch in batches)
    predicted = expected = 0
    for number, batch in enumerate(batches):
        context.progress(number, len(batches), "gradients")
        with observe(points, see, root=context.model):
            losses = context.token_losses(context.on_device(batch))
        expected = expected or sequences * losses.shape[1]
        predicted += losses.numel()
        (losses.sum() / expected).backward()
        del losses
    if not predicted:
        raise UserError("gradients: the model predicts no token. Give sequences of at least two tokens.")
    return expected / predicted


def _along_depth(label: str, norms: Frame, what: str) -> list[str]:
    if len(norms) < 2:
        return []
    first, last = float(norms.iloc[0]), float(norms.iloc[-1])
    if not (math.isfinite(first) and math.isfinite(last)):
        return [f"{label} is not finite."]
    said = f"{label} is {first:.3g} at {what} {norms.index[0]} and {last:.3g} at {what} {norms.index[-1]}"
    if min(first, last) <= 0:
        return [f"{said}."]
    ratio = last / first
    shape = f"{ratio:.3g} times larger" if ratio > 1 else f"{1 / ratio:.3g} times smaller"
    return [f"{said}: {'about even' if 0.5 <= ratio <= 2 else shape}."]


def places(model: nn.Module, structure: Structure) -> dict[str, Place]:
    """Map the name of each parameter to its (layer, sublayer, role). A shared parameter appears only once.

    Outside the layers, the layer is -1 and the sublayer is "model". In a layer but outside its sub-layers, the sublayer
    is "block". A role is a known name (query, query_bias, feed_forward_out, ...), a norm's role (such as pre_norm), or
    the parameter's path in the sub-layer. If layers share a parameter, the parameter belongs to the first layer. A tied
    output head belongs to the embedding.
    """
    owners = _owners(structure)
    by_name: dict[str, Place] = {}
    for name, _ in model.named_parameters():
        module_path, _, last = name.rpartition(".")
        module = model.get_submodule(module_path)
        (layer, sublayer, role), path = owners.get(id(module), ((-1, "model", name), ""))
        if not role:
            last_name = last if last not in ("weight", "bias") else path.rpartition(".")[2]
            known = ROLES.get(f"{sublayer}.{last_name}") or ROLES.get(last_name)
            inside = ".".join(filter(None, (path, last))).removesuffix(".weight")
            role = inside if known is None else f"{known}_bias" if last == "bias" else known
        elif last != "weight" and layer >= 0:
            role = f"{role}_{last}"
        by_name[name] = layer, sublayer, role
    return by_name


def shared_layers(structure: Structure) -> list[int]:
    """Return the layers that share a module with another layer, in ascending order."""
    first: dict[int, int] = {}
    shared: set[int] = set()
    for site in structure.layers:
        before = first.setdefault(id(site.module), site.index)
        if before != site.index:
            shared |= {before, site.index}
    return sorted(shared)


def _owners(structure: Structure) -> dict[int, tuple[Place, str]]:
    """Return each module's (layer, sublayer, role), with "" for an unknown role, and its path in the layer."""
    owners: dict[int, tuple[Place, str]] = {}

    def own(root: nn.Module, place: Place, prefix: str = "") -> None:
        for path, module in root.named_modules():
            owners.setdefault(id(module), (place, ".".join(filter(None, (prefix, path)))))

    for site in structure.layers:
        for sublayer in site.sublayers:
            for norm in sublayer.norms:
                own(norm.module, (site.index, sublayer.kind, norm.role))
        for sublayer in site.sublayers:
            for path, module in sublayer.modules:
                own(module, (site.index, sublayer.kind, ""), path.removeprefix(site.path).lstrip("."))
    for site in structure.layers:
        own(site.module, (site.index, "block", ""))
    norms = [(norm.module, norm.role) for norm in (structure.embedding_norm, structure.final_norm) if norm is not None]
    for module, role in (*norms, (structure.embedding, "embedding"), (structure.head, "readout")):
        if module is not None:
            own(module, (-1, "model", role))
    return owners
