"""Width and depth scaling: the rules against the papers' tables, and what they do to a model."""

import copy
import math
from fractions import Fraction

import pytest
import torch
from modeling.tiny import LATENT, OF_TEXT, token_ids
from spread import KINDS, rotated
from training.tiny_runs import llama_of
from transformers import DeepseekV3Config, Gemma3TextConfig, GraniteConfig, GraniteForCausalLM, ModernBertConfig

import lamina
from lamina.errors import UserError
from lamina.modeling.initialization import weights
from lamina.modeling.scaling import DEPTH_SCHEMES, SCHEMES, Scaling, StepFactors, scaled_weights
from lamina.placements import names, resolve
from lamina.training.optimization.optimizer import parameter_groups, step_factors

HALF = Fraction(1, 2)
# Everett et al. 2024, exponents of Adam: a and b of n^-a and n^-b, then the learning rate's in n^e.
TABLE = {
    "standard": ((0, 0, 0), (0, HALF, HALF), (0, -1, -1), (0, -HALF, -HALF)),
    "mup": ((-HALF, 0, HALF), (HALF, HALF, HALF), (-HALF, -1, -HALF), (-HALF, -HALF, 0)),
}


@pytest.mark.parametrize("scheme", SCHEMES)
def test_the_exponents_are_those_of_the_papers_table(scheme):
    name, _, rest = scheme.partition("-")
    ours, (a, b, full, none) = SCHEMES[scheme], TABLE[name]
    assert ours.multiplier == tuple(-x for x in a)
    assert ours.std == tuple(-x for x in b)
    assert ours.rate == (none if rest else full)


def expected_rate(scheme, kind, m):
    """Read off the paper's table: eta * n^(learning rate's exponent - a)."""
    name, _, rest = scheme.partition("-")
    a, _, full, none = TABLE[name]
    if kind == "vector":
        return 1.0
    index = ("embedding", "hidden", "readout").index(kind)
    return m ** float((none if rest else full)[index] - a[index])


@pytest.mark.parametrize(("placement", "scheme"), rotated(names(), SCHEMES, every=4))
def test_every_weight_has_its_roles_factor(placement, scheme):
    with torch.device("meta"):
        model = lamina.build(llama_of(64), placement, init="normal")
    found = {s.weight.name: s for s in scaled_weights(model, Scaling(width=scheme, base_width=16))}
    assert found.keys() == dict(model.named_parameters()).keys()
    for name, scaled in found.items():
        parameter = model.get_parameter(name)
        kind = "hidden"
        if parameter.ndim < 2:
            kind = "vector"
        elif name == "model.backbone.embed_tokens.weight":
            kind = "embedding"
        elif name == "lm_head.weight":
            kind = "readout"
        assert scaled.kind == kind
        # an embedding that the plan multiplies by the root of the width loses that again
        growth = 2.0 if kind == "embedding" and resolve(placement, 1).embedding_scale == "sqrt_hidden_size" else 1.0
        assert scaled.factors.rate == pytest.approx(expected_rate(scheme, kind, 4.0) / growth)
        std = {"vector": 1.0, "embedding": 1 / growth, "hidden": 4**-0.5, "readout": 4**-0.5}[kind]
        if scheme.startswith("mup") and kind == "readout":
            std = 1 / 4
        assert scaled.std == pytest.approx(std)


def test_constants_are_each_kinds_own_and_not_the_vectors():
    model = lamina.build(llama_of(32), "keel", init="normal")
    scaling = Scaling(width="standard", base_width=16, k_embedding=3.0, k_hidden=5.0, k_readout=7.0)
    factors = {s.kind: s.factors.rate for s in scaled_weights(model, scaling)}
    assert factors == {"embedding": 3.0, "vector": 1.0, "hidden": 5 / 2, "readout": 7 / 2}


def test_experts_and_routers_are_hidden_and_a_latent_of_fixed_rank_keeps_its_rate():
    widths = {"hidden_size": 64, "intermediate_size": 128, "num_key_value_heads": 4}
    ranks = {"q_lora_rank": 12, "kv_lora_rank": 8, "n_shared_experts": 1}
    config = DeepseekV3Config(**{**OF_TEXT, **LATENT, **widths, **ranks})
    with torch.device("meta"):
        model = lamina.build(config, "peri_ln", init="normal")
    factors = {s.weight.name: s.factors.rate for s in scaled_weights(model, Scaling(width="standard", base_width=32))}
    layer = "model.backbone.layers.1."
    for name in ("feed_forward.module.experts.gate_up_proj", "feed_forward.module.experts.down_proj"):
        assert factors[layer + name] == 1 / 2
    assert factors[layer + "feed_forward.module.gate.weight"] == 1 / 2
    for name in ("q_a_proj", "kv_a_proj_with_mqa", "o_proj"):
        assert factors[f"{layer}attention.module.{name}.weight"] == 1 / 2
    for name in ("q_b_proj", "kv_b_proj"):  # they read a latent as wide as in the base
        assert factors[f"{layer}attention.module.{name}.weight"] == 1.0


@pytest.mark.parametrize("by", ["plan", "backbone"])
def test_an_embedding_multiplied_by_the_root_of_the_width_loses_the_factor_again(by):
    if by == "plan":
        model = lamina.build(llama_of(64), "pre_ln", embedding_scale="sqrt_hidden_size", init="normal")
    else:
        config = Gemma3TextConfig(**{**OF_TEXT, "hidden_size": 64}, head_dim=16, tie_word_embeddings=False)
        model = lamina.build(config, "pre_ln", init="normal")
    scaled = {s.kind: (s.factors.rate, s.std) for s in scaled_weights(model, Scaling(width="standard", base_width=16))}
    assert scaled["embedding"] == (0.5, 0.5)


@pytest.mark.parametrize("init", ["normal", "scaled", "small", "xavier", "deepnorm"])
def test_weights_start_as_at_the_base_and_then_fall_by_their_fan_in(init):
    base, width = 32, 128
    wide = lamina.build(llama_of(width), "deepnorm", init=init, scaling=Scaling(width="mup", base_width=base))
    narrow = lamina.build(llama_of(base), "deepnorm", init=init)
    for ours, theirs in zip(weights(wide), weights(narrow), strict=True):
        if ours.role in ("vector", "wiring"):
            continue
        exponent = {"embedding": 0.0, "readout": -1.0}.get(ours.role, -0.5)
        # The narrow weight's own draw strays by 1 / sqrt(2 n): five of those are allowed.
        slack = 5 / math.sqrt(2 * theirs.parameter.numel())
        wanted = theirs.parameter.std().item() * 4**exponent
        assert ours.parameter.std().item() == pytest.approx(wanted, rel=slack), ours.name


@pytest.mark.parametrize("placement", [*KINDS, "admin"])
def test_at_the_base_width_every_weight_starts_bit_for_bit_as_without(placement):
    torch.manual_seed(3)
    plain = lamina.build(llama_of(32), placement, profile_ids=token_ids())
    torch.manual_seed(3)
    scaled = lamina.build(llama_of(32), placement, profile_ids=token_ids(), scaling=Scaling(width="mup", base_width=32))
    for (name, one), (_, other) in zip(plain.named_parameters(), scaled.named_parameters(), strict=True):
        assert torch.equal(one, other), name


def test_what_cannot_be_scaled_is_one_line():
    tied = lamina.build(llama_of(32, tie_word_embeddings=True), "pre_ln", init="normal")
    with pytest.raises(UserError, match=r"ties its output head.*--untie-embeddings"):
        list(scaled_weights(tied, Scaling(width="standard", base_width=16)))
    with pytest.raises(UserError, match="base_width: Lamina cannot build this model with width 15"):
        list(scaled_weights(copy.deepcopy(lamina.build(llama_of(32), "pre_ln")), Scaling(width="mup", base_width=15)))
    grouped = lamina.build(llama_of(32), "group_ln", groups=8)
    with pytest.raises(UserError, match="base_width: Lamina cannot build this model with width 4"):
        list(scaled_weights(grouped, Scaling(width="standard", base_width=4)))


def test_only_the_last_matrix_of_a_masked_language_model_is_a_readout():
    sizes = {"hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 1, "num_attention_heads": 4}
    config = ModernBertConfig(**sizes, vocab_size=61, pad_token_id=None, tie_word_embeddings=False)
    model = lamina.build(config, "pre_ln", head="masked_lm")
    kinds = {s.weight.name: s.kind for s in scaled_weights(model, Scaling(width="mup", base_width=32))}
    assert [name for name, kind in kinds.items() if kind == "readout"] == ["decoder.weight"]
    assert kinds["head.dense.weight"] == "hidden"


def scalable(placement):
    """Whether blocks only add to the stream, by the placement's own plan."""
    sublayers = [sub for layer in resolve(placement, 4).layers for sub in (layer.attention, layer.feed_forward)]
    on_the_stream = [(s.post_norm, s.skip, s.skip_scale, s.skip_scale_learned, s.coupling) for s in sublayers]
    return set(on_the_stream) == {(None, "stream", 1.0, "no", "none")}


@pytest.mark.parametrize("placement", names())
@pytest.mark.parametrize(("scheme", "alpha"), [("depth-mup", 0.5), ("completep", 1.0)])
def test_every_branch_is_divided_where_blocks_only_add_to_the_stream(placement, scheme, alpha):
    options = {"depth_scaling": scheme, "base_depth": 2}
    if not scalable(placement):
        with pytest.raises(UserError, match=rf"'{placement}'.* only add to .*, but the .* of layer .* sets .* Choose"):
            resolve(placement, 8, **options)
        return
    plain, divided = resolve(placement, 8).to_dict(), resolve(placement, 8, **options).to_dict()
    assert divided.pop("options") == options
    for layer, before in zip(divided["layers"], plain["layers"], strict=True):
        for name, sub in layer.items():
            assert sub.pop("out_scale") == pytest.approx(before[name].pop("out_scale", 1.0) * (8 / 2) ** -alpha)
    assert divided == {name: value for name, value in plain.items() if name != "options"}


def test_the_placements_that_the_papers_rules_are_for():
    divided = {name for name in names() if scalable(name)}
    assert {"pre_ln", "peri_ln", "sandwich_ln", "olmo2", "layernorm_scaling", "subln", "layerscale"} <= divided
    assert not divided & {"post_ln", "deepnorm", "keel", "fusenorm", "mix_ln", "b2t", "admin", "doge", "muse_spark"}


def table_1(name, m, alpha, eta, decay, epsilon):
    """CompleteP's Table 1 at the base width: rate, weight decay and epsilon of a parameter of GraniteForCausalLM."""
    in_block = ".layers." in name  # hidden weights, biases and the norms before them
    rates = {"lr": eta * m ** (alpha - 1), "eps": epsilon * m**-alpha} if in_block else {"lr": eta, "eps": epsilon}
    return {**rates, "weight_decay": decay if "norm" not in name else 0.0}


def granite_names(model):
    """The names of a Pre-LN model of Llama's modules, as transformers' Granite has them."""
    renamed = {"attention.pre_norm": "input_layernorm", "feed_forward.pre_norm": "post_attention_layernorm"}
    renamed |= {"attention.module": "self_attn", "feed_forward.module": "mlp", "model.backbone.": "model."}
    for name, parameter in model.named_parameters():
        theirs = name
        for own, granite in renamed.items():
            theirs = theirs.replace(own, granite)
        yield theirs, name, parameter


@pytest.mark.parametrize(("scheme", "alpha"), [("depth-mup", 0.5), ("completep", 1.0)])
def test_it_trains_as_transformers_granite_does_with_the_papers_table(scheme, alpha):
    """The branch's multiplier is Granite's own ``residual_multiplier``, the optimizer's groups the naive table."""
    torch.manual_seed(0)
    depth, base, eta, decay, epsilon = 6, 2, 1e-2, 0.1, 1e-4
    m = depth / base
    scaling = Scaling(depth=scheme, base_depth=base)
    config = llama_of(32, num_hidden_layers=depth)
    ours = lamina.build(config, "pre_ln", init="small", scaling=scaling)
    kept = {name: value for name, value in config.to_dict().items() if name not in ("model_type", "architectures")}
    multipliers = {"residual_multiplier": m**-alpha, "attention_multiplier": 8**-0.5}
    multipliers |= {"embedding_multiplier": 1.0, "logits_scaling": 1.0}
    theirs = GraniteForCausalLM(GraniteConfig(**kept, **multipliers, attn_implementation="sdpa"))
    state = {granite: parameter.detach().clone() for granite, _, parameter in granite_names(ours)}
    assert theirs.load_state_dict(state, strict=False).unexpected_keys == []
    factors = step_factors(ours, scaling)
    rules = {"learning_rate": eta, "weight_decay": decay, "epsilon": epsilon}
    given = {"lr": eta, "eps": epsilon, "betas": (0.9, 0.95)}
    optimizers = [torch.optim.AdamW(parameter_groups(ours, factors, **rules), **given)]
    naive = [{"params": [p], **table_1(name, m, alpha, eta, decay, epsilon)} for name, p in theirs.named_parameters()]
    optimizers.append(torch.optim.AdamW(naive, **given))
    ids, losses = token_ids(4, 16), ([], [])
    for model, optimizer, seen in zip((ours, theirs), optimizers, losses, strict=True):
        model.train()
        for _ in range(4):
            loss = model(input_ids=ids, labels=ids).loss
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            seen.append(loss.item())
    assert losses[0] == pytest.approx(losses[1], abs=1e-5)
    assert losses[0][-1] < losses[0][0] - 0.1
    trained = dict(theirs.named_parameters())
    for granite, name, parameter in granite_names(ours):
        assert torch.allclose(parameter, trained[granite], atol=2e-5), name


@pytest.mark.parametrize("init", ["normal", "scaled", "small_scaled_uncut"])
def test_weights_start_as_at_the_base_depth(init):
    config = llama_of(64, num_hidden_layers=8)
    deep = lamina.build(config, "peri_ln", init=init, scaling=Scaling(depth="completep", base_depth=2))
    shallow = lamina.build(llama_of(64, num_hidden_layers=2), "peri_ln", init=init)
    stds = {name.split(".", 4)[-1]: weight.std().item() for name, weight in shallow.named_parameters()}
    for weight in weights(deep):
        if weight.role != "vector":
            slack = 8 / math.sqrt(2 * weight.parameter.numel())
            assert weight.parameter.std().item() == pytest.approx(stds[weight.name.split(".", 4)[-1]], rel=slack)


def test_width_and_depth_multiply_and_the_decay_follows_the_width_alone():
    """CompleteP, Table 1: hidden weights have rate eta / m_N * m_L^(alpha - 1) and decay lambda * m_N."""
    scaling = Scaling(width="mup", base_width=16, depth="depth-mup", base_depth=2)
    model = lamina.build(llama_of(64, num_hidden_layers=8), "pre_ln", init="small", scaling=scaling)
    found = {name: (own.rate, own.width_rate, own.epsilon) for name, own in step_factors(model, scaling).items()}
    block, m_n, m_l = "model.backbone.layers.3.", 4, 4
    assert found[block + "attention.module.q_proj.weight"] == pytest.approx((m_l**-0.5 / m_n, 1 / m_n, m_l**-0.5))
    assert found[block + "feed_forward.pre_norm.weight"] == pytest.approx((m_l**-0.5, 1.0, m_l**-0.5))
    for name, rate in (("norm", 1.0), ("embed_tokens", 1.0)):
        assert found[f"model.backbone.{name}.weight"] == (rate, rate, 1.0)
    assert found["lm_head.weight"] == (1 / m_n, 1 / m_n, 1.0)


@pytest.mark.parametrize("scheme", DEPTH_SCHEMES)
def test_a_learned_scale_on_the_branch_is_the_multiplier_folded_into_it(tmp_path, scheme):
    """m^-alpha * lambda, lambda with a block's rate and epsilon, takes the steps that Lamina's one scale takes."""
    file = tmp_path / "scaled.yaml"
    part = "{pre_norm: true, out_scale: 0.5, out_scale_learned: vector}"
    file.write_text(f"final_norm: true\nrules: [{{attention: {part}, feed_forward: {part}}}]\n")
    m, alpha, eta, epsilon = 4, DEPTH_SCHEMES[scheme], 1e-2, 1e-3
    scaling = Scaling(depth=scheme, base_depth=2)
    model = lamina.build(llama_of(32, num_hidden_layers=2 * m), str(file), init="small", scaling=scaling)
    name = "model.backbone.layers.5.feed_forward.out_scale"
    own, factors = model.get_parameter(name), step_factors(model, scaling)[name]
    assert torch.allclose(own, torch.full((32,), 0.5 * m**-alpha))
    explicit = torch.nn.Parameter(own.detach() * m**alpha)
    steps = [
        torch.optim.AdamW([own], lr=eta * factors.rate, eps=epsilon * factors.epsilon, weight_decay=0),
        torch.optim.AdamW([explicit], lr=eta * m ** (alpha - 1), eps=epsilon * m**-alpha, weight_decay=0),
    ]
    for seed in range(3):  # the gradient of m^-alpha * lambda, and by the chain rule that of lambda
        own.grad = torch.randn(32, generator=torch.Generator().manual_seed(seed)) * 1e-3
        explicit.grad = own.grad * m**-alpha
        for optimizer in steps:
            optimizer.step()
    assert torch.allclose(own * m**alpha, explicit, rtol=1e-5)
    assert not torch.allclose(explicit, torch.full((32,), 0.5), rtol=1e-3)


@pytest.mark.parametrize("scheme", DEPTH_SCHEMES)
def test_at_the_base_depth_every_weight_starts_bit_for_bit_as_without(scheme):
    models = []
    for scaling in (None, Scaling(depth=scheme, base_depth=4)):
        torch.manual_seed(3)
        models.append(lamina.build(llama_of(32, num_hidden_layers=4), "peri_ln", init="scaled", scaling=scaling))
    for (name, one), (_, other) in zip(models[0].named_parameters(), models[1].named_parameters(), strict=True):
        assert torch.equal(one, other), name
    assert set(step_factors(models[1], scaling).values()) == {StepFactors()}


def test_rates_without_the_multiplier_are_refused():
    with pytest.raises(UserError, match="depth_scaling is 'completep', but the placement does not scale its branches"):
        lamina.build(llama_of(32), resolve("pre_ln", 2), scaling=Scaling(depth="completep", base_depth=1))
    with pytest.raises(UserError, match=r"base_depth: 0\. Give a whole number"):
        resolve("pre_ln", 2, depth_scaling="completep", base_depth=0)
