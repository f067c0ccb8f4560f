"""`lamina backbones`: list the model families that work with Lamina's norm placements."""

from __future__ import annotations

from lamina.commands.arguments import Parser
from lamina.core.terminal import show


def parser() -> Parser:
    return Parser("backbones", "List the backbones: model families to build with a placement.", "  lamina backbones")


def run(argv: list[str]) -> int:
    parser().parse(argv)
    from lamina.api import backbones
    from lamina.modeling.modeling_lamina import ADAPTERS

    show(
        f"{'name':<21} {'type':<11} {'layers':>6} {'width':>6} {'FFN':>6} {'heads':>5} {'vocabulary':>10} "
        f"{'total':>8} {'active':>8}  source"
    )
    for row in backbones().to_dict("records"):
        vocabulary = "-" if row["vocabulary"] != row["vocabulary"] else int(row["vocabulary"])
        show(
            f"{row['name']:<21} {row['type']:<11} {row['layers']:>6} {row['width']:>6} {row['FFN']:>6} "
            f"{row['heads']:>5} {vocabulary:>10} {_short(row['total']):>8} {_short(row['active']):>8}  {row['source']}"
        )
    show(
        "\nThe column 'total' counts all parameters of transformers' model, with embeddings and output head.\n"
        "The column 'active' counts only the experts that a token uses.\n"
        "Any folder with a transformers config.json is also a backbone.\n"
        f"Lamina's tests compare these families with transformers on the same weights: {', '.join(ADAPTERS)}.\n"
        "Other families work if their layers' modules are named self_attn and mlp, or if you tell Lamina the\n"
        "modules' names (docs/own.md)."
    )
    return 0


def _short(parameters: int) -> str:
    return f"{parameters / 1e9:.2f}B" if parameters >= 1e9 else f"{parameters / 1e6:.1f}M"
