"""The schemes for scaling a model's width and depth. This module loads no torch."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Literal, TypeAlias


@dataclass(frozen=True, kw_only=True)
class WidthScheme:
    """The exponents e of scale factors n^e, where n is the width.

    Each tuple has the exponents for the embedding, the hidden weights and the output head.
    """

    # the exponents for the factor on the weights in the forward pass (the paper's -a)
    multiplier: tuple[float, float, float]
    std: tuple[float, float, float]  # the exponents for the initial standard deviation (the paper's -b)
    rate: tuple[float, float, float]  # the exponents for Adam's learning rate (the paper's -c)


_STANDARD = WidthScheme(multiplier=(0, 0, 0), std=(0, -1 / 2, -1 / 2), rate=(0, -1, -1))
_MUP = WidthScheme(multiplier=(1 / 2, 0, -1 / 2), std=(-1 / 2, -1 / 2, -1 / 2), rate=(-1 / 2, -1, -1 / 2))
# Everett et al. 2024, the table of Adam's exponents. The learning rates assume that updates align fully with the
# activations or, in the schemes without alignment, that updates do not align. If the weights include the multipliers,
# the table's NTK equals standard, and the table's mean field equals muP. So NTK and mean field are no extra schemes.
SCHEMES = {
    "standard": _STANDARD,
    "standard-no-alignment": replace(_STANDARD, rate=(0, -1 / 2, -1 / 2)),
    "mup": _MUP,
    "mup-no-alignment": replace(_MUP, rate=(-1 / 2, -1 / 2, 0)),
}
DepthScheme: TypeAlias = Literal["depth-mup", "completep"]
# alpha: every branch is divided by m^alpha, where m is the depth over the base depth. Depth-muP: Yang et al. 2023
# (arXiv 2310.02244). CompleteP: Dey et al. 2025 (arXiv 2505.01618), whose Table 1 has the rules for both.
DEPTH_SCHEMES: dict[str, float] = {"depth-mup": 1 / 2, "completep": 1.0}
