"""A text is cut into pieces, held out evenly, and joined with an end-of-text token wherever it jumps."""

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lamina.data.encoding import TextEncoder, TokenJoiner
from lamina.data.sources.file_documents import Document
from lamina.data.split import Segment, is_held_out, piece_chars, split_documents
from lamina.data.tokenizers import load_tokenizer

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
