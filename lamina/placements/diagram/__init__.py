"""A plan as a picture (SVG), as a gallery of pictures and as equations for a terminal: all drawn from the plan itself.

The vertical line is the stream, bottom to top, and each module stands on a branch to its right: a norm on the line
normalizes the stream, a norm on the branch does not.
"""

from lamina.placements.diagram import equations, gallery, svg, text

__all__ = ["equations", "gallery", "svg", "text"]
