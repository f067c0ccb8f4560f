"""The reliability suites: of each some cases in every run of the tests, and with --slow markers the whole of it.

And that every tool runs as its docstring says: as a module, from the repository's root.
"""

import os
import random
import subprocess
import sys
from pathlib import Path

import pytest

from lamina.training.monitor.writers import LayersWriter
from tools.reliability import (
    bad_calls,
    bad_files,
    bad_values,
    command_lines,
    damaged_files,
    families,
    kills,
    models,
    stages,
    watched,
)
from tools.reliability.record import RIGHT

WHOLE = {  # of each suite its cases, how many there are at least, and their groups
    "command_lines": (lambda: command_lines.suite(700, 11), 500, None),
    "damaged_files": (lambda: damaged_files.suite(230, 1), 230, {kind for _, kind, _ in damaged_files.SHARES}),
    "families": (lambda: families.suite(0, 0), 100, None),
    "kills": (lambda: kills.suite(104, 1), 100, set(kills.CONFIGURATIONS)),
    "models": (lambda: models.suite(240, 1), 240, None),
}


ROOT = Path(__file__).parents[2]


def test_every_tool_finds_what_it_imports():
    """In a process of its own, which has the repository's root on its path and not the folder of the tests."""
    names = [f"tools.{path.parent.name}.{path.stem}" for path in sorted((ROOT / "tools").glob("*/*.py"))]
    code = f"import importlib\nfor name in {names}:\n    assert importlib.import_module(name).__doc__, name"
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


def faults(cases):
    return [f"{case.outcome}: {case.group}: {case.name}: {case.detail}" for case in cases if case.outcome != RIGHT]


@pytest.mark.parametrize("name", list(bad_values.BASE))
def test_every_commands_flags_are_read_off_its_own_parser(name):
    found = bad_values.options(name)
    assert name == "backbones" or len(found) > 1
    kinds = {bad_values.kind_of(option) for option in found}
    assert kinds <= {int, float, str, bool}


def test_the_judge_sees_each_kind_of_fault(tmp_path):
    bad = command_lines.Bad("values", ["pretrain", "--steps=x"], ("steps",))
    before = command_lines.snapshot(tmp_path)

    def outcome(code, out, err):
        return command_lines.judge(bad, code, out, err, tmp_path, before, 0.0).outcome

    good = "lamina: --steps: 'x'. Give a whole number.\n"
    assert outcome(2, "", good) == "right"
    assert outcome(0, "done", "") == "silent difference"
    assert outcome(1, "", "Traceback (most recent call last)\n") == "traceback"
    assert outcome(None, "", "") == "hung"
    wrong = [(1, "", good), (2, "", ""), (2, "", good * 2), (2, "", "lamina: no\n"), (2, "\x1b[1m", good)]
    wrong.append((2, "", good.replace("x", "\u202e")))
    assert {outcome(*case) for case in wrong} == {"wrong number"}
    (tmp_path / "out").write_text("")
    assert outcome(2, "", good) == "lost"


@pytest.fixture(scope="module")
def prepared(tmp_path_factory):
    folder = tmp_path_factory.mktemp("bad").resolve()
    bad_files.prepare(folder)
    return folder


def test_a_sample_of_bad_command_lines(prepared):
    drawn = random.Random(5)
    bads = list(command_lines.cases(prepared, drawn))
    assert len(bads) > 1500
    drawn.shuffle(bads)
    with command_lines._inside(prepared):
        before = command_lines.snapshot(prepared)
        sample = [bad for bad in bads if not bad.process and "generate" not in bad.argv][:40]
        assert not faults(command_lines.within(bad, prepared, before) for bad in sample)
        assert not faults(bad_calls.suite(prepared, drawn, 20))


@pytest.mark.slow
@pytest.mark.parametrize("name", WHOLE)
def test_every_case_of_a_suite_is_right(name):
    suite, count, groups = WHOLE[name]
    cases = list(suite())
    assert len(cases) >= count
    assert groups is None or {case.group for case in cases} == groups
    assert not faults(cases)


@pytest.mark.parametrize("family", ["qwen3_moe", "gpt2", "deberta-v2"])
def test_probes_of_a_family_equal_plain_formulas(family):
    cases = families.cases_of(family)
    assert not faults(cases)
    assert len(cases) >= 11


@pytest.mark.parametrize("family", ["xlnet", "squeezebert", "hiera", "swin", "t5"])
def test_what_is_no_stream_of_tokens_is_refused_as_a_whole(family):
    (case,) = families.cases_of(family)
    assert case.group == "refused as a whole"
    assert not faults([case])


def test_two_kills_change_nothing():
    cases = list(kills.suite(2, 0, ("plain",)))
    assert len(cases) == 2
    assert not faults(cases)


def test_a_killed_watched_loop_keeps_its_rows_and_goes_on():
    cases = list(kills.suite(2, 3, ("a watched loop",)))
    assert len(cases) == 2
    assert not faults(cases)


def test_the_suite_sees_rows_that_are_other_or_gone_without_a_word(tmp_path):
    def left(name, steps, log="", value=0.5):
        writer = LayersWriter((tmp_path / name).mkdir() or tmp_path / name)
        writer.add([(step, 0, "block", "block", 0, "step_loss", value) for step in steps])
        writer.flush()
        (tmp_path / name / "metrics.jsonl").write_text("")
        (tmp_path / name / "result.json").write_text('{"status": "finished"}')
        (tmp_path / f"{name}.log").write_text(log)
        return tmp_path / name

    whole = left("whole", [1, 2, 3])
    assert watched.faults_at_the_end(left("same", [1, 2, 3]), whole) == ""
    assert watched.faults_at_the_end(left("gap", [1, 3]), whole) == "rows of steps [2] are missing, and no line says so"
    assert watched.faults_at_the_end(left("told", [1, 3], "records by layer of steps 2 to 2 are missing"), whole) == ""
    assert watched.faults_at_a_kill(left("other", [1, 2], value=0.6), whole) == "other rows at steps [1, 2]"


def test_the_job_of_every_configuration_is_there():
    assert all(callable(stages.job_named(how["job"])) for how, _ in kills.CONFIGURATIONS.values() if "job" in how)


def test_a_broken_model_is_one_line_or_the_model_as_it_is():
    cases = list(models.suite(25, 1))
    assert len(cases) == 25
    assert not faults(cases)
