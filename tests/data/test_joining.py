"""An end-of-text token stands wherever the text jumps, and nowhere else."""

from lamina.data.encoding import TextEncoder, TokenJoiner
from lamina.data.split import Segment
from lamina.data.tokenizers import load_tokenizer

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
