"""What every placement does when it runs, and that every option and field of it is read."""

import dataclasses
from itertools import combinations
from typing import Literal, get_args, get_origin

import pytest
import torch
from modeling.tiny import VOCABULARY, built, llama, opened, streams, token_ids
from spread import spread

import lamina
from lamina.errors import UserError
from lamina.placements import Layer, Norm, Plan, Sublayer, get, names, resolve

# The same sums in another order, in float32 over two layers with activations of order 1 to 10: some 1e-6 relative.
SAME_SUMS = {"rtol": 1e-4, "atol": 1e-4}

over_placements = pytest.mark.parametrize("name", names())


@over_placements
def test_every_parameter_gets_a_finite_gradient(name):
    model = opened(lamina.build(llama(3), name).train())
    model(input_ids=token_ids(), labels=token_ids()).loss.backward()
    for key, parameter in model.named_parameters():
        assert parameter.grad is not None, key
        assert parameter.grad.isfinite().all(), key
        assert parameter.grad.abs().sum() > 0, key


def test_a_part_in_evaluation_mode_trains_with_the_rest_again():
    model = built("pre_ln").train()
    model.model.layers[0].eval()
    assert all(module.training for module in model.train().modules())
    assert not any(module.training for module in model.eval().modules())


@over_placements
def test_the_model_is_causal(name):
    model, ids = built(name), token_ids()
    changed = ids.clone()
    changed[:, 5:] = token_ids(seed=2)[:, 5:]
    with torch.no_grad():
        assert torch.equal(model(input_ids=ids).logits[:, :5], model(input_ids=changed).logits[:, :5])


@over_placements
def test_logits_with_a_cache_are_those_without(name):
    model, ids = built(name), token_ids()
    with torch.no_grad():
        whole = model(input_ids=ids).logits
        first = model(input_ids=ids[:, :4], use_cache=True)
        parts, cache = [first.logits], first.past_key_values
        for position in range(4, ids.shape[1]):
            step = model(input_ids=ids[:, position : position + 1], past_key_values=cache, use_cache=True)
            parts.append(step.logits)
    torch.testing.assert_close(torch.cat(parts, dim=1), whole, **SAME_SUMS)


def test_generation_from_embeddings_gives_the_tokens_of_the_ids():
    model, ids = built("peri_ln"), token_ids()
    how = {"do_sample": False, "max_new_tokens": 6, "min_new_tokens": 6, "pad_token_id": 0}
    embedded = model.get_input_embeddings()(ids)
    generated = model.generate(inputs_embeds=embedded, attention_mask=torch.ones_like(ids), **how)
    assert torch.equal(generated, model.generate(ids, **how)[:, ids.shape[1] :])


def test_a_prompt_padded_on_the_left_goes_on_as_without_padding():
    model, ids = built("pre_ln"), token_ids(batch=1)
    padded = torch.cat([torch.zeros(1, 4, dtype=torch.long), ids], dim=1)
    mask = (padded > 0).long()
    how = {"do_sample": False, "max_new_tokens": 6, "min_new_tokens": 6, "pad_token_id": 0}
    generated = model.generate(padded, attention_mask=mask, **how)[:, padded.shape[1] :]
    assert torch.equal(generated, model.generate(ids, **how)[:, ids.shape[1] :])


@over_placements
def test_gradient_checkpointing_changes_no_gradient(name):
    gradients = []
    for checkpointing in (False, True):
        torch.manual_seed(3)
        model = lamina.build(llama(3), name).train()
        if checkpointing:
            model.gradient_checkpointing_enable()
            calls = []
            module = model.model.layers[1].attention.module
            module.register_forward_pre_hook(lambda *_, calls=calls: calls.append(1))
        model(input_ids=token_ids(), labels=token_ids()).loss.backward()
        gradients.append({k: p.grad for k, p in model.named_parameters()})
    assert len(calls) == 2  # once forward, once again for the backward pass
    for key, gradient in gradients[0].items():
        assert torch.equal(gradient, gradients[1][key]), key


@over_placements
def test_hidden_states_are_the_stream_before_the_final_norm(name):
    model, ids = built(name, 3), token_ids()
    with torch.no_grad():
        seen, output = streams(model, ids, output_hidden_states=True)
        assert len(output.hidden_states) == 4
        for state, hooked in zip(output.hidden_states, seen, strict=True):
            assert torch.equal(state, hooked)
        x0 = model.get_input_embeddings()(ids)
        x0 = x0 * 32**0.5 if name.startswith("gemma") else x0
        if model.model.embedding_norm is not None:
            x0 = model.model.embedding_norm(x0)
        assert torch.equal(output.hidden_states[0], x0)
        norm = model.model.norm
        last = output.hidden_states[-1] if norm is None else norm(output.hidden_states[-1])
        assert torch.equal(model.lm_head(last), output.logits)


@pytest.mark.parametrize("by_configuration", [False, True])
def test_attentions_come_with_the_eager_kernel(by_configuration):
    model, ids = built("keel", 3), token_ids()
    model.set_attn_implementation("eager")
    model.config.output_attentions = by_configuration
    attentions = model(input_ids=ids, **({} if by_configuration else {"output_attentions": True})).attentions
    assert [a.shape for a in attentions] == [(2, 4, 9, 9)] * 3
    torch.testing.assert_close(attentions[1].sum(-1), torch.ones(2, 4, 9))


@over_placements
def test_bfloat16_is_finite_and_near_float32(name):
    torch.manual_seed(0)
    model, ids = lamina.build(llama(2), name).eval(), token_ids()
    with torch.no_grad():
        exact = model(input_ids=ids).logits
        with torch.autocast("cpu", torch.bfloat16):
            mixed = model(input_ids=ids).logits.float()
        pure = model.bfloat16()(input_ids=ids).logits
    assert pure.dtype == torch.bfloat16
    # 8 bits of mantissa: 2^-8 = 0.4 % a rounding, and some tens of roundings on the way, each of random sign.
    scale = exact.abs().max()
    assert (mixed - exact).abs().max() < 0.05 * scale
    assert (pure.float() - exact).abs().max() < 0.05 * scale


@over_placements
def test_more_tokens_keep_the_norms_and_the_old_logits(name):
    model, ids = built(name, embedding_norm=True), token_ids()
    with torch.no_grad():
        before = model(input_ids=ids).logits
        model.resize_token_embeddings(VOCABULARY + 8, mean_resizing=False)
        after = model(input_ids=ids).logits
    assert model.model.embedding_norm is not None
    assert after.shape[-1] == VOCABULARY + 8 == model.config.get_text_config().vocab_size
    assert torch.equal(after[..., :VOCABULARY], before)


@over_placements
def test_tied_embeddings_are_one_parameter(name):
    model = lamina.build(llama(2, tie_word_embeddings=True), name)
    assert model.lm_head.weight is model.get_input_embeddings().weight
    assert "lm_head.weight" not in dict(model.named_parameters())
    model.resize_token_embeddings(VOCABULARY + 3, mean_resizing=False)
    assert model.lm_head.weight is model.get_input_embeddings().weight


def test_a_backbone_whose_configuration_says_bfloat16_is_built_in_float32():
    model = lamina.build(llama(2, dtype="bfloat16"), "peri_ln", qk_norm="head")
    assert {p.dtype for p in model.parameters()} == {torch.float32}
    assert model(input_ids=token_ids()).logits.isfinite().all()


NEEDS = {
    "groups": {"norm": "group"},
    "size": {"wiring": "identity_hc"},
    "base_depth": {"depth_scaling": "completep"},  # neither is taken alone
    "depth_scaling": {"base_depth": 2},
    "temperature": {"start": 0.25},
    "start": {"wiring": "mhc"},
    "collapse": {"wiring": "hc"},
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


OPTIONS = [(n, o) for n in names() for o in get(n).all_options()]
OWN = [(n, o) for n, o in OPTIONS if o in get(n).options or n in ("pre_ln", "keel", "hybridnorm")]


@pytest.mark.parametrize(("name", "option"), spread(OPTIONS, OWN), ids=lambda x: getattr(x, "name", x))
def test_every_option_of_every_placement_is_read(name, option):
    own = option.name in ("groups", "start") and option.name in {o.name for o in get(name).options}
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
NORM = {"kind": "layer", "learnable_gain": False, "initial_gain": 0.5, "groups": 4, "zero_centered": True}
NORM |= {"alpha": 0.25, "eps": 1e14}  # this stream is as large without norms
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


@pytest.mark.parametrize("learnable", [True, False])
def test_a_gain_that_is_a_whole_number_is_a_number(learnable):
    """Whole numbers are what a YAML file holds."""
    norms = [Norm(kind="rms", initial_gain=gain, learnable_gain=learnable) for gain in (2, 2.0)]
    assert not differ(*(fingerprint(plan_of(Sublayer(out_norm=norm))) for norm in norms))


def test_groups_that_do_not_divide_the_width_are_refused():
    with pytest.raises(UserError, match=r"groups: 5 .* 32"):
        lamina.build(llama(2), "pre_ln", norm="group", groups=5)
