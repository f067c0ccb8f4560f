"""DeepNorm: Post-LN with a scaled skip and small initial branches."""

from __future__ import annotations

from lamina.errors import UserError
from lamina.placements.plan import Layer, Norm, Plan, Sublayer
from lamina.placements.registry import placement


@placement(
    "deepnorm",
    title="DeepNorm",
    equation=("y = LN(alpha x + A(x))", "x' = LN(alpha y + F(y))", "alpha = (2 N)^(1/4), beta = (8 N)^(-1/4)"),
    source="DeepNet (arXiv 2203.00555) Fig 2",
    initialization="deepnorm",
    advice=(
        "Keep the initializer `deepnorm`, which is a part of the method. The largest stable learning rate is 3.5e-4 at "
        "64 and 512 layers (Keel Table 1)."
    ),
)
def deepnorm(
    num_layers: int, *, alpha: float | None = None, beta: float | None = None, scale_gate: bool = False
) -> Plan:
    """DeepNorm limits how much one update changes the model's output. Alpha strengthens the skip, and beta shrinks the
    branches' initial weights.

    Args:
        alpha: the constant on the skip (default: (2 N)^(1/4) with N blocks, for decoder-only and encoder-only models).
            In an encoder-decoder with N encoder blocks and M decoder blocks, set 0.81 (N^4 M)^(1/16) for the encoder,
            and (3 M)^(1/4) for the decoder.
        beta: the gain on the initial weights of values, outputs and feed-forwards (default: (8 N)^(-1/4)). In an
            encoder-decoder, set 0.87 (N^4 M)^(-1/16) for the encoder, and (12 M)^(-1/4) for the decoder.
        scale_gate: whether beta also applies to the gate of a gated feed-forward (default: False). The paper's
            feed-forward has no gate.
    """
    for name, value in (("alpha", alpha), ("beta", beta)):
        if value is not None and value <= 0:
            raise UserError(f"placement 'deepnorm': option {name!r} is {value!r}. Give a number above 0.")
    gain = float((8 * num_layers) ** -0.25 if beta is None else beta)
    sublayer = Sublayer(
        post_norm=Norm(),
        skip_scale=(2 * num_layers) ** 0.25 if alpha is None else float(alpha),
        weight_gain=gain,
        gate_gain=gain if scale_gate else 1.0,
    )
    return Plan(layers=(Layer.of(sublayer),) * num_layers)
