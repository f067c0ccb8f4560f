"""What several processes saw of a batch, put together as if one had seen the whole."""

import pytest
import torch

from lamina.training.monitor.stream_measures import STATE_METRICS, PassNumbers, rows_of, state_statistics


def seen(x, logit, load):
    spot = (0, "attention", 0)
    return PassNumbers(
        states={spot: (x.numel(), state_statistics(x).tolist())}, logits={0: logit}, loads={0: (len(x), load)}
    )


def test_the_parts_of_a_batch_have_the_statistics_of_the_whole():
    x = torch.randn(6, 5, 8) * 3 + torch.arange(6.0)[:, None, None]
    parts = [seen(x[:2], 1.0, [0.5, 0.5]), seen(x[2:], 4.0, [0.0, 1.0])]
    found = {(row[2], row[5], row[4]): row[6] for row in rows_of(7, parts)}
    whole = [x.var(correction=0), x.mean(), x.abs().mean(), x.abs().max()]
    for metric, value in zip(STATE_METRICS, whole, strict=True):
        assert found["attention", metric, 0] == pytest.approx(float(value), rel=1e-6)
    assert found["attention", "attention_logit", 0] == 4.0
    assert found["feed_forward", "expert_load", 0] == pytest.approx(2 * 0.5 / 6)
    assert found["feed_forward", "expert_load", 1] == pytest.approx((2 * 0.5 + 4 * 1.0) / 6)


def test_a_process_that_saw_nothing_adds_nothing():
    part = seen(torch.randn(2, 3, 4), 2.0, [1.0])
    assert rows_of(1, [PassNumbers(), part]) == rows_of(1, [part])
