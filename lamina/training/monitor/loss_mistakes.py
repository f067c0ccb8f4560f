"""Find mistakes in the inputs of torch's loss and attention functions."""

from __future__ import annotations

import math
from collections.abc import Iterator

import torch

from lamina.training.monitor.before_training import BeforeTraining, Mistake, checks

SMOOTHED = 0.5  # of a label's weight
FEW = 16  # numbers that lie between 0 and 1 by chance
CLOSE = 0.1  # of the loss of guessing: the first loss of a new model
FAR = 100.0  # times the outputs, and times 1: targets that were not scaled
DISTANCES = ("mse_loss", "l1_loss", "smooth_l1_loss", "huber_loss")


def _called(setup: BeforeTraining, name: str) -> dict[str, object]:
    return dict(setup.trial.calls.get(name, {})) if setup.trial is not None else {}


@checks
def loss_inputs(setup: BeforeTraining) -> Iterator[Mistake]:
    """Find wrong inputs of a loss: probabilities as logits, logits as log-probabilities, or logits of a wrong shape."""
    logits = _called(setup, "cross_entropy").get("input")
    odds = _called(setup, "binary_cross_entropy_with_logits").get("input")
    viewed = setup.trial.logits if setup.trial is not None else None
    if isinstance(logits, torch.Tensor) and logits.ndim > 1 and logits.shape[1] > 1:
        values = logits.detach().float()
        if bool((values >= 0).all()) and torch.allclose(values.sum(1), torch.ones(()).to(values), atol=1e-2):
            yield Mistake(
                what="cross_entropy gets probabilities",
                why="cross_entropy applies a softmax itself, and after two softmaxes the loss hardly falls",
                do="Pass logits: leave out the softmax before the loss",
            )
        elif values.numel() >= FEW and 0 == float(values.min()) < values.max() and (values == 0).float().mean() > 0.1:
            yield Mistake(
                what="no logit is below 0, and many are exactly 0",
                why="an activation such as ReLU after the head stops the gradient of these logits",
                do="Leave out the activation after the head",
            )
    if isinstance(odds, torch.Tensor) and odds.numel() >= FEW and bool(((odds >= 0) & (odds <= 1)).all()):
        yield Mistake(
            what="binary_cross_entropy_with_logits gets only numbers from 0 to 1",
            why="this loss applies a sigmoid itself, and after two sigmoids no output is below 0.5",
            do="Pass logits: leave out the sigmoid before the loss",
        )
    if isinstance(logits, torch.Tensor) and viewed is not None and logits.ndim == viewed.ndim == 3:
        turned, shape = viewed.transpose(1, 2), logits.shape
        if turned.shape == shape and torch.equal(viewed.reshape(shape), logits) and not torch.equal(turned, logits):
            yield Mistake(
                what=f"cross_entropy gets logits of shape {[*viewed.shape]} viewed as {[*shape]}",
                why="view and reshape do not move dimensions, so the classes of different tokens are mixed",
                do="Pass logits.transpose(1, 2), or flatten both: logits.flatten(0, 1) and labels.flatten()",
            )
    for name, of, log in (("nll_loss", 1, True), ("kl_div", -1, True), ("kl_div", -1, False)):
        given = _called(setup, name)
        values = given.get("input" if log else "target")
        if not isinstance(values, torch.Tensor) or values.ndim < 2:
            continue
        total = (
            values.detach().float().logsumexp(of) if log or given.get("log_target") else values.sum(of).float().log()
        )
        if not torch.allclose(total, torch.zeros(()).to(total), atol=1e-2):
            which = "log-probabilities of the classes" if log else "probabilities in its target"
            yield Mistake(
                what=f"{name} gets no {which}",
                why="this loss neither takes a logarithm nor normalizes, so it has no lower limit",
                do="Pass log_softmax(logits, dim=1), or use cross_entropy"
                if name == "nll_loss"
                else "Pass log_softmax of the student's logits, and softmax of the teacher's",
            )
            break
    for name in DISTANCES:
        shapes = [[*x.shape] for x in _called(setup, name).values() if isinstance(x, torch.Tensor)][:2]
        if shapes[:1] != shapes[1:]:
            yield Mistake(
                what=f"{name} compares outputs of shape {shapes[0]} with targets of shape {shapes[1]}",
                why="torch compares each output with each target, so the model learns the targets' mean",
                do="Give both the same shape, for example with outputs.squeeze(-1)",
            )


@checks
def targets(setup: BeforeTraining) -> Iterator[Mistake]:
    """Find targets that outputs cannot reach, or reach only after very many steps, and a teacher that is trained."""
    given = _called(setup, "binary_cross_entropy_with_logits").get("target")
    if isinstance(given, torch.Tensor) and given.numel() and not 0 <= float(given.min()) <= float(given.max()) <= 1:
        yield Mistake(
            what=f"binary_cross_entropy_with_logits gets targets from {float(given.min()):g} to {float(given.max()):g}",
            why="beyond 0 and 1 its loss has no lower limit",
            do="Pass targets of 0 and 1: count the two classes from 0",
        )
    for name in DISTANCES:
        values = [x for x in _called(setup, name).values() if isinstance(x, torch.Tensor) and x.numel()][:2]
        sizes = [float(x.float().square().mean().sqrt()) for x in values]
        if len(sizes) == 2 and sizes[1] > FAR * max(sizes[0], 1.0):
            yield Mistake(
                what=f"the targets of {name} are about {sizes[1]:.2g}, and the model's outputs about {sizes[0]:.2g}",
                why="the outputs need very many steps to get there, and the gradients are as large as the targets",
                do="Scale the targets to a mean of 0 and a standard deviation of 1, and the predictions back",
            )
    if setup.trial is not None and setup.trial.teaches:
        yield Mistake(
            what="the target of kl_div requires a gradient, and comes from other weights than its input",
            why="the loss also trains the teacher to agree with the student",
            do="Compute the teacher's output under torch.no_grad(), and set the teacher's requires_grad to False",
        )


@checks
def label_smoothing(setup: BeforeTraining) -> Iterator[Mistake]:
    """Find label smoothing that takes most of the weight from the labels."""
    smoothing = _called(setup, "cross_entropy").get("label_smoothing", 0.0)
    if isinstance(smoothing, float) and smoothing >= SMOOTHED:
        yield Mistake(
            what=f"label_smoothing is {smoothing:g}",
            why=f"{smoothing:.0%} of each target is spread over all classes",
            do="Use 0 to 0.1",
        )


@checks
def sign_of_loss(setup: BeforeTraining) -> Iterator[Mistake]:
    """Find a loss with the wrong sign: minus a cross-entropy, or a mean log-probability."""
    trial = setup.trial
    if trial is None or any(g.get("maximize") for _, g in setup.settings):
        return
    classes = trial.logits.shape[-1] if trial.logits is not None and not trial.calls.keys() - {"attention"} else 0
    guessing = math.log(max(classes, 1))
    if trial.rises or (classes >= FEW and abs(trial.loss + guessing) < CLOSE * guessing):
        yield Mistake(
            what="the loss is minus a cross-entropy",
            why="to minimize it, the model avoids the labels",
            do="Remove the minus sign, or put a minus before the labels' log-probabilities",
        )


@checks
def additive_mask(setup: BeforeTraining) -> Iterator[Mistake]:
    """Find float attention masks of zeros and ones, which torch adds to the scores."""
    mask = _called(setup, "attention").get("mask")
    if isinstance(mask, torch.Tensor) and mask.is_floating_point() and set(mask.unique().tolist()) == {0.0, 1.0}:
        yield Mistake(
            what="attention gets a float mask of zeros and ones",
            why="torch adds such a mask to the scores, so it hides no token",
            do="Pass a boolean mask, or 0 and -inf",
        )


@checks
def pooled_padding(setup: BeforeTraining) -> Iterator[Mistake]:
    """Find a model whose output for a row is computed from the padding at the row's end."""
    if setup.trial is not None and setup.trial.pools_padding:
        yield Mistake(
            what="the output of a padded row depends mostly on its last token, which the mask hides",
            why="the model takes the last position as the row's summary, and there is padding",
            do="Take the last token that the mask shows: hidden[torch.arange(len(hidden)), mask.sum(1) - 1]",
        )


@checks
def mixed_rows(setup: BeforeTraining) -> Iterator[Mistake]:
    """Find a model whose outputs for a row depend on the batch's other rows, or on the row's index in the batch."""
    trial, rows = setup.trial, next(iter(setup.batch.values()), None)
    if trial is not None and trial.by_row:
        yield Mistake(
            what="equal rows of the batch have different outputs",
            why="a part of the model uses a row's index in the batch, such as positions added along dimension 0",
            do="Add positions along the tokens: x + positions[:, : x.shape[1]]",
        )
    if trial is None or not trial.mixes or trial.logits is None or rows is None or setup.is_encoder_decoder:
        return
    named = {"input_ids", "pixel_values"} & set(setup.batch)
    if named or trial.offset is not None or (trial.logits.ndim == 2 and rows.ndim > 1 and rows.shape[1] != len(rows)):
        yield Mistake(
            what="the outputs of a row depend on the other rows of the batch",
            why="a module mistakes the batch for the sequence, as torch's attention without batch_first=True does",
            do="Pass batch_first=True, and check the dimension of each view, permute and softmax",
        )
