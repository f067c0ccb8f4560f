"""What is handed out: the source distribution's tests run, and the types reach a user's own script."""

import json
import os
import shutil
import subprocess
import sys
import tarfile
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
SCRIPT = """
import pandas
from transformers import PreTrainedModel
from typing import assert_type

import lamina
from lamina.placements import Plan, resolve

assert_type(lamina.compare(steps=5), lamina.api.Comparison)
assert_type(lamina.compare(steps=5).results, pandas.DataFrame)
assert_type(lamina.build("llama-nano", "keel"), PreTrainedModel)
assert_type(resolve("keel", 2), Plan)
assert_type(lamina.placements.names(), list[str])
lamina.build(3.5, "keel")
lamina.comapre()
"""


def run(*words, cwd, **more):
    done = subprocess.run([str(w) for w in words], cwd=cwd, capture_output=True, text=True, timeout=1800, **more)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.fixture(scope="module")
def built(tmp_path_factory):
    """The source distribution, and the wheel that is built from it."""
    pytest.importorskip("setuptools", minversion="77")
    folder = tmp_path_factory.mktemp("dist")
    run(sys.executable, "-m", "build", "--no-isolation", "--outdir", folder, cwd=ROOT)
    return folder


@pytest.fixture(scope="module")
def unpacked(built, tmp_path_factory):
    (archive,) = built.glob("*.tar.gz")
    folder = tmp_path_factory.mktemp("unpacked")
    with tarfile.open(archive) as file:
        file.extractall(folder, filter="data")
    (inner,) = folder.iterdir()
    return inner


@pytest.mark.slow
def test_the_source_distribution_holds_every_file_that_its_tests_need(unpacked):
    tracked = run("git", "ls-files", cwd=ROOT).splitlines()
    needed = {name for name in tracked if not name.startswith((".ci/", ".gitignore"))}
    there = {str(path.relative_to(unpacked)) for path in unpacked.rglob("*") if path.is_file()}
    assert needed <= there


@pytest.mark.slow
def test_a_sample_of_the_tests_runs_in_the_source_distribution(unpacked):
    sample = ["tests/placements/test_plan.py", "tests/test_readme.py", "tests/commands/test_public_surface.py"]
    out = run(sys.executable, "-m", "pytest", "-p", "no:cacheprovider", *sample, cwd=unpacked)
    assert " passed" in out


@pytest.mark.slow
def test_the_wheel_has_the_studies_and_not_their_records(built, tmp_path):
    (wheel,) = built.glob("*.whl")
    assert wheel.stat().st_size < 3.5 * 2**20  # 1.9 MB are the corpus and plotly
    with zipfile.ZipFile(wheel) as file:
        assert not [name for name in file.namelist() if "records/" in name or name.endswith(".parquet")]
        file.extractall(tmp_path / "site")
    folder = tmp_path / "site" / "lamina" / "lab" / "papers" / "studies"
    of_repository = {path.relative_to(ROOT / "studies") for path in (ROOT / "studies").rglob("*.yaml")}
    ours = {path for path in of_repository if path.parts[0] != "records"}
    assert {path.relative_to(folder) for path in folder.rglob("*.yaml")} == ours
    words = [sys.executable, "-c", "from lamina.cli import main; main()", "study", "list", "--json"]
    paths = {"PYTHONPATH": str(tmp_path / "site")}
    bare = json.loads(run(*words, cwd=tmp_path, env={**os.environ, **paths}))
    assert {one["verdict"] for one in bare} == {"not run yet"}

    records = tmp_path / "records"  # a build writes beside its sources
    shutil.copytree(ROOT / "studies" / "records", records)
    run(sys.executable, "-m", "build", "--no-isolation", "--wheel", "--outdir", tmp_path, cwd=records)
    (wheel,) = tmp_path.glob("lamina_records*.whl")
    with zipfile.ZipFile(wheel) as file:
        file.extractall(tmp_path / "site")
    recorded = json.loads(run(*words, cwd=tmp_path, env={**os.environ, **paths}))
    assert {one["claim"] for one in bare} <= {one["claim"] for one in recorded}
    assert recorded == json.loads(run(*words, cwd=ROOT, env={**os.environ, "PYTHONPATH": str(ROOT)}))


@pytest.mark.slow
def test_a_users_script_is_checked_against_the_types_of_the_wheel(built, tmp_path):
    (wheel,) = built.glob("*.whl")
    with zipfile.ZipFile(wheel) as file:
        assert "lamina/py.typed" in file.namelist()
        file.extractall(tmp_path / "site")
    (tmp_path / "script.py").write_text(SCRIPT)
    (tmp_path / "pyrightconfig.json").write_text('{"extraPaths": ["site"], "include": ["script.py"]}')
    command = [sys.executable, "-m", "pyright", "--pythonpath", sys.executable]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True)
    errors = [line for line in done.stdout.splitlines() if "- error" in line]
    assert len(errors) == 2, done.stdout  # the number for a backbone, and the misspelled name
    assert '"float"' in errors[0]
    assert '"comapre"' in errors[1]


SMOKE = """
import torch
from transformers import LlamaConfig

import lamina

torch.manual_seed(0)
sizes = {"hidden_size": 16, "intermediate_size": 32, "num_attention_heads": 2, "num_hidden_layers": 2}
model = lamina.build(LlamaConfig(vocab_size=258, **sizes), "keel")
optimizer = torch.optim.AdamW(model.parameters())
with lamina.watch(model, optimizer, output="watched") as monitor:
    for _ in range(3):
        loss = model(input_ids=(rows := torch.randint(0, 258, (2, 8))), labels=rows).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        monitor.step(loss)
model.save_pretrained("model")
"""


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["*.whl", "*.tar.gz"])
def test_what_is_built_works_in_a_clean_environment(built, kind, tmp_path):
    """Outside the checkout: install the wheel or the sdist in a new environment, and type the first commands."""
    (archive,) = built.glob(kind)
    clean = {name: value for name, value in os.environ.items() if not name.startswith(("PYTHON", "VIRTUAL_ENV"))}
    run(sys.executable, "-m", "venv", tmp_path / "venv", cwd=tmp_path)
    python, lamina = (tmp_path / "venv" / "bin" / name for name in ("python", "lamina"))
    words = ["install", "-q", "-c", ROOT / "constraints.txt", f"lamina[train] @ {archive.as_uri()}"]
    run(python, "-m", "pip", *words, cwd=tmp_path, env=clean)
    (tmp_path / "smoke.py").write_text(SMOKE)
    run(python, "smoke.py", cwd=tmp_path, env=clean)
    size = "--num-layers 2 --hidden-size 16 --num-heads 2 --sequence-length 16 --batch-size 2 --steps 4"
    for line in (
        "placements keel",
        "placements --of model",
        "diagnose watched",
        "probe model --tokenizer bytes --sequence-length 16 --sequences 4 --output probed",
        f"compare --placements pre_ln,keel --seeds 0 {size} --output compared",
        "study list",
    ):
        run(lamina, *line.split(), cwd=tmp_path, env=clean)
    assert (tmp_path / "compared" / "report.html").is_file()
    assert (tmp_path / "probed" / "report.html").is_file()
    where = run(python, "-c", "import lamina; print(lamina.__file__)", cwd=tmp_path, env=clean)
    assert where.startswith(str(tmp_path))
