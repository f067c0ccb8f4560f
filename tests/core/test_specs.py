"""Specs: ``name(option=value, ...)`` for placements, probes and initializers, and lists of them."""

import pytest

from lamina.core import specs
from lamina.errors import UserError


@pytest.mark.parametrize(
    ("text", "options"),
    [
        ("name", {}),
        (" name ( ) ", {}),
        ("name(a=1, b=true)", {"a": 1, "b": True}),
        ("name(a=1e-3, b=1/3, c=off, d=)", {"a": 1e-3, "b": "1/3", "c": False, "d": None}),
        ("name(layers=[0, 3], b=2)", {"layers": [0, 3], "b": 2}),
        ("name(table={a: 1, b: [2, 3]})", {"table": {"a": 1, "b": [2, 3]}}),
        ("name(text='a, b', b=2)", {"text": "a, b", "b": 2}),
        ('name(text="a), (b")', {"text": "a), (b"}),
        ("name(texts=['a, b', \"c, d\"])", {"texts": ["a, b", "c, d"]}),
        ("name(text=it's, b=don't)", {"text": "it's", "b": "don't"}),
        ("name(a=(1, 2), b=3)", {"a": "(1, 2)", "b": 3}),
    ],
)
def test_a_value_may_hold_a_comma_inside_brackets_or_quotes(text, options):
    assert specs.parse(text, "placement") == ("name", options)


@pytest.mark.parametrize("text", ["", "a(b", "a)b=1(", "a(b=1)c", "a(b)", "a(b=[1)", "a(b='1)", "a(b={1, c=2)"])
def test_a_spec_of_another_form_is_refused_with_what_it_should_name(text):
    with pytest.raises(UserError, match=r"^probe ") as error:
        specs.parse(text, "probe")
    assert repr(text) in str(error.value)


@pytest.mark.parametrize(
    ("text", "parts"),
    [
        ("a, b(c=1, d=2),e,", ["a", "b(c=1, d=2)", "e"]),
        ("a(b=[1, 2]), c(d='x, y)'), e", ["a(b=[1, 2])", "c(d='x, y)')", "e"]),
        ("bob's.yaml, runs[1].yaml, {x}.yaml", ["bob's.yaml", "runs[1].yaml", "{x}.yaml"]),
        ("", []),
        (" , ", []),
    ],
)
def test_a_list_is_split_outside_brackets_and_quotes(text, parts):
    assert specs.split(text, "placement") == parts


def test_a_list_that_is_no_text_is_refused():
    with pytest.raises(UserError, match=r"probes: 3 \(allowed"):
        specs.split(3, "probe")
