"""From a trace to the structure: which calls are layers, what each adds to the stream, and where."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

import torch
from torch import nn

from lamina.errors import UserError
from lamina.probes.structure.hooks import evaluating, takes_cache
from lamina.probes.structure.sites import FeedForward, LayerSite, NormSite, Point, Structure, SublayerSite, is_norm
from lamina.probes.structure.stream import TracedLayer, origin
from lamina.probes.structure.tracing import Call, Op, Trace, trace


def find_structure(model: nn.Module, inputs: Mapping[str, torch.Tensor], *, layers: str | None = None) -> Structure:
    """Find a model's layers by running it once on ``inputs`` (tiny ones: all tensors are held meanwhile).

    ``layers``: the path of the list of layers (``encoder.block``), if they cannot be found, or others are meant.

    Raises:
        UserError: if no layers are found; the message says what was searched for and how to name them.
    """
    if declared_structure(model) is not None:
        raise UserError(
            "model: its layers hand on several streams, or earlier states beside the stream, and the probes follow one "
            "(allowed: a model without a wiring)"
        )
    more = {"use_cache": False} if takes_cache(type(model)) else {}
    with evaluating(model):
        record = trace(model, {**inputs, **more})
    chains = _chains(record)
    calls = _named(model, record, layers) if layers else _choose(model, record, chains)
    resolved = [TracedLayer(call, record) for call in calls]
    width = record.shapes[calls[0].output][-1]
    notes = []
    strange = [i for i, layer in enumerate(resolved) if layer.breaks or not layer.additions]
    if strange:
        some = ", ".join(map(str, strange[:5])) + (f" and {len(strange) - 5} more" if len(strange) > 5 else "")
        notes.append(
            f"layer {some} adds something to the stream that no module hands over (it is computed or "
            "rearranged in between), so its sub-layers are left out; the states are whole"
        )
        for index in strange:
            resolved[index].additions.clear()
    first, last = calls[0], calls[-1]
    others = _outside_chains(chains, calls)
    if others and not layers:
        notes.append(
            f"{sum(map(len, others))} more layers ({others[0][0].path}, ...) lie outside of the chain that was found "
            f"at {first.path}; --layers PATH names the list of layers that is meant"
        )
    outside = [("other", call.module) for chain in others for call in chain]
    for call in record.calls:  # those that hold layers are left out
        if call.ended < first.began or call.began > last.ended:
            outside.append(("embedding" if call.ended < first.began else "readout", call.module))
    return Structure(
        layers=tuple(_site(i, layer) for i, layer in enumerate(resolved)),
        hidden_size=width,
        embedding=_asked(model, "get_input_embeddings"),
        embedding_norm=_outer_norm("embedding_norm", record, before=first),
        final_norm=_outer_norm("final_norm", record, after=last),
        head=_asked(model, "get_output_embeddings"),
        notes=notes,
        outside=tuple(outside),
    )


def declared_structure(model: nn.Module) -> Structure | None:
    """Return the structure of a Lamina model whose blocks hand on more than one stream; None of others.

    Whichever copy of Lamina's code the model runs: a checkpoint brings its own.
    """
    named = list(model.named_modules())
    mixers = {type(getattr(part, "mixer", None)).__name__ for _, part in named}  # Mamba's blocks have one, too
    blocks = [(path, part) for path, part in named if isinstance(getattr(part, "has_memory", None), bool)]
    if not blocks or not ("StreamMixer" in mixers or any(block.has_memory for _, block in blocks)):
        return None
    first = next((site for site in named if site[0].endswith("embedding_norm") and is_norm(site[1])), None)
    path, last = next((path, part) for path, part in named if type(part).__name__ == "Collapse")
    parts = dict(last.named_children())
    norm, reader = parts["norm"], parts.get("reader")
    end = None if reader is None else Point(reader, f"{path}.reader", "output")
    if end is not None and getattr(reader, "spec", {}).get("normed"):  # it norms some of the streams
        end = Point(last, path, "output")
    return Structure(
        layers=tuple(_declared_layer(i, path, block) for i, (path, block) in enumerate(blocks)),
        hidden_size=int(getattr(getattr(model, "config", None), "hidden_size", 0)),
        embedding=_asked(model, "get_input_embeddings"),
        embedding_norm=None if first is None else NormSite("embedding_norm", first[1], first[0]),
        final_norm=NormSite("final_norm", norm, f"{path}.norm") if is_norm(norm) else None,
        head=_asked(model, "get_output_embeddings"),
        notes=["The states are the mean of the model's streams." if "StreamMixer" in mixers else _ONE_OF_MEMORY],
        end=end,
    )


def _declared_layer(index: int, path: str, block: nn.Module) -> LayerSite:
    """Return a block of Lamina's; what its two sub-layers add is after an out_norm, before a factor or a write."""
    halves = {kind: block.get_submodule(kind) for kind in ("attention", "feed_forward")}
    sublayers: list[SublayerSite] = []
    for kind, half in halves.items():
        place = f"{path}.{kind}"
        last = "module" if half.out_norm is None else "out_norm"
        norms = [(name, part) for name, part in half.named_modules() if is_norm(part)]
        sublayers.append(
            SublayerSite(
                kind,
                contribution=Point(half.get_submodule(last), f"{place}.{last}", "output"),
                after=Point(half, place, "output", collapse=True),
                norms=tuple(NormSite("inner_norm" if "." in n else n, norm, f"{place}.{n}") for n, norm in norms),
                modules=((place, half),),
            )
        )
    parts = {**dict(block.named_children()), **dict(halves["attention"].named_children())}
    reads = parts.get("mixer") or parts.get("depth") or parts.get("sources")
    point = None if reads is None else Point(reads, f"{path}.reads", "output")
    return LayerSite(index, block, path, 0, tuple(sublayers), carries_more=True, reads=point)


_ONE_OF_MEMORY = "The states are the stream's; the earlier ones that the model remembers are not added to them."


def _chains(record: Trace) -> list[list[Call]]:
    """Return runs of calls that hand the stream on from one to the next, each after adding to it."""
    chains: list[list[Call]] = []
    same = _sources(record.ops)
    for family in _families(record):
        run: list[Call] = []
        for call in family:
            if run and origin(_stream_input(call, record), same) != origin(run[-1].output, same):
                chains.append(run)
                run = []
            run.append(call)
        chains.append(run)
    return chains


def _families(record: Trace) -> list[list[Call]]:
    """Return the calls of modules that add to a stream, by the call that holds them."""
    families: dict[int, list[Call]] = {}
    for call in record.calls:
        if call.parent is not None and _carries_stream(call, record):
            families.setdefault(id(call.parent), []).append(call)
    return list(families.values())


def _choose(model: nn.Module, record: Trace, chains: list[list[Call]]) -> list[Call]:
    """Return the chain that is the model's layers."""
    expected_count = _num_layers(model)
    exact = [chain for chain in chains if len(chain) == expected_count]
    if not exact:  # something is done to the stream between the layers (YOLOS adds position embeddings)
        exact = [f for f in _families(record) if len(f) == expected_count and len({type(c.module) for c in f}) == 1]
    # Of two of the same length the outer one: it holds the other.
    best = min(exact, key=lambda c: c[0].began) if exact else None
    if best is None and chains and expected_count is None:
        best = max(chains, key=lambda c: (len(c), -c[0].began))
    if best is None:
        lengths = ", ".join(str(len(c)) for c in chains[:6]) or "none"
        expected = "of any length" if expected_count is None else f"of {expected_count} (as many as the config has)"
        raise UserError(
            f"layers: none found in {type(model).__name__}: looked for a chain {expected} of modules that hand one "
            f"tensor on and add to it; found chains of {lengths} (allowed: --layers PATH, the path of the list of "
            f"layers{_suggest(model)})"
        )
    return best


def _outside_chains(chains: list[list[Call]], calls: list[Call]) -> list[list[Call]]:
    """Return the outermost chains of layers outside the chosen ones (a hierarchy of stages, a second tower)."""
    began, ended = calls[0].began, calls[-1].ended
    outside = [c for c in chains if len(c) > 1 and (c[-1].ended < began or c[0].began > ended)]
    others = [call for chain in outside for call in chain]
    return [c for c in outside if not any(o.began < c[0].began and c[-1].ended < o.ended for o in others)]


def _named(model: nn.Module, record: Trace, path: str) -> list[Call]:
    try:
        holder = model.get_submodule(path)
    except AttributeError:
        raise UserError(
            f"layers: no module {path!r} in {type(model).__name__}{_suggest(model, allowed=True)}"
        ) from None
    members = {id(m) for m in holder.children()} if isinstance(holder, nn.ModuleList) else {id(holder)}
    calls = [call for call in record.calls if id(call.module) in members]
    calls = [call for call in calls if _stream_input(call, record) is not None and call.output >= 0]
    if not calls:
        raise UserError(f"layers: the modules of {path!r} are not called on a stream{_suggest(model, allowed=True)}")
    widths = {record.shapes[call.output][-1] for call in calls}
    if len(widths) > 1:
        raise UserError(
            f"layers: those of {path!r} have several widths {sorted(widths)} (allowed: layers of one width)"
        )
    return calls


def _suggest(model: nn.Module, allowed: bool = False) -> str:
    lists = [n for n, m in model.named_modules() if isinstance(m, nn.ModuleList) and len(m) > 0 and n]
    first = ", ".join(sorted(lists, key=lambda n: (n.count("."), n))[:6])
    text = f"; its lists of modules: {first}" if first else ""
    return f" (allowed: the path of a list of layers{text})" if allowed else text


def _num_layers(model: nn.Module) -> int | None:
    config = getattr(model, "config", None)
    if config is None:
        return None
    text = config.get_text_config() if hasattr(config, "get_text_config") else config
    depths = getattr(text, "depths", None)  # of a hierarchy of stages: its num_hidden_layers counts the stages
    if isinstance(depths, list | tuple) and depths and all(isinstance(depth, int) for depth in depths):
        return sum(depths)
    value = getattr(text, "num_hidden_layers", None)
    return value if isinstance(value, int) else None


def _carries_stream(call: Call, record: Trace) -> bool:
    """Return whether a call takes a stream and hands one on of the same shape, having added to it."""
    x = _stream_input(call, record)
    if x is None or call.output < 0 or call.is_norm or call.output == x:
        return False
    if not record.floating[call.output] or record.shapes[call.output] != record.shapes[x]:
        return False
    return bool(TracedLayer(call, record, describe=False).additions)


def _stream_input(call: Call, record: Trace) -> int | None:
    """Return the value that a layer takes as its stream: its first tensor of the output's shape."""
    if call.output < 0:
        return None
    shape = record.shapes[call.output]
    candidates = [
        v for v in call.inputs.values() if record.floating[v] and record.shapes[v] == shape and len(shape) >= 2
    ]
    return candidates[0] if candidates else None


def _sources(ops: Iterable[Op]) -> dict[int, int]:
    return {op.outputs[0]: op.inputs[0] for op in ops if op.kind in ("same", "scale") and op.inputs and op.outputs}


def _outer_norm(role: str, record: Trace, *, before: Call | None = None, after: Call | None = None) -> NormSite | None:
    """Return the norm whose output is the first layer's stream, or that reads the last layer's."""
    same = _sources(record.ops)  # DeBERTa multiplies the normed embedding by the padding's mask
    for call in record.calls:
        if not call.is_norm:
            continue
        reads = {origin(v, same) for v in call.inputs.values()}
        adjacent = (
            before is not None
            and call.ended < before.began
            and origin(call.output, same) == origin(_stream_input(before, record), same)
        ) or (after is not None and call.began > after.ended and origin(after.output, same) in reads)
        if adjacent:
            return NormSite(role, call.module, call.path, call.number)
    return None


def _asked(model: nn.Module, method: str) -> nn.Module | None:
    """Return a part of a transformers model; None for a plain module, and where transformers knows no such part."""
    try:
        return getattr(model, method)()
    except (AttributeError, NotImplementedError):
        return None


def _site(index: int, layer: TracedLayer) -> LayerSite:
    sublayers: list[SublayerSite] = []
    for addition in layer.additions:
        for branch in addition.branches:
            source, down, feed_forward = branch.source, branch.down, None
            if branch.kind == "feed_forward" and down is not None and branch.up:
                up = tuple((c.path, c.module) for c in branch.up)
                post = Point(down.module, down.path, "input", down.number, None, next(iter(down.inputs)))
                feed_forward = FeedForward(up, (down.path, down.module), branch.pre, post)
            sublayers.append(
                SublayerSite(
                    kind=branch.kind,
                    contribution=Point(source.module, source.path, "output", source.number, branch.factor),
                    after=addition.after,
                    norms=tuple(NormSite(role, norm.module, norm.path, norm.number) for role, norm in branch.norms),
                    feed_forward=feed_forward,
                    modules=tuple((c.path, c.module) for c in branch.modules),
                    entry=layer.entry_of(branch),
                )
            )
    call = layer.call
    return LayerSite(index, call.module, call.path, call.number, tuple(sublayers), layer.argument)
