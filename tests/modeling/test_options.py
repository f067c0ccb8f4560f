"""No option and no field that nothing reads: each changes the logits, the parameters or what they start from."""

import dataclasses
from itertools import combinations
from typing import Literal, get_args, get_origin

import pytest
import torch
from tiny import llama, token_ids

import lamina
from lamina.errors import UserError
from lamina.placements import Layer, Norm, Plan, Sublayer, get, names, resolve

NEEDS = {
    "groups": {"norm": "group"},
    "size": {"wiring": "identity_hc"},
    "base_depth": {"depth_scaling": "completep"},  # neither is taken alone
    "depth_scaling": {"base_depth": 2},
    "temperature": {"start": 0.25},
}
VALUES = {"wiring": ["x0", "hc"]}
REFUSED = {"depth_scaling", "base_depth"}  # by placements whose norms or skips act on the stream
WITHOUT_NORMS = {"rezero", "skipinit"}
NUM_LAYERS = 4


def fingerprint(placement, **options):
    """The parameters' names and initial values, and the logits of a model whose parameters are all of order one."""
    torch.manual_seed(0)
    model = lamina.build(llama(NUM_LAYERS), placement, **options).eval()
    start = {key: parameter.detach().clone() for key, parameter in model.named_parameters()}
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim > 1:
                parameter.mul_(10)
        return start, model(input_ids=token_ids()).logits


def differ(one, other):
    same_names = one[0].keys() == other[0].keys()
    return not (
        same_names and all(torch.equal(v, other[0][k]) for k, v in one[0].items()) and torch.equal(one[1], other[1])
    )


def values(hint):
    """Values of an option's type, some of which it may refuse."""
    if get_origin(hint) is Literal:
        return list(get_args(hint))
    if hint in (bool, int, float, str):
        return {bool: [True, False], int: [1, 2, 4], float: [0.5, 1.75, 0.25], str: ["1/2"]}[hint]
    return [value for kind in get_args(hint) if kind is not type(None) for value in values(kind)]


def takes(name, option, value, needs):
    try:
        resolve(name, NUM_LAYERS, **needs, **{option: value})
    except UserError:
        return False
    return True


@pytest.mark.parametrize(
    ("name", "option"), [(n, o) for n in names() for o in get(n).all_options()], ids=lambda x: getattr(x, "name", x)
)
def test_every_option_of_every_placement_is_read(name, option):
    own = option.name == "groups" and "groups" in {o.name for o in get(name).options}
    needs = {} if own else NEEDS.get(option.name, {})
    tried = VALUES.get(option.name) or values(option.type)
    taken = [{**needs, option.name: value} for value in tried if takes(name, option.name, value, needs)]
    if option.name in REFUSED and (not taken or name == "rezero"):  # its factor of 0 stays 0
        return
    before = fingerprint(name, **({} if option.name in REFUSED else needs))
    if name in WITHOUT_NORMS and option.name in ("norm", "groups"):
        assert not any(differ(before, fingerprint(name, **options)) for options in taken)
        return
    assert any(differ(before, fingerprint(name, **options)) for options in taken)


@pytest.mark.parametrize(
    ("name", "option"),
    [(n, o) for n in names() for o in get(n).options if o.type is bool or get_origin(o.type) is Literal],
    ids=lambda x: getattr(x, "name", x),
)
def test_every_value_of_a_placements_own_switch_gives_another_model(name, option):
    prints = {value: fingerprint(name, **{option.name: value}) for value in values(option.type)}
    for one, other in combinations(prints, 2):
        assert differ(prints[one], prints[other]), (one, other)


SUBLAYER = {
    "pre_norm": Norm(), "out_norm": Norm(), "post_norm": Norm(), "skip": "block_input", "skip_scale": 2.0,
    "skip_scale_learned": "scalar", "pre_scale": 2.0, "pre_scale_learned": "vector", "weight_gain": 0.5,
    "gate_gain": 0.5, "out_scale": 2.0, "out_scale_learned": "scalar", "coupling": "lerp",
    "gate_temperature": 0.5, "inner_norm": Norm(),
}  # fmt: skip
BESIDE = {"gate_temperature": {"coupling": "lerp", "out_scale": 0.25, "out_scale_learned": "scalar"}}
OF_PLANS = {"streams", "read"}  # they need the plan's other ends: test_streams.py
NORM = {
    "kind": "layer",
    "learnable_gain": False,
    "initial_gain": 0.5,
    "groups": 4,
    "zero_centered": True,
    "alpha": 0.25,
}
KINDS = {"groups": "group", "alpha": "dyt"}


def plan_of(sublayer, **changes):
    layers = (Layer(attention=Sublayer(), feed_forward=sublayer),) * NUM_LAYERS
    return Plan(placement="mine", layers=layers, initialization="deepnorm", **changes)


@pytest.mark.parametrize("field", [f.name for f in dataclasses.fields(Sublayer) if f.name not in OF_PLANS])
def test_every_field_of_a_sublayer_is_read(field):
    beside = BESIDE.get(field, {})
    changed = Sublayer(**beside, **{field: SUBLAYER[field]})
    assert differ(fingerprint(plan_of(Sublayer(**beside))), fingerprint(plan_of(changed)))


@pytest.mark.parametrize("position", ["pre_norm", "out_norm", "post_norm", "final_norm", "embedding_norm"])
@pytest.mark.parametrize("field", [f.name for f in dataclasses.fields(Norm)])
def test_every_field_of_a_norm_is_read_at_every_position(field, position):
    norm = Norm(kind=KINDS.get(field, "rms"))
    changed = dataclasses.replace(norm, **{field: NORM[field]})

    def plan(norm):
        if position in ("final_norm", "embedding_norm"):
            return plan_of(Sublayer(), **{position: norm})
        return plan_of(Sublayer(**{position: norm}))

    assert differ(fingerprint(plan(norm)), fingerprint(plan(changed)))


@pytest.mark.parametrize("learned", ["scalar", "vector"])
def test_learned_scales_start_where_the_plan_says(learned):
    sublayer = Sublayer(skip_scale=3, skip_scale_learned=learned, pre_scale=0.5, pre_scale_learned=learned)
    residual = lamina.build(llama(NUM_LAYERS), plan_of(sublayer)).model.layers[1].feed_forward
    shape = () if learned == "scalar" else (32,)
    assert torch.equal(residual.skip_scale, torch.full(shape, 3.0))
    assert torch.equal(residual.pre_scale, torch.full(shape, 0.5))
    assert isinstance(residual.skip_scale, torch.nn.Parameter)


@pytest.mark.parametrize("kind", ["rms", "layer", "group"])
@pytest.mark.parametrize("learnable", [True, False])
def test_a_gain_that_is_a_whole_number_is_a_number(kind, learnable):
    """Whole numbers are what a YAML file holds."""
    norm = Norm(kind=kind, initial_gain=2, learnable_gain=learnable)
    with_float = dataclasses.replace(norm, initial_gain=2.0)
    assert not differ(
        fingerprint(plan_of(Sublayer(out_norm=norm))), fingerprint(plan_of(Sublayer(out_norm=with_float)))
    )


def test_groups_that_do_not_divide_the_width_are_refused():
    with pytest.raises(UserError, match=r"groups: 5 .* 32"):
        lamina.build(llama(2), "pre_ln", norm="group", groups=5)
