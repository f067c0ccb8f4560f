"""What a model is run on: texts, blocks, a corpus, images."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from probes import tiny
from small_models import small_model
from tokenizers import Tokenizer, models, pre_tokenizers, processors
from transformers import PreTrainedTokenizerFast

import lamina
from lamina.data.tokenizers import load_tokenizer
from lamina.errors import UserError
from lamina.probes.engine.inputs import batches_of
from lamina.probes.engine.measure import make_context
from lamina.probes.engine.probe_settings import ProbeSettings


@pytest.fixture(scope="module")
def llama():
    model = small_model("llama")
    model.resize_token_embeddings(257)
    return model


@pytest.fixture(scope="module")
def tokenizer():
    return load_tokenizer("bytes")


def test_texts_are_packed_into_blocks(llama, tokenizer):
    batches = batches_of(["abcdefgh", "ij"], llama, tokenizer, sequence_length=5)
    ids = torch.cat([b["input_ids"] for b in batches])
    end = tokenizer.eos_token_id
    assert ids.tolist() == [list(b"abcde"), [*b"fgh", end, ord("i")]]


def test_an_encoder_gets_its_special_tokens():
    words = {w: i for i, w in enumerate(["[PAD]", "[CLS]", "[SEP]", "[MASK]", "a", "b", "c"])}
    backend = Tokenizer(models.WordLevel(words, unk_token="[PAD]"))
    backend.pre_tokenizer = pre_tokenizers.Whitespace()
    special = [("[CLS]", 1), ("[SEP]", 2)]
    backend.post_processor = processors.TemplateProcessing(single="[CLS] $A [SEP]", special_tokens=special)
    made = PreTrainedTokenizerFast(tokenizer_object=backend, cls_token="[CLS]", sep_token="[SEP]", pad_token="[PAD]")
    batches = batches_of(["a b c a b c a"], small_model("bert"), made, sequence_length=5)
    assert batches[0]["input_ids"].tolist() == [[1, 4, 5, 6, 2], [1, 4, 5, 6, 2]]


def test_text_that_spells_a_special_token_is_text(llama, tokenizer):
    ids = batches_of(["<|endoftext|>" * 2], llama, tokenizer, sequence_length=13)[0]["input_ids"]
    assert ids[0].tolist() == list(b"<|endoftext|>")


def test_a_text_shorter_than_a_block(llama, tokenizer):
    with pytest.raises(UserError, match=r"7 tokens are fewer than a block of 64.*--sequence-length to at most 7"):
        batches_of("a short", llama, tokenizer, sequence_length=64)


def test_the_corpus_is_held_out_and_spread(llama, tokenizer):
    batches = batches_of(None, llama, tokenizer, sequence_length=32, sequences=10, batch_size=4)
    assert [len(b["input_ids"]) for b in batches] == [4, 4, 2]
    again = batches_of(None, llama, tokenizer, sequence_length=32, sequences=10, batch_size=4)
    assert all(torch.equal(a["input_ids"], b["input_ids"]) for a, b in zip(batches, again, strict=True))


@pytest.mark.parametrize("kind", [torch.as_tensor, np.asarray, list])
def test_blocks_of_many_kinds(llama, kind):
    rows = [[1, 2, 3], [4, 5, 6]]
    assert batches_of(kind(rows), llama, None)[0]["input_ids"].tolist() == rows


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ([[1, 2, 3], [4, 5]], "texts_or_blocks"),
        (torch.rand(2, 3), "integers"),
        (torch.tensor([1, 2, 3]), r"shape is \[3\]"),
        (torch.tensor([[1, -2, 3]]), "token id -2"),
        (torch.tensor([[1, 999]]), "999 is outside the model's vocabulary of 257"),
        (torch.zeros(0, 4, dtype=torch.long), "shape"),
    ],
)
def test_blocks_that_cannot_be(llama, given, said):
    with pytest.raises(UserError, match=said):
        batches_of(given, llama, None)


def test_longer_than_the_model_takes():
    model = small_model("bert")
    with pytest.raises(UserError, match=r"sequence_length: 600 is more than the model's 512"):
        batches_of("text", model, load_tokenizer("bytes"), sequence_length=600)
    roberta = small_model("roberta")  # counts its positions from behind the padding's id
    with pytest.raises(UserError, match="more than the model's 510"):
        batches_of("text", roberta, load_tokenizer("bytes"), sequence_length=511)


def test_a_tokenizer_may_be_given_by_its_name(llama, tokenizer):
    text = ["a text that is long enough"]
    named, given = (lamina.probe(llama, "gains", text, tokenizer=e, sequence_length=8) for e in ("bytes", tokenizer))
    assert named["gains"].equals(given["gains"])


def test_no_tokenizer(llama):
    with pytest.raises(UserError, match="tokenizer: the checkpoint has no tokenizer"):
        batches_of(["text"], llama, None)


def test_images_from_files_arrays_and_noise(tmp_path):
    image = pytest.importorskip("PIL.Image")
    model = small_model("vit")
    noise = batches_of(None, model, None, sequences=3, batch_size=2)
    assert [tuple(b["pixel_values"].shape) for b in noise] == [(2, 3, 16, 16), (1, 3, 16, 16)]
    np.save(tmp_path / "images.npy", np.ones((5, 3, 16, 16), dtype=np.float32))
    assert len(batches_of(None, model, None, corpus=str(tmp_path / "images.npy"))[0]["pixel_values"]) == 4
    image.fromarray(np.full((20, 30, 3), 255, np.uint8)).save(tmp_path / "white.png")
    white = batches_of(None, model, None, corpus=str(tmp_path))[0]["pixel_values"]
    assert white.shape == (1, 3, 16, 16)
    assert float(white.min()) == 1.0
    with pytest.raises(UserError, match="no images at"):
        batches_of(None, model, None, corpus=str(tmp_path / "none"))
    with pytest.raises(UserError, match=r"images: .*\[2, 3, 8, 8\]"):
        batches_of(torch.rand(2, 3, 8, 8), model, None)


def test_padded_texts_are_refused(llama, tokenizer):
    ids = torch.arange(8).view(2, 4)
    whole = {"input_ids": ids, "attention_mask": torch.ones_like(ids)}
    assert batches_of(whole, llama, tokenizer)[0]["input_ids"].tolist() == ids.tolist()
    padded = {**whole, "attention_mask": torch.tensor([[1, 1, 1, 1], [1, 1, 0, 0]])}
    with pytest.raises(UserError, match="the texts are padded, and Lamina would measure the padding"):
        batches_of(padded, llama, tokenizer)


def test_a_tokenizer_of_special_tokens_alone_is_no_tokenizer(tmp_path, refused):
    """Transformers makes one for a BERT checkpoint without tokenizer files, and every text would be [UNK]."""
    small_model("bert").save_pretrained(tmp_path / "bert")
    line = refused("probe", str(tmp_path / "bert"), "--output", str(tmp_path / "out"))
    assert "tokenizer: the checkpoint has no tokenizer" in line


@pytest.mark.parametrize(("vocabulary", "doubted"), [(1000, True), (300, False)])
def test_bytes_for_a_model_of_tokens_are_doubted(vocabulary, doubted, tmp_path, caplog):
    tiny.llama(vocab_size=vocabulary).save_pretrained(tmp_path / "model")
    how = ProbeSettings(tokenizer="bytes", sequence_length=8, sequences=2)
    (warning,) = make_context(tmp_path / "model", how).warnings or [""]
    said = f"but the model's vocabulary has {vocabulary} tokens" in warning
    assert said == doubted
    text = {"tokenizer": "bytes", "sequence_length": 8, "sequences": 2}
    lamina.prune(tmp_path / "model", tmp_path / "out", layers=[1], **text)
    assert ("the results mean nothing" in caplog.text) == doubted
    caplog.clear()
    write = tmp_path / "text.txt"
    write.write_text("To be, or not to be. " * 20)
    chosen = {"corpus": str(write), "tokenizer": "bytes", "device": "cpu", "bar": False}
    lamina.evaluate(models=str(tmp_path / "model"), output=tmp_path / "eval", **chosen)
    assert ("the results mean nothing" in caplog.text) == doubted
