import json
import subprocess
import sys

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import AutoTokenizer, ByT5Tokenizer

from lamina.data.corpus import Corpus
from lamina.data.encoding import TextEncoder, ids_are_bytes
from lamina.data.split import count_chars, is_held_out, piece_chars, split_documents
from lamina.data.tokenizers import load_tokenizer

BYTES = load_tokenizer("bytes")
ENCODERS = [TextEncoder(BYTES), TextEncoder(BYTES)]
ENCODERS[1].is_bytes = False  # the slow way


@pytest.fixture
def corpus(tmp_path):
    path = tmp_path / "corpus.txt"
    path.write_text("".join(f"The {number}th whale of the {number * 7}th sea.\n" for number in range(2000)))
    return Corpus.parse(str(path))


def test_the_byte_tokenizer_has_the_bytes_as_ids_and_the_end_of_text_at_256():
    assert BYTES.encode("aé🐋\n") == list("aé🐋\n".encode())
    assert len(BYTES) == BYTES.vocab_size == 257
    assert BYTES.eos_token_id == BYTES.bos_token_id == BYTES.pad_token_id == 256
    assert BYTES.encode("a<|endoftext|>b") == [97, 256, 98]


@settings(max_examples=30)
@given(st.text())
def test_any_text_survives_the_byte_tokenizer(text):
    ids = ENCODERS[1].encode([text])[0].tolist()
    assert ids == list(text.encode())
    assert BYTES.decode(ids) == text


@settings(max_examples=30)
@given(st.lists(st.text() | st.just("a <|endoftext|> b"), max_size=4))
def test_the_short_cut_for_bytes_equals_the_tokenizer_itself(texts):
    fast, slow = (encoder.encode(texts) for encoder in ENCODERS)
    assert [ids.tolist() for ids in fast] == [ids.tolist() for ids in slow]


def test_the_short_cut_is_taken_by_what_a_tokenizer_is():
    serialised = json.loads(BYTES.backend_tokenizer.to_str())
    assert ids_are_bytes(serialised)
    for change in (
        {"normalizer": {"type": "Lowercase"}},
        {"pre_tokenizer": None},
        {"pre_tokenizer": {**serialised["pre_tokenizer"], "add_prefix_space": True}},
        {"model": {**serialised["model"], "merges": [["a", "b"]]}},
        {"model": {**serialised["model"], "dropout": 0.1}},
        {"model": {**serialised["model"], "vocab": {**serialised["model"]["vocab"], "a": 98, "b": 97}}},
        {"added_tokens": [{**serialised["added_tokens"][0], "special": False}]},
    ):
        assert not ids_are_bytes({**serialised, **change})


@pytest.mark.slow
def test_a_saved_byte_tokenizer_loads_in_a_process_without_lamina(tmp_path):
    BYTES.save_pretrained(tmp_path / "saved")
    script = (
        "import sys; from transformers import AutoTokenizer\n"
        "tokenizer = AutoTokenizer.from_pretrained(sys.argv[1])\n"
        "assert tokenizer.encode('é🐋') == list('é🐋'.encode()), tokenizer.encode('é🐋')\n"
        "assert tokenizer.decode(tokenizer.encode('é🐋 , .')) == 'é🐋 , .'\n"
        "assert tokenizer.eos_token_id == tokenizer.pad_token_id == 256 and len(tokenizer) == 257\n"
        "assert 'lamina' not in sys.modules\n"
    )
    subprocess.run([sys.executable, "-c", script, str(tmp_path / "saved")], check=True, cwd=tmp_path)


def test_a_bpe_has_the_size_asked_for_and_survives_saving(corpus, tmp_path):
    tokenizer = load_tokenizer("bpe:300", corpus=corpus)
    assert len(tokenizer) == 300
    assert tokenizer.decode(tokenizer.encode("The 9th whale é🐋")) == "The 9th whale é🐋"
    assert len(tokenizer.encode("The whale of the sea")) < len("The whale of the sea")
    assert tokenizer.eos_token == tokenizer.pad_token == "<|endoftext|>"
    tokenizer.save_pretrained(tmp_path / "saved")
    assert AutoTokenizer.from_pretrained(tmp_path / "saved").encode("whale") == tokenizer.encode("whale")


def test_a_bpe_is_trained_once_for_each_corpus_and_size(corpus, own_cache, tmp_path):
    def trained():
        return {path: path.stat().st_mtime_ns for path in own_cache.glob("tokenizers/*/tokenizer.json")}

    load_tokenizer("bpe:300", corpus=corpus)
    first = trained()
    load_tokenizer("bpe:300", corpus=corpus)
    assert trained() == first
    load_tokenizer("bpe:310", corpus=corpus)
    (tmp_path / "corpus.txt").write_text("other text, quite other text\n" * 200)
    load_tokenizer("bpe:300", corpus=corpus)
    assert len(first) == 1
    assert len(trained()) == 3


def test_a_bpe_does_not_learn_from_the_held_out_text(tmp_path):
    path = tmp_path / "corpus.txt"
    lines = [f"the number {number:04d} of some\n" for number in range(3000)]
    path.write_text("".join(lines))
    corpus = Corpus.parse(str(path))
    chars = piece_chars(count_chars(corpus))
    apart = (s.text for s in split_documents(corpus.documents(), chars) if is_held_out(s.piece, 0.05))
    held_out = {line for text in apart for line in text.split("\n")}
    path.write_text("".join(line.replace("some", "zqxj") if line.strip() in held_out else line for line in lines))
    assert "zqxj" in next(corpus.documents()).text
    vocabulary = load_tokenizer("bpe:400", corpus=corpus).get_vocab()
    assert not any("zq" in token or "xj" in token for token in vocabulary)


def test_a_corpus_too_small_for_the_bpe_gives_a_smaller_one_and_says_so(tmp_path, caplog):
    (tmp_path / "small.txt").write_text("abc abc\n" * 30)
    tokenizer = load_tokenizer("bpe:5000", corpus=Corpus.parse(str(tmp_path / "small.txt")))
    assert 257 <= len(tokenizer) < 5000
    assert "instead of 5000" in caplog.text


def test_a_tokenizer_of_transformers_loads_by_folder_and_by_file(tmp_path):
    BYTES.save_pretrained(tmp_path / "saved")
    assert load_tokenizer(str(tmp_path / "saved")).encode("é") == [195, 169]
    by_file = load_tokenizer(str(tmp_path / "saved" / "tokenizer.json"))
    assert by_file.encode("é") == [195, 169]
    assert by_file.eos_token_id == by_file.pad_token_id == 256


def test_a_tokenizer_without_padding_pads_with_its_end(tmp_path):
    tokenizer = load_tokenizer("bytes")
    tokenizer.pad_token = None
    tokenizer.save_pretrained(tmp_path / "saved")
    assert load_tokenizer(str(tmp_path / "saved")).pad_token_id == 256


def test_a_tokenizer_written_in_python_encodes_too(tmp_path):
    ByT5Tokenizer().save_pretrained(tmp_path / "byt5")
    encoder = TextEncoder(load_tokenizer(str(tmp_path / "byt5")))
    assert encoder.encode(["é</s>"])[0].tolist() == [byte + 3 for byte in "é</s>".encode()]
    assert encoder.content_hash() == TextEncoder(load_tokenizer(str(tmp_path / "byt5"))).content_hash()
