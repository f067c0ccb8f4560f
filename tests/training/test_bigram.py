"""The bigram table's loss, against tables counted one pair at a time."""

import math
from collections import Counter, defaultdict
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest
import torch
import yaml
from training import tiny_runs

from lamina.data.blocks import pair_entropy as of_blocks
from lamina.data.packed import prepare_blocks
from lamina.training.objectives.bigram import entropy_of
from lamina.training.optimization.order import order_of
from lamina.training.pretrain import pretrain
from lamina.training.resolve import resolve_run
from lamina.training.settings import PretrainSettings

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
