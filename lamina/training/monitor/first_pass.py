"""Run the forward and backward pass of `lamina.check` on a batch."""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence, Set
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field
from functools import cached_property, partial
from itertools import pairwise
from typing import NamedTuple, TypeAlias

import torch
from torch import nn
from torch.distributed.tensor import DTensor
from torch.nn import functional
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_leaves, tree_map

from lamina.errors import UserError, one_line
from lamina.probes.structure.hooks import Output, evaluating, first_tensor, fresh_gradients
from lamina.training.monitor.graph_hooks import is_compiled
from lamina.training.monitor.loss_origins import lengths_of, range_of
from lamina.training.monitor.loss_targets import Targets, offset_of, targets_of
from lamina.training.monitor.zero_gradients import ZeroGradients, is_own_reference, size_of, zero_gradients

LossOf: TypeAlias = Callable[[nn.Module, Output], Output]
Places: TypeAlias = Mapping[int | str, torch.Tensor]
Target: TypeAlias = tuple[int | str, torch.Tensor, int]
IGNORED = -100  # a label without a loss
_KEPT = 2**20  # the largest number of elements of a tensor that Lamina keeps after the pass
LAST = 0.5  # in the logits' standard deviations: a larger change by a masked token means a summary, not a mean
UNORDERED = 1e-4  # a change by the order of two tokens counts from this fraction of a change by another token
_CLASSES = 256  # the number of classes of which Lamina compares the logits of two passes
_ROWS = 64  # the largest batch in which each row gets a separate pass
_FEW = 8  # targets
EXACT = 256  # bfloat16 holds integers exactly up to this value
LARGE_ANGLE = 16.0  # bfloat16 rounds a larger angle by more than 0.03


@dataclass(frozen=True, kw_only=True)
class FirstPass:
    """The result of one forward and backward pass."""

    loss: float
    logits: torch.Tensor | None  # the model's logits (only the first rows of large logits), or None
    gradients: Mapping[int, float]  # the root mean square of each parameter's gradient, by the parameter's id
    ran: Mapping[int, Set[bool]]  # whether gradients were enabled in the calls of each module, by the module's id
    zero: ZeroGradients = field(default_factory=ZeroGradients)  # the parameters that get no gradient, by cause
    foreign: Sequence[nn.Parameter] = ()  # the parameters that the loss depends on but the model does not contain
    # the number of tokens by which the targets are ahead of the input (1: next token), or None for other targets
    offset: int | None = None
    # whether the logits for a target depend on this target or on later tokens, or None if unknown
    reads: bool | None = None
    causal: bool | None = None  # whether logits are independent of later tokens, or None if unknown
    mixes: bool | None = None  # whether a row's logits depend on other rows of the batch, or None if unknown
    by_row: bool = False  # whether identical rows of the batch get different logits
    # the part of the model that reads masked tokens: "attention", "summary" (a vector for each row), "mean" (the mean
    # of a row's tokens), or "" (none). "inverted" is attention that reads only masked tokens
    leaks: str = ""
    ordered: bool = True  # whether the first layer's output depends on the order of the tokens (true if unknown)
    turns: bool = False  # whether forward computes cosines, as for rotary positions
    rounded: bool = False  # whether the positions of tokens are rounded, so that neighbors share a position
    drops: bool = False  # whether dropout is active in evaluation mode
    strange: bool = False  # whether most targets of a causal model differ from the tokens of the same row
    broken: Sequence[int] = ()  # the rows that make the loss NaN or infinite, if the other rows' loss is finite
    # the comparison of each layer's output with the layer's input, by the layer's id
    skips: Mapping[int, Skip] = field(default_factory=dict)
    # the arguments of the first call of each watched function, by name
    # a loss's arguments also have the ``range`` of its inputs, and the ``lengths`` of the vectors in their products
    calls: Mapping[str, Mapping[str, Output]] = field(default_factory=dict)
    entropies: Sequence[float] = ()  # the values of all cross-entropies
    # the targets of the logits, or None if the loss is not a cross-entropy of the model's logits
    targets: Targets | None = None
    half: bool = False  # whether an operation with a gradient returned float16
    teaches: bool = False  # whether kl_div's input and target depend on different trainable tensors
    same: bool = False  # whether the reference or teacher of the loss is the trained model itself

    @property
    def reached(self) -> Set[int]:
        """The ids of the parameters that got a gradient."""
        return self.gradients.keys()


WATCHED = {
    functional.cross_entropy: "cross_entropy",
    functional.nll_loss: "nll_loss",
    functional.binary_cross_entropy_with_logits: "binary_cross_entropy_with_logits",
    functional.kl_div: "kl_div",
    functional.ctc_loss: "ctc_loss",
    functional.mse_loss: "mse_loss",
    functional.l1_loss: "l1_loss",
    functional.smooth_l1_loss: "smooth_l1_loss",
    functional.huber_loss: "huber_loss",
    functional.multi_head_attention_forward: "attention",
    functional.scaled_dot_product_attention: "attention",
}


_NORMALIZING = {getattr(of, name) for of in (torch, torch.Tensor) for name in ("log_softmax", "logsumexp")}
_NORMALIZING.add(functional.log_softmax)
_TURNING = (torch.cos, torch.Tensor.cos)


class Skip(NamedTuple):
    """A comparison of a layer's output with the layer's input, both without the mean over all tokens."""

    cosine: float  # the cosine between output and input
    factor: float  # the factor on the input that comes closest to the output
    by_row: float  # the norm of the input's variation between rows, divided by the input's norm (median over tokens)
    next_input: float = 0.0  # the cosine between this layer's input and the next layer's input


class Swap(NamedTuple):
    """Tokens [batch, tokens]. The embeddings of the tokens in column ``by`` replace the embeddings of column ``at``."""

    tokens: torch.Tensor
    at: int
    by: int


def _skip(skips: dict[int, Skip], layer: nn.Module, args: tuple, kwargs: dict[str, Output], output: Output) -> None:
    given, returned = first_tensor(args or kwargs), first_tensor(output)
    if id(layer) in skips or given is None or returned is None or given.shape != returned.shape or given.ndim != 3:
        return
    whole_x, y = (x.detach()[:8, :64].float() for x in (given, returned))
    x, y = (z - z.mean((0, 1)) for z in (whole_x, y))
    along, size, other = float((x * y).sum()), float(x.norm()), float(y.norm())
    if size > 0 and other > 0:
        by_row = float(((whole_x - whole_x.mean(0)).norm(dim=(0, 2)) / whole_x.norm(dim=(0, 2))).median())
        skips[id(layer)] = Skip(along / (size * other), along / size**2, by_row)


class _Calls(TorchFunctionMode):
    """Keep the arguments of the first call of each watched function, and all cross-entropies."""

    def __init__(self, part: Callable[[Output], Output], swap: Swap | None = None) -> None:
        super().__init__()
        # what to keep of an argument, and the embeddings to replace
        self._part, self._swap = part, swap
        self.first: dict[str, dict[str, Output]] = {}
        self.entropies: list[torch.Tensor] = []
        self.scores: list[tuple[torch.Tensor, int]] = []  # the first cross-entropy's, and the classes' dimension
        self.normalized: list[tuple[torch.Tensor, int]] = []  # the last log-softmax's
        self._cosines = set[Output]()  # the operations of torch's cosine similarity
        self.half = self.teaches = self.drops = self.turns = self.rounded = False

    def __torch_function__(
        self, func: Callable[..., Output], types: Output, args: tuple = (), kwargs: dict[str, Output] | None = None
    ) -> Output:
        output = func(*args, **(kwargs or {}))
        if self._swap is not None and func is functional.embedding and torch.equal(args[0], self._swap.tokens):
            output = output.clone()
            output[:, self._swap.at] = output[:, self._swap.by]
        for x in args[:1] if func in _TURNING or func is functional.embedding else ():
            self.turns = self.turns or func in _TURNING
            self.rounded = self.rounded or is_rounded(x if func in _TURNING else x[..., None])
        self.drops = self.drops or _dropped(func, args, kwargs or {}) > 0
        half = isinstance(output, torch.Tensor) and output.dtype == torch.float16 and output.requires_grad
        self.half, name = self.half or half, WATCHED.get(func)
        if func is torch.cosine_similarity:
            self._cosines.add(output.grad_fn)
        if func in _NORMALIZING and args and output.requires_grad == torch.is_grad_enabled():
            of = next(iter(args[1:]), (kwargs or {}).get("dim"))
            self.normalized = [(args[0], of)] if isinstance(of, int) else []
        if name is None:
            if "broadcast" not in self.first and _is_spread(args, output):
                of, to = sorted(args, key=lambda x: not x.requires_grad)
                self.first["broadcast"] = {"input": self._part(of), "target": self._part(to)}
            return output
        if name == "attention":  # a function of torch's own has no signature
            given = kwargs or {}
            mask = given.get("attn_mask")
            mask = args[3] if mask is None and 3 < len(args) < 8 else mask
            self.first.setdefault(name, {"mask": mask, "padding": given.get("key_padding_mask")})
        else:
            arguments = inspect.signature(func).bind(*args, **(kwargs or {})).arguments
            if name == "kl_div" and name not in self.first:
                ids = [leaves_of(arguments[of]).keys() for of in ("input", "target")]
                self.teaches = all(ids) and ids[0].isdisjoint(ids[1])
            if name not in self.first:
                scores = next(iter(arguments.values()))
                origin = {"range": range_of(scores), "lengths": lengths_of(scores, self._cosines)}
                self.first[name] = {key: self._part(value) for key, value in arguments.items()} | origin
            if name in ("cross_entropy", "nll_loss") and not self.scores and arguments["input"].ndim > 1:
                self.scores = [(arguments["input"], 1)]
            if name == "cross_entropy" and output.requires_grad:
                self.entropies.append(output.detach().clone())  # AdaLoRA adds to the output in place
        return output

    def targets(
        self, logits: torch.Tensor | None, given: Output
    ) -> tuple[torch.Tensor | None, list[list[Targets | None]]]:
        """Return the logits, and lists to which the backward pass adds the logits' targets."""
        if logits is not None and logits.ndim > 1:
            asked = [_ask(logits, -1, logits)]
        else:
            logits = self.of_rows(given)
            asked = [_ask(*each, logits) for each in self.scored()]
        self.scores = self.normalized = []
        return logits, asked

    def scored(self) -> Iterator[tuple[torch.Tensor, int]]:
        """If the loss is a cross-entropy, yield the loss's logits and the dimension of the classes."""
        yield from (self.scores or self.normalized)[:1]

    def of_rows(self, given: Output) -> torch.Tensor | None:
        """Return the loss's logits, if possible in the shape [rows, tokens, classes]."""
        for logits in (x.movedim(of, -1) for x, of in self.scored()):
            shapes = [tuple(x.shape) for x in tree_leaves(given) if isinstance(x, torch.Tensor) and x.ndim > 1]
            for rows, tokens, *_ in shapes if logits.ndim == 2 else ():
                if rows < len(logits) and len(logits) in (rows * (tokens - cut) for cut in range(3)):
                    return logits.unflatten(0, (rows, -1))
            return logits
        return None


def is_rounded(positions: torch.Tensor) -> bool:
    """Return whether positions [tokens, angles] are rounded: large in half precision, or equal after token 256."""
    if positions.ndim < 2 or positions.requires_grad or not positions.numel():
        return False
    rows = positions.flatten(0, -3)[0] if positions.ndim > 2 else positions
    same = (rows[1:] == rows[:-1]).all(-1)
    if positions.dtype in (torch.float16, torch.bfloat16) and not bool(same.all()) and float(rows.max()) >= LARGE_ANGLE:
        return True
    return len(same) > EXACT and not bool(same[: EXACT - 1].any()) and int((same[:-1] & ~same[1:]).sum()) >= _FEW


def _is_spread(args: tuple, output: Output) -> bool:
    """Return whether broadcasting pairs each of n outputs with each of n targets, as in [n, 1] - [n]."""
    if len(args) != 2 or not all(isinstance(x, torch.Tensor) for x in (*args, output)):
        return False
    one, other = args
    return (
        one.ndim != other.ndim
        and 1 < one.numel() == other.numel()
        and output.numel() == one.numel() ** 2
        and one.requires_grad != other.requires_grad
        and not (one if one.requires_grad else other).is_leaf
    )


def _dropped(func: Callable[..., Output], args: tuple, kwargs: Mapping[str, Output]) -> float:
    """Return the dropout rate of a call of dropout or attention, or 0.0 for another function."""
    if func is functional.scaled_dot_product_attention:
        return float(kwargs.get("dropout_p", args[4] if len(args) > 4 else 0.0))
    if func is not functional.dropout:
        return 0.0
    given = inspect.signature(functional.dropout).bind(*args, **kwargs).arguments
    return float(given.get("p", 0.5)) if given.get("training", True) else 0.0


def _first_rows(value: Output) -> Output:
    """Detach a tensor, and keep only the first rows of a large tensor."""
    if not isinstance(value, torch.Tensor):
        return value
    large = value.is_floating_point() and value.numel() > _KEPT
    return value.detach()[: max(1, _KEPT * len(value) // value.numel())].clone() if large else value.detach()


def _few_classes(logits: torch.Tensor | None) -> torch.Tensor | None:
    """Return the logits of a sample of the classes, to compare two passes."""
    return logits if logits is None else logits.detach()[..., :: -(-logits.shape[-1] // _CLASSES)].clone()


def leaves_of(value: torch.Tensor) -> dict[int, torch.Tensor]:
    """Return the trainable leaf tensors from which a tensor was computed, by id."""
    found = {id(value): value} if value.is_leaf and value.requires_grad else {}
    nodes, seen = [value.grad_fn], set[Output]()
    while nodes:
        node: Output = nodes.pop()
        if node is not None and node not in seen:
            seen.add(node)
            nodes += [next_node for next_node, _ in node.next_functions]
            if (leaf := getattr(node, "variable", None)) is not None:
                found[id(leaf)] = leaf
    return found


def whole(tensor: torch.Tensor) -> torch.Tensor:
    """Return a detached tensor. For a sharded tensor, return this process's part."""
    return tensor.to_local().detach() if isinstance(tensor, DTensor) else tensor.detach()


def arguments_of(model: nn.Module, batch: object) -> tuple[tuple, dict[str, Output]]:
    if isinstance(batch, Mapping):
        return (), dict(batch)
    return (tuple(batch) if isinstance(batch, list | tuple) else (batch,)), {}


def _parts(output: Output) -> tuple[torch.Tensor | None, torch.Tensor | None]:
    """Return the loss and the logits among a model's outputs."""
    if isinstance(output, Mapping) or hasattr(output, "logits"):
        get = output.get if isinstance(output, Mapping) else lambda name: getattr(output, name, None)
        return get("loss"), get("logits")
    tensors = [x for x in (output if isinstance(output, list | tuple) else (output,)) if isinstance(x, torch.Tensor)]
    scalars, matrices = [x for x in tensors if x.numel() == 1], [x for x in tensors if x.ndim > 1]
    return next(iter(scalars), None), next(iter(matrices), None)


def first_pass(
    model: nn.Module,
    batch: object,
    loss_of: LossOf | None,
    others: Iterable[torch.Tensor] = (),
    blocks: Sequence[tuple[str, Sequence[nn.Module]]] = (),
) -> FirstPass | None:
    """Run a forward and backward pass, then restore the model's state. Return None if there is no loss."""
    # ``others`` are trainable tensors that model.parameters() lacks
    every, seen, calls = [*model.parameters(), *others], _Seen(), _Calls(_first_rows)

    def loss_and_logits(batch: object = batch) -> tuple[torch.Tensor | None, torch.Tensor | None]:
        seen.outputs.clear()
        if loss_of is None:
            args, kwargs = arguments_of(model, batch)
            return _parts(model(*args, **kwargs))
        loss = loss_of(model, batch)
        return loss, _parts(seen.outputs[0])[1] if seen.outputs else None  # a LightningModule may call only its parts

    devices = [p.device.index or 0 for p in model.parameters() if p.device.type == "cuda"][:1]
    eager = torch.compiler.set_stance("force_eager") if is_compiled(model) else nullcontext()  # watched functions run
    try:
        with _watching(model, blocks, seen), eager, torch.random.fork_rng(devices=devices), fresh_gradients(every):
            with calls:
                loss, logits = loss_and_logits()
            if not isinstance(loss, torch.Tensor) or loss.numel() != 1:
                return None
            logits, asked = calls.targets(logits, [*seen.given.values()])
            logits, value, leaves = _first_rows(logits), float(loss.detach()), leaves_of(loss)
            seen.outputs.clear()  # the logits of a large vocabulary
            ran = {key: {*of} for key, of in seen.ran.items()}  # later passes drop no layers
            if loss.requires_grad:
                loss.backward()
            gradients = {id(p): size_of(p.grad) for p in every if p.grad is not None}
            same = is_own_reference(model, ran, lambda: loss_and_logits()[0])
            zero = zero_gradients(model, gradients, lambda: loss_and_logits()[0])
            first, targets = [layers[0] for _, layers in blocks], next((x for of in asked for x in of), None)
            entries = seen.entries(model)
            found = _Repeats(model, entries[0], loss_and_logits, targets, first).found() if entries else {}
            found["broken"] = _broken(batch, lambda rows: loss_and_logits(rows)[0]) if not math.isfinite(value) else ()
        return FirstPass(
            loss=value,
            logits=logits,
            gradients=gradients,
            ran=ran,
            zero=zero,
            same=same,
            foreign=[x for key, x in leaves.items() if isinstance(x, nn.Parameter) and key not in map(id, every)],
            calls=calls.first,
            entropies=[float(each) for each in calls.entropies if each.numel() == 1],
            targets=targets,
            **{name: getattr(calls, name) for name in ("half", "teaches", "turns", "rounded")},
            skips=seen.skips,
            **found,
        )
    except Exception as error:  # any model and batch may come
        raise UserError(f"batch: {type(model).__name__} does not run on this batch ({one_line(error)})") from error


def _ask(scores: torch.Tensor, classes: int, logits: torch.Tensor | None) -> list[Targets | None]:
    """Return a list to which the backward pass adds the targets. ``classes`` is the dimension of the classes."""
    asked = list[Targets | None]()
    if logits is not None and scores.requires_grad:
        shape, shown, rows = logits.shape, _first_rows(logits), len(logits)
        scores.register_hook(
            lambda of: asked.append(
                targets_of(shown, of.movedim(classes, -1).reshape(shape)[: len(shown)] * (rows / len(shown)))
            )
        )
    return asked


@dataclass
class _Seen:
    ran: dict[int, set[bool]] = field(default_factory=dict)
    outputs: list[Output] = field(default_factory=list)
    given: dict[int, tuple[tuple, dict[str, Output]]] = field(default_factory=dict)
    skips: dict[int, Skip] = field(default_factory=dict)
    entered: dict[int, torch.Tensor] = field(default_factory=dict)

    def entries(self, model: nn.Module) -> list[tuple[nn.Module, tuple, dict[str, Output]]]:
        """Return the model and its children that were called, largest first, with the arguments of the call."""
        called = [m for m in (model, *model.children()) if id(m) in self.given]
        called.sort(key=lambda m: -sum(p.numel() for p in m.parameters()))
        return [(m, *self.given[id(m)]) for m in called]

    def enter(self, module: nn.Module, args: tuple, kwargs: dict[str, Output]) -> None:
        self.given.setdefault(id(module), (args, kwargs))


def _enter(
    entered: dict[int, torch.Tensor], layer: int, part: nn.Module, args: tuple, kwargs: dict[str, Output]
) -> None:
    """Keep the first input of a layer's submodules, because some models call submodules instead of the layer."""
    given = first_tensor(args or kwargs)
    if layer not in entered and given is not None and given.ndim == 3:
        entered[layer] = given.detach()[:8, :64].clone()


def _broken(batch: object, loss_of: Callable[[object], torch.Tensor | None]) -> list[int]:
    """Return the rows with a NaN or infinite loss. Return [] if the other rows' loss is not finite either."""
    batch = dict(batch) if isinstance(batch, Mapping) else batch
    sizes = [len(x) for x in tree_leaves(batch) if isinstance(x, torch.Tensor) and x.ndim][:1]
    every = range(sizes[0] if sizes and 1 < sizes[0] <= _ROWS else 0)

    @torch.no_grad()
    def finite(rows: list[int]) -> bool:
        loss = loss_of(tree_map(lambda x: x[rows] if getattr(x, "shape", ())[:1] == (len(every),) else x, batch))
        return loss is not None and bool(loss.isfinite())

    try:
        bad = [row for row in every if not finite([row, row])]  # batch norms need two
        rest = [row for row in every if row not in bad]
        return bad if rest and finite(rest) else []
    except Exception:  # a loss may not take other rows
        return []


@contextmanager
def _watching(model: nn.Module, blocks: Sequence[tuple[str, Sequence[nn.Module]]], seen: _Seen) -> Iterator[None]:
    """Collect values inside the context, then restore the model's buffers."""
    ran = seen.ran
    hooks = [
        module.register_forward_pre_hook(lambda m, a: ran.setdefault(id(m), set()).add(torch.is_grad_enabled()))
        for module in model.modules()
    ]
    hooks.append(model.register_forward_hook(lambda m, a, output: seen.outputs.append(output)))
    for part in (model, *model.children()):
        hooks.append(part.register_forward_pre_hook(seen.enter, with_kwargs=True))
    for layer in (layer for _, layers in blocks for layer in layers):
        hooks.append(layer.register_forward_hook(partial(_skip, seen.skips), with_kwargs=True))
        enter = partial(_enter, seen.entered, id(layer))
        hooks += [module.register_forward_pre_hook(enter, with_kwargs=True) for module in layer.children()]
    buffers = {name: buffer.clone() for name, buffer in model.named_buffers()}
    try:
        yield
    finally:
        for layer, after in (pair for _, layers in blocks for pair in pairwise(layers)):
            between = dict[int, Skip]()
            _skip(between, layer, (seen.entered.get(id(layer)),), {}, seen.entered.get(id(after)))
            if not {id(layer), id(after)} & seen.ran.keys():  # a loop calls their parts
                seen.skips |= between
            elif between and id(layer) in seen.skips:
                seen.skips[id(layer)] = seen.skips[id(layer)]._replace(next_input=between[id(layer)].cosine)
        for hook in hooks:
            hook.remove()
        for name, buffer in model.named_buffers():
            if name in buffers and buffers[name].shape == buffer.shape:
                buffer.copy_(buffers[name])


class _Repeats:
    """Repeat the pass in evaluation mode with changed inputs, to find the inputs that change the logits."""

    def __init__(
        self,
        model: nn.Module,
        given: tuple[nn.Module, tuple, dict[str, Output]],
        run: Callable[[], tuple[torch.Tensor | None, torch.Tensor | None]],
        targets: Targets | None,
        layers: Sequence[nn.Module],
    ):
        places: dict[int | str, Output] = {**dict(enumerate(given[1])), **given[2]}
        order = sorted(places, key=lambda at: "decoder" not in f"{at}")
        self._places = places
        self._given = {at: x for at in order if isinstance(x := places[at], torch.Tensor)}
        self._nested = any(isinstance(x, Mapping | list | tuple) for x in places.values())  # such as encoder_outputs
        self._model, self._entry, self._run, self._targets, self._layers = model, given[0], run, targets, layers
        self._now, self._drops, self._base = list[torch.Tensor](), False, dict[int | str, torch.Tensor]()
        self._drawn: dict[int | str, Output] = {}  # the inputs of the first repeated pass
        self._logits = self._again({})
        if any(at in self._drawn and not torch.equal(x, self._drawn[at]) for at, x in self._given.items()):
            self._base = self._given  # the loss draws the inputs (noise, masks), so each pass gets the first draw
            self._logits = self._again({})
        exact = all(p.dtype in (torch.float32, torch.float64) for p in model.parameters())
        self._share = 1e-3 if exact else 0.02  # of the logits' standard deviation: more than rounding
        self._seen = self._now if exact else []  # the first layers' outputs for a token

    @torch.no_grad()
    def _again(
        self, places: Places, seed: int = 0, *, layers_only: bool = False, swap: Swap | None = None
    ) -> torch.Tensor | None:
        """Run the model with some of the arguments replaced, and return the logits."""

        def swapped(module: nn.Module, a: tuple, k: dict[str, Output]) -> tuple[tuple, dict[str, Output]]:
            self._drawn = self._drawn or {**dict(enumerate(a)), **k}
            return tuple(new.get(at, x) for at, x in enumerate(a)), {at: new.get(at, x) for at, x in k.items()}

        def see(module: nn.Module, a: tuple, output: Output) -> None:
            tensor = first_tensor(output)
            if tensor is not None and tensor.ndim == 3 and tensor.shape[1] > 3:
                seen.append(tensor[:, 3].clone())
            if layers_only and len(seen) == len(self._seen):
                raise StopIteration  # the other layers need not run

        new = {**self._base, **places}
        calls, seen, outputs = _Calls(lambda value: None, swap), list[torch.Tensor](), list[Output]()
        hooks = [self._model.register_forward_hook(lambda m, a, output: outputs.append(output))]
        hooks += [self._entry.register_forward_pre_hook(swapped, with_kwargs=True)]
        hooks += [layer.register_forward_hook(see) for layer in self._layers]
        try:
            with torch.random.fork_rng(devices=[]), evaluating(self._model), calls:
                torch.manual_seed(seed)
                logits = self._run()[1]
                logits = _few_classes(calls.of_rows(self._places) if logits is None else logits)
        except Exception:  # a loss may not take other inputs
            if not outputs or (logits := _few_classes(_parts(outputs[0])[1])) is None:
                return None
        finally:
            self._drops = self._drops or calls.drops
            self._now = seen
            for hook in hooks:
                hook.remove()
        return None if logits is None or not bool(logits.isfinite().all()) else logits

    def found(self) -> dict[str, Output]:
        """Return the attributes of ``FirstPass`` that need repeated passes."""
        mixes, by_row = self.rows()
        found = {"mixes": mixes, "by_row": by_row, "leaks": self.leaks(), "ordered": self.ordered()}
        found["drops"] = self._drops
        read = [(target[-1], *self.reads(*target)) for target in self.targets()]
        if not read:
            return {**found, "strange": mixes is False and self.strange()}
        offset, reads, causal = next((each for each in read if each[-1]), read[0])  # an encoder may read the same row
        return {**found, "offset": offset, "reads": reads, "causal": causal}

    def _has_rows(self, before: torch.Tensor) -> bool:
        """Return whether the logits of a batch are [rows, ...], and not [tokens, rows, classes] or [rows, rows]."""
        if before.ndim == 3:
            # with inputs [tokens, rows], flipping dimension 1 only flips the logits
            flipped = {at: x.flip(1) for at, x in self._given.items() if x.ndim > 1 and x.shape[1] == before.shape[1]}
            after = self._again(flipped) if flipped else None
            if after is None or after.shape != before.shape:
                return True
            return bool((after.flip(1) - before).abs().amax() > self._share * before.std())
        size = len(before)
        if before.shape[-1] % size:
            return True
        # in a contrastive loss, the number of classes changes with the number of rows
        half = self._again({at: x[: size // 2] for at, x in self._given.items() if x.ndim and len(x) == size})
        return half is not None and half.shape[-1] == before.shape[-1]

    def leaks(self) -> str:
        """Change the embedding of a masked token at a row's end, and return ``FirstPass.leaks``."""
        tables = [(at, x) for at, x in self._given.items() if x.ndim == 2 and not x.is_floating_point()]
        pairs = [(x, mask) for _, x in tables for _, mask in tables if mask.shape == x.shape and mask.max() <= 1]
        for tokens, mask in pairs:
            hidden = next((mask == v for v in (0, 1) if 1 == len(tokens[mask == v].unique()) < tokens.max()), None)
            before, end = self._logits, -1 if hidden is not None and hidden[:, -1].any() else 0
            if hidden is None or before is None or len(hidden) != len(before) or not (rows := hidden[:, end]).any():
                continue
            # The token id stays, because some models look for padding tokens to find the end of a row.
            logits = self._again({}, swap=Swap(tokens, end, ~end))
            if logits is None or logits.shape != before.shape:
                continue
            if self._moves(rows & ~hidden[:, 3]):
                self._again({}, swap=Swap(tokens, 0, -1), layers_only=True)
                return "attention" if end == 0 or self._moves(rows & ~hidden[:, 3]) else "inverted"
            change = (logits - before)[rows].abs()
            if (
                change.ndim == 2
                and change.shape[1] != tokens.shape[1]
                and (size := float(change.amax(-1).median() / before.std())) > self._share
            ):
                return "summary" if size > LAST else "mean"
        return ""

    def _moves(self, rows: torch.Tensor) -> bool:
        """Return whether the last pass changed the first layers' outputs in some rows."""
        seen = [(x, y) for x, y in zip(self._seen, self._now, strict=False) if len(x) == len(y) == len(rows)]
        return any(float((y - x)[rows].abs().sum()) > 0 for x, y in seen)

    def ordered(self) -> bool:
        """Return whether the order of earlier tokens changes the first layer's output for a token (true if unknown)."""
        text = ((at, x) for at, x in self._given.items() if x.ndim == 2 and not x.is_floating_point() and x.max() > 1)
        at, tokens = next(((at, x) for at, x in text if x.shape[1] > 4 and len(x) > 1), (None, None))
        zeros = any(p.ndim > 1 and not bool(p.any()) for layer in self._layers for p in layer.parameters())  # queries
        if at is None or tokens is None or not self._seen or zeros:
            return True
        changed = tokens.clone()
        # In even rows two tokens change places. In odd rows another token replaces the first of the two tokens.
        changed[::2, 1:3] = tokens[::2, 1:3].flip(1)
        changed[1::2, 1] = torch.where(tokens[1::2, 1] == tokens[1::2, 0], tokens[1::2, 3], tokens[1::2, 0])
        self._again({at: changed}, layers_only=True)
        moves = [(y - x).abs().amax(-1) for x, y in zip(self._seen, self._now, strict=False) if x.shape == y.shape]
        differ = (changed != tokens).any(1)
        for move in (move for move in moves if len(move) == len(differ)):
            swapped, replaced = (move[of::2][differ[of::2]] for of in (0, 1))
            if len(swapped) and len(replaced) and float(replaced.nanmedian()) > 0:
                return bool(swapped.nanmedian() > UNORDERED * replaced.nanmedian())
        return True

    def targets(self) -> Iterator[Target]:
        """For each argument that contains the targets, yield the name, the positions with a target, and the offset."""
        for at, tokens, classes, counted in self._asked():
            if (found := offset_of(tokens, classes, counted)) is not None:
                yield at, *found

    def _asked(self) -> Iterator[tuple[int | str, torch.Tensor, torch.Tensor, torch.Tensor]]:
        """For each argument of token ids, yield the name, the tokens, the targets, and the positions with a target."""
        if self._targets is None:
            return
        classes, counted = self._targets.classes, self._targets.counted
        for at, tokens in self._given.items():
            rows = len(classes) if classes.ndim > 1 else len(tokens)
            if at in self._read and rows <= len(tokens) and not len(classes) % rows:
                yield at, tokens[:rows], classes.reshape(rows, -1), counted.reshape(rows, -1)

    @cached_property
    def _read(self) -> list[int | str]:
        """The names of the arguments with token ids: integers [rows, tokens] that change the logits."""
        tables = [at for at, x in self._given.items() if x.ndim == 2 and x.dtype in (torch.int64, torch.int32)]
        changed = [(at, self._again({at: self._given[at].roll(1, 1)})) for at in tables]
        before = self._logits
        return [at for at, x in changed if before is not None and x is not None and not torch.equal(x, before)]

    def strange(self) -> bool:
        for at, tokens, classes, counted in self._asked():
            length = classes.shape[1]
            dense = int(counted.sum()) >= _FEW and float(counted[counted.any(1)].float().mean()) > 0.5
            if dense and abs(tokens.shape[1] - length) <= 2:
                wide = functional.pad(tokens, (0, 4), value=-1)
                same = [float((wide[:, of : of + length] == classes)[counted].float().mean()) for of in range(3)]
                if max(same) < 0.5 and self.reads(at, counted, 0)[1]:
                    return True
        return False

    def reads(self, at: int | str, counted: torch.Tensor, offset: int) -> tuple[bool | None, bool | None]:
        """Change the last target token, and return ``FirstPass.reads`` and ``FirstPass.causal``."""
        last = int(counted.any(0).nonzero().max())
        tokens = self._given[at].clone()
        tokens[:, last + offset] = torch.where(tokens[:, last + offset] == tokens[:, 0], tokens[:, 1], tokens[:, 0])
        before, after = self._logits, self._again({at: tokens})
        if before is None or after is None or before.shape != after.shape:
            return None, None
        change = (after - before).abs().amax(-1).reshape(-1, counted.shape[1])[: len(counted)]
        changed = (change > self._share * before.std()) & counted & counted[:, last, None]
        earlier = bool(changed[:, : last + offset].any())  # than the token
        return earlier if offset > 0 else bool(changed[:, last].any()), not earlier

    def rows(self) -> tuple[bool | None, bool]:
        """Return ``FirstPass.mixes`` and ``FirstPass.by_row``."""
        size, before = next((len(x) for x in self._given.values() if x.ndim > 1), 0), self._logits
        if size < 2 or self._nested or before is None or len(before) != size or before.ndim < 2:
            return None, False
        inner = slice(1, -1) if size > 2 else slice(1, None)
        changed = {at: x.clone() for at, x in self._given.items() if x.ndim and len(x) == size}
        for x in changed.values():
            x[inner] = x[:1]
        logits = self._again(changed)
        if logits is None or logits.shape != before.shape:
            return None, False
        limit = self._share * before.std()
        ends = [0, -1] if size > 2 else [0]
        differ = bool((logits - before)[ends].abs().amax() > limit)
        if differ and not self._has_rows(before):
            return None, False
        by_row = not differ and bool((logits[0] - logits[inner][0]).abs().amax() > limit)
        other = self._again(changed, seed=1) if by_row else None  # a model may draw for each row
        return differ, other is not None and torch.equal(other, logits)
