"""The settings records: every field said once, its flag, key, check and command line derived from that."""

import importlib
import inspect
import math
import pkgutil
from dataclasses import MISSING, fields
from typing import Literal, get_args

import pytest

import lamina
from lamina.errors import UserError
from lamina.jobs.settings import Settings, at_least, changed, setting
from lamina.preflights.settings import PreflightSettings
from lamina.probes.engine.probe_settings import ProbeSettings
from lamina.studies.settings import CompareSettings, CoordCheckSettings, TransferSettings
from lamina.training.settings import PretrainSettings

# Two quantities with one name: an exponent of the width, and a relative standard error.
HOMONYMS = {"tolerance"}
RECORDS = (PretrainSettings, CompareSettings, TransferSettings, CoordCheckSettings, PreflightSettings, ProbeSettings)


def test_no_field_is_declared_twice():
    """A class may give an inherited field another default, through ``changed`` and in no other way."""
    first: dict[str, list[str]] = {}
    for cls in {cls for record in RECORDS for cls in record.__mro__ if issubclass(cls, Settings)}:
        for name in {entry.name for entry in fields(cls)} & set(inspect.get_annotations(cls)):
            inherited = [base for base in cls.__mro__[1:] if name in getattr(base, "__dataclass_fields__", {})]
            is_changed = cls.__dataclass_fields__[name].metadata.get("changed", False)
            assert is_changed == bool(inherited), f"{cls.__name__}.{name}"
            if not is_changed:
                first.setdefault(name, []).append(cls.__name__)
            assert "help" in cls.__dataclass_fields__[name].metadata, f"{cls.__name__}.{name}"
    assert {name for name, names in first.items() if len(names) > 1} == HOMONYMS


@pytest.mark.parametrize("record", RECORDS)
def test_the_nearest_class_decides_on_a_default(record):
    """Where a group is inherited on two ways dataclasses may take the farther one's field."""
    for entry in fields(record):
        owner = next(cls for cls in record.__mro__ if entry.name in inspect.get_annotations(cls))
        own = owner.__dataclass_fields__[entry.name]
        assert (entry.default is MISSING) == (own.default is MISSING)
        assert entry.default is MISSING or entry.default == own.default


@pytest.mark.parametrize("record", RECORDS)
def test_a_record_comes_back_from_its_dictionary(record):
    settings = record(checkpoint="x") if record is ProbeSettings else record()
    assert record.from_dict(settings.to_dict()) == settings
    assert set(settings.to_dict()) == set(record.names())


@pytest.mark.parametrize("record", RECORDS)
def test_an_unknown_name_is_refused_with_the_nearest(record):
    with pytest.raises(UserError, match="unknown setting 'sequence_lenght'; did you mean 'sequence_length'"):
        record.from_dict({"sequence_lenght": 3})


class Steps(Settings):
    steps: int = setting(100, "steps", at_least(1))
    mode: Literal["slow", "fast"] = setting("slow", "slow or fast")
    extra: bool = setting(False, "a switch")


class Job(Steps):
    command_name = "job"
    without = frozenset({"extra"})
    order = ("name", "mode")

    steps: int = changed(7)
    name: str = setting("x", "a name")
    options: dict[str, object] = setting({}, "options")


def test_a_changed_field_keeps_its_check_and_its_help():
    assert Job().steps == Job.default("steps") == 7
    assert Job.help("steps") == "steps"
    with pytest.raises(UserError, match=r"steps: 0\. Give a whole number of at least 1"):
        Job(steps=0)


def test_a_closed_set_is_checked_by_its_type():
    with pytest.raises(UserError, match=r"mode: 'fst'; did you mean 'fast'\? \(allowed: slow, fast\)"):
        Job(mode="fst")  # type: ignore[arg-type]


def test_a_field_that_is_not_offered_has_no_key_and_no_other_value():
    assert "extra" not in Job().to_dict()
    with pytest.raises(UserError, match="unknown setting 'extra'"):
        Job.from_dict({"extra": True})
    with pytest.raises(UserError, match="unknown setting 'extra'"):
        Job(extra=True)


def test_the_order_is_that_of_the_bases_after_the_names_that_come_first():
    assert Job.names() == ("name", "mode", "steps", "options")


def test_the_command_line_says_what_is_not_at_its_default():
    settings = Job(steps=3, name="a b", options={"k": 1})
    assert settings.command() == "lamina job --name 'a b' --steps 3 --options.k 1"
    assert Job(options={"a": None, "b": True}).command() == "lamina job --options.a none --options.b true"
    assert Steps(extra=True).command().endswith("--extra")


def test_two_records_do_not_share_a_mapping():
    one = Job()
    one.to_dict()["options"]["k"] = 1
    assert Job().options == {} == one.options


def numeric_settings():
    """Each number that any command's settings have: its record, name and kinds."""
    for module in pkgutil.walk_packages(lamina.__path__, "lamina."):
        if "settings" in module.name:
            importlib.import_module(module.name)
    found, records = {}, [Settings]
    for record in records:
        records += record.__subclasses__()
        if record.command_name and record.__module__.startswith("lamina."):
            for name in record.names():
                kinds = set(get_args(record.kind(name)) or (record.kind(name),))
                if kinds & {int, float} and str not in kinds:
                    found.setdefault((name, record.check_of(name)), (record, kinds))
    return [(record, name, kinds) for (name, _), (record, kinds) in found.items()]


NUMERIC = numeric_settings()
SPANS = [(record, name) for record, name, _ in NUMERIC if "fraction of all steps" in record.help(name)]


@pytest.mark.parametrize(("record", "name", "kinds"), NUMERIC)
def test_a_numeric_setting_takes_neither_text_nor_a_boolean_nor_what_is_not_a_number(record, name, kinds):
    meaningless = [True, False, "", "3", math.nan, math.inf, -math.inf, -1, 10**400, *([2.5] if int in kinds else [])]
    for value in meaningless:
        with pytest.raises(UserError, match=rf"^{name}: "):
            record.check_of(name)(name, value)


@pytest.mark.parametrize(("record", "name"), SPANS)
def test_a_span_of_steps_is_a_share_or_a_whole_number(record, name):
    check = record.check_of(name)
    assert [check(name, span) for span in (0.25, 1, 2.0, 100)] == [0.25, 1, 2.0, 100]
    with pytest.raises(
        UserError, match=f"^{name}: 2.5. Give a whole number of steps, or a fraction of all steps \\(below 1\\)"
    ):
        check(name, 2.5)
