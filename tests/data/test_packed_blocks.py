"""A text is cut into pieces, held out evenly, joined, and packed into blocks that are cached."""

import dataclasses
import errno
import itertools
import json
import math
import os
import pickle
import random
import shutil
import subprocess
from collections import Counter

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from spread import rotated

from lamina.data import cache
from lamina.data.blocks import BlockStats, bits_per_byte, perplexity
from lamina.data.encoding import TextEncoder, TokenJoiner
from lamina.data.packed import prepare_blocks
from lamina.data.sources.file_documents import Document
from lamina.data.split import Segment, is_held_out, piece_chars, split_documents
from lamina.data.tokenizers import load_tokenizer
from lamina.errors import UserError
from tools.reliability.damaged_files import HARMS

CACHED = ("train.bin", "eval.bin", "meta.json", "tokenizer.json", "manifest.json")


def write_lines(path, count=4000):
    path.write_text("".join(f"<{number:05d}> some words of the line\n" for number in range(count)))
    return str(path)


@pytest.fixture
def corpus(tmp_path):
    return write_lines(tmp_path / "lines.txt")


def packed(corpus, spec="bytes", length=32, **options):
    return prepare_blocks(str(corpus), spec, length, progress=False, **options)


def decoded(blocks, tokenizer):
    return tokenizer.decode(blocks.array.ravel().astype(int).tolist())


def files(cache):
    return {path: path.stat().st_mtime_ns for path in sorted(cache.glob("blocks/*/*"))}


@pytest.mark.parametrize("spec", ["bytes", "bpe:300"])
def test_no_line_is_in_both_splits_and_hardly_one_is_in_neither(corpus, spec):
    blocks, tokenizer = packed(corpus, spec)
    marks = [{t[:5] for t in decoded(p, tokenizer).split("<") if t[5:6] == ">"} for p in (blocks.train, blocks.eval)]
    assert not marks[0] & marks[1]
    assert len(marks[0] | marks[1]) >= 4000 - 4
    assert len(marks[1]) == pytest.approx(200, rel=0.15)


def test_every_tokenizer_sees_the_same_split(corpus):
    texts = []
    for spec in ("bytes", "bpe:300"):
        blocks, tokenizer = packed(corpus, spec, 8)
        texts.append(decoded(blocks.eval, tokenizer))
    assert texts[0][:1500] == texts[1][:1500]


def test_an_item_is_one_block_of_ids_that_are_their_own_labels(corpus):
    blocks, _ = packed(corpus)
    item = blocks.train[3]
    assert item["input_ids"].dtype == torch.long
    assert item["input_ids"].tolist() == item["labels"].tolist() == blocks.train.array[3].tolist()
    batch = blocks.train.__getitems__([3, 0])
    assert batch[1]["input_ids"].tolist() == blocks.train[0]["input_ids"].tolist()
    assert blocks.train[-1]["input_ids"].tolist() == blocks.train[len(blocks.train) - 1]["input_ids"].tolist()
    with pytest.raises(IndexError):
        blocks.train[len(blocks.train)]


def test_pickling_keeps_the_path_and_not_the_content(corpus):
    blocks, _ = packed(corpus)
    assert len(blocks.train.array) == len(blocks.train)
    pickled = pickle.dumps(blocks)
    assert len(pickled) < 3000
    assert np.array_equal(pickle.loads(pickled).train.array, blocks.train.array)


def test_the_statistics_are_those_of_the_blocks(corpus):
    blocks, tokenizer = packed(corpus)
    stats = blocks.stats
    assert stats.train_tokens == blocks.train.array.size
    assert stats.eval_tokens == blocks.eval.array.size
    assert (stats.vocab_size, stats.sequence_length, stats.documents) == (257, 32, 1)
    text_bytes = int((blocks.eval.array != tokenizer.eos_token_id).sum())
    assert stats.eval_bytes == pytest.approx(text_bytes, abs=1)
    assert stats.bytes_per_token == stats.eval_bytes / stats.eval_tokens


def test_the_unigram_entropy_equals_a_naive_count(corpus):
    blocks, _ = packed(corpus, "bpe:300")
    train = Counter(blocks.train.array.ravel().tolist())
    held_out = blocks.eval.array.ravel().tolist()
    total = sum(train.values())
    naive = sum(-math.log((train[token] + 1) / (total + 300)) for token in held_out) / len(held_out)
    assert blocks.stats.unigram_entropy == pytest.approx(naive, rel=1e-12)


def test_an_end_of_text_stands_between_documents_and_nowhere_inside_one(tmp_path):
    path = tmp_path / "rows.jsonl"
    path.write_text("".join(json.dumps({"text": f"<{number:04d}>" + "x" * 34}) + "\n" for number in range(400)))
    blocks, tokenizer = packed(path, length=41)
    assert blocks.stats.documents == 400
    for part in (blocks.train, blocks.eval):
        # 40 bytes and the end of the document fill a block exactly, so each block is one document
        assert (part.array[:, :40] != tokenizer.eos_token_id).all()
        assert (part.array[:, 40] == tokenizer.eos_token_id).all()


def test_an_end_of_text_spelt_out_in_the_corpus_does_not_end_a_document(tmp_path):
    (tmp_path / "text.txt").write_text("words <|endoftext|> words\n" * 200)
    blocks, tokenizer = packed(str(tmp_path / "text.txt"), eval_fraction=0.5)
    assert int((blocks.train.array == tokenizer.eos_token_id).sum()) < 40
    assert "<|endoftext|>" in decoded(blocks.train, tokenizer)


def test_a_small_corpus_holds_out_as_much_as_a_block_takes_and_says_so(tmp_path, caplog):
    corpus = write_lines(tmp_path / "small.txt", count=60)
    blocks, _ = packed(corpus, length=256)
    assert len(blocks.eval) >= 1
    assert len(blocks.train) >= 1
    assert "holds out the fraction" in caplog.text


def test_a_corpus_shorter_than_two_blocks_is_refused_with_both_numbers_and_leaves_nothing(tmp_path, own_cache):
    (tmp_path / "short.txt").write_text("x" * 100)
    with pytest.raises(UserError, match="sequence_length of 256") as caught:
        packed(str(tmp_path / "short.txt"), length=256)
    assert "512" in str(caught.value)
    assert "1" in str(caught.value)
    assert "corpus:" in str(caught.value)
    assert list((own_cache / "blocks").iterdir()) == []


@pytest.mark.parametrize(
    "arguments", [{"sequence_length": 1}, {"sequence_length": 2.5}, {"eval_fraction": 0}, {"eval_fraction": 0.6}]
)
def test_a_setting_out_of_range_is_refused(corpus, arguments):
    with pytest.raises(UserError, match=r"(sequence_length|eval_fraction): "):
        prepare_blocks(corpus, **arguments)


def test_the_second_call_finds_the_blocks_and_does_not_tokenise(corpus, own_cache, monkeypatch):
    first, _ = packed(corpus)
    written = files(own_cache)
    monkeypatch.setattr("lamina.data.encoding.TextEncoder.encode", None)
    second, _ = packed(corpus)
    assert files(own_cache) == written
    assert second.stats == first.stats
    assert np.array_equal(second.eval.array, first.eval.array)


def test_other_content_and_other_settings_give_other_blocks(corpus, tmp_path):
    changes = ({}, {"length": 64}, {"eval_fraction": 0.1}, {"spec": "bpe:300"})
    seen = [packed(corpus, **options)[0].stats.fingerprint for options in changes]
    write_lines(tmp_path / "lines.txt", count=4001)
    assert len({*seen, packed(corpus)[0].stats.fingerprint}) == 5


def test_the_same_corpus_gives_the_same_blocks_byte_by_byte(corpus, tmp_path):
    parts = [packed(corpus, "bpe:320", cache_dir=tmp_path / name)[0] for name in "ab"]
    assert parts[0].train.path.read_bytes() == parts[1].train.path.read_bytes()
    assert parts[0].stats == parts[1].stats


@pytest.mark.parametrize(("name", "harm"), rotated(CACHED, HARMS, every=5))
def test_what_is_damaged_in_the_cache_is_made_again(corpus, own_cache, name, harm):
    blocks, tokenizer = packed(corpus, "bpe:320")
    whole = blocks.train.array.tobytes()
    for path in own_cache.rglob(name):
        harm(path, random.Random(0))
    again, same = packed(corpus, "bpe:320")
    assert again.train.array.tobytes() == whole
    assert again.stats == blocks.stats
    assert same.get_vocab() == tokenizer.get_vocab()


def test_drafts_of_processes_that_are_gone_are_swept(corpus, own_cache):
    process = subprocess.Popen(["true"])
    process.wait()
    key, mine = "0" * 32, cache._host()
    owners = f"{mine}.{process.pid}", f"{mine}.{os.getpid()}", f"01234567.{process.pid}", "99"
    gone, alive, elsewhere, old = (own_cache / "blocks" / f".{key}.{name}.abcdef01" for name in owners)
    for path in (gone, alive, elsewhere, old):
        path.mkdir(parents=True)
    os.utime(old, (0, 0))
    packed(corpus)
    assert [path.exists() for path in (gone, alive, elsewhere, old)] == [False, True, True, False]


def test_a_full_disk_leaves_nothing_behind_and_comes_as_it_is(corpus, own_cache, monkeypatch):
    def full(*_):
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr("lamina.data.packed.SplitFile.add", full)
    with pytest.raises(OSError, match="No space left") as caught:
        packed(corpus)
    assert caught.value.errno == errno.ENOSPC
    assert list((own_cache / "blocks").iterdir()) == []


def test_losing_a_race_takes_what_the_winner_made(corpus, own_cache, tmp_path, monkeypatch):
    winner, _ = packed(corpus, cache_dir=tmp_path / "winner")
    seal = cache.seal

    def slower(draft):
        seal(draft)
        shutil.copytree(winner.train.path.parent, own_cache / "blocks" / winner.train.path.parent.name)

    monkeypatch.setattr(cache, "seal", slower)
    blocks, _ = packed(corpus)
    assert blocks.stats == winner.stats
    assert [path.name for path in (own_cache / "blocks").iterdir()] == [winner.train.path.parent.name]


def test_a_cache_that_cannot_be_written_is_a_clear_error(corpus, tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(UserError, match="LAMINA_CACHE"):
        packed(corpus, cache_dir=tmp_path / "file")


def test_perplexity_is_the_exponential_and_infinite_on_overflow():
    assert perplexity(math.log(7)) == pytest.approx(7)
    assert perplexity(1e9) == math.inf


def test_bits_per_byte_do_not_depend_on_how_the_text_is_cut_into_tokens():
    train = {"train_tokens": 1, "train_bytes": 1, "unigram_entropy": 1.0, "fingerprint": "", "documents": 1}
    stats = BlockStats(**train, eval_tokens=1000, eval_bytes=1000, vocab_size=257, sequence_length=10)
    # a uniform guess over 256 bytes is 8 bits a byte; so it is when pairs of bytes are the tokens
    pairs = dataclasses.replace(stats, eval_tokens=500)
    assert bits_per_byte(math.log(256), stats) == pytest.approx(8)
    assert bits_per_byte(math.log(256**2), pairs) == pytest.approx(8)
    assert pairs.bytes_per_token == 2


def test_a_bpe_that_saw_held_out_text_is_warned_of(tmp_path, caplog):
    corpus = write_lines(tmp_path / "small.txt", count=60)
    for spec, warned in (("bytes", False), ("bpe:260", True)):
        caplog.clear()
        prepare_blocks(str(corpus), spec, 256, cache_dir=tmp_path / "cache", progress=False)
        assert "To fill an eval block" in caplog.text
        assert ("trained the BPE tokenizer partly on held-out text" in caplog.text) == warned


FEW_CHARACTERS = st.text(alphabet="ab \n🐋", max_size=400)


def segments_of(*texts, chars):
    return list(split_documents(map(Document, texts), chars))


@given(st.lists(FEW_CHARACTERS, max_size=8), st.integers(1, 120))
def test_the_segments_joined_together_are_the_corpus(texts, chars):
    segments = segments_of(*texts, chars=chars)
    for number, text in enumerate(texts):
        own = [segment for segment in segments if segment.document == number]
        assert "".join(segment.text for segment in own) == text
        assert all(later.begin == earlier.end for earlier, later in itertools.pairwise(own))


@given(FEW_CHARACTERS, st.integers(1, 120))
def test_no_segment_is_longer_than_two_pieces(text, chars):
    assert all(len(segment.text) <= 2 * chars for segment in segments_of(text, chars=chars))


def test_pieces_end_at_line_ends_where_there_are_any():
    text = "".join(f"line {number}\n" for number in range(200))
    assert all(segment.text.endswith("\n") for segment in segments_of(text, chars=50))


def test_short_documents_stay_whole_and_share_pieces():
    texts = [f"document {number}\n" * 2 for number in range(50)]
    segments = segments_of(*texts, chars=120)
    assert [segment.text for segment in segments] == texts
    assert 5 < segments[-1].piece < 20


def test_the_parts_of_a_large_file_are_one_document():
    first, second = split_documents([Document("abc\n"), Document("def\n", continues=True)], 100)
    assert second.begin == first.end


@pytest.mark.parametrize("fraction", [0.01, 0.05, 0.3, 0.5])
def test_the_held_out_pieces_are_the_fraction_and_evenly_spread(fraction):
    held_out = [piece for piece in range(2000) if is_held_out(piece, fraction)]
    assert len(held_out) == pytest.approx(2000 * fraction, abs=1)
    gaps = [later - earlier for earlier, later in itertools.pairwise(held_out)]
    assert max(gaps) - min(gaps) <= 1


@pytest.mark.parametrize("total", [1, 19, 3_000, 100_000, 5_208_759, 10**9])
def test_there_are_some_twenty_pieces_at_least_and_none_is_longer_than_64_thousand(total):
    chars = piece_chars(total)
    assert 1 <= chars <= 64 * 1024
    assert chars * 20 <= max(total, 20)


END = 256
ENCODER = TextEncoder(load_tokenizer("bytes"))


def segment(text, document, start):
    return Segment(text=text, document=document, start=start, piece=0)


def joined(joiner, *segments):
    for part in segments:
        joiner.add(part)
    return joiner.encode().tolist()


def test_no_token_stands_before_the_first_text_and_none_where_it_continues():
    assert joined(TokenJoiner(ENCODER), segment("ab", 0, 0), segment("c", 0, 2)) == [*b"abc"]


def test_a_token_stands_between_documents_and_where_a_piece_is_missing():
    parts = [segment("ab", 0, 0), segment("c", 0, 5), segment("d", 1, 0)]
    assert joined(TokenJoiner(ENCODER), *parts) == [*b"ab", END, *b"c", END, *b"d"]


def test_after_a_jump_nothing_continues_but_a_jump_before_any_text_is_none():
    joiner = TokenJoiner(ENCODER)
    joiner.jump()
    assert joined(joiner, segment("ab", 0, 0)) == [*b"ab"]
    joiner.jump()
    assert joined(joiner, segment("c", 0, 2)) == [END, *b"c"]


def test_a_joiner_made_anew_where_another_ended_goes_on_like_it():
    parts = [segment("ab", 0, 0), segment("c", 0, 2), segment("d", 2, 0)]
    last, ids = None, []
    for part in parts:
        joiner = TokenJoiner(ENCODER, last)
        ids += joined(joiner, part)
        last = joiner.last
    assert ids == joined(TokenJoiner(ENCODER), *parts)
    assert joined(joiner) == []
