"""Several streams, and earlier states: against code that is not ours, the base placement at step 0, and every use."""

from dataclasses import replace

import pytest
import torch
from modeling.tiny import token_ids
from naive import llama
from spread import spread
from torch._dynamo.testing import CompileCounter
from transformers import AutoModelForCausalLM, TrainingArguments
from transformers.models.deepseek_v4 import modeling_deepseek_v4 as deepseek
from transformers.models.hy_v4 import modeling_hy_v4 as hy
from transformers.models.inkling2 import modeling_inkling2 as inkling
from transformers.models.qwen4_exp import modeling_qwen4_exp as qwen

import lamina
from lamina.errors import UserError
from lamina.modeling.initialization import weights
from lamina.modeling.parts import decaying
from lamina.modeling.streams_lamina import Collapse, DepthAttention, LaminaWiring, StreamMixer
from lamina.modeling.wiring_lamina import LaminaNorm
from lamina.placements import resolve
from lamina.placements.plan import Plan
from lamina.placements.wirings import WIRINGS
from lamina.training.execution import compiling
from lamina.training.monitor.followed import follow
from lamina.training.monitor.stream_measures import hidden_state_rows
from lamina.training.resolve import check_modules, wiring_multiplications
from lamina.training.settings import PretrainSettings

N, WIDTH, EPS = 4, 24, 1e-6
CLOSE = {"rtol": 1e-5, "atol": 1e-5}
BASES = ("pre_ln", "peri_ln", "keel", "fusenorm")
WITHOUT = {
    ("attn_res", "fusenorm"),
    ("parallel", "fusenorm"),
    *(("residual", base) for base in BASES),
    *(("siamese", base) for base in ("keel", "fusenorm")),
}  # no meaning: refused
PAIRS = [(wiring, base) for wiring in WIRINGS.names() for base in BASES if (wiring, base) not in WITHOUT]
FEW = [*PAIRS[::3], ("residual", "post_ln"), ("attn_res", "peri_ln(size=0)")]  # 0: attention over each sub-layer


class Sizes:
    """The fields that the transformers modules read."""

    hc_mult, hc_sinkhorn_iters, hc_eps, hc_magnitude, hc_count, hc_lowrank = N, 20, 0.0, 2.0, N, 16
    hidden_size, rms_norm_eps = WIDTH, EPS


@torch.no_grad()
def shaken(module):
    for parameter in module.parameters():
        parameter.copy_(0.5 * torch.randn_like(parameter))
    return module


def mixer(wiring):
    """The second sub-layer's mixer of a wiring, with random values."""
    spec = resolve("pre_ln", 2, wiring=wiring).to_dict()["layers"][0]["feed_forward"]["streams"]
    return shaken(StreamMixer(spec, WIDTH, EPS))


@pytest.fixture
def streams():
    return torch.randn(2, 5, N, WIDTH)


def hyper_state(ours, parts):
    """Our values under the names of transformers' hyper-connections: one projection, one base, a scale of each part."""
    base = torch.cat([getattr(ours, name).flatten() for name in parts])
    return {"fn": ours.projection, "base": base, "scale": ours.scale}


@torch.no_grad()
def test_mhc_is_deepseeks(streams):
    ours, theirs = mixer("mhc"), deepseek.DeepseekV4HyperConnection(Sizes())
    theirs.load_state_dict(hyper_state(ours, ("read", "write", "mix")))
    theirs.hc_eps = EPS  # of its Sinkhorn, and added to what it reads
    post, comb, collapsed = theirs(streams)
    read, mix, write = ours(streams)
    torch.testing.assert_close(read, collapsed - EPS * streams.sum(-2), **CLOSE)
    torch.testing.assert_close(write, post, **CLOSE)
    torch.testing.assert_close(mix, comb, **CLOSE)
    torch.testing.assert_close(mix.sum(-1), torch.ones(2, 5, N), rtol=0, atol=1e-3)


@torch.no_grad()
def test_identity_hyper_connections_are_hunyuans(streams):
    ours, theirs = mixer("identity_hc"), hy.HYV4HyperConnection(Sizes())
    theirs.load_state_dict(hyper_state(ours, ("read", "write")))
    post, out = theirs(streams)
    read, mix, write = ours(streams)
    assert mix is None
    torch.testing.assert_close(read, out, **CLOSE)
    torch.testing.assert_close(write, post, **CLOSE)


@torch.no_grad()
def test_the_gated_residual_is_qwens(streams):
    ours, theirs = mixer("gated_residual"), qwen.Qwen4ExpTextGatedResidual(Sizes())
    names = {"gain": "hc_norm", "down": "input_mix_weight_down"}
    names |= {"up": "input_mix_weight_up", "inject": "block_inject_weight"}
    theirs.load_state_dict({f"{names[name]}.weight": value for name, value in ours.named_parameters()})
    offset = theirs.hc_norm(torch.ones(1, 1, N * WIDTH)).flatten() - ours.gain  # 1, if it stores the difference from 1
    if (offset - 1).abs().max() < 1e-4:
        theirs.hc_norm.weight.sub_(1)
    mixed, _, injection = theirs(streams.flatten(-2))
    read, _, write = ours(streams)
    torch.testing.assert_close(read, mixed, **CLOSE)
    torch.testing.assert_close(write, injection, **CLOSE)


@torch.no_grad()
@pytest.mark.parametrize("dynamic", [False, True])
def test_hyper_connections_are_those_of_the_package(streams, dynamic):
    package = pytest.importorskip("hyper_connections")
    theirs = package.HyperConnections(N, dim=WIDTH, layer_index=0)
    ours = mixer("dynamic_hc" if dynamic else "hc")
    state = {name: torch.zeros_like(value) for name, value in theirs.state_dict().items()}
    state["static_alpha"], state["static_beta"] = torch.cat([ours.read[:, None], ours.mix], dim=1), ours.write
    if dynamic:
        state["dynamic_alpha_fn"] = torch.cat([ours.projection[:1], ours.projection[2:]]).T
        state["dynamic_beta_fn"] = ours.projection[1]
        ours.scale[2] = ours.scale[0]  # the package has one for both
        state["dynamic_alpha_scale"], state["dynamic_beta_scale"] = ours.scale[0], ours.scale[1]
    theirs.load_state_dict(state)
    flat = torch.stack([streams[b, :, s] for b in range(2) for s in range(N)])  # theirs has them in the batch
    branch, residuals, rest = theirs.width_connection(flat)
    read, mix, write = ours(streams)
    torch.testing.assert_close(read, branch, rtol=1e-4, atol=1e-4)
    mixed = mix.transpose(-1, -2) @ streams
    output = torch.randn(2, 5, WIDTH)
    after = theirs.depth_connection(output, residuals, **rest)
    ours_after = mixed + write.unsqueeze(-1) * output.unsqueeze(-2)
    theirs_after = torch.stack([torch.stack([after[b * N + s] for s in range(N)], dim=1) for b in range(2)])
    torch.testing.assert_close(ours_after, theirs_after, rtol=1e-4, atol=1e-4)


@torch.no_grad()
def test_depth_attention_is_inklings_up_to_the_norm_of_its_values():
    ours, theirs = shaken(DepthAttention(WIDTH, EPS)), inkling.Inkling2BlockAttentionResidual(Sizes())
    memory, stream = [torch.randn(2, 5, WIDTH) for _ in range(3)], torch.randn(2, 5, WIDTH)
    unit = [x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + EPS) for x in (*memory, stream)]
    theirs.query.copy_(ours.query * WIDTH**0.5)  # theirs divides by it
    (expected,) = theirs(torch.stack(memory, dim=-2), stream)
    torch.testing.assert_close(ours(tuple(unit[:-1]), unit[-1]), expected, **CLOSE)
    shares = torch.stack([u @ ours.query for u in unit], dim=-1).softmax(-1)
    written_out = sum(shares[..., i, None] * v for i, v in enumerate((*memory, stream)))
    torch.testing.assert_close(ours(tuple(memory), stream), written_out, **CLOSE)


def built(base, wiring=None, layers=6, **options):
    torch.manual_seed(0)
    options |= {"wiring": wiring} if wiring else {}
    return lamina.build(llama(layers, rms_norm_eps=1e-6), base, init="normal", **options).eval()


@torch.no_grad()
def wired(wiring, base, layers=6, **options):
    """A model whose wiring has moved from where it starts."""
    model = built(base, wiring, layers, **options)
    for module in model.modules():
        if isinstance(module, LaminaWiring):
            for parameter in module.parameters():
                parameter.add_(0.2 * torch.randn_like(parameter))
    return model


@pytest.mark.parametrize("base", spread(BASES, ("pre_ln", "keel")))
@pytest.mark.parametrize(
    ("wiring", "limit"),
    [
        *((name, 0.0) for name in ("x0", "denseformer", "hc", "dynamic_hc", "dynamic_dense", "mudd")),
        *(("identity_hc", 1e-6), ("mhc", 2e-5)),
    ],
)
def test_at_step_0_it_is_its_base_placement(wiring, limit, base):
    ids = token_ids()
    with torch.no_grad():
        assert (built(base, wiring)(ids).logits - built(base)(ids).logits).abs().max().item() <= limit


@pytest.mark.parametrize("wiring", ["identity_hc", "mhc", "gated_residual", "hc", "dynamic_hc"])
def test_its_streams_part_in_training(wiring):
    """They begin as copies of the embedding: read and written alike, they would stay one stream for ever."""
    model, ids, states = built("pre_ln", wiring, layers=3), token_ids(), []
    optimizer = torch.optim.SGD(model.parameters(), 1.0)
    for _ in range(5):
        optimizer.zero_grad()
        model(input_ids=ids, labels=ids).loss.backward()
        optimizer.step()
    model.model.layers[-1].register_forward_hook(lambda block, args, state: states.append(state))
    with torch.no_grad():
        model(ids)
    apart = (states[0] - states[0].mean(-2, keepdim=True)).norm() / states[0].norm()
    assert apart > 1e-3


@torch.no_grad()
def states_of(model, ids):
    """The memory's view: the layers' inputs, and each sub-layer as a function."""
    x = model.get_input_embeddings()(ids)
    embeddings = model.model.backbone.rotary_emb(x, position_ids=torch.arange(ids.shape[1])[None])

    def attention(block, h):
        return block.attention.module(hidden_states=h, position_embeddings=embeddings, attention_mask=None)[0]

    return x, attention


@torch.no_grad()
@pytest.mark.parametrize("start", ["mean", "dlcl"])
def test_dlcl_weighs_normed_states_equally_at_the_start(start):
    """Wang et al. 2019 written out; one norm per state, which all later sums share."""
    fresh = built("pre_ln", "denseformer", 4, start=start)
    model, ids = wired("denseformer", "pre_ln", layers=4, start=start), token_ids()
    x, attention = states_of(model, ids)
    ends, states = [*(block.sources for block in model.model.layers), model.model.norm.reader], []
    for index, source in enumerate([*(block.sources for block in fresh.model.layers), fresh.model.norm.reader]):
        if source is None:
            assert (index, start) == (0, "mean")
            continue
        assert source.weight.tolist() == pytest.approx([1 / (index + 1)] * (index + 1))
        assert hasattr(source, "gains") == (start == "dlcl")
    for index, source in enumerate(ends):
        if start == "dlcl":
            x = x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + EPS) * source.gains
        w, new = [1.0] if source is None else source.weight, x
        x = w[0] * x + sum(w[1 + k] * state for k, state in enumerate(states))
        states.append(new)
        if index < 4:
            a, f = model.model.layers[index].attention, model.model.layers[index].feed_forward
            y = x + attention(model.model.layers[index], a.pre_norm(x))
            x = y + f.module(f.pre_norm(y))
    logits = model.model.norm.norm(x) @ model.lm_head.weight.T
    torch.testing.assert_close(model(ids).logits, logits, rtol=1e-4, atol=1e-4)
    plan = resolve("pre_ln", 4, wiring="denseformer", start=start)
    assert Plan.from_dict(plan.to_dict()).layers == plan.layers


@torch.no_grad()
@pytest.mark.parametrize("wiring", ["x0", "denseformer", "unet", "attn_res", "residual", "siamese"])
def test_a_whole_model_is_its_equation_written_out(wiring):
    model, ids = wired(wiring, "post_ln" if wiring == "residual" else "pre_ln", layers=10), token_ids()
    x, attention = states_of(model, ids)
    layers, norm = model.model.layers, model.model.norm
    states, slots, r = [x], [], x

    def unit(v):
        return v * torch.rsqrt(v.pow(2).mean(-1, keepdim=True) + EPS)

    def read(depth, slots, partial):
        values = [*slots, *([] if partial is None else [partial])]
        shares = torch.stack([depth.depth.query @ unit(v).unsqueeze(-1) for v in values]).softmax(0)
        return sum(share * v for share, v in zip(shares, values, strict=True))

    for index, block in enumerate(layers):
        a, f = block.attention, block.feed_forward
        if wiring == "attn_res":
            first = index % 2 == 0  # ten layers in blocks of two
            slots += [x] if first else []
            b = attention(block, a.pre_norm(read(a, slots, None if first else x)))
            x = b if first else x + b
            x = x + f.module(f.pre_norm(read(f, slots, x)))
            continue
        if wiring == "siamese":  # x and r are the normed stream and the plain one
            for half, run in ((a, lambda h, block=block: attention(block, h)), (f, f.module)):
                x = unit(x) * half.mixer.gains[0]
                b = run(half.pre_norm(x + unit(r) * half.mixer.gains[1]))
                x, r = x + b / (2 * (index + 1)) ** 0.5, r + b
            continue
        if wiring == "residual":
            for half, run in ((a, lambda h, block=block: attention(block, h)), (f, f.module)):
                b = run(x)
                x, r = half.post_norm(x + b), r + b
            continue
        if block.sources is not None:
            w = block.sources.weight
            others = {"x0": [0], "denseformer": range(index), "unet": [10 - index]}[wiring]
            x = w[0] * x + sum(w[1 + k] * states[s] for k, s in enumerate(others))
        y = x + attention(block, a.pre_norm(x))
        x = y + f.module(f.pre_norm(y))
        states.append(x)
    if wiring == "denseformer":
        w = norm.reader.weight
        x = w[0] * x + sum(w[1 + k] * states[k] for k in range(10))
    if wiring == "attn_res":
        values = [*slots, x]
        shares = torch.stack([unit(v) @ norm.reader.query for v in values])
        x = sum(share.unsqueeze(-1) * v for share, v in zip(shares.softmax(0), values, strict=True))
    if wiring == "siamese":
        x = unit(x) * norm.reader.gains[0] + unit(r) * norm.reader.gains[1]
    last = x + norm.norm(r) if wiring == "residual" else norm.norm(x)
    torch.testing.assert_close(model(ids).logits, last @ model.lm_head.weight.T, rtol=1e-4, atol=1e-4)


@torch.no_grad()
def test_full_attention_residuals_are_their_equation_written_out():
    """Attention Residuals Sec 3.1: v_0 is the embedding, v_i what sub-layer i computes; each reads a softmax of all."""
    model, ids = wired("attn_res", "pre_ln", layers=4, size=0), token_ids()
    x, attention = states_of(model, ids)
    values = [x]

    def read(query):
        logits = [(v * torch.rsqrt(v.pow(2).mean(-1, keepdim=True) + EPS)) @ query for v in values]
        return sum(share.unsqueeze(-1) * v for share, v in zip(torch.stack(logits).softmax(0), values, strict=True))

    for block in model.model.layers:
        a, f = block.attention, block.feed_forward
        values.append(attention(block, a.pre_norm(read(a.depth.query))))
        values.append(f.module(f.pre_norm(read(f.depth.query))))
    norm = model.model.norm
    last = norm.norm(read(norm.reader.query))
    torch.testing.assert_close(model(ids).logits, last @ model.lm_head.weight.T, rtol=1e-4, atol=1e-4)


@torch.no_grad()
@pytest.mark.parametrize("collapse", [None, "mean", "sum", "sum_of_norms"])
def test_mhc_with_ligers_start_is_its_equations_written_out(collapse):
    """x_out[o] = sum_i h_res[o, i] x[i] + h_post[o] f, as the docstring of liger_kernel.transformers.LigerMHC says."""
    options = {"start": "liger"} | ({"collapse": collapse} if collapse else {})
    model, ids = built("pre_ln", "mhc", layers=3, **options), token_ids()
    for module in model.modules():
        if isinstance(module, StreamMixer) and module.writes:
            assert all((value == 0).all() for value in (module.read, module.write, module.mix))
            assert (module.scale == 0.01).all()
            assert module.projection.std().item() == pytest.approx(0.02, rel=0.1)
            for parameter in module.parameters():
                parameter.add_(0.3 * torch.randn_like(parameter))
    x, attention = states_of(model, ids)
    streams = [x] * N
    for block in model.model.layers:
        for half, run in ((block.attention, lambda h, b=block: attention(b, h)), (block.feed_forward, None)):
            mixer, flat = half.mixer, torch.cat(streams, -1)
            y = flat @ mixer.projection.T * torch.rsqrt(flat.pow(2).mean(-1, keepdim=True) + EPS)
            read = torch.sigmoid(y[..., :N] * mixer.scale[0] + mixer.read)
            write = 2 * torch.sigmoid(y[..., N : 2 * N] * mixer.scale[1] + mixer.write)
            matrix = (y[..., 2 * N :].unflatten(-1, (N, N)) * mixer.scale[2] + mixer.mix).exp()
            for _ in range(20):
                matrix = matrix / matrix.sum(-1, keepdim=True)
                matrix = matrix / matrix.sum(-2, keepdim=True)
            h = half.pre_norm(sum(read[..., i, None] * streams[i] for i in range(N)))
            f = half.module(h) if run is None else run(h)
            mixed = [sum(matrix[..., o, i, None] * streams[i] for i in range(N)) for o in range(N)]
            streams = [each + write[..., o, None] * f for o, each in enumerate(mixed)]
    norm = model.model.norm.norm
    whole = sum(streams) / (1 if collapse == "sum" else N)
    last = sum(map(norm, streams)) if collapse == "sum_of_norms" else norm(whole)
    torch.testing.assert_close(model(ids).logits, last @ model.lm_head.weight.T, rtol=1e-4, atol=1e-4)


def test_summed_streams_differ_from_the_mean_where_no_norm_follows():
    ids, logits = token_ids(), {}
    for how in ("mean", "sum", "sum_of_norms"):
        model = built("keel", "hc", collapse=how)
        assert [name for name, _ in model.named_parameters() if "reader" in name] == []
        with torch.no_grad():
            logits[how] = model(ids).logits
    torch.testing.assert_close(logits["sum"], N * logits["mean"])
    assert torch.equal(logits["sum"], logits["sum_of_norms"])  # Keel has no final norm


def test_states_within_a_layer_are_none_of_the_census_and_do_not_go_with_those_of_layers():
    census = lamina.placement_of(built("peri_ln", "attn_res", layers=3, size=0))
    assert "inside a layer, the model sums several new hidden states" in census.unknown
    plan = resolve("pre_ln", 3, wiring="x0")
    layers = tuple(replace(layer, inner_boundary=True) for layer in plan.layers)
    with pytest.raises(UserError, match="inner_boundary: this field does not work with sources"):
        replace(plan, layers=layers)


@pytest.mark.parametrize(("wiring", "base"), spread(dict.fromkeys([*FEW, *PAIRS]), FEW))
def test_it_trains_is_causal_generates_with_a_cache_and_comes_back_from_a_file(wiring, base, tmp_path):
    model, ids = wired(wiring, base), token_ids()
    output = model(input_ids=ids, labels=ids)
    output.loss.backward()
    silent = {"layers.0.attention.depth.query"} if wiring == "attn_res" else set()  # a softmax over one state
    for name, parameter in model.named_parameters():
        assert parameter.grad is not None, name
        assert parameter.grad.isfinite().all(), name
        assert parameter.grad.any() or any(name.endswith(s) for s in silent), name
    changed = torch.cat([ids[:, :5], ids[:, 5:].flip(1)], dim=1)
    torch.testing.assert_close(model(changed).logits[:, :5], output.logits[:, :5], rtol=1e-5, atol=1e-5)
    how = {"do_sample": False, "max_new_tokens": 5, "min_new_tokens": 5, "pad_token_id": 0}
    assert torch.equal(model.generate(ids, **how), model.generate(ids, **how, use_cache=False))
    model.save_pretrained(tmp_path)
    again = AutoModelForCausalLM.from_pretrained(tmp_path)
    assert torch.equal(again(ids).logits, model(ids).logits)
    model.train().gradient_checkpointing_enable()
    assert torch.equal(model(input_ids=ids, labels=ids).loss, output.loss)


COMPILED = [("mhc", "pre_ln"), ("siamese", "pre_ln"), ("unet", "pre_ln")]
COMPILED += [("attn_res", "peri_ln"), ("x0", "fusenorm"), ("mudd", "keel")]


@pytest.mark.parametrize(("wiring", "base"), spread(COMPILED, [("mhc", "pre_ln")]))
def test_a_compiled_block_computes_the_same(wiring, base):
    model, ids = wired(wiring, base), token_ids()
    expected, counter = model(ids, use_cache=False).logits, CompileCounter()
    torch._dynamo.reset()
    kinds = compiling.compile_blocks(model, backend=counter)
    torch.testing.assert_close(model(ids, use_cache=False).logits, expected, rtol=1e-5, atol=1e-5)
    assert counter.frame_count <= kinds


@pytest.mark.parametrize("wiring", WIRINGS.names())
def test_what_it_learns_is_the_wirings_and_does_not_decay(wiring):
    base = "post_ln" if wiring == "residual" else "pre_ln"
    model = built(base, wiring)
    own = [m for m in model.modules() if isinstance(m, LaminaWiring)]
    parameters = {id(p) for m in own for p in m.parameters()}
    assert {id(w.parameter) for w in weights(model) if w.role == "wiring"} == parameters
    assert all(p.ndim > 0 and p.dtype == torch.float32 for m in own for p in m.parameters())
    assert not {id(model.get_parameter(name)) for name in decaying(model)} & parameters
    for module in own:  # no initializer drew it
        with torch.device("meta"):
            starts = module.initial()
        for name, start in starts.items():
            if isinstance(value := getattr(module, name), torch.Tensor):
                assert torch.equal(value, start)
    plain = dict(built(base).named_parameters())
    end = "norm.norm." if isinstance(model.model.norm, Collapse) else "norm."
    names = {name: name.replace("backbone.norm.", f"backbone.{end}") for name in plain}
    assert all(torch.equal(value, model.get_parameter(names[name])) for name, value in plain.items())


@torch.no_grad()
@pytest.mark.parametrize("wiring", ["mhc", "identity_hc", "dynamic_hc", "gated_residual", "attn_res"])
def test_under_autocast_the_weights_are_those_of_float32(wiring):
    model, ids = wired(wiring, "pre_ln"), token_ids()
    seen = []

    def keep(module, args, output):
        seen.append(output if isinstance(output, torch.Tensor) else output[-1] if output[-1] is not None else output[0])

    module = next(m for m in model.modules() if isinstance(m, LaminaWiring))
    states = torch.randn(2, 5, N, 32).bfloat16()
    arguments = (tuple(states.unbind(-2)),) if wiring == "attn_res" else (states,)
    module.register_forward_hook(keep)
    module(*arguments)
    with torch.autocast("cpu", torch.bfloat16):
        module(*arguments)
        model.model.layers[-1].register_forward_hook(lambda block, args, state: seen.append(state))
        assert model(ids).logits.isfinite().all()
    stream = seen.pop()
    assert (stream.stream if isinstance(stream, tuple) else stream).dtype == torch.float32  # as in pre_ln
    assert torch.equal(seen[0], seen[1])


@pytest.mark.parametrize("base", ["pre_ln", "doge", "admin"])
def test_a_block_of_depth_begins_without_a_skip_also_where_skips_are_learned(base):
    attention = resolve(base, 4, wiring="attn_res", size=2).layers[2].attention
    assert (attention.skip_scale, attention.skip_scale_learned) == (0.0, "no")


@pytest.mark.parametrize("wiring", ["mhc", "x0", "attn_res"])
def test_a_layer_alone_is_refused(wiring):
    layer = resolve("pre_ln", 2, wiring=wiring).layers[0]
    with pytest.raises(UserError, match="one block cannot have several streams"):
        lamina.wire(torch.nn.Identity(), torch.nn.Identity(), layer, 8)


@pytest.mark.parametrize("wiring", WIRINGS.names())
def test_a_run_of_it_may_begin(wiring):
    """The check builds a layer of each kind; sources name other layers."""
    plan = resolve("post_ln" if wiring == "residual" else "pre_ln", 10, wiring=wiring)
    check_modules(PretrainSettings(), llama(10), plan, TrainingArguments(), trained=False)
    grouped = resolve("post_ln" if wiring == "residual" else "pre_ln", 10, wiring=wiring, norm="group", groups=5)
    with pytest.raises(UserError, match="groups: 5"):
        check_modules(PretrainSettings(), llama(10), grouped, TrainingArguments(), trained=False)


def test_flops_count_what_the_wiring_multiplies():
    plans = {wiring: resolve("pre_ln", 4, wiring=wiring) for wiring in ("identity_hc", "mhc", "x0", "attn_res")}
    found = {wiring: wiring_multiplications(plan) for wiring, plan in plans.items()}
    # 8 sub-layers read 4, write 4, mix 16; 4 blocks weigh 2 states; a memory that grows counts twice
    full = resolve("pre_ln", 4, wiring="attn_res", size=0)
    assert wiring_multiplications(full) == 2 * sum(range(1, 9))
    assert wiring_multiplications(resolve("pre_ln", 4, wiring="mudd")) == 4 * (2 + 3 + 4)
    assert found == {"identity_hc": 64, "mhc": 192, "x0": 8, "attn_res": 2 * (1 + 2 + 2 + 3 + 3 + 4 + 4 + 5)}
    assert wiring_multiplications(resolve("keel", 4)) == 0


FIRST = [("mhc", "pre_ln"), ("mudd", "fusenorm")]
MEASURED = spread([*FIRST, ("residual", "post_ln"), ("attn_res", "keel")], FIRST)


@pytest.mark.parametrize(("wiring", "base"), MEASURED)
def test_probes_of_states_measure_what_the_streams_come_to_and_others_refuse(wiring, base):
    model, ids = wired(wiring, base), token_ids()
    states = []
    for block in model.model.layers:
        block.register_forward_hook(lambda block, args, state: states.append(state))
    frames = lamina.probe(model, "hidden_states,similarity,angular_distance", ids)
    with torch.no_grad():
        states.clear()
        model(ids)
    streams = [state.stream if isinstance(state, tuple) else state for state in states]
    frame = frames["hidden_states"].set_index(["role", "metric", "layer", "index"])["value"]
    for layer, state in enumerate(streams, start=1):
        one = state.mean(-2) if state.ndim == 4 else state
        assert frame["state", "rms", layer, 0] == pytest.approx(one.square().mean().sqrt().item(), rel=1e-4)
        if state.ndim == 4:
            pairs = [(i, j) for i in range(state.shape[2]) for j in range(i)]
            cosines = [torch.cosine_similarity(state[:, :, i], state[:, :, j], dim=-1).mean() for i, j in pairs]
            expected = sum(cosines).item() / len(pairs)
            assert frame["streams", "stream_cosine", layer, 0] == pytest.approx(expected, abs=1e-5)
            rms = [frame["streams", "stream_rms", layer, 1 + i] for i in range(state.shape[2])]
            assert rms == pytest.approx(state.square().mean((0, 1, 3)).sqrt().tolist(), rel=1e-4)
    assert ("streams" in frame.index.get_level_values(0)) == (streams[0].ndim == 4)
    cosine = frames["similarity"].set_index(["metric", "start", "size"])["value"]["cosine", 1, 1]
    first, second = (state.mean(-2) if state.ndim == 4 else state for state in streams[:2])
    assert cosine == pytest.approx(torch.cosine_similarity(first, second, dim=-1).mean().item(), abs=1e-4)
    read = "several streams" if streams[0].ndim == 4 else "earlier states"
    with pytest.raises(UserError, match=f"logit_lens: this probe follows a single residual stream, .* read {read}"):
        lamina.probe(model, "logit_lens", ids)


@pytest.mark.parametrize(("wiring", "base"), MEASURED)
def test_the_monitor_and_the_watch_measure_each_stream(wiring, base):
    model, ids, last = wired(wiring, base), token_ids(), {}
    for layer, block in enumerate(model.model.layers):
        for name in ("attention", "feed_forward"):
            half = getattr(block, name)
            half.register_forward_hook(lambda m, args, y, key=(layer, name): last.update({key: y}))
    found, states = {row[1:6]: row[6] for row in hidden_state_rows(model, ids, 0)}, dict(last)
    followed = follow(model, {"input_ids": ids, "labels": ids})
    watched = {row[1:6]: row[6] for row in followed.rows(model, ids, 0)}
    assert followed.whole
    assert found == {key: watched[key] for key in found}
    gains = lamina.probe(model, "gains", ids)["gains"]
    assert len(gains["path"].unique()) >= len([m for m in model.modules() if isinstance(m, LaminaNorm)])
    streams = {key: y for key, y in states.items() if y.ndim == 4}
    assert len(streams) == (12 if wiring in ("mhc", "residual") else 0)
    assert {key[:2] for key in found if key[-1] == "stream_cosine"} == set(streams)
    for (layer, name), y in states.items():
        assert found[layer, name, "all", 0, "hidden_variance"] == pytest.approx(y.var(correction=0).item(), rel=1e-4)
    for (layer, name), y in streams.items():
        for index, one in enumerate(y.unbind(-2)):
            rms = found[layer, name, "all", index, "stream_rms"]
            assert rms == pytest.approx(one.square().mean().sqrt().item(), rel=1e-4)
        pairs = [(i, j) for i in range(y.shape[2]) for j in range(i)]
        pairs = [torch.cosine_similarity(y[:, :, i], y[:, :, j], dim=-1).mean() for i, j in pairs]
        cosine = found[layer, name, "all", 0, "stream_cosine"]
        assert cosine == pytest.approx(float(sum(pairs)) / len(pairs), abs=1e-5)
