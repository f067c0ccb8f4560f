"""docs/placements.md has a heading for each placement, at the anchor that `lamina placements NAME` prints."""

import re

import pytest
from scripts import ROOT, loaded

from lamina.commands import placements as command
from lamina.placements import get, names

PAGE = (ROOT / "docs" / "placements.md").read_text("utf-8")
SECTIONS = dict(re.findall(r"^## (.+?)\n(.*?)(?=^## |\Z)", PAGE, re.MULTILINE | re.DOTALL))


@pytest.mark.parametrize("name", names())
def test_a_placement_has_its_heading_equation_code_and_picture(name, capsys):
    slugify = pytest.importorskip("markdown.extensions.toc").slugify
    placement = get(name)
    section = SECTIONS[placement.heading]
    assert "\n".join(placement.equation) in section
    assert f'lamina.build(config, "{name}")' in section
    assert placement.advice in section
    assert f"](placements/{name}.svg)" in section
    assert command.run([name]) == 0
    assert f"docs/placements.md#{slugify(placement.heading, '-')}\n" in capsys.readouterr().out


def test_the_pictures_are_up_to_date():
    pictures = loaded("docs/placement_sections.py").pictures()
    assert {path.name for path in pictures} == {path.name for path in (ROOT / "docs" / "placements").iterdir()}
    assert all(path.read_text("utf-8") == text for path, text in pictures.items()), "run make pictures"


def test_fusenorm_is_found_by_the_name_of_its_paper():
    assert get("spannorm").heading == "FuseNorm (SpanNorm)"
