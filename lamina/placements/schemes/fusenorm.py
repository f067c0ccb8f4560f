"""FuseNorm (also SpanNorm): Post-LN whose feed-forward skip starts at the block's input."""

from lamina.placements.plan import Layer, Norm, Plan, Sublayer
from lamina.placements.registry import placement


@placement(
    "fusenorm",
    title="FuseNorm (SpanNorm)",
    equation=(
        "y = LN(x + A(x))",
        "x' = LN(x + F(y))",
        "block 0:  y = LN(E + A(LN E)),  x' = LN(E + F(y))",
    ),
    source="FuseNorm (SpanNorm, arXiv 2601.22580) Eq 5-8",
    initialization="scaled",
    advice=(
        "Use the initializer `scaled`, which FuseNorm needs. The paper's learning rate is 2e-4 from 740M to 5B "
        "parameters and 1.2e-4 at 128 layers, with 200 steps of warm-up."
    ),
)
def fusenorm(num_layers: int, *, first_layer_norm: bool = True) -> Plan:
    """The feed-forward reads the attention sub-layer's output, but the feed-forward's skip starts at the block's input.
    So a block's residual path has one norm instead of two.

    Args:
        first_layer_norm: whether the first attention reads its input through an additional norm (Eq 7).
    """
    feed_forward = Sublayer(skip="block_input", post_norm=Norm())
    first = Layer(
        attention=Sublayer(pre_norm=Norm() if first_layer_norm else None, post_norm=Norm()), feed_forward=feed_forward
    )
    rest = Layer(attention=Sublayer(post_norm=Norm()), feed_forward=feed_forward)
    return Plan(layers=(first,) + (rest,) * (num_layers - 1))
