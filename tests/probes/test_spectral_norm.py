"""Largest singular values without the matrix, against the matrix."""

import pytest
import torch
from torch.nn.attention import SDPBackend, sdpa_kernel

from lamina.errors import UserError
from lamina.probes.engine.jacobians import Jacobian


def spectral_norm(function, x, **options):
    return Jacobian(function, x).norm(**options)


def random(*shape, seed=0):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


@pytest.mark.parametrize("shape", [(40, 30), (30, 40), (1, 9), (9, 1)])
def test_the_norm_of_a_linear_map_is_that_of_its_matrix(shape):
    matrix = random(*shape)
    found = spectral_norm(lambda x: matrix @ x, random(shape[1]), tolerance=1e-8)
    assert found.converged
    assert float(found.value) == pytest.approx(float(torch.linalg.svdvals(matrix)[0]), rel=1e-10)


def test_the_norm_of_a_nonlinear_function_is_that_of_its_jacobian_there():
    first, second, x = random(20, 12, seed=1), random(12, 20, seed=2), random(12, seed=3)

    def function(x):
        return second @ torch.tanh(first @ x) * x.square().sum()

    matrix = torch.autograd.functional.jacobian(function, x)
    assert float(spectral_norm(function, x, tolerance=1e-8).value) == pytest.approx(
        float(torch.linalg.matrix_norm(matrix, ord=2)), rel=1e-9
    )
    distance = torch.linalg.matrix_norm(matrix - torch.eye(12, dtype=torch.float64), ord=2)
    assert float(spectral_norm(function, x, identity=1.0, tolerance=1e-8).value) == pytest.approx(
        float(distance), rel=1e-9
    )


def test_products_with_the_jacobian_and_its_transpose():
    matrix, v, u = random(6, 4), random(4, seed=1), random(6, seed=2)
    jacobian = Jacobian(lambda x: matrix @ x.sin(), torch.zeros(4, dtype=torch.float64))
    torch.testing.assert_close(jacobian.forward(v), matrix @ v)
    torch.testing.assert_close(jacobian.transpose(u), matrix.T @ u)


def test_a_batch_is_solved_sequence_by_sequence():
    matrices, x = random(3, 8, 8), random(3, 4, 2, seed=1)
    found = spectral_norm(
        lambda x: torch.einsum("bij,bj->bi", matrices, x.flatten(1)).view(3, 4, 2), x, batch_dims=1, tolerance=1e-8
    )
    torch.testing.assert_close(found.value, torch.linalg.matrix_norm(matrices, ord=2))


@pytest.mark.parametrize("identity", [0.0, 1.0])
def test_the_typical_stretch_is_the_frobenius_norm_over_the_root_of_the_size(identity):
    matrices = random(2, 6, 6)
    jacobian = Jacobian(lambda x: torch.einsum("bij,bj->bi", matrices, x), random(2, 6))
    found = jacobian.typical_stretch(identity=identity, batch_dims=1, samples=2000)
    expected = torch.linalg.matrix_norm(matrices - identity * torch.eye(6, dtype=torch.float64)) / 6**0.5
    torch.testing.assert_close(found, expected, rtol=0.03, atol=0)  # of 2000 random directions


def test_singular_values_that_lie_close_together_near_the_identity():
    matrix = torch.eye(200, dtype=torch.float64) + 0.001 * random(200, 200)
    found = spectral_norm(lambda x: matrix @ x, random(200), tolerance=1e-3, iterations=100)
    assert found.converged
    assert float(found.value) == pytest.approx(float(torch.linalg.svdvals(matrix)[0]), rel=1e-4)


def test_an_unfinished_norm_says_so_and_is_a_lower_bound_with_an_honest_residual():
    matrix = random(50, 50)
    true = torch.linalg.svdvals(matrix)
    found = spectral_norm(lambda x: matrix @ x, random(50), tolerance=1e-12, iterations=4)
    assert not found.converged
    assert found.iterations == 4
    assert float(found.value) < float(true[0])
    nearest = float((true - found.value).abs().min())
    assert 0 < nearest <= float(found.residual * found.value)


@pytest.mark.parametrize(("size", "scale", "accuracy"), [(60, 1.0, 1e-5), (10, 1e-30, 1e-4)])
def test_float32_vectors_give_float32_accuracy_of_very_small_norms_too(size, scale, accuracy):
    matrix = scale * random(size, size).float()
    found = spectral_norm(lambda x: matrix @ x, torch.zeros(size), tolerance=1e-4)
    assert found.value.dtype == torch.float64
    assert float(found.value) == pytest.approx(float(torch.linalg.svdvals(matrix.double())[0]), rel=accuracy)


def test_a_function_that_does_not_depend_on_its_input_has_norm_0():
    assert float(spectral_norm(lambda x: torch.ones(3), torch.zeros(3)).value) == 0.0
    assert float(spectral_norm(lambda x: 0 * x, torch.zeros(3)).value) == 0.0


class Once(torch.autograd.Function):
    """Has a first derivative, not a second."""

    @staticmethod
    def forward(ctx, x):
        return x.square()

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx, gradient):
        return gradient


def fused_attention(x):
    with sdpa_kernel(SDPBackend.FLASH_ATTENTION):
        return torch.nn.functional.scaled_dot_product_attention(x, x, x)


@pytest.mark.parametrize("function", [Once.apply, fused_attention])
def test_an_operation_without_a_second_derivative_is_one_line(function):
    with pytest.raises(UserError, match="second derivatives"):
        spectral_norm(function, torch.ones(1, 1, 4, 8))


def test_a_jacobian_that_is_not_finite_is_refused():
    with pytest.raises(UserError, match="not finite"):
        spectral_norm(lambda x: x / 0.0, torch.ones(3))
