"""Find mistakes in a training's first batch and first loss."""

from __future__ import annotations

import math
import re
from collections.abc import Iterator

import torch

from lamina.training.monitor.before_training import BeforeTraining, Mistake, checks, listing
from lamina.training.monitor.first_pass import IGNORED, whole
from lamina.training.monitor.loss_targets import Targets

ABOVE, WIDER = 1.0, 2e-4  # nats by which the first loss may exceed guessing: a constant, and more for each channel
FAR_APART, SATURATED = 3.0, 1e-6  # nats: the first loss of a contrastive training above guessing, and the lowest
ONE_TOKEN = 0.9  # the fraction of a batch's tokens from which a single token is reported
IN_A_ROW = 0.5  # the fraction of labels that another label follows: high in an answer, low for masked words
MANY = 4  # rows that share an unknown special token
TAIL = 3  # equal tokens at a row's end that show padding. A single token may be the end of text
_CAUSAL = re.compile(r"ForCausalLM$|LMHeadModel$")
LABELS = "Count labels from 0, and set num_labels"


@checks
def empty_rows(setup: BeforeTraining) -> Iterator[Mistake]:
    """Find rows of the batch in which no token has a label, and rows in which all tokens are masked."""
    mask = setup.batch.get("attention_mask")
    if mask is not None and mask.ndim == 2 and (none := int((mask == 0).all(1).sum())):
        yield Mistake(
            what=f"{none} of {len(mask)} rows of attention_mask are all 0",
            why="without tokens to attend to, attention is NaN or uniform",
            do="Leave empty texts out, and check whether the mask is inverted",
        )
    labels, targets = setup.labels, setup.trial.targets if setup.trial is not None else None
    there = labels != IGNORED if labels is not None and not labels.is_floating_point() else None
    if targets is not None and (there is None or there.ndim != 2 or targets.counted.shape == there.shape):
        there = targets.counted
    if there is None or there.ndim != 2 or (setup.trial is not None and setup.trial.strange):
        return
    if targets is not None and bool((targets.weights < 0).any()):
        return  # a policy's loss, in which a row without an advantage has no weight
    none, following = int((~there).all(1).sum()), there[:, 1:][there[:, :-1]]
    if none and (none == len(there) or float(following.float().mean()) > IN_A_ROW):
        yield Mistake(
            what=f"{none} of {len(there)} rows have no label for the loss (all labels are {IGNORED}, or a mask hides "
            "the labels)",
            why="the model learns nothing from these rows, and the mean loss over no labels is NaN",
            do="Leave out examples whose answer was cut off",
        )


@checks
def shift_of_labels(setup: BeforeTraining) -> Iterator[Mistake]:
    """Find labels of a causal model that are shifted twice, shifted backward, or not shifted."""
    trial, offset = setup.trial, None
    text = trial is not None and trial.logits is not None and trial.logits.shape[-1] in setup.vocabularies
    if trial is not None and trial.strange and text and not setup.is_encoder_decoder:
        yield Mistake(
            what="the targets of a row are not the row's tokens",
            why="the loss shifts rows instead of tokens, or the labels come from another row or tokenizer",
            do="Compare logits[:, :-1] with labels[:, 1:] of the same row",
        )
    if trial is not None:
        offset = trial.offset if trial.causal and (trial.reads or trial.offset == 2) else None
    elif setup.shift == 1 and "labels" in setup.batch and _CAUSAL.search(type(setup.inner).__name__):
        offset = 2
    if offset == 2:
        yield Mistake(
            what="each label is the next token, and the loss shifts labels once more",
            why="the model learns to predict the token after the next token",
            do="Pass labels equal to the input ids, or compute the loss without a shift",
        )
    elif offset is not None:
        which = "token at the label's position" if offset == 0 else "previous token"
        yield Mistake(
            what=f"each label is the {which}, and the loss does not shift labels",
            why="the model only learns to copy its input, so the loss falls to 0",
            do="Leave out decoder_input_ids, or shift them: decoder_start_token_id, then labels[:, :-1]"
            if setup.is_encoder_decoder
            else "Compare logits[:, :-1] with labels[:, 1:]",
        )
    start, labels = getattr(setup.config, "decoder_start_token_id", None), setup.labels
    own = setup.is_encoder_decoder and not any("decoder" in name for name in setup.batch) and isinstance(start, int)
    if own and labels is not None and labels.ndim == 2 and len(labels) > 1 and bool((labels[:, 0] == start).all()):
        yield Mistake(
            what=f"all labels begin with decoder_start_token_id ({start})",
            why="the model also puts this token before the labels, so the decoder reads the token twice",
            do="Leave out the first label",
        )


@checks
def first_loss(setup: BeforeTraining) -> Iterator[Mistake]:
    """Find a first loss far above the loss of guessing among all tokens."""
    trial = setup.trial
    if trial is None:
        return
    if not math.isfinite(trial.loss):
        rows = [str(row) for row in trial.broken]
        some = f", and would be finite without the batch's rows {listing(rows)}" if rows else ""
        yield Mistake(
            what=f"the first loss is {trial.loss}{some}",
            why="no optimizer step can use this loss" + "; a mask may hide all tokens of these rows" * bool(some),
            do="Unmask at least one token of each row, look for invalid inputs and labels, and run the pass "
            "under torch.autograd.set_detect_anomaly(True)",
        )
        return
    if trial.targets is not None and trial.logits is not None:
        yield from _reduction(trial.targets, trial.logits, alone=not trial.entropies)
    scores = trial.calls.get("cross_entropy", {}).get("input")
    classes = scores.shape[1] if isinstance(scores, torch.Tensor) and scores.ndim > 1 else 0
    first, one = max(trial.entropies, default=0.0), len(trial.entropies) == 1
    if not classes and trial.targets is not None and bool((trial.targets.weights >= 0).all()):
        classes, first = trial.targets.count, trial.targets.loss  # of a loss without torch's function
    outputs = trial.logits.shape if trial.logits is not None else ()
    # not the other rows of the batch, as in a contrastive loss
    contrast = len(outputs) == 2 and classes % outputs[0] == 0 and trial.mixes is None
    lengths = trial.calls.get("cross_entropy", {}).get("lengths")
    known = classes in setup.vocabularies or (outputs[-1:] == (classes,) and not contrast)
    if one and not known and isinstance(scores, torch.Tensor) and scores.shape == (classes, classes):
        yield from _unnormalized(first, classes, lengths)
    classes *= known and lengths != 1.0  # cosines, which a constant scales, as in ArcFace
    width = setup.structure.hidden_size if setup.structure is not None else 0
    limit = math.log(max(classes, 1)) + ABOVE + WIDER * width
    if classes >= 8 and first > limit:
        yield Mistake(
            what=f"the first loss is {first:.3g}, but guessing among {classes} gives {math.log(classes):.3g}",
            why="weights or a temperature make the logits too large, or the loss is a sum instead of a mean",
            do="Initialize head and embedding with a standard deviation of about 0.02 (or 1/sqrt(width)), and use a "
            "mean loss",
        )
    elif classes >= 8 and one and trial.loss > max(limit, 2 * first):  # AdaLoRA adds a regularizer
        yield Mistake(
            what=f"the first loss is {trial.loss:.3g}, but the cross-entropy is only {first:.3g}",
            why="another part of the loss, such as a router's loss or a penalty, outweighs the cross-entropy",
            do="Lower the coefficient of this part (such as router_aux_loss_coef), or use its mean",
        )


def _unnormalized(loss: float, rows: int, lengths: object) -> Iterator[Mistake]:
    """Find a contrastive loss of vectors that are not normalized."""
    limit = math.log(rows) + FAR_APART
    if isinstance(lengths, float) and lengths > 1.0 and not SATURATED < loss <= limit:
        yield Mistake(
            what=f"the first loss is {loss:.3g}, but guessing among {rows} rows gives {math.log(rows):.3g}, and the "
            f"compared vectors have lengths of about {lengths:.2g}",
            why="the products of such vectors are too large as logits, so the softmax is 0 or 1 for most rows",
            do="Normalize the vectors (functional.normalize(x, dim=-1)), and divide their products by a temperature "
            "such as 0.07",
        )


def _reduction(targets: Targets, logits: torch.Tensor, *, alone: bool) -> Iterator[Mistake]:
    """Find a cross-entropy that is averaged twice. If the loss has no other term (``alone``), also find a sum."""
    if targets.weights.ndim < 2 or not bool((targets.weights >= 0).all()):
        return
    total = float(targets.weights.sum())
    rows, tokens, classes = len(logits), targets.weights.shape[1], logits.shape[-1]
    added = targets.weights[targets.counted]
    if alone and len(added) >= 16 and bool(((added - 1).abs() < 0.02).all()):
        yield Mistake(
            what=f"the loss is the sum of {len(added)} cross-entropies",
            why="gradients grow with the number of tokens, so SGD takes larger steps and clipping acts more often",
            do="Average the cross-entropy over the tokens with labels",
        )
    for count, what in ((classes, "classes"), (tokens, "tokens"), (rows * tokens, "tokens of the batch")):
        if count >= 16 and abs(total * count - 1) < 0.02:
            yield Mistake(
                what=f"the loss is the mean cross-entropy divided by {count}, the number of {what}",
                why="this division makes the loss and all gradients too small",
                do="Average the cross-entropy over the tokens with labels, and not over the classes",
            )


@checks
def mask_and_labels(setup: BeforeTraining) -> Iterator[Mistake]:
    """Find an inverted mask, labels at masked tokens, and ends of text without a label."""
    mask, labels, tokens = setup.batch.get("attention_mask"), setup.labels, setup.tokens
    passed = setup.trial.calls.get("attention", {}).get("padding") if setup.trial is not None else None
    if mask is None and isinstance(passed, torch.Tensor):  # True, or -inf, at padding
        mask = (~passed if passed.dtype == torch.bool else passed >= 0).long()
    if mask is None or mask.ndim != 2 or tokens is None or tokens.shape != mask.shape or setup.is_encoder_decoder:
        return
    hidden, padding = mask == 0, setup.padding
    if padding is None and len(shown := tokens[~hidden].unique()) == 1 and len(tokens[hidden].unique()) > 2:
        padding = int(shown)
    if padding is not None and bool(hidden.any()) and torch.equal(tokens == padding, ~hidden):
        yield Mistake(
            what=f"the mask shows padding (token {padding}) and hides all other tokens",
            why="the model reads only the padding",
            do="Invert the mask: attention_mask is 1 at tokens, and torch's key_padding_mask is True at padding",
        )
        return
    if labels is None or labels.shape != mask.shape:
        return
    if count := int((hidden & (labels >= 0))[~hidden.all(1)].sum()):
        yield Mistake(
            what=f"{count} positions with attention_mask 0 have labels",
            why="the loss counts padding, so the model learns to predict padding",
            do=f"Set the labels to {IGNORED} where attention_mask is 0",
        )
    ends = (tokens == padding) & ~hidden
    ends[:, 1:] &= labels[:, :-1] >= 0  # behind a token that counts
    if bool(hidden.any()) and bool(ends.any()) and not bool((labels == padding).any()):
        yield Mistake(
            what=f"{int(ends.sum())} end-of-text tokens have no label, because padding uses the same token {padding}",
            why="without a label at the end of text, the model never learns to stop",
            do="Choose another padding token, or mask the labels by attention_mask",
        )


@checks
def doubled_tokens(setup: BeforeTraining) -> Iterator[Mistake]:
    """Find a special token that occurs twice at the beginning of all rows, or twice at the end of all rows."""
    tokens, mask = setup.tokens, setup.batch.get("attention_mask")
    if tokens is None or tokens.shape[1] < 4:
        return
    shown = (
        mask != 0
        if mask is not None and mask.shape == tokens.shape
        else tokens != (-1 if setup.padding is None else setup.padding)
    )
    known = {getattr(setup.config, f"{name}_token_id", None) for name in ("bos", "eos", "cls", "sep")}
    for where, rows, there in (("begin", tokens, shown), ("end", tokens.flip(1), shown.flip(1))):
        first = there.int().argmax(1, keepdim=True).clamp(max=rows.shape[1] - 2)
        pairs = torch.cat([rows.gather(1, first), rows.gather(1, first + 1)], 1)
        token = int(pairs[0, 0])
        only = ((rows == token) & there).sum(1) == 2
        if bool((pairs == token).all()) and bool(only.all()) and len(rows) >= (2 if token in known else MANY):
            yield Mistake(
                what=f"all rows {where} with token {token} twice",
                why="the chat template and the tokenizer probably both add this token, but inference adds only one",
                do="Tokenize the template's text with add_special_tokens=False",
            )


@checks
def untrained_rows(setup: BeforeTraining) -> Iterator[Mistake]:
    """Find tokens with untrained embeddings: zeros, or values close to the mean embedding in a frozen table."""
    table, tokens = setup.ends[0].weight if setup.ends is not None else None, setup.tokens
    if table is None or tokens is None or table.ndim != 2 or not 0 <= int(tokens.max()) < len(table):
        return
    values, used = whole(table).float(), tokens.unique()
    if values.shape != table.shape:  # a part of it
        return
    used = used[used != setup.padding] if setup.padding is not None else used
    apart = (values - values.mean(0)).norm(dim=1)
    zero, middle = ~values[used].any(1), apart[used] < 0.1 * apart.median()
    new = used[zero | middle] if not table.requires_grad else used[zero]
    if len(new) and bool(values.any()):
        yield Mistake(
            what=f"tokens {listing([*map(str, new.tolist())])} of the batch have embeddings "
            + ("of zeros" if bool(zero.any()) else "close to the mean embedding, and the embedding matrix is frozen"),
            why="the model cannot tell new tokens apart",
            do="Train the embeddings (modules_to_save, or trainable_token_indices of LoRA), and initialize new rows at "
            "random around the mean",
        )


@checks
def sees_next_token(setup: BeforeTraining) -> Iterator[Mistake]:
    """Find a model that can read the tokens to predict, because a causal mask or masked tokens are missing."""
    trial = setup.trial
    if trial is None or not trial.reads or trial.causal or setup.is_encoder_decoder:
        return
    if trial.offset == 1:
        yield Mistake(
            what="the labels are the next tokens, and the model's logits change with later tokens",
            why="the model sees the labels in its input, so the loss falls although the model learns nothing",
            do="Give the attention a causal mask (is_causal=True), and check the dimension of each softmax, view and "
            "norm",
        )
    elif trial.offset == 0 and "MaskedLM" in type(setup.inner).__name__:
        yield Mistake(
            what="all labels equal the input's tokens, and no token is masked",
            why="the model learns to copy its input",
            do="Mask 15% of the tokens, and set all other labels to -100 (DataCollatorForLanguageModeling does both)",
        )


@checks
def labels_of_shown_tokens(setup: BeforeTraining) -> Iterator[Mistake]:
    """Find a masked language model that also predicts the tokens that it sees."""
    tokens, labels = setup.tokens, setup.labels
    masked = "MaskedLM" in type(setup.inner).__name__ and tokens is not None and labels is not None
    if not masked or labels is None or tokens is None or labels.shape != tokens.shape:
        return
    same = (labels == tokens)[labels >= 0].float()
    if len(same) and IN_A_ROW < float(same.mean()) < 1.0:
        yield Mistake(
            what=f"{float(same.mean()):.0%} of the labels equal the token at their position in the input",
            why="the model sees these tokens, so most of the loss only teaches it to copy",
            do=f"Set the labels of all tokens that are not masked to {IGNORED}",
        )


@checks
def equal_inputs(setup: BeforeTraining) -> Iterator[Mistake]:
    """Find batches of equal rows, and batches that consist mostly of a single token."""
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
                why="the batch is mostly padding, or the tokenizer does not know the text",
                do="Decode a row with the tokenizer",
            )


@checks
def beyond_tables(setup: BeforeTraining) -> Iterator[Mistake]:
    """Find token ids, labels or positions that are too large for the model."""
    config, tokens, labels = setup.config, setup.tokens, setup.labels
    if config is None or tokens is None or not callable(getattr(config, "get_text_config", None)):
        return
    text = config.get_text_config()
    vocabulary, longest = getattr(text, "vocab_size", None), getattr(text, "max_position_embeddings", None)
    task = bool(re.search(r"Classification$", type(setup.inner).__name__)) and getattr(config, "num_labels", 1) > 1
    ids = labels if labels is not None and not labels.is_floating_point() and labels.numel() else None
    for value, limit, what, do in (
        (int(tokens.max()) + 1, vocabulary, "token", "Call model.resize_token_embeddings(len(tokenizer))"),
        (int(ids.max()) + 1 if task and ids is not None else 0, getattr(config, "num_labels", 0), "label", LABELS),
        (tokens.shape[1], longest, "position", "Cut the rows, or load the model with more positions"),
    ):
        if isinstance(limit, int) and 0 < limit < value:
            yield Mistake(
                what=f"the batch has {what} {value - 1}, and the model has {limit} {what}s (0 to {limit - 1})",
                why=f"the model has no {'position' if what == 'position' else 'matrix row'} with this number",
                do=do,
            )


@checks
def image_values(setup: BeforeTraining) -> Iterator[Mistake]:
    """Find images that were not divided by 255 or were divided twice, and inputs that are not finite."""
    for name, value in setup.batch.items():
        if not value.is_floating_point() or not value.numel() or re.search("mask|label|embeds", name):
            continue
        low, high = float(value.detach().min()), float(value.detach().max())
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
                do="Scale images as the model's processor does, usually to a mean of 0 and a standard deviation of 1",
            )


@checks
def reads_padding(setup: BeforeTraining) -> Iterator[Mistake]:
    """Find an encoder that reads padding because the mask is missing or does not hide the padding."""
    mask, tokens, padding = setup.batch.get("attention_mask"), setup.tokens, setup.padding
    encodes = setup.is_encoder_decoder or re.search("bert", type(setup.inner).__name__, re.IGNORECASE)
    if tokens is None or not encodes or padding is None or tokens.shape[1] <= TAIL:
        return
    ends = (tokens[:, -TAIL:] == padding).all(1)
    if bool(ends.any()) and (mask is None or (mask.shape == tokens.shape and bool((mask[:, -TAIL:] != 0).all()))):
        yield Mistake(
            what=f"{int(ends.sum())} rows end in padding (token {padding}) that no mask hides",
            why="all tokens of the encoder attend to the padding",
            do="Pass the tokenizer's attention_mask",
        )


@checks
def labels_of_padding(setup: BeforeTraining) -> Iterator[Mistake]:
    """Find padding at the end of a language model's labels."""
    trial, mask = setup.trial, setup.batch.get("attention_mask")
    targets = trial.targets if trial is not None and (trial.offset is not None or setup.is_encoder_decoder) else None
    if targets is None or targets.classes.ndim != 2 or targets.classes.shape[1] <= TAIL:
        return
    shown = targets.classes.where(targets.counted, IGNORED)[:, :-1]  # the last logits may have no label
    same = shown[(shown[:, -TAIL:] == shown[:, -1:]).all(1), -1]
    of, rows = same[same >= 0].unique(return_counts=True)
    hidden = mask is not None and mask.shape == targets.classes.shape and not setup.is_encoder_decoder
    if len(of) == 1 and (int(rows) > 1 or setup.padding == int(of)) and not (hidden and bool((mask == 0).any())):
        ends = int((shown == of).flip(1).cumprod(1).sum())
        if int((shown == of).sum()) - ends <= len(shown):  # where it is an end of text, too
            yield Mistake(
                what=f"{int(rows)} rows end in several targets that are token {int(of)}, and the loss counts these "
                "targets",
                why=f"token {int(of)} is probably padding, so the model learns to predict padding",
                do=f"Set the labels to {IGNORED} at padding, or pass ignore_index",
            )
