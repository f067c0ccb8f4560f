"""Mix-LN with another placement above its Post-LN blocks."""

from typing import Literal

from lamina.placements import Layer, Norm, Plan, Sublayer, placement


@placement(
    "mixed_top",
    title="Mix-LN with Keel or Peri-LN above",
    equation=("blocks 1 .. N/4: Post-LN", "the other blocks: Keel's or Peri-LN's"),
    source="Mix-LN Sec 3 with Keel Sec 4 or Peri-LN Sec 3.3, combined",
    initialization="scaled",
)
def mixed_top(num_layers: int, *, top: Literal["keel", "peri_ln"] = "keel") -> Plan:
    """Post-LN in the first quarter of the blocks, as in Mix-LN, and another placement in the rest.

    Args:
        top: the placement of the rest. Keel's alpha is the number of sub-layers of the whole model.
    """
    post = Sublayer(post_norm=Norm())
    upper = {
        "keel": Sublayer(pre_norm=Norm(), post_norm=Norm(), skip_scale=2.0 * num_layers),
        "peri_ln": Sublayer(pre_norm=Norm(), out_norm=Norm()),
    }[top]
    border = num_layers // 4
    layers = (Layer(attention=post, feed_forward=post),) * border
    layers += (Layer(attention=upper, feed_forward=upper),) * (num_layers - border)
    return Plan(layers=layers, final_norm=Norm() if top == "peri_ln" else None)
