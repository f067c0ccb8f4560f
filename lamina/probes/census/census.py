"""Find a checkpoint's norm placement from measurements."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path

import torch
import transformers
from torch import nn
from transformers import PreTrainedConfig

from lamina.core.json_types import Json
from lamina.core.text import ranges
from lamina.errors import UserError, one_line, shortened, unknown
from lamina.jobs.files import finite
from lamina.modeling.backbones.loading import quiet, read_config
from lamina.modeling.backbones.presets import cut_config
from lamina.modeling.checkpoint import auto_class, load
from lamina.modeling.configuration_lamina import backbone_of
from lamina.placements.matching import PARALLEL, SEQUENTIAL, UNSEEN, UNSEEN_NUMBER, Facts, Match, learned_fact, match
from lamina.placements.plan import SUBLAYERS
from lamina.probes.census.equations import (
    BLOCK_INPUT,
    NORMED,
    ROUNDING,
    STREAM,
    BranchTerm,
    Factor,
    Sum,
    norm_kind,
    sums_of,
    watched_rows,
)
from lamina.probes.census.inner_norms import KEY, OUTPUT, QUERY, VALUE, InnerNorm, inner_norms, mixes
from lamina.probes.census.memory import NORMS_OF_WAYS, MemoryLayers, StateRead, memories_of
from lamina.probes.census.streams import StreamLayers, StreamSum, wirings_of
from lamina.probes.engine.inputs import batches_of, reads_images
from lamina.probes.engine.measure import refuse_meta, structure_of
from lamina.probes.structure.hooks import base_of, evaluating, observe
from lamina.probes.structure.hooks import forward as run
from lamina.probes.structure.proof import combination, prove
from lamina.probes.structure.sites import LayerSite, NormSite, Point, Structure, SublayerSite
from lamina.probes.structure.token_rows import token_rows

_SEQUENCES = 3
_LENGTHS = (13, 11, 17, 19, 23)
_FEW_LAYERS, _FEW_TOKENS = 4, 512
# Without weights, Lamina shrinks configurations above the first size, and rejects configurations above the second.
_MANY_PARAMETERS, _MOST_PARAMETERS = 100_000_000, 1_000_000_000
_FEW_EXPERTS, _FEW_CHANNELS = 16, 256
_FEWER = 8  # the factor by which Lamina reduces the number of heads
_CLOSE = 1e-5
_SINKHORN = 1e-3  # the largest difference of row and column sums from 1 in a Sinkhorn matrix


@dataclass(frozen=True, kw_only=True)
class LayerGroup:
    """Layers with the same equations. The factors and norms are from the first of these layers."""

    layers: tuple[int, ...]
    sums: tuple[Sum, ...]
    inner: tuple[InnerNorm, ...] = ()
    streams: tuple[StreamSum, ...] = ()  # in a model with several residual streams
    reads: tuple[StateRead, ...] = ()  # the hidden states that the layer reads instead of the residual stream


@dataclass(frozen=True, kw_only=True)
class Census:
    """The measurements of a model, and the norm placement that Lamina finds.

    ``match``: the nearest placement and the differences from this placement (None: Lamina cannot measure the model).
    ``unknown``: the reason why Lamina cannot measure the model.
    ``groups``: the layers, grouped by equal equations.
    ``ends``: the embedding's norm and scale, the final norm, and the norms on queries, keys and values.
    ``error``: the largest error of the fitted equations, divided by the largest value.
    """

    model_type: str
    num_layers: int = 0
    match: Match | None = None
    unknown: str = ""
    groups: tuple[LayerGroup, ...] = ()
    ends: Facts
    error: float = math.nan
    notes: tuple[str, ...] = ()

    @property
    def placement(self) -> str | None:
        """Return the placement with its options, such as ``keel(alpha=4)``, or None if the model fits no placement."""
        return self.match.placement if self.match is not None and not self.match.differences else None

    @property
    def verdict(self) -> str:
        """Return one line with the model's placement, or with the nearest placement and the differences."""
        if self.match is None:
            return f"not known: {self.unknown}"
        if not self.match.differences:
            synonyms = f" (the same as {', '.join(self.match.others)})" if self.match.others else ""
            return f"{self.match.placement}{synonyms}"
        return (
            f"no known placement. The nearest placement is {self.match.placement}, with these differences: "
            f"{'; '.join(self.match.differences)}"
        )

    def __str__(self) -> str:
        return self.text()

    def text(self) -> str:
        layers = [f"{self.num_layers} layer{'s' * (self.num_layers != 1)}"] if self.num_layers else []
        lines = [", ".join([self.model_type, *layers]), f"placement: {self.verdict}"]
        for group in self.groups:
            lines.append(f"\nlayer {ranges(group.layers)}:")
            lines += [f"  {read.text()}" for read in group.reads]
            sums = (*group.sums, *group.streams)
            lines += [f"  {total.text()}    (error: {total.error:.1g} of the largest value)" for total in sums]
            lines += [f"  {n.path}: {n.kind} on {n.on or 'a tensor inside the module'}, {n.scope}" for n in group.inner]
        if self.groups:
            facts = {name: value for name, value in self.ends.items() if value is not None}
            lines += ["", *(f"{name.replace('_', ' ')}: {value}" for name, value in facts.items())]
        return "\n".join([*lines, *(f"note: {note}" for note in self.notes)])

    def to_dict(self) -> Json:
        return finite({**asdict(self), "placement": self.placement, "verdict": self.verdict})


def census(model_or_path: nn.Module | PreTrainedConfig | str | Path, *, layers: str | None = None) -> Census:
    """Find a model's norm placement from measurements. ``lamina.placement_of`` documents the arguments.

    Raises:
        UserError: if the path holds no model, or the model lacks the requested layers. If Lamina cannot measure the
            model, the result's ``unknown`` gives the reason instead.
    """
    model, notes = _model_of(model_or_path)
    config = _text_config(model)
    kind = type(model).__name__ if config is None else config.model_type
    if any(p.dtype.itemsize < 4 for p in model.parameters() if p.is_floating_point()):
        model = copy.deepcopy(model).float() if isinstance(model_or_path, nn.Module) else model.float()
    try:
        with evaluating(model):
            return _measured(model, kind, layers, notes)
    except UserError as error:
        if layers is not None and str(error).startswith("layers: "):  # the user named a path that does not fit
            raise
        return Census(model_type=kind, unknown=str(error), ends={}, notes=tuple(notes))


def _measured(model: nn.Module, kind: str, layers: str | None, notes: list[str]) -> Census:
    inputs = _inputs(model)
    if (streams := _several_streams(model, inputs)) is not None:
        return _of_streams(streams, model, inputs, kind, notes)
    structure = structure_of(model, inputs, layers=layers)
    root = base_of(model, structure, inputs)
    pairs = zip(structure.layers, prove(structure, inputs, root).layers, strict=True)
    structure = replace(structure, layers=tuple(_with_kinds(site, proved) for site, proved in pairs))
    reads: list[list[StateRead]] = []
    if structure.carries_more:
        memory = MemoryLayers(structure, root, inputs)
        structure, reads = memory.structure, memory.reads()
        sums = sums_of(structure, memory.watch, memory.others())
    else:
        sums = sums_of(structure, partial(watched_rows, root, inputs))
    notes += structure.notes
    bare = [
        site.index
        for site, layer_sums in zip(structure.layers, sums, strict=True)
        if not all(s.skip for s in layer_sums) or not layer_sums
    ]
    if bare:
        raise UserError(
            f"the output of layer {ranges(bare)} is not a weighted sum of the residual stream and sub-layers' outputs"
            + (f" ({structure.notes[0]})" if structure.notes else "")
        )
    groups = _grouped(structure, sums, reads, root, inputs)
    facts: list[dict[str, object]] = [{}] * structure.num_layers
    for group in groups:
        for index in group.layers:
            facts[index] = _facts(group, _usual_kind(groups))
    ends = _ends(structure, groups, root, inputs, notes)
    notes += _shape_notes(groups)
    around = {name: _as_fact(value, _usual_kind(groups)) for name, value in ends.items() if value is not None}
    best = match(*_with_norms_before(facts, around))
    if reads:
        best = _wired(
            best,
            lambda spec: memories_of(spec, reads),
            "no wiring that Lamina knows reads these hidden states",
        )
    return Census(
        model_type=kind,
        num_layers=structure.num_layers,
        match=best,
        groups=tuple(groups),
        ends=ends,
        error=max(total.error for layer_sums in sums for total in layer_sums),
        notes=tuple(dict.fromkeys([*notes, *best.notes])),
    )


def _with_kinds(site: LayerSite, proved: LayerSite) -> LayerSite:
    pairs = zip(site.sublayers, proved.sublayers or site.sublayers, strict=True)
    return replace(site, sublayers=tuple(replace(sublayer, kind=part.kind) for sublayer, part in pairs))


def _several_streams(model: nn.Module, inputs: Mapping[str, torch.Tensor]) -> StreamLayers | None:
    width = getattr(_text_config(model), "hidden_size", None)
    if not isinstance(width, int) or "input_ids" not in inputs:
        return None
    try:
        streams = StreamLayers(model, inputs, width)
    except Exception:  # the model does not run on its main input alone, which ``structure_of`` reports
        return None
    return streams if streams.n > 1 else None


def _of_streams(
    streams: StreamLayers, model: nn.Module, inputs: Mapping[str, torch.Tensor], kind: str, notes: list[str]
) -> Census:
    sums, structure = streams.sums(), streams.structure()
    if bare := [index for index, layer_sums in enumerate(sums) if not layer_sums]:
        raise UserError(
            f"{type(streams.layers[0]).__name__} returns {streams.n} streams. In layer {ranges(bare)}, the streams are "
            "not weighted sums of earlier streams and a sub-layer's output with one weight per token for all channels"
        )
    groups: dict[object, LayerGroup] = {}
    for index, layer_sums in enumerate(sums):
        sites = [_site(streams, streams.entries[total.path], model, inputs) for total in layer_sums]
        layer_sums[:] = [replace(total, kind=site.kind) for total, site in zip(layer_sums, sites, strict=True)]
        key = str(
            [
                (total.kind, total.form(), total.norms, total.skip, total.skip_scale, total.pre_scale)
                for total in layer_sums
            ]
        )
        if key in groups:
            groups[key] = replace(groups[key], layers=(*groups[key].layers, index))
        else:
            inner = tuple(norm for site in sites for norm in inner_norms(site, model, inputs))
            groups[key] = LayerGroup(layers=(index,), sums=(), inner=inner, streams=tuple(layer_sums))
    kinds = [norm for layer_sums in sums for total in layer_sums for norm in total.norms.values()]
    norm = max(("rms", "layer"), key=kinds.count)
    ends = _ends(structure, [*groups.values()], model, inputs, notes)
    around = {name: _as_fact(value, norm) for name, value in ends.items() if value is not None}
    facts = [_stream_facts(layer_sums, norm, scalar) for layer_sums, scalar in zip(sums, streams.scalars, strict=True)]
    for group in groups.values():
        for index in group.layers:
            facts[index] |= _inner_facts(group, norm)
    best = match(facts, around)
    best = _wired(
        best,
        lambda spec: wirings_of(spec, sums, streams.n),
        f"Lamina does not know how the model combines its {streams.n} residual streams",
    )
    return Census(
        model_type=kind,
        num_layers=len(sums),
        match=best,
        groups=tuple(groups.values()),
        ends=ends,
        error=max(total.error for layer_sums in sums for total in layer_sums),
        notes=tuple(dict.fromkeys([*notes, *best.notes])),
    )


def _wired(best: Match, wirings: Callable[[str], list[str]], otherwise: str) -> Match:
    """Name the residual connections as the option ``wiring``. If no wiring fits, add ``otherwise`` as a difference."""
    exact = [] if best.differences else [best.placement, *best.others, *best.here]
    wired_as = {spec: wired for spec in exact or [best.placement] if (wired := wirings(spec))}
    if not wired_as:
        return replace(best, differences=(*best.differences, otherwise), others=(), here=())
    (spec, *same), *_ = wired_as.values()
    alike = {
        name: [spec for one in group for spec in wired_as.get(one, ())]
        for name, group in {"others": best.others, "here": best.here}.items()
    }
    return replace(best, placement=spec, others=(*same, *alike["others"]), here=tuple(alike["here"]))


def _site(streams: StreamLayers, entry: Point, model: nn.Module, inputs: Mapping[str, torch.Tensor]) -> SublayerSite:
    out = Point(entry.module, entry.path, "output", entry.call)
    calls = [call for call in streams.record.calls if call.is_norm and call.path.startswith(f"{entry.path}.")]
    norms = tuple(NormSite("inner_norm", call.module, call.path, call.number) for call in calls)
    kind = "attention" if mixes(entry, out, model, inputs) else "feed_forward"
    return SublayerSite(kind, out, None, norms, modules=((entry.path, entry.module),), entry=entry)


def _stream_facts(sums: Sequence[StreamSum], usual: str, scalar: bool) -> dict[str, object]:
    kinds = tuple(total.kind for total in sums)
    facts: dict[str, object] = {"order": SEQUENTIAL if kinds == SUBLAYERS else ", then ".join(kinds)}
    for part, total in zip(SUBLAYERS, (sums[0], sums[-1]), strict=True):
        scales = {"skip_scale": total.skip_scale, "pre_scale": total.pre_scale}
        facts |= {f"{part}.{name}": scale.value for name, scale in scales.items() if abs(scale.value - 1) > _SINKHORN}
        if total.mix in ("", "free"):  # M already contains a factor of all streams
            facts[f"{part}.skip_scale"] = UNSEEN_NUMBER
        facts[f"{part}.out_scale"] = learned_fact("scalar") if scalar else UNSEEN_NUMBER  # w already contains out_scale
        facts |= {f"{part}.{name}": _as_fact(kind, usual) for name, kind in total.norms.items()}
        facts[f"{part}.skip"] = total.skip
    return facts


def _with_norms_before(layers: list[dict[str, object]], ends: dict[str, object]) -> tuple[list[Facts], Facts]:
    """If the skip is normed (MiniMax), describe pre-norms and the final norm as post-norms of the previous layer."""
    layers, ends = [dict(facts) for facts in layers], dict(ends)
    if any(facts["attention.skip"] != NORMED or "feed_forward.post_norm" in facts for facts in layers):
        return [*layers], ends
    for index, facts in enumerate(layers):
        norm, facts["attention.skip"] = facts.pop("attention.pre_norm"), STREAM
        if index:
            layers[index - 1]["feed_forward.post_norm"] = norm
        elif ends["embedding_norm"] == "none":
            ends["embedding_norm"] = norm
    if ends["final_norm"] != "none":
        layers[-1]["feed_forward.post_norm"], ends["final_norm"] = ends["final_norm"], "none"
    return [*layers], ends


def _grouped(
    structure: Structure,
    sums: Sequence[Sequence[Sum]],
    reads: Sequence[Sequence[StateRead]],
    root: nn.Module,
    inputs: Mapping[str, torch.Tensor],
) -> list[LayerGroup]:
    """Group the layers with the same equations. Measure the inner norms in the first layer of each group."""
    indices: dict[object, list[int]] = {}
    for site, layer_sums in zip(structure.layers, sums, strict=True):
        inner = tuple(norm.role for sub in site.sublayers for norm in sub.norms if norm.role == "inner_norm")
        same = tuple(
            (
                tuple(sorted((name, _alike(factor)) for name, factor in total.skip.items())),
                tuple(
                    (b.kind, tuple(sorted(b.norms.items())), _alike(b.scale), _alike(b.pre_scale), b.beside)
                    for b in total.branches
                ),
                total.post_norm,
                total.coupling,
            )
            for total in layer_sums
        )
        read = tuple(replace(reading, error=0.0) for reading in reads[site.index]) if reads else ()
        indices.setdefault((same, inner, read), []).append(site.index)
    groups = []
    for members in indices.values():
        first = structure.layers[members[0]]
        inner_found = [norm for sub in first.sublayers for norm in inner_norms(sub, root, inputs)]
        worst = [
            replace(total, error=max(sums[i][number].error for i in members))
            for number, total in enumerate(sums[members[0]])
        ]
        read = tuple(reads[members[0]]) if reads else ()
        groups.append(LayerGroup(layers=tuple(members), sums=tuple(worst), inner=tuple(inner_found), reads=read))
    return groups


def _alike(factor: Factor | None) -> object:
    if factor is None:
        return None
    value = float(f"{factor.value:.5g}")  # equal factors of two layers differ by rounding
    return factor.learned if factor.learned != "no" else ("by channel" if factor.by_channel else value)


def _facts(group: LayerGroup, usual: str) -> dict[str, object]:
    """Convert the equations of a group of layers to the fields of a placement, such as "attention.pre_norm"."""
    found: dict[str, object] = {"order": SEQUENTIAL}
    terms = [(total, branch) for total in group.sums for branch in total.branches]
    if len(terms) > 1 and (terms[0][0] is terms[-1][0] or terms[-1][1].beside):
        found["order"] = PARALLEL
    elif len(terms) > 1 and terms[0][1].kind == "feed_forward" and terms[1][1].kind != "feed_forward":
        found["order"] = "feed-forward, then attention"
    places = dict(zip(("attention", "feed_forward"), (terms[0], terms[-1]), strict=True))
    for part, (total, branch) in places.items():
        found |= {f"{part}.{name}": value for name, value in _sublayer_facts(total, branch, usual).items()}
    if len(terms) > 2:
        middle = [_sublayer_facts(total, branch, usual) for total, branch in terms[1:-1]]
        if any(facts != _sublayer_facts(*terms[0], usual) for facts in middle):
            found["order"] = f"{len(terms)} sub-layers with different equations"
    way_norms = [found.pop(f"attention.{name}", "none") for name in NORMS_OF_WAYS[1:]]
    if any(norm != found.get("attention.pre_norm", "none") for norm in way_norms) and any(
        map("none".__ne__, way_norms)
    ):
        found["attention.pre_norm"] = " and ".join(map(str, way_norms))
    if (
        any(read.into == "attention" for read in group.reads)
        and abs(places["attention"][0].skip[STREAM].value) < _CLOSE
    ):
        found["attention.skip_scale"] = UNSEEN  # a block of Attention Residuals begins
    return found | _inner_facts(group, usual)


def _inner_facts(group: LayerGroup, usual: str) -> dict[str, object]:
    places = {norm.inside: norm.kind for norm in group.inner if norm.on == OUTPUT and norm.inside in SUBLAYERS}
    return {f"{part}.inner_norm": _as_fact(kind, usual) for part, kind in places.items()}


def _sublayer_facts(total: Sum, branch: BranchTerm, usual: str) -> dict[str, object]:
    names = tuple(total.skip)
    carries = {(STREAM,): STREAM, (BLOCK_INPUT,): BLOCK_INPUT, (STREAM, BLOCK_INPUT): "both"}
    factors = list(total.skip.values())
    facts: dict[str, object] = {"skip": carries.get(names, " and ".join(names))}
    scales = {"skip_scale": factors[0], "out_scale": branch.scale, "pre_scale": branch.pre_scale}
    if len({_alike(factor) for factor in factors}) > 1:
        facts["skip"] = " + ".join(f"{factor}{name}" for name, factor in total.skip.items())
        del scales["skip_scale"]
    if total.coupling != "none":
        facts["coupling"] = total.coupling
        del scales["skip_scale"]
    for name, factor in scales.items():
        if factor is None:
            facts[name] = "another tensor"
        elif factor.learned != "no":
            facts[name] = learned_fact(factor.learned)
        elif factor.by_channel:
            facts[name] = "by channel"
        elif abs(factor.value - 1.0) > _CLOSE:
            facts[name] = factor.value
    norms = {**branch.norms, **({"post_norm": total.post_norm} if total.post_norm else {})}
    return facts | {position: _as_fact(kind, usual) for position, kind in norms.items()}


def _usual_kind(groups: Sequence[LayerGroup]) -> str:
    """Return the most frequent kind of norm, rms or layer. Placements call this kind "norm"."""
    counts: dict[str, int] = {}
    for group in groups:
        for total in group.sums:
            for kind in (*(k for b in total.branches for k in b.norms.values()), total.post_norm):
                if kind in ("rms", "layer"):
                    counts[kind] = counts.get(kind, 0) + len(group.layers)
    return max(counts, key=lambda kind: counts[kind], default="rms")


def _as_fact(value: object, usual: str) -> object:
    if value == usual:
        return "norm"
    words = {"layer": "layer norm", "rms": "rms norm"}
    if isinstance(value, str) and value.startswith("group of "):
        return f"norm over {value.removeprefix('group of ')} groups"
    return words.get(value, value) if isinstance(value, str) else value


def _ends(
    structure: Structure,
    groups: Sequence[LayerGroup],
    root: nn.Module,
    inputs: Mapping[str, torch.Tensor],
    notes: list[str],
) -> dict[str, object]:
    facts: dict[str, object] = {"embedding_norm": "none", "embedding_scale": None, "final_norm": "none"}
    points = {("x0", ""): structure.layers[0].input}
    sites = {"embedding_norm": structure.embedding_norm, "final_norm": structure.final_norm}
    for name, site in sites.items():
        if site is not None:
            points |= {(name, "input"): site.input, (name, "output"): site.output}
    tensors: dict[tuple[str, str], torch.Tensor] = {}

    def see(key: tuple[str, str], tensor: torch.Tensor) -> None:
        tensors[key] = tensor.detach().double().flatten(0, -2)

    with torch.no_grad(), observe(points, see, root=root):
        run(root, inputs)
    for name, site in sites.items():
        if site is not None:
            x, y = (tensors.get((name, side)) for side in ("input", "output"))
            facts[name] = "norm" if x is None or y is None else norm_kind(site.module, x, y)
    first = tensors.get(("embedding_norm", "input"), tensors["x0", ""])
    table = getattr(structure.embedding, "weight", None)
    if isinstance(table, torch.Tensor) and "input_ids" in inputs and table.shape[-1] == first.shape[-1]:
        rows = table.detach().double()[inputs["input_ids"]].flatten(0, -2)
        (factor,), error = combination(first, [rows], by_channel=False)
        if error <= 1e-4:
            scale, root_of_width = float(factor), math.sqrt(structure.hidden_size)
            facts["embedding_scale"] = 1.0 if abs(scale - 1.0) <= _CLOSE else float(f"{scale:.6g}")
            if abs(scale / root_of_width - 1.0) <= 1e-3:
                facts["embedding_scale"] = "sqrt_hidden_size"
        else:
            notes.append(
                "the first layer's input is not the token's embedding multiplied by a number. The input may include "
                "position embeddings"
            )
    return facts | _head_norms([norm for group in groups for norm in group.inner], notes)


def _head_norms(inner: Iterable[InnerNorm], notes: list[str]) -> dict[str, object]:
    scopes: dict[str, set[str]] = {QUERY: set(), KEY: set(), VALUE: set()}
    for norm in inner:
        if norm.on in scopes and norm.inside == "attention" and norm.scope != "latent":
            scopes[norm.on].add(norm.scope)
    for norm in inner:
        if norm.scope == "latent" and norm.on in scopes:
            notes.append(
                "the attention has a norm on a low-rank state. Lamina counts this norm as a part of the attention"
            )
    q, k, v = (next(iter(norms)) if len(norms) == 1 else "several" if norms else "off" for norms in scopes.values())
    if q != k:
        notes.append(f"the norm on queries is {q!r}, and the norm on keys is {k!r}")
    return {"qk_norm": q if q == k else "several", "v_norm": v}


def _shape_notes(groups: Sequence[LayerGroup]) -> list[str]:
    notes = []
    for group in groups:
        terms = [branch for total in group.sums for branch in total.branches]
        if len(terms) != 2:
            kinds = ", ".join(branch.kind.replace("_", "-") for branch in terms)
            notes.append(f"layer {ranges(group.layers)} has {len(terms)} sub-layer{'s' * (len(terms) != 1)}: {kinds}")
        elif all(branch.scale is not None and abs(branch.scale.value) < ROUNDING for branch in terms):
            notes.append(
                f"layer {ranges(group.layers)} multiplies the sub-layers' outputs by 0, so Lamina cannot tell whether "
                "the sub-layers run in parallel"
            )
    return notes


def _inputs(model: nn.Module) -> dict[str, torch.Tensor]:
    """Return random tokens, or noise for a vision model. The number of tokens differs from every size in the config."""
    if reads_images(model):
        return batches_of(None, model, None, corpus="noise", sequences=_SEQUENCES)[0]
    text = _text_config(model)
    sizes = {v for v in vars(text).values() if isinstance(v, int)} if text is not None else set()
    size = token_rows(model) or _FEW_TOKENS
    most = getattr(text, "max_position_embeddings", None) or -1
    most = most if most > 0 else _LENGTHS[-1]  # -1 means no limit (XLNet)
    length = next((n for n in _LENGTHS if n not in sizes and n <= most), min(_LENGTHS[0], most))
    low = 6 if size > 16 else 0
    generator = torch.Generator().manual_seed(0)
    ids = torch.randint(low, size, (_SEQUENCES, length), generator=generator)
    return {"input_ids": ids.to(next(model.parameters()).device)}


def _text_config(model: nn.Module) -> PreTrainedConfig | None:
    config = getattr(model, "config", None)
    return backbone_of(config) if isinstance(config, PreTrainedConfig) else None


def _model_of(given: nn.Module | PreTrainedConfig | str | Path) -> tuple[nn.Module, list[str]]:
    if isinstance(given, nn.Module):
        refuse_meta(given)
        return given, []
    if isinstance(given, PreTrainedConfig):
        return _random_model(given)
    folder = Path(given).expanduser()
    if not folder.exists():
        if len(folder.parts) == 2 and not folder.is_absolute():  # OWNER/NAME on the hub: read only config.json
            return _random_model(read_config(folder, "model", weights=False))
        if str(given) not in transformers.CONFIG_MAPPING:
            refusal = unknown("model", str(given), transformers.CONFIG_MAPPING)
            raise UserError(f"{refusal}. You can also give a folder with config.json.")
        return _random_model(transformers.CONFIG_MAPPING[str(given)]())
    weights = (
        [file for kind in ("*.safetensors*", "*.bin*", "*.gguf") for file in folder.glob(kind)]
        if folder.is_dir()
        else []
    )
    if folder.is_dir() and (folder / "config.json").is_file() and not weights:
        return _random_model(read_config(folder, "model", weights=False))
    loaded = load(folder)
    return loaded.model, list(loaded.notes)


def _random_model(config: PreTrainedConfig) -> tuple[nn.Module, list[str]]:
    """Build a model with random weights from a configuration, and shrink a large configuration first."""
    note, count = "Lamina built the model from its configuration alone, with random weights", _size(config)
    fewer_layers = (
        f". The model has only {_FEW_LAYERS} layers and {_FEW_TOKENS} tokens in the vocabulary, so factors that depend "
        "on the depth differ from the original model's"
    )
    fewer_heads = ". The model has fewer heads, so factors that depend on the width differ from the original model's"
    for shrink, most, told in (
        (_smaller, _MANY_PARAMETERS, fewer_layers),
        (_narrower, _MANY_PARAMETERS, ""),
        (_with_fewer_heads, _MOST_PARAMETERS, fewer_heads),
    ):
        if count > most:
            config, note = shrink(config), note + told
            count = _size(config)
    if count > _MOST_PARAMETERS:
        raise UserError(
            f"model: {config.model_type!r} has {count:,} parameters even with {_FEW_LAYERS} layers. Give a folder "
            f"with the model's weights, or a configuration of at most {_MOST_PARAMETERS:,} parameters."
        )
    torch.manual_seed(0)
    with quiet():
        model = auto_class(config).from_config(config, dtype=torch.float32).eval()
    return stirred(model), [note]


def stirred(model: nn.Module) -> nn.Module:
    """Add noise to the model's gains, biases and scales, because a gain of 1 or a bias of 0 has no visible effect."""
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim <= 1:
                parameter.add_(0.1 * torch.randn(parameter.shape, generator=generator).to(parameter))
    return model


def _size(config: PreTrainedConfig) -> int:
    try:
        with torch.device("meta"), quiet():
            return sum(parameter.numel() for parameter in auto_class(config).from_config(config).parameters())
    except UserError:
        raise
    except Exception as error:
        raise UserError(
            f"model: {config.model_type!r} cannot be built ({shortened(one_line(error), 300)}). Give a folder with "
            "the model's weights."
        ) from error


def _smaller(config: PreTrainedConfig) -> PreTrainedConfig:
    small = copy.deepcopy(config)
    text = backbone_of(small)
    layers = getattr(text, "num_hidden_layers", None)
    if isinstance(layers, int):
        cut_config(small, range(min(layers, _FEW_LAYERS)), layers)
    for name, value in list(vars(text).items()):
        if name.endswith("_token_id") and isinstance(value, int):
            setattr(text, name, 0)
    if getattr(text, "vocab_size", None):
        text.vocab_size = min(text.vocab_size, _FEW_TOKENS)
    return small


def _with_fewer_heads(config: PreTrainedConfig) -> PreTrainedConfig:
    """Divide the numbers of heads and channels by 8, if all numbers are divisible by 8. A head keeps its width."""
    small = copy.deepcopy(config)
    text = backbone_of(small)
    heads, shared = text.num_attention_heads, getattr(text, "num_key_value_heads", None) or text.num_attention_heads
    if (
        heads % _FEWER == 0
        and text.hidden_size % _FEWER == 0
        and (shared % _FEWER == 0 or heads // _FEWER % shared == 0)
    ):
        text.num_attention_heads, text.hidden_size = heads // _FEWER, text.hidden_size // _FEWER
        if getattr(text, "num_key_value_heads", None):
            text.num_key_value_heads = shared // _FEWER if shared % _FEWER == 0 else shared
    return small


def _narrower(config: PreTrainedConfig) -> PreTrainedConfig:
    """Reduce the numbers of experts and feed-forward channels, because placements do not depend on these sizes."""
    small = copy.deepcopy(config)
    text = backbone_of(small)
    for name, value in list(vars(text).items()):
        if isinstance(value, int) and name.endswith(("intermediate_size", "ffn_hidden_size", "ffn_dim", "n_inner")):
            setattr(text, name, min(value, _FEW_CHANNELS))
        elif isinstance(value, int) and name.endswith(("num_experts", "local_experts", "routed_experts")):
            setattr(text, name, min(value, _FEW_EXPERTS))
    return small
