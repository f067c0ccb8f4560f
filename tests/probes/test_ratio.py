"""An average over tokens of sequences of different lengths, against the formula written out."""

import math

import numpy as np
import pytest
import torch

from lamina.probes.engine.statistics import Ratio


def test_ratio_is_total_over_count_with_the_error_of_a_ratio_of_sums():
    generator = np.random.default_rng(0)
    counts = generator.integers(1, 9, 12)
    totals = generator.normal(0.7, 0.3, (12, 2)) * counts[:, None]
    ratio = Ratio()
    for part in (slice(0, 5), slice(5, 12)):
        ratio.add(torch.from_numpy(totals[part]), torch.from_numpy(counts[part]))
    wanted = totals.sum(0) / counts.sum()
    residuals = totals - wanted * counts[:, None]
    error = np.sqrt((residuals**2).sum(0) * 12 / 11) / counts.sum()
    np.testing.assert_allclose(ratio.mean, wanted, rtol=1e-12)
    np.testing.assert_allclose(ratio.standard_error, error, rtol=1e-9)


def test_a_sequence_without_tokens_is_left_out_and_one_alone_has_no_error():
    ratio = Ratio()
    assert torch.isnan(ratio.mean)
    ratio.add(torch.tensor([[3.0], [math.nan]]), torch.tensor([2.0, 0.0]))
    assert ratio.samples == 1
    assert ratio.mean.tolist() == [1.5]
    assert ratio.standard_error.tolist() == [math.inf]


@pytest.mark.parametrize("spread", [0.0, 1e-9])
def test_almost_equal_values_give_an_error_that_is_a_number(spread: float):
    ratio = Ratio()
    ratio.add(0.3 + spread * torch.randn(50, 1, dtype=torch.float64), torch.ones(50))
    assert 0 <= float(ratio.standard_error) < 1e-8
