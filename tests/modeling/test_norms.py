"""Norms beyond the backbone's, of the user's own, and on projections: each kind against its formula."""

import copy
import pickle
import subprocess
import sys

import pytest
import torch
from modeling.tiny import LATENT, OF_TEXT, SIZES, TOKENS, VOCABULARY, built, llama, token_ids
from spread import KINDS, spread
from torch import nn
from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForMaskedLM, DeepseekV3Config
from transformers.models.bitnet import BitNetConfig, BitNetForCausalLM

import lamina
from lamina.errors import UserError
from lamina.modeling.building import norm
from lamina.modeling.initialization import weights
from lamina.modeling.wiring_lamina import NORMS, LaminaGroupedNorm, LaminaNorm, LaminaRMSNorm, NormStyle, make_norm
from lamina.placements import Norm, Plan, Sublayer, names, resolve
from lamina.placements.plan import Layer
from lamina.training.monitor.gain_measures import gain_rows

FORMULAS = {
    "rms": lambda x, p: x / (x.pow(2).mean(-1, keepdim=True) + 1e-6).sqrt(),
    "l2": lambda x, p: x / x.norm(dim=-1, keepdim=True),
    "dyt": lambda x, p: torch.tanh(p["alpha"] * x),
    "derf": lambda x, p: torch.erf(p["alpha"] * x + p["shift"]),
}


@pytest.mark.parametrize("zero_centered", [False, True])
@pytest.mark.parametrize("kind", FORMULAS)
def test_a_kind_follows_its_formula(kind, zero_centered):
    spec = Plan(placement="x", layers=(Layer(),), final_norm=Norm(kind=kind, zero_centered=zero_centered, alpha=0.8))
    made = make_norm(spec.to_dict()["final_norm"], 12, NormStyle())
    if "alpha" in (parameters := dict(made.named_parameters())):
        assert parameters["alpha"].item() == pytest.approx(0.8)
    assert (made.weight == (0.0 if zero_centered else 1.0)).all()
    with torch.no_grad():
        for parameter in made.parameters():
            parameter.add_(0.3 * torch.randn_like(parameter))
    x = 3 * torch.randn(2, 5, 12)
    expected = FORMULAS[kind](x, parameters) * (made.weight + zero_centered) + parameters.get("bias", 0.0)
    torch.testing.assert_close(made(x), expected, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("kind", ["l2", "dyt", "derf"])
def test_a_model_with_such_norms_is_saved_and_read_again(kind, tmp_path):
    model = built("peri_ln", norm=kind)
    assert {type(m) for m in model.modules() if isinstance(m, LaminaNorm)} == {NORMS[kind]}
    model.save_pretrained(tmp_path)
    again = AutoModelForCausalLM.from_pretrained(tmp_path)
    assert torch.equal(model(token_ids()).logits, again(token_ids()).logits)


@torch.no_grad()
def test_a_norm_may_have_an_epsilon_of_its_own(tmp_path):
    layer = Layer(attention=Sublayer(pre_norm=Norm(eps=1e-3)), feed_forward=Sublayer(pre_norm=Norm()))
    model = lamina.build(llama(2), Plan(placement="mine", layers=(layer,) * 2))
    model.save_pretrained(tmp_path)
    block = AutoModelForCausalLM.from_pretrained(tmp_path).model.layers[1]
    assert (block.attention.pre_norm.eps, block.feed_forward.pre_norm.eps) == (1e-3, llama(2).rms_norm_eps)
    x = 0.02 * torch.randn(2, 3, SIZES["hidden_size"])
    torch.testing.assert_close(block.attention.pre_norm(x), x / (x.pow(2).mean(-1, keepdim=True) + 1e-3).sqrt())


def test_zero_centered_gains_are_the_same_function_from_weights_of_zero():
    torch.manual_seed(0)
    ours = lamina.build(llama(), "gemma2").eval()
    torch.manual_seed(0)
    plain = lamina.build(llama(), "peri_ln", embedding_norm=False, embedding_scale="sqrt_hidden_size").eval()
    norms = [m for m in ours.modules() if isinstance(m, LaminaNorm)]
    assert norms
    assert all(not m.weight.any() for m in norms)
    assert torch.equal(ours(token_ids()).logits, plain(token_ids()).logits)
    assert {row[-1] for row in gain_rows(ours, 0) if "mean" in row[5]} == {1.0}


def test_queries_and_keys_can_be_normed_without_a_gain(tmp_path):
    file = tmp_path / "glimmer.yaml"
    norms = "qk_norm: head\nqkv_norm: {kind: rms, learnable_gain: false}\n"
    file.write_text(f"{norms}rules: [{{attention: {{pre_norm: true}}}}]\n")
    model = lamina.build(llama(), str(file))
    assert model.model.layers[0].attention.module.q_norm.weight is None


@torch.no_grad()
def test_subln_is_bitnets_placement():
    config = BitNetConfig(**OF_TEXT, **TOKENS)
    theirs = BitNetForCausalLM(config).eval()
    for parameter in theirs.parameters():
        parameter.add_(0.2 * torch.randn_like(parameter))
    ours = lamina.build(
        llama(hidden_act="relu2", **{n: getattr(config, n) for n in ("rms_norm_eps", "rope_parameters")}), "subln"
    ).eval()
    renamed = {"self_attn.attn_sub_norm": "attention.module.inner_norm"}
    renamed |= {"mlp.ffn_sub_norm": "feed_forward.module.inner_norm", "self_attn": "attention.module"}
    renamed |= {"mlp.": "feed_forward.module.", "input_layernorm": "attention.pre_norm"}
    renamed |= {"post_attention_layernorm": "feed_forward.pre_norm", "model.": "model.backbone."}
    state = {}
    for key, tensor in theirs.state_dict().items():
        for theirs_name, name in renamed.items():
            key = key.replace(theirs_name, name, 1) if name not in key else key
        state[key] = tensor
    ours.load_state_dict(state)
    ids = token_ids()
    assert torch.equal(ours(ids).logits, theirs(ids).logits)


def test_a_norm_inside_a_module_that_has_no_last_projection_is_refused():
    plan = Plan(placement="mine", layers=(Layer.of(Sublayer(pre_norm=Norm(), inner_norm=Norm())),) * 2)
    with pytest.raises(UserError, match=r"inner_norm: .* has no last projection"):
        lamina.wire(nn.Identity(), nn.Linear(4, 4), plan.layers[0], 4)
    sizes = {**OF_TEXT, **TOKENS, **LATENT, "q_lora_rank": None, "num_key_value_heads": 4, "head_dim": 8}
    with pytest.raises(UserError, match=r"inner_norm: .* has no last projection"):
        lamina.build(DeepseekV3Config(**sizes), plan)


@pytest.fixture
def clipped():
    @norm("clipped")
    class ClippedNorm(LaminaNorm):
        """x cut off at a learned height, times the gain."""

        more = ("height",)

        def starts(self):
            return {**super().starts(), "height": 2.0}

        def forward(self, x):
            return self.apply_gain(torch.minimum(torch.maximum(x, -self.height), self.height))

    return ClippedNorm


def test_a_norm_of_ones_own_is_an_option_a_plans_kind_and_in_the_checkpoint(clipped, tmp_path):
    model = lamina.build(llama(), "keel", norm="clipped").eval()
    assert {type(m) for m in model.modules() if isinstance(m, LaminaNorm)} == {clipped}
    assert all(m.height.item() == 2.0 for m in model.modules() if isinstance(m, clipped))
    model.save_pretrained(tmp_path)
    again = AutoModelForCausalLM.from_pretrained(tmp_path)
    assert torch.equal(model(token_ids()).logits, again(token_ids()).logits)
    assert Sublayer(pre_norm="clipped").pre_norm.kind == "clipped"


def test_a_norm_of_ones_own_may_have_parameters_of_its_own(clipped, tmp_path):
    @norm("clipped")
    class Turned(LaminaNorm):
        def __init__(self, hidden_size, **options):
            super().__init__(hidden_size, **options)
            self.turn = nn.Parameter(torch.eye(hidden_size).flip(0))

        def forward(self, x):
            return self.apply_gain(x @ self.turn)

    model = lamina.build(llama(), "pre_ln", norm="clipped").eval()
    assert torch.equal(model.model.norm(torch.arange(32.0)), torch.arange(32.0).flip(0))
    model.save_pretrained(tmp_path)
    again = AutoModelForCausalLM.from_pretrained(tmp_path)
    assert torch.equal(again(token_ids()).logits, model(token_ids()).logits)


def test_a_kind_that_nothing_registers_and_a_name_that_is_taken_are_refused():
    with pytest.raises(UserError, match=r"'clipped' is unknown. Choose one of .*'derf'"):
        Norm(kind="clipped")
    for kind in ("rms", "backbone"):
        with pytest.raises(UserError, match=rf"^norm '{kind}': .*test_norms registers .*, but lamina.*_lamina has"):
            norm(kind)(type("Own", (LaminaNorm,), {"__module__": __name__}))
    with pytest.raises(UserError, match="Identity is not a subclass of LaminaNorm"):
        norm("mine")(nn.Identity)


@pytest.mark.parametrize("name", names())
def test_what_the_wiring_learns_has_a_role_of_its_own(name):
    """It is not drawn, does not decay, and is float32 in one process; FSDP2: test_learned_scales.py."""
    model = lamina.build(llama(3), name, init="normal" if name != "admin" else "admin")
    residuals = [r for block in model.model.layers for r in (block.attention, block.feed_forward)]
    own = {id(p) for r in residuals for p in r.parameters(recurse=False)}
    found = [weight for weight in weights(model) if weight.role == "wiring"]
    assert {id(weight.parameter) for weight in found} == own
    learned = {
        s
        for layer in resolve(name, 3).layers
        for sub in (layer.attention, layer.feed_forward)
        for s in ("skip_scale", "pre_scale", "out_scale")
        if getattr(sub, f"{s}_learned") != "no"
    }
    assert {weight.name.rpartition(".")[2].replace("gate", "out_scale") for weight in found} == learned
    starts = {id(getattr(r, n)): v for r in residuals for n, v in r.starts().items() if getattr(r, n, None) is not None}
    for weight in found if name != "admin" else ():
        assert torch.equal(weight.parameter, torch.full_like(weight.parameter, starts[id(weight.parameter)]))
    assert all(weight.parameter.dtype == torch.float32 for weight in found)


ENCODERS = ("modernbert hybridnorm", "modernbert olmo2")
ALL = (*names(), *ENCODERS)
AUTO = {name: AutoModelForMaskedLM if name in ENCODERS else AutoModelForCausalLM for name in ALL}


def model_of(name):
    torch.manual_seed(0)
    backbone, _, placement = name.rpartition(" ")
    encoder = AutoConfig.for_model("modernbert", pad_token_id=0, vocab_size=VOCABULARY, **SIZES)
    return built(placement, 2, config=encoder if backbone else llama(2))


@torch.no_grad()
def logits(model):
    return model.eval()(input_ids=token_ids()).logits


def norms_of(model):
    return {n: m for n, m in model.named_modules() if isinstance(m, LaminaNorm)}


# ReZero's and SkipInit's states grow without bound.
@pytest.mark.parametrize("name", spread([n for n in ALL if n not in ("rezero", "skipinit")], [*KINDS, *ENCODERS]))
def test_an_adapter_trains_saves_loads_and_merges(name, tmp_path):
    """The check on the review's own case: merging took hybridnorm from a loss of 1.053 to 3.924."""
    peft = pytest.importorskip("peft")
    model = model_of(name)
    before, kept = logits(model), set(norms_of(model))
    tuned = peft.get_peft_model(model, peft.LoraConfig(r=4))  # PEFT knows the targets
    optimizer = torch.optim.SGD([p for p in tuned.parameters() if p.requires_grad], lr=0.5)
    for _ in range(2):  # the first step moves B alone, which starts at 0
        tuned.train()(input_ids=token_ids(), labels=token_ids()).loss.backward()
        optimizer.step()
    trained = logits(tuned)
    assert (trained - before).abs().max() > 1e-3
    tuned.save_pretrained(tmp_path / "adapter")

    again = peft.PeftModel.from_pretrained(model_of(name), tmp_path / "adapter")
    assert torch.equal(logits(again), trained)
    with again.disable_adapter():
        assert torch.equal(logits(again), before)
    merged = again.merge_and_unload()
    assert set(norms_of(merged)) == kept
    # W + BA in place of two products: rounding, of the same order as that of any other sum.
    torch.testing.assert_close(logits(merged), trained, rtol=1e-4, atol=1e-4)
    merged.save_pretrained(tmp_path / "merged")
    loaded = AUTO[name].from_pretrained(tmp_path / "merged")
    assert torch.equal(logits(loaded), logits(merged))


@pytest.mark.parametrize("name", ENCODERS)  # decoders' are in test_forwards.py
def test_copies_and_pickles_compute_the_same(name):
    model = model_of(name)
    for again in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        assert torch.equal(logits(again), logits(model))


@pytest.mark.slow  # a process that imports transformers
def test_a_normed_attention_is_unpickled_in_a_fresh_process(tmp_path):
    attention = model_of("hybridnorm").model.layers[0].attention.module
    (tmp_path / "attention.pickle").write_bytes(pickle.dumps(attention))
    code = "import pickle, sys; print(type(pickle.load(open(sys.argv[1], 'rb')).v_norm).__name__)"
    done = subprocess.run([sys.executable, "-c", code, str(tmp_path / "attention.pickle")], capture_output=True)
    assert done.stdout.decode().strip() == "LaminaRMSNorm", done.stderr.decode()


def test_a_group_of_heads_is_normed_head_by_head():
    model = lamina.build(llama(2), "pre_ln", qk_norm="head", v_norm="full", norm="group", groups=4)
    attention = model.model.layers[0].attention.module
    assert type(attention.q_norm) is LaminaRMSNorm
    assert (type(attention.v_norm), attention.v_norm.groups) == (LaminaGroupedNorm, 4)
