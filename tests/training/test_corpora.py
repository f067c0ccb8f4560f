"""Runs on a mix, and on a corpus that is read while they train: the blocks, the log, and resumes."""

import json
import os
import shutil

import pytest
import torch
from training.tiny_runs import SMALL, assert_same_run, at_step, cut_back, records, result, settings

from lamina.data import corpus as corpora
from lamina.data import streamed
from lamina.errors import UserError
from lamina.training import pretrain as pretraining
from lamina.training.optimization.order import TrainOrder
from lamina.training.settings import PretrainSettings


@pytest.fixture
def mix(corpus, tmp_path):
    other = tmp_path / "other.txt"
    other.write_text("few words, other ones\n" * 60)
    return f"{corpus}:0.75,{other}:0.25", str(corpus), str(other)


@pytest.fixture
def trained(mix, tmp_path):
    def run(name="run", resume=False, **changed):
        return pretraining.pretrain(settings(mix[0], tmp_path / name, **changed), resume=resume, bar=False)

    return run


def test_the_blocks_are_in_these_shares_and_the_log_and_the_result_say_so(trained, tmp_path, mix, before_each_pass):
    _, first, second = mix
    seen = []  # of each pass, how many blocks are of the other corpus: only that has commas
    before_each_pass(
        lambda trainer, model, inputs: seen.append((inputs["input_ids"] == ord(",")).any(dim=1).sum().item())
    )
    given = trained(steps=6, batch_size=4, sequence_length=64, logging_steps=1)
    assert seen == [1] * 6
    assert given["mix"][first]["share"] == 0.75
    assert {"wanted": 0.25, "share": 0.25, "blocks": 6}.items() <= given["mix"][second].items()
    shares = [r["mix"] for r in records(tmp_path / "run") if "loss" in r]
    assert shares == [{first: 0.75, second: 0.25}] * 6
    assert result(tmp_path / "run")["mix"] == given["mix"]


def test_a_resumed_run_goes_on_with_the_same_blocks(trained, tmp_path):
    given = {"steps": 6, "save_steps": 3, "logging_steps": 1}
    whole = trained("whole", **given)
    trained("cut", **given)
    cut_back(tmp_path / "cut", 3)
    again = trained("cut", resume=True, **given)
    assert again["eval_loss"] == whole["eval_loss"]
    assert records(tmp_path / "cut") == records(tmp_path / "whole")


def test_what_is_seen_more_than_once_is_said(trained, tmp_path, mix, caplog):
    trained(steps=12, batch_size=16, sequence_length=64)
    (said,) = [r.getMessage() for r in caplog.records if "trains on the whole corpus" in r.getMessage()]
    epochs = json.loads((tmp_path / "run" / "result.json").read_text())["mix"][mix[2]]["epochs"]
    assert epochs > 1
    assert f"{mix[2]}: this run trains on the whole corpus {epochs:.2f} times" in said


def test_the_spans_are_the_blocks_that_the_steps_trained_on():
    """Against the order itself: without skips, after one, and where a second one goes back before the first."""
    for skips in ((), ((3, 2),), ((3, 2), (5, 4)), ((5, 2), (3, 4))):
        order = TrainOrder(10**9, steps=8, batch_size=2, gradient_accumulation=3, skips=skips, shuffled=False)
        blocks = [i for batch in order for i in batch]
        for steps in range(9):
            spans = [i for start, end in order.spans(steps) for i in range(start, end)]
            assert spans == blocks[: steps * 6]


OPTIONS = {
    "steps": 14, "batch_size": 4, "gradient_accumulation": 2, "logging_steps": 1, "save_steps": 1, "eval_steps": 7,
    "keep": 99, "streaming": True, "shuffle_buffer": 3,
}  # fmt: skip


@pytest.fixture
def small_chunks(monkeypatch):
    """A chunk is less than a step's blocks, and a batch of text less than a document."""
    monkeypatch.setattr(streamed, "_CHUNK", 4)
    monkeypatch.setattr(streamed, "_BATCH_CHARS", 90)
    monkeypatch.setattr(corpora, "_PART_CHARS", 150)


@pytest.fixture
def folder(tmp_path):
    """About 1.2 kB in files of all kinds: a run of 14 steps, of 128 tokens each, reads it once and a half."""
    root = tmp_path / "texts"
    root.mkdir()
    (root / "a.txt").write_text("".join(f"line {i} of a text\n" for i in range(25)))
    rows = ["a short row", "a long row " * 30, "another"]
    (root / "b.jsonl").write_text("".join(json.dumps({"text": row}) + "\n" for row in rows))
    (root / "c.txt").write_text("one last file of few words\n" * 12)
    return root


@pytest.fixture
def train(folder, tiny):
    def run(name="run", resume=False, **changed):
        given = tiny(name, **{**OPTIONS, "corpus": str(folder), **changed})
        return pretraining.pretrain(given, resume=resume, bar=False)

    return run


@pytest.fixture
def tiny(tmp_path):
    return lambda name, **changed: PretrainSettings(**{**SMALL, "output": str(tmp_path / name), **changed})


@pytest.fixture
def seen(before_each_pass):
    """Each micro-batch's place in the data's order, its step and its ids."""
    found = []

    def see(trainer, model, inputs):
        step = trainer.state.global_step + 1
        found.append((step, trainer.order.data_step(step), inputs["input_ids"].clone()))

    before_each_pass(see)
    return found


def blocks_by_place(seen):
    """Of the last time that each place was trained on: its micro-batches' ids."""
    places = {}
    for step, place, ids in seen:
        places.setdefault((place, step), []).append(ids)
    return {place: torch.cat(ids) for (place, _), ids in places.items()}


def test_a_run_cut_anywhere_goes_on_as_if_it_had_not_been(train, tmp_path, small_chunks):
    """In the middle of a file, of a document and of a shuffled window; in the first pass and in the second."""
    train("whole")
    whole, places = tmp_path / "whole", []
    for step in (5, 13):
        cut = tmp_path / f"cut-{step}"
        shutil.copytree(whole, cut)
        cut_back(cut, step)
        run_state = cut / "checkpoints" / f"checkpoint-{step}" / "run_state.json"
        places.append(json.loads(run_state.read_text())["stream"])
        train(f"cut-{step}", resume=True)
        assert records(cut) == records(whole)
        assert_same_run(cut, whole)
    assert {place["turn"] for place in places} == {0, 1}
    assert any(place["segments"] for place in places)
    assert any(place["position"] for place in places)
    assert places[-1]["chunk"] == 13 * 8 // 6


def test_the_held_out_text_is_never_trained_on(train, folder, seen, trainers):
    """Lines of which no two are alike: those whole in a held-out block are in no block of three passes."""
    for path in folder.iterdir():
        path.unlink()
    (folder / "a.txt").write_text("".join(f"<{i:03d}>\n" for i in range(400)))
    train(steps=40, save_steps=0)
    trained = {n for _, _, ids in seen for row in ids for n in bytes(row.clamp(max=255).tolist()).split(b"\n")[1:-1]}
    evaluated = [trainers[0].eval_dataset[i]["input_ids"] for i in range(len(trainers[0].eval_dataset))]
    held_out = {n for row in evaluated for n in bytes(row.clamp(max=255).tolist()).split(b"\n")[1:-1]}
    assert len(trained) > 250
    assert held_out
    assert not trained & held_out


def test_a_rollback_leaves_the_streams_blocks_of_the_window_out(train, seen, small_chunks, before_each_pass):
    train("whole", save_steps=0, steps=20)
    wanted = blocks_by_place(seen)
    seen.clear()

    def spoil(trainer, model, inputs):
        if trainer.order.data_step(trainer.state.global_step + 1) == 7:
            trainer.guard.see_loss(trainer.state.global_step + 1, float("nan"))

    before_each_pass(spoil)
    found = train(save_steps=4, rollback=1)
    assert [told["skipped"] for told in found["rollbacks"]] in ([[5, 7]], [(5, 7)])
    back = next(i for i in range(1, len(seen)) if seen[i][0] < seen[i - 1][0])
    after = seen[back:]
    assert [(step, place) for step, place, _ in after[::2]] == [(s, s + 3) for s in range(5, 15)]
    assert all(torch.equal(ids, wanted[place]) for place, ids in blocks_by_place(after).items())


def test_a_mix_is_streamed_in_its_shares_and_goes_on_exactly(train, folder, tmp_path, small_chunks):
    other = tmp_path / "other.txt"
    other.write_text("few words, other ones\n" * 60)
    mix = f"{folder}:0.75,{other}:0.25"
    whole = train("whole", corpus=mix)
    assert {name: part["share"] for name, part in whole["mix"].items()} == {str(folder): 0.75, str(other): 0.25}
    shutil.copytree(tmp_path / "whole", tmp_path / "cut")
    cut_back(tmp_path / "cut", 5)
    train("cut", resume=True, corpus=mix)
    assert records(tmp_path / "cut") == records(tmp_path / "whole")
    assert_same_run(tmp_path / "cut", tmp_path / "whole")


def test_a_file_that_changed_since_the_run_began_is_named(train, folder, tmp_path, refused):
    train(steps=4, save_steps=2)
    (tmp_path / "run" / "result.json").unlink()
    with (folder / "b.jsonl").open("a") as file:
        file.write('{"text": "more"}\n')
    os.utime(folder / "b.jsonl", (2**31, 2**31))
    said = refused("pretrain", "--output", tmp_path / "run", "--resume")
    assert str(folder / "b.jsonl") in said
    assert "a.txt" not in said
    assert "has changed since" in said


def test_a_file_that_is_lost_meanwhile_is_one_line_and_the_run_can_go_on(train, folder, tmp_path, small_chunks, capsys):
    train("whole")
    text, lost = (folder / "a.txt").read_bytes(), pytest.raises(UserError, match=r"a\.txt' could not be read")
    with at_step(7, lambda trainer, model: (folder / "a.txt").unlink(missing_ok=True)), lost:
        train()
    (folder / "a.txt").write_bytes(text)
    train(resume=True)
    assert records(tmp_path / "run") == records(tmp_path / "whole")
    assert_same_run(tmp_path / "run", tmp_path / "whole")


def test_the_order_of_a_run_cannot_be_changed_when_it_goes_on(train, tmp_path):
    train(steps=2)
    usual = PretrainSettings.default("shuffle_buffer")
    for changed in ({"streaming": False, "shuffle_buffer": usual}, {"shuffle_buffer": 5}):
        (tmp_path / "run" / "result.json").unlink(missing_ok=True)
        with pytest.raises(UserError, match=f"{next(iter(changed))}: .* differs from the run's"):
            train(steps=2, resume=True, **changed)
