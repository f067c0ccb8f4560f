"""``batches=True``: the rows of batches that stood out, their hashes, and their text in the answer and on the page."""

import hashlib
import json
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from training.tiny_runs import layers
from training.watching.loops import NanoGpt, Tokens, llama
from transformers import Trainer, TrainingArguments

import lamina
from lamina.modeling.processes import Processes
from lamina.training.monitor import batches as kept_batches
from lamina.training.monitor.batches import BatchRecords, KeptBatches, hash_of_row, read_batches

AT, STEPS = 31, 45
PAYLOAD = "<script>alert(1)</script>\x1b[31m"


class Words:
    """A tokenizer whose texts a page or a terminal would obey."""

    def decode(self, ids):
        return f"{PAYLOAD} {' '.join(f't{token}' for token in ids)}"


def hash_of(ids):
    return hashlib.sha256(np.asarray(ids, dtype="<i8").tobytes()).hexdigest()[:16]


def spiked(folder, **options):
    """A training whose gradient is 15 times too large at one step."""
    model, batches = NanoGpt(), list(Tokens(items=2 * STEPS).ids.split(2))

    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-5)
    with lamina.watch(model, optimizer, output=str(folder), **options) as monitor:
        for step, batch in enumerate(batches, 1):
            loss = model(batch[:, :-1], batch[:, 1:])[1]
            (loss * (15.0 if step == AT else 1.0)).backward()
            optimizer.step()
            optimizer.zero_grad()
            monitor.step(loss)
    return batches[AT - 1][:, :-1].tolist()


def test_the_rows_behind_a_spike_of_the_loss_alone_are_written(tmp_path):
    """One batch of other text: its loss is high, its gradient is not."""
    model, batches = NanoGpt(), list(Tokens(items=200).ids.split(2))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-5)
    with lamina.watch(model, optimizer, output=str(tmp_path / "run"), batches=True) as monitor:
        for step, batch in enumerate(batches, 1):
            loss = model(batch[:, :-1], batch[:, 1:])[1]
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            monitor.step(loss.detach() + 3.0 * (step == 80))
    assert {line["step"] for line in read_batches(tmp_path / "run")} == {80}
    assert "The batch of step 80 has these rows" in " ".join(lamina.diagnose(tmp_path / "run").sentences)


def test_a_notable_batchs_rows_are_written_without_a_tokenizer_as_token_ids(tmp_path):
    rows = spiked(tmp_path / "run", batches=True)
    hashed = [{"row": at, "hash": hash_of(row), "beginning": row} for at, row in enumerate(rows)]
    assert read_batches(tmp_path / "run") == [{"step": AT, "process": 0, **row} for row in hashed]
    assert not (tmp_path / "run" / "alarms.jsonl").exists()  # nothing follows it
    said = " ".join(lamina.diagnose(tmp_path / "run").sentences)
    assert f"The loss had no lasting rise in {STEPS} steps (status: finished)." in said
    assert "nothing went wrong after" in said
    assert "No layer has an anomaly." in said
    assert "cause" not in said
    assert f"The batch of step {AT} has these rows" in said
    assert f"{hash_of(rows[1])} “token ids {rows[1][0]} {rows[1][1]} " in said


def test_a_text_is_in_the_answer_and_escaped_on_both_pages(tmp_path, capsys):
    from lamina.commands.diagnose import run

    spiked(tmp_path / "run", batches=True, tokenizer=Words())
    (line, _) = read_batches(tmp_path / "run")
    assert line["beginning"].startswith(PAYLOAD)
    run([str(tmp_path / "run")])
    said = capsys.readouterr().out
    assert "alert(1)" in said
    assert "\x1b" not in said
    for page in (tmp_path / "run" / "diagnosis.html", lamina.report(tmp_path / "run")):
        html = page.read_text()
        assert "&lt;script&gt;alert(1)" in html
        assert "<script>alert(1)" not in html
        assert line["hash"] in html


def test_without_the_setting_no_text_is_kept(tmp_path):
    spiked(tmp_path / "run", tokenizer=Words())
    assert (tmp_path / "run" / "notable.jsonl").exists()
    assert not (tmp_path / "run" / "batches.jsonl").exists()
    assert "Rows of" not in " ".join(lamina.diagnose(tmp_path / "run").sentences)


def test_an_alarmed_batch_of_a_trainer_is_decoded_by_its_own_tokenizer(tmp_path):
    class Tokenizer(Words):
        def save_pretrained(self, folder):
            pass

    class Broken(Trainer):
        def training_step(self, model, *args, **kwargs):
            loss = super().training_step(model, *args, **kwargs)
            if self.state.global_step == 2:
                next(model.parameters()).grad.fill_(torch.nan)
            return loss

    arguments = TrainingArguments(
        str(tmp_path / "out"), max_steps=4, report_to="none", per_device_train_batch_size=3, learning_rate=1e-5
    )
    monitor = lamina.LayerMonitor(str(tmp_path / "run"), batches=True)
    options = {"processing_class": Tokenizer(), "callbacks": [monitor]}
    Broken(llama(), arguments, train_dataset=Tokens(), **options).train()
    told = [json.loads(line)["step"] for line in (tmp_path / "run" / "alarms.jsonl").read_text().splitlines()]
    lines = read_batches(tmp_path / "run")
    assert {line["step"] for line in lines} == set(told) >= {3}
    assert [line["row"] for line in lines if line["step"] == 3] == [0, 1, 2]
    assert lines[0]["beginning"].startswith(PAYLOAD)
    assert set(layers(tmp_path / "run")["step"])  # the run is whole


def test_padding_is_no_part_of_a_row_and_accumulated_batches_are_one():
    ids, mask = torch.tensor([[0, 0, 5, 6], [0, 7, 8, 9]]), torch.tensor([[0, 0, 1, 1], [0, 1, 1, 1]])
    kept = KeptBatches(every=20)
    for _ in range(2):
        kept.see({"attention_mask": mask, "input_ids": ids}, "input_ids")
    ids.zero_()  # a loop may use its tensors again
    kept.end_step(1)
    assert [row.tolist() for row in kept.rows(1)] == [[5, 6], [7, 8, 9]] * 2
    assert hash_of_row(kept.rows(1)[0]) == hash_of([5, 6])


def test_pixels_have_a_hash_and_no_beginning():
    kept = KeptBatches(every=20)
    kept.see({"pixel_values": torch.ones(2, 3, 4, 4, dtype=torch.bfloat16)}, "pixel_values")
    kept.end_step(1)
    records = BatchRecords(kept, None, 0, Words(), None)
    sent = []
    records.write([1], [], SimpleNamespace(rank=0, everyones=lambda value: sent.append(value) or [value]))
    assert [line["beginning"] for line in sent[1]] == [None, None]
    assert sent[1][0]["hash"] == hashlib.sha256(np.ones(48, "<f4").tobytes()).hexdigest()[:16]


def test_old_batches_are_dropped(monkeypatch):
    kept = KeptBatches(every=20)
    for step in range(1, 200):
        kept.see({"idx": torch.ones(2, 8, dtype=torch.long)}, None)
        kept.end_step(step)
    assert list(kept.steps) == list(range(116, 200))
    monkeypatch.setattr(kept_batches, "MOST_BYTES", 3 * 64)
    kept.see({"idx": torch.ones(2, 8, dtype=torch.long)}, None)
    kept.end_step(200)
    assert list(kept.steps) == [198, 199, 200]


def test_every_process_adds_its_rows(tmp_path):
    kept = KeptBatches(every=20)
    kept.see({"idx": torch.tensor([[1, 2]])}, None)
    kept.end_step(7)
    theirs = [{"step": 7, "process": 1, "row": 0, "hash": "x", "beginning": [3, 4]}]
    answers = iter([[[7], []], None])

    def everyones(value):
        return next(answers) or [value, theirs]

    records = BatchRecords(kept, tmp_path, 0, None, None)
    records.write([7], [], SimpleNamespace(rank=0, everyones=everyones))
    assert [(line["process"], line["beginning"]) for line in read_batches(tmp_path)] == [(0, [1, 2]), (1, [3, 4])]
    assert BatchRecords(kept, tmp_path, 6, None, None)._lines == []
    assert read_batches(tmp_path) == []  # a training that goes on after step 6 comes to step 7 again


def test_a_tokenizer_that_fails_does_not_end_the_training(tmp_path, caplog):
    class Failing:
        def decode(self, ids):
            raise ValueError("unknown id")

    rows = spiked(tmp_path / "run", batches=True, tokenizer=Failing())
    assert read_batches(tmp_path / "run")[0]["beginning"] == rows[0]
    assert caplog.text.count("cannot decode a batch (unknown id)") == 1


@pytest.mark.parametrize("vocabulary", [61, 3])
def test_a_models_own_tokenizer_is_found(tmp_path, vocabulary):
    from tokenizers import Tokenizer, models
    from transformers import PreTrainedTokenizerFast

    words = models.WordLevel({f"w{number}": number for number in range(61)}, "w0")
    PreTrainedTokenizerFast(tokenizer_object=Tokenizer(words)).save_pretrained(tmp_path)
    model = SimpleNamespace(config=SimpleNamespace(name_or_path=str(tmp_path), vocab_size=vocabulary))
    found = kept_batches.tokenizer_of(model)
    assert (found is None) == (vocabulary == 3)  # of another vocabulary: not this model's
    assert found is None or found.decode([4, 5]).split() == ["w4", "w5"]


SOUND = {"input_values": torch.rand(2, 3), "attention_mask": torch.ones(2, 3, dtype=torch.long)}
INPUTS = {
    "sound beside a mask": (SOUND, "input_values", None),
    "labels with -100": ({"x": torch.rand(1, 4, 4), "labels": torch.tensor([[5, 6, -100]])}, "x", [[5, 6]]),
    "sequences in a row": (
        {"input_ids": torch.arange(4), "position_ids": torch.zeros(1, 4).long()},
        "input_ids",
        [[0, 1, 2, 3]],
    ),
}


@pytest.mark.parametrize("name", INPUTS)
def test_the_text_of_a_batch_is_told_from_what_is_beside_it(name):
    inputs, main, rows = INPUTS[name]
    kept = KeptBatches(every=20)
    kept.see(inputs, main)
    kept.end_step(1)
    assert [row.tolist() for row in kept.rows(1)] == (inputs[main].tolist() if rows is None else rows)


def test_steps_whose_batches_are_gone_take_no_room(tmp_path):
    kept = KeptBatches(every=20)
    kept.see({"input_ids": torch.ones(1, 3, dtype=torch.long)}, "input_ids")
    kept.end_step(510)
    records = BatchRecords(kept, tmp_path, 500, SimpleNamespace(decode=lambda ids: "\ud800"), None)
    records.write({*range(1, 101), 510}, [], Processes())
    assert [(line["step"], line["beginning"]) for line in read_batches(tmp_path)] == [(510, "?")]
