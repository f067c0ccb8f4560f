"""`--packing off`: a document a row, cut or padded. Rows, masks, losses and tokens are those of naive code."""

import json
import math
import random
from collections import Counter
from itertools import pairwise

import numpy as np
import pytest
import torch
from training.tiny_runs import WORDS, assert_same_records, assert_same_weights, cut_at, records, result, settings
from transformers import AutoModelForCausalLM, AutoModelForMaskedLM, AutoTokenizer

from lamina.data.blocks import pair_entropy
from lamina.data.masked_blocks import MaskedBlocks
from lamina.data.packed import PackedBlocks, prepare_blocks, whole_blocks
from lamina.training.pretrain import pretrain

LENGTH, END, BYTES = 16, 256, 257
FAST = {"precision": "fp32", "compile": "off", "logging_steps": 1, "eval_steps": 4, "eval_blocks": 0}


def documents() -> list[str]:
    """160 different documents of 1 to 60 characters, 15 of them as long as a row with its end, and 3 one longer."""
    draw = random.Random(5)
    text = " ".join(draw.choices(WORDS.split(), k=2000))
    lengths = [1, 2, 14, 15, 16, 17, *(draw.randint(1, 60) for _ in range(150))]
    starts = (draw.randint(0, len(text) - 60) for _ in range(4000))
    cut = (text[start : start + lengths[number % len(lengths)]].strip() for number, start in enumerate(starts))
    return list(dict.fromkeys(document for document in cut if document))[:160]


@pytest.fixture(scope="session")
def corpus(tmp_path_factory):
    path = tmp_path_factory.mktemp("rows") / "rows.jsonl"
    path.write_text("".join(json.dumps({"text": document}) + "\n" for document in documents()))
    return path


@pytest.fixture
def run(corpus, tmp_path):
    def trained(name="run", resume=False, **changed):
        given = {"corpus": corpus, "packing": "off", **FAST, **changed}
        pretrain(settings(given.pop("corpus"), tmp_path / name, **given), resume=resume, bar=False)
        return tmp_path / name

    return trained


def naive_row(document: str) -> list[int]:
    return [*document.encode(), END][:LENGTH]


def padded(corpus, **changed):
    return prepare_blocks(str(corpus), "bytes", LENGTH, padded=True, progress=False, eval_fraction=0.2, **changed)[0]


def tokens_of(item) -> list[int]:
    return item["input_ids"][item["attention_mask"] == 1].tolist()


def split_rows(blocks) -> list[list[int]]:
    return [tokens_of(blocks[number]) for number in range(len(blocks))]


def test_each_document_is_a_row_of_one_split(corpus, monkeypatch):
    blocks = padded(corpus)
    train, held_out = split_rows(blocks.train), split_rows(blocks.eval)
    wanted = Counter(tuple(naive_row(document)) for document in documents())
    assert Counter(map(tuple, train + held_out)) == wanted
    assert 0.1 < len(held_out) / len(documents()) < 0.3
    assert max(map(len, train)) == LENGTH
    assert min(map(len, train)) < 5
    with monkeypatch.context() as alone:  # every process of a run asks for the lengths
        alone.setattr(PackedBlocks, "array", property(lambda _: pytest.fail("reads the rows for their lengths")))
        assert blocks.train.lengths.tolist() == [len(row) for row in train]


def test_padding_has_neither_attention_nor_labels(corpus):
    blocks = padded(corpus)
    for item, row in zip((blocks.train[n] for n in range(len(blocks.train))), split_rows(blocks.train), strict=True):
        missing = LENGTH - len(row)
        assert item["input_ids"].tolist()[: len(row)] == row
        assert item["attention_mask"].tolist() == [1] * len(row) + [0] * missing
        assert item["labels"].tolist() == [-100, *row[1:], *[-100] * missing]


def test_statistics_are_of_real_tokens(corpus):
    blocks, texts = padded(corpus), documents()
    train, held_out = split_rows(blocks.train), split_rows(blocks.eval)
    stats = blocks.stats
    assert (stats.train_tokens, stats.eval_tokens) == (sum(map(len, train)), sum(map(len, held_out)))
    assert stats.documents == len(texts)
    counts = Counter(token for row in train for token in row)
    share = {token: (counts[token] + 1) / (stats.train_tokens + BYTES) for token in range(BYTES)}
    entropy = -sum(math.log(share[token]) for row in held_out for token in row) / stats.eval_tokens
    assert stats.unigram_entropy == pytest.approx(entropy, abs=1e-12)
    every = [len(text.encode()) + 1 for text in texts]  # with their ends, of which a cut row has none
    shown = sum(min(length, LENGTH) for length in every) / sum(every)
    given = sum(len(text.encode()) for text in texts)
    assert stats.train_bytes + stats.eval_bytes == pytest.approx(given * shown, rel=0.02)


def test_a_table_of_pairs_ignores_padding(corpus):
    blocks = padded(corpus)
    train, held_out = split_rows(blocks.train), split_rows(blocks.eval)
    pairs = Counter(pair for row in train for pair in pairwise(row))
    before = Counter(first for first, _ in pairs.elements())
    different = Counter(first for first, _ in pairs)
    counts = Counter(token for row in train for token in row)

    def probability(first, second):
        alone = (counts[second] + 1) / (sum(counts.values()) + BYTES)
        if not before[first]:
            return alone
        return (pairs[first, second] + different[first] * alone) / (before[first] + different[first])

    wanted = [-math.log(probability(*pair)) for row in held_out for pair in pairwise(row)]
    assert pair_entropy(blocks.train.array, blocks.eval.array, BYTES) == pytest.approx(np.mean(wanted), abs=1e-12)


def test_what_is_measured_has_no_padding(corpus):
    blocks = padded(corpus)
    sample = blocks.train.sample(4)
    assert sample.shape == (4, LENGTH)
    assert int(sample.max()) <= END
    joined = " ".join(str(token) for row in split_rows(blocks.train) for token in row)
    assert " ".join(map(str, sample[0].tolist()))[:9] == joined[:9]
    assert padded(corpus).eval.sample(10_000).shape == (blocks.stats.eval_tokens // LENGTH, LENGTH)


def test_a_second_text_has_its_documents_in_rows(corpus, tmp_path):
    tokenizer = prepare_blocks(str(corpus), "bytes", LENGTH, progress=False)[1]
    rows = split_rows(whole_blocks(str(corpus), tokenizer, LENGTH, padded=True, progress=False))
    assert rows == [naive_row(document) for document in documents()]


def test_a_vocabulary_that_fills_its_type_has_room_for_padding(corpus):
    from lamina.data.encoding import RowJoiner, TextEncoder
    from lamina.data.split import Segment

    encoder = TextEncoder(prepare_blocks(str(corpus), "bytes", LENGTH, progress=False)[1])
    for size, dtype in ((2**16 - 1, np.uint16), (2**16, np.uint32)):
        encoder.vocab_size, encoder.padded_dtype = size, np.min_scalar_type(size)
        joiner = RowJoiner(encoder, 4)
        joiner.add(Segment(text="a", document=0, start=0, piece=0))
        assert joiner.encode().tolist() == [97, END, size, size]
        assert encoder.padded_dtype == dtype


def losses_of(model, rows) -> list[float]:
    """The loss of every prediction, each row by itself and without padding."""
    losses = []
    for row in map(torch.tensor, rows):
        with torch.no_grad():
            logits = model(input_ids=row[None]).logits[0]
        losses += torch.nn.functional.cross_entropy(logits[:-1], row[1:], reduction="none").tolist()
    return losses


def test_losses_are_means_over_real_tokens(run, corpus, before_each_pass):
    expected, rows, every = [], [], 2

    def keep(trainer, model, inputs):
        taken = [tokens_of({name: inputs[name][at] for name in inputs}) for at in range(len(inputs["input_ids"]))]
        rows.append(taken)
        model.eval()
        expected.append(losses_of(model, taken))
        model.train()

    before_each_pass(keep)
    changed = {"gradient_accumulation": every, "placement": "keel", "ema_decay": 0.5}
    folder = run(batch_size=4, learning_rate=0.01, eval_corpus=str(corpus), **changed)
    steps = range(0, len(expected), every)
    seen = [record["loss"] for record in records(folder) if "loss" in record]
    assert seen == pytest.approx([np.mean(np.concatenate(expected[at : at + every])) for at in steps], abs=2e-5)

    model = AutoModelForCausalLM.from_pretrained(folder / "model").eval()
    held_out = split_rows(prepare_blocks(str(corpus), "bytes", LENGTH, padded=True, progress=False)[0].eval)
    found = result(folder)
    assert found["eval_loss"] == pytest.approx(np.mean(losses_of(model, held_out)), abs=1e-5)
    assert found["perplexity"] == pytest.approx(math.exp(found["eval_loss"]))
    second = [naive_row(document) for document in documents()]
    assert found["eval_corpus_loss"] == pytest.approx(np.mean(losses_of(model, second)), abs=1e-5)
    by_items = np.mean([np.mean(losses_of(model, [row])) for row in held_out])
    assert abs(by_items - found["eval_loss"]) > 1e-3  # what the mean over rows would have been

    sizes = [sum(map(len, taken)) for taken in rows]
    counts = np.cumsum([sum(sizes[at : at + every]) for at in steps])
    assert [record["tokens"] for record in records(folder) if "loss" in record] == counts.tolist()
    assert found["tokens"] == counts[-1]


def test_tokens_are_counted_across_passes_of_the_text(run, corpus, before_each_pass):
    counted = []
    before_each_pass(lambda trainer, model, inputs: counted.append(int(inputs["attention_mask"].sum())))
    folder = run(batch_size=32, steps=11)  # more than two passes
    blocks = prepare_blocks(str(corpus), "bytes", LENGTH, padded=True, progress=False)[0]
    assert 2 * len(blocks.train) < 11 * 32
    assert result(folder)["tokens"] == sum(counted)
    assert [record["tokens"] for record in records(folder) if "loss" in record] == np.cumsum(counted).tolist()


@pytest.mark.parametrize("kind", ["causal", "masked"])
def test_a_killed_run_resumes_in_the_middle_of_a_pass_bit_for_bit(run, bert, kind):
    options = {"steps": 8, "batch_size": 4, "gradient_accumulation": 2, "save_steps": 3}
    if kind == "masked":
        options |= {"backbone": str(bert), **dict.fromkeys(("num_layers", "hidden_size", "num_heads"))}
    whole = run("whole", **options)
    with cut_at(5):
        run("cut", **options)
    cut = run("cut", resume=True, **options)
    assert_same_weights(whole, cut)
    assert_same_records(whole, cut)
    assert result(whole)["tokens"] == result(cut)["tokens"]


def test_masked_text_attends_to_no_padding(run, bert, corpus):
    """The held-out loss is that of rows without padding; a model of text in both directions reads what follows."""
    folder = run(backbone=str(bert), num_layers=None, hidden_size=None, num_heads=None, learning_rate=0.03, steps=12)
    model = AutoModelForMaskedLM.from_pretrained(folder / "model").eval()
    blocks = prepare_blocks(str(corpus), "bytes", LENGTH, padded=True, progress=False)[0]
    masked = MaskedBlocks(blocks.eval, AutoTokenizer.from_pretrained(folder / "model"), 0.3)

    def loss(items) -> float:
        losses = []
        for ids, labels in items:
            with torch.no_grad():
                logits = model(input_ids=ids[None]).logits[0]
            losses += torch.nn.functional.cross_entropy(logits, labels, reduction="none")[labels != -100].tolist()
        return float(np.mean(losses))

    items = [masked[number] for number in range(len(masked))]
    real = [item["attention_mask"] == 1 for item in items]
    cut = [(item["input_ids"][shown], item["labels"][shown]) for item, shown in zip(items, real, strict=True)]
    found = result(folder)["eval_loss"]
    assert found == pytest.approx(loss(cut), abs=5e-6)
    assert abs(found - loss([(item["input_ids"], item["labels"]) for item in items])) > 2e-4  # without the mask


def test_packed_text_is_as_before(corpus, tmp_path, before_each_pass):
    seen = []
    before_each_pass(lambda trainer, model, inputs: seen.append(sorted(inputs)))
    pretrain(settings(corpus, tmp_path / "run", **FAST), bar=False)
    assert seen == [["input_ids", "labels"]] * 4
    assert result(tmp_path / "run")["tokens"] == 4 * 2 * LENGTH
