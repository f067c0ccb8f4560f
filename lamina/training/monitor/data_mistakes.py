"""Mistakes in a training's first batch and first loss."""

from __future__ import annotations

import math
import re
from collections.abc import Iterator

import torch
from torch.nn import functional

from lamina.training.monitor.before_training import IGNORED, BeforeTraining, Mistake, checks

ABOVE, WIDER = 1.0, 2e-4  # nats above guessing at the first step, and more for each channel: a head's own 0.02


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
