"""The Jacobian probe, and largest singular values without the matrix, against whole matrices."""

import math

import pytest
import torch
from probes.tiny import outputs
from spread import spread
from tiny_contexts import (
    context_of,
    jacobian_matrix,
    lamina_model,
    llama,
    measured,
    spectral,
    state_to_state,
    transformers_model,
    value,
)
from torch.nn.attention import SDPBackend, sdpa_kernel

import lamina
from lamina.errors import UserError
from lamina.probes.engine.jacobians import Jacobian, Wiring, block_factor, expected_sigmas, wirings_of
from lamina.probes.engine.measure import make_context
from lamina.probes.engine.probe_settings import ProbeSettings
from lamina.probes.jacobian import JacobianProbe
from lamina.probes.structure.hooks import eager_attention

PLACEMENTS = ["pre_ln", "post_ln", "peri_ln", "keel", "fusenorm", "b2t", "layernorm_scaling"]
TRANSFORMERS = ["BertForMaskedLM", "GPT2LMHeadModel", "AlbertForMaskedLM", "Gemma2ForCausalLM", "GPTNeoXForCausalLM"]
FEW = ["pre_ln", "keel", "fusenorm", "b2t", "GPT2LMHeadModel", "AlbertForMaskedLM"]


def exact(**options):
    return JacobianProbe(**{"sequences": 1, "tokens": 5, "tolerance": 1e-5, "iterations": 200, **options})


@pytest.mark.parametrize("name", spread(PLACEMENTS + TRANSFORMERS, FEW))
def test_block_and_total_norms_are_those_of_the_whole_matrices(name):
    changes = {"embedding_size": 8} if name.startswith("Albert") else {}
    model = transformers_model(name, **changes) if name in TRANSFORMERS else lamina_model(name)
    context = context_of(model, sequences=1)
    frame, num_layers = measured(exact(), context), context.structure.num_layers
    ids = context.batches[0]["input_ids"][:1]
    identity, log_product = torch.eye(5 * 16, dtype=torch.float64), 0.0
    with eager_attention(context.model):
        for layer in range(num_layers):
            start, function = state_to_state(context, ids, layer, layer + 1)
            matrix = jacobian_matrix(function, start)
            norm = spectral(matrix)
            log_product += math.log10(norm)
            assert value(frame, "norm", "jacobian", layer) == pytest.approx(norm, rel=1e-4)
            assert value(frame, "norm", "identity", layer) == pytest.approx(spectral(matrix - identity), rel=1e-4)
            assert value(frame, "log10_product", "jacobian", layer) == pytest.approx(log_product, abs=1e-4)
        start, function = state_to_state(context, ids, 0, num_layers)
        total = spectral(jacobian_matrix(function, start))
    assert value(frame, "log10_total", "jacobian") == pytest.approx(math.log10(total), abs=1e-4)
    assert value(frame, "log10_product", "jacobian") == pytest.approx(log_product, abs=1e-4)
    assert total < 10**log_product


def rms_norm_jacobian(norm, z):
    """[channels, channels]: diag(g) (I - z z^T / (d s^2)) / s with s^2 = mean(z^2) + eps, written out."""
    z, size = z.double(), len(z)
    scale = (z.square().mean() + norm.eps).sqrt()
    inner = torch.eye(size, dtype=torch.float64) - torch.outer(z, z) / (size * scale**2)
    return norm.weight.detach().double()[:, None] * inner / scale


def residual_path_by_hand(model, ids, layer):
    """The geometric mean over tokens of the path's norm, from each norm's explicit Jacobian and the plan's record."""
    block = model.model.backbone.layers[layer]
    normed = [part for part in (block.attention, block.feed_forward) if part.post_norm is not None]
    found = outputs(model, ids, [part.post_norm for part in normed])
    inputs = {part: given[0] for part, (given, _) in zip(normed, found, strict=True)}
    logs = []
    for token in range(ids.shape[1]):
        through = identity = torch.eye(16, dtype=torch.float64)
        for part in (block.attention, block.feed_forward):
            carried = {"stream": through, "block_input": identity, "both": through + identity}[part.skip]
            through = float(part.skip_scale) * carried
            if part in inputs:
                through = rms_norm_jacobian(part.post_norm, inputs[part][token]) @ through
        logs.append(torch.linalg.matrix_norm(through, ord=2).log())
    return float(torch.stack(logs).mean().exp())


@pytest.mark.parametrize("placement", spread(PLACEMENTS, FEW))
def test_the_residual_path_is_the_product_of_skips_and_norm_jacobians(placement):
    model = lamina_model(placement)
    context = context_of(model, sequences=1)
    frame = measured(exact(total=False), context)
    log_product = 0.0
    for layer in range(2):
        by_hand = residual_path_by_hand(model, context.batches[0]["input_ids"], layer)
        log_product += math.log10(by_hand)
        assert value(frame, "norm", "residual_path", layer) == pytest.approx(by_hand, rel=1e-3)
        assert value(frame, "log10_product", "residual_path", layer) == pytest.approx(log_product, abs=1e-3)


@pytest.mark.parametrize("placement", spread(PLACEMENTS, ["keel", "fusenorm"]))
def test_the_measured_sigmas_give_the_measured_path(placement):
    model = lamina_model(placement, num_layers=3)
    frame = measured(exact(total=False, tolerance=1e-3), context_of(model, sequences=1))
    for layer in range(3):
        # FuseNorm Eq 16 leaves out the direction that a norm takes away: some percent with 16 channels.
        path = value(frame, "norm", "residual_path", layer)
        assert value(frame, "formula", "fusenorm", layer) == pytest.approx(path, rel=0.1)


def test_keels_gains_in_the_numerator_and_the_denominator():
    outer, inner, alpha = 0.7, 1.9, 3.0
    sublayer = Wiring(skip_scale=alpha, pre_gain=inner, post_gain=outer, path_scale=outer * alpha)
    (sigmas,) = expected_sigmas([[sublayer, sublayer]], start=outer)
    one = outer * alpha / math.sqrt(outer**2 * alpha**2 + inner**2)
    assert float(block_factor([sublayer, sublayer], sigmas)) == pytest.approx(one**2)


@pytest.mark.parametrize(
    ("placement", "options", "published"), [("keel", {"alpha": 128.0}, 0.99611), ("post_ln", {}, 5.4e-20)]
)
def test_the_published_numbers_at_128_sublayers(placement, options, published):
    """From a stream of rms 1, without Keel's exception for the first layer; rounded as they are published."""
    context = context_of(lamina.build(llama(2), placement, **options), sequences=1)
    layers = [wirings_of(context.structure.layers[1])] * 64
    sigmas = expected_sigmas(layers, start=1.0)
    product = math.prod(float(block_factor(layer, sigma)) for layer, sigma in zip(layers, sigmas, strict=True))
    exact = (1 + 1 / 128**2) ** -64 if placement == "keel" else 2.0**-64
    assert product == pytest.approx(exact, rel=1e-9)
    assert product == pytest.approx(published, rel=1e-2 if placement == "post_ln" else 1e-5)


def test_two_norms_a_block_against_one():
    sublayer = Wiring(post_gain=1.0)
    fused = [sublayer, Wiring(skip="block_input", post_gain=1.0)]
    assert float(block_factor([sublayer, sublayer], [1.1, 1.1])) ** 50 == pytest.approx(1.1 ** (-2 * 50))
    assert float(block_factor(fused, [1.1, 1.1])) ** 50 == pytest.approx(1.1**-50)
    both = [sublayer, Wiring(skip="both", post_gain=1.0)]
    assert float(block_factor(both, [2.0, 4.0])) == pytest.approx((1 + 1 / 2) / 4)


def test_a_total_norm_below_the_smallest_float32():
    model = lamina_model("post_ln", num_layers=2, scale=0.02)
    for part in (layer.feed_forward for layer in model.model.backbone.layers):
        torch.nn.init.constant_(part.post_norm.weight, 1e-30)
    context = context_of(model, sequences=1)
    frame = measured(exact(), context)
    assert any("Lamina measured one sequence of 5 tokens." in note for note in context.notes)
    total = value(frame, "log10_total", "jacobian")
    assert -60 < total < -50
    assert total == pytest.approx(value(frame, "log10_product", "jacobian"), abs=1.0)


def test_what_was_not_found_exactly_is_said_and_the_model_is_left_as_it_was():
    model = lamina_model("pre_ln")
    context = context_of(model)
    before = model.config._attn_implementation
    frame = measured(JacobianProbe(iterations=1), context)
    assert any("lower bounds" in note for note in context.notes)
    assert "Jacobians: Lamina measured 2 sequences of 5 tokens. A Jacobian covers all tokens." in context.notes
    assert (frame[frame.metric == "residual"].value > 0.01).any()
    assert all(parameter.requires_grad for parameter in model.parameters())
    assert model.config._attn_implementation == before
    assert not any(module._forward_hooks or module._forward_pre_hooks for module in model.modules())


def test_a_model_in_16_bits_is_measured_in_float32_and_stays_in_16_bits():
    model = lamina_model("peri_ln").bfloat16()
    same = lamina.build(llama(2), "peri_ln").eval()
    same.load_state_dict(model.state_dict())  # float32, of the same rounded values
    frames = [measured(exact(total=False), context_of(each, sequences=1)) for each in (model, same)]
    for layer in range(2):
        found, expected = (value(frame, "norm", "jacobian", layer) for frame in frames)
        assert found == pytest.approx(expected, rel=1e-3)
    assert {parameter.dtype for parameter in model.parameters()} == {torch.bfloat16}


def test_images():
    model = transformers_model("ViTForImageClassification", image_size=8, patch_size=4, num_channels=1)
    context = make_context(model, ProbeSettings(), torch.randn(2, 1, 8, 8))
    frame = measured(JacobianProbe(sequences=2), context)
    assert value(frame, "norm", "jacobian", 0) > 0
    assert not frame[frame.metric == "norm"].standard_error.isna().any()


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
    for identity in (0.0, 1.0):
        found = spectral_norm(function, x, identity=identity, tolerance=1e-8)
        wanted = spectral(matrix - identity * torch.eye(12, dtype=torch.float64))
        assert float(found.value) == pytest.approx(wanted, rel=1e-9)


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
