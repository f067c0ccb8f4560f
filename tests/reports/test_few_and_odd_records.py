"""`lamina diagnose` and `lamina report` on short, odd and newer records of lamina.watch."""

import json
import math

import pytest

import lamina
from lamina.errors import UserError
from lamina.training.monitor.writers import LOSS, NORM, VERSION, LayersWriter

ALL = ("all", 0)


def record(folder, *, steps=12, layers=2, every=1, loss=4.0, version=VERSION, **about):
    """Write the folder of a watched run that was killed."""
    folder.mkdir()
    about = {"record": version, "layers": [{"path": f"h.{index}"} for index in range(layers)], **about}
    (folder / "watched.json").write_text(json.dumps(about))
    (folder / "config.yaml").write_text(f"every: {every}\n")
    writer = LayersWriter(folder)
    for step in range(1, steps + 1):
        writer.add([(step, -1, "model", *ALL, metric, loss) for metric in (LOSS, NORM)])
        writer.add([(step, layer, "block", *ALL, "hidden_variance", 2.0 + layer) for layer in range(-1, layers)])
    writer.flush()
    return folder


@pytest.mark.parametrize(("steps", "count"), [(1, "1 loss is"), (12, "12 losses are")])
def test_few_losses_do_not_show_whether_the_loss_rose(tmp_path, steps, count):
    said = lamina.diagnose(record(tmp_path / "run", steps=steps)).sentences
    assert said[0] == f"{count} too few to see whether the loss rose (status: unfinished)."


def test_a_run_that_recorded_every_step_is_not_told_to(tmp_path):
    said = {every: lamina.diagnose(record(tmp_path / f"{every}", every=every, loss=math.nan)) for every in (1, 20)}
    assert "The loss is not finite from step 1 of 12 on (status: unfinished)." in said[1].sentences
    assert not [text for text in said[1].sentences if "every=1" in text]
    assert [text for text in said[20].sentences if "every=1" in text]


@pytest.mark.parametrize("name", ["settings", "history"])
def test_an_entry_of_another_type_is_named(tmp_path, name):
    with pytest.raises(UserError, match=rf"{name}: \[1\] in .*watched.json' is not a mapping"):
        lamina.diagnose(record(tmp_path / "run", **{name: [1]}))


def test_records_of_a_newer_version_are_not_compared(tmp_path):
    mine, newer = record(tmp_path / "mine"), record(tmp_path / "newer", version=VERSION + 1)
    for pair in ((mine, newer), (newer, mine)):
        with pytest.raises(UserError, match=f"records of version {VERSION + 1}, but"):
            lamina.diagnose(*pair)


def test_layers_of_only_one_of_two_runs_are_named(tmp_path):
    few, many = record(tmp_path / "few"), record(tmp_path / "many", layers=5)
    for pair in ((few, many), (many, few)):
        assert f"Only {many} has layers 2-4." in lamina.diagnose(*pair).sentences
    assert not [text for text in lamina.diagnose(few, few).sentences if text.startswith("Only")]


def test_the_embedding_is_named_where_it_differs_first(tmp_path):
    first, second = record(tmp_path / "first", steps=1), record(tmp_path / "second", steps=1)
    writer = LayersWriter(second)
    writer.add([(1, -1, "block", *ALL, "hidden_variance", 3.0)])
    writer.flush()
    compared, parted = lamina.diagnose(first, second).sentences
    assert compared.endswith("at step 1.")
    assert parted == (
        "The first layer that differs is at step 1, the embedding: the residual stream's variance is 1 against 3."
    )


def history(path, *high):
    """Write a log whose loss goes up to 4.5 at some steps."""
    losses = {step: 4.5 if step in high else 2.4 + 0.02 * math.sin(7 * step) for step in range(1, 61)}
    path.write_text("".join(f"step {step} loss {loss:.4f}\n" for step, loss in losses.items()))
    return lamina.diagnose(path)


@pytest.mark.parametrize(
    ("high", "said"),
    [
        ([40], "step 40 (to 4.5, back at step 41)"),
        ([40, 41], "step 40 (to 4.5, back at step 42)"),
        ([30, 40], "step 30 (to 4.5, back at step 31); step 40 (to 4.5, back at step 41)"),
        ([60], "step 60 (to 4.5, where the record ends)"),
    ],
)
def test_a_loss_that_spiked_and_came_back_is_no_healthy_run(tmp_path, high, said):
    diagnosis = history(tmp_path / "train.log", *high)
    assert f"The loss spiked at {said}." in diagnosis.sentences
    assert f"To check: inspect the learning rate and the batch of step {high[0]}." in diagnosis.sentences
    assert "Lamina found nothing else unusual in the record." in diagnosis.sentences
    assert f"<title>The loss spiked at step {high[0]} and " in diagnosis.page.read_text("utf-8")


def test_an_unknown_cause_is_four_lines_with_what_was_seen_what_remains_and_what_to_record(tmp_path):
    log = [(step, 2.4 + 0.02 * math.sin(7 * step) + 2.0 * (step >= 50)) for step in range(1, 81)]
    (tmp_path / "train.log").write_text("".join(f"step {step} loss {loss:.4f}\n" for step, loss in log))
    causes, *texts, _ = lamina.diagnose(tmp_path / "train.log").sentences
    known = "The cause is not known. A record without values by layer does not tell these causes apart: "
    assert causes.startswith(f"{known}labels or data changed, an embedding row growing, ")
    assert causes.endswith(", or a failure that Lamina does not know.")
    assert texts == [
        "The loss rose at step 50 of 80.",
        "The first anomaly is at step 50, the model: the loss went from 2.4 to 4.38, a larger change than usual.",
        "To check: inspect the learning rate and the batch of step 50, and record every step by layer (lamina.watch "
        "with every=1).",
    ]


BAR = "{percent}%|##  | {step}/80 [00:40<00:40,  2.0it/s"


@pytest.mark.parametrize(
    ("line", "about"),
    [
        (f"{BAR}, loss={{loss:.4f}}]\r", "about "),
        (f"{BAR}]\r{{{{'loss': {{loss:.4f}}, 'grad_norm': 1.0}}}}\n", "about "),
        ("step {step}/80 loss={loss:.4f}\n", ""),
    ],
)
def test_steps_of_a_progress_bar_are_not_exact(tmp_path, line, about):
    losses = {step: 2.4 + 0.02 * math.sin(7 * step) + 2.0 * (step >= 50) for step in range(1, 81)}
    text = "".join(line.format(percent=step, step=step, loss=loss) for step, loss in losses.items())
    (tmp_path / "train.log").write_text(text)
    diagnosis = lamina.diagnose(tmp_path / "train.log")
    assert f"The loss rose at {about}step 50 of 80." in diagnosis.sentences
    assert f"<title>Anomaly at {about}step 50, " in diagnosis.page.read_text("utf-8")


def test_a_loss_that_rose_within_its_first_records_is_no_healthy_run(tmp_path):
    """From a Trainer whose learning rate was 1.0: 8 losses that tell the noise do not come before the rise."""
    losses = [4.98, 12.41, 19.9, 16.45, 16.88, 13.87, 9.72, 6.41, 4.97, *(4.0 - 0.02 * n for n in range(12))]
    rows = [{"step": 5 * number, "loss": loss} for number, loss in enumerate(losses, start=1)]
    (tmp_path / "trainer_state.json").write_text(json.dumps({"log_history": rows}))
    diagnosis = lamina.diagnose(tmp_path / "trainer_state.json")
    assert "The loss spiked at step 10 (to 19.9, back at step 45)." in diagnosis.sentences
    assert "To check: inspect the learning rate and the batches of steps 6 to 10." in diagnosis.sentences
    for row in rows[1:8]:
        row["loss"] = 5.2  # less than a half more
    (tmp_path / "other.json").write_text(json.dumps(rows))
    assert "Lamina found no anomaly in the record." in lamina.diagnose(tmp_path / "other.json").sentences


def test_records_without_steps_are_called_records(tmp_path):
    losses = [4.5 if number == 40 else 2.4 + 0.02 * math.sin(7 * number) for number in range(1, 61)]
    (tmp_path / "pasted.txt").write_text("".join(f"{{'loss': {loss:.4f}}}\n" for loss in losses))
    diagnosis = lamina.diagnose(tmp_path / "pasted.txt")
    assert "The loss spiked at record 40 (to 4.5, back at record 41)." in diagnosis.sentences
    assert "To check: inspect the learning rate and the batches that record 40 covers." in diagnosis.sentences
    page = diagnosis.page.read_text("utf-8")
    assert "<title>The loss spiked at record 40 and " in page
    lines = [*(f"{{'loss': {loss:.4f}}}" for loss in losses[:30]), *["{'loss': nan}"] * 3]
    (tmp_path / "nan.txt").write_text("\n".join(lines))
    page = lamina.diagnose(tmp_path / "nan.txt").page.read_text("utf-8")
    assert "Alarms by record" in page
    assert "<li>record 31, " in page


def test_a_loss_that_rose_for_some_steps_is_said_to_have_come_back(tmp_path):
    assert "The loss was back down by step 45." in history(tmp_path / "back.log", *range(40, 45)).sentences
    assert "back down" not in str(history(tmp_path / "up.log", *range(40, 61)).sentences)


def test_a_steady_loss_has_no_spike(tmp_path):
    diagnosis = history(tmp_path / "train.log")
    assert "spiked" not in str(diagnosis.sentences)
    assert "<title>No problem found" in diagnosis.page.read_text("utf-8")


@pytest.mark.parametrize("value", ["high", "2026-01-01", [1.0], None])
@pytest.mark.parametrize("column", ["value", "step"])
def test_a_part_whose_numbers_are_none_is_left_out(tmp_path, caplog, column, value):
    pa, pq = (pytest.importorskip(name) for name in ("pyarrow", "pyarrow.parquet"))
    folder = record(tmp_path / "run", steps=40)
    part = folder / "layers" / "part-00000.parquet"
    table = pq.read_table(part)
    odd = table.set_column(table.column_names.index(column), column, pa.array([value] * len(table)))
    pq.write_table(odd, folder / "layers" / "part-00001.parquet")
    said = lamina.diagnose(folder).sentences
    missing = column == "value" and value is None  # a missing value is not finite
    assert ("part-00001.parquet is not readable, so Lamina skips this file" in caplog.text) == (not missing)
    assert ("The loss had no lasting rise in 40 steps (status: unfinished)." in said) == (not missing)


@pytest.mark.parametrize(("loss", "spiked"), [("358068508261867004967067454537728.0", True), ("40.0", False)])
def test_a_huge_loss_among_few_losses_is_a_spike(tmp_path, loss, spiked):
    (tmp_path / "train.log").write_text(
        "".join(f"step {at} loss {loss if at == 2 else 0.1 + at / 100}\n" for at in range(5))
    )
    said = str(lamina.diagnose(tmp_path / "train.log"))
    assert ("The loss spiked at step 2 (to 3.58e+32, back at step 3)." in said) is spiked
    assert ("Lamina found no anomaly" in said) is not spiked
