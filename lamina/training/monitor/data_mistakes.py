"""Mistakes in a training's first batch and first loss."""

from __future__ import annotations

import math
import re
from collections.abc import Iterator

import torch
from torch.nn import functional

from lamina.training.monitor.before_training import IGNORED, SAME, BeforeTraining, Mistake, checks

ABOVE, WIDER = 1.0, 2e-4  # nats above guessing at the first step, and more for each channel: a head's own 0.02
ONE_TOKEN = 0.9  # of a batch's tokens: one that says nothing
TAIL = 3  # equal tokens at a row's end that are padding, where one is an end of text
LABELS = "Count labels from 0, and set num_labels"


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
            why="the optimizer cannot take a step from a loss that is not finite",
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
    """Find an inverted mask, and labels at tokens that the mask hides, for which the loss counts padding."""
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
    """Find a model without a causal mask, which reads the tokens that it must predict."""
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


@checks
def equal_inputs(setup: BeforeTraining) -> Iterator[Mistake]:
    """Find batches whose rows are equal, and batches that consist of a single token."""
    rows = next(
        (x for name, x in setup.batch.items() if x.ndim > 1 and not re.search("mask|label|pos|type", name)), None
    )
    if rows is None or rows.numel() < 16:
        return
    if len(rows) > 1 and 2 * len(rows.flatten(1).unique(dim=0)) <= len(rows) - (len(rows) > 2):
        yield Mistake(
            what=f"the batch's {len(rows)} rows hold only {len(rows.flatten(1).unique(dim=0))} different inputs",
            why="copies of a row teach no more than the row itself",
            do="Check the dataset's indices and its shuffling",
        )
    if rows is setup.tokens:
        value, count = rows.unique(return_counts=True)
        if float(count.max()) >= ONE_TOKEN * rows.numel():
            yield Mistake(
                what=f"{float(count.max()) / rows.numel():.0%} of the tokens are token {int(value[count.argmax()])}",
                why="the batch is almost only padding, or the tokenizer does not know the text",
                do="Decode a row with the tokenizer",
            )


@checks
def positions(setup: BeforeTraining) -> Iterator[Mistake]:
    """Find rows whose position_ids are all equal."""
    ids = setup.batch.get("position_ids")
    if ids is not None and ids.shape[-1] > 2 and bool((ids == ids[..., :1]).all()):
        yield Mistake(
            what=f"all position_ids of a row are equal (such as {int(ids.flatten()[0])})",
            why="the model does not see the tokens' order",
            do="Pass torch.arange(tokens), from 0 again where a document starts",
        )


@checks
def beyond_tables(setup: BeforeTraining) -> Iterator[Mistake]:
    """Find tokens and labels for which the model has no row, and rows that are longer than its positions."""
    config, tokens, labels = getattr(setup.model, "config", None), setup.tokens, setup.labels
    if config is None or tokens is None or not hasattr(config, "get_text_config"):
        return
    text = config.get_text_config()
    vocabulary, longest = getattr(text, "vocab_size", None), getattr(text, "max_position_embeddings", None)
    task = bool(re.search(r"Classification$", type(setup.model).__name__)) and getattr(config, "num_labels", 1) > 1
    ids = labels if labels is not None and not labels.is_floating_point() and labels.numel() else None
    for value, limit, what, do in (
        (int(tokens.max()) + 1, vocabulary, "token", "Call model.resize_token_embeddings(len(tokenizer))"),
        (int(ids.max()) + 1 if task and ids is not None else 0, getattr(config, "num_labels", 0), "label", LABELS),
        (tokens.shape[1], longest, "position", "Cut the rows, or load the model with more positions"),
    ):
        if isinstance(limit, int) and 0 < limit < value:
            yield Mistake(
                what=f"the batch has {what} {value - 1}, and the model has {limit} {what}s (0 to {limit - 1})",
                why="the model's table lacks its row" if what != "position" else "the model was not made for such rows",
                do=do,
            )


@checks
def image_values(setup: BeforeTraining) -> Iterator[Mistake]:
    """Find images in bytes, images that were divided by 255 twice, and inputs that are not finite."""
    for name, value in setup.batch.items():
        if not value.is_floating_point() or not value.numel() or re.search("mask|label|embeds", name):
            continue
        low, high = float(value.min()), float(value.max())
        if not math.isfinite(low + high):
            yield Mistake(
                what=f"{name} is not finite",
                why="NaN or infinity reaches the loss and then all weights",
                do="Look for a division by 0 in the preprocessing",
            )
        elif value.ndim == 4 and low >= 0 and (high > 10 or 0 < high <= 1 / 200):
            yield Mistake(
                what=f"{name} has values from {low:.2g} to {high:.2g}",
                why="images were not divided by 255" if high > 10 else "images were divided by 255 twice",
                do="Scale images as the model's processor does, mostly to a mean of 0 and a standard deviation of 1",
            )


@checks
def decoder_inputs(setup: BeforeTraining) -> Iterator[Mistake]:
    """Find a decoder that reads the token that it must predict."""
    inputs, labels = setup.batch.get("decoder_input_ids"), setup.labels
    if inputs is None or labels is None or inputs.shape != labels.shape or not bool((labels >= 0).any()):
        return
    if float((inputs == labels)[labels >= 0].float().mean()) >= SAME:
        yield Mistake(
            what="decoder_input_ids are the labels",
            why="the decoder learns to copy its input",
            do="Leave decoder_input_ids out, or shift them by one to the right",
        )


@checks
def reads_padding(setup: BeforeTraining) -> Iterator[Mistake]:
    """Find an encoder that reads padding at the rows' ends, because no mask hides it."""
    padding = getattr(getattr(setup.model, "config", None), "pad_token_id", None)
    mask, tokens = setup.batch.get("attention_mask"), setup.tokens
    encodes = setup.is_encoder_decoder or re.search("bert", type(setup.model).__name__, re.IGNORECASE)
    if tokens is None or not encodes or not isinstance(padding, int) or tokens.shape[1] <= TAIL:
        return
    ends = (tokens[:, -TAIL:] == padding).all(1)
    if bool(ends.any()) and (mask is None or (mask.shape == tokens.shape and bool((mask[:, -TAIL:] != 0).all()))):
        yield Mistake(
            what=f"{int(ends.sum())} rows end in padding (token {padding}), and no mask hides it",
            why="all tokens of an encoder read the padding",
            do="Pass the tokenizer's attention_mask",
        )


@checks
def labels_of_padding(setup: BeforeTraining) -> Iterator[Mistake]:
    """Find padding among the labels of a language model, at the rows' ends."""
    padding = getattr(getattr(setup.model, "config", None), "pad_token_id", None)
    mask, labels = setup.batch.get("attention_mask"), setup.labels
    words = re.search(r"ForCausalLM|LMHeadModel|ForConditionalGeneration", type(setup.model).__name__)
    if labels is None or labels.ndim != 2 or not isinstance(padding, int) or not words or labels.shape[1] <= TAIL:
        return
    hidden = mask is not None and mask.shape == labels.shape and bool((mask == 0).any())  # mask_and_labels looks there
    ends = (labels[:, -TAIL:] == padding).all(1)
    if bool(ends.any()) and not bool((labels == padding).all(1).any()) and not hidden:
        yield Mistake(
            what=f"{int(ends.sum())} rows of labels end in padding (token {padding})",
            why="the loss counts padding, and the model learns to predict it",
            do=f"Set the labels to {IGNORED} at padding",
        )


@checks
def labels_of_others(setup: BeforeTraining) -> Iterator[Mistake]:
    """Find labels of a causal language model that are not tokens of their own row."""
    tokens, labels = setup.tokens, setup.labels
    causal = re.search(r"ForCausalLM$|LMHeadModel$", type(setup.model).__name__)
    if not causal or tokens is None or labels is None or labels.shape != tokens.shape or setup.shifted is not None:
        return
    there = labels >= 0
    near = [labels[:, 1:-1] == tokens[:, 1 + shift : tokens.shape[1] - 1 + shift] for shift in (-1, 0, 1)]
    shares = [float(same[there[:, 1:-1]].float().mean()) for same in near]
    if int(there.sum()) >= 8 and max(shares[1:]) < 0.5:
        yield Mistake(
            what="each label is the previous token" if shares[0] >= SAME else "the labels are not the input's tokens",
            why="a causal language model learns to predict its own row's next token",
            do="Pass labels equal to the input ids. The model shifts them",
        )
