"""Attach the monitor's hooks to a model, to gradient clipping and to optimizers, and collect measurements."""

from __future__ import annotations

import contextlib
import inspect
import math
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import cast

import torch
from accelerate.state import GradientState
from torch import nn
from torch.autograd.graph import Node
from torch.distributed import ProcessGroup
from torch.utils._pytree import tree_leaves

from lamina.core.json_types import Json
from lamina.errors import UserError
from lamina.modeling.parts import temporary_hooks
from lamina.modeling.processes import Processes
from lamina.probes.structure.hooks import Kwargs, Output
from lamina.training.checkpointing.sharding import local_part
from lamina.training.monitor.batches import KeptBatches
from lamina.training.monitor.flat_parameters import FlatParameters
from lamina.training.monitor.followed import Arguments, Followed, Inputs, batch_of, follow, is_tokens, tensors_of
from lamina.training.monitor.gain_measures import GainSeries, gains_of, rows_of_gains
from lamina.training.monitor.graph_hooks import GraphHooks, Hook, is_compiled
from lamina.training.monitor.listeners import listening
from lamina.training.monitor.loop_signs import LoopSigns, StepSigns, kept_square, named
from lamina.training.monitor.loss_targets import is_own_mean
from lamina.training.monitor.parameter_measures import GradientNorms, UpdateRatios, found_parameters, largest_rate
from lamina.training.monitor.stream_measures import (
    ForwardMeter,
    PassNumbers,
    Spot,
    in_half,
    rows_of,
)
from lamina.training.monitor.writers import MODEL, Row, WatchSettings
from lamina.training.monitor.zero import ZeroGroups, is_deepspeeds, steps_of, zero_optimizer

_MARKED = 8192  # elements that tell one batch from another
_OUTPUT = "lamina_output"  # in the metadata of a node of the autograd graph
_NODES_OF_A_LOSS = 500
_ADDED_UP = (
    "the model ignores num_items_in_batch, so Trainer adds up the losses of a step's micro-batches instead of "
    "averaging them, and the gradient is too large. Set model.accepts_loss_kwargs = False before you create the Trainer"
)


def bare(model: nn.Module) -> nn.Module:
    """Unwrap a model (DDP, DataParallel, DeepSpeed, torch.compile)."""
    while True:
        if isinstance(inner := getattr(model, "_orig_mod", None), nn.Module):
            model = inner
        elif type(model).__name__ in ("DistributedDataParallel", "DataParallel", "DeepSpeedEngine"):
            model = model.module  # type: ignore[assignment]
        else:
            return model


def named_arguments(model: nn.Module, args: tuple, kwargs: Mapping[str, object]) -> dict[str, object]:
    """Return a call's arguments by the names in the forward method's signature."""
    named = dict(kwargs)
    with contextlib.suppress(TypeError, ValueError):
        signature = inspect.signature(model.forward)
        named = dict(signature.bind(*args, **kwargs).arguments)
        for name, parameter in signature.parameters.items():
            named |= named.pop(name, {}) if parameter.kind is parameter.VAR_KEYWORD else {}  # **kwargs, **batch
    return named


def called(module: nn.Module, args: tuple, kwargs: Mapping[str, object]) -> tuple[nn.Module, Arguments]:
    """Return the module whose forward method names the arguments, and the call's arguments by name."""
    inner = module
    while not tensors_of(arguments := named_arguments(inner, args, kwargs)):
        count = sum(1 for _ in inner.parameters())
        # a wrapper's forward may take only *args: look at the inner module with all parameters
        holders = [child for child in inner.children() if sum(1 for _ in child.parameters()) == count]
        if len(holders) != 1:
            return module, named_arguments(module, args, kwargs)
        inner = holders[0]
    return inner, arguments


def _numbers_of(inputs: Mapping[str, torch.Tensor]) -> torch.Tensor:
    """Return a batch's hash and three counts: labels equal to the token, labels equal to the next token, all labels."""
    tokens = next(filter(is_tokens, inputs.values()), next(iter(inputs.values()), torch.empty(0))).detach()
    some = tokens.flatten()[:: max(1, tokens.numel() // _MARKED)].double()
    mark = (some * torch.arange(1.0, len(some) + 1, dtype=some.dtype, device=some.device).sqrt()).sum()
    labels = next((value for name, value in inputs.items() if "label" in name or "target" in name), tokens[:0])
    if labels.shape != tokens.shape or labels.ndim != 2 or labels is tokens or labels.device != tokens.device:
        return torch.stack([mark, *torch.zeros(3).to(mark)])
    there = labels >= 0
    following = torch.cat([labels[:, :-1] == tokens[:, 1:], there[:, -1:]], 1)  # nobody knows the last one's
    return torch.stack([mark, *(part.sum().double() for part in (labels == tokens, following, there))])


def items_of(inputs: Mapping[str, torch.Tensor]) -> int:
    """Return the number of tokens in a batch, or the number of items if the batch has no tokens."""
    tokens = [value.numel() for value in inputs.values() if is_tokens(value)]
    return [*tokens, *(len(value) if value.ndim else 0 for value in inputs.values()), 0][0]


def _mark_output(output: Output) -> None:
    """Mark the autograd nodes that computed a model's output. Keep no references to the nodes."""
    for value in tree_leaves(output):
        if isinstance(value, torch.Tensor) and value.grad_fn is not None:
            _metadata_of(value.grad_fn)[_OUTPUT] = True


def _metadata_of(node: Node) -> dict[str, object]:
    return cast(dict[str, object], node.metadata)  # declared as a method


def _comes_from_output(loss: torch.Tensor) -> bool:
    """Return whether a loss depends on a marked node, or on more nodes than a loss function alone would have."""
    waiting, seen = [loss.grad_fn], set[Node]()
    while waiting and len(seen) < _NODES_OF_A_LOSS:
        node = waiting.pop()
        if node is None or node in seen:
            continue
        if _OUTPUT in _metadata_of(node):
            return True
        seen.add(node)
        waiting += [before for before, _ in node.next_functions]
    return bool(waiting)


@dataclass(frozen=True, kw_only=True)
class Taken:
    """The result of an optimizer step."""

    loss: torch.Tensor | None  # the loss that the model or a trainer returned, or None
    norm: torch.Tensor | None  # the norm of the gradient before clipping, or None without a gradient
    stepped: bool  # whether an optimizer took the step
    measured: bool  # whether Lamina measured the update
    rate: float | None  # the largest learning rate of the step


def stepping(optimizer: object) -> torch.optim.Optimizer:
    """Return the torch optimizer inside accelerate's or DeepSpeed's optimizer. Raises UserError for other objects."""
    inner: Output = optimizer
    while not type(inner).__module__.startswith("torch.") and hasattr(
        getattr(inner, "optimizer", None), "param_groups"
    ):
        inner = inner.optimizer
    if not hasattr(inner, "register_step_pre_hook"):
        raise UserError(
            f"optimizer: a {type(optimizer).__name__}. Pass a torch.optim.Optimizer, or a list of optimizers."
        )
    return inner


def after_closure(args: tuple, kwargs: Kwargs, act: Callable[[], None]) -> tuple[tuple, Kwargs] | None:
    """Call a function when a step's gradients are complete: after the step's closure, if there is a closure.

    Returns new arguments for the step, or None to keep the given arguments.

    Args:
        args: the positional arguments of the step, beginning with the optimizer.
        act: the function to call. LBFGS calls the function several times in a step.
    """
    closure = kwargs.get("closure") if len(args) < 2 else args[1]
    if not callable(closure):
        act()
        return None

    def measured() -> Output:
        loss = closure()
        act()
        return loss

    return (args, {**kwargs, "closure": measured}) if len(args) < 2 else ((args[0], measured, *args[2:]), kwargs)


LOOKS = 5  # steps between two looks at whether the model still has the parameters that are followed
GROWTH = 1.5  # of the learning rate since the last measured update: then this one is measured, too
Judge = Callable[[torch.Tensor], bool]


@dataclass(kw_only=True)
class StepState:
    """The state of the present step. ``end_step`` replaces the state."""

    passed: bool = False  # whether the step had a forward pass
    pass_measured: bool = False
    updates_measured: bool = False
    batch: torch.Tensor | None = None  # the sum of ``_numbers_of`` the micro-batches
    losses: list[torch.Tensor] = field(default_factory=list)  # of the micro-batches, or their shares
    differentiated: list[torch.Tensor] = field(default_factory=list)  # the same, as the loop differentiated them
    apart: list[torch.Tensor] = field(default_factory=list)  # those differentiated only to a copy of the model's output
    squares: torch.Tensor | None = None  # the squared gradient norms of the parts of the model
    weights: torch.Tensor | None = None  # the squared norms of the weights, where they say what is not finite
    kept: torch.Tensor | None = None  # square of the gradient that no backward pass of this step found zeroed
    scale: torch.Tensor | None = None  # of the gradients, until a GradScaler unscales them
    began: set[int] = field(default_factory=set)  # the optimizers whose step began
    ended: set[int] = field(default_factory=set)  # those whose step has ended, or was left out by a loss scaler
    inner: Counter[int] = field(default_factory=Counter)  # by optimizer: calls of a base's step within a step


class Instruments:
    """The hooks on a model's forward pass, on gradient clipping, and on the optimizers' steps.

    Measurements stay on the device until ``gradient_rows`` and ``rows`` read them, so that training does not wait.
    """

    resumed = False  # whether steps were done before
    group: ProcessGroup | None = None  # the processes that share the model, if they are a pipeline stage's

    def __init__(self, model: nn.Module, optimizers: Sequence[torch.optim.Optimizer], settings: WatchSettings):
        if not isinstance(model, nn.Module):
            raise UserError(f"model: a {type(model).__name__}. Pass a torch.nn.Module.")
        if not optimizers:
            raise UserError("optimizer: an empty list. Pass a torch.optim.Optimizer, or a list of optimizers.")
        self.model = bare(model)
        self.optimizers = [stepping(optimizer) for optimizer in optimizers]
        self.settings = settings
        self.batches = KeptBatches(settings.every) if settings.batches else None
        self.due = False
        self.tokens = 0
        self.last_norm: float | None = None
        self.followed: Followed | None = None
        parameters = list(self.model.parameters())
        self.on_cpu = all(parameter.device.type == "cpu" for parameter in parameters)
        self._device = next((parameter.device.type for parameter in parameters), "cpu")
        self._zero = zero_optimizer(model, optimizers)
        self._flat = FlatParameters(self.model, self._zero)
        self._groups: Sequence[torch.optim.Optimizer | ZeroGroups] = self.optimizers
        if self._zero is not None:
            self._groups = [ZeroGroups(optimizer, self._flat.zero) for optimizer in self.optimizers]
            if settings.skip_outliers is not None:
                raise UserError(
                    "skip_outliers: DeepSpeed takes every step, so Lamina cannot skip a step. Leave skip_outliers out."
                )
        self.parameters = self._flat.numel(self.model)
        self.half = any(parameter.dtype == torch.float16 for parameter in parameters)
        self._clipped_at: float | None = None
        self.scales_losses = False  # by a GradScaler, which handles infinite gradients itself
        self._norms: GradientNorms | None = None
        self._updates: UpdateRatios | None = None
        self._meter: ForwardMeter | None = None
        self._graph: GraphHooks[Spot] | None = None  # of a compiled model
        self.gains = GainSeries()
        self._squares: list[tuple[int, torch.Tensor, bool, StepSigns]] = []  # numbers; whether an optimizer took it
        self.now = StepState()
        self._mark, self._repeats, self._varied = math.nan, 0, False  # of the last batch; whether any was another one
        self._inside: nn.Module | None = None
        self._measuring = ExitStack()
        self._looking = self._looked = False
        self._rate: float | None = None  # the step's, which a schedule changes once the optimizer took it
        self._measured_rate = 0.0  # that of the last measured update
        self._scaled: tuple[torch.Tensor | None, torch.Tensor | None] = None, None
        self._signs: LoopSigns | None = None
        self._told_still = self._told_resting = False
        self._stale = False  # whether the model has other parameters than those followed
        self._summed = False
        self.takes_shares = False  # a Trainer says what it trains; a model's outputs may hold another loss (TRL's DPO)

    @contextmanager
    def attached(
        self,
        judge: Judge | None,
        found: Callable[[Inputs], None],
        untold: Callable[[], None],
        left: Callable[[], None],
    ) -> Iterator[None]:
        """Attach the hooks inside the context.

        Args:
            judge: a function that decides from the gradient norm whether to skip the step, or None.
            found: a function that receives the batch after each search for the layers.
            untold: a function to call if a forward pass begins before the loop has reported the last step.
            left: a function to call before the loop destroys the process group.
        """
        self._judge, self._found, self._untold, self._left = judge, found, untold, left
        base = getattr(self.model, "base_model", None)
        roots = [self.model, base] if isinstance(base, nn.Module) and base is not self.model else [self.model]
        with temporary_hooks() as hooks, listening(self), self._measuring, self._zero_steps():
            self._roots, (enter, leave) = roots, (Hook(self._enter), Hook(self._leave))
            for root in roots:
                hooks.append(root.register_forward_pre_hook(enter, with_kwargs=True, prepend=True))
                hooks.append(root.register_forward_hook(leave, with_kwargs=True, always_call=True))
            for optimizer in self.optimizers if self._zero is None else ():
                hooks.append(optimizer.register_step_pre_hook(self._before_step))
                hooks.append(optimizer.register_step_post_hook(self._after_step))
            try:
                yield
            finally:
                for part in (self._signs, self._graph, self._updates):
                    if part is not None:
                        part.close()

    @contextmanager
    def _zero_steps(self) -> Iterator[None]:
        """Measure before and after each step of ZeRO's optimizer, which calls torch's optimizer several times."""
        if self._zero is None:
            yield
            return
        (optimizer,) = self.optimizers
        with steps_of(self._zero, partial(self._before_step, optimizer, (optimizer,), {}), self._left_zero):
            yield

    def _enter(self, module: nn.Module, args: tuple, kwargs: Kwargs) -> None:
        if self._inside is not None or self._looking or all(module is not root for root in self._roots):
            return  # a copy of the model, such as a moving average, has its hooks, too
        if not torch.is_grad_enabled():
            return  # an evaluation, or a policy that generates; a model may be trained in evaluation mode
        if self.now.ended:  # a closure's passes are within a step
            self._untold()
        inner, arguments = called(module, args, kwargs)
        inputs = batch_of(arguments)
        self.half |= in_half(self._device)
        if self.followed is None or self._stale:
            self._follow(inner, arguments)
        self._inside, self.now.passed = module, True
        numbers = _numbers_of(inputs)
        self.now.batch = numbers if self.now.batch is None else self.now.batch + numbers
        self.tokens += items_of(inputs)
        if self.batches is not None:
            self.batches.see(inputs, getattr(self.model, "main_input_name", None))
        self._summed = kwargs.get("num_items_in_batch") is not None
        if self.due and not self.now.pass_measured and self._meter is not None:
            self._measuring.enter_context(self._meter.measuring(module))
            self.now.pass_measured = True

    def _leave(self, module: nn.Module, args: tuple, kwargs: Kwargs, output: Output) -> None:
        if self._inside is not module:
            return
        self._inside = None
        self._measuring.close()
        of = output if isinstance(output, Mapping) else {}
        if self._summed and self._rate is None and not self.now.losses and not is_compiled(self.model):
            count = float(cast(float, kwargs["num_items_in_batch"]))
            if is_own_mean(of.get("loss"), of.get("logits"), kwargs.get("labels"), count):
                self.note(_ADDED_UP)
        loss = None if self.takes_shares else of.get("loss")
        if isinstance(loss, torch.Tensor) and loss.numel() == 1:
            self.now.losses.append(loss.detach())
        else:
            _mark_output(output)

    def _follow(self, module: nn.Module, arguments: Mapping[str, object]) -> None:
        """Look for the layers once, and again after parameters were replaced."""
        self._looking = True
        named = {"layers": self.settings.layers, "first_layer": self.settings.first_layer}
        before, self.followed = self.followed, follow(module, arguments, **named)
        self._looking = self._stale = False
        followed, structure = self.followed, self.followed.structure
        if before is not None:
            followed.notes[:] = [*before.notes, *(note for note in followed.notes if note not in before.notes)]
        known = set() if self._norms is None else {id(p) for p in self._norms.parameters}
        owned = found_parameters(self.model, structure, self._flat)
        self._norms = GradientNorms(self.model, owned, exact=True, flat=self._flat, group=self.group)
        if self._updates is not None:
            self._updates.close()
        self._updates = UpdateRatios(self._norms, structure)
        self._updates.samples.resumed = self.resumed
        compiled = is_compiled(self.model)
        if self._signs is not None:
            self._signs.close()
        self._signs = LoopSigns(self._norms, structure, hooks=not compiled, note=self.note)
        if known:
            new = [
                (g, p) for g, p in zip(self._norms.groups, self._norms.parameters, strict=True) if id(p) not in known
            ]
            self._signs.replaced(self._norms.keys[group] for group, _ in new)
        if self._graph is not None:
            self._graph.close()
        self._meter = self._graph = None
        if structure is not None:
            points = followed.points
            self._graph = GraphHooks(points) if compiled else None
            self._meter = ForwardMeter(points, structure if self.settings.attention else None, graph=self._graph)
        hidden_by = self._flat.hidden_by
        self.gains.follow([] if structure is None or hidden_by else gains_of(structure))
        if is_deepspeeds(self.model) and not self._flat:
            self.note(
                "DeepSpeed hides gradients and weights, so Lamina records no layer's gradients or weights, and makes "
                "no checks"
            )
        elif hidden_by:
            what = "Lamina cannot record the gains of norm layers or the largest row norms, and makes no checks"
            self.note(f"{hidden_by} hides whole weights, so {what}")
        elif self._flat:
            self.note("Lamina makes no checks before the first step under DeepSpeed")
        self._found(batch_of(arguments))

    def note(self, text: str) -> None:
        if self.followed is not None and text not in self.followed.notes:
            self.followed.notes.append(text)

    def differentiates(self, loss: torch.Tensor) -> None:
        """Keep the loss that a loop differentiates, in case neither the model nor the user gives a loss."""
        whole, scaled = self._scaled
        self._scaled = None, None
        # losses after the optimizer's step do not belong to the step
        stepped = self.now.began or self.now.ended
        if self.now.passed and not stepped and self._inside is None and not self._looking:
            optimizers = self.optimizers if self._zero is None else ()  # ZeRO zeroes gradients itself
            if not (self.now.differentiated or self.now.apart):
                self.now.kept = kept_square(optimizers)
            elif self.now.kept is not None:  # a later micro-batch, or a loss whose gradient is zeroed only now
                kept = kept_square(optimizers)
                self.now.kept = None if kept is None else torch.minimum(self.now.kept, kept)
            # these count only if the model gives no loss
            losses = self.now.differentiated if self.now.losses or _comes_from_output(loss) else self.now.apart
            losses.append((whole if scaled is loss and whole is not None else loss).detach())

    def divides(self, model: nn.Module, divisor: float) -> None:
        """Divide the losses so far, because a pipeline stage divides its gradients by the same number."""
        if bare(model) is self.model:
            self.now.differentiated = [loss / divisor for loss in self.now.differentiated]
            self.now.apart = [loss / divisor for loss in self.now.apart]

    def ignores(self, passes: bool) -> None:
        """With True, ignore the next forward passes, because these passes do not train. With False, stop ignoring."""
        self._looking = passes

    def leaves(self) -> None:
        """Stop watching before the loop destroys the process group."""
        self._left()

    def scales(self, loss: torch.Tensor, scaled: torch.Tensor) -> None:
        """Keep each loss with its scaled loss until the loop calls backward on the scaled loss."""
        self._scaled = loss, scaled
        if scaled is not loss:  # the scaler is enabled
            self.now.scale = (scaled.detach().double() / loss.detach().double()).reshape(-1)[0]

    def unscales(self) -> None:
        self.now.scale = None

    def tries(self, optimizer: object) -> None:
        """Note the end of a loss scaler's step, which may have skipped the optimizer's step."""
        if any(optimizer is own for own in self.optimizers):
            self.now.ended.add(id(optimizer))

    def clips(self, parameters: Sequence[torch.Tensor], limit: float | None) -> None:
        """Measure this model's gradients before torch clips them. If torch clips values, ``limit`` is None."""
        clipped_ids = {id(parameter) for parameter in parameters}
        if not any(id(parameter) in clipped_ids for parameter in self.model.parameters()):
            return
        self._clipped_at = limit
        self._measure_gradients()
        if self.now.scale is not None and self.now.squares is not None:
            self.now.squares = self.now.squares / torch.where(self.now.scale > 0, self.now.scale, 1.0) ** 2
            self.note(
                "your code clips gradients before scaler.unscale_(optimizer), so the gradients still contain the loss "
                "scale and clipping is too strong. Call scaler.unscale_(optimizer) before you clip"
            )
            self.now.scale = None

    @torch.no_grad()
    def _measure_gradients(self) -> None:
        """Measure complete gradients once per step: before clipping, or before the optimizer's step."""
        none = all(parameter.grad is None for parameter in self.model.parameters())
        if self.now.squares is not None or (none and not self._flat):  # with FSDP1 another process may have some
            return
        if self.followed is None:
            # Without a forward pass of the model (it is compiled), look for the layers with made-up tokens.
            device = local_part(next(self.model.parameters())).device
            names = [*inspect.signature(self.model.forward).parameters, "input_ids"]
            main = str(getattr(self.model, "main_input_name", names[0]))
            self._follow(self.model, {main: torch.arange(1, 9, device=device)[None]})
        assert self._norms is not None
        self.now.squares = self._norms.squares()
        if self._zero is not None:  # float16's scale, by which its own step divides
            self.now.squares = self.now.squares / float(self._zero.loss_scale) ** 2
        if not self.on_cpu or not math.isfinite(float(self.now.squares.sum())):
            trained = [p if p.requires_grad else None for p in self._norms.parameters]
            self.now.weights = self._norms.over_processes(self._norms.local_sums(trained))

    def _before_step(
        self, optimizer: torch.optim.Optimizer, args: tuple, kwargs: Kwargs
    ) -> tuple[tuple, Kwargs] | None:
        """Measure the gradients before an optimizer's step, or after its closure."""
        self.now.inner[id(optimizer)] += 1
        if self.now.inner[id(optimizer)] > 1:
            return None
        if not self.now.began:
            self._rate = largest_rate(self.optimizers)
        return after_closure(args, kwargs, partial(self._with_gradients, optimizer))

    def _with_gradients(self, optimizer: torch.optim.Optimizer) -> None:
        first = not self.now.began
        self.now.began.add(id(optimizer))
        self.scales_losses |= getattr(optimizer, "found_inf", None) is not None
        # A fused optimizer is called even with an infinite gradient, and then skips the step itself.
        factor: torch.Tensor | None = getattr(optimizer, "grad_scale", None)
        if self.now.squares is None:
            self._measure_gradients()
            if self.now.squares is not None and factor is not None:
                self.now.squares = self.now.squares / factor.double() ** 2
        squares = self.now.squares
        if first and self._judge is not None and squares is not None and self._judge(squares.sum().sqrt()):
            for parameter in self.model.parameters():
                parameter.grad = None  # torch's optimizers leave such a parameter, and its state, as they are
            return
        rate = self._rate or 0.0
        if first and self._updates is not None:
            self.now.updates_measured = self.due or rate > GROWTH * self._measured_rate
            self._measured_rate = rate if self.now.updates_measured else self._measured_rate
            self._updates.before_step(self._groups, recorded=self.now.updates_measured)

    def _after_step(self, optimizer: torch.optim.Optimizer, args: tuple, kwargs: Kwargs) -> None:
        self.now.inner[id(optimizer)] -= 1
        if self.now.inner[id(optimizer)] > 0:
            return
        self.now.ended.add(id(optimizer))
        if len(self.now.ended) == len(self.optimizers) and self._updates is not None:
            self._updates.after_step(self._groups)  # behind all optimizers' steps, in any order

    def _left_zero(self) -> None:
        self._after_step(self.optimizers[0], (), {})
        self.scales_losses |= float(self._zero.loss_scale) != 1.0
        if self._zero.overflow:  # its step was left out
            self.now.began.clear()

    @property
    def accumulates(self) -> bool:
        """Whether the step continues after this micro-batch. A step that a loss scaler skips has ended."""
        if self._zero is not None:
            return not self.now.ended
        return not self.now.began and not GradientState().sync_gradients  # accelerate leaves out the optimizers' steps

    def step_loss(self) -> torch.Tensor | None:
        """Return the step's loss so far: the mean over micro-batches, or the sum of the loss's parts."""
        shares = not self.now.losses
        if not (kept := self.now.differentiated or self.now.apart if shares else self.now.losses):
            return None
        losses = torch.stack([loss.reshape(()).float() for loss in kept])
        return losses.sum() if shares or self._summed or self.takes_shares else losses.mean()

    def end_step(self, step: int) -> Taken:
        if self._updates is not None:
            self._updates.after_step(self._groups)  # if one of the optimizers left the step out
            self._updates.samples.compare(self._groups)  # the rows of this step are of the weights as they are now
        squares = self.now.squares
        norm = None if squares is None else squares.sum().sqrt()
        stepped = bool(self.now.began)
        rate = self._rate if stepped else largest_rate(self.optimizers)
        taken = Taken(loss=self.step_loss(), norm=norm, stepped=stepped, measured=self.now.updates_measured, rate=rate)
        signs = StepSigns() if self._signs is None else self._signs.end_step(step, passed=self.now.passed)
        if signs.changed and self._updates is not None:
            self._updates.samples.choose()
        if step % LOOKS == 0 or self.due:
            self._compare_parameters(step)
        now, self.now = self.now, StepState()
        if squares is not None:
            weights = torch.zeros_like(squares) if now.weights is None or taken.measured else now.weights
            batch = torch.full((4,), math.nan) if now.batch is None else now.batch
            kept = now.kept
            share = squares.new_zeros(1) if kept is None else (kept.to(squares) / squares.sum()).sqrt().reshape(1)
            self._squares.append((step, torch.cat([squares, weights, batch.to(squares), share]), stepped, signs))
        if self.batches is not None:
            self.batches.end_step(step)
        return taken

    def _compare_parameters(self, step: int) -> None:
        """Look for the layers again at the next forward pass if the model's parameters have changed."""
        if self._norms is None or self._norms.sharded:
            return
        seen = {id(parameter) for parameter in self._norms.parameters}
        now = {id(parameter): parameter for parameter in self.model.parameters() if parameter.is_floating_point()}
        if now.keys() == seen:
            return
        new = [parameter for identity, parameter in now.items() if identity not in seen]
        names = f": {named(self.model, new)}" if new else ""
        self.note(
            f"step {step}: the model has {len(new)} new parameters, and {len(seen - now.keys())} earlier parameters "
            f"are gone{names}. Lamina searches for the layers again. An optimizer that you created earlier does not "
            "train the new parameters"
        )
        self._stale = True

    def gradient_rows(self) -> list[Row]:
        """Return the gradients of the steps since the last call, except frozen sub-layers and skipped steps."""
        if not self._squares:
            return []
        assert self._norms is not None
        numbers = torch.stack([numbers for _, numbers, _, _ in self._squares]).cpu()
        steps, self._squares = [(step, stepped, signs) for step, _, stepped, signs in self._squares], []
        count, rows = len(self._norms.keys), list[Row]()
        for (step, stepped, signs), sums in zip(steps, numbers, strict=True):
            rows += signs.rows(step)
            if math.isfinite(norm := float(sums[:count].sum().sqrt())) or (stepped and not self.scales_losses):
                self.last_norm = norm
                rows += [row for row in self._norms.rows(step, sums[:count]) if row.location in signs.trained]
            weights = dict(zip(self._norms.keys, sums[count:-5].tolist(), strict=True))
            spoiled = [owner for owner, of in weights.items() if not math.isfinite(of)]
            if len(spoiled) < len(weights):  # else nothing says where it began
                rows += [Row(step, *owner, 0, "weight_norm", math.nan) for owner in spoiled]
            rows += self._batch_rows(step, *sums[-5:-1].tolist())
            kept = float(sums[-1])
            rows += [Row(step, *MODEL, 0, "kept_gradient", kept)] if 0 < kept < math.inf else []
        return rows

    def _batch_rows(self, step: int, mark: float, same: float, following: float, labels: float) -> list[Row]:
        """Return how often the batch repeats, and the fractions of labels equal to the same or the next token."""
        self._varied |= mark != self._mark and math.isfinite(self._mark)
        self._repeats, self._mark = self._repeats + 1 if mark == self._mark else 0, mark
        shares = (same / labels, following / labels) if labels > 0 else ()
        rows = [Row(step, *MODEL, offset, "label_match", share) for offset, share in enumerate(shares)]
        again = [Row(step, *MODEL, 0, "batch_repeats", float(self._repeats))]
        return rows + (again if self._repeats and self._varied else [])

    def written_rows(self, step: int) -> list[Row]:
        """Return the weight changes that no optimizer made, at a step that is not recorded."""
        return [] if self._updates is None else self._updates.samples.rows(step, recorded=False)

    def rows(self, step: int, processes: Processes) -> list[Row]:
        """Return a recorded step's measurements, except gradients. Call this in all processes."""
        seen = PassNumbers()
        if self._meter is not None:
            if self.due and not self._looked and self.followed is not None:
                self.followed.notes.extend(self._meter.missing())
                self._looked = True
            seen, self.half = self._meter.take(), self.half or self._meter.half
        rows = rows_of(step, processes.everyones(seen))
        if self._updates is not None:
            rows += self._updates.rows(step)
            if (still := self._updates.still) and not self._told_still:
                self._told_still = True
                missing = " (no optimizer has these parameters)" if self._updates.missing else ""
                self.note(
                    f"step {step}: these parameters get a gradient but do not change{missing}: "
                    f"{named(self.model, still)}"
                )
            if (resting := self._updates.resting) and not self._told_resting:
                self._told_resting = True
                if step > 1:  # at the first step, `lamina.check` has said so
                    self.note(f"step {step}: these parameters have a learning rate of 0: {named(self.model, resting)}")
            if silent := self._updates.silent:
                self.note(
                    "these parameters get no gradient, unlike the same parameters of most other layers: "
                    f"{named(self.model, silent)}"
                )
        with contextlib.suppress(RuntimeError):  # the gathered weight of a sharded model
            rows += rows_of_gains(self.gains.gains, step)
        return rows

    def about(self) -> Json:
        """Return the description of the model for watched.json."""
        followed = self.followed
        assert followed is not None
        structure = followed.structure
        layers = [] if structure is None else structure.layers
        groups = [group for optimizer in self.optimizers for group in optimizer.param_groups]
        betas, decays = ([group.get(name) for group in groups] for name in ("betas", "weight_decay"))
        return {
            "model": type(self.model).__name__,
            "parameters": self.parameters,
            "num_layers": len(layers),
            "first_layer": layers[0].index if layers else 0,
            "hidden_size": None if structure is None else structure.hidden_size,
            "layers": [
                {"path": site.path, "sublayers": [sublayer.kind for sublayer in site.sublayers]} for site in layers
            ],
            "optimizers": [type(optimizer).__name__ for optimizer in self.optimizers],
            "settings": {
                "beta2": max((float(b[1]) for b in betas if isinstance(b, Sequence) and len(b) == 2), default=None),
                "weight_decay": max((float(decay) for decay in decays if isinstance(decay, int | float)), default=None),
                "max_grad_norm": self._clipped_at or getattr(self._zero, "clip_grad", None) or None,
            },
            "half": self.half,
            "notes": followed.notes,
        }
