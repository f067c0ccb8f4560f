"""What every source of blocks gives: in files, masked, and in a mix of corpora."""

import math
import pickle
from fractions import Fraction

import numpy as np
import pytest
import torch

from lamina.data.blocks import ArrayBlocks, BlockSource, MixedBlocks, spread
from lamina.data.corpus import parse_mix
from lamina.data.masked_blocks import MASK, MaskedBlocks, with_mask_token
from lamina.data.packed import prepare_blocks
from lamina.data.streamed import stream_blocks
from lamina.data.tokenizers import load_tokenizer

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
        assert [(p["blocks"], p["share"], p["wanted"]) for p in shares.values()] == [(30, 0.75, 0.75), (10, 0.25, 0.25)]
        assert all(("epochs" in part) == (blocks.stats.train_tokens > 0) for part in shares.values())


MASKED_LENGTH = 64


@pytest.fixture(scope="module")
def tokenizer():
    return with_mask_token(load_tokenizer("bytes"))


@pytest.fixture(scope="module")
def letters():
    ids = np.random.default_rng(0).integers(97, 123, (200, MASKED_LENGTH)).astype(np.uint16)
    ids[:, 10] = 256  # the end of a text
    return ArrayBlocks(ids)


def test_a_tokenizer_without_a_mask_gets_one(tokenizer):
    assert tokenizer.mask_token == MASK
    assert tokenizer.mask_token_id == 257
    assert len(with_mask_token(tokenizer)) == 258


@pytest.mark.parametrize("ratio", [0.15, 0.3])
def test_the_shares_are_those_of_bert(tokenizer, letters, ratio):
    masked = MaskedBlocks(letters, tokenizer, ratio)
    ids = torch.stack([letters[i]["input_ids"] for i in range(200)])
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


def test_held_out_blocks_are_masked_alike_in_every_run(tokenizer, letters):
    one, other = (MaskedBlocks(letters, tokenizer, 0.3) for _ in range(2))
    torch.manual_seed(1)
    assert all(torch.equal(one[i]["input_ids"], other[i]["input_ids"]) for i in (3, 0, 199))


def test_a_training_masks_a_block_anew_in_each_pass(tokenizer, letters):
    drawn = MaskedBlocks(letters, tokenizer, 0.3).for_run(7)
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


@pytest.mark.parametrize(
    ("corpus", "expected"),
    [
        ("a.txt", ()),
        ("embedded", ()),
        ("hf:name:config@split", ()),
        ("a,b", ()),
        ("A:0.7,B:0.3", (("A", "7/10"), ("B", "3/10"))),
        ("A:7,B:3", (("A", "7/10"), ("B", "3/10"))),
        ("A:1e-1, B:.3", (("A", "1/4"), ("B", "3/4"))),
        ("hf:org/name:config@train[:5%]:2,C:/texts:6", (("hf:org/name:config@train[:5%]", "1/4"), ("C:/texts", "3/4"))),
        ("one, two.txt:1,b:1", (("one, two.txt", "1/2"), ("b", "1/2"))),
        ("a:1,b:1,c:1", (("a", "1/3"), ("b", "1/3"), ("c", "1/3"))),
    ],
)
def test_the_last_colon_before_a_number_is_the_weights(corpus, expected):
    assert parse_mix(corpus) == {name: Fraction(share) for name, share in expected}


def test_a_file_of_that_very_name_is_no_mix(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "a:1,b:2").write_text("text")
    assert parse_mix("a:1,b:2") == {}


class Numbers(BlockSource):
    """Stands in for a corpus' blocks: item i is (name, i)."""

    def __init__(self, name, count):
        self.name, self.count = name, count

    def __len__(self):
        return self.count

    def __getitem__(self, index):
        assert 0 <= index < self.count
        return self.name, int(index)

    @property
    def known(self):
        raise NotImplementedError

    def rows(self, indices):
        raise NotImplementedError


def mixed(shares, sizes, length=10_000, seed=5):
    rows = [(n, Fraction(s), Numbers(n, size)) for n, s, size in zip("abcd", shares, sizes, strict=False)]
    return MixedBlocks(rows, length, seed)


@pytest.mark.parametrize(
    "shares", [("7/10", "3/10"), ("1/3", "1/3", "1/3"), ("1/2", "1/3", "1/7", "1/42"), ("999/1000", "1/1000")]
)
def test_after_any_number_of_blocks_each_share_is_met_to_within_a_block(shares):
    data = mixed(shares, [100] * 4)
    seen = dict.fromkeys("abcd", 0)
    for n in range(1, 2001):
        seen[data[n - 1][0]] += 1
        for name, share in zip("abcd", shares, strict=False):
            assert abs(seen[name] - n * float(Fraction(share))) <= 1.0
        assert list(data.counts(n)) == [seen[name] for name in "abcd"[: len(shares)]]


def test_each_part_is_seen_whole_before_any_block_of_it_twice_and_in_another_order():
    data = mixed(("1/2", "1/2"), [30, 7])
    of_b = [i for name, i in (data[n] for n in range(200)) if name == "b"]
    epochs = [of_b[k : k + 7] for k in range(0, 98, 7)]
    assert all(sorted(epoch) == list(range(7)) for epoch in epochs)
    assert len({tuple(epoch) for epoch in epochs}) > 10
    assert data.realized([(0, 150), (150, 200)])["b"] == {"wanted": 0.5, "share": 0.5, "blocks": 100, "epochs": 100 / 7}


def test_nothing_but_the_seed_decides():
    data = mixed(("7/10", "3/10"), [30, 7])
    order = [data[i] for i in range(300)]
    assert [mixed(("7/10", "3/10"), [30, 7])[i] for i in range(150, 300)] == order[150:]  # from the middle, as resumed
    assert [pickle.loads(pickle.dumps(data))[i] for i in range(300)] == order
    assert [mixed(("7/10", "3/10"), [30, 7], seed=6)[i] for i in range(300)] != order
    assert [name for name, _ in order] == [mixed(("7/10", "3/10"), [30, 7], seed=6)[i][0] for i in range(300)]


def test_a_mix_of_files_holds_the_shares_in_both_splits(corpora):
    first, second = corpora
    blocks, _ = prepare_blocks(f"{first}:0.75,{second}:0.25", "bytes", 32, progress=False)
    train = blocks.train.for_run(3, 400)
    is_second = [bool((train[i]["input_ids"] == ord("x")).any()) for i in range(400)]
    assert sum(is_second) == 100
    held_out = [bool((blocks.eval[i]["input_ids"] == ord("x")).any()) for i in range(len(blocks.eval))]
    assert abs(sum(held_out) - len(held_out) / 4) <= 1
    assert blocks.stats.eval_tokens == 32 * len(blocks.eval)
    places = [blocks.eval.where(i) for i in range(len(blocks.eval))]
    assert len(set(places)) == len(places)  # no held-out block counts twice


def test_the_unigram_entropy_is_that_of_the_mixed_frequencies(corpora):
    first, second = corpora
    blocks, _ = prepare_blocks(f"{first}:3,{second}:1", "bytes", 32, progress=False)
    alone = [prepare_blocks(str(path), "bytes", 32, progress=False)[0] for path in (first, second)]
    probability, seen = np.zeros(257), np.zeros(257)
    for share, one in zip((0.75, 0.25), alone, strict=True):
        for split, total in ((one.train, probability), (one.eval, seen)):
            ids = np.concatenate([split[i]["input_ids"].numpy() for i in range(len(split))])
            counts = np.bincount(ids, minlength=257)
            counts = counts + (1 if split is one.train else 0)
            total += share * counts / counts.sum()
    assert blocks.stats.unigram_entropy == pytest.approx(-(seen * np.log(probability)).sum())
    assert math.isfinite(blocks.stats.unigram_entropy)


def test_a_bpe_of_a_mix_learns_from_every_part(corpora):
    first, second = corpora
    _, tokenizer = prepare_blocks(f"{first}:1,{second}:1", "bpe:270", 16, progress=False)
    merged = [token.strip("Ġ") for token in tokenizer.get_vocab() if len(token.strip("Ġ")) > 1]
    assert any(set(token) <= set("abcd") for token in merged)
    assert any(set(token) <= set("xyzw") for token in merged)
