"""The largest singular value of a function's Jacobian, without the matrix: from products with it and its transpose."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch

from lamina.errors import UserError


@dataclass(frozen=True)
class SpectralNorm:
    """A spectral norm and how the search for it ended.

    Attributes:
        value: the norm, float64 on the CPU, [...] one per problem; never above the true one.
        residual: ||J^T u - s v|| / s for the singular triplet (s, u, v): a singular value lies within this of s.
        iterations: the products with J and with J^T.
        converged: whether every residual is below the tolerance.
    """

    value: torch.Tensor
    residual: torch.Tensor
    iterations: int
    converged: bool


class Jacobian:
    """The Jacobian J of ``function`` at ``x`` as a linear map, from one forward pass whose graph is kept.

    J^T u is a backward pass. J v is the derivative of J^T u, which is linear in u, along v: a backward pass through the
    backward pass. So every operation needs a second derivative, none a forward-mode one, which the fused attention
    kernels lack on CPU; they lack the second derivative, too: run attention eagerly.

    ``function`` keeps the shape of ``x`` or not; ``x`` is floating point and nothing else of the function is varied.
    """

    def __init__(self, function: Callable[[torch.Tensor], torch.Tensor], x: torch.Tensor):
        with torch.enable_grad(), _second_derivatives():
            self.x = x.detach().requires_grad_()
            self.y = function(self.x)
            self._u = torch.zeros_like(self.y, requires_grad=True)
            self._back: torch.Tensor | None = None
            if self.y.requires_grad:
                (self._back,) = torch.autograd.grad(self.y, self.x, self._u, create_graph=True, allow_unused=True)

    def forward(self, v: torch.Tensor) -> torch.Tensor:
        """J v, in the shape of y."""
        if self._back is None:
            return torch.zeros_like(self.y)
        with _second_derivatives():
            (product,) = torch.autograd.grad(self._back, self._u, v.to(self.x.dtype), retain_graph=True)
        return product.detach()

    def transpose(self, u: torch.Tensor) -> torch.Tensor:
        """J^T u, in the shape of x."""
        if self._back is None:
            return torch.zeros_like(self.x)
        (product,) = torch.autograd.grad(self.y, self.x, u.to(self.y.dtype), retain_graph=True)
        return product.detach()


@contextmanager
def _second_derivatives() -> Iterator[None]:
    """A UserError of one line in place of PyTorch's errors if an operation of the model has no second derivative."""
    try:
        yield
    except RuntimeError as error:
        text = " ".join(str(error).split())
        # J^T u always depends on u: if its graph ends earlier, an operation's backward pass has none of its own.
        signs = ("derivative", "double backward", "differentiate twice", "not have been used in the graph")
        # Where an operation has no derivative at all, PyTorch raises NotImplementedError, a RuntimeError.
        if isinstance(error, NotImplementedError) or any(sign in text for sign in signs):
            raise UserError(f"the Jacobian needs second derivatives, and the model has none: {text[:200]}") from error
        raise


def spectral_norm(
    function: Callable[[torch.Tensor], torch.Tensor],
    x: torch.Tensor,
    *,
    identity: float = 0.0,
    batch_dims: int = 0,
    tolerance: float = 1e-2,
    iterations: int = 100,
    seed: int = 0,
) -> SpectralNorm:
    """||J - identity * I||_2 of a function's Jacobian J at ``x``.

    Args:
        function: from a tensor to a tensor (of the same shape where ``identity`` is not 0), twice differentiable.
        x: where the Jacobian is taken.
        identity: how many times the identity is subtracted; 1 for the distance to the identity.
        batch_dims: the first dimensions of ``x`` are independent problems, solved at once: 1 for a batch of sequences.
            Only where no output depends on the input of another.
        tolerance: stops when the residual, relative to the norm, is below it.
        iterations: stops there otherwise.
        seed: of the random first vector.

    Raises UserError where the Jacobian isn't finite.
    """
    return norm_of(
        Jacobian(function, x),
        identity=identity,
        batch_dims=batch_dims,
        tolerance=tolerance,
        iterations=iterations,
        seed=seed,
    )


def norm_of(
    jacobian: Jacobian,
    *,
    identity: float = 0.0,
    batch_dims: int = 0,
    tolerance: float = 1e-2,
    iterations: int = 100,
    seed: int = 0,
) -> SpectralNorm:
    """``spectral_norm`` of a Jacobian whose graph exists already."""
    return largest_singular_value(
        lambda v: jacobian.forward(v) - identity * v if identity else jacobian.forward(v),
        lambda u: jacobian.transpose(u) - identity * u if identity else jacobian.transpose(u),
        start_vector(jacobian.x, seed),
        batch_dims=batch_dims,
        tolerance=tolerance,
        iterations=iterations,
    )


def typical_stretch(
    jacobian: Jacobian, *, identity: float = 0.0, batch_dims: int = 0, samples: int = 4, seed: int = 0
) -> torch.Tensor:
    """||J - identity * I||_F / sqrt(n), [...] in float64: the root mean square of the stretch of random
    directions, estimated with ``samples`` of them (Hutchinson), where the spectral norm is the worst direction's.
    """
    squares = []
    for sample in range(samples):
        v = start_vector(jacobian.x, seed + sample)
        product = jacobian.forward(v).to(v.dtype) - identity * v if identity else jacobian.forward(v).to(v.dtype)
        sums = [t.flatten(batch_dims).double().square().sum(-1) for t in (product, v)]
        squares.append((sums[0] / sums[1]).cpu())
    return torch.stack(squares).mean(0).sqrt()


def start_vector(x: torch.Tensor, seed: int = 0) -> torch.Tensor:
    """A random vector of the shape of ``x``, in float32 at least."""
    drawn = torch.randn(x.shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
    return drawn.to(x.device, torch.promote_types(x.dtype, torch.float32))


def largest_singular_value(
    forward: Callable[[torch.Tensor], torch.Tensor],
    transpose: Callable[[torch.Tensor], torch.Tensor],
    start: torch.Tensor,
    *,
    batch_dims: int = 0,
    tolerance: float = 1e-2,
    iterations: int = 100,
) -> SpectralNorm:
    """The largest singular value of a linear map, by Lanczos bidiagonalization (Golub and Kahan 1965) from ``start``.

    The power iteration's products, but the norm is taken over all vectors so far, not the last alone:
    it needs far fewer where the singular values lie close together, as they do near the identity. All vectors are kept
    and made orthogonal again: 2 * iterations of them. Accumulates in float64 at the size of the small matrix only.
    """
    if tolerance <= 0:
        raise UserError(f"tolerance: {tolerance!r} (allowed: a number above 0)")
    if iterations < 1:
        raise UserError(f"iterations: {iterations!r} (allowed: a whole number of at least 1)")
    batch = start.shape[:batch_dims]
    problems = math.prod(batch)

    def flat(vector: torch.Tensor) -> torch.Tensor:
        return vector.reshape(problems, -1)

    dtype = torch.promote_types(start.dtype, torch.float32)
    right, alpha, beta = [_unit(flat(start.to(dtype)))[0]], [], []
    left_vectors: list[torch.Tensor] = []
    values = residual = torch.zeros(problems, dtype=torch.float64)
    converged = False
    for step in range(iterations):
        u = forward(right[-1].reshape(start.shape)).to(dtype)
        shape = u.shape
        u, length = _unit(_orthogonal(flat(u), left_vectors))
        left_vectors.append(u)
        alpha.append(length)
        w, length = _unit(_orthogonal(flat(transpose(u.reshape(shape)).to(dtype)), right))
        beta.append(length)
        values, residual = _top_triplet(alpha, beta)
        if not bool(values.isfinite().all()):
            raise UserError("the Jacobian is not finite: the model's weights or its states hold NaN or infinity")
        converged = bool((residual <= tolerance).all())
        if converged or step + 1 == right[0].shape[-1]:
            break
        right.append(w)
    return SpectralNorm(values.reshape(batch), residual.reshape(batch), len(alpha), converged)


def _unit(vectors: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Vectors [problems, n] of length 1 (those of length 0 stay) and their lengths, float64 on the CPU."""
    length = torch.linalg.vector_norm(vectors, dim=-1, dtype=torch.float64)
    # Vectors of length 1e-30 would lose bits to denormal numbers before they are divided.
    return torch.where(length[:, None] > 0, vectors / length[:, None], vectors).to(vectors.dtype), length.cpu()


def _orthogonal(vectors: torch.Tensor, others: list[torch.Tensor]) -> torch.Tensor:
    """The part of ``vectors`` [problems, n] orthogonal to all ``others``; twice, since once loses half the bits."""
    if not others:
        return vectors
    basis = torch.stack(others, dim=1)
    for _ in range(2):
        shares = torch.einsum("pkn,pn->pk", basis, vectors)
        vectors = vectors - torch.einsum("pkn,pk->pn", basis, shares)
    return vectors


def _top_triplet(alpha: list[torch.Tensor], beta: list[torch.Tensor]) -> tuple[torch.Tensor, torch.Tensor]:
    """The largest singular value of the bidiagonal matrix and its residual relative to it, [problems] each."""
    diagonal, above = torch.stack(alpha, dim=-1), torch.stack(beta, dim=-1)
    matrix = torch.diag_embed(diagonal) + torch.diag_embed(above[:, :-1], offset=1)
    if not bool(matrix.isfinite().all()):
        return torch.full_like(above[:, -1], math.nan), above[:, -1]
    u, s, _ = torch.linalg.svd(matrix)
    residual = above[:, -1] * u[:, -1, 0].abs()
    return s[:, 0], torch.where(s[:, 0] > 0, residual / s[:, 0], torch.zeros_like(residual))
