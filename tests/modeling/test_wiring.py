"""The fixed interface: Residual, Block, and plain modules of the user's own or of others wired by a plan."""

import math
import re
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from modeling.tiny import llama
from ports import model_of_nanogpts_form
from scripts import loaded
from torch import nn
from transformers import BertConfig
from transformers.models.bert.modeling_bert import BertLayer
from transformers.models.muse_spark.modeling_muse_spark import MuseSparkResidualGate

import lamina
from lamina.errors import UserError
from lamina.modeling.wiring_lamina import LAST_PROJECTIONS
from lamina.placements import Layer, Norm, Sublayer, names, resolve

WIDTH = 16


class PlainAttention(nn.Module):
    """One causal head that knows of no mask, no cache and no position."""

    def __init__(self):
        super().__init__()
        self.query, self.key, self.value = (nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(3))

    def forward(self, x):
        scores = self.query(x) @ self.key(x).transpose(-1, -2) / math.sqrt(WIDTH)
        future = torch.ones(x.shape[1], x.shape[1]).triu(1).bool()
        return scores.masked_fill(future, -math.inf).softmax(-1) @ self.value(x)


def plain_modules():
    attention = PlainAttention()
    feed_forward = nn.Sequential(nn.Linear(WIDTH, 32), nn.GELU(), nn.Linear(32, WIDTH))
    for parameter in (*attention.parameters(), *feed_forward.parameters()):
        nn.init.normal_(parameter, 0.0, 0.5)
    return attention, feed_forward


def rms(x):
    return x / torch.sqrt(x.pow(2).mean(-1, keepdim=True) + 1e-6)


def written_out(sublayer, x, block_input, module):
    """y = C(skip_scale * s + out_scale * B(module(pre_scale * A(x)))), with gains of one."""

    def norm(position, value):
        gain = getattr(sublayer, position)
        return value if gain is None else gain.initial_gain * rms(value)

    branch = sublayer.out_scale * norm("out_norm", module(sublayer.pre_scale * norm("pre_norm", x)))
    skip = {"stream": x, "block_input": block_input, "both": x + block_input}[sublayer.skip]
    return norm("post_norm", skip_factor(sublayer) * skip + branch)


def normed(norm, x):
    return x if norm is None else norm(x)


def skip_factor(sublayer):
    b = sublayer.out_scale
    return {"none": sublayer.skip_scale, "lerp": 1 - b, "variance": (1 - b**2) ** 0.5}[sublayer.coupling]


ALL = {"pre_norm": Norm(), "out_norm": Norm(), "post_norm": Norm()}
EVERYTHING = Layer(
    attention=Sublayer(**ALL, skip_scale=1.7, pre_scale=0.3, out_scale=0.6),
    feed_forward=Sublayer(**ALL, skip="both", skip_scale=0.4, pre_scale=2.0, out_scale=-3.0),
)
LEARNED = [Sublayer(out_scale=0.3, out_scale_learned=learned) for learned in ("scalar", "vector")]
COUPLED = [
    Sublayer(coupling=coupling, out_scale=0.3, out_scale_learned=learned, gate_temperature=temperature)
    for coupling in ("lerp", "variance")
    for learned, temperature in (("no", 1.0), ("scalar", 1.0), ("vector", 0.3))
]
PLAIN = [name for name in names() if name != "subln"]  # its norms stand inside modules: test_norms.py
RECORDS = {f"{n}-{i}": record for n in PLAIN for i, (record, _) in enumerate(resolve(n, 4).kinds())}
RECORDS["everything"] = EVERYTHING
RECORDS |= {f"out-scale-{i}": Layer.of(sublayer) for i, sublayer in enumerate([*LEARNED, *COUPLED])}


@pytest.mark.parametrize("record", RECORDS)
def test_plain_modules_and_their_terms_follow_the_formula_when_wired(record):
    layer, x, seen = RECORDS[record], torch.randn(2, 5, WIDTH), []
    attention, feed_forward = plain_modules()
    block = lamina.wire(attention, feed_forward, layer, WIDTH)
    plain, middle = block(x), block.attention(x)
    y = written_out(layer.attention, x, x, attention)
    expected = written_out(layer.feed_forward, y, x, feed_forward)
    kinds = {n.kind for s in (layer.attention, layer.feed_forward) for n in s.norms.values()}
    if kinds <= {"backbone", "rms"}:
        torch.testing.assert_close(plain, expected)  # the same operations, torch's own tolerance for float32
    sublayers, halves = (layer.attention, layer.feed_forward), (block.attention, block.feed_forward)
    handles = [half.register_terms_hook(seen.append) for half in halves]
    assert torch.equal(block(x), plain)  # listening changes nothing
    for terms, sublayer, stream, half in zip(seen, sublayers, (x, middle), halves, strict=True):
        source = {"stream": stream, "block_input": x, "both": stream + x}[sublayer.skip]
        torch.testing.assert_close(terms.source, source)
        torch.testing.assert_close(terms.skip, skip_factor(sublayer) * source)
        torch.testing.assert_close(terms.output, half.module(sublayer.pre_scale * normed(half.pre_norm, stream)))
        torch.testing.assert_close(terms.branch, sublayer.out_scale * normed(half.out_norm, terms.output))
        torch.testing.assert_close(terms.sum, terms.skip + terms.branch)
    torch.testing.assert_close(plain, normed(block.feed_forward.post_norm, seen[1].sum))
    for handle in handles:
        handle.remove()
    seen.clear()
    block(x)
    assert not seen


def test_a_wired_attention_may_return_its_weights_and_take_a_mask():
    class Attention(nn.Module):
        def forward(self, x, attention_mask=None, scale=1.0):
            self.seen = attention_mask
            return scale * x, "weights"

    attention = Attention()
    block = lamina.wire(attention, nn.Identity(), Layer(), WIDTH)
    x, mask = torch.randn(1, 3, WIDTH), torch.ones(1, 3)
    torch.testing.assert_close(block(x, attention_mask=mask, scale=2.0), 6 * x)
    assert attention.seen is mask
    assert block(x, mask, scale=2.0) is not None


@pytest.mark.parametrize("kind", ["rms", "layer", "group"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_norms_keep_the_dtype_and_do_not_overflow(kind, dtype):
    """The square of 300 is beyond float16's 65504: the statistics are in float32."""
    more = {"groups": 4} if kind == "group" else {}
    norm = lamina.build(llama(1), "pre_ln", norm=kind, **more).model.norm.to(dtype)
    x = (300 * torch.randn(2, 3, 32)).to(dtype)
    assert norm(x).dtype == dtype
    assert norm(x).isfinite().all()
    torch.testing.assert_close(norm(x).float().pow(2).mean(-1), torch.ones(2, 3), rtol=0.1, atol=0.0)


def test_the_gate_is_muse_sparks():
    config = SimpleNamespace(hidden_size=WIDTH, residual_gate_temperature=0.3)
    theirs = MuseSparkResidualGate(config)
    block = lamina.wire(nn.Identity(), nn.Identity(), resolve("muse_spark", 1).layers[0], WIDTH)
    with torch.no_grad():
        block.attention.gate.copy_(3 * torch.randn(WIDTH))  # so far that the variance's floor is reached
        theirs.gate.copy_(block.attention.gate)
    x, seen = torch.randn(2, 5, WIDTH), []
    block.attention.register_terms_hook(seen.append)
    block.attention(x)
    branch = rms(rms(x))
    torch.testing.assert_close(seen[0].sum, theirs(x, branch), rtol=1e-5, atol=1e-5)


PAGE = Path(__file__).parents[2] / "docs" / "use.md"
BLOCKS = re.findall(r"^```python\n(.*?)^```$", PAGE.read_text(encoding="utf-8"), re.M | re.S)
EXAMPLE = loaded("examples/wire_own_modules.py")  # the page names it


@pytest.fixture(scope="module")
def page(tmp_path_factory):
    """What the page defines, all its blocks having run in order, each as a file: SubLN reads the modules' source."""
    names: dict = {"__name__": "use_page"}
    folder = tmp_path_factory.mktemp("page")
    for index, block in enumerate(BLOCKS):
        file = folder / f"block_{index}.py"
        file.write_text(block, encoding="utf-8")
        exec(compile(block, str(file), "exec"), names)
    return names


def test_the_page_has_the_blocks_that_are_run_here(page):
    assert len(BLOCKS) == 2
    assert page["x"].shape == (2, 16, 64)
    assert len(page["layers"]) == 12
    assert "`examples/wire_own_modules.py`" in PAGE.read_text(encoding="utf-8")


def test_the_example_learns():
    torch.manual_seed(0)
    assert not isinstance(EXAMPLE.Model("keel", 4).last_norm, nn.RMSNorm)  # its plan has no final norm
    model = EXAMPLE.Model("peri_ln", 4)
    assert isinstance(model.last_norm, nn.RMSNorm)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    text = torch.tensor(list(EXAMPLE.TEXT * 3))
    losses = []
    for _ in range(20):
        rows = text[torch.randint(0, len(text) - 34, (8, 1)) + torch.arange(33)]
        loss = nn.functional.cross_entropy(model(rows[:, :-1]).flatten(0, 1), rows[:, 1:].flatten())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    assert losses[-1] < losses[0] - 1


def test_the_example_follows_the_whole_plan():
    """A plan's part that the example lacks is an error, and never left out silently."""
    for spec, scale in (("gemma2", 8.0), ("peri_ln(embedding_scale=3)", 3.0), ("keel", 1.0)):
        model, seen = EXAMPLE.Model(spec, 2), []
        model.first_norm.register_forward_pre_hook(lambda _, args, seen=seen: seen.append(args[0]))
        tokens = torch.tensor([[1, 2]])
        model(tokens)
        torch.testing.assert_close(seen[0], scale * model.embedding(tokens) + model.positions.weight[:2])
    with pytest.raises(SystemExit, match="'olmo2' has norms on q, k or v"):
        EXAMPLE.Model("olmo2", 2)


class Named(nn.Module):
    """A module whose last projection has a name that Lamina knows."""

    def __init__(self):
        super().__init__()
        self.c_proj = nn.Linear(8, 8)

    def forward(self, x):
        return self.c_proj(x)


def test_the_norms_of_a_wired_block_have_the_epsilon_that_is_named():
    layer = Layer(attention=Sublayer(pre_norm=True, inner_norm=True), feed_forward=Sublayer(post_norm=Norm(eps=0.25)))
    x = torch.ones(1, 8)
    block = lamina.wire(Named(), Named(), layer, 8, eps=0.5)
    for norm, eps in (
        (block.attention.pre_norm, 0.5),
        (block.attention.module.inner_norm, 0.5),
        (block.feed_forward.post_norm, 0.25),  # the plan names it
        (lamina.wire(Named(), Named(), layer, 8).attention.pre_norm, 1e-6),
    ):
        torch.testing.assert_close(norm(1e-3 * x), 1e-3 * x / math.sqrt(1e-6 + eps))
    for value in (0, -1.0, "1e-5", math.nan):
        with pytest.raises(UserError, match=r"^eps: .* Give a number above 0"):
            lamina.wire(Named(), Named(), layer, 8, eps=value)


def test_a_wired_layer_norm_with_nanogpts_epsilon_is_nanogpts():
    theirs, x = model_of_nanogpts_form.LayerNorm(8, bias=True), 1e-3 * torch.randn(2, 5, 8)
    layer = resolve("pre_ln", 2, norm="layer").layers[0]
    block = lamina.wire(Named(), Named(), layer, 8, eps=1e-5)
    torch.testing.assert_close(block.attention.pre_norm(x), theirs(x))
    assert (lamina.wire(Named(), Named(), layer, 8).attention.pre_norm(x) - theirs(x)).abs().max() > 0.1


def test_a_norm_before_the_last_projection_needs_it_by_name(page):
    layer = resolve("subln", 2).layers[0]
    with pytest.raises(UserError, match="no last projection"):
        lamina.wire(page["Attention"](64, 4), page["feed_forward"](64), layer, 64)
    x = torch.randn(2, 5, 8)
    assert not torch.equal(lamina.wire(Named(), Named(), layer, 8)(x), x)
    (listed,) = re.findall(r"named (`o_proj`.*?`) or", PAGE.read_text(encoding="utf-8"), re.S)
    assert [*re.findall(r"`(\w+)`", listed), "dense_4h_to_h"] == list(LAST_PROJECTIONS)


@pytest.mark.parametrize("placement", ["keel", "admin", "peri_ln"])
def test_reset_wiring_gives_the_values_of_a_block_that_was_never_on_meta(page, placement):
    def make():
        layer = lamina.placements.resolve(placement, 4, norm="layer").layers[1]
        return lamina.wire(nn.Linear(8, 8), nn.Linear(8, 8), layer, 8)

    expected = make()
    with torch.device("meta"):
        block = make()
    block = block.to_empty(device="cpu")
    page["reset_wiring"](block)
    for name, parameter in expected.named_parameters():
        if ".module." not in name:
            assert torch.equal(block.get_parameter(name), parameter), name


PEER_WIDTH, LAYERS, EPSILON = 32, 6, 1e-6  # wire's norms have this epsilon


def shake(module):
    """Weights and gains that differ, so that no mix-up is too small to see."""
    with torch.no_grad():
        for parameter in module.parameters():
            parameter.add_(0.2 * torch.randn_like(parameter))


def wired(placement, attention, feed_forward, norms, **options):
    """One layer of the placement with LayerNorms, which get the peer's gains and biases."""
    layer = lamina.placements.resolve(placement, LAYERS, norm="layer", **options).layers[0]
    block = lamina.wire(attention, feed_forward, layer, PEER_WIDTH).eval()
    for mine, theirs in zip((block.attention.post_norm, block.feed_forward.post_norm), norms, strict=True):
        assert theirs.eps == EPSILON
        mine.load_state_dict(theirs.state_dict())
    return block


class BertSelf(nn.Module):
    """BERT's attention up to its output projection, without the add and the norm that follow."""

    def __init__(self, attention):
        super().__init__()
        self.self, self.dense = attention.self, attention.output.dense

    def forward(self, hidden_states, attention_mask=None):
        return self.dense(self.self(hidden_states, attention_mask=attention_mask)[0])


@pytest.fixture
def bert_layer():
    sizes = {"hidden_size": PEER_WIDTH, "num_attention_heads": 4, "intermediate_size": 48, "layer_norm_eps": EPSILON}
    config = BertConfig(**sizes, attn_implementation="eager")
    layer = BertLayer(config).eval()
    shake(layer)
    return layer


@pytest.mark.parametrize("masked", [False, True])
def test_post_ln_is_transformers_bert_layer(bert_layer, masked):
    feed_forward = nn.Sequential(bert_layer.intermediate, bert_layer.output.dense)
    norms = (bert_layer.attention.output.LayerNorm, bert_layer.output.LayerNorm)
    block = wired("post_ln", BertSelf(bert_layer.attention), feed_forward, norms)
    x = torch.randn(2, 7, PEER_WIDTH)
    mask = None
    if masked:
        mask = torch.zeros(2, 1, 7, 7)
        mask[1, :, :, 4:] = torch.finfo(mask.dtype).min
    expected = bert_layer(x, mask)
    expected = expected[0] if isinstance(expected, tuple) else expected
    assert torch.equal(block(x, mask), expected)
    assert not torch.allclose(block(x), wired("pre_post_ln", block.attention.module, feed_forward, norms)(x))


class TorchscaleSelf(nn.Module):
    """torchscale's attention, called as its EncoderLayer calls it."""

    def __init__(self, attention):
        super().__init__()
        self.attention = attention

    def forward(self, x):
        return self.attention(query=x, key=x, value=x, key_padding_mask=None, attn_mask=None, rel_pos=None)[0]


@pytest.fixture
def torchscale_encoder():
    reason = "torchscale is not installed (it pins another torch; with --no-deps it needs fairscale and timm beside it)"
    architecture = pytest.importorskip("torchscale.architecture.encoder", reason=reason, exc_type=ImportError)
    from torchscale.architecture.config import EncoderConfig

    config = EncoderConfig(
        encoder_embed_dim=PEER_WIDTH, encoder_attention_heads=4, encoder_ffn_embed_dim=48, encoder_layers=LAYERS,
        deepnorm=True, layernorm_eps=EPSILON, dropout=0.0, no_output_layer=True, vocab_size=-1,
    )  # fmt: skip
    return architecture.Encoder(config).eval()


def test_deepnorm_is_torchscales_encoder_layer(torchscale_encoder):
    layer = torchscale_encoder.layers[0]
    shake(layer)
    norms = (layer.self_attn_layer_norm, layer.final_layer_norm)
    block = wired("deepnorm", TorchscaleSelf(layer.self_attn), layer.ffn, norms)
    assert block.attention.skip_scale == pytest.approx(layer.alpha)
    x = torch.randn(2, 7, PEER_WIDTH)
    expected, _ = layer(x, encoder_padding_mask=None)
    assert torch.allclose(block(x), expected, rtol=0, atol=1e-6)
