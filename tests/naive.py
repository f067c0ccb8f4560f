"""The equation of every placement, written from the papers alone, and what is needed to hold a built model against it.

A formula is one block: x is the block's input, `attention` and `feed_forward` are callables on hidden states, `norms`
holds the six positions as callables (None where the model has no norm), index counts blocks from 0.
`FORMULAS[name](x0, attention, feed_forward, norms, num_layers, **options)` gives the states [x0, x1, ..., xN].

A new placement needs one row here, `@formula(...)` above its block or `alike(...)`: all tests of placements read it.
"""

import inspect
import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from fractions import Fraction
from types import SimpleNamespace

import torch
from torch import nn
from transformers import LlamaConfig

import lamina

FORMULAS = {}
EXPECTED = {}  # by placement, as FORMULAS
VOCABULARY, WIDTH, HEADS, KEY_VALUE_HEADS = 61, 32, 4, 2
HEAD_DIM = WIDTH // HEADS
EPS = 1e-3  # large enough that a model which ignores the config's eps shows


@dataclass(frozen=True, kw_only=True)
class Expected:
    """What the paper says of a placement beside its equation.

    `norms` are the positions (A on the input, B on the output, C on the sum; - for none) of the attention and the
    feed-forward, "AC C | C C" where the first layer differs from the others, None where the border is an option.
    `parameters` counts those of the norms (and learned scales) of n layers, without a final or embedding norm.
    `heads` are the norms on q and k, and on v: off | head | full.
    """

    norms: str | None
    final_norm: bool
    parameters: Callable[[int], int]
    heads: tuple[str, str] = ("off", "off")

    @property
    def positions(self):
        """Of the first layer and of every other one: (attention, feed-forward)."""
        first, *others = (tuple(part.replace("-", "").split(" ")) for part in self.norms.split(" | "))
        return first, others[0] if others else first


def two_norms(n):
    return 2 * WIDTH * n


def four_norms(n):
    return 4 * WIDTH * n


def every_block(block):
    def states(x0, attention, feed_forward, norms, num_layers, **options):
        stream = [x0]
        if "residuals" not in inspect.signature(block).parameters:
            options.pop("residuals", None)
        for index in range(num_layers):
            parts = attention[index], feed_forward[index], norms[index]
            stream.append(block(stream[-1], *parts, index, num_layers, **options))
        return stream

    return states


def formula(norms, **expected):
    def register(block):
        name = block.__name__.removeprefix("naive_")
        FORMULAS[name] = every_block(block)
        EXPECTED[name] = Expected(norms=norms, **{"parameters": two_norms, **expected})
        return block

    return register


def alike(name, other, **changes):
    """A placement whose blocks have another one's formula."""
    FORMULAS[name] = FORMULAS[other]
    EXPECTED[name] = replace(EXPECTED[other], **changes)


@formula("A A", final_norm=True)
def naive_pre_ln(x, attention, feed_forward, norms, index, num_layers):
    y = x + attention(norms.attention.pre(x))
    return y + feed_forward(norms.feed_forward.pre(y))


@formula("C C", final_norm=False)
def naive_post_ln(x, attention, feed_forward, norms, index, num_layers):
    y = norms.attention.post(x + attention(x))
    return norms.feed_forward.post(y + feed_forward(y))


@formula(None, final_norm=True)
def naive_mix_ln(x, attention, feed_forward, norms, index, num_layers, alpha="0.25", num_post_layers=None):
    border = math.floor(Fraction(alpha) * num_layers) if num_post_layers is None else num_post_layers
    if index < border:
        y = norms.attention.post(x + attention(x))
        return norms.feed_forward.post(y + feed_forward(y))
    y = x + attention(norms.attention.pre(x))
    return y + feed_forward(norms.feed_forward.pre(y))


@formula("AB AB", final_norm=True, parameters=four_norms)
def naive_peri_ln(x, attention, feed_forward, norms, index, num_layers):
    y = x + norms.attention.out(attention(norms.attention.pre(x)))
    return y + norms.feed_forward.out(feed_forward(norms.feed_forward.pre(y)))


alike("sandwich_ln", "peri_ln")  # the block is the same; the embedding's norm tells them apart


@formula("AC C | C C", final_norm=False, parameters=lambda n: two_norms(n) + WIDTH)
def naive_fusenorm(x, attention, feed_forward, norms, index, num_layers):
    if index == 0:
        y = norms.attention.post(x + attention(norms.attention.pre(x)))
    else:
        y = norms.attention.post(x + attention(x))
    return norms.feed_forward.post(x + feed_forward(y))


@formula("A AC | AC AC", final_norm=False, parameters=lambda n: four_norms(n) - WIDTH)
def naive_keel(x, attention, feed_forward, norms, index, num_layers, alpha=None):
    alpha = 2 * num_layers if alpha is None else alpha
    if index == 0:
        y = x + attention(norms.attention.pre(x))
        return norms.feed_forward.post(y + feed_forward(norms.feed_forward.pre(y)))
    y = norms.attention.post(alpha * x + attention(norms.attention.pre(x)))
    return norms.feed_forward.post(alpha * y + feed_forward(norms.feed_forward.pre(y)))


@formula("C C", final_norm=False)
def naive_deepnorm(x, attention, feed_forward, norms, index, num_layers, alpha=None):
    alpha = (2 * num_layers) ** 0.25 if alpha is None else alpha
    y = norms.attention.post(alpha * x + attention(x))
    return norms.feed_forward.post(alpha * y + feed_forward(y))


@formula("C -", final_norm=True, parameters=lambda n: (WIDTH + 3 * HEAD_DIM) * n, heads=("head", "head"))
def naive_hybridnorm(x, attention, feed_forward, norms, index, num_layers):
    z = norms.attention.post(x + attention(x))
    return z + feed_forward(z)


@formula("A A | C -", final_norm=True, parameters=lambda n: (WIDTH + 3 * HEAD_DIM) * n + WIDTH, heads=("head", "head"))
def naive_hybridnorm_star(x, attention, feed_forward, norms, index, num_layers):
    if index == 0:
        y = x + attention(norms.attention.pre(x))
        return y + feed_forward(norms.feed_forward.pre(y))
    z = norms.attention.post(x + attention(x))
    return z + feed_forward(z)


@formula("A A", final_norm=True)
def naive_layernorm_scaling(x, attention, feed_forward, norms, index, num_layers):
    root = math.sqrt(index + 1)
    y = x + attention(norms.attention.pre(x) / root)
    return y + feed_forward(norms.feed_forward.pre(y) / root)


@formula("B B", final_norm=True)
def naive_out_ln(x, attention, feed_forward, norms, index, num_layers):
    y = x + norms.attention.out(attention(x))
    return y + norms.feed_forward.out(feed_forward(y))


alike(  # OLMo2's queries and keys are normed inside its attention
    "olmo2",
    "out_ln",
    parameters=lambda n: two_norms(n) + (HEADS + KEY_VALUE_HEADS) * HEAD_DIM * n,
    heads=("full", "off"),
)
alike("group_ln", "pre_ln")  # Group-LN's norms are group norms


@formula("C C", final_norm=False, parameters=four_norms)  # two of them are omegas
def naive_admin(x, attention, feed_forward, norms, index, num_layers, residuals):
    y = norms.attention.post(residuals[index].attention.skip_scale * x + attention(x))
    return norms.feed_forward.post(residuals[index].feed_forward.skip_scale * y + feed_forward(y))


@formula("C C", final_norm=False)
def naive_b2t(x, attention, feed_forward, norms, index, num_layers):
    y = norms.attention.post(x + attention(x))
    return norms.feed_forward.post(x + y + feed_forward(y))


@formula("AC AC", final_norm=False, parameters=four_norms)
def naive_pre_post_ln(x, attention, feed_forward, norms, index, num_layers):
    y = norms.attention.post(x + attention(norms.attention.pre(x)))
    return norms.feed_forward.post(y + feed_forward(norms.feed_forward.pre(y)))


@formula("A A", final_norm=True)
def naive_granite(x, attention, feed_forward, norms, index, num_layers, multiplier=0.22):
    y = x + multiplier * attention(norms.attention.pre(x))
    return y + multiplier * feed_forward(norms.feed_forward.pre(y))


@formula("A A", final_norm=True)
def naive_minicpm(x, attention, feed_forward, norms, index, num_layers, scale_depth=1.4):
    y = x + scale_depth / num_layers**0.5 * attention(norms.attention.pre(x))
    return y + scale_depth / num_layers**0.5 * feed_forward(norms.feed_forward.pre(y))


@formula("A A", final_norm=True, parameters=four_norms)  # two of them are lambdas
def naive_layerscale(x, attention, feed_forward, norms, index, num_layers, residuals):
    y = x + residuals[index].attention.out_scale * attention(norms.attention.pre(x))
    return y + residuals[index].feed_forward.out_scale * feed_forward(norms.feed_forward.pre(y))


@formula("- -", final_norm=False, parameters=lambda n: 2 * n)
def naive_rezero(x, attention, feed_forward, norms, index, num_layers, residuals):
    y = x + residuals[index].attention.out_scale * attention(x)
    return y + residuals[index].feed_forward.out_scale * feed_forward(y)


alike("skipinit", "rezero")


@formula("AB AB", final_norm=True, parameters=four_norms)  # two are gates, two norms have no gain
def naive_muse_spark(x, attention, feed_forward, norms, index, num_layers, residuals):
    def add(skip, branch, gate):
        b = torch.sigmoid(gate / 0.3)
        return torch.sqrt(1 - b**2) * skip + b * branch

    y = add(x, norms.attention.out(attention(norms.attention.pre(x))), residuals[index].attention.gate)
    branch = norms.feed_forward.out(feed_forward(norms.feed_forward.pre(y)))
    return add(y, branch, residuals[index].feed_forward.gate)


alike("gemma2", "peri_ln")  # their embedding is scaled, their gains are 1 + w
alike("gemma3", "peri_ln", heads=("head", "off"), parameters=lambda n: four_norms(n) + 2 * HEAD_DIM * n)
alike("sandwich_depth_scaled", "peri_ln")


alike("minimax_01", "deepnorm")  # the embedding's norm tells them apart


@formula("A A", final_norm=True, parameters=four_norms)  # two of them are the skips'
def naive_doge(x, attention, feed_forward, norms, index, num_layers, residuals):
    y = residuals[index].attention.skip_scale * x + attention(norms.attention.pre(x))
    return residuals[index].feed_forward.skip_scale * y + feed_forward(norms.feed_forward.pre(y))


alike("subln", "pre_ln", parameters=lambda n: two_norms(n) + (WIDTH + 48) * n)  # the inner norms are the modules'


def rms_norm(x, weight, eps):
    """In float32 inside, as in Llama: a model in float64 can then be compared closely, 12 random blocks deep."""
    x32 = x.float()
    return (x32 * torch.rsqrt(x32.pow(2).mean(-1, keepdim=True) + eps)).to(x.dtype) * weight


def layer_norm(x, weight, bias, eps):
    centred = x - x.mean(-1, keepdim=True)
    return centred / torch.sqrt(centred.pow(2).mean(-1, keepdim=True) + eps) * weight + (0 if bias is None else bias)


def group_norm(x, weight, groups, eps):
    """Every token's features in groups of their own, each divided by its root mean square."""
    return rms_norm(x.unflatten(-1, (groups, -1)), 1, eps).flatten(-2) * weight


def naive_norm(module, kind="rms", groups=None, eps=EPS):
    """The norm's equation with the module's gain; None where there is no norm."""
    if module is None or isinstance(module, nn.Identity):
        return None
    weight = torch.ones(()) if getattr(module, "weight", None) is None else module.weight.detach()
    weight = 1 + weight if getattr(module, "zero_centered", False) else weight
    if kind == "layer":
        return lambda x: layer_norm(x, weight, getattr(module, "bias", None), eps)
    if kind == "group":
        return lambda x: group_norm(x, weight, groups, eps)
    return lambda x: rms_norm(x, weight, eps)


def naive_norms(model, **norm):
    def positions(residual):
        found = {name: naive_norm(getattr(residual, f"{name}_norm"), **norm) for name in ("pre", "out", "post")}
        return SimpleNamespace(**found)

    return [
        SimpleNamespace(attention=positions(b.attention), feed_forward=positions(b.feed_forward))
        for b in model.model.layers
    ]


def llama(num_layers, **changes):
    sizes = {"vocab_size": VOCABULARY, "hidden_size": WIDTH, "intermediate_size": 48}
    sizes |= {"num_attention_heads": HEADS, "num_key_value_heads": KEY_VALUE_HEADS, "rms_norm_eps": EPS}
    return LlamaConfig(num_hidden_layers=num_layers, **{**sizes, **changes})


def built(placement, num_layers, *, config=None, **options):
    """A model in float64 whose gains, biases and weights are all random: a norm in the wrong place cannot hide."""
    model = lamina.build(config or llama(num_layers), placement, **options).double().eval()
    generator = torch.Generator().manual_seed(num_layers)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            random = torch.randn(parameter.shape, generator=generator, dtype=parameter.dtype)
            if parameter.dim() >= 2:
                parameter.copy_(random if "embed" in name else 0.2 * random)
            elif parameter.numel() > 1:
                parameter.copy_(0.3 * random if name.endswith("bias") else 1 + 0.3 * random)
    return model


def token_ids(batch=2, length=7):
    return torch.randint(VOCABULARY, (batch, length), generator=torch.Generator().manual_seed(1))


@torch.no_grad()
def observe(model, ids):
    """The states x^0 ... x^N, the arguments beside the stream of every block and every attention, and the logits."""
    seen = SimpleNamespace(states=[], block_kwargs=[], attention_kwargs=[])

    def keep_block(_, args, kwargs):
        seen.states.append(args[0])
        seen.block_kwargs.append(kwargs)

    def keep_last(_, args, output):
        seen.last = output[0] if isinstance(output, tuple) else output

    def keep_attention(_, args, kwargs):
        seen.attention_kwargs.append({k: v for k, v in kwargs.items() if k != "hidden_states"})

    layers = model.model.layers
    handles = [block.register_forward_pre_hook(keep_block, with_kwargs=True) for block in layers]
    handles += [b.attention.module.register_forward_pre_hook(keep_attention, with_kwargs=True) for b in layers]
    handles.append(layers[-1].register_forward_hook(keep_last))
    seen.logits = model(input_ids=ids, use_cache=False).logits
    for handle in handles:
        handle.remove()
    seen.states.append(seen.last)
    return seen
