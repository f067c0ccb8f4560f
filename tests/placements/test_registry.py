"""The registry: names, options and the plans that they resolve to."""

from dataclasses import replace

import pytest

from lamina.errors import UserError
from lamina.placements import Layer, Norm, Plan, Sublayer, get, names, placement, registry, resolve
from lamina.placements.resolution import map_norms

# Read off the papers, not off the code: Mix-LN's, Pre-LN's and Post-LN's own main runs are plain.
INITIALIZATIONS = {**dict.fromkeys(("mix_ln", "pre_ln", "post_ln", "peri_ln", "keel", "layernorm_scaling"), "normal")}
INITIALIZATIONS |= {**dict.fromkeys(("hybridnorm", "hybridnorm_star"), "small_scaled")}
INITIALIZATIONS |= {"fusenorm": "scaled", "deepnorm": "deepnorm", "admin": "admin"}


@pytest.fixture
def registry_as_before():
    with registry.PLACEMENTS.isolated():
        yield


def norms_of(plan):
    ends = [n for n in (plan.final_norm, plan.embedding_norm) if n is not None]
    return ends + [n for x in plan.layers for s in (x.attention, x.feed_forward) for n in s.norms.values()]


@pytest.mark.parametrize("name", names())
def test_a_placement_says_what_it_is(name):
    scheme = get(name)
    assert scheme.title
    assert scheme.equation
    assert scheme.source
    assert scheme.advice
    assert scheme.description
    for option in scheme.all_options():
        assert option.help, option.name
        assert option.type_name, option.name


@pytest.mark.parametrize(("name", "initialization"), INITIALIZATIONS.items())
def test_the_recommended_initialisation_is_that_of_the_papers_main_runs(name, initialization):
    assert get(name).initialization == initialization


@pytest.mark.parametrize("name", names())
def test_the_defaults_of_an_option_are_values_that_it_takes(name):
    for option in get(name).options:
        option.check(name, option.default)
        with pytest.raises(UserError, match=f"option '{option.name}'"):
            option.check(name, object())


@pytest.mark.parametrize("num_layers", [0, -1, 2.0, "4", True])
def test_a_depth_with_no_meaning_is_refused(num_layers):
    with pytest.raises(UserError, match="num_layers"):
        resolve("pre_ln", num_layers)


@pytest.mark.parametrize("kind", ["rms", "layer", "group"])
@pytest.mark.parametrize("name", names())
def test_the_norm_option_changes_every_norm_of_the_plan_and_nothing_else(name, kind):
    groups = {"groups": 4} if kind == "group" else {}
    plan = resolve(name, 3, norm=kind, **groups, final_norm=True, embedding_norm=True)
    assert {(n.kind, n.groups) for n in norms_of(plan)} == {(kind, groups.get("groups", 1))}
    before = resolve(name, 3, final_norm=True, embedding_norm=True)
    back = map_norms(plan, lambda norm: replace(norm, kind="backbone", groups=1))
    assert back.layers == map_norms(before, lambda norm: replace(norm, kind="backbone", groups=1)).layers


@pytest.mark.parametrize("name", names())
def test_an_option_that_is_none_is_the_default(name):
    options = {option.name: None for option in get(name).all_options() if "None" in option.type_name}
    assert replace(resolve(name, 4, **options), options={}) == resolve(name, 4)


@pytest.mark.usefixtures("registry_as_before")
def test_a_registered_function_is_a_placement_with_its_keywords_as_options():
    @placement("mine_ln", title="Mine", equation=("y = x",), source="here")
    def mine_ln(num_layers: int, *, strength: float = 2.0) -> Plan:
        """What it does.

        Args:
            strength: of the skip, which
                goes on here.
        """
        sublayer = Sublayer(pre_norm=Norm(), skip_scale=strength)
        return Plan(placement="", layers=(Layer(attention=sublayer, feed_forward=sublayer),) * num_layers)

    assert "mine_ln" in names()
    (option,) = get("mine_ln").options
    assert (option.name, option.type_name, option.default) == ("strength", "float", 2.0)
    assert option.help == "of the skip, which goes on here."
    plan = resolve("mine_ln", 2, strength=3)
    assert plan.placement == "mine_ln"
    assert plan.layers[1].feed_forward.skip_scale == 3


@pytest.mark.usefixtures("registry_as_before")
def test_a_scheme_with_a_plan_of_another_depth_is_refused():
    @placement("wrong_depth", title="", equation=(), source="")
    def wrong_depth(num_layers: int) -> Plan:
        return Plan(placement="", layers=(Layer(),))

    with pytest.raises(UserError, match=r"1 layers, but num_layers is 2"):
        resolve("wrong_depth", 2)
