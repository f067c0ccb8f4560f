"""Masked blocks: which tokens are chosen, what becomes of them, and that a position decides it."""

import numpy as np
import pytest
import torch

from lamina.data.blocks import ArrayBlocks
from lamina.data.masked_blocks import MASK, MaskedBlocks, with_mask_token
from lamina.data.tokenizers import load_tokenizer

LENGTH = 64


@pytest.fixture(scope="module")
def tokenizer():
    return with_mask_token(load_tokenizer("bytes"))


@pytest.fixture(scope="module")
def blocks():
    ids = np.random.default_rng(0).integers(97, 123, (200, LENGTH)).astype(np.uint16)
    ids[:, 10] = 256  # the end of a text
    return ArrayBlocks(ids)


def test_a_tokenizer_without_a_mask_gets_one(tokenizer):
    assert tokenizer.mask_token == MASK
    assert tokenizer.mask_token_id == 257
    assert len(with_mask_token(tokenizer)) == 258


@pytest.mark.parametrize("ratio", [0.15, 0.3])
def test_the_shares_are_those_of_bert(tokenizer, blocks, ratio):
    masked = MaskedBlocks(blocks, tokenizer, ratio)
    ids = torch.stack([blocks[i]["input_ids"] for i in range(200)])
    inputs, labels = (torch.stack([masked[i][name] for i in range(200)]) for name in ("input_ids", "labels"))
    chosen = labels != -100
    assert torch.equal(labels[chosen], ids[chosen])
    assert torch.equal(inputs[~chosen], ids[~chosen])
    assert not chosen[:, 10].any()  # never the end of a text
    count = int(chosen.sum())
    deviation = (ratio * (1 - ratio) / (200 * 63)) ** 0.5
    assert abs(count / (200 * 63) - ratio) < 4 * deviation
    assert float((inputs[chosen] == 257).float().mean()) == pytest.approx(0.8, abs=4 * (0.16 / count) ** 0.5)
    kept = float((inputs[chosen] == ids[chosen]).float().mean())
    assert kept == pytest.approx(0.1, abs=4 * (0.09 / count) ** 0.5 + 0.1 / 258)  # a random token may be the same


def test_held_out_blocks_are_masked_alike_in_every_run(tokenizer, blocks):
    one, other = (MaskedBlocks(blocks, tokenizer, 0.3) for _ in range(2))
    torch.manual_seed(1)
    assert all(torch.equal(one[i]["input_ids"], other[i]["input_ids"]) for i in (3, 0, 199))


def test_a_training_masks_a_block_anew_in_each_pass(tokenizer, blocks):
    drawn = MaskedBlocks(blocks, tokenizer, 0.3).for_run(7)
    assert drawn.in_order
    where = {drawn.number(p): p for p in range(200)}
    again = {drawn.number(p): p for p in range(200, 400)}
    assert sorted(where) == sorted(again) == list(range(200))
    first, second = drawn[where[5]], drawn[again[5]]
    assert not torch.equal(first["labels"], second["labels"])
    assert torch.equal(drawn[where[5]]["labels"], first["labels"])


def test_a_block_always_has_something_to_predict(tokenizer):
    short = ArrayBlocks(np.full((50, 2), 97, dtype=np.uint16))
    masked = MaskedBlocks(short, tokenizer, 0.01)
    assert all(bool((masked[i]["labels"] != -100).any()) for i in range(50))
