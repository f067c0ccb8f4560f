"""Files that name no loss are read by the file's name, or refused for the true reason; notebooks by what they show."""

import io
import json
import math
import random
import sys
from pathlib import Path

import pytest

import lamina
from lamina.errors import UserError
from lamina.reports.diagnosis import epoch_stairs, gather
from lamina.reports.histories import import_history, read_history
from lamina.training.monitor.writers import LOSS, NORM

NAMED_BY_FILE = {
    "loss.log": ("2.5 0\n2.4 100\n2.3 200\n", {0: 2.5, 100: 2.4, 200: 2.3}),
    "losses.txt": ("2.5\n2.4\n2.3\n", {1: 2.5, 2: 2.4, 3: 2.3}),
    "train_loss": ("1600000000100 2.5 0\n1600000000100 2.4 10\n1600000003000 2.3 20\n", {0: 2.5, 10: 2.4, 20: 2.3}),
    "run-a-tag-train_loss.csv": ("Wall time,Step,Value\n1600000000.1,0,2.5\n1600000001.1,10,2.4\n", {0: 2.5, 10: 2.4}),
    "loss_history.json": (json.dumps({"train": [2.5, 2.4], "val": [2.6, 2.7]}), {1: 2.5, 2: 2.4}),
    "train_losses.json": (json.dumps([2.5, 2.4]), {1: 2.5, 2: 2.4}),
}


@pytest.mark.parametrize("name", NAMED_BY_FILE)
def test_a_file_that_is_called_a_loss_holds_one(tmp_path, name):
    text, losses = NAMED_BY_FILE[name]
    (tmp_path / name).write_text(text)
    assert read_history(tmp_path / name).values(LOSS) == losses


@pytest.mark.parametrize(
    ("name", "text", "reason"),
    [
        ("numbers.log", "2.5 0\n2.4 100\n", "2 columns of numbers without names"),
        ("loss.json", json.dumps([[200, 5.9, 6.0], [400, 5.4, 5.5]]), "3 columns of numbers without names"),
        ("val_loss.csv", "Wall time,Step,Value\n1600000000.1,0,2.5\n1600000001.1,10,2.4\n", "holds no loss"),
        (
            "tensors.log",
            "INFO:  Num steps = 8242\nINFO: ***** Variables *****\n"
            + "INFO:absl: restored\n" * 4
            + "INFO:  name = crf_loss/transition:0, shape = (10, 10)\n",
            "holds no loss",
        ),
        (
            "job.out",
            "0it [00:00, ?it/s]\r176it [00:00, 1758.01it/s]\r352it [00:00, 625.91it/s]",
            "Lamina finds no JSON",
        ),
        ("run.ipynb", json.dumps({"cells": [{"outputs": []}], "nbformat": 4}), "outputs of this notebook have no loss"),
    ],
)
def test_other_numbers_are_refused_for_the_true_reason(tmp_path, name, text, reason):
    (tmp_path / name).write_text(text)
    with pytest.raises(UserError, match=reason):
        read_history(tmp_path / name)


def test_a_notebook_is_read_by_what_its_cells_show(tmp_path):
    printed = [{"output_type": "stream", "text": [f"step {n} loss {5 - n}.5\n"]} for n in range(3)]
    rows = "".join(f"<tr>\n<td>{n}</td><td>{n / 100}</td></tr>" for n in (10, 20))
    table = {"data": {"text/html": ["<p>[20/20]</p><table><tr><th>Step</th><th>Training Loss</th></tr>", rows]}}
    cells = [{"cell_type": "markdown"}, {"outputs": printed}, {"outputs": [table]}]
    path = tmp_path / "run.ipynb"
    path.write_text(json.dumps({"cells": cells, "nbformat": 4}))
    with pytest.raises(UserError, match=r"2 runs: 'cell 2' \(step 0 to 2\), 'cell 3' \(Step 10 to 20\)"):
        read_history(path)
    assert read_history(path, "cell 2").values(LOSS) == {0: 5.5, 1: 4.5, 2: 3.5}
    assert read_history(path, "cell 3").values(LOSS) == {10: 0.1, 20: 0.2}


def test_a_notebook_is_read_past_its_single_losses_and_other_outputs(tmp_path, monkeypatch):
    lines = "".join(f"Ep 1 (Step {n:06d}): Train loss {9 - n}.5, Val loss 9.9\n" for n in range(6))
    printed = ["[tensor 'loss' 1]\n['a]\n", "Training loss: 2.4\nValidation loss: 2.5\n", lines, "Training loss: 2.3\n"]
    path = tmp_path / "run.ipynb"
    path.write_text(json.dumps({"cells": [{"outputs": [{"text": [text]}]} for text in printed], "nbformat": 4}))
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(path.open("rb")))
    for source in (path, Path("-")):
        assert read_history(source).values(LOSS) == {n: 9.5 - n for n in range(6)}


def test_totals_are_steps(tmp_path):
    path = tmp_path / "progress.csv"
    path.write_text(
        "num_episodes,total timesteps,total_loss\n" + "".join(f"{n * n},{8192 * n},{9 - n}\n" for n in range(1, 6))
    )
    assert list(read_history(path).values(LOSS)) == [8192 * n for n in range(1, 6)]


def test_another_loss_that_is_not_finite_breaks_the_loss(tmp_path):
    path, nan = tmp_path / "log.jsonl", float("nan")
    gap = [{"step": n, "policy_loss": 1.0, "value_loss": nan if n == 5 else 2.0, "kl_loss": nan} for n in range(9)]
    path.write_text("\n".join(map(json.dumps, gap)))
    assert set(read_history(path).values(LOSS).values()) == {1.0}  # numbers follow the NaN, or there never was one
    path.write_text(
        "\n".join(json.dumps({**line, "value_loss": float("inf")} if line["step"] > 6 else line) for line in gap)
    )
    history = read_history(path)
    assert [n for n, loss in history.values(LOSS).items() if loss != loss] == [7, 8]
    assert "'value_loss' is not finite, first at step 7" in str(history)


def test_averages_over_short_epochs_are_read_at_their_ends(tmp_path):
    draw, lines = random.Random(1), []
    for epoch in range(20):
        losses = [2.0 - epoch / 100 + draw.gauss(0, 0.5) for _ in range(100)]
        lines += [f"Epoch: [{epoch}][{at}/100] loss: {sum(losses[:at]) / at:.5f}\n" for at in range(10, 101, 10)]
    path = tmp_path / "log.txt"
    path.write_text("".join(lines))
    history = read_history(path)
    assert list(history.values(LOSS))[10:] == [100 * epoch + 100 for epoch in range(1, 20)]
    assert "an average over the epoch so far" in str(history)


def test_no_epoch_begins_with_a_fall_in_a_loss_that_falls_all_the_time(tmp_path):
    path = tmp_path / "log.txt"
    lines = [(e, s, 8 * 0.985 ** (3 * e + s)) for e in range(99) for s in range(3)]
    path.write_text("".join(f"Epoch: {e + 1}/99 | Batch {s}/3 | Loss: {loss:.6f}\n" for e, s, loss in lines))
    import_history(path, tmp_path / "read")
    assert epoch_stairs(gather(tmp_path / "read")) == {}


def test_a_loss_near_0_rises_by_its_own_measure(tmp_path):
    draw, path = random.Random(1), tmp_path / "log.csv"
    level = [max(0.0002, 0.0002 * 1.08 ** (step - 60)) for step in range(120)]
    noisy = [value * draw.uniform(0.7, 1.3) for value in level]
    for losses, rose in ((noisy, True), (noisy[:60] * 2, False), ([0.0, *noisy[1:]], False)):
        path.write_text("step,loss\n" + "".join(f"{step},{loss}\n" for step, loss in enumerate(losses)))
        sentences = " ".join(lamina.diagnose(path).sentences)
        assert ("The loss rose at step 7" in sentences) == rose
        assert ("no lasting rise" in sentences) != rose


def test_a_loss_that_rose_is_an_anomaly(tmp_path):
    draw, path = random.Random(1), tmp_path / "log.csv"
    losses = [1.4] * 9 + [14 + draw.gauss(0, 0.3) for _ in range(60)]
    path.write_text("step,loss\n" + "".join(f"{step},{loss}\n" for step, loss in enumerate(losses)))
    sentences = lamina.diagnose(path).sentences
    assert "The loss rose at step 9 of 68." in sentences
    assert "Lamina found nothing else unusual in the record. The record does not show why the loss rose." in sentences


def test_a_second_stage_with_shorter_epochs_is_another_run(tmp_path):
    line = "Epoch: [{}/9]  [ {}/{}]  eta: 3:32:02  loss: {}.5 (10.7)  lr: 0.1\n"
    stages = [(e, s, of, 9 - e) for of, epochs in ((40, 3), (20, 2)) for e in range(epochs) for s in range(0, of, 10)]
    path = tmp_path / "log.txt"
    path.write_text("".join(line.format(*stage) for stage in stages))
    with pytest.raises(UserError, match=r"2 runs: '1' \(step 0 to 110\), '2' \(step 0 to 30\)"):
        read_history(path)


TWICE = (
    "[INFO] callbacks:157 >> {{'loss': 0.0000, 'learning_rate': {r:.4e}, 'epoch': 0.03}}\n"
    "{{'loss': 0.0, 'grad_norm': nan, 'learning_rate': {r!r}, 'epoch': 0.03}}\n 1%|# | {s}/6249 [08:38<11:33, 6.74s/it]"
)


def test_a_record_that_is_printed_twice_is_one_record(tmp_path):
    path = tmp_path / "train.log"
    path.write_text("".join(TWICE.format(r=4.9981234e-05 - s * 1e-09, s=s) for s in (75, 80, 85)))
    history = read_history(path)
    assert list(history.values(LOSS)) == [70, 75, 80]
    assert not any(math.isfinite(loss) for loss in history.values(LOSS).values())


def test_losses_beside_a_discriminators_are_neither_summed_nor_judged(tmp_path):
    path = tmp_path / "train.log"
    losses = [(1.5 + n % 2 / 9, -0.01 * 1.2**n, 0.008) for n in range(1, 55)]
    path.write_text(
        "".join(
            f"Epoch {n}/99 - Loss Discriminator: {d}, Loss Encoder: {e}, Loss Decoder: {c}\n"
            for n, (d, e, c) in enumerate(losses, 1)
        )
    )
    history = read_history(path)
    assert history.opposed
    assert history.read[LOSS] == "Loss Decoder"


def test_lines_below_a_global_step_are_its_record(tmp_path):
    path = tmp_path / "train.log"
    numbers = (
        "loss_0: 20.48  (20.22)",
        "grad_norm_0: 459.3  (378.8)",
        "loss_disc: 3.2  (3.6)",
        "grad_norm_1: 115.9  (2.0)",
    )
    path.write_text("  --> STEP: 183/270 -- GLOBAL_STEP: 1061700\n" + "".join(f"     | > {each}\n" for each in numbers))
    history = read_history(path)
    assert (history.values(LOSS), history.values(NORM)) == ({1061700: 20.48}, {1061700: 459.3})
    assert not history.layers


def test_results_of_an_evaluation_below_a_heading_are_no_record(tmp_path):
    path = tmp_path / "train.log"
    lines = [f"INFO:tensorflow:global_step = {n}, loss = {3 - n / 100}" for n in (10, 20, 30)]
    path.write_text(
        "\n".join(
            [
                *lines,
                "INFO:***** Eval results *****",
                "INFO:  acc = 0.9",
                "INFO:  global_step = 40",
                "INFO:  loss = 9.5",
            ]
        )
    )
    assert list(read_history(path).values(LOSS)) == [10, 20, 30]
