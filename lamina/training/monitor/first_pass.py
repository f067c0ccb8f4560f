"""Run the forward and backward pass of `lamina.check` on a batch."""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable, Iterable, Mapping, Sequence, Set
from contextlib import nullcontext
from dataclasses import dataclass, field
from typing import TypeAlias

import torch
from torch import nn
from torch.distributed.tensor import DTensor
from torch.nn import functional
from torch.overrides import TorchFunctionMode

from lamina.errors import UserError, one_line
from lamina.probes.structure.hooks import Output, evaluating, fresh_gradients
from lamina.training.monitor.graph_hooks import is_compiled
from lamina.training.monitor.stream_measures import in_half

LossOf: TypeAlias = Callable[[nn.Module, Output], Output]
Places: TypeAlias = Mapping[int | str, torch.Tensor]
Target: TypeAlias = tuple[int | str, torch.Tensor, int]
IGNORED = -100  # a label without a loss
_KEPT = 2**20  # elements of a tensor that outlive the pass
LAST = 0.5  # of the logits' standard deviation: a change by a hidden last token alone
_CLASSES = 256  # of logits, by which two passes are compared
SAME = 0.99  # of the labels


@dataclass(frozen=True, kw_only=True)
class FirstPass:
    """The result of one forward and backward pass.

    Attributes:
        loss: the loss's value.
        logits: the model's logits, if it returns any; only the first rows of large logits.
        gradients: the root mean square of each gradient that exists, by the parameter's id.
        ran: the ids of the modules that were called.
        offset: how many tokens the targets are ahead of the input (1: next token); None if the targets are not input
            tokens.
        reads: whether the logits that predict a target depend on the target itself or on later tokens; None if unknown.
        causal: whether logits are independent of later tokens; None if unknown.
        stuck: the ids of all-zero matrices whose gradient will stay 0.
        idle: the ids of matrices whose gradient is 0, except where all-zero weights elsewhere may explain this.
        foreign: parameters on which the loss depends although the model does not contain them.
        mixes: whether a row's logits depend on the other rows of the batch; None if unknown.
        by_row: whether identical rows of the batch get different logits.
        pools_padding: whether a row's only logits come from the padding at the row's end.
        calls: the arguments of the first call of each function in ``WATCHED``, by its name; large tensors are cut.
        teaches: whether the target of kl_div depends on trained weights that its input does not depend on.
        entropies: the values of all cross-entropies.
        rises: whether the loss falls when the only cross-entropy in the loss rises.
        half: whether autocast computes in float16.
    """

    loss: float
    logits: torch.Tensor | None
    gradients: Mapping[int, float]
    ran: frozenset[int]
    stuck: frozenset[int]
    idle: frozenset[int] = frozenset()
    foreign: Sequence[nn.Parameter] = ()
    offset: int | None = None
    reads: bool | None = None
    causal: bool | None = None
    mixes: bool | None = None
    by_row: bool = False
    pools_padding: bool = False
    calls: Mapping[str, Mapping[str, Output]] = field(default_factory=dict)
    entropies: Sequence[float] = ()
    rises: bool = False
    half: bool = False
    teaches: bool = False

    @property
    def reached(self) -> Set[int]:
        """The ids of the parameters that got a gradient."""
        return self.gradients.keys()


WATCHED = {
    functional.cross_entropy: "cross_entropy",
    functional.nll_loss: "nll_loss",
    functional.binary_cross_entropy_with_logits: "binary_cross_entropy_with_logits",
    functional.kl_div: "kl_div",
    functional.mse_loss: "mse_loss",
    functional.l1_loss: "l1_loss",
    functional.smooth_l1_loss: "smooth_l1_loss",
    functional.huber_loss: "huber_loss",
    functional.multi_head_attention_forward: "attention",
    functional.scaled_dot_product_attention: "attention",
}


class _Calls(TorchFunctionMode):
    """Keeps the arguments of the first call of each watched function, and all cross-entropies.

    ``part`` maps an argument to the part of the argument to keep.
    """

    def __init__(self, part: Callable[[Output], Output]) -> None:
        super().__init__()
        self._part = part
        self.first: dict[str, dict[str, Output]] = {}
        self.losses: list[torch.Tensor] = []
        self.entropies: list[torch.Tensor] = []
        self.half = self.teaches = False

    def __torch_function__(
        self, func: Callable[..., Output], types: Output, args: tuple = (), kwargs: dict[str, Output] | None = None
    ) -> Output:
        output = func(*args, **(kwargs or {}))
        name = WATCHED.get(func)
        if name is None:
            return output
        self.half = self.half or (isinstance(args[0], torch.Tensor) and in_half(args[0].device.type))
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
            self.first.setdefault(name, {key: self._part(value) for key, value in arguments.items()})
            if name == "cross_entropy" and output.requires_grad:
                output.retain_grad()
                self.losses.append(output)
                self.entropies.append(output.detach().clone())  # AdaLoRA adds to the output in place
        return output

    @property
    def rises(self) -> bool:
        slopes = [loss.grad for loss in self.losses]
        slope = slopes[0] if len(slopes) == 1 else None
        return slope is not None and bool(slope.any()) and float(slope.max()) <= 0


def _first_rows(value: Output) -> Output:
    """Return a tensor detached from its graph. Of a large tensor, return only the first rows."""
    if not isinstance(value, torch.Tensor):
        return value
    large = value.is_floating_point() and value.numel() > _KEPT
    return value.detach()[: max(1, _KEPT * len(value) // value.numel())].clone() if large else value.detach()


def _few_classes(value: Output, of: int = 1) -> Output:
    """Return the logits of some classes. Comparing these logits is enough to compare two passes."""
    if not isinstance(value, torch.Tensor) or value.ndim < 2 or not value.is_floating_point():
        return value
    step = -(-value.shape[of] // _CLASSES)
    return value.detach().movedim(of, -1)[..., ::step].movedim(-1, of).clone()


def leaves_of(value: torch.Tensor) -> dict[int, torch.Tensor]:
    """Return the leaf tensors that require a gradient and from which a tensor was computed, by id."""
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
    """Return a plain tensor with a tensor's values. Of a sharded tensor, return this process's part."""
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
    model: nn.Module, batch: object, loss_of: LossOf | None, others: Iterable[torch.Tensor] = ()
) -> FirstPass | None:
    """Run a forward and backward pass; restore gradients, random states and buffers. Returns None without a loss.

    ``others`` are trainable tensors that are not among the model's parameters.
    """
    every = [*model.parameters(), *others]
    args, kwargs = arguments_of(model, batch)
    ran, outputs, given, calls = set[int](), [], [], _Calls(_first_rows)
    hooks = [module.register_forward_pre_hook(lambda m, a: ran.add(id(m))) for module in model.modules()]
    hooks.append(model.register_forward_hook(lambda m, a, output: outputs.append(output)))
    hooks.append(model.register_forward_pre_hook(lambda m, a, k: given.append((a, k)), with_kwargs=True))

    def loss_and_logits() -> tuple[torch.Tensor | None, torch.Tensor | None]:
        outputs.clear()
        if loss_of is None:
            return _parts(model(*args, **kwargs))
        loss = loss_of(model, batch)
        return loss, _parts(outputs[0])[1] if outputs else None

    buffers = {name: buffer.clone() for name, buffer in model.named_buffers()}
    devices = [p.device.index or 0 for p in model.parameters() if p.device.type == "cuda"][:1]
    eager = torch.compiler.set_stance("force_eager") if is_compiled(model) else nullcontext()  # watched functions run
    try:
        with eager, torch.random.fork_rng(devices=devices), fresh_gradients(every):
            with calls:
                loss, logits = loss_and_logits()
            if not isinstance(loss, torch.Tensor) or loss.numel() != 1:
                return None
            logits, value, leaves = _first_rows(logits), float(loss.detach()), leaves_of(loss)
            outputs.clear()  # the logits of a large vocabulary
            if loss.requires_grad:
                loss.backward()
            gradients, idle = _gradients(model, every)
            stuck = _stuck(model, lambda: loss_and_logits()[0])
            repeats = _Repeats(model, given[0], loss_and_logits).found(calls.first) if given else {}
        return FirstPass(
            loss=value,
            logits=logits,
            gradients=gradients,
            ran=frozenset(ran),
            stuck=stuck,
            idle=idle,
            foreign=[x for key, x in leaves.items() if isinstance(x, nn.Parameter) and key not in map(id, every)],
            teaches=calls.teaches,
            calls=calls.first,
            entropies=[float(each) for each in calls.entropies if each.numel() == 1],
            rises=calls.rises,
            half=calls.half,
            **repeats,
        )
    except Exception as error:  # any model and batch may come
        raise UserError(f"batch: {type(model).__name__} does not run on this batch ({one_line(error)})") from error
    finally:
        for hook in hooks:
            hook.remove()
        for name, buffer in model.named_buffers():
            if name in buffers and buffers[name].shape == buffer.shape:
                buffer.copy_(buffers[name])


def _gradients(model: nn.Module, every: Iterable[torch.Tensor]) -> tuple[dict[int, float], frozenset[int]]:
    """Return the gradients' root mean squares by the parameters' ids, and ``FirstPass.idle``."""
    sizes = {id(p): float(whole(p.grad).float().square().mean().sqrt()) for p in every if p.grad is not None}
    shown = {name: p for name, p in model.named_parameters() if id(p) in sizes and not isinstance(p, DTensor)}
    zeros = any(not name.endswith("bias") and not bool(p.detach().any()) for name, p in shown.items())  # LoRA, a scale
    return sizes, frozenset(id(p) for p in shown.values() if p.ndim > 1 and not zeros and sizes[id(p)] == 0)


def _stuck(model: nn.Module, loss_of: Callable[[], torch.Tensor | None]) -> frozenset[int]:
    """Return the all-zero matrices whose gradient is 0 and will stay 0 when other all-zero matrices have changed.

    A matrix counts only if it gets a gradient once all these matrices differ from 0. The passes replace only zeros, so
    Lamina can restore the weights exactly.
    """
    trained = [p for p in model.parameters() if p.requires_grad and p.ndim > 1 and p.grad is not None]
    if any(isinstance(p, DTensor) for p in trained):
        return frozenset()
    zeros = [p for p in trained if p.numel() and not bool(p.detach().any())]

    def without_gradient(parameters: Iterable[nn.Parameter]) -> list[nn.Parameter]:
        return [p for p in parameters if p.grad is None or not bool(p.grad.any())]

    def after_moving(parameters: Iterable[nn.Parameter]) -> None:
        for p in parameters:
            nn.init.normal_(p, std=0.02)
        model.zero_grad(set_to_none=True)
        loss = loss_of()
        if loss is not None:
            loss.backward()

    still = without_gradient(zeros)
    if not still:
        return frozenset()
    try:
        moving = [p for p in zeros if all(p is not other for other in still)]
        while still and moving:
            after_moving(moving)
            now = without_gradient(still)
            moving = [p for p in still if all(p is not other for other in now)]
            still = now
        if still:
            after_moving(still)
        alone = without_gradient(still)
        return frozenset(id(p) for p in still if all(p is not other for other in alone))
    finally:
        for p in zeros:
            nn.init.zeros_(p)


def _scores(calls: Mapping[str, Mapping[str, Output]]) -> torch.Tensor | None:
    return next((calls[name]["input"] for name in ("cross_entropy", "nll_loss") if name in calls), None)


def offset_of(tokens: torch.Tensor, labels: torch.Tensor, there: torch.Tensor) -> tuple[torch.Tensor, int] | None:
    """Return which labels count, and how many tokens ahead they are; None if labels are not the row's tokens."""
    length = labels.shape[1]
    if tokens.shape[1] < 4 or not tokens.shape[1] - 2 <= length <= tokens.shape[1]:
        return None
    wide = functional.pad(tokens, (1, 3), value=-1)
    for offset in (1, 0, 2, -1):
        known = wide[:, offset + 1 : offset + 1 + length]
        counted = there & (known >= 0)
        if counted.sum() > 3 and float((known == labels)[counted].float().mean()) >= SAME:
            return counted, offset
    return None


class _Repeats:
    """Repeats the pass in evaluation mode with changed inputs, to find on which inputs the logits depend."""

    def __init__(
        self,
        model: nn.Module,
        given: tuple[tuple, dict[str, Output]],
        run: Callable[[], tuple[torch.Tensor | None, torch.Tensor | None]],
    ):
        places: dict[int | str, Output] = {**dict(enumerate(given[0])), **given[1]}
        order = sorted(places, key=lambda at: "decoder" not in f"{at}")
        self._given = {at: x for at in order if isinstance(x := places[at], torch.Tensor)}
        self._model, self._run = model, run
        self._logits, self._scores = self._again({})
        exact = all(p.dtype in (torch.float32, torch.float64) for p in model.parameters())
        self._share = 1e-3 if exact else 0.02  # of the logits' standard deviation: more than rounding

    @torch.no_grad()
    def _again(self, places: Places, seed: int = 0) -> tuple[torch.Tensor | None, torch.Tensor | None]:
        """Run the model with changed values for some arguments. Return its logits and the cross-entropy's logits."""

        def swapped(module: nn.Module, a: tuple, k: dict[str, Output]) -> tuple[tuple, dict[str, Output]]:
            return tuple(places.get(at, x) for at, x in enumerate(a)), {at: places.get(at, x) for at, x in k.items()}

        swap, calls = self._model.register_forward_pre_hook(swapped, with_kwargs=True), _Calls(_few_classes)
        try:
            with torch.random.fork_rng(devices=[]), evaluating(self._model), calls:
                torch.manual_seed(seed)
                found = [_few_classes(self._run()[1], -1), _scores(calls.first)]
        except Exception:  # a loss may not take other inputs
            return None, None
        finally:
            swap.remove()
        logits, scores = (None if x is None or not bool(x.isfinite().all()) else x for x in found)
        return logits, scores

    def found(self, calls: Mapping[str, Mapping[str, Output]]) -> dict[str, Output]:
        """Return the attributes of ``FirstPass`` that these passes determine."""
        (mixes, by_row), target = self.rows(), self.target(calls)
        found = {"mixes": mixes, "by_row": by_row, "pools_padding": self.pools_padding()}
        if target is None:
            return found
        reads, causal = self.reads(*target)
        return {**found, "offset": target[-1], "reads": reads, "causal": causal}

    def pools_padding(self) -> bool:
        """Return whether a row's only logits depend mostly on the row's last token although a mask hides this token."""
        tables = [(at, x) for at, x in self._given.items() if x.ndim == 2 and not x.is_floating_point()]
        pairs = [(at, x, mask) for at, x in tables for _, mask in tables if mask.shape == x.shape and mask.max() <= 1]
        before = self._logits
        for at, tokens, mask in pairs if before is not None and before.ndim == 2 else []:
            hidden = next((mask == v for v in (0, 1) if 1 == len(tokens[mask == v].unique()) < tokens.max()), None)
            if before is not None and hidden is not None and hidden[:, -1].any() and len(hidden) == len(before):
                others = tokens.clone()
                others[:, -1] = torch.where(tokens[:, -1] == tokens[:, 0], tokens[:, 1], tokens[:, 0])
                if (logits := self._again({at: others})[0]) is not None and logits.shape == before.shape:
                    change = (logits - before)[hidden[:, -1]].abs().amax(-1).median()
                    return bool(change > LAST * before.std())
        return False

    def target(self, calls: Mapping[str, Mapping[str, Output]]) -> Target | None:
        """Find the argument whose tokens are the targets: its index, the targets that count, and their offset."""
        call = calls.get("cross_entropy") or calls.get("nll_loss") or {}
        labels, ignored = call.get("target"), call.get("ignore_index", IGNORED)
        if not isinstance(labels, torch.Tensor) or labels.is_floating_point() or labels.ndim > 2:
            return None
        for at, tokens in self._given.items():
            integers = tokens.ndim == 2 and tokens.dtype in (torch.int64, torch.int32)
            if integers and not re.search("label|target", f"{at}") and labels.numel() % len(tokens) == 0:
                of = labels.reshape(len(tokens), -1)
                if (found := offset_of(tokens, of, (of >= 0) & (of != ignored))) is not None:
                    return at, *found
        return None

    def reads(self, at: int | str, counted: torch.Tensor, offset: int) -> tuple[bool | None, bool | None]:
        """Change the last target token. Return whether the logits for it change, and whether earlier logits stay."""
        last = int(counted.any(0).nonzero().max())
        tokens = self._given[at].clone()
        tokens[:, last + offset] = torch.where(tokens[:, last + offset] == tokens[:, 0], tokens[:, 1], tokens[:, 0])
        scores = self._again({at: tokens})[1]
        if scores is None or self._scores is None or scores.shape != self._scores.shape:
            return None, None
        logits = self._logits
        if logits is not None and scores.ndim == logits.ndim == 3 and not torch.equal(logits.mT, self._scores):
            return None, None  # logits that were viewed
        change = (scores - self._scores).abs()
        change = (change.transpose(1, 2) if change.ndim == 3 else change).reshape(*counted.shape, -1).amax(-1)
        changed = (change > self._share * self._scores.std()) & counted & counted[:, last, None]
        earlier = bool(changed[:, : last + offset].any())  # than the token
        return earlier if offset > 0 else bool(changed[:, last].any()), not earlier

    def rows(self) -> tuple[bool | None, bool]:
        """Return whether a row's logits change with other rows (None if unknown), and whether equal rows differ."""
        size = next((len(x) for x in self._given.values() if x.ndim > 1), 0)
        if size < 2 or self._logits is None or len(self._logits) != size or self._logits.shape[-1] == size:
            return None, False
        inner = slice(1, -1) if size > 2 else slice(1, None)
        changed = {at: x.clone() for at, x in self._given.items() if x.ndim and len(x) == size}
        for x in changed.values():
            x[inner] = x[:1]
        logits = self._again(changed)[0]
        if logits is None or logits.shape != self._logits.shape:
            return None, False
        limit = self._share * self._logits.std()
        ends = [0, -1] if size > 2 else [0]
        differ = bool((logits - self._logits)[ends].abs().amax() > limit)
        by_row = not differ and bool((logits[0] - logits[inner][0]).abs().amax() > limit)
        other = self._again(changed, seed=1)[0] if by_row else None  # a model may draw for each row
        return differ, other is not None and torch.equal(other, logits)
