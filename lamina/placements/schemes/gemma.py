"""Gemma 2 and 3: Peri-LN with a scaled embedding instead of a normed embedding, and gains of 1 + w."""

from lamina.placements.plan import HeadNorm, Layer, Norm, Plan, Sublayer
from lamina.placements.registry import placement

_EQUATION = ("x_0 = sqrt(d) E", "y = x + LN(A(LN x))", "x' = y + LN(F(LN y))", "LN: gain 1 + w", "logits = W LN(x_N)")
_ADVICE = "On a Gemma backbone, set embedding_scale=1, because the backbone already scales the embedding."


def _plan(num_layers: int, qk_norm: HeadNorm, zero_centered: bool) -> Plan:
    norm = Norm(zero_centered=zero_centered)
    return Plan(
        layers=(Layer.of(Sublayer(pre_norm=norm, out_norm=norm)),) * num_layers,
        final_norm=norm,
        embedding_scale="sqrt_hidden_size",
        qk_norm=qk_norm,
        qkv_norm=Norm(kind="rms", zero_centered=zero_centered and qk_norm != "off"),
    )


@placement("gemma2", title="Gemma 2", equation=_EQUATION, source="Gemma 2 (arXiv 2408.00118)", advice=_ADVICE)
def gemma2(num_layers: int, *, zero_centered: bool = True) -> Plan:
    """Gemma 2 has a norm before and after each module, and multiplies the embedding by sqrt(width).

    Args:
        zero_centered: whether the weights store the gain minus 1. In converted checkpoints, the value is false.
    """
    return _plan(num_layers, "off", zero_centered)


@placement(
    "gemma3",
    title="Gemma 3",
    equation=(*_EQUATION[:-1], "A: norms on q and k, per head", _EQUATION[-1]),
    source="Gemma 3 (arXiv 2503.19786)",
    advice=_ADVICE,
)
def gemma3(num_layers: int, *, zero_centered: bool = True) -> Plan:
    """Gemma 3 is Gemma 2's placement with norms on queries and keys instead of the soft cap on attention logits.

    Args:
        zero_centered: whether the weights store the gain minus 1. In converted checkpoints, the value is false.
    """
    return _plan(num_layers, "head", zero_centered)
