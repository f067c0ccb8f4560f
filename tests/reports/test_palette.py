import itertools

import numpy as np
import pytest

from lamina import placements
from lamina.reports.style import colors, look, looks

PAPERS = ("pre_ln", "post_ln", "fusenorm", "mix_ln", "keel", "peri_ln")
# Machado, Oliveira and Fernandes 2009, severity 1, on linear RGB.
BLINDNESS = {
    "none": np.eye(3),
    "protanopia": [[0.152286, 1.052583, -0.204868], [0.114503, 0.786281, 0.099216], [-0.003882, -0.048116, 1.051998]],
    "deuteranopia": [[0.367322, 0.860646, -0.227968], [0.280085, 0.672501, 0.047413], [-0.011820, 0.042940, 0.968881]],
    "tritanopia": [[1.255528, -0.076749, -0.178779], [-0.078411, 0.930809, 0.147602], [0.004733, 0.691367, 0.303900]],
}
XYZ = np.array([[0.4124, 0.3576, 0.1805], [0.2126, 0.7152, 0.0722], [0.0193, 0.1192, 0.9505]])


def lab(color: str, blindness: str) -> np.ndarray:
    """A color as someone with a color blindness sees it, in CIELAB."""
    rgb = np.array([int(color[i : i + 2], 16) / 255 for i in (1, 3, 5)])
    linear = np.where(rgb <= 0.04045, rgb / 12.92, ((rgb + 0.055) / 1.055) ** 2.4)
    x, y, z = XYZ @ np.clip(np.asarray(BLINDNESS[blindness]) @ linear, 0, 1) / [0.9505, 1, 1.089]
    fx, fy, fz = (np.cbrt(v) if v > 0.008856 else 7.787 * v + 16 / 116 for v in (x, y, z))
    return np.array([116 * fy - 16, 500 * (fx - fy), 200 * (fy - fz)])


@pytest.mark.parametrize("blindness", BLINDNESS)
def test_the_papers_own_are_told_apart_by_color_alone(blindness):
    seen = {name: lab(color, blindness) for name, color in colors(PAPERS).items()}
    near = {pair for pair in itertools.combinations(seen, 2) if np.linalg.norm(seen[pair[0]] - seen[pair[1]]) < 10}
    assert not near


def test_every_placement_has_a_color_and_a_form_of_its_own():
    all_looks = looks(placements.names())
    assert None not in {look(name) for name in placements.names()}
    assert len({chosen.color for chosen in all_looks.values()}) == len(all_looks)
    assert len({(chosen.dash, chosen.marker) for chosen in all_looks.values()}) == len(all_looks)


def test_a_placements_look_does_not_depend_on_the_others():
    assert looks(placements.names())["olmo2"] == looks(["mine.yaml", "olmo2"])["olmo2"]
    assert looks(["keel(alpha=3)"])["keel(alpha=3)"] == look("keel")


def test_those_of_the_users_own_get_a_look_that_nothing_else_on_the_page_has():
    chosen = looks([*PAPERS, "mine.yaml", "yours.yaml", "keel(alpha=3)", "deepnorm"])
    assert len(set(chosen.values())) == 10
