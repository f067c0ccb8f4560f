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
    assert placement.heading in SECTIONS, "run python docs/placement_sections.py"
    section = SECTIONS[placement.heading]
    assert "\n".join(placement.equation) in section
    assert f'lamina.build(config, "{name}")' in section
    assert placement.advice in section
    assert f"](placements/{name}.svg)" in section
    assert command.run([name]) == 0
    assert f"docs/placements.md#{slugify(placement.heading, '-')}\n" in capsys.readouterr().out


def test_every_arxiv_paper_of_a_source_has_a_bibtex_entry(capsys):
    for name in names():
        numbers = re.findall(r"arXiv (\d{4}\.\d{5})", get(name).source)
        entries = re.findall(r"@misc\{arxiv:([\d.]+), note = \{[^{}]+\}, eprint = \{([\d.]+)\}", get(name).bibtex)
        assert entries == [(number, number) for number in numbers]
    assert command.run(["group_ln"]) == command.run(["doge"]) == 0
    fields = r"note = {Wu \& He 2018}, eprint = {1803.08494}, archivePrefix = {arXiv}"
    entry = f"@misc{{arxiv:1803.08494, {fields}, url = {{https://arxiv.org/abs/1803.08494}}}}"
    printed = capsys.readouterr().out
    assert entry in printed
    assert printed.count("To cite the source") == 1  # no paper describes Doge's placement


def test_the_pictures_are_up_to_date():
    pictures = loaded("docs/placement_sections.py").pictures()
    assert {path.name for path in pictures} == {path.name for path in (ROOT / "docs" / "placements").iterdir()}
    assert all(path.read_text("utf-8") == text for path, text in pictures.items()), "run docs/placement_sections.py"


def test_fusenorm_is_found_by_the_name_of_its_paper():
    assert get("spannorm").heading == "FuseNorm (SpanNorm)"


def test_the_list_has_the_equations_of_both_sub_layers(tmp_path, capsys):
    (tmp_path / "mine.yaml").write_text("placement: mine\nequation: ['y = LN(x + A(x))']\nrules: []\n")
    assert command.run([f"{tmp_path / 'mine.yaml'},keel"]) == 0
    assert "  y = LN(x + A(x))\n" in capsys.readouterr().out
    assert command.run([]) == 0
    *lines, _, _ = capsys.readouterr().out.splitlines()
    assert all("y = " in line and "x' = " in line for line in lines)
    assert len({line.index(f"  {get(line.split()[0]).title}  ") for line in lines}) == 1
    assert "  x_0 = LN(E)   y = x + LN(A(LN x))   x' = y + LN(F(LN y))" in "\n".join(lines)
