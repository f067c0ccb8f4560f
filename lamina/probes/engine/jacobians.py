"""Find the largest singular value of a function's Jacobian from products of the Jacobian and vectors."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from torch import nn

from lamina.core.values import number, whole_number
from lamina.errors import UserError
from lamina.modeling.wiring_lamina import skip_source
from lamina.probes.structure.sites import LayerSite, NormSite, SublayerSite


@dataclass(frozen=True)
class SpectralNorm:
    """A spectral norm, and how well the search converged."""

    value: torch.Tensor  # the norm, float64 on the CPU, [...] one per problem; never above the true one
    # ||J^T u - s v|| / s for the singular triplet (s, u, v): a singular value lies within this of s
    residual: torch.Tensor
    iterations: int  # the products with J and with J^T
    converged: bool  # whether every residual is below the tolerance


class Jacobian:
    """The Jacobian J of a function at x, as a linear map.

    A backward pass gives J^T u, and a backward pass through this backward pass gives J v. Every operation of the
    function therefore needs a second derivative. Use eager attention, because fused attention on CPUs has no second
    derivative.
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
        """Return J v, in the shape of the function's output."""
        if self._back is None:
            return torch.zeros_like(self.y)
        with _second_derivatives():
            (product,) = torch.autograd.grad(self._back, self._u, v.to(self.x.dtype), retain_graph=True)
        return product.detach()

    def transpose(self, u: torch.Tensor) -> torch.Tensor:
        """Return J^T u, in the shape of x."""
        if self._back is None:
            return torch.zeros_like(self.x)
        (product,) = torch.autograd.grad(self.y, self.x, u.to(self.y.dtype), retain_graph=True)
        return product.detach()

    def norm(
        self, *, identity: float = 0.0, batch_dims: int = 0, tolerance: float = 1e-2, iterations: int = 100
    ) -> SpectralNorm:
        """Return the spectral norm of J minus a multiple of the identity.

        Args:
            identity: the multiple of the identity to subtract. 1 gives the distance to the identity.
            batch_dims: number of leading dimensions of x that index independent items, such as 1 for a batch of
                sequences
            tolerance: the residual, divided by the norm, at which the iteration stops
            iterations: largest number of iterations

        Raises UserError if the Jacobian is not finite.
        """
        return largest_singular_value(
            lambda v: self.forward(v) - identity * v if identity else self.forward(v),
            lambda u: self.transpose(u) - identity * u if identity else self.transpose(u),
            start_vector(self.x),
            batch_dims=batch_dims,
            tolerance=tolerance,
            iterations=iterations,
        )

    def typical_stretch(self, *, identity: float = 0.0, batch_dims: int = 0, samples: int = 4) -> torch.Tensor:
        """Estimate the root mean square stretch of a random direction by J - identity * I, in float64 (Hutchinson)."""
        squares = []
        for sample in range(samples):
            v = start_vector(self.x, sample)
            product = self.forward(v).to(v.dtype) - identity * v if identity else self.forward(v).to(v.dtype)
            sums = [t.flatten(batch_dims).double().square().sum(-1) for t in (product, v)]
            squares.append((sums[0] / sums[1]).cpu())
        return torch.stack(squares).mean(0).sqrt()


@contextmanager
def _second_derivatives() -> Iterator[None]:
    """Raise UserError instead of PyTorch's errors if an operation of the model has no second derivative."""
    try:
        yield
    except RuntimeError as error:
        text = " ".join(str(error).split())
        # J^T u always depends on u: if its graph ends earlier, an operation's backward pass has none of its own.
        signs = ("derivative", "double backward", "differentiate twice", "not have been used in the graph")
        # Where an operation has no derivative at all, PyTorch raises NotImplementedError, a RuntimeError.
        if isinstance(error, NotImplementedError) or any(sign in text for sign in signs):
            raise UserError(
                f"the Jacobian needs second derivatives, and an operation of the model has none ({text[:200]}). "
                "Choose another model."
            ) from error
        raise


def start_vector(x: torch.Tensor, seed: int = 0) -> torch.Tensor:
    """Return a random vector in the shape of ``x``, in at least float32."""
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
    """Find a linear map's largest singular value by Lanczos bidiagonalization (Golub and Kahan 1965).

    If singular values are close together, as in a Jacobian near the identity, Lanczos needs far fewer products than
    power iteration. Memory holds 2 * iterations vectors.
    """
    number("tolerance", tolerance, 0.0, open_low=True)
    whole_number("iterations", iterations)
    batch = start.shape[:batch_dims]
    problems = math.prod(batch)

    dtype = torch.promote_types(start.dtype, torch.float32)
    right, alpha, beta = [_unit(start.to(dtype).reshape(problems, -1))[0]], [], []
    left_vectors: list[torch.Tensor] = []
    values = residual = torch.zeros(problems, dtype=torch.float64)
    converged = False
    for step in range(iterations):
        u = forward(right[-1].reshape(start.shape)).to(dtype)
        shape = u.shape
        u, length = _unit(_orthogonal(u.reshape(problems, -1), left_vectors))
        left_vectors.append(u)
        alpha.append(length)
        w, length = _unit(_orthogonal(transpose(u.reshape(shape)).to(dtype).reshape(problems, -1), right))
        beta.append(length)
        values, residual = _top_triplet(alpha, beta)
        converged = bool((residual <= tolerance).all())
        if converged or step + 1 == right[0].shape[-1]:
            break
        right.append(w)
    return SpectralNorm(values.reshape(batch), residual.reshape(batch), len(alpha), converged)


def _unit(vectors: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Scale vectors [problems, n] to length 1, and return the original lengths. Zeros stay zeros."""
    length = torch.linalg.vector_norm(vectors, dim=-1, dtype=torch.float64)
    # Vectors of length 1e-30 would lose bits to denormal numbers before they are divided.
    return torch.where(length[:, None] > 0, vectors / length[:, None], vectors).to(vectors.dtype), length.cpu()


def _orthogonal(vectors: torch.Tensor, others: list[torch.Tensor]) -> torch.Tensor:
    """Make ``vectors`` [problems, n] orthogonal to all ``others``. A second pass restores the precision."""
    if not others:
        return vectors
    basis = torch.stack(others, dim=1)
    for _ in range(2):
        shares = torch.einsum("pkn,pn->pk", basis, vectors)
        vectors = vectors - torch.einsum("pkn,pk->pn", basis, shares)
    return vectors


def _top_triplet(alpha: list[torch.Tensor], beta: list[torch.Tensor]) -> tuple[torch.Tensor, torch.Tensor]:
    """Return a bidiagonal matrix's largest singular value and the search's relative residual, both [problems]."""
    diagonal, above = torch.stack(alpha, dim=-1), torch.stack(beta, dim=-1)
    matrix = torch.diag_embed(diagonal) + torch.diag_embed(above[:, :-1], offset=1)
    if not bool(matrix.isfinite().all()):
        raise UserError(
            "the Jacobian is not finite, because the model's weights or states hold NaN or infinity. Choose "
            "another checkpoint."
        )
    u, s, _ = torch.linalg.svd(matrix)
    residual = above[:, -1] * u[:, -1, 0].abs()
    return s[:, 0], torch.where(s[:, 0] > 0, residual / s[:, 0], torch.zeros_like(residual))


@dataclass(frozen=True, kw_only=True)
class Wiring:
    """The scales and gains of a sub-layer ``y = post_norm(skip_scale * s + b)``.

    s is the skip. The branch is ``b = out_scale * out_norm(module(pre_scale * pre_norm(x)))``.
    """

    skip: str = "stream"  # stream | block_input | both
    read: str = "stream"  # stream | block_input
    skip_scale: float = 1.0
    pre_scale: float = 1.0
    out_scale: float = 1.0
    pre_gain: float | None = None
    out_gain: float | None = None
    post_gain: float | None = None
    path_scale: torch.Tensor | float = 1.0


def block_factor(wirings: Sequence[Wiring], sigmas: Sequence[torch.Tensor | float]) -> torch.Tensor:
    """Return the norm of the residual path's Jacobian in one block.

    A norm on the path multiplies by gain / sigma (FuseNorm Eq 16, where the gain is 1), and a skip multiplies by the
    skip's scale. A Post-LN block has two norms on the path, and a FuseNorm block has one (FuseNorm Eq 10 and 11).
    Lamina returns the largest value over the channels. As in the papers, Lamina ignores that a norm removes one
    direction. ``sigmas`` has each sub-layer's standard deviation at the post-norm: numbers or tensors [...].
    """
    through = torch.ones(1, dtype=torch.float64)
    for wiring, sigma in zip(wirings, sigmas, strict=True):
        carried = skip_source(wiring.skip, through, torch.ones_like(through))
        through = carried * torch.as_tensor(wiring.path_scale, dtype=torch.float64)
        if wiring.post_gain is not None:
            through = through / torch.as_tensor(sigma, dtype=torch.float64)[..., None]
    return through.abs().amax(-1)


def expected_sigmas(layers: Sequence[Sequence[Wiring]], start: float) -> list[list[float]]:
    """Predict the standard deviation of every sub-layer's sum from gains and scales alone (Keel Eq 14-19).

    Keel assumes that attention and feed-forward keep their input's scale, and that skip and branch are uncorrelated.
    The sum's variance is then the skip's variance plus the branch's variance. ``start`` is the root mean square of x^0.
    """
    sigmas, stream = [], start
    for layer in layers:
        block_input, layer_sigmas = stream, []
        for wiring in layer:
            read = skip_source(wiring.read, stream, block_input) if wiring.pre_gain is None else wiring.pre_gain
            read *= wiring.pre_scale
            branch = (read if wiring.out_gain is None else wiring.out_gain) * wiring.out_scale
            skip = math.sqrt(skip_source(wiring.skip, stream**2, block_input**2))  # uncorrelated: variances add
            sigma = ((wiring.skip_scale * skip) ** 2 + branch**2) ** 0.5
            layer_sigmas.append(sigma)
            stream = sigma if wiring.post_gain is None else wiring.post_gain
        sigmas.append(layer_sigmas)
    return sigmas


def wirings_of(site: LayerSite) -> list[Wiring]:
    """Return the scales and gains of a layer's sub-layers. In models of other libraries, all scales are 1."""
    return [_wiring(site, sublayer) for sublayer in site.sublayers]


def _called(residual: nn.Module | None, name: str, default: object) -> object:
    """Call a method, or return ``default`` if the method does not exist (in an older copy of Lamina's code)."""
    method: Callable[[], object] | None = getattr(residual, name, None)
    return default if method is None else method()


def _wiring(site: LayerSite, sublayer: SublayerSite) -> Wiring:
    gains = {norm.role: _gain(norm) for norm in sublayer.norms}
    sizes = {role: float(gain.square().mean().sqrt()) for role, gain in gains.items()}
    added = sublayer.contribution.module  # Lamina's Residual, whichever copy of its code, adds it by a plan's record
    records = (m for m in site.module.modules() if hasattr(m, "skip") and hasattr(m, "skip_scale"))
    residual = next((m for m in records if any(part is added for part in m.modules())), None)
    scales = {
        "skip_scale": _called(residual, "skip_factor", getattr(residual, "skip_scale", 1.0)),
        "pre_scale": getattr(residual, "pre_scale", 1.0),
        "out_scale": _called(residual, "branch_factor", 1.0),
    }
    scales = {name: torch.as_tensor(scale).detach().double().cpu() for name, scale in scales.items()}
    return Wiring(
        skip=str(getattr(residual, "skip", "stream")),
        read=str(getattr(residual, "read", "stream")),
        **{name: float(scale.square().mean().sqrt()) for name, scale in scales.items()},
        pre_gain=sizes.get("pre_norm"),
        out_gain=sizes.get("out_norm"),
        post_gain=sizes.get("post_norm"),
        path_scale=gains.get("post_norm", torch.ones((), dtype=torch.float64)) * scales["skip_scale"],
    )


def _gain(norm: NormSite) -> torch.Tensor:
    """Return a norm's gain as float64 on the CPU, [channels] or a single number if the norm has no learned gain."""
    gain = norm.gain
    if gain is None:
        return torch.as_tensor(float(getattr(norm.module, "initial_gain", 1.0)), dtype=torch.float64)
    return gain.detach().double().cpu()


def largest_gain(norm: NormSite) -> float:
    return float(_gain(norm).abs().max())


def norm_scale(module: nn.Module, x: torch.Tensor) -> torch.Tensor:
    """Return the number by which a norm divides each token of ``x``, without epsilon. Shapes: [..., channels] to [...].

    The number is the root mean square, or the standard deviation if the norm subtracts the mean. For a norm over groups
    of channels, the number is the smallest of all groups.
    """
    if not getattr(module, "divides", True):  # Lamina's l2, DyT, Derf
        raise UserError(
            f"bounds: {type(module).__name__} does not divide by a root mean square. Choose a model with RMSNorm or "
            "LayerNorm."
        )
    x = x.detach().to(torch.promote_types(x.dtype, torch.float32))
    groups = int(getattr(module, "groups", 1))
    x = x.unflatten(-1, (groups, -1))
    if subtracts_mean(module, x.shape[-1] * groups):
        x = x - x.mean(-1, keepdim=True)
    return x.square().mean(-1).sqrt().amin(-1)


def subtracts_mean(module: nn.Module, channels: int) -> bool:
    """Return whether a norm subtracts the mean over the channels, as LayerNorm does and RMSNorm does not."""
    parameter = next(module.parameters(), None)
    like = {} if parameter is None else {"device": parameter.device, "dtype": parameter.dtype}
    x = torch.linspace(-1, 1, channels, **like)[None, None]
    with torch.no_grad():
        shifted, plain = module(x + 3), module(x)
    return bool((shifted - plain).abs().max() < 0.1 * (plain.abs().max() + 1e-12))
