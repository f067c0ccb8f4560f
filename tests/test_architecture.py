"""docs/architecture.md is about the package as it is."""

import re

from scripts import ROOT, loaded

PAGE = (ROOT / "docs" / "architecture.md").read_text(encoding="utf-8")


def test_the_picture_of_the_rooms_is_up_to_date():
    script = loaded("docs/rooms.py")
    assert script.PICTURE.read_text(encoding="utf-8") == script.picture(), "run python docs/rooms.py"


def test_the_picture_shows_a_new_import(tmp_path):
    script = loaded("docs/rooms.py")
    for room, imported in (("data", "errors"), ("modeling", "errors"), ("errors", "")):
        (tmp_path / "lamina" / room).mkdir(parents=True)
        line = f"from lamina.{imported} import UserError\n" if imported else ""
        (tmp_path / "lamina" / room / "__init__.py").write_text(line)
    before = script.picture(tmp_path / "lamina")
    (tmp_path / "lamina" / "modeling" / "uses.py").write_text("def f():\n    from lamina import data\n")
    assert script.picture(tmp_path / "lamina") != before
    assert script.floors(script.imports(tmp_path / "lamina")) == [["errors"], ["data"], ["modeling"]]


def test_every_room_is_described():
    table = PAGE.split("## The rooms")[1].split("## Where")[0]
    described = set(re.findall(r"`(\w+)`", " ".join(line.split("|")[1] for line in table.splitlines() if "|" in line)))
    assert described == set(loaded("docs/rooms.py").imports(ROOT / "lamina"))


def test_every_file_that_the_page_names_is_there():
    package = ROOT / "lamina"
    of_a_run = {"layers/", "model/"}
    for name in set(re.findall(r"`([\w/]+(?:/|\.py))`", PAGE)) - of_a_run:
        assert any(package.rglob(name.rstrip("/"))) or (ROOT / name).exists(), name
