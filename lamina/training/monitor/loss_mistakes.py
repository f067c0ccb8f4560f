"""Mistakes in the inputs of torch's loss and attention functions."""

from __future__ import annotations

from collections.abc import Iterator

import torch

from lamina.training.monitor.before_training import BeforeTraining, Mistake, checks

SMOOTHED = 0.5  # of a label's weight
FEW = 16  # numbers that lie between 0 and 1 by chance


def _called(setup: BeforeTraining, name: str) -> dict[str, object]:
    return dict(setup.trial.calls.get(name, {})) if setup.trial is not None else {}


@checks
def loss_inputs(setup: BeforeTraining) -> Iterator[Mistake]:
    """Find probabilities where a loss expects logits, and other values where a loss expects log-probabilities."""
    logits = _called(setup, "cross_entropy").get("input")
    odds = _called(setup, "binary_cross_entropy_with_logits").get("input")
    log_probabilities = _called(setup, "nll_loss").get("input")
    if isinstance(logits, torch.Tensor) and logits.ndim > 1 and logits.shape[1] > 1:
        values = logits.detach().float()
        if bool((values >= 0).all()) and torch.allclose(values.sum(1), torch.ones(()).to(values), atol=1e-2):
            yield Mistake(
                what="cross_entropy gets probabilities",
                why="it applies a softmax itself, and after two softmaxes the loss hardly falls",
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
            what="binary_cross_entropy_with_logits gets numbers from 0 to 1 only",
            why="it applies a sigmoid itself, and after two sigmoids no output is below 0.5",
            do="Pass logits: leave out the sigmoid before the loss",
        )
    if isinstance(log_probabilities, torch.Tensor) and log_probabilities.ndim > 1:
        sums = log_probabilities.detach().float().logsumexp(1)
        if not torch.allclose(sums, torch.zeros(()).to(sums), atol=1e-2):
            yield Mistake(
                what="nll_loss gets no log-probabilities of the classes",
                why="it neither takes a logarithm nor normalizes, so its loss has no lower limit",
                do="Pass log_softmax(logits, dim=1), or use cross_entropy",
            )


@checks
def label_smoothing(setup: BeforeTraining) -> Iterator[Mistake]:
    """Find a smoothing that takes most of the weight from the labels."""
    smoothing = _called(setup, "cross_entropy").get("label_smoothing", 0.0)
    if isinstance(smoothing, float) and smoothing >= SMOOTHED:
        yield Mistake(
            what=f"label_smoothing is {smoothing:g}",
            why=f"{smoothing:.0%} of each target is spread over all classes",
            do="Use 0 to 0.1",
        )


@checks
def sign_of_loss(setup: BeforeTraining) -> Iterator[Mistake]:
    """Find a loss that falls when its only cross-entropy rises."""
    if setup.trial is not None and setup.trial.rises and not any(g.get("maximize") for _, g in setup.settings):
        yield Mistake(
            what="the loss is minus a cross-entropy",
            why="to minimize it, the model avoids the labels",
            do="Remove the minus sign",
        )


@checks
def additive_mask(setup: BeforeTraining) -> Iterator[Mistake]:
    """Find attention masks of zeros and ones in floats, which torch adds to the scores."""
    mask = _called(setup, "attention").get("mask")
    if isinstance(mask, torch.Tensor) and mask.is_floating_point() and set(mask.unique().tolist()) == {0.0, 1.0}:
        yield Mistake(
            what="attention gets a mask of 0 and 1 in floats",
            why="torch adds such a mask to the scores, so it hides no token",
            do="Pass a boolean mask, or 0 and -inf",
        )


@checks
def mixed_rows(setup: BeforeTraining) -> Iterator[Mistake]:
    """Find outputs of a sequence that depend on the batch's other sequences."""
    trial, rows = setup.trial, next(iter(setup.batch.values()), None)
    if trial is None or not trial.mixes or trial.logits is None or rows is None or setup.is_encoder_decoder:
        return
    named = {"input_ids", "pixel_values"} & set(setup.batch)
    if named or setup.shifted is not None or (trial.logits.ndim == 2 and rows.ndim > 1 and rows.shape[1] != len(rows)):
        yield Mistake(
            what="the outputs of a row depend on the other rows of the batch",
            why="a module mistakes the batch for the sequence, as torch's attention without batch_first=True does",
            do="Pass batch_first=True, and check each view, permute and softmax for its dimension",
        )
