"""The rise of the loss, the first anomaly and the recovery agree, and a sentence says only what the record shows."""

import math
import random

import pytest

from lamina.reports.diagnosis import epoch_stairs, gather
from lamina.reports.histories.importing import import_history


def read(folder, lines):
    """Return the evidence in a log."""
    (folder / "train.log").write_text("\n".join(lines))
    import_history(folder / "train.log", folder / "read")
    return gather(folder / "read")


def printed(losses, **more):
    """Return Trainer's printed dictionaries, a record every 10 steps of 1,000 in an epoch."""
    return [
        str({"loss": round(loss, 4), **{name: of[at] for name, of in more.items()}, "epoch": round(at / 100, 2)})
        for at, loss in enumerate(losses, start=1)
    ]


def noisy(seed, records=300, noise=0.035):
    """A loss that falls smoothly, with noise."""
    draw = random.Random(seed)
    return [2.2 + 8.6 * math.exp(-at / 26) + draw.gauss(0, noise) for at in range(1, records + 1)]


def test_no_epoch_begins_with_a_fall_in_a_smooth_loss_with_noise(tmp_path):
    said = [seed for seed in range(30) if epoch_stairs(read(tmp_path, printed(noisy(seed))))]
    assert said == []


@pytest.mark.parametrize("rates", [False, True])
def test_an_epoch_begins_with_a_fall_if_examples_are_known_but_not_if_the_learning_rate_falls(tmp_path, rates):
    draw = random.Random(3)
    losses = [2 + math.exp(-at / 26) - 0.2 * (at // 100) + draw.gauss(0, 0.035) for at in range(1, 301)]
    rate = {at: 1e-3 * 0.1 ** (at // 100) for at in range(301)}
    lines = printed(losses, learning_rate=rate) if rates else printed(losses)
    assert [*epoch_stairs(read(tmp_path, lines))] == ([] if rates else [1, 2])
