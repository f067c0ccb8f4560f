"""Mistakes in a training setup that show before the first step.

Each of ``CHECKS`` is one function, which looks for one mistake. Intentional choices, such as zero-initialized branches,
frozen parts and depth-scaled initializers, are not mistakes.
"""

from __future__ import annotations

import math
import re
import statistics
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import TypeAlias

import torch
from torch import nn
from torch.distributed.tensor import DTensor
from torch.nn import functional

from lamina.probes.structure.hooks import Output
from lamina.probes.structure.sites import Structure, effective_gain, is_norm
from lamina.training.monitor.first_pass import FirstPass
from lamina.training.monitor.flat_parameters import FlatParameters
from lamina.training.monitor.silent_parameters import named_alike
from lamina.training.monitor.zero import is_deepspeeds

IGNORED = -100  # a label without a loss
HEAD_ONLY = 0.1  # of the trainable elements: an optimizer that has fewer of them trains a head on purpose
DECAY = 0.05  # a weight decay that shrinks a gain within a run; torch's default is 0.01
NEAR_ZERO, TWICE = 0.05, (1.9, 2.1)  # mean gains that switch a norm off, or count the 1 of a "1 + weight" twice
WIDE, NARROW, SOLE = 4.0, 0.03, 8.0  # standard deviations times sqrt(inputs); and times that of the same part elsewhere
ABOVE, WIDER = 1.0, 2e-4  # nats above guessing at the first step, and more for each channel: a head's own 0.02
SAME = 0.99  # of the labels
LARGE_STEP = 2.0  # times a matrix's root mean square: a step of Adam that replaces the weights
_SHOWN = 3


@dataclass(frozen=True, kw_only=True)
class Mistake:
    """A mistake: the name of the check that found it, the fault, why it matters, and what to do."""

    what: str
    why: str
    do: str
    name: str = ""

    def __str__(self) -> str:
        return f"{self.what}: {self.why}. {self.do}."


class Mistakes(list[Mistake]):
    """The mistakes that ``lamina.check`` found.

    Printed, it shows a line for each mistake and for each check that was not possible.
    """

    def __init__(self, findings: Iterable[Mistake], unchecked: Sequence[str] = ()):
        super().__init__(findings)
        self.unchecked = tuple(unchecked)

    def __str__(self) -> str:
        lines = [f"- {finding}" for finding in self] or ["Lamina found no mistake."]
        return "\n".join([*lines, *(f"(not checked: {reason})" for reason in self.unchecked)])

    __repr__ = __str__


@dataclass(kw_only=True)
class BeforeTraining:
    """The training setup that the checks examine.

    Attributes:
        model: the bare model.
        optimizers: the optimizers; empty if the caller gave none.
        structure: the model's layers; None if Lamina did not find them.
        batch: the tensors of the batch by the model's argument; empty without a batch.
        trial: the result of one pass; None without a batch or a loss.
        scaler: whether a GradScaler scales the loss; None if unknown.
        half: whether autocast computes in float16.
    """

    model: nn.Module
    optimizers: Sequence[torch.optim.Optimizer] = ()
    structure: Structure | None = None
    batch: Mapping[str, torch.Tensor] = field(default_factory=dict)
    trial: FirstPass | None = None
    scaler: bool | None = None
    half: bool = False

    @cached_property
    def names(self) -> dict[int, str]:
        """The parameters' names by id."""
        return {id(parameter): name for name, parameter in self.model.named_parameters()}

    @cached_property
    def trained(self) -> list[nn.Parameter]:
        return [parameter for parameter in self.model.parameters() if parameter.requires_grad]

    @cached_property
    def groups(self) -> dict[int, list[Mapping[str, Output]]]:
        """For each parameter's id, the optimizers' groups that contain the parameter."""
        outputs: dict[int, list[Mapping[str, Output]]] = {}
        for optimizer in self.optimizers:
            for group in optimizer.param_groups:
                for parameter in group["params"]:
                    outputs.setdefault(id(parameter), []).append(group)
        return outputs

    @cached_property
    def blocks(self) -> list[tuple[str, list[nn.Module]]]:
        """The paths and modules of the lists of repeated layers."""
        lists = [
            (name, list(module)) for name, module in self.model.named_modules() if isinstance(module, nn.ModuleList)
        ]
        return [(name, layers) for name, layers in lists if len(layers) > 1 and len(set(map(type, layers))) == 1]

    @cached_property
    def tokens(self) -> torch.Tensor | None:
        """The batch's token ids [batch, tokens]."""
        inputs = (value for name, value in self.batch.items() if "label" not in name and "target" not in name)
        return next((value for value in inputs if value.ndim == 2 and not value.is_floating_point()), None)

    @cached_property
    def labels(self) -> torch.Tensor | None:
        return next((value for name, value in self.batch.items() if "label" in name or "target" in name), None)

    @property
    def is_encoder_decoder(self) -> bool:
        return bool(getattr(getattr(self.model, "config", None), "is_encoder_decoder", False))

    @cached_property
    def shifted(self) -> bool | None:
        """True if each label is the next token, False if each is the token at its own position, otherwise None."""
        tokens, labels = self.tokens, self.labels
        if tokens is None or labels is None or labels.shape != tokens.shape or labels.shape[1] < 4:
            return None
        there = labels >= 0
        same, following = labels == tokens, labels[:, :-1] == tokens[:, 1:]
        for value, equal, counted in ((False, same, there), (True, following, there[:, :-1])):
            if counted.sum() > 3 and float(equal[counted].float().mean()) >= SAME:
                return None if value is False and float(following[there[:, :-1]].float().mean()) >= SAME else value
        return None

    def listed(self, parameters: Iterable[torch.Tensor]) -> str:
        names = [self.names.get(id(parameter), "?") for parameter in parameters]
        return f"{', '.join(names[:_SHOWN])}{f' and {len(names) - _SHOWN} more' if len(names) > _SHOWN else ''}"


Check: TypeAlias = Callable[[BeforeTraining], Iterator[Mistake]]
CHECKS: dict[str, Check] = {}
"""The checks by name, in the order of their findings."""


def checks(function: Check) -> Check:
    """Register a check under its function's name."""
    CHECKS[function.__name__] = function
    return function


@checks
def in_no_optimizer(setup: BeforeTraining) -> Iterator[Mistake]:
    """Find trainable parameters that are in no optimizer, unless the optimizers train only a small part on purpose."""
    missing = [p for p in setup.trained if id(p) not in setup.groups] if setup.optimizers else []
    all_of, left_out = (sum(p.numel() for p in part) for part in (setup.trained, missing))
    if missing and (left_out == all_of or all_of - left_out >= HEAD_ONLY * all_of):
        yield Mistake(
            what=f"{len(missing)} trainable parameters are in no optimizer ({setup.listed(missing)})",
            why="they get a gradient but never change",
            do="Create the optimizer from all parameters after your last change of the model, or set their "
            "requires_grad to False",
        )


@checks
def of_another_model(setup: BeforeTraining) -> Iterator[Mistake]:
    """Find parameters of the optimizer that the model does not have."""
    every = [p for optimizer in setup.optimizers for group in optimizer.param_groups for p in group["params"]]
    parameter_ids = {id(p) for p in setup.model.parameters()}
    foreign = sum(id(p) not in parameter_ids for p in every)
    if foreign and foreign < len(every) and any(id(p) not in setup.groups for p in setup.trained):
        yield Mistake(
            what=f"{foreign} of the optimizer's {len(every)} parameters do not belong to the model",
            why="a part of the model was replaced, resized or wrapped after the optimizer was created, so this part "
            "does not learn",
            do="Create the optimizer again after this change",
        )


@checks
def in_two_optimizers(setup: BeforeTraining) -> Iterator[Mistake]:
    """Find parameters that each step updates twice."""
    twice = [p for p in setup.trained if len(setup.groups.get(id(p), ())) > 1]
    if twice:
        yield Mistake(
            what=f"{len(twice)} parameters are in two groups or optimizers ({setup.listed(twice)})",
            why="each step updates them twice",
            do="Give each parameter to one group of one optimizer",
        )


@checks
def decayed_gains(setup: BeforeTraining) -> Iterator[Mistake]:
    """Find norms' gains and biases that weight decay pulls to 0, except gains stored as a difference from 1."""
    gains: list[nn.Parameter] = []
    decay = 0.0
    for module in setup.model.modules():
        for name, parameter in module.named_parameters(recurse=False):
            gain = (
                is_norm(module) and name == "weight" and parameter.ndim == 1 and float(_whole(parameter).mean()) > 0.5
            )
            values = [float(group.get("weight_decay") or 0.0) for group in setup.groups.get(id(parameter), ())]
            if (gain or name == "bias") and parameter.requires_grad and max(values, default=0.0) >= DECAY:
                gains.append(parameter)
                decay = max(decay, *values)
    if any(p.ndim == 1 for p in gains):
        yield Mistake(
            what=f"{len(gains)} norms' gains or biases have a weight decay of {decay:g} ({setup.listed(gains)})",
            why="weight decay pulls a gain and so the layer's contribution toward 0",
            do="Put them into a group with weight_decay=0.0",
        )


@checks
def no_gradient_to_blocks(setup: BeforeTraining) -> Iterator[Mistake]:
    """Find layers that run but get no gradient: behind a detach, or in reentrant checkpoints with frozen inputs."""
    reentrant = _is_reentrant(setup.model)
    for path, layers in setup.blocks:
        trained = [[p for p in layer.parameters() if p.requires_grad] for layer in layers]
        if not any(trained):
            continue
        dead = [str(at) for at, parameters in enumerate(trained) if parameters]
        if setup.trial is not None:
            ran = [at for at, layer in enumerate(layers) if id(layer) in setup.trial.ran]
            dead = [str(at) for at in ran if trained[at] and not {id(p) for p in trained[at]} & setup.trial.reached]
        elif not (reentrant and _inputs_are_frozen(setup.model)):
            continue
        if dead and (setup.trial is None or setup.trial.reached):
            do = "Call model.enable_input_require_grads(), or checkpoint with use_reentrant=False"
            yield Mistake(
                what=f"layers {', '.join(dead[:8])}{' ...' * (len(dead) > 8)} of {path} get no gradient",
                why="reentrant checkpointing needs an input that requires a gradient, but these layers' inputs are "
                "frozen"
                if reentrant
                else "an operation between these layers and the loss detaches the residual stream",
                do=do if reentrant else "Look for .detach(), .data, torch.no_grad() or .item() after these layers",
            )


@checks
def no_gradient_to_parts(setup: BeforeTraining) -> Iterator[Mistake]:
    """Find layers' parameters that get no gradient, although their modules run and most other layers' parameters do."""
    if setup.trial is None:
        return
    for _, layers in setup.blocks:
        peers: dict[str, list[nn.Parameter]] = {}
        for layer in layers:
            for name, module, parameter in named_alike(layer):
                if parameter.requires_grad and id(module) in setup.trial.ran:
                    peers.setdefault(name, []).append(parameter)
        alive = {id(layer): {*map(id, layer.parameters())} & setup.trial.reached for layer in layers}
        inside = {id(p) for layer in layers if alive[id(layer)] for p in layer.parameters()}
        silent = [
            p
            for of in peers.values()
            if sum(id(p) in setup.trial.reached for p in of) > len(of) / 2
            for p in of
            if id(p) not in setup.trial.reached and id(p) in inside
        ]
        if silent:
            yield Mistake(
                what=f"{len(silent)} layers' parameters get no gradient ({setup.listed(silent)})",
                why="most other layers' parameters of these names get a gradient, so an operation detaches "
                "these layers' outputs",
                do="Look for .detach(), .data, torch.no_grad() or .item() behind their modules",
            )


@checks
def untied(setup: BeforeTraining) -> Iterator[Mistake]:
    """Find an embedding and an output head that should be one tensor but are two."""
    model: Output = setup.model
    with suppress(AttributeError, NotImplementedError, TypeError):  # no model of transformers, or one without a head
        table, head = model.get_input_embeddings().weight, model.get_output_embeddings().weight
        config = model.config.get_text_config()
        wanted = bool(config.tie_word_embeddings) and bool(getattr(model, "_tied_weights_keys", None))
        if wanted and table is not head and table.shape == head.shape:
            yield _untied("config.tie_word_embeddings is true, but embedding and output head are two tensors")
            return
    tables = [m.weight for m in setup.model.modules() if isinstance(m, nn.Embedding)]
    heads = [m.weight for m in setup.model.modules() if isinstance(m, nn.Linear)]
    for table in tables:
        for head in heads:
            if isinstance(table, DTensor) or isinstance(head, DTensor):
                continue
            if table is not head and table.shape == head.shape and bool(table.any()) and torch.equal(table, head):
                yield _untied(
                    f"{setup.listed([table])} and {setup.listed([head])} have equal values but are two tensors"
                )
                return


def _untied(what: str) -> Mistake:
    return Mistake(
        what=what,
        why="training will make the two tensors, which were tied, differ more and more",
        do="Tie them again before you create the optimizer (model.tie_weights(), or head.weight = embedding.weight)",
    )


@checks
def empty_rows(setup: BeforeTraining) -> Iterator[Mistake]:
    """Find sequences of the batch in which all tokens are masked, or which have no label."""
    mask = setup.batch.get("attention_mask")
    if mask is not None and mask.ndim == 2 and (none := int((mask == 0).all(1).sum())):
        yield Mistake(
            what=f"{none} of {len(mask)} rows of attention_mask are all 0",
            why="attention over no tokens is NaN or uniform",
            do="Leave empty texts out, and check whether the mask is inverted",
        )
    labels = setup.labels
    ids = labels is not None and labels.ndim == 2 and not labels.is_floating_point()
    if labels is not None and ids and (none := int((labels == IGNORED).all(1).sum())):
        yield Mistake(
            what=f"{none} of {len(labels)} rows of labels are all {IGNORED}",
            why="these rows train nothing, and the mean loss over no labels is NaN",
            do="Leave out examples whose answer was cut off",
        )


@checks
def shift_of_labels(setup: BeforeTraining) -> Iterator[Mistake]:
    """Find labels that are shifted twice (by the batch and by the loss) or not at all, in a causal model."""
    trial = setup.trial
    if setup.shifted is None or setup.is_encoder_decoder or (trial and trial.logits is not None and not trial.causal):
        return
    shifts = _loss_shifts(setup)
    if shifts is True and setup.shifted:
        yield Mistake(
            what="each label is the next token, and the loss shifts labels once more",
            why="the model learns to predict the token after the next",
            do="Pass labels equal to the input ids, or compute the loss without a shift",
        )
    if shifts is False and not setup.shifted:
        yield Mistake(
            what="each label is the token at its own position, and the loss does not shift labels",
            why="the model learns to copy its input, and the loss falls to 0 without learning",
            do="Compare logits[:, :-1] with labels[:, 1:]",
        )


@checks
def first_loss(setup: BeforeTraining) -> Iterator[Mistake]:
    """Find a first loss far above the loss of guessing among all tokens.

    A trained model's loss is below the loss of guessing.
    """
    trial, labels = setup.trial, setup.labels
    if trial is None or (labels is not None and labels.is_floating_point()):
        return
    if not math.isfinite(trial.loss):
        yield Mistake(
            what=f"the first loss is {trial.loss}",
            why="the optimizer cannot take a step from such a loss",
            do="Run the pass under torch.autograd.set_detect_anomaly(True), and check the batch's labels and mask",
        )
        return
    if trial.logits is None or labels is None or trial.logits.shape[-1] < 8:
        return
    guess = math.log(trial.logits.shape[-1])
    losses = [trial.loss, *_cross_entropies(trial.logits, labels)]
    if not all(map(math.isfinite, losses)):
        return
    width = setup.structure.hidden_size if setup.structure is not None else 0
    if max(losses[0], min(losses[1:])) > guess + ABOVE + WIDER * width:
        yield Mistake(
            what=f"the first loss is {losses[0]:.3g}, but guessing among {trial.logits.shape[-1]} tokens gives "
            f"{guess:.3g}",
            why="the logits start too large, or the loss is a sum instead of a mean",
            do=(
                "Initialize head and embedding with a standard deviation of about 0.02 (or 1/sqrt(width)), and use a "
                "mean loss"
            ),
        )


@checks
def norm_gains(setup: BeforeTraining) -> Iterator[Mistake]:
    """Find norms whose gain starts at 0 or at 2. Only a norm at the end of a branch may start at 0."""
    sites = list(setup.structure.norms()) if setup.structure is not None else []
    ends = {id(site.module) for _, _, site in sites if site.role == "out_norm"}
    norm_ids = {id(site.module) for _, _, site in sites}
    norms = [module for module in setup.model.modules() if is_norm(module)]
    gains = {module: gain for module in norms if (gain := _gain(module)) is not None and gain.numel() > 1}
    off = [module for module, gain in gains.items() if float(gain.abs().max()) < NEAR_ZERO and id(module) not in ends]
    off = [module for module in off if id(module) in norm_ids] if len(off) < len(gains) else off
    off = [module for module in off if not _is_as_made(module)]
    flat = {m: float(gain.mean()) for m, gain in gains.items() if float(gain.std()) < 1e-3 and not _is_as_made(m)}
    double = [module for module, mean in flat.items() if TWICE[0] < mean < TWICE[1]]
    for found, size, why, do in (
        (off, 0, "its layer sees zeros", "Start gains at 1 (at 0 only where the norm computes 1 + weight)"),
        (double, 2, "the weights of norms that compute 1 + weight start at 1", "Start such weights at 0"),
    ):
        if found:
            names = {id(module): name for name, module in setup.model.named_modules()}
            listed = ", ".join(names[id(module)] for module in found[:_SHOWN])
            what = f"{len(found)} norms have a gain of about {size} ({listed}{' ...' * (len(found) > _SHOWN)})"
            yield Mistake(what=what, why=why, do=do)


@checks
def weight_scales(setup: BeforeTraining) -> Iterator[Mistake]:
    """Find layers' matrices whose standard deviation does not suit the width, or differs from other layers."""
    scales: dict[str, dict[str, float]] = {}
    for path, layers in setup.blocks:
        for at, layer in enumerate(layers):
            for name, module in layer.named_modules():
                weight = getattr(module, "weight", None)
                if type(module).__name__ not in ("Linear", "Conv1D", "NonDynamicallyQuantizableLinear"):
                    continue
                if isinstance(weight, torch.Tensor) and weight.ndim == 2 and weight.is_floating_point():
                    inputs = weight.shape[0] if type(module).__name__ == "Conv1D" else weight.shape[1]
                    scale = float(_whole(weight).float().std()) * math.sqrt(inputs)
                    scales.setdefault(f"{path}.N.{name}", {})[f"{path}.{at}.{name}"] = scale
    flat = {name: scale for of in scales.values() for name, scale in of.items() if scale > 0}
    if not flat:
        return
    usual = statistics.median(flat.values())
    wide = [name for name, scale in flat.items() if scale > WIDE]
    odd = []
    for of in scales.values():
        middle = statistics.median(of.values())
        apart = [n for n, s in of.items() if s > 0 and middle > 0 and not 1 / SOLE < s / middle < SOLE]
        odd += apart if len(of) > 3 and len(apart) <= len(of) / 4 else []
    for paths, what, why in (
        (
            wide,
            f"a standard deviation of more than {WIDE:g}/sqrt(inputs)",
            "the residual stream's variance explodes with depth",
        ),
        (
            [*flat] if usual < NARROW else [],
            f"a standard deviation of less than {NARROW:g}/sqrt(inputs)",
            "the layers add almost nothing, and their gradients vanish",
        ),
        (
            [n for n in odd if n not in wide],
            f"{SOLE:g} times the scale of their peers, or less than 1/{SOLE:g}",
            "one layer will dominate, or have no effect",
        ),
    ):
        if paths:
            yield Mistake(
                what=f"{len(paths)} matrices have {what} ({', '.join(paths[:_SHOWN])}{' ...' * (len(paths) > _SHOWN)})",
                why=why,
                do=(
                    "Initialize them with a standard deviation of 0.02 or 1/sqrt(inputs), and divide output "
                    "projections by sqrt(2 layers)"
                ),
            )


@checks
def float16_gradients(setup: BeforeTraining) -> Iterator[Mistake]:
    """Find float16 without a loss scaler, and trainable weights in float16."""
    weights = [p for p in setup.trained if p.dtype == torch.float16]
    if weights:
        yield Mistake(
            what=f"{len(weights)} trainable parameters are float16 ({setup.listed(weights)})",
            why="small gradients and updates round to 0, and a GradScaler rejects float16 gradients",
            do="Keep weights in float32 and compute under autocast, or load the model in bfloat16",
        )
    elif setup.half and setup.scaler is False:
        yield Mistake(
            what="autocast computes in float16 without a GradScaler",
            why="gradients below 6e-8 become 0",
            do="Scale the loss (torch.amp.GradScaler), or use bfloat16",
        )


def _rate_of(groups: Iterable[Mapping[str, Output]]) -> float:
    """Return the highest rate of groups, before a schedule lowered it; infinity if an optimizer sets its own."""
    rates = [group.get(name, 0.0) for group in groups for name in ("lr", "initial_lr")]
    return max(math.inf if rate is None else float(rate) for rate in rates)


@checks
def idle_groups(setup: BeforeTraining) -> Iterator[Mistake]:
    """Find parameters whose learning rate is 0 while others have one; a schedule that starts at 0 is no mistake."""
    rates = {id(p): _rate_of(setup.groups[id(p)]) for p in setup.trained if id(p) in setup.groups}
    idle = [p for p in setup.trained if rates.get(id(p)) == 0]
    if idle and any(rates.values()):
        yield Mistake(
            what=f"{len(idle)} trainable parameters have a learning rate of 0 ({setup.listed(idle)})",
            why="they get a gradient but never change",
            do="Give their group a learning rate, or set their requires_grad to False",
        )


@checks
def rate_of_adam(setup: BeforeTraining) -> Iterator[Mistake]:
    """Find an Adam that changes most layers' weights by more than their size in a single step."""
    adam = {
        id(p): _rate_of([group])
        for optimizer in setup.optimizers
        if isinstance(optimizer, torch.optim.Adam | torch.optim.AdamW | torch.optim.NAdam | torch.optim.RAdam)
        for group in optimizer.param_groups
        for p in group["params"]
    }
    inside = [p for _, layers in setup.blocks for layer in layers for p in layer.parameters()]
    matrices = [p for p in inside if p.ndim > 1 and p.requires_grad and id(p) in adam]
    sizes = [(adam[id(p)], float(_whole(p).float().square().mean().sqrt()), p.shape[-1]) for p in matrices]
    over = [(rate, size) for rate, size, inputs in sizes if rate > LARGE_STEP * max(size, NARROW * inputs**-0.5)]
    if len(over) > len(sizes) / 2:
        rate, size = statistics.median_low(over)
        yield Mistake(
            what=f"the learning rate is {rate:g}, and the layers' weights are about {size:.2g}",
            why=(
                "a step of Adam changes each weight by about the learning rate, which is more than the weights' size "
                "here"
            ),
            do="Lower the learning rate, to 1e-2 or less",
        )


@checks
def mask_and_labels(setup: BeforeTraining) -> Iterator[Mistake]:
    """Find a mask that is inverted, and labels where the mask hides the token: the loss counts padding."""
    mask, labels, tokens = setup.batch.get("attention_mask"), setup.labels, setup.tokens
    if mask is None or mask.ndim != 2 or tokens is None or tokens.shape != mask.shape or setup.is_encoder_decoder:
        return
    hidden = mask == 0
    padding = getattr(getattr(setup.model, "config", None), "pad_token_id", None)
    if isinstance(padding, int) and bool(hidden.any()) and torch.equal(tokens == padding, ~hidden):
        yield Mistake(
            what=f"attention_mask is 1 at padding (token {padding}) and 0 at all other tokens",
            why="the model reads only the padding",
            do="Invert the mask: 1 stands for a token that is read",
        )
    elif (
        labels is not None
        and labels.shape == mask.shape
        and (count := int((hidden & (labels >= 0))[~hidden.all(1)].sum()))
    ):
        yield Mistake(
            what=f"{count} positions with attention_mask 0 have labels",
            why="the loss counts padding, and the model learns to predict it",
            do=f"Set the labels to {IGNORED} where attention_mask is 0",
        )


@checks
def sees_next_token(setup: BeforeTraining) -> Iterator[Mistake]:
    """Find a model that reads the tokens that it must predict: it has no causal mask."""
    if setup.trial is None or setup.trial.causal is not False or setup.is_encoder_decoder or setup.shifted is None:
        return
    shifts = _loss_shifts(setup)
    if shifts is not None and shifts is not setup.shifted:
        yield Mistake(
            what="the labels are the next tokens, and the model's first logits change with the last token",
            why="the model sees the labels in its input, so the loss falls although the model learns nothing",
            do="Give the attention a causal mask (is_causal=True)",
        )


@checks
def stuck_at_zero(setup: BeforeTraining) -> Iterator[Mistake]:
    """Find matrices of zeros whose gradient stays 0, because the matrix that they are multiplied by is 0 as well."""
    stuck = [p for p in setup.trained if setup.trial is not None and id(p) in setup.trial.stuck]
    if stuck:
        yield Mistake(
            what=f"{len(stuck)} matrices of zeros get a gradient of 0 ({setup.listed(stuck)})",
            why="each is multiplied by another matrix of zeros, so both stay 0",
            do="Initialize one of the two at random",
        )


def _whole(parameter: torch.Tensor) -> torch.Tensor:
    return parameter.to_local().detach() if isinstance(parameter, DTensor) else parameter.detach()


def _gain(norm: nn.Module) -> torch.Tensor | None:
    try:
        return effective_gain(norm)
    except RuntimeError:  # a sharded weight, or one that takes other shapes
        return None


def _is_as_made(norm: nn.Module) -> bool:
    """Return whether a norm's weight is what its class starts with: Nemotron's 1 + weight starts at 2."""
    weight: Output = norm.weight
    try:
        new: Output = type(norm)(len(weight))
        return bool(torch.equal(new.weight.detach(), weight.detach().cpu()))
    except (TypeError, ValueError, AttributeError, RuntimeError):
        return False


def _is_reentrant(model: nn.Module) -> bool:
    for module in model.modules():
        inner = getattr(module, "_gradient_checkpointing_func", None)
        if getattr(module, "gradient_checkpointing", False) and inner is not None:
            return bool(getattr(inner, "keywords", {}).get("use_reentrant", False))
    return False


def _inputs_are_frozen(model: nn.Module) -> bool:
    """Return whether what goes into the layers requires no gradient: frozen tables whose outputs no hook changes."""
    tables = [module for module in model.modules() if isinstance(module, nn.Embedding)]
    hooked = any(module._forward_hooks for module in tables)
    return bool(tables) and not hooked and not any(p.requires_grad for module in tables for p in module.parameters())


def _cross_entropies(logits: torch.Tensor, labels: torch.Tensor) -> list[float]:
    """Return the mean cross-entropy without a shift, and with one where there are tokens; none if shapes differ."""
    if logits.shape[:-1] != labels.shape or labels.is_floating_point() or int(labels.max()) >= logits.shape[-1]:
        return [math.nan]
    logits = logits.float()
    pairs = [(logits, labels)] + ([(logits[:, :-1], labels[:, 1:])] if labels.ndim == 2 and labels.shape[1] > 1 else [])
    return [
        float(functional.cross_entropy(x.flatten(0, -2), y.flatten().long(), ignore_index=IGNORED)) for x, y in pairs
    ]


def _loss_shifts(setup: BeforeTraining) -> bool | None:
    """Return whether the loss compares logits with the next label, from its value; None if neither can be told."""
    trial = setup.trial
    if trial is None or trial.logits is None or setup.labels is None:
        named = bool(re.search(r"ForCausalLM|LMHeadModel", type(setup.model).__name__)) and "labels" in setup.batch
        return True if named else None
    losses = _cross_entropies(trial.logits, setup.labels)
    if len(losses) < 2 or not all(map(math.isfinite, losses)):
        return None
    plain, shifted = (abs(value - trial.loss) for value in losses)
    near, far = sorted((plain, shifted))
    if near > 0.01 * abs(trial.loss) or far < max(3 * near, 1e-5 * abs(trial.loss)):
        return None
    return shifted < plain


def findings(setup: BeforeTraining) -> list[Mistake]:
    """Return the mistakes that the checks find; empty if FSDP1 or DeepSpeed hides the weights or gradients."""
    if FlatParameters(setup.model) or is_deepspeeds(setup.model):
        return []
    return [replace(found, name=name) for name, check in CHECKS.items() for found in check(setup)]
