"""Links under names that a job writes: what they lead to stays as it is."""

import os

import pytest

from lamina.cli import main
from lamina.errors import UserError
from lamina.jobs.files import write_text
from lamina.jobs.folder import LOCK, REPLACES, hold, lock
from lamina.reports.page import write_page


@pytest.fixture
def precious(tmp_path):
    path = tmp_path / "precious"
    path.write_text("mine")
    return path


@pytest.fixture
def folder(tmp_path):
    (tmp_path / "folder").mkdir()
    return tmp_path / "folder"


@pytest.mark.parametrize("name", [LOCK, REPLACES])
def test_a_folder_with_a_link_in_the_locks_place_is_refused(folder, precious, name):
    (folder / name).symlink_to(precious)
    with pytest.raises(UserError, match=f"{name}' is a link"), lock(folder):
        pass
    assert precious.read_text() == "mine"
    assert (folder / name).is_symlink()


def test_a_lock_that_leads_nowhere_makes_no_file(folder, tmp_path):
    (folder / ".lock").symlink_to(tmp_path / "nowhere")
    with pytest.raises(UserError, match="is a link"), lock(folder):
        pass
    assert not (tmp_path / "nowhere").exists()


def test_a_lock_that_is_a_hard_link_is_not_emptied(folder, precious):
    os.link(precious, folder / ".lock")
    with lock(folder):
        pass
    assert precious.read_text() == "mine"


def test_a_lock_that_is_a_folder_is_refused(folder):
    (folder / ".lock").mkdir()
    with pytest.raises(UserError, match="is a folder"), lock(folder):
        pass


@pytest.mark.parametrize("argv", [["pretrain", "--steps", "1"], ["compare", "--steps", "1"]])
def test_a_command_refuses_a_linked_lock_in_one_line(folder, precious, capsys, argv):
    (folder / ".lock").symlink_to(precious)
    assert main([*argv, "--output", str(folder)]) == 2
    (line,) = [line for line in capsys.readouterr().err.splitlines() if line.startswith("lamina:")]
    assert line.endswith(".lock' is a link (allowed: no link there, or another folder)")
    assert precious.read_text() == "mine"
    assert [path.name for path in folder.iterdir()] == [".lock"]


def test_a_file_is_not_written_through_a_link_in_its_temporary_place(folder, precious):
    (folder / f".result.json.{os.getpid()}").symlink_to(precious)
    write_text(folder / "result.json", "{}")
    assert precious.read_text() == "mine"
    assert not (folder / "result.json").is_symlink()


def test_a_page_is_not_written_through_a_link_in_its_temporary_place(folder, precious):
    (folder / f".report.html.{os.getpid()}").symlink_to(precious)
    write_page(folder / "report.html", title="A page", facts=[], sections=[], command="")
    assert precious.read_text() == "mine"


def test_holding_a_folder_deletes_a_linked_draft_but_not_what_it_leads_to(folder, tmp_path):
    (tmp_path / "home").mkdir()
    (tmp_path / "home" / "letter").write_text("mine")
    (folder / ".model-draft").symlink_to(tmp_path / "home")
    write_text(folder / "environment.json", '{"versions": {"lamina": "0.1.0"}}')
    with hold(folder, resume=True):
        pass
    assert not (folder / ".model-draft").is_symlink()
    assert (tmp_path / "home" / "letter").read_text() == "mine"
