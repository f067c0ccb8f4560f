"""Two runs side by side: the step and the layer at which they part by more than their noise."""

import json
import math
import random

import pytest

import lamina
from lamina.cli import main
from lamina.errors import UserError
from lamina.reports.side_by_side import side_by_side

LAYERS, LAST = 3, 80


def run(path, *, seed=0, parts=None, layer=1, scale=3.0, rate=None, noise=0.0, apart=1):
    """A history whose gradient in a layer, and then its loss, part at a step."""
    draw, other = random.Random(0), random.Random(seed)
    lines = []
    for step in range(1, LAST + 1):
        line = {"step": step, "loss": 2 + 3 * math.exp(-step / 30) + draw.gauss(0, 0.03), "learning_rate": 1e-3}
        for at in range(LAYERS):
            for part in ("self_attn.q_proj", "mlp.up_proj"):
                line[f"gradients/model.layers.{at}.{part}.weight"] = math.exp(draw.gauss(0, 0.1))
        for name in sorted(line.keys() - {"step", "learning_rate"}):
            line[name] *= math.exp(other.gauss(0, noise))
        if parts and step >= parts:
            line[f"gradients/model.layers.{layer}.mlp.up_proj.weight"] *= scale
            line["loss"] += 0.5 * (step >= parts + 4)
        if rate and step >= rate:
            line["learning_rate"] *= 2
        if step % apart == 0:
            lines.append(json.dumps(line))
    path.write_text("\n".join(lines))
    return path


@pytest.mark.parametrize("noise", [0.0, 0.03])
def test_the_first_layer_that_parts_is_named_with_its_step(tmp_path, noise):
    first, second = run(tmp_path / "a.jsonl"), run(tmp_path / "b.jsonl", seed=1, parts=40, noise=noise)
    found = side_by_side(first, second)
    assert (found.layer.step, *found.layer.series) == (40, 1, "feed_forward", "all", "gradient_norm")
    assert found.same_until == (39 if not noise else None)
    said = " ".join(lamina.diagnose(first, second).sentences)
    assert "The first layer that differs is at step 40, layer 1 (feed-forward): the gradient norm is" in said
    assert ("The runs are equal up to step 39." in said) == (not noise)


@pytest.mark.parametrize(
    ("line", "where"),
    [
        ("Training: 10%|#   | {step}/600 [00:10<01:30,  9.90it/s, loss={loss:.4f}]", "about step 40"),
        ("loss: {loss:.4f}", "record 40"),
    ],
)
def test_the_steps_of_a_bar_are_about_right_and_records_without_steps_are_counted(tmp_path, line, where):
    for name, gap in (("a", 0.0), ("b", 1.0)):
        losses = [3 - step / 100 + gap * (step >= 40) for step in range(1, LAST + 1)]
        text = "\n".join(line.format(step=step, loss=loss) for step, loss in enumerate(losses, start=1))
        (tmp_path / f"{name}.log").write_text(text)
    compared = side_by_side(tmp_path / "a.log", tmp_path / "b.log")
    assert compared.title == f"The two runs differ from {where} on"
    assert f"The whole model differs first at {where}: the loss is" in " ".join(compared.sentences())
    assert f"at 80 {compared.unit}s, 1 to 80." in compared.sentences()[0]


def test_what_has_the_same_noise_does_not_part(tmp_path):
    first, second = run(tmp_path / "a.jsonl", seed=2, noise=0.05), run(tmp_path / "b.jsonl", seed=3, noise=0.05)
    found = side_by_side(first, second)
    assert found.first is None
    assert found.title == "The two runs do not differ"
    assert found.sentences()[-1] == "The runs differ by no more than the noise in each series."
    assert side_by_side(first, first).sentences()[-1] == "The runs are equal at all steps."


def test_a_learning_rate_that_differs_is_said(tmp_path):
    first, second = run(tmp_path / "a.jsonl"), run(tmp_path / "b.jsonl", rate=30, parts=35)
    assert "The learning rates differ first at step 30" in side_by_side(first, second).sentences()[-1]


def test_a_learning_rate_that_few_records_have_is_said(tmp_path):
    """A watched loop records the rate every 20 steps, so that few records are left after the change."""
    first, second = run(tmp_path / "a.jsonl", apart=20), run(tmp_path / "b.jsonl", rate=60, apart=20)
    assert side_by_side(first, second).rate.step == 60
    assert side_by_side(first, second).sentences()[-1].startswith("But the learning rates differ first at step 60")


def test_a_loss_that_is_not_finite_in_one_parts(tmp_path):
    first = run(tmp_path / "a.jsonl")
    second = tmp_path / "b.jsonl"
    second.write_text(first.read_text().replace('"step": 50, "loss": 2', '"step": 50, "loss": NaN, "old": 2'))
    assert side_by_side(first, second).whole.step == 50


def test_records_at_other_distances_are_compared_where_both_have_one(tmp_path, capsys):
    first, second = run(tmp_path / "a.jsonl"), run(tmp_path / "b.jsonl", parts=40, apart=4)
    assert side_by_side(first, second).layer.step == 40
    assert main(["diagnose", str(first), str(second)]) == 0
    page = tmp_path / "a.jsonl-lamina" / "against-b.jsonl.html"
    assert str(page) in capsys.readouterr().out
    assert "The two runs differ from step 40 on" in page.read_text(encoding="utf-8")


def test_runs_without_a_common_step_are_one_line(tmp_path):
    first, second = run(tmp_path / "a.jsonl"), tmp_path / "b.jsonl"
    second.write_text('{"step": 900, "loss": 2.0}\n{"step": 901, "loss": 2.0}\n')
    with pytest.raises(UserError, match="has no series at the steps of"):
        side_by_side(first, second)
