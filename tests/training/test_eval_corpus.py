"""The loss on a second corpus: that of the saved model, with every evaluation, through a resume."""

import random
from contextlib import nullcontext

import pytest
import torch
from training.tiny_runs import TIMING, cut_at, layers, records, result, settings
from transformers import AutoModelForCausalLM, AutoTokenizer

from lamina.data.packed import whole_blocks
from lamina.errors import UserError
from lamina.reports import report
from lamina.training import pretrain as pretraining

NAME = "eval_corpus_loss"


@pytest.fixture
def second(tmp_path):
    draw = random.Random(3)
    path = tmp_path / "second.txt"
    path.write_text(
        "\n".join(" ".join(draw.choices(["quite", "other", "words", "stand", "here"], k=9)) for _ in range(20))
    )
    return path


@pytest.fixture
def tiny(corpus, second, tmp_path):
    def make(name="run", **changed):
        given = {"steps": 6, "eval_steps": 3, "logging_steps": 3, "precision": "fp32", "compile": "off"}
        return settings(corpus, tmp_path / name, **{**given, "eval_corpus": str(second), **changed})

    return make


def by_hand(folder, text, length):
    """The mean loss of the saved model over all whole blocks of a text of bytes."""
    model = AutoModelForCausalLM.from_pretrained(folder / "model").eval()
    ids = torch.tensor(list(text.encode()))
    blocks = ids[: len(ids) // length * length].view(-1, length)
    with torch.no_grad():
        return model(input_ids=blocks, labels=blocks).loss.item()


@pytest.mark.parametrize("placement", ["pre_ln", "keel"])
def test_the_loss_is_that_of_the_saved_model(tiny, second, tmp_path, placement):
    chosen = tiny(placement=placement, eval_blocks=0)
    pretraining.pretrain(chosen, bar=False)
    found = result(tmp_path / "run")
    expected = by_hand(tmp_path / "run", second.read_text(), chosen.sequence_length)
    assert found[NAME] == pytest.approx(expected, rel=1e-4)
    assert found[NAME] != pytest.approx(found["eval_loss"], rel=1e-3)
    evaluated = [r for r in records(tmp_path / "run") if "eval_loss" in r]
    assert [r["step"] for r in evaluated] == [3, 6]
    assert [NAME in r for r in evaluated] == [True, True]
    assert evaluated[-1][NAME] == found[NAME]
    assert "On the second corpus" in report(tmp_path / "run").read_text(encoding="utf-8")


def test_the_blocks_are_the_whole_text_in_its_order(tiny, second, tmp_path):
    pretraining.pretrain(tiny(), bar=False)
    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "run" / "model")
    blocks = whole_blocks(str(second), tokenizer, 16, progress=False)
    text = second.read_text().encode()
    assert len(blocks) == len(text) // 16
    assert bytes(blocks.array.ravel().astype("uint8").tolist()) == text[: len(blocks) * 16]


def test_a_run_with_a_second_corpus_trains_as_one_without(tiny, tmp_path):
    pretraining.pretrain(tiny("with"), bar=False)
    pretraining.pretrain(tiny("without", eval_corpus=None), bar=False)
    first, plain = (result(tmp_path / name) for name in ("with", "without"))
    assert NAME not in plain
    assert not any(NAME in r for r in records(tmp_path / "without"))
    del first[NAME]
    assert {**first, **dict.fromkeys(TIMING)} == {**plain, **dict.fromkeys(TIMING)}
    assert layers(tmp_path / "with").equals(layers(tmp_path / "without"))


@pytest.mark.parametrize("killed_at", [5, None], ids=["between two evaluations", "after the last one"])
def test_a_killed_run_resumes_to_the_same_loss(tiny, tmp_path, killed_at):
    pretraining.pretrain(tiny("whole"), bar=False)
    chosen = tiny("cut", save_steps=4 if killed_at else 6)
    with cut_at(killed_at) if killed_at else nullcontext():
        pretraining.pretrain(chosen, bar=False)
    (tmp_path / "cut" / "result.json").unlink()
    pretraining.pretrain(chosen, resume=True, bar=False)
    assert result(tmp_path / "cut")[NAME] == result(tmp_path / "whole")[NAME]


@pytest.mark.parametrize(
    ("spec", "message"),
    [
        ("nowhere.txt", r"eval_corpus: .*nowhere.txt"),
        ("{second}:0.5,embedded:0.5", r"eval_corpus: .* is a mix \(allowed here: one corpus\)"),
        ("{short}", r"eval_corpus: .* too few for a block"),
    ],
)
def test_a_bad_second_corpus_is_one_line_before_the_run(tiny, second, tmp_path, spec, message):
    short = tmp_path / "short.txt"
    short.write_text("few")
    with pytest.raises(UserError, match=message) as error:
        pretraining.pretrain(tiny(eval_corpus=spec.format(second=second, short=short)), bar=False)
    assert "\n" not in str(error.value)
    assert not (tmp_path / "run" / "config.yaml").exists()
