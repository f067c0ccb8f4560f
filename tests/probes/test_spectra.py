"""The spectra probe against numpy in double precision, and the traps of its ranks."""

import math

import numpy as np
import pytest
import torch
from probes.tiny import outputs
from tiny_contexts import context_of, llama, measured, shake, transformers_model, value
from transformers import LlamaForCausalLM

from lamina.errors import UserError
from lamina.probes.spectra import (
    Covariance,
    Spectra,
    condition_number,
    early_enrichment,
    effective_dimension_ratio,
    hard_rank,
    row_covariance_eigenvalues,
    soft_rank,
)


def naive_ranks(activations):
    """[tokens, channels] as numpy has it: hard, soft, edr, eee."""
    values = np.linalg.eigvalsh(np.cov(np.asarray(activations, dtype=np.float64).T))[::-1].clip(1e-12)
    size = len(values)
    shares = values / values.sum()
    hard = values.sum() ** 2 / (values**2).sum() / size
    soft = math.exp(-sum(p * math.log(p) for p in shares)) / size
    eee = 2 / size * sum(shares[: k + 1].sum() - (k + 1) / size for k in range(size))
    return {"hard_rank": hard, "soft_rank": soft, "edr": 200 * hard * soft / (hard + soft), "eee": eee}


@pytest.fixture(scope="module")
def llama_model():
    torch.manual_seed(0)
    return shake(LlamaForCausalLM(llama(3)).eval())


def activations(model, ids):
    """What goes into the nonlinearity and into the down-projection of each layer, [tokens, channels]."""
    modules = {(i, "pre"): layer.mlp.act_fn for i, layer in enumerate(model.model.layers)}
    modules |= {(i, "post"): layer.mlp.down_proj for i, layer in enumerate(model.model.layers)}
    found = outputs(model, ids, modules.values())
    return {key: given.flatten(0, -2) for key, (given, _) in zip(modules, found, strict=True)}


@pytest.mark.parametrize("memory", [1.0, 1e-9])
def test_ranks_are_those_of_the_activations_covariance(llama_model, memory):
    """A tiny memory takes one matrix a pass, six passes in all."""
    context = context_of(llama_model, sequences=8, tokens=20, batch_size=3)
    frame = measured(Spectra(memory=memory, tokens_per_channel=0), context)
    ids = torch.cat([batch["input_ids"] for batch in context.batches])
    naive = {key: naive_ranks(found) for key, found in activations(llama_model, ids).items()}
    assert len(naive) == 6
    for (layer, role), ranks in naive.items():
        for metric, expected in ranks.items():
            assert value(frame, metric, role, layer) == pytest.approx(expected, rel=1e-4)
    for role in ("pre", "post"):
        for metric in ("hard_rank", "soft_rank", "edr", "eee"):
            mean = np.mean([ranks[metric] for (_, each), ranks in naive.items() if each == role])
            assert value(frame, metric, role) == pytest.approx(mean, rel=1e-4)
        assert value(frame, "tokens", role) == 160
    assert any("6 passes" in note for note in context.notes) == (memory < 1)


def test_a_flat_spectrum_and_a_single_direction():
    flat, single = torch.ones(8), torch.tensor([1.0] + [0.0] * 7)
    assert hard_rank(flat) == pytest.approx(1)
    assert soft_rank(flat) == pytest.approx(1)  # exp of the entropy: the entropy over ln D would be 1, too
    assert early_enrichment(flat) == pytest.approx(0)
    assert hard_rank(single) == pytest.approx(1 / 8)
    assert soft_rank(single) == pytest.approx(1 / 8)  # the entropy over ln D would be 0
    assert early_enrichment(single) == pytest.approx(7 / 8)


def test_the_composite_of_the_published_means_is_near_the_published_composite():
    assert effective_dimension_ratio(0.23, 0.53) == pytest.approx(32.1, abs=0.05)


def test_a_covariance_in_batches_with_a_massive_mean():
    samples = torch.randn(500, 6, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    samples[:, 2] += 5000.0  # a massive activation: the uncentred Gram matrix would be nothing else
    covariance = Covariance()
    for batch in samples.float().split(64):
        covariance.add(batch.view(-1, 1, 6))
    expected = np.cov(samples.float().double().numpy().T)
    np.testing.assert_allclose(covariance.matrix().numpy(), expected, rtol=1e-4, atol=1e-4)
    assert covariance.count == 500
    assert hard_rank(covariance.eigenvalues()) > 0.9


def test_bfloat16_activations_are_multiplied_in_float32():
    samples = torch.randn(300, 5, generator=torch.Generator().manual_seed(0)).bfloat16()
    covariance = Covariance()
    covariance.add(samples)
    np.testing.assert_allclose(covariance.matrix().numpy(), np.cov(samples.double().numpy().T), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("smallest", [0.5, 1e-3, 1e-8, 1e-12])
@pytest.mark.parametrize("shape", [(7, 12), (12, 7)])
def test_condition_numbers_of_well_and_ill_conditioned_matrices(shape, smallest):
    generator = torch.Generator().manual_seed(0)
    u, _, v = torch.linalg.svd(torch.randn(*shape, generator=generator, dtype=torch.float64), full_matrices=False)
    values = torch.linspace(1, smallest, 7, dtype=torch.float64)
    assert condition_number(u @ torch.diag(values) @ v) == pytest.approx(1 / smallest, rel=1e-3)


def test_a_singular_matrix_has_an_infinite_condition_number():
    assert condition_number(torch.tensor([[1.0, 2.0], [2.0, 4.0]])) == math.inf
    assert condition_number(torch.zeros(3, 2)) == math.inf


@pytest.mark.parametrize(
    ("name", "layers", "paths"),
    [
        ("LlamaForCausalLM", "model.layers", ["gate_proj", "up_proj", "down_proj"]),
        ("Phi3ForCausalLM", "model.layers", ["gate_up_proj[0]", "gate_up_proj[1]"]),  # gate and up in one matrix
        ("GPT2LMHeadModel", "transformer.h", ["c_fc", "c_proj"]),  # keeps its weights transposed
    ],
)
def test_condition_numbers_by_the_projections_paths(name, layers, paths):
    model = transformers_model(name, num_attention_heads=2)
    frame = measured(Spectra(), context_of(model, sequences=8, tokens=20))
    assert {f"mlp.{path}" for path in paths} | {"pre", "post"} <= set(frame.role)
    assert "mlp.gate_up_proj" not in set(frame.role)
    for index, layer in enumerate(model.get_submodule(layers)):
        for path in paths:
            matrix, _, half = path.rstrip("]").partition("[")
            weight = getattr(layer.mlp, matrix).weight.detach().double().numpy()
            weight = weight[24 * int(half) : 24 * (int(half) + 1)] if half else weight
            expected = pytest.approx(np.linalg.cond(weight))
            assert value(frame, "condition_number", f"mlp.{path}", index) == expected


def test_eigenvalues_of_the_embedding_over_their_median(llama_model):
    frame = measured(Spectra(), context_of(llama_model, sequences=8, tokens=20))
    weight = llama_model.model.embed_tokens.weight.detach().double().numpy()
    expected = np.linalg.eigvalsh(np.cov(weight.T))[::-1]  # centred: the rows' mean is no direction
    found = frame[frame.metric == "eigenvalue"].sort_values("index")
    np.testing.assert_allclose(found.value, expected, rtol=1e-9)
    ratios = frame[frame.metric == "eigenvalue_over_median"].sort_values("index")
    np.testing.assert_allclose(ratios.value, expected / np.median(expected), rtol=1e-9)


def test_the_rows_covariance_by_chunks():
    weight = torch.randn(50, 4, generator=torch.Generator().manual_seed(0)) + 3
    expected = np.linalg.eigvalsh(np.cov(weight.double().numpy().T))[::-1]
    np.testing.assert_allclose(row_covariance_eigenvalues(weight, rows=7), expected)


def test_as_many_tokens_as_channels_are_refused_or_left_out_or_warned_of(llama_model):
    few = {"sequences": 2, "tokens": 12}  # 24 tokens, 24 channels
    with pytest.raises(UserError, match=r"24 tokens are too few for the feed-forward's 24 channels.*--sequences"):
        measured(Spectra(), context_of(llama_model, **few))
    context = context_of(llama_model, **few)
    frame = measured(Spectra(), context, strict=False)  # one of "all"
    assert not set(frame.role) & {"pre", "post"}
    assert {"eigenvalue", "condition_number"} <= set(frame.metric)
    assert any("24 tokens" in note and "leaves out the ranks" in note for note in context.notes)
    context = context_of(llama_model, **few)
    frame = measured(Spectra(few_tokens="warn"), context)
    assert value(frame, "hard_rank", "pre", 0) <= 23 / 24
    assert any("ranks are too low" in note for note in context.notes)
    measured(Spectra(), context_of(llama_model, sequences=1, tokens=25))


def test_experts_have_no_ranks():
    model = transformers_model("MixtralForCausalLM", num_local_experts=2, num_experts_per_tok=1)
    context = context_of(model, sequences=8, tokens=20)
    frame = measured(Spectra(), context)
    assert set(frame.role) == {"embedding"}
    assert any("no dense feed-forward" in note for note in context.notes)


def test_the_passes_go_on_until_there_is_text_enough(llama_model):
    probe = Spectra()
    probe.begin(context_of(llama_model, sequences=8, tokens=20))
    assert probe.standard_error() == math.inf
    for key in probe.points():
        probe.see(key, torch.randn(1, 4 * 24, 24))
    assert probe.standard_error() is None
