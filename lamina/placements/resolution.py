"""From a placement's name, or a file, and its options to the plan: ``resolve``."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

from lamina.core import specs
from lamina.core.scaling_schemes import DEPTH_SCHEMES
from lamina.core.values import text, whole_number
from lamina.errors import UserError, nearest, shortened
from lamina.placements.custom import SUFFIXES, load
from lamina.placements.plan import SUBLAYERS, Layer, Norm, Plan, Sublayer
from lamina.placements.registry import Placement, as_written, get
from lamina.placements.wirings import named_wiring

# The fields of a sub-layer that act inside its branch, and those of a plan that act before the first block, after the
# last or inside the modules. All others act on the stream.
IN_THE_BRANCH = (
    *("pre_norm", "inner_norm", "out_norm", "pre_scale", "pre_scale_learned", "out_scale", "out_scale_learned"),
    *("weight_gain", "gate_gain"),
)
AT_THE_ENDS = (
    *("placement", "layers", "final_norm", "embedding_norm", "embedding_scale", "qk_norm", "v_norm", "qkv_norm"),
    *("initialization", "options"),
)


def parse_spec(spec: str) -> tuple[Placement | str, dict[str, object]]:
    """Split ``"name(option=value, ...)"`` into the name, or the placement that a file holds, and the options."""
    target, options = specs.parse(spec, "placement")
    path = Path(target)
    return (load(path) if path.suffix in SUFFIXES else target), options


def split_specs(text: str) -> list[str]:
    """Return the specs of a comma-separated list; commas inside an option's brackets stay."""
    return specs.split(text, "placement")


def _scheme_and_options(spec: str, /, **more: object) -> tuple[Placement, dict[str, object]]:
    target, options = parse_spec(spec)
    written = {option: as_written(option, value) for option, value in {**options, **more}.items()}
    if str(written.get("wiring")).endswith(".py"):
        named_wiring(str(written["wiring"]))  # the file may register the norm that another option names
    return (get(target) if isinstance(target, str) else target), written


def find(spec: str) -> Placement:
    """Return the placement that a spec names, without its options. Raises UserError that suggests the nearest name."""
    return _scheme_and_options(spec)[0]


def check_spec(spec: str) -> None:
    """Raise UserError for an unknown placement, an unknown option, or a value that the option does not take."""
    _check_options(*_scheme_and_options(text("placement", spec)))


def resolve(name: str, num_layers: int, **options: object) -> Plan:
    """Return the plan of a placement for ``num_layers`` blocks (each an attention and a feed-forward sub-layer).

    ``name`` is a registered name, a YAML or Python file with a placement of the user's own, or either of them with
    options in brackets: ``"mix_ln(alpha=0.5, final_norm=true)"``. Raises UserError for an unknown name, an unknown
    option (suggesting the nearest) and a value that the option does not take.
    """
    whole_number("num_layers", num_layers)
    scheme, options = _scheme_and_options(text("placement", name), **options)
    _check_options(scheme, options)
    own = {option.name for option in scheme.options}
    plan = scheme.make(num_layers, **{k: v for k, v in options.items() if k in own})
    if not isinstance(plan, Plan):
        raise UserError(f"placement {scheme.name!r}: it makes {shortened(repr(plan), 200)} (allowed: a Plan)")
    if plan.num_layers != num_layers:
        raise UserError(f"placement {scheme.name!r}: its plan has {plan.num_layers} layers, num_layers is {num_layers}")
    plan = replace(
        plan, placement=scheme.name, initialization=plan.initialization or scheme.initialization, options=options
    )
    return _with_common(plan, {k: v for k, v in options.items() if k not in own and v is not None})


def _check_options(scheme: Placement, options: Mapping[str, object]) -> None:
    known = {option.name: option for option in scheme.all_options()}
    for option, value in options.items():
        if option not in known:
            raise UserError(
                f"placement {scheme.name!r} has no option {option!r}{nearest(option, known)} "
                f"(allowed: {', '.join(known)})"
            )
        known[option].check(scheme.name, value)


def _with_common(plan: Plan, options: Mapping[str, Any]) -> Plan:
    """Return the plan changed by the options that every placement takes; their values are checked already."""
    changes = {key: options[key] for key in ("embedding_scale", "qk_norm", "v_norm") if key in options}
    for key in ("final_norm", "embedding_norm"):
        if key in options and options[key] != (getattr(plan, key) is not None):
            changes[key] = _like_others(plan) if options[key] else None
    plan = replace(plan, **changes)
    if "wiring" in options:
        chosen = named_wiring(options["wiring"])
        try:
            plan = chosen.apply(plan, options.get("size"))
        except UserError as error:
            raise UserError(f"wiring: {options['wiring']!r} on {plan.placement!r}: {error}") from None
    elif "size" in options:
        raise UserError(f"placement {plan.placement!r}: option 'size' needs wiring")
    if "groups" in options and options.get("norm") != "group":
        raise UserError(f"placement {plan.placement!r}: option 'groups' needs norm='group'")
    if "norm" in options:
        kind = options["norm"]

        def change(norm: Norm) -> Norm:
            own = norm.groups if norm.kind == "group" else 8
            return replace(norm, kind=kind, groups=options.get("groups", own) if kind == "group" else 1)

        plan = map_norms(plan, change)
        if (plan.qk_norm, plan.v_norm) != ("off", "off"):
            plan = replace(plan, qkv_norm=change(plan.qkv_norm))
    return _scaled_by_depth(plan, options.get("depth_scaling"), options.get("base_depth"))


def _scaled_by_depth(plan: Plan, scheme: str | None, base_depth: int | None) -> Plan:
    """Return the plan with every branch divided by m^alpha, m = blocks / ``base_depth`` (arXiv 2505.01618, Table 1).

    Raises UserError for a plan that does more to the stream than add to it: the rules are for x + F(x) / m^alpha with
    any F. A norm or a scale on the stream acts in every block, so that changes of its gain multiply over the depth.
    """
    name = f"placement {plan.placement!r}:"
    if scheme is None or base_depth is None:
        if scheme == base_depth:
            return plan
        raise UserError(f"{name} options 'depth_scaling' and 'base_depth' need each other")
    whole_number("base_depth", base_depth)
    if more := next(_on_the_stream(plan), None):
        raise UserError(
            f"{name} depth_scaling {scheme!r} is for streams to which blocks only add, and {more} (allowed: a "
            "placement with norms and scales in its branches alone, or no depth scaling)"
        )
    factor = (plan.num_layers / base_depth) ** -DEPTH_SCHEMES[scheme]
    layers = [layer.map(lambda sub: replace(sub, out_scale=sub.out_scale * factor)) for layer in plan.layers]
    return replace(plan, layers=tuple(layers))


def _on_the_stream(plan: Plan) -> Iterator[str]:
    """Say where a plan does more to the stream than add branches to it."""
    records: list[tuple[str, Plan | Layer | Sublayer, tuple[str, ...]]] = [("the plan", plan, AT_THE_ENDS)]
    for index, layer in enumerate(plan.layers, start=1):
        records.append((f"block {index}", layer, SUBLAYERS))
        halves = (("attention", layer.attention), ("feed_forward", layer.feed_forward))
        records += [(f"the {part} of block {index}", half, IN_THE_BRANCH) for part, half in halves]
    for place, record, kept in records:
        for entry in fields(record):
            if entry.name not in kept and getattr(record, entry.name) != entry.default:
                yield f"{place} sets {entry.name}"


def _like_others(plan: Plan) -> Norm:
    """Return a norm of the kind that the plan has elsewhere."""
    norms = [norm for x in plan.layers for sub in (x.attention, x.feed_forward) for norm in sub.norms.values()]
    norms += [norm for norm in (plan.final_norm, plan.embedding_norm) if norm is not None]
    return Norm(kind=norms[0].kind, groups=norms[0].groups) if norms else Norm()


def map_norms(plan: Plan, change: Callable[[Norm], Norm]) -> Plan:
    """Return the plan with ``change`` applied to every norm in it, the embedding's and the last one included."""

    def changed(sub: Sublayer) -> Sublayer:
        return replace(sub, **{position: change(norm) for position, norm in sub.norms.items()})

    ends = {name: change(norm) for name in ("final_norm", "embedding_norm") if (norm := getattr(plan, name))}
    return replace(plan, layers=tuple(layer.map(changed) for layer in plan.layers), **ends)
