"""The logs of sixty trainers are read as they print them: healthy ones calm, and what was planted at its step."""

import math
import random

import pytest
from printed_logs import LOGS

from lamina.reports.diagnosis import gather
from lamina.reports.histories import import_history

RECORDS, PLANTED = 130, 105
FROM_0 = ("torchvision's references", "Swin", "PyTorch's ImageNet example", "PyTorch's MNIST example")
"""Logs whose first step is 0."""
NO_STEP = ("numpy's numbers",)
COARSE = {"Keras by epoch": 423}
"""Steps between two records."""


def written(path, name, fact):
    draw, texts = random.Random(1), ["loading the data", "LayerNorm((768,), eps=1e-05)"]
    for step in range(1, RECORDS + 1):
        loss, norm = 2 + 3 * math.exp(-step / 30) + draw.gauss(0, 0.05), math.exp(draw.gauss(0, 0.2))
        if step >= PLANTED and fact == "rise":
            loss, norm = loss + 1.5, norm * (20 if step < PLANTED + 10 else 1)
        elif step >= PLANTED and fact == "nan":
            loss = norm = math.nan
        epoch, inside = divmod(step - 1, 100)
        places = {"e0": epoch, "e1": epoch + 1, "i0": inside, "i": inside + 1, "i8": step % 8, "f": step / 100}
        heads = {
            "keras": f"Epoch {epoch + 1}/2\n" * (not inside),
            "fastai": "epoch     train_loss  valid_loss  accuracy  time\n" * (step == 1),
        }
        comma = f"{loss:.4f}".replace(".", ",")
        texts.append(LOGS[name].format(s=step, l=loss, g=norm, r=3e-4, comma=comma, **places, **heads))
    path.write_text("\n".join(texts[2:] if name == "fastai" else texts) + "\n")
    return path


@pytest.mark.parametrize("fact", ["rise", "nan"])
@pytest.mark.parametrize("name", LOGS)
def test_a_printed_log_is_read(tmp_path, name, fact):
    history = import_history(written(tmp_path / "train.log", name, fact), tmp_path / "read")
    apart = COARSE.get(name, 1)
    first = 0 if name in FROM_0 else apart
    assert history.steps == list(range(first, first + RECORDS * apart, apart))
    assert bool(history.clock) == (name not in NO_STEP)
    norms = "{g" in LOGS[name]
    assert ("step_gradient_norm" in {metric for _, metric in history.series}) == (norms or name == "a decimal comma")
    evidence = gather(tmp_path / "read")
    at = history.steps[PLANTED - 1]  # nothing is found before
    assert at <= evidence.rose <= at + 2 * apart
    assert evidence.first.rule == ("not_finite" if fact == "nan" else "rise")
    assert at <= evidence.first.step <= at + 3 * apart
