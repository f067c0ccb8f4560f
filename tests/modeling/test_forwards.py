"""The forward with norms is source that others may read and rewrite: what ``inspect.getsource`` gives is what runs."""

import copy
import functools
import inspect
import linecache
import pickle
import textwrap

import pytest
import torch
from modeling.tiny import built, llama, token_ids
from torch import nn
from transformers.utils.deprecation import deprecate_kwarg

import lamina
from lamina.errors import UserError
from lamina.modeling.forwards_lamina import with_calls
from lamina.modeling.wiring_lamina import NormedProjections
from lamina.placements import Sublayer
from lamina.placements.plan import Layer

FACTOR = 3.0
OPTIONS = [("olmo2", {}), ("hybridnorm", {}), ("subln", {})]
OPTIONS += [("pre_ln", {"v_norm": "head"}), ("pre_ln", {"wiring": "mudd"})]


def changed(module, **more):
    """The module with a class whose forward has the calls."""
    calls = {"before": {}, "after": {"proj": "halved"}, **more}
    methods = {"halved": lambda self, y: y / 2, "doubled": lambda self, x: x * 2}
    module.__class__ = type("Changed", (type(module),), {"forward": with_calls(type(module), **calls), **methods})
    return module


class Plain(nn.Module):
    def __init__(self):
        super().__init__()
        self.proj = nn.Linear(4, 4)

    def forward(self, x, factor=FACTOR, *, shift: "int" = 1):
        """Text over
        two lines, and "quotes".
        """
        pick = lambda y: y * factor  # noqa: E731
        return pick(self.proj(x)) + shift if self.proj is not None else x


class Inherited(Plain):
    pass


class Renamed(Plain):
    @deprecate_kwarg("y", version="99.0", new_name="x")
    def forward(self, x):
        return self.proj(x)


class Twice(Plain):
    __own = 2.0

    def forward(self, x):
        return self.__own * self.proj(x) + super().forward(x)


def of_a_function(scale):
    class Closed(Plain):
        def forward(self, x):
            return scale * self.proj(x)

    return Closed()


@torch.no_grad()
@pytest.mark.parametrize("make", [Plain, Inherited, Renamed, functools.partial(of_a_function, 5.0)])
def test_the_source_is_the_one_that_runs(make):
    torch.manual_seed(0)
    module, x = make(), torch.randn(2, 4)
    before, bias = module(x), float(isinstance(module, Inherited) or type(module) is Plain)
    source = inspect.getsource(type(changed(module)).forward)
    assert "self.halved(self.proj(x))" in source
    torch.testing.assert_close(module(x), (before - bias) / 2 + bias)
    again = inspect.unwrap(type(module).forward)
    assert again.__globals__ is globals()
    assert textwrap.dedent(inspect.getsource(again)) == textwrap.dedent(source)


@torch.no_grad()
def test_a_parents_forward_and_private_names_resolve_as_before():
    torch.manual_seed(0)
    module, x = Twice(), torch.randn(2, 4)
    y, parents = module.proj(x), 3 * module.proj(x) + 1  # the parent's own call stays as it is
    torch.testing.assert_close(changed(module)(x), 2.0 * y / 2 + parents)


@torch.no_grad()
def test_decorators_signatures_and_defaults_stay():
    module, x = changed(Renamed()), torch.randn(2, 4)
    with pytest.warns(FutureWarning, match="y"):
        assert torch.equal(module(y=x), module(x=x))
    forward = type(changed(Plain())).forward
    assert inspect.signature(forward) == inspect.signature(Plain.forward)
    assert forward.__doc__ == Plain.forward.__doc__


def test_inputs_are_changed_before_outputs():
    module = changed(Plain(), before={"proj": "doubled"})
    assert "self.halved(self.proj(self.doubled(x)))" in inspect.getsource(type(module).forward)


def own_class(text, file, **names):
    exec(compile(textwrap.dedent(text), str(file), "exec"), names)
    return names["Own"]


OWN = """
class Own(nn.Module):
    def forward(self, x):
        return self.proj(x)
"""


def test_a_forward_without_source_or_of_a_changed_file_is_refused_in_a_line(tmp_path):
    with pytest.raises(ValueError, match=r"^Own.forward: its source is not available\. [^\n]+$"):
        with_calls(own_class(OWN, "<nowhere>", nn=nn), {}, {"proj": "halved"})
    file = tmp_path / "own.py"
    file.write_text(OWN)
    own = own_class(OWN, file, nn=nn)
    assert "halved(self.proj(x))" in inspect.getsource(with_calls(own, {}, {"proj": "halved"}))
    file.write_text(OWN.replace("self.proj(x)", "self.other(self.proj(x))"))
    linecache.checkcache(str(file))
    with pytest.raises(ValueError, match=r"Own.forward: its source differs from the code that runs"):
        with_calls(own, {}, {"proj": "halved"})


def test_what_does_not_call_the_module_or_hides_its_forward_is_refused():
    with pytest.raises(ValueError, match=r"Plain.forward does not call 'other' itself"):
        with_calls(Plain, {}, {"other": "halved"})
    hidden = type("Hidden", (Plain,), {"forward": lambda self, x: self.proj(x)})
    with pytest.raises(ValueError, match=r"Hidden.forward: its source is not available"):
        with_calls(hidden, {}, {"proj": "halved"})
    mlp = own_class(OWN.replace("self.proj", "self.down_proj"), "<nowhere>", nn=nn)()
    mlp.down_proj = nn.Linear(4, 4)
    layer = Layer(feed_forward=Sublayer(inner_norm=True))
    with pytest.raises(UserError, match=r"^inner_norm: Own.forward: its source is not available"):
        lamina.wire(Plain(), mlp, layer, 4)


def normed(model):
    return [module for module in model.modules() if isinstance(module, NormedProjections)]


@torch.no_grad()
@pytest.mark.parametrize(("placement", "options"), OPTIONS)
def test_a_models_source_names_its_norms_also_in_copies_and_when_compiled_anew(placement, options):
    model = built(placement, 3, config=llama(3), **options)
    expected = model(token_ids()).logits
    for one in (model, copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        assert normed(one)
        for module in normed(one):
            function = inspect.unwrap(type(module).forward)
            source = textwrap.dedent(inspect.getsource(function))
            for part in "qkv":
                assert (f"(self.{part}_proj(" in source) is (part in module.normed)
            assert ("self.inner_norm(" in source) is hasattr(module, "inner_norm")
            names: dict = {}
            exec(compile(source, "<again>", "exec"), function.__globals__, names)
            module.forward = names["forward"].__get__(module)
        assert torch.equal(one(token_ids()).logits, expected)
