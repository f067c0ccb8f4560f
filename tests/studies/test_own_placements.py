"""The combinations of the four seeds that studies/placements adds."""

import pytest

from lamina.papers.study_catalog import catalog_folder
from lamina.placements import Norm, resolve

FOLDER = catalog_folder() / "placements"


@pytest.fixture(autouse=True)
def said_already(monkeypatch):
    monkeypatch.setenv("LAMINA_PYTHON_FILES", "")


@pytest.mark.parametrize(("alpha", "scale"), [("root", 3.0), ("blocks", 9.0), ("sublayers", 18.0)])
def test_the_fused_keel_has_fusenorms_skip_and_keels_norms(alpha, scale):
    first, *rest = resolve(f"{FOLDER}/fused_keel.py(alpha={alpha})", 9).layers
    for layer in rest:
        assert (layer.attention.skip, layer.feed_forward.skip) == ("stream", "block_input")
        for sublayer in (layer.attention, layer.feed_forward):
            assert set(sublayer.norms) == {"pre_norm", "post_norm"}
            assert sublayer.skip_scale == scale
    assert set(first.attention.norms) == {"pre_norm"}
    assert set(first.feed_forward.norms) == {"pre_norm", "post_norm"}
    assert (first.attention.skip_scale, first.feed_forward.skip_scale) == (1.0, 1.0)
    assert first.feed_forward.skip == "block_input"


@pytest.mark.parametrize(("top", "last"), [("keel", "keel(first_layer=keel)"), ("peri_ln", "sandwich_ln")])
def test_the_mixed_ones_are_mix_ln_below_and_another_placement_above(top, last):
    plan, above = resolve(f"{FOLDER}/mixed_top.py(top={top})", 8), resolve(last, 8)
    assert plan.layers[:2] == resolve("mix_ln", 8).layers[:2]
    assert plan.layers[2:] == above.layers[2:]
    assert plan.final_norm == above.final_norm


def test_the_scaled_sandwich_is_a_sandwich_whose_outer_gains_start_small():
    plan, sandwich = resolve(str(FOLDER / "sandwich_depth_scaled.yaml"), 16), resolve("sandwich_ln", 16)
    assert plan.layers[0].attention.out_norm == Norm(initial_gain=0.25)
    assert plan.layers[-1].feed_forward.pre_norm == sandwich.layers[-1].feed_forward.pre_norm
    assert plan.final_norm == sandwich.final_norm
