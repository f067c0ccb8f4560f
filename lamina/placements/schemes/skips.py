"""Post-LN with other skips: longer ones, scaled ones, learned ones."""

from __future__ import annotations

import math
from typing import Literal

from lamina.errors import UserError
from lamina.placements.plan import Layer, Norm, Plan, Sublayer
from lamina.placements.registry import placement


@placement(
    "b2t",
    title="B2T connection",
    equation=("y = LN(x + A(x))", "x' = LN(x + y + F(y))"),
    source="Takase et al. 2022 (arXiv 2206.00330) Sec 4",
    advice="Post-LN's learning rates and warm-up (its own paper trains translation models)",
)
def b2t(num_layers: int) -> Plan:
    """The bottom-to-top skip bypasses every norm of the block but the last; FuseNorm replaces y's skip by it."""
    layer = Layer(attention=Sublayer(post_norm=Norm()), feed_forward=Sublayer(skip="both", post_norm=Norm()))
    return Plan(layers=(layer,) * num_layers)


@placement(
    "fusenorm",
    title="FuseNorm",
    equation=(
        "y = LN(x + A(x))",
        "x' = LN(x + F(y))",
        "block 1:  y = LN(E + A(LN E)),  x' = LN(E + F(y))",
    ),
    source="FuseNorm (SpanNorm, arXiv 2601.22580) Eq 5-8",
    initialization="scaled",
    advice="learning rate 2e-4 (740M to 5B), 1.2e-4 at 128 layers, 200 steps of warm-up; needs the scaled init",
)
def fusenorm(num_layers: int, *, first_layer_norm: bool = True) -> Plan:
    """The feed-forward reads y but its skip carries x, so one norm, not two, stands on a block's residual path.

    Args:
        first_layer_norm: the additional norm on the first attention's input (Eq 7); the skips carry the raw embedding
            either way.
    """
    feed_forward = Sublayer(skip="block_input", post_norm=Norm())
    first = Layer(
        attention=Sublayer(pre_norm=Norm() if first_layer_norm else None, post_norm=Norm()), feed_forward=feed_forward
    )
    rest = Layer(attention=Sublayer(post_norm=Norm()), feed_forward=feed_forward)
    return Plan(layers=(first,) + (rest,) * (num_layers - 1))


@placement(
    "deepnorm",
    title="DeepNorm",
    equation=("y = LN(alpha x + A(x))", "x' = LN(alpha y + F(y))", "alpha = (2 N)^(1/4), beta = (8 N)^(-1/4)"),
    source="DeepNet (arXiv 2203.00555) Fig 2",
    initialization="deepnorm",
    advice="largest stable rate 3.5e-4 at 64 and 512 layers (Keel Table 1); without init deepnorm it is not DeepNorm",
)
def deepnorm(
    num_layers: int, *, alpha: float | None = None, beta: float | None = None, scale_gate: bool = False
) -> Plan:
    """Bounds the model's update: alpha strengthens the skip, beta shrinks what each branch starts with.

    Args:
        alpha: the constant on the skip; default (2 N)^(1/4) with N blocks, for decoder-only and encoder-only models.
            In an encoder-decoder of N and M blocks: encoder 0.81 (N^4 M)^(1/16), decoder (3 M)^(1/4).
        beta: the gain on the initial value, output and feed-forward weights; default (8 N)^(-1/4).
            Encoder 0.87 (N^4 M)^(-1/16), decoder (12 M)^(-1/4).
        scale_gate: apply beta to a gated feed-forward's gate as well (the paper has no gate; without it the branch's
            output keeps the paper's factor beta^2).
    """
    for name, value in (("alpha", alpha), ("beta", beta)):
        if value is not None and value <= 0:
            raise UserError(f"placement 'deepnorm': option {name!r} is {value!r} (allowed: a number above 0)")
    gain = float((8 * num_layers) ** -0.25 if beta is None else beta)
    sublayer = Sublayer(
        post_norm=Norm(),
        skip_scale=(2 * num_layers) ** 0.25 if alpha is None else float(alpha),
        weight_gain=gain,
        gate_gain=gain if scale_gate else 1.0,
    )
    return Plan(layers=(Layer.of(sublayer),) * num_layers)


@placement(
    "admin",
    title="Admin",
    equation=("y = LN(omega_1 * x + A(x))", "x' = LN(omega_2 * y + F(y))", "omega: one learned vector per sub-layer"),
    source="Liu et al. 2020 (arXiv 2004.08249) Eq 5; profile-free: admin-torch",
    initialization="admin",
    advice=(
        "Mix-LN's baseline at 250M: learning rate 1e-3, warm-up 10 %; omega from the profiling pass of init admin. The "
        "authors' embedding has unit variance; after one of 0.02 all omegas but the first start near 0.02 instead of 1 "
        "(embedding_norm=true avoids it)"
    ),
)
def admin(num_layers: int, *, omega: Literal["profiled", "log", "sqrt", "one"] = "profiled") -> Plan:
    """Starts each skip as strong as the sum of the branches below it, so that no branch dominates early training.

    Args:
        omega: where it starts: "profiled" by one forward pass (init admin); or, of n = 2 N sub-layers and without any
            pass, "log": sqrt((n + 1) / ln(n + 1) - 1), "sqrt": sqrt(n), "one": 1 (use another init with these, such
            as normal; init admin would overwrite them).
    """
    n = 2 * num_layers
    start = {"profiled": 1.0, "log": math.sqrt((n + 1) / math.log(n + 1) - 1), "sqrt": math.sqrt(n), "one": 1.0}[omega]
    sublayer = Sublayer(post_norm=Norm(), skip_scale=start, skip_scale_learned="vector")
    return Plan(
        layers=(Layer.of(sublayer),) * num_layers,
        initialization="admin" if omega == "profiled" else "normal",
    )


@placement(
    "keel",
    title="Keel",
    equation=(
        "y = LN(alpha x + A(LN x))",
        "x' = LN(alpha y + F(LN y))",
        "block 1:  y = x + A(LN x),  x' = LN(y + F(LN y))",
        "alpha = 2 N, the number of sub-layers",
    ),
    source="Keel (arXiv 2601.19895) Sec 4; first layer: Sec 4.3",
    advice="learning rate 9e-3 at 64 and 128 sub-layers, 6e-3 at 512, 4.5e-3 at 1024; 2500 steps of warm-up",
)
def keel(
    num_layers: int,
    *,
    alpha: float | None = None,
    learnable_alpha: bool = False,
    variant: Literal["keel", "scale", "scale_gain", "scale_gain_norm"] = "keel",
    first_layer: Literal["paper", "post_ln", "keel"] = "paper",
) -> Plan:
    """The outer norm fixes the stream's scale and alpha lets its gradient pass: the product of Jacobians tends to 1.

    Args:
        alpha: the constant on the skip (default: the number of sub-layers, 2 N; the paper never learns it).
        learnable_alpha: make each alpha a learned scalar that starts at this value.
        variant: "keel", or one of the ablations of Sec 4.2: "scale" is LN(alpha x + F(x)), "scale_gain" is
            LN(alpha x + F(b * x)) with a learned vector b, "scale_gain_norm" is LN(alpha x + F(b * LN(x))), its norm
            without a gain of its own. The last is Keel itself, for b is then the inner norm's gain: the same function
            of the same number of parameters, here to follow the paper's steps.
        first_layer: "paper": the first attention has no outer norm and alpha = 1, the first feed-forward alpha = 1;
            "post_ln": as the paper, but the first feed-forward without its inner norm (the other reading of "degrades
            to standard Pre-LN or Post-LN blocks"); "keel": no exception.
    """
    if alpha is not None and alpha <= 0:
        raise UserError(f"placement 'keel': option 'alpha' is {alpha!r} (allowed: a number above 0)")
    sublayer = Sublayer(
        pre_norm=None if variant in ("scale", "scale_gain") else Norm(learnable_gain=variant == "keel"),
        post_norm=Norm(),
        skip_scale=float(2 * num_layers if alpha is None else alpha),
        skip_scale_learned="scalar" if learnable_alpha else "no",
        pre_scale_learned="vector" if variant in ("scale_gain", "scale_gain_norm") else "no",
    )
    first = rest = Layer.of(sublayer)
    if first_layer != "keel":
        first = Layer(
            attention=Sublayer(pre_norm=Norm()),
            feed_forward=Sublayer(pre_norm=Norm() if first_layer == "paper" else None, post_norm=Norm()),
        )
    return Plan(layers=(first,) + (rest,) * (num_layers - 1))
