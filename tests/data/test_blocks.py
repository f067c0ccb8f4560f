"""What every source of blocks gives, wherever its blocks lie."""

import numpy as np
import pytest
import torch

from lamina.data.blocks import spread
from lamina.data.packed import prepare_blocks
from lamina.data.streamed import stream_blocks

LENGTH = 16


@pytest.fixture(params=["packed", "streamed", "mix", "streamed mix"])
def blocks(request, corpora):
    corpus = f"{corpora[0]}:0.75,{corpora[1]}:0.25" if "mix" in request.param else corpora[0]
    if "streamed" in request.param:
        return stream_blocks(corpus, "bytes", LENGTH)[0]
    return prepare_blocks(corpus, "bytes", LENGTH, progress=False)[0]


def test_a_sample_is_of_whole_blocks_always_the_same_ones(blocks):
    for source in (blocks.train, blocks.eval):
        rows = source.sample(7)
        assert rows.dtype == torch.long
        assert rows.shape == (7, LENGTH)
        assert torch.equal(rows, source.sample(7))


def test_a_sample_of_stored_blocks_is_spread_over_them(corpora):
    train = prepare_blocks(corpora[0], "bytes", LENGTH, progress=False)[0].train
    rows = torch.stack([train[i]["input_ids"] for i in spread(len(train), 5)])
    assert torch.equal(train.sample(5), rows)
    assert len(train.sample(10**6)) == len(train)


def test_the_frequencies_add_up_to_one_and_a_mix_has_its_shares(blocks):
    frequencies = blocks.train.frequencies(257, 10**6)
    assert frequencies.sum() == pytest.approx(1.0)
    assert (frequencies > 0).all()
    if len(blocks.train.parts) == 2:
        letters = np.array([[ord(letter) for letter in letters] for letters in ("abcd", "xyzw")])
        first, second = frequencies[letters].sum(axis=1)
        assert 2.5 < first / second < 5  # the smoothing takes more from the shorter text
        weighted = sum(float(share) * part.frequencies(257, 10**6) for share, part in blocks.train.parts)
        assert frequencies == pytest.approx(weighted)


def test_only_a_stream_has_to_be_told_where_to_begin_again(blocks):
    train = blocks.train.for_run(1)
    streamed = blocks.stats.train_tokens == 0
    first = [train[i]["input_ids"] for i in range(6)]
    state = train.state_dict(3)
    assert (state is not None) == streamed
    train.load_state_dict(state)
    assert all(torch.equal(train[i]["input_ids"], first[i]) for i in (3, 4, 5))


def test_only_a_mix_has_contributions(blocks):
    shares = blocks.train.for_run(0).realized([(0, 40)])
    if len(blocks.train.parts) == 1:
        assert shares == {}
    else:
        assert [(part["blocks"], part["share"], part["wanted"]) for part in shares.values()] == [
            (30, 0.75, 0.75),
            (10, 0.25, 0.25),
        ]
        assert all(("epochs" in part) == (blocks.stats.train_tokens > 0) for part in shares.values())
