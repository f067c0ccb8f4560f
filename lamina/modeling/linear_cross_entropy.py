"""Compute a language model's loss from a few hundred tokens at a time, without storing all logits.

The loss is the mean cross-entropy over the n labels t that are not -100:

    L = 1/n sum_i ( log sum_v exp z_iv  -  z_i,t_i ),     z_i = s W h_i,  or  c tanh(s W h_i / c)

- h_i: the last hidden state of token i
- W: the head's weight [vocab_size, hidden_size]
- s, c: the logits' factor and soft-cap

The gradient of the logits z needs only the softmax of z. So the forward pass computes both the loss and the gradients
for one chunk of tokens at a time. The logits of only one chunk are in memory.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.nn import functional

IGNORED = -100
# Logits in a chunk: enough for the products to run at full speed, 64 MiB of float32 on a CPU.
ELEMENTS = {"cpu": 2**24, "cuda": 2**27}
SMALLEST_CHUNK = 256  # smaller products with the head's weight wait for memory
LARGEST_CHUNK = 512  # on a CPU, unless the logits are few: more tokens are not faster, and the logits leave the caches
FEW = 2**21


# A function of a chunk's logits, labels and soft-cap. It returns the sum of the losses in float32, and the gradient
# of the logits in their dtype.
ChunkKernel = Callable[[torch.Tensor, torch.Tensor, float | None], tuple[torch.Tensor, torch.Tensor]]


class LinearLoss:
    """A function for the attribute ``linear_loss`` of a LaminaForCausalLM. On a GPU, LinearLoss uses Liger's kernels if
    they are installed.

    If all logits fit into one chunk, LinearLoss returns None. The model then computes the loss from the logits.
    Compiled training on a GPU always uses chunks, because chunks are faster there.

    Args:
        compiled: whether to compile the operations on a chunk's logits, which is faster on a GPU.
        elements: the number of logits in a chunk (default: depends on the device).
    """

    def __init__(self, *, compiled: bool = False, elements: int | None = None):
        self.elements = elements
        self.liger = _liger() if torch.cuda.is_available() else None
        self.compiled = compiled
        # On a GPU, the vocabulary is a constant. A kernel for any size would read one half-precision number at a time.
        dynamic = None if torch.cuda.is_available() else True
        self.kernel: ChunkKernel = torch.compile(chunk_loss, dynamic=dynamic) if compiled else chunk_loss

    def chunk(self, vocab_size: int, device: torch.device) -> int:
        """Return the number of tokens in a chunk, a power of 2."""
        elements = self.elements or ELEMENTS.get(device.type, ELEMENTS["cpu"])
        most = max(elements // vocab_size, 1 if self.elements else SMALLEST_CHUNK)
        if device.type == "cpu" and not self.elements:
            most = min(most, max(LARGEST_CHUNK, FEW // vocab_size))
        return 1 << (most.bit_length() - 1)

    def __call__(
        self,
        states: torch.Tensor,
        head: nn.Module,
        labels: torch.Tensor,
        *,
        scale: float = 1.0,
        softcap: float | None = None,
        num_items_in_batch: torch.Tensor | int | None = None,
        shift_labels: torch.Tensor | None = None,
        **more: Any,
    ) -> torch.Tensor | None:
        """Return the mean loss in float32, like transformers' ForCausalLMLoss, or None if the loss needs all logits.

        Args:
            states: the last hidden states [batch, tokens, hidden_size]. The state of token i predicts label i + 1.
            head: the output head. The result is None for a head that is not an nn.Linear, or that has a bias, an
                adapter, or a quantized or sharded weight.
            labels: the labels [batch, tokens], with -100 for tokens without a label.
            scale: the factor on the logits.
            softcap: the logits' soft-cap c in c tanh(z / c).
            num_items_in_batch: the divisor of the summed losses (default: the number of labels that are not -100).
            shift_labels: labels that are already shifted by one token.
            more: other arguments of the loss. The result is None with any such argument.
        """
        if type(head) is not nn.Linear or head.bias is not None or type(head.weight) is not nn.Parameter or more:
            return None
        chunk = self.chunk(head.out_features, states.device)
        tokens = states.shape[:-1].numel()
        faster = self.compiled and states.device.type == "cuda" and states.requires_grad
        if tokens <= chunk and not faster:
            return None
        if shift_labels is None:
            shift_labels = functional.pad(labels, (0, 1), value=IGNORED)[..., 1:]
        targets = shift_labels.reshape(-1).to(states.device)
        hidden, weight = states.flatten(0, -2), head.weight
        device = states.device.type
        dtype = torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else hidden.dtype
        exact = dtype in (torch.float32, torch.float64)
        if scale != 1.0:
            hidden = hidden * scale
        if exact and device == "cpu" and softcap is None and hasattr(functional, "linear_cross_entropy"):
            # PyTorch's own loss (2.13) is the fastest in float32 on a CPU. In bfloat16, PyTorch would round the loss.
            more = {"options": torch.nn.LinearCrossEntropyOptions(batch_chunk_size=chunk), "reduction": "sum"}
            with torch.autocast(device, enabled=False):
                loss = functional.linear_cross_entropy  # type: ignore[attr-defined]
                total = loss(hidden.to(dtype), weight, targets, ignore_index=IGNORED, **more)
        elif not exact and device == "cuda" and self.liger is not None:
            more = {"ignore_index": IGNORED, "reduction": "sum", "softcap": softcap, "accum_dtype": torch.float32}
            total = self.liger(hidden.to(dtype), weight.to(dtype), targets, **more)
        else:
            total = LinearCrossEntropy.apply(hidden, weight, targets, softcap, chunk, dtype, self.kernel)
        if num_items_in_batch is None:
            return total / (targets != IGNORED).sum()
        divisor = num_items_in_batch
        return total / (divisor.to(total.device) if isinstance(divisor, torch.Tensor) else divisor)


def chunk_loss(logits: torch.Tensor, labels: torch.Tensor, softcap: float | None) -> tuple[torch.Tensor, torch.Tensor]:
    """Compute the summed loss of a chunk, and the gradient of the chunk's logits. Float64 logits stay float64."""
    z = logits if logits.dtype == torch.float64 else logits.float()
    if softcap is not None:
        z = softcap * torch.tanh(z / softcap)
    counted = (labels != IGNORED).unsqueeze(-1)
    target = labels.unsqueeze(-1).clamp(min=0)
    # Not logsumexp, which Inductor would not fuse with the next lines.
    largest = z.amax(-1, keepdim=True)
    log_sum = largest + (z - largest).exp().sum(-1, keepdim=True).log()
    loss = torch.where(counted, log_sum - z.gather(-1, target), 0.0).sum()
    gradient = (z - log_sum).exp()
    if torch.compiler.is_compiling():  # part of one kernel; a scatter would be another kernel
        gradient = gradient - (torch.arange(z.shape[-1], device=z.device) == target).to(gradient.dtype)
    else:
        gradient = gradient.scatter_add(-1, target, gradient.new_full((1, 1), -1.0).expand_as(target))
    if softcap is not None:
        gradient = gradient * (1 - (z / softcap) ** 2)
    return loss, torch.where(counted, gradient, 0.0).to(logits.dtype)


class LinearCrossEntropy(torch.autograd.Function):
    """The sum of the cross-entropies of the logits W h. The forward pass also computes the gradients."""

    @staticmethod
    def forward(  # type: ignore[override]
        ctx: Any,
        hidden: torch.Tensor,
        weight: torch.Tensor,
        targets: torch.Tensor,
        softcap: float | None,
        chunk: int,
        dtype: torch.dtype,
        kernel: ChunkKernel,
    ) -> torch.Tensor:
        """Sum the losses for ``hidden`` [tokens, hidden_size] with the head's ``weight`` [vocab_size, hidden_size].

        ``dtype`` is the dtype of the logits. The weight's gradient accumulates in float32. The stored gradients are the
        gradients of the summed loss, because the gradients of the mean loss would underflow in float16.
        """
        with torch.autocast(hidden.device.type, enabled=False):
            x, w = hidden.detach().to(dtype), weight.detach().to(dtype)
            wide = torch.float64 if dtype == torch.float64 else torch.float32
            total = torch.zeros((), dtype=wide, device=x.device)
            by_hidden = torch.empty_like(x) if ctx.needs_input_grad[0] else None
            by_weight = torch.zeros_like(w, dtype=wide) if ctx.needs_input_grad[1] else None
            for start in range(0, len(x), chunk):
                rows = x[start : start + chunk]
                loss, gradient = kernel(rows @ w.t(), targets[start : start + chunk], softcap)
                total += loss
                if by_hidden is not None:
                    torch.mm(gradient, w, out=by_hidden[start : start + len(rows)])
                if by_weight is not None and gradient.dtype == by_weight.dtype:
                    by_weight.addmm_(gradient.t(), rows)
                elif by_weight is not None and x.device.type == "cuda":  # sums are float32 before they are rounded
                    by_weight += torch.mm(gradient.t(), rows, out_dtype=by_weight.dtype)
                elif by_weight is not None:
                    by_weight += gradient.t() @ rows
        ctx.gradients = (by_hidden, by_weight)
        ctx.dtypes = (hidden.dtype, weight.dtype)
        return total

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> Any:
        """Multiply the stored gradients by the loss's gradient, in place. You can call backward only once."""
        if ctx.gradients is None:
            raise RuntimeError("the chunked loss supports only one backward pass. Leave out retain_graph.")
        (by_hidden, by_weight), ctx.gradients = ctx.gradients, None
        if by_hidden is not None:
            by_hidden = (by_hidden.to(gradients[0].dtype) * gradients[0]).to(ctx.dtypes[0])
        if by_weight is not None:
            by_weight = by_weight.mul_(gradients[0]).to(ctx.dtypes[1])
        return by_hidden, by_weight, None, None, None, None, None


def _liger() -> Callable[..., torch.Tensor] | None:
    """Return Liger's loss. Return None without Liger, or if Liger can't accumulate the weight's gradient in float32."""
    try:
        from liger_kernel.transformers import functional as liger  # pyright: ignore[reportMissingImports]
    except ImportError:
        return None
    function = getattr(liger, "liger_fused_linear_cross_entropy", None)
    return function if function and "accum_dtype" in inspect.signature(function).parameters else None
