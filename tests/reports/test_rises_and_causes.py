"""The rise of the loss, the first anomaly and the recovery agree, and a sentence says only what the record shows."""

import json
import math
import random

import pytest

import lamina
from lamina.reports.diagnosis import _explained, _headline, epoch_stairs, gather
from lamina.reports.histories.importing import import_history
from lamina.reports.loss_course import back_at, loss_rise, rises_of


def diagnosed(path, lines):
    path.write_text("\n".join(lines))
    return lamina.diagnose(path).sentences


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


def spiked(seed):
    """The same loss with a spike at record 184 that is gone 15 records later."""
    return [
        loss + (3.1 * math.exp(-(at - 184) / 4.5) if 184 <= at < 199 else 0.0)
        for at, loss in enumerate(noisy(seed), start=1)
    ]


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


@pytest.mark.parametrize("seed", range(3))
def test_the_first_anomaly_of_a_log_with_losses_only_is_the_rise(tmp_path, seed):
    cause, *texts = diagnosed(tmp_path / "train.log", printed(spiked(seed)))
    said = " ".join(texts)
    assert "The loss rose at record 184 of 300. The loss was back down by record 19" in said
    assert "The first anomaly is at record 184, the model: the loss went from 2.2" in said
    assert "inspect the learning rate and the batches of records 184 to 18" in said
    assert "Record 184 is at epoch 1.84." in texts
    assert "186" not in f"{cause}{said}"


def loud(seed=4):
    """A loud loss at about 3.45 that a learning rate raises by half a nat for some twenty steps from step 144 on."""
    draw = random.Random(seed)
    rises = {step: 0.6 * min(1.0, math.exp(-(step - 150) / 20)) for step in range(144, 181)}
    return {step: 3.45 + rises.get(step, 0.0) + draw.gauss(0, 0.13) for step in range(1, 181)}


def test_a_rise_that_an_alarm_noticed_late_begins_where_the_losses_rise(tmp_path):
    losses = loud()
    evidence = read(tmp_path, [f"step {step} loss {loss:.4f}" for step, loss in losses.items()])
    assert loss_rise(losses) is None  # only the alarm, which adds up losses, notices this rise
    assert evidence.first.step == evidence.rose > 145
    assert (evidence.rise, evidence.anomaly.step) == (144, 144)
    back = back_at(evidence.losses, evidence.rise)
    assert back is None or back > 155


def test_a_loss_that_rose_for_five_steps_is_back_at_about_the_same_step_in_all_records_of_it(tmp_path):
    draw = random.Random(0)
    losses = {step: 2.6 + 1.7 * math.exp(-step / 40) + draw.gauss(0, 0.07) for step in range(1, 301)}
    losses |= {step: 5.9 - 0.07 * (step - 150) for step in range(150, 155)}
    losses |= {step: losses[step] + 0.4 * math.exp(-(step - 155) / 4) for step in range(155, 175)}
    some = {step: loss for step, loss in losses.items() if step % 10 == 0 or 146 < step < 156}
    every, rare = back_at(losses, 150), back_at(some, 150)
    assert 157 <= every <= 167
    assert 160 <= rare <= 170
    texts = diagnosed(tmp_path / "train.log", [f"step {step} loss {loss:.4f} lr 1e-3" for step, loss in some.items()])
    assert "The loss rose at step 150 of 300." in texts
    assert "Lamina found nothing else unusual in the record. The record does not show why the loss rose." in texts
    assert "To check: inspect the batches of steps 150 to 154." in texts


def test_the_first_anomaly_is_the_rise_if_a_rule_notices_it_later(tmp_path):
    losses = {step: 2.6 + 0.05 * math.sin(7 * step) + 3.2 * (step >= 150) for step in range(1, 201)}
    lines = [f"step {step} loss {loss:.4f} grad_norm {1.0 + (step > 152)}" for step, loss in losses.items()]
    evidence = read(tmp_path, lines)
    assert (evidence.first.step, evidence.rise, evidence.anomaly.step) == (152, 150, 150)
    assert "150" in _headline(evidence)
    said = " ".join(diagnosed(tmp_path / "train.log", lines))
    assert "The first anomaly is at step 150, the model: the loss went from 2.59 to 5.83" in said
    (tmp_path / "bad").mkdir()
    few = {step: loss - 3.2 * (step >= 162) for step, loss in losses.items()}
    evidence = read(tmp_path / "bad", [f"step {step} loss {loss:.4f}" for step, loss in few.items()])
    inspect = _explained(evidence, [("bad batch", 0.9)], []).changes[0]
    assert inspect.startswith("To change: inspect the batches of steps 150 to 161: repeated text")
    assert "152" not in said


def test_a_rise_begins_at_its_first_high_loss_though_only_later_losses_prove_it(tmp_path):
    draw = random.Random(1)
    rises = {step: 0.38 if step < 97 else 0.9 for step in range(93, 160)}
    losses = {step: 2.2 + rises.get(step, 0.0) + draw.gauss(0, 0.06) for step in range(1, 160)}
    evidence = read(tmp_path, [f"step {step} loss {loss:.4f} grad_norm 1.0" for step, loss in losses.items()])
    assert loss_rise(losses) > 94
    assert (evidence.rise, evidence.anomaly.step) == (93, 93)


def test_a_rise_that_passed_is_not_the_rise_that_stays(tmp_path):
    losses = {step: 2.6 + 0.05 * math.sin(7 * step) + 1.5 * (72 <= step < 76 or step >= 180) for step in range(1, 301)}
    lines = [f"step {step} loss {loss:.4f}" for step, loss in losses.items()]
    said = " ".join(diagnosed(tmp_path / "train.log", lines))
    assert "The loss rose at step 180 of 300. The loss also rose at step 72, but came back down." in said
    assert "The first anomaly is at step 180, the model" in said
    assert rises_of(losses) == (180, (72,))
    losses |= {step: losses[step] - 1.5 for step in range(195, 301)}  # the second passes, too, and only it has an alarm
    said = " ".join(diagnosed(tmp_path / "both.log", [f"step {step} loss {loss:.4f}" for step, loss in losses.items()]))
    assert "The loss was back down by step 195. The loss also rose at step 72, but came back down." in said
    assert "The loss rose at step 180 of 300." in said


def test_a_gradient_that_was_high_long_before_explains_no_rise(tmp_path):
    losses = noisy(0, noise=0.12)
    for at in range(200, 206):
        losses[at - 1] += 1.2
    norms = {at: 1.0 + 0.05 * math.sin(at) + 14.0 * (60 <= at < 72) for at in range(1, 301)}
    texts = diagnosed(tmp_path / "train.log", printed(losses, grad_norm=norms))
    assert "The loss rose at record 200 of 300." in texts
    assert any(
        text.startswith("An anomaly at record 60 passed long before. Lamina found nothing else") for text in texts
    )
    assert "before the loss rose" not in " ".join(texts)


def scheduled(path, high):
    """Diagnose a log whose learning rate follows a cosine, times 30 at the given records."""
    rates = {at: 1.5e-4 * (1 + math.cos(math.pi * at / 301)) * (30 if at in high else 1) for at in range(1, 301)}
    losses = [loss + 2.0 * (at >= 184) for at, loss in enumerate(noisy(1), start=1)]
    norms = {at: 1.0 + 6.0 * (at >= 184) for at in rates}
    return " ".join(diagnosed(path, printed(losses, grad_norm=norms, learning_rate=rates)))


def test_a_schedule_that_goes_on_falling_does_not_end_a_jump_of_its_rate(tmp_path):
    said = scheduled(tmp_path / "train.log", range(184, 301))
    assert "The record shows that the learning rate went from 0.0001 at record 183" in said
    assert "restore the schedule's learning rate (the record shows 29.6 times the rate of record 183)." in said
    assert "until" not in said
    back = scheduled(tmp_path / "train.log", range(184, 190))
    assert "keep the schedule's learning rate (the record shows 0.00274 until record 189, but 8.99e-05 at" in back


def test_the_lead_counts_records_if_the_record_has_no_steps(tmp_path):
    norms = {at: 1.0 + 0.01 * math.sin(at) + 9.0 * (183 <= at < 195) for at in range(1, 301)}
    said = " ".join(diagnosed(tmp_path / "train.log", printed(spiked(0), grad_norm=norms)))
    assert "The anomaly came 1 record before the loss rose." in said
    assert "inspect the learning rate and the batches that record 183 covers" in said
    rates = dict.fromkeys(norms, 1e-3)
    said = " ".join(diagnosed(tmp_path / "train.log", printed(spiked(0), grad_norm=norms, learning_rate=rates)))
    assert "inspect the batches that record 183 covers" in said  # the record has the learning rate


def test_a_folder_of_trainer_without_a_checkpoint_is_told_to_give_the_log(tmp_path, refused):
    said = refused("diagnose", tmp_path)
    assert said.endswith(
        "Trainer writes trainer_state.json with its first checkpoint: until then, give Trainer's printed log."
    )


def test_two_causes_with_the_same_odds_are_equally_likely(tmp_path):
    log = [{"step": 10 * at, "loss": 0.0, "grad_norm": math.nan, "learning_rate": 1e-5} for at in range(1, 20)]
    (tmp_path / "state.json").write_text(json.dumps({"log_history": log}))
    first, second, *texts = lamina.diagnose(tmp_path / "state.json").sentences
    assert first.startswith("Two causes are equally likely: values that are not finite from step 10 (odds 48%).")
    assert second.startswith("Or: values outside the number format's range, from step 10 on (odds 48%).")
    assert "To change: train in bfloat16 instead of float16, because bfloat16 has float32's range." in texts
    said = " ".join(texts)
    assert "skip_outliers" not in said  # another tool trained the model
    assert "study" not in said
    page = (tmp_path / "state.json-lamina" / "diagnosis.html").read_text(encoding="utf-8")
    assert "<title>Two causes are equally likely: " in page
    import_history(tmp_path / "state.json", tmp_path / "read")
    assert (
        _explained(gather(tmp_path / "read"), [("bad batch", 0.5), ("dead layer", 0.4)], [])
        .cause[0]
        .startswith("Likely")
    )
