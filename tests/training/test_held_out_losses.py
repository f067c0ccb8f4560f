"""Losses of held-out text beside the eval loss: a second corpus's, a bigram table's, and one that still falls."""

import math
import random
from collections import Counter, defaultdict
from contextlib import nullcontext
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest
import torch
import yaml
from training import tiny_runs
from training.tiny_runs import TIMING, cut_at, layers, records, result, settings
from transformers import AutoModelForCausalLM, AutoTokenizer

from lamina.data.blocks import pair_entropy as of_blocks
from lamina.data.packed import prepare_blocks, whole_blocks
from lamina.reports import report
from lamina.training import pretrain as pretraining
from lamina.training.monitor.guard import STILL_FALLING, still_falling
from lamina.training.optimization.order import order_of
from lamina.training.pretrain import entropy_of, pretrain
from lamina.training.resolve import resolve_run
from lamina.training.settings import PretrainSettings

NAME = "eval_corpus_loss"


@pytest.fixture
def second(tmp_path):
    draw = random.Random(3)
    path = tmp_path / "second.txt"
    words = ["quite", "other", "words", "stand", "here"]
    path.write_text("\n".join(" ".join(draw.choices(words, k=9)) for _ in range(20)))
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


def test_the_loss_is_that_of_the_saved_model(tiny, second, tmp_path):
    chosen = tiny(placement="keel", eval_blocks=0)
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


BASES = Path(__file__).parents[2] / "studies" / "bases.yaml"
SMALL = {**tiny_runs.SMALL, "num_layers": 1, "num_heads": 1, "sequence_length": 32, "eval_blocks": 8}
SMALL |= {"precision": "fp32", "compile": "off"}


def bigram_entropy(values):
    """The table's loss for a run of these settings that trains all steps, without training it."""
    settings = PretrainSettings.from_dict(values)
    splits, _ = resolve_run(settings).read()
    order = order_of(settings, splits.train.for_run(settings.seed))
    return entropy_of(splits, settings, order, settings.steps)


def naive(train, held_out, vocab_size):
    """The loss under a table of dictionaries, written from Witten and Bell's formula."""
    tokens, pairs, after = Counter(), Counter(), defaultdict(set)
    for block in train:
        tokens.update(block)
        for first, second in pairwise(block):
            pairs[first, second] += 1
            after[first].add(second)
    total, losses = sum(tokens.values()), []
    for block in held_out:
        for first, second in pairwise(block):
            alone = (tokens[second] + 1) / (total + vocab_size)
            seen = sum(pairs[first, other] for other in after[first])
            weight = len(after[first])
            together = (pairs[first, second] + weight * alone) / (seen + weight) if seen else alone
            losses.append(-math.log(together))
    return sum(losses) / len(losses)


@pytest.mark.parametrize("vocab_size", [5, 300, 60_000])
def test_the_table_is_that_of_a_naive_count(vocab_size):
    rng = np.random.default_rng(vocab_size)
    train, held_out = (rng.zipf(1.3, (rows, 24)) % vocab_size for rows in (40, 9))
    expected = naive(train.tolist(), held_out.tolist(), vocab_size)
    assert of_blocks(train.astype(np.uint16), held_out.astype(np.uint16), vocab_size) == pytest.approx(expected)


def test_counting_in_pieces_changes_nothing(monkeypatch):
    rng = np.random.default_rng(1)
    train, held_out = rng.integers(0, 50, (64, 16)), rng.integers(0, 60, (8, 16))
    whole = of_blocks(train, held_out, 60)
    monkeypatch.setattr("lamina.data.blocks._AT_ONCE", 48)
    assert of_blocks(train, held_out, 60) == pytest.approx(whole, rel=1e-14)


def test_the_base_of_the_studies_has_the_published_values():
    base = yaml.safe_load(BASES.read_text(encoding="utf-8"))["small"]
    blocks, _ = prepare_blocks("embedded", "bytes", 64)
    held_out = [blocks.eval[i * len(blocks.eval) // 256]["input_ids"].tolist() for i in range(256)]
    for seed in (0, 1):
        order = torch.randperm(len(blocks.train), generator=torch.Generator().manual_seed(seed))[: 100 * 16]
        expected = naive([blocks.train[int(i)]["input_ids"].tolist() for i in order], held_out, 257)
        entropy = bigram_entropy({**base, "seed": seed})
        assert entropy == pytest.approx(expected)
        assert entropy == pytest.approx(2.42, abs=0.005)


def test_a_run_has_the_entropy_of_what_it_read(tmp_path):
    settings = {**SMALL, "steps": 4, "gradient_accumulation": 2, "seed": 3}
    result = pretrain({**settings, "output": str(tmp_path / "run")}, bar=False)
    assert result["bigram_entropy"] == pytest.approx(bigram_entropy(settings), rel=1e-12)
    assert bigram_entropy({**settings, "steps": 3}) != result["bigram_entropy"]
    assert bigram_entropy({**settings, "seed": 4}) != result["bigram_entropy"]


def test_a_text_that_is_read_often_counts_once(tmp_path):
    (tmp_path / "text.txt").write_text("the cat sat on the mat. " * 100, encoding="utf-8")
    settings = {**SMALL, "corpus": str(tmp_path / "text.txt"), "eval_fraction": 0.2}
    assert bigram_entropy({**settings, "steps": 200}) == bigram_entropy({**settings, "steps": 100})


@pytest.mark.parametrize("streaming", [False, True])
def test_a_mix_and_a_stream_have_one_too(tmp_path, streaming):
    for name, words in (("a", "one two three "), ("b", "four five six ")):
        (tmp_path / f"{name}.txt").write_text(words * 2000, encoding="utf-8")
    mix = f"{tmp_path / 'a.txt'}:0.7,{tmp_path / 'b.txt'}:0.3"
    settings = {**SMALL, "steps": 20, "corpus": mix, "streaming": streaming, "eval_blocks": 64}
    assert 0 < bigram_entropy(settings) < 1.5


def evals(*pairs):
    return [{"step": step, "eval_loss": loss} for step, loss in pairs]


def course(loss, name="loss", every=5):
    return [{"step": step, name: loss(step)} for step in range(every, 101, every)]


DROP = STILL_FALLING / 5  # in a fifth of a run
SLOW = evals((1, 5.565), (2, 5.547), (3, 5.525), (4, 5.514))
ONE = evals((100, 3.25))
HISTORIES = {  # records, the steps of the run, the entropy of the plateau, and what is said (None: it does not fall)
    "a plateau": (evals((20, 3.6), (40, 3.27), (60, 3.252), (80, 3.251), (100, 3.2505)), 100, None, None),
    "a descent": (
        evals((4, 5.2), (8, 4.8), (12, 4.4), (16, 4.1), (20, 3.9)), 20, None,
        "the eval loss still falls, from 4.100 at step 16 to 3.900 at step 20",
    ),
    "a pace above the limit": (evals((80, 3.5), (100, 3.5 - 1.01 * DROP)), 100, None, "the eval loss still falls"),
    "a pace below the limit": (evals((80, 3.5), (100, 3.5 - 0.99 * DROP)), 100, None, None),
    "slow, but above the plateau": (SLOW, 4, 3.2, "the eval loss"),
    "slow, and on the plateau": (SLOW, 4, 5.6, None),
    "nearly level": (evals((1, 5.5651), (2, 5.565), (3, 5.5649), (4, 5.5648)), 4, 3.2, None),
    "slower and slower": (evals((20, 4.0), (40, 3.5), (60, 3.43), (80, 3.42), (100, 3.405)), 100, 3.24, None),
    "noise at every step": (course(lambda s: 3.25 + 0.004 * (-1) ** s, "eval_loss", every=1), 100, None, None),
    "one evaluation": ([*course(lambda s: 5.5 - 0.02 * s), *ONE], 100, None, "the training loss still falls"),
    "one evaluation and noise": ([*course(lambda s: 3.25 + 0.2 * (s in (65, 75))), *ONE], 100, None, None),
    "a rise": (evals((80, 3.2), (100, 3.4)), 100, None, None),
    "a broken loss": ([*evals((80, 3.2)), {"step": 90, "loss": None}, {"step": 95, "loss": math.nan}], 100, None, ""),
    "nothing": ([], 1, None, "only one loss was recorded"),
}  # fmt: skip


@pytest.mark.parametrize("name", HISTORIES)
def test_a_loss_falls_still_if_its_pace_says_so(name):
    history, steps, entropy, says = HISTORIES[name]
    found = still_falling(history, steps, entropy=entropy) if entropy else still_falling(history, steps)
    assert found is None if says is None else found.startswith(says)


@pytest.mark.parametrize(("rate", "status"), [(3e-3, "short"), (1e-9, "stuck")])
def test_a_run_of_a_few_steps_is_short_where_its_loss_falls(corpus, tmp_path, rate, status):
    given = settings(corpus, tmp_path / "run", steps=8, learning_rate=rate)
    found = pretrain(given, bar=False)
    assert found["status"] == status
    assert ("too few to tell" in found["reason"]) == (status == "short")
    assert ("is not 0.1 nats below" in found["reason"]) == (status == "short")  # it is above: "less than" misled
    assert "unigram entropy" in found["reason"]
    assert found["eval_loss"] > found["unigram_entropy"]
    assert found == result(tmp_path / "run")
    assert (tmp_path / "run" / "model").is_dir()
    assert pretrain(given, resume=True, bar=False) == found  # it has ended
