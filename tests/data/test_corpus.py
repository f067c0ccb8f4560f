"""Corpora: files, folders, and data sets of the hub."""

import gzip
import json
import logging
import lzma
import os
import re
import socket
import sys

import datasets
import pandas as pd
import pytest
import zstandard

from lamina.core.extras import install
from lamina.data.corpus import EMBEDDED, Corpus
from lamina.data.sources.file_documents import read_file
from lamina.data.sources.hub_datasets import parse
from lamina.errors import UserError

TEXT = "Ein Wal, naïve café 🐋.\r\nThe second line.\n"
COMPRESS = {"": bytes, ".gz": gzip.compress, ".xz": lzma.compress}
COMPRESS |= {".zst": lambda content: zstandard.ZstdCompressor().compress(content)}


def texts(corpus, **options):
    return [document.text for document in Corpus.parse(str(corpus), **options).documents()]


def fingerprint(corpus, *options):
    return Corpus.parse(str(corpus), *options).fingerprint()


def error_of(corpus, **options):
    with pytest.raises(UserError) as caught:
        list(Corpus.parse(str(corpus), **options).documents())
    message = str(caught.value)
    assert "\n" not in message
    return message


def test_the_embedded_corpus_is_one_document_from_emma_to_moby_dick():
    (document,) = Corpus.parse(EMBEDDED).documents()
    assert document.text.startswith("EMMA\n")
    assert len(document.text.encode()) == 5_208_759
    assert "Ishmael" in document.text[-1_300_000:]


@pytest.mark.parametrize("suffix", COMPRESS)
def test_a_text_and_the_rows_of_a_jsonl_file_are_read_as_they_stand_under_every_compression(tmp_path, suffix):
    rows = "\n\n".join(map(json.dumps, [{"text": "one\ntwo"}, {"text": TEXT, "id": 3}]))
    for name, content, expected in (("novel.txt", TEXT, [TEXT]), ("rows.jsonl", rows, ["one\ntwo", TEXT])):
        (tmp_path / f"{name}{suffix}").write_bytes(COMPRESS[suffix](content.encode()))
        assert texts(tmp_path / f"{name}{suffix}") == expected


@pytest.mark.parametrize(
    ("name", "content", "field", "text"),
    [
        pytest.param("a.txt", gzip.compress(TEXT.encode()), "text", TEXT, id="compression is known by content"),
        pytest.param("a.txt", b"\xef\xbb\xbf" + TEXT.encode(), "text", TEXT, id="byte order mark"),
        pytest.param("a.jsonl", b'{"body": "words", "text": "no"}', "body", "words", id="another field"),
        pytest.param("a.jsonl", '{"text": "a\\ud83dz 🐋"}'.encode(), "text", "a\ufffdz 🐋", id="half a surrogate pair"),
    ],
)
def test_what_a_file_holds_is_one_text(tmp_path, name, content, field, text):
    (tmp_path / name).write_bytes(content)
    assert texts(tmp_path / name, text_field=field) == [text]


def test_a_row_without_the_field_is_refused_with_file_line_and_fields(tmp_path):
    path = tmp_path / "rows.jsonl"
    path.write_text('{"text": "fine"}\n{"texts": "no", "id": 1}\n')
    message = error_of(path)
    assert "rows.jsonl" in message
    assert "line 2" in message
    assert "'texts'" in message
    assert "texts, id" in message


@pytest.mark.parametrize(
    ("row", "part"),
    [("{oops", "not JSON"), ('["a"]', "not list"), ('{"text": 3}', "not int"), ('{"text": null}', "not null")],
)
def test_a_malformed_row_is_refused_by_line(tmp_path, row, part):
    path = tmp_path / "rows.jsonl"
    path.write_text(row)
    assert "line 1" in (message := error_of(path))
    assert part in message


def test_a_folder_is_walked_in_order_whatever_the_suffixes_and_without_hidden_or_binary_files(tmp_path, caplog):
    folder = tmp_path / "project"
    files = {"b/main.py": b"print('b')\n", "a.md": b"# a\n", "a/z.c": b"int z;\n", "Makefile": b"all:\n"}
    files |= {"rows.jsonl.gz": gzip.compress(b'{"text": "row"}'), "logo.png": b"\x89PNG\r\n\x1a\n\x00\x00"}
    files |= {"latin.txt": "café".encode("latin-1"), "broken.txt.xz": b"not xz", "empty.py": b""}
    for name, content in (files | dict.fromkeys((".git/config", ".env"), b"hidden\n")).items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_bytes(content)
    with caplog.at_level(logging.WARNING):
        documents = list(Corpus.parse(str(folder)).documents())
    assert [document.text for document in documents] == ["all:\n", "int z;\n", "# a\n", "print('b')\n", "row"]
    assert "skipped 3 files" in caplog.text
    assert "logo.png" in caplog.text


def test_a_large_file_comes_in_parts_that_end_at_line_ends_and_join_to_the_whole(tmp_path):
    path = tmp_path / "large.txt"
    path.write_text("".join(f"line {number}\n" for number in range(500)))
    first, *others = (document for document, _ in read_file(path, "text", part_chars=100))
    assert len(others) > 10
    assert all(part.text.endswith("\n") for part in (first, *others))
    assert "".join(part.text for part in (first, *others)) == path.read_text()
    assert not first.continues
    assert all(part.continues for part in others)


CUT = {suffix: COMPRESS[suffix](TEXT.encode() * 50)[:-12] for suffix in (".gz", ".xz")}


@pytest.mark.parametrize(
    ("name", "contents", "said"),
    [
        ("a.txt", [b" \n\t\n", b"\xef\xbb\xbf"], "holds no text"),
        ("folder/a.bin", [b"\x00\x01"], "holds no text"),
        ("a.txt", [b"ab\x00cd", b"\xff\xd8\xff\xe0 jpeg"], "binary or not UTF-8"),
        ("a.txt.gz", [CUT[".gz"]], "damaged"),
        ("a.txt.xz", [CUT[".xz"]], "damaged"),
    ],
)
def test_what_holds_no_text_is_refused(tmp_path, name, contents, said):
    path = tmp_path / name
    path.parent.mkdir(exist_ok=True)
    for content in contents:
        path.write_bytes(content)
        assert said in error_of(path.parent if path.suffix == ".bin" else path)


def test_a_pipe_is_neither_file_nor_folder(tmp_path):
    os.mkfifo(tmp_path / "pipe")
    assert "neither a regular file nor a folder" in error_of(tmp_path / "pipe")


def test_zstandard_missing_names_the_extra_to_install(tmp_path, monkeypatch):
    path = tmp_path / "novel.txt.zst"
    path.write_bytes(COMPRESS[".zst"](TEXT.encode()))
    monkeypatch.setitem(sys.modules, "zstandard", None)
    assert install("zstd") in error_of(path)


def test_the_fingerprint_is_that_of_names_contents_and_text_field(tmp_path):
    folder = tmp_path / "corpus"
    folder.mkdir()
    (folder / "a.txt").write_text("one")
    (folder / "b.txt").write_text("two")
    seen = [fingerprint(folder)]
    os.utime(folder / "a.txt", (1, 1))
    assert fingerprint(folder) == seen[0]
    seen.append(fingerprint(folder, "body"))
    (folder / "a.txt").write_text("onet")
    (folder / "b.txt").write_text("wo")
    seen.append(fingerprint(folder))
    (folder / "b.txt").rename(folder / "c.txt")
    seen.append(fingerprint(folder))
    assert len(set(seen)) == 4


def test_a_name_with_a_colon_is_a_path(tmp_path, monkeypatch):
    """pyarrow would take it for an address."""
    monkeypatch.chdir(tmp_path)
    pd.DataFrame({"text": ["one", "two"]}).to_parquet(tmp_path / "rows.parquet")
    os.rename("rows.parquet", "lr:3e-3.parquet")
    assert texts("lr:3e-3.parquet") == ["one", "two"]


def test_the_fingerprint_of_a_mix_is_made_of_its_parts_and_not_of_their_shares(tmp_path):
    for name in "ab":
        (tmp_path / name).write_text(name)
    first, second = (str(tmp_path / name) for name in "ab")
    joined = f"{fingerprint(first)}+{fingerprint(second)}"
    assert fingerprint(f"{first}:1,{second}:1") == fingerprint(f"{first}:1,{second}:7") == joined


def test_the_fingerprint_of_a_text_is_that_of_every_revision(tmp_path):
    """Caches and checkpoints know a text by it."""
    (tmp_path / "a.txt").write_text("one")
    assert fingerprint(tmp_path / "a.txt") == "604a2bc2c83d0f48685548c7bbdcac086842727a2ded931f7b59bdc819886ac8"
    assert fingerprint(tmp_path, "body") == "147bffec860ef849978a41ce697571c09cfecf4b7557869d25f816bf14362a7a"
    assert fingerprint(EMBEDDED) == "f5943d12f4b748eb0e0f6d63d122e5093722934aa26e41f28b8dabe31142b495"


def test_the_files_changed_since_a_time_are_named_part_by_part(tmp_path):
    for name, time in {"a": 10, "b": 30, "c": 50}.items():
        (tmp_path / name).write_text(name)
        os.utime(tmp_path / name, (time, time))
    assert Corpus.parse(str(tmp_path)).changed_since(20) == [tmp_path / "b", tmp_path / "c"]
    mix = Corpus.parse(f"{tmp_path / 'a'}:1,{tmp_path / 'c'}:1")
    assert mix.changed_since(20) == [tmp_path / "c"]
    assert Corpus.parse(EMBEDDED).changed_since(0) == []
    assert Corpus.parse(f"hf:{tmp_path}").changed_since(40) == [tmp_path / "c"]
    with pytest.raises(UserError, match=r"names a file on this machine. Write .*c without hf:"):
        Corpus.parse(f"hf:{tmp_path / 'c'}")


@pytest.mark.parametrize("text", ['{"text": "a row"}\n{"text": "b"}\n', '\n[ {"id": 1, "text": "a row"}]'])
@pytest.mark.parametrize("name", ["rows.json", "rows.json.gz", "part-0001"])
def test_rows_that_are_read_as_plain_text_are_warned_of(tmp_path, caplog, text, name):
    path = tmp_path / "texts" / name
    path.parent.mkdir()
    path.write_bytes(gzip.compress(text.encode()) if name.endswith(".gz") else text.encode())
    for corpus in (Corpus.parse(str(path)), Corpus.parse(str(path.parent))):
        caplog.clear()
        assert [document.text for document in corpus.documents()] == [text]
        list(corpus.shards().shards[0].read())
        said = "reads this file as plain text, although it contains JSON rows with the field 'text'"
        assert caplog.text.count(said) == 1


@pytest.mark.parametrize("text", ['{"body": "a row"}', '{"text": 3}', "{ int text; }", "[1, 2]", "a {"])
def test_text_in_braces_is_text(tmp_path, caplog, text):
    (tmp_path / "a.json").write_text(text)
    assert texts(tmp_path) == [text]
    assert not caplog.text


def test_a_folder_with_several_kinds_of_files_says_which(tmp_path, caplog):
    for name in ("a.md", "b.md", "picture.svg", "LICENSE"):
        (tmp_path / name).write_text(name)
    assert len([*Corpus.parse(str(tmp_path)).documents()]) == 4
    assert f"{tmp_path}: Lamina reads files of several kinds (2 .md, 1 without an ending, 1 .svg)" in caplog.text
    caplog.clear()
    assert Corpus.parse(str(tmp_path)).shards().bytes == 26  # a job's second reader does not warn again
    assert len([*Corpus.parse(str(tmp_path / "a.md")).documents()]) == 1
    assert not caplog.text


def test_links_to_files_are_read_and_links_to_folders_are_named(tmp_path, caplog):
    for name in ("other/b.txt", "mine/a.txt"):
        (tmp_path / name).parent.mkdir()
        (tmp_path / name).write_text(name)
    (tmp_path / "mine" / "file").symlink_to("../other/b.txt")
    (tmp_path / "mine" / "folder").symlink_to("../other")
    (tmp_path / "mine" / "circle").symlink_to(".")
    corpus = Corpus.parse(str(tmp_path / "mine"))
    assert [document.text for document in corpus.documents()] == ["mine/a.txt", "other/b.txt"]
    Corpus.parse(str(tmp_path / "mine")).shards()
    assert caplog.text.count("Lamina does not follow links to folders (circle, folder)") == 1


def test_a_folder_that_must_not_be_read_is_named(tmp_path, monkeypatch):
    (tmp_path / "closed").mkdir()
    (tmp_path / "a.txt").write_text("a")
    scandir = os.scandir

    def refusing(path):
        if str(path).endswith("closed"):
            raise PermissionError(13, "Permission denied", str(path))
        return scandir(path)

    monkeypatch.setattr(os, "scandir", refusing)
    with pytest.raises(UserError, match=r"closed' cannot be read \(Permission denied"):
        texts(tmp_path)


@pytest.fixture
def saved(tmp_path):
    parts = {"train": ["one", "two", None], "test": ["three"]}
    splits = {name: datasets.Dataset.from_dict({"text": rows}) for name, rows in parts.items()}
    datasets.DatasetDict(splits).save_to_disk(str(tmp_path / "saved"))
    return tmp_path / "saved"


@pytest.mark.parametrize(
    ("corpus", "parts"),
    [
        ("hf:me/text", ("me/text", None, None)),
        ("hf:me/text:en", ("me/text", "en", None)),
        ("hf:me/text@test", ("me/text", None, "test")),
        ("hf:me/text:en@train[:1%]", ("me/text", "en", "train[:1%]")),
    ],
)
def test_name_configuration_and_split_are_taken_apart(corpus, parts):
    source = parse(corpus)
    assert (source.name, source.config, source.split) == parts


def test_a_folder_that_datasets_saved_gives_its_train_split_or_another_one(saved):
    assert texts(f"hf:{saved}") == ["one", "two"]
    assert texts(f"hf:{saved}@test") == ["three"]


def test_a_folder_of_files_is_loaded_as_a_data_set(tmp_path, monkeypatch):
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "hf-cache")
    folder = tmp_path / "rows"
    folder.mkdir()
    (folder / "train.jsonl").write_text("".join(json.dumps({"body": word}) + "\n" for word in ("one", "two")))
    assert texts(f"hf:{folder}", text_field="body") == ["one", "two"]


def test_an_unknown_split_and_an_unknown_column_are_refused_with_what_there_is(saved):
    with pytest.raises(UserError, match="allowed: test, train"):
        texts(f"hf:{saved}@tset")
    with pytest.raises(UserError, match="allowed: text"):
        texts(f"hf:{saved}", text_field="body")


def test_the_fingerprint_of_a_local_data_set_follows_content_and_split(saved):
    first = fingerprint(f"hf:{saved}")
    assert first == fingerprint(f"hf:{saved}")
    assert first != fingerprint(f"hf:{saved}@test")
    (saved / "train/more.txt").write_text("x")
    assert first != fingerprint(f"hf:{saved}")


def test_a_missing_library_names_the_extra_to_install(monkeypatch):
    monkeypatch.setitem(sys.modules, "datasets", None)
    with pytest.raises(UserError, match=re.escape(install("hub"))):
        texts("hf:me/text")


def test_without_a_network_one_clear_line_comes_at_once_and_the_offline_switches_are_turned_back(tmp_path, monkeypatch):
    def no_address(*_args, **_options):
        raise socket.gaierror("Name or service not known")

    monkeypatch.setattr(socket, "getaddrinfo", no_address)
    monkeypatch.setattr("lamina.core.hub_access.getproxies", dict)
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "hf-cache")
    before = datasets.config.HF_HUB_OFFLINE
    with pytest.raises(UserError, match="hub cannot be reached") as caught:
        texts("hf:nobody/nothing-at-all")
    assert "\n" not in str(caught.value)
    assert datasets.config.HF_HUB_OFFLINE is before


def test_an_error_of_the_library_becomes_one_line(monkeypatch):
    def fail(*_args, **_options):
        raise ValueError("BuilderConfig 'fr' not found.\nAvailable: ['en']")

    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", False)
    monkeypatch.setattr("lamina.core.hub_access.hub_resolves", lambda: True)
    monkeypatch.setattr(datasets, "load_dataset", fail)
    with pytest.raises(UserError, match="BuilderConfig 'fr' not found") as caught:
        texts("hf:me/text:fr")
    assert "\n" not in str(caught.value)
