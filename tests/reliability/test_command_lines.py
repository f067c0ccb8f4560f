"""A fast sample of the bad command lines, and with --slow markers the whole suite with another seed."""

import pytest
from reliability import bad_calls, bad_files, bad_values, command_lines


def faults(cases):
    return [f"{case.outcome}: {case.group}: {case.name}: {case.detail}" for case in cases if case.outcome != "right"]


@pytest.mark.parametrize("name", list(bad_values.BASE))
def test_every_commands_flags_are_read_off_its_own_parser(name):
    found = bad_values.actions(name)
    assert name == "backbones" or len(found) > 1
    kinds = {bad_values.kind_of(action) for action in found}
    assert kinds <= {int, float, str, bool}


def test_the_judge_sees_each_kind_of_fault(tmp_path):
    bad = command_lines.Bad("values", ["pretrain", "--steps=x"], ("steps",))
    before = command_lines.snapshot(tmp_path)

    def outcome(code, out, err):
        return command_lines.judge(bad, code, out, err, tmp_path, before, 0.0).outcome

    good = "lamina: --steps: 'x' (allowed: a whole number)\n"
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
    import random

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
def test_all_groups_of_bad_command_lines():
    assert not faults(command_lines.suite(700, 11))
