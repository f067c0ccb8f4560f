"""`lamina placements`: show Lamina's norm placements, or identify the norm placement of a model."""

from __future__ import annotations

import json
import textwrap
from pathlib import Path

from lamina.api.models import placement_of
from lamina.commands.arguments import Parser
from lamina.core.specs import split
from lamina.core.terminal import show
from lamina.core.values import path, whole_number, writable_folder
from lamina.errors import UserError
from lamina.placements import names, resolve
from lamina.placements.resolution import find

EXAMPLES = """
  lamina placements
  lamina placements keel
  lamina placements "mix_ln(alpha=0.5)" --num-layers 24 --svg mix_ln.svg
  lamina placements pre_ln,peri_ln,keel --svg three.svg
  lamina placements --svg placements.svg
  lamina placements --of models/smollm2
  lamina placements --of gemma2 --json
"""


def parser() -> Parser:
    flags = Parser(
        "placements",
        "List the placements, show one in full, or find a model's placement. Lamina never runs code from a\n"
        "checkpoint's folder. From the hub, Lamina downloads only config.json.",
        EXAMPLES,
        "[NAME] ",
    )
    about = "comma-separated placements: NAME, name(option=value, ...), or a file (Lamina executes a .py file)"
    flags.add_word("name", about, needed=False)
    flags.add_flag("--num-layers", "number of layers of the placement to show", 4)
    flags.add_flag("--svg", "draw the diagram as an SVG file", metavar="FILE")
    about = "find the placement of this model (a folder, a name on the hub, or a model type), and print the evidence"
    flags.add_flag("--of", about, metavar="MODEL")
    flags.add_flag(
        "--layers",
        "with --of, the module path of the list of layers, such as model.layers (default: Lamina finds the list)",
        metavar="PATH",
    )
    flags.add_flag("--json", "with --of, print the placement and the evidence as JSON", False)
    return flags


def run(argv: list[str]) -> int:
    options = parser().parse(argv)
    idle, allowed = (("layers", "json"), "with") if options.of is None else (("svg",), "without")
    for name in idle:
        if value := getattr(options, name):
            raise UserError(
                f"{name}: {value!r} has no effect here. Use {name!r} only {allowed} --of, or leave {name!r} out."
            )
    if options.of is not None:
        if options.name is not None:
            raise UserError(
                f"--of: Lamina finds the placement of {options.of!r}, so do not also name a placement "
                f"({options.name!r}). Leave one of the two out."
            )
        census = placement_of(options.of, layers=options.layers)
        show(json.dumps(census.to_dict(), indent=1) if options.json else census.text())
        return 0
    whole_number("num_layers", options.num_layers)
    if options.svg is not None:
        options.svg = path("svg", options.svg)
        writable_folder("svg", Path(options.svg).parent)
        if Path(options.svg).is_dir():
            raise UserError(f"svg: {options.svg!r} is a folder. Give a file.")
    specs = split(options.name, "placement") if options.name else names()
    if len(specs) > 1:
        _list(specs, options.svg, options.num_layers)
    else:
        _show(options.name, options.num_layers, options.svg)
    return 0


def _list(specs: list[str], svg: str | None, num_layers: int) -> None:
    from lamina.placements.diagram import gallery

    placements = {spec: find(spec) for spec in specs}
    widest = max(map(len, specs)), max(len(placement.title) for placement in placements.values())
    for spec, placement in placements.items():
        ends = [number for number, line in enumerate(placement.equation, start=1) if "x' =" in line]
        # omit the lines that define constants
        lines = [" ".join(line.split()) for line in placement.equation[: max([2, *ends[:1]])]]
        show(f"{spec:<{widest[0]}}  {placement.title:<{widest[1]}}  {'   '.join(lines)}")
    show("\n`lamina placements NAME` shows a placement in full: all equations, diagram, options, source.")
    if svg:
        _write(svg, gallery([resolve(spec, num_layers) for spec in specs]))


def _show(spec: str, num_layers: int, svg: str | None) -> None:
    from lamina.placements.diagram import svg as draw
    from lamina.placements.diagram import text

    placement, plan = find(spec), resolve(spec, num_layers)
    show(f"{placement.title} ({placement.name})\n")
    if placement.description:
        show(textwrap.fill(placement.description, 100) + "\n")
    for line in placement.equation:
        show(f"    {line}")
    show(f"\nThe placement in {num_layers} layers:\n")
    show(textwrap.indent(text(plan), "    "))
    show(f"\nInitialization: {plan.initialization}")
    if placement.advice:
        show(textwrap.fill(f"Advice:         {placement.advice}", 100, subsequent_indent=" " * 16))
    if placement.anchor:
        show(f"Documentation:  docs/placements.md#{placement.anchor}")
    show(f'Source:         {placement.source}\n\nOptions, as in "{placement.name}(option=value)":')
    for option in placement.all_options():
        head = f"  {option.name} ({option.type_name}; default {option.default})"
        show(textwrap.fill(f"{head}: {option.help}", 100, subsequent_indent="      "))
    if placement.bibtex:
        show("\nTo cite the source (https://arxiv.org/bibtex/NUMBER adds the authors and the title):")
        show(textwrap.indent(placement.bibtex, "  "))
    if svg:
        _write(svg, draw(plan, title=placement.title))


def _write(path: str, svg: str) -> None:
    Path(path).parent.mkdir(parents=True, exist_ok=True)
    Path(path).write_text(svg, encoding="utf-8")
    show(f"\nthe diagram: {path}")
