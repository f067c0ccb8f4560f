"""Predict tokens from each layer's hidden states with the final norm and the output head (the logit lens)."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from typing import Any

import pandas as pd
import torch
from torch import nn

from lamina.core.frames import Frame
from lamina.core.text import ranges
from lamina.errors import UserError
from lamina.modeling.parts import temporary_hooks
from lamina.probes.engine.context import Context
from lamina.probes.engine.figures import Figure, chart
from lamina.probes.engine.layer_calls import rows_of
from lamina.probes.engine.losses import is_causal, logits_of, masked_positions
from lamina.probes.engine.registry import COLUMNS, Probe, Sample, check_most, probe, sample_of
from lamina.probes.engine.statistics import Running
from lamina.probes.structure.hooks import Args, Output, forward, forwards, observe, refill

METRICS = ("cross_entropy", "kl_to_final", "top1_agreement")
_LOGITS = 2**23  # the largest number of logits at a time (32 MiB in float32)
_TOKENS = 1024  # the default for a corpus
_TRIED = 8  # the number of tokens on which Lamina compares ``Tail`` with the model


@probe
class LogitLens(Probe):
    """Predict tokens from each hidden state x^l as if x^l were the last hidden state (the logit lens).

    The hidden state x^l is the residual stream before layer l, and x^N is the residual stream after the last layer.
    Lamina applies all operations that follow the layers to x^l: the final norm, the output head, and any scale or
    soft-cap. The predictions from x^N are the model's own predictions. Rows have the role "state" and layer = l. Lamina
    averages over the predicted tokens of each sequence, then over sequences. The following metrics have a standard
    error over sequences:

    ``cross_entropy``: the cross-entropy of the true token in nats. A causal model predicts the next token. A masked
        model predicts 15 % of each sequence's tokens, which Lamina masks. Sequences of equal length have the same
        masked positions.
    ``kl_to_final``: the KL divergence in nats from the model's own predictions to the predictions from x^l.
    ``top1_agreement``: the fraction of predicted tokens for which x^l and the model have the same most likely token.

    Early hidden states may predict worse than uniform guessing, because their basis differs from the basis of the last
    hidden state. The metric uniform_cross_entropy (layer -1, sublayer "model") is the cross-entropy of uniform
    guessing, ln(vocabulary size).
    """

    name = "logit_lens"
    title = "Logit lens"
    summary = (
        "predictions of the output head from each layer's output: cross-entropy, KL to the final prediction, top-1 "
        "agreement"
    )
    source = "nostalgebraist 2020 (the logit lens), with the model's own final norm"
    over_steps = ("cross_entropy", "top1_agreement")
    needs = frozenset({"tokens"})

    def __init__(self, tokens: int | None = None):
        self.tokens = check_most(self.name, "tokens", tokens)
        self._read: list[Mapping[str, torch.Tensor]] = []

    def cost(self, context: Context) -> float:
        weight = getattr(context.structure.head, "weight", None)
        parameters = sum(p.numel() for p in context.model.parameters())
        share = weight.numel() / max(1, parameters) if weight is not None else 0.5
        tokens = context.most(self.tokens, _TOKENS) or context.tokens()
        return (1 + 1.5 * share * context.structure.num_layers) * tokens

    def begin(self, context: Context) -> None:
        model: Any = context.model
        head = model.get_output_embeddings() if hasattr(model, "get_output_embeddings") else None
        if head is None:
            raise UserError(
                f"logit_lens: {type(model).__name__} has no language-model head. Choose a causal or masked "
                "language model."
            )
        context.check_head()
        ids = context.batches[0]["input_ids"][:1].to(context.device)
        self._causal = is_causal(model, ids)
        self._mask: int | None = getattr(context.tokenizer, "mask_token_id", None)
        if not self._causal and self._mask is None:
            raise UserError(
                "logit_lens: a masked language model needs its tokenizer's mask token. Name the tokenizer with "
                "--tokenizer."
            )
        self._tail = Tail(context, ids[:, :_TRIED])

    def measured(self, context: Context) -> Sample:
        return sample_of(self._read)

    def finish(self, context: Context) -> pd.DataFrame:
        running, tokens_read, most = Running(), 0, context.most(self.tokens, _TOKENS)
        self._read = []
        batches = context.batches[: context.forwards or len(context.batches)]
        total = sum(b["input_ids"].numel() for b in batches)
        for sequence in (row for batch in batches for row in rows_of(batch)):
            context.progress(tokens_read, min(most or total, total), "logit lens")
            sequence = context.on_device(sequence)
            sums, predicted = self._sequence(context, sequence)
            if predicted:
                running.add((sums / predicted).unsqueeze(0))
            tokens_read += predicted
            self._read.append(sequence)
            if most and tokens_read >= most:
                break
        if not running.count:
            raise UserError("logit_lens: there is no token to predict. Give sequences of at least 2 tokens.")
        rows: list[tuple] = []
        for metric, *columns in zip(METRICS, running.mean.T.tolist(), running.standard_error.T.tolist(), strict=True):
            for state, (value, error) in enumerate(zip(*columns, strict=True)):
                rows.append((state, "block", "state", 0, metric, value, error))
        rows.append((-1, "model", "head", 0, "uniform_cross_entropy", math.log(self._tail.vocabulary), math.nan))
        return pd.DataFrame(rows, columns=COLUMNS)

    def _sequence(self, context: Context, inputs: Mapping[str, torch.Tensor]) -> tuple[torch.Tensor, int]:
        """Return METRICS summed over one sequence's predicted tokens, [states, metrics], and the number of tokens."""
        ids = inputs["input_ids"]
        mask = inputs.get("attention_mask", torch.ones_like(ids))[0].bool()
        if self._causal:
            chosen = (mask[:-1] & mask[1:]).nonzero().flatten()
            targets = ids[0, chosen + 1]
        else:
            text = mask.nonzero().flatten()
            chosen = text[masked_positions(len(text)).to(ids.device)] if len(text) else text
            targets = ids[0, chosen]
            ids = ids.clone()
            assert self._mask is not None  # ``begin`` raised an error otherwise
            ids[0, chosen] = self._mask
        states: dict[int, torch.Tensor] = {}

        def see(state: int, value: torch.Tensor) -> None:
            states[state] = value[0, chosen]

        with torch.no_grad():
            with observe(context.structure.states(), see, root=context.base):
                output = context.forward({**inputs, "input_ids": ids}, head=False)
            del output
            last = len(states) - 1
            sums = torch.zeros(last + 1, len(METRICS), dtype=torch.float64)
            with self._tail.instead_of_the_layers(ids):
                size = min(self._tail.chunk, ids.shape[1])
                for start in range(0, len(chosen), size):
                    part = slice(start, start + size)
                    final = self._tail(states[last][part])
                    for state in range(last + 1):
                        logits = final if state == last else self._tail(states[state][part])
                        sums[state] += compare(logits, final, targets[part]).cpu()
        return sums, len(chosen)

    def figures(self, frame: Frame) -> Iterator[tuple[Figure, str]]:
        for metrics, title, unit, caption in (
            (("cross_entropy", "kl_to_final"), "Loss by state", "nats per token", "Cross-entropy of the true token"),
            (("top1_agreement",), "Agreement with the final prediction", "share", "Share of equal top tokens"),
        ):
            caption += ", from each hidden state through the model's final norm and output head."
            axes = {"color": "metric", "x_title": "state", "band": "standard_error"}
            yield from chart(frame[frame["metric"].isin(metrics)], title, unit, caption, **axes)

    def sentences(self, frame: Frame) -> Iterator[str]:
        table = frame[frame["layer"] >= 0].pivot(index="layer", columns="metric", values="value")
        loss, agreement = table["cross_entropy"], table["top1_agreement"]
        last = table.index[-1]
        uniform = float(frame.loc[frame["metric"] == "uniform_cross_entropy", "value"].iloc[0])
        yield (
            f"The loss of predictions from the hidden states goes from {loss.iloc[0]:.2f} nats (state 0) to "
            f"{loss.iloc[-1]:.2f} nats (state {last}). Uniform guessing has a loss of {uniform:.2f} nats."
        )
        agreeing = agreement.index[agreement >= 0.5]
        yield (
            f"From state {agreeing[0]} of {last} on, at least half of the tokens already get their final prediction."
            if len(agreeing) and (agreement.loc[agreeing[0] :] >= 0.5).all()
            else (
                f"At state {table.index[-2]}, {agreement.iloc[-2]:.0%} of the tokens already get their final "
                "prediction."
            )
        )
        worse = table.index[loss > uniform]
        if last in worse:
            yield "The model is no better than uniform guessing, so this probe shows little."
        elif len(worse):
            yield (
                f"States {ranges(worse)} give worse predictions than uniform guessing, perhaps because the basis "
                "of these states differs from the last state's basis."
            )


def compare(logits: torch.Tensor, final: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    """Sum METRICS over tokens. ``logits`` and ``final`` are [tokens, vocabulary], and ``targets`` is [tokens]."""
    size, size_final = logits.logsumexp(-1), final.logsumexp(-1)
    cross_entropy = size.double() - logits.gather(1, targets.unsqueeze(1)).squeeze(1).double()
    p = (final - size_final.unsqueeze(1)).exp_()
    divergence = (p * (final - logits)).sum(-1).double() - size_final.double() + size.double()
    same = logits.argmax(-1) == final.argmax(-1)
    return torch.stack([cross_entropy.sum(), divergence.sum(), same.double().sum()])


class Tail:
    """Compute logits from any hidden states with the model's operations after its last layer.

    Lamina runs the model itself, but each layer returns the given states. The logits therefore include any soft-cap or
    scale. Ask for the logits of at most ``chunk`` tokens at a time.
    """

    def __init__(self, context: Context, ids: torch.Tensor):
        """Raise UserError if the last state of ``ids`` [1, tokens] does not give the model's logits."""
        self.model, self._modules = context.model, {site.module for site in context.structure.layers}
        self._forms: dict[nn.Module, Output] = {}
        last: list[torch.Tensor] = []

        def note(module: nn.Module, args: Args, output: Output) -> None:
            self._forms[module] = output

        point = context.structure.states()[context.structure.num_layers]
        observing = observe({0: point}, lambda key, value: last.append(value), root=self.model)
        with torch.no_grad(), temporary_hooks() as hooks, observing:
            hooks += [module.register_forward_hook(note) for module in self._modules]
            expected = logits_of(context.forward({"input_ids": ids}))[0].float()
        self.vocabulary = expected.shape[-1]
        self.chunk = max(1, _LOGITS // self.vocabulary)
        with torch.no_grad(), self.instead_of_the_layers(ids):
            logits = self(last[-1][0])
        if not expected.isfinite().all():
            raise UserError("logit_lens: the model's logits are not finite. Choose another model.")
        # The tolerance allows for rounding in bfloat16, which depends on the shape.
        scale = max(float(expected.abs().max()), 1e-6)
        if not torch.allclose(logits, expected, rtol=0.0, atol=0.02 * scale, equal_nan=True):
            raise UserError(
                f"logit_lens: {type(self.model).__name__}'s logits depend on more than the last state: logits from the "
                f"last state alone differ by {float((logits - expected).abs().max()):.3g}. Choose a model with a head "
                "that reads only the last state."
            )

    def __call__(self, states: torch.Tensor) -> torch.Tensor:
        """Inside ``instead_of_the_layers``, return float32 logits [tokens, vocabulary] of states [tokens, channels]."""
        self._states = states.unsqueeze(0)
        return logits_of(forward(self.model, {"input_ids": self._ids[:, : len(states)]}))[0].float()

    @contextmanager
    def instead_of_the_layers(self, ids: torch.Tensor) -> Iterator[None]:
        """Make each layer return the given states. ``ids`` [1, tokens] needs at least as many tokens as states."""
        self._ids = ids

        def stub(form: Output, *args: object, **kwargs: object) -> Output:
            return refill(form)(self._states)

        with forwards({module: partial(stub, self._forms[module]) for module in self._modules}):
            yield
