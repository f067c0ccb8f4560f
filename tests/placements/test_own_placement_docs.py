"""The placement of docs/own.md works as written: its files are written, its commands run, a package's is listed."""

import os
import re
import shlex
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from training.tiny_runs import SMALL, cut_at
from transformers import LlamaConfig

import lamina
from lamina.cli import main
from lamina.errors import UserError
from lamina.placements import registry
from lamina.placements.wirings import WIRINGS, wiring
from lamina.training.pretrain import pretrain
from lamina.training.settings import PretrainSettings

PAGE = (Path(__file__).parents[2] / "docs" / "own.md").read_text(encoding="utf-8").split("\n## A probe\n")[0]


def blocks(language):
    return re.findall(rf"^```{language}\n(.*?)^```$", PAGE, re.M | re.S)


COMMANDS = re.findall(r"^lamina .*$", PAGE, re.M)


@pytest.fixture(autouse=True)
def registry_as_before():
    with registry.PLACEMENTS.isolated(), WIRINGS.isolated():
        yield


@pytest.fixture(autouse=True)
def folder(tmp_path, monkeypatch):
    """The page's two files in an empty folder that is the current one."""
    (source,), (module, *more) = blocks("yaml"), blocks("python")
    (tmp_path / "mine.yaml").write_text(source, encoding="utf-8")
    (tmp_path / "mine.py").write_text("\n".join([module, *more]), encoding="utf-8")
    words = "the norm sits before, after and between\n" * 400
    (tmp_path / "words.txt").write_text(words, encoding="utf-8")
    monkeypatch.chdir(tmp_path)
    return tmp_path


def run(*argv, cwd, path=()):
    """``lamina ARGV`` in a process of its own, with ``path`` in front of where modules are found."""
    places = [*map(str, path), *filter(None, [os.environ.get("PYTHONPATH")]), str(Path(lamina.__file__).parents[1])]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(places)}
    return subprocess.run(
        [sys.executable, "-m", "lamina", *argv], cwd=cwd, env=environment, capture_output=True, text=True, timeout=240
    )


def llama():
    sizes = {"hidden_size": 16, "intermediate_size": 24, "num_attention_heads": 2, "num_hidden_layers": 5}
    return LlamaConfig(vocab_size=61, **sizes)


def test_lamina_placements_shows_the_yaml_file_and_draws_it(folder, capsys):
    assert main(shlex.split(COMMANDS[0])[1:]) == 0
    out = capsys.readouterr().out
    assert "y = x + LN(A(LN x))" in out
    assert "Initialization: scaled" in out
    assert (folder / "mine.svg").read_text(encoding="utf-8").startswith("<svg")


def test_the_norm_of_the_page_is_a_kind_of_every_placement():
    model = lamina.build(llama(), "mine.py", norm="clipped")
    assert type(model.model.layers[0].attention.out_norm).__name__ == "ClippedNorm"
    assert model.model.norm(torch.full((1, 1, 16), 9.0)).max().item() == 2.0
    plan = lamina.placements.resolve("mine.py(norm=clipped)", 5)
    assert {norm.kind for norm in plan.layers[0].attention.norms.values()} == {"clipped"}


def test_the_wiring_of_the_page_goes_around_any_norms():
    lamina.placements.resolve("mine.py", 5)  # reads the file, which registers it
    model = lamina.build(llama(), "keel", wiring="again")
    sources = [block.sources for block in model.model.layers]
    assert [source is not None for source in sources] == [False] * 4 + [True]
    assert sources[-1].weight.tolist() == [1.0, 1.0]


def test_a_spec_may_name_the_wirings_file_so_that_a_trials_process_reads_it(folder, capsys):
    spec = "keel(wiring=mine.py,norm=clipped)"
    assert spec in PAGE
    listed = set(WIRINGS.names())
    assert main(["placements", spec, "--num-layers", "3"]) == 0
    assert ", 1 in the last" in capsys.readouterr().out
    block = lamina.build(llama(), spec).model.layers[-1]
    assert block.sources.weight.tolist() == [1.0, 1.0]
    assert type(block.attention.post_norm).__name__ == "ClippedNorm"
    assert set(WIRINGS.names()) == listed
    (folder / "none.py").write_text("", encoding="utf-8")
    registers = "this file registers 0 wirings with @wiring. Register one"
    for name, why in (("nothing.py", "no such file"), ("none.py", registers)):
        with pytest.raises(UserError, match=f"^wiring '{name}': {why}"):
            lamina.placements.resolve(f"keel(wiring={name})", 3)


@pytest.mark.parametrize(
    ("function", "said"),
    [
        (lambda plan: plan.layers[7], "its function raised IndexError: tuple index out of range"),
        (lambda plan: None, r"its function returns None\. Return a Plan of 5 layers\."),
        (lambda plan: replace(plan, layers=plan.layers[:2]), r"its function returns 2 layers\. Return a Plan of 5 "),
    ],
)
def test_a_wiring_that_fails_is_refused_in_one_line(function, said):
    wiring("again", equation="", source="")(function)
    with pytest.raises(UserError, match=f"^wiring: 'again' on 'keel': {said}"):
        lamina.build(llama(), "keel", wiring="again")


def test_the_yaml_file_means_what_the_page_says():
    plan = lamina.placements.resolve("mine.yaml", 16)
    peri, pre = plan.layers[3], plan.layers[4]
    assert peri.feed_forward.pre_norm is not None
    assert peri.feed_forward.out_norm is not None
    assert peri.feed_forward.skip_scale == 1
    assert pre.feed_forward.out_norm is None
    assert pre.feed_forward.skip_scale == pytest.approx(2**0.5)


@pytest.mark.parametrize("placement", ["mine.yaml", "mine.py(alpha=0.9)"])
def test_a_placement_of_the_page_trains(folder, placement):
    sizes = {**SMALL, "num_layers": 5, "steps": 2}
    result = pretrain(PretrainSettings(placement=placement, corpus="words.txt", output="run", **sizes), bar=False)
    assert result["status"] in ("finished", "short", "stuck")
    assert result["steps"] == 2
    model = type(lamina.build(llama(), placement)).from_pretrained(folder / "run" / "model")
    skip_scale = 0.9 if "alpha" in placement else 2**0.5
    assert model.model.layers[4].feed_forward.skip_scale == pytest.approx(skip_scale)


def test_a_run_with_the_pages_norm_and_wiring_resumes_in_a_process_that_has_not_read_the_file(folder):
    given = {"placement": "mine.py(norm=clipped,wiring=again)", "corpus": "words.txt", **SMALL, "save_steps": 2}
    pretrain(PretrainSettings(output="whole", **given), bar=False)
    with cut_at(3):
        pretrain(PretrainSettings(output="cut", **given), bar=False)
    done = run("pretrain", "--output", "cut", "--resume", cwd=folder)
    assert done.returncode == 0, done.stderr
    whole, cut = (folder / name / "model" / "model.safetensors" for name in ("whole", "cut"))
    assert whole.read_bytes() == cut.read_bytes()


@pytest.mark.slow
def test_a_packages_placements_are_listed_with_the_others(folder, tmp_path_factory):
    site = tmp_path_factory.mktemp("site")
    source = blocks("python")[0].replace('"mine", title="Mine"', '"theirs", title="From a package"')
    (site / "their_norms.py").write_text(source.replace('placement="mine"', 'placement="theirs"'), encoding="utf-8")
    info = site / "their_norms-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: their-norms\nVersion: 1.0\n", encoding="utf-8")
    (info / "entry_points.txt").write_text("[lamina.placements]\ntheirs = their_norms\n", encoding="utf-8")
    listed = run("placements", cwd=folder, path=[site])
    assert listed.returncode == 0, listed.stderr
    assert re.search(r"^theirs +From a package +y = alpha x", listed.stdout, re.M)
    assert re.search(r"^pre_ln ", listed.stdout, re.M)
    assert "theirs" not in run("placements", cwd=folder).stdout
    lamina.build(llama(), "mine.py", norm="clipped").save_pretrained(folder / "model")
    (site / "their_norms.py").write_text("\n".join([source, blocks("python")[1]]), encoding="utf-8")
    assert run("placements", "--of", "model", cwd=folder, path=[site]).returncode == 0
    without = run("placements", "--of", "model", cwd=folder)
    assert without.returncode == 2
    assert "For your own norm, import the norm's module first, or install its package." in without.stderr
    shown = run("placements", "theirs(alpha=0.5)", cwd=folder, path=[site])
    assert "From a package (theirs)" in shown.stdout
    assert "alpha (float; default 1.0)" in shown.stdout


def test_the_initialization_shown_is_the_plans(capsys):
    """Admin with omegas of its own is not profiled, which would overwrite them."""
    for spec, name in (("admin", "admin"), ("admin(omega=log)", "normal")):
        assert main(["placements", spec]) == 0
        assert f"Initialization: {name}\n" in capsys.readouterr().out
