"""Change the norm placement of a trained model. Lamina keeps the weights and fits the new norms on a text.

Lamina runs the old model on the text, and then the new model, one sub-layer at a time. The gains of each new norm are
least-squares fits to the old model's tensor in the same position. Where the new placement has no norm, or another
factor on the skip, Lamina rescales projection weights instead.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import TypeAlias, TypedDict, cast, overload

import torch
from torch import nn
from transformers import PreTrainedModel
from transformers import initialization as init

from lamina.errors import UserError
from lamina.jobs.files import write_json
from lamina.modeling.backbones.conversion import (
    copy_buffers,
    from_transformers,
    read_config,
    saved,
    written_model,
)
from lamina.modeling.configuration_lamina import LaminaConfig
from lamina.modeling.modeling_lamina import LaminaForCausalLM
from lamina.modeling.parts import body_of, sublayers, temporary_hooks
from lamina.modeling.wiring_lamina import LaminaNorm, Residual, skip_source
from lamina.placements import Plan, resolve
from lamina.probes.engine.measure import make_context
from lamina.probes.engine.probe_settings import ProbeSettings
from lamina.probes.structure.hooks import Args, Kwargs, forward, forwards, stream_of
from lamina.surgery.prune import mean_loss

Factor: TypeAlias = torch.Tensor | float  # for each channel, or for all channels
_FOLDED = 1e-3  # the allowed relative error after a factor is moved into a module's weights
_TINY = 1e-30


class Grafting(TypedDict):
    """The content of grafting.json. Losses are in nats per token, on text that Lamina did not use to fit the gains."""

    source: str
    placement_before: str
    placement: str
    fitted: list[str]  # the norms with fitted gains
    folded: list[str]  # the modules with rescaled weights
    lost: list[str]  # the tensors that the new model does not have
    loss_before: float  # of the old model
    loss: float
    tokens: int  # on which Lamina measured the losses


def graft(source: str, output: Path, settings: ProbeSettings, *, placement: str, overwrite: bool = False) -> Grafting:
    """Write a trained model with another norm placement into a new folder (see ``lamina.api.models.graft``).

    The first half of the text fits the gains, and the second half measures the losses. After an error, ``output`` stays
    unchanged.
    """
    stored = read_config(source, field="model").dtype
    context = make_context(source, settings)
    context.warn()
    model = cast(PreTrainedModel, context.model)
    old = model if isinstance(model.config, LaminaConfig) else from_transformers(model)
    if not isinstance(old, LaminaForCausalLM):
        raise UserError(f"model: a {type(old).__name__} is not a decoder. Choose a decoder.")
    before = Plan.from_dict(old.config.plan or {})
    plan = resolve(placement, before.num_layers)
    for which, name, plan_of in (("model", source, before), ("placement", placement, plan)):
        if plan_of.streams > 1 or plan_of.has_memory:
            more = "layers that read earlier states" if plan_of.has_memory else "several residual streams"
            raise UserError(f"{which}: {name!r} has {more}. Choose a placement with one residual stream.")
    blocks = torch.cat([batch["input_ids"] for batch in context.batches])
    if len(blocks) < 2:
        raise UserError(
            "sequences: 1 block of text is too short. Give 2 or more: one block to fit the gains, and one to "
            "measure the losses."
        )
    half = len(blocks) // 2
    new, told = grafted(old, plan, blocks[:half].to(context.device))
    held = copy.copy(context)
    held.batches = [{"input_ids": part} for part in blocks[half:].split(settings.batch_size)]
    losses = []
    for each in (old, new):
        held.model = held.base = each
        losses.append(mean_loss(held))
    record: Grafting = {
        "source": source,
        "placement_before": before.placement,
        "placement": placement,
        **told,
        "loss_before": losses[0][0],
        "loss": losses[1][0],
        "tokens": losses[0][1],
    }
    with written_model(source, output, overwrite=overwrite) as draft:
        saved(new, draft, stored)
        write_json(draft / "grafting.json", record)
    return record


class Told(TypedDict):
    fitted: list[str]
    folded: list[str]
    lost: list[str]


@torch.no_grad()
def grafted(old: LaminaForCausalLM, plan: Plan, ids: torch.Tensor) -> tuple[LaminaForCausalLM, Told]:
    """Return the model with another norm placement, fitted on ``ids`` [sequences, tokens], and what changed."""
    old = old.eval()
    config = copy.deepcopy(old.config)
    assert isinstance(config, LaminaConfig)
    config.plan = plan.to_dict()
    try:
        with init.no_init_weights():
            new = LaminaForCausalLM._from_config(config, dtype=old.dtype)
    except ValueError as error:  # for example, the attention already has a norm on queries
        raise UserError(f"placement: {error}") from error
    assert isinstance(new, LaminaForCausalLM)
    tensors, new_tensors = old.state_dict(), new.state_dict()
    both = {
        name: tensors[name]
        for name, tensor in new_tensors.items()
        if name in tensors and tensors[name].shape == tensor.shape
    }
    new.load_state_dict({**new_tensors, **both})
    _keep_values(old, new)
    copy_buffers({name: name for name, _ in old.named_buffers()}, old, new)
    nn.Module.to(new, old.device)
    new.tie_weights()
    new.generation_config = copy.deepcopy(old.generation_config)
    told: Told = {"fitted": [], "folded": [], "lost": sorted(tensors.keys() - new_tensors.keys())}
    _Matching(old, new.eval(), told).run(ids)
    for names in (told["fitted"], told["folded"]):  # a module that runs again repeats the names of its norms
        names[:] = dict.fromkeys(names)
    return new, told


def _keep_values(old: LaminaForCausalLM, new: LaminaForCausalLM) -> None:
    """Copy the old model's factors into learned scales. Subtract 1 from gains if the new norms store them minus 1."""
    modules = dict(old.named_modules())
    for name, module in new.named_modules():
        before = modules.get(name)
        if isinstance(module, Residual) and isinstance(before, Residual) and module.coupling == "none":
            values = {
                "skip_scale": before.skip_factor(),
                "out_scale": before.branch_factor(),
                "pre_scale": before.pre_scale,
            }
            for scale, value in values.items():
                if isinstance(parameter := getattr(module, scale), nn.Parameter):
                    now = torch.as_tensor(value).to(parameter)
                    parameter.copy_(now if now.numel() in (1, parameter.numel()) else now.mean())
        elif isinstance(module, LaminaNorm) and isinstance(before, LaminaNorm) and module.weight is not None:
            module.weight.add_(_offset(before) - _offset(module))


def _offset(norm: nn.Module) -> float:
    return 1.0 if getattr(norm, "zero_centered", False) else 0.0


def _is_new(norm: nn.Module | None, before: nn.Module | None) -> bool:
    """Return whether a norm needs a fit, because the old model has no norm of the same type in the same position."""
    if norm is None or before is None:
        return norm is not None
    return type(norm) is not type(before) or getattr(norm, "groups", 1) != getattr(before, "groups", 1)


@dataclass(frozen=True)
class _Seen:
    """Three tensors of a sub-layer in the old model: the module's input, the branch, and the output."""

    entry: torch.Tensor
    branch: torch.Tensor
    behind: torch.Tensor


@dataclass
class _Old:
    """The old model's hidden states on the text: x^0, the states in each sub-layer, and the output head's input."""

    first: list[torch.Tensor] = field(default_factory=list)
    entries: list[torch.Tensor] = field(default_factory=list)
    branches: list[torch.Tensor] = field(default_factory=list)
    behind: list[torch.Tensor] = field(default_factory=list)
    read: list[torch.Tensor] = field(default_factory=list)

    def run(self, model: LaminaForCausalLM, ids: torch.Tensor) -> list[_Seen]:
        residuals = [residual for _, _, residual in sublayers(body_of(model))]
        with temporary_hooks() as hooks:
            for residual in residuals:
                hooks.append(residual.module.register_forward_pre_hook(_keep(self.entries), with_kwargs=True))
                hooks.append(residual.register_terms_hook(lambda terms: self.branches.append(terms.sum - terms.skip)))
                hooks.append(residual.register_forward_hook(lambda *call: self.behind.append(call[2])))
            hooks.append(residuals[0].register_forward_pre_hook(_keep(self.first), with_kwargs=True))
            hooks.append(model.lm_head.register_forward_pre_hook(_keep(self.read), with_kwargs=True))
            forward(model, {"input_ids": ids})
        return [_Seen(*each) for each in zip(self.entries, self.branches, self.behind, strict=True)]


def _keep(found: list[torch.Tensor]) -> Callable[[nn.Module, Args, Kwargs], None]:
    return lambda module, args, kwargs: found.append(next(x for x in (*args, *kwargs.values()) if torch.is_tensor(x)))


class _Matching:
    """A forward pass of the new model that fits each new norm and factor just before its first use.

    ``scale`` is the ratio of the new residual stream to the old residual stream. A post_norm resets this ratio to 1.
    """

    def __init__(self, old: LaminaForCausalLM, new: LaminaForCausalLM, told: Told):
        self.old, self.new, self.told = old, new, told
        self.scale: Factor = 1.0
        self.names = {module: name for name, module in new.named_modules()}
        self.ends_in_norm = [isinstance(body_of(model).norm, LaminaNorm) for model in (old, new)]

    def run(self, ids: torch.Tensor) -> None:
        old, new = body_of(self.old), body_of(self.new)
        seen = _Old()
        pairs = zip(seen.run(self.old, ids), sublayers(old), sublayers(new), strict=True)
        steps = {b: _Step(self, a, b, module_name, seen.read[0]) for module_name, (_, _, a), (_, _, b) in pairs}
        last = list(steps.values())[-1]
        last.is_last = True
        modules = dict(self.old.named_modules())
        placed = {norm for step in steps for norm in (step.pre_norm, step.out_norm, step.post_norm)}
        with temporary_hooks() as hooks, forwards({residual: step.forward for residual, step in steps.items()}):
            for name, norm in self.new.named_modules():
                if not isinstance(norm, LaminaNorm) or norm in placed or not _is_new(norm, modules.get(name)):
                    continue
                # A norm inside a module should change its input little. Other norms should match the old states.
                wanted = {new.embedding_norm: seen.first[0], new.norm: seen.read[0]}.get(norm)
                hooks.append(norm.register_forward_pre_hook(partial(self.fit_before, wanted=wanted)))
            if new.embedding_norm is None:
                self.scale = float(new.embedding_scale) / float(old.embedding_scale)
            if new.embedding_norm is None and old.embedding_norm is not None:  # use the mean length instead of the norm
                table = new.get_input_embeddings()(ids) * new.embedding_scale
                self.scale = float(ratio(seen.first[0].flatten(), table.flatten()))
            forward(self.new, {"input_ids": ids})

    def fit_before(self, norm: nn.Module, args: Args, wanted: torch.Tensor | None) -> None:
        self.fit(norm, args[0], args[0] if wanted is None else wanted)

    def fit(self, norm: nn.Module, x: torch.Tensor, wanted: torch.Tensor) -> None:
        """Set a norm's gain and bias so that the output is close to ``wanted``. Skip a norm without a gain."""
        weight, bias = getattr(norm, "weight", None), getattr(norm, "bias", None)
        if not isinstance(weight, torch.Tensor):
            return
        weight.fill_(1.0 - _offset(norm))
        if isinstance(bias, torch.Tensor):
            bias.zero_()
        plain, aim = norm.forward(x).double().flatten(0, -2), wanted.double().flatten(0, -2)
        center = plain.mean(0) if isinstance(bias, torch.Tensor) else torch.zeros_like(plain[0])
        middle = aim.mean(0) if isinstance(bias, torch.Tensor) else torch.zeros_like(plain[0])
        gain = ratio(plain - center, aim - middle)
        weight.copy_(gain - _offset(norm))
        if isinstance(bias, torch.Tensor):
            bias.copy_(middle - gain * center)
        self.told["fitted"].append(self.names[norm])

    def scale_gain(self, norm: LaminaNorm, factor: Factor) -> None:
        if is_one(factor):
            return
        if norm.weight is None:
            name = self.names[norm]
            raise UserError(
                f"placement: {name} has no gain that Lamina could multiply by a factor. Choose a placement with "
                "learnable gains."
            )
        norm.weight.copy_((norm.weight + _offset(norm)) * factor - _offset(norm))
        if isinstance(bias := getattr(norm, "bias", None), torch.Tensor):
            bias.mul_(factor)
        self.told["folded"].append(self.names[norm])


class _Step:
    """A sub-layer of the new model. ``forward`` computes Residual.forward, and fits each norm before its use."""

    def __init__(self, matching: _Matching, old: Residual, new: Residual, seen: _Seen, read: torch.Tensor):
        self.matching, self.old, self.new, self.seen, self.read = matching, old, new, seen, read
        self.is_last = False

    def forward(self, x: torch.Tensor, block_input: torch.Tensor | None = None, **kwargs: object) -> torch.Tensor:
        new, old, matching = self.new, self.old, self.matching
        # the aimed ratio of the new sum to the old sum
        grown = over(new.skip_factor(), old.skip_factor()) * matching.scale
        factor = over(grown * as_factor(old.branch_factor()), new.branch_factor())
        hidden = self._entry(x, kwargs)
        branch = self._branch(hidden, kwargs, factor, over(self.seen.branch * grown, new.branch_factor()))
        total = new.scale_skip(skip_source(new.skip, x, block_input)) + branch * new.branch_factor()
        if new.post_norm is None:
            gone = old.post_norm is not None
            matching.scale = float(ratio(self.seen.behind.flatten(), total.flatten())) if gone else grown
            return total
        # in a model without a final norm, the last post_norm has the role of the final norm
        was, ends = (self.is_last and not ends_in_norm for ends_in_norm in matching.ends_in_norm)
        if _is_new(new.post_norm, old.post_norm) or was != ends:
            matching.fit(new.post_norm, total, self.read if ends else self.seen.behind)
        matching.scale = 1.0
        return new.post_norm(total)

    def _entry(self, x: torch.Tensor, kwargs: Kwargs) -> torch.Tensor:
        """Return the module's input. If only the old model has a norm here, rescale the first projections' weights."""
        new, old, matching = self.new, self.old, self.matching
        factor = over(old.pre_scale, new.pre_scale)
        if new.pre_norm is not None:
            if _is_new(new.pre_norm, old.pre_norm):
                matching.fit(new.pre_norm, x, over(self.seen.entry, new.pre_scale))
            else:
                matching.scale_gain(new.pre_norm, factor)
            return new.pre_norm(x) * new.pre_scale
        hidden = x * new.pre_scale
        if old.pre_norm is not None:
            factor = ratio(hidden.flatten(0, -2), self.seen.entry.flatten(0, -2))
        else:
            factor = over(factor, matching.scale)
        if not is_one(factor):
            expected = self._run(hidden * factor, kwargs)
            for linear in self._linears(hidden, kwargs, lambda given, made: given.data_ptr() == hidden.data_ptr()):
                linear.weight.mul_(factor)
            self._check(expected, self._run(hidden, kwargs))
        return hidden

    def _branch(self, hidden: torch.Tensor, kwargs: Kwargs, factor: Factor, wanted: torch.Tensor) -> torch.Tensor:
        """Return the branch before the sum. If only the old model has a norm or factor here, rescale the weights."""
        new, old, matching = self.new, self.old, self.matching
        output = self._run(hidden, kwargs)
        if new.out_norm is not None:
            if _is_new(new.out_norm, old.out_norm):
                matching.fit(new.out_norm, output, wanted)
            else:
                matching.scale_gain(new.out_norm, factor)
            return new.out_norm(output)
        if old.out_norm is not None:
            factor = ratio(output.flatten(0, -2), wanted.flatten(0, -2))
        if is_one(factor):
            return output
        for linear in self._linears(hidden, kwargs, lambda given, made: torch.equal(made, output)):
            linear.weight.mul_(factor[:, None] if isinstance(factor, torch.Tensor) and factor.ndim else factor)
            if linear.bias is not None:
                linear.bias.mul_(factor)
        scaled = self._run(hidden, kwargs)
        self._check(output * factor, scaled)
        return scaled

    def _run(self, hidden: torch.Tensor, kwargs: Kwargs) -> torch.Tensor:
        return stream_of(self.new.module(hidden, **kwargs)).clone()

    def _linears(
        self, hidden: torch.Tensor, kwargs: Kwargs, belongs: Callable[[torch.Tensor, torch.Tensor], bool]
    ) -> list[nn.Linear]:
        linears: list[nn.Linear] = []

        def see(linear: nn.Linear, args: Args, output: torch.Tensor) -> None:
            if belongs(args[0], output) and linear not in linears:
                linears.append(linear)

        with temporary_hooks() as hooks:
            hooks += [m.register_forward_hook(see) for m in self.new.module.modules() if isinstance(m, nn.Linear)]
            self.new.module(hidden, **kwargs)
        return linears

    def _check(self, expected: torch.Tensor, actual: torch.Tensor) -> None:
        name = self.matching.names[self.new.module]
        if float((expected - actual).abs().max()) > _FOLDED * float(expected.abs().max()):
            raise UserError(
                f"placement: Lamina cannot move a factor into the weights of {name}. Choose a placement that "
                "normalizes the module's input and output."
            )
        self.matching.told["folded"].append(name)


def ratio(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    """Return the factors f that minimize the squared error of f * x against y, over the first axis."""
    x, y = x.double(), y.double()
    return ((x * y).sum(0) / x.pow(2).sum(0).clamp_min(_TINY)).float()


def as_factor(value: Factor) -> Factor:
    return value.detach() if isinstance(value, torch.Tensor) else value


@overload
def over(value: torch.Tensor, divisor: Factor) -> torch.Tensor: ...
@overload
def over(value: float, divisor: Factor) -> Factor: ...
@overload
def over(value: Factor, divisor: Factor) -> Factor: ...
def over(value: Factor, divisor: Factor) -> Factor:
    return as_factor(value) / as_factor(divisor)


def is_one(factor: Factor) -> bool:
    return bool((factor == 1).all()) if isinstance(factor, torch.Tensor) else factor == 1.0
