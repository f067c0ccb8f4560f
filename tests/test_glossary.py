"""The words that CONTRIBUTING.md's glossary rules out are not in docstrings, comments, messages and docs."""

import ast
import functools
import re
from pathlib import Path

import pytest
from scripts import ROOT, loaded

# Those of the glossary's last column that are never right, whatever the sentence.
BANNED = {
    "mend": r"\bmend(s|ed|ing)?\b",
    "crew": r"\bcrews?\b",
    "initialiser": r"\b[Ii]nitialis(er|ers|ation|e|ed|es|ing)\b",
    "optimiser": r"\b[Oo]ptimis(er|ers|ation|e|ed|es|ing)\b",
    "tokenise": r"\b[Tt]okenis(er|ers|ation|e|ed|es|ing)\b",
    "colour": r"\b[Cc]olour(s|ed|ing)?\b",
    "a row a trial": r"\b(a|one) (row|line|column|file|panel|section) an? (?!single\b|time\b)\w+\b",
    "bits a byte": r"\b(bits|nats|tokens|bytes) an? (byte|token|second|step|parameter)\b",
    "take up": r"\b(take|takes|took|taken|taking) up\b",
    "gone on from": r"\bgone on (from|with)\b",
    "iteration": r"\btraining iterations?\b",
    "towards": r"\b([Tt]owards|[Aa]mongst|[Ww]hilst)\b",
    "in order to": r"\b[Ii]n order to\b",
    "marketing": r"\b([Ss]imply|[Ee]asily|[Ss]eamless(ly)?|[Pp]owerful|[Bb]lazing(ly)?|[Ee]ffortless(ly)?|"
    r"[Cc]utting-edge|[Ss]tate-of-the-art|[Ww]orld-class|[Ll]everag(e|es|ing)|[Uu]tiliz(e|es|ed|ing))\b",
}


# What a reader of pages, of the commands' help and of messages never meets: house words, and verdicts of the records.
HOUSE = {
    "readout": r"\b[Rr]eadouts?\b",  # the output head
    "left first": r"\bleft (first|its (range|course))\b",
    "turns the stream": r"\bturns? the stream\b",
    "hands on": r"\bhands? on\b",
    "anew": r"\banew\b",
    "alike": r"\balike\b",
    "dearer": r"\bdearer\b",
    "else": r"[,;] else\b|\b[Ee]lse,|\bor else\b",
    "scale cpu": r"\b[Aa]t scale cpu\b",
    "same bits": r"\b(same bits|to the bit)\b",
    "is refused": r"\b(is|are|was|were) refused\b",
    "is said": r"\b(is|are|was|were) (said|told)\b",
    "placed": r"\bplaced\b",
    "not tested": r"\(not tested\)",
}


@functools.cache
def prose(path: Path) -> str:
    """What a file says to people: the whole of a page, and of code the texts and the comments."""
    text = path.read_text(encoding="utf-8")
    if path.suffix == ".md":
        return text.split("## Words")[0] if path.name == "CONTRIBUTING.md" else text
    texts = [n.value for n in ast.walk(ast.parse(text)) if isinstance(n, ast.Constant) and isinstance(n.value, str)]
    return "\n".join([*texts, *re.findall(r"#.*", text)])


def files() -> list[Path]:
    pages = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", ROOT / "SECURITY.md", *sorted((ROOT / "docs").glob("*.md"))]
    return [*pages, *sorted((ROOT / "examples").glob("*.py")), *sorted((ROOT / "lamina").rglob("*.py"))]


@functools.cache
def shown() -> dict[str, str]:
    """What a reader sees: the pages, the help of all commands and settings, and the messages of refusals."""
    docs = ROOT / "docs"
    pages = [ROOT / "README.md", *sorted(docs.glob("*.md")), *sorted((docs / "evidence").glob("*.md"))]
    texts = {path.name: path.read_text("utf-8") for path in pages}
    reference = loaded("docs/reference.py")
    texts |= {"help": reference.command_line_page(), "settings": reference.settings_page()}
    texts["refusals"] = (ROOT / "tests" / "refusals.txt").read_text("utf-8")
    return {name: re.sub(r"k_readout|--k-readout", "", text) for name, text in texts.items()}


@pytest.mark.parametrize("word", HOUSE)
def test_no_reader_meets(word):
    met = {f"{name}: {hit.group()}" for name, text in shown().items() for hit in re.finditer(HOUSE[word], text)}
    assert not met, "\n".join(sorted(met))


@pytest.mark.parametrize("word", BANNED)
def test_nobody_says(word):
    hits = [(path, hit) for path in files() for hit in re.finditer(BANNED[word], prose(path))]
    said = {f"{path.relative_to(ROOT)}: {hit.group()}" for path, hit in hits}
    assert not said, "\n".join(sorted(said))
