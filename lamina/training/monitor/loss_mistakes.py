"""Find mistakes in the inputs of torch's loss and attention functions."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence

import torch

from lamina.training.monitor.before_training import BeforeTraining, Mistake, checks
from lamina.training.monitor.first_pass import IGNORED, is_rounded

FEW = 16  # numbers that lie between 0 and 1 by chance
CENTER = 0.25  # before training, the mean of a sigmoid's outputs differs from 0.5 by at most this
ZEROS = 0.02  # the fraction of logits from which zeros are reported
FAR = 100.0  # targets that are this many times larger than the outputs, and than 1, were not scaled
DISTANCES = ("mse_loss", "l1_loss", "smooth_l1_loss", "huber_loss")
OUTSIDE = 0.05  # the fraction of targets outside of the outputs' range from which the range is reported
LEAST_LOSS = 0.25  # nats: a lower limit of the loss that keeps a model from learning
SMOOTHED = 0.5  # from this label smoothing on, the model learns to guess


def _called(setup: BeforeTraining, name: str) -> dict[str, object]:
    return dict(setup.trial.calls.get(name, {})) if setup.trial is not None else {}


@checks
def loss_inputs(setup: BeforeTraining) -> Iterator[Mistake]:
    """Find wrong inputs of a loss: probabilities as logits, logits as log-probabilities, or a wrong shape."""
    logits = _called(setup, "cross_entropy").get("input")
    viewed = setup.trial.logits if setup.trial is not None else None
    for name, of in (("cross_entropy", "softmax"), ("binary_cross_entropy_with_logits", "sigmoid")):
        values = _called(setup, name).get("input")
        if not isinstance(values, torch.Tensor) or values.ndim < 2 or values.numel() < FEW or not bool(values.any()):
            continue
        rows = values.float().movedim(1, -1).flatten(0, -2)
        center = abs(float(rows.mean()) - 0.5) < CENTER  # new logits lie close together, but around a bias near 0
        sums = center if of == "sigmoid" else torch.allclose(rows.sum(1), torch.ones(()).to(rows), atol=1e-2)
        if sums and bool(((rows >= 0) & (rows <= 1)).all()):
            yield Mistake(
                what=f"{name} gets only numbers from 0 to 1, as after a {of}",
                why=f"this loss applies a {of} too, and a second {of} keeps the loss from falling",
                do=f"Pass logits: leave out the {of} before the loss",
            )
        zeros = rows[rows.any(1)][:, rows.any(0)] == 0  # without padding, and classes without weights
        if (share := float(zeros.float().mean())) > ZEROS:
            yield Mistake(
                what=f"{share:.0%} of the logits are exactly 0",
                why="an activation (such as ReLU) or a dropout after the head stops the gradient of these logits",
                do="Remove the activation or dropout after the head",
            )
    if isinstance(logits, torch.Tensor) and viewed is not None and logits.ndim == viewed.ndim == 3:
        turned, shape = viewed.transpose(1, 2), logits.shape
        if turned.shape == shape and torch.equal(viewed.reshape(shape), logits) and not torch.equal(turned, logits):
            yield Mistake(
                what=f"cross_entropy gets logits of shape {[*viewed.shape]} viewed as {[*shape]}",
                why="view and reshape do not move dimensions, so the classes of different tokens are mixed",
                do="Pass logits.transpose(1, 2), or logits.flatten(0, 1) and labels.flatten()",
            )
    for name, of, log in (("nll_loss", 1, True), ("kl_div", -1, True), ("kl_div", -1, False), ("cross_entropy", 1, 0)):
        given = _called(setup, name)
        values = given.get("input" if log else "target")
        if not isinstance(values, torch.Tensor) or values.ndim < 2 or not values.is_floating_point():
            continue
        total = (
            values.detach().float().logsumexp(of) if log or given.get("log_target") else values.sum(of).float().log()
        )
        if not torch.allclose(total, torch.zeros(()).to(total), atol=1e-2):
            which = "log-probabilities of the classes" if log else "probabilities in its target"
            yield Mistake(
                what=f"{name} gets no {which}",
                why="this loss function neither takes a logarithm nor normalizes, so the loss has no lower limit",
                do={
                    "nll_loss": "Pass log_softmax(logits, dim=1), or use cross_entropy",
                    "kl_div": "Pass log_softmax of the student's logits, and softmax of the teacher's logits",
                }.get(name, "For rows of several classes, use binary_cross_entropy_with_logits"),
            )
            break
    yield from _viewed_pixels(logits, viewed)
    yield from _broadcasts(setup)


def _viewed_pixels(logits: object, viewed: torch.Tensor | None) -> Iterator[Mistake]:
    """Find logits [rows, classes, ...] that the loss gets viewed as [positions, classes]."""
    if isinstance(logits, torch.Tensor) and viewed is not None and logits.ndim == 2 < viewed.ndim:
        classes = logits.shape[1]
        flat = classes == viewed.shape[1] != viewed.shape[-1] and viewed.numel() == logits.numel()
        if flat and torch.equal(viewed.flatten(), logits.flatten()):
            yield Mistake(
                what=f"cross_entropy gets logits of shape {[*viewed.shape]} viewed as {[*logits.shape]}",
                why="view and reshape do not move dimensions, so a row mixes the logits of different pixels or tokens",
                do="Pass the logits and the labels without a view, or logits.movedim(1, -1).flatten(0, -2)",
            )


def _broadcasts(setup: BeforeTraining) -> Iterator[Mistake]:
    viewed = setup.trial.logits if setup.trial is not None else None
    known = [viewed] if viewed is not None else [*setup.batch.values()]
    for name in (*DISTANCES, "broadcast"):
        pair = [x for x in _called(setup, name).values() if isinstance(x, torch.Tensor)][:2]
        shapes = [[*x.shape] for x in pair]
        same = (torch.equal(x.flatten(), each.flatten()) for x in pair for each in known)
        if shapes[:1] != shapes[1:] and (name != "broadcast" or any(same)):
            yield Mistake(
                what=f"{'the loss' if name == 'broadcast' else name} compares outputs of shape {shapes[0]} with "
                f"targets of shape {shapes[1]}",
                why="torch compares each output with each target, so the model learns the targets' mean",
                do="Give outputs and targets the same shape, for example with outputs.squeeze(-1)",
            )


@checks
def targets(setup: BeforeTraining) -> Iterator[Mistake]:
    """Find targets that outputs cannot reach or reach too slowly, and a teacher that is trained."""
    given = _called(setup, "binary_cross_entropy_with_logits").get("target")
    if isinstance(given, torch.Tensor) and given.numel() and not 0 <= float(given.min()) <= float(given.max()) <= 1:
        yield Mistake(
            what=f"binary_cross_entropy_with_logits gets targets from {float(given.min()):g} to {float(given.max()):g}",
            why="the loss of a target below 0 or above 1 has no lower limit",
            do="Use the labels 0 and 1 for the two classes",
        )
    for name in DISTANCES:
        values = [x for x in _called(setup, name).values() if isinstance(x, torch.Tensor) and x.numel()][:2]
        sizes = [float(x.float().square().mean().sqrt()) for x in values]
        if len(sizes) == 2 and sizes[1] > FAR * max(sizes[0], 1.0) and not _unreachable(setup, name):
            yield Mistake(
                what=f"the targets of {name} are about {sizes[1]:.2g}, and the model's outputs about {sizes[0]:.2g}",
                why="such targets need very many steps, and make the gradients as large as the targets",
                do="Scale the targets to a mean of 0 and a standard deviation of 1, and scale predictions back",
            )
    if setup.trial is not None and setup.trial.teaches:
        yield Mistake(
            what="the target of kl_div depends on trainable weights that the input of kl_div does not use",
            why="the loss also trains the teacher, so the teacher moves toward the student",
            do="Compute the teacher's output under torch.no_grad(), and set the teacher's requires_grad to False",
        )
    if setup.trial is not None and setup.trial.same:
        yield Mistake(
            what="the model is its own reference: the loss calls the model with and without gradients on equal inputs",
            why="the reference (or teacher) changes with the model, so the two outputs never differ",
            do="Use a frozen copy as the reference: copy.deepcopy(model).requires_grad_(False). With LoRA, run the "
            "reference under model.disable_adapter()",
        )


def _unreachable(setup: BeforeTraining, name: str) -> tuple[float, float, float] | None:
    """Return the fraction of a loss's targets that the last activation cannot reach, and the activation's range."""
    given = _called(setup, name)
    target, limits = given.get("target"), given.get("range")
    if not isinstance(target, torch.Tensor) or not target.numel() or not isinstance(limits, tuple):
        return None
    low, high = limits
    share = float(((target < low - 1e-3) | (target > high + 1e-3)).float().mean())
    return (share, low, high) if share > OUTSIDE else None


@checks
def unreachable_targets(setup: BeforeTraining) -> Iterator[Mistake]:
    """Find targets that lie outside of the range of the model's last activation."""
    for name in DISTANCES:
        if found := _unreachable(setup, name):
            share, low, high = found
            yield Mistake(
                what=f"{share:.0%} of the targets of {name} cannot be reached, because an activation (such as sigmoid, "
                f"tanh or ReLU) gives outputs from {low:g} to {high:g}",
                why="the loss of these targets has a lower limit above 0, and the activation's gradient fades there",
                do="Remove the last activation, or scale the targets into its range",
            )


@checks
def bounded_logits(setup: BeforeTraining) -> Iterator[Mistake]:
    """Find logits that are cosines without a temperature, or the outputs of tanh or sigmoid."""
    for name in ("cross_entropy", "binary_cross_entropy_with_logits"):
        given = _called(setup, name)
        scores, limits, cosines = given.get("input"), given.get("range"), given.get("lengths") == 1.0
        if not isinstance(scores, torch.Tensor) or scores.ndim < 1 or not scores.numel():
            continue
        if cosines and float(scores.abs().max()) <= 1.01:
            limits = (-1.0, 1.0)
        if not isinstance(limits, tuple) or not math.isfinite(limits[1]):
            continue
        low, high = limits
        others = (scores.shape[min(1, scores.ndim - 1)] - 1) * math.exp(low - high)
        least = math.log1p(others if name == "cross_entropy" else math.exp(-high))
        softmax = (low, high) == (0.0, 1.0) and name != "cross_entropy"  # which loss_inputs reports
        if least > LEAST_LOSS and not softmax:
            yield Mistake(
                what=f"all logits of {name} lie between {low:g} and {high:g}, so its loss is {least:.2g} or more",
                why="the logits are cosines without a temperature" if cosines else "an activation bounds the logits",
                do="Divide the cosines by a temperature such as 0.07"
                if cosines
                else "Remove the activation before the loss, because the loss takes any number",
            )


@checks
def own_similarity(setup: BeforeTraining) -> Iterator[Mistake]:
    """Find a contrastive loss in which each row is also compared with itself."""
    given = _called(setup, "cross_entropy")
    scores, target = given.get("input"), given.get("target")
    if not isinstance(scores, torch.Tensor) or not isinstance(target, torch.Tensor):
        return
    if scores.ndim != 2 or target.ndim != 1 or not 4 <= len(scores) == scores.shape[1] == len(target):
        return
    own, order = scores.diagonal(), torch.arange(len(scores), device=scores.device)
    same = torch.allclose(scores, scores.T, rtol=1e-3, atol=1e-4) and torch.allclose(own, own[:1].expand_as(own))
    if same and bool((target != order).all()) and bool((own >= scores.amax(1) - 1e-3 * own.abs()).all()):
        yield Mistake(
            what="the similarity of each row with itself is among the logits, and is the largest",
            why="no other row can be more similar, so the loss cannot fall to 0",
            do='Hide the diagonal before the loss: logits.fill_diagonal_(float("-inf"))',
        )


@checks
def ctc_inputs(setup: BeforeTraining) -> Iterator[Mistake]:
    """Find CTC's usual mistakes: no log-probabilities, the blank among the labels, and labels that do not fit."""
    given = _called(setup, "ctc_loss")
    scores, labels, blank = given.get("log_probs"), given.get("targets"), given.get("blank")
    blank = blank if isinstance(blank, int) else 0
    if not isinstance(scores, torch.Tensor) or not isinstance(labels, torch.Tensor):
        return
    frames, counts = (torch.as_tensor(given[name]).flatten().tolist() for name in ("input_lengths", "target_lengths"))
    rows: Sequence[torch.Tensor] = (
        labels.split(counts) if labels.ndim == 1 else [row[:n] for row, n in zip(labels, counts, strict=True)]
    )
    total = scores.detach().float().logsumexp(-1)
    if not torch.allclose(total, torch.zeros(()).to(total), atol=1e-2):
        yield Mistake(
            what="ctc_loss gets no log-probabilities",
            why="this loss does not normalize, so the loss has no lower limit",
            do="Pass logits.log_softmax(-1)",
        )
    if found := sum(int(torch.eq(row, blank).sum()) for row in rows):
        yield Mistake(
            what=f"{found} of the labels of ctc_loss are the blank ({blank})",
            why="CTC inserts blanks itself, so the model learns to spell blanks, and padding is counted as text",
            do=f"Set padding in the labels to {IGNORED} (or shorten target_lengths), and count labels from {blank} + 1",
        )
    needs = [len(row) + int(torch.eq(row[1:], row[:-1]).sum()) for row in rows]
    if cut := sum(need > has for need, has in zip(needs, frames, strict=True)):
        yield Mistake(
            what=f"{cut} of the {len(rows)} rows have more labels than frames (up to {max(needs)} labels for "
            f"{min(frames)} frames)",
            why="CTC cannot align these rows, so their loss is infinite, or 0 with zero_infinity=True",
            do="Leave out these rows, or use a model with more frames per second",
        )


@checks
def mean_of_kl(setup: BeforeTraining) -> Iterator[Mistake]:
    """Find a kl_div that is divided by the number of classes."""
    given = _called(setup, "kl_div")
    scores = given.get("input")
    if isinstance(scores, torch.Tensor) and scores.ndim > 1 and given.get("reduction", "mean") == "mean":
        yield Mistake(
            what=f'kl_div has reduction="mean", which also divides by the {scores.shape[-1]} classes',
            why="the loss and its gradients are smaller than the divergence by this factor",
            do='Pass reduction="batchmean"',
        )


@checks
def much_smoothing(setup: BeforeTraining) -> Iterator[Mistake]:
    """Find a label smoothing that hides the labels."""
    smoothing = _called(setup, "cross_entropy").get("label_smoothing", 0.0)
    if isinstance(smoothing, float) and smoothing >= SMOOTHED:
        yield Mistake(
            what=f"cross_entropy has a label smoothing of {smoothing:g}",
            why="this fraction of each target is spread over all classes, so the model learns to guess",
            do="Pass 0.1 or less",
        )


@checks
def sign_of_loss(setup: BeforeTraining) -> Iterator[Mistake]:
    """Find training that raises the loss because the loss has the wrong sign or the optimizer maximizes."""
    trial, rises = setup.trial, any(group.get("maximize") for _, group in setup.settings)
    targets = trial.targets if trial is not None else None
    added = targets.weights[targets.counted] if targets is not None else torch.ones(1)
    sizes = (added / added.abs().max()).round(decimals=2).unique()  # in a policy gradient, the returns
    negative = bool((added < 0).all()) and len(sizes) <= max(1, len(added) // 2)
    if negative and _has_returns(setup, added):
        return
    if targets is not None and targets.count == 2 and (labels := setup.labels) is not None:
        same = targets.classes.shape == labels.shape
        negative = same and not bool((targets.classes == labels)[targets.counted].any())
    if negative != rises and (negative or trial is None or trial.loss >= 0):
        yield Mistake(
            what="the optimizer has maximize=True" if rises else "the loss is minus a cross-entropy",
            why="each step raises the loss" if rises else "to minimize this loss, the model avoids the labels",
            do="Minimize the loss: remove the minus, and pass maximize only if you call backward on a reward",
        )


def _has_returns(setup: BeforeTraining, weights: torch.Tensor) -> bool:
    """Return whether the batch holds the negative factors of the loss, such as the returns of a policy gradient."""
    floats = [x for x in setup.batch.values() if x.is_floating_point() and x.numel() and not x.requires_grad]
    return any(
        bool((x < 0).all()) and x.numel() in (len(weights), len(next(iter(setup.batch.values())))) for x in floats
    )


@checks
def additive_mask(setup: BeforeTraining) -> Iterator[Mistake]:
    """Find float attention masks of zeros and ones, which torch adds to the scores."""
    mask = _called(setup, "attention").get("mask")
    if isinstance(mask, torch.Tensor) and mask.is_floating_point() and set(mask.unique().tolist()) == {0.0, 1.0}:
        yield Mistake(
            what="attention gets a float mask of zeros and ones",
            why="torch adds such a mask to the scores, so the mask hides no token",
            do="Pass a boolean mask, or 0 and -inf",
        )


@checks
def rounded_positions(setup: BeforeTraining) -> Iterator[Mistake]:
    """Find token positions that half precision rounds so much that neighboring tokens share a position."""
    tables = (x.squeeze() for x in setup.model.buffers() if x.is_floating_point())
    if (setup.trial is not None and setup.trial.rounded) or any(x.ndim == 2 and is_rounded(x) for x in tables):
        yield Mistake(
            what="the positions of tokens are rounded, so that neighbors share a position",
            why="bfloat16 holds integers exactly only up to 256, and float16 up to 2048",
            do="Compute positions and their angles in float32 (torch.arange without dtype, and autocast disabled), and "
            "cast only the cosines and sines",
        )


@checks
def changed_inputs(setup: BeforeTraining) -> Iterator[Mistake]:
    """Find outputs that depend on the wrong inputs, such as masked tokens, other rows or the row's index."""
    trial, rows = setup.trial, next(iter(setup.batch.values()), None)
    if trial is None:
        return
    if trial.leaks:
        why, do = {
            "attention": (
                "the mask hides queries instead of keys, or hides nothing",
                "Mask the keys: mask[:, None, None, :]",
            ),
            "inverted": (
                "attention reads only the masked tokens, so the mask is inverted",
                "Pass ~mask.bool() as torch's key_padding_mask, which is True at padding. Other masks are 1 at tokens",
            ),
            "summary": (
                "the model reads the summary of a row from a padding token",
                "Take the last token that the mask shows: hidden[torch.arange(len(hidden)), mask.sum(1) - 1]. For a "
                "transformers model, set config.pad_token_id to the batch's padding token",
            ),
            "mean": ("a mean over all positions includes padding", "Average over the tokens that the mask shows"),
        }[trial.leaks]
        what = "the model's outputs depend on tokens that the mask hides"
        yield Mistake(what=what, why=why, do=do, note=trial.leaks == "mean")
    mixed = getattr(setup.config, "layer_types", None)  # of which some have no positions
    if not trial.ordered:
        yield Mistake(
            what="swapping two tokens does not change the first layer's outputs for other tokens",
            why="attention gets no positions, or rotary positions run along the wrong dimension",
            do="Add positions to the embeddings, or rotate queries and keys by their index among the tokens",
            note=bool(trial.causal and (mixed or not trial.turns)),  # decoders learn positions from their mask
        )
    if trial.drops:
        yield Mistake(
            what="dropout is active in evaluation mode",
            why="functional.dropout and scaled_dot_product_attention do not know the module's mode",
            do="Pass training=self.training, or dropout_p=self.dropout if self.training else 0.0",
        )
    if trial.by_row:
        yield Mistake(
            what="equal rows of the batch have different outputs",
            why="a part of the model depends on a row's index in the batch (for example, positions along dimension 0)",
            do="Add positions along the tokens: x + positions[:, : x.shape[1]]",
        )
    if not trial.mixes or trial.logits is None or rows is None or setup.is_encoder_decoder:
        return
    graph = rows.ndim < 2 or rows.shape[1] == len(rows) or (rows.ndim == 2 and rows.is_floating_point())
    if trial.logits.ndim == 3 or not graph:  # its nodes are no rows
        yield Mistake(
            what="the outputs of a row depend on the other rows of the batch",
            why="a module mistakes the batch for the sequence, as torch's attention without batch_first=True does",
            do="Pass batch_first=True, and check the dimension of each view, permute and softmax",
        )
