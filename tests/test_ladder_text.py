"""The texts of the pre-registered studies are prose, a paragraph per line, each once per source."""

import pytest
from scripts import loaded

SENTENCE = "It is a truth universally acknowledged, that a single man in possession of a good fortune, must be in want."


@pytest.fixture(scope="module")
def script():
    return loaded("benchmarks/ladder_text.py")


def test_hard_wrapped_lines_become_paragraphs(script):
    assert list(script.paragraphs_of("one\n two\n\t\nthree\n\n\n")) == ["one two", "three"]


def test_a_long_paragraph_stands_once_and_a_short_one_as_often_as_it_was_written(script):
    assert list(script.distinct(["Enter.", SENTENCE, "Enter.", SENTENCE])) == ["Enter.", SENTENCE, "Enter."]


@pytest.mark.parametrize(
    ("paragraph", "prose"),
    [(SENTENCE, True), ("Too short to be prose.", False), ("0x7f 12 34 " * 20, False), ("é" * 20 + SENTENCE, False)],
)
def test_tables_code_and_foreign_text_are_no_prose(script, paragraph, prose):
    assert script.is_prose(paragraph) is prose


def test_the_innermost_blocks_of_a_page_are_its_paragraphs(script, tmp_path):
    pytest.importorskip("lxml")
    (tmp_path / "deb-manual").mkdir()
    body = "<nav><p>menu</p></nav><li><p>inner</p></li><pre>code</pre><div class='para'>own</div>"
    (tmp_path / "deb-manual" / "page.html").write_text(f"<html><body>{body}</body></html>")
    assert list(script.pages("manual", "", script.Packages(tmp_path))) == ["inner", "own"]
