"""Mix-LN: Post-LN in the first layers, Pre-LN in the rest."""

from __future__ import annotations

import logging
from fractions import Fraction

from lamina.errors import UserError
from lamina.placements.plan import Layer, Norm, Plan, Sublayer
from lamina.placements.registry import placement

logger = logging.getLogger(__name__)


@placement(
    "mix_ln",
    title="Mix-LN",
    equation=(
        "the first floor(alpha N) blocks:  y = LN(x + A(x)),  x' = LN(y + F(y))",
        "the other blocks:                 y = x + A(LN x),   x' = y + F(LN y)",
        "logits = W LN(x_N)",
    ),
    source="Mix-LN (arXiv 2412.13795) Sec 3",
    initialization="normal",
    advice=(
        "The paper uses a learning rate of 1e-3 for up to 350M parameters and 5e-4 from 1B parameters, with 10 % "
        "warm-up. For 7B parameters, alpha is 0.0625."
    ),
)
def mix_ln(num_layers: int, *, alpha: float | str | None = None, num_post_layers: int | None = None) -> Plan:
    """Gradients are large in the deepest layers of Post-LN and in the earliest layers of Pre-LN. Mix-LN therefore
    combines Post-LN blocks at the bottom with Pre-LN blocks above.

    Args:
        alpha: the fraction of Post-LN layers (default: 0.25). A text such as "1/3" avoids rounding errors.
        num_post_layers: the number of Post-LN layers, which replaces alpha.
    """
    if alpha is not None and num_post_layers is not None:
        raise UserError("placement 'mix_ln': options 'alpha' and 'num_post_layers' are both set. Set only one of them.")
    if num_post_layers is None:
        share = _exact(0.25 if alpha is None else alpha)
        num_post_layers = share.numerator * num_layers // share.denominator
        if num_post_layers == 0 and share > 0:
            logger.warning(
                "mix_ln: floor(%s * %d) is 0, so no layer is Post-LN. Raise alpha, or set num_post_layers.",
                *(alpha or 0.25, num_layers),
            )
    if not 0 <= num_post_layers <= num_layers:
        raise UserError(
            f"placement 'mix_ln': option 'num_post_layers' is {num_post_layers}. Give a number from 0 to {num_layers}."
        )
    post, pre = Sublayer(post_norm=Norm()), Sublayer(pre_norm=Norm())
    layers = (Layer.of(post),) * num_post_layers
    layers += (Layer.of(pre),) * (num_layers - num_post_layers)
    return Plan(layers=layers, final_norm=Norm())


def _exact(alpha: float | str) -> Fraction:
    """Return alpha as an exact fraction: 0.29 becomes 29/100."""
    try:
        share = Fraction(str(alpha))
    except (ValueError, ZeroDivisionError):
        share = Fraction(-1)
    if not 0 <= share <= 1:
        raise UserError(f"placement 'mix_ln': option 'alpha' is {alpha!r}. Give a number from 0 to 1.")
    return share
