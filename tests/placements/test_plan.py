"""The plan as data: it goes to JSON and comes back, and refuses invalid values."""

import dataclasses
import json

import pytest

from lamina.errors import UserError
from lamina.placements import Layer, Norm, Plan, Sublayer, get, names, resolve

COMMON = [
    {},
    {"final_norm": True, "embedding_scale": "sqrt_hidden_size", "norm": "layer"},
    {"final_norm": False, "embedding_norm": True, "embedding_scale": 2.5},
    {"norm": "group", "groups": 4, "qk_norm": "head", "v_norm": "full"},
]


def back_from_json(plan):
    return Plan.from_dict(json.loads(json.dumps(plan.to_dict(), allow_nan=False)))


def plan_of(**changes):
    return {"placement": "mine", "layers": [{"attention": {"pre_norm": True}}], **changes}


@pytest.mark.parametrize("options", COMMON, ids=str)
@pytest.mark.parametrize("name", names())
def test_a_plan_comes_back_from_json_equal(name, options):
    own = {option.name for option in get(name).options}
    options = {k: v for k, v in options.items() if not (k == "groups" and k in own)}
    plan = resolve(name, 5, **options)
    assert back_from_json(plan) == plan


@pytest.mark.parametrize("name", names())
def test_a_plan_comes_back_equal_with_every_value_of_its_own_switches(name):
    for option in get(name).options:
        choices = {"bool": [True, False]}.get(option.type_name, [])
        choices = choices or [eval(c) for c in option.type_name.split(" | ") if c.startswith("'")]
        for value in choices:
            plan = resolve(name, 5, **{option.name: value})
            assert plan.options == {option.name: value}
            assert back_from_json(plan) == plan


@pytest.mark.parametrize("record", [Norm(), Sublayer(), Layer(), Plan(placement="mine", layers=(Layer(),))])
def test_records_cannot_be_changed_and_take_keywords_only(record):
    field = dataclasses.fields(record)[0].name
    with pytest.raises(dataclasses.FrozenInstanceError):
        setattr(record, field, None)
    with pytest.raises(TypeError):
        type(record)(getattr(record, field))


@pytest.mark.parametrize("name", names())
def test_kinds_are_the_distinct_layers_and_name_every_index_once(name):
    plan = resolve(name, 6)
    kinds = plan.kinds()
    assert sorted(i for _, indices in kinds for i in indices) == list(range(6))
    assert len({layer for layer, _ in kinds}) == len(kinds)
    assert [indices[0] for _, indices in kinds] == sorted(indices[0] for _, indices in kinds)
    assert all(plan.layers[i] == layer for layer, indices in kinds for i in indices)


@pytest.mark.parametrize(
    ("data", "path", "suggestion"),
    [
        (plan_of(final_nrom=True), "plan", "final_norm"),
        (plan_of(layers=[{"atention": {}}]), "plan.layers[0]", "attention"),
        (plan_of(layers=[{}, {"feed_forward": {"postnorm": True}}]), "plan.layers[1].feed_forward", "post_norm"),
        (plan_of(layers=[{"attention": {"pre_norm": {"kindd": "rms"}}}]), "plan.layers[0].attention.pre_norm", "kind"),
        (plan_of(embedding_norm={"group": 2}), "plan.embedding_norm", "groups"),
    ],
)
def test_an_unknown_field_is_named_with_its_path_and_the_nearest(data, path, suggestion):
    with pytest.raises(UserError) as error:
        Plan.from_dict(data)
    assert str(error.value).startswith(f"{path}: unknown field")
    assert f"did you mean '{suggestion}'" in str(error.value)


def _attention(**fields):
    return plan_of(layers=[{"attention": fields}])


def _streams(readout=(), **fields):
    one = {"weights": "learned", "read": [1.0, 0.0], "write": [1.0, 1.0], **fields}
    layer = {half: {"streams": one} for half in ("attention", "feed_forward")}
    return plan_of(layers=[layer], readout={"weights": "learned", "read": [1, 1], **dict(readout)})


@pytest.mark.parametrize(
    ("data", "mentions"),
    [
        (_attention(skip="block_input"), ["attention.skip", "'block_input'", "'stream'"]),
        (_attention(skip="both"), ["attention.skip", "'both'", "'stream'"]),
        (
            _attention(skip="sideways"),
            ["layers[0].attention.skip", "'sideways'", "'stream'", "'block_input'", "'both'"],
        ),
        (_attention(pre_norm={"groups": 4}), ["pre_norm", "groups", "4", "'group'"]),
        (_attention(pre_norm={"kind": "rms", "groups": 2}), ["groups", "2", "'group'", "'rms'"]),
        (_attention(pre_norm={"kind": "group", "groups": 0}), ["groups", "0", "at least 1"]),
        (_attention(pre_norm={"kind": "group", "groups": 2.0}), ["groups", "2.0"]),
        (_attention(pre_norm={"kind": "batch"}), ["kind", "'batch'", "'rms'", "'layer'"]),
        (_attention(pre_norm="batch"), ["pre_norm", "kind", "'batch'", "'rms'"]),
        (_attention(pre_norm=3), ["pre_norm", "3"]),
        (_attention(pre_norm={"learnable_gain": "yes"}), ["learnable_gain", "'yes'"]),
        (_attention(pre_norm={"initial_gain": "1"}), ["initial_gain", "'1'"]),
        (_attention(skip_scale="big"), ["skip_scale", "'big'", "number"]),
        (_attention(skip_scale=float("nan")), ["skip_scale", "nan", "finite"]),
        (_attention(pre_scale=True), ["pre_scale", "True", "number"]),
        (_attention(out_scale=float("inf")), ["out_scale", "inf", "finite"]),
        (_attention(out_scale_learned="matrix"), ["out_scale_learned", "'matrix'", "'scalar'", "'vector'"]),
        (_attention(coupling="sum"), ["coupling", "'sum'", "'lerp'", "'variance'"]),
        (_attention(coupling="lerp", skip_scale=2.0), ["coupling", "'lerp'", "skip_scale"]),
        (_attention(coupling="lerp", out_scale=1.5), ["out_scale", "1.5", "0 to 1"]),
        (_attention(coupling="variance", out_scale_learned="vector"), ["out_scale", "1.0", "above 0 and below 1"]),
        (_attention(coupling="lerp", gate_temperature=0), ["gate_temperature", "0", "above 0"]),
        (_streams(read=3), ["streams.read", "3", "list"]),
        (_streams(read=[1.0]), ["read", "'read' has 1 weights", "at least 2"]),
        (_streams(magnitude="2"), ["magnitude", "'2'", "number"]),
        (_streams(eps=-1e-6), ["eps", "-1e-06", "at least 0"]),
        (_streams(transposed=1), ["transposed", "1", "true or false"]),
        (_attention(pre_norm={"eps": "small"}), ["eps", "'small'", "at least 0"]),
        (_streams(weights="gate"), ["rank", "0", "at least 1"]),
        (_streams(write=[]), ["streams.write", "no weights are given", "as many"]),
        (_streams({"write": [1.0, 1.0]}), ["readout", "no block follows", "'write' and 'mix'"]),
        (plan_of(layers=[{"sources": {"states": 0}}]), ["layers[0].sources.states", "0", "list"]),
        *(
            (plan_of(layers=[{"sources": {"states": [state]}}]), ["sources.states", repr(state), "pairs"])
            for state in (["a", 1.0], [0], [0, 1.0, 2.0], [0.5, 1.0])
        ),
        (plan_of(layers=[{"boundary": "first"}]), ["boundary", "'first'", "true or false"]),
        (_attention(read="depth"), ["read", "'depth'", "boundary"]),
        (
            plan_of(layers=[{"attention": {"read": "depth"}, "boundary": True}], final_sources={"states": [[0, 1.0]]}),
            ["read", "'depth'", "final_sources"],
        ),
        (_attention(pre_scale_learned="matrix"), ["pre_scale_learned", "'matrix'", "'scalar'", "'vector'"]),
        (plan_of(layers=[]), ["layers", "at least one"]),
        (plan_of(layers=4), ["layers", "4", "list"]),
        (plan_of(layers={"attention": {}}), ["layers", "list"]),
        (plan_of(layers=["pre_ln"]), ["layers[0]", "'pre_ln'", "mapping"]),
        (plan_of(layers=[{"attention": True}]), ["layers[0].attention", "True", "mapping"]),
        (plan_of(final_norm=1), ["final_norm", "1"]),
        (plan_of(embedding_scale="huge"), ["embedding_scale", "'huge'", "sqrt_hidden_size"]),
        (plan_of(qk_norm="heads"), ["qk_norm", "'heads'", "'head'", "'full'"]),
        (plan_of(v_norm=True), ["v_norm", "True", "'off'"]),
        (plan_of(initialization=3), ["initialization", "3"]),
        (plan_of(options=["final_norm"]), ["options", "final_norm"]),
        ({"layers": [{}]}, ["placement", "missing"]),
        ({"placement": "mine"}, ["layers", "missing"]),
        (["pre_ln"], ["plan", "mapping"]),
    ],
)
def test_what_has_no_meaning_is_refused_by_field_value_and_what_is_allowed(data, mentions):
    with pytest.raises(UserError) as error:
        Plan.from_dict(data)
    for mention in mentions:
        assert mention in str(error.value)


@pytest.mark.parametrize(
    "build",
    [lambda: Layer(attention=None), lambda: Sublayer(streams=4), lambda: Plan(placement="mine", layers=("pre_ln",))],
)
def test_records_of_the_wrong_type_are_refused_in_python_too(build):
    with pytest.raises(UserError):
        build()


def test_true_a_kind_and_the_fields_of_a_norm_say_the_same():
    assert len({Sublayer(pre_norm=w) for w in (True, "backbone", Norm(kind="backbone"), Norm())}) == 1
    assert Sublayer(pre_norm=False) == Sublayer(pre_norm=None) == Sublayer()


def test_norms_lists_those_that_are_there_by_position():
    assert Sublayer(pre_norm=True, post_norm="layer").norms == {"pre_norm": Norm(), "post_norm": Norm(kind="layer")}
