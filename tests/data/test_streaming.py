"""Blocks that are read while training goes on: which text they hold, and that they can be taken up anywhere."""

import gzip
import json
import os
import threading
from itertools import islice
from pathlib import Path

import datasets
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
import zstandard
from spread import spread

from lamina.data import corpus as corpora
from lamina.data import streamed as streams
from lamina.data.corpus import Corpus
from lamina.data.encoding import TextEncoder
from lamina.data.sources import file_documents
from lamina.data.sources.file_documents import Document
from lamina.data.streamed import Place, StreamedBlocks, TokenStream, stream_blocks
from lamina.data.tokenizers import load_tokenizer
from lamina.errors import UserError

LENGTH = 32
END = 256  # the end-of-text token of the tokenizer "bytes"


@pytest.fixture(autouse=True)
def small_pieces(monkeypatch):
    """Everything that is read at once is small, so that a few kilobytes have every boundary there is."""
    monkeypatch.setattr(streams, "_CHUNK", 4)
    monkeypatch.setattr(streams, "_BATCH_CHARS", 300)
    monkeypatch.setattr(corpora, "_PART_CHARS", 700)


def lines(count, name="l"):
    """Lines of which no two are alike, some of them long."""
    return [f"{name}{i:05d} " + "abc " * (i % 17) + "\n" for i in range(count)]


def rows():
    """Documents of all lengths: an empty one, short ones, one that is longer than all that is read at once."""
    texts = ["".join(lines(i % 9 + 1, f"r{i:03d}-")) for i in range(60)]
    texts[20] = "".join(lines(150, "long-"))
    texts[30] = ""
    return texts


@pytest.fixture
def text(tmp_path):
    path = tmp_path / "text.txt"
    path.write_text("".join(lines(400)))
    return path


KINDS = ["txt", "folder", "jsonl", "jsonl.gz", "jsonl.zst", "parquet", "saved", "hub folder"]


@pytest.fixture(params=spread(KINDS, ["folder", "jsonl.gz", "parquet", "hub folder"]))
def any_kind(request, tmp_path, text, monkeypatch):
    """A corpus of each kind."""
    kind = request.param
    if kind == "txt":
        return str(text)
    if kind == "folder":
        folder = tmp_path / "folder"
        (folder / "b").mkdir(parents=True)
        for i, name in enumerate(["a.txt", "b/a.txt", "b/b.txt", "c.txt"]):
            (folder / name).write_text("".join(lines(60 + i, f"f{i}-")))
        (folder / "picture.bin").write_bytes(b"\x00\xff" * 50)
        return str(folder)
    encoded = "".join(json.dumps({"text": row}) + "\n" for row in rows()).encode()
    if kind == "hub folder":
        monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "hf-cache")
        (tmp_path / "data").mkdir()
        for part, few in enumerate((rows()[:35], rows()[35:])):
            table = pa.table({"text": few, "other": list(range(len(few)))})
            pq.write_table(table, tmp_path / "data" / f"train-{part:05d}-of-00002.parquet", row_group_size=10)
        return f"hf:{tmp_path / 'data'}"
    if kind == "saved":
        datasets.Dataset.from_dict({"text": rows()}).save_to_disk(str(tmp_path / "saved"))
        return f"hf:{tmp_path / 'saved'}"
    path = tmp_path / f"rows.{kind}"
    if kind == "parquet":
        pq.write_table(pa.table({"text": rows()}), path, row_group_size=7)
    else:
        pack = {"jsonl": bytes, "jsonl.gz": gzip.compress, "jsonl.zst": zstandard.compress}[kind]
        path.write_bytes(pack(encoded))
    return str(path)


def streamed(corpus, **options):
    return stream_blocks(str(corpus), "bytes", LENGTH, **{"eval_blocks": 64, "buffer": 3, **options})[0]


def take(blocks, start, count):
    return torch.stack([blocks[i]["input_ids"] for i in range(start, start + count)])


def one_pass(blocks):
    """How many blocks a pass over the text has, by the stream's own count of them."""
    places = (after for _, after in blocks.train.stream.chunks(Place(), 1))
    return next(number for number, after in enumerate(places) if after.turn)


def texts(ids):
    """Ids as the texts between end-of-text tokens."""
    flat = np.asarray(ids).ravel()
    return [bytes(part[part != END].astype(np.uint8)).decode() for part in np.split(flat, np.flatnonzero(flat == END))]


def test_a_pass_holds_all_the_text_but_the_held_out_pieces(any_kind):
    blocks = streamed(any_kind, buffer=1)
    count = one_pass(blocks)
    train = take(blocks.train, 0, count + 1)
    trained = {line for part in texts(train) for line in part.splitlines() if line}
    held_out = {line for part in texts(blocks.eval.array) for line in part.splitlines() if line}
    if any_kind.startswith("hf:") or "rows" in any_kind:
        every = {line for row in rows() for line in row.splitlines()}
    else:
        found = [Path(any_kind)] if any_kind.endswith(".txt") else list(Path(any_kind).rglob("*.txt"))
        every = {line for path in found for line in path.read_text().splitlines()}
    # a line that a block's end cuts is in neither set whole: the last ones of either split
    assert len(trained & every) + len(held_out & every) >= len(every) - 8
    assert len(held_out & every) >= 5
    assert not trained & held_out & every


def test_the_blocks_are_the_naive_packing_of_the_text(tmp_path):
    """Tokens of all documents in a row, an end-of-text token between them, cut into rows; the remainder goes on."""
    path = tmp_path / "rows.jsonl"
    path.write_text("".join(json.dumps({"text": row}) + "\n" for row in rows()))
    stream = stream_of(Corpus.parse(str(path)).shards().shards)
    naive = []
    for _ in range(3):
        for row in rows():
            if row:
                naive += [END] * bool(naive) + list(row.encode())
    count = len(naive) // LENGTH
    found = np.concatenate([chunk for chunk, _ in islice(stream.chunks(Place(), 1), count)])
    assert (found == np.array(naive[: count * LENGTH]).reshape(count, LENGTH)).all()


def stream_of(found, seed=None):
    options = {"corpus": "x", "chars": 200, "held_out": {}, "eval_fraction": 0.1, "seed": seed}
    return TokenStream(shards=found, encoder=TextEncoder(load_tokenizer("bytes")), sequence_length=LENGTH, **options)


@pytest.mark.parametrize("buffer", spread([1, 3], [3]))
def test_a_stream_is_taken_up_at_every_block(any_kind, buffer):
    """Across files, documents and passes: what comes after any block is what came after it the first time."""
    first = streamed(any_kind, buffer=buffer)
    count = 2 * one_pass(first) + 10
    states, whole = [], []
    for i in range(count):
        states.append(json.loads(json.dumps(first.train.state_dict(i))))
        whole.append(first.train[i]["input_ids"])
    again = streamed(any_kind, buffer=buffer).train
    for i in range(0, count - 1, 1 if count < 400 else 3):
        again.load_state_dict(states[i])
        assert torch.equal(again[i]["input_ids"], whole[i]), i
        assert torch.equal(again[i + 1]["input_ids"], whole[i + 1]), i
    # they were not all of the beginning, and of every kind
    assert all(state["chunk"] * again.size > i - 2 * again.size for i, state in enumerate(states))
    assert {state["turn"] for state in states} == {0, 1, 2}
    for field in ("carry", "segments", "position", "skip"):
        assert any(state[field] for state in states), field


def test_the_same_seed_gives_the_same_blocks_and_another_one_others(any_kind):
    first, second, other = (take(streamed(any_kind, seed=seed).train, 0, 30) for seed in (1, 1, 2))
    assert torch.equal(first, second)
    assert not torch.equal(first, other)


def test_a_buffer_shuffles_its_own_blocks_and_no_others(text):
    plain, shuffled = (take(streamed(text, buffer=buffer, seed=3).train, 0, 40) for buffer in (1, 5))
    moved = 0
    for start in range(0, 40, 5):
        before, after = ({tuple(row.tolist()) for row in part[start : start + 5]} for part in (plain, shuffled))
        assert before == after
        moved += not torch.equal(plain[start : start + 5], shuffled[start : start + 5])
    assert moved >= 6


def test_the_files_come_in_another_order_in_each_pass(tmp_path):
    for i in range(6):
        (tmp_path / f"{i}.txt").write_text(f"{i}" * 4 * LENGTH)
    found = Corpus.parse(str(tmp_path)).shards().shards
    flat = np.concatenate([c for c, _ in islice(stream_of(found, (0, 0)).chunks(Place(), 1), 80)]).ravel()
    files = [text[0] for text in texts(flat) if text]
    passes = [tuple(files[i : i + 6]) for i in (0, 6, 12)]
    assert all(sorted(order) == list("012345") for order in passes)
    assert len(set(passes)) == 3


def test_what_is_held_out_depends_on_neither_seed_nor_buffer(text):
    first = streamed(text)
    other = streamed(text, seed=5, buffer=7)
    assert np.array_equal(first.eval.array, other.eval.array)
    assert first.stats == other.stats
    assert len(streamed(text, eval_fraction=0.3, eval_blocks=100).eval) > len(first.eval)


def test_the_unigram_entropy_is_that_of_the_held_out_text_under_the_sample(text):
    blocks = streamed(text)
    counts = np.ones(257)
    for token in blocks.train.known.ravel():
        counts[token] += 1
    naive = -np.mean([np.log(counts[token] / counts.sum()) for token in blocks.eval.array.ravel()])
    assert blocks.stats.unigram_entropy == pytest.approx(naive)
    splits = (blocks.train.known, blocks.eval.array)
    apart = [{x for part in texts(ids) for x in part.split("\n")[1:-1]} for ids in splits]
    assert all(apart)
    assert not apart[0] & apart[1]


class Endless:
    """A shard without end that counts what was read of it, and by which threads."""

    def __init__(self):
        self.read_so_far, self.threads = 0, set()

    def read(self, position=None):
        number = position or 0
        while True:
            number += 1
            self.read_so_far += 1
            self.threads.add(threading.current_thread().name)
            yield Document(f"{number % 10} " * 20), number


def test_a_text_without_end_is_read_as_far_as_it_is_needed():
    """41 tokens a document: to block 200, the chunk of 4 that it is in, the chunk behind it, and a batch of text."""
    shard = Endless()
    blocks = StreamedBlocks(stream_of([shard]), buffer=1, seed=(0,), known=np.zeros((1, LENGTH), np.uint16))
    blocks[200]
    blocks._drop()  # waits for what is being read
    assert 208 * LENGTH / 41 <= shard.read_so_far <= 208 * LENGTH / 41 + 300 / 40 + 1


def test_where_the_text_is_read_again_is_said_once_and_right(text, caplog):
    blocks = streamed(text)
    count = one_pass(blocks)
    take(blocks.train, 0, 3 * count)
    (said,) = [r.getMessage() for r in caplog.records if "reads the corpus again" in r.getMessage()]
    first, last = (int(word) for word in said.split() if word.isdigit())
    assert first - 1 <= count <= last + 1
    assert str(text) in said


def test_a_mix_keeps_its_shares_and_every_part_is_taken_up(tmp_path):
    for name in "ab":
        (tmp_path / f"{name}.txt").write_text("".join(name * (20 + i % 30) + "\n" for i in range(300)))
    corpus = f"{tmp_path / 'a.txt'}:0.75,{tmp_path / 'b.txt'}:0.25"
    blocks = streamed(corpus)
    train = blocks.train.for_run(0)
    rows = take(train, 0, 400)
    of_a = (rows == ord("a")).any(dim=1)
    assert all(abs(int(of_a[:n].sum()) - 0.75 * n) <= 1 for n in range(1, 401))
    held_out = torch.stack([blocks.eval[i]["input_ids"] for i in range(len(blocks.eval))])
    assert abs(int((held_out == ord("a")).any(dim=1).sum()) - 0.75 * len(held_out)) <= 1
    state = json.loads(json.dumps(train.state_dict(333)))
    again = streamed(corpus).train.for_run(0)
    again.load_state_dict(state)
    assert torch.equal(take(again, 333, 20), rows[333:353])


def test_a_missing_column_of_a_data_set_is_named(tmp_path):
    datasets.Dataset.from_dict({"body": ["one", "two"]}).save_to_disk(str(tmp_path / "saved"))
    with pytest.raises(UserError, match="allowed: body"):
        streamed(f"hf:{tmp_path / 'saved'}")


def test_a_fault_far_behind_shows_when_it_is_reached(tmp_path):
    path = tmp_path / "rows.jsonl"
    good = "".join(json.dumps({"text": line}) + "\n" for line in lines(3000))
    path.write_text(good + "{broken\n")
    blocks = streamed(path, eval_blocks=1)
    with pytest.raises(UserError, match="line 3001: not JSON"):
        take(blocks.train, 0, 5000)


@pytest.mark.parametrize("change", [lambda p: p.write_text("x"), lambda p: p.unlink(), lambda p: os.utime(p, (1, 1))])
def test_a_file_that_changes_meanwhile_is_named(tmp_path, change):
    for name in "abc":
        (tmp_path / f"{name}.txt").write_text("".join(lines(200, name)))
    blocks = streamed(tmp_path)
    take(blocks.train, 0, 10)
    change(tmp_path / "b.txt")
    with pytest.raises(UserError, match=r"b\.txt' (has changed while|could not be read)"):
        take(blocks.train, 10, 900)
    assert threading.active_count() < 50


def test_the_fingerprint_follows_the_content_of_small_files_and_the_times_of_large_ones(text, monkeypatch):
    small = streamed(text).stats.fingerprint
    os.utime(text, (1, 1))
    assert streamed(text).stats.fingerprint == small
    monkeypatch.setattr(file_documents, "_HASHED_BYTES", 10)
    large = streamed(text).stats.fingerprint
    assert streamed(text).stats.fingerprint == large
    os.utime(text, (2, 2))
    assert streamed(text).stats.fingerprint != large


def test_rows_of_parquet_files_are_a_corpus_without_streaming_too(tmp_path):
    pq.write_table(pa.table({"text": ["one", None, "two"], "n": [1, 2, 3]}), tmp_path / "a.parquet")
    assert [document.text for document in Corpus.parse(str(tmp_path / "a.parquet")).documents()] == ["one", "two"]
    with pytest.raises(UserError, match="allowed: n, text"):
        list(Corpus.parse(str(tmp_path / "a.parquet"), "body").documents())
    with pytest.raises(UserError, match="'n' must hold strings, not int64"):
        list(Corpus.parse(str(tmp_path / "a.parquet"), "n").documents())
    (tmp_path / "a.parquet").write_bytes(b"no parquet")
    with pytest.raises(UserError, match="not a readable parquet file"):
        list(Corpus.parse(str(tmp_path / "a.parquet")).documents())


@pytest.mark.parametrize("kind", [pa.string_view(), pa.large_string(), pa.dictionary(pa.int32(), pa.string())])
def test_every_arrow_type_of_texts_is_text(tmp_path, kind):
    texts = ["one", None, "two", "one"]
    pq.write_table(pa.table({"text": pa.array(texts, pa.string()).cast(kind)}), tmp_path / "a.parquet")
    assert [row.text for row in Corpus.parse(str(tmp_path / "a.parquet")).documents()] == ["one", "two", "one"]
