import xml.etree.ElementTree as ET
from dataclasses import replace
from pathlib import Path

import pytest
from PIL import ImageFont

from lamina.placements import Layer, Norm, Plan, Sublayer, names, resolve
from lamina.placements.diagram import equations, gallery, svg, text

SVG = "{http://www.w3.org/2000/svg}"


def words(drawing: str) -> list[str]:
    return [node.text or "" for node in ET.fromstring(drawing).iter(f"{SVG}text")]


@pytest.mark.parametrize("name", names())
def test_every_registered_placement_is_drawn_and_written(name):
    plan = resolve(name, 12)
    drawing = svg(plan, equation=("y = x",))
    root = ET.fromstring(drawing)
    assert root.get("viewBox")
    assert root.find(f"{SVG}title") is not None
    assert "<script" not in drawing
    columns = words(drawing).count("Attention")
    assert 1 <= columns <= 4
    per_layer = sum(len(k.attention.norms) + len(k.feed_forward.norms) for k, _ in plan.kinds()[:columns])
    ends = (plan.final_norm is not None) + (plan.embedding_norm is not None)
    assert sum(word.startswith(("Norm", "GroupNorm")) for word in words(drawing)) == per_layer + ends
    assert text(plan).startswith(f"{name}, 12 layers")
    assert text(plan).count("attention") == columns


@pytest.mark.parametrize("name", names())
def test_all_text_fits_into_the_drawing_in_the_widest_usual_font(name):
    matplotlib = pytest.importorskip("matplotlib")
    fonts = Path(matplotlib.get_data_path()) / "fonts" / "ttf"

    def edges(node, left=0.0):
        if "translate" in node.get("transform", ""):
            left += float(node.get("transform").split("(")[1].split()[0])
        if node.tag == f"{SVG}text" and node.text:
            bold = "-Bold" if int(node.get("font-weight", 400)) >= 600 else ""
            font = ImageFont.truetype(str(fonts / f"DejaVuSans{bold}.ttf"), 100)
            wide = font.getlength(node.text) * float(node.get("font-size", 11.5)) / 100
            start = left + float(node.get("x")) - wide * {"end": 1, "middle": 0.5}.get(node.get("text-anchor"), 0)
            yield node.text, start, start + wide
        for child in node:
            yield from edges(child, left)

    root = ET.fromstring(svg(resolve(name, 4)))
    assert [each for each in edges(root) if each[1] < 0 or each[2] > float(root.get("width"))] == []


@pytest.mark.parametrize(
    ("wiring", "said", "lines", "squares"),
    [
        ("mhc", "4 streams", 4, 0),
        ("x0", "earlier states", 1, 1),
        ("attn_res", "softmax", 1, 13),
        ("unet", "added", 1, 2),
    ],
)
def test_what_the_residual_carries_is_said_and_drawn(wiring, said, lines, squares):
    plan = resolve("pre_ln", 4, wiring=wiring, **({"size": 4} if wiring == "attn_res" else {}))
    assert said in text(plan)
    drawing = svg(plan)
    assert said in drawing
    boxes = [node.attrib for node in ET.fromstring(drawing).iter(f"{SVG}rect")]
    top = next(box["y"] for box in boxes if box["rx"] == "9")  # of the first block's panel
    paths = {str(node.get("d")) for node in ET.fromstring(drawing).iter(f"{SVG}path")}
    assert len({p.split("L")[1].split()[0] for p in paths if p.endswith(f" {int(top) + 22}")}) == lines
    assert [box["width"] for box in boxes].count("8") == squares


@pytest.mark.parametrize(
    ("spec", "layer", "lines"),
    [
        ("pre_ln(wiring=parallel)", 0, ("y  = x + A( LN x )", "x' = y + F( LN x )")),
        ("keel", 0, ("y  = x + A( LN x )", "x' = LN( y + F( LN y ) )")),
        ("keel", 1, ("y  = LN( 64 x + A( LN x ) )", "x' = LN( 64 y + F( LN y ) )")),
        ("fusenorm", 1, ("y  = LN( x + A( x ) )", "x' = LN( x + F( y ) )")),
    ],
)
def test_a_layers_equations_are_the_papers(spec, layer, lines):
    assert equations([resolve(spec, 32).layers[layer]]) == lines


NORMS = [Norm(), Norm(kind="rms"), Norm(kind="group", groups=4), Norm(learnable_gain=False), Norm(initial_gain=0.5)]
OF_SUBLAYERS = {"pre_norm": NORMS[:1], "out_norm": NORMS[:1], "post_norm": NORMS, "skip": ("block_input", "both")}
OF_SUBLAYERS |= {"skip_scale": (64.0,), **dict.fromkeys(("pre_scale", "out_scale"), (0.5,))}
OF_SUBLAYERS |= dict.fromkeys([f"{scale}_scale_learned" for scale in ("skip", "pre", "out")], ("scalar", "vector"))
OF_SUBLAYERS |= {"coupling": ("lerp", "variance"), **dict.fromkeys(("weight_gain", "gate_gain"), (0.3,))}


@pytest.mark.parametrize("change", [{name: value} for name, values in OF_SUBLAYERS.items() for value in values])
def test_every_field_of_a_sublayer_shows(change):
    def plan(**fields):
        return Plan(placement="mine", layers=(Layer(feed_forward=Sublayer(**fields)),))

    assert svg(plan(**change)) != svg(plan())
    assert text(plan(**change)) != text(plan())


OF_PLANS = [{"final_norm": True}, {"embedding_norm": True}, {"embedding_scale": 2.0}, {"qk_norm": "head"}]
OF_PLANS += [{"embedding_scale": "sqrt_hidden_size"}, {"qk_norm": "full"}, {"v_norm": "full"}]


@pytest.mark.parametrize("change", OF_PLANS)
def test_every_field_of_a_plan_shows(change):
    plan = resolve("post_ln", 2)
    assert svg(replace(plan, **change)) != svg(plan)
    assert text(replace(plan, **change)) != text(plan)


def test_a_scale_that_differs_by_layer_is_one_column_with_a_range():
    layers = tuple(Layer(attention=Sublayer(pre_norm=Norm(), pre_scale=(i + 1) ** -0.5)) for i in range(32))
    plan = Plan(placement="mine", layers=layers)
    assert words(svg(plan)).count("Attention") == 1
    assert "×1 … 0.177" in words(svg(plan))
    assert "A( [1 … 0.177] LN x )" in text(plan)


def test_many_wirings_are_cut_with_a_note():
    skips = [Layer(attention=Sublayer(post_norm=Norm(kind="group", groups=g))) for g in range(1, 8)]
    assert "and 3 more kinds of layer" in words(svg(Plan(placement="mine", layers=tuple(skips))))


def test_text_is_escaped():
    plan = replace(resolve("pre_ln", 2), placement="<script>alert(1)</script>")
    drawing = svg(plan, equation=('y = "x" & <b>',))
    assert "<script" not in drawing
    assert "<b>" not in drawing
    assert "<script>alert(1)</script>" in words(drawing)


def test_gallery_holds_every_plan_within_its_width():
    plans = [resolve(name, 8) for name in names()]
    root = ET.fromstring(gallery(plans, width=900))
    assert float(root.get("width", "0")) <= 900
    assert words(gallery(plans)).count("Output") == len(plans)
